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
    product is s − b.

    tau_query, tau_target: in units of the score. temperature_query, temperature_target: used in
    place of them, in units of the spread of the bank's scores; 0.5 and 25 by default. If both are
    equal, similar items lose their own queries.
    """

    tau_query: float | None = None
    tau_target: float | None = None
    temperature_query: float | None = None
    temperature_target: float | None = None
    device: str = field(default="auto", repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_temperatures(temperature_query=0.5, temperature_target=25.0)

    @property
    def needs_target_bank(self) -> bool:
        return True

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        targets = require_target_bank(
            bank, inputs.target_bank, type(self).__name__, as_queries=True
        )
        by_query, by_target, share = self._taus

        def formula(items: Vectors) -> npt.NDArray[Any]:
            to_queries = logsumexp(items, bank.vectors, by_query, device=self.device)
            to_targets = logsumexp(items, targets, by_target, device=self.device)
            return share * to_queries + (1 - share) * to_targets

        return self._fitted(bank, formula, BankDiagnostics(len(bank), bank.dim, len(targets)))

    @property
    def _taus(self) -> tuple[float, float, float]:
        """tau_query, tau_target, and λ / tau_query; the share of the targets is the rest of 1."""
        query = self.tau_of("tau_query")
        target = self.tau_of("tau_target")
        return query, target, target / (query + target)
