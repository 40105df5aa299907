"""The survey of the source: its chunks of keys, and estimates of memory, time and recall."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import Key
from milvus_hubness.codec.half_precision import BYTES
from milvus_hubness.codec.layout import Layout
from milvus_hubness.correction import Correction
from milvus_hubness.estimators import Estimator
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.operations.reading import MEASURED_ROWS, Resolution, resolution
from milvus_hubness.quality.recall import ROWS, RecallGate, measure_recall
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo, VectorField

KEYS_PER_PAGE = 16_384


def key_pages(store: Store, collection: str, partition: str | None = None) -> Iterator[list[Key]]:
    """Yield pages of keys: all keys that exist at the start, and some of those that clients write
    meanwhile."""
    after: Key | None = None
    ceiling: Key | None = None
    while page := store.scan_keys(collection, after=after, limit=KEYS_PER_PAGE, partition=partition):
        if ceiling is None and len(page) < KEYS_PER_PAGE:
            ceiling = ceiling_of(store, collection, page[-1], partition)
        if ceiling is not None:
            page = [key for key in page if key <= ceiling]  # type: ignore[operator]
        if not page:
            return
        yield page
        after = page[-1]


def ceiling_of(store: Store, collection: str, key: Key, partition: str | None = None) -> Key | None:
    """Return a key that is at least the greatest current key, searched from `key` up; None if there is no
    such key.

    A reader that stops at this key ends even if clients write rows with rising keys faster than it reads
    pages. A short page does not show the end: Milvus 2.3 returns the last rows of one of several partitions
    one by one.
    """
    for step in count():
        above = store.above(key, step)
        if above is None or not store.scan_keys(collection, after=above, limit=1, partition=partition):
            return above
    raise AssertionError("steps end where there is no key above")


SAMPLE_ROWS = 4_096


class Chunk(BaseModel):
    """The rows of a partition with after < key ≤ upto.

    rows: their number when the chunk was fixed. seconds: duration of their write; None until it is done.
    invalid: number of rows without a usable vector. invalid_keys: the first of these. importing: the file
    that the database was asked to import, by its name in the database.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=0)
    partition: str | None
    after: Key | None
    upto: Key
    rows: int = Field(ge=1)
    seconds: float | None = None
    invalid: int = 0
    invalid_keys: tuple[Key, ...] = ()
    importing: str | None = None


@dataclass(frozen=True)
class Survey:
    """All chunks of a collection, in key order within each partition, and the keys of a sample of rows,
    spread evenly over each partition."""

    chunks: list[Chunk]
    sample: dict[str | None, list[Key]]

    @property
    def rows(self) -> int:
        """The number of distinct keys."""
        return sum(chunk.rows for chunk in self.chunks)


def survey(store: Store, info: CollectionInfo, rows_per_chunk: int, *, progress: Progress = silent) -> Survey:
    """Page through the keys once, with one page in memory at a time, and return the chunks."""
    store.count(info.name)
    every = max(1, info.rows // SAMPLE_ROWS)
    chunks: list[Chunk] = []
    sample: dict[str | None, list[Key]] = {}
    seen = 0
    for partition in info.partitions:
        sample[partition] = []
        waiting: list[Key] = []
        cut_at: Key | None = None
        for page in chain(key_pages(store, info.name, partition), [[]]):
            waiting += page
            while len(waiting) >= rows_per_chunk or (waiting and not page):
                part, waiting = waiting[:rows_per_chunk], waiting[rows_per_chunk:]
                chunks.append(
                    Chunk(
                        number=len(chunks), partition=partition, after=cut_at, upto=part[-1], rows=len(part)
                    )
                )
                cut_at = part[-1]
            sample[partition] += page[-seen % every :: every]
            seen += len(page)
            progress("reading the keys", seen, info.rows)
    return Survey(chunks, sample)


ESTIMATED_ROWS = 512
DEFAULT_LINKS = 30
"""Default M of Milvus's HNSW, for an index that names none: each row has up to 2·M links of four bytes."""


@dataclass(frozen=True)
class Gauge:
    """Estimates for a migration.

    seconds: duration of copy and verification, if a write and a comparison take as long as a read.
    bytes_of_source, bytes_of_target: memory of the loaded source and of its copy: vectors, graph links, other
    fields.
    """

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
    """Return the estimates. Also check on the sample that the estimator can be fitted on this bank."""
    chunk = max(looked.chunks, key=lambda each: each.rows)
    began = time.perf_counter()
    batch = store.scan(
        info.name, field, after=chunk.after, upto=chunk.upto, limit=ESTIMATED_ROWS, partition=chunk.partition
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
    """Measure the recall that the collection's own kind of index loses with the augmented form, on up to ROWS
    rows and queries of the bank; see `measure_recall`. value: of ef or nprobe, as the application uses."""
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
    """Measure how well the augmented form tells rows apart, on rows spread over the collection and queries of
    the bank. Return None if it does so as well as the vectors do. Raises CannotMigrate if it does not tell
    rows apart."""
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
    """Return the recall gate in one sentence."""
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
