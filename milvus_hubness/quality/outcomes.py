"""Searches with many biases at once, and what hubs take in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.kernels.scores import (
    Scores,
    as_array,
    as_scores,
    at_columns,
    filled,
    largest,
    largest_sizes,
    library_of,
    tiles_of_scores,
    where_true,
)
from milvus_hubness.quality.measures import DEPTH, excess_answers, k_occurrence
from milvus_hubness.quality.retrieval import (
    MARGIN,
    R_AT_1,
    Measure,
    PositiveRanks,
    in_order,
)
from milvus_hubness.quality.right_items import RightItems

RESAMPLES = 50
"""Of the queries, for the standard error of a change."""
TOGETHER = 24
"""Biases that `assess` bounds together."""
GROUP = 8
"""Items of which a bound needs the best only."""


class Outcome(NamedTuple):
    """The outcome of searches under several biases."""

    ranks: npt.NDArray[np.int32]
    """(n_biases, n_queries), those of each query's best
    positive, as in `ranks`; without positives (n_biases, 0)."""

    retrieved: npt.NDArray[np.int32]
    """(n_biases, n_queries, at most 10), the first items."""

    values: npt.NDArray[np.float64]
    """(n_biases, n_queries) of the measure of the searches; without positives (n_biases, 0)."""

    def of(self, queries: npt.NDArray[np.int64]) -> Outcome:
        """Return the outcome of these queries only."""
        return Outcome(self.ranks[:, queries], self.retrieved[:, queries], self.values[:, queries])

    def of_biases(self, rows: npt.NDArray[Any]) -> Outcome:
        """Return the outcome under these biases only, by their numbers or by a mask."""
        return Outcome(self.ranks[rows], self.retrieved[rows], self.values[rows])

    def joined(self, other: Outcome) -> Outcome:
        """Return this outcome, then another one of the same queries."""
        both = zip(self, other, strict=True)
        return Outcome(*(np.concatenate([ours, theirs]) for ours, theirs in both))

    def over(self, raw: Outcome) -> Outcome:
        """Return this outcome with the first search of another one, of the same queries, as the raw
        one, in place of its own first.
        """
        rows = np.arange(len(self.retrieved))
        return raw.of_biases(rows[:1]).joined(self.of_biases(rows[1:]))

    def gated(self, activated: Sequence[npt.NDArray[np.bool_] | None]) -> Outcome:
        """Return the outcome with a gate on each search but the first, the raw one.

        Queries whose first raw item is not activated keep the raw outcome. activated: for each
        search but the raw one, (n_items,) whether an item is activated; None without a gate.
        """
        result = Outcome(self.ranks.copy(), self.retrieved.copy(), self.values.copy())
        first_raw = self.retrieved[0, :, 0]
        for row, is_activated in enumerate(activated, 1):
            if is_activated is None:
                continue
            stays_raw = ~is_activated[first_raw]
            result.retrieved[row, stays_raw] = self.retrieved[0, stays_raw]
            if self.ranks.size:
                result.ranks[row, stays_raw] = self.ranks[0, stays_raw]
                result.values[row, stays_raw] = self.values[0, stays_raw]
        return result


def assess(
    queries: Vectors,
    gallery: Vectors,
    biases: Sequence[Vectors],
    right: RightItems | None = None,
    measure: Measure = R_AT_1,
) -> Outcome:
    """Return the outcome of each bias (n_items,) for queries (n_queries, d) on a gallery.

    gallery: (n_items, d). right: the right items of the queries; None for no ranks. Memory: a tile of
    at least one row of scores.
    """
    all_biases = np.stack(biases)
    # Biases of nearly the same spread go together: bounds on all of a group are then tight.
    by_spread = np.argsort(all_biases.std(1), kind="stable")
    groups = np.array_split(by_spread, -(-len(biases) // TOGETHER))

    depth = min(DEPTH, len(gallery))
    retrieved = np.empty((len(biases), len(queries), depth), np.int32)
    ranks = np.empty((len(biases), 0 if right is None else len(queries)), np.int32)
    values = np.empty(ranks.shape)
    right_items = None if right is None else _padded(right)
    numbers = np.arange(len(queries))
    own = None if right is None else right.own
    for tile, scores in tiles_of_scores(queries, gallery, own):
        for group in groups:
            group_biases = as_scores(all_biases[group], scores)
            bounds = _Bounds.of(scores, group_biases)
            retrieved[group, tile] = _first_items(bounds, depth)
            if right is None or right_items is None:
                continue

            best = _best_ranks(bounds, as_scores(right_items[tile], scores))
            ranks[group, tile] = best
            if measure.needs_best_only:
                values[group, tile] = measure.of_best(best)
                continue
            all_ranks = _all_ranks(bounds, right.take(numbers[tile]))
            for bias, of_bias in zip(group, all_ranks, strict=True):
                values[bias, tile] = measure.values(of_bias)

    return Outcome(ranks, retrieved, values)


class _Bounds(NamedTuple):
    """Bounds of the corrected scores of m queries and n items under a group of biases at once.

    A bias is its mean, which changes no order, and the deviations from it. So the lowest and the
    highest deviation of an item bound its corrected scores under the whole group, but for the
    means. Most items are far from being decisive for any bias, as one comparison with a bound
    shows; only the undecided ones are computed for each bias.
    """

    scores: Scores
    """(m, n) raw."""

    biases: Scores
    """(group, n)."""

    means: Scores
    """(group, 1) of the biases."""

    lower: Scores
    """(m, n): s − b is at least this less the mean of b, for every bias b of the group."""

    upper: Scores
    """(m, n): s − b is at most this less the mean of b."""

    largest: Scores
    """(m,) the largest raw score of each query, in absolute value."""

    rounding: Scores
    """(m, 1) by how much float32 may make a bound wrong."""

    @classmethod
    def of(cls, scores: Scores, biases: Scores) -> _Bounds:
        library = library_of(scores)
        means = biases.mean(1)[:, None]
        deviations = biases - means
        largest_scores = largest_sizes(scores)
        return cls(
            scores=scores,
            biases=biases,
            means=means,
            # The largest deviation bounds from below, because it is subtracted.
            lower=scores - library.amax(deviations, 0),
            upper=scores - library.amin(deviations, 0),
            largest=largest_scores,
            rounding=2 * MARGIN * (largest_scores + 2 * abs(biases).max())[:, None],
        )

    def of_rows(self, rows: Scores) -> _Bounds:
        """Return the bounds of some of the queries."""
        if len(rows) == len(self.scores):
            return self
        return self._replace(
            scores=self.scores[rows],
            lower=self.lower[rows],
            upper=self.upper[rows],
            largest=self.largest[rows],
            rounding=self.rounding[rows],
        )


def _first_items(bounds: _Bounds, depth: int) -> npt.NDArray[np.int64]:
    """Return (group, m, depth) the items with the highest corrected scores, best first."""
    # At least `depth` items reach the threshold under every bias, so an item whose upper bound does
    # not is first under none.
    threshold = _nth_largest(bounds.lower, depth) - bounds.rounding
    rows, columns = where_true(bounds.upper >= threshold)

    # The candidates of each query, moved to the left of a narrow table; the rest of it is −inf.
    library = library_of(bounds.scores)
    query_count = len(bounds.scores)
    counts = library.bincount(rows, minlength=query_count)
    starts = library.cumsum(counts, 0) - counts
    slots = as_scores(np.arange(len(rows)), rows) - starts[rows]
    items = filled((query_count, int(counts.max())), 0, rows)
    items[rows, slots] = columns
    candidate_scores = filled(tuple(items.shape), -np.inf, bounds.scores)
    candidate_scores[rows, slots] = bounds.scores[rows, columns]

    firsts = []
    for bias in bounds.biases:
        _, best = largest(candidate_scores - bias[items], depth)
        firsts.append(as_array(at_columns(items, best)))
    return np.stack(firsts)


def _nth_largest(values: Scores, nth: int) -> Scores:
    """Return (m, 1) the nth largest of each row of values (m, n), or a somewhat smaller number.

    It is the nth largest of the maxima of groups, of which there are fewer to sort.
    """
    column_count = values.shape[1]
    # There must be at least `nth` groups; else each column is a group of its own.
    group_count = column_count // GROUP if column_count >= GROUP * nth else column_count
    # The last columns, too few for a group, are left out: the result may only be smaller for it.
    whole = column_count // group_count * group_count
    groups = values[:, :whole].reshape(len(values), -1, group_count)
    maxima, _ = largest(library_of(values).amax(groups, 1), nth)
    return maxima[:, -1:]


def _best_ranks(bounds: _Bounds, positives: Scores) -> npt.NDArray[np.int64]:
    """Return (group, m) the rank of the best of each query's positives (m, p)."""
    corrected = at_columns(bounds.scores, positives) - bounds.biases[:, positives]
    return _ranks_behind(bounds, library_of(bounds.scores).amax(corrected, 2))


def _all_ranks(bounds: _Bounds, right: RightItems) -> Iterator[PositiveRanks]:
    """Yield the ranks of all right items of the m queries under each bias of the group."""
    counts = right.counts
    unordered = np.empty((len(bounds.biases), len(right.items)), np.int64)
    # The nth right item of all queries that have so many, at once.
    for nth in range(int(counts.max())):
        with_nth = np.flatnonzero(counts > nth)
        positions = right.starts[with_nth] + nth
        of_rows = bounds.of_rows(as_scores(with_nth, bounds.scores))
        columns = as_scores(right.items[positions], bounds.scores)
        raw = at_columns(of_rows.scores, columns[:, None])[:, 0]
        corrected = raw - bounds.biases[:, columns]
        unordered[:, positions] = _ranks_behind(of_rows, corrected)

    for of_bias in unordered:
        yield in_order(of_bias, right)


def _ranks_behind(bounds: _Bounds, corrected: Scores) -> npt.NDArray[np.int64]:
    """Return (group, m) the rank that an item has with these corrected scores, (group, m)."""
    library = library_of(bounds.scores)
    biases = bounds.biases
    # An item ranks before the positive if its corrected score is above this, (group, m).
    largest_biases = library.amax(abs(biases), 1)[:, None]
    margins = MARGIN * library.maximum(bounds.largest, largest_biases)
    limits = corrected + margins

    # The bounds lack the means, so the limits that they are compared with get them.
    limits_of_bounds = limits + bounds.means
    highest_limit = library.amax(limits_of_bounds, 0)[:, None] + bounds.rounding
    lowest_limit = library.amin(limits_of_bounds, 0)[:, None] - bounds.rounding
    is_before_under_all = bounds.lower > highest_limit
    is_undecided = (bounds.upper > lowest_limit) & ~is_before_under_all

    # Every bias decides the few others itself, in the exact scores.
    rows, columns = where_true(is_undecided)
    undecided_scores = bounds.scores[rows, columns]
    least_ranks = 1 + is_before_under_all.sum(1)
    ranks = []
    for bias, limit in zip(biases, limits, strict=True):
        is_before = undecided_scores - bias[columns] > limit[rows]
        before_counts = library.bincount(rows[is_before], minlength=len(bounds.scores))
        ranks.append(as_array(least_ranks + before_counts))
    return np.stack(ranks)


def excess_answers_of(outcome: Outcome, n_items: int) -> npt.NDArray[np.float64]:
    """Return (n_biases,) the share of excess answers taken by hubs among all answers."""
    shares = []
    for items in outcome.retrieved:
        counts = k_occurrence(items, n_items, items.shape[1])
        shares.append(excess_answers(counts))
    return np.array(shares)


def noise_of_change(
    outcome: Outcome, n_items: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return (n_biases − 1,) standard errors of changes in excess answers taken by hubs.

    They are the changes from each of the other biases to the last one, on the same queries, which
    are resampled.
    """
    query_count = outcome.retrieved.shape[1]
    changes = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(query_count, size=query_count)
        resampled = outcome._replace(retrieved=outcome.retrieved[:, drawn])
        excess = excess_answers_of(resampled, n_items)
        changes.append(excess[-1] - excess[:-1])
    noise: npt.NDArray[np.float64] = np.std(changes, axis=0)
    return noise


def _padded(right: RightItems) -> npt.NDArray[np.int64]:
    """Return (n_queries, most) the items of each query, filled up with its last."""
    # An item twice is no better than once, so the last one can fill a row of the table.
    counts = right.counts
    nth = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    padded: npt.NDArray[np.int64] = right.items[right.starts[:-1, None] + nth]
    return padded
