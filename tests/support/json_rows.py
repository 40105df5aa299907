"""Rows with a value of each type, JSON among them, and the form in which pymilvus sends them."""

import json

import numpy as np
from pymilvus import DataType, MilvusClient
from pymilvus.client.prepare import Prepare

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
    for name, (data_type, options, _) in PLAIN.items():
        made.add_field(name, data_type, **options)
    made.add_field("document", DataType.JSON, nullable=nullable)
    return made.to_dict()


def sent(row, described):
    """The columns of an insert, as pymilvus sends them."""
    return Prepare.row_insert_param(
        "c", [row], "", described["fields"], enable_dynamic=True
    ).fields_data


def encoded(value):
    """A value of a JSON field as a user inserts it."""
    return json.dumps(value) if isinstance(value, str) or value is None else value
