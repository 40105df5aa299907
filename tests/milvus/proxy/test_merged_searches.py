"""Searches whose answers the proxy puts in order itself: beside vectors, gated, by keys, and merged ones."""

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, Function, FunctionType, RRFRanker, WeightedRanker
from pymilvus.client.search_aggregation import SearchAggregation
from pymilvus.exceptions import MilvusException, ParamError
from pymilvus.function_chain import FunctionChain, FunctionChainStage
from pymilvus.grpc_gen import common_pb2, milvus_pb2, schema_pb2

from milvus_hubness import (
    NNN,
    Beside,
    HubnessClient,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
)
from milvus_hubness.milvus.proxy.columns import joined, take_rows
from milvus_hubness.milvus.proxy.searching import _ranker
from tests.milvus.proxy.conftest import ProxyBackend
from tests.milvus.proxy.running import at, wishing
from tests.support.born import born
from tests.support.catalogue import ACCURACY
from tests.support.galleries import plain_collection, vectors
from tests.support.recipes import as_plan
from tests.support.reranked import Enabled

ON_SERVERS = {"gated": ["COSINE"], "beside": ["L2"]}

DIM, ITEMS, K, METRICS = 12, 80, 4, ("IP", "COSINE", "L2")

SEARCHES = {
    "a page": lambda g: {"limit": 7, "offset": 3},
    "all there is": lambda g: {"limit": g.items},
    "the vector and dynamic fields": lambda g: {"output_fields": ["vector", "note"]},
    "all fields": lambda g: {"output_fields": ["*"]},
    "a filter": lambda g: {"filter": "group in [1, 3]"},
    "a filter that nothing passes": lambda g: {"filter": "group == 99"},
    "half as strong": lambda g: {"strength": 0.5},
    "not corrected": lambda g: {"strength": 0, "output_fields": ["vector"]},
    "a ring": lambda g: {"data": g.queries[:1], "limit": 30, "search_params": {"params": g.ring}},
    "rounded": lambda g: {"round_decimal": 3},
    "by keys": lambda g: {"data": None, "ids": [3, 11]},
}


class Questions:
    """queries, of two queries; ring: bounds of corrected scores. expected: what HubnessClient finds."""

    def __init__(self, client, name, queries, metric, items):
        self.client, self.name, self.queries = client, name, queries
        self.metric, self.items = metric, items
        [hits] = client.behind.search(name, data=queries[:1], limit=20)
        self.ring = {"range_filter": hits[4]["distance"], "radius": hits[15]["distance"]}

    def assert_same(self, **asked):
        asked = {"data": self.queries, **asked}
        got, expected = (c.search(self.name, **asked) for c in (self.client, self.client.behind))
        assert_same(got, expected)
        return got


def assert_same(got, expected):
    assert [hits.ids for hits in got] == [hits.ids for hits in expected]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a.distances, b.distances, atol=ACCURACY)
        for one, other in zip(a, b, strict=True):
            assert one["entity"].keys() == other["entity"].keys()
            for name, value in other["entity"].items():
                if name == "vector":
                    np.testing.assert_allclose(one["entity"][name], value, rtol=1e-6, atol=1e-7)
                else:
                    assert one["entity"][name] == value


@pytest.fixture(
    scope="session",
    params=["lite", pytest.param("server-2.3.5", marks=pytest.mark.beyond_contract)],
)
def running(request):
    return at(request)


@pytest.fixture(scope="module", params=METRICS)
def gated(shared_backend, request):
    rng, name = np.random.default_rng(7), shared_backend.name("gated")
    plain_collection(shared_backend.client(), name, vectors(rng, ITEMS, DIM), request.param)
    store, bank = shared_backend.store(), QueryBank(vectors(rng, 40, DIM))
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(K), gate=1))
    target = migrate(store, plan, no_writers=True).target
    client, queries = shared_backend.hubness_client(), vectors(rng, 12, DIM)
    opened = [
        client.behind.search(target, data=[query])[0].ids
        != client.behind.search(target, data=[query], strength=0)[0].ids
        for query in queries
    ]
    both = queries[[opened.index(True), opened.index(False)]]
    return Questions(client, target, both, request.param, ITEMS)


@pytest.fixture(scope="module", params=METRICS)
def beside(shared_backend, request):
    here = Enabled(shared_backend, request.param)
    return Questions(here.client, here.name, here.queries[:2], request.param, len(here.items))


@pytest.mark.parametrize("search", SEARCHES)
def test_gated_searches(gated, search):
    gated.assert_same(**SEARCHES[search](gated))


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_beside_vectors(beside, search):
    beside.assert_same(**SEARCHES[search](beside))


def test_no_page_begins_before_the_first_hit(gated, beside):
    for asked in (gated, beside):
        with pytest.raises(MilvusException, match="offset at least 0"):
            asked.client.search(asked.name, data=asked.queries, offset=-2)
        parts = [AnnSearchRequest(list(asked.queries), "vector", {}, 5) for _ in range(2)]
        with pytest.raises(MilvusException, match="offset at least 0"):
            asked.client.hybrid_search(asked.name, parts, RRFRanker(), offset=-1)


def test_requests_of_a_hybrid_search_need_as_many_queries_as_each_other(beside):
    one, two = (AnnSearchRequest(list(beside.queries[:n]), "vector", {}, 5) for n in (1, 2))
    with pytest.raises(MilvusException, match="queries: give each request"):
        beside.client.hybrid_search(beside.name, [two, one], RRFRanker())


def test_the_gate_is_seen(gated):
    """What the others compare differs from the raw ranking for one of the two queries."""
    corrected, raw = gated.assert_same(limit=40), gated.assert_same(limit=40, strength=0)
    assert [a.ids != b.ids for a, b in zip(corrected, raw, strict=True)] == [True, False]


def test_the_correction_is_seen(beside):
    corrected, raw = beside.assert_same(limit=40), beside.assert_same(limit=40, strength=0)
    assert any(a.ids != b.ids for a, b in zip(corrected, raw, strict=True))


def test_keys_are_searched_by(lite):
    """Also where the correction is in the vectors."""
    rng = np.random.default_rng(8)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 30, DIM)
    target = born(lite, items, bank, "COSINE", estimator=NNN(K))
    client = lite.hubness_client()
    for options in ({}, {"strength": 0.3}, {"limit": 4, "offset": 2, "output_fields": ["*"]}):
        asked = {"ids": [5, 2, 5], **options}
        assert_same(client.search(target, **asked), client.behind.search(target, **asked))
    with pytest.raises(MilvusException, match="no rows of these ids"):
        client.search(target, ids=[5, 9_999])


def test_what_would_see_uncorrected_scores_is_refused(lite):
    here = Enabled(lite, "IP")
    decay = Function(
        "decay",
        FunctionType.RERANK,
        ["group"],
        params={"reranker": "decay", "function": "exp", "origin": 0, "scale": 5, "decay": 0.5},
    )
    refused = {
        "ranker": decay,
        "function_chains": FunctionChain(FunctionChainStage.L2_RERANK).limit(3),
        "search_aggregation": SearchAggregation(["group"], 3),
        "group_by_field": "group",
        "order_by_fields": [{"field": "group"}],
    }
    for name, value in refused.items():
        with pytest.raises(MilvusException, match=f"{name} would see uncorrected scores"):
            here.client.search(here.name, data=here.queries[:1], **{name: value})
        assert here.client.search(here.name, data=here.queries[:1], strength=0, **{name: value})[0]
    with pytest.raises(MilvusException, match="iterators cannot follow"):
        here.client.search_iterator(here.name, here.queries[:1], batch_size=10).next()


def test_what_computes_with_inner_products_is_refused_where_the_user_has_distances(lite):
    rng = np.random.default_rng(6)
    items, bank, query = (vectors(rng, count, DIM) for count in (ITEMS, 30, 1))
    target = born(lite, items, bank, "L2", estimator=NNN(K))
    boost = Function("b", FunctionType.RERANK, [], params={"reranker": "boost", "weight": 2})
    for refused in ({"ranker": boost}, {"search_aggregation": SearchAggregation(["group"], 3)}):
        with pytest.raises(MilvusException, match="inner products"):
            lite.hubness_client().search(target, data=query, strength=0, **refused)
    asked = {"search_aggregation": SearchAggregation(["group"], 3), "output_fields": ["vector"]}
    with pytest.raises(MilvusException, match="output field 'vector'"):
        lite.hubness_client().search(target, data=query, **asked)
    assert len(lite.hubness_client().search(target, data=query, group_by_field="group")[0]) == 5


# -- merged ----------------------------------------------------------------------------------------------


class TwoFields:
    """text, corrected, under one metric; picture, as it is, under IP."""

    def __init__(self, backend, metric, how):
        rng = np.random.default_rng(3)
        self.metric = metric
        self.queries, bank = vectors(rng, 2, DIM), QueryBank(vectors(rng, 30, DIM))
        plain, name = backend.client(), backend.name("two")
        backend.made += [f"{name}__bias_a", f"{name}__bias_b"]
        schema = plain.create_schema(enable_dynamic_field=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        for field in ("text", "picture"):
            schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
        schema.add_field("group", DataType.INT64)
        index = plain.prepare_index_params("text", index_type="FLAT", metric_type=metric)
        index.add_index("picture", index_type="FLAT", metric_type="IP")
        plain.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
        rows = zip(vectors(rng, ITEMS, DIM), vectors(rng, ITEMS, DIM), strict=True)
        plain.insert(
            name,
            [
                {"id": i, "text": a, "picture": b, "group": i % 5, "note": f"n{i}"}
                for i, (a, b) in enumerate(rows)
            ],
        )
        store = backend.store()
        if how == "beside":
            result = {
                "estimator": NNN(K),
                "field": "text",
            }
            enable(
                store,
                plan_correction(store, name, **as_plan(bank, Beside, **result)),
                client_ttl=0.0,
            )
            self.name = name
        else:
            result = {"estimator": NNN(K), "field": "text", "gate": 1 if how == "gate" else None}
            self.name = migrate(
                store, plan_correction(store, name, **as_plan(bank, **result)), no_writers=True
            ).target
        self.client = backend.hubness_client()

    def requests(self, **params):
        return [
            AnnSearchRequest(self.queries, "text", params, 12),
            AnnSearchRequest(self.queries, "picture", {}, 15, expr="group > 0"),
        ]


RANKERS = {
    "weighted": WeightedRanker(0.3, 0.7),
    "weighted as they are": WeightedRanker(0.3, 0.7, norm_score=False),
    "by rank": RRFRanker(20),
    "a function": Function(
        "r",
        FunctionType.RERANK,
        [],
        params={"reranker": "weighted", "weights": [0.6, 0.4], "norm_score": True},
    ),
    "a function by rank": Function(
        "r", FunctionType.RERANK, [], params={"reranker": "rrf", "k": 30}
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        ("COSINE", "in"),
        ("L2", "in"),
        ("IP", "gate"),
        ("COSINE", "beside"),
        ("L2", "beside"),
    ],
    ids=" ".join,
)
def two(proxies, lite_server_uri, request):
    here = ProxyBackend("lite", lite_server_uri, proxies)
    yield TwoFields(here, *request.param)
    here.clean()


@pytest.mark.parametrize("ranker", RANKERS)
def test_hybrid_searches_that_are_merged_here(two, ranker):
    for options in (
        {},
        {"limit": 4, "offset": 3, "output_fields": ["group", "note"]},
        {"output_fields": ["*"], "round_decimal": 4},
        {"limit": 60},
    ):
        asked = (two.name, two.requests(), RANKERS[ranker])
        expected = two.client.behind.hybrid_search(*asked, **options)
        assert_same(two.client.hybrid_search(*asked, **options), expected)


def test_an_index_that_is_made_again_is_weighed_by_its_new_metric(lite):
    two = TwoFields(lite, "COSINE", "in")
    clients = [two.client, lite.client(HubnessClient, state_ttl=0.0)]
    for metric in ("IP", "COSINE"):
        two.client.release_collection(two.name)
        two.client.drop_index(two.name, "picture")
        index = two.client.prepare_index_params("picture", index_type="FLAT", metric_type=metric)
        two.client.create_index(two.name, index)
        two.client.load_collection(two.name)
        fresh = lite.client(HubnessClient)
        expected = fresh.hybrid_search(two.name, two.requests(), RANKERS["weighted"])
        for client in clients:
            found = client.hybrid_search(two.name, two.requests(), RANKERS["weighted"])
            assert_same(found, expected)


def test_each_request_says_how_strongly(two):
    for strength in (0, 0.5):
        asked = two.requests(**wishing(None, strength))
        got = two.client.hybrid_search(two.name, asked, WeightedRanker(0.5, 0.5))
        expected = two.client.behind.hybrid_search(
            two.name, two.requests(), WeightedRanker(0.5, 0.5), strength=strength
        )
        assert_same(got, expected)


def test_hybrid_searches_that_nobody_merges_are_refused(two):
    with pytest.raises(MilvusException, match="grouping a hybrid search"):
        two.client.hybrid_search(
            two.name, two.requests(), WeightedRanker(0.5, 0.5), group_by_field="group"
        )
    decay = {"reranker": "decay", "function": "gauss", "origin": 0, "scale": 50}
    for params in ({"reranker": "model"}, decay):
        ranker = Function("r", FunctionType.RERANK, ["group"], params=params)
        with pytest.raises(
            MilvusException, match=f"'{params['reranker']}' runs on the server only"
        ):
            two.client.hybrid_search(two.name, two.requests(), ranker)
    for decimals in (7, -2, 10**10):
        with pytest.raises(ParamError, match="`round_decimal` value"):
            two.client.behind.hybrid_search(
                two.name, two.requests(), WeightedRanker(0.5, 0.5), round_decimal=decimals
            )
    with pytest.raises(MilvusException, match="1 weights for 2 requests"):
        two.client.hybrid_search(two.name, two.requests(), WeightedRanker(0.5))


def test_several_functions_are_a_ranker_of_the_server():
    """Clients of other languages send them, and pymilvus does not."""
    pairs = [[common_pb2.KeyValuePair(key="reranker", value=name)] for name in ("decay", "boost")]
    functions = [schema_pb2.FunctionSchema(params=params) for params in pairs]
    score = schema_pb2.FunctionScore(functions=functions)
    ranker = _ranker(milvus_pb2.HybridSearchRequest(function_score=score))
    assert ranker.strategy == "decay and boost"


# -- columns ---------------------------------------------------------------------------------------------


def column(name, *, valid=(), **kept):
    made = schema_pb2.FieldData(field_name=name, valid_data=valid)
    for path, values in kept.items():
        kind, within = path.split("__")
        part = getattr(made, kind)
        if isinstance(values, bytes):
            setattr(part, within, values)
        else:
            getattr(part, within).data.extend(values)
    return made


def test_rows_of_every_kind_of_column_are_picked():
    cells = [schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=[i])) for i in range(4)]
    arrays = column("tags", scalars__array_data=cells)
    take_rows(arrays, [3, 0])
    assert [list(cell.long_data.data) for cell in arrays.scalars.array_data.data] == [[3], [0]]
    words = column(
        "words", valid=[True, False, True, True], scalars__string_data=["a", "", "c", "d"]
    )
    take_rows(words, [1, 3, 1])
    assert (list(words.scalars.string_data.data), list(words.valid_data)) == (
        ["", "d", ""],
        [False, True, False],
    )
    halves = column("halves", vectors__float16_vector=bytes(range(16)))
    halves.vectors.dim = 2
    take_rows(halves, [2, 0])
    assert halves.vectors.float16_vector == bytes([8, 9, 10, 11, 0, 1, 2, 3])
    bits = column("bits", vectors__binary_vector=bytes(range(8)))
    bits.vectors.dim = 16
    take_rows(bits, [3])
    assert bits.vectors.binary_vector == bytes([6, 7])
    sparse = schema_pb2.FieldData(field_name="sparse", valid_data=[True, False, True])
    sparse.vectors.sparse_float_vector.contents.extend([b"first", b"third"])
    take_rows(sparse, [2, 1])
    assert list(sparse.vectors.sparse_float_vector.contents) == [b"third"]
    assert list(sparse.valid_data) == [True, False]
    dense = column("dense", valid=[False, True, True], vectors__float_vector=[1.0, 2.0, 3.0, 4.0])
    dense.vectors.dim = 2
    take_rows(dense, [2, 0])
    assert (list(dense.vectors.float_vector.data), list(dense.valid_data)) == (
        [3.0, 4.0],
        [True, False],
    )
    none = column("none", valid=[False, False])
    take_rows(none, [1])
    assert list(none.valid_data) == [False]
    part = column("part", scalars__long_data=[7, 8, 9])
    parts = schema_pb2.FieldData(field_name="parts", struct_arrays={"fields": [part]})
    take_rows(parts, [2, 1])
    assert list(parts.struct_arrays.fields[0].scalars.long_data.data) == [9, 8]


def test_answers_are_joined_with_all_that_hangs_on_their_rows():
    def answer(first, **more):
        results = schema_pb2.SearchResultData(
            num_queries=1, topks=[2], scores=[0.5, 0.25], recalls=[1.0], **more
        )
        results.ids.int_id.data.extend([first, first + 1])
        results.element_indices.data.extend([first, 0])
        results.group_by_field_values.add().CopyFrom(
            column("group", scalars__long_data=[first, first])
        )
        return milvus_pb2.SearchResults(results=results)

    columns = [
        column("halves", vectors__float16_vector=bytes([1, 2])),
        column("n", scalars__long_data=[1]),
    ]
    results = joined(
        [answer(1), answer(5, fields_data=columns), answer(8, fields_data=columns)]
    ).results
    assert list(results.ids.int_id.data) == [1, 2, 5, 6, 8, 9]
    assert list(results.element_indices.data) == [1, 0, 5, 0, 8, 0]
    assert list(results.group_by_field_values[0].scalars.long_data.data) == [1, 1, 5, 5, 8, 8]
    assert (results.num_queries, list(results.topks), list(results.recalls)) == (
        3,
        [2, 2, 2],
        [1.0] * 3,
    )
    assert results.fields_data[0].vectors.float16_vector == bytes([1, 2, 1, 2])
    assert list(results.fields_data[1].scalars.long_data.data) == [1, 1]
