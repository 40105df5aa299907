"""Confidence sequences: intervals that hold at all looks at once, however often and whenever one looks.

An ordinary 95% interval holds at one look that was planned before. Whoever looks each day and stops
at the first clear difference is wrong far more often than one time in twenty. The intervals here
are wider, by half or so, and the probability that any of them misses the true value is at most α.

The boundary is the two-sided normal mixture of Howard, Ramdas, McAuliffe and Sekhon (Annals of
Statistics 49, 2021), with an estimated variance as in the asymptotic confidence sequences of
Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Annals of Statistics 52, 2024).

No library is used. `confseq` is C++ that has to be built with Boost; `expectation` needs Python 3.12,
pandas and plotly, and is under the GPL. Neither has the difference of randomised arms with many
rows in a unit, which is the larger part of this file.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

TIGHTEST_AT = 10_000
"""Rows at which the intervals are tightest, next to the best possible at that number. At a tenth of
them and at ten times as many they are a quarter and a tenth wider than they could be."""
TYPICAL_VARIANCE = 0.15
"""Variance of the success of a row for which that holds. It changes where the intervals are tightest,
never whether they hold."""


class Difference(NamedTuple):
    """The difference of two arms, treatment less control, and its confidence sequence."""

    estimate: float
    low: float
    """The lower bound of the interval."""
    high: float
    """The upper bound of the interval."""

    @property
    def half_width(self) -> float:
        """The smallest difference that the present number of rows can show."""
        return (self.high - self.low) / 2


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
    """Return (Σ n)² / Σ n² of the numbers n of rows of units (u,), u ≥ 1: that many units of equal
    size would vary as much.
    """
    of_units = sizes.astype(np.float64)
    return float(of_units.sum() ** 2 / (of_units**2).sum())


def difference_of_arms(
    sums: Values,
    sizes: Integers,
    treated: npt.NDArray[np.bool_],
    share: float,
    alpha: float,
) -> Difference | None:
    """Return the difference of the mean success of a row, with its interval.

    sums: (u,) the successes of a unit's rows, added up. sizes: (u,) the numbers of these rows.
    treated: (u,). share: the probability p of the treatment. None if an arm has no unit, or there
    are fewer than three.

    Units are randomised, so units are the independent terms: the rows of a unit share an arm and
    are alike, and count as one draw of their number. With N rows, and the mean success m of the
    rows of the *other* units, the estimate is

        Σ (T − p) (sum − m · size) / (p (1 − p) N),

    the estimator by inverse probabilities, which is unbiased as m does not depend on the unit.

    If arms are alike, the variance of the sum follows from all units, Σ (sum − m · size)² / (p (1 − p)),
    even if one arm has hardly any of the large ones. If they are not, the variance of the terms as
    they are holds, after Neyman. The larger of both is taken.
    """
    if len(sums) < 3 or treated.all() or not treated.any():
        return None
    of_units = sizes.astype(np.float64)
    total = float(of_units.sum())
    predicted = (sums.sum() - sums) / (total - of_units)
    errors = sums - predicted * of_units
    terms = np.where(treated, 1 / share, -1 / (1 - share)) * errors
    estimate = float(terms.sum()) / total

    randomised = share * (1 - share)
    if_alike = float((errors**2).sum()) / randomised
    as_they_are = float(((terms - estimate * of_units) ** 2).sum())
    scale = mixture_scale(TIGHTEST_AT * TYPICAL_VARIANCE / randomised, alpha)
    half_width = boundary(max(if_alike, as_they_are), scale, alpha) / total
    return Difference(estimate, estimate - half_width, estimate + half_width)
