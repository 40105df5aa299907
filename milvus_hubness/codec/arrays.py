"""Vectors as float matrices, their lengths and their mean, and the metrics. No I/O.

Distances do not change when all vectors move by the same offset, but ½‖r‖² in float32 does: if a gallery is
100 times as far from zero as its rows are from each other, ½‖r‖² loses 13 bits. So half squares are those of
r − c and queries are sent as q − c, where c is the mean. A row is stored as r − a. In each dimension, a is
the number of c if

    that number is so far from zero that all rows have numbers between half and twice as large, or 0,

and 0 otherwise. float32 and both half precisions subtract such numbers without rounding (Sterbenz). So rows
are read back bit for bit, except that −0 becomes 0.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
)

Floats = npt.NDArray[np.float32]


def _packed(vectors: Any, width: int) -> Floats | None:
    """Pack lists of `width` Python numbers each, float32 (n, width), in half of NumPy's time.

    Returns None for anything else, and for numbers that do not fit into float32.
    """
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
    """Return `vectors` as float32 (n, width).

    what: the name of the vectors in error messages. Raises DimensionMismatch, and InvalidInput if they are
    not rows of real numbers.
    """
    if _is_complex(vectors):
        raise InvalidInput(f"{what} must hold real numbers, not complex ones")
    try:
        if isinstance(vectors, list) and len(vectors) == 1 and isinstance(vectors[0], np.ndarray):
            rows = np.asarray(vectors[0], np.float32)[None]  # This takes half the time.
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
    """Whether NumPy would drop an imaginary part; NumPy itself rejects lists of Python's complex numbers."""
    if isinstance(vectors, list):
        return any(isinstance(row, np.ndarray) and row.dtype.kind == "c" for row in vectors)
    return isinstance(vectors, np.ndarray) and vectors.dtype.kind == "c"


def lengths_of(rows: Floats) -> npt.NDArray[np.float64]:
    """Return the lengths of rows (n, d), float64 (n,)."""
    return np.sqrt(2 * half_squares64(rows))


def half_squares(rows: Floats) -> Floats:
    """Return ½‖r‖² of rows (n, d), float32 (n,), computed in float64."""
    return half_squares64(rows).astype(np.float32)


def half_squares64(rows: Floats) -> npt.NDArray[np.float64]:
    """Return ½‖r‖² of rows (n, d) as float64 (n,), unrounded."""
    wide = rows.astype(np.float64)
    return cast("npt.NDArray[np.float64]", 0.5 * np.einsum("ij,ij->i", wide, wide))


MOST_NUMBERS = 5_120
"""Largest dimension of a mean: a migration record of at most 65,535 bytes contains the mean twice, as
text."""

MEASURED_ROWS = 10_000
"""Largest number of rows, spread evenly, from which the mean is computed."""

FAR = 8
"""Least ratio of |mean| to the spread around it for a dimension that is stored without its mean: all but a
few numbers of such a dimension are that many times farther from zero than from the mean.
"""

LEAST_FAR = 2.0**-14
"""Smallest number of a mean that is subtracted: float16 may round when it subtracts smaller ones."""


class Mean(NamedTuple):
    """A mean of the gallery.

    seen_from: (d,) c. taken_off: (d,) a, in each dimension the number of c, or 0.
    """

    seen_from: Floats
    taken_off: Floats


def mean_of(rows: Floats, *, taken_off: bool = True) -> str:
    """Return the mean of finite rows (n, d) as text; empty if half squares lose next to nothing without it.

    In each dimension, numbers beyond the 1st and 99th percentile are clipped to these. The mean is rounded to
    as many bits as the rows have. taken_off: whether rows may be stored without the mean.
    """
    some = rows[:: -(-len(rows) // MEASURED_ROWS)] if len(rows) else rows
    if not some.any() or some.shape[1] > MOST_NUMBERS:
        return ""
    low, high = np.percentile(some, [1, 99], axis=0)
    inner = np.clip(some, low, high, dtype=np.float64)
    mean = _rounded_as(some, inner.mean(axis=0).astype(np.float32))
    if np.square(mean, dtype=np.float64).sum() <= inner.var(axis=0).sum():
        return ""
    far = np.maximum(high - mean, mean - low) * FAR <= np.abs(mean)
    far &= (np.abs(mean) >= LEAST_FAR) & ~lost(some, mean).any(axis=0) & taken_off
    return as_text(mean, far)


def lost(rows: Floats, taken_off: Floats) -> npt.NDArray[np.bool_]:
    """Return which numbers of rows (n, d) may be rounded when `taken_off` (d,) is subtracted, bool (n, d)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = rows / taken_off.astype(np.float64)
    kept = (taken_off == 0) | (rows == 0) | ~np.isfinite(rows) | ((shares >= 0.5) & (shares <= 2))
    return np.asarray(~kept)


def as_text(mean: Floats, far: npt.NDArray[np.bool_]) -> str:
    """Return a mean as text: base64 of d float32 and d bits.

    mean: (d,). far: (d,) whether rows are stored without it.
    """
    return base64.b64encode(mean.astype("<f4").tobytes() + np.packbits(far).tobytes()).decode()


def mean_in(text: str, dim: int) -> Mean:
    """Read the text that `as_text` returns; zeros for an empty text.

    Raises InvalidParameter for anything else.
    """
    if not text:
        return Mean(np.zeros(dim, np.float32), np.zeros(dim, np.float32))
    try:
        found = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InvalidParameter(f"the mean of a layout is no base64: {error}") from None
    if len(found) != 4 * dim + -(-dim // 8):
        raise InvalidParameter(f"{len(found)} bytes are no mean of {dim} dimensions")
    mean = np.frombuffer(found, "<f4", dim).astype(np.float32)
    if not np.isfinite(mean).all():
        raise InvalidParameter("the mean of a layout holds NaN or infinity")
    far = np.unpackbits(np.frombuffer(found, np.uint8, offset=4 * dim), count=dim).astype(np.bool_)
    return Mean(mean, np.where(far, mean, np.float32(0)))


def _rounded_as(rows: Floats, mean: Floats) -> Floats:
    """Round the mean to as many bits as any number of the rows has, but to no fewer than bfloat16 has."""
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(rows).view(np.uint32), axis=None))
    step = np.uint32(min(used & -used, 2**16))
    return np.asarray(((mean.view(np.uint32) + step // 2) & ~(step - np.uint32(1))).view(np.float32))


Metric = Literal["IP", "COSINE", "L2"]

ALIGNMENT = 16
MAX_WIDTH = 32_768
UNIT_TOLERANCE = 2.5e-7
LEAST_LENGTH = 1e-9

SPREADS = 3
"""s² over the range of half squares: the graph then places an item at most a third farther away than it
is."""

QUERY_SCALE = 4
"""Factor on the scale of v relative to u: v adds to the inner products among stored vectors a sixteenth of
what u adds beyond their distance.
"""

GRAPH_HINT_SHARE: dict[Metric, float] = {"IP": 0.75, "COSINE": 0.75, "L2": 0.5}
"""λ by metric. Above it corrected searches gain little and raw ones lose; under L2 that begins sooner."""


def as_metric(name: str) -> Metric:
    """Return `name` as one of IP, COSINE, L2.

    Case does not matter. Raises InvalidParameter for other names.
    """
    if name.upper() not in get_args(Metric):
        raise InvalidParameter(f"metric {name!r} cannot be corrected: use one of IP, COSINE, L2")
    return cast(Metric, name.upper())
