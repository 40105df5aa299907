"""Kinds of items in one gallery: modalities or languages, such as photos and texts.

Encoders place items of each kind in a region of their own (the modality gap), so that items of one
kind come first for all queries, right or wrong. Vectors are therefore compared relative to the mean
of their kind, and queries relative to their own mean (GR-CLIP, Li et al., 2025, arXiv 2507.19054,
without scaling to unit length afterwards):

    s(q, r) = ⟨q − μq, r − μk⟩        k = the kind of r

The means are sent with the query. An item has h in the column of its kind and 0 in the others:

    stored  < r − νk     , b ,  h in the column of k … 0 >
    sent    < q − κ·μq   , −w , (a + ⟨q − κ·μq, ν1 − κ·(μ1 − μ)⟩)/h , … , a/h … 0 >

μ is the mean of all items: a row without a kind has h in the last of these columns, and counts as an
average item. a = κ·⟨μq, μ⟩ is in all scores, so that an item at μ has its raw score: what the database
computes is the score, whatever its rankers, bounds and formulas do with it.
κ is the factor of a search, `kinds`: 1 by default, 0 leaves kinds out. So kinds and the strength w
of the biases are apart, and a refresh that renews the means writes no row for them.

νk, the offset of the kind, changes no score. Where kinds lie far apart, few links of a graph lead from
one to the other, while searches by kind want both: offsets bring the kinds together. They are measured
once, stay as long as the layout, and are 0 where vectors must stay as they are. float32 rounds r − νk:
vectors are read back within one unit in the last place of a number or of its offset.

Under L2 the score contains ½‖r‖², which would change by one number for each row and κ. There are no
kinds under L2: unit vectors rank alike under COSINE.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, model_validator

from milvus_hubness.basics.bounds import FrozenModel, Name, Number, shown
from milvus_hubness.correction.codec.arrays import (
    Floats,
    rows_as_text,
    rows_in,
    unit_directions,
)
from milvus_hubness.correction.codec.senders import KindWeights
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.errors import InvalidInput, InvalidParameter

KindNumbers = npt.NDArray[np.int64]
"""(n,) the number of the kind of each row, UNKNOWN for a row without one."""

UNKNOWN = -1
"""The number of a row without a kind."""
AUTO = "auto"
"""What callers pass in place of a field for the kinds that the vectors themselves show."""

MOST_KINDS = 16
"""Largest number of kinds."""
MOST_NUMBERS = 15_000
"""Largest number of numbers in the means of all kinds and of the queries, of all profiles together.

Records of a migration have at most 65,535 bytes, and contain the means twice.
"""
FEWEST_OF_A_KIND = 30
"""Rows of a value with fewer rows have no kind: their mean would be noise."""

STEADY = 0.05
"""How far means may move, as a share of the length of the largest, before a refresh takes new ones.

With each change of a mean all rows are written again. Means of a sample of 4,096 rows move by less.
"""

LEAST_PREFERENCE = 3.0
"""Least mean preference of queries for a kind, in its standard deviations, for a real gap.

Above it nearly all queries are nearer to the same kind, whatever they look for, as between two
modalities; between two topics some queries are nearer to each, and without their means a search would
not know which topic a query has. The clusters of galleries of one kind have 0.0 to 0.5, and where
clusters are the kinds of a gallery they have 3.6 to 11.5 (`benchmarks.mixed`).
"""

LONGEST_VALUE = 255
"""Most characters of a text that names a kind: longer ones are descriptions."""

KindValue = bool | int | Annotated[str, Field(max_length=LONGEST_VALUE)]
"""A value of the field of kinds."""


def _valid_text(text: str) -> str:
    """Return a text of `rows_as_text` unchanged. Raises InvalidParameter for anything else."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidParameter(f"means of kinds are not base64: {error}") from None
    if len(content) > 2 * 4 * MOST_NUMBERS:
        raise InvalidParameter(f"means of kinds have {len(content):,} bytes, which is too many")
    return text


RowsAsText = Annotated[str, AfterValidator(_valid_text)]


class KindRule(FrozenModel):
    """The rule that gives each row of a field its kind; it stays as long as the layout.

    Kinds follow from a field of the rows, or from the side of a plane on which a vector lies.
    """

    field: Name = ""
    """The field of the rows; empty if the kinds follow from the vectors."""
    values: tuple[KindValue, ...] = Field(default=(), max_length=MOST_KINDS)
    """The values of the field, by kind; rows with others have no kind."""
    direction: RowsAsText = ""
    """The direction (d,) from the mean of kind 0 to that of kind 1, as `rows_as_text`."""
    threshold: Number = 0.0
    """Vectors at unit length whose product with the direction is above it are of kind 1."""

    @model_validator(mode="after")
    def _expect_one_way(self) -> KindRule:
        if bool(self.field) == bool(self.direction):
            raise InvalidParameter("kinds follow from a field of the rows, or from the vectors")
        if self.field and len(self.values) < 2:
            raise InvalidParameter(f"kinds has {len(self.values)} values: at least 2 are needed")
        if len(set(map(identity_of, self.values))) < len(self.values):
            raise InvalidParameter("kinds has a value twice")
        return self

    @property
    def source(self) -> str:
        """What a caller names for these kinds: the field of the rows, or AUTO."""
        return self.field or AUTO

    @property
    def count(self) -> int:
        """The number of kinds."""
        return len(self.values) if self.field else 2

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each kind, for people; without the control characters that a text may have."""
        return tuple(map(shown, self.values)) if self.field else ("cluster 0", "cluster 1")

    @cached_property
    def _number_of(self) -> dict[Identity | None, int]:
        return {identity_of(value): number for number, value in enumerate(self.values)}

    def numbers_of(self, vectors: Floats, rows: ItemRows | None) -> KindNumbers:
        """Return the kinds of rows with vectors (n, d), (n,).

        rows: needed if the kinds follow from a field.
        """
        if self.direction:
            return self._side_of(vectors)
        # A caller that forgot the rows would store rows without a kind.
        if rows is None:
            raise RuntimeError(f"the kinds of rows follow from their field {self.field!r}")
        return self.numbers_of_values([row.get(self.field) for row in rows.rows])

    def numbers_of_values(self, values: Iterable[Any]) -> KindNumbers:
        """Return the kinds of rows whose field has these values, (n,)."""
        # None, the identity of what names no kind, is that of no value.
        numbers = [self._number_of.get(identity_of(value), UNKNOWN) for value in values]
        return np.array(numbers, np.int64)

    def _side_of(self, vectors: Floats) -> KindNumbers:
        rows = np.asarray(vectors, np.float32)
        finite = np.isfinite(rows).all(axis=1) & rows.any(axis=1)
        numbers = np.full(len(rows), UNKNOWN, np.int64)
        [direction] = rows_in(self.direction, 1, rows.shape[1])
        sides = unit_directions(rows[finite]) @ direction.astype(np.float64) > self.threshold
        numbers[finite] = sides.astype(np.int64)
        return numbers


Identity = tuple[type, KindValue]
"""A value of the field of kinds with its type: 1 and True are equal in Python, not in a database."""


def identity_of(value: Any) -> Identity | None:
    """Return a value with its type; None if it names no kind, such as a list or a long text."""
    if isinstance(value, np.bool_):
        value = bool(value)
    elif isinstance(value, np.integer):
        value = int(value)

    names_a_kind = isinstance(value, bool | int)
    if isinstance(value, str):
        names_a_kind = 0 < len(value) <= LONGEST_VALUE
    return (type(value), value) if names_a_kind else None


class KindMeans(FrozenModel):
    """The means that a profile compares vectors with, renewed by each refresh with a fit."""

    means: RowsAsText
    """(1 + K, d): that of the queries, then those of the kinds, as `rows_as_text`."""
    shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(max_length=MOST_KINDS)
    """The share of the items of each kind among those with one."""


@dataclass(frozen=True)
class Kinds:
    """The kinds of a profile: the rule of the field, and the means of the profile."""

    rule: KindRule
    means: KindMeans
    dim: int
    """d."""

    def __post_init__(self) -> None:
        if len(self.means.shares) != self.rule.count:
            raise InvalidParameter(
                f"{len(self.means.shares)} means of kinds for {self.rule.count} kinds"
            )
        # It raises if the text has another number of means.
        _ = self._rows

    @classmethod
    def measured(
        cls, rule: KindRule, items: Floats, numbers: KindNumbers, queries: Floats
    ) -> Kinds:
        """Measure the means on items (n, d), of the kinds `numbers` (n,), and queries (m, d).

        Both are as the layout reduces them. A kind without an item has the mean of all.
        """
        dim = items.shape[1]
        counts = np.bincount(numbers[numbers != UNKNOWN], minlength=rule.count)
        total = max(1, int(counts.sum()))
        everything = items.mean(axis=0, dtype=np.float64) if len(items) else np.zeros(dim)
        means = [queries.mean(axis=0, dtype=np.float64) if len(queries) else np.zeros(dim)]
        for number in range(rule.count):
            of_kind = items[numbers == number]
            means.append(of_kind.mean(axis=0, dtype=np.float64) if len(of_kind) else everything)

        shares = tuple((counts / total).tolist())
        return cls(rule, KindMeans(means=rows_as_text(np.stack(means)), shares=shares), dim)

    @cached_property
    def _rows(self) -> Floats:
        return rows_in(self.means.means, 1 + self.rule.count, self.dim)

    @property
    def mean_query(self) -> Floats:
        """μq, (d,)."""
        mean: Floats = self._rows[0]
        return mean

    @property
    def of_kinds(self) -> Floats:
        """μ1 … μK, (K, d)."""
        means: Floats = self._rows[1:]
        return means

    @cached_property
    def overall(self) -> Floats:
        """μ, the mean of all items with a kind, (d,)."""
        return np.asarray(np.array(self.means.shares) @ self.of_kinds, np.float32)

    @property
    def facts(self) -> dict[str, Any]:
        """The kinds as plain data."""
        names = self.rule.names
        shares = {
            name: round(share, 4) for name, share in zip(names, self.means.shares, strict=True)
        }
        return {"field": self.rule.field or None, "names": list(names), "shares": shares}

    def centred_items(self, items: Floats, numbers: KindNumbers) -> Floats:
        """Return reduced items (n, d) less the means of their kinds (n,)."""
        # UNKNOWN, −1, is the last row.
        means = np.vstack([self.of_kinds, self.overall])
        return items - means[numbers]

    def centred_queries(self, queries: Floats) -> Floats:
        """Return reduced queries (m, d) less their mean."""
        return queries - self.mean_query

    def is_near(self, former: Kinds) -> bool:
        """Whether the means of this rule differ little from former ones, in lengths of the largest."""
        if self.rule != former.rule or self.dim != former.dim:
            return False
        moves = np.linalg.norm(self._rows - former._rows, axis=1)
        return bool(moves.max() <= STEADY * np.linalg.norm(former._rows, axis=1).max())

    def preference(self, queries: Floats) -> float:
        """Return how much nearer queries (m, d) are to one kind than to another, as `preferred` does;
        of all pairs of kinds, the largest.
        """
        directions = unit_directions(queries)
        pairs = combinations(self.of_kinds.astype(np.float64), 2)
        return max(preferred(np.stack(pair), directions) for pair in pairs)

    def weights(self, factor: float = 1.0) -> KindWeights | None:
        """Return what a search with this factor κ sends; None if it leaves kinds out."""
        if factor == 0:
            return None
        # Nearly all searches: they need not compute the same numbers again.
        if factor == 1:
            return self._weights_in_full
        return KindWeights(
            taken_off=np.float32(factor) * self._weights_in_full.taken_off,
            directions=factor * self._weights_in_full.directions,
            added=factor * self._weights_in_full.added,
        )

    @cached_property
    def _weights_in_full(self) -> KindWeights:
        directions = np.zeros((self.dim, self.rule.count + 1))
        directions[:, :-1] = (self.of_kinds - self.overall).T
        return KindWeights(
            taken_off=self.mean_query,
            directions=directions,
            added=float(self.mean_query.astype(np.float64) @ self.overall),
        )


def preferred(means: npt.NDArray[np.float64], queries: npt.NDArray[np.float64]) -> float:
    """Return how much nearer queries (m, d) are to one of two means (2, d): the mean of the
    differences of their scores, in standard deviations; 0 if it varies not at all.
    """
    differences = queries @ (means[1] - means[0])
    deviation = float(differences.std())
    return abs(float(differences.mean())) / deviation if deviation else 0.0


@dataclass(frozen=True, eq=False)
class GalleryKinds:
    """The kinds of the n items of a gallery, whose vectors are as the layout reduces them."""

    kinds: Kinds
    numbers: KindNumbers
    """(n,), the kind of each item."""

    def take(self, items: npt.NDArray[np.int64]) -> GalleryKinds:
        """Return the kinds of some of the items, by their numbers."""
        return replace(self, numbers=self.numbers[items])

    @property
    def members(self) -> list[tuple[str, npt.NDArray[np.bool_]]]:
        """The name of each kind, with whether each item is of it, (n,); then the items without one,
        if there are any.
        """
        members = [(name, self.numbers == kind) for kind, name in enumerate(self.kinds.rule.names)]
        without = self.numbers == UNKNOWN
        return [*members, ("no kind", without)] if without.any() else members

    def centred_items(self, items: Floats) -> Floats:
        """Return the items (n, d) less the means of their kinds."""
        return self.kinds.centred_items(items, self.numbers)

    def centred_queries(self, queries: Floats) -> Floats:
        """Return queries (m, d) less their mean."""
        return self.kinds.centred_queries(queries)

    def item_table(self, items: Floats) -> Floats:
        """Return the items (n, d) with columns for their kinds, (n, d + K + 1).

        Their products with `query_table` are the scores of searches with any factor.
        """
        columns = np.zeros((len(items), self.kinds.rule.count + 1), np.float32)
        # UNKNOWN, −1, is the last column.
        columns[np.arange(len(items)), self.numbers] = 1
        return np.hstack([items, columns])

    def query_table(self, queries: Floats, factor: float = 1.0) -> Floats:
        """Return queries (m, d) as a search with this factor compares them, (m, d + K + 1)."""
        weights = self.kinds.weights(factor)
        if weights is None:
            columns = np.zeros((len(queries), self.kinds.rule.count + 1), np.float32)
            return np.hstack([queries, columns])

        moved = queries - weights.taken_off
        columns = np.asarray(weights.added - moved @ weights.directions, np.float32)
        return np.hstack([moved, columns])


def kinds_from(rule: KindRule, means: KindMeans, dim: int) -> Kinds:
    """Return the kinds of a profile; the few in use are decoded once."""
    # Rules of truth values and of the numbers 0 and 1 are equal in Python.
    types = tuple(map(type, rule.values))
    return _kinds_from(types, rule, means, dim)


@lru_cache(maxsize=64)
def _kinds_from(types: tuple[type, ...], rule: KindRule, means: KindMeans, dim: int) -> Kinds:
    return Kinds(rule, means, dim)


class KindCounts(NamedTuple):
    """How many rows of a collection have each value of a field."""

    counts: Sequence[tuple[KindValue, int]]
    """Each value that can be a kind, with its number of rows."""
    without: int
    """Rows without a value, or with one that is no kind, such as a list."""


def rule_of_field(field: str, collection: str, counted: KindCounts) -> KindRule:
    """Return the rule that makes a kind of each value of a field with enough rows.

    Raises InvalidInput, in one line, if there are too many values, or fewer than two.
    """
    counts = counted.counts
    if len(counts) > MOST_KINDS:
        some = ", ".join(repr(value) for value, _ in counts[:3])
        raise InvalidInput(
            f"field {field!r} of {collection!r} has more than {MOST_KINDS} values, such as {some}: "
            f"kinds are few, such as image and text; choose a field with at most {MOST_KINDS}"
        )

    enough = [value for value, count in counts if count >= FEWEST_OF_A_KIND]
    if len(enough) < 2:
        values = ", ".join(f"{value!r} ({count:,} rows)" for value, count in counts)
        raise InvalidInput(
            f"field {field!r} of {collection!r} does not have two kinds of at least "
            f"{FEWEST_OF_A_KIND} rows each, only {values or 'rows without a value'}: leave the "
            "kinds out, or choose another field"
        )
    return KindRule(field=field, values=tuple(sorted(enough, key=lambda value: str(value))))


def expect_room(rule: KindRule, dim: int, profiles: int = 1) -> None:
    """Raise InvalidInput if the collection state has no room for the means of so many profiles."""
    numbers = profiles * (1 + rule.count) * dim
    if numbers <= MOST_NUMBERS:
        return

    of_profiles = f" of {profiles} profiles" if profiles > 1 else ""
    remedy = "do with fewer profiles" if profiles > 1 else "choose a field with fewer values"
    raise InvalidInput(
        f"{rule.count} kinds of dimension {dim:,} have {numbers:,} numbers in the means{of_profiles}, "
        f"and a collection state has room for {MOST_NUMBERS:,}: {remedy}"
    )
