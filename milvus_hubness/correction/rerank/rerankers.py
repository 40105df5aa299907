"""Re-rankers: the dynamic gate, globally-corrected retrieval, and the adaptive protocol."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import convert_fields, whole_number
from milvus_hubness.correction.kernels.rows import as_floats

Hits = TypeVar("Hits")

MARGIN = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less, relative to the largest, count as equal."""


@dataclass(frozen=True)
class DynamicGate:
    """Correct a query only if its raw nearest item is activated.

    An item is activated if it is among the k nearest of some bank query. With InvertedSoftmax this
    is the dynamic inverted softmax of QB-Norm (Bogolin et al., CVPR 2022).
    """

    k: int = 1
    """How many nearest items of a bank query are activated."""

    def __post_init__(self) -> None:
        convert_fields(self, whole_number, "k")

    def activated(self, bank: npt.ArrayLike, gallery: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether each row of gallery (n, d) is activated, bool (n,).

        bank: (m, d). Nearness is by inner product. Raises DimensionMismatch, and BankTooSmall if the
        gallery has fewer than k items.
        """
        items = as_floats(gallery)
        nearest = topk(as_floats(bank), items, self.k).indices
        return np.isin(np.arange(len(items)), np.ravel(nearest))


def gate(
    raw: Sequence[Hits],
    corrected: Sequence[Hits],
    raw_best: Iterable[Hashable | None],
    activated: AbstractSet[Hashable],
) -> list[Hits]:
    """Return for each query the corrected hits if its raw best item is activated, else the raw.

    raw_best: the key of each query's raw best item; None, which activates nothing, without hits.
    """
    return [
        corrected_hits if best in activated else raw_hits
        for raw_hits, corrected_hits, best in zip(raw, corrected, raw_best, strict=True)
    ]


@dataclass(frozen=True)
class GloballyCorrected:
    """Rank items of the raw search by Rank_r(q), ascending, and those of equal rank by s(q, r).

    Rank_r(q) counts the bank queries that are nearer to r than q is. For cosines this is the order
    of the paper's GC(q, r) = Rank_r(q) − cos(q, r) (Dinu, Lazaridou and Baroni, 2015), and a score
    of any range overrules no rank.
    """

    candidates: int = 100
    """How many items of the raw search are ranked."""

    def __post_init__(self) -> None:
        convert_fields(self, whole_number, "candidates")

    def order(
        self, scores: npt.ArrayLike, items: npt.ArrayLike, bank: npt.ArrayLike
    ) -> npt.NDArray[np.int64]:
        """Return (c,) the order of one query's candidates, best first.

        scores: (c,) s(q, r) of the candidates. items: (c, d), bank: (m, d), with s as their inner
        product. A bank query is nearer only beyond rounding, so that a query which is in the bank
        itself is not nearer than itself.
        """
        query_scores = np.asarray(scores, np.float64)
        bank_scores = np.asarray(items, np.float32) @ np.asarray(bank, np.float32).T

        # Both may be empty: there may be no candidates.
        largest_score = np.abs(query_scores).max(initial=0)
        margin = MARGIN * max(np.abs(bank_scores).max(initial=0), largest_score)
        ranks = (bank_scores > query_scores[:, None] + margin).sum(axis=1)
        # `lexsort` sorts by its last key first.
        return np.lexsort((-query_scores, ranks))


Floats = npt.NDArray[np.float32]


@runtime_checkable
class Adaptive(Protocol):
    """A learned stage after the corrected search, such as `quari.QuariReranker`."""

    @property
    def candidates(self) -> int:
        """Number of re-ranked items of the corrected search."""

    @property
    def correction(self) -> float:
        """β, the share of the search's bias that is also subtracted from the adapted scores."""

    @property
    def direct(self) -> bool:
        """Whether the search uses `direct_queries` in place of the queries.

        Then there are no candidates.
        """

    def expect_dim(self, dim: int) -> None:
        """Check that it handles vectors of this dimension. Raises DimensionMismatch."""

    def scores(self, queries: Floats, items: Sequence[Floats]) -> list[Floats]:
        """Return for each query the scores (c_i,) of its own items; higher is better.

        queries: (m, d). items: m arrays (c_i, d).
        """

    def direct_queries(self, queries: Floats) -> Floats:
        """Return the vectors to search for in place of queries (m, d), (m, d)."""
