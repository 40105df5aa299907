"""Columns that are to be written, as pymilvus's rows. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from pymilvus import DataType
from pymilvus.client.entity_helper import sparse_parse_single_row

from milvus_hubness.errors import UnsupportedOperation
from milvus_hubness.proxy.columns import floats

_BYTES_OF_A_NUMBER = {
    "float16_vector": 2.0,
    "bfloat16_vector": 2.0,
    "int8_vector": 1.0,
    "binary_vector": 1 / 8,
}


def rows_of(columns: Any, count: int) -> list[dict[str, Any]]:
    """The rows of so many that the columns of a write hold. Raises UnsupportedOperation for types that are
    unknown here."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for column in columns:
        values = _spread(column, count)
        if column.is_dynamic:
            for row, value in zip(rows, values, strict=True):
                row.update(value or {})
        else:
            for row, value in zip(rows, values, strict=True):
                row[column.field_name] = value
    return rows


def _spread(column: Any, count: int) -> list[Any]:
    """A value for each row, None where the column says so; those may be left out of its data."""
    values = list(_values(column))
    valid = list(column.valid_data)
    if len(valid) != count:
        return values
    if len(values) == count:
        return [value if there else None for value, there in zip(values, valid, strict=True)]
    following = iter(values)
    return [next(following) if there else None for there in valid]


def _values(column: Any) -> Iterator[Any]:
    if column.HasField("scalars"):
        yield from _scalars(column.scalars, column.type)
    elif column.HasField("vectors"):
        yield from _vectors(column.vectors)
    else:
        raise UnsupportedOperation(f"the proxy cannot write {DataType(column.type).name} here")


def _scalars(scalars: Any, kind: int) -> Iterator[Any]:
    kept = scalars.WhichOneof("data")
    values = getattr(scalars, kept).data if kept else ()
    if kept == "json_data":
        yield from map(json.loads, values)
    elif kept == "array_data":
        for value in values:
            inner = value.WhichOneof("data")
            yield list(getattr(value, inner).data) if inner else []
    elif kept in (None, "bool_data", "int_data", "long_data", "float_data", "double_data", "string_data"):
        yield from values
    else:
        raise UnsupportedOperation(f"the proxy cannot write {DataType(kind).name} here")


def _vectors(vectors: Any) -> Iterator[Any]:
    kept = vectors.WhichOneof("data")
    if kept == "float_vector":
        yield from np.array(floats(vectors.float_vector)).reshape(-1, vectors.dim)
    elif kept == "sparse_float_vector":
        yield from map(sparse_parse_single_row, vectors.sparse_float_vector.contents)
    elif kept in _BYTES_OF_A_NUMBER:
        packed, size = getattr(vectors, kept), int(vectors.dim * _BYTES_OF_A_NUMBER[kept])
        yield from (packed[i : i + size] for i in range(0, len(packed), size))
    elif kept is not None:
        raise UnsupportedOperation(f"the proxy cannot write {kept} here")
