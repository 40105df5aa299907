"""Why a migration waits at present, noted in the ledger for those who watch it from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from milvus_hubness.basics.bounds import FrozenModel, Name
from milvus_hubness.errors import HubnessError
from milvus_hubness.jobs.common.lease import Lease, holder_of
from milvus_hubness.jobs.common.lease_records import read_ledger
from milvus_hubness.jobs.common.progress import polling
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import Record

PAUSES = "pauses"
"""The group of the ledger's notes of pauses; a note has the name of the copy in its key."""

POLL_SECONDS = 0.5
"""Seconds after which a pause, or its end, is noted at the latest."""


class Pause(FrozenModel):
    """The note of a process that carries a migration out."""

    owner_id: Name
    """The id of its lease: a note of an earlier process means nothing."""
    paused_by: tuple[str, ...]
    """The operators and checks that pause it, the first one first."""


@contextmanager
def noting_pauses(lease: Lease, target: str, options: MigrationOptions) -> Iterator[None]:
    """Note within the block which operators and checks pause the migration to `target`.

    The database is written only when one pauses it or resumes it.
    """
    noted: tuple[str, ...] = ()
    key = _key(target)

    def note() -> None:
        nonlocal noted
        paused_by = tuple(options.throttle.snapshot()["paused_by"])
        # A note is for people: a database that does not answer now is the job's own concern.
        with suppress(HubnessError):
            if paused_by == noted:
                return
            if paused_by:
                pause = Pause(owner_id=lease.owner_id, paused_by=paused_by)
                lease.store.put_records(LEDGER, [Record(key, PAUSES, pause.model_dump_json())])
            else:
                lease.store.drop_records(LEDGER, PAUSES, [key])
            noted = paused_by

    try:
        with polling(note, POLL_SECONDS, "milvus-hubness-pauses"):
            yield
    finally:
        if noted:
            with suppress(HubnessError):
                lease.store.drop_records(LEDGER, PAUSES, [key])


def paused_by(store: Store, target: str) -> list[str]:
    """Return what pauses the process that carries out the migration to `target`; empty if nothing
    does, or if no process is at work. Raises StateError.
    """
    record = store.record(LEDGER, _key(target))
    if record is None:
        return []

    pause = read_ledger(Pause.model_validate_json, record)
    holder = holder_of(store, target)
    # A process that was killed leaves its note behind.
    is_current = holder is not None and holder.owner_id == pause.owner_id
    return list(pause.paused_by) if is_current else []


def _key(target: str) -> str:
    return f"{PAUSES}/{target}"
