"""Sinkhorn Normalization (SN; Pan et al., ACM Multimedia 2025; the iteration: Cuturi, NeurIPS 2013)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.banks import BankLike, QueryBank, Vectors
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators.balance import (
    Scores,
    Step,
    balance,
    cached_steps,
    dense_steps,
    scores_for,
    sparse_steps,
    with_room,
)
from milvus_hubness.estimators.base import FittedBias
from milvus_hubness.estimators.inputs import check_potentials, require_gallery
from milvus_hubness.estimators.nearest import (
    ACCURACY,
    LEADING,
    Bounded,
    Nearest,
    Needs,
    bounded_logsumexp,
    own_room,
)
from milvus_hubness.estimators.temperature import measured, set_temperatures, tau_of
from milvus_hubness.kernels import logsumexp, resolve_device
from milvus_hubness.kernels.arguments import finite_number, whole_number
from milvus_hubness.kernels.operands import as_tensor

NEIGHBORS = 64
KEPT = {"float32": torch.float32, "float16": torch.float16}


class SinkhornDiagnostics(NamedTuple):
    """How the iteration ended; all of it None for a fit restored from its potentials.

    items: gallery items (and target bank) it ran over. marginal_error: Σ_i |marginal of bank query i − 1/m|,
    between 0 and 2. converged: whether that is at most tol. scores: how those of the iteration were had.
    """

    bank_size: int
    dim: int
    items: int | None
    iterations: int | None
    marginal_error: float | None
    converged: bool | None
    scores: Scores | None = None


@dataclass(frozen=True)
class Sinkhorn:
    """b(r) = tau · log Σ_i exp((s(q_i, r) + f_i) / tau), f the bank's potentials.

    f and b are such that exp((s(q_i, r) + f_i − b(r)) / tau) has uniform marginals over bank × gallery: every
    query gives, and every item gets, the same. `FittedBias.new_bias` tells those of items that came later,
    which the formula alone corrects too much, since the others have not made room for them.

    tau: in units of the score. temperature: in units of the spread of scores, in place of tau; 0.5 where
    neither is given. iterations: at most so many; the paper's results need 10, not convergence. tol: ends
    earlier at this error of the bank's marginal. neighbors: run all iterations but the last on the scores of
    each item's and each bank query's nearest only: O((|gallery| + |bank|) · neighbors) memory, less time.
    Unless given, as `balance.scores_for` has it: all scores, or 64 neighbors where those are too many. items:
    how many a fit ran over, which sets it.
    """

    tau: float | None = None
    iterations: int = 10
    tol: float = 1e-3
    neighbors: int | None = None
    temperature: float | None = None
    items: int | None = None
    device: str = field(default="auto", repr=False, compare=False)

    needs_gallery: ClassVar[bool] = True
    needs_target_bank: ClassVar[bool] = False
    potentials: ClassVar[int] = 1

    def __post_init__(self) -> None:
        set_temperatures(self, {"temperature": 0.5})
        object.__setattr__(self, "iterations", whole_number("iterations", self.iterations))
        object.__setattr__(self, "tol", finite_number("tol", self.tol))
        if self.neighbors is not None:
            object.__setattr__(self, "neighbors", whole_number("neighbors", self.neighbors))
        if self.items is not None:
            object.__setattr__(self, "items", whole_number("items", self.items))

    @property
    def needs(self) -> Needs:
        """The nearest queries with their potentials, as many as the error asks for."""
        tau = tau_of(self)
        return Needs(queries=LEADING, temperatures=(tau,), tolerance=ACCURACY * tau)

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """start: potentials (|bank|, 1) of an earlier fit on this bank, to begin from.

        Raises InvalidInput without a gallery or for a start of another shape, DimensionMismatch.
        """
        bank = QueryBank.of(bank)
        items = require_gallery(bank, gallery, "Sinkhorn")
        return measured(self, bank, items)._balanced(bank, items, start)

    def restore(
        self,
        bank: BankLike,
        potentials: npt.ArrayLike,
        *,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """The fit that had these potentials (|bank|, 1). Raises InvalidInput for another shape."""
        bank = QueryBank.of(bank)
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, None, None, None, None)
        return self._fitted(bank, check_potentials(bank, potentials, 1), diagnostics)

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """The sum over the nearest, less the room of a new item, and what the others would add if all scored
        as the last of these."""
        found = bounded_logsumexp(queries, tau_of(self))
        if not queries.are_new:
            return found
        size = queries.scores.shape[1] + queries.rest
        return found._replace(biases=found.biases - own_room(queries, tau_of(self), size / self._fitted_on))

    def _balanced(self, bank: QueryBank, items: Vectors, start: npt.ArrayLike | None) -> FittedBias:
        tau = tau_of(self)
        queries, columns, scores, steps = self._steps(bank, items)
        device = queries.device
        g = columns.new_zeros(len(columns))
        if start is not None:
            g = steps[1](as_tensor(check_potentials(bank, start, 1)[:, 0], torch.float32, device))
        ahead = 0
        if scores == "sparse" and self.iterations > 1:
            nearest = sparse_steps(queries, columns, tau, self.neighbors or NEIGHBORS)
            _, g, ahead, _, _ = balance(*nearest, g, tau, self.iterations - 1, self.tol)
        result = balance(*steps, g, tau, 1 if ahead else self.iterations, self.tol)
        diagnostics = SinkhornDiagnostics(
            len(bank),
            bank.dim,
            len(items),
            ahead + result.iterations,
            result.marginal_error,
            result.converged,
            scores,
        )
        fitted = replace(self, items=len(items))
        return fitted._fitted(bank, result.f.cpu().numpy()[:, None], diagnostics)

    def _steps(
        self, bank: QueryBank, items: Vectors
    ) -> tuple[torch.Tensor, torch.Tensor, Scores, tuple[Step, Step]]:
        """Bank and items on the device, how to have their scores, and the steps over all of these."""
        device, tau = resolve_device(self.device), tau_of(self)
        queries, columns = (as_tensor(part, torch.float32, device) for part in (bank.vectors, items))
        scores: Scores = "sparse" if self.neighbors else scores_for(len(queries), len(columns), device)
        if scores in KEPT:
            return queries, columns, scores, cached_steps(queries, columns, tau, KEPT[scores])
        return queries, columns, scores, dense_steps(queries, columns, tau, self.device)

    @property
    def _fitted_on(self) -> int:
        if self.items is None:
            raise InvalidParameter(f"{self!r} does not say how many items it was fitted on: pass items=…")
        return self.items

    def _fitted(self, bank: QueryBank, potentials: Vectors, diagnostics: SinkhornDiagnostics) -> FittedBias:
        tau = tau_of(self)

        def biases(items: Vectors, f: Vectors) -> npt.NDArray[np.float32]:
            return logsumexp(items, bank.vectors, tau, f, device=self.device)

        def new_formula(items: Vectors) -> npt.NDArray[np.float32]:
            queries, _, _, steps = replace(self, neighbors=None)._steps(bank, items)
            f = as_tensor(potentials[:, 0], torch.float32, queries.device)
            room = with_room(*steps, f, tau, len(bank) / self._fitted_on)
            return biases(items, room.cpu().numpy())

        known = partial(biases, f=potentials[:, 0])
        return FittedBias(self, bank, known, diagnostics, potentials, new_formula)
