"""Collections that the store did not create: it looks at the schema first, and refuses what it
cannot hold before anything is written."""

import itertools

import numpy as np
import pytest
from haystack import Document
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError
from pymilvus import DataType, MilvusClient

from haystack_milvus_hubness import HubnessDocumentStore

DIM = 8
ITEMS = np.random.default_rng(0).normal(size=(4, DIM)).tolist()
_numbers = itertools.count()


def collection(uri, *, key=DataType.VARCHAR, declared=(), dynamic=True, row=None):
    """Create a collection of an application, without an index if it has no row; return its name.

    declared: its VARCHAR fields. row: further values of its row.
    """
    client = MilvusClient(uri)
    name = f"theirs_{next(_numbers)}"
    schema = client.create_schema(auto_id=False, enable_dynamic_field=dynamic)
    length = {"max_length": 100} if key == DataType.VARCHAR else {}
    schema.add_field("id", key, is_primary=True, **length)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    for field in declared:
        schema.add_field(field, DataType.VARCHAR, max_length=100)
    client.create_collection(name, schema=schema, consistency_level="Strong")
    if row is not None:
        index = client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        client.create_index(name, index)
        client.load_collection(name)
        client.insert(name, [{"id": "a", "vector": ITEMS[0], **row}])
    return name


def opened(uri, name, **options):
    return HubnessDocumentStore(
        name, connection_args={"uri": uri}, consistency_level="Strong", **options
    )


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"key": DataType.INT64, "declared": ["text"]}, "'id' is INT64, not VARCHAR"),
        ({"declared": ["body"], "dynamic": False}, "no field 'text'"),
        ({"row": {"body": "b"}}, "its rows have no field 'text'"),
    ],
)
def test_a_collection_without_documents_is_refused_and_left_as_it_is(uri, theirs, message):
    name = collection(uri, **theirs)
    client = MilvusClient(uri)
    before = client.describe_collection(name), client.list_indexes(name)
    with pytest.raises(
        ValueError, match=f"'{name}' cannot be used by this store: .*{message}"
    ) as e:
        opened(uri, name)
    assert "\n" not in str(e.value)
    assert (client.describe_collection(name), client.list_indexes(name)) == before


def test_texts_in_a_dynamic_field_are_read(uri):
    name = collection(uri, row={"text": "first", "group": 1})
    store = opened(uri, name)
    [document] = store.filter_documents({"field": "meta.group", "operator": "==", "value": 1})
    assert (document.id, document.content, document.meta) == ("a", "first", {"group": 1})
    store.write_documents([Document(id="b", content="second", embedding=ITEMS[1])])
    assert {item.content for item in store.filter_documents()} == {"first", "second"}


@pytest.mark.parametrize("policy", [DuplicatePolicy.NONE, DuplicatePolicy.OVERWRITE])
def test_documents_that_cannot_be_held_are_refused_before_any_is_written(uri, policy):
    name = collection(
        uri, declared=["text", "author"], dynamic=False, row={"text": "t", "author": "x"}
    )
    store = opened(uri, name)
    good = Document(id="b", content="t", embedding=ITEMS[1], meta={"author": "y"})
    for content, meta, message in [
        ("t", {}, "needs the field 'author'"),
        ("t", {"author": 5}, "'author' .* is VARCHAR, the value 5 is not"),
        ("t", {"author": "y", "page": 1}, "no field 'page' and no dynamic fields"),
        ("t", {"author": "y", "text": "z"}, "meta 'text' of document 'c'"),
        ("é" * 60, {"author": "y"}, "holds 100 bytes, a value has 120"),
    ]:
        bad = Document(id="c", content=content, embedding=ITEMS[2], meta=meta)
        with pytest.raises(ValueError, match=message):
            store.write_documents([good, bad], policy)
    assert store.count_documents() == 1
    assert store.write_documents([good], policy) == 1


def test_a_filter_by_a_field_that_no_document_can_have_is_refused(uri):
    name = collection(
        uri, declared=["text", "author"], dynamic=False, row={"text": "t", "author": "x"}
    )
    store = opened(uri, name)
    for operator, value in (("==", "x"), ("!=", "x"), ("==", None), ("in", ["x"])):
        filters = {"field": "meta.autor", "operator": operator, "value": value}
        for call in (store.filter_documents, store.delete_by_filter):
            with pytest.raises(FilterError, match="no field 'autor': filter by one of"):
                call(filters)
        with pytest.raises(FilterError, match="no field 'autor'"):
            store._embedding_retrieval(ITEMS[0], filters)
    assert store.count_documents() == 1
