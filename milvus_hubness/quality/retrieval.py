"""Measures of retrieval: the ranks of right items, and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import DEFAULT_MEASURE
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.scores import (
    as_array,
    as_scores,
    at_columns,
    largest_sizes,
    tiles_of_scores,
)
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.measures import ONCE_EACH, Sendings, with_bias
from milvus_hubness.quality.right_items import RightItems

MARGIN = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less, relative to the largest, count as equal."""

PerQuery = npt.NDArray[np.float64]


class PositiveRanks(NamedTuple):
    """The ranks of all positives; those of query i are ranks[right.starts[i]:right.starts[i + 1]]."""

    ranks: npt.NDArray[np.int64]
    """(p,), from 1; those of a query best first."""

    right: RightItems
    """The positives in the same order."""

    @property
    def best(self) -> npt.NDArray[np.int64]:
        """Return (n_queries,) the rank of each query's best positive."""
        return self.ranks[self.right.starts[:-1]]

    def among(self, inside: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], PositiveRanks]:
        """Return which queries, (n_queries,), have positives in a group of items, and their ranks.

        inside: (n_items,) whether an item is in the group. Other positives count as any items.
        """
        is_inside = inside[self.right.items]
        counts = self.right.sums(is_inside.astype(np.int64))
        has_one = counts > 0
        starts = np.concatenate([[0], np.cumsum(counts[has_one])])
        grades = self.right.grades
        right = RightItems(
            self.right.items[is_inside], starts, None if grades is None else grades[is_inside]
        )
        return has_one, PositiveRanks(self.ranks[is_inside], right)

    def where(self, is_ours: npt.NDArray[np.bool_], other: PositiveRanks) -> PositiveRanks:
        """Return these ranks for some of the queries, (n_queries,) bool, and others for the rest.

        Both are of the same positives, in any order of these.
        """
        by_positive = np.repeat(is_ours, self.right.counts)
        ours = self.right
        theirs = other.right
        grades = None
        if ours.grades is not None and theirs.grades is not None:
            grades = np.where(by_positive, ours.grades, theirs.grades)
        items = np.where(by_positive, ours.items, theirs.items)
        ranks = np.where(by_positive, self.ranks, other.ranks)
        return PositiveRanks(ranks, replace(ours, items=items, grades=grades))


def ranks(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    right: RightItems,
    bias: npt.ArrayLike | None = None,
) -> PositiveRanks:
    """Return the rank of every right item under s(q, r) − b(r) among all gallery items.

    Scores that are equal up to float32 rounding rank behind that of the right item. Memory: a tile of
    at least one row of scores. Raises InvalidInput, DimensionMismatch, NonFiniteVectors.
    """
    query_vectors, stored = with_bias(queries, gallery, bias)
    right.expect_within(len(query_vectors), len(stored))
    items = right.items
    starts = right.starts
    unordered = np.empty(len(items), np.int64)
    for tile, scores in tiles_of_scores(query_vectors, stored, right.own):
        # Equal items get scores that differ by rounding. Without a margin, they would be before
        # the positive or behind it by chance.
        margins = MARGIN * largest_sizes(scores)
        first = starts[:-1][tile]
        end = starts[1:][tile]

        # The nth positive of all queries of the tile that have so many, at once.
        for nth in range(int((end - first).max())):
            with_nth = np.flatnonzero(first + nth < end)
            positions = first[with_nth] + nth
            rows = as_scores(with_nth, scores)
            columns = as_scores(items[positions, None], scores)
            row_scores = scores[rows]
            limits = at_columns(row_scores, columns) + margins[rows, None]
            unordered[positions] = 1 + as_array((row_scores > limits).sum(1))

    return in_order(unordered, right)


MEASURES = "R@k, MRR, MAP or nDCG@k"
"""The measures to choose from, in words."""
_NAMED = re.compile(r"(R|MRR|MAP|nDCG|Success|RR|AP)(?:@([1-9][0-9]{0,5}))?", re.IGNORECASE)
_NAMES = {
    "r": "R",
    "success": "R",
    "mrr": "MRR",
    "rr": "MRR",
    "map": "MAP",
    "ap": "MAP",
    "ndcg": "nDCG",
}
"""Our name of a measure by any name of it, in small letters."""


@dataclass(frozen=True)
class Measure:
    """A measure of retrieval, of each query; its mean over the queries is what is reported."""

    name: str
    """"R", "MRR", "MAP" or "nDCG"."""

    k: int | None = None
    """How many of the first items count, for R and nDCG."""

    @classmethod
    def of(cls, measure: object) -> Measure:
        """Return the measure itself, or that of a name as in `R@1`, `MRR`, `MAP` or `nDCG@10`.

        R@k is 1 if a positive is among the first k, and 0 if not, as in the literature on
        cross-modal search. ir-measures calls it Success@k, MRR RR and MAP AP; these names are taken
        too. Raises InvalidInput.
        """
        if isinstance(measure, Measure):
            return measure
        named = _NAMED.fullmatch(measure.strip()) if isinstance(measure, str) else None
        if named is None:
            raise InvalidInput(f"the measure must be {MEASURES}, not {measure!r}")
        name = _NAMES[named[1].lower()]
        has_k = named[2] is not None
        if has_k != (name in ("R", "nDCG")):
            raise InvalidInput(f"the measure must be {MEASURES}, not {measure!r}")
        return cls(name, int(named[2]) if has_k else None)

    def __str__(self) -> str:
        return self.name if self.k is None else f"{self.name}@{self.k}"

    @property
    def needs_best_only(self) -> bool:
        """Whether the rank of a query's best positive is enough."""
        return self.name in ("R", "MRR")

    def of_best(self, ranks: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """Return R or MRR from the ranks of the best positives, of any shape."""
        if self.name == "MRR":
            return np.asarray(1 / ranks, np.float64)
        return np.asarray(ranks <= np.int64(self.k or 0), np.float64)

    def values(self, ranks: PositiveRanks) -> PerQuery:
        """Return the measure of each query, (n_queries,)."""
        if self.needs_best_only:
            return self.of_best(ranks.best)
        if self.name == "MAP":
            return average_precisions(ranks)
        assert self.k is not None, "nDCG has a k"
        return ndcgs(ranks, self.k)


R_AT_1 = Measure.of(DEFAULT_MEASURE)
"""The measure that decides unless another is chosen."""


def in_order(ranks: npt.NDArray[np.int64], right: RightItems) -> PositiveRanks:
    """Return each query's ranks in ascending order, with distinct ranks for equal positives.

    ranks: (p,), in the order of the positives.
    """
    query = np.repeat(np.arange(len(right)), right.counts)
    order = np.lexsort((ranks, query))
    ranks = ranks[order]
    nth = np.arange(len(ranks)) - right.starts[query]

    # A rank is at least one more than the one before: a running maximum of rank − nth does that. It
    # starts again with each query, because the ranks of a query are far above those before.
    offset = query * (ranks.max(initial=0) + len(ranks) + 1)
    rising = np.maximum.accumulate(ranks - nth + offset)
    grades = None if right.grades is None else right.grades[order]
    ordered = replace(right, items=right.items[order], grades=grades)
    return PositiveRanks(rising + nth - offset, ordered)


def hits(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) 1 if a positive is among the first k, else 0; the mean is R@k."""
    return (ranks.best <= whole_number("k", k)).astype(np.float64)


def average_precisions(ranks: PositiveRanks, k: int | None = None) -> PerQuery:
    """Return (n_queries,) AP@k = Σ (i / rank_i) / min(p, k), or AP if k is None.

    The sum is over those of the p positives i = 1, 2, …, ordered by rank, that are among the first
    k, or over all (Manning et al., Introduction to Information Retrieval, 2008, 8.4).
    """
    right = ranks.right
    nth = 1 + np.arange(len(ranks.ranks)) - np.repeat(right.starts[:-1], right.counts)
    precisions = nth / ranks.ranks
    if k is None:
        return right.sums(precisions) / right.counts
    k = whole_number("k", k)
    return right.sums(precisions * (ranks.ranks <= k)) / np.minimum(right.counts, k)


def ndcgs(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) nDCG@k, whose gain is the grade (Järvelin and Kekäläinen, 2002).

    It is Σ grade / log2(1 + rank) over the positives among the first k, divided by its value with
    all positives in front, the highest grade first. As in trec_eval, the gain is the grade itself,
    not 2 to its power.
    """
    k = whole_number("k", k)
    right = ranks.right
    grades = np.ones(len(ranks.ranks)) if right.grades is None else right.grades
    gained = right.sums((ranks.ranks <= k) * grades / np.log2(1 + ranks.ranks))

    query = np.repeat(np.arange(len(right)), right.counts)
    falling = grades[np.lexsort((-grades, query))]
    nth = np.arange(len(grades)) - right.starts[query]
    ndcgs: PerQuery = gained / right.sums((nth < k) * falling / np.log2(2 + nth))
    return ndcgs


def retrieval_summary(
    ranks: PositiveRanks,
    ks: Sequence[int] = (1, 5, 10),
    depth: int = 10,
    sendings: Sendings = ONCE_EACH,
) -> dict[str, float]:
    """Return R@k for each k, median and mean rank of the best positive, MRR, mAP and nDCG.

    They are means over what users send. Source of MRR: Voorhees, TREC-8, 1999.
    """
    return {
        **{f"R@{k}": sendings.mean(hits(ranks, k)) for k in ks},
        "MdR": sendings.median(ranks.best),
        "MnR": sendings.mean(ranks.best),
        "MRR": sendings.mean(1 / ranks.best),
        f"mAP@{depth}": sendings.mean(average_precisions(ranks, depth)),
        f"nDCG@{depth}": sendings.mean(ndcgs(ranks, depth)),
    }
