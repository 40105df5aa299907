"""The columns of the augmented vector <r, b> and the augmented query <q, −w>. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.codec.arrays import (
    ALIGNMENT,
    MAX_WIDTH,
    Floats,
    Metric,
    matrix,
    norms_of,
)
from milvus_hubness.correction.codec.parts import (
    BiasSlots,
    GraphHint,
    HalfSquares,
    KindColumns,
    LocalityHints,
    Part,
    expect_size,
)
from milvus_hubness.correction.codec.senders import KindWeights, Sender, Weights
from milvus_hubness.correction.kernels.multi_vectors import stacked
from milvus_hubness.errors import (
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
    ZeroVectors,
    name_some,
)

PLAIN_SLOTS = BiasSlots()


@dataclass(frozen=True)
class Layout:
    """The columns of augmented vectors and augmented queries of one field: the vector, and the parts
    that the layout has.

    `quantisation` chooses the scale and the spread of biases for quantisers that treat all columns
    alike, and `index_hints` the other constants. `MultiVectorLayout` is the layout of rows of several
    vectors.

    Raises InvalidParameter for parts that do not stand together.
    """

    dim: int
    """Dimension of the user's vectors."""
    metric: Metric
    """The user's metric."""
    slots: BiasSlots = PLAIN_SLOTS
    """The columns of biases."""
    multiple_of: int = ALIGNMENT
    """The width is a multiple of it: 16 suits SIMD code, and product quantisation with m
    sub-vectors needs lcm(16, m)."""
    half_squares: HalfSquares | None = None
    """The columns u and v, which every layout for L2 has."""
    kinds: KindColumns | None = None
    """The columns of the kinds of items."""
    locality_hints: LocalityHints | None = None
    """The locality hint columns."""
    graph_hint: GraphHint | None = None
    """The graph hint column."""

    multi_vectors: ClassVar[bool] = False
    """Whether a row has several vectors."""

    def __post_init__(self) -> None:
        expect_word("metric", self.metric, Metric)
        if self.metric == "L2" and self.half_squares is None:
            object.__setattr__(self, "half_squares", HalfSquares())

        # Collection states come from outside, so the sizes come first: later arithmetic may rely on
        # numbers of limited size.
        expect_size("dim", self.dim)
        expect_size("multiple_of", self.multiple_of)
        for part in self.parts:
            part.validate_beside(self.dim, self.metric, self.slots.spread)

        hints = self.locality_hint_count + bool(self.graph_hint)
        if self.spare < hints:
            raise InvalidParameter(
                f"after dimension {self.dim} and its slots, a width of {self.width} has "
                f"{self.spare} columns to spare, not {hints}"
            )
        if self.width > MAX_WIDTH:
            raise InvalidParameter(
                f"dimension {self.dim} leaves no room for {self.slots.count} bias columns: "
                f"the stored width would be {self.width}, Milvus allows {MAX_WIDTH}"
            )

    # -- columns ----------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order of their columns: those before the spare columns, and the hints."""
        # Those of kinds come before the slots: they must not move when a further profile takes slots
        # of the spare columns.
        parts = (self.half_squares, self.kinds, self.slots, self.locality_hints, self.graph_hint)
        return tuple(part for part in parts if part is not None)

    @cached_property
    def half_square_columns(self) -> slice:
        """The columns u and v; none without half squares."""
        return self._columns_from(self.dim, self.half_squares)

    @cached_property
    def kind_columns(self) -> slice:
        """The columns of all kinds, and of rows without one; none without kinds."""
        return self._columns_from(self.half_square_columns.stop, self.kinds)

    @cached_property
    def slot_columns(self) -> slice:
        """All slots, one after the other."""
        return self._columns_from(self.kind_columns.stop, self.slots)

    def columns_of(self, slot: int) -> slice:
        """Return the columns of one slot."""
        spread = self.slots.spread
        first = self.slot_columns.start + slot * spread
        return slice(first, first + spread)

    @cached_property
    def locality_hint_columns(self) -> slice:
        """The last columns, before that of the graph hint if there is one."""
        end = self.width - bool(self.graph_hint)
        return slice(end - self.locality_hint_count, end)

    @cached_property
    def locality_hint_count(self) -> int:
        """c, the number of locality hint columns."""
        return self._width_of(self.locality_hints)

    @cached_property
    def numbers(self) -> int:
        """Number of columns between the vector and the spare ones."""
        return int(self.slot_columns.stop) - self.dim

    @cached_property
    def width(self) -> int:
        """Stored width: the least multiple of `multiple_of` with room for all but the hints."""
        return math.ceil((self.dim + self.numbers) / self.multiple_of) * self.multiple_of

    @cached_property
    def spare(self) -> int:
        """Number of columns after the slots, among them those of hints."""
        return self.width - self.dim - self.numbers

    def _columns_from(self, start: int, part: Part | None) -> slice:
        return slice(start, start + self._width_of(part))

    def _width_of(self, part: Part | None) -> int:
        return part.width(self.dim, self.slots.spread) if part is not None else 0

    def without_hints(self) -> Layout:
        """Return the layout without index hints."""
        return replace(self, locality_hints=None, graph_hint=None)

    def stores_like(self, other: Layout) -> bool:
        """Whether rows of both layouts differ in their biases and index hints only."""
        unscaled = [
            replace(layout.without_hints(), slots=replace(layout.slots, scale=1.0))
            for layout in (self, other)
        ]
        return unscaled[0] == unscaled[1]

    # -- vectors ----------------------------------------------------------------------------------

    def rows(self, vectors: npt.ArrayLike) -> Floats:
        """Return `vectors` as float32 (n, d). Raises DimensionMismatch and InvalidInput."""
        # What was checked before is not checked again.
        if (
            type(vectors) is np.ndarray
            and vectors.dtype == np.float32
            and vectors.shape[1:] == (self.dim,)
        ):
            return vectors
        return matrix(vectors, self.dim, "vectors")

    def stacked(self, parts: Iterable[Any]) -> Floats:
        """Return the rows of all parts, as `rows` returns them, in one."""
        return cast(Floats, stacked(parts, self.dim, are_multi=self.multi_vectors))

    def require_finite(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        """Return `vectors` as float32 (n, d).

        Raises DimensionMismatch, and NonFiniteVectors naming the rows.
        """
        rows = self.rows(vectors)
        if not math.isfinite(np.vdot(rows, rows)):
            expect_finite(are_finite(rows), what)
        return rows

    def validate_vectors(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        """Return what `require_finite` does.

        Raises as it does, and under COSINE ZeroVectors naming the rows.
        """
        rows = self.require_finite(vectors, what)
        if self.metric != "COSINE":
            return rows

        zero = np.flatnonzero(~rows.any(axis=1))
        if zero.size:
            raise ZeroVectors(
                f"a zero vector has no direction under COSINE: remove {what} "
                f"{name_some(zero.tolist())}"
            )
        return rows

    def invalid(self, vectors: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether a row can have no bias, bool (n,).

        Such a row has NaN or infinity, or is a zero vector under COSINE.
        """
        rows = self.rows(vectors)
        valid = are_finite(rows)
        if self.metric == "COSINE":
            valid &= rows.any(axis=1)
        return ~valid

    def norms(self, vectors: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the lengths that COSINE divides by, (n,), see `norms_of`."""
        return norms_of(self.rows(vectors))

    def scaled(self, rows: Floats) -> Floats:
        """Return the rows at the length that the metric compares, (n, d); zero rows stay zero."""
        if self.metric != "COSINE":
            return rows
        lengths = norms_of(rows)
        # Unit vectors, as most encoders return them, need no copy.
        if (lengths == 1).all():
            return rows
        lengths[lengths == 0] = 1.0
        return (rows / lengths[:, None]).astype(np.float32)

    def reduce_items(self, vectors: npt.ArrayLike) -> Floats:
        """Return gallery vectors for the similarity of the bias estimate.

        They are (n, d), under L2 (n, d + 2).
        Their inner product with reduced queries is the similarity: q·r, the cosine, or −½‖q−r‖².
        """
        rows = self.rows(vectors)
        if self.half_squares is not None:
            return self.half_squares.reduced_items(rows)
        return self.scaled(rows)

    def reduce_queries(self, queries: npt.ArrayLike) -> Floats:
        """Return the counterpart of `reduce_items` for queries: (m, d), under L2 (m, d + 2)."""
        rows = self.rows(queries)
        if self.half_squares is not None:
            return self.half_squares.reduced_queries(rows)
        return self.scaled(rows)

    # -- stored rows ------------------------------------------------------------------------------

    def augment(
        self,
        vectors: npt.ArrayLike,
        biases: npt.ArrayLike,
        locality_hints: npt.ArrayLike | None = None,
        kinds: npt.ArrayLike | None = None,
    ) -> Floats:
        """Return augmented vectors, float32 (n, width).

        Rows without a direction under COSINE stay zero.

        vectors: (n, d) float32. biases: (n,) for the same bias in every slot, or (n, slots).
        locality_hints: (n, c), see `Correction.locality_hints`; zeros if None. kinds: (n,) the number
        of the kind of each row, below 0 for none; none if None. Raises DimensionMismatch,
        InvalidInput.
        """
        rows = self.rows(vectors)
        in_columns = self._by_slot(biases, len(rows))
        stored = np.zeros((len(rows), self.width), np.float32)

        as_compared = self.scaled(rows)
        if self.half_squares is not None:
            stored[:, : self.dim] = self.half_squares.without_mean(as_compared)
            columns = stored[:, self.half_square_columns]
            self.half_squares.write(columns, stored[:, : self.dim], rows)
        elif self.kinds is not None:
            numbers = np.full(len(rows), -1) if kinds is None else kinds
            stored[:, : self.dim] = self.kinds.without_offsets(as_compared, numbers)
            self.kinds.write(stored[:, self.kind_columns], numbers)
        else:
            stored[:, : self.dim] = as_compared

        self.slots.write(stored[:, self.slot_columns], in_columns)
        # Last, because the graph hint follows from the slots.
        return self._with_hints(stored, locality_hints)

    def _by_slot(self, biases: npt.ArrayLike, count: int) -> Floats:
        """Return biases of rows as (count, slots). Raises InvalidInput."""
        numbers = np.asarray(biases, np.float32)
        if numbers.shape not in {(count,), (count, self.slots.count)}:
            raise InvalidInput(
                f"{count} vectors need biases of shape ({count},) or "
                f"({count}, {self.slots.count}), got {numbers.shape}"
            )
        in_columns = numbers if numbers.ndim == 2 else numbers[:, np.newaxis]
        return np.broadcast_to(in_columns, (count, self.slots.count))

    def with_biases(
        self,
        stored: Floats,
        biases: Mapping[int, npt.ArrayLike],
        locality_hints: npt.ArrayLike | None = None,
        kinds: npt.ArrayLike | None = None,
    ) -> Floats:
        """Return stored vectors with other biases (n,) in the named slots, (n, width).

        locality_hints: (n, c) new numbers of the locality hint columns; None leaves them. kinds: (n,)
        as in `augment`; None leaves those of the rows.
        """
        changed = stored.copy()
        for slot, biases_of_slot in biases.items():
            numbers = self.slots.as_stored(np.asarray(biases_of_slot, np.float32))
            changed[:, self.columns_of(slot)] = numbers[:, None]
        if self.kinds is not None and kinds is not None:
            columns = changed[:, self.kind_columns]
            self.kinds.change(changed[:, : self.dim], columns, np.asarray(kinds, np.int64))

        # Without new biases the graph hint, which follows from them, stays as it is.
        return self._with_hints(changed, locality_hints, are_new=bool(biases))

    def _with_hints(
        self, stored: Floats, locality_hints: npt.ArrayLike | None, *, are_new: bool = True
    ) -> Floats:
        """Set the hint columns of stored vectors, in place. are_new: whether their biases are."""
        columns = stored[:, self.slot_columns]
        # Products with the scale can overflow, though the biases themselves are finite.
        if not np.isfinite(columns).all():
            raise InvalidInput(
                "biases must be finite numbers of float32, in units of the layout's scale"
            )

        if self.graph_hint is not None and are_new:
            vectors = stored[:, : self.dim]
            stored[:, -1] = self.graph_hint.numbers(vectors, self.slots, columns)
        if locality_hints is not None:
            hints = matrix(locality_hints, self.locality_hint_count, "locality hint columns")
            stored[:, self.locality_hint_columns] = hints
        return stored

    def vectors_in(self, stored: Floats) -> Floats:
        """Return the vectors of stored rows at the length that the metric compares, (n, d)."""
        vectors = stored[:, : self.dim]
        if self.half_squares is not None:
            return self.half_squares.with_mean(vectors)
        if self.kinds is not None:
            return self.kinds.with_offsets(vectors, stored[:, self.kind_columns])
        return vectors

    def biases(self, stored: Floats, slot: int | slice = 0) -> Floats:
        """Return the biases in one slot of stored vectors, (n,), or in several, (n, slots)."""
        return self.slots.read(stored[:, self.slot_columns], slot)

    def held_kinds(self, stored: Floats) -> npt.NDArray[np.int64]:
        """Return the kinds of stored vectors, (n,), −1 for rows without one."""
        if self.kinds is None:
            return np.full(len(stored), -1, np.int64)
        return self.kinds.read(stored[:, self.kind_columns])

    # -- queries and scores -----------------------------------------------------------------------

    def encode_queries(
        self,
        queries: npt.ArrayLike,
        strength: float | npt.ArrayLike = 1.0,
        *,
        slot: int = 0,
        kinds: KindWeights | None = None,
    ) -> Floats:
        """Return augmented queries, (m, width).

        Their inner product with stored vectors is s(q, r) − strength·b(r); under L2 it exceeds that
        by an amount that `scores` subtracts.

        queries: (m, d) float32. strength: one number, or one for each query; 0 gives the raw
        ranking. kinds: the means of kinds with which the similarity s is computed; None for none.
        Raises DimensionMismatch, InvalidInput, InvalidParameter, and NonFiniteVectors naming the
        queries.
        """
        return self.sender(strength, slot=slot, kinds=kinds)(queries)

    def sender(
        self,
        strength: float | npt.ArrayLike = 1.0,
        *,
        slot: int = 0,
        kinds: KindWeights | None = None,
    ) -> Callable[[npt.ArrayLike], Floats]:
        """Return a function that encodes queries (m, d) as `encode_queries` does with these arguments.

        Raises InvalidParameter; the function raises the rest.
        """
        weights = self._weights(strength, slot)
        spread = self.slots.spread
        # The other slots, u and the index hints stay 0: they count in no score.
        after = np.zeros((*weights.shape, self.width - self.dim), np.float32)
        first = self.slot_columns.start - self.dim + slot * spread
        after[..., first : first + spread] = self.slots.sent(weights)[..., None]

        seen_from = by_kind = None
        if self.half_squares is not None:
            after[..., 1 : 1 + spread] = self.half_squares.sent(spread)
            if self.half_squares.mean:
                seen_from = self.half_squares.mean_of(self.dim).seen_from
        if self.kinds is not None:
            by_kind = self.kinds.by_kind(self.kind_columns, self.dim, kinds)

        return Sender(
            dim=self.dim,
            after=after,
            is_cosine=self.metric == "COSINE",
            require_finite=self.require_finite,
            seen_from=seen_from,
            by_kind=by_kind,
        )

    def _weights(self, strength: float | npt.ArrayLike, slot: int) -> Weights:
        """Return strengths of searches by a slot as float32. Raises InvalidParameter."""
        with np.errstate(over="ignore"):
            weights = np.asarray(strength, np.float32)
        if not np.isfinite(weights).all():
            raise InvalidParameter(f"strength must be finite, got {strength!r}")
        if not 0 <= slot < self.slots.count:
            raise InvalidParameter(f"slot {slot} is not one of the {self.slots.count} slots")
        return weights

    def scores(
        self,
        products: npt.ArrayLike,
        queries: npt.ArrayLike,
        strength: float | npt.ArrayLike = 1.0,
    ) -> npt.NDArray[np.float64]:
        """Convert inner products (m, k) to scores of the user's metric.

        products: of augmented queries and stored vectors. queries: (m, d) as the user gave them. IP
        and COSINE: s − w·b, the product itself. L2: the squared distance ‖q−r‖² + 2w·b, which is
        never below 0 if w = 0.
        """
        values = np.asarray(products, np.float64)
        if self.half_squares is None:
            return values

        distances = 2 * (self.half_squares.above(self.rows(queries))[:, None] - values)
        # Rounding can make a distance of 0 negative; a corrected one may well be below 0.
        is_raw = np.broadcast_to(np.asarray(strength)[..., None] == 0, distances.shape)
        return np.where(is_raw, np.maximum(distances, 0), distances)

    def products(self, scores: npt.ArrayLike, query: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Convert scores of one query (d,) to inner products: the inverse of `scores`."""
        values = np.asarray(scores, np.float64)
        if self.half_squares is None:
            return values
        [above] = self.half_squares.above(self.rows(np.asarray(query)[None, :]))
        return float(above) - values / 2


def are_finite(rows: Floats) -> npt.NDArray[np.bool_]:
    """Return which rows (n, d) have only finite numbers, (n,)."""
    # One pass without a temporary array. A large sum may overflow, so only then each number counts.
    if math.isfinite(np.vdot(rows, rows)):
        return np.ones(len(rows), np.bool_)
    return np.asarray(np.isfinite(rows).all(axis=1), np.bool_)


def expect_finite(finite: npt.NDArray[np.bool_], what: str) -> None:
    """Raise NonFiniteVectors, which names the rows, unless all are finite."""
    broken = np.flatnonzero(~finite)
    if broken.size:
        raise NonFiniteVectors(
            f"vectors must be finite: NaN or infinity in {what} {name_some(broken.tolist())}"
        )
