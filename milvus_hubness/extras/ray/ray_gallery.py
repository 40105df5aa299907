"""A gallery in shards on Ray workers, and Ray as the engine of a job.

For Sinkhorn, a shard returns log-sum-exps over its own items. They add up to those over all items,
as exp(L/τ) of the whole is the sum of those of the parts. A task stores nothing between iterations,
so it can run again elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.requirements import naming_extras
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators import (
    Blend,
    Estimator,
    FittedBias,
    RelativeNNN,
    Sinkhorn,
    WithDemand,
)
from milvus_hubness.correction.estimators.base import (
    ITEMS,
    check_potentials,
    require_gallery,
    require_target_bank,
    score_spread,
)
from milvus_hubness.correction.estimators.sinkhorn import SinkhornDiagnostics, iterate
from milvus_hubness.correction.estimators.steps import TINY, AllScores
from milvus_hubness.correction.kernels import logsumexp, topk
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.errors import InvalidInput

RETRIES = 3
"""How often a task runs again if its worker dies."""
Shard: TypeAlias = npt.NDArray[np.floating] | Callable[[], npt.NDArray[np.floating]]
"""Items (n, d), or a function by which a worker reads them."""
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
) -> tuple[int, Doubles, float]:
    """Return the number of a shard's items, the bank's row of one step over them, (m,), and the
    sum of their biases.

    The row is that of the shares of the bank under its potentials f (m,), as `AllScores` has them.
    Without f, it is that of the potentials that balance the bank against these items alone, whose
    biases it leaves open: the sum is 0.
    """
    items = shard_items(shard, bank)
    # Never stored: a task may run on any worker, and none has the scores of the step before.
    steps = AllScores(bank.vectors, items, device, "recomputed")
    taus = np.array([tau])

    if f is None:
        rows = steps.from_items(np.zeros((1, len(items))), taus)
        bias_sum = 0.0
    else:
        g, rows = steps.from_bank(f[None], taus)
        bias_sum = -float(g.sum(dtype=np.float64))
    return len(items), rows[0].astype(np.float64), bias_sum


def joined(potentials: Sequence[Doubles], tau: float) -> Doubles:
    """Return bank potentials (m,) from those of all shards alone."""
    # −f is τ times a log-sum-exp; the exponentials of the shards add up to that of the whole.
    of_shards = -np.stack(potentials)
    largest = of_shards.max(0)
    sums = np.exp((of_shards - largest) / tau).sum(0)
    whole: Doubles = -(largest + tau * np.log(sums))
    return whole


def shard_biases(
    shard: Shard,
    bank: QueryBank,
    estimator: Estimator,
    potentials: Vectors,
    targets: QueryBank | None,
) -> Vectors:
    """Return biases of the items of a shard, float32 (n,).

    potentials: (m, p), those of the fit.
    """
    # A fit has functions, which Ray cannot send; what it was made of can be sent.
    fitted = estimator.restore(bank, potentials, target_bank=targets)
    return fitted.bias(shard_items(shard, bank))


def shard_sums(
    shard: Shard,
    bank: QueryBank,
    estimator: Estimator,
    potentials: Vectors,
    targets: QueryBank | None,
    tau: float,
    device: str,
) -> Doubles:
    """Return the log-sum-exps of the corrected scores of a shard, (m,).

    potentials: (m, p), those of the fit of the biases.
    """
    items = shard_items(shard, bank)
    biases = estimator.restore(bank, potentials, target_bank=targets).bias(items)
    return logsumexp(bank.vectors, items, tau, -biases, device=device).astype(np.float64)


def shard_largest(shard: Shard, bank: QueryBank, k: int, device: str) -> Vectors:
    """Return the k largest scores of each bank query over the items of a shard, (m, ≤ k).

    They are all scores if it has fewer.
    """
    items = shard_items(shard, bank)
    return np.asarray(topk(bank.vectors, items, min(k, len(items)), device=device).values)


class RayGallery:
    """Shards of one gallery, on the Ray cluster that this process is connected to.

    If a worker dies, its task runs up to four times.

    shards: arrays (n, d), which are put into Ray's object store, or functions by which workers read
    them from their own storage, always the same items in the same order. gpus: what Ray reserves
    for a task, besides a core. Raises InvalidInput without shards, InvalidParameter, and
    MissingExtra.
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
        """Fit as the estimator's own `fit` does on all shards together, up to rounding.

        Its `start` and its errors are the same. Sinkhorn, alone or in a Blend, iterates over the
        shards; a temperature and an agreement are measured on up to 20,000 items.
        """
        queries = QueryBank.of(bank)
        if isinstance(estimator, WithDemand):
            return self._demanded(estimator, queries, target_bank, start)
        if start is not None and queries.groups is not None:
            start = queries.of_groups(check_potentials(queries, start, estimator.potentials))
        fitted = self._fit(estimator, queries.condensed, target_bank, start)
        # `with_agreement` would return the same, but a sample costs a read of every shard.
        if fitted.estimator.strength != "agreement":
            return fitted
        return fitted.with_agreement(queries, self._sample(fitted.bank), target_bank)

    def _demanded(
        self,
        estimator: WithDemand,
        queries: QueryBank,
        target_bank: BankLike | None,
        start: npt.ArrayLike | None,
    ) -> FittedBias:
        """Fit the biases on the shards, and share the queries among the items of all of them."""
        if start is not None:
            start = check_potentials(queries, start, estimator.potentials)[:, :-1]
        fitted = self.fit(estimator.of_biases, queries, target_bank=target_bank, start=start)

        sample = self._sample(fitted.bank)
        measured = estimator.measured(fitted.bank, sample)
        tau = measured.tau_of()
        run = self._remote(shard_sums)
        remote_bank = self._ray.put(fitted.bank)
        fit = (remote_bank, fitted.estimator, fitted.potentials, target_bank, tau, self._device)
        sums = self._ray.get([run.remote(shard, *fit) for shard in self._shards])

        shares = -joined([-of_shard for of_shard in sums], tau)
        demanded = measured.with_shares(fitted, shares, score_spread(fitted.bank, sample))
        return demanded.with_agreement(queries, sample, target_bank)

    def _fit(
        self,
        estimator: Estimator,
        bank: QueryBank,
        target_bank: BankLike | None,
        start: npt.ArrayLike | None,
    ) -> FittedBias:
        if isinstance(estimator, Blend):
            return self._blended(estimator, bank, target_bank, start)
        if estimator.has_temperature:
            estimator = estimator.measured(bank, self._sample(bank))

        if isinstance(estimator, Sinkhorn):
            return self._balanced(estimator, bank, target_bank, start)
        if isinstance(estimator, RelativeNNN):
            bank.require(at_least=estimator.k)
            return estimator.with_finds(bank, self._finds(bank, estimator.finds))
        # The others learn nothing from the gallery but the spread.
        return estimator.restore(bank, np.empty((len(bank), 0)), target_bank=target_bank)

    def _blended(
        self,
        blend: Blend,
        bank: QueryBank,
        target_bank: BankLike | None,
        start: npt.ArrayLike | None,
    ) -> FittedBias:
        """Fit each estimator of the blend on the shards, and restore the blend of the fits."""
        potentials = None
        if start is not None:
            potentials = check_potentials(bank, start, blend.potentials)

        fits = []
        for estimator, columns in blend.with_columns():
            own_start = None
            if potentials is not None and estimator.potentials:
                own_start = potentials[:, columns]
            fits.append(self.fit(estimator, bank, target_bank=target_bank, start=own_start))

        fitted = replace(blend, estimators=tuple(fit.estimator for fit in fits))
        fitted_potentials = np.hstack([fit.potentials for fit in fits])
        return fitted.restore(bank, fitted_potentials, target_bank=target_bank)

    def _finds(self, bank: QueryBank, count: int) -> Doubles:
        """Return the mean of each bank query's `count` best item scores, (m,)."""
        run = self._remote(shard_largest)
        remote_bank = self._ray.put(bank)
        tasks = [run.remote(shard, remote_bank, count, self._device) for shard in self._shards]

        # The best of all shards are among the best of each.
        scores = np.hstack(self._ray.get(tasks))
        best = -np.sort(-scores, axis=1)[:, :count]
        means: Doubles = best.mean(1)
        return means

    def biases(
        self, fitted: FittedBias, *, target_bank: QueryBank | None = None
    ) -> Iterator[Vectors]:
        """Yield biases of the shards' items in order, float32 (n,).

        target_bank: that of the fit, if it is needed.
        """
        run = self._remote(shard_biases)
        remote_bank = self._ray.put(fitted.bank)
        fit = (remote_bank, fitted.estimator, fitted.potentials, target_bank)
        # All tasks are sent before the first result is read, so that workers need not wait for the
        # caller.
        for task in [run.remote(shard, *fit) for shard in self._shards]:
            yield self._ray.get(task)

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
            targets = require_target_bank(bank, target_bank, type(estimator).__name__)
            shards.append(self._ray.put(targets))

        remote_bank = self._ray.put(bank)
        tau = estimator.tau_of()
        run = self._remote(shard_step)

        def on_shards(f: Vectors | None) -> tuple[int, list[Doubles], float]:
            """Return the number of items, the bank's row of each shard, and the mean bias."""
            tasks = [run.remote(shard, remote_bank, f, tau, self._device) for shard in shards]
            results = self._ray.get(tasks)
            counts, rows, bias_sums = zip(*results, strict=True)
            return sum(counts), list(rows), sum(bias_sums) / sum(counts)

        mean_bias = 0.0

        def step(f: Vectors, _: Doubles) -> tuple[Vectors, Doubles]:
            # The potentials of the items stay on the shards: f takes their place in the result.
            nonlocal mean_bias
            rows_of_shards, mean_bias = on_shards(f[0].astype(np.float32))[1:]
            return f, np.sum(rows_of_shards, axis=0)[None]

        if start is None:
            items, rows, _ = on_shards(None)
            f = joined(rows, tau)
        else:
            # The update that `iterate` would make after a step from these potentials.
            former = check_potentials(bank, start, 1)[:, 0]
            items, rows, _ = on_shards(former)
            f = former - tau * np.log(np.maximum(np.sum(rows, axis=0), TINY))

        taus = np.array([tau])
        [balance] = iterate(step, f[None], taus, items, estimator.iterations, estimator.tol)
        # After the iteration, the mean bias is that of its last step, whose f is the balance's.
        measured = replace(estimator, items=items, mean_bias=mean_bias)
        fitted = measured.restore(bank, balance.f[:, None])
        diagnostics = SinkhornDiagnostics(
            bank_size=len(bank),
            dim=bank.dim,
            items=items,
            iterations=balance.iterations,
            marginal_error=balance.marginal_error,
            converged=balance.converged,
            scores="recomputed",
        )
        return replace(fitted, diagnostics=diagnostics)

    def _sample(self, bank: QueryBank) -> Vectors:
        """Return some 20,000 items, as many of each shard."""
        run = self._remote(shard_sample)
        per_shard = math.ceil(ITEMS / len(self._shards))
        tasks = [run.remote(shard, bank, per_shard) for shard in self._shards]
        return np.concatenate(self._ray.get(tasks))

    def _remote(self, function: Any) -> Any:
        """Return the function as a task of Ray."""
        return self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=RETRIES)(function)


def imported_ray() -> Any:
    """Return Ray. Raises MissingExtra, which says how to install it."""
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
    """Fit as `estimator.fit` does, up to rounding.

    Each core of the cluster has one shard of the gallery (n, d).
    """
    # First, so that a missing extra shows whatever the estimator needs.
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
        fit = (fitted.bank, fitted.estimator, fitted.potentials, target_bank)
        self._fit = [self._ray.put(argument) for argument in fit]

    def __call__(self, items: Vectors) -> Vectors:
        """Return biases of items (n, d), n ≥ 1, float32 (n,).

        Each core of the cluster has one shard of the items.
        """
        shards = np.array_split(items, min(_cores(self._ray), len(items)))
        tasks = [self._run.remote(shard, *self._fit) for shard in shards]
        return np.concatenate(self._ray.get(tasks))


def _cores(ray: Any) -> int:
    # A cluster whose workers have not started yet has none.
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
