"""Chunks copied, reading, computing and writing at once, each recorded once the database has taken it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from milvus_hubness.jobs.migration.catch_up import carried, send
from milvus_hubness.jobs.migration.chunks import Chunk
from milvus_hubness.jobs.migration.differences import Pair
from milvus_hubness.jobs.migration.faces import Flags
from milvus_hubness.jobs.migration.recording import Recorder, with_unsound
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.stores.base import Batch, Key


def copy_chunks(
    pair: Pair, chunks: Sequence[Chunk], recorder: Recorder, throttle: Throttle, *, alone: bool
) -> None:
    """Copy the chunks that are not recorded as done. alone: nobody else has ever written to the copy."""
    _Copying(pair, recorder, throttle, chunks, alone).run()


class _Copying:
    def __init__(
        self, pair: Pair, recorder: Recorder, throttle: Throttle, chunks: Sequence[Chunk], alone: bool
    ) -> None:
        self._pair, self._recorder, self._throttle = pair, recorder, throttle
        self._todo = [chunk for chunk in chunks if chunk.seconds is None]
        self._alone = alone

    def run(self) -> None:
        with ThreadPoolExecutor(2, "copying") as pool:
            ahead = [pool.submit(self._read, chunk) for chunk in self._todo[:1]]
            behind: Future[None] | None = None
            for i, chunk in enumerate(self._todo):
                batch = ahead.pop().result()
                ahead += [pool.submit(self._read, after) for after in self._todo[i + 1 : i + 2]]
                rows = carried(self._pair, batch)
                unsound = [batch.keys[i] for i in np.flatnonzero(self._unsound(batch))]
                if behind is not None:
                    behind.result()
                behind = pool.submit(self._write, chunk, rows, unsound)
            if behind is not None:
                behind.result()

    def _unsound(self, batch: Batch) -> Flags:
        return self._pair.state.layout.unsound(self._pair.origin.read(batch).vectors)

    def _read(self, chunk: Chunk) -> Batch:
        return self._pair.store.scan(
            self._pair.origin.collection,
            self._pair.state.field,
            after=chunk.after,
            upto=chunk.upto,
            partition=chunk.partition,
        )

    def _write(self, chunk: Chunk, rows: Batch, unsound: list[Key]) -> None:
        began = time.perf_counter()
        # Of the first chunk an earlier run may have written rows before it was killed: no other was begun.
        are_new = self._alone and chunk.importing is None and chunk is not self._todo[0]
        size = send(self._pair, rows, chunk.partition, self._throttle, are_new=are_new)
        seconds = time.perf_counter() - began
        copied = with_unsound(chunk, unsound).model_copy(update={"seconds": round(seconds, 3)})
        self._recorder.done([copied], size, seconds)
