"""The steps of the Sinkhorn iteration: from potentials of the items to those of the bank, and back.

Potentials g (t, n) of the items and f (t, m) of the bank have a row for each of the taus (t,), and
one pass over the scores serves all.

    from_items(g)   f_i = −tau · log Σ_j exp((s_ij + g_j) / tau)
    from_bank(f)    g_j = −tau · log Σ_i exp((s_ij + f_i) / tau), and the shares of the bank
    shares          (t, m): Σ_j exp((s_ij + f_i + g_j) / tau), n in all

At balance each bank query has the share n/m.
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
"""Least divisor in place of a tau: a smaller one may be 0 in float32."""

Scores: TypeAlias = Literal["float32", "recomputed", "sparse"]
"""How the scores of all pairs are provided: stored, computed again in each pass, or those of the
nearest pairs only."""

CUDA_SHARE = 0.6
"""Share of the free memory of a CUDA device that scores may fill."""
MOST_ON_CUDA = 2e12
"""Most pairs whose scores are computed again in each pass on a CUDA device."""


def scores_for(m: int, n: int, free: float | None = None) -> Scores:
    """Return how to provide the scores of m × n pairs.

    They are stored in float32 if that fits into 1 GiB, or into 0.6 of the free memory of a CUDA
    device; else every step recomputes them. Above 2·10^10 pairs, 2·10^12 on CUDA, that would take
    minutes: "sparse".

    free: bytes of free memory of the CUDA device, if there is one.
    """
    memory: float
    if free is None:
        memory, most_pairs = POLICY.get().sinkhorn_limits
    else:
        memory = CUDA_SHARE * free
        most_pairs = MOST_ON_CUDA

    bytes_in_float32 = 4 * m * n
    if bytes_in_float32 <= memory:
        return "float32"
    return "recomputed" if m * n <= most_pairs else "sparse"


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
            # It takes seconds to import, and nothing before this needs it.
            import torch

            torch_device = resolve_device(device)
            if torch_device.type == "cuda":
                free = torch.cuda.mem_get_info(torch_device)[0]
        self.scores = scores or scores_for(len(bank), len(items), free)

        self._stored = None
        if self.scores == "float32":
            self._stored = list(score_tiles(items, bank, device))

    @property
    def _tiles(self) -> Iterable[tuple[slice, Any]]:
        """Slices of the items with their scores, (rows, |bank|)."""
        return self._stored or score_tiles(self._items, self._bank, self._device)

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        return _pass_by_column(self._tiles, len(self._bank), g, taus)

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        return _pass(self._tiles, len(self._items), f, taus)


def _pass_by_column(
    tiles: Iterable[tuple[slice, Any]], m: int, potentials: Potentials, taus: Taus
) -> Potentials:
    """Return −tau · log Σ exp((s + potential) / tau) of each of m columns.

    tiles: slices of the rows with their scores, (rows, columns). potentials: (t, rows).
    """
    shape = (len(taus), m)
    largest: Any = np.full(shape, -np.inf, np.float32)
    totals: Any = np.zeros(shape, np.float32)
    weights: Any = potentials.astype(np.float32)[:, :, None]
    library: Any = np
    for rows, scores in tiles:
        if is_tensor(scores):
            library = sys.modules["torch"]
            largest, totals, weights = (
                library.as_tensor(values, device=scores.device)
                for values in (largest, totals, weights)
            )

        buffer = library.empty_like(scores)
        for number, tau in enumerate(taus.tolist()):
            divisor = max(tau, TINY)
            terms = library.add(scores, weights[number, rows], out=buffer)
            # What the former tiles add up to is scaled to the largest term so far.
            former = largest[number]
            now = library.maximum(former, library.amax(terms, 0))
            terms -= now
            with np.errstate(over="ignore"):
                terms /= divisor
                totals[number] *= library.exp((former - now) / divisor)
            totals[number] += library.sum(library.exp(terms, out=terms), 0)
            largest[number] = now

    taus_of_rows = taus[:, None]
    return np.asarray(-_array(largest) - taus_of_rows * np.log(_array(totals)), np.float32)


def _pass(
    tiles: Iterable[tuple[slice, Any]], n: int, potentials: Potentials, taus: Taus
) -> tuple[Potentials, Potentials]:
    """Return −tau · log Σ exp((s + potential) / tau) of each of n rows, and the columns' shares.

    tiles: slices of the rows with their scores, (rows, columns). potentials: (t, columns).
    """
    softmin = np.empty((len(taus), n), np.float32)
    shares = np.zeros(potentials.shape)

    library: Any = np
    weights: Any = potentials.astype(np.float32)
    for rows, scores in tiles:
        if is_tensor(scores):
            # A tensor exists, so torch has been imported: no need to import it by name.
            library = sys.modules["torch"]
            weights = library.as_tensor(weights, device=scores.device)

        # The stored scores serve the next pass, so no operation may write into them.
        buffer = library.empty_like(scores)
        for number, tau in enumerate(taus.tolist()):
            terms = library.add(scores, weights[number], out=buffer)
            # Without the largest, exp would overflow for small taus.
            largest = library.amax(terms, 1)
            terms -= largest[:, None]
            with np.errstate(over="ignore"):
                terms /= max(tau, TINY)
            totals = library.sum(library.exp(terms, out=terms), 1)

            softmin[number, rows] = _array(-largest - tau * library.log(totals))
            shares[number] += _array((1 / totals) @ terms)
    return softmin, shares


def _array(values: Any) -> Potentials:
    return np.asarray(values.cpu() if is_tensor(values) else values)


class PairSteps:
    """Steps over some pairs of items and queries only, by NumPy.

    items, queries, scores: (p,), by number; each item and each query has a pair. Results have the
    dtype of scores and potentials.
    """

    def __init__(self, items: Numbers, queries: Numbers, scores: Potentials) -> None:
        # `reduceat` needs the pairs of an item side by side, and for queries a second order.
        order = np.argsort(items, kind="stable")
        self._item = items[order]
        self._query = queries[order]
        self._scores = scores[order]
        self._by_query = np.argsort(self._query, kind="stable")

        self._pairs_of_item = np.bincount(items)
        self._pairs_of_query = np.bincount(queries)

    @classmethod
    def nearest(cls, of_items: TopK, of_queries: TopK) -> PairSteps:
        """Return the pairs of the nearest of each item and of each query.

        of_items: (n, k) queries, of_queries: (m, k) items, as `topk` returns them.
        """
        m = len(of_queries.values)
        n = len(of_items.values)
        # One number for each pair, item · m + query, so that a pair on both sides counts once.
        pairs = np.concatenate(
            [
                np.ravel(of_items.indices + m * np.arange(n)[:, None]),
                np.ravel(of_queries.indices * m + np.arange(m)[:, None]),
            ]
        )
        scores = np.concatenate([of_items.values.ravel(), of_queries.values.ravel()])

        pairs, first = np.unique(pairs, return_index=True)
        items, queries = np.divmod(pairs, m)
        return cls(items, queries, scores[first])

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        values = (self._scores + g[:, self._item])[:, self._by_query]
        softmins = [
            _grouped(row, tau, self._pairs_of_query)[0]
            for row, tau in zip(values, taus, strict=True)
        ]
        return np.stack(softmins)

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        values = self._scores + f[:, self._query]
        g = []
        shares = []
        for row, tau in zip(values, taus, strict=True):
            softmin, shares_of_pairs = _grouped(row, tau, self._pairs_of_item)
            g.append(softmin)
            shares.append(np.bincount(self._query, shares_of_pairs))
        return np.stack(g), np.stack(shares)


def _grouped(values: Potentials, tau: float, counts: Numbers) -> tuple[Potentials, Potentials]:
    """Return −tau · log Σ exp(value / tau) of each group, and each value's share of that sum.

    counts: how many values each group has; the groups follow one another, and none is empty.
    """
    starts = np.cumsum(counts) - counts
    largest = np.maximum.reduceat(values, starts)
    with np.errstate(over="ignore"):
        terms = np.exp((values - np.repeat(largest, counts)) / values.dtype.type(max(tau, TINY)))

    totals = np.add.reduceat(terms, starts, dtype=np.float64)
    softmin = (-largest - tau * np.log(totals)).astype(values.dtype)
    return softmin, terms / np.repeat(totals, counts)
