"""The right items of queries, with grades, as measures of retrieval take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import InvalidInput, name_some

Positives: TypeAlias = npt.NDArray[Any] | Sequence[int | Collection[int]]
"""For each query the number of its right item, or several."""
Grades: TypeAlias = npt.NDArray[Any] | Sequence[float | Collection[float]]
"""For each query how right its positives are: numbers above 0, in the order of the positives."""


@dataclass(frozen=True, eq=False)
class RightItems:
    """The right items of n queries; those of query i are items[starts[i]:starts[i + 1]]."""

    items: npt.NDArray[np.int64]
    """(p,) their numbers in the gallery, none of them twice for a query."""

    starts: npt.NDArray[np.int64]
    """(n + 1,) the position of each query's first one, and p at the end."""

    grades: npt.NDArray[np.float64] | None = None
    """(p,) how right each is, above 0; None for 1 each."""

    own: npt.NDArray[np.int64] | None = None
    """(n,) the number of the item that a query itself is, which is no answer to it, and −1 for none;
    None if all items are answers.
    """

    @classmethod
    def of(
        cls,
        positives: Positives,
        grades: Grades | None = None,
        *,
        own: npt.NDArray[np.int64] | None = None,
    ) -> RightItems:
        """Return the right items of n ≥ 1 queries, each with at least one.

        Of an item that is there twice for a query, the higher grade counts. Raises InvalidInput.
        """
        if not len(positives):
            raise InvalidInput("queries or gallery items are missing")

        listed = _listed(positives)
        graded = [dict.fromkeys(numbers, 1.0) for numbers in listed]
        if grades is not None:
            graded = _with_grades(listed, grades)
        missing = [query for query, of_query in enumerate(graded) if not of_query]
        if missing:
            raise InvalidInput(
                f"no positive for query {name_some(missing)}: each query needs at least one"
            )

        ordered = [sorted(of_query.items()) for of_query in graded]
        items = np.array([item for of_query in ordered for item, _ in of_query])
        if items.dtype.kind not in "iu":
            raise InvalidInput("positives must be the numbers of gallery items")

        values = None
        if grades is not None:
            values = np.array([grade for of_query in ordered for _, grade in of_query])
        return cls(items.astype(np.int64), _starts_of(list(map(len, graded))), values, own)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """(n,) the number of right items of each query."""
        return np.diff(self.starts)

    def expect_within(self, query_count: int, item_count: int) -> None:
        """Raise InvalidInput unless these are the right items of so many queries among so many items."""
        if len(self) != query_count:
            raise InvalidInput(
                f"positives cover {len(self)} queries, but {query_count} queries were passed"
            )
        outside = np.flatnonzero((self.items < 0) | (self.items >= item_count))
        if len(outside):
            faulty = sorted(set((np.searchsorted(self.starts, outside, "right") - 1).tolist()))
            raise InvalidInput(
                f"positives of query {name_some(faulty)} are not among the {item_count} gallery items"
            )

    def take(self, queries: npt.NDArray[np.int64]) -> RightItems:
        """Return those of some queries, (m,) their numbers."""
        counts = self.counts[queries]
        starts = _starts_of(counts)
        rows = np.arange(starts[-1]) + np.repeat(self.starts[queries] - starts[:-1], counts)
        return RightItems(
            self.items[rows],
            starts,
            None if self.grades is None else self.grades[rows],
            None if self.own is None else self.own[queries],
        )

    def among(self, chosen: npt.NDArray[np.int64]) -> RightItems:
        """Return them with the numbers that items have among some of the gallery.

        chosen: (m,) the numbers of these in ascending order, with all that are right.
        """
        own = self.own
        if own is not None:
            # One that is not chosen is no answer anyway.
            positions = np.minimum(np.searchsorted(chosen, own), len(chosen) - 1)
            own = np.where(chosen[positions] == own, positions, -1)
        return RightItems(np.searchsorted(chosen, self.items), self.starts, self.grades, own)

    def sums(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return (n,) the sums over each query's right items of values (p,)."""
        return np.add.reduceat(values, self.starts[:-1])


def _starts_of(counts: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _listed(of_queries: Iterable[Any]) -> list[list[Any]]:
    """Return for each query a list of plain values: of one value, of several, or of an array."""
    # The elements of a tensor are tensors, of which no two are equal as keys of a dictionary.
    plain = (values.tolist() if hasattr(values, "tolist") else values for values in of_queries)
    return [list(values) if isinstance(values, Iterable) else [values] for values in plain]


def _with_grades(positives: Sequence[list[Any]], grades: Grades) -> list[dict[Any, float]]:
    """Return the grade of each positive of each query. Raises InvalidInput."""
    listed = _listed(grades)
    unequal = [
        query
        for query, numbers in enumerate(positives)
        if query >= len(listed) or len(listed[query]) != len(numbers)
    ]
    if unequal or len(listed) != len(positives):
        raise InvalidInput(
            f"the grades of query {name_some(unequal or [len(positives)])} must be as many as its "
            "positives"
        )
    wrong = [
        query
        for query, values in enumerate(listed)
        if not all(isinstance(grade, Real) and 0 < float(grade) < np.inf for grade in values)
    ]
    if wrong:
        raise InvalidInput(f"the grades of query {name_some(wrong)} must be numbers above 0")

    of_queries: list[dict[Any, float]] = []
    for numbers, values in zip(positives, listed, strict=True):
        of_query: dict[Any, float] = {}
        for item, grade in zip(numbers, values, strict=True):
            of_query[item] = max(of_query.get(item, 0.0), float(grade))
        of_queries.append(of_query)
    return of_queries
