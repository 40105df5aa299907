"""Rows of a gallery that look like planted hubs, with the evidence for each. Numbers only.

The reach of a row is counted behind the sixteen best rows of each query: were fifty hubs planted,
each would hide behind the others in the first ranks. From how far the upper ranks of a gallery
spread, a limit follows that no row of an ordinary gallery exceeds; hubs that are already there do not
move it, as long as they are fewer than a tenth of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import ALERT_BUDGET
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.guard import FEWEST_ROWS
from milvus_hubness.correction.kernels import topk
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.quality.clusters import clusters_of

SKIPPED = 16
"""Best rows of a query that are skipped."""
COUNTED = 10
"""Rows behind them, whose mean score a row must exceed to count as an answer."""
MOST_QUERIES = 10_000
"""Bank queries of a scan; of more, so many are drawn."""
MOST_PRODUCTS = 1 << 23
"""Products in memory at once."""

LOWER, UPPER = 0.5, 0.9
"""The quantiles of the reach from which the limit follows."""
TAIL_MARGIN = 2.0
"""Factor on the tail beyond UPPER, which would be exponential for 1.

Chosen on docstring_code, caption_document and text_video_msrvtt t2v, of 1, 1.5, 2 and 3.
"""
MOST_CLUSTERED = 2_000
"""About how many bank queries the clusters are computed on."""
TOPICS = 16
"""Clusters of bank queries over which the spread of a row is measured."""
FEWEST_OF_TOPIC = 5
"""Bank queries for each cluster, on average; of fewer, there are fewer clusters."""
UNIVERSAL_SPREAD = 1 / 3
"""A row that is an answer in so many of the clusters, as a share, is a hub of all topics."""

COPY = 0.98
"""Cosine with a bank query from which on a row is called a near copy of it."""
LONG = 6.0
"""Robust z-score of the length from which on a row is called long, under IP."""
MANY = 100
"""Rows with one vector from which on they are a fault of the data."""


class Evidence(NamedTuple):
    """What a scan has measured of one row."""

    row: int
    """Its position."""
    suspicion: float
    """Its reach, as a multiple of the limit; above 1 it is suspicious."""
    reach: float
    """Share of bank queries that it is an answer of."""
    robust_z: float
    """The distance of its reach from the median, in scaled median deviations."""
    spread: float
    """Over how many clusters of queries its answers spread, as a share: 1 for evenly over all."""
    scope: str
    """`universal` or `topic`."""
    bias_quantile: float | None
    """Share of the rows whose bias is at most its own; None without biases."""
    nearest_query: int
    """Number of the bank query that is nearest to it."""
    nearest_cosine: float
    length_z: float
    """The distance of its length from the median, in scaled median deviations."""
    remarks: tuple[str, ...]
    """Short words about it: near copy of a query, long vector."""


@dataclass(frozen=True)
class Suspicions:
    """The suspicious rows of a gallery."""

    rows: int
    """Number of rows that were scanned."""
    limit: float
    """The reach above which a row is suspicious."""
    listed: tuple[Evidence, ...]
    """The rows of the largest suspicion, suspicious or not, most suspicious first."""
    suspicious: tuple[int, ...]
    """Positions of all suspicious rows, most suspicious first."""
    zero_vectors: tuple[int, ...]
    """Positions of rows of length 0."""
    repeated: tuple[tuple[int, ...], ...]
    """Groups of a hundred or more rows with one vector."""

    @property
    def share(self) -> float:
        """The share of the rows that are suspicious."""
        return len(self.suspicious) / self.rows

    def exceeds(self, alert_budget: float) -> bool:
        """Whether more rows are suspicious than this share of all."""
        return len(self.suspicious) > alert_budget * self.rows


def expect_budget(alert_budget: object) -> float:
    """Return a share of rows from 0 to 1, or raise InvalidParameter."""
    is_number = isinstance(alert_budget, int | float) and not isinstance(alert_budget, bool)
    if not is_number or not 0 <= alert_budget <= 1:  # type: ignore[operator]
        raise InvalidParameter(f"alert_budget is a share from 0 to 1, not {alert_budget!r}")
    return float(alert_budget)  # type: ignore[arg-type]


def scan(
    queries: Floats,
    items: Floats,
    *,
    biases: Floats | None = None,
    by_guard: Floats | None = None,
    lengths: Floats | None = None,
    top: int = 50,
) -> Suspicions:
    """Return the suspicious rows among items (n, d), n ≥ 200, by bank queries (m, d).

    Both are reduced to inner products. biases: (n,), for the evidence. by_guard: (n,), reaches of the
    rows as multiples of the limit of the hub guard, measured against the gallery at its fit. lengths:
    (n,) of the vectors; by default those of the items. top: how many rows get evidence at most,
    beyond the suspicious ones. Raises InvalidInput for fewer rows.
    """
    if len(items) < FEWEST_ROWS:
        raise InvalidInput(
            f"{len(items):,} rows are too few to see which are hubs: a scan takes {FEWEST_ROWS}"
        )
    if len(queries) > MOST_QUERIES:
        drawn = np.sort(np.random.default_rng(0).permutation(len(queries))[:MOST_QUERIES])
    else:
        drawn = np.arange(len(queries))
    sampled_queries = np.ascontiguousarray(queries[drawn], np.float32)

    references = _references(sampled_queries, items)
    topics = _topics(sampled_queries)
    reaches, by_topic = _reaches(sampled_queries, items, references, topics)
    limit = _limit(reaches)
    suspicion = reaches / limit
    if by_guard is not None:
        suspicion = np.maximum(suspicion, by_guard)

    order = np.argsort(-suspicion, kind="stable")
    suspicious = order[suspicion[order] > 1]
    chosen = order[: max(top, len(suspicious))]
    lengths = np.linalg.norm(items, axis=1) if lengths is None else lengths
    facts = _Facts(sampled_queries, drawn, items, reaches, suspicion, by_topic, biases, lengths)
    return Suspicions(
        rows=len(items),
        limit=limit,
        listed=tuple(facts.of(chosen)),
        suspicious=tuple(suspicious.tolist()),
        zero_vectors=tuple(np.flatnonzero(lengths == 0).tolist()),
        repeated=_repeated(items),
    )


def _references(queries: Floats, items: Floats) -> Floats:
    """Return the mean score (m,) of ranks 17 to 26 of each query."""
    best = topk(queries, np.ascontiguousarray(items, np.float32), SKIPPED + COUNTED)
    means: Floats = np.asarray(best.values)[:, SKIPPED:].mean(axis=1, dtype=np.float64)
    return means.astype(np.float32)


def _topics(queries: Floats) -> npt.NDArray[np.int64]:
    """Return the cluster of each query, (m,)."""
    sample = queries[:: max(1, len(queries) // MOST_CLUSTERED)]
    distinct = len(np.unique(sample, axis=0))
    count = max(1, min(TOPICS, len(queries) // FEWEST_OF_TOPIC, distinct))
    topics, _ = clusters_of(sample, count, rounds=20).nearest(queries)
    return topics


def _reaches(
    queries: Floats, items: Floats, references: Floats, topics: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the reach of each row (n,), and its reach within each cluster of queries, (n, c)."""
    members = np.eye(topics.max() + 1, dtype=np.float32)[topics]
    counts = np.zeros((len(items), members.shape[1]), np.float64)
    size = max(1, MOST_PRODUCTS // len(queries))
    for start in range(0, len(items), size):
        products = items[start : start + size] @ queries.T
        counts[start : start + size] = (products > references).astype(np.float32) @ members
    return counts.sum(axis=1) / len(queries), counts / members.sum(axis=0)


def _limit(reaches: npt.NDArray[np.float64]) -> float:
    """Return the reach that no row of an ordinary gallery exceeds."""
    lower, upper = np.quantile(reaches, [LOWER, UPPER])
    scale = (upper - lower) / np.log((1 - LOWER) / (1 - UPPER))
    # Rows that differ in nothing have no tail: one answer more is no suspicion.
    least = 2 / len(reaches)
    return float(max(upper + TAIL_MARGIN * scale * np.log((1 - UPPER) / ALERT_BUDGET), least))


def _robust_z(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Return distances from the median in units of 1.4826 median absolute deviations."""
    values = np.asarray(values, np.float64)
    median = float(np.median(values))
    deviation = 1.4826 * np.median(np.abs(values - median))
    # A row of equal numbers has no scale.
    scores: npt.NDArray[np.float64] = (values - median) / max(
        deviation, 1e-9 * max(1.0, abs(median))
    )
    return scores


def _repeated(items: Floats) -> tuple[tuple[int, ...], ...]:
    """Return the groups of a hundred or more equal rows, the largest first."""
    rows = np.ascontiguousarray(items)
    as_bytes = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, group, sizes = np.unique(as_bytes, return_inverse=True, return_counts=True)
    large = [number for number in np.argsort(-sizes).tolist() if sizes[number] >= MANY]
    return tuple(tuple(np.flatnonzero(group == number).tolist()) for number in large)


@dataclass(frozen=True)
class _Facts:
    """The evidence of rows, by position."""

    queries: Floats
    drawn: npt.NDArray[np.int64]
    """The number in the bank of each query."""
    items: Floats
    reaches: npt.NDArray[np.float64]
    suspicion: npt.NDArray[np.float64]
    by_topic: npt.NDArray[np.float64]
    biases: Floats | None
    lengths: Floats

    def of(self, rows: npt.NDArray[np.int64]) -> list[Evidence]:
        """Return the evidence of these rows."""
        if not len(rows):
            return []
        z = _robust_z(self.reaches)
        length_z = _robust_z(self.lengths)
        nearest, cosines = self._nearest(rows)
        sorted_biases = None if self.biases is None else np.sort(self.biases)

        evidence: list[Evidence] = []
        for position, row in enumerate(rows.tolist()):
            spread = _spread(self.by_topic[row])
            quantile = None
            if sorted_biases is not None and self.biases is not None:
                below = np.searchsorted(sorted_biases, self.biases[row], side="right")
                quantile = float(below / len(sorted_biases))
            cosine = float(cosines[position])
            query = int(self.drawn[nearest[position]])
            remarks = []
            if cosine >= COPY:
                remarks.append(f"near copy of bank query {query}")
            if length_z[row] > LONG:
                remarks.append("long vector")
            evidence.append(
                Evidence(
                    row=row,
                    suspicion=float(self.suspicion[row]),
                    reach=float(self.reaches[row]),
                    robust_z=float(z[row]),
                    spread=spread,
                    scope="universal" if spread >= UNIVERSAL_SPREAD else "topic",
                    bias_quantile=quantile,
                    nearest_query=query,
                    nearest_cosine=cosine,
                    length_z=float(length_z[row]),
                    remarks=tuple(remarks),
                )
            )
        return evidence

    def _nearest(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the nearest query of each row by cosine, and the cosine."""
        queries = _directions(self.queries)
        items = _directions(self.items[rows])
        best = topk(items, queries, 1)
        return np.asarray(best.indices)[:, 0], np.asarray(best.values)[:, 0]


def _directions(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    directions: Floats = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return directions


def _spread(by_topic: npt.NDArray[np.float64]) -> float:
    """Return over how many clusters the answers spread, as a share of all: e^entropy / clusters."""
    total = by_topic.sum()
    if total == 0:
        return 0.0
    shares = by_topic[by_topic > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()) / len(by_topic))
