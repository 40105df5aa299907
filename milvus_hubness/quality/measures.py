"""Measures of hubness, and bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors, as_vectors
from milvus_hubness.correction.estimators.base import ESTIMATORS, to_dict
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.rows import as_queries, with_column
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter

CHUNK = 1 << 22
"""Numbers of queries that a bootstrap draws at once: 32 MiB."""
DEPTH = 10
"""The k of N_k, as in the literature on hubness."""


class Interval(NamedTuple):
    """A statistic of all queries, and its confidence interval."""

    estimate: float
    low: float
    """The lower bound of the interval."""
    high: float
    """The upper bound of the interval."""


def confidence_interval(values: npt.ArrayLike, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the mean of finite per-query values (n,), n ≥ 2, with its 95% bootstrap interval.

    Raises InvalidInput.
    """
    return bootstrap(_checked(values)[None], resamples=resamples, seed=seed)[0]


def paired_difference(
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    weights: npt.NDArray[np.float64] | None = None,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the mean of `after` minus that of `before`, with joint resampling.

    Both are per-query values (n,) of the same queries. weights: (n,) above 0, of the queries in
    both means; None for equal ones.
    Raises as `confidence_interval`, and DimensionMismatch.
    """
    before_values = _checked(before)
    after_values = _checked(after)
    if len(before_values) != len(after_values):
        raise DimensionMismatch(
            f"{len(before_values)} queries before and {len(after_values)} after; "
            "they must be the same"
        )
    differences = (after_values - before_values)[None]
    return bootstrap(differences, weights, resamples=resamples, seed=seed)[0]


def bootstrap(
    values: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None = None,
    *,
    resamples: int,
    seed: int,
) -> list[Interval]:
    """Return the mean of each row of values (m, n) with its 95% interval.

    All rows share the draws of queries. weights: (n,) above 0, of the queries in the means; a query
    is drawn as often as any other, whatever its weight.
    """
    n = values.shape[1]
    if weights is None:
        weights = np.ones(n)
    weighted = values * weights
    rng = np.random.default_rng(seed)
    means = np.empty((whole_number("resamples", resamples), len(values)))
    draws_at_once = max(1, CHUNK // n)
    for start in range(0, resamples, draws_at_once):
        chunk = means[start : start + draws_at_once]
        draws = rng.integers(n, size=(len(chunk), n))

        # How often each draw has each query: one count over numbers that differ between draws.
        numbers = draws + n * np.arange(len(chunk))[:, None]
        counts = np.bincount(numbers.ravel(), minlength=numbers.size).reshape(numbers.shape)
        chunk[:] = (counts @ weighted.T) / (counts @ weights)[:, None]

    lows, highs = np.quantile(means, [0.025, 0.975], axis=0)
    estimates = weighted.sum(1) / weights.sum()
    bounds = np.stack([estimates, lows, highs], axis=1).tolist()
    return [Interval(estimate, low, high) for estimate, low, high in bounds]


class Sendings(NamedTuple):
    """How often users send the queries of a measurement: its means are over what they send."""

    counts: npt.NDArray[np.int64] | None = None
    """(n,) how often each query was sent, each time one observation; None for once each."""

    weights: npt.NDArray[np.float64] | None = None
    """(n,) above 0, what one observation weighs; None for equal weights."""

    def of(self, queries: npt.NDArray[Any]) -> Sendings:
        """Return those of some of the queries, by their numbers or by a mask."""
        counts, weights = self
        return Sendings(
            None if counts is None else counts[queries],
            None if weights is None else weights[queries],
        )

    def mean(self, values: npt.NDArray[Any]) -> float:
        """Return the mean of the values (n,) of the queries."""
        return float(np.average(self._observed(values), weights=self._observed(self.weights)))

    def median(self, values: npt.NDArray[Any]) -> float:
        """Return the median of the values (n,) of the queries."""
        observed = self._observed(values)
        weights = self._observed(self.weights)
        if weights is None:
            return float(np.median(observed))
        order = np.argsort(observed, kind="stable")
        below = weights[order].cumsum()
        half = below[-1] / 2
        # Where exactly half is below, the median is between two values, as without weights.
        first = int(np.searchsorted(below, half * (1 - 1e-12)))
        second = int(np.searchsorted(below, half * (1 + 1e-12), "right"))
        return float(observed[order][[first, min(second, len(order) - 1)]].mean())

    def interval(self, values: npt.NDArray[np.float64]) -> Interval:
        """Return the mean of the values (n,) with its 95% interval, as `confidence_interval`."""
        observed = _checked(self._observed(values))[None]
        return bootstrap(observed, self._observed(self.weights), resamples=2000, seed=0)[0]

    def _observed(self, values: npt.NDArray[Any] | None) -> Any:
        """Return a value for each observation."""
        return values if values is None or self.counts is None else np.repeat(values, self.counts)


ONCE_EACH = Sendings()


def _checked(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or len(array) < 2:
        raise InvalidInput(
            f"an interval needs the values (n,) of at least two queries, not shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise InvalidInput("the per-query values have NaN or infinity")
    return array


def nearest(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    k: int,
    bias: npt.ArrayLike | None = None,
    own: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Return (n, k) numbers of the items with the highest s(q, r) − b(r), best first.

    queries: (n, d); gallery: (m, d); bias: (m,); own: see `RightItems.own`. Raises InvalidInput, DimensionMismatch,
    NonFiniteVectors and, for k, InvalidParameter.
    """
    query_vectors, stored = with_bias(queries, gallery, bias)
    k = whole_number("k", k)
    answers = len(stored) if own is None else len(stored) - 1
    if k > answers:
        raise InvalidParameter(f"k is {k} and the gallery has {answers} items: choose a smaller k")
    # One more, of which the own item goes, or else the last one.
    wanted = k if own is None else k + 1
    indices: npt.NDArray[np.int64] = topk(query_vectors, stored, wanted).indices
    if own is None:
        return indices
    is_kept = indices != own[:, None]
    is_kept[is_kept.all(1), -1] = False
    others: npt.NDArray[np.int64] = indices[is_kept].reshape(-1, k)
    return others


def with_bias(
    queries: npt.ArrayLike, gallery: npt.ArrayLike, bias: npt.ArrayLike | None
) -> tuple[Vectors, Vectors]:
    """Return <q, −1> and <r, b>, whose inner products are the corrected scores.

    Without a bias, it returns the vectors.
    """
    query_vectors = as_queries(as_vectors(queries, "the queries"))
    items = as_vectors(gallery, "the gallery")
    if query_vectors.shape[1] != items.shape[1]:
        raise DimensionMismatch(
            f"the queries have dimension {query_vectors.shape[1]}, the gallery has {items.shape[1]}"
        )
    if bias is None:
        return query_vectors, items

    if np.shape(bias) != (len(items),):
        raise DimensionMismatch(f"biases must have shape ({len(items)},) and have {np.shape(bias)}")
    bias_column = as_vectors(np.reshape(bias, (-1, 1)), "the biases")
    return with_column(query_vectors, -1), with_column(items, bias_column[:, 0])


Counts = npt.NDArray[np.int64]


class HubnessSummary(NamedTuple):
    """Measures of one k-occurrence distribution.

    hub_occurrence, groupie_ratio, gini and atkinson are as scikit-hubness has them.
    """

    skewness: float
    """As in `skewness`."""

    kurtosis: float
    """E(N_k − μ)⁴ / σ⁴ − 3; 0 for equal counts."""

    excess_answers: float
    """As in `excess_answers`."""

    largest: int
    """The largest N_k."""

    antihubs: float
    """The share of items that no query finds (Radovanović et al., JMLR 2010)."""

    hub_occurrence: float
    """The share of all answers that are hubs, items with N_k ≥ 2k."""

    groupie_ratio: float
    """The share of all answers that are the largest hub."""

    gini: float
    """The Gini index; 0 for equal counts."""

    atkinson: float
    """Atkinson's index for ε = ½; 0 for equal counts."""

    entropy: float
    """Of the item of a random answer, as a share of log n; 1 for equal counts."""


def k_occurrence(retrieved: npt.ArrayLike, n_items: int, k: int = DEPTH) -> Counts:
    """Return (n_items,) N_k: the number of queries with the item among their first k results.

    retrieved: (n_queries, ≥ k) numbers of items, best first. Source: Radovanović et al., JMLR 2010.
    Raises InvalidInput, InvalidParameter.
    """
    k = whole_number("k", k)
    n_items = whole_number("n_items", n_items)
    results = np.asarray(retrieved)
    if results.ndim != 2 or results.shape[1] < k or len(results) == 0:
        raise InvalidInput(f"results must have shape (n_queries, {k} or more), not {results.shape}")

    # `bincount` would take floats and negative numbers for something else, or fail without a name.
    numbers = results[:, :k].ravel()
    if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= n_items:
        raise InvalidInput(f"results must be numbers of items, 0 … {n_items - 1}")

    return np.bincount(numbers, minlength=n_items).astype(np.int64)


def skewness(counts: npt.ArrayLike) -> float:
    """Return E(N_k − μ)³ / σ³ over the items; 0 if all counts are equal.

    Source: Radovanović et al., JMLR 2010, eq. 1.
    """
    return float(np.mean(_standardised(counts) ** 3))


def excess_answers(counts: npt.ArrayLike) -> float:
    """Return ½ Σ|N_k − μ| / Σ N_k, the excess answers taken by hubs, as a share.

    They are those to move for equal counts (the Robin Hood index of Feldbauer et al., 2018).
    """
    values = _counts(counts)
    if not values.any():
        return 0.0
    return float(np.abs(values - values.mean()).sum() / (2 * values.sum()))


def hubness_summary(counts: npt.ArrayLike, k: int = DEPTH) -> HubnessSummary:
    """Return all measures of a k-occurrence distribution (n_items,)."""
    values = _counts(counts)
    n = len(values)
    # Equal counts, all zeros among them, have 0 / 0 in most measures: each has its limit instead.
    is_even = not np.ptp(values)
    shares = np.sort(values) / (values.sum() or 1.0)
    positive_shares = shares[shares > 0]
    entropy = -positive_shares @ np.log(positive_shares)

    return HubnessSummary(
        skewness=skewness(values),
        kurtosis=0.0 if is_even else float(np.mean(_standardised(values) ** 4)) - 3,
        excess_answers=excess_answers(values),
        largest=int(values.max()),
        antihubs=float((values == 0).mean()),
        hub_occurrence=float(shares[np.sort(values) >= 2 * k].sum()),
        groupie_ratio=float(shares[-1]),
        gini=0.0 if is_even else float((2 * np.arange(n) + 1 - n) @ shares / n),
        atkinson=0.0 if is_even else float(1 - n * np.sqrt(shares).mean() ** 2),
        entropy=1.0 if is_even else float(entropy / np.log(n)),
    )


def _standardised(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the counts with mean 0 and standard deviation 1, or zeros if all are equal."""
    values = _counts(counts)
    deviations = values - values.mean()
    spread = np.sqrt(np.mean(deviations**2))
    standardised: npt.NDArray[np.float64] = deviations / (spread or 1.0)
    return standardised


def _counts(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(counts, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise InvalidInput(f"counts must be 1-D, one for each item, not of shape {values.shape}")
    return values


def as_plain(value: Any) -> Any:
    """Return a value as JSON has it.

    Dataclasses and named tuples become dicts, estimators as in `estimators.to_dict`, NumPy numbers
    numbers, and other values that JSON lacks strings.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    # Before the dataclasses, which estimators are too: theirs would lack the name.
    if type(value).__name__ in ESTIMATORS:
        return to_dict(value)
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): as_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner) for inner in value]

    # JSON has no infinity and no NaN.
    is_plain = (
        value is None
        or isinstance(value, str | int)
        or (isinstance(value, float) and isfinite(value))
    )
    return value if is_plain else str(value)
