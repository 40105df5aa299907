"""The dynamic part of Dynamic Inverted Softmax (QB-Norm, Bogolin et al., CVPR 2022), over any estimator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from milvus_hubness.kernels import topk
from milvus_hubness.kernels.arguments import whole_number

Hits = TypeVar("Hits")


@dataclass(frozen=True)
class DynamicGate:
    """Correct a query only if its raw nearest item lies in the activation set.

    k: an item is activated when it is among the k nearest of some bank query. With InvertedSoftmax this is
    the paper's DIS.
    """

    k: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", whole_number("k", self.k))

    def activated(self, bank: npt.ArrayLike, gallery: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """(n,) which rows of gallery (n, d) are among the k nearest of a row of bank (m, d) by inner product.

        Raises DimensionMismatch, and BankTooSmall where the gallery has fewer than k items.
        """
        items = np.asarray(gallery, np.float32)
        nearest = topk(np.asarray(bank, np.float32), items, self.k).indices
        flags = np.zeros(len(items), bool)
        flags[np.unique(np.asarray(nearest))] = True
        return flags


def gate(
    raw: Sequence[Hits],
    corrected: Sequence[Hits],
    raw_best: Iterable[Hashable | None],
    activated: AbstractSet[Hashable],
) -> list[Hits]:
    """For each query the corrected hits if its raw best item is activated, else the raw ones."""
    return [
        after if best in activated else before
        for before, after, best in zip(raw, corrected, raw_best, strict=True)
    ]
