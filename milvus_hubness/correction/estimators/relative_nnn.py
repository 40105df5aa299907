"""Nearest Neighbor Normalization on scores relative to what each bank query finds.

A method of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    Estimator,
    FitInputs,
    FittedBias,
    require_gallery,
)
from milvus_hubness.correction.estimators.products import Numbers, topk_mean_of
from milvus_hubness.correction.kernels import topk_mean
from milvus_hubness.correction.kernels.rows import with_column


@dataclass(frozen=True)
class RelativeNNN(Estimator, alias="relative"):
    """b(r) = mean of the k largest s(q_i, r) − discount · f_i.

    f_i is the mean of q_i's `finds` best item scores.

    A query that is near to all items says less about one of them: CSLS (Conneau et al., ICLR 2018)
    subtracts r_T(q) in the same way, and NNN (Chowdhury et al., EMNLP 2024) is the case discount =
    0. The fit raises BankTooSmall if the bank has fewer than k queries; new items never need a
    refit. Under L2, s is q·r − ½‖r‖².
    """

    k: int = 8
    """How many bank queries count, 1 ≤ k ≤ |bank|."""
    discount: float = 0.5
    """Share of f_i that is subtracted from the scores of query i."""
    finds: int = 10
    """How many of a bank query's best items f_i is the mean of."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    @property
    def needs_gallery(self) -> bool:
        return True

    @property
    def potentials(self) -> int:
        return 1

    def gallery_scores(self, potentials: Vectors) -> Vectors | None:
        # Without a discount, the scores are in none of the potentials.
        if not self.discount:
            return None
        return np.asarray(potentials[:, 0] / -self.discount, np.float32)

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        bank.require(at_least=self.k)
        items = require_gallery(bank, inputs.gallery, type(self).__name__)
        count = min(self.finds, len(items))
        finds = topk_mean(bank.vectors, items, count, device=self.device)
        return self.with_finds(bank, finds)

    def with_finds(self, bank: QueryBank, finds: npt.NDArray[np.floating]) -> FittedBias:
        """Return the fit of bank queries with these f (m,)."""
        # Rounded as they are stored, so that the fit and its restoration give the same biases.
        potentials = (-self.discount * finds).astype(np.float32)[:, None]
        return self._restore(bank, potentials, None)

    def _restore(
        self, bank: QueryBank, potentials: Vectors, target_bank: BankLike | None
    ) -> FittedBias:
        k = bank.nearest_of(self.k)

        # A column of ones in the items adds the query's potential to its score, so one kernel is
        # enough: the largest sums are not those of the largest products.
        relative = with_column(bank.vectors, potentials[:, 0])

        def of_vectors(items: Vectors) -> npt.NDArray[np.float32]:
            return topk_mean(with_column(items, 1), relative, k, device=self.device)

        def of_products(products: Numbers) -> Numbers:
            return topk_mean_of(products + potentials[:, 0], k)

        fitted = self._fitted(bank, of_vectors, of_products=of_products)
        return replace(fitted, potentials=potentials)
