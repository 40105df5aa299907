"""What a query returns, written again, is the same row: for values of every kind, in the form that pymilvus sends."""

import json
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymilvus import DataType, MilvusClient
from pymilvus.client import entity_helper
from pymilvus.client.prepare import Prepare
from pymilvus.client.types import HybridExtraList

from milvus_hubness.milvus.store import schema as milvus_schema

PLAIN = {
    "id": (DataType.INT64, {"is_primary": True}, 7),
    "flag": (DataType.BOOL, {}, True),
    "tiny": (DataType.INT8, {}, -5),
    "count": (DataType.INT32, {}, 2**31 - 1),
    "single": (DataType.FLOAT, {}, 0.5),
    "double": (DataType.DOUBLE, {}, 0.1),
    "text": (DataType.VARCHAR, {"max_length": 99}, '"5" \\ ü'),
    "numbers": (DataType.ARRAY, {"element_type": DataType.INT64, "max_capacity": 9}, [1, 2**60]),
    "words": (
        DataType.ARRAY,
        {"element_type": DataType.VARCHAR, "max_capacity": 9, "max_length": 9},
        ["5", "null", ""],
    ),
    "shares": (DataType.ARRAY, {"element_type": DataType.DOUBLE, "max_capacity": 9}, [0.1, -1.0]),
    "none": (DataType.ARRAY, {"element_type": DataType.BOOL, "max_capacity": 9}, []),
    "vector": (DataType.FLOAT_VECTOR, {"dim": 4}, [1.0, 2.0, 3.0, 0.5]),
    "half": (DataType.FLOAT16_VECTOR, {"dim": 2}, np.array([1, 2], np.float16)),
    "bits": (DataType.BINARY_VECTOR, {"dim": 16}, b"\x01\x80"),
    "bytes": (DataType.INT8_VECTOR, {"dim": 2}, np.array([1, -2], np.int8)),
    "sparse": (DataType.SPARSE_FLOAT_VECTOR, {}, {3: 0.5, 9: 1.0}),
}
JSON_VALUES = {
    "text": "hello",
    "text of digits": "5",
    "text of an object": '{"a": 1}',
    "text of null": "null",
    "empty text": "",
    "quoted text": '"5"',
    "odd text": 'a"b\\ü\n😀',
    "number": 5,
    "great number": 2**60,
    "fraction": 1.5,
    "true": True,
    "null": None,
    "list": [1, "x", None, {"y": "5"}],
    "empty list": [],
    "object": {"a": "5", "b": None, "c": {"d": ["null", True, 1.0]}},
    "empty object": {},
}
DYNAMIC = {
    "free": "5",
    "text": '{"a": 1}',
    "nothing": None,
    "list": ["5", None],
    "deep": {"x": "null"},
    "yes": True,
}


def schema(*, nullable):
    made = MilvusClient.create_schema(enable_dynamic_field=True)
    for name, (kind, options, _) in PLAIN.items():
        made.add_field(name, kind, **options)
    made.add_field("document", DataType.JSON, nullable=nullable)
    return made.to_dict()


def sent(row, described):
    """The columns of an insert, as pymilvus sends them."""
    return Prepare.row_insert_param(
        "c", [row], "", described["fields"], enable_dynamic=True
    ).fields_data


def answered(columns, described):
    """These columns as a server returns them: with their types, and a name for the dynamic ones."""
    fields = {field["name"]: field for field in described["fields"]}
    columns = deepcopy(list(columns))
    for column in columns:
        if column.is_dynamic:
            column.field_name = "$meta"
        column.type = fields.get(column.field_name, {"type": DataType.JSON})["type"]
        if column.type == DataType.ARRAY:
            column.scalars.array_data.element_type = fields[column.field_name]["element_type"]
    return columns


def read(columns, *, strict_float32):
    """The row that pymilvus reads from such columns."""
    named = [column.field_name for column in columns if not column.is_dynamic]
    rows = [dict.fromkeys(named)]
    unread = [
        each for each in columns if entity_helper.extract_row_data_from_fields_data_v2(each, rows)
    ]
    found = HybridExtraList(
        unread, rows, extra={}, dynamic_fields=[], strict_float32=strict_float32
    )
    return dict(next(iter(found)))


def plain(columns):
    return sorted(column.SerializeToString(deterministic=True) for column in columns)


def written_again(columns, described, *, strict_float32=True):
    row = read(answered(columns, described), strict_float32=strict_float32)
    [again] = milvus_schema.insertable_rows([row], described, lite=False)
    return sent(again, described)


def encoded(value):
    """A value of a JSON field as a user inserts it."""
    return json.dumps(value) if isinstance(value, str) or value is None else value


@pytest.mark.parametrize("strict_float32", [True, False], ids=["arrays", "lists"])
@pytest.mark.parametrize("nullable", [True, False], ids=["nullable", "required"])
@pytest.mark.parametrize("value", JSON_VALUES.values(), ids=JSON_VALUES)
def test_a_row_that_was_read_is_written_as_it_was(value, nullable, strict_float32):
    described = schema(nullable=nullable)
    if value is None and nullable:
        pytest.skip("pymilvus returns None for null of JSON and for no value")
    row = {name: example for name, (_, _, example) in PLAIN.items()}
    columns = sent({**row, **DYNAMIC, "text": row["text"], "document": encoded(value)}, described)
    assert plain(written_again(columns, described, strict_float32=strict_float32)) == plain(columns)


def test_a_null_stays_null():
    described = schema(nullable=True)
    row = {name: example for name, (_, _, example) in PLAIN.items()}
    columns = sent({**row, "document": None}, described)
    assert plain(written_again(columns, described)) == plain(columns)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
        max_leaves=6,
    )
)  # fmt: skip
def test_any_json_value_is_inserted_as_it_was_read(value):
    inserted = milvus_schema.insertable_json(value, nullable=False, lite=False)
    assert json.loads(entity_helper.convert_to_json(inserted)) == value
