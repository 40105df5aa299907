"""The recall gate of a migration: the recall that an ANN index loses with augmented vectors, on a sample."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.kernels.ann import AnnIndex, IndexSpec, SearchParameter
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.measures import Interval, confidence_interval

ROWS = 20_000
QUERIES = 500
K = 10
GRAPH_BUDGET = 5e8
"""Rows × width × efConstruction × M/16 of one graph: at most about 3.5 s on two cores."""
LIMIT = 16
"""Factor on the search parameter up to which it is tried."""
ROUNDING = 2.0**-22

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RecallGate:
    """recall@k (Aumüller, Bernhardsson and Faithfull, ANN-Benchmarks, 2017), with its 95% interval
    over the queries, of an index of r (raw) and of <r, b − c> (stored), each against the exact top
    k of the same scores.

    index_params: of the measured index, with nlist in proportion to the rows. measured_as: its kind
    if it is not index_type. search_parameter, value: None if the index has none. needed: the least
    value, up to LIMIT times the present one, at which the stored recall is at most one standard
    error of the paired difference below the raw.
    """

    rows: int
    queries: int
    k: int
    index_type: str
    index_params: Mapping[str, Any]
    measured_as: str | None
    search_parameter: SearchParameter | None
    value: int | None
    raw: Interval
    stored: Interval
    needed: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        recalls = {
            name: {bound: round(share, 4) for bound, share in getattr(self, name)._asdict().items()}
            for name in ("raw", "stored")
        }
        return {**asdict(self), "index_params": dict(self.index_params), **recalls}


def measure_recall(
    layout: Layout,
    vectors: npt.ArrayLike,
    biases: npt.ArrayLike,
    queries: npt.ArrayLike,
    index_type: str,
    index_params: Mapping[str, Any],
    *,
    rows_total: int | None = None,
    at_most: int | None = None,
    value: int | None = None,
    graph_hint: bool = True,
    locality_hints: npt.ArrayLike | None = None,
    length_pull: bool = True,
) -> RecallGate:
    """Measure recall@10 of the index in each form, and the ef or nprobe at which it equals the raw
    recall again.

    vectors (n, d) as the user inserted them; biases (n,) b − c; queries (m, d), m ≥ 2; at most ROWS and QUERIES usable
    ones are drawn. rows_total: rows of the collection, n by default. at_most: rows to measure, `affordable_rows` by
    default. value: the user's ef or nprobe, Milvus's default by default. graph_hint, length_pull: see `measured_on`.
    locality_hints: (n, c), zeros by default. Compare the two recalls only with each other: the nearest items of a
    sample are easier to find than those of all rows. Raises InvalidParameter, FaissConflict, InvalidInput.
    """
    rows = np.asarray(vectors, np.float32)
    query_vectors = np.asarray(queries, np.float32)
    columns = None if locality_hints is None else np.asarray(locality_hints)
    subtracted = np.asarray(biases, np.float32)
    spec = IndexSpec.of(index_type, index_params)
    rng = np.random.default_rng(0)
    limit = (
        affordable_rows(layout.width, spec) if at_most is None else whole_number("at_most", at_most)
    )
    chosen = _drawn(np.flatnonzero(~layout.invalid(rows)), min(limit, ROWS), rng)
    query_vectors = query_vectors[
        _drawn(np.flatnonzero(~layout.invalid(query_vectors)), QUERIES, rng)
    ]
    if len(chosen) < 2 or len(query_vectors) < 2:
        raise InvalidInput(
            f"recall needs two valid rows and queries, got {len(chosen)} and {len(query_vectors)}"
        )
    total = max(
        len(rows), whole_number("rows_total", len(rows) if rows_total is None else rows_total)
    )
    spec = spec.for_sample(len(chosen), total)
    rows = rows[chosen]
    subtracted = subtracted[chosen]
    columns = None if columns is None else columns[chosen]
    k = min(K, len(rows))
    if spec.search_parameter is None or value is None:
        value = spec.default_value(k)
    else:
        value = whole_number(
            spec.search_parameter, value, at_least=k if spec.search_parameter == "ef" else 1
        )

    reduced = layout.reduce_items(rows)
    reduced_queries = layout.reduce_queries(query_vectors)
    scores = reduced_queries.astype(np.float64) @ reduced.astype(np.float64).T
    if layout.metric == "L2":
        reduced = rows
        reduced_queries = query_vectors
    form = _Form(reduced, reduced_queries, "L2" if layout.metric == "L2" else "IP", scores, k, spec)
    raw = form.recalls(value)
    scores -= subtracted
    fitted = measured_on(
        layout, rows, query_vectors, graph_hint=graph_hint, length_pull=length_pull
    )
    stored = fitted.augment(rows, subtracted, columns)
    sent = fitted.encode_queries(query_vectors)
    form = _Form(stored, sent, "IP", scores, k, spec)
    return RecallGate(
        rows=len(rows),
        queries=len(query_vectors),
        k=k,
        index_type=index_type,
        index_params=spec.params,
        measured_as=None if spec.kind == index_type.upper() else spec.kind,
        search_parameter=spec.search_parameter,
        value=value,
        raw=confidence_interval(raw),
        stored=confidence_interval(form.recalls(value)),
        needed=_needed(form, raw, value),
    )


def affordable_rows(width: int, spec: IndexSpec) -> int:
    """Return the number of rows within GRAPH_BUDGET; ROWS if no graph is built."""
    if spec.search_parameter != "ef":
        return ROWS
    effort = spec.params["efConstruction"] * spec.params["M"] / 16
    return min(ROWS, max(1, int(GRAPH_BUDGET / (width * effort))))


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
        self.least = np.partition(scores, -k, axis=1)[:, -k] - ROUNDING * magnitude

    def recalls(self, value: int | None) -> Scores:
        """Return (m,) the recall of each query; answers as good as the k-th best count, up to
        float32 rounding.
        """
        retrieved = self.index.search(self.queries, self.k, value)
        good = np.take_along_axis(self.scores, np.maximum(retrieved, 0), 1) >= self.least[:, None]
        recalls: Scores = (good & (retrieved >= 0)).mean(axis=1)
        return recalls


def _needed(form: _Form, raw: Scores, value: int | None) -> int | None:
    """Return the least search parameter that reaches the raw recall, by doubling and bisection."""
    if value is None:
        return None

    def holds(candidate: int) -> bool:
        difference = form.recalls(candidate) - raw
        return bool(difference.mean() >= -difference.std(ddof=1) / np.sqrt(len(difference)))

    most = min(LIMIT * value, form.index.spec.params.get("nlist", LIMIT * value))
    low = value - 1
    high = value
    while not holds(high):
        if high >= most:
            return None
        low = high
        high = min(2 * high, most)
    return bisect_left(range(high), True, low + 1, key=holds)


def _drawn(numbers: npt.NDArray[Any], count: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Return at most `count` of the numbers, in order."""
    return numbers if len(numbers) <= count else np.sort(rng.choice(numbers, count, replace=False))
