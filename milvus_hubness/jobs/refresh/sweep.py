"""The removal of all that the correction of a collection has left and nothing uses any more.

A refresh leaves the former copy, a rollback leaves the copy, and `disable` leaves biases
in rows without a schema; banks, records of the ledger and properties stay after each of these. The
collection itself, what an application reads, the source of a migration, and what an unfinished job
goes on with are never removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import CollectionNotFound
from milvus_hubness.jobs.common.lease import Lease, forget_leases, holder_of, read_entries
from milvus_hubness.jobs.migration.clean import (
    drop_collection,
    drop_copy,
    replaced_by,
    samples_with,
    without_source,
)
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.presence import is_copy
from milvus_hubness.jobs.store.ownership import bank_name
from milvus_hubness.jobs.store.protocols import BiasKeys, Store, expect_store
from milvus_hubness.jobs.store.records import (
    BANK_PROPERTY,
    DUAL_WRITE_PROPERTY,
    IDENTITY_PROPERTY,
    CollectionInfo,
)

UNFINISHED = {"preparing", "copying", "catching up", "verified", "switching", "rolling back"}
"""Phases of a migration that goes on when its command is run again."""


@dataclass(frozen=True)
class Leftovers(ShownAsTable):
    """What the correction of a collection has left, in the order in which it is removed."""

    collection: str
    """The real name of the collection; it stays."""

    copies: tuple[str, ...] = ()
    """Copies that nobody reads: former copies of refreshes, and copies after a rollback.
    """

    samples: dict[str, int] = field(default_factory=dict)
    """The collections of sampled queries that go with the copies, and the number of queries in each."""

    keys: dict[str, int] = field(default_factory=dict)
    """The number of rows with each key in which a correction without a copy kept its biases."""

    properties: tuple[str, ...] = ()
    """Properties of the collection."""

    banks: tuple[str, ...] = ()
    """Bank collections of which no collection uses a query."""

    records: tuple[str, ...] = ()
    """Collections of which the ledger has records that serve nobody anything any more."""

    staying: dict[str, str] = field(default_factory=dict)
    """Collections that a correction has made and that stay, each with the reason."""

    def __bool__(self) -> bool:
        return any((self.copies, self.keys, self.properties, self.banks, self.records))

    def to_dict(self) -> dict[str, Any]:
        """Return the leftovers as plain data."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


def leftovers(store: Store, collection: str) -> Leftovers:
    """Return what `sweep` would remove.

    Read only. collection: a collection, also a former one, or an alias.

    Raises CollectionNotFound if there is neither such a collection nor a record of one, and
    StateError if a state or a record cannot be read.
    """
    expect_store(store)
    return _Search(store, collection).leftovers()


def sweep(store: Store, collection: str) -> Leftovers:
    """Remove for good what `leftovers` returns, and return what was removed; after an interruption,
    call it again. Raises LeaseHeld, LeaseLost, and as `leftovers` does.
    """
    expect_store(store)
    planned = leftovers(store, collection)
    if not planned:
        return planned

    with Lease(store, planned.collection, *planned.copies) as lease:
        search = _Search(lease.store, collection)
        removed = search.leftovers()
        lease.include(*removed.copies)
        for copy in removed.copies:
            _remove_copy(lease, copy)
        _remove_from_collection(lease, removed)

        # Whether a bank is used depends on the copies, which are gone now.
        for bank in search.unused({*removed.banks}, {*removed.copies, *removed.records}):
            lease.check_now()
            lease.store.drop(bank)

        for name in removed.records:
            _forget(lease.store, name)

    # The leases leave records too.
    is_over = not Ledger(store).related(collection)
    for name in {*removed.copies, *removed.records, *([removed.collection] if is_over else [])}:
        forget_leases(store, name)
    return removed


class _Search:
    """Looks for the leftovers of one collection.

    The ledger says which collections belong together.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._ledger = Ledger(store)
        self._migrations = self._ledger.related(name)
        self._name = store.alias_target(name) or name
        self._staying: dict[str, str] = {}
        if not (self._migrations or store.exists(name)):
            raise CollectionNotFound(
                f"no collection or alias {name!r}, and the ledger has no record of one"
            )

    def leftovers(self) -> Leftovers:
        store = self._store
        copies = tuple(m.target for m in self._migrations if self._is_left(m))
        records = self._records(copies)
        info = store.info(self._name, checked=False) if store.exists(self._name) else None

        # Nothing but the records of leases is left of a collection without migrations and states.
        has_history = bool(self._migrations) or (info is not None and bool(info.states))
        if not has_history:
            has_leases = bool(read_entries(store, self._name))
            if has_leases and holder_of(store, self._name) is None:
                records = (*records, self._name)

        keys: dict[str, int] = {}
        properties: tuple[str, ...] = ()
        if info is not None and info.name not in copies:
            properties = self._properties(info, {*copies, *records})
            if isinstance(store, BiasKeys) and not _keeps_keys(info.states.values()):
                keys = store.left_keys(info.name)

        banks = self.unused(self._banks(), {*copies, *records})
        return Leftovers(
            collection=self._name,
            copies=copies,
            samples={
                name: count for copy in copies for name, count in samples_with(store, copy).items()
            },
            keys=keys,
            properties=properties,
            banks=tuple(sorted(banks)),
            records=records,
            staying=self._staying,
        )

    def _is_left(self, migration: Migration) -> bool:
        """Whether nobody needs the copy of a migration any more. Notes why one stays."""
        store = self._store
        target = migration.target
        if not store.exists(target):
            return False

        info = store.info(target, counted=False, checked=False)
        refresh = replaced_by(self._ledger, target, target)
        if not is_copy(info, migration):
            self._staying[target] = "another client has created it"
        elif info.aliases:
            self._staying[target] = f"{', '.join(map(repr, info.aliases))} leads to it"
        elif migration.phase == "rolled back" or (
            refresh is not None and store.exists(refresh.target)
        ):
            return True
        elif migration.phase in UNFINISHED:
            self._staying[target] = (
                f"its migration is {migration.phase!r}: complete it, or drop the copy with clean"
            )
        else:
            self._staying[target] = "the application was switched to it"

        return False

    def _records(self, copies: Iterable[str]) -> tuple[str, ...]:
        """Return the names of copies that are gone but still have a migration in the ledger."""
        gone = [
            migration
            for migration in self._migrations
            if migration.target not in copies and not self._store.exists(migration.target)
        ]
        # A migration that was interrupted before its copy existed goes on when it is run again.
        before_the_copy = {"preparing", "copying"}
        return tuple(
            migration.target
            for migration in gone
            if migration.phase not in before_the_copy
            or not self._store.exists(migration.source_now)
        )

    def _properties(self, info: CollectionInfo, ending: Collection[str]) -> tuple[str, ...]:
        """Return the properties of the collection that serve nobody anything any more.

        ending: the copies whose migrations end now.
        """
        unfinished = [
            migration
            for migration in self._migrations
            if migration.target not in ending and migration.phase != "finished"
        ]
        if info.states or any(info.name in {m.source_now, m.target} for m in unfinished):
            return ()

        properties = self._store.properties_of(info.name)
        names = (IDENTITY_PROPERTY, DUAL_WRITE_PROPERTY)
        return tuple(name for name in names if properties.get(name))

    def _banks(self) -> set[str]:
        """Return the bank collections of this family, used or not."""
        owners = {
            self._name,
            *(m.source for m in self._migrations),
            *(m.target for m in self._migrations),
        }
        derived = re.compile(
            "|".join(f"{re.escape(bank_name(owner))}(_.+)?" for owner in sorted(owners))
        )
        names = set(self._store.collection_names())
        banks = {name for name in names if derived.fullmatch(name)}
        banks |= {m.bank_collection for m in self._migrations} & names
        return {bank for bank in banks if self._store.properties_of(bank).get(BANK_PROPERTY)}

    def unused(self, banks: set[str], ending: Collection[str]) -> set[str]:
        """Return those of these banks that nothing uses
        once the migrations to the copies `ending` are over.
        """
        store = self._store
        unused = set(banks)
        for name in store.collection_names() if banks else ():
            if name not in ending and store.exists(name):
                states = store.info(name, counted=False, checked=False).states.values()
                unused -= {bank.collection for state in states for bank in state.banks}

        # A migration that goes on needs its bank, whether its state is written or not.
        for migration in self._ledger.migrations():
            if migration.target not in ending and migration.phase in UNFINISHED:
                unused.discard(migration.bank_collection)

        return unused


def _keeps_keys(states: Iterable[CollectionState]) -> bool:
    """Whether a correction keeps its biases in rows without a schema."""
    return any(state.codec.leaves_vectors for state in states)


def _remove_copy(lease: Lease, copy: str) -> None:
    """Drop a copy. If a refresh has replaced it, the new copy takes its place in the ledger."""
    ledger = Ledger(lease.store)
    migration = ledger.of_target(copy)
    refresh = replaced_by(ledger, copy, copy)
    if migration is not None and refresh is None:
        drop_copy(lease, ledger, migration)
    elif refresh is not None:
        drop_collection(lease, copy, other=refresh.target)
        without_source(ledger, refresh)

    _forget(lease.store, copy)


def _remove_from_collection(lease: Lease, removed: Leftovers) -> None:
    """Remove keys of rows and properties of the collection, which stays."""
    store = lease.store
    name = removed.collection
    if not store.exists(name) or name in removed.copies:
        return

    info = store.info(name, counted=False, checked=False)
    lease.check_now()
    if isinstance(store, BiasKeys) and not _keeps_keys(info.states.values()):
        store.delete_keys(name)
    for property_name in removed.properties:
        store.write_property(name, property_name, None)


def _forget(store: Store, name: str) -> None:
    """Remove the ledger's records of a collection that is gone."""
    ledger = Ledger(store)
    migration = ledger.of_target(name)
    refresh = replaced_by(ledger, name, name)
    if refresh is not None and migration is not None:
        without_source(ledger, refresh)
    elif migration is not None:
        ledger.forget(migration)

    store.forget_helpers(name)
