"""Write intents: clients log their writes before making them while a job rewrites rows.

A collection property asks its clients to note each write in the log; `row_writer` describes what the job does with the
notes. The log protects writes of HubnessClient and AsyncHubnessClient if they have the same rights on the log as on the
collection. If another client writes a row between the job's read and write of it, that write is undone. A repair may
also replay the note of a failed write: the database may have applied such a write anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from milvus_hubness.errors import Cancelled, LeaseLost
from milvus_hubness.job_properties import WRITE_INTENTS_PROPERTY
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.row_writer import RowWriter, drop_batches, open_batches, repair_left
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.records import CollectionInfo


@contextmanager
def rewriting(
    lease: Lease,
    info: CollectionInfo,
    state: CollectionState,
    *,
    client_ttl: float,
    stop: threading.Event | None = None,
) -> Iterator[RowWriter]:
    """Have all clients note their writes to `info` within the block, and yield the writer of its rows.

    state: the state of the field whose biases are written. New biases must be announced before this call, so
    that every noted row has them. client_ttl: the longest state_ttl of a client that writes, in seconds; this
    waits that long before the first row may be read. stop: an event that ends the wait with Cancelled.

    If the block fails or is stopped, this repairs the last batch before clients stop noting. After a job is
    killed, clients continue to note, and the next job repairs the last batch. If all biases are in side
    collections, no row is rewritten and clients note nothing.
    """
    store = lease.store
    if not (rewrites_rows(state) or any(map(rewrites_rows, info.states.values()))):
        _wait(client_ttl, stop)
        yield RowWriter(lease, info, state, None)
        return
    lease.check()
    announced = store.info(info.name, counted=False)
    former = announced.intent_log
    if former is not None and store.exists(former.collection):
        # The job may have been killed before all clients had read the new collection state.
        _wait(client_ttl, stop)
        repair_left(store, info.name, former)
    lease.check()
    intent_log = store.create_intent_log(announced)
    lease.check()
    store.write_property(info.name, WRITE_INTENTS_PROPERTY, intent_log)
    try:
        for left in store.intent_logs(info.name):
            if left.collection != intent_log.collection:
                store.drop_intent_log(left, lease.look)
        _wait(client_ttl, stop)
    except BaseException:
        store.end_intent_log(info.name, intent_log)
        raise
    writer = RowWriter(lease, info, state, intent_log)
    try:
        yield writer
    except (LeaseLost, GeneratorExit):
        raise
    except BaseException:
        # An interrupted write may still arrive; with new fences it cannot arrive after the repair.
        lease.renew_fences()
        repair_left(store, info.name, intent_log)
        store.end_intent_log(info.name, intent_log)
        raise
    lease.check()
    writer.close()
    store.end_intent_log(info.name, intent_log)


def repair(lease: Lease, collection: str, *, client_ttl: float) -> int:
    """Repair the rows that killed jobs left, and end the noting of writes. Return the number of repaired rows."""
    store = lease.store
    info = store.info(collection, counted=False)
    if info.intent_log is None:
        return 0
    _wait(client_ttl, None)
    repaired = repair_left(store, info.name, info.intent_log) if store.exists(info.intent_log.collection) else 0
    lease.check()
    store.end_intent_log(info.name, info.intent_log)
    return repaired


def drop_intents(lease: Lease, info: CollectionInfo) -> None:
    """Repair the last batch of a killed job, and drop the log of a collection that stays: no job will rewrite
    its rows any more."""
    store = lease.store
    if info.intent_log is not None:
        if store.exists(info.intent_log.collection):
            repair_left(store, info.name, info.intent_log)
        store.write_property(info.name, WRITE_INTENTS_PROPERTY, None)
    drop_log(lease, info.name)


def drop_log(lease: Lease, collection: str) -> None:
    """Drop the log and the batch records of a leased collection, which may no longer exist. Read no row."""
    store = lease.store
    if open_batches(store, collection):
        drop_batches(store, collection)
    for intent_log in store.intent_logs(collection):
        store.drop_intent_log(intent_log, lease.look)


def rewrites_rows(state: CollectionState) -> bool:
    """Return whether a job writes new biases of a field into rows of the collection itself."""
    return state.codec.writes_rows


def _wait(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Cancelled("stopped while clients were told of the job")
