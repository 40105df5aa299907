"""Clusters by k-means, in NumPy alone: for a check that is to install little.

Each start follows k-means++ (Arthur and Vassilvitskii, 2007) in its greedy form, where each next mean
is the best of several draws, and Lloyd's rounds improve it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.floating[Any]]

TOLERANCE = 1e-4
"""Rounds end when the means move by less, squared, than this share of the variance of the rows."""
MOST_SCORES = 1 << 22
"""Distances in memory at once."""


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of rows."""

    means: npt.NDArray[np.float64]
    """(c, d)."""

    cost: float
    """Sum of the squared distances of the rows, on which they were computed, to their means."""

    def nearest(self, rows: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the cluster of each row of rows (n, d), and its squared distance, both (n,)."""
        numbers = np.empty(len(rows), np.int64)
        distances = np.empty(len(rows))
        size = max(1, MOST_SCORES // len(self.means))
        for start in range(0, len(rows), size):
            block = slice(start, start + size)
            to_means = _squared_distances(rows[block], self.means)
            numbers[block] = to_means.argmin(1)
            distances[block] = to_means.min(1)
        return numbers, distances


def clusters_of(
    rows: Rows, count: int, *, rounds: int = 300, starts: int = 1, seed: int = 0
) -> Clusters:
    """Return at most `count` clusters of rows (n, d), n ≥ count ≥ 1, the best of several starts.

    rounds: the most of Lloyd's. The same arguments give the same clusters. Rows that are nearly the
    same as all others can leave a cluster without any: its mean stays where it was.
    """
    rng = np.random.default_rng(seed)
    tried = [_from_one_start(rows, count, rounds, rng) for _ in range(starts)]
    return min(tried, key=lambda clusters: clusters.cost)


def _from_one_start(rows: Rows, count: int, rounds: int, rng: np.random.Generator) -> Clusters:
    least_move = TOLERANCE * float(rows.var(0, dtype=np.float64).mean())
    clusters = Clusters(_first_means(rows, count, rng), np.inf)
    for _ in range(rounds):
        numbers, distances = clusters.nearest(rows)
        means = clusters.means.copy()
        sizes = np.bincount(numbers, minlength=len(means))
        by_cluster = np.split(np.argsort(numbers, kind="stable"), np.cumsum(sizes)[:-1])
        for number, members in enumerate(by_cluster):
            if len(members):
                means[number] = rows[members].mean(0, dtype=np.float64)

        move = float(((means - clusters.means) ** 2).sum())
        clusters = Clusters(means, float(distances.sum()))
        if move <= least_move:
            break

    _, distances = clusters.nearest(rows)
    return Clusters(clusters.means, float(distances.sum()))


def _first_means(rows: Rows, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return (count, d) rows that are far from each other."""
    draws = 2 + int(np.log(count))
    chosen = [int(rng.integers(len(rows)))]
    distances = _squared_distances(rows, rows[chosen])[:, 0]
    while len(chosen) < count:
        total = distances.sum()
        # All rows are already among the means: any other one is as good.
        shares = distances / total if total > 0 else None
        candidates = rng.choice(len(rows), draws, p=shares)
        to_candidates = _squared_distances(rows, rows[candidates])
        nearer = np.minimum(to_candidates, distances[:, None])
        best = int(nearer.sum(0).argmin())
        chosen.append(int(candidates[best]))
        distances = nearer[:, best]
    return np.asarray(rows[chosen], np.float64)


def _squared_distances(rows: Rows, means: Rows) -> npt.NDArray[np.float64]:
    """Return squared distances (n, c) of rows (n, d) to means (c, d), never below 0."""
    # Distances are differences of products, which would lose digits far from the origin.
    origin = means.mean(0, dtype=np.float64)
    rows = np.asarray(rows - origin, rows.dtype)
    means = np.asarray(means - origin, rows.dtype)
    products = rows @ means.T
    lengths = np.einsum("nd,nd->n", rows, rows, dtype=np.float64)[:, None]
    of_means = np.einsum("nd,nd->n", means, means, dtype=np.float64)
    distances: npt.NDArray[np.float64] = np.maximum(lengths - 2.0 * products + of_means, 0.0)
    return distances
