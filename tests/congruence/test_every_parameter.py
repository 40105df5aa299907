"""Every parameter of every kind of search: corrected, passed through unchanged, or refused with a reason."""

import ast
import asyncio
import inspect
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pymilvus import (
    AnnSearchRequest,
    AsyncMilvusClient,
    DataType,
    Function,
    FunctionScore,
    FunctionType,
    MilvusClient,
    RRFRanker,
    WeightedRanker,
)
from pymilvus.client.grpc_handler import GrpcHandler
from pymilvus.client.iterator import QueryIterator, SearchIteratorV2
from pymilvus.client.prepare import Prepare
from pymilvus.client.search_aggregation import SearchAggregation, TopHits
from pymilvus.client.search_result import SearchResult
from pymilvus.exceptions import MilvusException
from pymilvus.function_chain import FunctionChain, FunctionChainStage, col, fn
from pymilvus.grpc_gen import schema_pb2

from milvus_hubness import (
    NNN,
    Beside,
    GloballyCorrected,
    MilvusStore,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    enable,
    migrate,
    plan_correction,
)
from tests.support.async_clients import opened
from tests.support.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

DIM, ITEMS, QUERIES, BANK, K, ALPHA = 14, 60, 3, 30, 6, 0.75
LOCATIONS = ["vector", "beside"]
STORED = LOCATIONS[:1]
"""Where the server ranks inner products of augmented form."""


_turn = threading.Lock()


class InTurn(MilvusStore):
    """Milvus Lite loses a race between two clients that change aliases."""

    def fence(self, collection, alias):
        with _turn:
            super().fence(collection, alias)

    def unfence(self, alias):
        with _turn:
            super().unfence(alias)


class World:
    """One plain collection of a metric, and the same rows with their biases at each location."""

    def __init__(self, backend, metric):
        rng = np.random.default_rng(23)
        self.backend, self.metric = backend, metric
        self.items, self.queries = vectors(rng, ITEMS, DIM), list(vectors(rng, QUERIES, DIM))
        self.bank = vectors(rng, BANK, DIM)
        self.plain, self.name = backend.client(), backend.name("plain")
        plain_collection(self.plain, self.name, self.items, metric)
        with ThreadPoolExecutor() as threads:
            self.corrected = dict(
                zip(LOCATIONS, threads.map(self._correct, LOCATIONS), strict=True)
            )
        self.client = backend.hubness_client()

    def _correct(self, location):
        bank, estimator, store = QueryBank(self.bank), NNN(K, ALPHA), InTurn(self.backend.client())
        if location == "vector":
            plan = plan_correction(store, self.name, Recipe(bank, estimator=estimator))
            return migrate(store, plan, no_writers=True).target
        name = self.backend.name(location)
        self.backend.made += [f"{name}__bias_a", f"{name}__bias_b"]
        plain_collection(self.backend.client(), name, self.items, self.metric)
        enable(store, plan_correction(store, name, Recipe(bank, estimator=estimator), Beside()))
        return name

    @property
    def far(self):
        """A bound that no row passes by."""
        return 1e6 if self.metric == "L2" else -1e6

    def search(self, location, **question):
        return self.client.search(self.corrected[location], data=self.queries, **question)

    def plain_search(self, **question):
        return self.plain.search(self.name, data=self.queries, **question)

    def scores(self, location, strength=1.0):
        mean_bias = self.client.hubness_state(self.corrected[location]).profile.mean_bias
        biases = nnn(self.bank, self.items, self.metric, K, ALPHA) - mean_bias
        raw = similarity(np.array(self.queries), self.items, self.metric)
        return as_distance(raw - strength * biases, self.metric)


@pytest.fixture(scope="module")
def worlds(shared_lite):
    """Made side by side: most of the time goes by in waiting for indexes."""
    with ThreadPoolExecutor() as threads:
        made = threads.map(lambda metric: World(shared_lite, metric), METRICS)
        return dict(zip(METRICS, made, strict=True))


@pytest.fixture(params=METRICS)
def world(worlds, request):
    return worlds[request.param]


def assert_alike(expected, got):
    for ours, theirs in zip(got, expected, strict=True):
        assert list(ours.ids) == list(theirs.ids)
        np.testing.assert_allclose(ours.distances, theirs.distances, rtol=1e-5, atol=4e-5)


def ranker(kind, **params):
    fields = [] if kind == "boost" else ["group"]
    return Function(
        name=kind, function_type=FunctionType.RERANK, input_field_names=fields, params=params
    )


DECAY = {"reranker": "decay", "function": "gauss", "origin": 2, "scale": 2, "decay": 0.5}
CHAIN = (
    FunctionChain(FunctionChainStage.L2_RERANK)
    .map(
        "$score", fn.num_combine(col("$score"), col("group"), mode="weighted", weights=[1.0, -0.1])
    )
    .sort(col("$score"), desc=True)
    .limit(5)
)
SCORERS = {
    "a boost ranker": {
        "ranker": ranker("boost", reranker="boost", filter="group == 3", weight=1.5)
    },
    "a decay ranker": {"ranker": ranker("decay", **DECAY)},
    "a score of functions": {"ranker": FunctionScore(ranker("decay", **DECAY))},
    "a function chain": {"function_chains": CHAIN},
}


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("scorer", SCORERS)
def test_rankers_give_what_they_give_on_the_plain_collection_or_are_refused(
    world, location, scorer
):
    question = {"limit": 5, **SCORERS[scorer]}
    if world.metric == "L2" and location in STORED:
        for strength in (0, 1):
            with pytest.raises(UnsupportedOperation, match="inner products"):
                world.search(location, strength=strength, **question)
        return
    expected = world.plain_search(**question)
    assert any(any(hits.distances) for hits in expected)
    assert_alike(expected, world.search(location, strength=0, **question))
    if location not in STORED:
        with pytest.raises(UnsupportedOperation, match="uncorrected scores"):
            world.search(location, **question)


@pytest.mark.parametrize("location", STORED)
def test_a_chain_computes_with_corrected_scores_where_these_are_stored(world, location):
    if world.metric == "L2":
        pytest.skip("refused")
    groups = np.arange(ITEMS) % 5
    results = world.search(location, function_chains=CHAIN, limit=ITEMS)
    for hits, scores in zip(results, world.scores(location) - 0.1 * groups, strict=True):
        assert list(hits.ids) == np.argsort(-scores)[:5].tolist()
        np.testing.assert_allclose(hits.distances, np.sort(scores)[::-1][:5], atol=4e-5)


@pytest.mark.parametrize("location", STORED)
def test_a_ranker_that_normalises_is_refused_where_the_server_has_another_metric(world, location):
    question = {"ranker": ranker("decay", **DECAY, norm_score=True), "limit": 5}
    if world.metric == "IP":
        assert_alike(world.plain_search(**question), world.search(location, strength=0, **question))
    else:
        with pytest.raises(UnsupportedOperation, match=r"norm_score|inner products"):
            world.search(location, strength=0, **question)


GROUPS = {"group_by_field": "group", "limit": 5, "output_fields": ["group"]}
ORDER = {"order_by_fields": [{"field": "group", "order": "desc"}], "limit": 5}


@pytest.mark.parametrize("location", LOCATIONS)
def test_groups_are_led_by_their_best_corrected_row_or_refused(world, location):
    assert_alike(world.plain_search(**GROUPS), world.search(location, strength=0, **GROUPS))
    if location not in STORED:
        for question in (GROUPS, {**GROUPS, "group_size": 2}, {"group_by_fields": ["group", "id"]}):
            with pytest.raises(UnsupportedOperation, match="group_by_field"):
                world.search(location, **question)
        return
    for hits, scores in zip(world.search(location, **GROUPS), world.scores(location), strict=True):
        order = np.argsort(scores if world.metric == "L2" else -scores)
        best = {number % 5: number for number in order[::-1].tolist()}
        assert list(hits.ids) == [number for number in order.tolist() if number in best.values()]


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_sorted_answer_is_refused_where_candidates_are_ranked_by_the_client(world, location):
    world.search(location, strength=0, **ORDER)
    if location in STORED:
        world.search(location, **ORDER)
        refused = [{"rerank": GloballyCorrected(20)}]
    else:
        refused = [{}, {"rerank": GloballyCorrected(20), "strength": 0}]
    for further in refused:
        with pytest.raises(UnsupportedOperation, match="order_by_fields"):
            world.search(location, **ORDER, **further)
        with pytest.raises(UnsupportedOperation, match="group_by_field"):
            world.search(location, **GROUPS, **further)


@pytest.mark.parametrize("location", LOCATIONS)
def test_an_iterator_is_refused_what_a_search_is(world, location):
    name, question = world.corrected[location], {"data": world.queries[:1], "limit": 5}
    expected = world.metric == "L2" or location not in STORED
    for scorer in SCORERS.values():
        if expected:
            with pytest.raises(UnsupportedOperation):
                world.client.search_iterator(name, **question, **scorer)
        else:
            world.client.search_iterator(name, **question, **scorer).next()


@pytest.mark.parametrize("location", LOCATIONS)
def test_futures_are_refused(world, location):
    with pytest.raises(UnsupportedOperation, match="_async"):
        world.search(location, _async=True)


BUCKETS = {"search_aggregation": SearchAggregation(["group"], 3, top_hits=TopHits(2)), "limit": 5}


@pytest.mark.parametrize("location", LOCATIONS)
def test_buckets_are_of_corrected_scores_or_refused(world, location):
    """Milvus Lite takes such a request, and answers without buckets."""
    if world.metric == "L2" and location in STORED:
        refused = {"inner products": {"strength": 0}}
    elif location in STORED:
        world.search(location, **BUCKETS, output_fields=["group"], round_decimal=2)
        refused = {
            "no room for raw scores": {"with_raw_score": True},
            "uncorrected": {"rerank": GloballyCorrected(20)},
        }
    else:
        world.search(location, strength=0, **BUCKETS)
        refused = {"uncorrected scores": {}}
    refused |= {"output field 'vector'": {"output_fields": ["vector"]}}
    refused |= {r"output field '\*'": {"output_fields": ["*"]}}
    for reason, further in refused.items():
        with pytest.raises(UnsupportedOperation, match=reason):
            world.search(location, **BUCKETS, **further)


def test_buckets_come_as_the_server_sent_them(world, monkeypatch):
    if world.metric == "L2":
        pytest.skip("refused")
    hit = schema_pb2.AggHit(int_pk=7, score=0.25)
    bucket = schema_pb2.AggBucket(count=3, hits=[hit])
    data = schema_pb2.SearchResultData(
        num_queries=1, topks=[0], agg_buckets=[bucket], agg_topks=[1]
    )
    sent = []

    def search(self, collection, data_, *args, **options):
        sent.append(options)
        return SearchResult(data)

    monkeypatch.setattr(MilvusClient, "search", search)
    name, asked = (
        world.corrected["vector"],
        {"round_decimal": 2, "output_fields": ["group"], **BUCKETS},
    )
    for _ in range(2):
        [[found]] = world.client.search(name, data=world.queries[:1], **asked).agg_buckets
        assert (found.count, found.hits[0].pk, found.hits[0].score) == (3, 7, 0.25)
    for options in sent:
        assert (options["search_aggregation"], options["round_decimal"]) == (
            BUCKETS["search_aggregation"],
            2,
        )


# -- the table ---------------------------------------------------------------------------------------------

CORRECTED, PASSED, INTERNAL = "corrected", "passed", "internal"
REFUSED_CANDIDATES = "uncorrected scores"
OUTCOMES = ("stored", "stored under L2", "candidates")
"""Where the augmented form is searched, where that is done under L2, and where candidates are ranked by the client:
beside the vectors, at any strength but 0, at which all pass there that is not refused to everyone."""
EVERYWHERE = {
    # The question and the answer are decoded; filters, partitions and the like are the server's.
    **dict.fromkeys(
        ("data", "limit", "output_fields", "search_params", "anns_field", "ids"), CORRECTED
    ),
    **dict.fromkeys(("offset", "round_decimal", "metric_type", "params"), CORRECTED),
    **dict.fromkeys(
        ("filter", "filter_params", "timeout", "partition_names", "highlighter"), PASSED
    ),
    **dict.fromkeys(
        ("consistency_level", "guarantee_timestamp", "cluster_id", "ignore_growing"), PASSED
    ),
    **dict.fromkeys(
        ("hints", "analyzer_name", "page_retain_order", "timezone", "time_fields"), PASSED
    ),
    **dict.fromkeys(
        ("group_size", "strict_group_size", "json_path", "json_type", "strict_cast"), PASSED
    ),
    **dict.fromkeys(("collection_id", "search_iter_batch_size", "search_iter_id"), PASSED),
    "search_iter_last_bound": PASSED,
    **dict.fromkeys(
        ("collection_name", "context", "schema", "expr_params", "kwargs", "self"), INTERNAL
    ),
    **dict.fromkeys(("_async", "_callback"), "AsyncHubnessClient"),
    "namespace": "which has none",
    "is_embedding_list": "one vector per row",
}
BY_LOCATION = {
    **dict.fromkeys(
        ("ranker", "function_chains", "search_aggregation"),
        (PASSED, "inner products", REFUSED_CANDIDATES),
    ),
    **dict.fromkeys(("group_by_field", "group_by_fields"), (PASSED, PASSED, REFUSED_CANDIDATES)),
    **dict.fromkeys(
        ("order_by_fields", "iterator", "search_iter_v2"), (PASSED, PASSED, REFUSED_CANDIDATES)
    ),
}
SEARCH = EVERYWHERE | BY_LOCATION
READ = {
    **dict.fromkeys(
        ("filter", "filter_params", "timeout", "partition_names", "limit", "offset"), PASSED
    ),
    **dict.fromkeys(
        ("consistency_level", "guarantee_timestamp", "cluster_id", "ignore_growing"), PASSED
    ),
    **dict.fromkeys(
        ("group_by_fields", "order_by", "order_by_fields", "timezone", "time_fields"), PASSED
    ),
    **dict.fromkeys(
        ("collection_id", "iterator", "reduce_stop_for_best", "strict_float32"), PASSED
    ),
    **dict.fromkeys(("query_iter_last_pk", "query_iter_last_element_offset", "namespace"), PASSED),
    **dict.fromkeys(("output_fields", "ids"), CORRECTED),
    **dict.fromkeys(
        ("collection_name", "context", "expr_params", "expr", "kwargs", "self"), INTERNAL
    ),
}
TABLE = {
    "search": SEARCH,
    "query": READ,
    "query_iterator": READ | {"batch_size": PASSED, "iterator_cp_file": PASSED},
    "search_iterator": SEARCH | {"batch_size": CORRECTED, "external_filter_func": CORRECTED},
    "hybrid_search": {
        **dict.fromkeys(
            ("reqs", "ranker", "limit", "output_fields", "offset", "round_decimal"), CORRECTED
        ),
        **dict.fromkeys(
            ("timeout", "partition_names", "consistency_level", "guarantee_timestamp"), PASSED
        ),
        **dict.fromkeys(
            ("cluster_id", "rank_group_scorer", "group_size", "strict_group_size"), PASSED
        ),
        **dict.fromkeys(("search_aggregation", "function_chains"), "not supported"),
        **dict.fromkeys(("_async", "_callback"), "AsyncHubnessClient"),
        "group_by_field": (PASSED, PASSED, "grouping a hybrid search"),
        "namespace": "which has none",
        **dict.fromkeys(("collection_name", "context", "schema", "kwargs", "self"), INTERNAL),
    },
}
"""By method. A parameter that pymilvus adds fails `test_every_parameter_is_classified`."""
READS_FROM = {
    "search": [
        (MilvusClient, "search"),
        (AsyncMilvusClient, "search"),
        (GrpcHandler, "_execute_search"),
        (Prepare, "search_requests_with_expr"),
    ],
    "query": [
        (MilvusClient, "query"),
        (AsyncMilvusClient, "query"),
        (GrpcHandler, "query"),
        (Prepare, "query_request"),
    ],
    "hybrid_search": [
        (MilvusClient, "hybrid_search"),
        (AsyncMilvusClient, "hybrid_search"),
        (GrpcHandler, "_execute_hybrid_search"),
        (Prepare, "hybrid_search_request_with_ranker"),
    ],
    "search_iterator": [(MilvusClient, "search_iterator"), (SearchIteratorV2, "__init__")],
    "query_iterator": [(MilvusClient, "query_iterator"), (QueryIterator, None)],
}
OPTIONS = {"kwargs", "param", "rpc_options", "_query_options"}
"""Names under which pymilvus passes further arguments on."""
OF_WIRE = {
    "use_default_consistency",
    "request",
    "handler",
    "expr",
    "expression",
    "cls",
    "rerank",
    "param",
}
RENAMED = {"expr_params": "filter_params"}


def words_of(node, tree, defined):
    """The strings that an expression may stand for."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    name = getattr(node, "id", "")
    for each in ast.walk(tree):
        if isinstance(each, ast.For) and getattr(each.target, "id", None) == name:
            return [
                word
                for one in getattr(each.iter, "elts", ())
                for word in words_of(one, tree, defined)
            ]
    return [defined[name]] if isinstance(defined.get(name), str) else []


def names_read(owner, method):
    """The parameters of a function, and the keys that it takes out of further arguments."""
    function = inspect.unwrap(getattr(owner, method)) if method else owner
    names = (
        set(inspect.signature(function).parameters) if method and method != "__init__" else set()
    )
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    keys = []
    for node in ast.walk(tree):
        taken = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "pop")
        if taken and is_options(node.func.value):
            keys.append(node.args[0])
        elif isinstance(node, ast.Compare) and is_options(node.comparators[0]):
            keys.append(node.left)
        elif (
            isinstance(node, ast.Subscript)
            and is_options(node.value)
            and isinstance(node.ctx, ast.Load)
        ):
            keys.append(node.slice)
    for key in keys:
        names.update(words_of(key, tree, vars(sys.modules[function.__module__])))
    return {RENAMED.get(name, name) for name in names} - OF_WIRE


def is_options(node):
    return getattr(node, "id", getattr(node, "attr", None)) in OPTIONS


@pytest.mark.parametrize("method", TABLE)
def test_every_parameter_is_classified(method):
    read = set().union(*(names_read(*place) for place in READS_FROM[method]))
    assert len(read) > 10
    assert read <= set(TABLE[method]), "classify it in the table, and show what it does"
    if not method.endswith("iterator"):
        gone = {name for name, how in TABLE[method].items() if name not in read and how != INTERNAL}
        assert gone <= {"_async", "_callback", "function_chains", "round_decimal"}


def outcome_of(method, name, metric, location, strength=1):
    """What the table says. Without a correction candidates are plain hits."""
    result = TABLE[method][name]
    if isinstance(result, str):
        return result
    if location in STORED:
        return result[1 if metric == "L2" else 0]
    return result[2] if strength else PASSED


TIME = {"timezone": "UTC", "time_fields": "year"}
EXAMPLES = {
    "data": lambda w: np.array(w.queries),
    "limit": 7,
    "output_fields": ["vector", "group", "note"],
    "search_params": {"params": {"nprobe": 4}},
    "metric_type": lambda w: {"search_params": {"metric_type": w.metric}},
    "params": lambda w: {"search_params": {"params": {"radius": w.far}}},
    "anns_field": "vector",
    "ids": [3, 4],
    "offset": 2,
    "round_decimal": 2,
    "filter": "group in [1, 3]",
    "filter_params": lambda _: {"filter": "group in [1, 3]", "filter_params": {"groups": [1, 3]}},
    "timeout": 30.0,
    "partition_names": ["_default"],
    "highlighter": None,
    "consistency_level": "Bounded",
    "guarantee_timestamp": 1,
    "cluster_id": "east",
    "ignore_growing": False,
    "hints": lambda w: {"search_params": {"hints": "iterative_filter"}},
    "analyzer_name": lambda w: {"search_params": {"analyzer_name": "standard"}},
    "page_retain_order": True,
    **TIME,
    "group_size": 2,
    "strict_group_size": True,
    "json_path": "/a",
    "json_type": DataType.INT64,
    "strict_cast": True,
    "collection_id": 5,
    "search_iter_batch_size": 5,
    "search_iter_id": "token",
    "search_iter_last_bound": 0.5,
    "_async": True,
    "_callback": print,
    "namespace": "tenant",
    "is_embedding_list": True,
    "ranker": SCORERS["a boost ranker"]["ranker"],
    "function_chains": CHAIN,
    "search_aggregation": BUCKETS["search_aggregation"],
    "group_by_field": "group",
    "group_by_fields": ["group"],
    "order_by_fields": ORDER["order_by_fields"],
    "iterator": True,
    "search_iter_v2": True,
}
UNSHOWN = {
    "ids",
    "search_aggregation",
    "group_by_fields",
    "order_by_fields",
    "iterator",
    "search_iter_v2",
}
"""Of these Milvus Lite takes no notice, or, of ids, has none: what is sent is shown, and above what comes."""
SCORES_CHANGE = {"ranker", "function_chains"}


def question_with(world, name):
    value = (
        EXAMPLES[name](world)
        if callable(EXAMPLES[name]) and name != "_callback"
        else EXAMPLES[name]
    )
    asked = value if isinstance(value, dict) and name not in ("search_params",) else {name: value}
    return {"limit": 5, **({} if name == "ids" else {"data": world.queries}), **asked}


@pytest.fixture
def sent(monkeypatch):
    """The arguments of pymilvus's own searches, by name."""
    own, calls = MilvusClient.search, []

    def search(self, *args, **options):
        bound = inspect.signature(own).bind(self, *args, **options).arguments
        calls.append({**bound, **bound.pop("kwargs", {})})
        return own(self, *args, **options)

    monkeypatch.setattr(MilvusClient, "search", search)
    return calls


CASES = [
    (metric, location, name)
    for name, how in SEARCH.items()
    for metric in METRICS
    for location in LOCATIONS
    # What is passed through is so whatever the metric, by one piece of code for either kind of location.
    if how != INTERNAL and (how != PASSED or (metric == "IP" and location in ("vector", "beside")))
]


@pytest.mark.parametrize(("metric", "location", "name"), CASES)
def test_every_parameter_of_search_does_what_the_table_says(worlds, metric, location, name, sent):
    world = worlds[metric]
    asked = question_with(world, name)
    for strength in (1, 0):
        how = outcome_of("search", name, world.metric, location, strength)
        if how not in (CORRECTED, PASSED):
            with pytest.raises(UnsupportedOperation, match=how):
                world.client.search(world.corrected[location], strength=strength, **asked)
            continue
        found = world.client.search(world.corrected[location], strength=strength, **asked)
        [request] = [call for call in sent if call["self"] is world.client][-1:]
        if how == PASSED:
            for passed in set(asked) - {"data", "limit", "search_params"}:
                assert request.get(passed) == asked[passed]
        if strength == 0 and name not in UNSHOWN:
            expected = world.plain.search(world.name, **asked)
            assert_alike(expected, found)
            assert [[set(hit["entity"]) for hit in hits] for hits in found] == [
                [set(hit["entity"]) for hit in hits] for hits in expected
            ]
        elif name not in SCORES_CHANGE | {"ids"}:
            for hits, scores in zip(found, world.scores(location, strength), strict=True):
                np.testing.assert_allclose(hits.distances, scores[hits.ids], atol=6e-3)


READ_EXAMPLES = {
    **{name: EXAMPLES[name] for name in set(READ) & set(EXAMPLES)},
    "limit": 7,
    "ids": [3, 4],
    "order_by": "group",
    "group_by_fields": ["group"],
    "reduce_stop_for_best": "True",
    "strict_float32": True,
    "query_iter_last_pk": 3,
    "query_iter_last_element_offset": 0,
}


@pytest.mark.parametrize("location", LOCATIONS)
def test_every_parameter_of_query_does_what_the_table_says(world, location, monkeypatch):
    """In one go: what the plain collection answers, the corrected one does."""
    own, calls = MilvusClient.query, []

    def query(self, *args, **options):
        calls.append(options)
        return own(self, *args, **options)

    monkeypatch.setattr(MilvusClient, "query", query)
    for name in (name for name, how in READ.items() if how != INTERNAL):
        value = READ_EXAMPLES[name](world) if callable(READ_EXAMPLES[name]) else READ_EXAMPLES[name]
        asked = value if name == "filter_params" else {name: value}
        asked = {"output_fields": ["vector", "group"], **asked}
        if name not in ("ids", "filter", "filter_params"):
            asked["filter"] = "id < 20"
        try:
            expected = world.plain.query(world.name, **asked)
        except MilvusException as error:
            with pytest.raises(type(error)):
                world.client.query(world.corrected[location], **asked)
            continue
        found = world.client.query(world.corrected[location], **asked)
        assert [{**row, "vector": None} for row in found] == [
            {**row, "vector": None} for row in expected
        ], name
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours["vector"], theirs["vector"], rtol=3e-7)
            assert type(ours["vector"][0]) is type(theirs["vector"][0]), name
        if TABLE["query"][name] == PASSED and name in calls[-1]:
            assert calls[-1][name] == asked[name]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("method", ["search_iterator", "query_iterator"])
def test_every_parameter_of_an_iterator_does_what_the_table_says(
    worlds, location, method, monkeypatch
):
    """What comes page by page is in test_iterators."""
    world, calls = worlds["IP"], []
    monkeypatch.setattr(MilvusClient, method, lambda self, *args, **options: calls.append(options))
    for name in (name for name, how in TABLE[method].items() if how != INTERNAL):
        if name == "ids" or (method == "search_iterator" and name in ("metric_type", "params")):
            continue
        examples = EXAMPLES if method == "search_iterator" else READ_EXAMPLES
        further = {
            "batch_size": 9,
            "external_filter_func": print,
            "iterator_cp_file": "/tmp/cursor",
        }
        value, in_params = {**examples, **further}[name], name in ("hints", "analyzer_name")
        asked = dict(value(world)) if in_params or name == "filter_params" else {name: value}
        if method == "search_iterator":
            asked |= {"data": world.queries[:1], "strength": 0}
        how = outcome_of(method, name, "IP", location, 0)
        if how not in (CORRECTED, PASSED):
            with pytest.raises(UnsupportedOperation, match=how):
                getattr(world.client, method)(world.corrected[location], **asked)
            continue
        getattr(world.client, method)(world.corrected[location], **asked)
        if how == PASSED and not in_params:
            assert calls[-1][name] == asked[name]
    if method == "search_iterator" and location not in STORED:
        with pytest.raises(UnsupportedOperation, match="cannot follow the corrected order"):
            world.client.search_iterator(world.corrected[location], data=world.queries[:1])


HYBRID_EXAMPLES = {
    **{name: EXAMPLES[name] for name in set(TABLE["hybrid_search"]) & set(EXAMPLES)},
    "ranker": WeightedRanker(0.4, 0.6),
    "output_fields": ["vector", "group"],
    "rank_group_scorer": "max",
}


@pytest.mark.parametrize("location", LOCATIONS)
def test_every_parameter_of_a_hybrid_search_does_what_the_table_says(
    world, location, sent, monkeypatch
):
    own, calls = MilvusClient.hybrid_search, []

    def hybrid_search(self, *args, **options):
        calls.append(options)
        return own(self, *args, **options)

    monkeypatch.setattr(MilvusClient, "hybrid_search", hybrid_search)
    requests = [AnnSearchRequest(world.queries, "vector", {}, limit) for limit in (8, 6)]
    for name in (name for name, how in TABLE["hybrid_search"].items() if how != INTERNAL):
        if name == "reqs":
            continue
        asked = {"ranker": RRFRanker(), "limit": 5, name: HYBRID_EXAMPLES[name]}
        how = outcome_of("hybrid_search", name, world.metric, location)
        if how not in (CORRECTED, PASSED):
            with pytest.raises((UnsupportedOperation, MilvusException), match=how):
                world.client.hybrid_search(world.corrected[location], requests, **asked)
            continue
        for strength in (1, 0):
            sent.clear()
            calls.clear()
            found = world.client.hybrid_search(
                world.corrected[location], requests, strength=strength, **asked
            )
            if how == PASSED:
                assert all(call[name] == asked[name] for call in [*sent, *calls])
            if strength == 0:
                assert_alike(world.plain.hybrid_search(world.name, requests, **asked), found)


def test_clients_for_asyncio_decide_alike(worlds, shared_lite):
    def questions():
        for metric, location in (
            ("IP", "vector"),
            ("L2", "vector"),
            ("L2", "beside"),
        ):
            for name, how in SEARCH.items():
                if how != INTERNAL and name != "highlighter":
                    yield worlds[metric].corrected[location], question_with(worlds[metric], name)

    async def ask():
        async with opened(shared_lite) as client:
            for collection, asked in questions():
                try:
                    outcome = [list(hits.ids) for hits in await client.search(collection, **asked)]
                except UnsupportedOperation as error:
                    outcome = str(error)
                answers.append(outcome)

    answers = []
    asyncio.run(ask())
    for (collection, asked), answer in zip(questions(), answers, strict=True):
        if isinstance(answer, list):
            assert [
                list(hits.ids) for hits in worlds["IP"].client.search(collection, **asked)
            ] == answer
        else:
            with pytest.raises(UnsupportedOperation) as refused:
                worlds["IP"].client.search(collection, **asked)
            assert str(refused.value) == answer
    assert {type(answer) for answer in answers} == {list, str}
