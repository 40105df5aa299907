"""Vectors as float matrices, their metrics, lengths and mean, and half precision. No I/O.

½‖r‖² in float32 loses bits in a gallery far from zero. So half squares are those of r − c and
queries are sent as q − c, where c is the mean. A row is stored as r − a. In each dimension, a is
the number of c if all rows have numbers between half and twice as large there, or 0; otherwise a is
0. All dtypes subtract such numbers without rounding (Sterbenz), so rows are read back bit for bit,
except that −0 becomes 0.

float16 and bfloat16 fields store augmented vectors in this format, for < r , n_0 , n_1 … 0 > with
n = h + l, and for < q , w_0 , w_1 … 0 > with w = u + v:

    vector   < r , h_0 , l_0 , h_0/16 , h_1 , l_1 , h_1/16 … 0 >
    query    < q , u_0 , u_0 , 16·v_0 , u_1 , u_1 , 16·v_1 … 0 >

Half precision is too coarse for the numbers after a vector (½‖r‖² and the biases). So each is
stored as two, the second the remainder of the first, and so is its weight: u(h + l) + v·h is n·w to
16 bits in bfloat16 and to 22 in float16. The last h is divided by 16, so that a graph, built on the
inner products of stored vectors, does not count it twice.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter

Floats = npt.NDArray[np.float32]


def packed(vectors: Any, width: int) -> Floats | None:
    """Pack lists of `width` Python numbers each, float32 (n, width), in half of NumPy's time.

    Returns None for anything else, and for numbers that do not fit into float32.
    """
    if not isinstance(vectors, list) or not vectors:
        return None
    if not all(type(row) is list and len(row) == width for row in vectors):
        return None

    pack = packing(width)
    try:
        content = b"".join([pack(*row) for row in vectors])
    except (struct.error, OverflowError):
        return None
    return np.frombuffer(content, np.float32).reshape(len(vectors), width)


def without_tensors(vectors: Any) -> Any:
    """Return vectors with float32 arrays in place of tensors of torch.

    Tensors may be half-precise, on a device, or part of a graph of gradients; NumPy reads none of
    these. Raises InvalidInput for complex tensors.
    """
    # If torch is not loaded, there is no tensor, and nobody waits for its import.
    torch = sys.modules.get("torch")
    if torch is None:
        return vectors
    if isinstance(vectors, torch.Tensor):
        return _array_of(vectors)

    is_list = isinstance(vectors, list | tuple)
    if is_list and any(isinstance(row, torch.Tensor) for row in vectors):
        return [_array_of(row) if isinstance(row, torch.Tensor) else row for row in vectors]
    return vectors


def _array_of(tensor: Any) -> Any:
    if tensor.is_complex():
        raise InvalidInput(f"vectors must hold real numbers, not {tensor.dtype}")
    return tensor.detach().cpu().float().numpy()


def matrix(vectors: Any, width: int, what: str) -> Floats:
    """Return `vectors`, which messages call `what`, as float32 (n, width).

    Raises DimensionMismatch, and InvalidInput if they are not rows of real numbers.
    """
    quick = _quick_matrix(vectors, width)
    if quick is not None:
        return quick

    vectors = without_tensors(vectors)
    if _is_complex(vectors):
        raise InvalidInput(f"{what} must hold real numbers, not complex ones")
    try:
        rows = np.asarray(vectors, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} must be rows of {width} numbers each: {error}") from None

    if rows.ndim != 2:
        raise InvalidInput(f"{what} must be of shape (n, {width}), got {rows.shape}")
    if rows.shape[1] != width:
        raise DimensionMismatch(f"{what} must have {width} dimensions, got {rows.shape[1]}")
    return rows


def only_vector(vectors: Any, width: int) -> Floats | list[Any] | None:
    """Return the only vector of a list or a matrix: an array of float32 (width,), or a list of so many
    entries.

    Returns None for anything else, which `matrix` looks at closely.
    """
    if type(vectors) not in (list, np.ndarray) or len(vectors) != 1:
        return None

    vector = vectors[0]
    if type(vector) is np.ndarray:
        fits = vector.dtype == np.float32 and vector.shape == (width,)
        return cast(Floats, vector) if fits else None
    return vector if type(vector) is list and len(vector) == width else None


@lru_cache(maxsize=16)
def packing(width: int) -> Callable[..., bytes]:
    """Return what packs so many numbers as float32."""
    return struct.Struct(f"{width}f").pack


def _quick_matrix(vectors: Any, width: int) -> Floats | None:
    """Return one query, the most frequent search, or lists of numbers as a matrix.

    Returns None for anything else, which `matrix` looks at closely.
    """
    one = only_vector(vectors, width)
    return one[None] if isinstance(one, np.ndarray) else packed(vectors, width)


def _is_complex(vectors: Any) -> bool:
    """Whether NumPy would drop an imaginary part.

    NumPy itself rejects lists of Python's complex numbers.
    """
    if isinstance(vectors, list):
        return any(isinstance(row, np.ndarray) and row.dtype.kind == "c" for row in vectors)
    return isinstance(vectors, np.ndarray) and vectors.dtype.kind == "c"


def lengths_of(rows: Floats) -> npt.NDArray[np.float64]:
    """Return the lengths of rows (n, d), float64 (n,)."""
    return np.sqrt(2 * half_squares(rows))


def half_squares(rows: Floats) -> npt.NDArray[np.float64]:
    """Return ½‖r‖² of rows (n, d), float64 (n,)."""
    wide = rows.astype(np.float64)
    return cast("npt.NDArray[np.float64]", 0.5 * np.einsum("ij,ij->i", wide, wide))


def norms_of(rows: Floats) -> npt.NDArray[np.float64]:
    """Return the lengths that COSINE divides rows (n, d) by, float64 (n,).

    They are exactly 1.0 for unit vectors to float32 accuracy: such rows are stored and read back bit
    for bit.
    """
    lengths = lengths_of(rows)
    lengths[np.abs(lengths - 1) <= UNIT_TOLERANCE] = 1.0
    return lengths


class Mean(NamedTuple):
    """A mean of the gallery."""

    seen_from: Floats
    """(d,): c."""
    taken_off: Floats
    """(d,): a, in each dimension the number of c, or 0."""
    left_on: npt.NDArray[np.float64]
    """(d,): o = c − a, the part of the mean that stored rows contain."""
    half_square_left_on: float
    """½‖o‖²."""

    @classmethod
    def of(cls, seen_from: Floats, taken_off: Floats) -> Mean:
        """Return the mean c of which a is taken off."""
        left_on = np.subtract(seen_from, taken_off, dtype=np.float64)
        return cls(seen_from, taken_off, left_on, 0.5 * float(left_on @ left_on))


def lost(rows: Floats, taken_off: Floats) -> npt.NDArray[np.bool_]:
    """Return which numbers of rows may be rounded when `taken_off` (d,) is subtracted.

    rows: (n, d). Returns bool (n, d).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = rows / taken_off.astype(np.float64)
    # Sterbenz: x − y is exact if y/2 ≤ x ≤ 2y.
    is_near = (ratios >= 0.5) & (ratios <= 2)
    exact = (taken_off == 0) | (rows == 0) | ~np.isfinite(rows) | is_near
    return np.asarray(~exact)


def as_text(mean: Floats, far: npt.NDArray[np.bool_]) -> str:
    """Return a mean (d,) and whether rows are stored without it (d,) as text.

    It is base64 of d float32 and d bits.
    """
    content = mean.astype("<f4").tobytes() + np.packbits(far).tobytes()
    return base64.b64encode(content).decode()


def mean_in(text: str, dim: int) -> Mean:
    """Read the text that `as_text` returns; zeros for an empty text.

    Raises InvalidParameter for anything else.
    """
    if not text:
        return Mean.of(np.zeros(dim, np.float32), np.zeros(dim, np.float32))

    content = _from_base64(text, "the mean of a layout")
    bytes_of_bits = math.ceil(dim / 8)
    if len(content) != 4 * dim + bytes_of_bits:
        raise InvalidParameter(f"{len(content)} bytes are no mean of {dim} dimensions")

    mean = np.frombuffer(content, "<f4", dim).astype(np.float32)
    # NaN is not at most anything.
    if not half_squares(mean[None, :])[0] <= LARGEST_HALF_SQUARE:
        raise InvalidParameter(
            "the mean of a layout contains NaN or infinity, or is too long for float32"
        )

    packed_bits = np.frombuffer(content, np.uint8, offset=4 * dim)
    far = np.unpackbits(packed_bits, count=dim).astype(np.bool_)
    return Mean.of(mean, np.where(far, mean, np.float32(0)))


def _from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    # binascii.Error, or characters outside ASCII.
    except ValueError as error:
        raise InvalidParameter(f"{what} is not base64: {error}") from None


Metric = Literal["IP", "COSINE", "L2"]

ALIGNMENT = 16
"""The width of augmented vectors is a multiple of it, which suits SIMD code."""
LARGEST_HALF_SQUARE = 1e36
"""Largest ½‖c‖² of a mean c, so that those of rows around it fit into float32."""
MAX_WIDTH = 32_768
"""Largest dimension of a vector field of Milvus."""
UNIT_TOLERANCE = 2.5e-7
"""Vectors of a length that differs from 1 by at most this count as unit vectors: two units in the
last place of float32."""

QUERY_SCALE = 4
"""Scale of v relative to u.

v adds to the inner products among stored vectors a sixteenth of what u adds.
"""


def as_metric(name: str) -> Metric:
    """Return `name`, in any case, as one of IP, COSINE, L2.

    Raises InvalidParameter for other names.
    """
    if name.upper() not in get_args(Metric):
        raise InvalidParameter(f"metric {name!r} cannot be corrected: use one of IP, COSINE, L2")
    return cast(Metric, name.upper())


LARGEST_NUMBER = 127
"""Largest number of int8, in which directions of locality hints and means of kinds are."""


def hint_directions_in(text: str, dim: int) -> npt.NDArray[np.int8]:
    """Read the text that `hint_directions` returns: directions times LARGEST_NUMBER, int8 (dim, c).

    Raises InvalidParameter for anything else.
    """
    numbers = np.frombuffer(_from_base64(text, "the direction of locality hints"), np.int8)
    if len(numbers) % dim:
        raise InvalidParameter(f"{len(numbers)} numbers are no directions of dimension {dim}")
    return numbers.reshape(dim, -1)


def rows_as_text(rows: npt.NDArray[np.floating[Any]]) -> str:
    """Return rows (m, d) as base64: a float32 scale for each, then int8 numbers of those that are not 0.

    Means need no more digits: queries and biases are computed with the same rounded ones.
    """
    numbers = np.asarray(rows, np.float64)
    scales = np.abs(numbers).max(axis=1, initial=0.0) / LARGEST_NUMBER
    scales = scales.astype(np.float32)
    divisors = np.where(scales == 0, 1, scales).astype(np.float64)
    rounded = np.rint(numbers / divisors[:, None]).clip(-LARGEST_NUMBER, LARGEST_NUMBER)
    content = scales.astype("<f4").tobytes() + rounded[scales != 0].astype(np.int8).tobytes()
    return base64.b64encode(content).decode()


def rows_in(text: str, count: int, dim: int) -> Floats:
    """Read the text of `rows_as_text`: float32 (count, dim). Raises InvalidParameter."""
    content = _from_base64(text, "means of kinds")
    scales = np.frombuffer(content[: 4 * count].ljust(4 * count, b"\0"), "<f4")
    has_numbers = scales != 0
    if len(content) != 4 * count + dim * has_numbers.sum():
        raise InvalidParameter(
            f"{len(content)} bytes are not {count} means of {dim} dimensions each"
        )
    if not np.isfinite(scales).all() or (np.abs(scales) > 1e30).any():
        raise InvalidParameter("means of kinds contain numbers that are not finite, or too large")
    rows = np.zeros((count, dim), np.float32)
    numbers = np.frombuffer(content, np.int8, offset=4 * count).reshape(-1, dim)
    rows[has_numbers] = numbers * scales[has_numbers, None]
    return rows


Dtype = Literal["float32", "float16", "bfloat16"]

BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number."""
COLUMNS: dict[Dtype, int] = {"float32": 1, "float16": 3, "bfloat16": 3}
"""Columns of a field for one number after the vector."""
DAMPING = np.float32(16)
"""Divisor of the third column of a number, and factor of its weight: a power of two, so that
neither is rounded."""
SPACING: dict[Dtype, float] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Upper bound of one unit in the last place, relative to the number."""
SMALLEST: dict[Dtype, float] = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}
"""Smallest difference of numbers near zero."""


def unit_directions(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return vectors (…, d) divided by their lengths, in float64; zero vectors stay."""
    numbers = vectors.astype(np.float64)
    lengths = np.linalg.norm(numbers, axis=-1, keepdims=True)
    return np.asarray(numbers / np.where(lengths == 0, 1, lengths), np.float64)


def same_directions(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: Dtype, units: int) -> bool:
    """Whether vectors (…, d) have the same directions, up to so many units in the last place of
    numbers of `dtype`.
    """
    return bool(
        np.allclose(
            unit_directions(a),
            unit_directions(b),
            rtol=units * SPACING[dtype],
            atol=units * SMALLEST[dtype],
        )
    )


def rounded(values: npt.ArrayLike, dtype: Dtype) -> Floats:
    """Round to the nearest numbers of `dtype`, ties to even, as float32 of the same shape.

    Raises InvalidInput if a finite number exceeds the largest number of the dtype.
    """
    exact = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return exact

    with np.errstate(over="ignore"):
        nearest = _to_float16(exact) if dtype == "float16" else _to_bfloat16(exact)

    # An infinity of the user's is no number that became too large.
    if not np.array_equal(np.isinf(nearest), np.isinf(exact)):
        largest = np.abs(exact[np.isinf(nearest) & ~np.isinf(exact)]).max()
        raise InvalidInput(f"a number of size {largest:g} does not fit into {dtype}")
    return nearest


def encode(rows: npt.ArrayLike, dtype: Dtype) -> list[Any]:
    """Return vectors (n, w) as pymilvus takes them.

    They are arrays of float32, or the bytes of half-precision numbers. Raises InvalidInput if a number
    does not fit.
    """
    if dtype == "float32":
        return list(np.asarray(rows, np.float32))

    nearest = rounded(rows, dtype)
    if dtype == "float16":
        return [row.tobytes() for row in nearest.astype("<f2")]
    # bfloat16 is the upper half of float32.
    upper = (nearest.view(np.uint32) >> 16).astype("<u2")
    return [row.tobytes() for row in upper]


def returned(rows: Floats, dtype: Dtype) -> list[Any]:
    """Return vectors (n, w) as pymilvus returns them: lists of numbers, or bytes."""
    return rows.tolist() if dtype == "float32" else encode(rows, dtype)


def unpacked(value: Any, dtype: Dtype) -> Any:
    """Return the bytes of half-precision numbers as float32 (w,); anything else is unchanged.

    The bytes may be inside a list, as pymilvus's queries return them. Raises InvalidInput for an
    odd number of bytes.
    """
    if dtype == "float32":
        return value
    is_in_list = isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes)
    content = value[0] if is_in_list else value
    if not isinstance(content, bytes):
        return value
    if len(content) % 2:
        raise InvalidInput(
            f"{len(content)} bytes are no vector of {dtype}, which takes 2 for each number"
        )

    if dtype == "float16":
        return np.frombuffer(content, "<f2").astype(np.float32)
    return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)


def decode(values: Iterable[Any], dtype: Dtype) -> Floats:
    """Return n vectors, as pymilvus returns or takes them, as float32 (n, w).

    Raises InvalidInput if they are not rows of numbers, or of bytes, of one length.
    """
    numbers = [unpacked(value, dtype) for value in values]
    try:
        return np.asarray(numbers, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"vectors must be rows of numbers, or bytes, of one length: {error}"
        ) from None


def rounded_to_sums(numbers: npt.ArrayLike, dtype: Dtype) -> Floats:
    """Round each number to the sum of two numbers of `dtype`, float32 of the same shape.

    A second rounding changes nothing.
    """
    coarse, remainder = _coarse_and_remainder(np.asarray(numbers, np.float32), dtype)
    return cast(Floats, coarse + remainder)


@dataclass(frozen=True)
class StorageFormat:
    """The storage format of augmented vectors < r (dim) , numbers , 0 … 0 >.

    Formats of one width are the same. Raises InvalidParameter if the width exceeds Milvus's limit.
    """

    dtype: Dtype
    """Type of the field."""
    dim: int
    """d, the dimension of the vectors."""
    numbers: int = 0
    """How many numbers follow the vector; 0 stores the vectors alone."""
    multiple_of: int = 1
    """The width is a multiple of it."""

    def __post_init__(self) -> None:
        if self.width > MAX_WIDTH:
            raise InvalidParameter(
                f"dimension {self.dim} leaves no room for {self.width - self.dim} further columns "
                f"of {self.dtype}: the stored width would be {self.width}, Milvus allows "
                f"{MAX_WIDTH}"
            )

    @cached_property
    def width(self) -> int:
        """Width of the field."""
        return self._aligned(COLUMNS[self.dtype])

    def encode_rows(self, rows: Floats) -> list[Any]:
        """Return rows as pymilvus stores them. Raises InvalidInput if a number does not fit."""
        return encode(self.split(rows), self.dtype)

    def encode_queries(self, rows: Floats) -> list[Any]:
        """Return augmented queries as pymilvus sends them. Raises as `encode_rows` does."""
        if self.is_plain:
            return encode(rows, self.dtype)
        coarse, remainder = _coarse_and_remainder(self._numbers(rows), self.dtype)
        # u(h + l) + 16v · h/16: v·l, a product of two remainders, is below the precision.
        return encode(self._filled(rows, coarse, coarse, DAMPING * remainder), self.dtype)

    def decode(self, values: Iterable[Any]) -> Floats:
        """Return rows as they are stored, or queries as they are sent, as float32 (n, width).

        Raises InvalidInput if they are not rows of numbers, or of bytes, of one length.
        """
        return decode(values, self.dtype)

    def split(self, rows: Floats) -> Floats:
        """Return float32 (n, width): the rows in the columns of the field."""
        if self.is_plain:
            return rows
        coarse, remainder = _coarse_and_remainder(self._numbers(rows), self.dtype)
        return self._filled(rows, coarse, remainder, rounded(coarse / DAMPING, self.dtype))

    def joined(self, fields: Floats) -> Floats:
        """Return the rows from which `split` made `fields` (n, width); they are rounded."""
        if self.is_plain:
            return fields
        rows = np.zeros((len(fields), self._aligned(1)), np.float32)
        rows[:, : self.dim] = fields[:, : self.dim]
        # h + l; the third column has nothing that these do not have.
        triples = fields[:, self.dim : self.dim + 3 * self._stored]
        rows[:, self.dim : self.dim + self._stored] = triples[:, ::3] + triples[:, 1::3]
        return rows

    @cached_property
    def is_plain(self) -> bool:
        return self.dtype == "float32" or not self.numbers

    @cached_property
    def _stored(self) -> int:
        """How many numbers after the vector the field contains."""
        return min(self._aligned(1) - self.dim, (self.width - self.dim) // 3)

    def _numbers(self, rows: Floats) -> Floats:
        """Return the numbers after the vectors, (n, stored)."""
        return rows[:, self.dim : self.dim + self._stored]

    def _filled(self, rows: Floats, *thirds: Floats) -> Floats:
        """Return fields (n, width) with the vectors, and three columns for each number."""
        fields = np.zeros((len(rows), self.width), np.float32)
        fields[:, : self.dim] = rows[:, : self.dim]
        end = self.dim + 3 * self._stored
        for offset, columns in enumerate(thirds):
            fields[:, self.dim + offset : end : 3] = columns
        return fields

    def _aligned(self, columns_of_a_number: int) -> int:
        """Return the width if each number takes so many columns."""
        columns = self.dim + columns_of_a_number * self.numbers
        return math.ceil(columns / self.multiple_of) * self.multiple_of


def _coarse_and_remainder(numbers: Floats, dtype: Dtype) -> tuple[Floats, Floats]:
    """Return each number rounded to `dtype`, and the remainder rounded to `dtype`."""
    coarse = rounded(numbers, dtype)
    with np.errstate(invalid="ignore"):
        remainder = numbers - coarse
    # ∞ − ∞ is NaN, which would replace an infinity when both are added again.
    return coarse, rounded(np.where(np.isfinite(coarse), remainder, 0), dtype)


def _to_float16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _to_bfloat16(values: Floats) -> Floats:
    """Round to the nearest bfloat16, ties to even, as float32."""
    # Half a step of the upper 16 bits, or a little less if the last of them is even, and then a
    # truncation. The sum can turn a NaN into another number.
    bits = values.view(np.uint32)
    last_bit = (bits >> 16) & 1
    upper = (bits + (last_bit + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), upper).view(np.float32)
