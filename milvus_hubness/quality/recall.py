"""The recall gate of a migration: the recall that an ANN index loses with augmented vectors.

It is measured on a sample, in indexes that FAISS builds here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.kernels.ann import AnnIndex, IndexSpec, SearchParameter
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kinds import KindNumbers, Kinds
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.measures import Interval, confidence_interval

ROWS = 20_000
"""Rows that are measured at most."""
QUERIES = 500
"""Queries that are measured at most."""
K = 10
GRAPH_BUDGET = 5e8
"""Rows × width × efConstruction × M/16 of one graph: at most about 3.5 s on two cores."""
LIMIT = 16
"""Factor on the search parameter up to which it is tried."""
ROUNDING = 2.0**-22
"""Error of a float32 score, as a share of the squared lengths, that costs no recall."""

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RecallGate(ShownAsTable):
    """recall@k of an index of r (raw) and of <r, b − c> (stored), on a sample.

    Each is against the exact top k of the same scores (Aumüller, Bernhardsson and Faithfull,
    ANN-Benchmarks, 2017), with its 95% interval over the queries.
    """

    rows: int
    queries: int
    k: int
    index_type: str

    index_params: Mapping[str, Any]
    """Of the measured index, with nlist in proportion to the rows."""

    measured_as: str | None
    """The type of the measured index if it is not `index_type`."""

    search_parameter: SearchParameter | None
    """None if the index has none."""

    value: int | None
    """That of the search parameter; None if the index has none."""

    raw: Interval
    stored: Interval

    needed: int | None
    """The least value, up to `LIMIT` times the present one, at which the stored recall is at most
    one standard error of the paired difference below the raw; None if there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        recalls = {
            name: {bound: round(share, 4) for bound, share in getattr(self, name)._asdict().items()}
            for name in ("raw", "stored")
        }
        return {**asdict(self), "index_params": dict(self.index_params), **recalls}


@dataclass(frozen=True, eq=False)
class RecallSample:
    """The rows and queries to measure with."""

    vectors: Floats
    """(n, d) rows as the user inserted them."""

    biases: Floats
    """(n,) b − c."""

    queries: Floats
    """(m, d)."""

    locality_hints: npt.NDArray[Any] | None = None
    """(n, c); None for zeros."""

    kinds: KindNumbers | None = None
    """(n,), the kinds of the rows; None without kinds."""

    def drawn(self, layout: Layout, row_limit: int) -> RecallSample:
        """Return at most `row_limit` valid rows, and at most QUERIES valid queries, in float32.

        Raises InvalidInput for fewer than two of either.
        """
        rows = np.asarray(self.vectors, np.float32)
        queries = np.asarray(self.queries, np.float32)
        rng = np.random.default_rng(0)
        chosen = _drawn(np.flatnonzero(~layout.invalid(rows)), row_limit, rng)
        chosen_queries = _drawn(np.flatnonzero(~layout.invalid(queries)), QUERIES, rng)
        if len(chosen) < 2 or len(chosen_queries) < 2:
            raise InvalidInput(
                f"recall needs two valid rows and queries, got {len(chosen)} and "
                f"{len(chosen_queries)}"
            )
        return RecallSample(
            rows[chosen],
            np.asarray(self.biases, np.float32)[chosen],
            queries[chosen_queries],
            None if self.locality_hints is None else np.asarray(self.locality_hints)[chosen],
            None if self.kinds is None else self.kinds[chosen],
        )


class MeasuredIndex(NamedTuple):
    """An index as the user has it."""

    index_type: str

    index_params: Mapping[str, Any]

    value: int | None = None
    """The user's ef or nprobe; None for Milvus's default."""

    graph_hint: bool = True
    """Whether it gains by the graph hint, see `measured_on`."""

    length_pull: bool = True
    """Whether it gains by the pull of lengths, see `measured_on`."""


def measure_recall(
    layout: Layout,
    sample: RecallSample,
    index: MeasuredIndex,
    *,
    kinds: Kinds | None = None,
    rows_total: int | None = None,
    at_most: int | None = None,
) -> RecallGate:
    """Measure recall@10 of the index in each form, and the ef or nprobe that restores the raw one.

    sample: with at least two queries. At most ROWS and QUERIES valid ones are drawn. kinds: those by
    whose means the augmented form compares. rows_total: rows of the collection, those of the sample by
    default. at_most: rows to measure, `affordable_rows` by default.

    Compare the two recalls only with each other: the nearest items of a sample are easier to find
    than those of all rows. Raises InvalidParameter, FaissConflict, InvalidInput.
    """
    spec = IndexSpec.of(index.index_type, index.index_params)
    if at_most is None:
        at_most = affordable_rows(layout.width, spec)
    given_rows = len(sample.vectors)
    sample = sample.drawn(layout, min(whole_number("at_most", at_most), ROWS))
    row_count = len(sample.vectors)

    total = given_rows if rows_total is None else whole_number("rows_total", rows_total)
    spec = spec.for_sample(row_count, max(given_rows, total))
    k = min(K, row_count)
    value = _search_value(spec, index.value, k)

    items = layout.reduce_items(sample.vectors)
    reduced_queries = layout.reduce_queries(sample.queries)
    scores = reduced_queries.astype(np.float64) @ items.astype(np.float64).T
    # The exact scores are inner products in any metric, but a raw L2 index has the vectors as they
    # are, and its search is what the augmented form is compared with.
    if layout.metric == "L2":
        raw_form = _Form(sample.vectors, sample.queries, "L2", scores, k, spec)
    else:
        raw_form = _Form(items, reduced_queries, "IP", scores, k, spec)
    raw = raw_form.recalls(value)
    del raw_form

    # In place, since a second table of scores may be large: the raw form had to be done with it.
    if kinds is not None and sample.kinds is not None:
        items = kinds.centred_items(items, sample.kinds).astype(np.float64)
        scores = kinds.centred_queries(reduced_queries).astype(np.float64) @ items.T
    scores -= sample.biases
    fitted = measured_on(
        layout,
        sample.vectors,
        sample.queries,
        graph_hint=index.graph_hint,
        length_pull=index.length_pull,
    )
    augmented = fitted.augment(sample.vectors, sample.biases, sample.locality_hints, sample.kinds)
    weights = None if kinds is None else kinds.weights()
    sent = fitted.encode_queries(sample.queries, kinds=weights)
    augmented_form = _Form(augmented, sent, "IP", scores, k, spec)

    return RecallGate(
        rows=row_count,
        queries=len(sample.queries),
        k=k,
        index_type=index.index_type,
        index_params=spec.params,
        measured_as=None if spec.kind == index.index_type.upper() else spec.kind,
        search_parameter=spec.search_parameter,
        value=value,
        raw=confidence_interval(raw),
        stored=confidence_interval(augmented_form.recalls(value)),
        needed=_needed(augmented_form, raw, value),
    )


def affordable_rows(width: int, spec: IndexSpec) -> int:
    """Return the number of rows within GRAPH_BUDGET; ROWS if no graph is built."""
    if spec.search_parameter != "ef":
        return ROWS
    effort = spec.params["efConstruction"] * spec.params["M"] / 16
    return min(ROWS, max(1, int(GRAPH_BUDGET / (width * effort))))


def _drawn(numbers: npt.NDArray[Any], count: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Return at most `count` of the numbers, in order."""
    return numbers if len(numbers) <= count else np.sort(rng.choice(numbers, count, replace=False))


def _search_value(spec: IndexSpec, value: int | None, k: int) -> int | None:
    """Return the user's search parameter or, without one, Milvus's default."""
    if spec.search_parameter is None or value is None:
        return spec.default_value(k)
    # Milvus refuses an ef below the number of answers.
    at_least = k if spec.search_parameter == "ef" else 1
    return whole_number(spec.search_parameter, value, at_least=at_least)


class _Form:
    """One form of the stored items, with its exact scores (m, n)."""

    def __init__(
        self,
        items: Floats,
        queries: Floats,
        metric: Literal["IP", "L2"],
        scores: Scores,
        k: int,
        spec: IndexSpec,
    ) -> None:
        self.index = AnnIndex(items, spec, metric=metric)
        self.queries = queries
        self.scores = scores
        self.k = k

        longest = np.square(items, dtype=np.float64).sum(axis=1).max()
        magnitude = (np.square(queries, dtype=np.float64).sum(axis=1) + longest) / 2
        kth_best = np.partition(scores, -k, axis=1)[:, -k]
        # (m,) the score from which on an answer counts as one of the k best. The index computes in
        # float32, so it may well prefer an item that is worse by a rounding error.
        self.limits = kth_best - ROUNDING * magnitude

    def recalls(self, value: int | None) -> Scores:
        """Return (m,) the recall of each query.

        Answers as good as the k-th best count, up to float32 rounding.
        """
        retrieved = self.index.search(self.queries, self.k, value)
        # FAISS fills up with −1 where it finds fewer than k.
        is_answer = retrieved >= 0
        answer_scores = np.take_along_axis(self.scores, np.maximum(retrieved, 0), 1)
        is_right = is_answer & (answer_scores >= self.limits[:, None])
        recalls: Scores = is_right.mean(axis=1)
        return recalls


def _needed(form: _Form, raw: Scores, value: int | None) -> int | None:
    """Return the least search parameter that reaches the raw recall, by doubling and bisection."""
    if value is None:
        return None

    def reaches_raw(candidate: int) -> bool:
        difference = form.recalls(candidate) - raw
        standard_error = difference.std(ddof=1) / np.sqrt(len(difference))
        return bool(difference.mean() >= -standard_error)

    # More cells than nlist cannot be probed.
    most = min(LIMIT * value, form.index.spec.params.get("nlist", LIMIT * value))
    too_small = value - 1
    enough = value
    while not reaches_raw(enough):
        if enough >= most:
            return None
        too_small = enough
        enough = min(2 * enough, most)

    return bisect_left(range(enough), True, too_small + 1, key=reaches_raw)
