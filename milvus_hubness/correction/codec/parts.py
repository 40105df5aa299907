"""The parts of a layout: what each has in the columns of a row and of a query. No I/O.

A part is given its own columns of rows (n, c), and fills and reads them; where these are in a vector,
only `Layout` knows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import (
    LARGEST_NUMBER,
    MAX_WIDTH,
    QUERY_SCALE,
    Floats,
    Mean,
    Metric,
    half_squares,
    hint_directions_in,
    mean_in,
    rows_in,
)
from milvus_hubness.correction.codec.senders import ByKind, KindWeights, Weights
from milvus_hubness.errors import InvalidParameter

LARGEST_CONSTANT = 1e38
"""Largest size of a constant: float32 has numbers up to 3.4e38."""
LARGEST_SCALE = 2.0**100
"""Largest scale, and the inverse of the smallest one."""
MOST_SCALES = 2.0**20
"""Largest offset, in units of scale². A measured one is at most 2."""
LARGEST_SPREAD = 64
"""Most columns of one number after the vector."""
CACHED = 64
"""Number of texts whose arrays are remembered: the layouts of a process have few."""


class Part(ABC):
    """Columns of a layout.

    Raises InvalidParameter, as each part does, for constants that no layout can have.
    """

    metrics: ClassVar[tuple[Metric, ...]] = get_args(Metric)
    """The metrics under which a layout can have it."""
    noun: ClassVar[str]
    """What messages call it where it is not for all metrics."""

    @abstractmethod
    def width(self, dim: int, spread: int) -> int:
        """Return the number of its columns after vectors (n, dim), given the spread of the biases."""

    def validate_beside(self, dim: int, metric: Metric, spread: int) -> None:
        """Raise InvalidParameter unless vectors of this dimension and metric, whose biases have this
        spread, can have the part.
        """
        if metric not in self.metrics:
            raise InvalidParameter(
                f"{self.noun} are for {' and '.join(self.metrics)}, not for {metric}: leave them out"
            )


@dataclass(frozen=True)
class BiasSlots(Part):
    """The columns of biases, one slot a profile."""

    count: int = 1
    """Number of slots."""
    scale: float = 1.0
    """f, a power of two: a bias b is stored as f·b, and its weight is sent as w/f. So both are exact,
    to within the smallest number of float32. With columns of half squares it is 1/s, unless biases
    are spread."""
    spread: int = 1
    """n, a power of two: a bias, and under L2 ½‖r‖², is stored in n columns, and a query has 1/n of
    its weight in each."""

    def __post_init__(self) -> None:
        expect_size("the number of slots", self.count)
        _expect_power_of_two("the scale of biases", self.scale)
        if not 1 <= self.spread <= LARGEST_SPREAD or not _is_power_of_two(self.spread):
            raise InvalidParameter(
                f"the spread of biases is a power of two up to {LARGEST_SPREAD}, got "
                f"{self.spread!r:.20}"
            )

    def width(self, dim: int, spread: int) -> int:
        return self.count * spread

    def write(self, columns: Floats, biases: Floats) -> None:
        """Set the columns of rows to biases (n, slots)."""
        columns[...] = np.repeat(self.as_stored(biases), self.spread, axis=1)

    def read(self, columns: Floats, slot: int | slice) -> Floats:
        """Return the biases of rows in one slot, (n,), or in several, (n, slots)."""
        # The columns of a slot are equal: the first of each is enough.
        return columns[:, :: self.spread][:, slot] / np.float32(self.scale)

    def sent(self, weights: Weights) -> npt.NDArray[Any]:
        """Return what queries of these strengths have in each column of the slot that they read."""
        return -weights / self.scale / self.spread

    def as_stored(self, biases: Floats) -> Floats:
        """Return biases in the unit of the columns, in the same shape: none is rounded."""
        return biases * np.float32(self.scale)


@dataclass(frozen=True)
class HalfSquares(Part):
    """The columns u and v of L2, with ½‖r‖² of a row, and the mean that vectors are measured from.

    If biases are spread, the column u, which no query reads, is 0, and v has as many columns.
    """

    offset: float = 0.0
    """m."""
    scale: float = 1.0
    """s, a power of two."""
    mean: str = ""
    """c as `index_hints.mean_of` returns it; empty without one."""

    metrics = ("L2",)
    noun = "a mean, an offset and a scale of half squares"

    def __post_init__(self) -> None:
        _expect_finite("the offset of half squares", self.offset)
        _expect_power_of_two("the scale of half squares", self.scale)
        if abs(self.offset) > MOST_SCALES * self.scale**2:
            raise InvalidParameter(
                f"an offset of {self.offset:g} is too large for a scale of {self.scale:g}"
            )

    def width(self, dim: int, spread: int) -> int:
        return 1 + spread

    def validate_beside(self, dim: int, metric: Metric, spread: int) -> None:
        super().validate_beside(dim, metric, spread)
        # It raises if the text is no mean of this dimension.
        _ = self.mean_of(dim)

    def mean_of(self, dim: int) -> Mean:
        """Return c and the parts of it that stored vectors have and lack; zeros without one."""
        return _mean(self.mean, dim)

    def seen(self, rows: Floats) -> Floats:
        """Return the rows relative to the mean, (n, d)."""
        return rows - self.mean_of(rows.shape[1]).seen_from if self.mean else rows

    def without_mean(self, rows: Floats) -> Floats:
        """Return the rows less the part of the mean that is not stored, (n, d)."""
        return rows - self.mean_of(rows.shape[1]).taken_off if self.mean else rows

    def with_mean(self, stored: Floats) -> Floats:
        """Return the rows from which `without_mean` made these vectors, (n, d)."""
        if not self.mean:
            return stored
        # Where nothing was taken off, −0 and NaN stay as they are.
        taken_off = self.mean_of(stored.shape[1]).taken_off
        return np.where(taken_off == 0, stored, stored + taken_off)

    def write(self, columns: Floats, stored: Floats, rows: Floats) -> None:
        """Set the columns of rows (n, d), whose stored vectors are `stored` (n, d)."""
        if columns.shape[1] == 2:
            # Of the numbers as they were rounded, since the graph compares stored vectors.
            columns[:, 0] = (half_squares(stored) - self.offset) / self.scale

        # From the mean in float64: in float32 the difference would lose digits of the score.
        mean = self.mean_of(rows.shape[1])
        squares = half_squares(rows - mean.seen_from.astype(np.float64))
        v = (squares - self._query_offset(mean)) / (QUERY_SCALE * self.scale)
        columns[:, 1:] = v[:, None]

    def sent(self, spread: int) -> float:
        """Return what queries have in each column v."""
        return -QUERY_SCALE * self.scale / spread

    def reduced_items(self, rows: Floats) -> Floats:
        """Return rows (n, d + 2) whose inner product with reduced queries is −½‖q−r‖²."""
        # −½‖q−r‖² = q·r − 1·½‖r‖² − ½‖q‖²·1
        rows = self.seen(rows)
        squares = half_squares(rows).astype(np.float32)
        return np.column_stack([rows, squares, np.ones(len(rows), np.float32)])

    def reduced_queries(self, queries: Floats) -> Floats:
        """Return the counterpart of `reduced_items` for queries, (m, d + 2)."""
        rows = self.seen(queries)
        squares = half_squares(rows).astype(np.float32)
        return np.column_stack([rows, -np.ones(len(rows), np.float32), -squares])

    def above(self, queries: Floats) -> npt.NDArray[np.float64]:
        """Return by how much inner products of queries (m, d) exceed −½‖q−r‖², (m,)."""
        # ½‖q − c‖², the part of the mean that stored rows contain, and what v was stored without.
        mean = self.mean_of(queries.shape[1])
        seen = self.seen(queries)
        return (
            half_squares(seen) + seen.astype(np.float64) @ mean.left_on + self._query_offset(mean)
        )

    def _query_offset(self, mean: Mean) -> float:
        """Return m′: typical for ½‖r − c‖², as m − s² is for ½‖r‖²."""
        # A stored row is r − c + o, so on average its half square has ½‖o‖² more.
        return self.offset - self.scale**2 - mean.half_square_left_on


@dataclass(frozen=True)
class KindColumns(Part):
    """A column for each kind of items, and one for rows without a kind: a row has h in one of them."""

    count: int
    """K, the number of kinds."""
    scale: float = 1.0
    """h, a power of two: the number of a row in the column of its kind. Its square is in the inner
    product of two stored vectors of one kind, so it is small against their lengths."""
    offsets: str = ""
    """ν1 … νK as `rows_as_text`: a row of kind k is stored less νk, and one without a kind as it is.
    Empty if all are stored as they are."""

    metrics = ("IP", "COSINE")
    noun = "columns for kinds"

    def __post_init__(self) -> None:
        expect_size("the number of kinds", self.count)
        _expect_power_of_two("the scale of kinds", self.scale)

    def width(self, dim: int, spread: int) -> int:
        return self.count + 1

    def validate_beside(self, dim: int, metric: Metric, spread: int) -> None:
        super().validate_beside(dim, metric, spread)
        if spread > 1:
            raise InvalidParameter(
                f"columns for kinds stand beside biases with a spread of 1, got {spread}: leave them "
                "out"
            )
        # It raises if the text has no offset for each kind.
        _ = self.offsets_in(dim)

    def offsets_in(self, dim: int) -> Floats:
        """Return ν1 … νK, and zeros for rows without a kind, (K + 1, dim)."""
        return _kind_offsets(self.offsets, self.count, dim)

    def offsets_of(self, kinds: npt.ArrayLike, dim: int) -> Floats:
        """Return what rows of these kinds (n,) are stored less of, (n, dim)."""
        # −1, a row without a kind, is the last.
        return self.offsets_in(dim)[np.asarray(kinds, np.int64)]

    def without_offsets(self, rows: Floats, kinds: npt.ArrayLike) -> Floats:
        """Return rows (n, d) of these kinds (n,) less the offsets of their kinds, as they are stored."""
        return rows - self.offsets_of(kinds, rows.shape[1]) if self.offsets else rows

    def with_offsets(self, stored: Floats, columns: Floats) -> Floats:
        """Return stored vectors (n, d) with the offsets of the kinds in the columns, rounded."""
        if not self.offsets:
            return stored
        offsets = self.offsets_of(self.read(columns), stored.shape[1])
        # Where nothing was subtracted, −0 and NaN stay as they are.
        return np.where(offsets == 0, stored, stored + offsets)

    def write(self, columns: Floats, kinds: npt.ArrayLike) -> None:
        """Set the columns of rows to their kinds (n,), below 0 for none."""
        numbers = np.asarray(kinds, np.int64)
        columns[...] = 0
        # The last column is that of rows without a kind.
        columns[np.arange(len(columns)), np.where(numbers < 0, self.count, numbers)] = self.scale

    def read(self, columns: Floats) -> npt.NDArray[np.int64]:
        """Return the kinds of rows, (n,), −1 for none."""
        of_kinds = columns[:, : self.count]
        # Half of h, as another program may have rounded the numbers.
        has_kind = (of_kinds > self.scale / 2).any(axis=1)
        return np.where(has_kind, of_kinds.argmax(axis=1), -1)

    def change(self, stored: Floats, columns: Floats, kinds: npt.NDArray[np.int64]) -> None:
        """Give rows other kinds (n,): also the stored vectors (n, d) get the offsets of these."""
        if self.offsets:
            # Rows that keep their kind keep every bit.
            moved = kinds != self.read(columns)
            vectors = self.with_offsets(stored[moved], columns[moved])
            stored[moved] = self.without_offsets(vectors, kinds[moved])
        self.write(columns, kinds)

    def by_kind(self, columns: slice, dim: int, weights: KindWeights | None) -> ByKind | None:
        """Return how queries are compared with these weights of kinds; None for no comparison.

        None for weights leaves the means out, so that only the offsets of stored vectors count.
        columns: those of kinds in a query.
        """
        if weights is None and not self.offsets:
            return None
        if weights is None:
            # h is a power of two, so that nothing is rounded.
            directions = np.ascontiguousarray(self.offsets_in(dim).T / np.float32(self.scale))
            return ByKind(columns, directions, np.zeros(self.count + 1, np.float32), None)

        form = (self.offsets, self.scale)
        if form not in weights.sent:
            exact = (self.offsets_in(dim).T - weights.directions) / self.scale
            # Of the query less its mean, whose part is the same in all searches.
            added = weights.added / self.scale - weights.taken_off.astype(np.float64) @ exact
            directions = np.asarray(exact, np.float32)
            sent = ByKind(columns, directions, np.asarray(added, np.float32), weights.taken_off)
            weights.sent[form] = sent
        return weights.sent[form]


@dataclass(frozen=True)
class LocalityHints(Part):
    """The locality hint columns, which no query reads. The width must have them to spare."""

    directions: str
    """Directions of the columns as text, see `index_hints.hint_directions`."""
    reach: float
    """Length of an item's numbers in the columns."""

    metrics = ("IP", "COSINE")
    noun = "locality hint columns"

    def __post_init__(self) -> None:
        _expect_finite("the reach of locality hints", self.reach)
        if not self.directions or self.reach <= 0:
            raise InvalidParameter(
                f"locality hint columns need directions and a length above 0, got {self.reach}"
            )

    def width(self, dim: int, spread: int) -> int:
        return len(self.directions_in(dim).T)

    def directions_in(self, dim: int) -> Floats:
        """Return the directions of the c columns, (dim, c)."""
        return _directions(self.directions, dim)


@dataclass(frozen=True)
class GraphHint(Part):
    """The graph hint column, the last one, which no query reads: a − p·b − g·½‖r‖²."""

    anchor: float
    """a, other than 0."""
    pull: float = 0.0
    """p."""
    length_pull: float = 0.0
    """g, for IP only: the column is lower by g·½‖r‖², but by no more than a."""

    def __post_init__(self) -> None:
        for name in ("anchor", "pull", "length_pull"):
            _expect_finite(f"the {name} of a graph hint", getattr(self, name))
        if not self.anchor:
            raise InvalidParameter(
                f"a graph hint column needs an anchor, got {self.anchor:g} and {self.pull:g}"
            )
        if self.length_pull and (self.length_pull < 0 or self.anchor < 0):
            raise InvalidParameter(
                "a length_pull needs an anchor, and both are above 0: got "
                f"{self.length_pull:g} and {self.anchor:g}"
            )

    def width(self, dim: int, spread: int) -> int:
        return 1

    def validate_beside(self, dim: int, metric: Metric, spread: int) -> None:
        super().validate_beside(dim, metric, spread)
        if self.length_pull and metric != "IP":
            raise InvalidParameter(
                f"a length_pull, with an anchor, is for IP, not for {metric}: leave it out"
            )

    def numbers(self, stored: Floats, slots: BiasSlots, columns: Floats) -> npt.NDArray[np.float64]:
        """Return the numbers of stored vectors (n, d) with these columns of biases, (n,)."""
        biases = slots.read(columns, slice(None))
        mean_biases: npt.NDArray[np.float64] = biases.mean(axis=1, dtype=np.float64)
        hints = self.anchor - self.pull * mean_biases
        if not self.length_pull:
            return hints
        # The bound is for rows much longer than those that the constants were measured on: without
        # it their hint would grow with the square of their length, and outweigh their vector.
        return hints - np.fmin(self.length_pull * half_squares(stored), self.anchor)


# Each state that is read makes a layout, and nearly all have the same texts.
_mean = lru_cache(maxsize=CACHED)(mean_in)


@lru_cache(maxsize=CACHED)
def _kind_offsets(text: str, count: int, dim: int) -> Floats:
    offsets = np.zeros((count + 1, dim), np.float32)
    if text:
        offsets[:-1] = rows_in(text, count, dim)
    return offsets


@lru_cache(maxsize=CACHED)
def _directions(text: str, dim: int) -> Floats:
    return np.asarray(hint_directions_in(text, dim) / LARGEST_NUMBER, np.float32)


def expect_size(name: str, number: int) -> None:
    """Raise InvalidParameter unless there can be so many columns."""
    if not 1 <= number <= MAX_WIDTH:
        raise InvalidParameter(f"{name} is from 1 to {MAX_WIDTH}, got {number!r:.20}")


def _expect_finite(name: str, number: float) -> None:
    # NaN is not at most anything.
    if not abs(number) <= LARGEST_CONSTANT:
        raise InvalidParameter(
            f"{name} is a finite number of at most {LARGEST_CONSTANT:g}, got {number!r:.20}"
        )


def _expect_power_of_two(name: str, number: float) -> None:
    if not _is_power_of_two(number):
        raise InvalidParameter(
            f"{name} is a power of two from {1 / LARGEST_SCALE:g} to {LARGEST_SCALE:g}, "
            f"got {number!r:.30}"
        )


def _is_power_of_two(number: float) -> bool:
    """Whether a number is a power of two from 1/LARGEST_SCALE to LARGEST_SCALE.

    Products with it are exact.
    """
    # A power of two has no other digit than the first.
    return 1 / LARGEST_SCALE <= number <= LARGEST_SCALE and math.frexp(number)[0] == 0.5
