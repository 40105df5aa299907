"""Collections that the store did not create: it looks at the schema first, and refuses what it
cannot hold before anything is written."""

import asyncio
import itertools

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from pymilvus import DataType, MilvusClient, MilvusException

from langchain_milvus_hubness import HubnessMilvus

DIM = 8
_numbers = itertools.count()


class Lengths(Embeddings):
    def embed_query(self, text):
        return [float(len(text)), *[1.0] * (DIM - 1)]

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]


def collection(uri, *, key=DataType.VARCHAR, declared=(), dynamic=True, row=None):
    """Create a collection of an application, without an index if it has no row; return its name.

    declared: its VARCHAR fields. row: further values of its row.
    """
    client = MilvusClient(uri)
    name = f"theirs_{next(_numbers)}"
    schema = client.create_schema(auto_id=False, enable_dynamic_field=dynamic)
    length = {"max_length": 100} if key == DataType.VARCHAR else {}
    schema.add_field("pk", key, is_primary=True, **length)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    for field in declared:
        schema.add_field(field, DataType.VARCHAR, max_length=100)
    client.create_collection(name, schema=schema, consistency_level="Strong")
    if row is not None:
        index = client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        client.create_index(name, index)
        client.load_collection(name)
        client.insert(name, [{"pk": "a", "vector": Lengths().embed_query("first"), **row}])
    return name


def opened(uri, name, **options):
    return HubnessMilvus(
        Lengths(),
        name,
        connection_args={"uri": uri, "state_ttl": 0.0},
        consistency_level="Strong",
        **options,
    )


@pytest.mark.parametrize(
    ("theirs", "options", "message"),
    [
        ({"declared": ["body"]}, {}, "no field 'text'"),
        ({"row": {"text": "t"}}, {}, "no field 'text'"),
        ({"row": {"body": "b"}}, {"enable_dynamic_field": True}, "its rows have no field 'text'"),
        ({"declared": ["text"]}, {"vector_field": "text"}, "'text' is VARCHAR, not .*FLOAT_VECTOR"),
        ({"declared": ["text"]}, {"primary_field": "id"}, "no field 'id'"),
        ({"declared": ["text"]}, {"metadata_field": "meta"}, "no field 'meta'"),
    ],
)
def test_a_collection_without_documents_is_refused_and_left_as_it_is(uri, theirs, options, message):
    name = collection(uri, **theirs)
    client = MilvusClient(uri)
    before = client.describe_collection(name), client.list_indexes(name)
    with pytest.raises(
        ValueError, match=f"'{name}' cannot be used by this store: .*{message}"
    ) as e:
        opened(uri, name, **options)
    assert "\n" not in str(e.value)
    assert (client.describe_collection(name), client.list_indexes(name)) == before


def test_texts_in_a_dynamic_field_are_read(uri):
    name = collection(uri, row={"text": "first", "group": 1})
    store = opened(uri, name, enable_dynamic_field=True)
    [document] = store.similarity_search("first", expr="group == 1")
    assert document.page_content == "first"
    assert document.metadata["group"] == 1
    store.add_texts(["second"], [{"group": 2}], ids=["b"])
    assert len(store.similarity_search("first")) == 2


def test_documents_that_cannot_be_held_are_refused_before_any_is_written(uri):
    name = collection(uri, declared=["text", "author"], row={"text": "t", "author": "x"})
    store = opened(uri, name)
    good = Document("good", metadata={"author": "y"})
    for content, metadata, message in [
        ("t", {}, "needs the field 'author'"),
        ("t", {"author": 5}, "'author' .* is VARCHAR, the value 5 is not"),
        ("t", {"author": "y", "page": 1}, "no field for the metadata 'page'"),
        ("t", {"author": "y", "text": "z"}, "'text' of another value"),
        ("t", {"author": "y", "pk": "a"}, "'pk' or 'text' of another value"),
        ("é" * 60, {"author": "y"}, "holds 100 bytes, a value has 120"),
    ]:
        documents = [good, Document(content, metadata=metadata)]
        for call in (
            lambda documents=documents: store.add_documents(documents, ids=["b", "c"]),
            lambda documents=documents: asyncio.run(
                opened(uri, name).aadd_documents(documents, ids=["b", "c"])
            ),
            lambda documents=documents: store.upsert(["b", "c"], documents),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    assert store.get_pks("pk != ''") == ["a"]
    store.add_documents([good], ids=["b"])
    [read] = store.similarity_search("good", expr="pk == 'b'")
    store.upsert(["b"], [read])
    assert sorted(store.get_pks("pk != ''")) == ["a", "b"]


def test_documents_are_not_written_without_a_key_that_fits(uri):
    store = opened(uri, collection(uri, key=DataType.INT64, declared=["text"]))
    with pytest.raises(ValueError, match=r"'pk' .* is INT64, the value 'b' is not"):
        store.add_texts(["second"], ids=["b"])
    with (
        pytest.warns(UserWarning, match="auto_id"),
        pytest.raises(ValueError, match="needs the field 'pk'"),
    ):
        store.add_texts(["second"])


def test_a_wrong_expression_is_an_error_and_not_an_empty_result(uri):
    name = collection(uri, dynamic=False, declared=["text"], row={"text": "t"})
    store = opened(uri, name)
    assert [document.metadata["pk"] for document in store.search_by_metadata("text == 't'")] == [
        "a"
    ]
    for call in (
        lambda: store.search_by_metadata("author == 'x'"),
        lambda: asyncio.run(opened(uri, name).asearch_by_metadata("author == 'x'")),
        lambda: store.similarity_search("t", expr="author == 'x'"),
    ):
        with pytest.raises(MilvusException):
            call()
