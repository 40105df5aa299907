"""Batch matching: Sinkhorn Normalization between a batch of queries and the gallery.

Pan et al., ACM Multimedia 2025. The queries themselves are the bank. The iteration runs on pairs
only: the items nearest to each query, and the queries nearest to each item, so that neither hubs
nor anti-hubs lack pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.requirements import naming_extras
from milvus_hubness.correction.estimators.sinkhorn import Balance, iterate
from milvus_hubness.correction.estimators.steps import PairSteps

Numbers = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]

TEMPERATURE = 0.2
"""τ, in units of the spread of the scores."""
ITERATIONS = 30
"""Most iterations of the balance."""
TOLERANCE = 1e-3
"""The balance ends earlier at this error of the queries' marginal."""

# benchmarks/matching.py measures the limits below.
FEW_QUERIES = 0.1
"""Share of the items; with fewer queries, matching gained nothing on real data."""
LARGEST_BIAS_SPREAD = 1.1
"""Largest standard deviation of the biases, in units of the spread of the scores; above it,
matching mostly hurt."""
LARGEST_GAP = 1.0
"""Largest distance between the mean best score of a query and that of an item, in the same units;
above it, matching mostly hurt."""


class Pairs(NamedTuple):
    """Pairs of queries and items by their numbers."""

    queries: Numbers
    """(p,)."""
    items: Numbers
    """(p,)."""
    scores: Scores
    """(p,), higher is better."""

    @classmethod
    def union(cls, batches: list[Pairs], items: int) -> Pairs:
        """Return each pair of the batches once, with its first score, sorted by query.

        items: their number. Clears the list.
        """
        queries, numbers, scores = (np.concatenate(column) for column in zip(*batches, strict=True))
        # The batches hold as much as the result: their memory is free before `unique` needs it.
        batches.clear()

        # One number for each pair, in 64 bits, since m · n exceeds 32.
        pair_numbers = queries * np.int64(max(1, items)) + numbers
        _, first = np.unique(pair_numbers, return_index=True)
        return cls(queries[first], numbers[first], scores[first])

    def of_first(self, queries: int) -> Pairs:
        """Return the pairs of the first queries."""
        # The pairs are sorted by query.
        end = int(np.searchsorted(self.queries, queries))
        return Pairs(self.queries[:end], self.items[:end], self.scores[:end])

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The number of the first pair of each query that has one."""
        return np.flatnonzero(np.diff(self.queries, prepend=-1))

    def by_query(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return one value for each query that has a pair as one for each pair (p,)."""
        pairs_of_query = np.diff(np.r_[self.starts, len(self.queries)])
        return np.repeat(values, pairs_of_query)

    def ranks(self, scores: Scores) -> npt.NDArray[np.int64]:
        """Return the rank, from 1, of each pair among those of its query, by scores (p,)."""
        order = np.lexsort((-scores, self.queries))
        # In this order the pairs of a query are where they were, only sorted among themselves.
        rank_in_order = 1 + np.arange(len(order)) - self.by_query(self.starts)

        ranks = np.empty(len(order), np.int64)
        ranks[order] = rank_in_order
        return ranks


class Balanced(NamedTuple):
    """The biases of the items under a batch of queries."""

    biases: Scores
    """(n,), less their mean."""
    warnings: list[str]
    """Why matching may be worse than the raw ranking here."""
    facts: dict[str, float]
    """The measurements that the warnings rest on, ready for JSON."""


def balanced(pairs: Pairs, items: int, spread: float) -> Balanced:
    """Balance the queries against the items, each of which has a pair.

    spread: of a query's scores over the items.
    """
    query_count = len(pairs.starts)
    if not query_count:
        return Balanced(np.empty(0, np.float32), [], {"queries": 0, "items": 0, "pairs": 0})

    tau = TEMPERATURE * spread
    balance = _balance(pairs, items, tau)
    # The potentials of the items are their biases with the other sign, up to a constant.
    biases = balance.g.mean() - balance.g

    bias_spread = float(biases.std()) / spread
    gap = _best_score_gap(pairs, items) / spread
    facts: dict[str, float] = {
        "queries": query_count,
        "items": items,
        "pairs": len(pairs.scores),
        "tau": tau,
        "bias_spread": bias_spread,
        "best_score_gap": gap,
        "iterations": balance.iterations,
        "marginal_error": balance.marginal_error,
    }
    warnings = _warnings(query_count, items, bias_spread, gap)
    return Balanced(biases.astype(np.float32), warnings, facts)


def _balance(pairs: Pairs, items: int, tau: float) -> Balance:
    """Return the potentials that balance the queries of the pairs against the items."""
    # Queries without a pair have no share: the others are numbered without gaps.
    queries = pairs.by_query(np.arange(len(pairs.starts)))
    # The steps compute in the dtype of the scores: in float32 the error may stay above TOLERANCE.
    steps = PairSteps(pairs.items, queries, pairs.scores.astype(np.float64))

    taus = np.array([tau])
    start = steps.from_items(np.zeros((1, items)), taus)
    [balance] = iterate(steps.from_bank, start, taus, items, ITERATIONS, TOLERANCE)
    return balance


def _best_score_gap(pairs: Pairs, items: int) -> float:
    """Return by how much the mean best score of a query exceeds that of an item."""
    best_of_item = np.full(items, -np.inf, np.float32)
    np.maximum.at(best_of_item, pairs.items, pairs.scores)
    best_of_query = np.maximum.reduceat(pairs.scores, pairs.starts)
    return float(best_of_query.mean(dtype=np.float64) - best_of_item.mean(dtype=np.float64))


def _warnings(queries: int, items: int, bias_spread: float, gap: float) -> list[str]:
    warnings = []
    if queries < FEW_QUERIES * items:
        warnings.append(
            f"there are {queries:,} queries for {items:,} items, fewer than one for "
            f"{1 / FEW_QUERIES:.0f}: most items have no query of their own, and matching may put "
            "them in front of right answers"
        )

    if bias_spread > LARGEST_BIAS_SPREAD or gap > LARGEST_GAP:
        warnings.append(
            "the queries seem to ask for some of the items only, as if they were of one topic, and "
            "matching may put items that nobody asks for in front of right answers: biases spread "
            f"{bias_spread:.2f} times as far as scores (usually at most {LARGEST_BIAS_SPREAD:g}), "
            f"and the best score of a query is {gap:.2f} spreads above that of an item (usually at "
            f"most {LARGEST_GAP:g})"
        )
    return warnings


def one_to_one(pairs: Pairs, scores: Scores, items: int) -> npt.NDArray[np.bool_]:
    """Return which pairs (p,) the best assignment takes.

    It gives an item to as many queries as possible, each item at most once, with the largest sum of
    `scores` (p,). Queries that are left over have none of the pairs.
    """
    with naming_extras():
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    query_count = len(pairs.starts)
    if not query_count:
        return np.zeros(0, np.bool_)

    # SciPy may take a cost of 0 for a missing pair, so the best one costs 1.
    queries = pairs.by_query(np.arange(query_count))
    costs = 1.0 + scores.max() - scores.astype(np.float64)

    # SciPy needs a full matching, so each query gets an item of its own, after the others, that
    # costs more than any other assignment of all queries.
    extra_items = items + np.arange(query_count)
    extra_costs = np.full(query_count, (query_count + 1) * costs.max())
    rows = np.r_[queries, np.arange(query_count)]
    columns = np.r_[pairs.items, extra_items]
    weights = np.r_[costs, extra_costs]

    graph = coo_array((weights, (rows, columns)), shape=(query_count, items + query_count))
    _, item_of_query = min_weight_full_bipartite_matching(graph.tocsr())
    taken: npt.NDArray[np.bool_] = item_of_query[queries] == pairs.items
    return taken


def moments(scores: Scores) -> npt.NDArray[np.float64]:
    """Return the number of items and the sums of their scores and of the squares, by query.

    scores: (b, q), of b items. Returns (3, q); those of all items are the sum over the batches.
    """
    exact = scores.astype(np.float64)
    total: npt.NDArray[np.float64] = np.stack([np.ones_like(exact), exact, np.square(exact)]).sum(1)
    return total


def spread_of(total: npt.NDArray[np.float64]) -> float:
    """Return the standard deviation of a query's scores over all items.

    total: the sum of their `moments` (3, q). It is measured as `estimators.base.score_spread` does.
    """
    means, squares = total[1:] / np.maximum(total[0], 1)
    variance = float(np.mean(squares - np.square(means)))
    mean_square = float(np.mean(squares))

    # Less is the rounding of equal scores: the unit is then their size, or 1 if all are 0.
    is_spread = variance > 1e-12 * mean_square
    return math.sqrt(variance if is_spread else mean_square) or 1.0
