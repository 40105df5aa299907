"""What was copied: kept in the ledger, and told."""

from __future__ import annotations

import time
from collections.abc import Sequence

from milvus_hubness.jobs.migration.chunks import Chunk
from milvus_hubness.jobs.migration.events import Events
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.stores.base import Key

KEYS_NAMED = 5


class Recorder:
    """migration: as the ledger has it. chunks: all of them, whether done or not."""

    def __init__(self, migration: Migration, chunks: Sequence[Chunk], ledger: Ledger, events: Events) -> None:
        self.migration = migration
        self._ledger, self._events = ledger, events
        self._count = len(chunks)
        self._rows = sum(chunk.rows for chunk in chunks if chunk.seconds is not None)
        self._rows_before = self._rows
        self._began = time.perf_counter()

    def done(self, chunks: Sequence[Chunk], size: int, seconds: float) -> None:
        """These chunks, whose vectors have so many bytes, were copied, which took that long."""
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
    """The chunk, with the keys of its rows that hold no usable vector."""
    return chunk.model_copy(update={"invalid": len(keys), "invalid_keys": tuple(keys[:KEYS_NAMED])})
