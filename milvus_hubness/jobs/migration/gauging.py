"""What a plan says of memory, time and recall, from a sample of the rows. Reads only."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milvus_hubness.banks import QueryBank
from milvus_hubness.correction import Correction
from milvus_hubness.estimators import Estimator
from milvus_hubness.halves import BYTES
from milvus_hubness.jobs.migration.chunks import Survey
from milvus_hubness.jobs.resolution import MEASURED_ROWS, Resolution, resolution
from milvus_hubness.layout import Layout
from milvus_hubness.quality import RecallGate, measure_recall
from milvus_hubness.quality.recall import ROWS
from milvus_hubness.stores.base import CollectionInfo, Store, VectorField

SAMPLE_ROWS = 512
DEFAULT_LINKS = 30
"""M of Milvus's HNSW where the index names none: each row keeps up to 2·M links of four bytes."""


@dataclass(frozen=True)
class Gauge:
    """seconds: what copying and verifying would take, writing and comparing as long as reading does. bytes:
    that the source holds in memory when loaded, and its copy: vectors, the links of a graph, other fields."""

    seconds: float
    bytes_of_source: int
    bytes_of_target: int


def gauge(
    store: Store,
    info: CollectionInfo,
    field: str,
    looked: Survey,
    layout: Layout,
    width: int,
    estimator: Estimator,
    bank: QueryBank,
    target_bank: QueryBank | None,
) -> Gauge:
    """Also finds out, on the sample, whether the estimator can be fitted on this bank at all."""
    chunk = max(looked.chunks, key=lambda each: each.rows)
    began = time.perf_counter()
    batch = store.scan(
        info.name, field, after=chunk.after, upto=chunk.upto, limit=SAMPLE_ROWS, partition=chunk.partition
    )
    reading = time.perf_counter() - began
    sample_of_gallery = batch.vectors if estimator.needs_gallery else None
    Correction.fit(layout, estimator, bank, gallery=sample_of_gallery, target_bank=target_bank).centred(
        batch.vectors
    )
    correcting = time.perf_counter() - began - reading
    others = sum(len(json.dumps(row, default=str)) for row in batch.rows) / max(1, len(batch))
    vector = info.vector_fields[field]
    per_row = others + _links(vector)
    return Gauge(
        (4 * reading + correcting) * looked.rows / max(1, len(batch)),
        int(looked.rows * (per_row + BYTES[vector.dtype] * layout.dim)),
        int(looked.rows * (per_row + BYTES[vector.dtype] * width)),
    )


def recall_gate(
    store: Store,
    info: CollectionInfo,
    field: str,
    looked: Survey,
    layout: Layout,
    estimator: Estimator,
    bank: QueryBank,
    target_bank: QueryBank | None,
    *,
    value: int | None = None,
) -> RecallGate:
    """What the augmented form costs the collection's own kind of index, measured on up to ROWS of its rows
    and queries of the bank; see `measure_recall`. value: of ef or nprobe, as the application asks."""
    parts, left = [], ROWS
    for chunk in np.random.default_rng(0).permutation(np.array(looked.chunks, object)):
        if left <= 0:
            break
        parts.append(
            store.scan(
                info.name, field, after=chunk.after, upto=chunk.upto, partition=chunk.partition
            ).vectors
        )
        left -= len(parts[-1])
    vectors, graph_hint = np.concatenate(parts), store.takes_graph_hint(info, field)
    correction = Correction.fit(
        layout.measured_on(
            vectors,
            bank.vectors,
            graph_hint=graph_hint,
            locality_hints=store.takes_locality_hints(info, field),
        ),
        estimator,
        bank,
        gallery=vectors if estimator.needs_gallery else None,
        target_bank=target_bank,
    )
    biases = correction.centred(vectors)
    mean_bias = float(biases[~layout.invalid(vectors)].mean(dtype=np.float64))
    biases = replace(correction, mean_bias=mean_bias).centred(vectors)
    vector = info.vector_fields[field]
    return measure_recall(
        correction.layout,
        vectors,
        biases,
        bank.vectors,
        vector.index_type,
        vector.index_params,
        rows_total=looked.rows,
        value=value,
        graph_hint=graph_hint,
        locality_hints=correction.locality_hints(vectors),
    )


def resolution_of(
    store: Store, info: CollectionInfo, field: str, looked: Survey, layout: Layout, bank: QueryBank
) -> Resolution | None:
    """How finely the augmented form tells rows apart, on rows spread over the collection and queries of the
    bank; None where it does so as finely as the vectors do. Raises CannotMigrate where it does not."""
    dtype = info.vector_fields[field].dtype
    if layout.metric != "L2" and dtype == "float32":
        return None
    every = max(1, -(-sum(map(len, looked.sample.values())) // MEASURED_ROWS))
    parts = [
        store.get(info.name, keys[::every], field, partition=partition).vectors
        for partition, keys in looked.sample.items()
        if keys
    ]
    found = resolution(layout, np.concatenate(parts), bank.vectors, dtype)
    if found is not None and layout.metric == "L2":
        found.require(field)
    return found


def said(gate: RecallGate) -> str:
    """The gate in one sentence."""
    at = f" at {gate.search_parameter} {gate.value}" if gate.search_parameter else ""
    raw, stored = gate.raw.estimate, gate.stored.estimate
    measured = f"recall@{gate.k}{at} of {gate.rows:,} rows: {raw:.3f} raw, {stored:.3f} corrected"
    if gate.search_parameter is None or gate.needed == gate.value:
        return measured
    if gate.needed is None:
        return f"{measured}; no {gate.search_parameter} that was tried gives the raw recall back"
    return f"{measured}; {gate.search_parameter} {gate.needed} gives the raw recall back"


def _links(vector: VectorField) -> float:
    graph = vector.index_type in {"HNSW", "HNSW_SQ", "HNSW_PQ", "HNSW_PRQ", "AUTOINDEX", ""}
    m: Any = vector.index_params.get("M", DEFAULT_LINKS)
    return 2 * 4 * int(m) if graph else 0.0
