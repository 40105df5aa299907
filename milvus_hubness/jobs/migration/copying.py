"""Chunks copied, reading, computing and writing at once, each recorded once the database has taken it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from milvus_hubness.jobs.migration.catch_up import carried, send
from milvus_hubness.jobs.migration.chunks import Chunk
from milvus_hubness.jobs.migration.differences import Pair
from milvus_hubness.jobs.migration.faces import Flags
from milvus_hubness.jobs.migration.recording import Recorder, with_invalid
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.stores.base import Batch, Key


def copy_chunks(
    pair: Pair, chunks: Sequence[Chunk], recorder: Recorder, throttle: Throttle, *, alone: bool
) -> None:
    """Copy the chunks that are not recorded as done. alone: nobody else has ever written to the copy."""
    _Copying(pair, recorder, throttle, chunks, alone).run()


BEGUN_AT_MOST = 4
"""Chunks after the last one recorded that an earlier run may have written rows of before it was killed: one
is being written while the one before it is recorded, and of a row that was just replaced, a busy Milvus 2.3
may still show the one before."""


class _Written(NamedTuple):
    """A chunk that the database has taken: bytes of vectors, seconds that took."""

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
        """While a chunk is written, the one after it is read and the one before it recorded."""
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
        """What was being written is, and what was being recorded: the former is being recorded now."""
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
