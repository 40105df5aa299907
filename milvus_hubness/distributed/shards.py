"""The work on one shard of the gallery. It does not know of Ray.

Sinkhorn over shards: each gives log-sum-exps over its own items, which add up to those over all of them, as
exp(L/τ) of the whole is the sum of those of the parts. A step keeps nothing from one iteration to the next,
so that it can be done again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import QueryBank, Vectors
from milvus_hubness.estimators import Estimator, restore
from milvus_hubness.estimators.base import require_gallery
from milvus_hubness.kernels import logsumexp

Shard: TypeAlias = npt.NDArray[np.floating] | Callable[[], npt.NDArray[np.floating]]
Doubles: TypeAlias = npt.NDArray[np.float64]


class Sums(NamedTuple):
    """Of one shard: its items, and (m,) float64 τ·log Σ_j exp((s_ij + g_j)/τ) of each query over them."""

    items: int
    logsumexps: Doubles


def read(shard: Shard, bank: QueryBank) -> Vectors:
    """The items of a shard, (n, d) float32; raises InvalidInput where there are none, DimensionMismatch."""
    return require_gallery(bank, shard() if callable(shard) else shard, "a shard")


def sample(shard: Shard, bank: QueryBank, most: int) -> Vectors:
    """At most so many items of a shard, spread evenly."""
    items = read(shard, bank)
    return items[np.linspace(0, len(items) - 1, min(most, len(items)), dtype=np.int64)]


def step(shard: Shard, bank: QueryBank, f: Vectors | None, tau: float, device: str) -> Sums:
    """The sums under the item potentials g that follow from those of the bank, f (m,), or under g = 0."""
    items = read(shard, bank)
    g = np.zeros(len(items), np.float32)
    if f is not None:
        g = -logsumexp(items, bank.vectors, tau, f, device=device)
    return Sums(len(items), logsumexp(bank.vectors, items, tau, g, device=device).astype(np.float64))


def joined(sums: Sequence[Sums], tau: float) -> Doubles:
    """(m,) float64 bank potentials f from the sums of all shards."""
    parts = np.stack([each.logsumexps for each in sums])
    largest = parts.max(0)
    potentials: Doubles = -(largest + tau * np.log(np.exp((parts - largest) / tau).sum(0)))
    return potentials


def biases(
    shard: Shard, bank: QueryBank, estimator: Estimator, potentials: Vectors, targets: QueryBank | None
) -> Vectors:
    """(n,) float32 biases of the items of a shard under a fit that has these potentials (m, p)."""
    fitted = restore(estimator, bank, potentials, target_bank=targets)
    return fitted.bias(read(shard, bank))
