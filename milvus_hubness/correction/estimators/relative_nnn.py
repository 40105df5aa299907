"""Nearest Neighbor Normalization on scores relative to what each bank query finds. A method of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    Estimator,
    FitInputs,
    FittedBias,
    check_potentials,
    score_spread,
)
from milvus_hubness.correction.estimators.nearest import (
    ACCURACY,
    LEADING,
    Bounded,
    Nearest,
    Needs,
    largest,
)
from milvus_hubness.correction.kernels import topk_mean

SMALLEST_TAU = 1e-300
"""The τ whose log-sum-exp is the largest potential."""


@dataclass(frozen=True)
class RelativeNNN(Estimator, alias="relative"):
    """b(r) = mean of the k largest s(q_i, r) − discount · f_i, f_i the mean of q_i's `finds` best item scores.

    A query that is near to all items says less about one of them: CSLS (Conneau et al., ICLR 2018) subtracts r_T(q)
    in the same way, and NNN (Chowdhury et al., EMNLP 2024) is the case discount = 0. The fit raises BankTooSmall if the
    bank has fewer than k queries; new items never need a refit. Under L2, s is q·r − ½‖r‖².

    spread: of the scores, measured in the fit; banks that are searched give biases to 1/300 of it.
    """

    k: int = 8
    discount: float = 0.5
    finds: int = 10
    spread: float | None = None
    device: str = field(default="auto", repr=False, compare=False)

    @property
    def needs_gallery(self) -> bool:
        return True

    @property
    def potentials(self) -> int:
        return 1

    @property
    def needs(self) -> Needs:
        tolerance = math.inf if self.spread is None else ACCURACY * self.spread
        return Needs(
            queries=max(self.k, LEADING), temperatures=(SMALLEST_TAU,), tolerance=tolerance
        )

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        bank.require(at_least=self.k)
        items = np.asarray(inputs.gallery, np.float32)
        finds = topk_mean(bank.vectors, items, min(self.finds, len(items)), device=self.device)
        return self.with_finds(bank, finds, score_spread(bank, items))

    def with_finds(
        self, bank: QueryBank, finds: npt.NDArray[np.floating], spread: float
    ) -> FittedBias:
        """Return the fit of bank queries with these f (m,)."""
        potentials = (-self.discount * finds).astype(np.float32)[:, None]
        return replace(self, spread=spread).restore(bank, potentials)

    def restore(
        self, bank: BankLike, potentials: npt.ArrayLike, *, target_bank: BankLike | None = None
    ) -> FittedBias:
        bank = QueryBank.of(bank)
        values = check_potentials(bank, potentials, 1)
        relative = np.hstack([bank.vectors, values])

        def formula(items: Vectors) -> npt.NDArray[np.float32]:
            rows = np.hstack([items, np.ones((len(items), 1), np.float32)])
            return topk_mean(rows, relative, self.k, device=self.device)

        return replace(self._fitted(bank, formula), potentials=values)

    def _from_nearest(self, queries: Nearest, targets: Nearest | None) -> Bounded:
        """Return means of the largest relative scores seen, and by how much others can raise them."""
        relative = largest(queries.scores + queries.potentials[..., 0], self.k)
        means = relative.mean(1)
        if not queries.rest:
            return Bounded(means, np.zeros(len(means)))
        highest = queries.scores[:, -1:] + queries.masses[0]
        return Bounded(means, np.maximum(0, highest - relative).mean(1))
