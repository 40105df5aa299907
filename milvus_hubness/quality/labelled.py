"""Labelled queries: their vectors and right items, and what is measured on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors, as_vectors
from milvus_hubness.correction.kernels.rows import as_queries
from milvus_hubness.errors import InvalidInput, name_some
from milvus_hubness.quality.measures import ONCE_EACH, Sendings
from milvus_hubness.quality.retrieval import R_AT_1, Measure, PerQuery
from milvus_hubness.quality.right_items import Grades, Positives, RightItems

LARGEST_WEIGHT = 1e20
"""Largest weight of a labelled pair."""


@dataclass(frozen=True, eq=False)
class LabelledQueries:
    """n queries, the items of a gallery that are right for each, and what is measured on them."""

    queries: Vectors
    """(n, d)."""

    right: RightItems

    sendings: Sendings = ONCE_EACH
    """How often users send each query."""

    measure: Measure = R_AT_1
    """What decides: the measure of retrieval, of what users send."""

    @classmethod
    def of(
        cls,
        queries: npt.ArrayLike,
        positives: Positives,
        grades: Grades | None = None,
        *,
        weights: npt.ArrayLike | None = None,
        own: npt.NDArray[np.int64] | None = None,
        measure: str | Measure = R_AT_1,
    ) -> LabelledQueries:
        """Return labelled queries, without those of weight 0, which nobody sends.

        queries: (n, d). positives: for each query the number of its right item, or several. grades: for
        each query how right these are; by default equally. weights: (n,), how often users send each;
        by default equally often. own: (n,), see `RightItems.own`. measure: R@k, MRR, MAP or nDCG@k.
        Raises InvalidInput, NonFiniteVectors.
        """
        vectors = as_queries(as_vectors(queries, "the queries"))
        right = RightItems.of(positives, grades, own=own)
        if len(right) != len(vectors):
            raise InvalidInput(
                f"positives cover {len(right)} queries, but {len(vectors)} queries were passed"
            )
        chosen = Measure.of(measure)
        if weights is None:
            return cls(vectors, right, measure=chosen)

        checked = checked_weights(weights, len(vectors))
        labelled = cls(vectors, right, Sendings(weights=checked), chosen)
        return labelled.take(np.flatnonzero(checked > 0))

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def weights(self) -> PerQuery:
        """(n,) above 0, what one sending of each query weighs."""
        return np.ones(len(self)) if self.sendings.weights is None else self.sendings.weights

    def take(self, numbers: npt.NDArray[np.int64]) -> LabelledQueries:
        """Return some of the queries, (m,) their numbers."""
        return replace(
            self,
            queries=self.queries[numbers],
            right=self.right.take(numbers),
            sendings=self.sendings.of(numbers),
        )

    def as_sent(self) -> LabelledQueries:
        """Return each query as often as it was sent.

        A log is a sample of what users send, and each sending is one observation: an interval for a
        popular query that was sent a hundred times is narrower than for one that was sent once.
        Weights without repeats say nothing of the number of observations, and stay.
        """
        counts = self.sendings.counts
        if counts is None:
            return self
        repeated = self.take(np.repeat(np.arange(len(self)), counts))
        return replace(repeated, sendings=repeated.sendings._replace(counts=None))


def checked_weights(weights: npt.ArrayLike, count: int) -> PerQuery:
    """Return the weights of labelled pairs, (count,). Raises InvalidInput."""
    try:
        values = np.asarray(weights)
    # Rows of unequal length.
    except ValueError:
        values = np.empty(0, object)
    if values.dtype.kind not in "iuf" or values.shape != (count,):
        raise InvalidInput(
            f"the weights of {count} pairs must be {count} numbers, not {values.dtype} of shape "
            f"{values.shape}"
        )
    # What is larger has squares and sums beyond float64, and figures that are no numbers.
    wrong = np.flatnonzero(~((values >= 0) & (values <= LARGEST_WEIGHT))).tolist()
    if wrong:
        raise InvalidInput(
            f"the weight of pair {name_some(wrong)} must be a number from 0 to {LARGEST_WEIGHT:g}: correct "
            "or remove these pairs"
        )
    if not values.any():
        raise InvalidInput(
            "the weights of all pairs are 0, so that nobody sends them: correct or remove them"
        )
    return values.astype(np.float64)
