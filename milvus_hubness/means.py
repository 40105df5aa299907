"""The mean vector from which vectors are seen under L2, and how much of it stored rows are without. No I/O.

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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.rows import Floats

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
