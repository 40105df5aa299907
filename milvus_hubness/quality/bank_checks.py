"""Checks of a bank: its reach, its coverage of the gallery, and whether it consists of items."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors, as_vectors
from milvus_hubness.correction.kernels import topk, topk_mean
from milvus_hubness.correction.kernels.rows import pooled
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


ALIKE = 0.002
"""Share of the variance between two sets of vectors below which they may be of one distribution.
`quality.verdict` takes a bank for one of items if its share to the gallery is smaller."""
AT_LEAST = 50
"""Vectors of either set below which nothing is compared."""


def share_between(first: npt.ArrayLike, second: npt.ArrayLike, *, at_most: int, seed: int) -> float:
    """Return the share of the variance that is between two sets of vectors (n, d) and (m, d).

    It sets a large shift apart from one that is merely significant: a quarter of the unbiased squared
    maximum mean discrepancy (Gretton et al., JMLR 2012, eq. 3) as a share of all variance in the
    kernel's space. At most `at_most` of each are drawn at random; of fewer than AT_LEAST, it is 1.
    """
    rng = np.random.default_rng(seed)
    first, second = (
        pooled(vectors)[rng.permutation(len(vectors))[:at_most]]
        for vectors in (as_vectors(first, "the bank"), as_vectors(second, "the gallery"))
    )
    n = len(first)
    m = len(second)
    if min(n, m) < AT_LEAST:
        return 1.0

    kernel = _kernel(np.concatenate([first, second]))
    # The diagonal is 0, so n(n − 1) pairs count: without bias.
    mean_first = kernel[:n, :n].sum() / (n * (n - 1))
    mean_second = kernel[n:, n:].sum() / (m * (m - 1))
    mean_across = kernel[:n, n:].mean()

    # In the kernel's space every point has length 1. So a sample has the variance 1 − its mean
    # kernel, and two samples of equal weight have a quarter of MMD² between them.
    between = (mean_first + mean_second - 2 * mean_across) / 4
    total = (2 - mean_first - mean_second) / 2 + between
    return float(between / total) if total > 0 else 0.0


def _kernel(rows: Vectors) -> npt.NDArray[np.float64]:
    """Return (N, N) exp(−‖x−y‖² / 2σ²), with the median distance as σ; 0 on the diagonal."""
    # Centred first: the squares below cancel less if the rows are short.
    centred = rows.astype(np.float64) - rows.mean(0, dtype=np.float64)
    lengths = (centred**2).sum(1)
    squares = np.maximum(lengths[:, None] + lengths[None, :] - 2 * centred @ centred.T, 0)
    width = np.median(squares[np.triu_indices(len(rows), 1)])
    # Where more than half of all pairs are equal, the limit of a narrow kernel.
    kernel = np.exp(-squares / (2 * width)) if width > 0 else (squares == 0)
    kernel = np.asarray(kernel, np.float64)
    np.fill_diagonal(kernel, 0)
    return kernel
