"""Confidence intervals by resampling the queries (percentile bootstrap; Efron and Tibshirani, 1993)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.kernels.arguments import whole_number

CHUNK = 1 << 22


class Interval(NamedTuple):
    """The statistic of all queries, and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def confidence_interval(
    values: npt.ArrayLike,
    statistic: Literal["mean", "median"] = "mean",
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean or median of per-query values (n,), n ≥ 2, with the interval that its resamples span.

    Raises InvalidInput for fewer than two values or values that are not finite, InvalidParameter.
    """
    return _interval([_checked(values)], statistic, level, resamples, seed)


def paired_difference(
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    statistic: Literal["mean", "median"] = "mean",
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The statistic of `after` less that of `before`, two systems on the same queries, resampled together.

    Per-query values (n,) in the same order. Raises as `confidence_interval`, and DimensionMismatch.
    """
    pair = [_checked(before), _checked(after)]
    if len(pair[0]) != len(pair[1]):
        raise DimensionMismatch(
            f"{len(pair[0])} queries before and {len(pair[1])} after; they must be the same"
        )
    return _interval(pair, statistic, level, resamples, seed)


def _interval(
    systems: list[npt.NDArray[np.float64]], statistic: str, level: float, resamples: int, seed: int
) -> Interval:
    if statistic not in ("mean", "median"):
        raise InvalidParameter(f'statistic must be "mean" or "median", not {statistic!r}')
    if not 0 < level < 1:
        raise InvalidParameter(f"level must be between 0 and 1, not {level!r}")
    resamples = whole_number("resamples", resamples)
    measure = np.mean if statistic == "mean" else np.median
    rng = np.random.default_rng(seed)
    n = len(systems[0])
    drawn = np.empty(resamples)
    rows = max(1, CHUNK // n)
    for start in range(0, resamples, rows):
        part = drawn[start : start + rows]
        chosen = rng.integers(n, size=(len(part), n))
        part[:] = measure(systems[-1][chosen], axis=1)
        if len(systems) == 2:
            part -= measure(systems[0][chosen], axis=1)
    estimate = measure(systems[-1]) - (measure(systems[0]) if len(systems) == 2 else 0)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high))


def _checked(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or len(array) < 2:
        raise InvalidInput(
            f"an interval needs one value each of at least two queries, not shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise InvalidInput("the per-query values have NaN or infinity")
    return array
