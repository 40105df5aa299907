"""Iterators over corrected collections against pymilvus's over plain ones, and against float64 oracles."""

import inspect

import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.client.grpc_handler import GrpcHandler
from pymilvus.client.iterator import SearchIteratorV2, SearchPage
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    DimensionMismatch,
    HubnessClient,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    enable,
    migrate,
    plan_correction,
    rollback,
)
from milvus_hubness.milvus.client.rewrite import keep
from tests.support.galleries import METRICS, plain_collection, similarity, vectors
from tests.support.pairs import ITEMS, K, Pair

ON_SERVERS = {"pair": ["L2"]}


@pytest.fixture(scope="module", params=METRICS)
def pair(shared_backend, request):
    return Pair(shared_backend, request.param)


def pages_of(iterator):
    pages = []
    while page := iterator.next():
        pages.append(page)
    iterator.close()
    return pages


def hits_of(pages):
    return [hit for page in pages for hit in page]


def assert_same_hits(expected, got):
    assert [hit.id for hit in got] == [hit.id for hit in expected]
    np.testing.assert_allclose(
        [hit.distance for hit in got], [hit.distance for hit in expected], atol=1e-5
    )
    for a, b in zip(expected, got, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(
            b["entity"].pop("vector", 0), a["entity"].pop("vector", 0), rtol=2.4e-7
        )
        assert a["entity"] == b["entity"]


SEARCHES = [
    {"limit": ITEMS},
    {"batch_size": 40, "limit": 100},
    {"batch_size": 7, "limit": 25},
    {"batch_size": 16, "filter": "group in [1, 3]", "limit": 120},
    {"limit": 9, "output_fields": ["group"]},
    {"limit": 9, "output_fields": ["vector", "note"]},
    {"limit": 9, "output_fields": ["*"]},
    {"limit": 9, "round_decimal": 3},
    {"limit": 9, "anns_field": "vector", "filter": None},
]


@pytest.mark.parametrize("call", SEARCHES, ids=str)
def test_search_iterator_at_strength_zero_is_the_plain_one(pair, call):
    for query in pair.queries[:2]:
        expected = pages_of(pair.plain.search_iterator(pair.name, data=[query], **call))
        got = pages_of(
            pair.client.search_iterator(pair.corrected, data=[query], strength=0, **call)
        )
        assert [len(page) for page in got] == [len(page) for page in expected]
        assert {type(page) for page in got} == {SearchPage}
        assert [page.ids() for page in got] == [page.ids() for page in expected]
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(b.distances(), a.distances(), atol=1e-5)
        assert_same_hits(hits_of(expected), hits_of(got))


@pytest.mark.parametrize("strength", [1.0, 0.4, -0.3])
def test_search_iterator_goes_through_all_rows_in_the_oracles_order(pair, strength):
    [scores] = pair.oracle(pair.queries[:1], pair.items, strength)
    # Milvus 2.3 tells the end of the rows only after 20 searches.
    limit = {} if pair.backend.is_lite else {"limit": ITEMS}
    hits = hits_of(
        pages_of(
            pair.client.search_iterator(
                pair.corrected, data=[pair.queries[0]], batch_size=33, strength=strength, **limit
            )
        )
    )
    keys = [hit.id for hit in hits]
    assert sorted(keys) == list(range(ITEMS))
    np.testing.assert_allclose([hit.distance for hit in hits], scores[keys], atol=2e-5)
    ordered = scores[keys] if pair.metric == "L2" else -scores[keys]
    assert (np.diff(ordered) >= -2e-5).all()


def test_search_iterator_takes_strength_from_client_and_collection(pair):
    def first(client, **call):
        iterator = client.search_iterator(
            pair.corrected, data=[pair.queries[0]], batch_size=20, **call
        )
        return list(iterator.next())

    assert first(pair.client) == first(pair.client, strength=1) != first(pair.client, strength=0)
    assert first(pair.backend.hubness_client(strength=0)) == first(pair.client, strength=0)


def test_bounds_of_a_search_iterator_are_in_corrected_scores(pair):
    [scores] = pair.oracle(pair.queries[:1], pair.items, 1.0)
    ordered = np.sort(scores if pair.metric == "L2" else -scores)
    near, far = ((ordered[i] + ordered[i + 1]) / 2 for i in (9, 69))
    sign = 1 if pair.metric == "L2" else -1
    bounds = {"radius": float(sign * far), "range_filter": float(sign * near)}
    hits = hits_of(
        pages_of(
            pair.client.search_iterator(
                pair.corrected,
                data=[pair.queries[0]],
                batch_size=20,
                search_params={"params": bounds},
                **({} if pair.backend.is_lite else {"limit": 60}),
            )
        )
    )
    order = np.argsort(scores if pair.metric == "L2" else -scores)
    assert [hit.id for hit in hits] == order[10:70].tolist()


ROWS = [
    {},
    {"batch_size": 70},
    {"batch_size": 30, "limit": 100, "output_fields": ["note"]},
    {
        "batch_size": 16,
        "filter": "group in [1, 3] or id > 290",
        "output_fields": ["group", "vector"],
    },
    {"batch_size": 64, "output_fields": ["*"], "offset": 100},
    {"filter": None, "output_fields": ["id"]},
]


@pytest.mark.parametrize("call", ROWS, ids=str)
def test_query_iterator_is_the_plain_one(pair, call):
    iterators = [
        pair.plain.query_iterator(pair.name, **call),
        pair.client.query_iterator(pair.corrected, **call),
    ]
    while True:
        expected, got = (iterator.next() for iterator in iterators)
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for a, b in zip(expected, got, strict=True):
            assert a.keys() == b.keys()
            np.testing.assert_allclose(b.pop("vector", 0), a.pop("vector", 0), rtol=2.4e-7)
            assert a == b
        assert iterators[1].get_cursor().int_pk == iterators[0].get_cursor().int_pk
        if not expected:
            break
    for iterator in iterators:
        iterator.close()


def test_hidden_columns_show_only_when_named(pair):
    page = pair.client.query_iterator(
        pair.corrected, output_fields=["hubness_bias"], batch_size=5
    ).next()
    biases = (
        pair.biases(pair.items[:5]) - pair.client.hubness_state(pair.corrected).profile.mean_bias
    )
    np.testing.assert_allclose([row["hubness_bias"] for row in page], biases, atol=1e-5)
    [hit] = pair.client.search_iterator(
        pair.corrected, data=[pair.queries[0]], output_fields=["hubness_bias"], limit=1
    ).next()
    assert set(hit["entity"]) == {"hubness_bias"}


def test_raw_scores_come_along(pair):
    [scores] = pair.oracle(pair.queries[:1], pair.items, 0.0)
    page = pair.client.search_iterator(
        pair.corrected,
        data=[pair.queries[0]],
        batch_size=20,
        with_raw_score=True,
        output_fields=["note"],
    ).next()
    np.testing.assert_allclose([hit["raw_score"] for hit in page], scores[page.ids()], atol=2e-5)
    assert set(page[0]["entity"]) == {"note"}


def test_an_iterator_knows_a_collection_that_was_switched_since(pair):
    alias = pair.backend.name("alias")
    pair.plain.create_alias(pair.name, alias)
    client = pair.backend.hubness_client(state_ttl=1_000)
    client.search(alias, data=[pair.queries[0]], limit=1)
    pair.plain.alter_alias(pair.corrected, alias)
    [row] = client.query_iterator(alias, output_fields=["*"], limit=1).next()
    assert row.keys() == {"id", "vector", "group", "note"}
    hits = list(client.search_iterator(alias, data=[pair.queries[0]], batch_size=10).next())
    assert hits == list(client.search(alias, data=[pair.queries[0]])[0])


def test_an_iterator_ends_on_the_copy_on_which_it_began(lite):
    rng = np.random.default_rng(9)
    items = vectors(rng, 40, 16)
    source, store, client = lite.name("switched"), lite.store(), lite.hubness_client()
    plain_collection(lite.client(), source, items, "L2")
    alias = f"{source}_alias"
    lite.client().create_alias(source, alias)
    iterators = [client.query_iterator(alias, batch_size=10, output_fields=["vector"])]
    plan = plan_correction(
        store, source, Recipe(QueryBank(vectors(rng, 20, 16)), estimator=NNN(K)), Copy(alias=alias)
    )
    first_pages = [iterators[0].next()]
    migrate(store, plan)
    iterators.append(client.query_iterator(alias, batch_size=10, output_fields=["vector"]))
    first_pages.append(iterators[1].next())
    rollback(store, alias)

    for pages, first_page in zip(iterators, first_pages, strict=True):
        rows = [*first_page, *(row for page in iter(pages.next, []) for row in page)]
        assert [row["id"] for row in rows] == list(range(40))
        np.testing.assert_allclose([row["vector"] for row in rows], items, rtol=1e-5)


WRONG_SEARCHES = [
    {"batch_size": -1},
    {"offset": 3},
    {"filter": "no such thing"},
    {"anns_field": "nowhere"},
    {"limit": 3, "output_fields": ["vector", 5]},
]


def test_wrong_questions_raise_what_they_raise_there(pair):
    query = pair.queries[0]
    for call in [
        {"data": [query, query]},
        *({"data": [query], **wrong} for wrong in WRONG_SEARCHES),
    ]:
        with pytest.raises(Exception) as expected:  # noqa: PT011
            pair.plain.search_iterator(pair.name, **call)
        with pytest.raises(type(expected.value)):
            pair.client.search_iterator(pair.corrected, **call)
    for call in (
        {"batch_size": -1},
        {"batch_size": 20_000},
        {"filter": 3},
        {"filter": "no such thing"},
    ):
        with pytest.raises(MilvusException) as expected:
            pair.plain.query_iterator(pair.name, **call)
        with pytest.raises(type(expected.value)):
            pair.client.query_iterator(pair.corrected, **call)
    for call, error in (
        ({"data": [[0.1] * 3]}, DimensionMismatch),
        ({"data": []}, InvalidInput),
        ({"data": [query], "strength": float("inf")}, InvalidParameter),
        ({"data": [query], "profile": "nobody's"}, InvalidInput),
        ({"data": [query], "search_params": {"metric_type": "HAMMING"}}, InvalidParameter),
    ):
        with pytest.raises(error):
            pair.client.search_iterator(pair.corrected, **call)
    for opening in (
        lambda: pair.client.query_iterator("nowhere"),
        lambda: pair.client.search_iterator("nowhere", data=[query]),
    ):
        with pytest.raises(MilvusException, match="nowhere"):
            opening()


def test_parameters_serve_one_collection_after_the_other(pair):
    """pymilvus's iterator writes the metric into both places of the parameters that it is given."""
    query = pair.queries[0]
    params = {"params": {}}
    pages_of(pair.client.search_iterator(pair.name, data=[query], search_params=params))
    assert params["params"]["metric_type"] == pair.metric
    asked = {"data": [query], "batch_size": 40, "limit": 40}
    found = pages_of(pair.client.search_iterator(pair.corrected, search_params=params, **asked))
    assert_same_hits(
        hits_of(pages_of(pair.client.search_iterator(pair.corrected, **asked))), hits_of(found)
    )
    params = {"params": {"metric_type": "HAMMING"}}
    with pytest.raises(InvalidParameter, match="not HAMMING of search_params"):
        pair.client.search_iterator(pair.corrected, data=[query], search_params=params)


def search_on_the_server(connection, *, search=GrpcHandler.search, **asked):
    """Search Milvus Lite as Milvus from 2.5 on, which keeps the place of a search."""
    size = asked.pop("search_iter_batch_size", None)
    bound = asked.pop("search_iter_last_bound", None)
    results = search(connection, **{**asked, "limit": ITEMS} if size else asked)
    if size:
        [hits] = results
        behind = hits if bound is None else [hit for hit in hits if hit.distance < bound]
        keep(hits, list(behind)[:size])
        result = results.get_search_iterator_v2_results_info()
        result.token, result.last_bound = "here", hits[-1].distance if hits else 0.0
    return results


def test_a_server_that_keeps_the_place_itself(lite, monkeypatch):
    pair = Pair(lite, "COSINE")
    monkeypatch.setattr(GrpcHandler, "search", search_on_the_server)
    [scores] = pair.oracle(pair.queries[:1], pair.items, 1.0)
    order = np.argsort(-scores)
    question = {"data": [pair.queries[0]], "batch_size": 50, "output_fields": ["vector", "group"]}
    iterator = pair.client.search_iterator(pair.corrected, **question, round_decimal=4)
    pages = pages_of(iterator)
    assert [page.ids() for page in pages] == order.reshape(-1, 50).tolist()
    for page in pages:
        np.testing.assert_allclose(page.distances(), scores[page.ids()].round(4), atol=1e-4)
        found = [hit["entity"].pop("vector") for hit in page]
        np.testing.assert_allclose(found, pair.items[page.ids()], rtol=2.4e-7)
        assert all(set(hit["entity"]) == {"group"} for hit in page)

    seen = []

    def even(hits):
        seen.extend((hit.id, hit.distance) for hit in hits)
        return [hit for hit in hits if hit.id % 2 == 0]

    chosen = pair.client.search_iterator(
        pair.corrected, **question, external_filter_func=even, limit=60
    )
    assert isinstance(chosen, SearchIteratorV2)
    keys = [hit.id for hit in hits_of(pages_of(chosen))]
    assert keys == [key for key in order if key % 2 == 0][:60]
    np.testing.assert_allclose(
        [score for _, score in seen], scores[[key for key, _ in seen]], atol=2e-5
    )


def test_a_gate_decides_by_the_raw_nearest_row(lite):
    rng = np.random.default_rng(3)
    items, queries, bank = vectors(rng, 300, 16), vectors(rng, 12, 16), vectors(rng, 30, 16)
    client, name = lite.hubness_client(), lite.name("gated")
    plain_collection(client, name, items, "IP")
    store = lite.store()
    migrate(store, plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(K), gate=1)))
    activated = set(similarity(bank, items, "IP").argmax(1).tolist())
    opened = 0
    for query in queries:
        opens = int(similarity(query[None], items, "IP")[0].argmax()) in activated
        opened += opens
        for strength in (None, 0.0):
            hits = hits_of(
                pages_of(
                    client.search_iterator(
                        f"{name}_hubness", data=[query], batch_size=10, limit=30, strength=strength
                    )
                )
            )
            [found] = client.search(f"{name}_hubness", data=[query], limit=30, strength=strength)
            assert_same_hits(found, hits)
    assert 0 < opened < len(queries)


def test_biases_beside_the_vectors(lite):
    rng = np.random.default_rng(4)
    items, query = vectors(rng, 200, 16), vectors(rng, 1, 16)
    client, name = lite.hubness_client(), lite.name("beside")
    lite.made += [f"{name}__bias_a", f"{name}__bias_b"]
    plain_collection(client, name, items, "L2")
    question = {"data": [query[0]], "batch_size": 30, "round_decimal": 2, "output_fields": ["*"]}
    expected = [list(page) for page in pages_of(client.search_iterator(name, **question))]
    rows = pages_of(client.query_iterator(name, batch_size=64))
    store = lite.store()
    enable(
        store,
        plan_correction(store, name, Recipe(QueryBank(items[:40]), estimator=NNN(K)), Beside()),
    )
    assert [
        list(page) for page in pages_of(client.search_iterator(name, strength=0, **question))
    ] == expected
    assert pages_of(client.query_iterator(name, batch_size=64)) == rows
    with pytest.raises(UnsupportedOperation, match=r"outside.*strength=0"):
        client.search_iterator(name, **question)


@pytest.mark.parametrize("method", ["query_iterator", "search_iterator"])
def test_signatures_are_pymilvuss_and_what_is_added_goes_by_name(method):
    ours = dict(inspect.signature(getattr(HubnessClient, method)).parameters)
    theirs = inspect.signature(getattr(MilvusClient, method)).parameters
    added = [name for name in ours if name not in theirs]
    assert {ours.pop(name).kind for name in added} <= {inspect.Parameter.KEYWORD_ONLY}
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in theirs.values()
    ]
