"""A gallery in shards, each worked on by whichever Ray worker is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import BankLike, QueryBank, Vectors
from milvus_hubness.beyond import shard_steps
from milvus_hubness.beyond.shard_steps import Shard, Sums
from milvus_hubness.errors import InvalidInput, MissingExtra
from milvus_hubness.estimators import Blend, DualBankSinkhorn, Estimator, FittedBias, Sinkhorn, restore
from milvus_hubness.estimators.base import no_potentials
from milvus_hubness.estimators.inputs import check_potentials, require_target_bank
from milvus_hubness.estimators.temperature import ITEMS, has_temperature, measured, tau_of
from milvus_hubness.kernels.arguments import finite_number, whole_number

RETRIES = 3


class RayGallery:
    """Shards of one gallery, on the Ray cluster that this process is connected to.

    shards: each an array (n, d), which is put into Ray's object store, or a function that a worker calls to
    read it where it lies, so that no machine holds them all; it must give the same items in the same order
    every time. gpus, cpus: what Ray sets aside for each task; with a GPU, tasks compute on it. A task whose
    worker dies is done again, up to `retries` times, and what a worker raises is raised here.
    Raises InvalidInput without shards, InvalidParameter, and MissingExtra where Ray is not installed.
    """

    def __init__(
        self, shards: Sequence[Shard], *, cpus: float = 1, gpus: float = 0, retries: int = RETRIES
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra('needs Ray: pip install "milvus-hubness[ray]"') from error
        if not len(shards):
            raise InvalidInput("a gallery has at least one shard")
        self._ray: Any = ray
        self._options = {
            "num_cpus": finite_number("cpus", cpus),
            "num_gpus": finite_number("gpus", gpus),
            "max_retries": whole_number("retries", retries, at_least=0),
        }
        self._device = "cuda" if gpus else "cpu"
        self._shards = [shard if callable(shard) else ray.put(shard) for shard in shards]

    def fit(
        self,
        estimator: Estimator,
        bank: BankLike,
        *,
        target_bank: BankLike | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """As the estimator's own `fit` on all shards together, up to rounding; start: as there.

        Sinkhorn and its dual-bank form, alone or in a Blend, are iterated over the shards; of the others only
        those with a temperature learn from the gallery, on up to 20,000 items of all shards. Raises what the
        estimator's `fit` raises.
        """
        bank = QueryBank.of(bank)
        if isinstance(estimator, Blend):
            before = None if start is None else check_potentials(bank, start, estimator.potentials)
            parts = []
            for part in estimator.estimators:
                width = getattr(part, "potentials", 0)
                own = None
                if before is not None and width:
                    own, before = before[:, :width], before[:, width:]
                parts.append(self.fit(part, bank, target_bank=target_bank, start=own))
            potentials = np.hstack([part.potentials for part in parts])
            fitted = Blend([part.estimator for part in parts], estimator.weights)
            return restore(fitted, bank, potentials, target_bank=target_bank)
        if has_temperature(estimator):
            estimator = measured(estimator, bank, self._sample(bank))
        if not isinstance(estimator, Sinkhorn):
            return restore(estimator, bank, no_potentials(bank), target_bank=target_bank)
        return self._balanced(estimator, bank, target_bank, start)

    def biases(self, fitted: FittedBias, *, target_bank: QueryBank | None = None) -> Iterator[Vectors]:
        """(n,) float32 biases of each shard's items, in the order of the shards, as they are done.

        target_bank: that of the fit, for estimators that compare with it.
        """
        run = self._remote(shard_steps.biases)
        bank = self._ray.put(fitted.bank)
        arguments = fitted.estimator, fitted.potentials, target_bank
        for done in [run.remote(shard, bank, *arguments) for shard in self._shards]:
            yield self._ray.get(done)

    def _balanced(
        self,
        estimator: Sinkhorn,
        bank: QueryBank,
        target_bank: BankLike | None,
        start: npt.ArrayLike | None,
    ) -> FittedBias:
        """The iteration of `estimators.balance`, a round of tasks for each."""
        shards = list(self._shards)
        if isinstance(estimator, DualBankSinkhorn):
            shards.append(self._ray.put(require_target_bank(bank, target_bank, "DualBankSinkhorn")))
        kept, tau, m = self._ray.put(bank), tau_of(estimator), len(bank)
        run = self._remote(shard_steps.step)

        def sums(f: Vectors | None) -> list[Sums]:
            done: list[Sums] = self._ray.get(
                [run.remote(each, kept, f, tau, self._device) for each in shards]
            )
            return done

        before = None if start is None else check_potentials(bank, start, 1)[:, 0]
        f = shard_steps.joined(sums(before), tau)
        for iteration in range(1, estimator.iterations + 1):
            parts = sums(f.astype(np.float32))
            following = shard_steps.joined(parts, tau)
            items = sum(part.items for part in parts)
            error = float(np.abs(np.exp((f - following) / tau) / items - 1 / m).sum())
            if error <= estimator.tol or iteration == estimator.iterations:
                break
            f = following
        estimator = replace(estimator, items=items)
        fitted = restore(estimator, bank, f.astype(np.float32)[:, None])
        ended = {
            "items": items,
            "iterations": iteration,
            "marginal_error": error,
            "converged": error <= estimator.tol,
            "scores": "recomputed",
        }
        return replace(fitted, diagnostics=fitted.diagnostics._replace(**ended))

    def _sample(self, bank: QueryBank) -> Vectors:
        """Items spread evenly over each shard."""
        run = self._remote(shard_steps.sample)
        most = -(-ITEMS // len(self._shards))
        return np.concatenate(self._ray.get([run.remote(shard, bank, most) for shard in self._shards]))

    def _remote(self, function: Any) -> Any:
        return self._ray.remote(**self._options)(function)
