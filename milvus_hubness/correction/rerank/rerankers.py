"""Re-rankers: dynamic gates, globally-corrected retrieval, and the protocol of adaptive re-rankers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import convert_fields, whole_number

Hits = TypeVar("Hits")

MARGIN = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less, relative to the largest, count as equal."""


@dataclass(frozen=True)
class DynamicGate:
    """Correct a query only if its raw nearest item is activated: among the k nearest of some bank
    query or, if `k_targets` is given, among the k_targets nearest of some item of the target bank,
    which must not be the gallery: it would activate all its items.

    With InvertedSoftmax and without `k_targets` this is the paper's DIS. The authors' code of
    DualDIS (`db_norm`, DBNorm/dbnorm.py in yimuwangcs/Better_Cross_Modal_Retrieval) multiplies two
    dynamic inverted softmaxes, each of one bank with its own set. If a set lacks the raw nearest
    item of q, its factor is the raw score s(q, r):

        in both        IS_bank(q, r) · IS_targets(q, r)
        first only     IS_bank(q, r) · s(q, r)
        second only    s(q, r) · IS_targets(q, r)
        in neither     s(q, r)²

    DualInvertedSoftmax, whose s − b is λ times the logarithm of the first line, ranks behind this
    gate as the first line does, and as the last line does for s ≥ 0. In the two middle cases it
    corrects by both banks, not by one.
    """

    k: int = 1
    k_targets: int | None = None

    def __post_init__(self) -> None:
        convert_fields(
            self, whole_number, "k", *(["k_targets"] if self.k_targets is not None else [])
        )

    def activated(
        self, bank: npt.ArrayLike, gallery: npt.ArrayLike, target_bank: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return (n,) whether each row of gallery (n, d) is activated by bank (m, d) or, with
        `k_targets`, by target_bank (t, d). Nearness is by inner product. Raises DimensionMismatch,
        and BankTooSmall if the gallery has fewer than k or k_targets items.
        """
        items = np.asarray(gallery, np.float32)
        sets = [(np.asarray(bank, np.float32), self.k)]
        if self.k_targets is not None:
            sets.append((np.asarray(target_bank, np.float32), self.k_targets))
        nearest = [np.ravel(topk(vectors, items, k).indices) for vectors, k in sets]
        return np.isin(np.arange(len(items)), np.concatenate(nearest))


def gate(
    raw: Sequence[Hits],
    corrected: Sequence[Hits],
    raw_best: Iterable[Hashable | None],
    activated: AbstractSet[Hashable],
) -> list[Hits]:
    """Return for each query the corrected hits if its raw best item is activated, else the raw
    hits.
    """
    return [
        after if best in activated else before
        for before, after, best in zip(raw, corrected, raw_best, strict=True)
    ]


@dataclass(frozen=True)
class GloballyCorrected:
    """Rank `candidates` items of the raw search by Rank_r(q), ascending, and those of equal rank by
    s(q, r).

    Rank_r(q) counts the bank queries that are nearer to r than q is. For cosines this is the order
    of the paper's GC(q, r) = Rank_r(q) − cos(q, r) (Dinu, Lazaridou and Baroni, 2015), and a score
    of any range overrules no rank.
    """

    candidates: int = 100

    def __post_init__(self) -> None:
        convert_fields(self, whole_number, "candidates")

    def order(
        self, scores: npt.ArrayLike, items: npt.ArrayLike, bank: npt.ArrayLike
    ) -> npt.NDArray[np.int64]:
        """Return (c,) the order of one query's candidates, best first.

        scores (c,) s(q, r) of the candidates; items (c, d) and bank (m, d) with s as their inner
        product. A bank query is nearer only beyond rounding, so that a query which is in the bank
        itself is not nearer than itself.
        """
        own = np.asarray(scores, np.float64)
        others = np.asarray(items, np.float32) @ np.asarray(bank, np.float32).T
        margin = MARGIN * max(np.abs(others).max(initial=0), np.abs(own).max(initial=0))
        places = (others > own[:, None] + margin).sum(axis=1)
        return np.lexsort((-own, places))


Floats = npt.NDArray[np.float32]


@runtime_checkable
class Adaptive(Protocol):
    """A learned stage after the corrected search, such as `quari.QuariReranker`.

    candidates: number of re-ranked items of the corrected search. correction: β, the share of the
    search's bias that is also subtracted from the adapted scores. direct: whether there are no
    candidates, and the search uses `direct_queries` in place of the queries.
    """

    @property
    def candidates(self) -> int: ...

    @property
    def correction(self) -> float: ...

    @property
    def direct(self) -> bool: ...

    def expect_dim(self, dim: int) -> None:
        """Check that it handles vectors of this dimension. Raises DimensionMismatch."""

    def scores(self, queries: Floats, items: Sequence[Floats]) -> list[Floats]:
        """Return for each query (m, d) the scores (c_i,) of its own items, m arrays (c_i, d);
        higher is better.
        """

    def direct_queries(self, queries: Floats) -> Floats:
        """Return (m, d) the vectors to search for in place of queries (m, d)."""
