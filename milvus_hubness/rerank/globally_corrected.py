"""Globally-Corrected retrieval (Dinu, Lazaridou and Baroni, ICLR 2015 workshop, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milvus_hubness.kernels.arguments import whole_number


@dataclass(frozen=True)
class GloballyCorrected:
    """Rank candidates by the place that the query takes among the bank's queries, seen from the item.

    GC(q, r) = Rank_r(q) − s(q, r), ascending; Rank_r(q) counts the bank queries that r is nearer to than to
    q, and the score breaks ties. candidates: how many items of the raw search are looked at.
    """

    candidates: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", whole_number("candidates", self.candidates))

    def order(
        self, scores: npt.ArrayLike, items: npt.ArrayLike, bank: npt.ArrayLike
    ) -> npt.NDArray[np.int64]:
        """(c,) the order of one query's candidates, best first.

        scores (c,) s(q, r) of the candidates; items (c, d) and bank (m, d) with s as their inner product.
        """
        own = np.asarray(scores, np.float64)
        others = np.asarray(items, np.float32) @ np.asarray(bank, np.float32).T
        places = (others > own[:, None]).sum(axis=1)
        return np.lexsort((-own, places))
