"""A search that is asked again, whatever became of what it was asked with, or of the biases."""

import itertools

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, HubnessClient, QueryBank, refresh
from tests.support.born import born
from tests.support.galleries import METRICS, as_distance, nnn, similarity, vectors

DIM, ITEMS, K, LIMIT = 9, 80, 4, 6


class SearchRequest:
    """A corrected collection, and a client that has asked it nothing yet."""

    def __init__(self, backend, metric):
        rng = np.random.default_rng(71)
        self.metric, self.store = metric, backend.store()
        self.items, self.queries = vectors(rng, ITEMS, DIM), vectors(rng, 5, DIM)
        self.bank = vectors(rng, 30, DIM)
        self.name = born(backend, self.items, self.bank, metric, estimator=NNN(K))
        self.client = backend.client(HubnessClient, state_ttl=3_600.0)

    def scores(self, query, strength=1.0):
        state = self.store.info(self.name).state
        biases = nnn(self.bank, self.items, self.metric, K, 0.75) - state.profile.mean_bias
        return (similarity(query[None, :], self.items, self.metric) - strength * biases)[0]

    def assert_found(self, hits, scores):
        order = np.argsort(-scores)[: len(hits)]
        assert hits
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(
            hits.distances, as_distance(scores[order], self.metric), atol=3e-5
        )


@pytest.fixture(scope="module", params=METRICS)
def asked(shared_lite, request):
    return SearchRequest(shared_lite, request.param)


def test_every_query_has_its_own_answer(asked):
    ways = itertools.product((None, 0, 0.5, 1.0), (None, ["vector"], ["*"]), (False, True))
    for strength, output_fields, with_raw_score in ways:
        for query in asked.queries[:2]:
            for given in ([query], [query.tolist()], query[None, :]):
                [hits] = asked.client.search(
                    asked.name,
                    data=given,
                    limit=LIMIT,
                    output_fields=output_fields,
                    strength=strength,
                    with_raw_score=with_raw_score,
                )
                asked.assert_found(hits, asked.scores(query, 1.0 if strength is None else strength))
                raw = as_distance(asked.scores(query, 0.0), asked.metric)
                for hit in hits:
                    assert set(hit["entity"]) <= {"id", "vector", "group", "note"}
                    if output_fields:
                        np.testing.assert_allclose(
                            hit["entity"]["vector"], asked.items[hit["id"]], rtol=1e-6
                        )
                    if with_raw_score:
                        assert hit["raw_score"] == pytest.approx(raw[hit["id"]], abs=3e-5)
    found = asked.client.search(asked.name, data=list(asked.queries), limit=LIMIT)
    for hits, query in zip(found, asked.queries, strict=True):
        asked.assert_found(hits, asked.scores(query))


def test_bounds_are_those_of_this_search(asked):
    for query, rank in itertools.product(asked.queries, (2, 5)):
        scores = asked.scores(query)
        bound = float(as_distance(np.sort(scores)[::-1][rank - 1 : rank + 1].mean(), asked.metric))
        params = {"params": {"radius": bound}}
        [hits] = asked.client.search(asked.name, data=[query], limit=LIMIT, search_params=params)
        assert len(hits) == rank
        asked.assert_found(hits, scores)
        assert params == {"params": {"radius": bound}}


def test_what_the_caller_changes_afterwards_is_not_asked_again(asked):
    inner, names = {"radius": -1e6 if asked.metric != "L2" else 1e6}, ["id"]
    query = asked.queries[0]

    def search(params, output_fields):
        [hits] = asked.client.search(
            asked.name, data=[query], limit=LIMIT, search_params=params, output_fields=output_fields
        )
        return len(hits), set(hits[0]["entity"]) if hits else None

    first = search({"params": inner}, names)
    told = {"params": dict(inner)}
    inner["radius"] = -inner["radius"]
    names.append("group")
    assert search(told, ["id"]) == first == (LIMIT, {"id"})
    assert search({"params": inner}, names)[0] == 0


def test_what_pymilvus_refuses_it_refuses_again(asked):
    client, query = asked.client, asked.queries[0]
    client.search(asked.name, data=[query], limit=LIMIT, output_fields=["id"])
    for wrong in (
        {"output_fields": ("id",)},
        {"output_fields": "id"},
        {"limit": float(LIMIT)},
        {"data": [tuple(query.tolist())]},
        {"data": query},
        {"data": [[np.nan] * DIM]},
        {"data": [query[1:]]},
        {"data": None},
    ):
        for _ in range(2):
            with pytest.raises(MilvusException):
                client.search(
                    asked.name,
                    **{"data": [query], "limit": LIMIT, "output_fields": ["id"], **wrong},
                )


def test_after_a_refresh_the_new_biases_are_asked_for(lite):
    search_request = SearchRequest(lite, "COSINE")
    query = search_request.queries[0]
    for _ in range(2):
        [hits] = search_request.client.search(search_request.name, data=[query], limit=LIMIT)
    search_request.assert_found(hits, search_request.scores(query))
    search_request.bank = vectors(np.random.default_rng(72), 30, DIM)
    refresh(
        search_request.store,
        search_request.name,
        bank=QueryBank(search_request.bank),
        estimator=NNN(K),
    )
    search_request.client.hubness_state(search_request.name)
    for _ in range(2):
        [hits] = search_request.client.search(search_request.name, data=[query], limit=LIMIT)
        search_request.assert_found(hits, search_request.scores(query))
