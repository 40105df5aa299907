"""Cross-domain Similarity Local Scaling (Conneau et al., ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators.base import Estimator, FitInputs, FittedBias
from milvus_hubness.correction.estimators.products import topk_mean_of
from milvus_hubness.correction.kernels import topk_mean


@dataclass(frozen=True)
class CSLS(Estimator, alias="csls"):
    """b(r) = ½ · mean of the k largest inner products of r with the bank.

    CSLS(q, r) = 2·s(q, r) − r_T(q) − r_S(r). b(r) is half of it, without the query's own term,
    which changes no ranking. The fit raises BankTooSmall if the bank has fewer than k queries.
    """

    k: int = 10
    """How many bank queries count, 1 ≤ k ≤ |bank|."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        k = bank.nearest_of(self.k)
        return self._fitted(
            bank,
            lambda items: 0.5 * topk_mean(items, bank.vectors, k, device=self.device),
            of_products=lambda products: 0.5 * topk_mean_of(products, k),
        )
