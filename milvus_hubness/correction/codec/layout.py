"""The columns of the augmented vector <r, b> and the augmented query <q, −w>. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.codec.arrays import (
    ALIGNMENT,
    LARGEST_NUMBER,
    MAX_WIDTH,
    QUERY_SCALE,
    UNIT_TOLERANCE,
    Floats,
    KindColumns,
    KindWeights,
    Mean,
    Metric,
    half_squares,
    hint_directions_in,
    lengths_of,
    lost,
    matrix,
    mean_in,
    rows_in,
)
from milvus_hubness.correction.codec.senders import ByKind, Sender, TokenSender
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, is_multi, stacked
from milvus_hubness.correction.kernels.token_rows import TokenRows, is_token_rows
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
    ZeroVectors,
    name_some,
)

LARGEST_CONSTANT = 1e38
"""Largest size of a constant: float32 has numbers up to 3.4e38."""
LARGEST_SCALE = 2.0**100
"""Largest scale, and the inverse of the smallest one."""
MOST_SCALES = 2.0**20
"""Largest offset, in units of scale². A measured one is at most 2."""
LARGEST_SPREAD = 64
"""Most columns of one number after the vector."""


@dataclass(frozen=True)
class Layout:
    """The columns of augmented vectors and augmented queries of one field.

    Quantisers that treat all columns alike need biases that look like the vector's own numbers: for
    them `bias_scale` and `spread` are chosen, see `quantisation`. A graph of unquantised vectors
    needs small biases where queries are long or the lengths of items vary: see `index_hints`, which
    chooses `bias_scale` and `length_pull` for it.

    Raises InvalidParameter for values that do not fit together.
    """

    dim: int
    """Dimension of the user's vectors."""
    metric: Metric
    """The user's metric."""
    slots: int = 1
    """Columns for biases, one a profile."""
    multiple_of: int = ALIGNMENT
    """The width is a multiple of it: 16 suits SIMD code, and product quantisation with m
    sub-vectors needs lcm(16, m)."""
    offset: float = 0.0
    """m, for L2 only."""
    scale: float = 1.0
    """s, a power of two, for L2 only. So biases and their weights are stored and sent exactly, to
    within the smallest number of float32."""
    anchor: float = 0.0
    """a of the graph hint column, the last one if a is not 0."""
    pull: float = 0.0
    """p of the graph hint column."""
    locality_hints: str = ""
    """Directions of the locality hint columns as text, for IP and COSINE only; empty without such
    columns. The width must have the hint columns to spare."""
    reach: float = 0.0
    """Length of an item's numbers in the locality hint columns."""
    mean: str = ""
    """c as `index_hints.mean_of` returns it, for L2 only."""
    bias_scale: float = 1.0
    """f, a power of two: a bias b is stored as f·b/s, and its weight is sent as w·s/f. It is 1
    under L2 and COSINE unless biases are spread."""
    spread: int = 1
    """n, a power of two: a bias, and under L2 ½‖r‖², is stored in n columns, and a query has 1/n of
    its weight in each. If n is above 1, the column u of L2, which no query reads, is 0."""
    length_pull: float = 0.0
    """g, for IP only: the graph hint column is lower by g·½‖r‖², but by no more than a."""
    kinds: int = 0
    """K, the number of kinds of items, for IP and COSINE only: each has a column, and so have rows
    without a kind."""
    kind_scale: float = 1.0
    """h, a power of two: the number of a row in the column of its kind. Its square is in the inner
    product of two stored vectors of one kind, so it is small against their lengths."""
    kind_offsets: str = ""
    """ν1 … νK as `rows_as_text`: a row of kind k is stored less νk, and one without a kind as it is.
    Empty if all are stored as they are."""
    multi_vectors: bool = False
    """Whether a row has several vectors, its tokens, which the database scores by MaxSim; for IP and
    COSINE only. Methods then take and return `MultiVectors` in place of (n, d). Each token of a row
    has the row's numbers after it, and each of a query its weights, so that MaxSim, a sum over the
    query's tokens of the largest product, is the corrected one: Σj maxi(⟨qj, di⟩ − w·b)."""

    def __post_init__(self) -> None:
        expect_word("metric", self.metric, Metric)
        # Collection states come from outside, so the sizes come first: later arithmetic may rely on
        # numbers of limited size.
        self._validate_sizes()
        self._validate_scales()
        self._validate_kinds()
        self._validate_hints()
        self._validate_multi_vectors()
        self._validate_width()
        # It raises if the text is no mean of this dimension.
        _ = self._mean

    def _validate_sizes(self) -> None:
        for name in ("dim", "slots", "multiple_of"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_WIDTH:
                raise InvalidParameter(f"{name} is from 1 to {MAX_WIDTH}, got {value!r:.20}")
        for name in ("offset", "anchor", "pull", "length_pull", "reach"):
            value = getattr(self, name)
            # NaN is not at most anything.
            if not abs(value) <= LARGEST_CONSTANT:
                raise InvalidParameter(
                    f"{name} is a finite number of at most {LARGEST_CONSTANT:g}, got {value!r:.20}"
                )

    def _validate_scales(self) -> None:
        if self.metric != "L2" and (self.offset, self.scale, self.mean) != (0.0, 1.0, ""):
            raise InvalidParameter(
                f"a mean, an offset and a scale are for L2: got {self.offset:g} and "
                f"{self.scale:g} for {self.metric}"
            )
        _require_power_of_two("scale", self.scale)
        _require_power_of_two("bias_scale", self.bias_scale)
        # Both may be valid and their ratio, by which biases are multiplied, too large.
        _require_power_of_two("bias_scale divided by scale", self.bias_factor)

        if not 1 <= self.spread <= LARGEST_SPREAD or not _is_power_of_two(self.spread):
            raise InvalidParameter(
                f"spread is a power of two up to {LARGEST_SPREAD}, got {self.spread!r:.20}"
            )
        if abs(self.offset) > MOST_SCALES * self.scale**2:
            raise InvalidParameter(
                f"an offset of {self.offset:g} is too large for a scale of {self.scale:g}"
            )

    def _validate_kinds(self) -> None:
        if not 0 <= self.kinds <= MAX_WIDTH:
            raise InvalidParameter(f"kinds is from 0 to {MAX_WIDTH}, got {self.kinds!r:.20}")
        _require_power_of_two("kind_scale", self.kind_scale)
        if self.kinds and (self.metric == "L2" or self.spread > 1):
            raise InvalidParameter(
                "columns for kinds are for IP and COSINE, with a spread of 1: got "
                f"{self.metric} and {self.spread}"
            )
        if self.kind_offsets and not self.kinds:
            raise InvalidParameter("offsets of kinds need columns for the kinds, of which it has 0")
        # It raises if the text has no offset for each kind.
        _ = self.offsets

    def _validate_hints(self) -> None:
        if (self.pull or self.length_pull) and not self.anchor:
            raise InvalidParameter(
                f"a graph hint column needs an anchor, got {self.anchor:g} and {self.pull:g}"
            )
        if self.length_pull and (self.metric != "IP" or self.length_pull < 0 or self.anchor < 0):
            raise InvalidParameter(
                "a length_pull, with an anchor, both above 0, is for IP: got "
                f"{self.length_pull:g} and {self.anchor:g} for {self.metric}"
            )

        if bool(self.locality_hints) != (self.reach > 0):
            raise InvalidParameter(
                f"locality hint columns need directions and a length above 0, got {self.reach}"
            )
        if self.locality_hints and self.metric == "L2":
            raise InvalidParameter("locality hint columns are for IP and COSINE, not for L2")

    def _validate_multi_vectors(self) -> None:
        if not self.multi_vectors:
            return
        if self.metric == "L2":
            raise InvalidParameter(
                "MaxSim over L2 adds up squared distances, which no number behind a vector makes "
                "corrected ones: use IP or COSINE"
            )
        if self.kinds or self.locality_hints or self.anchor:
            raise InvalidParameter(
                "rows of several vectors have no columns for kinds or index hints: leave them out"
            )

    def _validate_width(self) -> None:
        hints = self.locality_hint_count + bool(self.anchor)
        if self.spare < hints:
            raise InvalidParameter(
                f"after dimension {self.dim} and its slots, a width of {self.width} has "
                f"{self.spare} columns to spare, not {hints}"
            )
        if self.width > MAX_WIDTH:
            raise InvalidParameter(
                f"dimension {self.dim} leaves no room for {self.slots} bias columns: "
                f"the stored width would be {self.width}, Milvus allows {MAX_WIDTH}"
            )

    @cached_property
    def first_slot(self) -> int:
        """Column of slot 0."""
        # Under L2, u and the columns of v come before it. Those of kinds do too: they must not move
        # when a further profile takes slots of the spare columns.
        return self._first_kind + self._kind_count

    @cached_property
    def numbers(self) -> int:
        """Number of columns between the vector and the index hints."""
        return self.first_slot + self.slots * self.spread - self.dim

    @cached_property
    def _first_kind(self) -> int:
        """Column of kind 0."""
        return self.dim + (1 + self.spread) * (self.metric == "L2")

    @cached_property
    def _kind_count(self) -> int:
        """Number of columns for kinds: each row has h in one of them."""
        return self.kinds + bool(self.kinds)

    @cached_property
    def width(self) -> int:
        """Stored width.

        It is the least multiple of `multiple_of` with room for r, u and v (L2), the kinds and
        the slots.
        """
        return math.ceil((self.dim + self.numbers) / self.multiple_of) * self.multiple_of

    @cached_property
    def offsets(self) -> Floats:
        """(K + 1, d): ν1 … νK, and zeros for rows without a kind."""
        offsets = np.zeros((self.kinds + 1, self.dim), np.float32)
        if self.kind_offsets:
            offsets[:-1] = rows_in(self.kind_offsets, self.kinds, self.dim)
        return offsets

    @cached_property
    def largest_offsets(self) -> Floats:
        """(d,) the largest size of an offset in each dimension; zeros without offsets."""
        return np.asarray(np.abs(self.offsets).max(axis=0))

    def offsets_of(self, kinds: npt.ArrayLike) -> Floats:
        """Return what rows of these kinds (n,) are stored less of, (n, d)."""
        # −1, a row without a kind, is the last.
        return self.offsets[np.asarray(kinds, np.int64)]

    @cached_property
    def spare(self) -> int:
        """Number of columns after the slots."""
        return self.width - self.dim - self.numbers

    @cached_property
    def _unhinted(self) -> Layout:
        """The layout without what changes biases and index hints only."""
        return replace(
            self,
            bias_scale=1.0,
            anchor=0.0,
            pull=0.0,
            length_pull=0.0,
            locality_hints="",
            reach=0.0,
        )

    @cached_property
    def locality_directions(self) -> Floats:
        """(d, c) directions of the c locality hint columns."""
        directions = hint_directions_in(self.locality_hints, self.dim)
        return np.asarray(directions / LARGEST_NUMBER, np.float32)

    @cached_property
    def locality_hint_count(self) -> int:
        """c, the number of locality hint columns."""
        return len(self.locality_directions.T)

    @cached_property
    def _mean(self) -> Mean:
        return mean_in(self.mean, self.dim)

    @cached_property
    def _left_on(self) -> npt.NDArray[np.float64]:
        """(d,) o, the part of the mean that stored rows contain."""
        return np.subtract(*self._mean, dtype=np.float64)

    @cached_property
    def _query_offset(self) -> float:
        """m′: typical for ½‖r − c‖², as m − s² is for ½‖r‖²."""
        # A stored row is r − c + o, so on average its half square has ½‖o‖² more.
        return self.offset - self.scale**2 - 0.5 * float(self._left_on @ self._left_on)

    def stores_like(self, other: Layout) -> bool:
        """Whether rows of both layouts differ in their biases and index hints only."""
        return self._unhinted == other._unhinted

    @cached_property
    def of_tokens(self) -> Layout:
        """The layout of single vectors, which each token of a row has."""
        return replace(self, multi_vectors=False)

    def rows(self, vectors: npt.ArrayLike) -> Floats:
        """Return `vectors` as float32 (n, d), or as multi-vectors.

        Raises DimensionMismatch, InvalidInput, and NonFiniteVectors for lists of tokens with NaN.
        """
        if not self.multi_vectors:
            # What was checked before is not checked again.
            if (
                type(vectors) is np.ndarray
                and vectors.dtype == np.float32
                and vectors.shape[1:] == (self.dim,)
            ):
                return vectors
            return matrix(vectors, self.dim, "vectors")
        rows: Any = vectors
        rows = rows.taken() if is_token_rows(rows) else MultiVectors.of(rows, what="vectors")
        rows.expect_dim(self.dim, "the field")
        return cast(Floats, rows)

    def stacked(self, parts: Iterable[Any]) -> Floats:
        """Return the rows of all parts, float32 (n, d) or multi-vectors, in one."""
        return cast(Floats, stacked(parts, self.dim, are_multi=self.multi_vectors))

    @cached_property
    def taken_off(self) -> Floats:
        """(d,) a, the part of the mean that stored rows do not contain."""
        return self._mean.taken_off

    def lost(self, vectors: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which numbers of vectors would not be read back bit for bit, bool (n, d)."""
        return lost(self.rows(vectors), self.taken_off)

    def norms(self, vectors: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the lengths that COSINE divides by, (n,).

        They are exactly 1.0 for unit vectors to float32 accuracy: such rows are stored and read
        back bit for bit.
        """
        rows = self.rows(vectors)
        if self.multi_vectors:
            # Tokens are stored at length 1, which MaxSim by cosine gives them anyway.
            return np.ones(len(rows))
        lengths = lengths_of(rows)
        lengths[np.abs(lengths - 1) <= UNIT_TOLERANCE] = 1.0
        return lengths

    def reduce_items(self, vectors: npt.ArrayLike) -> Floats:
        """Return gallery vectors for the similarity of the bias estimate.

        They are (n, d), under L2 (n, d + 2).
        Their inner product with reduced queries is the similarity: q·r, the cosine, or −½‖q−r‖².
        """
        if type(vectors) is not np.ndarray:
            if is_multi(vectors):
                return self._reduced_tokens(TokenRows.documents(vectors))
            if is_token_rows(vectors):
                return self._reduced_tokens(vectors)
        rows = self.seen(self.rows(vectors))
        if self.metric == "COSINE":
            return self._unit(rows)
        if self.metric == "L2":
            # −½‖q−r‖² = q·r − 1·½‖r‖² − ½‖q‖²·1
            squares = half_squares(rows).astype(np.float32)
            return np.column_stack([rows, squares, np.ones(len(rows), np.float32)])
        return rows

    def reduce_queries(self, queries: npt.ArrayLike) -> Floats:
        """Return the counterpart of `reduce_items` for queries: (m, d), under L2 (m, d+2)."""
        if type(queries) is not np.ndarray:
            if is_multi(queries):
                return self._reduced_tokens(TokenRows.queries(queries))
            if is_token_rows(queries):
                return self._reduced_tokens(queries)
        rows = self.seen(self.rows(queries))
        if self.metric == "COSINE":
            return self._unit(rows)
        if self.metric == "L2":
            squares = half_squares(rows).astype(np.float32)
            return np.column_stack([rows, -np.ones(len(rows), np.float32), -squares])
        return rows

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
        slots = np.asarray(biases, np.float32)
        if slots.shape not in {(len(rows),), (len(rows), self.slots)}:
            raise InvalidInput(
                f"{len(rows)} vectors need biases of shape ({len(rows)},) or "
                f"({len(rows)}, {self.slots}), got {slots.shape}"
            )
        if self.multi_vectors and is_multi(rows):
            return self._each_token(rows, lambda of: of.augment(rows.tokens, rows.of_tokens(slots)))

        stored = np.zeros((len(rows), self.width), np.float32)
        numbers = np.full(len(rows), -1) if kinds is None else kinds
        stored[:, : self.dim] = self.without_offsets(self.without_mean(self.scaled(rows)), numbers)
        if self.metric == "L2":
            self._set_half_squares(stored, rows)

        in_columns = slots if slots.ndim == 2 else slots[:, np.newaxis]
        by_slot = np.broadcast_to(in_columns, (len(rows), self.slots))
        stored[:, self._slot_columns] = np.repeat(self.as_stored(by_slot), self.spread, axis=1)
        self._set_kinds(stored, numbers)

        # Last, because the graph hint column follows from the slots.
        return self._set_hints(stored, locality_hints)

    def _each_token(self, rows: MultiVectors, change: Callable[[Layout], Floats]) -> Floats:
        """Return rows whose tokens (total, …) are what `change` returns of the layout of tokens."""
        return cast(Floats, rows.with_tokens(change(self.of_tokens)))

    def _set_half_squares(self, stored: Floats, rows: Floats) -> None:
        """Set the columns u and v of L2, for rows (n, d), in place."""
        if self.spread == 1:
            # Of the numbers as they were rounded, since the graph compares stored vectors.
            u = (half_squares(stored[:, : self.dim]) - self.offset) / self.scale
            stored[:, self.dim] = u

        # From the mean in float64: in float32 the difference would lose digits of the score.
        squares = half_squares(rows - self._mean.seen_from.astype(np.float64))
        v = (squares - self._query_offset) / (QUERY_SCALE * self.scale)
        stored[:, self.dim + 1 : self.first_slot] = v[:, None]

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
        if is_multi(stored):
            by_token = {
                slot: stored.of_tokens(np.asarray(biases_of_slot, np.float32))
                for slot, biases_of_slot in biases.items()
            }
            return self._each_token(stored, lambda of: of.with_biases(stored.tokens, by_token))

        changed = stored.copy()
        for slot, biases_of_slot in biases.items():
            numbers = self.as_stored(np.asarray(biases_of_slot, np.float32))
            changed[:, self.columns_of(slot)] = numbers[:, None]
        if kinds is not None:
            self._change_kinds(changed, np.asarray(kinds, np.int64))

        # Without new biases the graph hint column, which follows from them, stays as it is.
        return self._set_hints(changed, locality_hints, graph_hint=bool(biases))

    def _change_kinds(self, stored: Floats, kinds: npt.NDArray[np.int64]) -> None:
        """Give stored vectors other kinds (n,), in place, with the offsets of these."""
        if self.kind_offsets:
            # Rows that keep their kind keep every bit.
            moved = kinds != self.held_kinds(stored)
            vectors = self.with_offsets(stored[moved])
            stored[moved, : self.dim] = self.without_offsets(vectors, kinds[moved])
        self._set_kinds(stored, kinds)

    def _set_kinds(self, stored: Floats, kinds: npt.ArrayLike) -> None:
        """Set the columns of kinds (n,) of stored vectors, in place."""
        if not self.kinds:
            return
        numbers = np.asarray(kinds, np.int64)
        # The last column is that of rows without a kind.
        columns = np.where(numbers < 0, self.kinds, numbers)
        stored[:, self.kind_columns] = 0
        stored[np.arange(len(stored)), self._first_kind + columns] = self.kind_scale

    def held_kinds(self, stored: Floats) -> npt.NDArray[np.int64]:
        """Return the kinds of stored vectors, (n,), −1 for rows without one."""
        if not self.kinds:
            return np.full(len(stored), -1, np.int64)
        columns = stored[:, self._first_kind : self._first_kind + self.kinds]
        # Half of h, as another program may have rounded the numbers.
        has_kind = (columns > self.kind_scale / 2).any(axis=1)
        return np.where(has_kind, columns.argmax(axis=1), -1)

    def held_locality_hints(self, stored: Floats) -> Floats:
        """Return the numbers in the locality hint columns of stored vectors, (n, c)."""
        if is_multi(stored):
            return np.zeros((len(stored), 0), np.float32)
        return stored[:, self._locality_hint_columns]

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
        with np.errstate(over="ignore"):
            weights = np.asarray(strength, np.float32)
        if not np.isfinite(weights).all():
            raise InvalidParameter(f"strength must be finite, got {strength!r}")
        if not 0 <= slot < self.slots:
            raise InvalidParameter(f"slot {slot} is not one of the {self.slots} slots")
        if self.multi_vectors:
            of_tokens = partial(self.of_tokens.sender, slot=slot)
            return TokenSender(weights, self.require_finite, of_tokens)

        # The other slots, u and the index hints stay 0: they count in no score.
        after = np.zeros((*weights.shape, self.width - self.dim), np.float32)
        if self.metric == "L2":
            weight_of_v = -QUERY_SCALE * self.scale / self.spread
            after[..., 1 : self.first_slot - self.dim] = weight_of_v
        first = self.first_slot + slot * self.spread - self.dim
        sent = -weights / self.bias_factor / self.spread
        after[..., first : first + self.spread] = sent[..., None]

        return Sender(
            dim=self.dim,
            after=after,
            is_cosine=self.metric == "COSINE",
            require_finite=self.require_finite,
            seen=self.seen if self.mean else None,
            by_kind=self._by_kind(kinds),
        )

    def _by_kind(self, kinds: KindWeights | None) -> ByKind | None:
        """Return how queries are compared with these weights of kinds.

        None for weights leaves the means out, so that only the offsets of stored vectors count.
        """
        if kinds is None and not self.kind_offsets:
            return None
        if kinds is None:
            # h is a power of two, so that nothing is rounded.
            directions = np.ascontiguousarray(self.offsets.T / np.float32(self.kind_scale))
            none_added = np.zeros(directions.shape[1], np.float32)
            return ByKind(self.kind_columns, KindColumns(directions, none_added), None)

        form = (self.kind_offsets, self.kind_scale)
        of_products = kinds.sent.get(form)
        if of_products is None:
            of_products = kinds.sent[form] = self._sent_for(kinds)
        return ByKind(self.kind_columns, of_products, kinds.taken_off)

    def _sent_for(self, kinds: KindWeights) -> KindColumns:
        """Return what a search with these weights sends in the columns of kinds."""
        directions = (self.offsets.T - kinds.directions) / self.kind_scale
        # Of the query less its mean, whose part is the same in all searches.
        added = kinds.added / self.kind_scale - kinds.taken_off.astype(np.float64) @ directions
        return KindColumns(np.asarray(directions, np.float32), np.asarray(added, np.float32))

    def biases(self, stored: Floats, slot: int | slice = 0) -> Floats:
        """Return the biases in one slot of stored vectors, (n,), or in several, (n, slots)."""
        if self.multi_vectors and is_multi(stored):
            # All tokens of a row have its biases.
            stored = stored.first_tokens
        # The columns of a slot are equal: the first of each is enough.
        by_slot = stored[:, self._slot_columns][:, :: self.spread]
        return by_slot[:, slot] / np.float32(self.bias_factor)

    def as_stored(self, biases: Floats) -> Floats:
        """Return biases in the unit of the stored columns, in the same shape.

        The factor is a power of two, so no bias is rounded.
        """
        return biases * np.float32(self.bias_factor)

    def columns_of(self, slot: int) -> slice:
        """Return the columns of one slot."""
        first = self.first_slot + slot * self.spread
        return slice(first, first + self.spread)

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
        if self.metric != "L2":
            return values

        distances = 2 * (self._above(self.rows(queries))[:, None] - values)
        # Rounding can make a distance of 0 negative; a corrected one may well be below 0.
        is_raw = np.broadcast_to(np.asarray(strength)[..., None] == 0, distances.shape)
        return np.where(is_raw, np.maximum(distances, 0), distances)

    def products(self, scores: npt.ArrayLike, query: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Convert scores of one query (d,) to inner products: the inverse of `scores`."""
        values = np.asarray(scores, np.float64)
        if self.metric != "L2":
            return values
        [above] = self._above(self.rows(np.asarray(query)[None, :]))
        return float(above) - values / 2

    def require_finite(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        """Return `vectors` as float32 (n, d).

        Raises DimensionMismatch, and NonFiniteVectors naming the rows.
        """
        rows = self.rows(vectors)
        # One pass without a temporary array. A large sum may overflow, so only then each number counts.
        if not self.multi_vectors and math.isfinite(np.vdot(rows, rows)):
            return rows

        broken = np.flatnonzero(~_are_finite(rows))
        if broken.size:
            raise NonFiniteVectors(
                f"vectors must be finite: NaN or infinity in {what} {name_some(broken.tolist())}"
            )
        return rows

    def validate_vectors(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        """Return what `require_finite` does.

        Raises as it does, and under COSINE ZeroVectors naming the rows.
        """
        rows = self.require_finite(vectors, what)
        # A token of zeros has a score, so that a row of them has one too.
        if self.metric != "COSINE" or self.multi_vectors:
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
        if type(vectors) is not np.ndarray:
            # A token of zeros has a score, so that a row of them has one too.
            if is_token_rows(vectors):
                return ~_are_finite(vectors.taken())
            if is_multi(vectors):
                return ~_are_finite(vectors)
        rows = self.rows(vectors)
        valid = _are_finite(rows)
        if self.metric == "COSINE":
            valid &= rows.any(axis=1)
        return ~valid

    def _reduced_tokens(self, rows: TokenRows) -> Floats:
        """Return rows of tokens for MaxSim. Raises InvalidInput for what has none."""
        if self.metric == "L2" or self.mean:
            problem = "the metric L2" if self.metric == "L2" else "a mean of vectors"
            raise InvalidInput(
                f"vectors of many tokens are scored by MaxSim, which {problem} does not go with: "
                "use IP or COSINE"
            )
        if rows.vectors.dim != self.dim:
            raise DimensionMismatch(
                f"tokens of dimension {rows.vectors.dim} are not of the field, which has {self.dim}"
            )
        return cast(Floats, rows.normalised() if self.metric == "COSINE" else rows)

    def seen(self, rows: Floats) -> Floats:
        """Return the rows relative to the mean, (n, d)."""
        return rows - self._mean.seen_from if self.mean else rows

    def without_mean(self, rows: Floats) -> Floats:
        """Return the rows less the part of the mean that is not stored, (n, d)."""
        return rows - self.taken_off if self.mean else rows

    def scaled(self, rows: Floats) -> Floats:
        """Return the rows at the length that the metric compares, (n, d)."""
        return self._unit(rows) if self.metric == "COSINE" else rows

    def without_offsets(self, rows: Floats, kinds: npt.ArrayLike) -> Floats:
        """Return rows (n, d) of these kinds (n,) less the offsets of their kinds, as they are stored."""
        return rows - self.offsets_of(kinds) if self.kind_offsets else rows

    def with_offsets(self, stored: Floats) -> Floats:
        """Return the vectors of stored rows with the offsets of their kinds, (n, d), rounded."""
        if self.multi_vectors and is_multi(stored):
            return self._each_token(stored, lambda of: of.with_offsets(stored.tokens))
        vectors = stored[:, : self.dim]
        if not self.kind_offsets:
            return vectors
        offsets = self.offsets_of(self.held_kinds(stored))
        # Where nothing was subtracted, −0 and NaN stay as they are.
        return np.where(offsets == 0, vectors, vectors + offsets)

    def _above(self, queries: Floats) -> npt.NDArray[np.float64]:
        """Return by how much inner products of queries (m, d) under L2 exceed −½‖q−r‖², (m,)."""
        # ½‖q − c‖², the part of the mean that stored rows contain, and what v was stored without.
        seen = self.seen(queries)
        return half_squares(seen) + seen.astype(np.float64) @ self._left_on + self._query_offset

    def _set_hints(
        self, stored: Floats, locality_hints: npt.ArrayLike | None, *, graph_hint: bool = True
    ) -> Floats:
        """Set the hint columns of stored vectors, in place.

        The graph hint column follows from the slots.
        """
        # Products with the factor can overflow, though the biases themselves are finite.
        if not np.isfinite(stored[:, self._slot_columns]).all():
            raise InvalidInput(
                "biases must be finite numbers of float32, in units of the layout's scale"
            )

        if self.anchor and graph_hint:
            mean = self.biases(stored, slice(None)).mean(axis=1, dtype=np.float64)
            stored[:, -1] = self.anchor - self.pull * mean - self._lowered_by_length(stored)
        if locality_hints is not None:
            hints = matrix(locality_hints, self.locality_hint_count, "locality hint columns")
            stored[:, self._locality_hint_columns] = hints
        return stored

    def _lowered_by_length(self, stored: Floats) -> npt.NDArray[np.float64]:
        """Return by how much the lengths of stored vectors lower their graph hint column, (n,).

        The bound is for rows much longer than those that the constants were measured on: without it
        their hint would grow with the square of their length, and outweigh their vector.
        """
        if not self.length_pull:
            return np.zeros(len(stored))
        squares = half_squares(stored[:, : self.dim])
        return np.fmin(self.length_pull * squares, self.anchor)

    @cached_property
    def _slot_columns(self) -> slice:
        """All slots, one after the other."""
        return slice(self.first_slot, self.dim + self.numbers)

    @cached_property
    def kind_columns(self) -> slice:
        """The columns of all kinds, and of rows without one."""
        return slice(self._first_kind, self._first_kind + self._kind_count)

    @cached_property
    def bias_factor(self) -> float:
        """The number by which a bias is multiplied before it is stored."""
        return self.bias_scale / self.scale

    @cached_property
    def _locality_hint_columns(self) -> slice:
        # The last columns, before that of the graph hint if there is one.
        end = self.width - bool(self.anchor)
        return slice(end - self.locality_hint_count, end)

    def _unit(self, rows: Floats) -> Floats:
        """Return the rows at length 1, (n, d); zero rows stay zero."""
        if self.multi_vectors and is_multi(rows):
            return self._each_token(rows, lambda of: of.scaled(rows.tokens))
        lengths = self.norms(rows)
        # Unit vectors, as most encoders return them, need no copy.
        if (lengths == 1).all():
            return rows
        lengths[lengths == 0] = 1.0
        return (rows / lengths[:, None]).astype(np.float32)


def _are_finite(rows: Any) -> npt.NDArray[np.bool_]:
    """Return which rows (n, d), or multi-vectors, have only finite numbers, (n,)."""
    numbers: Floats = rows.tokens if is_multi(rows) else rows
    if math.isfinite(np.vdot(numbers, numbers)):
        return np.ones(len(rows), np.bool_)
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(numbers).all(axis=1), np.bool_)
    return rows.all_of_row(finite) if is_multi(rows) else finite


def _require_power_of_two(name: str, number: float) -> None:
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
