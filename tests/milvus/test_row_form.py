"""What a collection can hold that the store of a framework did not create, without a database."""

import pytest
from pymilvus import DataType

from milvus_hubness import InvalidInput
from milvus_hubness.extending import RowForm


def form(*fields, dynamic=False):
    """Return a form of fields, each a name, a type and further facts."""
    described = [
        {"name": name, "type": data_type, "params": {"max_length": 4}, **facts}
        for name, data_type, facts in fields
    ]
    return RowForm.of(
        {"collection_name": "items", "fields": described, "enable_dynamic_field": dynamic}
    )


KEY = ("id", DataType.INT64, {"is_primary": True})


@pytest.mark.parametrize(
    ("data_type", "good", "bad"),
    [
        (DataType.VARCHAR, ["", "four", "éé"], [5, b"a", "ééé", ["a"]]),
        (DataType.INT64, [0, -5], [1.0, "1", True]),
        (DataType.INT8, [0], [False, "a"]),
        (DataType.DOUBLE, [0.5, 1], ["1", True]),
        (DataType.BOOL, [True], [1, "true"]),
        (DataType.ARRAY, [[], [1]], ["a", 1]),
        (DataType.JSON, [{}, 1, "a", [1]], []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_value_must_have_the_type_of_its_field(data_type, good, bad):
    items = form(KEY, ("value", data_type, {}))
    items.expect_rows({"id": 1, "value": value} for value in good)
    for value in bad:
        with pytest.raises(InvalidInput, match="'value' of collection 'items'") as refused:
            items.expect_rows([{"id": 1, "value": good[0]}, {"id": 2, "value": value}])
        assert "\n" not in str(refused.value)


def test_a_row_needs_the_fields_that_have_no_other_value():
    optional = [
        ("a", DataType.VARCHAR, {"nullable": True}),
        ("b", DataType.VARCHAR, {"default_value": object()}),
        ("c", DataType.SPARSE_FLOAT_VECTOR, {"is_function_output": True}),
    ]
    form(KEY, *optional).expect_rows([{"id": 1}, {"id": 2, "a": None, "b": "x"}])
    with pytest.raises(InvalidInput, match="needs the field 'd'"):
        form(KEY, *optional, ("d", DataType.FLOAT_VECTOR, {})).expect_rows([{"id": 1}])


@pytest.mark.parametrize("kind", ["auto_id", "is_function_output"])
def test_a_row_must_not_name_what_milvus_makes(kind):
    facts = {kind: True, "is_primary": kind == "auto_id"}
    items = form(("made", DataType.INT64, facts))
    items.expect_rows([{}])
    with pytest.raises(InvalidInput, match="makes the values of 'made' itself"):
        items.expect_rows([{"made": 1}])


def test_an_upsert_names_keys_that_milvus_generated():
    items = form(("id", DataType.INT64, {"auto_id": True, "is_primary": True}))
    items.expect_rows([{"id": 1}], by_generated_key=True)
    for rows in ([{}], [{"id": "1"}]):
        with pytest.raises(InvalidInput, match="'id'"):
            items.expect_rows(rows, by_generated_key=True)


def test_further_fields_need_dynamic_ones():
    form(KEY, dynamic=True).expect_rows([{"id": 1, "more": 1}])
    with pytest.raises(InvalidInput, match="no field 'more' and no dynamic fields"):
        form(KEY).expect_rows([{"id": 1, "more": 1}])


def test_the_fields_that_a_store_reads_are_looked_for():
    texts = {"text": (DataType.VARCHAR,)}
    form(("text", DataType.VARCHAR, {})).expect_fields(texts)
    form(KEY, dynamic=True).expect_fields(texts, dynamic=["text"])
    for items, message in [
        (form(KEY), "no field 'text'; it has id"),
        (form(KEY, dynamic=True), "no field 'text'"),
        (form(("text", DataType.JSON, {})), "'text' is JSON, not VARCHAR"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            items.expect_fields(texts)
    with pytest.raises(InvalidInput, match="no field 'text'"):
        form(KEY).expect_fields(texts, dynamic=["text"])
    assert form(KEY).undeclared(["id", "text"]) == ["text"]
    with pytest.raises(InvalidInput, match="its rows have no field 'text'"):
        form(KEY).expect_in_row({"id": 1}, ["text"])
