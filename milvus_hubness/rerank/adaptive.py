"""What a client asks of a re-ranker that adapts the space to each query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@runtime_checkable
class Adaptive(Protocol):
    """A learned stage after the corrected search, as `quari.QuariReranker` is.

    candidates: how many items of the corrected search are looked at. correction: β, what of the bias that the
    search subtracted is subtracted from the adapted scores too. direct: there are no candidates;
    `direct_queries` are asked in the place of the queries.
    """

    @property
    def candidates(self) -> int: ...

    @property
    def correction(self) -> float: ...

    @property
    def direct(self) -> bool: ...

    def expect_dim(self, dim: int) -> None:
        """Raises DimensionMismatch unless it is for vectors of this dimension."""

    def scores(self, queries: Floats, items: Sequence[Floats]) -> list[Floats]:
        """For each query (m, d) the scores (c_i,) of its own items, m arrays (c_i, d); more is better."""

    def direct_queries(self, queries: Floats) -> Floats:
        """(m, d) what to ask the index in the place of queries (m, d)."""
