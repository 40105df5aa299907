"""Write intents: what clients are about to write to a collection while a job rewrites its rows.

The collection tells its clients to note each write in a log before they make it; `row_writer` says what the
job does with the notes. They help writes of HubnessClient and AsyncHubnessClient with the same rights on the
log as on the collection. A write of another client between the job's read and its write of the same row is
undone. Notes of a write that failed may be done too: a write that failed may have been done, here as
anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from milvus_hubness.errors import Cancelled, LeaseLost
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
    """Have all clients note their writes to `info` from here to the end, and yield the writer of its rows.

    state: of the field whose biases are written. Biases that are on their way must be announced before this,
    so that every row that is noted has them. client_ttl: the longest state_ttl of a client that writes, in
    seconds; so long is waited before the first row may be read. stop: once it is set, the wait ends with
    Cancelled.

    If the work within fails or is stopped, the last batch is repaired before clients are told to stop noting.
    A job that is killed leaves them noting: the next one repairs its last batch. If all biases lie in side
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
        # Its job may have been killed before all clients had heard of it.
        _wait(client_ttl, stop)
        repair_left(store, info.name, former)
    lease.check()
    intent_log = store.create_intent_log(announced)
    lease.check()
    store.write_intent_log(info.name, intent_log)
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
        # A write that was broken off may arrive yet: not after the repair.
        lease.renew_fences()
        repair_left(store, info.name, intent_log)
        store.end_intent_log(info.name, intent_log)
        raise
    lease.check()
    writer.close()
    store.end_intent_log(info.name, intent_log)


def repair(lease: Lease, collection: str, *, client_ttl: float) -> int:
    """Repair what killed jobs left, and have clients note no more. Returns how many rows were repaired."""
    store = lease.store
    info = store.info(collection, counted=False)
    if info.intent_log is None:
        return 0
    _wait(client_ttl, None)
    repaired = (
        repair_left(store, info.name, info.intent_log) if store.exists(info.intent_log.collection) else 0
    )
    lease.check()
    store.end_intent_log(info.name, info.intent_log)
    return repaired


def drop_intents(lease: Lease, info: CollectionInfo) -> None:
    """Drop the log of a collection that stays, once the last batch of a killed job is repaired: no job will
    rewrite its rows any more."""
    store = lease.store
    if info.intent_log is not None:
        if store.exists(info.intent_log.collection):
            repair_left(store, info.name, info.intent_log)
        store.write_intent_log(info.name, None)
    drop_log(lease, info.name)


def drop_log(lease: Lease, collection: str) -> None:
    """Drop the log and the batch records of a leased collection, which may be gone. Reads no row."""
    store = lease.store
    if open_batches(store, collection):
        drop_batches(store, collection)
    for intent_log in store.intent_logs(collection):
        store.drop_intent_log(intent_log, lease.look)


def rewrites_rows(state: CollectionState) -> bool:
    """Whether new biases of a field are written into rows of the collection itself."""
    return state.reranking is None or state.reranking.side is None


def _wait(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Cancelled("stopped while clients were told of the job")
