"""Searches through the proxy compare by kind as HubnessClient's do, and rows get the same kinds."""

import grpc
import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, RRFRanker, WeightedRanker
from pymilvus.client.prepare import Prepare
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import milvus_pb2, milvus_pb2_grpc

from milvus_hubness import NNN, QueryBank, migrate, plan_correction
from milvus_hubness.correction.overrides import RAW
from tests.milvus.proxy.running import ForeignClient, ProxyHere
from tests.support.galleries import plain_collection, vectors
from tests.support.recipes import as_plan

DIM, ITEMS, LIMIT = 10, 220, 20
NAMES = ["image", "text"]


class Mixture:
    """A corrected collection with a kind in a field of the schema, `sort`, and in a dynamic one, `mode`."""

    def __init__(self, backend, kind="sort", metric="COSINE", **options):
        rng = np.random.default_rng(11)
        self.backend = backend
        self.numbers = (rng.random(ITEMS) < 0.5).astype(int)
        # Vectors themselves show kinds only if nearly all queries are nearer to one.
        gap = (6 if kind == "auto" else 1.5) * np.eye(DIM)[0]
        self.items = (vectors(rng, ITEMS, DIM) + np.outer(self.numbers, gap)).astype(np.float32)
        bank = (vectors(rng, 60, DIM) + gap).astype(np.float32)
        self.queries = bank[:3]
        self.source = backend.name()
        field = ("sort", DataType.VARCHAR, {"max_length": 20})
        fields = {"fields": [field], "values": {"sort": "neither"}}
        plain_collection(backend.client(), self.source, self.items, metric, **fields)
        backend.client().upsert(self.source, [self.row(i) for i in range(ITEMS)])
        self.store = backend.store()
        plan = plan_correction(
            self.store,
            self.source,
            **as_plan(QueryBank(bank), estimator=NNN(8), kind=kind, verdict="skip", **options),
        )
        self.name = migrate(self.store, plan, no_writers=True).target
        self.client = backend.hubness_client()
        self.address = backend.proxies.uri(backend.uri).removeprefix("http://")

    def row(self, number, kind=None):
        kind = NAMES[self.numbers[number]] if kind is None else kind
        row = {"id": number, "vector": self.items[number], "group": number % 4, "sort": kind}
        # Every tenth row lacks the dynamic field.
        return {**row, "mode": kind} if number % 10 else row

    def stored_kinds(self, keys=range(ITEMS)):
        state = self.store.info(self.name).state
        batch = self.store.get(self.name, list(keys), "vector")
        numbers = state.codec.read_kinds({"vector": batch.vectors})
        return dict(zip(batch.keys, numbers.tolist(), strict=True))

    def search(self, client, **options):
        return client.search(self.name, data=self.queries, limit=LIMIT, **options)


def assert_same(got, expected):
    assert [hits.ids for hits in got] == [hits.ids for hits in expected]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a.distances, b.distances, atol=1e-5)


@pytest.fixture(scope="module", params=["IP", "COSINE"])
def mixture(shared_backend, request):
    """A collection for the tests that only read."""
    return Mixture(shared_backend, metric=request.param)


under_cosine = pytest.mark.parametrize("mixture", ["COSINE"], indirect=True)


def test_searches_are_those_of_a_client(mixture):
    ours, foreign = mixture.client.behind, mixture.client
    [hits] = ours.search(mixture.name, data=mixture.queries[:1], limit=LIMIT)
    ring = {"params": {"range_filter": hits[3]["distance"], "radius": hits[12]["distance"]}}
    for options in (
        {},
        {"kinds": 0},
        {"kinds": 0.5},
        {"strength": 0},
        {"strength": 0.5, "kinds": 0},
        {"offset": 4, "filter": "group in [1, 3]"},
        {"round_decimal": 2},
        {"search_params": ring},
        {"output_fields": ["vector", "sort"]},
    ):
        # Once more, as a repeated search is a prepared one.
        for _ in range(2):
            assert_same(mixture.search(foreign, **options), mixture.search(ours, **options))

    by_keys = {"ids": [5, 9], "limit": LIMIT}
    assert_same(foreign.search(mixture.name, **by_keys), ours.search(mixture.name, **by_keys))


def test_without_strength_and_kinds_the_ranking_is_the_raw_one(mixture):
    raw = mixture.backend.client().search(mixture.source, data=mixture.queries, limit=LIMIT)
    got = mixture.search(mixture.client, strength=0, kinds=0)
    assert_same(got, raw)
    by_kind = mixture.search(mixture.client, strength=0)
    assert [hits.ids for hits in by_kind] != [hits.ids for hits in raw]


@pytest.mark.lite_only
@under_cosine
def test_a_call_says_by_its_metadata_how_it_compares(mixture):
    """And who says so by a search parameter too is believed there."""
    group = Prepare._prepare_placeholder_str(mixture.queries, False, DataType.FLOAT_VECTOR)

    def search(metadata, params="{}", **pairs):
        pairs = {"anns_field": "vector", "topk": str(LIMIT), "params": params, **pairs}
        request = milvus_pb2.SearchRequest(
            collection_name=mixture.name,
            nq=len(mixture.queries),
            placeholder_group=group,
            use_default_consistency=True,
        )
        for key, value in pairs.items():
            request.search_params.add(key=key, value=value)
        with grpc.insecure_channel(mixture.address) as channel:
            return milvus_pb2_grpc.MilvusServiceStub(channel).Search(request, metadata=metadata)

    header = "hubness-kinds"
    for kinds, response in [
        (None, search([])),
        (0, search([(header, "0")])),
        (0.5, search([(header, "0.5")])),
        (0.25, search([(header, "0.5")], params='{"hubness_kinds": 0.25}')),
        (0, search([(header, "0.5")], params='{"hubness_kinds": 0.25}', hubness_kinds="0")),
        (1, search([(header, "0")], hubness_kinds="1")),
    ]:
        expected = mixture.search(mixture.client.behind, kinds=kinds)
        ids = [key for hits in expected for key in hits.ids]
        assert list(response.results.ids.int_id.data) == ids
        distances = [distance for hits in expected for distance in hits.distances]
        np.testing.assert_allclose(response.results.scores, distances, atol=1e-5)
    for value in ("much", "-1", "nan"):
        assert search([(header, value)]).status.code == 1100
        with pytest.raises(MilvusException, match="kinds"):
            mixture.search(mixture.client, kinds=value)


@pytest.mark.lite_only
def test_hybrid_searches(mixture):
    ours, foreign = mixture.client.behind, mixture.client

    def asked(*factors):
        parts = []
        for kinds, where in zip(factors, ("", "group > 1"), strict=True):
            params = {} if kinds is None else {"hubness_kinds": kinds}
            parts.append(
                AnnSearchRequest(mixture.queries, "vector", {"params": params}, LIMIT, expr=where)
            )
        return parts

    for ranker in (RRFRanker(), WeightedRanker(0.3, 0.7), WeightedRanker(0.6, 0.4)):
        for kinds in (None, 0, 0.5):
            expected = ours.hybrid_search(
                mixture.name, asked(None, None), ranker, limit=LIMIT, kinds=kinds
            )
            got = foreign.hybrid_search(mixture.name, asked(kinds, kinds), ranker, limit=LIMIT)
            assert_same(got, expected)

    # Each part says so for itself.
    weights = WeightedRanker(1.0, 0.0)
    got = foreign.hybrid_search(mixture.name, asked(0, None), weights, limit=5)
    alone = mixture.search(ours, kinds=0)
    assert [hits.ids for hits in got] == [hits.ids[:5] for hits in alone]


@pytest.mark.lite_only
def test_gated_searches_leave_the_kinds(lite):
    mixture = Mixture(lite, gate=1)
    for options in ({}, {"kinds": 0}, {"strength": 0}):
        got = mixture.search(mixture.client, **options)
        assert_same(got, mixture.search(mixture.client.behind, **options))


@pytest.mark.lite_only
@under_cosine
def test_a_proxy_may_leave_kinds_out_of_all_searches(mixture):
    upstream = mixture.backend.uri.removeprefix("http://")
    with ProxyHere(upstream, overrides=RAW, state_ttl=0.0) as proxy:
        client = ForeignClient(proxy.uri)
        raw = mixture.backend.client().search(mixture.source, data=mixture.queries, limit=LIMIT)
        assert_same(mixture.search(client), raw)
        expected = mixture.search(mixture.client.behind)
        assert_same(mixture.search(client, strength=1, kinds=1), expected)

        request = AnnSearchRequest(mixture.queries, "vector", {"params": {}}, LIMIT)
        merged = client.hybrid_search(mixture.name, [request], RRFRanker(), limit=LIMIT)
        assert [hits.ids for hits in merged] == [hits.ids for hits in raw]


@pytest.mark.lite_only
@pytest.mark.parametrize("kind", ["sort", "mode", "auto"])
def test_a_write_through_the_proxy_is_that_of_a_client(lite, kind):
    """A field of the schema, a dynamic one, and kinds that the vectors show."""
    mixture = Mixture(lite, kind)
    before = mixture.stored_kinds()
    assert {0, 1} <= set(before.values())
    if kind == "mode":
        assert {before[key] for key in range(0, ITEMS, 10)} == {-1}

    rng = np.random.default_rng(2)
    new = vectors(rng, 30, DIM)
    rows = [
        {**mixture.row(i, kind=["text", "image", "video"][i % 3]), "vector": new[i]}
        for i in range(30)
    ]
    rows += [{**rows[i], "id": 500 + i} for i in range(30)]
    written = {}
    for client in (mixture.client.behind, mixture.client):
        client.upsert(mixture.name, [mixture.row(i) for i in range(ITEMS)])
        assert mixture.stored_kinds() == before
        client.delete(mixture.name, ids=list(range(500, 530)))
        client.upsert(mixture.name, rows[:30])
        client.insert(mixture.name, rows[30:])
        keys = [*range(30), *range(500, 530)]
        batch = mixture.store.get(mixture.name, keys, "vector")
        by_key = dict(zip(batch.keys, batch.vectors, strict=True))
        written[client] = np.array([by_key[key] for key in keys])
        kinds = mixture.stored_kinds(keys)
        if kind == "sort":
            assert [kinds[key] for key in range(30)] == [[1, 0, -1][i % 3] for i in range(30)]
    ours, foreign = written.values()
    np.testing.assert_allclose(foreign, ours, atol=2e-5)


@pytest.mark.lite_only
@pytest.mark.parametrize("kind", ["sort", "mode"])
def test_a_part_of_a_row_has_the_kind_that_it_leaves_out(lite, kind):
    mixture = Mixture(lite, kind)
    before = mixture.stored_kinds()
    rows = [{"id": i, "vector": mixture.items[i + 1]} for i in range(1, 9)]
    mixture.client.upsert(mixture.name, rows, partial_update=True)
    assert mixture.stored_kinds() == before
    for row in rows:
        mixture.items[row["id"]] = row["vector"]
    changed = [{"id": 3, "vector": mixture.items[3], kind: "video"}]
    mixture.client.upsert(mixture.name, changed, partial_update=True)
    assert mixture.stored_kinds() == {**before, 3: -1}
