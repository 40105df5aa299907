"""Checks of a bank: its reach, its coverage of the gallery, and drift of recent queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors, as_vectors
from milvus_hubness.correction.kernels import topk, topk_mean
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.token_rows import pooled
from milvus_hubness.errors import DimensionMismatch
from milvus_hubness.quality.clusters import clusters_of
from milvus_hubness.quality.measures import Counts, k_occurrence, nearest


def reach(queries: Vectors, gallery: Vectors) -> float:
    """Return the number of items (N, d) that are the nearest of some query (n, d), as a share.

    The share is of N·(1 − exp(−n/N)), the expectation if all items were equally likely.
    """
    reached = len(np.unique(topk(queries, gallery, 1).indices))
    expected = -len(gallery) * np.expm1(-len(queries) / len(gallery))
    return float(reached / expected)


ITEMS_PER_REGION = 25
"""Mean size of a region, until there are `MOST_REGIONS`."""
MOST_REGIONS = 48
COVERAGE_SAMPLE = 20_000
"""Items on which the regions are computed."""
ROUNDS = 10
"""Iterations of k-means."""


class Coverage(NamedTuple):
    """The coverage of a gallery by a bank; regions are clusters of items."""

    counts: Counts
    """(n_items,) N_k over the bank."""

    similarity: Vectors
    """(n_items,) the largest inner product of each item with a bank query."""

    region: npt.NDArray[np.int64]
    """(n_items,) the number of each item's region."""

    central: npt.NDArray[np.int64]
    """(n_regions,) the most central item of each region."""


def bank_coverage(
    bank: QueryBank | npt.ArrayLike, gallery: npt.ArrayLike, *, k: int = 10
) -> Coverage:
    """Return the coverage of a gallery (n_items, d) by a bank (m, d).

    Scores are inner products without biases. Raises InvalidInput, DimensionMismatch,
    NonFiniteVectors and, for k, InvalidParameter.
    """
    query_vectors = QueryBank.of(bank).vectors
    items = as_vectors(gallery, "the gallery")
    counts = k_occurrence(nearest(query_vectors, items, k), len(items), k)
    similarity: Vectors = np.asarray(topk_mean(items, query_vectors, 1), np.float32)
    return Coverage(counts, similarity, *_regions(items))


def _regions(items: Vectors) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return clusters by k-means, computed on a sample, and the most central item of each."""
    drawn = np.random.default_rng(0).permutation(len(items))[:COVERAGE_SAMPLE]
    sample = items[np.sort(drawn)]
    # More clusters than distinct items would leave some without any.
    distinct = len(np.unique(sample, axis=0))
    region_count = min(MOST_REGIONS, 1 + len(items) // ITEMS_PER_REGION, distinct)
    clusters = clusters_of(sample, region_count, rounds=ROUNDS)

    # Renumbered without gaps, because a cluster of the sample may be the nearest of no item.
    numbers, distance_to_mean = clusters.nearest(items)
    _, region = np.unique(numbers, return_inverse=True)
    by_region = np.lexsort((distance_to_mean, region))
    first_of_region = np.searchsorted(region[by_region], np.arange(region.max() + 1))
    return region, by_region[first_of_region]


THRESHOLD = 0.002
"""Share of the variance from which drift counts. On the banks of `benchmarks/online_bank.py`, such a
share costs one point of R@1. `quality.verdict` takes a bank for one of items if its share to the
gallery is smaller."""
LEVEL = 0.001
"""p-value up to which drift counts. `benchmarks/online_bank.py` counts the false alarms."""
AT_LEAST = 50
"""Queries of either side below which nothing is compared."""
AT_MOST = 1_000
"""Queries of either side that are compared, drawn at random."""
PERMUTATIONS = 1_999
DIRECTIONS = 128
"""Random directions of the sliced earth mover's distance."""

Squares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """The drift between a bank and recent queries."""

    reason: str
    """The figures, or why nothing was compared."""

    bank: int
    """Number of compared queries of the bank."""

    recent: int
    """Number of compared recent queries."""

    statistic: float = 0.0
    """Share of the variance that is between the two."""

    p: float = 1.0
    """Probability of such a statistic between two samples of one distribution."""

    mmd2: float = 0.0
    """The unbiased squared discrepancy."""

    earth_mover: float = 0.0
    """The sliced earth mover's distance, in standard deviations."""

    earth_mover_by_chance: float = 0.0
    """That distance for a random split of both together."""

    fired: bool = False
    """Whether the drift is large and significant."""


def drift_between(
    bank: npt.ArrayLike,
    recent: npt.ArrayLike,
    *,
    at_most: int = AT_MOST,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> Drift:
    """Compare recent queries (m, d) with the bank's queries (n, d).

    At most `at_most` of each are drawn at random. With fewer than 50 of either, drift never fires.
    Raises DimensionMismatch, InvalidInput, NonFiniteVectors.
    """
    at_most = whole_number("at_most", at_most)
    permutations = whole_number("permutations", permutations)
    rng = np.random.default_rng(seed)
    first, second = (
        pooled(vectors)[rng.permutation(len(vectors))[:at_most]]
        for vectors in (as_vectors(bank, "the bank"), as_vectors(recent, "queries"))
    )
    if min(len(first), len(second)) < AT_LEAST:
        too_few = (
            f"{len(second)} recent queries and {len(first)} in the bank; "
            f"{AT_LEAST} of each are needed"
        )
        return Drift(too_few, len(first), len(second))
    if first.shape[1] != second.shape[1]:
        raise DimensionMismatch(
            f"{second.shape[1]}-d queries cannot be compared with a {first.shape[1]}-d bank"
        )

    mmd2, statistic, p = _discrepancy(first, second, permutations, rng)

    # A distance says little by itself: that of a random split shows what chance does.
    both = np.concatenate([first, second])
    shuffled = rng.permutation(both)
    moved = _earth_mover(first, second, rng)
    by_chance = _earth_mover(shuffled[: len(first)], shuffled[len(first) :], rng)

    reason = (
        f"{statistic:.2%} of the variance is between bank and recent queries (p {p:.2g}); "
        f"{THRESHOLD:.2%} and p {LEVEL:.2g} count. Earth mover's distance {moved:.2f}, "
        f"{by_chance:.2f} by chance"
    )
    # Both: of many queries a tiny shift is significant, and of few a large one may be chance.
    fired = statistic >= THRESHOLD and p <= LEVEL
    return Drift(reason, len(first), len(second), statistic, p, mmd2, moved, by_chance, fired)


def _earth_mover(first: Vectors, second: Vectors, rng: np.random.Generator) -> float:
    """Return the mean earth mover's distance between projections on random directions.

    It is a share of the root mean square deviation of all projections (Bonneel et al., JMIV 2015).
    """
    directions = rng.standard_normal((first.shape[1], DIRECTIONS), np.float32)
    directions /= np.linalg.norm(directions, axis=0)
    projected = np.concatenate([first, second]).astype(np.float64) @ directions

    # On a line, the distance is the area between the two distribution functions: the gap between
    # neighbouring points, times the difference of the shares to their left.
    order = projected.argsort(axis=0)
    weights = np.where(order < len(first), 1 / len(first), -1 / len(second))
    share_differences = np.abs(weights.cumsum(0)[:-1])
    gaps = np.diff(np.take_along_axis(projected, order, 0), axis=0)
    distances = (share_differences * gaps).sum(0)

    spread = np.sqrt(projected.var(axis=0).mean())
    return float(distances.mean() / spread) if spread > 0 else 0.0


def _discrepancy(
    first: Vectors, second: Vectors, permutations: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the unbiased MMD², the share of the variance between the samples, and the p-value.

    The share sets a large shift apart from one merely significant; the p-value is by permutations
    (Gretton et al., JMLR 2012, eq. 3 and section 8).
    """
    n = len(first)
    m = len(second)
    kernel = _kernel(np.concatenate([first, second]))

    # A column marks the rows of the first sample: in column 0 as they are, then permuted.
    is_first = np.zeros((n + m, 1 + permutations), np.float32)
    is_first[:n, 0] = 1
    for column in range(1, 1 + permutations):
        is_first[rng.permutation(n + m)[:n], column] = 1

    # One product gives all permutations the sums within the first sample. What is left of the sums
    # over its rows is across, and what is left of the whole kernel is within the second.
    within_first = (is_first * (kernel.astype(np.float32) @ is_first)).sum(0, dtype=np.float64)
    across = is_first.T.astype(np.float64) @ kernel.sum(1) - within_first
    within_second = kernel.sum() - within_first - 2 * across

    # The diagonal is 0, so n(n − 1) pairs count: without bias (eq. 3).
    mean_first = within_first / (n * (n - 1))
    mean_second = within_second / (m * (m - 1))
    mean_across = across / (n * m)
    mmd2 = mean_first + mean_second - 2 * mean_across

    # In the kernel's space every point has length 1. So a sample has the variance 1 − its mean
    # kernel, and two samples of equal weight have a quarter of MMD² between them.
    between = mmd2[0] / 4
    total = (2 - mean_first[0] - mean_second[0]) / 2 + between
    return (
        float(mmd2[0]),
        float(between / total) if total > 0 else 0.0,
        float((mmd2 >= mmd2[0]).mean()),
    )


def _kernel(rows: Vectors) -> Squares:
    """Return (N, N) exp(−‖x−y‖² / 2σ²), with the median distance as σ; 0 on the diagonal."""
    # Centred first: the squares below cancel less if the rows are short.
    centred = rows.astype(np.float64) - rows.mean(0, dtype=np.float64)
    lengths = (centred**2).sum(1)
    squares: Squares = np.maximum(lengths[:, None] + lengths[None, :] - 2 * centred @ centred.T, 0)
    width = np.median(squares[np.triu_indices(len(rows), 1)])
    if width > 0:
        kernel: Squares = np.exp(-squares / (2 * width))
    else:
        # More than half of all pairs are equal: the limit of a narrow kernel.
        kernel = (squares == 0).astype(np.float64)
    np.fill_diagonal(kernel, 0)
    return kernel
