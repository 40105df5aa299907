"""Cross-domain Similarity Local Scaling (Conneau et al., ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank
from milvus_hubness.estimators.base import BankDiagnostics, FittedBias, no_potentials
from milvus_hubness.estimators.nearest import Bounded, Nearest, Needs, mean_of_largest
from milvus_hubness.kernels import topk_mean
from milvus_hubness.kernels.operands import whole_number


@dataclass(frozen=True)
class CSLS:
    """b(r) = ½ · mean of the k largest inner products of r with the bank.

    CSLS(q, r) = 2·s(q, r) − r_T(q) − r_S(r). b(r) is half of it, without the query's own term, which changes
    no ranking.
    """

    k: int = 10
    device: str = field(default="auto", repr=False, compare=False)

    needs_gallery: ClassVar[bool] = False
    needs_target_bank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", whole_number("k", self.k))

    @property
    def needs(self) -> Needs:
        """The k nearest queries."""
        return Needs(queries=self.k)

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """Fit on the bank. Raises BankTooSmall if the bank has fewer than k queries."""
        bank = QueryBank.of(bank)
        bank.require(at_least=self.k)
        return FittedBias(
            self,
            bank,
            lambda items: 0.5 * topk_mean(items, bank.vectors, self.k, device=self.device),
            BankDiagnostics(len(bank), bank.dim),
            no_potentials(bank),
        )

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """Return exact biases. Raises BankTooSmall for fewer than k nearest."""
        return Bounded(0.5 * mean_of_largest(queries, self.k), np.zeros(len(queries.scores)))
