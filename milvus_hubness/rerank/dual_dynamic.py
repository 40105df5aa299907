"""The gate of Dual Dynamic Inverted Softmax (DualDIS; Wang, Jian and Xue, Balance Act / DBNorm, EMNLP 2023),
over any estimator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milvus_hubness.kernels.arguments import whole_number
from milvus_hubness.rerank.dynamic import DynamicGate


@dataclass(frozen=True)
class DualDynamicGate:
    """Correct a query only if its raw nearest item lies in one of two activation sets.

    k_query: an item is in the first when it is among the k_query nearest of some bank query. k_target: in the
    second when it is among the k_target nearest of some item of the target bank. A target bank that holds the
    gallery's own items would activate them all.

    The authors' code (`db_norm`, DBNorm/dbnorm.py in yimuwangcs/Better_Cross_Modal_Retrieval) multiplies two
    dynamic inverted softmaxes, each of one bank with its own set. Where a set lacks the raw nearest item of
    q, its factor is the raw score s(q, r):

        in both        IS_bank(q, r) · IS_targets(q, r)
        first only     IS_bank(q, r) · s(q, r)
        second only    s(q, r) · IS_targets(q, r)
        in neither     s(q, r)²

    DualInvertedSoftmax, whose s − b is λ times the logarithm of the first line, behind this gate ranks as
    the first line does, and as the last does where s ≥ 0. It departs in the two between, each of which would
    need a bias of its own: there it corrects by both banks, not by one.
    """

    k_query: int = 1
    k_target: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "k_query", whole_number("k_query", self.k_query))
        object.__setattr__(self, "k_target", whole_number("k_target", self.k_target))

    def activated(
        self, bank: npt.ArrayLike, gallery: npt.ArrayLike, target_bank: npt.ArrayLike
    ) -> npt.NDArray[np.bool_]:
        """(n,) which rows of gallery (n, d) are in a set: among the nearest, by inner product, of a row of
        bank (m, d) or of target_bank (t, d).

        Raises DimensionMismatch, and BankTooSmall where the gallery has fewer than k_query or k_target items.
        """
        by_queries = DynamicGate(self.k_query).activated(bank, gallery)
        return by_queries | DynamicGate(self.k_target).activated(target_bank, gallery)
