"""The steps of the Sinkhorn iteration: from potentials of the items to those of the bank, and back.

Potentials g (t, n) of the items and f (t, m) of the bank have a row for each of the taus (t,), and one pass over the
scores serves all. `from_items` returns f_i = −tau · log Σ_j exp((s_ij + g_j) / tau). `from_bank` returns the g that
follow likewise from f, and shares (t, m): Σ_j exp((s_ij + f_i + g_j) / tau), n in all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.checks import is_tensor
from milvus_hubness.correction.kernels.policy import POLICY, resolve_device, uses_numpy
from milvus_hubness.correction.kernels.primitives import TopK, score_tiles

Potentials: TypeAlias = npt.NDArray[np.floating[Any]]
Taus: TypeAlias = npt.NDArray[np.float64]
Numbers: TypeAlias = npt.NDArray[np.integer[Any]]
TINY = float(np.finfo(np.float32).tiny)

Scores: TypeAlias = Literal["float32", "recomputed", "sparse"]
CUDA_SHARE = 0.6
MOST_ON_CUDA = 2e12


def scores_for(m: int, n: int, free: float | None = None) -> Scores:
    """Return how to provide the scores of m × n pairs.

    They are stored in float32 if that fits into 1 GiB, or into 0.6 of the free memory of a CUDA
    device; else every step recomputes them. Above 2·10^10 pairs, 2·10^12 on CUDA, that would take
    minutes: "sparse". free: bytes of memory of the CUDA device, if there is one.
    """
    memory, most = (
        POLICY.get().sinkhorn_limits if free is None else (CUDA_SHARE * free, MOST_ON_CUDA)
    )
    if 4 * m * n <= memory:
        return "float32"
    return "recomputed" if m * n <= most else "sparse"


class AllScores:
    """Steps over all scores of a bank (m, d) and items (n, d), by NumPy or torch.

    scores: "float32" stores them; else every pass computes them again, in O((m + n) · d) memory and
    a tile. By default as `scores_for` has it.
    """

    def __init__(
        self,
        bank: Potentials,
        items: Potentials,
        device: str = "auto",
        scores: Scores | None = None,
    ) -> None:
        self._bank = bank
        self._items = items
        self._device = device
        free = None
        if scores is None and not uses_numpy(bank.size * len(items), device):
            import torch

            place = resolve_device(device)
            free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else None
        self.scores = scores or scores_for(len(bank), len(items), free)
        self._stored = list(score_tiles(items, bank, device)) if self.scores == "float32" else None

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        return _pass(score_tiles(self._bank, self._items, self._device), len(self._bank), g, taus)[
            0
        ]

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        return _pass(
            self._stored or score_tiles(self._items, self._bank, self._device),
            len(self._items),
            f,
            taus,
        )


def _pass(
    tiles: Iterable[tuple[slice, Any]], n: int, potentials: Potentials, taus: Taus
) -> tuple[Potentials, Potentials]:
    """Return −tau · log Σ exp((s + potential) / tau) of each of n rows, and the shares of the
    columns.
    """
    softmin = np.empty((len(taus), n), np.float32)
    shares = np.zeros(potentials.shape)
    library: Any = np
    weights: Any = potentials.astype(np.float32)
    for part, scores in tiles:
        if is_tensor(scores):
            library = sys.modules["torch"]
            weights = library.as_tensor(weights, device=scores.device)
        room = library.empty_like(scores)
        for which, tau in enumerate(taus.tolist()):
            terms = library.add(scores, weights[which], out=room)
            largest = library.amax(terms, 1)
            terms -= largest[:, None]
            with np.errstate(over="ignore"):
                terms /= max(tau, TINY)
            totals = library.sum(library.exp(terms, out=terms), 1)
            softmin[which, part] = _array(-largest - tau * library.log(totals))
            shares[which] += _array((1 / totals) @ terms)
    return softmin, shares


def _array(values: Any) -> Potentials:
    return np.asarray(values.cpu() if is_tensor(values) else values)


class PairSteps:
    """Steps over some pairs of items and queries only, by their numbers (p,) and scores (p,), by
    NumPy in the dtype of scores and potentials. Each item and each query has a pair.
    """

    def __init__(self, items: Numbers, queries: Numbers, scores: Potentials) -> None:
        order = np.argsort(items, kind="stable")
        self._item = items[order]
        self._query = queries[order]
        self._scores = scores[order]
        self._by_query = np.argsort(self._query, kind="stable")
        self._of_item = np.bincount(items)
        self._of_query = np.bincount(queries)

    @classmethod
    def nearest(cls, of_items: TopK, of_queries: TopK) -> PairSteps:
        """Return the pairs of the nearest of each item and of each query, as `topk` has them, (n,
        k) and (m, k).
        """
        m = len(of_queries.values)
        n = len(of_items.values)
        pairs = np.concatenate([np.ravel(of_items.indices + m * np.arange(n)[:, None]),
                                np.ravel(of_queries.indices * m + np.arange(m)[:, None])])  # fmt: skip
        pairs, first = np.unique(pairs, return_index=True)
        return cls(
            *np.divmod(pairs, m),
            np.concatenate([of_items.values.ravel(), of_queries.values.ravel()])[first],
        )

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        values = (self._scores + g[:, self._item])[:, self._by_query]
        return np.stack(
            [_grouped(*pair, self._of_query)[0] for pair in zip(values, taus, strict=True)]
        )

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        values = self._scores + f[:, self._query]
        g, parts = zip(
            *(_grouped(*pair, self._of_item) for pair in zip(values, taus, strict=True)),
            strict=True,
        )
        return np.stack(g), np.stack([np.bincount(self._query, part) for part in parts])


def _grouped(values: Potentials, tau: float, counts: Numbers) -> tuple[Potentials, Potentials]:
    """Return −tau · log Σ exp(value / tau) of each group, of so many values in turn, and each
    value's share of it.
    """
    starts = np.cumsum(counts) - counts
    largest = np.maximum.reduceat(values, starts)
    with np.errstate(over="ignore"):
        terms = np.exp((values - np.repeat(largest, counts)) / values.dtype.type(max(tau, TINY)))
    totals = np.add.reduceat(terms, starts, dtype=np.float64)
    return (-largest - tau * np.log(totals)).astype(values.dtype), terms / np.repeat(totals, counts)
