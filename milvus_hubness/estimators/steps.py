"""The steps of the Sinkhorn iteration: from potentials of the items to those of the bank, and back.

Potentials have a row for each tau, so that one look at the scores serves several temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.kernels.primitives import POLICY, TopK, resolve_device, topk, uses_numpy

Potentials: TypeAlias = npt.NDArray[np.floating[Any]]
Taus: TypeAlias = npt.NDArray[np.float64]
TINY = float(np.finfo(np.float32).tiny)


class Steps(Protocol):
    """Potentials g (t, n) of the items and f (t, m) of the bank, for taus (t,).

    shares: (t, m) Σ_j exp((s_ij + f_i + g_j) / tau) under the g that follow from f; their sum is n.
    """

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        """Return f = −tau · log Σ_j exp((s_ij + g_j) / tau)."""

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        """Return g = −tau · log Σ_i exp((s_ij + f_i) / tau), and the shares."""


def free_memory(device: str) -> float | None:
    """Return the bytes that are free on a CUDA device; None for the CPU."""
    import torch

    place = resolve_device(device)
    return torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else None


class AllScores:
    """`Steps` over all scores of a bank (m, d) and items (n, d), by NumPy or torch.

    scores: "float32" and "float16" store them, with errors up to 2^-12 in float16; else every look computes them again,
    in O((m + n) · d) memory and a tile.
    """

    def __init__(self, bank: Potentials, items: Potentials, device: str = "auto", scores: str = "recomputed") -> None:
        self._library: Any = np
        self._place: Any = None
        if not uses_numpy(bank.size * len(items), device):
            import torch

            self._library, self._place = torch, resolve_device(device)
        self._bank, self._items, self._stored = self._put(bank), self._put(items), None
        if scores in ("float32", "float16"):
            stored = self._library.empty((len(items), len(bank)), dtype=getattr(self._library, scores))
            stored = stored.to(self._place) if self._place else stored
            with self._full_precision():
                for part, tile in self._tiles(self._items, self._bank, None):
                    stored[part] = tile
            self._stored = stored

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        stored = None if self._stored is None else self._stored.T
        return self._look(self._bank, self._items, stored, g, taus)

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        shares = np.zeros(f.shape)
        return self._look(self._items, self._bank, self._stored, f, taus, shares), shares

    def _look(
        self, rows: Any, columns: Any, stored: Any, potentials: Potentials, taus: Taus, shares: Potentials | None = None
    ) -> Potentials:
        """Return −tau · log Σ exp((s + potential) / tau) of each row, (t, n), and add to the shares of the columns."""
        library, result, weights = self._library, np.empty((len(taus), len(rows)), np.float32), self._put(potentials)
        with self._full_precision():
            for part, scores in self._tiles(rows, columns, stored):
                room = library.empty_like(scores)
                for which, tau in enumerate(taus):
                    terms = library.add(scores, weights[which], out=room)
                    largest = library.amax(terms, 1)
                    terms -= largest[:, None]
                    terms /= max(float(tau), TINY)
                    totals = library.sum(library.exp(terms, out=terms), 1)
                    result[which, part] = _array(-largest - float(tau) * library.log(totals))
                    if shares is not None:
                        shares[which] += _array((1 / totals) @ terms)
        return result

    def _tiles(self, rows: Any, columns: Any, stored: Any) -> Iterator[tuple[slice, Any]]:
        """Yield scores of rows, in tiles of whole rows, float32."""
        size = POLICY.get().tile_size_of(self._place.type if self._place else "numpy")
        size = max(1, size // len(columns))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            if stored is None:
                yield part, rows[part] @ columns.T
            else:
                yield part, stored[part] if self._place is None else stored[part].float()

    def _put(self, vectors: Potentials) -> Any:
        if self._place is None:
            return np.asarray(vectors, np.float32)
        return self._library.from_numpy(np.array(vectors, np.float32)).to(self._place)

    def _full_precision(self) -> AbstractContextManager[None]:
        if self._place is None:
            return nullcontext()
        from milvus_hubness.kernels.operands import full_precision

        return full_precision(self._place)


def _array(values: Any) -> Potentials:
    array: Potentials = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array


class NearestPairs:
    """`Steps` over each item's and each query's nearest only, in O((m + n) · neighbors) memory, by torch.

    nearest: their scores and numbers as `topk` has them, of each item (n, k) and of each query (m, k); by default
    computed.
    """

    def __init__(
        self,
        bank: Potentials,
        items: Potentials,
        neighbors: int,
        device: str = "auto",
        nearest: tuple[TopK, TopK] | None = None,
    ) -> None:
        import torch

        m, n, self._place = len(bank), len(items), resolve_device(device)
        of_items, of_queries = nearest or (
            topk(items, bank, min(neighbors, m), device=device),
            topk(bank, items, min(neighbors, n), device=device),
        )
        pairs = np.concatenate(
            [
                (of_items.indices + m * np.arange(n)[:, None]).ravel(),
                (of_queries.indices * m + np.arange(m)[:, None]).ravel(),
            ]
        )
        scores = np.concatenate([of_items.values.ravel(), of_queries.values.ravel()])
        pairs, first = np.unique(pairs, return_index=True)
        self._scores, self._sizes = torch.from_numpy(scores[first]).to(self._place), (m, n)
        self._query, self._item = (torch.from_numpy(part).to(self._place) for part in (pairs % m, pairs // m))

    def from_items(self, g: Potentials, taus: Taus) -> Potentials:
        f = [self._grouped(row, self._item, self._query, 0, tau)[0] for row, tau in zip(g, taus, strict=True)]
        return np.stack(f)

    def from_bank(self, f: Potentials, taus: Taus) -> tuple[Potentials, Potentials]:
        steps = [self._grouped(row, self._query, self._item, 1, tau) for row, tau in zip(f, taus, strict=True)]
        shares = [shares.new_zeros(self._sizes[0]).index_add_(0, self._query, shares) for _, shares in steps]
        return np.stack([g for g, _ in steps]), np.stack([_array(row) for row in shares])

    def _grouped(self, potentials: Potentials, own: Any, group: Any, side: int, tau: float) -> tuple[Potentials, Any]:
        """Return −tau · log Σ exp((s + potential) / tau) of each group, and each pair's share of it, float64."""
        import torch

        values = self._scores + torch.from_numpy(potentials.astype(np.float32)).to(self._place)[own]
        largest = values.new_full((self._sizes[side],), -torch.inf).scatter_reduce_(0, group, values, "amax")
        terms = ((values - largest[group]) / max(tau, TINY)).exp_().double()
        totals = terms.new_zeros(self._sizes[side]).index_add_(0, group, terms)
        return _array(-largest - (tau * totals.log()).float()), terms / totals[group]
