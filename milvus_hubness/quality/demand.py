"""Demand and correction: whether biases push down what a log of queries asks for most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.estimators.base import DEMAND_TEMPERATURE, demand_for, score_spread

Values = npt.NDArray[np.float64]

LARGEST_ITEMS = 0.01
"""Share of the items that count as those that are wanted most."""
CLEAR = 0.2
"""Rank correlation from which on demand and correction are said to fight, or to agree."""


class DemandComparison(NamedTuple):
    """How the biases of items go with the demand for them that a log shows."""

    correlation: float
    """Rank correlation of the biases and the demand: above 0, what is wanted more is pushed
    down more."""

    largest_share: float
    """Share of all demand that is for the 1% of items with most of it, at least one item."""

    pushed_down: float
    """Share of that demand which is for items whose bias is above the median."""

    @property
    def sentence(self) -> str:
        word = "hardly touch each other"
        if self.correlation >= CLEAR:
            word = "fight"
        elif self.correlation <= -CLEAR:
            word = "agree"
        return (
            f"demand and correction {word}: their rank correlation is {self.correlation:+.2f}, and "
            f"of the demand for the 1% of items that are wanted most, which take "
            f"{self.largest_share:.0%} of it all, {self.pushed_down:.0%} is for items with a bias "
            "above the median"
        )


def compare(log: QueryBank, items: Vectors, biases: Vectors) -> DemandComparison:
    """Compare the biases (n,) of items (n, d) with the demand for them that a log (m, d) shows."""
    demand = demand_of(log, items, biases)
    largest = np.argsort(-demand, kind="stable")[: max(1, round(LARGEST_ITEMS * len(items)))]
    of_largest = demand[largest]
    is_above = biases[largest] > np.median(biases)
    return DemandComparison(
        correlation=rank_correlation(biases, demand),
        largest_share=float(of_largest.sum() / demand.sum()),
        pushed_down=float(of_largest[is_above].sum() / of_largest.sum()),
    )


def demand_of(log: QueryBank, items: Vectors, biases: Vectors) -> Values:
    """Return how many queries of a log (m, d) ask for each of the items (n, d), float64 (n,).

    As in `WithDemand`, the queries of each group of near copies are shared among the items by their
    scores less these biases (n,).
    """
    condensed = log.condensed
    spread = score_spread(condensed, items)
    # Items that all score alike are wanted alike.
    if not spread:
        count = len(condensed) if condensed.counts is None else condensed.counts.sum()
        return np.full(len(items), count / len(items))

    return demand_for(condensed, items, biases, DEMAND_TEMPERATURE * spread)


def rank_correlation(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation of two vectors (n,); 0 if one of them is constant."""
    if not (np.ptp(first) and np.ptp(second)):
        return 0.0
    return float(np.corrcoef(_mean_ranks(first), _mean_ranks(second))[0, 1])


def _mean_ranks(values: npt.NDArray[np.floating]) -> Values:
    """Return the rank of each value (n,); equal values share their mean rank."""
    _, number_of, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Values = (last - (counts - 1) / 2)[number_of.reshape(-1)]
    return ranks
