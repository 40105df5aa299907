"""Columns of Milvus's protocol as arrays and back: decode, join, and pick rows. No I/O.

A packed list of floats ends with its numbers as they are in memory, so it is read and written in one piece.
`client.rewrite` and `client.ranking` sort hits without regard to their other content. Here each hit has the
number of its row in the answer's columns, so columns are picked by row and otherwise stay as the server sent
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import BYTES, Dtype, decode
from milvus_hubness.errors import InvalidInput

VECTORS: dict[Dtype, str] = {
    "float32": "float_vector",
    "float16": "float16_vector",
    "bfloat16": "bfloat16_vector",
}
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
    vectors = column.vectors
    kept, width = VECTORS[dtype], vectors.dim
    if vectors.WhichOneof("data") not in (kept, None):
        raise InvalidInput(f"field {column.field_name!r} takes vectors of {dtype}")
    if dtype == "float32":
        numbers = floats(vectors.float_vector)
        if width < 1 or len(numbers) % width:
            raise InvalidInput(
                f"field {column.field_name!r}: {len(numbers)} numbers are no vectors of dimension {width}"
            )
        return numbers.reshape(-1, width)
    packed, size = getattr(vectors, kept), width * BYTES[dtype]
    if size < 1 or len(packed) % size:
        raise InvalidInput(
            f"field {column.field_name!r}: {len(packed)} bytes are no vectors of dimension {width}"
        )
    return decode([packed[i : i + size] for i in range(0, len(packed), size)], dtype).reshape(-1, width)


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
    elif kept := column.scalars.WhichOneof("data"):
        _take(getattr(column.scalars, kept).data, rows)
    if valid:
        column.valid_data[:] = [valid[row] for row in rows]


def _places(valid: Sequence[bool], rows: Sequence[int]) -> Sequence[int]:
    """Return the places of the vectors of these rows: null vectors take no place."""
    if not valid:
        return rows
    before = np.cumsum([0, *valid])
    return [int(before[row]) for row in rows if valid[row]]


def _take_vectors(vectors: Any, places: Sequence[int]) -> None:
    kept = vectors.WhichOneof("data")
    if kept == "float_vector":
        numbers = floats(vectors.float_vector)
        put_floats(vectors.float_vector, numbers.reshape(-1, vectors.dim)[list(places)].ravel())
    elif kept in _LISTS_OF_VECTORS:
        _take(getattr(getattr(vectors, kept), _LISTS_OF_VECTORS[kept]), places)
    elif kept:
        packed = getattr(vectors, kept)
        size = int(vectors.dim * _BYTES_OF_A_NUMBER[kept])
        setattr(vectors, kept, b"".join(packed[size * place : size * (place + 1)] for place in places))


def _take(values: Any, places: Sequence[int]) -> None:
    kept = list(values)
    taken = [kept[place] for place in places] if kept else []
    if taken and hasattr(taken[0], "SerializeToString"):
        taken = [type(each).FromString(each.SerializeToString()) for each in taken]
        del values[:]
        values.extend(taken)
    else:
        values[:] = taken


def _varint(number: int) -> bytes:
    taken = bytearray()
    while number > 0x7F:
        taken.append(number & 0x7F | 0x80)
        number >>= 7
    taken.append(number)
    return bytes(taken)


_IN_ONE_PIECE = ("binary_vector", "float16_vector", "bfloat16_vector", "int8_vector")


def joined(answers: Sequence[Any]) -> Any:
    """Join SearchResults into the first one, in place, and return it.

    The queries follow each other in order.
    """
    first, *others = answers
    for other in others:
        _join(first.results, other.results)
    return first


def _join(first: Any, other: Any) -> None:
    first.num_queries += other.num_queries
    first.top_k = max(first.top_k, other.top_k)
    first.scores.extend(other.scores)
    first.topks.extend(other.topks)
    first.ids.MergeFrom(other.ids)
    first.recalls.extend(other.recalls)
    if other.HasField("element_indices"):
        first.element_indices.MergeFrom(other.element_indices)
    if other.HasField("group_by_field_value"):
        first.group_by_field_value.MergeFrom(other.group_by_field_value)
    for columns, others in (
        (first.highlight_results, other.highlight_results),
        (first.fields_data, other.fields_data),
        (first.group_by_field_values, other.group_by_field_values),
    ):
        for column in others:
            there = column_named(columns, column.field_name)
            if there is None:
                columns.add().CopyFrom(column)
            else:
                _append(there, column)


def _append(column: Any, other: Any) -> None:
    """Append a column. Protobuf joins lists when it merges, but replaces bytes."""
    has_vectors = "vectors" in column.DESCRIPTOR.fields_by_name and column.HasField("vectors")
    kept = column.vectors.WhichOneof("data") if has_vectors else None
    before = getattr(column.vectors, kept) if kept in _IN_ONE_PIECE else b""
    column.MergeFrom(other)
    if kept in _IN_ONE_PIECE:
        setattr(column.vectors, kept, before + getattr(other.vectors, kept))


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
    found, start = [], 0
    for count in results.topks:
        rows = range(start, start + count)
        of_one = [
            Hit(
                keys[row], scores[row], row, {name: column[row] for name, column in columns.items() if column}
            )
            for row in rows
        ]
        found.append(Hits(of_one))
        start += count
    return found


def pick(results: Any, chosen: Sequence[Hits]) -> None:
    """Reduce a SearchResultData to these of its rows, by query, with the scores of the hits, in place."""
    rows = [hit.row for hits in chosen for hit in hits]
    keys = keys_of(results.ids)
    results.num_queries = len(chosen)
    results.topks[:] = [len(hits) for hits in chosen]
    results.top_k = max(results.topks, default=0)
    results.scores[:] = [hit["distance"] for hits in chosen for hit in hits]
    put_keys(results.ids, [keys[row] for row in rows])
    if results.element_indices.data:
        results.element_indices.data[:] = [results.element_indices.data[row] for row in rows]
    for column in results.fields_data:
        take_rows(column, rows)
    if results.HasField("group_by_field_value"):
        take_rows(results.group_by_field_value, rows)
    for column in results.group_by_field_values:
        take_rows(column, rows)
    for highlights in results.highlight_results:
        kept = [type(each).FromString(each.SerializeToString()) for each in highlights.datas]
        del highlights.datas[:]
        highlights.datas.extend(kept[row] for row in rows)


def keys_of(ids: Any) -> list[Key]:
    """Return the keys of an IDs message."""
    kept = ids.WhichOneof("id_field")
    return list(getattr(ids, kept).data) if kept else []


def put_keys(ids: Any, keys: Sequence[Key]) -> None:
    """Set the keys of an IDs message, of its own type; if it has no type, that of the first key."""
    kept = ids.WhichOneof("id_field") or ("str_id" if keys and isinstance(keys[0], str) else "int_id")
    getattr(ids, kept).data[:] = keys


def _numbers(column: Any) -> list[float] | None:
    """Return the numbers of a column; None if the answer has no such column, as when nothing was found."""
    if column is None:
        return None
    kept = column.scalars.WhichOneof("data")
    return list(getattr(column.scalars, kept).data) if kept else None
