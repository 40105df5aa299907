"""Dual Inverted Softmax (Wang, Jian and Xue, Balance Act / DBNorm, EMNLP 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy.typing as npt

from milvus_hubness.banks import QueryBank, Vectors
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators.base import FittedBias, TwoBankDiagnostics, no_potentials
from milvus_hubness.estimators.inputs import require_asking_targets
from milvus_hubness.estimators.nearest import LEADING, Bounded, Nearest, Needs, bounded_logsumexp
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

    @property
    def needs(self) -> Needs:
        """The nearest queries and the nearest targets, as many as the error asks for."""
        return Needs(queries=LEADING, targets=LEADING)

    def fit(
        self,
        bank: QueryBank,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: npt.ArrayLike | QueryBank | None = None,
    ) -> FittedBias:
        """Raises InvalidInput without a target bank, DimensionMismatch if it does not fit the bank."""
        targets = require_asking_targets(bank, target_bank, "DualInvertedSoftmax")
        share = self._query_share

        def formula(items: Vectors) -> npt.NDArray[Any]:
            to_queries = logsumexp(items, bank.vectors, self.tau_query, device=self.device)
            to_targets = logsumexp(items, targets, self.tau_target, device=self.device)
            return share * to_queries + (1 - share) * to_targets

        diagnostics = TwoBankDiagnostics(len(bank), len(targets), bank.dim)
        return FittedBias(self, bank, formula, diagnostics, no_potentials(bank))

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """As `InvertedSoftmax.from_nearest` over both banks. Raises InvalidInput without targets."""
        if targets is None:
            raise InvalidInput("DualInvertedSoftmax needs the nearest of a target bank too: pass targets=…")
        share = self._query_share
        by_queries = bounded_logsumexp(queries, self.tau_query)
        by_targets = bounded_logsumexp(targets, self.tau_target)
        return Bounded(
            share * by_queries.biases + (1 - share) * by_targets.biases,
            share * by_queries.errors + (1 - share) * by_targets.errors,
        )

    @property
    def _query_share(self) -> float:
        """λ / tau_query; that of the targets is what is left of 1."""
        return self.tau_target / (self.tau_query + self.tau_target)
