"""Chunks copied, reading, computing and writing at once, each recorded once the database has taken it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from milvus_hubness.jobs.migration.catch_up import carried, send
from milvus_hubness.jobs.migration.chunks import Chunk
from milvus_hubness.jobs.migration.differences import Pair
from milvus_hubness.jobs.migration.events import Events
from milvus_hubness.jobs.migration.faces import Flags
from milvus_hubness.jobs.migration.ledger import Ledger, Migration, Runner
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.stores.base import Batch, Key

SIGN_OF_LIFE_SECONDS = 10
KEYS_NAMED = 5


def copy_chunks(
    pair: Pair,
    migration: Migration,
    chunks: Sequence[Chunk],
    ledger: Ledger,
    throttle: Throttle,
    events: Events,
) -> Migration:
    """Copy the chunks that are not recorded as done. The migration as the ledger has it then."""
    return _Copying(pair, migration, ledger, throttle, events, chunks).run()


class _Copying:
    def __init__(
        self,
        pair: Pair,
        migration: Migration,
        ledger: Ledger,
        throttle: Throttle,
        events: Events,
        chunks: Sequence[Chunk],
    ) -> None:
        self._pair, self._migration, self._ledger = pair, migration, ledger
        self._throttle, self._events = throttle, events
        self._count = len(chunks)
        self._todo = [chunk for chunk in chunks if chunk.seconds is None]
        self._rows = sum(chunk.rows for chunk in chunks if chunk.seconds is not None)
        self._rows_before = self._rows
        self._began = self._seen = time.perf_counter()

    def run(self) -> Migration:
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
        return self._migration

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
        size = send(self._pair, rows, chunk.partition, self._throttle)
        done = time.perf_counter()
        found = {"unsound": len(unsound), "unsound_keys": tuple(unsound[:KEYS_NAMED])}
        copied = chunk.model_copy(update={"seconds": round(done - began, 3), **found})
        self._ledger.write_chunks(self._migration.target, [copied])
        if done - self._seen > SIGN_OF_LIFE_SECONDS:
            self._seen = done
            self._migration = self._ledger.write(self._migration, runner=Runner.here())
        self._rows += chunk.rows
        speed = (self._rows - self._rows_before) / (done - self._began)
        self._events.tell(
            "copying",
            partition=chunk.partition,
            chunk=chunk.number + 1,
            chunks=self._count,
            rows=self._rows,
            rows_total=self._migration.rows,
            bytes=size,
            seconds=done - began,
            rows_per_second=speed,
            eta_seconds=(self._migration.rows - self._rows) / speed,
        )
