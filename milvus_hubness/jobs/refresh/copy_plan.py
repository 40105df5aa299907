"""What the copy of a refresh takes, estimated on a page of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.migration.estimates import estimated
from milvus_hubness.jobs.migration.ledger import Switch
from milvus_hubness.jobs.migration.plan import waits_for_clients
from milvus_hubness.jobs.store.generations import Batch


@dataclass(frozen=True)
class CopyPlan:
    """A copy with new biases."""

    target: str
    """Its name."""
    names: tuple[str, ...]
    """The names that move to it."""
    renamed: str | None
    """The new name of its source; None if that keeps its own."""
    rows: int
    """Number of rows."""
    memory_bytes: dict[str, int]
    """The memory that the loaded source and the loaded copy take, as "source" and "target"."""
    seconds: float
    """How long copy and verification take, estimated on a sample of the rows."""
    waiting_seconds: float
    """How long the refresh waits for clients."""
    remarks: tuple[str, ...] = ()
    """What the user should know before the run."""


def copy_plan(
    stored: StoredBiases,
    correction: Correction,
    target: str,
    switch: Switch,
    *,
    client_ttl: float,
    remarks: Sequence[str],
) -> CopyPlan:
    """Return what a copy of this name takes, with these biases. client_ttl: as in RefreshOptions."""
    info = stored.info
    codec = stored.state.codec
    page, reading_seconds = _timed_page(stored)

    def correct(rows: Batch) -> None:
        vectors = codec.decode_rows(codec.columns(rows.vectors, rows.rows))
        correction.centred(vectors, rows.items)

    vector = info.vector_fields[stored.state.field]
    widths = {
        "source": codec.form.width,
        "target": form_of(correction.layout, vector.dtype).width,
    }
    estimates = estimated(page, reading_seconds, correct, vector, widths, info.rows)
    return CopyPlan(
        target=target,
        names=switch.names,
        renamed=switch.source_renamed,
        rows=info.rows,
        memory_bytes=estimates.memory_bytes,
        seconds=round(estimates.seconds, 3),
        waiting_seconds=waits_for_clients(
            client_ttl, estimates.seconds, alias=switch.name, rename=switch.source_renamed
        ),
        remarks=tuple(remarks),
    )


def _timed_page(stored: StoredBiases) -> tuple[Batch, float]:
    """Return a whole page of rows, or the most that a partition has, and the seconds of its read."""
    store = stored.store
    info = stored.info
    page_rows = store.chunk_rows(info)
    most: Batch | None = None
    seconds = 0.0
    for partition in info.partitions:
        began = time.perf_counter()
        page = store.scan(info.name, stored.state.field, limit=page_rows, partition=partition)
        if most is None or len(page) > len(most):
            most = page
            seconds = time.perf_counter() - began
        if len(page) == page_rows:
            break

    assert most is not None, "each collection has a partition"
    return most, seconds
