"""Clusters by k-means, in NumPy alone: for a check that is to install little.

Each start follows k-means++ (Arthur and Vassilvitskii, 2007) in its greedy form, where each next mean
is the best of several draws, and Lloyd's rounds improve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        origin = self.means.mean(0)
        for block in _blocks(len(rows), len(self.means)):
            points = _Points.of(rows[block], origin)
            numbers[block], distances[block] = points.nearest(self.means - origin)
        return numbers, distances


class _Points(NamedTuple):
    """Rows less an origin amid them: distances are differences of products, which would lose digits
    far from it.
    """

    rows: Rows
    """(n, d)."""
    lengths: npt.NDArray[np.float64]
    """(n,), squared."""

    @classmethod
    def of(cls, rows: Rows, origin: npt.NDArray[np.float64]) -> _Points:
        centred = np.asarray(rows - origin, rows.dtype)
        return cls(centred, np.einsum("nd,nd->n", centred, centred, dtype=np.float64))

    def distances(self, means: Rows) -> npt.NDArray[np.float64]:
        """Return squared distances (n, c) to means (c, d) less the origin, never below 0."""
        products = self.rows @ np.asarray(means, self.rows.dtype).T
        of_means = np.einsum("nd,nd->n", means, means, dtype=np.float64)
        distances: npt.NDArray[np.float64] = np.maximum(
            self.lengths[:, None] - 2.0 * products + of_means, 0.0
        )
        return distances

    def nearest(self, means: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the nearest of means (c, d) less the origin, and its squared distance, both (n,)."""
        distances = self.distances(means)
        return distances.argmin(1), distances.min(1)


def _blocks(rows: int, means: int) -> Iterator[slice]:
    """Yield slices of the rows, with MOST_SCORES distances to the means each."""
    size = max(1, MOST_SCORES // means)
    return (slice(start, start + size) for start in range(0, rows, size))


def clusters_of(
    rows: Rows, count: int, *, rounds: int = 300, starts: int = 1, seed: int = 0
) -> Clusters:
    """Return at most `count` clusters of rows (n, d), n ≥ count ≥ 1, the best of several starts.

    rounds: the most of Lloyd's. The same arguments give the same clusters. Rows that are nearly the
    same as all others can leave a cluster without any: its mean stays where it was.
    """
    rng = np.random.default_rng(seed)
    origin = rows.mean(0, dtype=np.float64)
    points = _Points.of(rows, origin)
    tried = [_from_one_start(points, count, rounds, rng) for _ in range(starts)]
    best = min(tried, key=lambda clusters: clusters.cost)
    return Clusters(best.means + origin, best.cost)


def _from_one_start(points: _Points, count: int, rounds: int, rng: np.random.Generator) -> Clusters:
    """Return clusters whose means are less the origin."""
    rows = points.rows
    least_move = TOLERANCE * float(points.lengths.sum()) / rows.size
    clusters = Clusters(_first_means(points, count, rng), np.inf)
    for _ in range(rounds):
        numbers, distances = points.nearest(clusters.means)
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

    _, distances = points.nearest(clusters.means)
    return Clusters(clusters.means, float(distances.sum()))


def _first_means(points: _Points, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return (count, d) rows that are far from each other."""
    rows = points.rows
    draws = 2 + int(np.log(count))
    chosen = [int(rng.integers(len(rows)))]
    distances = points.distances(rows[chosen])[:, 0]
    while len(chosen) < count:
        total = distances.sum()
        # All rows are already among the means: any other one is as good.
        shares = distances / total if total > 0 else None
        candidates = rng.choice(len(rows), draws, p=shares)
        to_candidates = points.distances(rows[candidates])
        nearer = np.minimum(to_candidates, distances[:, None])
        best = int(nearer.sum(0).argmin())
        chosen.append(int(candidates[best]))
        distances = nearer[:, best]
    return np.asarray(rows[chosen], np.float64)
