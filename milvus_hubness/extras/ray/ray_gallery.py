"""A gallery in shards on Ray workers, and Ray as the engine of a job.

For Sinkhorn, a shard returns log-sum-exps over its own items. They add up to those over all items,
as exp(L/τ) of the whole is the sum of those of the parts. A task stores nothing between iterations,
so it can run again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.requirements import naming_extras
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators import Blend, Estimator, FittedBias, RelativeNNN, Sinkhorn
from milvus_hubness.correction.estimators.base import (
    ITEMS,
    check_potentials,
    require_gallery,
    require_target_bank,
)
from milvus_hubness.correction.estimators.sinkhorn import SinkhornDiagnostics, iterate
from milvus_hubness.correction.estimators.steps import TINY, AllScores
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.errors import InvalidInput

RETRIES = 3
Shard: TypeAlias = npt.NDArray[np.floating] | Callable[[], npt.NDArray[np.floating]]
Doubles: TypeAlias = npt.NDArray[np.float64]


def shard_items(shard: Shard, bank: QueryBank) -> Vectors:
    """Return the items of a shard, float32 (n, d).

    Raises InvalidInput if it has none, DimensionMismatch.
    """
    return require_gallery(bank, shard() if callable(shard) else shard, "a shard")


def shard_sample(shard: Shard, bank: QueryBank, most: int) -> Vectors:
    """Return at most `most` items of a shard, spread evenly."""
    items = shard_items(shard, bank)
    return items[np.linspace(0, len(items) - 1, min(most, len(items)), dtype=np.int64)]


def shard_step(
    shard: Shard, bank: QueryBank, f: Vectors | None, tau: float, device: str
) -> tuple[int, Doubles]:
    """Return the number of a shard's items, and (m,) the shares of the bank under its potentials f
    (m,), as `AllScores` has them, or without f potentials of the bank that balance these items
    alone.
    """
    items = shard_items(shard, bank)
    steps = AllScores(bank.vectors, items, device, "recomputed")
    taus = np.array([tau])
    row = (
        steps.from_items(np.zeros((1, len(items))), taus)
        if f is None
        else steps.from_bank(f[None], taus)[1]
    )

    return len(items), row[0].astype(np.float64)


def joined(potentials: Sequence[Doubles], tau: float) -> Doubles:
    """Return bank potentials (m,) from those of all shards alone."""
    parts = -np.stack(potentials)
    largest = parts.max(0)
    whole: Doubles = -(largest + tau * np.log(np.exp((parts - largest) / tau).sum(0)))
    return whole


def shard_biases(
    shard: Shard,
    bank: QueryBank,
    estimator: Estimator,
    potentials: Vectors,
    targets: QueryBank | None,
) -> Vectors:
    """Return biases of the items of a shard, under a fit that has these potentials (m, p), float32
    (n,).
    """
    fitted = estimator.restore(bank, potentials, target_bank=targets)
    return fitted.bias(shard_items(shard, bank))


def shard_largest(shard: Shard, bank: QueryBank, k: int, device: str) -> Vectors:
    """Return the k largest scores of each bank query over the items of a shard, or all if it has
    fewer, (m, ≤ k).
    """
    items = shard_items(shard, bank)
    return np.asarray(topk(bank.vectors, items, min(k, len(items)), device=device).values)


class RayGallery:
    """Shards of one gallery, on the Ray cluster that this process is connected to.

    shards: arrays (n, d), which are put into Ray's object store, or functions by which workers read
    them from their own storage, always the same items in the same order. gpus: what Ray reserves
    for a task, besides a core. If a worker dies, its task runs up to four times. Raises
    InvalidInput without shards, InvalidParameter, and MissingExtra.
    """

    def __init__(self, shards: Sequence[Shard], *, gpus: float = 0) -> None:
        self._ray: Any = imported_ray()
        if not len(shards):
            raise InvalidInput("a gallery has at least one shard")
        self._gpus = finite_number("gpus", gpus)
        self._device = "cuda" if gpus else "cpu"
        self._shards = [shard if callable(shard) else self._ray.put(shard) for shard in shards]

    def fit(
        self,
        estimator: Estimator,
        bank: BankLike,
        *,
        target_bank: BankLike | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """Fit as the estimator's own `fit` does on all shards together, up to rounding, with its
        `start` and errors. Sinkhorn, alone or in a Blend, iterates over the shards; a temperature
        and an agreement are measured on up to 20,000 items.
        """
        fitted = self._fit(estimator, QueryBank.of(bank), target_bank, start)
        if fitted.estimator.strength != "agreement":
            return fitted  # Sooner than `with_agreement` says so: a sample costs a read of every shard.
        return fitted.with_agreement(self._sample(fitted.bank), target_bank)

    def _fit(
        self,
        estimator: Estimator,
        bank: QueryBank,
        target_bank: BankLike | None,
        start: npt.ArrayLike | None,
    ) -> FittedBias:
        if isinstance(estimator, Blend):
            before = None if start is None else check_potentials(bank, start, estimator.potentials)
            parts = [
                self.fit(
                    part,
                    bank,
                    target_bank=target_bank,
                    start=before[:, columns] if before is not None and part.potentials else None,
                )
                for part, columns in estimator.with_columns()
            ]
            fitted = replace(estimator, estimators=tuple(part.estimator for part in parts))
            potentials = np.hstack([part.potentials for part in parts])

            return fitted.restore(bank, potentials, target_bank=target_bank)

        if estimator.has_temperature:
            estimator = estimator.measured(bank, self._sample(bank))

        if isinstance(estimator, Sinkhorn):
            return self._balanced(estimator, bank, target_bank, start)

        if isinstance(estimator, RelativeNNN):
            bank.require(at_least=estimator.k)
            run = self._remote(shard_largest)
            remote_bank = self._ray.put(bank)
            parts = [
                run.remote(shard, remote_bank, estimator.finds, self._device)
                for shard in self._shards
            ]
            largest = -np.sort(-np.hstack(self._ray.get(parts)), axis=1)[:, : estimator.finds]
            return estimator.with_finds(bank, largest.mean(1))
        return estimator.restore(bank, np.empty((len(bank), 0)), target_bank=target_bank)

    def biases(
        self, fitted: FittedBias, *, target_bank: QueryBank | None = None
    ) -> Iterator[Vectors]:
        """Yield biases of the shards' items in order, float32 (n,).

        target_bank: that of the fit, if it is needed.
        """
        run = self._remote(shard_biases)
        bank = self._ray.put(fitted.bank)
        arguments = bank, fitted.estimator, fitted.potentials, target_bank
        for done in [run.remote(shard, *arguments) for shard in self._shards]:
            yield self._ray.get(done)

    def _balanced(
        self,
        estimator: Sinkhorn,
        bank: QueryBank,
        target_bank: BankLike | None,
        start: npt.ArrayLike | None,
    ) -> FittedBias:
        """Run the iteration of `estimators.sinkhorn`, with a round of tasks per step."""
        shards = list(self._shards)
        if estimator.needs_target_bank:
            shards.append(
                self._ray.put(require_target_bank(bank, target_bank, type(estimator).__name__))
            )

        remote_bank = self._ray.put(bank)
        tau = estimator.tau_of()
        run = self._remote(shard_step)

        def on_shards(f: Vectors | None) -> list[Any]:
            done = self._ray.get(
                [run.remote(shard, remote_bank, f, tau, self._device) for shard in shards]
            )
            return list(zip(*done, strict=True))

        def step(f: Vectors, _: Doubles) -> tuple[Vectors, Doubles]:
            return f, np.sum(on_shards(f[0].astype(np.float32))[1], axis=0)[None]

        before = None if start is None else check_potentials(bank, start, 1)[:, 0]
        counts, rows = on_shards(before)
        f = (
            joined(rows, tau)
            if before is None
            else before - tau * np.log(np.maximum(np.sum(rows, axis=0), TINY))
        )
        items = sum(counts)
        limits = (estimator.iterations, estimator.tol)
        [result] = iterate(step, f[None], np.array([tau]), items, *limits)
        fitted = replace(estimator, items=items).restore(bank, result.f[:, None])
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, items, *result[2:], "recomputed")

        return replace(fitted, diagnostics=diagnostics)

    def _sample(self, bank: QueryBank) -> Vectors:
        run = self._remote(shard_sample)
        most = -(-ITEMS // len(self._shards))
        return np.concatenate(
            self._ray.get([run.remote(shard, bank, most) for shard in self._shards])
        )

    def _remote(self, function: Any) -> Any:
        return self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=RETRIES)(function)


def imported_ray() -> Any:
    with naming_extras():
        import ray
    return ray


def connected() -> Any:
    """Return Ray, connected to the present cluster, that of $RAY_ADDRESS, or a local one.

    Raises MissingExtra.
    """
    ray = imported_ray()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    return ray


def fit_on_ray(
    estimator: Estimator,
    bank: BankLike,
    *,
    gallery: npt.NDArray[np.float32] | None = None,
    target_bank: BankLike | None = None,
    start: npt.ArrayLike | None = None,
) -> FittedBias:
    """Fit as `estimator.fit` does, up to rounding, with one shard of the gallery (n, d) per core of
    the cluster.
    """
    cores = _cores(connected())
    if gallery is None:
        return estimator.fit(bank, target_bank=target_bank)
    shards = np.array_split(gallery, min(cores, len(gallery)))
    return RayGallery(shards).fit(estimator, bank, target_bank=target_bank, start=start)


class RayBiases:
    """The biases of a fit, computed by Ray workers; bank and potentials are sent to them once.

    Raises MissingExtra.
    """

    def __init__(self, fitted: FittedBias, *, target_bank: QueryBank | None = None) -> None:
        self._ray = connected()
        self._run = self._ray.remote(num_cpus=1, max_retries=RETRIES)(shard_biases)
        whole = fitted.bank, fitted.estimator, fitted.potentials, target_bank
        self._fit = [self._ray.put(part) for part in whole]

    def __call__(self, items: Vectors) -> Vectors:
        """Return biases of items (n, d), n ≥ 1, float32 (n,), with one part of the items per core
        of the cluster.
        """
        shards = np.array_split(items, min(_cores(self._ray), len(items)))
        parts = self._ray.get([self._run.remote(shard, *self._fit) for shard in shards])
        return np.concatenate(parts)


def _cores(ray: Any) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
