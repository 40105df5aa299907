"""Inverted Softmax over a query bank.

Smith et al., ICLR 2017; with a bank, QB-Norm (Bogolin et al., CVPR 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators.base import Estimator, FitInputs, FittedBias
from milvus_hubness.correction.estimators.products import logsumexp_of
from milvus_hubness.correction.kernels import logsumexp


@dataclass(frozen=True)
class InvertedSoftmax(Estimator, alias="is"):
    """b(r) = tau · log Σ_i exp(s(q_i, r) / tau) over the bank.

    The paper divides exp(s/tau) by that sum; tau times the logarithm of the quotient is s − b.
    """

    tau: float | None = None
    """In units of the score; 0.05 is the paper's β = 20. Towards 0, only the nearest bank query
    counts."""
    temperature: float | None = None
    """Used in place of tau, in units of the spread of scores; 0.5 by default."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_temperatures(temperature=0.5)

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        tau = self.tau_of()
        return self._fitted(
            bank,
            lambda items: logsumexp(items, bank.vectors, tau, device=self.device),
            of_products=lambda products: logsumexp_of(products, tau),
        )
