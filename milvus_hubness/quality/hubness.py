"""How unevenly the answers of many queries fall on the items."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import DimensionMismatch, InvalidInput
from milvus_hubness.kernels.arguments import whole_number
from milvus_hubness.quality.search import first_k

Counts = npt.NDArray[np.int64]


class HubnessSummary(NamedTuple):
    """Measures of one k-occurrence distribution; see the functions of the same names."""

    skewness: float
    kurtosis: float
    robin_hood: float
    largest: int
    antihubs: float


def k_occurrence(retrieved: npt.NDArray[Any] | Sequence[Sequence[int]], n_items: int, k: int = 10) -> Counts:
    """(n_items,) N_k: in how many queries' first k results each item is (Radovanović et al., JMLR 2010).

    retrieved: for each query the numbers, 0 … n_items − 1, of the items found, best first: an array
    (n_queries, ≥ k) or lists of any length. Raises InvalidInput for other numbers; InvalidParameter.
    """
    k, n_items = whole_number("k", k), whole_number("n_items", n_items)
    if isinstance(retrieved, np.ndarray):
        found = first_k(retrieved, k).ravel()
    else:
        found = np.array([item for items in retrieved for item in items[:k]])
    if len(found) == 0:
        raise InvalidInput("there are no results to count")
    if found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= n_items:
        raise InvalidInput(f"results must be numbers of items, 0 … {n_items - 1}")
    return np.bincount(found, minlength=n_items).astype(np.int64)


def skewness(counts: npt.ArrayLike) -> float:
    """E(N_k − μ)³ / σ³ over the items (Radovanović et al., JMLR 2010, eq. 1); 0 if all counts are equal."""
    return _standardised_moment(counts, 3)


def kurtosis(counts: npt.ArrayLike) -> float:
    """E(N_k − μ)⁴ / σ⁴ − 3 over the items, 0 for a normal distribution; 0 if all counts are equal."""
    return _standardised_moment(counts, 4) - 3 if np.ptp(_checked(counts)) else 0.0


def robin_hood(counts: npt.ArrayLike) -> float:
    """½ Σ|N_k − μ| / Σ N_k: the share of answers to be moved to make all equal (Feldbauer et al., 2018)."""
    values = _checked(counts)
    return float(np.abs(values - values.mean()).sum() / (2 * values.sum())) if values.any() else 0.0


def antihubs(counts: npt.ArrayLike) -> float:
    """Share of items that no query finds, N_k = 0 (Radovanović et al., JMLR 2010)."""
    return float((_checked(counts) == 0).mean())


def top_hubs(
    counts: npt.ArrayLike, keys: Sequence[Hashable] | None = None, limit: int = 10
) -> list[tuple[Any, int]]:
    """The items with the largest N_k, as (key, N_k), largest first; their numbers where no keys are given.

    Raises DimensionMismatch unless there are as many keys as counts.
    """
    values = _checked(counts)
    if keys is not None and len(keys) != len(values):
        raise DimensionMismatch(f"{len(keys)} keys for {len(values)} counts")
    order = np.argsort(-values, kind="stable")[: whole_number("limit", limit)].tolist()
    return [(item if keys is None else keys[item], int(values[item])) for item in order]


def hubness_summary(counts: npt.ArrayLike) -> HubnessSummary:
    """All measures of a k-occurrence distribution (n_items,)."""
    return HubnessSummary(
        skewness(counts), kurtosis(counts), robin_hood(counts), int(_checked(counts).max()), antihubs(counts)
    )


def _standardised_moment(counts: npt.ArrayLike, order: int) -> float:
    values = _checked(counts)
    deviations = values - values.mean()
    spread = np.sqrt(np.mean(deviations**2))
    return float(np.mean((deviations / spread) ** order)) if spread else 0.0


def _checked(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(counts, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise InvalidInput(f"counts must be 1-D, one an item, not of shape {values.shape}")
    return values
