"""float16 and bfloat16 vector fields: their bytes, and how the rows of a layout fill them. No I/O.

    stored   < r , h_0 , l_0 , h_0/16 , h_1 , l_1 , h_1/16 … 0 >    for  < r , n_0 , n_1 … 0 >,  n = h + l
    asked    < q , u_0 , u_0 , 16·v_0 , u_1 , u_1 , 16·v_1 … 0 >    for  < q , w_0 , w_1 … 0 >,  w = u + v

The numbers behind a vector (½‖r‖² and the biases) decide between neighbours whose scores are closer than a
half is fine. So each is stored as two halves, what the first leaves of it in the second, as is its weight:
the product u(h + l) + v·h is n·w to 16 bits in bfloat16 and to 22 in float16. The last h is damped, so that a
graph, which is built on the products of stored vectors, does not count it twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.codec.arrays import MAX_WIDTH, Floats
from milvus_hubness.errors import InvalidInput, InvalidParameter

Dtype = Literal["float32", "float16", "bfloat16"]

BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
COLUMNS: dict[Dtype, int] = {"float32": 1, "float16": 3, "bfloat16": 3}
"""What a number of ours takes of a field."""
DAMPING = np.float32(16)
SPACING: dict[Dtype, float] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""One unit in the last place of a number, in shares of it: at most this."""
SMALLEST: dict[Dtype, float] = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}
"""What numbers near zero are told apart by."""

_UPPER_HALF = np.uint32(0xFFFF0000)
_QUIET_NAN = np.uint32(0x7FC00000)


def rounded(values: npt.ArrayLike, dtype: Dtype) -> Floats:
    """The nearest numbers of that type, ties to even, as float32 of the same shape.

    Raises InvalidInput where a finite number is beyond the largest.
    """
    exact = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return exact
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float16).astype(np.float32) if dtype == "float16" else _to_bfloat16(exact)
    if not np.array_equal(np.isinf(nearest), np.isinf(exact)):
        largest = np.abs(exact[np.isinf(nearest) & ~np.isinf(exact)]).max()
        raise InvalidInput(f"a number of size {largest:g} does not fit into {dtype}")
    return nearest


def encode(rows: npt.ArrayLike, dtype: Dtype) -> list[Any]:
    """What pymilvus takes as the vectors (n, w) of a field, in rows and as the data of searches: arrays of
    float32, or the bytes of halves. Raises InvalidInput where a number does not fit."""
    if dtype == "float32":
        return list(np.asarray(rows, np.float32))
    nearest = rounded(rows, dtype)
    if dtype == "float16":
        return [row.tobytes() for row in nearest.astype("<f2")]
    return [row.tobytes() for row in (nearest.view(np.uint32) >> 16).astype("<u2")]


def returned(rows: Floats, dtype: Dtype) -> list[Any]:
    """Vectors (n, w) as pymilvus gives them: lists of numbers, or the bytes of halves."""
    return rows.tolist() if dtype == "float32" else encode(rows, dtype)


def unpacked(value: Any, dtype: Dtype) -> Any:
    """One vector as numbers: (w,) float32 where it is the bytes of halves, alone or inside a list as
    pymilvus's queries give them, else as it is. Raises InvalidInput for an odd number of bytes."""
    if dtype == "float32":
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes):
        [value] = value
    if not isinstance(value, bytes):
        return value
    if len(value) % 2:
        raise InvalidInput(f"{len(value)} bytes are no vector of {dtype}, which takes 2 for each number")
    if dtype == "float16":
        return np.frombuffer(value, "<f2").astype(np.float32)
    return (np.frombuffer(value, "<u2").astype(np.uint32) << 16).view(np.float32)


def decode(values: Iterable[Any], dtype: Dtype) -> Floats:
    """(n, w) float32 of n vectors as pymilvus gives or takes them. Raises InvalidInput where they are no rows
    of numbers, or of bytes, of one length."""
    numbers = [unpacked(value, dtype) for value in values]
    try:
        return np.asarray(numbers, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"vectors must be rows of numbers, or bytes, of one length: {error}") from None


def kept(numbers: npt.ArrayLike, dtype: Dtype) -> Floats:
    """What two halves keep of each number, float32 of the same shape; the same again of that."""
    coarse, left = _halved(np.asarray(numbers, np.float32), dtype)
    return cast(Floats, coarse + left)


@dataclass(frozen=True)
class StorageFormat:
    """How rows of float32 < r (dim) , numbers of ours , 0 … 0 >, their width a multiple of `multiple_of`, lie
    in a field of type `dtype`. Without numbers it is the vectors alone.

    A form with room for more numbers reads and writes the same where its width is the same. Raises
    InvalidParameter where they find no room in Milvus's widest field.
    """

    dtype: Dtype
    dim: int
    numbers: int = 0
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.width > MAX_WIDTH:
            raise InvalidParameter(
                f"dimension {self.dim} leaves no room for {self.width - self.dim} further columns of "
                f"{self.dtype}: the stored width would be {self.width}, Milvus allows {MAX_WIDTH}"
            )

    @property
    def width(self) -> int:
        """Of the field."""
        return self._aligned(COLUMNS[self.dtype])

    def encode_rows(self, rows: Floats) -> list[Any]:
        """What pymilvus takes for rows to be stored. Raises InvalidInput where a number does not fit."""
        return encode(self.split(rows), self.dtype)

    def encode_queries(self, rows: Floats) -> list[Any]:
        """What pymilvus takes for queries of stored rows. Raises as `stored` does."""
        if self._is_plain:
            return encode(rows, self.dtype)
        coarse, left = _halved(self._numbers(rows), self.dtype)
        return encode(self._filled(rows, coarse, coarse, DAMPING * left), self.dtype)

    def split(self, rows: Floats) -> Floats:
        """(n, width) float32: the rows in the columns of the field."""
        if self._is_plain:
            return rows
        coarse, left = _halved(self._numbers(rows), self.dtype)
        return self._filled(rows, coarse, left, rounded(coarse / DAMPING, self.dtype))

    def joined(self, fields: Floats) -> Floats:
        """What `split` made these of (n, width): vectors rounded to the type, numbers to two of it."""
        if self._is_plain:
            return fields
        rows = np.zeros((len(fields), self._aligned(1)), np.float32)
        rows[:, : self.dim] = fields[:, : self.dim]
        triples = fields[:, self.dim : self.dim + 3 * self._held]
        rows[:, self.dim : self.dim + self._held] = triples[:, ::3] + triples[:, 1::3]
        return rows

    @property
    def _is_plain(self) -> bool:
        return self.dtype == "float32" or not self.numbers

    @property
    def _held(self) -> int:
        """How many of the rows' columns behind the vector the field holds."""
        return min(self._aligned(1) - self.dim, (self.width - self.dim) // 3)

    def _numbers(self, rows: Floats) -> Floats:
        return rows[:, self.dim : self.dim + self._held]

    def _filled(self, rows: Floats, *thirds: Floats) -> Floats:
        fields = np.zeros((len(rows), self.width), np.float32)
        fields[:, : self.dim] = rows[:, : self.dim]
        for place, columns in enumerate(thirds):
            fields[:, self.dim + place : self.dim + 3 * self._held : 3] = columns
        return fields

    def _aligned(self, columns_of_a_number: int) -> int:
        columns = self.dim + columns_of_a_number * self.numbers
        return math.ceil(columns / self.multiple_of) * self.multiple_of


def _halved(numbers: Floats, dtype: Dtype) -> tuple[Floats, Floats]:
    """Each number as one of that type, and what is left of it as another."""
    coarse = rounded(numbers, dtype)
    with np.errstate(invalid="ignore"):
        left = numbers - coarse
    return coarse, rounded(np.where(np.isfinite(coarse), left, 0), dtype)


def _to_bfloat16(values: Floats) -> Floats:
    bits = values.view(np.uint32)
    last_kept = (bits >> 16) & 1
    upper = (bits + (last_kept + np.uint32(0x7FFF))) & _UPPER_HALF
    return np.where(np.isnan(values), _QUIET_NAN, upper).view(np.float32)
