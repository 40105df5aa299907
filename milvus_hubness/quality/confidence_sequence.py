"""Confidence sequences: intervals that hold at all looks at once, however often and whenever one looks.

An ordinary 95% interval holds at one look that was planned before. Whoever looks each day and stops
at the first clear difference is wrong far more often than one time in twenty. The intervals here
are wider, by half or so, and the probability that any of them misses the true value is at most α.

The boundary is the two-sided normal mixture of Howard, Ramdas, McAuliffe and Sekhon (Annals of
Statistics 49, 2021), with an estimated variance as in the asymptotic confidence sequences of
Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Annals of Statistics 52, 2024). The empirical
Bernstein sequences, which need no estimate, are a third wider at 10,000 queries
(`benchmarks/experiment.py`), and need a bound on the sum of a unit, which a popular query has not.

No library is used. `confseq` is C++ that has to be built with Boost; `expectation` needs Python 3.12,
pandas and plotly, and is under the GPL. Neither has the difference of randomised arms with many
queries in a unit, which is the larger part of this file.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

TIGHTEST_AT = 10_000
"""Queries at which the intervals are tightest, next to the best possible at that number. At a tenth
of them and at ten times as many they are a quarter and a tenth wider than they could be."""
TYPICAL_VARIANCE = 0.15
"""Variance of a query's outcome for which that holds: that of a reciprocal rank. It changes where the
intervals are tightest, never whether they hold."""
PREDICTED_FROM = 5
"""Queries of average outcome that count in the prediction of a query, so that one that was sent
twice is predicted as an average one and one that was sent a hundred times by itself."""
FURTHEST = 1_000
"""Factor on the present number of queries up to which the number that is needed is computed."""


class Difference(NamedTuple):
    """The difference of two arms, treatment less control, and its confidence sequence."""

    estimate: float
    low: float
    """The lower bound of the interval."""
    high: float
    """The upper bound of the interval."""

    @property
    def half_width(self) -> float:
        """The smallest difference that the present number of queries can show."""
        return (self.high - self.low) / 2


class Sequence(NamedTuple):
    """How the interval of a difference narrows with further queries of the same kind."""

    queries: int
    """Those so far."""

    variance_per_query: float
    """Variance of the sum of the terms, over the number of queries."""

    scale: float
    """ρ of the mixture."""

    alpha: float

    def half_width(self, queries: float) -> float:
        """Return half of the width of the interval after so many queries."""
        return boundary(self.variance_per_query * queries, self.scale, self.alpha) / queries

    def queries_to_show(self, difference: float) -> int | None:
        """Return the number of queries from which on the interval around this leaves out zero.

        None if more than FURTHEST times the present number would be needed.
        """
        size = abs(difference)
        if self.half_width(self.queries) < size:
            return self.queries
        too_few = self.queries
        enough = FURTHEST * self.queries
        if self.half_width(enough) >= size:
            return None

        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.half_width(middle) < size:
                enough = middle
            else:
                too_few = middle
        return enough


def boundary(variance: float, scale: float, alpha: float) -> float:
    """Return the bound that |S| crosses at any time with probability at most α.

    S is a sum of independent terms of mean 0, variance V that of the sum so far. The bound is
    √((V + ρ) log((V + ρ) / (ρ α²))): the likelihood ratio of a drift against none, as a mixture over
    drifts of N(0, 1/ρ), is a nonnegative martingale and reaches 1/α with probability at most α.
    """
    total = variance + scale
    return math.sqrt(total * math.log(total / (scale * alpha**2)))


def mixture_scale(variance: float, alpha: float) -> float:
    """Return the ρ for which the boundary is next to the tightest where V has this value."""
    # The solution by Lambert's W, to the second term of its expansion.
    log_alpha = -2 * math.log(alpha)
    return variance / (log_alpha + math.log(1 + log_alpha))


def effective_units(sizes: Integers) -> float:
    """Return (Σ n)² / Σ n² of the numbers n of queries of units (u,): that many units of equal size
    would vary as much.
    """
    if not len(sizes):
        return 0.0
    of_units = sizes.astype(np.float64)
    return float(of_units.sum() ** 2 / (of_units**2).sum())


def difference_of_arms(
    sums: Values,
    sizes: Integers,
    treated: npt.NDArray[np.bool_],
    share: float,
    alpha: float,
    queries: Integers | None = None,
) -> tuple[Difference, Sequence] | None:
    """Return the difference of the mean outcome per query, and the sequence of its intervals.

    sums: (u,) the outcomes of a unit's queries, added up. sizes: (u,) their numbers. treated: (u,).
    share: the probability p of the treatment. queries: (u,) a hash of the query that a unit is about.
    None if an arm has no unit, or there are fewer than three.

    Units are randomised, so units are the independent terms: the queries of a unit share an arm and
    are alike, and count as one draw of their number. With the outcome m that is predicted for a
    query, and N queries, the estimate is

        Σ (T − p) (sum − m · size) / (p (1 − p) N),

    the estimator by inverse probabilities with predicted means. It is unbiased for any m from *other*
    units. By default m is their mean outcome; with `queries`, that of the same query in other units,
    which takes out that one arm had a popular query more often than the other.

    If arms are alike, the variance of the sum follows from all units, Σ (sum − m · size)² / (p (1 − p)),
    even if one arm has hardly any of the large ones. If they are not, the variance of the terms as
    they are holds, after Neyman. The larger of both is taken.
    """
    if len(sums) < 3 or treated.all() or not treated.any():
        return None
    of_units = sizes.astype(np.float64)
    total = float(of_units.sum())
    errors = sums - _predicted(sums, of_units, queries) * of_units
    terms = np.where(treated, 1 / share, -1 / (1 - share)) * errors
    estimate = float(terms.sum()) / total

    randomised = share * (1 - share)
    if_alike = float((errors**2).sum()) / randomised
    as_they_are = float(((terms - estimate * of_units) ** 2).sum())
    sequence = Sequence(
        queries=round(total),
        variance_per_query=max(if_alike, as_they_are) / total,
        scale=mixture_scale(TIGHTEST_AT * TYPICAL_VARIANCE / randomised, alpha),
        alpha=alpha,
    )
    half_width = sequence.half_width(total)
    return Difference(estimate, estimate - half_width, estimate + half_width), sequence


def _predicted(sums: Values, sizes: Values, queries: Integers | None) -> Values:
    """Return the mean outcome per query that the other units predict for each unit (u,)."""
    average: Values = (sums.sum() - sums) / (sizes.sum() - sizes)
    if queries is None:
        return average
    _, number = np.unique(queries, return_inverse=True)
    others_sums = np.bincount(number, sums)[number] - sums
    others_sizes = np.bincount(number, sizes)[number] - sizes
    predicted: Values = (others_sums + PREDICTED_FROM * average) / (others_sizes + PREDICTED_FROM)
    return predicted
