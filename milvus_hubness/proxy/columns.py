"""Columns of Milvus's protocol as arrays, and back. No I/O.

A packed list of floats ends with its numbers as they lie in memory: it is read and written in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import InvalidInput
from milvus_hubness.halves import BYTES, Dtype, decode
from milvus_hubness.layout import Floats

VECTORS: dict[Dtype, str] = {
    "float32": "float_vector",
    "float16": "float16_vector",
    "bfloat16": "bfloat16_vector",
}
"""Where a vector column of each type keeps its numbers."""
_DATA_TAG = b"\x0a"
_BYTES_OF_A_NUMBER = {"binary_vector": 1 / 8, "float16_vector": 2, "bfloat16_vector": 2, "int8_vector": 1}
_LISTS_OF_VECTORS = {"sparse_float_vector": "contents", "vector_array": "data"}


def column_named(columns: Iterable[Any], name: str) -> Any:
    """The FieldData of that name, None where there is none."""
    return next((column for column in columns if column.field_name == name), None)


def floats(array: Any) -> Floats:
    """(n,) the numbers of a FloatArray."""
    array.DiscardUnknownFields()
    packed, count = array.SerializeToString(), len(array.data)
    return np.frombuffer(packed, "<f4", count, len(packed) - 4 * count) if count else np.zeros(0, np.float32)


def put_floats(array: Any, numbers: npt.ArrayLike) -> None:
    """Make these the numbers of a FloatArray."""
    packed = np.ascontiguousarray(numbers, "<f4").tobytes()
    array.ParseFromString(_DATA_TAG + _varint(len(packed)) + packed)


def vectors_in(column: Any, dtype: Dtype) -> Floats:
    """(n, width) the vectors of a column. Raises InvalidInput where it holds none of that type and width."""
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
    """Make these its vectors: rows (n, width) as pymilvus takes them, arrays or the bytes of halves."""
    column.vectors.dim = width
    if dtype == "float32":
        numbers = np.stack(rows) if len(rows) else np.zeros((0, width), np.float32)
        put_floats(column.vectors.float_vector, numbers.ravel())
    else:
        setattr(column.vectors, VECTORS[dtype], b"".join(rows))


def take_rows(column: Any, rows: Sequence[int]) -> None:
    """Make a column hold these of its rows, in this order, in place."""
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
    """Where the vectors of these rows lie: those that are null take no place."""
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
