"""Biases less the log of the demand that a log of queries shows.

A method of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    DEMAND_TEMPERATURE,
    Estimator,
    FitInputs,
    FittedBias,
    Formula,
    check_potentials,
    require_gallery,
    score_spread,
)
from milvus_hubness.correction.estimators.blend import Blend
from milvus_hubness.correction.estimators.products import Numbers, logsumexp_of
from milvus_hubness.correction.kernels import logsumexp
from milvus_hubness.correction.kernels.checks import positive_number
from milvus_hubness.errors import InvalidParameter

EVEN_DISPERSION = 3.0
"""Dispersion up to which demand counts as even: noise in the grouping of copies adds to that of chance,
which is 1. Chosen on the tasks of the choice in `python -m benchmarks.demand`."""


class DemandDiagnostics(NamedTuple):
    """Diagnostics of WithDemand."""

    of_biases: Any
    """Those of the estimator of the biases."""
    dispersion: float | None
    """Variance of the queries of a group over their mean; 1 if all are wanted equally often, as the
    counts then have a Poisson distribution. None for a restored fit."""


@dataclass(frozen=True)
class WithDemand(Estimator, alias="demand"):
    """b(r) = b_e(r) − factor · log( n(r) + added ), with the estimator e of the biases b_e.

    n(r) = Σ_i n_i · exp((s(q_i, r) − b_e(r) − z_i) / tau) shares the n_i queries of each group among
    the items; z_i = tau · log Σ_r exp((s(q_i, r) − b_e(r)) / tau) over the gallery makes the shares
    of a group add up to 1.

    In theory a score is s − b + λ·log p, with the share p of all queries that want the item. A bank
    that is a log shows p itself. factor = weight · spread of scores · (1 − EVEN_DISPERSION/dispersion),
    at least 0: where all groups are wanted about equally often, it is 0.

    No group counts for more than `largest` groups of mean size.
    """

    estimators: Sequence[Estimator] = (Blend(),)
    """One: that of the biases b_e."""
    weight: float = 0.25
    """λ, in units of the spread of scores."""
    added: float = 3.0
    """Queries that every item has besides those that are counted: few queries say little."""
    largest: float = 8.0
    """The most that n_i may be, as a multiple of the mean of all groups: what is sent more often may
    come from a machine. A large number is for a log of which each query is known to be a user's."""
    tau: float | None = None
    """Temperature of the shares, in units of the score."""
    temperature: float | None = None
    """Used in place of tau, in units of the spread of scores; 0.2 by default."""
    factor: float | None = field(default=None, repr=False)
    """λ in units of the score, which a fit measures."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_temperatures(temperature=DEMAND_TEMPERATURE)
        positive_number("added", self.added)
        if self.weight < 0:
            raise InvalidParameter(f"weight must be a number from 0 up, not {self.weight}")
        if self.largest < 1:
            raise InvalidParameter(f"largest must be a number from 1 up, not {self.largest}")

        # JSON has lists, but a frozen estimator is hashable only with tuples.
        estimators = self.estimators
        is_list = isinstance(estimators, Sequence)
        if not is_list or len(estimators) != 1 or not isinstance(estimators[0], Estimator):
            raise InvalidParameter(f"demand goes with one estimator of biases, not {estimators!r}")
        object.__setattr__(self, "estimators", tuple(estimators))

    @property
    def of_biases(self) -> Estimator:
        """The estimator of the biases."""
        return self.estimators[0]

    @property
    def needs_gallery(self) -> bool:
        return True

    @property
    def needs_target_bank(self) -> bool:
        return self.of_biases.needs_target_bank

    @property
    def potentials(self) -> int:
        return self.of_biases.potentials + 1

    @property
    def share(self) -> float:
        return self.factor_on_formula * self.of_biases.share

    def in_full(self) -> WithDemand:
        return replace(super().in_full(), estimators=(self.of_biases.in_full(),))

    def gallery_scores(self, potentials: Vectors) -> Vectors | None:
        return self.of_biases.gallery_scores(potentials[:, :-1])

    def unmeasured(self) -> WithDemand:
        return replace(super().unmeasured(), estimators=(self.of_biases.unmeasured(),))

    def clamped(self, bank_size: int) -> WithDemand:
        return replace(self, estimators=(self.of_biases.clamped(bank_size),))

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        queries = inputs.queries
        start = None
        if inputs.start is not None:
            potentials = check_potentials(bank, inputs.start, self.potentials)
            start = queries.of_queries(potentials[:, :-1])

        # The bias is fitted on the queries themselves: near copies, of which the condensed bank has
        # only the means, count in the agreement of its halves.
        items = require_gallery(bank, inputs.gallery, type(self).__name__)
        fitted = self.of_biases.fit(
            queries, gallery=items, target_bank=inputs.target_bank, start=start
        )
        shares = logsumexp(
            bank.vectors, items, self.tau_of(), -fitted.bias(items), device=self.device
        )
        return self.with_shares(fitted, shares, score_spread(bank, items))

    def with_shares(
        self, fitted: FittedBias, shares: npt.NDArray[np.floating[Any]], spread: float
    ) -> FittedBias:
        """Return the fit with these z (m,) of the bank. spread: of its scores."""
        counts = self._counts_of(fitted.bank)
        measured = replace(self._with_factor(counts, spread), estimators=(fitted.estimator,))
        of_groups = self._group_potentials(counts, shares)
        potentials = np.column_stack([fitted.potentials, of_groups])
        diagnostics = DemandDiagnostics(fitted.diagnostics, dispersion_of(counts))
        return measured._less_demand(fitted, potentials, diagnostics)

    def of_gallery(self, biases: Vectors, bank: QueryBank, items: Vectors) -> Vectors:
        """Return the biases (n,) of a gallery (n, d), given those of its estimator of biases.

        They are those that a fit on this bank has, which would compute the others again; where demand
        is even, the very array that is given.
        """
        condensed = bank.condensed
        counts = self._counts_of(condensed)
        # Before the spread of scores is measured, which takes long.
        if not self._with_factor(counts, 1.0).factor:
            return biases

        spread = score_spread(condensed, items)
        demanded = self.measured(condensed, items)._with_factor(counts, spread)
        if not demanded.factor:
            return biases

        tau = demanded.tau_of()
        shares = logsumexp(condensed.vectors, items, tau, -biases, device=self.device)
        of_groups = demanded._group_potentials(counts, shares)
        sums = logsumexp(items, condensed.vectors, tau, of_groups, device=self.device)
        return np.asarray(demanded._biases_less_demand(biases, sums), np.float32)

    def _counts_of(self, bank: QueryBank) -> npt.NDArray[np.float64]:
        """Return the queries of each group of a condensed bank that count, (m,)."""
        if bank.counts is None:
            return np.ones(len(bank))
        return np.asarray(np.minimum(bank.counts, self.largest * bank.counts.mean()))

    def _with_factor(self, counts: npt.NDArray[Any], spread: float) -> WithDemand:
        """Return the estimator with its factor, for the queries of each group, (m,), and the spread
        of scores.
        """
        uneven = 1 - EVEN_DISPERSION / max(EVEN_DISPERSION, dispersion_of(counts))
        return replace(self, factor=self.weight * spread * uneven)

    def _group_potentials(
        self, counts: npt.NDArray[Any], shares: npt.NDArray[np.floating[Any]]
    ) -> Vectors:
        """Return tau · log n_i − z_i of the groups, (m,)."""
        return np.asarray(self.tau_of() * np.log(counts) - shares, np.float32)

    def _biases_less_demand(self, biases: Numbers, sums: Numbers) -> Numbers:
        """Return the biases (n,) less the demand.

        sums: (n,), tau · log Σ_i n_i · exp((s(q_i, r) − z_i) / tau).
        """
        log_count = (sums.astype(np.float64) - biases) / self.tau_of()
        factor = self.factor or 0.0
        return np.asarray(biases - factor * np.logaddexp(log_count, np.log(self.added)))

    def _restore(self, bank: QueryBank, potentials: Vectors, target_bank: Any) -> FittedBias:
        if self.factor is None:
            raise InvalidParameter(
                f"{self!r} has no factor yet: fit it, or take the estimator of the fit"
            )
        fitted = self.of_biases.restore(bank, potentials[:, :-1], target_bank=target_bank)
        return self._less_demand(fitted, potentials, DemandDiagnostics(fitted.diagnostics, None))

    def _less_demand(
        self, fitted: FittedBias, potentials: Vectors, diagnostics: DemandDiagnostics
    ) -> FittedBias:
        bank = fitted.bank
        tau = self.tau_of()
        of_groups = np.ascontiguousarray(potentials[:, -1])

        def formula(*, are_new: bool) -> Formula:
            def of_vectors(items: Vectors) -> Numbers:
                biases = fitted.new_bias(items) if are_new else fitted.bias(items)
                # Without demand there is no reason for another pass over the bank.
                if not self.factor:
                    return biases
                sums = logsumexp(items, bank.vectors, tau, of_groups, device=self.device)
                return self._biases_less_demand(biases, sums)

            def of_products(products: Numbers) -> Numbers:
                biases = fitted.bias_of_products(products, are_new=are_new)
                return self._biases_less_demand(biases, logsumexp_of(products + of_groups, tau))

            return Formula(of_vectors, of_products if fitted.takes_products else None)

        return FittedBias(
            estimator=self,
            bank=bank,
            formula=formula(are_new=False),
            diagnostics=diagnostics,
            potentials=potentials,
            new_formula=formula(are_new=True),
        )


DEFAULT_ESTIMATOR = WithDemand()
"""What applies where nobody chooses a method and no labels choose one: with even demand, the default
Blend."""


def dispersion_of(counts: npt.NDArray[np.floating[Any]]) -> float:
    """Return the variance of the counts (m,) over their mean.

    It is 1 if the counts have a Poisson distribution, as of queries that are all wanted equally often.
    """
    return float(counts.var() / counts.mean())
