"""HubnessVectorStore against MilvusClient, the definition of the score, and LlamaIndex's
filters."""

import asyncio
import itertools

import numpy as np
import pytest
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from pymilvus import MilvusClient

from llama_index_milvus_hubness import HubnessVectorStore
from milvus_hubness import (
    NNN,
    CorrectionConfig,
    DimensionMismatch,
    HubnessClient,
    QueryBank,
    Recipe,
)

DIM, COUNT, K, ALPHA = 8, 60, 8, 0.75
RNG = np.random.default_rng(0)
SHARED = RNG.normal(size=DIM)


def vectors(count):
    return (RNG.normal(size=(count, DIM)) + np.outer(RNG.gamma(1.0, 0.6, count), SHARED)).astype(
        np.float32
    )


ITEMS, BANK, [QUERY] = vectors(COUNT), vectors(40), vectors(1)
_numbers = itertools.count()


def node(i, **changes):
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc'{i % 3}")}
    result = {
        "id_": f"n{i}",
        "text": f"text {i}",
        "metadata": {"group": i % 4},
        "relationships": source,
    }
    return TextNode(**{**result, "embedding": ITEMS[i % COUNT].tolist(), **changes})


def empty(uri, metric="IP", corrected=True, **options):
    hubness = (
        CorrectionConfig(Recipe(QueryBank(BANK), estimator=NNN(K, ALPHA))) if corrected else None
    )
    at = {"uri": uri, "metric": metric, "index_type": "FLAT", "consistency_level": "Strong"}
    return HubnessVectorStore(f"nodes_{next(_numbers)}", hubness=hubness, **at, **options)


@pytest.fixture
def store(uri):
    store = empty(uri)
    store.add([node(i) for i in range(COUNT)])
    return store


def vector_query(top=10, **options):
    return VectorStoreQuery(query_embedding=QUERY.tolist(), similarity_top_k=top, **options)


def scores(strength=1.0):
    return ITEMS @ QUERY - strength * ALPHA * np.sort(BANK @ ITEMS.T, axis=0)[-K:].mean(axis=0)


def order(among=range(COUNT)):
    return [f"n{i}" for i in np.argsort(-scores()) if i in among]


def both(store, *queries):
    """Return the results of each query, by the sync and the async method."""

    async def later():
        return [await store.aquery(query) for query in queries]

    return [store.query(query) for query in queries], asyncio.run(later())


def test_similarities_are_the_corrected_scores(store):
    among = [i for i in range(COUNT) if i % 3 == 1]
    for all_of_it, some, named in both(
        store,
        vector_query(COUNT),
        vector_query(5, doc_ids=["doc'1"]),
        vector_query(3, node_ids=["n4", "n5"]),
    ):
        assert all_of_it.ids == order()
        assert all_of_it.similarities == pytest.approx(sorted(scores(), reverse=True), abs=1e-4)
        assert some.ids == order(among)[:5]
        assert named.ids == order([4, 5])
        assert {item.text for item in named.nodes} == {"text 4", "text 5"}
        assert {item.ref_doc_id for item in some.nodes} == {"doc'1"}


@pytest.mark.parametrize("metric", ["IP", "COSINE", "L2"])
def test_scores_at_strength_zero_are_those_of_milvus(uri, metric):
    corrected, plain = empty(uri, metric, strength=0.0), empty(uri, metric, corrected=False)
    for store in (corrected, plain):
        store.add([node(i) for i in range(COUNT)])
    assert corrected.client.hubness_state(corrected.collection_name) is not None
    assert plain.client.hubness_state(plain.collection_name) is None
    [hits] = MilvusClient(uri).search(plain.collection_name, [QUERY.tolist()], limit=10)
    sign = -1 if metric == "L2" else 1
    for [result] in both(corrected, vector_query()) + both(plain, vector_query()):
        assert result.ids == [hit["id"] for hit in hits]
        assert result.similarities == pytest.approx(
            [sign * hit["distance"] for hit in hits], abs=1e-4
        )


def test_mmr_picks_by_corrected_score_and_distance_from_those_picked(store):
    mmr = VectorStoreQueryMode.MMR
    units = ITEMS / np.linalg.norm(ITEMS, axis=1, keepdims=True)
    pool = [int(name[1:]) for name in order()[:20]]
    expected = pool[:1]
    while len(expected) < 5:
        worth = {i: 0.3 * scores()[i] - 0.7 * (units[i] @ units[expected].T).max() for i in pool}
        expected.append(max((i for i in pool if i not in expected), key=worth.get))
    for even, diverse in both(
        store,
        vector_query(5, mode=mmr, mmr_threshold=1.0),
        vector_query(5, mode=mmr, mmr_threshold=0.3),
    ):
        assert even.ids == order()[:5]
        assert diverse.ids == [f"n{i}" for i in expected] != even.ids
        assert diverse.similarities == pytest.approx(scores()[expected], abs=1e-4)


METADATA = [
    {"n": 1, "s": "a'b\"c", "tags": ["x", "y"], "b c": 5},
    {"n": 2.5, "s": "Hello World", "tags": []},
    {"s": "50% o\\f_f", "z": None, "n": 3},
    {"tags": ["x"]},
]
OPERATOR = FilterOperator
FILTERS = [
    ("n", OPERATOR.EQ, 1, {0}),
    ("n", OPERATOR.NE, 1, {1, 2, 3}),
    ("n", OPERATOR.GT, 1, {1, 2}),
    ("n", OPERATOR.GTE, 2.5, {1, 2}),
    ("n", OPERATOR.LT, 2.5, {0}),
    ("n", OPERATOR.LTE, 2.5, {0, 1}),
    ("n", OPERATOR.IN, [1, 3], {0, 2}),
    ("n", OPERATOR.NIN, [1, 3], {1, 3}),
    ("s", OPERATOR.IN, ["Hello World", "x"], {1}),
    ("tags", OPERATOR.CONTAINS, "x", {0, 3}),
    ("tags", OPERATOR.ANY, ["y", "q"], {0}),
    ("tags", OPERATOR.ALL, ["x", "y"], {0}),
    ("tags", OPERATOR.IS_EMPTY, None, {1, 2}),
    ("z", OPERATOR.IS_EMPTY, None, {0, 1, 2, 3}),
    ("s", OPERATOR.EQ, "a'b\"c", {0}),
    ("s", OPERATOR.EQ, '" or id != "', set()),
    ("s", OPERATOR.TEXT_MATCH, "% o\\f_", {2}),
    ("s", OPERATOR.TEXT_MATCH, "_", {2}),
    ("s", OPERATOR.TEXT_MATCH, "hello", set()),
    ("s", OPERATOR.TEXT_MATCH_INSENSITIVE, "hELLO w", {1}),
    ("b c", OPERATOR.EQ, 5, {0}),
]


def is_(key, operator, value):
    return MetadataFilter(key=key, operator=operator, value=value)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    store = empty(str(tmp_path_factory.mktemp("filters") / "filters.db"))
    store.add([node(i, metadata=result) for i, result in enumerate(METADATA)])
    return store


def matching(store, filters):
    result = {int(item.node_id[1:]) for item in store.get_nodes(filters=filters)}
    assert {int(name[1:]) for name in store.query(vector_query(filters=filters)).ids} == result
    return result


@pytest.mark.parametrize(("key", "operator", "value", "expected"), FILTERS, ids=str)
def test_filters(described, key, operator, value, expected):
    one = is_(key, operator, value)
    assert matching(described, MetadataFilters(filters=[one])) == expected
    assert (
        matching(described, MetadataFilters(filters=[one], condition="not"))
        == {0, 1, 2, 3} - expected
    )


def test_nested_filters(described):
    small, world = is_("n", OPERATOR.LT, 2), is_("s", OPERATOR.TEXT_MATCH, "World")
    either = MetadataFilters(filters=[small, world], condition="or")
    tagged = is_("tags", OPERATOR.CONTAINS, "x")
    assert matching(described, either) == {0, 1}
    assert matching(described, MetadataFilters(filters=[either, tagged])) == {0}
    neither = MetadataFilters(filters=[MetadataFilters(filters=[either, tagged])], condition="not")
    assert matching(described, neither) == {1, 2, 3}
    assert matching(described, MetadataFilters(filters=[])) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("operator", "value"),
    [
        (OPERATOR.IN, "x"),
        (OPERATOR.EQ, ["x"]),
        (OPERATOR.TEXT_MATCH, 5),
        (OPERATOR.GT, float("nan")),
    ],
)
def test_filters_that_make_no_sense_are_refused(described, operator, value):
    with pytest.raises(ValueError, match=r"needs|cannot filter"):
        described.get_nodes(filters=MetadataFilters(filters=[is_("n", operator, value)]))


def test_nodes_come_back_as_they_were_and_are_replaced(described):
    for i, metadata in enumerate(METADATA):
        [read] = described.get_nodes([f"n{i}"])
        assert read == node(i, metadata=metadata, embedding=None)
        assert [read] == asyncio.run(described.aget_nodes([f"n{i}"]))


def test_nodes_are_deleted(store):
    def left():
        return {int(item.node_id[1:]) for item in store.get_nodes()}

    store.delete("doc'0")
    assert left() == {i for i in range(COUNT) if i % 3}
    asyncio.run(store.adelete("doc'1"))
    assert left() == {i for i in range(COUNT) if i % 3 == 2}
    store.delete_nodes(["n2", "n5"])
    group = MetadataFilters(filters=[is_("group", OPERATOR.EQ, 0)])
    asyncio.run(store.adelete_nodes(filters=group))
    assert left() == {i for i in range(COUNT) if i % 3 == 2 and i not in (2, 5) and i % 4}
    with pytest.raises(ValueError, match="clear"):
        store.delete_nodes()
    before = left()
    store.delete_nodes([])
    assert left() == before
    assert store.get_nodes([]) == []
    store.clear()
    assert left() == set()
    assert asyncio.run(store.async_add([node(1), node(2)])) == ["n1", "n2"]
    store.add([node(1, text="another")])
    assert sorted(item.text for item in store.get_nodes()) == ["another", "text 2"]
    assert store.query(vector_query()).ids == order([1, 2])
    asyncio.run(store.aclear())
    assert left() == set()


def test_embeddings_of_another_width_are_refused_and_nothing_is_written(uri):
    store = empty(uri)
    odd = node(1, embedding=[1.0] * 5)
    with pytest.raises(DimensionMismatch, match=r"'n1' has 5 numbers, .* needs 8"):
        store.add([node(0), odd])
    assert not store.client.has_collection(store.collection_name)
    assert store.query(vector_query()).ids == store.get_nodes() == []
    store.add([node(0)])
    with pytest.raises(DimensionMismatch, match="'n1' has 5 numbers"):
        asyncio.run(store.async_add([odd]))
    with pytest.raises(ValueError, match="no embedding"):
        store.add([node(2, embedding=None)])
    with pytest.raises(ValueError, match="hybrid"):
        store.query(vector_query(mode=VectorStoreQueryMode.HYBRID))
    assert [item.node_id for item in store.get_nodes()] == ["n0"]


def test_an_index_over_it(uri):
    store = empty(uri, "COSINE")
    assert type(store.client) is HubnessClient
    model = MockEmbedding(embed_dim=DIM)
    context = StorageContext.from_defaults(vector_store=store)
    bare = [TextNode(text=f"text {i}", metadata={"n": i}) for i in range(6)]
    index = VectorStoreIndex(bare, storage_context=context, embed_model=model)
    filters = MetadataFilters(filters=[is_("n", OPERATOR.GTE, 4)])
    retriever = index.as_retriever(similarity_top_k=4, filters=filters)
    assert sorted(item.text for item in retriever.retrieve("anything")) == ["text 4", "text 5"]
    result = asyncio.run(retriever.aretrieve("anything"))
    assert sorted(item.text for item in result) == ["text 4", "text 5"]
