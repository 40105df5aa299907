"""The work on one shard of the gallery, without Ray.

For Sinkhorn, each shard gives log-sum-exps over its own items. They add up to those over all items, as
exp(L/τ) of the whole is the sum of those of the parts. A step stores nothing from one iteration to the next,
so it can run again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import QueryBank, Vectors
from milvus_hubness.estimators import Estimator
from milvus_hubness.estimators.base import require_gallery
from milvus_hubness.kernels import logsumexp

Shard: TypeAlias = npt.NDArray[np.floating] | Callable[[], npt.NDArray[np.floating]]
Doubles: TypeAlias = npt.NDArray[np.float64]


class Sums(NamedTuple):
    """The result of one shard: its number of items, and τ·log Σ_j exp((s_ij + g_j)/τ) of each query over
    them, float64 (m,).
    """

    items: int
    logsumexps: Doubles


def read(shard: Shard, bank: QueryBank) -> Vectors:
    """Return the items of a shard, float32 (n, d).

    Raises InvalidInput if there are none, DimensionMismatch.
    """
    return require_gallery(bank, shard() if callable(shard) else shard, "a shard")


def sample(shard: Shard, bank: QueryBank, most: int) -> Vectors:
    """Return at most `most` items of a shard, spread evenly."""
    items = read(shard, bank)
    return items[np.linspace(0, len(items) - 1, min(most, len(items)), dtype=np.int64)]


def step(shard: Shard, bank: QueryBank, f: Vectors | None, tau: float, device: str) -> Sums:
    """Return the sums under the item potentials g that follow from those of the bank, f (m,).

    Without f, the sums are under g = 0.
    """
    items = read(shard, bank)
    g = np.zeros(len(items), np.float32)
    if f is not None:
        g = -logsumexp(items, bank.vectors, tau, f, device=device)
    return Sums(len(items), logsumexp(bank.vectors, items, tau, g, device=device).astype(np.float64))


def joined(sums: Sequence[Sums], tau: float) -> Doubles:
    """Return bank potentials f from the sums of all shards, float64 (m,)."""
    parts = np.stack([each.logsumexps for each in sums])
    largest = parts.max(0)
    potentials: Doubles = -(largest + tau * np.log(np.exp((parts - largest) / tau).sum(0)))
    return potentials


def biases(
    shard: Shard, bank: QueryBank, estimator: Estimator, potentials: Vectors, targets: QueryBank | None
) -> Vectors:
    """Return biases of the items of a shard, under a fit that has these potentials (m, p), float32 (n,)."""
    fitted = estimator.restore(bank, potentials, target_bank=targets)
    return fitted.bias(read(shard, bank))
