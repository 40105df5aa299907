"""Measures of retrieval: one value per query, so that they can be averaged, bootstrapped and compared."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import InvalidInput
from milvus_hubness.kernels.arguments import whole_number
from milvus_hubness.quality.ranking import PositiveRanks
from milvus_hubness.quality.search import first_k

PerQuery = npt.NDArray[np.float64]


def recall_at_k(
    retrieved: npt.NDArray[Any] | Sequence[Sequence[Hashable]],
    positives: npt.NDArray[Any] | Sequence[Hashable | Collection[Hashable]],
    k: int,
) -> float:
    """Share, 0 … 1, of queries with a positive among their first k results: R@k.

    retrieved: for each query the keys found, best first, an array (n_queries, ≥ k) or lists of any length.
    positives: for each query its key, or a set, list or tuple of keys.
    Raises InvalidInput for no queries or unequal numbers of them; for k, InvalidParameter.
    """
    k = whole_number("k", k)
    if len(retrieved) != len(positives) or len(retrieved) == 0:
        raise InvalidInput(f"results of {len(retrieved)} queries and positives of {len(positives)}")
    if isinstance(retrieved, np.ndarray):
        retrieved = first_k(retrieved, k)
    found = 0
    for keys, wanted in zip(retrieved, positives, strict=True):
        several = isinstance(wanted, set | frozenset | list | tuple | np.ndarray)
        found += not set(wanted if several else (wanted,)).isdisjoint(keys[:k])
    return found / len(retrieved)


def hits(ranks: PositiveRanks, k: int) -> PerQuery:
    """(n_queries,) 1 where a positive is among the first k, else 0; the mean is R@k."""
    return (ranks.best <= whole_number("k", k)).astype(np.float64)


def reciprocal_ranks(ranks: PositiveRanks) -> PerQuery:
    """(n_queries,) 1 / rank of the best positive; the mean is the MRR (Voorhees, TREC-8, 1999)."""
    return 1 / ranks.best


def average_precisions(ranks: PositiveRanks, k: int) -> PerQuery:
    """(n_queries,) AP@k; the mean is mAP@k.

    AP@k = Σ (i / rank_i) / min(p, k) over those of the p positives i = 1, 2, … by rank that are among the
    first k: the precision at each (Manning et al., Introduction to Information Retrieval, 2008, 8.4).
    """
    k = whole_number("k", k)
    return _per_query(ranks, _nth(ranks) / ranks.ranks * (ranks.ranks <= k)) / _reachable(ranks, k)


def ndcgs(ranks: PositiveRanks, k: int) -> PerQuery:
    """(n_queries,) nDCG@k with gain 1 for a positive (Järvelin and Kekäläinen, 2002, with log2(1 + rank)).

    Σ 1 / log2(1 + rank) over the positives among the first k, over what it is with all of them in front.
    """
    k = whole_number("k", k)
    gained = _per_query(ranks, (ranks.ranks <= k) / np.log2(1 + ranks.ranks))
    best = np.cumsum(1 / np.log2(1 + np.arange(1, k + 1)))
    return gained / best[_reachable(ranks, k) - 1]


def retrieval_summary(
    ranks: PositiveRanks, ks: Sequence[int] = (1, 5, 10), depth: int = 10
) -> dict[str, float]:
    """R@k for each k, median and mean rank (MdR, MnR) of the best positive, MRR, mAP and nDCG to a depth."""
    return {
        **{f"R@{k}": float(hits(ranks, k).mean()) for k in ks},
        "MdR": float(np.median(ranks.best)),
        "MnR": float(ranks.best.mean()),
        "MRR": float(reciprocal_ranks(ranks).mean()),
        f"mAP@{depth}": float(average_precisions(ranks, depth).mean()),
        f"nDCG@{depth}": float(ndcgs(ranks, depth).mean()),
    }


def _nth(ranks: PositiveRanks) -> npt.NDArray[np.int64]:
    """1, 2, … for the positives of each query."""
    return 1 + np.arange(len(ranks.ranks)) - np.repeat(ranks.starts[:-1], np.diff(ranks.starts))


def _reachable(ranks: PositiveRanks, k: int) -> npt.NDArray[np.int64]:
    return np.minimum(np.diff(ranks.starts), k)


def _per_query(ranks: PositiveRanks, values: PerQuery) -> PerQuery:
    return np.add.reduceat(values, ranks.starts[:-1])
