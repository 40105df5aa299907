"""Distribution Normalization (Zhou et al., NeurIPS 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank
from milvus_hubness.estimators.base import BankDiagnostics, FittedBias, no_potentials
from milvus_hubness.estimators.nearest import Bounded, Nearest, Needs
from milvus_hubness.kernels.operands import finite_number


@dataclass(frozen=True)
class DistributionNormalization:
    """b(r) = lam · mean(bank) · r.

    The paper subtracts lam = ½ of the mean from both sides, (q − lam·μ_q)·(r − lam·μ_r). Its terms other than
    b(r) depend on the query alone and change no ranking.
    """

    lam: float = 0.5

    needs_gallery: ClassVar[bool] = False
    needs_target_bank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", finite_number("lam", self.lam))

    @property
    def needs(self) -> Needs:
        """The mean of all queries, and no nearest ones."""
        return Needs(mean=True)

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """Fit on the bank, of which only the mean is used."""
        bank = QueryBank.of(bank)
        mean = self.lam * bank.vectors.mean(0, dtype=np.float64)
        return FittedBias(
            self,
            bank,
            lambda items: items @ mean,
            BankDiagnostics(len(bank), bank.dim),
            no_potentials(bank),
        )

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """Return exact biases: mean(bank) · r is the mean score."""
        return Bounded(self.lam * queries.means, np.zeros(len(queries.means)))
