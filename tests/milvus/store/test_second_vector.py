"""What a server is asked for to give a collection a second vector field, and why it is not."""

from types import SimpleNamespace

import pytest
from pymilvus import DataType

from milvus_hubness import CannotMigrate
from milvus_hubness.correction.codec.base import BIAS_FIELD, EPOCH_FIELD
from milvus_hubness.correction.codec.second_vector import SECOND_VECTOR_FIELD
from milvus_hubness.jobs.store.records import CollectionInfo, VectorField
from milvus_hubness.milvus.store.keepalive import LITE_KEEPALIVE
from milvus_hubness.milvus.store.milvus_store import MilvusStore

WIDTH = 16


class Server:
    """Answers as a server of that version does, and takes down what it is asked for."""

    def __init__(self, version):
        self.version, self.asked = version, []

    def get_server_version(self):
        return self.version

    def _get_connection(self):
        return SimpleNamespace(_grpc_options=LITE_KEEPALIVE)

    def __getattr__(self, method):
        def call(*args, **options):
            self.asked.append((method, args, options))
            return []

        return call


def info(*further, **of_key):
    fields = [
        {"name": "id", "type": DataType.INT64, "is_primary": True, "params": {}, **of_key},
        {"name": "vector", "type": DataType.FLOAT_VECTOR, "params": {"dim": 12}},
        *further,
    ]
    schema = {"fields": fields, "properties": {}}
    vector = VectorField("vector", 12, "COSINE", "HNSW", {"M": "8", "efConstruction": "64"})
    return CollectionInfo("shop", "id", {"vector": vector}, 5, (None,), (), {}, None, False, schema)


def second(dim=WIDTH, kind=DataType.FLOAT_VECTOR):
    return {"name": SECOND_VECTOR_FIELD, "type": kind, "params": {"dim": dim}}


def scalars():
    kinds = {BIAS_FIELD: DataType.FLOAT, EPOCH_FIELD: DataType.INT64}
    return [{"name": name, "type": kind, "params": {}} for name, kind in kinds.items()]


def test_a_server_that_adds_vector_fields_is_asked_for_what_is_missing():
    server = Server("v2.6.18")
    store, source = MilvusStore(server), info(scalars()[0])
    assert store.second_vector_field(source, "vector", "", WIDTH) == "can be added"
    store.add_second_vector(source, "vector", "", WIDTH)
    assert server.asked == [
        (
            "add_collection_field",
            ("shop", SECOND_VECTOR_FIELD, DataType.FLOAT_VECTOR),
            {"nullable": True, "dim": WIDTH},
        ),
        (
            "add_collection_field",
            ("shop", EPOCH_FIELD, DataType.INT64),
            {"nullable": True, "default_value": 0},
        ),
    ]


@pytest.mark.parametrize("version", ["v2.6.17", "v2.3.5-lite", "milvus_lite-3.2.2"])
def test_others_must_have_them(version):
    store = MilvusStore(Server(version))
    with pytest.raises(
        CannotMigrate, match=rf"lacks {SECOND_VECTOR_FIELD}, .* from 2\.6\.18 on, this is {version}"
    ):
        store.second_vector_field(info(*scalars()), "vector", "", WIDTH)
    assert store.second_vector_field(info(second(), *scalars()), "vector", "", WIDTH) == "present"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (info(second(17), *scalars()), "has 17 dimensions, the augmented vectors have 16"),
        (
            info(second(kind=DataType.FLOAT16_VECTOR), *scalars()),
            "is FLOAT16_VECTOR, not FLOAT_VECTOR",
        ),
        (info(auto_id=True), "auto_id"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(source, told):
    with pytest.raises(CannotMigrate, match=told):
        MilvusStore(Server("3.0.1")).second_vector_field(source, "vector", "", WIDTH)
