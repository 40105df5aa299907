"""Sinkhorn Normalization (SN) and Dual-bank Sinkhorn Normalization (DBSN).

Pan et al., ACM Multimedia 2025.

All scores are computed once and stored if they fit into memory; otherwise every step computes them
again. If there are too many even for that, an estimator uses the nearest pairs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    Estimator,
    FitInputs,
    FittedBias,
    Formula,
    check_potentials,
    require_gallery,
    require_target_bank,
)
from milvus_hubness.correction.estimators.products import (
    MOST_PRODUCTS,
    FittedItems,
    Numbers,
    logsumexp_of,
    logsumexp_with_room,
)
from milvus_hubness.correction.estimators.steps import (
    AllScores,
    PairSteps,
    Potentials,
    Scores,
    Taus,
)
from milvus_hubness.correction.kernels import logsumexp, topk
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.policy import prefer_torch
from milvus_hubness.correction.kernels.primitives import TopK
from milvus_hubness.correction.kernels.rows import all_scores, joined, scored
from milvus_hubness.errors import InvalidParameter

MOST_ITERATIONS = 10_000
"""Most iterations of a fit: 10 suffice for the paper's results, and each reads all scores."""

Step: TypeAlias = Callable[[Potentials, Taus], tuple[Potentials, Potentials]]


class Balance(NamedTuple):
    """The potentials of bank and items, and how near to balance they are."""

    f: Potentials
    """(m,), of the bank."""
    g: Potentials
    """(n,), of the items."""
    iterations: int
    """Number of the iterations until then."""
    marginal_error: float
    """Σ_i |marginal of bank query i − 1/m|, between 0 and 2."""
    converged: bool
    """Whether the error is at most the tolerance."""


def iterate(
    step: Step, f: Potentials, taus: Taus, items: int, iterations: int, tol: float
) -> list[Balance]:
    """Compute for each tau the potentials that balance bank and items.

    Then exp((s_ij + f_i + g_j) / tau) has uniform marginals of both. The iteration starts from f
    (t, m), which it changes.

    step: the g that follow from f, and the shares of the bank, as in `AllScores`. So the items'
    marginal is exact, and the bank's has the reported error. Ends for a tau when that is at most
    `tol`, or after `iterations`.
    """
    balances = {}
    active = np.arange(len(taus))
    for done in range(1, iterations + 1):
        g, shares = step(f[active], taus[active])
        errors = np.abs(shares / items - 1 / f.shape[1]).sum(1)
        for row, (number, error) in enumerate(zip(active.tolist(), errors.tolist(), strict=True)):
            if error <= tol or done == iterations:
                balances[number] = Balance(f[number].copy(), g[row], done, error, error <= tol)

        # A pass costs the same for each tau, so those that have converged take part in no other.
        active = active[errors > tol]
        shares = shares[errors > tol]
        if not len(active):
            break

        # After the balances: f stays the one from which their g follow.
        f[active] -= taus[active, None] * np.log(shares)
    return [balances[number] for number in range(len(taus))]


NEIGHBORS = 64
"""Number of the nearest on each side, if iterations over all scores would take too long."""
DENSE_SCORES = 20_000_000
"""Number of scores up to which a look at a bank reads all of them in each iteration."""


def neighbors_for(scores: int) -> int | None:
    """Return the `neighbors` of a Sinkhorn with which a look at a bank tries a method on so many scores:
    a job, whose biases stay, takes minutes where this takes seconds.
    """
    return None if scores <= DENSE_SCORES else NEIGHBORS


class SinkhornDiagnostics(NamedTuple):
    """The end of the iteration; all of it None for a fit from its stored potentials."""

    bank_size: int
    dim: int
    items: int | None
    """Number of gallery items (and targets) of the iteration."""
    iterations: int | None
    """Number of iterations, those on the nearest pairs included."""
    marginal_error: float | None
    """That of `Balance`."""
    converged: bool | None
    """Whether the error is at most tol."""
    scores: Scores | None = None
    """How the iteration got its scores."""


@dataclass(frozen=True)
class Sinkhorn(Estimator, alias="sn"):
    """b(r) = tau · log Σ_i exp((s(q_i, r) + f_i) / tau), f the bank's potentials.

    f and b are such that exp((s(q_i, r) + f_i − b(r)) / tau) has uniform marginals over bank ×
    gallery. Items that came later need `FittedBias.new_bias`: the formula corrects them too much,
    since the others have not made room for them.
    """

    tau: float | None = None
    """In units of the score."""
    iterations: int = 10
    """Largest number of iterations; the paper's results need 10."""
    tol: float = 1e-3
    """The iteration ends earlier at this error of the bank's marginal."""
    neighbors: int | None = None
    """Run all iterations but the last on so many of each item's and each bank query's nearest only.
    By default `scores_for` decides: all scores, or 64 neighbors."""
    temperature: float | None = None
    """Used in place of tau, in units of the spread of scores; 0.5 by default."""
    items: int | None = None
    """The number of items of a fit, which sets it."""
    mean_bias: float | None = field(default=None, repr=False, compare=False)
    """The mean bias of the items of a fit, which sets it. Rounding changes it, so estimators
    compare without it."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_temperatures(temperature=0.5)
        whole_number("iterations", self.iterations, at_most=MOST_ITERATIONS)

    @property
    def needs_gallery(self) -> bool:
        return True

    @property
    def potentials(self) -> int:
        return 1

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        [(fitted, _)] = fit_together([self], bank, inputs)
        return fitted

    def gallery_biases(
        self, bank: BankLike, gallery: Vectors, target_bank: BankLike | None = None
    ) -> Vectors:
        if self.strength == "agreement":
            return super().gallery_biases(bank, gallery, target_bank)
        prefer_torch()
        queries = QueryBank.of(bank).condensed
        items = scored(
            require_gallery(queries, gallery, type(self).__name__), queries.vectors, self.device
        )
        inputs = FitInputs(items, target_bank, None, queries)
        [(_, biases)] = fit_together([self.measured(queries, items)], queries, inputs)
        return np.asarray(self.strength * biases[: len(items)], np.float32)

    def _restore(
        self, bank: QueryBank, potentials: Vectors, target_bank: BankLike | None
    ) -> FittedBias:
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, None, None, None, None)
        return self.with_potentials(bank, potentials, diagnostics)

    @property
    def _fitted_on(self) -> FittedItems:
        """The items of the fit. Raises InvalidParameter if they are unknown."""
        if self.items is None or self.mean_bias is None:
            raise InvalidParameter(
                f"{self!r} does not say how many items it was fitted on, with which mean bias: "
                "fit it, or pass items=… and mean_bias=…"
            )
        return FittedItems(self.items, self.mean_bias)

    def with_potentials(
        self, bank: QueryBank, potentials: Vectors, diagnostics: SinkhornDiagnostics
    ) -> FittedBias:
        """Return the fit of bank queries with these potentials (m, 1)."""
        tau = self.tau_of()
        f = potentials[:, 0]

        def of_vectors(items: Vectors) -> Numbers:
            return logsumexp(items, bank.vectors, tau, f, device=self.device)

        def of_products(products: Numbers) -> Numbers:
            return logsumexp_of(products + f, tau)

        def new_of_vectors(items: Vectors) -> Numbers:
            # Unlike the kernels above, this needs all products of its items with the bank at once.
            count = math.ceil(len(items) * len(bank) / MOST_PRODUCTS)
            biases = np.empty(len(items))
            # Every block has items of the whole batch, whose order may be that of their topics.
            for first in range(count):
                block = slice(first, None, count)
                biases[block] = new_of_products(all_scores(items[block], bank.vectors))
            return biases

        def new_of_products(products: Numbers) -> Numbers:
            return logsumexp_with_room(products, f, tau, self._fitted_on)

        return FittedBias(
            estimator=self,
            bank=bank,
            formula=Formula(of_vectors, of_products),
            diagnostics=diagnostics,
            potentials=potentials,
            new_formula=Formula(new_of_vectors, new_of_products),
        )


@dataclass(frozen=True)
class DualBankSinkhorn(Sinkhorn, alias="dbsn"):
    """`Sinkhorn` over bank × [gallery; target bank].

    It is for a bank whose queries ask for items outside the gallery: without targets, these queries
    would be balanced against items that answer none of them. The target bank has items of the
    gallery's kind, ideally those that the bank's queries ask for.
    """

    @property
    def needs_target_bank(self) -> bool:
        return True


def fit_together(
    estimators: Sequence[Sinkhorn],
    bank: QueryBank,
    inputs: FitInputs,
    nearest: tuple[TopK, TopK] | None = None,
) -> list[tuple[FittedBias, Vectors]]:
    """Return fits of estimators that differ in tau and temperature only, each with its biases.

    The biases are those of the items: gallery, then target bank if it is needed. Each pass over the
    scores serves all.

    nearest: as `PairSteps` has them; by default computed.
    """
    first = estimators[0]
    items = _balanced_items(first, bank, inputs)
    taus = np.array([estimator.tau_of() for estimator in estimators])
    steps = AllScores(bank.vectors, items, first.device, "sparse" if first.neighbors else None)
    g = _start(steps, bank, inputs, taus, len(items))

    iterations = first.iterations
    iterations_before = [0] * len(taus)
    if steps.scores == "sparse" and iterations > 1:
        near = PairSteps.nearest(*(nearest or _nearest(first, bank, items)))
        f = near.from_items(g, taus)
        sparse = iterate(near.from_bank, f, taus, len(items), iterations - 1, first.tol)

        # The last iteration is over all scores: an item's bias depends on all bank queries.
        g = np.stack([balance.g for balance in sparse])
        iterations_before = [balance.iterations for balance in sparse]
        iterations = 1

    f = steps.from_items(g, taus)
    balances = iterate(steps.from_bank, f, taus, len(items), iterations, first.tol)

    fits = []
    for estimator, before, balance in zip(estimators, iterations_before, balances, strict=True):
        diagnostics = SinkhornDiagnostics(
            bank_size=len(bank),
            dim=bank.dim,
            items=len(items),
            iterations=before + balance.iterations,
            marginal_error=balance.marginal_error,
            converged=balance.converged,
            scores=steps.scores,
        )
        mean_bias = -float(balance.g.mean(dtype=np.float64))
        fitted = replace(estimator, items=len(items), mean_bias=mean_bias)
        fits.append((fitted.with_potentials(bank, balance.f[:, None], diagnostics), -balance.g))
    return fits


def shared_fits(
    estimators: Sequence[Estimator], bank: QueryBank, inputs: FitInputs
) -> dict[int, FittedBias]:
    """Return the fits of those that differ in tau and temperature only, by their numbers: passes over
    the scores, of which a fit takes many, serve all of these. Others, and single ones, have none here.
    """
    alike_ones: dict[Sinkhorn, list[tuple[int, Sinkhorn]]] = {}
    for number, estimator in enumerate(estimators):
        if isinstance(estimator, Sinkhorn) and estimator.strength != "agreement":
            alike = replace(estimator, tau=1.0, temperature=None, strength=1.0, items=None)
            alike_ones.setdefault(alike, []).append((number, estimator))

    fits: dict[int, FittedBias] = {}
    for numbered in alike_ones.values():
        if len(numbered) > 1:
            numbers, some = zip(*numbered, strict=True)
            gallery = require_gallery(bank, inputs.gallery, type(some[0]).__name__)
            measured = [estimator.measured(bank, gallery) for estimator in some]
            together = fit_together(measured, bank, inputs)
            fits |= {number: fit for number, (fit, _) in zip(numbers, together, strict=True)}
    return fits


def _balanced_items(estimator: Sinkhorn, bank: QueryBank, inputs: FitInputs) -> Vectors:
    """Return the items to balance the bank against: gallery, then target bank if it is needed."""
    items = require_gallery(bank, inputs.gallery, type(estimator).__name__)
    if not estimator.needs_target_bank:
        return items
    targets = require_target_bank(bank, inputs.target_bank, type(estimator).__name__)
    both: Vectors = scored(joined([items, targets]), bank.vectors, estimator.device)
    return both


def _start(
    steps: AllScores, bank: QueryBank, inputs: FitInputs, taus: Taus, items: int
) -> Potentials:
    """Return potentials g (t, items) to start from: zeros, or those of an earlier fit."""
    if inputs.start is None:
        return np.zeros((len(taus), items), np.float32)
    f = check_potentials(bank, inputs.start, 1)[:, 0]
    g, _ = steps.from_bank(np.tile(f, (len(taus), 1)), taus)
    return g


def _nearest(estimator: Sinkhorn, bank: QueryBank, items: Vectors) -> tuple[TopK, TopK]:
    """Return the bank queries nearest to each item, and the items nearest to each bank query."""
    k = estimator.neighbors or NEIGHBORS
    of_items = topk(items, bank.vectors, min(k, len(bank)), device=estimator.device)
    of_queries = topk(bank.vectors, items, min(k, len(items)), device=estimator.device)
    return of_items, of_queries
