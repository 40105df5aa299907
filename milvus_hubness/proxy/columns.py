"""Columns of Milvus's protocol as arrays and back: decode, join, and pick rows. No I/O.

A packed list of floats ends with its numbers as they are in memory, so it is read and written in one piece.
`client.rewrite` and `client.ranking` sort hits without regard to their other content. Here each hit has the number of
its row in the answer's columns, so columns are picked by row and otherwise stay as the server sent them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message
from pymilvus import DataType
from pymilvus.client.entity_helper import sparse_parse_single_row

from milvus_hubness.codec.arrays import Dtype, Floats, decode
from milvus_hubness.errors import InvalidInput, UnsupportedOperation

VECTORS: dict[Dtype, str] = {"float32": "float_vector", "float16": "float16_vector", "bfloat16": "bfloat16_vector"}
"""The protocol field with the numbers of a vector column, by dtype."""
_DATA_TAG = b"\x0a"
_BYTES_OF_A_NUMBER = {"binary_vector": 1 / 8, "float16_vector": 2, "bfloat16_vector": 2, "int8_vector": 1}
_LISTS_OF_VECTORS = {"sparse_float_vector": "contents", "vector_array": "data"}


def column_named(columns: Iterable[Any], name: str) -> Any:
    """Return the FieldData of that name; None if there is none."""
    return next((column for column in columns if column.field_name == name), None)


def floats(array: Any) -> Floats:
    """Return the numbers of a FloatArray, (n,)."""
    array.DiscardUnknownFields()
    packed, count = array.SerializeToString(), len(array.data)
    return np.frombuffer(packed, "<f4", count, len(packed) - 4 * count) if count else np.zeros(0, np.float32)


def put_floats(array: Any, numbers: npt.ArrayLike) -> None:
    """Set the numbers of a FloatArray."""
    packed = np.ascontiguousarray(numbers, "<f4").tobytes()
    array.ParseFromString(_DATA_TAG + _varint(len(packed)) + packed)


def vectors_in(column: Any, dtype: Dtype) -> Floats:
    """Return the vectors of a column, (n, width).

    Raises InvalidInput if it has no vectors of that dtype and width.
    """
    vectors, kind, width = column.vectors, VECTORS[dtype], column.vectors.dim
    if vectors.WhichOneof("data") not in (kind, None):
        raise InvalidInput(f"field {column.field_name!r} takes vectors of {dtype}")
    data = getattr(vectors, kind)
    numbers = floats(data) if dtype == "float32" else decode([data], dtype).ravel()
    if width < 1 or len(numbers) % width:
        raise InvalidInput(f"field {column.field_name!r}: {len(numbers)} numbers are no vectors of dimension {width}")
    return numbers.reshape(-1, width)


def put_vectors(column: Any, rows: Sequence[Any], width: int, dtype: Dtype) -> None:
    """Set the vectors of a column.

    rows: (n, width) as pymilvus takes them, arrays or the bytes of half-precision numbers.
    """
    column.vectors.dim = width
    if dtype == "float32":
        numbers = np.stack(rows) if len(rows) else np.zeros((0, width), np.float32)
        put_floats(column.vectors.float_vector, numbers.ravel())
    else:
        setattr(column.vectors, VECTORS[dtype], b"".join(rows))


def take_rows(column: Any, rows: Sequence[int]) -> None:
    """Reduce a column to these of its rows, in this order, in place."""
    valid = list(column.valid_data)
    if column.HasField("struct_arrays"):
        for field in column.struct_arrays.fields:
            take_rows(field, rows)
    elif column.HasField("vectors"):
        _take_vectors(column.vectors, _places(valid, rows))
    elif kind := column.scalars.WhichOneof("data"):
        _take(getattr(column.scalars, kind).data, rows)
    if valid:
        column.valid_data[:] = [valid[row] for row in rows]


def _places(valid: Sequence[bool], rows: Sequence[int]) -> Sequence[int]:
    """Return the places of the vectors of these rows: null vectors take no place."""
    if not valid:
        return rows
    before = np.cumsum([0, *valid])
    return [int(before[row]) for row in rows if valid[row]]


def _take_vectors(vectors: Any, places: Sequence[int]) -> None:
    kind = vectors.WhichOneof("data")
    if kind == "float_vector":
        numbers = floats(vectors.float_vector)
        put_floats(vectors.float_vector, numbers.reshape(-1, vectors.dim)[list(places)].ravel())
    elif kind in _LISTS_OF_VECTORS:
        _take(getattr(getattr(vectors, kind), _LISTS_OF_VECTORS[kind]), places)
    elif kind:
        packed = _packed_vectors(vectors, kind)
        setattr(vectors, kind, b"".join(packed[place] for place in places))


def _packed_vectors(vectors: Any, kind: str) -> list[bytes]:
    data, size = getattr(vectors, kind), int(vectors.dim * _BYTES_OF_A_NUMBER[kind])
    return [data[start : start + size] for start in range(0, len(data), size)]


def _take(values: Any, places: Sequence[int]) -> None:
    put_all(values, [values[place] for place in places] if len(values) else [])


def put_all(values: Any, chosen: Sequence[Any]) -> None:
    """Set the values or messages of a repeated field, which may be some of its own."""
    taken = deepcopy(chosen) if chosen and isinstance(chosen[0], Message) else chosen
    del values[:]
    values.extend(taken)


def _varint(number: int) -> bytes:
    taken = bytearray()
    while number > 0x7F:
        taken.append(number & 0x7F | 0x80)
        number >>= 7
    taken.append(number)
    return bytes(taken)


def joined(answers: Sequence[Any]) -> Any:
    """Join SearchResults into the first one, in place, and return it.

    The queries follow each other in order. The other results lose their content.
    """
    first, *others = answers
    for other in others:
        _join(first.results, other.results)
    return first


def _join(first: Any, other: Any) -> None:
    for name in ("highlight_results", "fields_data", "group_by_field_values"):
        columns = getattr(first, name)
        for column in getattr(other, name):
            _append(column_named(columns, column.field_name) or columns.add(), column)
        other.ClearField(name)
    other.ClearField("output_fields")
    other.num_queries += first.num_queries
    other.top_k = max(first.top_k, other.top_k)
    first.MergeFrom(other)


def _append(column: Any, other: Any) -> None:
    """Append a column. Protobuf joins lists when it merges, but replaces bytes."""
    has_vectors = "vectors" in column.DESCRIPTOR.fields_by_name and column.HasField("vectors")
    kind = column.vectors.WhichOneof("data") if has_vectors else None
    before = getattr(column.vectors, kind) if kind in _BYTES_OF_A_NUMBER else b""
    column.MergeFrom(other)
    if kind in _BYTES_OF_A_NUMBER:
        setattr(column.vectors, kind, before + getattr(other.vectors, kind))


Key = int | str


class Hit(dict[str, Any]):
    """A hit. id: the key. row: its place in the columns.

    "distance" has its score, and "entity" the fields that a correction needs, as in pymilvus.
    """

    def __init__(self, key: Key, score: float, row: int, entity: dict[str, Any]) -> None:
        super().__init__(distance=score, entity=entity)
        self.id, self.row = key, row


class Hits(list[Hit]):
    """The hits of one query."""

    def __init__(self, hits: Sequence[Hit]) -> None:
        super().__init__(hits)
        self.ids = [hit.id for hit in hits]
        self.distances = [hit["distance"] for hit in hits]


def hits_of(results: Any, fields: Sequence[str] = ()) -> list[Hits]:
    """Return the hits of each query of a SearchResultData. fields: scalar fields to include in the hits."""
    keys, scores = keys_of(results.ids), list(results.scores)
    columns = {name: _numbers(column_named(results.fields_data, name)) for name in fields}
    hits = (
        Hit(key, score, row, {name: column[row] for name, column in columns.items() if column})
        for row, (key, score) in enumerate(zip(keys, scores, strict=True))
    )
    return [Hits(list(islice(hits, count))) for count in results.topks]


def pick(results: Any, chosen: Sequence[Hits]) -> None:
    """Reduce a SearchResultData to these of its rows, by query, with the scores of the hits, in place."""
    rows = [hit.row for hits in chosen for hit in hits]
    keys = keys_of(results.ids)
    results.num_queries = len(chosen)
    results.topks[:] = [len(hits) for hits in chosen]
    results.top_k = max(results.topks, default=0)
    results.scores[:] = [hit["distance"] for hits in chosen for hit in hits]
    if rows == list(range(len(keys))):
        return
    put_keys(results.ids, [keys[row] for row in rows])
    if results.element_indices.data:
        results.element_indices.data[:] = [results.element_indices.data[row] for row in rows]
    groups = [results.group_by_field_value] if results.HasField("group_by_field_value") else []
    for column in (*results.fields_data, *results.group_by_field_values, *groups):
        take_rows(column, rows)
    for highlights in results.highlight_results:
        _take(highlights.datas, rows)


def keys_of(ids: Any) -> list[Key]:
    """Return the keys of an IDs message."""
    kind = ids.WhichOneof("id_field")
    return list(getattr(ids, kind).data) if kind else []


def put_keys(ids: Any, keys: Sequence[Key]) -> None:
    """Set the keys of an IDs message, of its own type; if it has no type, that of the first key."""
    kind = ids.WhichOneof("id_field") or ("str_id" if keys and isinstance(keys[0], str) else "int_id")
    getattr(ids, kind).data[:] = keys


def _numbers(column: Any) -> list[float] | None:
    """Return the numbers of a column; None if the answer has no such column, as when nothing was found."""
    kind = column and column.scalars.WhichOneof("data")
    return list(getattr(column.scalars, kind).data) if kind else None


def rows_of(columns: Iterable[Any], count: int) -> list[dict[str, Any]]:
    """Return the `count` rows of a write's columns. Raises UnsupportedOperation for unknown types."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for column in columns:
        for row, value in zip(rows, _spread(column, count), strict=True):
            row.update((value or {}) if column.is_dynamic else {column.field_name: value})
    return rows


def _spread(column: Any, count: int) -> Sequence[Any]:
    """Return a value for each row, None for null rows; a column may leave these out of its data."""
    values, valid = list(_values(column)), list(column.valid_data)
    if len(valid) != count:
        return values
    if len(values) == count:
        return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]
    following = iter(values)
    return [next(following) if is_valid else None for is_valid in valid]


_SCALARS = (None, "bool_data", "int_data", "long_data", "float_data", "double_data", "string_data")


def _values(column: Any) -> Iterable[Any]:
    if column.HasField("scalars"):
        kind = column.scalars.WhichOneof("data")
        data = getattr(column.scalars, kind).data if kind else ()
        if kind == "json_data":
            return map(json.loads, data)
        if kind == "array_data":
            kinds = (array.WhichOneof("data") for array in data)
            return [list(getattr(array, of).data) if of else [] for array, of in zip(data, kinds, strict=True)]
        if kind in _SCALARS:
            return data
    elif column.HasField("vectors"):
        vectors, kind = column.vectors, column.vectors.WhichOneof("data")
        if kind == "float_vector":
            return np.array(floats(vectors.float_vector)).reshape(-1, vectors.dim)
        if kind == "sparse_float_vector":
            return map(sparse_parse_single_row, vectors.sparse_float_vector.contents)
        if kind in _BYTES_OF_A_NUMBER:
            return _packed_vectors(vectors, kind)
        if kind is None:
            return ()
    raise UnsupportedOperation(f"the proxy cannot write {DataType(column.type).name} here")
