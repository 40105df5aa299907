"""Rows of numbers as callers give them, as matrices, and how long they are. No I/O."""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import DimensionMismatch, InvalidInput

Floats = npt.NDArray[np.float32]


def _packed(vectors: Any, width: int) -> Floats | None:
    """(n, width) lists of as many Python numbers each, in half of numpy's time; None for anything else, and
    for numbers that no float32 holds."""
    if not isinstance(vectors, list) or not vectors:
        return None
    if not all(type(row) is list and len(row) == width for row in vectors):
        return None
    pack = struct.Struct(f"{width}f").pack
    try:
        packed = b"".join([pack(*row) for row in vectors])
    except (struct.error, OverflowError):
        return None
    return np.frombuffer(packed, np.float32).reshape(len(vectors), width)


def matrix(vectors: Any, width: int, what: str) -> Floats:
    """(n, width) float32. Raises DimensionMismatch, and InvalidInput for what is no rows of numbers."""
    if _is_complex(vectors):
        raise InvalidInput(f"{what} must hold real numbers, not complex ones")
    try:
        if isinstance(vectors, list) and len(vectors) == 1 and isinstance(vectors[0], np.ndarray):
            rows = np.asarray(vectors[0], np.float32)[None]  # in half the time
        else:
            packed = _packed(vectors, width)
            rows = np.asarray(vectors if packed is None else packed, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} must be rows of {width} numbers each: {error}") from None
    if rows.ndim != 2:
        raise InvalidInput(f"{what} must be of shape (n, {width}), got {rows.ndim} axes: {rows.shape}")
    if rows.shape[1] != width:
        raise DimensionMismatch(f"{what} must have {width} dimensions, got {rows.shape[1]}")
    return rows


def _is_complex(vectors: Any) -> bool:
    """Whether numpy would drop an imaginary part; it refuses lists of Python's complex numbers by itself."""
    if isinstance(vectors, list):
        return any(isinstance(row, np.ndarray) and row.dtype.kind == "c" for row in vectors)
    return isinstance(vectors, np.ndarray) and vectors.dtype.kind == "c"


def lengths_of(rows: Floats) -> npt.NDArray[np.float64]:
    """(n,) of rows (n, d)."""
    return np.sqrt(2 * half_squares64(rows))


def half_squares(rows: Floats) -> Floats:
    """(n,) ½‖r‖² of rows (n, d), computed in float64."""
    return half_squares64(rows).astype(np.float32)


def half_squares64(rows: Floats) -> npt.NDArray[np.float64]:
    """As `half_squares`, unrounded."""
    wide = rows.astype(np.float64)
    return cast("npt.NDArray[np.float64]", 0.5 * np.einsum("ij,ij->i", wide, wide))
