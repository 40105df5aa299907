"""The preparation of a migration, and the copy: by chunks of rows, or by files to import. A repeated import doubles its
rows. The ledger therefore names the file of a chunk before its import; a later run waits until no import is running,
and then imports only the rows that are missing."""

from __future__ import annotations

import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
from tenacity import Retrying, retry_if_result, wait_exponential

from milvus_hubness.banks.generations import Batch, Key, StoredBank
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.correction import initial_state
from milvus_hubness.errors import StoreError
from milvus_hubness.migration.compare import BYTES_PER_NUMBER, Pair
from milvus_hubness.migration.ledger import Chunk, Ledger, Migration
from milvus_hubness.migration.plan import BulkTarget, MigrationPlan
from milvus_hubness.migration.survey import KEYS_PER_PAGE, scan_chunk
from milvus_hubness.operations.inputs import fit_measured
from milvus_hubness.operations.progress import Events, Throttle
from milvus_hubness.stores.protocols import BulkImport, Rows, Store, capability


def begun(ledger: Ledger, plan: MigrationPlan) -> Migration:
    """Return the unfinished migration that the plan continues, or a new one. Raises ResumeRefused."""
    former = ledger.of_target(plan.target)
    if former is not None and former.phase not in {"preparing", "finished"}:
        former.expect(plan.arguments)
        return former
    interrupted = former.model_dump(include={"id", "made_bank"}) if former and former.phase == "preparing" else {}
    return Migration(
        **interrupted,
        source=plan.source.name,
        target=plan.target,
        field=plan.field,
        bank_collection=plan.bank_collection,
        arguments=plan.arguments,
        source_identity=plan.source.identity,
        phase="preparing",
    )


def prepared(store: Store, ledger: Ledger, plan: MigrationPlan, migration: Migration) -> Migration:
    """Fit the estimator, save the bank, and record the state and the chunks; after an interruption, once more."""
    correction = fit_measured(
        store, plan.source, plan.field, plan.layout, _gallery(store, plan), plan.estimator, plan.bank,
        plan.target_bank,
    )  # fmt: skip
    stored = StoredBank(plan.bank, correction.fitted.potentials, plan.target_bank)
    if not store.exists(plan.bank_collection):
        migration = ledger.write(migration, made_bank="collection")
    bank, made_bank = store.save_bank(plan.bank_collection, stored, plan.layout.metric)
    state = initial_state(
        correction.layout,
        correction.fitted.estimator,
        bank,
        field=plan.field,
        suffix=plan.suffix,
        dtype=plan.vector.dtype,
        source=plan.source.name,
        phase="copying",
        mean_bias=correction.mean_bias,
        strength=plan.strength,
        gate=plan.gate,
        gate_targets=plan.gate_targets,
    ).model_copy(update={"migration": migration.id})
    ledger.forget_chunks(migration)
    ledger.write_chunks(migration, plan.survey.chunks)
    return ledger.write(
        migration,
        phase="copying",
        state=state,
        made_bank=migration.made_bank if migration.made_bank == "collection" else made_bank,
        rows=plan.survey.rows,
        chunks=len(plan.survey.chunks),
    )


def _gallery(store: Rows, plan: MigrationPlan) -> Floats:
    """Return the vectors to fit on: all, if the estimator needs them; else those of rows spread over the keys."""
    source, field, size = plan.source.name, plan.field, store.chunk_rows(plan.source)
    if plan.estimator.needs_gallery:
        parts = [scan_chunk(store, source, field, chunk) for chunk in plan.survey.chunks]
    else:
        parts = [
            store.get(source, keys[start : start + size], field, partition=partition)
            for partition, keys in plan.survey.sample.items()
            for start in range(0, len(keys), size)
        ]
    return np.concatenate([part.vectors for part in parts])


KEYS_NAMED = 5


class Recorder:
    """Records copied chunks in the ledger and reports them."""

    def __init__(self, migration: Migration, ledger: Ledger, events: Events) -> None:
        self._migration, self._ledger, self._events = migration, ledger, events
        self._chunks = {chunk.number: chunk for chunk in ledger.chunks(migration)}
        self._rows_before = sum(chunk.rows for chunk in self.chunks if chunk.seconds is not None)
        self._rows = self._rows_before
        self._began = time.perf_counter()

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks in their original order, as recorded."""
        return list(self._chunks.values())

    @property
    def todo(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.seconds is None]

    def write(self, chunks: Sequence[Chunk]) -> None:
        self._ledger.write_chunks(self._migration, chunks)
        self._chunks |= {chunk.number: chunk for chunk in chunks}

    def done(self, chunks: Sequence[Chunk], size: int, seconds: float) -> None:
        """Record these chunks as copied. size: bytes of their vectors. seconds: time that the copy took."""
        moment = time.perf_counter()
        self.write(chunks)
        self._rows += sum(chunk.rows for chunk in chunks)
        speed = (self._rows - self._rows_before) / (moment - self._began)
        self._events.report(
            "copying",
            partition=chunks[-1].partition,
            chunk=chunks[-1].number + 1,
            chunks=len(self._chunks),
            rows=self._rows,
            rows_total=self._migration.rows,
            bytes=size,
            seconds=seconds,
            rows_per_second=speed,
            eta_seconds=(self._migration.rows - self._rows) / speed,
        )


def _with_invalid(pair: Pair, chunk: Chunk, rows: Batch) -> Chunk:
    invalid = pair.state.layout.invalid(pair.origin.decode_rows(rows).vectors)
    keys = tuple(rows.keys[i] for i in np.flatnonzero(invalid))
    return chunk.model_copy(update={"invalid": len(keys), "invalid_keys": keys[:KEYS_NAMED]})


def _read_ahead(pool: ThreadPoolExecutor, pair: Pair, chunks: Sequence[Chunk]) -> Iterator[Batch]:
    """Yield the rows of each chunk in turn, while the next chunk is read."""
    ahead = [pool.submit(pair.scan, chunk) for chunk in chunks[:1]]
    for i in range(len(chunks)):
        rows = ahead.pop().result()
        ahead += [pool.submit(pair.scan, chunk) for chunk in chunks[i + 1 : i + 2]]
        yield rows


BEGUN_AT_MOST = 4
"""Chunks after the last recorded one that a killed run may have begun: one is written while the one before is recorded,
and a busy Milvus 2.3 may still show a former record."""

_Copied = tuple[list[Chunk], int, float]


def copy_chunks(pair: Pair, recorder: Recorder, throttle: Throttle, *, alone: bool) -> None:
    """Copy the chunks that are not recorded as done; read the next one and record the last one during each write.
    alone: no client has ever written to the copy."""
    todo = recorder.todo
    recorded = [chunk.number for chunk in recorder.chunks if chunk.seconds is not None]
    perhaps_begun = max(recorded, default=-1) + BEGUN_AT_MOST

    def write(chunk: Chunk, rows: Batch) -> _Copied:
        began = time.perf_counter()
        are_new = alone and chunk.importing is None and chunk.number > perhaps_begun
        size = pair.send(rows, chunk.partition, throttle, are_new=are_new)
        seconds = time.perf_counter() - began
        return [chunk.model_copy(update={"seconds": round(seconds, 3)})], size, seconds

    with ThreadPoolExecutor(3, "copying") as pool:
        writing: Future[_Copied] | None = None
        recording: Future[None] | None = None

        def record_last() -> Future[None] | None:
            """Wait for the write and the record in progress, and start to record the copied chunk."""
            copied = writing.result() if writing else None
            if recording:
                recording.result()
            return pool.submit(recorder.done, *copied) if copied else None

        for chunk, batch in zip(todo, _read_ahead(pool, pair, todo), strict=True):
            rows, chunk = pair.copy.carried(pair.origin, batch), _with_invalid(pair, chunk, batch)
            recording = record_last()
            writing = pool.submit(write, chunk, rows)
        if last := record_last():
            last.result()


T = TypeVar("T")

CHUNKS_PER_FILE = 500
LONGEST_PAUSE = 2.0


def wait_for_imports(store: Store, target: str, recorder: Recorder, throttle: Throttle) -> None:
    """Complete an earlier run: wait until no import into `target` is running, record imported chunks as done, and
    delete the target's rows of all other chunks."""
    imports = capability(store, BulkImport)
    jobs = _ended(
        lambda: imports.import_jobs(target), lambda jobs: any(job.state == "running" for job in jobs), throttle
    )
    imports.show_imported(target)
    store.count(target)
    imported = {job.file for job in jobs if job.state == "done" and job.file is not None}
    ended = []
    for chunk in recorder.todo:
        if chunk.importing in imported:
            ended.append(chunk.model_copy(update={"seconds": 0.0}))
        else:
            _clear(store, target, chunk)
            ended.append(chunk.model_copy(update={"importing": None}))
    recorder.write(ended)


class Importer:
    """Copies the chunks that are not recorded as done, through files; the copy shows them after `Store.show_imported`.
    It must hold none of their rows, and no client may write to it: an import doubles present keys."""

    def __init__(self, pair: Pair, recorder: Recorder, bulk: BulkTarget, throttle: Throttle) -> None:
        self._pair, self._recorder = pair, recorder
        self._imports = capability(pair.store, BulkImport)
        self._bulk, self._throttle = bulk, throttle
        self._target = pair.copy.collection
        self._folder = bulk.folder / self._target
        self._bytes_per_row = BYTES_PER_NUMBER * pair.state.codec.form.width

    def run(self) -> None:
        """Read ahead, and write a file while the one before is imported. Raises StoreError with the reason."""
        shutil.rmtree(self._folder, ignore_errors=True)
        todo = self._recorder.todo
        with ThreadPoolExecutor(2, "importing") as pool:
            batches = _read_ahead(pool, self._pair, todo)
            behind: Future[None] | None = None
            for group in self._groups(todo):
                began = time.perf_counter()
                file, copied, rows = self._write(group, batches)
                if behind is not None:
                    behind.result()
                behind = pool.submit(self._import, file, copied, rows, began)
            if behind is not None:
                behind.result()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _groups(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        group: list[Chunk] = []
        rows = 0
        for chunk in chunks:
            is_large = (rows + chunk.rows) * self._bytes_per_row > self._bulk.file_bytes
            is_full = is_large or len(group) == CHUNKS_PER_FILE
            if group and (is_full or chunk.partition != group[0].partition):
                yield group
                group, rows = [], 0
            group.append(chunk)
            rows += chunk.rows
        if group:
            yield group

    def _write(self, group: list[Chunk], batches: Iterator[Batch]) -> tuple[str | None, list[Chunk], int]:
        """Write a file for the group. Return the file, None without rows; its chunks; and the number of rows."""
        pair = self._pair
        copied: list[Chunk] = []
        rows = 0

        def as_copied() -> Iterator[Batch]:
            nonlocal rows
            for chunk in group:
                batch = next(batches)
                copied.append(_with_invalid(pair, chunk, batch))
                rows += len(batch)
                self._throttle.admit(len(batch), self._bytes_per_row * len(batch))
                yield pair.copy.carried(pair.origin, batch)

        file = self._imports.write_import_file(self._target, as_copied(), pair.state.field, self._folder)
        return file, copied, rows

    def _import(self, file: str | None, chunks: list[Chunk], rows: int, began: float) -> None:
        if file is not None:
            name = self._bulk.seen_by_database(f"{self._target}/{file}")
            chunks = [chunk.model_copy(update={"importing": name}) for chunk in chunks]
            self._recorder.write(chunks)
            number = self._imports.bulk_import(self._target, name, partition=chunks[0].partition)
            job = _ended(lambda: self._imports.import_job(number), lambda job: job.state == "running", self._throttle)
            if job.state == "failed":
                raise StoreError(f"the database could not import {name}: {job.reason or 'it gives no reason'}")
            (self._folder / file).unlink(missing_ok=True)
        seconds = time.perf_counter() - began
        share = round(seconds / len(chunks), 3)
        done = [chunk.model_copy(update={"seconds": share}) for chunk in chunks]
        self._recorder.done(done, self._bytes_per_row * rows, seconds)


def _ended(poll: Callable[[], T], is_running: Callable[[T], bool], throttle: Throttle) -> T:
    """Call `poll` until its result is no longer running, and return that result; the throttle can end the wait."""
    return Retrying(
        retry=retry_if_result(is_running),
        wait=wait_exponential(0.1, max=LONGEST_PAUSE),
        before_sleep=lambda _: throttle.admit(0, 0),
    )(poll)


def _clear(store: Rows, target: str, chunk: Chunk) -> None:
    """Delete the rows of the copy whose keys are in the chunk."""
    after: Key | None = chunk.after
    while page := store.scan_keys(target, after=after, limit=KEYS_PER_PAGE, partition=chunk.partition):
        of_chunk = bisect_right(cast("list[Any]", page), chunk.upto)
        store.delete(target, page[:of_chunk])
        if of_chunk < len(page):
            return
        after = page[-1]
