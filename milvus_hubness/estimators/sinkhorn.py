"""Sinkhorn Normalization (SN) and Dual-bank Sinkhorn Normalization (DBSN): Pan et al., ACM Multimedia 2025.

All scores are computed once and stored if they fit into memory; otherwise every step computes them again. If
there are too many even for that, an estimator uses the nearest pairs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

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
from milvus_hubness.kernels import logsumexp, resolve_device, topk
from milvus_hubness.kernels.dense import cached_logsumexp, cached_scores
from milvus_hubness.kernels.primitives import as_tensor, finite_number, whole_number

Step: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Scores: TypeAlias = Literal["float32", "float16", "recomputed", "sparse"]

CPU_CACHE = 1 << 30
CUDA_SHARE = 0.6
MOST_RECOMPUTED = {"cpu": 2e10, "cuda": 2e12}


def scores_for(m: int, n: int, device: torch.device) -> Scores:
    """Return how to provide the scores of m × n pairs.

    They are stored in float32 or else float16 if that fits into 1 GiB, or into 0.6 of the free memory of a CUDA device;
    else every step recomputes them. Above 2·10^10 pairs, 2·10^12 on CUDA, that would take minutes: "sparse".
    """
    on_cuda = device.type == "cuda"
    memory = CUDA_SHARE * torch.cuda.mem_get_info(device)[0] if on_cuda else CPU_CACHE
    if 4 * m * n <= memory:
        return "float32"
    if 2 * m * n <= memory:
        return "float16"
    return "recomputed" if m * n <= MOST_RECOMPUTED[device.type] else "sparse"


class Balance(NamedTuple):
    """Potentials f (m,) of the bank, and how near to balance they are.

    marginal_error: Σ_i |marginal of bank query i − 1/m|, between 0 and 2.
    """

    f: torch.Tensor
    iterations: int
    marginal_error: float
    converged: bool


def iterate(step: Step, f: torch.Tensor, tau: float, items: int, iterations: int, tol: float) -> Balance:
    """Compute potentials for which exp((s_ij + f_i + g_j) / tau) has uniform marginals over bank × items.

    The iteration starts from f. step: the next f, −tau · log Σ_j exp((s_ij + g_j) / tau), under the g that
    follow from f likewise over i. So the items' marginal is exact, and the bank's has the reported error.
    Ends when that is at most `tol`, or after `iterations`.
    """
    for done in range(1, iterations + 1):
        following = step(f)
        marginal = ((f - following).double() / tau).exp_() / items
        error = float((marginal - 1 / len(f)).abs().sum())
        if error <= tol or done == iterations:
            break
        f = following
    return Balance(f, done, error, error <= tol)


def balance(steps: tuple[Step, Step], g: torch.Tensor, tau: float, iterations: int, tol: float) -> Balance:
    """Balance by the steps to f and to g, from the potentials g (n,) of the items."""
    bank_step, item_step = steps
    return iterate(lambda f: bank_step(item_step(f)), bank_step(g), tau, len(g), iterations, tol)


def with_room(bank_step: Step, item_step: Step, f: torch.Tensor, tau: float, share: float) -> torch.Tensor:
    """Return potentials of the bank (m,) under which new items get biases that leave room for each other.

    bank_step, item_step: over the new items. f: (m,) of the fit. share: m over the items of the fit. The fitted items
    take e^(−f_i/τ) / share of a query, the new ones Σ_j e^((s_ij − b_j)/τ). A refit would also lower the biases of the
    fitted items, on average as much as the potentials. Here these biases stay, and so does the mean of the potentials.
    """
    room = f
    for _ in range(ROUNDS):
        taken = math.log(share) - bank_step(item_step(room)) / tau
        room = -tau * torch.logaddexp(-f / tau, taken)
    return room - (room - f).mean()


def cached_steps(bank: torch.Tensor, items: torch.Tensor, tau: float, dtype: torch.dtype) -> tuple[Step, Step]:
    """Return the two steps over every pair, with scores stored in float32 or, with errors up to 2^-12, in float16."""
    scores = cached_scores(bank, items, dtype)
    return (lambda g: -cached_logsumexp(scores, tau, g), lambda f: -cached_logsumexp(scores.T, tau, f))


def dense_steps(bank: torch.Tensor, items: torch.Tensor, tau: float, device: str | None = None) -> tuple[Step, Step]:
    """Return the two steps over every pair of bank (m, d) and items (n, d), in O((m + n) · d) memory.

    device: as the kernels take it; by default that of the bank.
    """
    device = device or str(bank.device)
    return (
        lambda g: -logsumexp(bank, items, tau, g, device=device),
        lambda f: -logsumexp(items, bank, tau, f, device=device),
    )


def sparse_steps(bank: torch.Tensor, items: torch.Tensor, tau: float, neighbors: int) -> tuple[Step, Step]:
    """Return the two steps over each item's and each query's nearest only, in O((m + n) · neighbors) memory."""
    device, m, n = str(bank.device), len(bank), len(items)
    near_items = topk(items, bank, min(neighbors, m), device=device)
    near_bank = topk(bank, items, min(neighbors, n), device=device)
    pairs = torch.cat(
        [
            (near_items.indices * n + torch.arange(n, device=bank.device)[:, None]).ravel(),
            (near_bank.indices + torch.arange(m, device=bank.device)[:, None] * n).ravel(),
        ]
    )
    scores = torch.cat([near_items.values.ravel(), near_bank.values.ravel()])
    pairs, order = pairs.sort()
    first = torch.ones_like(pairs, dtype=torch.bool)
    first[1:] = pairs[1:] != pairs[:-1]
    pairs, scores = pairs[first], scores[order][first]
    query, item = pairs // n, pairs % n
    return (
        lambda g: -_grouped_logsumexp(scores + g[item], query, m, tau),
        lambda f: -_grouped_logsumexp(scores + f[query], item, n, tau),
    )


def _grouped_logsumexp(values: torch.Tensor, group: torch.Tensor, groups: int, tau: float) -> torch.Tensor:
    largest = values.new_full((groups,), -torch.inf).scatter_reduce_(0, group, values, "amax")
    terms = ((values - largest[group]) / tau).exp_().double()
    total = terms.new_zeros(groups).index_add_(0, group, terms)
    return largest + (tau * total.log_()).to(values.dtype)


NEIGHBORS = 64
STORED = {"float32": torch.float32, "float16": torch.float16}


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
        self._set_temperatures(temperature=0.5)
        self._convert(whole_number, "iterations", "neighbors", "items")
        self._convert(finite_number, "tol")

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
        queries, columns, scores, steps = self._steps(bank, items)
        g = columns.new_zeros(len(columns))
        if inputs.start is not None:
            f = check_potentials(bank, inputs.start, 1)[:, 0]
            g = steps[1](as_tensor(f, torch.float32, queries.device))
        ahead = 0
        if scores == "sparse" and self.iterations > 1:
            nearest = sparse_steps(queries, columns, tau, self.neighbors or NEIGHBORS)
            first = balance(nearest, g, tau, self.iterations - 1, self.tol)
            g, ahead = nearest[1](first.f), first.iterations
        result = balance(steps, g, tau, 1 if ahead else self.iterations, self.tol)
        diagnostics = SinkhornDiagnostics(
            len(bank), bank.dim, len(items), ahead + result.iterations, result.marginal_error,
            result.converged, scores,
        )  # fmt: skip
        fitted = replace(self, items=len(items))
        return fitted._with_potentials(bank, result.f.cpu().numpy()[:, None], diagnostics)

    def restore(self, bank: BankLike, potentials: npt.ArrayLike, *, target_bank: BankLike | None = None) -> FittedBias:
        bank = QueryBank.of(bank)
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, None, None, None, None)
        return self._with_potentials(bank, check_potentials(bank, potentials, 1), diagnostics)

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """Return the log-sum-exp over the nearest, less the room of a new item."""
        bounded = bounded_logsumexp(queries, self.tau_of())
        if not queries.are_new:
            return bounded
        size = queries.scores.shape[1] + queries.rest
        return bounded._replace(biases=bounded.biases - own_room(queries, self.tau_of(), size / self._fitted_on))

    def _steps(self, bank: QueryBank, items: Vectors) -> tuple[torch.Tensor, torch.Tensor, Scores, tuple[Step, Step]]:
        """Return bank and items on the device, how their scores are provided, and the steps over all of them."""
        device, tau = resolve_device(self.device), self.tau_of()
        queries, columns = (as_tensor(part, torch.float32, device) for part in (bank.vectors, items))
        scores: Scores = "sparse" if self.neighbors else scores_for(len(queries), len(columns), device)
        if scores in STORED:
            return queries, columns, scores, cached_steps(queries, columns, tau, STORED[scores])
        return queries, columns, scores, dense_steps(queries, columns, tau, self.device)

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
            queries, _, _, steps = replace(self, neighbors=None)._steps(bank, items)
            f = as_tensor(potentials[:, 0], torch.float32, queries.device)
            room = with_room(*steps, f, tau, len(bank) / self._fitted_on)
            return biases(items, room.cpu().numpy())

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
