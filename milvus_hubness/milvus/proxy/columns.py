"""Columns of Milvus's protocol as arrays and back: decode, join, and pick rows.

No I/O.

A packed list of floats has its numbers as they are in memory, so it is decoded and encoded in one
piece. The client's modules sort hits; a hit has the number of its row in the answer's columns,
which stay as the server sent them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from google.protobuf.message import Message
from pymilvus import DataType
from pymilvus.client.entity_helper import sparse_parse_single_row
from pymilvus.client.search_result import SearchResult
from pymilvus.grpc_gen import schema_pb2

from milvus_hubness.correction.codec.arrays import Dtype, Floats, decode
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from milvus_hubness.milvus.client.rewrite import floats_in, put_floats

Key = int | str

VECTORS: dict[Dtype, str] = {
    "float32": "float_vector",
    "float16": "float16_vector",
    "bfloat16": "bfloat16_vector",
}
"""The protocol field with the numbers of a vector column, by dtype."""
_BYTES_PER_NUMBER = {
    "binary_vector": 1 / 8,
    "float16_vector": 2,
    "bfloat16_vector": 2,
    "int8_vector": 1,
}
_LISTS_OF_VECTORS = {"sparse_float_vector": "contents", "vector_array": "data"}
_SCALARS = ("bool_data", "int_data", "long_data", "float_data", "double_data", "string_data")


MOST_JSON = 1 << 20
"""Characters of a JSON text, 16 times as many as Milvus
stores: Python runs nothing else while it parses one.
"""


def json_in(text: str | bytes, name: str) -> Any:
    """Parse a JSON text of a request. Raises InvalidInput."""
    if len(text) > MOST_JSON:
        raise InvalidInput(f"{name} may have {MOST_JSON:,} characters of JSON, not {len(text):,}")

    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        shown = text[:80]
        raise InvalidInput(f"{name} must be JSON, not {shown!r}") from None


def column_named(columns: Iterable[Any], name: str) -> Any:
    """Return the FieldData of that name; None if there is none."""
    return next((column for column in columns if column.field_name == name), None)


def vectors_in(column: Any, dtype: Dtype) -> Floats:
    """Return the vectors of a column, (n, width).

    Raises InvalidInput for another dtype or width.
    """
    vectors = column.vectors
    width = vectors.dim
    data_field = VECTORS[dtype]
    if vectors.WhichOneof("data") not in (data_field, None):
        raise InvalidInput(f"field {column.field_name!r} takes vectors of {dtype} only")

    data = getattr(vectors, data_field)
    numbers = floats_in(data) if dtype == "float32" else decode([data], dtype).ravel()
    if width < 1 or len(numbers) % width:
        raise InvalidInput(
            f"field {column.field_name!r} has {len(numbers)} numbers, which is no multiple of "
            f"{width}"
        )

    return numbers.reshape(-1, width)


def put_vectors(column: Any, rows: Sequence[Any], width: int, dtype: Dtype) -> None:
    """Set the vectors of a column.

    rows: (n, width), arrays or the bytes of half-precision numbers.
    """
    column.vectors.dim = width
    if dtype == "float32":
        put_floats(column.vectors.float_vector, np.stack(rows) if len(rows) else [])
    else:
        setattr(column.vectors, VECTORS[dtype], b"".join(rows))


def take_rows(column: Any, rows: Sequence[int]) -> None:
    """Reduce a column to these of its rows, in this order, in place."""
    valid = list(column.valid_data)
    if column.HasField("struct_arrays"):
        for field in column.struct_arrays.fields:
            take_rows(field, rows)
    elif column.HasField("vectors"):
        _take_vectors(column.vectors, _positions_without_null(rows, valid))
    elif kind := column.scalars.WhichOneof("data"):
        _take(getattr(column.scalars, kind).data, rows)

    if valid:
        column.valid_data[:] = [valid[row] for row in rows]


def _positions_without_null(rows: Sequence[int], valid: Sequence[bool]) -> Sequence[int]:
    """Return where the vectors of the rows are in a column that leaves out those of null rows.

    valid: by row, whether it is not null; empty if no row can be null.
    """
    if not valid:
        return rows

    vectors_before = np.cumsum([0, *valid])
    return [int(vectors_before[row]) for row in rows if valid[row]]


def _take_vectors(vectors: Any, positions: Sequence[int]) -> None:
    kind = vectors.WhichOneof("data")
    if kind == "float_vector":
        numbers = floats_in(vectors.float_vector).reshape(-1, vectors.dim)
        put_floats(vectors.float_vector, numbers[list(positions)])
    elif kind in _LISTS_OF_VECTORS:
        _take(getattr(getattr(vectors, kind), _LISTS_OF_VECTORS[kind]), positions)
    elif kind:
        packed = _packed_vectors(vectors, kind)
        setattr(vectors, kind, b"".join(packed[position] for position in positions))


def _packed_vectors(vectors: Any, kind: str) -> list[bytes]:
    data = getattr(vectors, kind)
    size = int(vectors.dim * _BYTES_PER_NUMBER[kind])
    return [data[start : start + size] for start in range(0, len(data), size)]


def _take(values: Any, positions: Sequence[int]) -> None:
    put_all(values, [values[position] for position in positions] if len(values) else [])


def put_all(values: Any, chosen: Sequence[Any]) -> None:
    """Set the values or messages of a repeated field, which may be some of its own."""
    taken = deepcopy(chosen) if chosen and isinstance(chosen[0], Message) else chosen
    del values[:]
    values.extend(taken)


def joined(answers: Sequence[Any]) -> Any:
    """Join SearchResults query after query into the first
    one, in place, and return it; the others lose content.
    """
    first = answers[0].results
    for answer in answers[1:]:
        other = answer.results
        for name in ("highlight_results", "fields_data", "group_by_field_values"):
            columns = getattr(first, name)
            for column in getattr(other, name):
                _extend(column_named(columns, column.field_name) or columns.add(), column)
            other.ClearField(name)

        # `MergeFrom` joins all lists that are left, and replaces single values.
        other.ClearField("output_fields")
        other.num_queries += first.num_queries
        other.top_k = max(first.top_k, other.top_k)
        first.MergeFrom(other)

    return answers[0]


def _extend(column: Any, other: Any) -> None:
    """Add the rows of another column. Protobuf joins lists when it merges, but replaces bytes."""
    has_vectors = "vectors" in column.DESCRIPTOR.fields_by_name and column.HasField("vectors")
    kind = column.vectors.WhichOneof("data") if has_vectors else None
    first_bytes = getattr(column.vectors, kind) if kind in _BYTES_PER_NUMBER else b""
    column.MergeFrom(other)
    if kind in _BYTES_PER_NUMBER:
        setattr(column.vectors, kind, first_bytes + getattr(other.vectors, kind))


def hits_of(results: Any) -> SearchResult:
    """Return the hits of a SearchResultData, by query, as pymilvus has them; the "offset" of a hit
    is its row in the columns.
    """
    return SearchResult(
        schema_pb2.SearchResultData(
            ids=results.ids,
            scores=results.scores,
            topks=results.topks,
            element_indices=schema_pb2.LongArray(data=range(len(results.scores))),
        )
    )


def pick(results: Any, chosen: Sequence[Any]) -> None:
    """Reduce a SearchResultData to these of its rows,
    by query, with the scores of the hits, in place.
    """
    # `hits_of` has numbered the rows of the columns.
    rows = [hit["offset"] for hits in chosen for hit in hits]
    keys = keys_of(results.ids)
    results.num_queries = len(chosen)
    results.topks[:] = [len(hits) for hits in chosen]
    results.top_k = max(results.topks, default=0)
    results.scores[:] = [score for hits in chosen for score in hits.distances]
    if rows == list(range(len(keys))):
        return

    put_keys(results.ids, [keys[row] for row in rows])
    _take(results.element_indices.data, rows)
    groups = [results.group_by_field_value] if results.HasField("group_by_field_value") else []
    for column in (*results.fields_data, *results.group_by_field_values, *groups):
        take_rows(column, rows)
    for highlights in results.highlight_results:
        _take(highlights.datas, rows)


def keys_of(ids: Any) -> list[Key]:
    kind = ids.WhichOneof("id_field")
    return list(getattr(ids, kind).data) if kind else []


def put_keys(ids: Any, keys: Sequence[Key]) -> None:
    """Set the keys of an IDs message, of its own type; if it has no type, that of the first key."""
    kind = ids.WhichOneof("id_field") or (
        "str_id" if keys and isinstance(keys[0], str) else "int_id"
    )
    getattr(ids, kind).data[:] = keys


def rows_of(columns: Iterable[Any], count: int) -> list[dict[str, Any]]:
    """Return the `count` rows of a write's columns.

    Raises UnsupportedOperation for unknown types, and InvalidInput for dynamic fields that are no
    JSON object and for columns of another length.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for column in columns:
        values = list(_values(column))
        valid = list(column.valid_data)
        if len(valid) == count != len(values):
            # The column leaves out null rows.
            present = iter(values)
            values = [next(present) if is_valid else None for is_valid in valid]
        elif len(valid) == count:
            values = [
                value if is_valid else None for value, is_valid in zip(values, valid, strict=True)
            ]

        if len(values) != count:
            raise InvalidInput(
                f"field {column.field_name!r} has {len(values)} values for {count} rows"
            )
        for number, (row, value) in enumerate(zip(rows, values, strict=True)):
            row.update(
                _dynamic_fields(value, number) if column.is_dynamic else {column.field_name: value}
            )

    return rows


def _dynamic_fields(text: str, row: int) -> dict[str, Any]:
    name = f"the dynamic fields of row {row}"
    fields = json_in(text or "{}", name)
    if not isinstance(fields, dict):
        raise InvalidInput(f"{name} must be a JSON object")
    return fields


def _values(column: Any) -> Iterable[Any]:
    """Return the values of a column, as pymilvus takes them in rows."""
    field = column.WhichOneof("field")
    payload: Any = getattr(column, field) if field in ("scalars", "vectors") else None
    kind = "" if payload is None else payload.WhichOneof("data")
    if kind is None:
        return ()

    data: Any = getattr(payload, kind, None)
    if kind in _SCALARS:
        return list(data.data)
    if kind == "json_data":
        # pymilvus takes texts for JSON that is encoded already.
        return [text.decode() for text in data.data]

    if kind == "array_data":
        return [
            list(getattr(cell, cell.WhichOneof("data") or "long_data").data) for cell in data.data
        ]

    if kind == "float_vector":
        return np.array(floats_in(data)).reshape(-1, payload.dim)
    if kind == "sparse_float_vector":
        return map(sparse_parse_single_row, data.contents)
    if kind in _BYTES_PER_NUMBER:
        return _packed_vectors(payload, kind)

    raise UnsupportedOperation(
        f"the proxy cannot write {DataType(column.type).name} row by row: use HubnessClient"
    )
