"""Inverted Softmax (Smith et al., ICLR 2017), over a query bank (QB-Norm; Bogolin et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy.typing as npt

from milvus_hubness.banks import QueryBank
from milvus_hubness.estimators.base import BankDiagnostics, FittedBias, no_potentials
from milvus_hubness.estimators.nearest import LEADING, Bounded, Nearest, Needs, bounded_logsumexp
from milvus_hubness.kernels import logsumexp
from milvus_hubness.kernels.arguments import positive_number


@dataclass(frozen=True)
class InvertedSoftmax:
    """b(r) = tau · log Σ_i exp(s(q_i, r) / tau) over the bank.

    The paper divides exp(s/tau) by that sum; tau times the logarithm of the quotient is s − b.
    tau: temperature; 0.05 is the paper's β = 20. Towards 0, only the nearest bank query counts.
    """

    tau: float = 0.05
    device: str = field(default="auto", repr=False, compare=False)

    needs_gallery: ClassVar[bool] = False
    needs_target_bank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", positive_number("tau", self.tau))

    @property
    def needs(self) -> Needs:
        """The nearest queries, as many as the error asks for."""
        return Needs(queries=LEADING)

    def fit(
        self,
        bank: QueryBank,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: npt.ArrayLike | QueryBank | None = None,
    ) -> FittedBias:
        """Nothing is learned from the gallery."""
        return FittedBias(
            self,
            bank,
            lambda items: logsumexp(items, bank.vectors, self.tau, device=self.device),
            BankDiagnostics(len(bank), bank.dim),
            no_potentials(bank),
        )

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """The sum over the nearest, and what n − N others that score as the last of these would add."""
        return bounded_logsumexp(queries, self.tau)
