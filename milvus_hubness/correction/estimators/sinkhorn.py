"""Sinkhorn Normalization (SN) and Dual-bank Sinkhorn Normalization (DBSN): Pan et al., ACM Multimedia 2025.

All scores are computed once and stored if they fit into memory; otherwise every step computes them again. If
there are too many even for that, an estimator uses the nearest pairs only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    Estimator,
    FitInputs,
    FittedBias,
    Formula,
    check_potentials,
    require_target_bank,
)
from milvus_hubness.correction.estimators.products import (
    MOST_PRODUCTS,
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
from milvus_hubness.correction.kernels.primitives import TopK
from milvus_hubness.errors import InvalidParameter

MOST_ITERATIONS = 10_000
"""Most iterations of a fit: 10 suffice for the paper's results, and each reads all scores."""

Step: TypeAlias = Callable[[Potentials, Taus], tuple[Potentials, Potentials]]


class Balance(NamedTuple):
    """Potentials f (m,) of the bank and g (n,) of the items, and how near to balance they are.

    marginal_error: Σ_i |marginal of bank query i − 1/m|, between 0 and 2.
    """

    f: Potentials
    g: Potentials
    iterations: int
    marginal_error: float
    converged: bool


def iterate(
    step: Step, f: Potentials, taus: Taus, items: int, iterations: int, tol: float
) -> list[Balance]:
    """Compute for each tau potentials for which exp((s_ij + f_i + g_j) / tau) has uniform marginals
    of bank and items.

    The iteration starts from f (t, m). step: the g that follow from f, and the shares of the bank,
    as in `AllScores`. So the items' marginal is exact, and the bank's has the reported error. Ends
    for a tau when that is at most `tol`, or after `iterations`.
    """
    balances = {}
    active = np.arange(len(taus))
    for done in range(1, iterations + 1):
        g, shares = step(f[active], taus[active])
        errors = np.abs(shares / items - 1 / f.shape[1]).sum(1)
        for row, (which, error) in enumerate(zip(active.tolist(), errors.tolist(), strict=True)):
            if error <= tol or done == iterations:
                balances[which] = Balance(f[which].copy(), g[row], done, error, error <= tol)
        active = active[errors > tol]
        shares = shares[errors > tol]
        if not len(active):
            break
        f[active] -= taus[active, None] * np.log(shares)
    return [balances[which] for which in range(len(taus))]


NEIGHBORS = 64


class SinkhornDiagnostics(NamedTuple):
    """The end of the iteration; all of it None for a fit from its stored potentials.

    items: gallery items (and target bank) of the iteration. marginal_error: that of `Balance`.
    converged: whether it is at most tol. scores: how the iteration got its scores.
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

    f and b are such that exp((s(q_i, r) + f_i − b(r)) / tau) has uniform marginals over bank ×
    gallery. Items that came later need `FittedBias.new_bias`: the formula corrects them too much,
    since the others have not made room for them.

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
        whole_number("iterations", self.iterations, at_most=MOST_ITERATIONS)

    @property
    def needs_gallery(self) -> bool:
        return True

    @property
    def potentials(self) -> int:
        return 1

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        return fit_together([self], bank, inputs)[0][0]

    def restore(
        self, bank: BankLike, potentials: npt.ArrayLike, *, target_bank: BankLike | None = None
    ) -> FittedBias:
        bank = QueryBank.of(bank)
        diagnostics = SinkhornDiagnostics(len(bank), bank.dim, None, None, None, None)
        return self.with_potentials(bank, check_potentials(bank, potentials, 1), diagnostics)

    @property
    def _fitted_on(self) -> int:
        if self.items is None:
            raise InvalidParameter(
                f"{self!r} does not say how many items it was fitted on: pass items=…"
            )
        return self.items

    def with_potentials(
        self, bank: QueryBank, potentials: Vectors, diagnostics: SinkhornDiagnostics
    ) -> FittedBias:
        tau = self.tau_of()
        f = potentials[:, 0]

        def of_vectors(items: Vectors) -> Numbers:
            return logsumexp(items, bank.vectors, tau, f, device=self.device)

        def of_products(products: Numbers) -> Numbers:
            return logsumexp_of(products + f, tau)

        def new_of_vectors(items: Vectors) -> Numbers:
            parts = np.array_split(items, -(-len(items) * len(bank) // MOST_PRODUCTS))
            return np.concatenate([new_of_products(part @ bank.vectors.T) for part in parts])

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
    """`Sinkhorn` over bank × [gallery; target bank], for a bank whose queries ask for items outside
    the gallery.

    The target bank has items of the gallery's kind, ideally those that the bank's queries ask for.
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
    """Return fits of estimators that differ in tau and temperature only, each with its biases of
    the items: gallery, then target bank if it is needed. Each pass over the scores serves all.
    nearest: as `PairSteps` has them; by default computed.
    """
    one = estimators[0]
    items = np.asarray(inputs.gallery, np.float32)
    if one.needs_target_bank:
        items = np.concatenate(
            [items, require_target_bank(bank, inputs.target_bank, type(one).__name__)]
        )
    taus = np.array([estimator.tau_of() for estimator in estimators])
    iterations = one.iterations
    steps = AllScores(bank.vectors, items, one.device, "sparse" if one.neighbors else None)
    g = np.zeros((len(taus), len(items)), np.float32)
    ahead = [0] * len(taus)
    if inputs.start is not None:
        g, _ = steps.from_bank(
            np.tile(check_potentials(bank, inputs.start, 1)[:, 0], (len(taus), 1)), taus
        )
    if steps.scores == "sparse" and iterations > 1:
        k = one.neighbors or NEIGHBORS
        sides = (items, bank.vectors)
        near = PairSteps.nearest(*(nearest or (
            topk(rows, columns, min(k, len(columns)), device=one.device) for rows, columns in (sides, sides[::-1])
        )))  # fmt: skip
        firsts = iterate(
            near.from_bank, near.from_items(g, taus), taus, len(items), iterations - 1, one.tol
        )
        g = np.stack([first.g for first in firsts])
        ahead = [first.iterations for first in firsts]
        iterations = 1
    balances = iterate(
        steps.from_bank, steps.from_items(g, taus), taus, len(items), iterations, one.tol
    )
    fits = []
    for estimator, before, (f, own_g, done, error, converged) in zip(
        estimators, ahead, balances, strict=True
    ):
        diagnostics = SinkhornDiagnostics(
            len(bank), bank.dim, len(items), before + done, error, converged, steps.scores
        )
        fitted = replace(estimator, items=len(items))
        fits.append((fitted.with_potentials(bank, f[:, None], diagnostics), -own_g))
    return fits
