"""Which parts of the gallery does a query bank say nothing about?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank, Vectors, as_vectors
from milvus_hubness.kernels import topk_mean
from milvus_hubness.quality.hubness import Counts, k_occurrence
from milvus_hubness.quality.search import nearest

ITEMS_PER_REGION = 25
MOST_REGIONS = 48
SAMPLE = 20_000
ROUNDS = 10


class Coverage(NamedTuple):
    """What a bank sees of a gallery.

    counts: (n_items,) N_k over the bank, 0 for an item that no bank query reaches.
    similarity: (n_items,) the largest inner product of each item with a bank query.
    region, central: (n_items,) the number of each item's region, (n_regions,) each region's middlemost item.
    """

    counts: Counts
    similarity: Vectors
    region: npt.NDArray[np.int64]
    central: npt.NDArray[np.int64]


def bank_coverage(
    bank: QueryBank | npt.ArrayLike, gallery: npt.ArrayLike, *, k: int = 10, device: str = "auto"
) -> Coverage:
    """A bank (m, d) against a gallery (n_items, d), by inner products, without biases.

    Regions are clusters of gallery items; a bank reaches one through its k nearest items, so a gap between
    the modalities, bank queries far from every item, does not count as a gap in the coverage.
    Raises InvalidInput, DimensionMismatch, NonFiniteVectors and, for k, InvalidParameter.
    """
    query_vectors, items = QueryBank.of(bank).vectors, as_vectors(gallery, "the gallery")
    counts = k_occurrence(nearest(query_vectors, items, k, device=device), len(items), k)
    similarity: Vectors = np.asarray(topk_mean(items, query_vectors, 1, device=device), np.float32)
    return Coverage(counts, similarity, *_regions(items, device))


def _regions(items: Vectors, device: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Clusters by k-means, found on a sample: the nearest centroid has the largest r·c − ½‖c‖²."""
    rng = np.random.default_rng(0)
    wanted = min(MOST_REGIONS, 1 + len(items) // ITEMS_PER_REGION)
    sample = items[np.sort(rng.permutation(len(items))[:SAMPLE])]
    centroids = sample[rng.permutation(len(sample))[:wanted]]
    for _ in range(ROUNDS):
        own = _nearest_centroid(sample, centroids, device)
        sums = np.zeros(centroids.shape)
        np.add.at(sums, own, sample)
        sizes = np.bincount(own, minlength=len(centroids))[:, None]
        centroids = np.where(sizes > 0, sums / np.maximum(sizes, 1), centroids).astype(np.float32)
    kept, region = np.unique(_nearest_centroid(items, centroids, device), return_inverse=True)
    centroids = centroids[kept]
    off = np.square(items - centroids[region]).sum(1)
    order = np.lexsort((off, region))
    return region, order[np.searchsorted(region[order], np.arange(len(centroids)))]


def _nearest_centroid(items: Vectors, centroids: Vectors, device: str) -> npt.NDArray[np.int64]:
    return nearest(items, centroids, 1, np.square(centroids).sum(1) / 2, device=device)[:, 0]
