"""The copy: chunks are written as rows or as files that the database imports, and recorded in the ledger.

An import always inserts, so a repeated import doubles its rows. The ledger therefore names the file of a
chunk before the database is asked to import it. A later run that finds such a name waits until no import is
running, and then imports only the rows that are missing.
"""

from __future__ import annotations

import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from tenacity import Retrying, retry_if_result, wait_exponential

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.codec.base import Flags
from milvus_hubness.errors import StoreError
from milvus_hubness.migration.catch_up import BYTES_PER_NUMBER, carried, send
from milvus_hubness.migration.compare import Pair
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.plan import BulkTarget
from milvus_hubness.migration.survey import KEYS_PER_PAGE, Chunk
from milvus_hubness.operations.progress import Events, Throttle
from milvus_hubness.stores.protocols import BulkImport, Store, capability

KEYS_NAMED = 5


class Recorder:
    """Records copied chunks in the ledger and reports them. migration: as in the ledger. chunks: all chunks,
    copied or not."""

    def __init__(self, migration: Migration, chunks: Sequence[Chunk], ledger: Ledger, events: Events) -> None:
        self.migration = migration
        self._ledger, self._events = ledger, events
        self._count = len(chunks)
        self._rows = sum(chunk.rows for chunk in chunks if chunk.seconds is not None)
        self._rows_before = self._rows
        self._began = time.perf_counter()

    def done(self, chunks: Sequence[Chunk], size: int, seconds: float) -> None:
        """Record these chunks as copied. size: bytes of their vectors. seconds: time that the copy took."""
        moment = time.perf_counter()
        self._ledger.write_chunks(self.migration, chunks)
        self._rows += sum(chunk.rows for chunk in chunks)
        speed = (self._rows - self._rows_before) / (moment - self._began)
        self._events.report(
            "copying",
            partition=chunks[-1].partition,
            chunk=chunks[-1].number + 1,
            chunks=self._count,
            rows=self._rows,
            rows_total=self.migration.rows,
            bytes=size,
            seconds=seconds,
            rows_per_second=speed,
            eta_seconds=(self.migration.rows - self._rows) / speed,
        )


def with_invalid(chunk: Chunk, keys: Sequence[Key]) -> Chunk:
    """Return the chunk with the keys of its rows that have no usable vector."""
    return chunk.model_copy(update={"invalid": len(keys), "invalid_keys": tuple(keys[:KEYS_NAMED])})


def copy_chunks(
    pair: Pair, chunks: Sequence[Chunk], recorder: Recorder, throttle: Throttle, *, alone: bool
) -> None:
    """Copy the chunks that are not recorded as done. alone: no client has ever written to the copy."""
    _Copying(pair, recorder, throttle, chunks, alone).run()


BEGUN_AT_MOST = 4
"""Number of chunks after the last recorded chunk that a killed run may have begun to write: one chunk is
written while the one before is recorded, and a busy Milvus 2.3 may still show the former record of a chunk
that was just recorded."""


class _Written(NamedTuple):
    """A chunk that the database has accepted. size: bytes of its vectors. seconds: time of the write."""

    chunk: Chunk
    size: int
    seconds: float


class _Copying:
    def __init__(
        self, pair: Pair, recorder: Recorder, throttle: Throttle, chunks: Sequence[Chunk], alone: bool
    ) -> None:
        self._pair, self._recorder, self._throttle = pair, recorder, throttle
        self._todo = [chunk for chunk in chunks if chunk.seconds is None]
        self._alone = alone
        recorded = [chunk.number for chunk in chunks if chunk.seconds is not None]
        self._perhaps_begun = max(recorded, default=-1) + BEGUN_AT_MOST

    def run(self) -> None:
        """Copy the chunks in a pipeline: read the next chunk and record the last one while a chunk is
        written."""
        with ThreadPoolExecutor(3, "copying") as pool:
            reading = [pool.submit(self._read, chunk) for chunk in self._todo[:1]]
            writing: list[Future[_Written]] = []
            recording: list[Future[None]] = []
            for i, chunk in enumerate(self._todo):
                batch = reading.pop().result()
                reading += [pool.submit(self._read, after) for after in self._todo[i + 1 : i + 2]]
                rows = carried(self._pair, batch)
                invalid = [batch.keys[i] for i in np.flatnonzero(self._invalid(batch))]
                recording = self._recorded(pool, writing, recording)
                writing = [pool.submit(self._write, chunk, rows, invalid)]
            for last in self._recorded(pool, writing, recording):
                last.result()

    def _recorded(
        self, pool: ThreadPoolExecutor, writing: list[Future[_Written]], recording: list[Future[None]]
    ) -> list[Future[None]]:
        """Wait for the write and the record in progress, and start to record the written chunk."""
        written = [each.result() for each in writing]
        for each in recording:
            each.result()
        return [pool.submit(self._recorder.done, [each.chunk], each.size, each.seconds) for each in written]

    def _invalid(self, batch: Batch) -> Flags:
        return self._pair.state.layout.invalid(self._pair.origin.decode_rows(batch).vectors)

    def _read(self, chunk: Chunk) -> Batch:
        return self._pair.store.scan(
            self._pair.origin.collection,
            self._pair.state.field,
            after=chunk.after,
            upto=chunk.upto,
            partition=chunk.partition,
        )

    def _write(self, chunk: Chunk, rows: Batch, invalid: list[Key]) -> _Written:
        began = time.perf_counter()
        are_new = self._alone and chunk.importing is None and chunk.number > self._perhaps_begun
        size = send(self._pair, rows, chunk.partition, self._throttle, are_new=are_new)
        seconds = time.perf_counter() - began
        copied = with_invalid(chunk, invalid).model_copy(update={"seconds": round(seconds, 3)})
        return _Written(copied, size, seconds)


T = TypeVar("T")

FILE_BYTES = 32_000_000
"""Maximum bytes of stored vectors in one file: the bulk writer holds ten times as much in memory."""
CHUNKS_PER_FILE = 500
LONGEST_PAUSE = 2.0


def half_imported(chunks: Sequence[Chunk]) -> bool:
    """Return whether the import of some chunk may be unfinished."""
    return any(chunk.importing is not None and chunk.seconds is None for chunk in chunks)


def wait_for_imports(
    store: Store,
    target: str,
    chunks: Sequence[Chunk],
    ledger: Ledger,
    recorder: Recorder,
    throttle: Throttle,
) -> None:
    """Complete the imports of an earlier run: wait until no import into `target` is running, record imported
    chunks as done, and delete the target's rows of all other chunks."""
    imports = capability(store, BulkImport)
    jobs = _ended(
        lambda: imports.import_jobs(target),
        lambda seen: any(job.state == "running" for job in seen),
        throttle,
    )
    imports.show_imported(target)
    store.count(target)
    imported = {job.file for job in jobs if job.state == "done" and job.file is not None}
    settled = []
    for chunk in chunks:
        if chunk.seconds is not None:
            continue
        if chunk.importing in imported:
            settled.append(chunk.model_copy(update={"seconds": 0.0}))
        else:
            _clear(store, target, chunk)
            settled.append(chunk.model_copy(update={"importing": None}))
    ledger.write_chunks(recorder.migration, settled)


def import_chunks(
    pair: Pair,
    chunks: Sequence[Chunk],
    ledger: Ledger,
    recorder: Recorder,
    bulk: BulkTarget,
    throttle: Throttle,
) -> None:
    """Copy the chunks that are not recorded as done, through files that the database imports.

    The copy must hold none of their rows; it shows them only after `Store.show_imported`. No client may write
    to it: the import of a key that was upserted before would double that key.

    Raises StoreError with the database's reason if the database cannot import a file.
    """
    _Importing(pair, ledger, recorder, bulk, throttle).run(chunks)


class _Importing:
    def __init__(
        self, pair: Pair, ledger: Ledger, recorder: Recorder, bulk: BulkTarget, throttle: Throttle
    ) -> None:
        self._pair, self._ledger, self._recorder = pair, ledger, recorder
        self._imports = capability(pair.store, BulkImport)
        self._bulk, self._throttle = bulk, throttle
        self._target = pair.copy.collection
        self._folder = bulk.folder / self._target
        self._bytes_per_row = BYTES_PER_NUMBER * pair.state.form.width

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Read chunks ahead, and write each file while the one before is imported."""
        shutil.rmtree(self._folder, ignore_errors=True)
        todo = [chunk for chunk in chunks if chunk.seconds is None]
        with ThreadPoolExecutor(2, "importing") as pool:
            batches = self._read_ahead(pool, todo)
            behind: Future[None] | None = None
            for group in self._groups(todo):
                began = time.perf_counter()
                file, written, rows = self._write(group, batches)
                if behind is not None:
                    behind.result()
                behind = pool.submit(self._import, file, written, rows, began)
            if behind is not None:
                behind.result()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_ahead(self, pool: ThreadPoolExecutor, chunks: Sequence[Chunk]) -> Iterator[Batch]:
        """Yield the rows of each chunk in turn."""
        ahead = [pool.submit(self._read, chunk) for chunk in chunks[:1]]
        for i in range(len(chunks)):
            batch = ahead.pop().result()
            ahead += [pool.submit(self._read, after) for after in chunks[i + 1 : i + 2]]
            yield batch

    def _read(self, chunk: Chunk) -> Batch:
        return self._pair.store.scan(
            self._pair.origin.collection,
            self._pair.state.field,
            after=chunk.after,
            upto=chunk.upto,
            partition=chunk.partition,
        )

    def _groups(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Yield groups of neighbouring chunks of one partition that fit into one file."""
        group: list[Chunk] = []
        rows = 0
        for chunk in chunks:
            is_full = (rows + chunk.rows) * self._bytes_per_row > FILE_BYTES or len(group) == CHUNKS_PER_FILE
            if group and (is_full or chunk.partition != group[0].partition):
                yield group
                group, rows = [], 0
            group.append(chunk)
            rows += chunk.rows
        if group:
            yield group

    def _write(self, group: list[Chunk], batches: Iterator[Batch]) -> tuple[str | None, list[Chunk], int]:
        """Write a file for the group. Return the file, None if the group has no rows left; its chunks; and
        the number of rows."""
        pair = self._pair
        written: list[Chunk] = []
        rows = 0

        def as_copied() -> Iterator[Batch]:
            nonlocal rows
            for chunk in group:
                batch = next(batches)
                invalid = pair.state.layout.invalid(pair.origin.decode_rows(batch).vectors)
                written.append(with_invalid(chunk, [batch.keys[i] for i in np.flatnonzero(invalid)]))
                rows += len(batch)
                self._throttle.admit(len(batch), self._bytes_per_row * len(batch))
                yield carried(pair, batch)

        file = self._imports.write_import_file(self._target, as_copied(), pair.state.field, self._folder)
        return file, written, rows

    def _import(self, file: str | None, chunks: list[Chunk], rows: int, began: float) -> None:
        if file is not None:
            name = self._bulk.seen_by_database(f"{self._target}/{file}")
            chunks = [chunk.model_copy(update={"importing": name}) for chunk in chunks]
            self._ledger.write_chunks(self._recorder.migration, chunks)
            self._import_file(name, chunks[0].partition)
            (self._folder / file).unlink(missing_ok=True)
        seconds = time.perf_counter() - began
        of_each = round(seconds / len(chunks), 3)
        done = [chunk.model_copy(update={"seconds": of_each}) for chunk in chunks]
        self._recorder.done(done, self._bytes_per_row * rows, seconds)

    def _import_file(self, name: str, partition: str | None) -> None:
        job = self._imports.bulk_import(self._target, name, partition=partition)
        ended = _ended(
            lambda: self._imports.import_job(job),
            lambda seen: seen.state == "running",
            self._throttle,
        )
        if ended.state == "failed":
            raise StoreError(f"the database could not import {name}: {ended.reason or 'it gives no reason'}")


def _ended(look: Callable[[], T], is_running: Callable[[T], bool], throttle: Throttle) -> T:
    """Poll `look` until its result is no longer running, and return that result; the throttle can end the
    wait."""

    def meanwhile(_: Any) -> None:
        throttle.admit(0, 0)

    retrying = Retrying(
        retry=retry_if_result(is_running),
        wait=wait_exponential(0.1, max=LONGEST_PAUSE),
        before_sleep=meanwhile,
    )
    return retrying(look)


def _clear(store: Store, target: str, chunk: Chunk) -> None:
    """Delete the rows of the copy whose keys are in the chunk."""
    after: Key | None = chunk.after
    while page := store.scan_keys(target, after=after, limit=KEYS_PER_PAGE, partition=chunk.partition):
        of_chunk = bisect_right(cast("list[Any]", page), chunk.upto)
        store.delete(target, page[:of_chunk])
        if of_chunk < len(page):
            return
        after = page[-1]
