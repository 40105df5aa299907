"""Where a generation of biases beside the vectors is filled.

There are two slots: two side collections whose names stay, or two keys of each payload. Searches
read one; a refresh replaces the entries of the other one, clients write both meanwhile, and one write
of the state moves the searches. Each entry has the number of its generation: what is left of an
earlier one, and what a client writes late for it, is not read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import CollectionExists, StateError
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.store.ownership import LEDGER, SIDE_PROPERTY, owner_in
from milvus_hubness.jobs.store.protocols import SideCollections, Store, capability
from milvus_hubness.jobs.store.records import CollectionInfo, Record


def expect_free_sides(store: Store, source: CollectionInfo, sides: Iterable[str]) -> None:
    """Raise CollectionExists if a collection that was created since the plan has one of the names."""
    for side in sides:
        if not capability(store, SideCollections).can_hold_side(source, side):
            raise _created_since(side)


def _created_since(side: str) -> CollectionExists:
    return CollectionExists(f"collection {side!r} was created since this plan was made: plan again")


def create_side(lease: Lease, source: CollectionInfo, side: str) -> None:
    """Create an empty side collection; what an unfinished `enable` has left of it is dropped.

    All are there from the beginning, so that no refresh needs further rights. Raises LeaseLost, and
    CollectionExists for a collection of somebody else, which stays.
    """
    store = lease.store
    try:
        drop_side(lease, source, side)
    except StateError:
        raise _created_since(side) from None
    capability(store, SideCollections).create_side(source, side)
    lease.fence(side)


def drop_side(lease: Lease, source: CollectionInfo, side: str) -> None:
    """Drop a side collection if it exists.

    Raises LeaseLost, and StateError for a collection that is none of `source`, which stays.
    """

    def expect_side(name: str) -> None:
        side_of = owner_in(lease.store.properties_of(name), SIDE_PROPERTY)
        if side_of is None or not side_of.is_same(source.collection_id):
            raise StateError(
                f"collection {side!r} is no side collection of {source.name!r}: it stays"
            )

    lease.drop(side, expect_side)


def wait_unread(
    info: CollectionInfo,
    state: CollectionState,
    client_ttl: float,
    stop: threading.Event | None = None,
) -> None:
    """Wait until no client reads the slot that the next generation is to replace.

    Clients may have read it until the last switch, of which they hear within `client_ttl` seconds.
    Once `stop` is set, this does not wait.
    """
    since = (now() - state.profile.refreshed_at).total_seconds()
    wait_seconds(f"all clients to read the last state of {info.name!r}", client_ttl - since, stop)


UNCHECKED = "unchecked"
"""The group of the ledger's records of generations in use whose entries a job is writing."""


@contextmanager
def noted_unchecked(store: Store, info: CollectionInfo, field: str) -> Iterator[None]:
    """Note that entries which searches read are being written, until the block ends without an error.

    A job that is killed between an entry and its repair may leave one of a vector that a client has
    changed. The next job finds the note, and compares all entries with their vectors.
    """
    key = _unchecked_key(info, field)
    store.put_records(LEDGER, [Record(key, UNCHECKED, info.name)])
    yield
    store.drop_records(LEDGER, UNCHECKED, [key])


def is_unchecked(store: Store, info: CollectionInfo, field: str) -> bool:
    """Whether a job that wrote entries which searches read has not ended."""
    return store.record(LEDGER, _unchecked_key(info, field)) is not None


def _unchecked_key(info: CollectionInfo, field: str) -> str:
    return f"{UNCHECKED}/{info.name}/{field}"


def flush_generation(store: Store, state: CollectionState, slot: int) -> None:
    """Make the entries of a slot durable and loaded."""
    if sides := state.codec.sides:
        store.flush(sides[slot])
