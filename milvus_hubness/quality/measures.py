"""Measures of hubness and of retrieval, with bootstrap confidence intervals."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import DEFAULT_MEASURE
from milvus_hubness.correction.banks.bank import Vectors, as_vectors
from milvus_hubness.correction.estimators.base import ESTIMATORS, to_dict
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.primitives import score_tiles
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter, name_some

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 22
"""Numbers of queries that a bootstrap draws at once: 32 MiB."""
DEPTH = 10
"""The k of N_k, as in the literature on hubness."""
RESAMPLES = 50
"""Of the queries, for the standard error of a change."""
TOGETHER = 24
"""Biases that `assess` bounds together."""
GROUP = 8
"""Items of which a bound needs the best only."""
MARGIN = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less, relative to the largest, count as equal."""


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
    queries: npt.ArrayLike, gallery: npt.ArrayLike, k: int, bias: npt.ArrayLike | None = None
) -> npt.NDArray[np.int64]:
    """Return (n, k) numbers of the items with the highest s(q, r) − b(r), best first.

    queries: (n, d); gallery: (m, d); bias: (m,). Raises InvalidInput, DimensionMismatch,
    NonFiniteVectors and, for k, InvalidParameter.
    """
    query_vectors, stored = with_bias(queries, gallery, bias)
    k = whole_number("k", k)
    if k > len(stored):
        raise InvalidParameter(
            f"k is {k} and the gallery has {len(stored)} items: choose a smaller k"
        )
    indices: npt.NDArray[np.int64] = topk(query_vectors, stored, k).indices
    return indices


def with_bias(
    queries: npt.ArrayLike, gallery: npt.ArrayLike, bias: npt.ArrayLike | None
) -> tuple[Vectors, Vectors]:
    """Return <q, −1> and <r, b>, whose inner products are the corrected scores.

    Without a bias, it returns the vectors.
    """
    query_vectors = as_vectors(queries, "the queries")
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
    weight_column = np.full((len(query_vectors), 1), -1, np.float32)
    return np.hstack([query_vectors, weight_column]), np.hstack([items, bias_column])


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


PerQuery = npt.NDArray[np.float64]
Positives: TypeAlias = npt.NDArray[Any] | Sequence[int | Collection[int]]
Grades: TypeAlias = npt.NDArray[Any] | Sequence[float | Collection[float]]
"""For each query how right its positives are: numbers above 0, in the order of the positives."""


class PositiveRanks(NamedTuple):
    """The ranks of all positives; those of query i are ranks[starts[i]:starts[i + 1]]."""

    ranks: npt.NDArray[np.int64]
    """(p,), from 1; those of a query best first."""

    starts: npt.NDArray[np.int64]
    """(n_queries + 1,) the position of each query's first rank, and p at the end."""

    grades: PerQuery | None = None
    """(p,) how right each positive is, above 0; None for 1 each."""

    items: npt.NDArray[np.int64] | None = None
    """(p,) the number of each positive in the gallery; None where only ranks count."""

    @property
    def best(self) -> npt.NDArray[np.int64]:
        """Return (n_queries,) the rank of each query's best positive."""
        return self.ranks[self.starts[:-1]]

    def sums(self, values: PerQuery) -> PerQuery:
        """Return (n_queries,) the sums over each query's positives of values (p,)."""
        return np.add.reduceat(values, self.starts[:-1])

    def where(self, is_ours: npt.NDArray[np.bool_], other: PositiveRanks) -> PositiveRanks:
        """Return these ranks for some of the queries, (n_queries,) bool, and others for the rest.

        Both are of the same positives, in any order of these.
        """
        by_positive = np.repeat(is_ours, np.diff(self.starts))

        def chosen(ours: npt.NDArray[Any] | None, theirs: npt.NDArray[Any] | None) -> Any:
            return None if ours is None or theirs is None else np.where(by_positive, ours, theirs)

        return PositiveRanks(
            chosen(self.ranks, other.ranks),
            self.starts,
            chosen(self.grades, other.grades),
            chosen(self.items, other.items),
        )


def ranks(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    positives: Positives,
    bias: npt.ArrayLike | None = None,
    *,
    grades: Grades | None = None,
) -> PositiveRanks:
    """Return the rank of every positive under s(q, r) − b(r) among all gallery items.

    positives: for each query the number of its gallery item, or several. grades: for each query how
    right these are, above 0. Scores that are equal up to float32 rounding rank behind the
    positive's. Memory: a tile of at least one row of scores. Raises InvalidInput,
    DimensionMismatch, NonFiniteVectors.
    """
    import torch

    query_vectors, stored = with_bias(queries, gallery, bias)
    items, starts, values = checked_judgements(positives, grades, len(query_vectors), len(stored))
    unordered = np.empty(len(items), np.int64)
    for tile, scores in score_tensors(query_vectors, stored):
        # Equal items get scores that differ by rounding. Without a margin, they would be before
        # the positive or behind it by chance.
        margins = MARGIN * scores.abs().amax(1)
        first = starts[:-1][tile]
        end = starts[1:][tile]

        # The nth positive of all queries of the tile that have so many, at once.
        for nth in range(int((end - first).max())):
            with_nth = np.flatnonzero(first + nth < end)
            positions = first[with_nth] + nth
            rows = torch.from_numpy(with_nth).to(scores.device)
            columns = torch.from_numpy(items[positions, None]).to(scores.device)
            row_scores = scores[rows]
            limits = row_scores.gather(1, columns) + margins[rows, None]
            unordered[positions] = 1 + (row_scores > limits).sum(1).cpu().numpy()

    return in_order(unordered, starts, values, items)


MEASURES = "R@k, MRR, MAP or nDCG@k"
"""The measures to choose from, in words."""
_NAMED = re.compile(r"(R|MRR|MAP|nDCG|Success|RR|AP)(?:@([1-9][0-9]{0,5}))?", re.IGNORECASE)
_KINDS = {"r": "R", "success": "R", "mrr": "MRR", "rr": "MRR", "map": "MAP", "ap": "MAP"}
_KINDS["ndcg"] = "nDCG"


@dataclass(frozen=True)
class Measure:
    """A measure of retrieval, of each query; its mean over the queries is what is reported."""

    kind: str
    """"R", "MRR", "MAP" or "nDCG"."""

    k: int | None = None
    """How many of the first items count, for R and nDCG."""

    @classmethod
    def of(cls, measure: object) -> Measure:
        """Return the measure itself, or that of a name as in `R@1`, `MRR`, `MAP` or `nDCG@10`.

        R@k is 1 if a positive is among the first k, and 0 if not, as in the literature on
        cross-modal search. ir-measures calls it Success@k, MRR RR and MAP AP; these names are taken
        too. Raises InvalidInput.
        """
        if isinstance(measure, Measure):
            return measure
        named = _NAMED.fullmatch(measure.strip()) if isinstance(measure, str) else None
        kind = _KINDS[named[1].lower()] if named else ""
        if named is None or (named[2] is None) == (kind in ("R", "nDCG")):
            raise InvalidInput(f"the measure must be {MEASURES}, not {measure!r}")
        return cls(kind, int(named[2]) if named[2] else None)

    def __str__(self) -> str:
        return self.kind if self.k is None else f"{self.kind}@{self.k}"

    @property
    def needs_best_only(self) -> bool:
        """Whether the rank of a query's best positive is enough."""
        return self.kind in ("R", "MRR")

    def of_best(self, ranks: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """Return R or MRR from the ranks of the best positives, of any shape."""
        if self.kind == "MRR":
            return np.asarray(1 / ranks, np.float64)
        return np.asarray(ranks <= np.int64(self.k or 0), np.float64)

    def values(self, ranks: PositiveRanks) -> PerQuery:
        """Return the measure of each query, (n_queries,)."""
        if self.needs_best_only:
            return self.of_best(ranks.best)
        if self.kind == "MAP":
            return average_precisions(ranks)
        assert self.k is not None, "nDCG has a k"
        return ndcgs(ranks, self.k)


R_AT_1 = Measure.of(DEFAULT_MEASURE)
"""The measure that decides unless another is chosen."""


def score_tensors(queries: Vectors, gallery: Vectors) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the inner products of queries (m, d) with all items (n, d), in tiles of whole rows."""
    import torch

    for tile, scores in score_tiles(queries, gallery):
        yield tile, torch.as_tensor(scores)


class Outcome(NamedTuple):
    """The outcome of searches under several biases."""

    ranks: npt.NDArray[np.int32]
    """(n_biases, n_queries), those of each query's best
    positive, as in `ranks`; without positives (n_biases, 0)."""

    retrieved: npt.NDArray[np.int32]
    """(n_biases, n_queries, at most 10), the first items."""

    values: npt.NDArray[np.float64]
    """(n_biases, n_queries) of the measure of the searches; without positives (n_biases, 0)."""

    def of(self, queries: npt.NDArray[np.int64]) -> Outcome:
        """Return the outcome of these queries only."""
        return Outcome(self.ranks[:, queries], self.retrieved[:, queries], self.values[:, queries])

    def of_biases(self, rows: npt.NDArray[Any]) -> Outcome:
        """Return the outcome under these biases only, by their numbers or by a mask."""
        return Outcome(self.ranks[rows], self.retrieved[rows], self.values[rows])

    def gated(self, activated: Sequence[npt.NDArray[np.bool_] | None]) -> Outcome:
        """Return the outcome with a gate on each search but the first, the raw one.

        Queries whose first raw item is not activated keep the raw outcome. activated: for each
        search but the raw one, (n_items,) whether an item is activated; None without a gate.
        """
        result = Outcome(self.ranks.copy(), self.retrieved.copy(), self.values.copy())
        first_raw = self.retrieved[0, :, 0]
        for row, is_activated in enumerate(activated, 1):
            if is_activated is None:
                continue
            stays_raw = ~is_activated[first_raw]
            result.retrieved[row, stays_raw] = self.retrieved[0, stays_raw]
            if self.ranks.size:
                result.ranks[row, stays_raw] = self.ranks[0, stays_raw]
                result.values[row, stays_raw] = self.values[0, stays_raw]
        return result


def assess(
    queries: Vectors,
    gallery: Vectors,
    biases: Sequence[Vectors],
    positives: Sequence[npt.NDArray[np.int64]] | None = None,
    *,
    grades: Sequence[PerQuery] | None = None,
    measure: Measure = R_AT_1,
) -> Outcome:
    """Return the outcome of each bias (n_items,) for queries (n_queries, d) on a gallery.

    gallery: (n_items, d). positives: for each query the numbers of its items, none of them twice;
    grades: for each query how right these are. Memory: a tile of at least one row of scores.
    """
    import torch

    all_biases = np.stack(biases)
    # Biases of nearly the same spread go together: bounds on all of a group are then tight.
    by_spread = np.argsort(all_biases.std(1), kind="stable")
    groups = np.array_split(by_spread, -(-len(biases) // TOGETHER))

    depth = min(DEPTH, len(gallery))
    retrieved = np.empty((len(biases), len(queries), depth), np.int32)
    ranks = np.empty((len(biases), 0 if positives is None else len(queries)), np.int32)
    values = np.empty(ranks.shape)
    positive_items = None if positives is None else torch.from_numpy(_padded(positives))
    for tile, scores in score_tensors(queries, gallery):
        for group in groups:
            group_biases = torch.from_numpy(all_biases[group]).to(scores)
            bounds = _Bounds.of(scores, group_biases)
            retrieved[group, tile] = _first_items(bounds, depth)
            if positives is None or positive_items is None:
                continue

            best = _best_ranks(bounds, positive_items[tile].to(scores.device))
            ranks[group, tile] = best
            if measure.needs_best_only:
                values[group, tile] = measure.of_best(best)
                continue
            of_tile = None if grades is None else grades[tile]
            for bias, of_bias in zip(
                group, _all_ranks(bounds, positives[tile], of_tile), strict=True
            ):
                values[bias, tile] = measure.values(of_bias)

    return Outcome(ranks, retrieved, values)


class _Bounds(NamedTuple):
    """Bounds of the corrected scores of m queries and n items under a group of biases at once.

    A bias is its mean, which changes no order, and the deviations from it. So the lowest and the
    highest deviation of an item bound its corrected scores under the whole group, but for the
    means. Most items are far from being decisive for any bias, as one comparison with a bound
    shows; only the undecided ones are computed for each bias.
    """

    scores: torch.Tensor
    """(m, n) raw."""

    biases: torch.Tensor
    """(group, n)."""

    means: torch.Tensor
    """(group, 1) of the biases."""

    lower: torch.Tensor
    """(m, n): s − b is at least this less the mean of b, for every bias b of the group."""

    upper: torch.Tensor
    """(m, n): s − b is at most this less the mean of b."""

    largest: torch.Tensor
    """(m,) the largest raw score of each query, in absolute value."""

    rounding: torch.Tensor
    """(m, 1) by how much float32 may make a bound wrong."""

    @classmethod
    def of(cls, scores: torch.Tensor, biases: torch.Tensor) -> _Bounds:
        means = biases.mean(1, keepdim=True)
        deviations = biases - means
        largest = scores.abs().amax(1)
        return cls(
            scores=scores,
            biases=biases,
            means=means,
            # The largest deviation bounds from below, because it is subtracted.
            lower=scores - deviations.amax(0),
            upper=scores - deviations.amin(0),
            largest=largest,
            rounding=2 * MARGIN * (largest + 2 * biases.abs().max())[:, None],
        )

    def of_rows(self, rows: torch.Tensor) -> _Bounds:
        """Return the bounds of some of the queries."""
        if len(rows) == len(self.scores):
            return self
        return self._replace(
            scores=self.scores[rows],
            lower=self.lower[rows],
            upper=self.upper[rows],
            largest=self.largest[rows],
            rounding=self.rounding[rows],
        )


def _first_items(bounds: _Bounds, depth: int) -> npt.NDArray[np.int64]:
    """Return (group, m, depth) the items with the highest corrected scores, best first."""
    import torch

    # At least `depth` items reach the threshold under every bias, so an item whose upper bound does
    # not is first under none.
    threshold = _nth_largest(bounds.lower, depth) - bounds.rounding
    rows, columns = (bounds.upper >= threshold).nonzero(as_tuple=True)

    # The candidates of each query, moved to the left of a narrow table; the rest of it is −inf.
    query_count = len(bounds.scores)
    counts = rows.bincount(minlength=query_count)
    starts = counts.cumsum(0) - counts
    slots = torch.arange(len(rows), device=rows.device) - starts[rows]
    items = rows.new_zeros(query_count, int(counts.max()))
    items[rows, slots] = columns
    candidate_scores = bounds.scores.new_full(items.shape, -torch.inf)
    candidate_scores[rows, slots] = bounds.scores[rows, columns]

    firsts = []
    for bias in bounds.biases:
        best = (candidate_scores - bias[items]).topk(depth, dim=1).indices
        firsts.append(items.gather(1, best))
    return _as_array(torch.stack(firsts))


def _nth_largest(values: torch.Tensor, nth: int) -> torch.Tensor:
    """Return (m, 1) the nth largest of each row of values (m, n), or a somewhat smaller number.

    It is the nth largest of the maxima of groups, of which there are fewer to sort.
    """
    column_count = values.shape[1]
    # There must be at least `nth` groups; else each column is a group of its own.
    group_count = column_count // GROUP if column_count >= GROUP * nth else column_count
    # The last columns, too few for a group, are left out: the result may only be smaller for it.
    whole = column_count // group_count * group_count
    maxima = values[:, :whole].view(len(values), -1, group_count).amax(1)
    return maxima.topk(nth, dim=1).values[:, -1:]


def _best_ranks(bounds: _Bounds, positives: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return (group, m) the rank of the best of each query's positives (m, p)."""
    best = bounds.scores.gather(1, positives) - bounds.biases[:, positives]
    return _ranks_behind(bounds, best.amax(2))


def _all_ranks(
    bounds: _Bounds,
    positives: Sequence[npt.NDArray[np.int64]],
    grades: Sequence[PerQuery] | None,
) -> Iterator[PositiveRanks]:
    """Yield the ranks of all positives of the m queries under each bias of the group."""
    import torch

    counts = np.array([len(items) for items in positives])
    starts = np.concatenate([[0], np.cumsum(counts)])
    items = np.concatenate(positives)
    unordered = np.empty((len(bounds.biases), len(items)), np.int64)
    # The nth positive of all queries that have so many, at once.
    for nth in range(int(counts.max())):
        with_nth = np.flatnonzero(counts > nth)
        positions = starts[:-1][with_nth] + nth
        of_rows = bounds.of_rows(torch.from_numpy(with_nth).to(bounds.scores.device))
        columns = torch.from_numpy(items[positions]).to(bounds.scores.device)
        corrected = of_rows.scores.gather(1, columns[:, None])[:, 0] - bounds.biases[:, columns]
        unordered[:, positions] = _ranks_behind(of_rows, corrected)

    values = None if grades is None else np.concatenate(grades)
    for of_bias in unordered:
        yield in_order(of_bias, starts, values)


def _ranks_behind(bounds: _Bounds, corrected: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return (group, m) the rank that an item has with these corrected scores, (group, m)."""
    import torch

    biases = bounds.biases
    # An item ranks before the positive if its corrected score is above this, (group, m).
    margins = MARGIN * bounds.largest.clamp(min=biases.abs().amax(1, keepdim=True))
    limits = corrected + margins

    # The bounds lack the means, so the limits that they are compared with get them.
    limits_of_bounds = limits + bounds.means
    highest_limit = limits_of_bounds.amax(0)[:, None] + bounds.rounding
    lowest_limit = limits_of_bounds.amin(0)[:, None] - bounds.rounding
    is_before_under_all = bounds.lower > highest_limit
    is_undecided = (bounds.upper > lowest_limit) & ~is_before_under_all

    # Every bias decides the few others itself, in the exact scores.
    rows, columns = is_undecided.nonzero(as_tuple=True)
    undecided_scores = bounds.scores[rows, columns]
    least_ranks = 1 + is_before_under_all.sum(1)
    ranks = []
    for bias, limit in zip(biases, limits, strict=True):
        is_before = undecided_scores - bias[columns] > limit[rows]
        before_counts = rows[is_before].bincount(minlength=len(bounds.scores))
        ranks.append(least_ranks + before_counts)
    return _as_array(torch.stack(ranks))


def _as_array(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    array: npt.NDArray[np.int64] = tensor.cpu().numpy()
    return array


def excess_answers_of(outcome: Outcome, n_items: int) -> npt.NDArray[np.float64]:
    """Return (n_biases,) the share of excess answers taken by hubs among all answers."""
    shares = []
    for items in outcome.retrieved:
        counts = k_occurrence(items, n_items, items.shape[1])
        shares.append(excess_answers(counts))
    return np.array(shares)


def noise_of_change(
    outcome: Outcome, n_items: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return (n_biases − 1,) standard errors of changes in excess answers taken by hubs.

    They are the changes from each of the other biases to the last one, on the same queries, which
    are resampled.
    """
    query_count = outcome.retrieved.shape[1]
    changes = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(query_count, size=query_count)
        resampled = outcome._replace(retrieved=outcome.retrieved[:, drawn])
        excess = excess_answers_of(resampled, n_items)
        changes.append(excess[-1] - excess[:-1])
    noise: npt.NDArray[np.float64] = np.std(changes, axis=0)
    return noise


def _padded(positives: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return (n_queries, most) the items of each query, filled up with its first."""
    # A positive twice is no better than once, so the first one can fill a row of the table.
    most = max(map(len, positives))
    return np.stack(
        [np.pad(items, (0, most - len(items)), constant_values=items[0]) for items in positives]
    )


def in_order(
    ranks: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    grades: PerQuery | None = None,
    items: npt.NDArray[np.int64] | None = None,
) -> PositiveRanks:
    """Return each query's ranks in ascending order, with distinct ranks for equal positives.

    ranks, grades, items: (p,), those of query i from starts[i] on.
    """
    query = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = np.lexsort((ranks, query))
    ranks = ranks[order]
    nth = np.arange(len(ranks)) - starts[query]

    # A rank is at least one more than the one before: a running maximum of rank − nth does that. It
    # starts again with each query, because the ranks of a query are far above those before.
    offset = query * (ranks.max(initial=0) + len(ranks) + 1)
    rising = np.maximum.accumulate(ranks - nth + offset)
    return PositiveRanks(
        rising + nth - offset,
        starts,
        None if grades is None else grades[order],
        None if items is None else items[order],
    )


def checked_positives(
    positives: Positives, n_queries: int, n_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return all positives, and the start of each query's.

    They are sorted by query, without duplicates. Raises InvalidInput.
    """
    items, starts, _ = checked_judgements(positives, None, n_queries, n_items)
    return items, starts


def checked_judgements(
    positives: Positives, grades: Grades | None, n_queries: int, n_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], PerQuery | None]:
    """Return all positives, the start of each query's, and their grades.

    They are sorted by query, without duplicates, of which the highest grade counts. Raises
    InvalidInput.
    """
    if len(positives) != n_queries:
        raise InvalidInput(
            f"positives cover {len(positives)} queries, but {n_queries} queries were passed"
        )
    if n_queries == 0 or n_items == 0:
        raise InvalidInput("queries or gallery items are missing")

    listed = [
        list(numbers) if isinstance(numbers, Iterable) else [numbers] for numbers in positives
    ]
    graded = [dict.fromkeys(numbers, 1.0) for numbers in listed]
    if grades is not None:
        graded = _with_grades(listed, grades)
    missing = [query for query, of_query in enumerate(graded) if not of_query]
    if missing:
        raise InvalidInput(
            f"no positive for query {name_some(missing)}: each query needs at least one"
        )

    starts = np.concatenate([[0], np.cumsum([len(of_query) for of_query in graded])])
    ordered = [sorted(of_query.items()) for of_query in graded]
    items = np.array([item for of_query in ordered for item, _ in of_query])
    if items.dtype.kind not in "iu":
        raise InvalidInput("positives must be the numbers of gallery items")

    outside = np.flatnonzero((items < 0) | (items >= n_items))
    if len(outside):
        faulty = sorted({int(query) for query in np.searchsorted(starts, outside, "right") - 1})
        raise InvalidInput(
            f"positives of query {name_some(faulty)} are not among the {n_items} gallery items"
        )

    values = None
    if grades is not None:
        values = np.array([grade for of_query in ordered for _, grade in of_query])
    return items.astype(np.int64), starts, values


def _with_grades(positives: Sequence[list[Any]], grades: Grades) -> list[dict[Any, float]]:
    """Return the grade of each positive of each query. Raises InvalidInput."""
    listed = [list(values) if isinstance(values, Iterable) else [values] for values in grades]
    unequal = [
        query
        for query, numbers in enumerate(positives)
        if query >= len(listed) or len(listed[query]) != len(numbers)
    ]
    if unequal or len(listed) != len(positives):
        raise InvalidInput(
            f"the grades of query {name_some(unequal or [len(positives)])} must be as many as its "
            "positives"
        )
    wrong = [
        query
        for query, values in enumerate(listed)
        if not all(isinstance(grade, Real) and 0 < float(grade) < np.inf for grade in values)
    ]
    if wrong:
        raise InvalidInput(f"the grades of query {name_some(wrong)} must be numbers above 0")

    of_queries: list[dict[Any, float]] = []
    for numbers, values in zip(positives, listed, strict=True):
        of_query: dict[Any, float] = {}
        for item, grade in zip(numbers, values, strict=True):
            of_query[item] = max(of_query.get(item, 0.0), float(grade))
        of_queries.append(of_query)
    return of_queries


def checked_weights(weights: npt.ArrayLike | None, count: int) -> PerQuery:
    """Return the weights of labelled pairs (count,), by default 1. Raises InvalidInput."""
    if weights is None:
        return np.ones(count)
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
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0))).tolist()
    if wrong:
        raise InvalidInput(
            f"the weight of pair {name_some(wrong)} must be a number from 0 up: correct or remove "
            "these pairs"
        )
    if not values.any():
        raise InvalidInput(
            "the weights of all pairs are 0, so that nobody sends them: correct or remove them"
        )
    return values.astype(np.float64)


def hits(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) 1 if a positive is among the first k, else 0; the mean is R@k."""
    return (ranks.best <= whole_number("k", k)).astype(np.float64)


def average_precisions(ranks: PositiveRanks, k: int | None = None) -> PerQuery:
    """Return (n_queries,) AP@k = Σ (i / rank_i) / min(p, k), or AP if k is None.

    The sum is over those of the p positives i = 1, 2, …, ordered by rank, that are among the first
    k, or over all (Manning et al., Introduction to Information Retrieval, 2008, 8.4).
    """
    counts = np.diff(ranks.starts)
    nth = 1 + np.arange(len(ranks.ranks)) - np.repeat(ranks.starts[:-1], counts)
    precisions = nth / ranks.ranks
    if k is None:
        return ranks.sums(precisions) / counts
    k = whole_number("k", k)
    return ranks.sums(precisions * (ranks.ranks <= k)) / np.minimum(counts, k)


def ndcgs(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) nDCG@k, whose gain is the grade (Järvelin and Kekäläinen, 2002).

    It is Σ grade / log2(1 + rank) over the positives among the first k, divided by its value with
    all positives in front, the highest grade first. As in trec_eval, the gain is the grade itself,
    not 2 to its power.
    """
    k = whole_number("k", k)
    counts = np.diff(ranks.starts)
    grades = np.ones(len(ranks.ranks)) if ranks.grades is None else ranks.grades
    gained = ranks.sums((ranks.ranks <= k) * grades / np.log2(1 + ranks.ranks))

    query = np.repeat(np.arange(len(counts)), counts)
    falling = grades[np.lexsort((-grades, query))]
    nth = np.arange(len(grades)) - ranks.starts[query]
    ndcgs: PerQuery = gained / ranks.sums((nth < k) * falling / np.log2(2 + nth))
    return ndcgs


def retrieval_summary(
    ranks: PositiveRanks, ks: Sequence[int] = (1, 5, 10), depth: int = 10
) -> dict[str, float]:
    """Return R@k for each k, median and mean rank of the best positive, MRR, mAP and nDCG.

    Source of MRR: Voorhees, TREC-8, 1999.
    """
    return {
        **{f"R@{k}": float(hits(ranks, k).mean()) for k in ks},
        "MdR": float(np.median(ranks.best)),
        "MnR": float(ranks.best.mean()),
        "MRR": float((1 / ranks.best).mean()),
        f"mAP@{depth}": float(average_precisions(ranks, depth).mean()),
        f"nDCG@{depth}": float(ndcgs(ranks, depth).mean()),
    }


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
