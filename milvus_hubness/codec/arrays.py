"""Vectors as float matrices, their lengths and their mean, and the metrics. No I/O.

Distances do not change when all vectors move alike, but ½‖r‖² in float32 does: where a gallery lies 100 times
as far from zero as its rows from each other, 13 bits of it are lost. So half squares are those of r − c and
queries are sent as q − c, c the mean. A row is stored as r − a, where a holds those numbers of c

    that lie so far from zero that all rows have numbers between half and twice as large, or 0,

as float32 and both half precisions subtract such numbers without rounding (Sterbenz), and 0 elsewhere. So
rows come back bit for bit, but −0 as 0.
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


MOST_NUMBERS = 5_120
"""In a mean: a migration's record, of 65,535 bytes at most, holds it twice, as text."""

MEASURED_ROWS = 10_000
"""At most so many, spread evenly, tell the mean."""

FAR = 8
"""So many times farther from zero than from the mean are all but a few numbers of a dimension that is stored
without its mean."""

LEAST_FAR = 2.0**-14
"""Smaller numbers may be too small for float16 to subtract them without rounding."""


class Mean(NamedTuple):
    """seen_from: (d,) c. taken_off: (d,) a, in each dimension the number of c, or 0."""

    seen_from: Floats
    taken_off: Floats


def mean_of(rows: Floats, *, taken_off: bool = True) -> str:
    """The mean of finite rows (n, d) as text; empty where half squares lose next to nothing without it.

    Of each dimension numbers beyond the 1st and 99th percentile count as these. Rounded to as many bits as
    the rows have. taken_off: whether rows may be stored without it.
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
    """(n, d) which numbers of rows (n, d) may be rounded when these (d,) are taken off."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = rows / taken_off.astype(np.float64)
    kept = (taken_off == 0) | (rows == 0) | ~np.isfinite(rows) | ((shares >= 0.5) & (shares <= 2))
    return np.asarray(~kept)


def as_text(mean: Floats, far: npt.NDArray[np.bool_]) -> str:
    """Of a mean (d,) and (d,) whether rows are stored without it: base64 of d float32 and d bits."""
    return base64.b64encode(mean.astype("<f4").tobytes() + np.packbits(far).tobytes()).decode()


def mean_in(text: str, dim: int) -> Mean:
    """What `as_text` wrote; zeros for an empty text. Raises InvalidParameter for anything else."""
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
    """The mean with as many bits as there are in any number of the rows, but no fewer than bfloat16 has."""
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(rows).view(np.uint32), axis=None))
    step = np.uint32(min(used & -used, 2**16))
    return np.asarray(((mean.view(np.uint32) + step // 2) & ~(step - np.uint32(1))).view(np.float32))


Metric = Literal["IP", "COSINE", "L2"]

ALIGNMENT = 16
MAX_WIDTH = 32_768
UNIT_TOLERANCE = 2.5e-7
LEAST_LENGTH = 1e-9

SPREADS = 3
"""s² over the range of half squares: an item links to others as if it lay at most a third further out."""

QUERY_SCALE = 4
"""v is scaled by so much more than u: to the products among stored vectors it adds a sixteenth of what u adds
beyond their distance."""

GRAPH_HINT_SHARE: dict[Metric, float] = {"IP": 0.75, "COSINE": 0.75, "L2": 0.5}
"""λ. Above it corrected searches gain little and raw ones lose; under L2 that begins sooner."""


def as_metric(name: str) -> Metric:
    """`name` as one of IP, COSINE, L2, in any case; raises InvalidParameter otherwise."""
    if name.upper() not in get_args(Metric):
        raise InvalidParameter(f"metric {name!r} cannot be corrected: use one of IP, COSINE, L2")
    return cast(Metric, name.upper())
