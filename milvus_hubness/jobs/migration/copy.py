"""The preparation of a migration, and the copy by chunks of rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from milvus_hubness.correction.codec.index_hints import rows_measured
from milvus_hubness.jobs.common.corrections import Banks
from milvus_hubness.jobs.common.gallery import FitRows
from milvus_hubness.jobs.common.plan import Plan
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.migration.compare import Pair
from milvus_hubness.jobs.migration.estimates import joined_rows
from milvus_hubness.jobs.migration.ledger import Chunk, Ledger, Migration
from milvus_hubness.jobs.migration.plan import PlannedCopy
from milvus_hubness.jobs.migration.survey import MEAN_ROWS, SAMPLE_ROWS, chunk_pages, sampled_pages
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import QuerySampling, Store
from milvus_hubness.jobs.store.records import CollectionInfo, Sample, SamplesOf


def begun(ledger: Ledger, plan: Plan[PlannedCopy]) -> Migration:
    """Return the unfinished migration that the plan continues, or a new one.

    Raises ResumeRefused, and WrongPhase while the source's own name moves to another copy or back.
    """
    source = plan.source.name
    for other in ledger.migrations(source):
        # A source that has its other name already seems to be one that was never migrated.
        if source == other.source_now != other.source:
            other.expect_no_move()

    former = ledger.of_target(plan.body.target)
    if former is not None and former.phase not in {"preparing", "finished"}:
        former.expect(plan.body.arguments)
        return former

    # A run that was interrupted before the copy existed may have made a bank collection.
    interrupted: dict[str, Any] = {}
    if former and former.phase == "preparing":
        interrupted = former.model_dump(include={"id", "made_bank"})
    return Migration(
        **interrupted,
        source=plan.source.name,
        target=plan.body.target,
        field=plan.field,
        bank_collection=plan.bank_collection,
        arguments=plan.body.arguments,
        source_identity=plan.source.identity,
        phase="preparing",
    )


def prepared(
    store: Store, ledger: Ledger, plan: Plan[PlannedCopy], migration: Migration
) -> tuple[Migration, Banks]:
    """Fit the estimator, save the bank, and record the state and the chunks; after an interruption,
    once more. Return the migration, and the bank, which the database holds as it is.
    """
    chosen = plan.chosen
    rows = _gallery(store, plan)
    correction = chosen.measured(store, plan.source, plan.field, rows).fit(rows)

    # The ledger says so first: `clean` may drop the collection if this run is killed.
    stored = correction.stored_bank(chosen.target_bank)
    if not store.exists(plan.bank_collection):
        migration = ledger.write(migration, made_bank="collection")
    bank, made_bank = store.save_bank(plan.bank_collection, stored, plan.chosen.layout.metric)
    if migration.made_bank == "collection":
        made_bank = "collection"

    state = plan.first_state(correction, bank, phase="copying", migration=migration.id)

    # The phase comes last: a run that is killed before this prepares all of it again.
    ledger.forget_chunks(migration)
    ledger.write_chunks(migration, plan.body.survey.chunks)
    migration = ledger.write(
        migration,
        phase="copying",
        state=state,
        made_bank=made_bank,
        rows=plan.body.survey.rows,
        chunks=len(plan.body.survey.chunks),
    )
    return migration, {bank: stored}


def _gallery(store: Store, plan: Plan[PlannedCopy]) -> FitRows:
    """Return the rows to fit on: all, if the estimator needs them; else rows spread over the keys,
    as many as the constants of the layout and the means need.
    """
    source = plan.source.name
    field = plan.field
    if plan.chosen.estimator.needs_gallery:
        every_page = (
            page
            for chunk in plan.body.survey.chunks
            for page, _ in chunk_pages(store, source, field, chunk, plan.body.survey.page_rows)
        )
        return joined_rows(plan.chosen, every_page)

    needs = store.column_needs(plan.source, field)
    constants_need = rows_measured(
        plan.chosen.layout,
        len(plan.chosen.bank),
        graph_hint=needs.graph_hint,
        locality_hints=needs.locality_hints,
    )
    needed = SAMPLE_ROWS if constants_need is None else max(constants_need, MEAN_ROWS)
    if plan.chosen.kinds.rule is not None:
        needed = SAMPLE_ROWS
    return joined_rows(
        plan.chosen,
        sampled_pages(store, plan.source, plan.field, plan.body.survey, plan.chosen.layout, needed),
    )


def carry_samples(store: Store, source: CollectionInfo, copy: CollectionInfo) -> None:
    """Give the copy the query samples of its source, before any client puts some there."""
    if not isinstance(store, QuerySampling):
        return

    for former in source.samplings.fields:
        sampling = copy.samplings.of(former.field)
        if sampling is None:
            continue
        samples = store.read_query_samples(former.samples_collection, former.size)
        rows = zip(samples.numbers.tolist(), samples.at.tolist(), samples.vectors, strict=True)
        carried = [Sample(place, *row) for place, row in enumerate(rows)]
        store.put_query_samples(SamplesOf(sampling.helper, copy.collection_id), carried)


KEYS_NAMED = 5
"""Most keys of rows without a usable vector that the record of a chunk names."""

T = TypeVar("T")


class Recorder:
    """Records copied chunks in the ledger and reports them."""

    def __init__(self, migration: Migration, ledger: Ledger, events: Events) -> None:
        self._migration = migration
        self._ledger = ledger
        self._events = events

        self._chunks = {chunk.number: chunk for chunk in ledger.chunks(migration)}
        self._rows_before = sum(chunk.rows for chunk in self.chunks if chunk.seconds is not None)
        self._rows = self._rows_before
        self._began = time.perf_counter()

        # Of the chunk that is being copied.
        self._bytes = 0
        self._seconds = 0.0

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks in their original order, as recorded."""
        return list(self._chunks.values())

    def done(self, chunk: Chunk, is_last: bool, size: int, seconds: float) -> None:
        """Note a copied page of `size` bytes of vectors that took `seconds`, and record a chunk
        after its last one.
        """
        self._bytes += size
        self._seconds += seconds
        if not is_last:
            return

        moment = time.perf_counter()
        chunk = chunk.model_copy(update={"seconds": round(self._seconds, 3)})
        self._ledger.write_chunks(self._migration, [chunk])
        self._chunks[chunk.number] = chunk

        self._rows += chunk.rows
        speed = (self._rows - self._rows_before) / (moment - self._began)
        self._events.report(
            "copying",
            partition=chunk.partition,
            chunk=chunk.number + 1,
            chunks=len(self._chunks),
            rows=self._rows,
            rows_total=self._migration.rows,
            bytes=self._bytes,
            seconds=self._seconds,
            rows_per_second=speed,
            eta_seconds=(self._migration.rows - self._rows) / speed,
        )

        self._bytes = 0
        self._seconds = 0.0


def _with_invalid(pair: Pair, chunk: Chunk, rows: Batch) -> Chunk:
    invalid = pair.state.layout.invalid(pair.origin.decode_rows(rows).vectors)
    keys = (*chunk.invalid_keys, *(rows.keys[i] for i in np.flatnonzero(invalid)))
    return chunk.model_copy(
        update={"invalid": chunk.invalid + int(invalid.sum()), "invalid_keys": keys[:KEYS_NAMED]}
    )


def _read_ahead(pool: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    """Yield each item in turn, while the next one is read."""
    reading = pool.submit(next, items, None)
    while (item := reading.result()) is not None:
        reading = pool.submit(next, items, None)
        yield item


BEGUN_AT_MOST = 4
"""Chunks after the last recorded one that a killed run may have begun: one is written while the one
before is recorded, and a busy Milvus 2.3 may still show a former record.
"""


def copy_chunks(
    pair: Pair, recorder: Recorder, throttle: Throttle, *, page_rows: int, alone: bool
) -> None:
    """Copy the chunks that are not recorded as done; read the next one and record the last one
    during each write. page_rows: rows that are read at once. alone: no client has ever written to
    the copy.
    """
    store = pair.store
    source = pair.origin.collection
    field = pair.state.field
    missing = [chunk for chunk in recorder.chunks if chunk.seconds is None]
    pages = (
        (chunk, *page)
        for chunk in missing
        for page in chunk_pages(store, source, field, chunk, page_rows)
    )

    # Rows of later chunks are new to the copy, so they are inserted, which costs less.
    recorded = [chunk.number for chunk in recorder.chunks if chunk.seconds is not None]
    last_perhaps_begun = max(recorded, default=-1) + BEGUN_AT_MOST

    def write(chunk: Chunk, rows: Batch, is_last: bool) -> tuple[Chunk, bool, int, float]:
        began = time.perf_counter()
        are_new = alone and chunk.number > last_perhaps_begun
        size = pair.send(rows, chunk.partition, throttle, are_new=are_new)
        return chunk, is_last, size, time.perf_counter() - began

    with ThreadPoolExecutor(3, "copying") as pool:
        writing: Future[tuple[Chunk, bool, int, float]] | None = None
        recording: Future[None] | None = None
        former: Chunk | None = None

        def record_last() -> Future[None] | None:
            """Wait for the write and the record in progress, and start the copied page's record."""
            copied = writing.result() if writing else None
            if recording:
                recording.result()
            return pool.submit(recorder.done, *copied) if copied else None

        for chunk, batch, is_last in _read_ahead(pool, pages):
            rows = pair.copy.carried(pair.origin, batch)

            # A further page of a chunk adds to the invalid rows of its former pages.
            if former and former.number == chunk.number:
                chunk = former
            former = _with_invalid(pair, chunk, batch)

            recording = record_last()
            writing = pool.submit(write, former, rows, is_last)

        if last := record_last():
            last.result()
