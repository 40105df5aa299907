"""Measures of hubness and of retrieval, with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors, as_vectors
from milvus_hubness.correction.estimators.base import ESTIMATORS, to_dict
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.primitives import score_tiles
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter, name_some

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 22
DEPTH = 10
TOGETHER, GROUP = 24, 8
"""Biases that `assess` bounds together, and items of which a bound needs the best only."""
MARGIN = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less, relative to the largest, count as equal."""


class Interval(NamedTuple):
    """A statistic of all queries, and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def confidence_interval(values: npt.ArrayLike, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the mean of finite per-query values (n,), n ≥ 2, with its 95% bootstrap interval. Raises InvalidInput."""
    return bootstrap(_checked(values)[None], resamples=resamples, seed=seed)[0]


def paired_difference(
    before: npt.ArrayLike, after: npt.ArrayLike, *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Return the mean of `after` minus that of `before`, per-query values (n,) of the same queries, with joint
    resampling. Raises as `confidence_interval`, and DimensionMismatch."""
    first, second = _checked(before), _checked(after)
    if len(first) != len(second):
        raise DimensionMismatch(
            f"{len(first)} queries before and {len(second)} after; they must be the same"
        )
    return confidence_interval(second - first, resamples=resamples, seed=seed)


def bootstrap(values: npt.NDArray[np.float64], *, resamples: int, seed: int) -> list[Interval]:
    """Return the mean of each row of values (m, n) with its 95% interval; all rows share the draws of queries."""
    n, rng = values.shape[1], np.random.default_rng(seed)
    means = np.empty((whole_number("resamples", resamples), len(values)))
    rows = max(1, CHUNK // n)
    for start in range(0, resamples, rows):
        part = means[start : start + rows]
        chosen = rng.integers(n, size=(len(part), n)) + n * np.arange(len(part))[:, None]
        counts = np.bincount(chosen.ravel(), minlength=chosen.size).reshape(chosen.shape)
        part[:] = counts @ values.T / n
    lows, highs = np.quantile(means, [0.025, 0.975], axis=0)
    return [
        Interval(*bounds) for bounds in np.stack([values.mean(1), lows, highs], axis=1).tolist()
    ]


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
    """Return (n, k) numbers of the items (m, d) with the highest s(q, r) − b(r) for queries (n, d), best first. Raises
    InvalidInput, DimensionMismatch, NonFiniteVectors and, for k, InvalidParameter."""

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
    """Return <q, −1> and <r, b>, whose inner products are the corrected scores; without a bias the vectors."""
    query_vectors, stored = as_vectors(queries, "the queries"), as_vectors(gallery, "the gallery")
    if query_vectors.shape[1] != stored.shape[1]:
        raise DimensionMismatch(
            f"the queries have dimension {query_vectors.shape[1]}, the gallery has {stored.shape[1]}"
        )
    if bias is None:
        return query_vectors, stored
    if np.shape(bias) != (len(stored),):
        raise DimensionMismatch(
            f"biases must have shape ({len(stored)},) and have {np.shape(bias)}"
        )
    column = as_vectors(np.reshape(bias, (-1, 1)), "the biases")
    return np.hstack([query_vectors, np.full((len(query_vectors), 1), -1, np.float32)]), np.hstack(
        [stored, column]
    )


Counts = npt.NDArray[np.int64]


class HubnessSummary(NamedTuple):
    """Measures of one k-occurrence distribution. kurtosis: E(N_k − μ)⁴ / σ⁴ − 3, 0 for equal counts. largest: the
    largest N_k. antihubs: share of items that no query finds (Radovanović et al., JMLR 2010). From hub_occurrence to
    atkinson as scikit-hubness has them: the shares of all answers that are hubs, items with N_k ≥ 2k, and that are the
    largest hub; the Gini index, and Atkinson's for ε = ½, 0 for equal counts. entropy: of the item of a random answer,
    as a share of log n; 1 for equal counts."""

    skewness: float
    kurtosis: float
    excess_answers: float
    largest: int
    antihubs: float
    hub_occurrence: float
    groupie_ratio: float
    gini: float
    atkinson: float
    entropy: float


def k_occurrence(retrieved: npt.ArrayLike, n_items: int, k: int = DEPTH) -> Counts:
    """Return (n_items,) N_k: the number of queries with the item among their first k results (Radovanović et
    al., JMLR 2010). retrieved: (n_queries, ≥ k) numbers of items, best first. Raises InvalidInput, InvalidParameter."""
    k, n_items, results = (
        whole_number("k", k),
        whole_number("n_items", n_items),
        np.asarray(retrieved),
    )
    if results.ndim != 2 or results.shape[1] < k or len(results) == 0:
        raise InvalidInput(f"results must have shape (n_queries, {k} or more), not {results.shape}")
    numbers = results[:, :k].ravel()
    if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= n_items:
        raise InvalidInput(f"results must be numbers of items, 0 … {n_items - 1}")
    return np.bincount(numbers, minlength=n_items).astype(np.int64)


def skewness(counts: npt.ArrayLike) -> float:
    """Return E(N_k − μ)³ / σ³ over the items (Radovanović et al., JMLR 2010, eq. 1); 0 if all counts are equal."""
    return float(np.mean(_standardised(counts) ** 3))


def excess_answers(counts: npt.ArrayLike) -> float:
    """Return ½ Σ|N_k − μ| / Σ N_k, the excess answers taken by hubs, as a share: those to move for
    equal counts (the Robin Hood index of Feldbauer et al., 2018)."""
    values = _counts(counts)
    return float(np.abs(values - values.mean()).sum() / (2 * values.sum())) if values.any() else 0.0


def hubness_summary(counts: npt.ArrayLike, k: int = DEPTH) -> HubnessSummary:
    """Return all measures of a k-occurrence distribution (n_items,)."""
    values = _counts(counts)
    n, is_even = len(values), not np.ptp(values)
    shares = np.sort(values) / (values.sum() or 1.0)
    taken = shares[shares > 0]
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
        entropy=1.0 if is_even else float(-taken @ np.log(taken) / np.log(n)),
    )


def _standardised(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the counts with mean 0 and standard deviation 1, or zeros if all are equal."""
    values = _counts(counts)
    deviations = values - values.mean()
    standardised: npt.NDArray[np.float64] = deviations / (np.sqrt(np.mean(deviations**2)) or 1.0)
    return standardised


def _counts(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(counts, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise InvalidInput(f"counts must be 1-D, one for each item, not of shape {values.shape}")
    return values


PerQuery = npt.NDArray[np.float64]
Positives: TypeAlias = npt.NDArray[Any] | Sequence[int | Collection[int]]


class PositiveRanks(NamedTuple):
    """The ranks (p,) of all positives, from 1; those of query i are ranks[starts[i]:starts[i + 1]], best first."""

    ranks: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    @property
    def best(self) -> npt.NDArray[np.int64]:
        """Return (n_queries,) the rank of each query's best positive."""
        return self.ranks[self.starts[:-1]]

    def sums(self, values: PerQuery) -> PerQuery:
        """Return (n_queries,) the sums over each query's positives of values (p,)."""
        return np.add.reduceat(values, self.starts[:-1])


def ranks(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    positives: Positives,
    bias: npt.ArrayLike | None = None,
) -> PositiveRanks:
    """Return the rank of every positive under s(q, r) − b(r) among all gallery items. positives: for each query the
    number of its gallery item, or several. Scores that are equal up to float32 rounding rank behind the positive's.
    Memory: a tile of at least one row of scores. Raises InvalidInput, DimensionMismatch, NonFiniteVectors."""
    import torch

    query_vectors, stored = with_bias(queries, gallery, bias)
    items, starts = checked_positives(positives, len(query_vectors), len(stored))
    places = np.empty(len(items), np.int64)
    for part, scores in score_tensors(query_vectors, stored):
        margin = MARGIN * scores.abs().amax(1)
        first, last = starts[:-1][part], starts[1:][part]
        for nth in range(int((last - first).max())):
            some = np.flatnonzero(first + nth < last)
            pair = first[some] + nth
            here = torch.from_numpy(some).to(scores.device)
            own = scores[here]
            positive = own.gather(1, torch.from_numpy(items[pair, None]).to(scores.device))
            places[pair] = 1 + (own > positive + margin[here, None]).sum(1).cpu().numpy()
    return PositiveRanks(_in_order(places, starts), starts)


def score_tensors(queries: Vectors, gallery: Vectors) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the inner products of queries (m, d) with all items (n, d), in tiles of whole rows."""
    import torch

    return ((part, torch.as_tensor(scores)) for part, scores in score_tiles(queries, gallery))


class Outcome(NamedTuple):
    """The outcome of searches under several biases. ranks: (n_biases, n_queries) of each query's best positive, as in
    `ranks`; (n_biases, 0) without positives. retrieved: (n_biases, n_queries, at most 10) the first items."""

    ranks: npt.NDArray[np.int32]
    retrieved: npt.NDArray[np.int32]

    def of(self, queries: npt.NDArray[np.int64]) -> Outcome:
        """Return the outcome of these queries only."""
        return Outcome(self.ranks[:, queries], self.retrieved[:, queries])

    def gated(self, activated: Sequence[npt.NDArray[np.bool_] | None]) -> Outcome:
        """Return the outcome with a gate on each search but the first, the raw one: queries whose first raw item is not
        in the set keep the raw outcome. activated: (n_items,) whether an item is in the set; None without a gate."""
        result = Outcome(self.ranks.copy(), self.retrieved.copy())
        for row, members in enumerate(activated, 1):
            if members is not None:
                closed = ~members[self.retrieved[0, :, 0]]
                result.retrieved[row, closed] = self.retrieved[0, closed]
                if self.ranks.size:
                    result.ranks[row, closed] = self.ranks[0, closed]
        return result

    @property
    def hits(self) -> npt.NDArray[np.float64]:
        """Return (n_biases, n_queries) 1 if a positive is first, else 0."""
        first: npt.NDArray[np.float64] = (self.ranks == 1).astype(np.float64)
        return first


def assess(
    queries: Vectors,
    gallery: Vectors,
    biases: Sequence[Vectors],
    positives: Sequence[npt.NDArray[np.int64]] | None = None,
) -> Outcome:
    """Return the outcome of each bias (n_items,) for queries (n_queries, d) on a gallery (n_items, d). positives: for
    each query the numbers of its items. Memory: a tile of at least one row of scores."""
    import torch

    retrieved = np.empty((len(biases), len(queries), min(DEPTH, len(gallery))), np.int32)
    ranks = np.empty((len(biases), 0 if positives is None else len(queries)), np.int32)
    answers = None if positives is None else torch.from_numpy(_padded(positives))
    stacked = np.stack(biases)
    alike = np.array_split(np.argsort(stacked.std(1), kind="stable"), -(-len(biases) // TOGETHER))
    for part, scores in score_tensors(queries, gallery):
        own_answers = None if answers is None else answers[part].to(scores.device)
        for group in alike:
            some = torch.from_numpy(stacked[group]).to(scores)
            retrieved[group, part], some_ranks = _assess_together(
                scores, some, own_answers, retrieved.shape[2]
            )
            if some_ranks is not None:
                ranks[group, part] = some_ranks
    return Outcome(ranks, retrieved)


def _assess_together(
    scores: torch.Tensor, biases: torch.Tensor, answers: torch.Tensor | None, depth: int
) -> tuple[Counts, Counts | None]:
    """Return the first items (e, m, depth) of scores (m, n) under biases (e, n), and ranks (e, m) of answers (m, a).

    Each item's lowest and highest bias, apart from the mean of every bias, bound its corrected scores. Only those whose
    bounds do not decide are computed for each bias.
    """
    import torch

    (m, n), means, largest = scores.shape, biases.mean(1, keepdim=True), scores.abs().amax(1)
    least, most = scores - (biases - means).amax(0), scores - (biases - means).amin(0)
    rounding = 2 * MARGIN * (largest + 2 * biases.abs().max())[:, None]
    apart = n // GROUP if n >= GROUP * depth else n
    threshold = (
        least[:, : n // apart * apart].view(m, -1, apart).amax(1).topk(depth, dim=1).values[:, -1:]
    )
    rows, columns = (most >= threshold - rounding).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=m)
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    items = rows.new_zeros(m, int(counts.max()))
    near = scores.new_full(items.shape, -torch.inf)
    items[rows, slots], near[rows, slots] = columns, scores[rows, columns]
    best = [items.gather(1, (near - bias[items]).topk(depth, dim=1).indices) for bias in biases]
    first = torch.stack(best).cpu().numpy()
    if answers is None:
        return first, None
    own = (scores.gather(1, answers) - biases[:, answers]).amax(2)
    limits = own + MARGIN * largest.clamp(min=biases.abs().amax(1, keepdim=True))
    above = least > (limits + means).amax(0)[:, None] + rounding
    rows, columns = ((most > (limits + means).amin(0)[:, None] - rounding) & ~above).nonzero(
        as_tuple=True
    )
    near, certain = scores[rows, columns], 1 + above.sum(1)
    pairs = zip(biases, limits, strict=True)
    ranks = [
        certain + rows[near - bias[columns] > limit[rows]].bincount(minlength=m)
        for bias, limit in pairs
    ]
    return first, torch.stack(ranks).cpu().numpy()


def excess_answers_of(outcome: Outcome, n_items: int) -> npt.NDArray[np.float64]:
    """Return (n_biases,) the share of excess answers taken by hubs among the answers to all queries."""
    return np.array(
        [
            excess_answers(k_occurrence(items, n_items, items.shape[1]))
            for items in outcome.retrieved
        ]
    )


def _padded(positives: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return (n_queries, most) the items of each query, filled up with its first."""
    most = max(map(len, positives))
    return np.stack(
        [np.pad(items, (0, most - len(items)), constant_values=items[0]) for items in positives]
    )


def _in_order(
    places: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return each query's ranks in ascending order, with distinct ranks for several equal positives."""
    query = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    places = places[np.lexsort((places, query))]
    nth = np.arange(len(places)) - starts[query]
    apart = places.max(initial=0) + len(places) + 1
    rising = np.maximum.accumulate(places - nth + query * apart)
    in_order: npt.NDArray[np.int64] = rising + nth - query * apart
    return in_order


def checked_positives(
    positives: Positives, n_queries: int, n_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return all positives, sorted by query and without duplicates, and the start of each query's positives."""
    if len(positives) != n_queries:
        raise InvalidInput(
            f"positives cover {len(positives)} queries, but {n_queries} queries were passed"
        )
    if n_queries == 0 or n_items == 0:
        raise InvalidInput("queries or gallery items are missing")
    sets = [sorted(set(one)) if isinstance(one, Iterable) else [one] for one in positives]
    if missing := [query for query, one in enumerate(sets) if not one]:
        raise InvalidInput(
            f"no positive for query {name_some(missing)}: each query needs at least one"
        )
    starts = np.concatenate([[0], np.cumsum([len(one) for one in sets])])
    items = np.array([item for one in sets for item in one])
    if items.dtype.kind not in "iu":
        raise InvalidInput("positives must be the numbers of gallery items")
    if len(astray := np.flatnonzero((items < 0) | (items >= n_items))):
        lost = sorted({int(query) for query in np.searchsorted(starts, astray, "right") - 1})
        raise InvalidInput(
            f"positives of query {name_some(lost)} are not among the {n_items} gallery items"
        )
    return items.astype(np.int64), starts


def hits(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) 1 if a positive is among the first k, else 0; the mean is R@k."""
    return (ranks.best <= whole_number("k", k)).astype(np.float64)


def average_precisions(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) AP@k = Σ (i / rank_i) / min(p, k) over those of the p positives i = 1, 2, …, ordered by rank,
    that are among the first k (Manning et al., Introduction to Information Retrieval, 2008, 8.4)."""
    k = whole_number("k", k)
    counts = np.diff(ranks.starts)
    nth = 1 + np.arange(len(ranks.ranks)) - np.repeat(ranks.starts[:-1], counts)
    return ranks.sums(nth / ranks.ranks * (ranks.ranks <= k)) / np.minimum(counts, k)


def ndcgs(ranks: PositiveRanks, k: int) -> PerQuery:
    """Return (n_queries,) nDCG@k with gain 1 for a positive (Järvelin and Kekäläinen, 2002): Σ 1 / log2(1 + rank) over
    the positives among the first k, divided by its value with all positives in front."""
    k = whole_number("k", k)
    gained = ranks.sums((ranks.ranks <= k) / np.log2(1 + ranks.ranks))
    best = np.cumsum(1 / np.log2(1 + np.arange(1, k + 1)))
    ndcgs: PerQuery = gained / best[np.minimum(np.diff(ranks.starts), k) - 1]
    return ndcgs


def retrieval_summary(
    ranks: PositiveRanks, ks: Sequence[int] = (1, 5, 10), depth: int = 10
) -> dict[str, float]:
    """Return R@k for each k, median and mean rank of the best positive, MRR (Voorhees, TREC-8, 1999), mAP and nDCG."""
    return {
        **{f"R@{k}": float(hits(ranks, k).mean()) for k in ks},
        "MdR": float(np.median(ranks.best)),
        "MnR": float(ranks.best.mean()),
        "MRR": float((1 / ranks.best).mean()),
        f"mAP@{depth}": float(average_precisions(ranks, depth).mean()),
        f"nDCG@{depth}": float(ndcgs(ranks, depth).mean()),
    }


def as_plain(value: Any) -> Any:
    """Return dataclasses and named tuples as dicts, estimators as in `estimators.to_dict`, NumPy numbers as numbers,
    and other values that JSON lacks as strings."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if type(value).__name__ in ESTIMATORS:
        return to_dict(value)
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(one) for one in value]
    is_plain = (
        value is None
        or isinstance(value, str | int)
        or (isinstance(value, float) and isfinite(value))
    )
    return value if is_plain else str(value)
