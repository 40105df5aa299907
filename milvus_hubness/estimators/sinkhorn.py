"""Sinkhorn Normalization (SN) and Dual-bank Sinkhorn Normalization (DBSN): Pan et al., ACM Multimedia 2025.

All scores are computed once and stored if they fit into memory; otherwise every step computes them again. If
there are too many even for that, an estimator uses the nearest pairs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators.base import Estimator, FitInputs, FittedBias, check_potentials, require_target_bank
from milvus_hubness.estimators.nearest import (
    ACCURACY,
    LEADING,
    ROUNDS,
    Bounded,
    Nearest,
    Needs,
    bounded_logsumexp,
    own_room,
)
from milvus_hubness.kernels import logsumexp
from milvus_hubness.kernels.on_numpy import cached_logsumexp
from milvus_hubness.kernels.primitives import POLICY, uses_numpy

Potentials: TypeAlias = npt.NDArray[np.floating[Any]]
Step: TypeAlias = Callable[[Potentials], Potentials]
"""Maps potentials of the bank or of the items to those of the other, as `iterate` explains."""
Scores: TypeAlias = Literal["float32", "float16", "recomputed", "sparse"]

CUDA_SHARE, MOST_ON_CUDA = 0.6, 2e12


def scores_for(m: int, n: int, free: float | None = None) -> Scores:
    """Return how to provide the scores of m × n pairs.

    They are stored in float32 or else float16 if that fits into 1 GiB, or into 0.6 of the free memory of a CUDA device;
    else every step recomputes them. Above 2·10^10 pairs, 2·10^12 on CUDA, that would take minutes: "sparse".
    free: bytes of memory of the CUDA device, if there is one.
    """
    memory, most = POLICY.get().sinkhorn_limits if free is None else (CUDA_SHARE * free, MOST_ON_CUDA)
    if 4 * m * n <= memory:
        return "float32"
    if 2 * m * n <= memory:
        return "float16"
    return "recomputed" if m * n <= most else "sparse"


class Balance(NamedTuple):
    """Potentials f (m,) of the bank, and how near to balance they are.

    marginal_error: Σ_i |marginal of bank query i − 1/m|, between 0 and 2.
    """

    f: Potentials
    iterations: int
    marginal_error: float
    converged: bool


def iterate(step: Step, f: Potentials, tau: float, items: int, iterations: int, tol: float) -> Balance:
    """Compute potentials for which exp((s_ij + f_i + g_j) / tau) has uniform marginals over bank × items.

    The iteration starts from f. step: the next f, −tau · log Σ_j exp((s_ij + g_j) / tau), under the g that
    follow from f likewise over i. So the items' marginal is exact, and the bank's has the reported error.
    Ends when that is at most `tol`, or after `iterations`.
    """
    for done in range(1, iterations + 1):
        following = step(f)
        marginal = np.exp((f - following).astype(np.float64) / tau) / items
        error = float(np.abs(marginal - 1 / len(f)).sum())
        if error <= tol or done == iterations:
            break
        f = following
    return Balance(f, done, error, error <= tol)


def balance(steps: tuple[Step, Step], g: Potentials, tau: float, iterations: int, tol: float) -> Balance:
    """Balance by the steps to f and to g, from the potentials g (n,) of the items."""
    bank_step, item_step = steps
    return iterate(lambda f: bank_step(item_step(f)), bank_step(g), tau, len(g), iterations, tol)


def with_room(bank_step: Step, item_step: Step, f: Potentials, tau: float, share: float) -> Potentials:
    """Return potentials of the bank (m,) under which new items get biases that leave room for each other.

    bank_step, item_step: over the new items. f: (m,) of the fit. share: m over the items of the fit. The fitted items
    take e^(−f_i/τ) / share of a query, the new ones Σ_j e^((s_ij − b_j)/τ). A refit would also lower the biases of the
    fitted items, on average as much as the potentials. Here these biases stay, and so does the mean of the potentials.
    """
    room = f
    for _ in range(ROUNDS):
        taken = math.log(share) - bank_step(item_step(room)) / tau
        room = -tau * np.logaddexp(-f / tau, taken)
    return np.asarray(room - (room - f).mean(), np.float32)


NEIGHBORS = 64


class SinkhornDiagnostics(NamedTuple):
    """The end of the iteration; all of it None for a fit from its stored potentials.

    items: gallery items (and target bank) of the iteration. marginal_error: that of `Balance`. converged: whether it is
    at most tol. scores: how the iteration got its scores.
    """

    bank_size: int
    dim: int
    items: int | None
    iterations: int | None
    marginal_error: float | None
    converged: bool | None
    scores: Scores | None = None


@dataclass(frozen=True)
class Sinkhorn(Estimator, alias="sn"):
    """b(r) = tau · log Σ_i exp((s(q_i, r) + f_i) / tau), f the bank's potentials.

    f and b are such that exp((s(q_i, r) + f_i − b(r)) / tau) has uniform marginals over bank × gallery. Items that came
    later need `FittedBias.new_bias`: the formula corrects them too much, since the others have not made room for them.

    tau: in units of the score. temperature: used in place of tau, in units of the spread of scores; 0.5 by default.
    iterations: largest number of them; the paper's results need 10. tol: the iteration ends earlier at this error of
    the bank's marginal. neighbors: run all iterations but the last on each item's and each bank query's nearest only;
    by default `scores_for` decides: all scores, or 64 neighbors. items: the number of items of a fit, which sets it.
    """

    tau: float | None = None
    iterations: int = 10
    tol: float = 1e-3
    neighbors: int | None = None
    temperature: float | None = None
    items: int | None = None
    device: str = field(default="auto", repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_temperatures(temperature=0.5)

    @property
    def needs_gallery(self) -> bool:
        return True

    @property
    def potentials(self) -> int:
        return 1

    @property
    def needs(self) -> Needs:
        tau = self.tau_of()
        return Needs(queries=LEADING, temperatures=(tau,), tolerance=ACCURACY * tau)

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        items = np.asarray(inputs.gallery, np.float32)
        if self.needs_target_bank:
            targets = require_target_bank(bank, inputs.target_bank, type(self).__name__)
            items = np.concatenate([items, targets])
        tau = self.tau_of()
        scores, steps = self._steps(bank, items)
        g = np.zeros(len(items), np.float32)
        if inputs.start is not None:
            g = steps[1](check_potentials(bank, inputs.start, 1)[:, 0])
        ahead = 0
        if scores == "sparse" and self.iterations > 1:
            from milvus_hubness.kernels.steps import sparse_steps

            nearest = sparse_steps(bank.vectors, items, tau, self.neighbors or NEIGHBORS, self.device)
            first = balance(nearest, g, tau, self.iterations - 1, self.tol)
            g, ahead = nearest[1](first.f), first.iterations
        result = balance(steps, g, tau, 1 if ahead else self.iterations, self.tol)
        diagnostics = SinkhornDiagnostics(
            len(bank), bank.dim, len(items), ahead + result.iterations, result.marginal_error,
            result.converged, scores,
        )  # fmt: skip
        fitted = replace(self, items=len(items))
        return fitted._with_potentials(bank, result.f[:, None], diagnostics)

    def restore(self, bank: BankLike, potentials: npt.ArrayLike, *, target_bank: BankLike | None = None) -> FittedBias:
        bank = QueryBank.of(bank)
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, None, None, None, None)
        return self._with_potentials(bank, check_potentials(bank, potentials, 1), diagnostics)

    def _from_nearest(self, queries: Nearest, targets: Nearest | None) -> Bounded:
        """Return the log-sum-exp over the nearest, less the room of a new item."""
        bounded = bounded_logsumexp(queries, self.tau_of())
        if not queries.are_new:
            return bounded
        size = queries.scores.shape[1] + queries.rest
        return bounded._replace(biases=bounded.biases - own_room(queries, self.tau_of(), size / self._fitted_on))

    def _steps(self, bank: QueryBank, items: Vectors) -> tuple[Scores, tuple[Step, Step]]:
        """Return how the scores of bank and items are provided, and the steps over all of them."""
        vectors, tau = bank.vectors, self.tau_of()
        if not uses_numpy(vectors.size * len(items), self.device):
            from milvus_hubness.kernels import steps

            scores = "sparse" if self.neighbors else scores_for(len(bank), len(items), steps.free_memory(self.device))
            return scores, steps.full_steps(vectors, items, tau, self.device, scores)
        scores = "sparse" if self.neighbors else scores_for(len(bank), len(items))
        if scores == "float32":
            stored = vectors @ items.T
            return scores, (lambda g: -cached_logsumexp(stored, tau, g), lambda f: -cached_logsumexp(stored.T, tau, f))
        return "recomputed" if scores == "float16" else scores, (
            lambda g: -logsumexp(vectors, items, tau, g),
            lambda f: -logsumexp(items, vectors, tau, f),
        )

    @property
    def _fitted_on(self) -> int:
        if self.items is None:
            raise InvalidParameter(f"{self!r} does not say how many items it was fitted on: pass items=…")
        return self.items

    def _with_potentials(self, bank: QueryBank, potentials: Vectors, diagnostics: SinkhornDiagnostics) -> FittedBias:
        tau = self.tau_of()

        def biases(items: Vectors, f: Vectors) -> npt.NDArray[np.float32]:
            return logsumexp(items, bank.vectors, tau, f, device=self.device)

        def new_formula(items: Vectors) -> npt.NDArray[np.float32]:
            _, steps = replace(self, neighbors=None)._steps(bank, items)
            return biases(items, with_room(*steps, potentials[:, 0], tau, len(bank) / self._fitted_on))

        formula = partial(biases, f=potentials[:, 0])
        return FittedBias(self, bank, formula, diagnostics, potentials, new_formula)


@dataclass(frozen=True)
class DualBankSinkhorn(Sinkhorn, alias="dbsn"):
    """`Sinkhorn` over bank × [gallery; target bank], for a bank whose queries ask for items outside the gallery.

    The target bank has items of the gallery's kind, ideally those that the bank's queries ask for.
    """

    @property
    def needs_target_bank(self) -> bool:
        return True
