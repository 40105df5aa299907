"""Sinkhorn Normalization (SN; Pan et al., ACM Multimedia 2025; the iteration: Cuturi, NeurIPS 2013)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.banks import QueryBank, Vectors
from milvus_hubness.estimators.balance import (
    Scores,
    balance,
    cached_steps,
    dense_steps,
    scores_for,
    sparse_steps,
)
from milvus_hubness.estimators.base import FittedBias
from milvus_hubness.estimators.inputs import check_potentials, require_gallery
from milvus_hubness.estimators.nearest import LEADING, Bounded, Nearest, Needs, bounded_logsumexp
from milvus_hubness.kernels import logsumexp, resolve_device
from milvus_hubness.kernels.arguments import finite_number, positive_number, whole_number
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
    query gives, and every item gets, the same. The formula is also the bias of an item that came later, which
    it corrects somewhat too much, since the others have not made room for it: refit, from `start`, in time.

    tau: temperature. iterations: at most so many; the paper's results need 10, not convergence. tol: ends
    earlier at this error of the bank's marginal. neighbors: run all iterations but the last on the scores of
    each item's and each bank query's nearest only: O((|gallery| + |bank|) · neighbors) memory, less time.
    Unless given, as `balance.scores_for` has it: all scores, or 64 neighbors where those are too many.
    """

    tau: float = 0.03
    iterations: int = 10
    tol: float = 1e-3
    neighbors: int | None = None
    device: str = field(default="auto", repr=False, compare=False)

    needs_gallery: ClassVar[bool] = True
    needs_target_bank: ClassVar[bool] = False
    potentials: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", positive_number("tau", self.tau))
        object.__setattr__(self, "iterations", whole_number("iterations", self.iterations))
        object.__setattr__(self, "tol", finite_number("tol", self.tol))
        if self.neighbors is not None:
            object.__setattr__(self, "neighbors", whole_number("neighbors", self.neighbors))

    @property
    def needs(self) -> Needs:
        """The nearest queries with their potentials, as many as the error asks for."""
        return Needs(queries=LEADING, temperatures=(self.tau,))

    def fit(
        self,
        bank: QueryBank,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: npt.ArrayLike | QueryBank | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """start: potentials (|bank|, 1) of an earlier fit on this bank, to begin from.

        Raises InvalidInput without a gallery or for a start of another shape, DimensionMismatch.
        """
        return self._balanced(bank, require_gallery(bank, gallery, "Sinkhorn"), start)

    def restore(
        self,
        bank: QueryBank,
        potentials: npt.ArrayLike,
        *,
        target_bank: npt.ArrayLike | QueryBank | None = None,
    ) -> FittedBias:
        """The fit that had these potentials (|bank|, 1). Raises InvalidInput for another shape."""
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, None, None, None, None)
        return self._fitted(bank, check_potentials(bank, potentials, 1), diagnostics)

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """The sum over the nearest, and what the others would add if all scored as the last of these."""
        return bounded_logsumexp(queries, self.tau)

    def _balanced(self, bank: QueryBank, items: Vectors, start: npt.ArrayLike | None) -> FittedBias:
        device = resolve_device(self.device)
        queries, columns = (as_tensor(part, torch.float32, device) for part in (bank.vectors, items))
        scores = "sparse" if self.neighbors else scores_for(len(queries), len(columns), device)
        if scores in KEPT:
            steps = cached_steps(queries, columns, self.tau, KEPT[scores])
        else:
            steps = dense_steps(queries, columns, self.tau, self.device)
        g = columns.new_zeros(len(columns))
        if start is not None:
            g = steps[1](as_tensor(check_potentials(bank, start, 1)[:, 0], torch.float32, device))
        ahead = 0
        if scores == "sparse" and self.iterations > 1:
            nearest = sparse_steps(queries, columns, self.tau, self.neighbors or NEIGHBORS)
            _, g, ahead, _, _ = balance(*nearest, g, self.tau, self.iterations - 1, self.tol)
        result = balance(*steps, g, self.tau, 1 if ahead else self.iterations, self.tol)
        diagnostics = SinkhornDiagnostics(
            len(bank),
            bank.dim,
            len(items),
            ahead + result.iterations,
            result.marginal_error,
            result.converged,
            scores,
        )
        return self._fitted(bank, result.f.cpu().numpy()[:, None], diagnostics)

    def _fitted(self, bank: QueryBank, potentials: Vectors, diagnostics: SinkhornDiagnostics) -> FittedBias:
        def formula(items: Vectors) -> npt.NDArray[np.float32]:
            return logsumexp(items, bank.vectors, self.tau, potentials[:, 0], device=self.device)

        return FittedBias(self, bank, formula, diagnostics, potentials)
