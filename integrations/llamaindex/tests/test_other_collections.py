"""Collections that HubnessVectorStore did not create: those of LlamaIndex's MilvusVectorStore are
read and written in their form, others are refused before anything is written."""

import asyncio
import itertools

import numpy as np
import pytest
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from pymilvus import DataType, MilvusClient

from llama_index_milvus_hubness import HubnessVectorStore
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, connect, migrate, plan_correction

DIM = 8
RNG = np.random.default_rng(0)
ITEMS = RNG.normal(size=(12, DIM)).astype(np.float32)
BANK = RNG.normal(size=(40, DIM)).astype(np.float32)
QUERY = RNG.normal(size=DIM).astype(np.float32)
METADATA = [
    {"n": 1, "s": "a'b\"c", "tags": ["x", "y"], "b c": 5},
    {"n": 2.5, "s": "Hello World", "tags": [], "z": 1},
    {"s": "under_score", "z": None, "n": 3},
    {"tags": ["x"]},
]
_numbers = itertools.count()


def node(i, **changes):
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc{i % 3}")}
    options = {"id_": f"n{i}", "text": f"text {i}", "embedding": ITEMS[i].tolist()}
    metadata = METADATA[i % len(METADATA)]
    return TextNode(**{**options, "metadata": metadata, "relationships": source, **changes})


def milvus_vector_store(uri, form, nodes):
    """Create a collection and fill it as llama-index-vector-stores-milvus does; return its name.

    form: "1.2.0", "1.2.0 with scalars" and other names, or "0.1", which declares the key and the
    vector only.
    """
    client = MilvusClient(uri)
    name = f"theirs_{next(_numbers)}"
    vector = "dense" if form == "1.2.0 with scalars" else "embedding"
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=65_535)
    if form != "0.1":
        schema.add_field("doc_id", DataType.VARCHAR, max_length=65_535)
        schema.add_field("text", DataType.VARCHAR, max_length=65_535)
    if form == "1.2.0 with scalars":
        schema.add_field("year", DataType.INT64)
    schema.add_field(vector, DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params()
    index.add_index(vector, index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    rows = [
        {
            **node_to_metadata_dict(item, remove_text=True, text_field="text"),
            "text": item.text,
            "id": item.node_id,
            vector: item.embedding,
        }
        for item in nodes
    ]
    client.insert(name, rows)
    return name


def opened(uri, name):
    return HubnessVectorStore(name, uri=uri, state_ttl=0.0)


def query(**options):
    return VectorStoreQuery(query_embedding=QUERY.tolist(), similarity_top_k=12, **options)


def is_(key, operator, value):
    one = MetadataFilter(key=key, operator=operator, value=value)
    return MetadataFilters(filters=[one])


@pytest.mark.parametrize("form", ["1.2.0", "0.1"])
def test_a_collection_of_milvus_vector_store_is_read_and_written_as_it_is(uri, form):
    nodes = [node(i) for i in range(10)]
    name = milvus_vector_store(uri, form, nodes)
    store = opened(uri, name)
    assert sorted(store.get_nodes(), key=lambda item: int(item.node_id[1:])) == [
        item.model_copy(update={"embedding": None}) for item in nodes
    ]
    order = [f"n{i}" for i in np.argsort(-(ITEMS[:10] @ QUERY))]
    assert store.query(query()).ids == asyncio.run(opened(uri, name).aquery(query())).ids == order
    assert sorted(store.query(query(doc_ids=["doc1"])).ids) == ["n1", "n4", "n7"]

    store.add([node(10), node(1, text="another")])
    rows = MilvusClient(uri).query(name, ids=["n1", "n10"], output_fields=["*"])
    for row, item in zip(sorted(rows, key=lambda row: row["id"]), (1, 10), strict=True):
        written = node(item, text="another" if item == 1 else "text 10")
        expected = node_to_metadata_dict(written, remove_text=True, text_field="text")
        assert {key: row.get(key) for key in expected} == expected
        assert row["text"] == written.text
    store.delete("doc1")
    asyncio.run(store.adelete_nodes(["n0"]))
    assert {item.node_id for item in store.get_nodes()} == {"n2", "n3", "n5", "n6", "n8", "n9"}


def test_its_migrated_copy_is_ranked_by_the_corrected_score(uri):
    name = milvus_vector_store(uri, "1.2.0", [node(i) for i in range(10)])
    database = MilvusStore(connect(uri))
    plan = plan_correction(database, name, Recipe(QueryBank(BANK), estimator=NNN(k=8, alpha=0.75)))
    store = opened(uri, migrate(database, plan).target)
    store.add([node(10)])
    top = np.sort(BANK @ ITEMS[:11].T, axis=0)[-8:].mean(axis=0)
    corrected = ITEMS[:11] @ QUERY - 0.75 * top
    result = store.query(query())
    assert result.ids == [f"n{i}" for i in np.argsort(-corrected)]
    assert result.ids != [f"n{i}" for i in np.argsort(-(ITEMS[:11] @ QUERY))]


OPERATOR = FilterOperator
FILTERS = [
    ("n", OPERATOR.EQ, 1, {0}),
    ("n", OPERATOR.NE, 1, {1, 2, 3}),
    ("n", OPERATOR.GT, 1, {1, 2}),
    ("n", OPERATOR.NIN, [1, 3], {1, 3}),
    ("s", OPERATOR.IN, ["Hello World", "x"], {1}),
    ("s", OPERATOR.EQ, "a'b\"c", {0}),
    ("s", OPERATOR.TEXT_MATCH, "lo W", {1}),
    ("tags", OPERATOR.CONTAINS, "x", {0, 3}),
    ("tags", OPERATOR.ANY, ["y", "q"], {0}),
    ("tags", OPERATOR.ALL, ["x", "y"], {0}),
    ("z", OPERATOR.NE, 1, {0, 2, 3}),
    ("b c", OPERATOR.EQ, 5, {0}),
    ("doc_id", OPERATOR.EQ, "doc1", {1}),
    ("text", OPERATOR.TEXT_MATCH, "text", {0, 1, 2, 3}),
    ("year", OPERATOR.GTE, 2002, {2, 3}),
    ("year", OPERATOR.NE, 2002, {0, 1, 3}),
]


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    uri = str(tmp_path_factory.mktemp("filters") / "theirs.db")
    nodes = [node(i, metadata={**METADATA[i], "year": 2000 + i}) for i in range(4)]
    return opened(uri, milvus_vector_store(uri, "1.2.0 with scalars", nodes))


@pytest.mark.parametrize(("key", "operator", "value", "expected"), FILTERS, ids=str)
def test_filters_find_the_metadata_where_it_is(described, key, operator, value, expected):
    filters = is_(key, operator, value)
    for chosen, wanted in (
        (filters, expected),
        (MetadataFilters(filters=filters.filters, condition="not"), {0, 1, 2, 3} - expected),
    ):
        found = {int(item.node_id[1:]) for item in described.get_nodes(filters=chosen)}
        assert found == {int(name[1:]) for name in described.query(query(filters=chosen)).ids}
        assert found == wanted


@pytest.mark.parametrize(
    ("key", "operator", "value", "message"),
    [
        ("tags", OPERATOR.IS_EMPTY, None, "'is_empty' of 'tags' cannot be answered"),
        ("s", OPERATOR.EQ, None, "'is_empty' of 's' cannot be answered"),
        ("s", OPERATOR.TEXT_MATCH, "r_s", "'text_match' of 'r_s' cannot be found"),
        ("s", OPERATOR.TEXT_MATCH_INSENSITIVE, "hello", "use 'text_match'"),
        ("dense", OPERATOR.EQ, 1, "is a vector"),
    ],
)
def test_a_filter_that_could_not_find_all_is_refused(described, key, operator, value, message):
    with pytest.raises(ValueError, match=message) as refused:
        described.query(query(filters=is_(key, operator, value)))
    assert "\n" not in str(refused.value)


def test_what_the_collection_cannot_hold_is_refused_before_anything_is_written(described):
    good = node(5, metadata={"year": 2005})
    for bad, message in [
        (node(6, metadata={}), "needs the field 'year'"),
        (node(6, metadata={"year": "2006"}), "'year' .* is INT64, the value '2006' is not"),
        (node(6, metadata={"year": 1, "text": "x"}), "metadata 'text' of node 'n6'"),
        (node(6, metadata={"year": 1, "doc_id": "x"}), "metadata 'doc_id' of node 'n6'"),
    ]:
        for add in (described.add, lambda nodes: asyncio.run(described.async_add(nodes))):
            with pytest.raises(ValueError, match=message):
                add([good, bad])
    assert len(described.get_nodes()) == 4


def foreign(uri, **fields):
    """Create a collection of an application with one row; return its name.

    fields: further VARCHAR fields, with their values.
    """
    client = MilvusClient(uri)
    name = f"foreign_{next(_numbers)}"
    types = {"id": DataType.VARCHAR, "vector": DataType.FLOAT_VECTOR}
    types |= dict.fromkeys(fields, DataType.VARCHAR)
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    for field, data_type in types.items():
        size = {"dim": DIM} if data_type == DataType.FLOAT_VECTOR else {"max_length": 100}
        schema.add_field(field, data_type, is_primary=field == "id", **size)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    client.insert(name, [{"id": "a", "vector": ITEMS[0].tolist(), "price": 5, **fields}])
    return name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "its rows have no field 'text'"),
        ({"text": "t", "doc_id": "d"}, "its rows have no field '_node_content'"),
    ],
)
def test_a_collection_of_another_program_is_refused_by_every_method(uri, fields, message):
    name = foreign(uri, **fields)
    store = opened(uri, name)
    for call in (
        lambda: store.add([node(1)]),
        lambda: store.query(query()),
        lambda: asyncio.run(store.aquery(query(filters=is_("price", OPERATOR.EQ, 5)))),
        lambda: store.get_nodes(filters=is_("price", OPERATOR.EQ, 5)),
        lambda: store.delete("d"),
        lambda: asyncio.run(store.adelete_nodes(["a"])),
        store.clear,
    ):
        with pytest.raises(ValueError, match=f"'{name}' cannot be used by this store: {message}"):
            call()
    [row] = MilvusClient(uri).query(name, filter='id != ""', output_fields=["price"])
    assert row == {"id": "a", "price": 5}


def test_a_collection_without_a_text_key_is_refused(uri):
    MilvusClient(uri).create_collection("quick", dimension=DIM)
    with pytest.raises(ValueError, match="field 'id' is INT64, not VARCHAR") as refused:
        opened(uri, "quick").query(query())
    assert "\n" not in str(refused.value)
