"""Inverted Softmax (Smith et al., ICLR 2017), over a query bank (QB-Norm; Bogolin et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank
from milvus_hubness.estimators.base import (
    BankDiagnostics,
    FittedBias,
    has_temperature,
    measured,
    no_potentials,
    set_temperatures,
    tau_of,
)
from milvus_hubness.estimators.nearest import ACCURACY, LEADING, Bounded, Nearest, Needs, bounded_logsumexp
from milvus_hubness.kernels import logsumexp


@dataclass(frozen=True)
class InvertedSoftmax:
    """b(r) = tau · log Σ_i exp(s(q_i, r) / tau) over the bank.

    The paper divides exp(s/tau) by that sum; tau times the logarithm of the quotient is s − b.

    tau: in units of the score; 0.05 is the paper's β = 20. Towards 0, only the nearest bank query counts.
    temperature: used in place of tau, in units of the spread of scores; 0.5 by default.
    """

    tau: float | None = None
    temperature: float | None = None
    device: str = field(default="auto", repr=False, compare=False)

    needs_target_bank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_temperatures(self, {"temperature": 0.5})

    @property
    def needs_gallery(self) -> bool:
        """True only to measure the spread of scores."""
        return has_temperature(self)

    @property
    def needs(self) -> Needs:
        """The nearest queries, as many as the error requires."""
        return Needs(queries=LEADING, tolerance=ACCURACY * tau_of(self))

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """Fit on the bank; the gallery is only used to measure the spread of its scores.

        Raises InvalidInput without a gallery if there is a temperature.
        """
        bank = QueryBank.of(bank)
        fitted = measured(self, bank, gallery)
        tau = tau_of(fitted)
        return FittedBias(
            fitted,
            bank,
            lambda items: logsumexp(items, bank.vectors, tau, device=self.device),
            BankDiagnostics(len(bank), bank.dim),
            no_potentials(bank),
        )

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """Return the log-sum-exp over the nearest.

        The error bound assumes that the n − N others score as the last of these.
        """
        return bounded_logsumexp(queries, tau_of(self))
