"""What a query returns, written again, is the same row: for values of every kind, in the form that pymilvus sends."""

import json
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymilvus import DataType
from pymilvus.client import entity_helper
from pymilvus.client.types import HybridExtraList

from milvus_hubness.milvus.store import schema as milvus_schema
from tests.support.json_rows import DYNAMIC, JSON_VALUES, PLAIN, encoded, schema, sent


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
