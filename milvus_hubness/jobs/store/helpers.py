"""The checks and the lists of helper collections, on any store. For the rules, see `ownership`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import StateError
from milvus_hubness.jobs.store.ownership import (
    LEDGER,
    QUERY_SAMPLES_PROPERTY,
    SIDE_PROPERTY,
    CollectionId,
    Helper,
    HelperRecord,
    helpers_group,
    is_bank_of,
    listed_in,
    owner_in,
    samples_name,
    side_name,
)
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, Record, Sampling, Samplings


class HelperReads(Protocol):
    """What the check of a helper reads from a database."""

    def exists(self, collection: str) -> bool: ...

    def properties_of(self, collection: str) -> Mapping[str, Any]:
        """Return the properties of an existing collection."""

    def listed_helpers(self, owner: CollectionId) -> frozenset[str]:
        """Return the helpers that the ledger lists for this collection."""


def expect_helpers(store: HelperReads, helpers: Iterable[Helper], owner: CollectionId) -> None:
    """Raise StateError unless each of these collections that exists is a helper of `owner`."""
    for helper in helpers:
        if not store.exists(helper.collection):
            continue

        # The ledger is read only where a name does not suffice: most helpers cost no further request.
        properties = store.properties_of(helper.collection)
        listed: Collection[str] = ()
        if not helper.is_derived_from(owner.name):
            # The helper knows its owner's new name before those who read that under the former one.
            known = owner_in(properties, helper.marker)
            is_renamed = known is not None and known.identity == owner.identity != ""
            listed = store.listed_helpers(known if known and is_renamed else owner)
        helper.require_owner(owner, properties, listed)


def own_samplings(store: HelperReads, samplings: Samplings, owner: CollectionId) -> Samplings:
    """Return the samplings whose samples belong to `owner`, and log each other one."""

    def is_own(sampling: Sampling) -> bool:
        try:
            expect_helpers(store, [sampling.helper], owner)
        except StateError as error:
            log.warning("no queries are sampled: %s", error)
            return False
        return True

    return Samplings(fields=tuple(each for each in samplings.fields if is_own(each)))


def list_helpers(
    store: Store,
    helpers: Iterable[Helper],
    states: Iterable[CollectionState],
    former: CollectionId,
    owner: CollectionId,
) -> None:
    """List these helpers, and the banks of these states,
    for a collection that gets or got another name.

    former: the collection under the name from which the names of its helpers are derived. owner:
    under the new name.
    """
    banks = own_banks(store, states, former)
    store.list_helpers(owner, [*(helper.collection for helper in helpers), *banks])


def prepare_rename(store: Store, collection: str, name: str) -> None:
    """List the helpers of a collection for the name that it is about to get. Raises StateError."""
    info = store.info(collection, counted=False)
    if info.states or info.helpers:
        renamed = CollectionId(name=name, identity=info.identity)
        list_helpers(store, info.helpers, info.states.values(), info.collection_id, renamed)


def complete_rename(store: Store, former: str, name: str) -> None:
    """Have the helpers of a renamed collection point back
    to its new name; the second time, nothing changes.
    """
    if not store.exists(name):
        # Somebody has dropped it meanwhile.
        return

    info = store.info(name, counted=False, checked=False)
    if not (info.states or info.helpers):
        return

    listed = store.listed_helpers(info.collection_id)
    for helper in info.helpers:
        # Only what `prepare_rename` or `adopt` has listed: any other
        # name may have been written into the properties by a stranger.
        if helper.collection in listed and store.exists(helper.collection):
            store.write_property(helper.collection, helper.marker, info.collection_id)

    # Last: a run that is killed before this finds the list again, and repeats the steps above.
    store.forget_helpers(former)


def own_banks(
    store: HelperReads, states: Iterable[CollectionState], owner: CollectionId
) -> list[str]:
    """Return the bank collections of these states that belong to `owner`."""
    states = list(states)
    others = {bank for state in states for bank in owner.banks_to_list(state)}
    listed = store.listed_helpers(owner) if others else frozenset()
    banks = {bank.collection for state in states for bank in state.banks}
    return sorted((banks - others) | (others & listed))


def expect_own_banks(store: HelperReads, state: CollectionState, owner: CollectionId) -> None:
    """Raise StateError if the state names a bank of somebody else."""
    if owner.banks_to_list(state):
        owner.require_banks(state, store.listed_helpers(owner))


def list_bank(store: Store, owner: CollectionId, bank: str) -> None:
    """Let jobs on `owner` write into a bank whose name is not derived from that of `owner`."""
    if not is_bank_of(bank, owner.name):
        store.list_helpers(owner, [bank])


_MAY_BE_LEFT = {
    SIDE_PROPERTY: side_name("", ""),
    QUERY_SAMPLES_PROPERTY: samples_name("", ""),
}
"""The markers of helpers that a job may leave, with a part of their names."""


def left_helpers(store: Store, info: CollectionInfo, *markers: str) -> list[str]:
    """Return the side collections and query samples that point back to a collection, which does not
    name them any more, or not yet: jobs that were interrupted have left them.

    markers: the properties that mark them, by default both. A job that runs has made some
    that are not named yet: ask under its lease.
    """
    named = {helper.collection for helper in info.helpers}
    parts = {marker: _MAY_BE_LEFT[marker] for marker in markers or _MAY_BE_LEFT}
    left: list[str] = []
    for name in sorted(store.collection_names()):
        # A description takes a request.
        if name in named or not any(part in name for part in parts.values()):
            continue
        if not store.exists(name):
            continue

        properties = store.properties_of(name)
        owners = [owner_in(properties, marker) for marker in parts]
        if any(owner is not None and owner.is_same(info.collection_id) for owner in owners):
            left.append(name)

    return left


class HelperLists:
    """The lists of helpers, for any store with a ledger."""

    records: Callable[..., list[Record]]
    put_records: Callable[[str, Sequence[Record]], None]
    drop_records: Callable[..., None]

    exists: Callable[[str], bool]
    properties_of: Callable[[str], Mapping[str, Any]]

    def expect_own_helpers(self, info: CollectionInfo) -> None:
        """Raise StateError unless the side collections and the banks that the properties of a
        collection name are its own.
        """
        expect_helpers(self, info.sides, info.collection_id)
        for state in info.states.values():
            expect_own_banks(self, state, info.collection_id)

    def listed_helpers(self, owner: CollectionId) -> frozenset[str]:
        """Return the helpers that the ledger lists for this collection."""
        records = self.records(LEDGER, helpers_group(owner.name))
        return listed_in((record.body for record in records), owner)

    def list_helpers(self, owner: CollectionId, helpers: Iterable[str]) -> None:
        """List these helpers for a collection from whose name theirs are not derived."""
        group = helpers_group(owner.name)
        bodies = {
            helper: HelperRecord(owner=owner, helper=helper).model_dump_json() for helper in helpers
        }
        records = [Record(f"{group}/{helper}", group, body) for helper, body in bodies.items()]
        if records:
            self.put_records(LEDGER, records)

    def unlist_helper(self, owner: CollectionId, helper: str) -> None:
        """Remove a helper from the list of a collection."""
        group = helpers_group(owner.name)
        self.drop_records(LEDGER, group, [f"{group}/{helper}"])

    def forget_helpers(self, owner: str) -> None:
        """Remove the list of a collection that is gone."""
        self.drop_records(LEDGER, helpers_group(owner))
