"""Dual Inverted Softmax (Wang, Jian and Xue, Balance Act / DBNorm, EMNLP 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    BankDiagnostics,
    Estimator,
    FitInputs,
    FittedBias,
    require_target_bank,
)
from milvus_hubness.correction.kernels import logsumexp


@dataclass(frozen=True)
class DualInvertedSoftmax(Estimator, alias="dualis"):
    """b(r) = λ · ( log Σ_i exp(s(q_i, r) / tau_query) + log Σ_j exp(s(t_j, r) / tau_target) ).

    q_i from the bank, t_j from the target bank, λ = tau_query · tau_target / (tau_query +
    tau_target): the paper multiplies the two inverted softmaxes, and λ times the logarithm of the
    product is s − b. If both temperatures are equal, similar items lose their own queries.
    """

    tau_query: float | None = None
    """In units of the score."""
    tau_target: float | None = None
    """In units of the score."""
    temperature_query: float | None = None
    """Used in place of tau_query, in units of the spread of the bank's scores; 0.5 by default."""
    temperature_target: float | None = None
    """Used in place of tau_target, in units of the spread of the bank's scores; 25 by default."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_temperatures(temperature_query=0.5, temperature_target=25.0)

    @property
    def needs_target_bank(self) -> bool:
        return True

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        # Under L2 a target as a query differs from itself as an item, and here it takes a query's
        # place in the products.
        targets = require_target_bank(
            bank, inputs.target_bank, type(self).__name__, as_queries=True
        )
        tau_query = self.tau_of("tau_query")
        tau_target = self.tau_of("tau_target")

        # `logsumexp` is tau · log Σ, so the factors are λ/tau_query and λ/tau_target, whose sum
        # is 1.
        share = tau_target / (tau_query + tau_target)

        def of_vectors(items: Vectors) -> npt.NDArray[Any]:
            to_queries = logsumexp(items, bank.vectors, tau_query, device=self.device)
            to_targets = logsumexp(items, targets, tau_target, device=self.device)
            return share * to_queries + (1 - share) * to_targets

        return self._fitted(bank, of_vectors, BankDiagnostics(len(bank), bank.dim, len(targets)))
