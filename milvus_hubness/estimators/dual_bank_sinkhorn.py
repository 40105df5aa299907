"""Dual-bank Sinkhorn Normalization (DBSN; Pan et al., ACM Multimedia 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import BankLike, QueryBank
from milvus_hubness.estimators.base import FittedBias
from milvus_hubness.estimators.inputs import require_gallery, require_target_bank
from milvus_hubness.estimators.sinkhorn import Sinkhorn
from milvus_hubness.estimators.temperature import measured


@dataclass(frozen=True)
class DualBankSinkhorn(Sinkhorn):
    """`Sinkhorn` over bank × [gallery; target bank], for a bank whose queries ask for items elsewhere.

    The target bank holds items of the gallery's kind, best those that the bank's queries ask for.
    """

    needs_target_bank: ClassVar[bool] = True

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """As `Sinkhorn.fit`; raises InvalidInput without a target bank too."""
        bank = QueryBank.of(bank)
        items = require_gallery(bank, gallery, "DualBankSinkhorn")
        targets = require_target_bank(bank, target_bank, "DualBankSinkhorn")
        return measured(self, bank, items)._balanced(bank, np.concatenate([items, targets]), start)
