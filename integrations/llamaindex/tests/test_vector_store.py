"""HubnessVectorStore against MilvusClient, the definition of the score, and LlamaIndex's filters."""

import asyncio
import itertools

import numpy as np
import pytest
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from pymilvus import MilvusClient

from llama_index_milvus_hubness import HubnessVectorStore
from milvus_hubness import NNN, CorrectionConfig, DimensionMismatch, HubnessClient, QueryBank

DIM, COUNT, K, ALPHA = 8, 60, 8, 0.75
RNG = np.random.default_rng(0)
SHARED = RNG.normal(size=DIM)


def vectors(count):
    return (RNG.normal(size=(count, DIM)) + np.outer(RNG.gamma(1.0, 0.6, count), SHARED)).astype(np.float32)


ITEMS, BANK, [QUERY] = vectors(COUNT), vectors(40), vectors(1)
_numbers = itertools.count()


def node(i, **changes):
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc'{i % 3}")}
    result = {"id_": f"n{i}", "text": f"text {i}", "metadata": {"group": i % 4}, "relationships": source}
    return TextNode(**{**result, "embedding": ITEMS[i % COUNT].tolist(), **changes})


def empty(uri, metric="IP", corrected=True, **options):
    hubness = CorrectionConfig(QueryBank(BANK), NNN(K, ALPHA)) if corrected else None
    at = {"uri": uri, "metric": metric, "index_type": "FLAT", "consistency_level": "Strong"}
    return HubnessVectorStore(f"nodes_{next(_numbers)}", hubness=hubness, **at, **options)


@pytest.fixture
def store(uri):
    store = empty(uri)
    store.add([node(i) for i in range(COUNT)])
    return store


def asked(top=10, **options):
    return VectorStoreQuery(query_embedding=QUERY.tolist(), similarity_top_k=top, **options)


def scores(strength=1.0):
    return ITEMS @ QUERY - strength * ALPHA * np.sort(BANK @ ITEMS.T, axis=0)[-K:].mean(axis=0)


def order(among=range(COUNT)):
    return [f"n{i}" for i in np.argsort(-scores()) if i in among]


def ways(store, *queries):
    """What each query finds, asked in turn and by asyncio."""

    async def later():
        return [await store.aquery(query) for query in queries]

    return [store.query(query) for query in queries], asyncio.run(later())


def test_similarities_are_the_corrected_scores(store):
    among = [i for i in range(COUNT) if i % 3 == 1]
    for all_of_it, some, named in ways(
        store, asked(COUNT), asked(5, doc_ids=["doc'1"]), asked(3, node_ids=["n4", "n5"])
    ):
        assert all_of_it.ids == order()
        assert all_of_it.similarities == pytest.approx(sorted(scores(), reverse=True), abs=1e-4)
        assert some.ids == order(among)[:5]
        assert named.ids == order([4, 5])
        assert {each.text for each in named.nodes} == {"text 4", "text 5"}
        assert {each.ref_doc_id for each in some.nodes} == {"doc'1"}


@pytest.mark.parametrize("metric", ["IP", "COSINE", "L2"])
def test_scores_at_strength_zero_are_those_of_milvus(uri, metric):
    corrected, plain = empty(uri, metric, strength=0.0), empty(uri, metric, corrected=False)
    for each in (corrected, plain):
        each.add([node(i) for i in range(COUNT)])
    assert corrected.client.hubness_state(corrected.collection_name) is not None
    assert plain.client.hubness_state(plain.collection_name) is None
    [hits] = MilvusClient(uri).search(plain.collection_name, [QUERY.tolist()], limit=10)
    sign = -1 if metric == "L2" else 1
    for [found] in ways(corrected, asked()) + ways(plain, asked()):
        assert found.ids == [hit["id"] for hit in hits]
        assert found.similarities == pytest.approx([sign * hit["distance"] for hit in hits], abs=1e-4)


def test_mmr_picks_by_corrected_score_and_distance_from_those_picked(store):
    mmr = VectorStoreQueryMode.MMR
    units = ITEMS / np.linalg.norm(ITEMS, axis=1, keepdims=True)
    pool = [int(name[1:]) for name in order()[:20]]
    wanted = pool[:1]
    while len(wanted) < 5:
        worth = {i: 0.3 * scores()[i] - 0.7 * (units[i] @ units[wanted].T).max() for i in pool}
        wanted.append(max((i for i in pool if i not in wanted), key=worth.get))
    for even, diverse in ways(store, asked(5, mode=mmr, mmr_threshold=1.0), asked(5, mode=mmr, mmr_threshold=0.3)):
        assert even.ids == order()[:5]
        assert diverse.ids == [f"n{i}" for i in wanted] != even.ids
        assert diverse.similarities == pytest.approx(scores()[wanted], abs=1e-4)


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
    found = {int(each.node_id[1:]) for each in store.get_nodes(filters=filters)}
    assert {int(name[1:]) for name in store.query(asked(filters=filters)).ids} == found
    return found


@pytest.mark.parametrize(("key", "operator", "value", "wanted"), FILTERS, ids=str)
def test_filters(described, key, operator, value, wanted):
    one = is_(key, operator, value)
    assert matching(described, MetadataFilters(filters=[one])) == wanted
    assert matching(described, MetadataFilters(filters=[one], condition="not")) == {0, 1, 2, 3} - wanted


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
    [(OPERATOR.IN, "x"), (OPERATOR.EQ, ["x"]), (OPERATOR.TEXT_MATCH, 5), (OPERATOR.GT, float("nan"))],
)
def test_filters_that_make_no_sense_are_refused(described, operator, value):
    with pytest.raises(ValueError, match=r"takes|cannot filter"):
        described.get_nodes(filters=MetadataFilters(filters=[is_("n", operator, value)]))


def test_nodes_come_back_as_they_were_and_are_replaced(described):
    for i, told in enumerate(METADATA):
        [revert] = described.get_nodes([f"n{i}"])
        assert revert == node(i, metadata=told, embedding=None)
        assert [revert] == asyncio.run(described.aget_nodes([f"n{i}"]))


def test_nodes_are_deleted(store):
    def left():
        return {int(each.node_id[1:]) for each in store.get_nodes()}

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
    assert sorted(each.text for each in store.get_nodes()) == ["another", "text 2"]
    assert store.query(asked()).ids == order([1, 2])
    asyncio.run(store.aclear())
    assert left() == set()


def test_embeddings_of_another_width_are_refused_and_nothing_is_written(uri):
    store = empty(uri)
    odd = node(1, embedding=[1.0] * 5)
    with pytest.raises(DimensionMismatch, match=r"'n1' has 5 numbers, .* takes 8"):
        store.add([node(0), odd])
    assert not store.client.has_collection(store.collection_name)
    assert store.query(asked()).ids == store.get_nodes() == []
    store.add([node(0)])
    with pytest.raises(DimensionMismatch, match="'n1' has 5 numbers"):
        asyncio.run(store.async_add([odd]))
    with pytest.raises(ValueError, match="no embedding"):
        store.add([node(2, embedding=None)])
    with pytest.raises(ValueError, match="hybrid"):
        store.query(asked(mode=VectorStoreQueryMode.HYBRID))
    assert [each.node_id for each in store.get_nodes()] == ["n0"]


def test_an_index_over_it(uri):
    store = empty(uri, "COSINE")
    assert type(store.client) is HubnessClient
    model = MockEmbedding(embed_dim=DIM)
    context = StorageContext.from_defaults(vector_store=store)
    bare = [TextNode(text=f"text {i}", metadata={"n": i}) for i in range(6)]
    index = VectorStoreIndex(bare, storage_context=context, embed_model=model)
    filters = MetadataFilters(filters=[is_("n", OPERATOR.GTE, 4)])
    retriever = index.as_retriever(similarity_top_k=4, filters=filters)
    assert sorted(each.text for each in retriever.retrieve("anything")) == ["text 4", "text 5"]
    found = asyncio.run(retriever.aretrieve("anything"))
    assert sorted(each.text for each in found) == ["text 4", "text 5"]
