"""Distribution Normalization (Zhou et al., NeurIPS 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators.base import Estimator, FitInputs, FittedBias
from milvus_hubness.correction.kernels import topk_mean


@dataclass(frozen=True)
class DistributionNormalization(Estimator, alias="dn"):
    """b(r) = lam · mean(bank) · r.

    The paper subtracts lam = ½ of the mean from both sides, (q − lam·μ_q)·(r − lam·μ_r). Its terms
    other than b(r) depend on the query alone and change no ranking.
    """

    lam: float = 0.5
    """Share of the bank's mean to subtract; the paper's is ½."""

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        # The mean of all products: of vectors that is the product with the mean, in float64.
        return self._fitted(
            bank,
            lambda items: self.lam * topk_mean(items, bank.vectors, len(bank)),
            of_products=lambda products: self.lam * products.mean(1, dtype=np.float64),
        )
