"""Dual Inverted Softmax (Wang, Jian and Xue, Balance Act / DBNorm, EMNLP 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy.typing as npt

from milvus_hubness.banks import QueryBank, Vectors
from milvus_hubness.estimators.base import FittedBias, TwoBankDiagnostics, no_potentials
from milvus_hubness.estimators.inputs import require_target_bank
from milvus_hubness.kernels import logsumexp
from milvus_hubness.kernels.arguments import positive_number


@dataclass(frozen=True)
class DualInvertedSoftmax:
    """b(r) = λ · ( log Σ_i exp(s(q_i, r) / tau_query) + log Σ_j exp(s(t_j, r) / tau_target) ).

    q_i from the bank, t_j from the target bank, λ = tau_query · tau_target / (tau_query + tau_target): the
    paper multiplies the two inverted softmaxes, and λ times the logarithm of the product is s − b.
    """

    tau_query: float = 0.05
    tau_target: float = 0.05
    device: str = field(default="auto", repr=False, compare=False)

    needs_gallery: ClassVar[bool] = False
    needs_target_bank: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau_query", positive_number("tau_query", self.tau_query))
        object.__setattr__(self, "tau_target", positive_number("tau_target", self.tau_target))

    def fit(
        self,
        bank: QueryBank,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: npt.ArrayLike | QueryBank | None = None,
    ) -> FittedBias:
        """Raises InvalidInput without a target bank, DimensionMismatch if it does not fit the bank."""
        targets = require_target_bank(bank, target_bank, "DualInvertedSoftmax")
        share = self.tau_target / (self.tau_query + self.tau_target)

        def formula(items: Vectors) -> npt.NDArray[Any]:
            to_queries = logsumexp(items, bank.vectors, self.tau_query, device=self.device)
            to_targets = logsumexp(items, targets, self.tau_target, device=self.device)
            return share * to_queries + (1 - share) * to_targets

        diagnostics = TwoBankDiagnostics(len(bank), len(targets), bank.dim)
        return FittedBias(self, bank, formula, diagnostics, no_potentials(bank))
