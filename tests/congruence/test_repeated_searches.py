"""A search that is asked again, whatever became of what it was asked with, or of the biases."""

import itertools

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, RRFRanker, WeightedRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, HubnessClient, QueryBank, Recipe, UnsupportedOperation, refresh
from tests.support.aliases import aliased
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


def bounds_between(asked, nearest, farthest):
    """Return the bounds within which the ranks from `nearest` to `farthest` of the first query lie."""
    scores = np.sort(asked.scores(asked.queries[0]))[::-1]
    return {
        "range_filter": float(as_distance(scores[nearest - 1 : nearest + 1].mean(), asked.metric)),
        "radius": float(as_distance(scores[farthest - 1 : farthest + 1].mean(), asked.metric)),
    }


def told_alike(found, expected):
    """Whether two answers have the same hits for each query, with the same scores and fields."""
    return [
        [(hit["id"], hit["distance"], hit.get("raw_score"), str(hit["entity"])) for hit in hits]
        for hits in found
    ] == [
        [(hit["id"], hit["distance"], hit.get("raw_score"), str(hit["entity"])) for hit in hits]
        for hits in expected
    ]


@pytest.mark.parametrize("strength", [None, 0])
@pytest.mark.parametrize("bounds", ["none", "radius", "both"])
def test_other_queries_are_answered_as_by_a_client_that_has_prepared_nothing(
    asked, shared_lite, bounds, strength
):
    params = bounds_between(asked, 3, 12)
    if bounds != "both":
        del params["range_filter"]
    if bounds == "none":
        params = {}

    fresh = shared_lite.client(HubnessClient, state_ttl=0.0)
    others = vectors(np.random.default_rng(73), 103, DIM)
    fields = iter(itertools.cycle((None, ["vector"], ["id", "group"])))
    searches = itertools.product((params, {"params": params}), ("", "id < 40"), (False, True))
    for search_params, filter, with_raw_score in searches:
        arguments = {
            "limit": 20,
            "search_params": search_params,
            "filter": filter,
            "with_raw_score": with_raw_score,
            "output_fields": next(fields),
            "strength": strength,
        }
        asked.client.search(asked.name, data=asked.queries[:1], **arguments)
        for data in (others[:1], others[1:3], others[3:]):
            if len(data) > 2 and (filter or with_raw_score):
                data = data[:9]
            found = asked.client.search(asked.name, data=data, **arguments)
            assert told_alike(found, fresh.search(asked.name, data=data, **arguments))
            assert len(found) == len(data)


@pytest.mark.parametrize("ranker", [RRFRanker(), WeightedRanker(0.5, 0.5)], ids=["rrf", "weighted"])
def test_hybrid_searches_of_other_queries_are_answered_as_by_a_fresh_client(
    asked, shared_lite, ranker
):
    fresh = shared_lite.client(HubnessClient, state_ttl=0.0)
    params = [{"params": bounds_between(asked, 3, 12)}, {}]
    others = vectors(np.random.default_rng(74), 10, DIM)

    def search(client, data):
        requests = [
            AnnSearchRequest(data=data, anns_field="vector", param=param, limit=20)
            for param in params
        ]
        return client.hybrid_search(asked.name, requests, ranker, limit=10)

    search(asked.client, asked.queries[:1].tolist())
    for data in (others[:1].tolist(), others[1:3].tolist(), others.tolist()):
        assert told_alike(search(asked.client, data), search(fresh, data))


@pytest.mark.parametrize("refused", [{"namespace": "a"}, {"is_embedding_list": True}], ids=str)
def test_what_is_refused_is_refused_though_a_search_is_prepared(asked, refused):
    for _ in range(2):
        asked.client.search(asked.name, data=asked.queries[:1], limit=LIMIT)
        with pytest.raises(UnsupportedOperation, match=next(iter(refused))):
            asked.client.search(asked.name, data=asked.queries[:1], limit=LIMIT, **refused)


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
    search_request.name = aliased(search_request.store, search_request.name)
    query = search_request.queries[0]
    for _ in range(2):
        [hits] = search_request.client.search(search_request.name, data=[query], limit=LIMIT)
    search_request.assert_found(hits, search_request.scores(query))
    search_request.bank = vectors(np.random.default_rng(72), 30, DIM)
    refresh(
        search_request.store,
        search_request.name,
        Recipe(QueryBank(search_request.bank), estimator=NNN(K)),
    )
    search_request.client.hubness_state(search_request.name)
    for _ in range(2):
        [hits] = search_request.client.search(search_request.name, data=[query], limit=LIMIT)
        search_request.assert_found(hits, search_request.scores(query))
