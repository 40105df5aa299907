"""Batch matching: Sinkhorn Normalization between a batch of queries and the gallery (Pan et al., ACM Multimedia 2025).

The queries themselves are the bank. The iteration runs on pairs only: the items nearest to each query, and the queries
nearest to each item, so that neither hubs nor anti-hubs lack pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.estimators.sinkhorn import iterate
from milvus_hubness.correction.estimators.steps import PairSteps

Numbers = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]

TEMPERATURE = 0.2
ITERATIONS = 30
TOLERANCE = 1e-3
FEW_QUERIES = 0.1
"""Share of the items; with fewer queries, matching gained nothing on real data: see benchmarks/matching.py."""
LARGEST_BIAS_SPREAD, LARGEST_GAP = 1.1, 1.0
"""In units of the spread of the scores; above either, matching mostly hurt: see benchmarks/matching.py."""


class Pairs(NamedTuple):
    """Pairs of queries and items by their numbers (p,), and their scores (p,), higher is better."""

    queries: Numbers
    items: Numbers
    scores: Scores

    @classmethod
    def union(cls, parts: list[Pairs], items: int) -> Pairs:
        """Return each pair of the parts once, with its first score, sorted by query, and clear the
        list.
        """
        queries, numbers, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
        parts.clear()
        _, first = np.unique(queries * np.int64(max(1, items)) + numbers, return_index=True)
        return cls(queries[first], numbers[first], scores[first])

    def of_first(self, queries: int) -> Pairs:
        """Return the pairs of the first queries."""
        end = int(np.searchsorted(self.queries, queries))
        return Pairs(self.queries[:end], self.items[:end], self.scores[:end])

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The place of the first pair of each query that has one."""
        return np.flatnonzero(np.diff(self.queries, prepend=-1))

    def by_query(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return one value for each query that has a pair as one for each pair (p,)."""
        return np.repeat(values, np.diff(np.r_[self.starts, len(self.queries)]))

    def ranks(self, scores: Scores) -> npt.NDArray[np.int64]:
        """Return the rank, from 1, of each pair among those of its query, by scores (p,)."""
        order = np.lexsort((-scores, self.queries))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = 1 + np.arange(len(order)) - self.by_query(self.starts)
        return ranks


class Balanced(NamedTuple):
    """biases: (n,), less their mean.

    warnings: why matching may be worse than the raw ranking here. facts: the measurements that they
    rest on, ready for JSON.
    """

    biases: Scores
    warnings: list[str]
    facts: dict[str, float]


def balanced(pairs: Pairs, items: int, spread: float) -> Balanced:
    """Balance the queries against the items, each of which has a pair.

    spread: of a query's scores over the items.
    """
    tau = TEMPERATURE * spread
    count = len(pairs.starts)
    if not count:
        return Balanced(
            np.empty(0, np.float32), [], dict.fromkeys(("queries", "items", "pairs"), 0)
        )
    steps = PairSteps(
        pairs.items, pairs.by_query(np.arange(count)), pairs.scores.astype(np.float64)
    )
    taus = np.array([tau])
    start = steps.from_items(np.zeros((1, items)), taus)
    [result] = iterate(steps.from_bank, start, taus, items, ITERATIONS, TOLERANCE)
    biases = result.g.mean() - result.g
    of_item = np.full(items, -np.inf, np.float32)
    np.maximum.at(of_item, pairs.items, pairs.scores)
    of_query = np.maximum.reduceat(pairs.scores, pairs.starts)
    gap = float(of_query.mean(dtype=np.float64) - of_item.mean(dtype=np.float64)) / spread
    uneven = float(biases.std()) / spread
    warnings = []
    if count < FEW_QUERIES * items:
        warnings.append(
            f"there are {count:,} queries for {items:,} items, fewer than one for {1 / FEW_QUERIES:.0f}: most items "
            "have no query of their own, and matching may put them in front of right answers"
        )
    if uneven > LARGEST_BIAS_SPREAD or gap > LARGEST_GAP:
        warnings.append(
            "the queries seem to ask for some of the items only, as if they were of one topic, and matching may put "
            f"items that nobody asks for in front of right answers: biases spread {uneven:.2f} times as far as scores "
            f"(usually at most {LARGEST_BIAS_SPREAD:g}), and the best score of a query is {gap:.2f} spreads above that "
            f"of an item (usually at most {LARGEST_GAP:g})"
        )
    facts: dict[str, float] = {
        "queries": count,
        "items": items,
        "pairs": len(pairs.scores),
        "tau": tau,
    }
    facts |= {"bias_spread": uneven, "best_score_gap": gap}
    facts |= {"iterations": result.iterations, "marginal_error": result.marginal_error}
    return Balanced(biases.astype(np.float32), warnings, facts)


def one_to_one(pairs: Pairs, scores: Scores, items: int) -> npt.NDArray[np.bool_]:
    """Return which pairs (p,) the best assignment takes: an item for as many queries as possible,
    each item at most once, with the largest sum of `scores` (p,). Queries that are left over have
    none of the pairs.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    m = len(pairs.starts)
    if not m:
        return np.zeros(0, np.bool_)
    # SciPy needs a full matching, so each query gets an item of its own that costs more than any other assignment.
    queries = pairs.by_query(np.arange(m))
    costs = 1.0 + scores.max() - scores.astype(np.float64)
    rows = np.r_[queries, np.arange(m)]
    columns = np.r_[pairs.items, items + np.arange(m)]
    weights = np.r_[costs, np.full(m, (m + 1) * costs.max())]
    _, chosen = min_weight_full_bipartite_matching(
        coo_array((weights, (rows, columns)), shape=(m, items + m)).tocsr()
    )
    taken: npt.NDArray[np.bool_] = chosen[queries] == pairs.items
    return taken


def moments(scores: Scores) -> npt.NDArray[np.float64]:
    """Return the number of items and the sums of their scores (b, q) and of the squares of these,
    by query, (3, q).
    """
    exact = scores.astype(np.float64)
    total: npt.NDArray[np.float64] = np.stack([np.ones_like(exact), exact, np.square(exact)]).sum(1)
    return total


def spread_of(total: npt.NDArray[np.float64]) -> float:
    """Return the standard deviation of a query's scores over all items, from the sum of their
    `moments` (3, q), as `estimators.base.score_spread` measures it.
    """
    means, sizes = total[1:] / np.maximum(total[0], 1)
    variance = float(np.mean(sizes - np.square(means)))
    size = float(np.mean(sizes))
    return math.sqrt(variance if variance > 1e-12 * size else size) or 1.0
