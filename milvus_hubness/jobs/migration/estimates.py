"""What a migration takes and loses, as a sample of the rows shows: memory, time, recall and order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import BYTES, Dtype, Floats, decode, rounded
from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.kernels.multi_vectors import is_multi
from milvus_hubness.correction.kinds import KindNumbers
from milvus_hubness.correction.prior import Values
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.jobs.common.choice import Chosen
from milvus_hubness.jobs.common.gallery import FitRows
from milvus_hubness.jobs.common.plan import Draft
from milvus_hubness.jobs.migration.survey import Survey, scan_chunk
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.quality.recall import (
    ROWS,
    MeasuredIndex,
    RecallGate,
    RecallSample,
    measure_recall,
)

ESTIMATED_ROWS = 512
"""Rows whose correction is timed for the estimates; reads are timed by a page, as jobs read them."""
GRAPH_INDEXES = {"HNSW", "HNSW_SQ", "HNSW_PQ", "HNSW_PRQ", "AUTOINDEX", ""}
"""Index types that hold a graph; no type, too, leaves the choice to the server."""
DEFAULT_LINKS = 30
"""Default M of Milvus's HNSW, for an index that names
none: each row has up to 2·M links of four bytes.
"""


def widths_of(layout: Layout, vector: VectorField) -> dict[str, int]:
    """Return the numbers per vector of the source and of a copy with this layout."""
    return {"source": layout.dim, "target": form_of(layout, vector.dtype).width}


class Estimates(NamedTuple):
    """What a migration is expected to take, from a sample of the rows."""

    seconds: float
    """Of copy and verification, if a write and a comparison take as long as a read."""
    memory_bytes: dict[str, int]
    """Of the loaded source and of the loaded target."""
    vectors_per_row: float
    """The mean number of vectors in a row: 1 unless rows have several."""


def estimates(store: Store, draft: Draft, surveyed: Survey, chosen: Chosen) -> Estimates:
    """Estimate a migration. Also check on a sample that the estimator can be fitted on this bank."""
    largest_chunk = max(surveyed.chunks, key=lambda chunk: chunk.rows)
    began = time.perf_counter()
    batch = scan_chunk(
        store, draft.source.name, draft.field, largest_chunk, limit=surveyed.page_rows
    )
    reading_seconds = time.perf_counter() - began
    return estimated(
        batch,
        reading_seconds,
        lambda rows: chosen.fit(chosen.fit_rows(rows.vectors, rows.items)),
        draft.vector,
        widths_of(chosen.layout, draft.vector),
        surveyed.rows,
    )


def estimated(
    batch: Batch,
    reading_seconds: float,
    correct: Callable[[Batch], object],
    vector: VectorField,
    widths: Mapping[str, int],
    rows: int,
) -> Estimates:
    """Estimate a copy of so many rows from a page of them, and the seconds that its read took.

    correct: computes the biases of these rows. widths: the numbers per vector of the source and of
    the target.
    """
    corrected = batch.take(range(min(len(batch), ESTIMATED_ROWS)))
    began = time.perf_counter()
    correct(corrected)
    correcting_seconds = time.perf_counter() - began

    sampled_rows = max(1, len(batch))
    # The copy reads and writes each row; the verification reads it on both sides.
    seconds_a_row = 4 * reading_seconds / sampled_rows
    seconds_a_row += correcting_seconds / max(1, len(corrected))
    seconds = seconds_a_row * rows

    per_row = 1.0
    if is_multi(batch.vectors):
        per_row = len(batch.vectors.tokens) / sampled_rows
    other_bytes = sum(len(json.dumps(row, default=str)) for row in batch.rows) / sampled_rows
    graph_bytes = 0
    if vector.index_type in GRAPH_INDEXES:
        graph_bytes = 2 * 4 * int(vector.index_params.get("M", DEFAULT_LINKS))
    memory_bytes = {
        name: int(rows * (other_bytes + graph_bytes + BYTES[vector.dtype] * width * per_row))
        for name, width in widths.items()
    }
    return Estimates(seconds, memory_bytes, per_row)


def recall_gate(store: Store, draft: Draft, surveyed: Survey, chosen: Chosen) -> RecallGate:
    """Measure the recall that the collection's own kind of index loses with the augmented form, on
    up to ROWS rows.
    """
    info = draft.source
    field = draft.field

    # Chunks in random order: each costs one request, and rows of all ages are among them.
    pages: list[Batch] = []
    rows_left = ROWS
    for chunk in np.random.default_rng(0).permutation(np.array(surveyed.chunks, object)):
        if rows_left <= 0:
            break
        pages.append(scan_chunk(store, info.name, field, chunk, store.chunk_rows(info)))
        rows_left -= len(pages[-1])
    rows = joined_rows(chosen, pages)
    vectors = rows.vectors

    correction = chosen.measured(store, info, field, rows).fit(rows)
    needs = store.column_needs(info, field)
    valid = ~chosen.layout.invalid(vectors)
    neutral = replace(correction, prior=None).centred(vectors, kinds=rows.kinds)
    sample = RecallSample(
        vectors,
        correction.with_prior(neutral, valid, None, rows.values),
        chosen.bank.vectors,
        correction.locality_hints(vectors, kinds=rows.kinds),
        rows.kinds,
    )
    index = MeasuredIndex(
        draft.vector.index_type,
        draft.vector.index_params,
        graph_hint=needs.graph_hint,
        length_pull=needs.length_pull,
    )
    return measure_recall(
        correction.layout, sample, index, kinds=correction.kinds, rows_total=surveyed.rows
    )


def joined_rows(chosen: Chosen, pages: Iterable[Batch]) -> FitRows:
    """Return the rows of all pages as a fit takes them."""
    values: list[Values] = [np.empty(0)]
    kinds: list[KindNumbers] = [np.empty(0, np.int64)]

    # Filled while `Layout.stacked` asks for one page after the other.
    def vectors() -> Iterator[Floats]:
        for page in pages:
            rows = chosen.fit_rows(page.vectors, page.items)
            if rows.values is not None:
                values.append(rows.values)
            if rows.kinds is not None:
                kinds.append(rows.kinds)
            yield page.vectors

    return FitRows(
        chosen.layout.stacked(vectors()),
        np.concatenate(values),
        None if chosen.kinds.rule is None else np.concatenate(kinds),
    )


MEASURED_ROWS = 1_000
MEASURED_QUERIES = 200
NEAREST = 10
"""Number of nearest rows whose order is compared."""
ALIKE = 1e-6
"""Relative difference below which a raw search in float32 treats two scores as equal."""
LEAST_IN_ORDER = 0.5
"""Least share of queries that must keep their order under L2; a plan with fewer is refused."""
REMARKED = 0.99
"""Share of queries that keep their order below which a plan has a remark."""


@dataclass(frozen=True)
class Resolution:
    """How well the augmented form keeps the raw order."""

    rows: int
    """Number of rows that were compared."""
    queries: int
    """Number of queries."""
    in_order: float
    """Share of queries whose ten nearest rows keep their order at strength 0."""
    gap: float
    """Median difference of neighbouring scores (L2: squared distances)."""
    error: float
    """Median error of scores."""

    def require(self, field: str) -> None:
        """Raise CannotMigrate unless the augmented form distinguishes rows under L2."""
        if self.in_order < LEAST_IN_ORDER:
            raise CannotMigrate(
                f"{field_words(field)} has rows that float32 cannot distinguish: the {NEAREST} nearest "
                f"of a query differ by {self.gap:.3g} in squared distance and scores are off by "
                f"{self.error:.3g}, because groups of rows are far apart ({self.in_order:.0%} of "
                f"{self.queries} queries keep their order among {self.rows:,} rows at strength "
                "0): keep each group in a collection of its own"
            )

    def remark(self, dtype: Dtype) -> list[str]:
        if self.in_order >= REMARKED:
            return []

        reason = (
            "" if dtype == "float32" else f", as the augmented form is rounded to {dtype} once more"
        )
        return [
            f"at strength 0 {self.in_order:.0%} of {self.queries} queries keep the order of their "
            f"{NEAREST} nearest among {self.rows:,} rows{reason}"
        ]


def resolution(layout: Layout, vectors: Floats, queries: Floats, dtype: Dtype) -> Resolution | None:
    """Measure the resolution in float32, as a server
    computes, if vectors (n, d) and queries (m, d) suffice.
    """
    rows = _some(vectors[~layout.invalid(vectors)], MEASURED_ROWS)
    query_vectors = rounded(_some(queries[~layout.invalid(queries)], MEASURED_QUERIES), dtype)
    if len(rows) < NEAREST + 2 or not len(query_vectors):
        return None

    # The scores of the augmented form at strength 0, as a server computes them.
    layout = measured_on(layout, rows, query_vectors)
    form = form_of(layout, dtype)
    stored = decode(form.encode_rows(layout.augment(rows, np.zeros(len(rows)))), dtype)
    products = (
        decode(form.encode_queries(layout.encode_queries(query_vectors, 0.0)), dtype) @ stored.T
    )
    scores = layout.scores(products, query_vectors, 0.0) * (-1 if layout.metric == "L2" else 1)

    # Those of the user's metric, of one row more than is compared, so that each has a gap.
    exact = _exact(layout, rows, query_vectors)
    order = np.argsort(-exact, axis=1, kind="stable")[:, : NEAREST + 1]
    nearest = np.take_along_axis(exact, order, 1)

    # Rows whose exact scores are alike may change places.
    ranked = np.argsort(-scores, axis=1, kind="stable")[:, :NEAREST]
    same = np.isclose(
        np.take_along_axis(exact, ranked, 1), nearest[:, :NEAREST], rtol=ALIKE, atol=0
    )

    gaps = -np.diff(nearest, axis=1)
    distinct_gaps = gaps[gaps > 0]
    errors = np.abs(np.take_along_axis(scores, order, 1) - nearest)
    return Resolution(
        rows=len(rows),
        queries=len(query_vectors),
        in_order=float(same.all(axis=1).mean()),
        gap=float(np.median(distinct_gaps)) if len(distinct_gaps) else 0.0,
        error=float(np.median(errors)),
    )


def _exact(layout: Layout, rows: Floats, queries: Floats) -> npt.NDArray[np.float64]:
    """Return the scores (m, n) of the user's metric in float64; higher means nearer."""
    wide = rows.astype(np.float64)
    query_vectors = queries.astype(np.float64)
    if layout.metric == "L2":
        return -np.stack([np.square(wide - query).sum(axis=1) for query in query_vectors])

    if layout.metric == "COSINE":
        wide /= np.linalg.norm(wide, axis=1, keepdims=True)
        query_vectors /= np.linalg.norm(query_vectors, axis=1, keepdims=True)
    return np.asarray(query_vectors @ wide.T)


def _some(rows: Floats, count: int) -> Floats:
    return rows[:: max(1, -(-len(rows) // count))]


def resolved(
    layout: Layout, vectors: Floats, bank: QueryBank, field: str, dtype: Dtype
) -> Resolution | None:
    """Return the resolution of vectors (n, d).

    Raises CannotMigrate if scores under L2 do not distinguish them.
    """
    measured = resolution(layout, vectors, bank.vectors, dtype)
    if measured is not None and layout.metric == "L2":
        measured.require(field)
    return measured


def resolution_of(
    store: Store, draft: Draft, surveyed: Survey, chosen: Chosen
) -> Resolution | None:
    """Measure the resolution on rows spread over the collection and queries of the bank; None if
    the augmented form is as good as the vectors. Raises CannotMigrate as `resolved` does.
    """
    layout = chosen.layout
    dtype = draft.vector.dtype
    sample = surveyed.sample
    # What half precision costs a MaxSim is not measured here, and L2 has none.
    if layout.multi_vectors or (layout.metric != "L2" and dtype == "float32"):
        return None

    sampled_rows = sum(map(len, sample.values()))
    every = max(1, -(-sampled_rows // MEASURED_ROWS))
    parts = [
        store.get(draft.source.name, keys[::every], draft.field, partition=partition).vectors
        for partition, keys in sample.items()
        if keys
    ]
    return resolved(layout, layout.stacked(parts), chosen.bank, draft.field, dtype)


def recall_words(gate: RecallGate) -> str:
    at = f" at {gate.search_parameter} {gate.value}" if gate.search_parameter else ""
    raw = gate.raw.estimate
    stored = gate.stored.estimate
    measured = f"recall@{gate.k}{at} of {gate.rows:,} rows: {raw:.3f} raw, {stored:.3f} corrected"
    if gate.search_parameter is None or gate.needed == gate.value:
        return measured
    if gate.needed is None:
        return f"{measured}; no {gate.search_parameter} that was tried gives the raw recall back"
    return f"{measured}; {gate.search_parameter} {gate.needed} gives the raw recall back"
