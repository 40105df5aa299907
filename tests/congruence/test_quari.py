"""Searches that a network re-ranks, through every database, against T written out in float64."""

import asyncio

import numpy as np
import pytest
import torch
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    Beside,
    GloballyCorrected,
    LinearMaps,
    QuariReranker,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
)
from milvus_hubness.extras.quari.model import Quari
from milvus_hubness.extras.quari.settings import QuariConfig
from tests.extras.quari import explicit
from tests.support.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

ON_SERVERS = {"world": ["L2"]}

pytestmark = pytest.mark.beyond_contract

DIM, ITEMS, QUERIES, CANDIDATES = 12, 150, 18, 25


def trained(**changed):
    """A network far from its start."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = Quari(
            QuariConfig(DIM, rank=3, width=8, layers=1, heads=2, **{"form": "published", **changed})
        )
        with torch.no_grad():
            for each in network.parameters():
                each += 0.3 * torch.randn(each.shape)
    return network.eval()


class World:
    """A corrected collection, and what searches on it should find. reranking: the biases are in fields."""

    def __init__(self, backend, metric, reranking=False):
        rng = np.random.default_rng(9)
        self.backend, self.metric = backend, metric
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 25, DIM)
        self.queries = vectors(rng, QUERIES, DIM)
        self.plain = self.name = backend.name()
        plain_collection(backend.client(), self.name, self.items, metric)
        store = backend.store()
        if reranking:
            plan = plan_correction(
                store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(8)), Beside()
            )
            backend.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
            enable(store, plan)
        else:
            plan = plan_correction(store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(8)))
            self.name = migrate(store, plan).target
        self.client = backend.hubness_client()
        self.network = trained()
        self.raw = similarity(self.queries, self.items, metric)
        mean_bias = store.info(self.name).state.profile.mean_bias
        self.bias = nnn(self.bank, self.items, metric, 8, 0.75) - mean_bias
        self.adapted = explicit.cosines(
            self.network(torch.from_numpy(self.queries)), self.items.astype(float)
        )

    def reranker(self, **options):
        return QuariReranker(self.network, **{"candidates": CANDIDATES, **options})

    def search(self, reranker, limit=6, client=None, **options):
        return (client or self.client).search(
            self.name, data=list(self.queries), limit=limit, rerank=reranker, **options
        )

    def expect(
        self, results, *, limit=6, skip=0, strength=1.0, correction=0.0, allowed=None, atol=3e-5
    ):
        """The best by the adapted score among the best by the corrected one, each with its score."""
        allowed = np.arange(ITEMS) if allowed is None else allowed
        assert len(results) == QUERIES
        for which, hits in enumerate(results):
            corrected = self.raw[which] - strength * self.bias
            pool = allowed[np.argsort(-corrected[allowed])[: max(CANDIDATES, skip + limit)]]
            scores = self.adapted[which, pool] - correction * strength * self.bias[pool]
            order = np.argsort(-scores)[skip : skip + limit]
            assert [hit["id"] for hit in hits] == pool[order].tolist()
            np.testing.assert_allclose([hit["distance"] for hit in hits], scores[order], atol=atol)
            assert list(hits.distances) == [hit["distance"] for hit in hits]


@pytest.fixture(scope="module", params=METRICS)
def world(shared_backend, request):
    return World(shared_backend, request.param)


def test_corrected_candidates_are_ranked_as_the_network_sees_them(world):
    results = world.search(world.reranker(), output_fields=["note"])
    world.expect(results)
    assert all(hit["entity"] == {"note": f"n{hit['id']}"} for hits in results for hit in hits)


def test_later_pages_go_on_and_are_rounded(world):
    results = world.search(world.reranker(), limit=4, offset=3, round_decimal=2)
    world.expect(results, limit=4, skip=3, atol=5.1e-3)
    assert all(hit["distance"] == round(hit["distance"], 2) for hits in results for hit in hits)
    world.expect(world.search(world.reranker(candidates=1), limit=CANDIDATES), limit=CANDIDATES)


def test_a_search_may_say_how_many_candidates_it_wants(world):
    """Whatever the re-ranker says."""
    world.expect(world.search(world.reranker(candidates=7), candidates=CANDIDATES))
    world.expect(world.search(world.reranker(candidates=ITEMS), candidates=CANDIDATES))
    whole = world.search(GloballyCorrected(CANDIDATES))
    for hits, wanted in zip(
        world.search(GloballyCorrected(8), candidates=CANDIDATES), whole, strict=True
    ):
        assert [hit["id"] for hit in hits] == [hit["id"] for hit in wanted]


def test_candidates_that_nothing_looks_at_are_refused(world):
    for reranker, wrong in ((None, 20), (world.reranker(direct=True), 20), (world.reranker(), 0)):
        with pytest.raises(MilvusException, match="candidates"):
            world.search(reranker, candidates=wrong)


def test_filters_hold_before_anything_is_ranked(world):
    results = world.search(world.reranker(), filter="group == 2")
    world.expect(results, allowed=np.flatnonzero(np.arange(ITEMS) % 5 == 2))
    none = world.search(world.reranker(), filter="group == 99")
    assert [list(hits) for hits in none] == [[]] * QUERIES


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_the_bias_counts_as_it_is_told_to(world, strength):
    results = world.search(world.reranker(correction=0.6), strength=strength, with_raw_score=True)
    world.expect(results, strength=strength, correction=0.6)
    for hits, raw in zip(results, world.raw, strict=True):
        wanted = as_distance(raw[[hit["id"] for hit in hits]], world.metric)
        np.testing.assert_allclose([hit["raw_score"] for hit in hits], wanted, atol=3e-5)


def test_vectors_come_back_as_they_were_inserted_where_asked_for(world):
    for hits in world.search(world.reranker(), output_fields=["vector", "hubness_bias"]):
        for hit in hits:
            np.testing.assert_allclose(hit["entity"]["vector"], world.items[hit["id"]], rtol=1e-6)
            assert set(hit["entity"]) == {"vector", "hubness_bias"}


def test_direct_asks_the_index_itself_with_the_biases_at_their_strength(world):
    reranker = world.reranker(direct=True)
    asked = reranker.direct_queries(world.queries)
    scores = similarity(asked, world.items, world.metric) - 0.5 * world.bias
    for hits, query_scores in zip(
        world.search(reranker, strength=0.5, offset=1), scores, strict=True
    ):
        order = np.argsort(-query_scores)[1:7]
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits],
            as_distance(query_scores[order], world.metric),
            atol=3e-5,
        )


def test_tasks_share_an_async_client(world):
    async def ask():
        client = world.backend.client(AsyncHubnessClient)
        try:
            return await asyncio.gather(
                *(
                    world.search(
                        world.reranker(correction=beta, candidates=3),
                        client=client,
                        candidates=CANDIDATES,
                    )
                    for beta in (0.0, 0.6)
                )
            )
        finally:
            await client.close()

    for results, beta in zip(asyncio.run(ask()), (0.0, 0.6), strict=True):
        world.expect(results, correction=beta)


def test_a_network_for_other_vectors_is_refused(world):
    other = QuariReranker(Quari(QuariConfig(DIM + 1, rank=2, width=8, heads=2)))
    with pytest.raises(MilvusException, match=f"for dimension {DIM + 1}, the vectors have {DIM}"):
        world.search(other)


@pytest.mark.lite_only
def test_a_collection_without_biases_says_that_it_cannot(backend):
    client, name = backend.hubness_client(), backend.name()
    plain_collection(client, name, vectors(np.random.default_rng(0), 5, DIM), "IP")
    with pytest.raises(MilvusException, match="needs a corrected field"):
        client.search(name, data=[[0.0] * DIM], rerank=QuariReranker(trained()))


def test_biases_beside_the_vectors_choose_the_candidates_as_well(lite):
    world = World(lite, "IP", reranking=True)
    world.expect(world.search(world.reranker(correction=0.6), with_raw_score=True), correction=0.6)


def test_linear_maps_rank_as_a_network_does(lite):
    world = World(lite, "IP")
    maps = LinearMaps(trained(form="linear", directions=DIM), candidates=CANDIDATES, correction=0.6)
    world.adapted = explicit.cosines(
        maps.network(torch.from_numpy(world.queries)), world.items.astype(float)
    )
    world.expect(world.search(maps), correction=0.6)
