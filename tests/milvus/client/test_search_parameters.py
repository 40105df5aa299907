"""Search parameters that corrected searches change: those of the index, and the bounds of scores."""

import itertools
import json

import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness import NNN, GloballyCorrected, HubnessClient, InvalidParameter
from milvus_hubness.milvus.client.messages import SEARCHED_AT_LEAST
from milvus_hubness.milvus.client.rewrite import raised, with_inner_bounds
from milvus_hubness.milvus.proxy.messages import SearchParameters
from tests.support.born import born
from tests.support.galleries import vectors

DIM, ITEMS = 8, 120
LEAST = -3.4028234e38


@pytest.mark.parametrize("name", SEARCHED_AT_LEAST)
def test_an_index_looks_at_least_at_as_many_rows_as_there_are_hits(name):
    for given, sent in [
        (10, 50),
        (50, 50),
        (99, 99),
        ("10", "50"),
        ("99", "99"),
        (np.int64(7), 50),
    ]:
        assert raised({name: given}, 50) == {name: sent}
        assert raised({"params": {name: given}}, 50) == {"params": {name: sent}}
    for refused_by_the_server in (None, "many", [3], float("inf")):
        assert raised({name: refused_by_the_server}, 50) == {name: refused_by_the_server}
    assert raised({"nprobe": 3}, 50) == {"nprobe": 3}


@pytest.mark.parametrize("metric", ["COSINE", "IP", "L2"])
def test_bounds_may_be_numbers_of_numpy(metric):
    """pymilvus writes parameters as JSON, which knows none of these."""
    given = {"radius": np.float64(0.5), "params": {"range_filter": np.float32(0.75)}}
    sent = with_inner_bounds(given, metric)
    assert json.loads(json.dumps(sent)) == {"radius": 0.5, "params": {"range_filter": 0.75}}


@pytest.mark.parametrize(
    ("metric", "given", "kept"),
    [
        ("COSINE", {"range_filter": 1.0}, {}),
        ("COSINE", {"radius": 0.2, "range_filter": "1.0"}, {"radius": 0.2}),
        ("COSINE", {"radius": 0.2, "range_filter": 2}, {"radius": 0.2}),
        ("COSINE", {"radius": 0.2, "range_filter": 0.99}, {"radius": 0.2, "range_filter": 0.99}),
        ("COSINE", {"radius": -1, "range_filter": 1}, {}),
        ("COSINE", {"radius": -1}, {}),
        ("COSINE", {"radius": -1, "range_filter": 0.5}, {"radius": LEAST, "range_filter": 0.5}),
        ("COSINE", {"radius": -0.99}, {"radius": -0.99}),
        ("L2", {"radius": 4, "range_filter": 0}, {"radius": 4}),
        ("L2", {"radius": 4, "range_filter": -1}, {"radius": 4}),
        ("L2", {"radius": 4, "range_filter": 0.1}, {"radius": 4, "range_filter": 0.1}),
        ("L2", {"radius": 0}, {"radius": 0}),
        ("IP", {"radius": -1, "range_filter": 1}, {"radius": -1, "range_filter": 1}),
    ],
    ids=str,
)
def test_a_bound_at_the_end_of_the_range_of_scores_is_none(metric, given, kept):
    before = {"params": dict(given)}
    assert with_inner_bounds(before, metric).get("params", {}) == kept
    assert before == {"params": given}
    assert with_inner_bounds(dict(given), metric) == kept
    for broken in ("near", [1]):
        if metric != "IP":
            with pytest.raises(InvalidParameter, match="range_filter must be a number"):
                with_inner_bounds({"range_filter": broken}, metric)


def test_a_foreign_client_may_send_each_parameter_in_a_pair_of_its_own():
    pairs = {"ef": "10", "range_filter": "1.0", "radius": "0.5", "params": '{"reorder_k": 3}'}
    request = milvus_pb2.SearchRequest(
        search_params=[common_pb2.KeyValuePair(key=key, value=pairs[key]) for key in pairs]
    )
    params = SearchParameters(request)
    params.take(raised(with_inner_bounds(params.for_rewrite(), "COSINE"), 40))
    sent = {pair.key: pair.value for pair in params.sent().search_params}
    assert sent == {"ef": "40", "radius": "0.5", "params": '{"reorder_k": 40}'}


class Recorded:
    """The requests for hits that reach a database, by limit and parameters."""

    def __init__(self, monkeypatch):
        self.requests = []
        search = MilvusClient.search

        def recording(client, *args, **options):
            limit, params = args[3], args[5]
            self.requests.append((limit, dict(params or {}).get("params") or params or {}))
            return search(client, *args, **options)

        monkeypatch.setattr(MilvusClient, "search", recording)


@pytest.mark.parametrize("name", ["ef", "reorder_k"])
def test_matches_and_re_rankers_raise_it_to_their_candidates(shared_lite, monkeypatch, name):
    rng = np.random.default_rng(3)
    items, bank, queries = vectors(rng, ITEMS, DIM), vectors(rng, 40, DIM), vectors(rng, 3, DIM)
    corrected = born(shared_lite, items, bank, "COSINE", estimator=NNN(4))
    client = shared_lite.client(HubnessClient)
    recorded = Recorded(monkeypatch)
    for value, nested in itertools.product((4, "4"), (False, True)):
        params = {"params": {name: value}} if nested else {name: value}
        client.match(corrected, queries, limit=3, candidates=30, search_params=params)
        client.search(
            corrected,
            list(queries),
            limit=3,
            rerank=GloballyCorrected(5),
            candidates=30,
            search_params=params,
        )
        assert params in ({"params": {name: value}}, {name: value})

    assert len(recorded.requests) == 8
    for limit, sent in recorded.requests:
        assert limit == 30
        assert sent[name] in (30, "30")


def test_the_users_metric_reaches_no_index_of_another_one(shared_lite, monkeypatch):
    """pymilvus sends it from either place; a server refuses it where the index has another."""
    rng = np.random.default_rng(5)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 40, DIM)
    corrected = born(shared_lite, items, bank, "COSINE", estimator=NNN(4))
    client = shared_lite.client(HubnessClient)
    recorded = Recorded(monkeypatch)
    for params in ({"metric_type": "COSINE"}, {"params": {"metric_type": "cosine", "ef": 64}}):
        client.search(corrected, [items[0]], search_params=params)
    assert [sent for _, sent in recorded.requests] == [{}, {"ef": 64}]


@pytest.mark.parametrize(
    ("metric", "bounds"),
    [
        ("COSINE", {"radius": -1.0, "range_filter": 1.0}),
        ("COSINE", {"radius": -0.5, "range_filter": 1.0}),
        ("L2", {"radius": 100.0, "range_filter": 0.0}),
    ],
    ids=str,
)
def test_a_search_up_to_the_best_score_keeps_its_best_hits(shared_lite, metric, bounds):
    rng = np.random.default_rng(4)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 40, DIM)
    name = born(shared_lite, items, bank, metric, estimator=NNN(4))
    # Without items to fit on, the mean bias is 0: only then do all scores move to one side.
    client = shared_lite.client(HubnessClient, strength=1.0 if metric == "L2" else -1.0)
    queries = list(items[:20])
    every = client.search(name, queries, limit=5)
    within = client.search(name, queries, limit=5, search_params={"params": bounds})
    assert [list(hits.ids) for hits in within] == [list(hits.ids) for hits in every]
    best = [hits[0]["distance"] for hits in every]
    assert any(score < 0 for score in best) if metric == "L2" else any(score > 1 for score in best)
