"""Import files hold the values that an insert would send."""

import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from pymilvus import CollectionSchema, DataType, FieldSchema

from milvus_hubness.correction.codec.arrays import encode
from milvus_hubness.errors import MissingExtra, StoreError
from milvus_hubness.milvus.store.milvus_store import MilvusStore


class Server:
    """Says what it is and what its only collection looks like."""

    def __init__(self, fields, version="v2.6.0"):
        schema = CollectionSchema(fields, enable_dynamic_field=True)
        self._version, self._schema = version, {**schema.to_dict(), "properties": {}}

    def get_server_version(self):
        return self._version

    def describe_collection(self, name):
        return self._schema


ID = FieldSchema("id", DataType.INT64, is_primary=True)


def written(folder, fields, vectors, rows, field="vec"):
    store = MilvusStore(Server([ID, *fields]))
    writer = store.import_writer("c", folder)
    writer.add([{**row, field: vector} for row, vector in zip(rows, vectors, strict=True)])
    return [row for file in writer.commit() for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(DataType.FLOAT16_VECTOR, "float16"), (DataType.BFLOAT16_VECTOR, "bfloat16")],
)
def test_halves_are_written_as_their_bytes(tmp_path, kind, dtype):
    vectors = encode(np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32), dtype)
    rows = [{"id": i} for i in range(3)]
    found = written(tmp_path, [FieldSchema("vec", kind, dim=4)], vectors, rows)
    assert [bytes(row["vec"]) for row in found] == vectors


def test_other_vectors_come_along(tmp_path):
    fields = [
        FieldSchema("vec", DataType.FLOAT_VECTOR, dim=4),
        FieldSchema("small", DataType.INT8_VECTOR, dim=4),
        FieldSchema("bits", DataType.BINARY_VECTOR, dim=16),
        FieldSchema("words", DataType.SPARSE_FLOAT_VECTOR),
    ]
    row = {
        "id": 1,
        "small": bytes([255, 0, 1, 128]),
        "bits": b"\x05\xff",
        "words": {3: 0.5, 70_000: 0.25},
    }
    [found] = written(tmp_path, fields, np.ones((1, 4), np.float32), [row])
    assert found["small"] == [-1, 0, 1, -128]
    assert bytes(found["bits"]) == b"\x05\xff"
    assert json.loads(found["words"]) == {"3": 0.5, "70000": 0.25}
    assert found["vec"] == [1.0] * 4


@pytest.mark.parametrize(
    "value", ["12", "plain", 12, 1.5, True, None, [1, None], {"a": {"b": "é"}}, ""]
)
def test_json_keeps_its_type(tmp_path, value):
    fields = [
        FieldSchema("vec", DataType.FLOAT_VECTOR, dim=2),
        FieldSchema("doc", DataType.JSON, nullable=True),
    ]
    [found] = written(
        tmp_path, fields, np.ones((1, 2), np.float32), [{"id": 1, "doc": value, "free": value}]
    )
    assert json.loads(found["doc"]) == value
    assert json.loads(found["$meta"]) == {"free": value}


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"a": np.int64(3)}, {"a": 3}),
        ({"a": np.arange(2)}, {"a": [0, 1]}),
        ([np.float32(0.5), np.bool_(True)], [0.5, True]),
        ({"a": float("nan")}, {"a": None}),
    ],
    ids=str,
)
def test_json_may_hold_numbers_of_numpy_as_that_of_an_insert(tmp_path, value, stored):
    fields = [FieldSchema("vec", DataType.FLOAT_VECTOR, dim=2), FieldSchema("doc", DataType.JSON)]
    [found] = written(tmp_path, fields, np.ones((1, 2), np.float32), [{"id": 1, "doc": value}])
    assert json.loads(found["doc"], parse_constant=pytest.fail) == stored


@pytest.mark.parametrize(
    "row", [{"doc": object()}, {"doc": {}, "free": {1, 2}}], ids=["of a field", "dynamic"]
)
def test_a_value_that_has_no_json_is_named_by_its_row(tmp_path, row):
    fields = [FieldSchema("vec", DataType.FLOAT_VECTOR, dim=2), FieldSchema("doc", DataType.JSON)]
    with pytest.raises(StoreError, match=r"row 7 cannot be added .*not JSON serializable"):
        written(tmp_path, fields, np.ones((1, 2), np.float32), [{"id": 7, **row}])


def test_a_row_that_cannot_be_written_is_named(tmp_path):
    fields = [FieldSchema("vec", DataType.FLOAT_VECTOR, dim=2), FieldSchema("n", DataType.INT8)]
    with pytest.raises(StoreError, match=r"row 7 cannot be added .*'n'"):
        written(tmp_path, fields, np.ones((1, 2), np.float32), [{"id": 7, "n": 1_000}])


def test_no_rows_make_no_file(tmp_path):
    store = MilvusStore(Server([ID, FieldSchema("vec", DataType.FLOAT_VECTOR, dim=2)]))
    assert store.import_writer("c", tmp_path).commit() == []


def test_a_missing_package_of_the_bulk_writer_is_named_with_its_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pymilvus.bulk_writer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "minio", None)
    with pytest.raises(MissingExtra, match=r'pip install .*\[bulk\]".*minio'):
        MilvusStore(Server([ID])).import_writer("c", tmp_path)
