"""The removal of one side of a migration: the source after the cutover, or the copy before it."""

from __future__ import annotations

from milvus_hubness.errors import CollectionExists, InvalidInput, StoreError
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.row_writer import drop_log
from milvus_hubness.stores.ownership import CollectionId
from milvus_hubness.stores.protocols import Collections, Rows, Store, expect_store
from milvus_hubness.stores.records import DUAL_WRITE_PROPERTY


def clean(store: Store, name: str, *, drop: str, target: str | None = None) -> Migration:
    """Drop one side of a migration for good. name: its source, target or alias. drop: the source, which finishes the
    migration, or the copy, while the application reads the source, which undoes it. target: the copy, if the source has
    several. Raises LeaseHeld, and as `would_drop` does."""
    expect_store(store)
    migration = _migration(Ledger(store), name, drop, target)
    with Lease(store, migration.source_now, migration.target) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        migration = ledger.reread(migration)
        _validate(store, migration, drop)
        if drop == migration.target:
            drop_copy(lease, ledger, migration)
            return migration
        _drop(lease, drop)
        ledger.forget_chunks(migration)
        return ledger.write(migration, phase="finished")


def would_drop(store: Store, name: str, *, drop: str, target: str | None = None) -> dict[str, str]:
    """Return the names that `clean` would drop, by kind. Read only. Raises NoMigration, WrongPhase, InvalidInput if
    `drop` is not of this migration, CollectionExists if it is another collection, StoreError if it has aliases."""
    expect_store(store)
    migration = _migration(Ledger(store), name, drop, target)
    _validate(store, migration, drop)
    going = {}
    if store.exists(drop):
        going["the copy" if drop == migration.target else "the source"] = f"{drop}, {_rows(store, drop)}"
    if drop == migration.target and migration.made_bank != "nothing":
        bank, whole = migration.bank_collection, migration.made_bank == "collection"
        going["the bank"] = bank if whole else f"what this added to {bank}"
    return going


def drop_copy(lease: Lease, ledger: Ledger, migration: Migration) -> None:
    """Remove everything that the migration created; the source is then as before. Only a copy with the
    migration's id is dropped: if another collection has its name, CollectionExists is raised at the end."""
    store, target, state = lease.store, migration.target, migration.state
    is_others = store.exists(target) and not _is_copy(store, migration)
    if store.exists(target) and not is_others:
        _refuse_aliases(store, target)
    if store.exists(migration.source_now):
        dual_write = store.info(migration.source_now, counted=False).dual_write
        if dual_write is not None and dual_write.collection == target:
            store.write_property(migration.source_now, DUAL_WRITE_PROPERTY, None)
    if not is_others:
        _drop(lease, target)
    bank = migration.bank_collection
    if migration.made_bank != "nothing" and store.exists(bank):
        if state is not None:
            store.drop_bank_generations([state.profile.bank])
        unsaved = state is None and not ledger.may_use_bank(bank, but=target)
        if migration.made_bank == "collection" and (unsaved or not store.count(bank)):
            store.drop(bank)
    ledger.forget(migration)
    if is_others:
        raise CollectionExists(
            f"{target!r} is not the copy of this migration, another client created it: it stays, "
            "everything else of the migration was dropped"
        )


def _migration(ledger: Ledger, name: str, drop: str, target: str | None) -> Migration:
    """Return the migration of `name` whose copy is `drop`, if that is a copy; else the one to `target`."""
    return ledger.find(name, drop if ledger.of_target(drop) is not None else target)


def _validate(store: Store, migration: Migration, drop: str) -> None:
    if drop == migration.target:
        migration.require("preparing", "copying", "catching up", "verified", "rolled back", step="dropping the copy")
        if store.exists(drop) and _is_copy(store, migration):
            _refuse_aliases(store, drop)
        return
    if drop != migration.source_now:
        raise InvalidInput(f"{drop!r} is neither the source {migration.source_now!r} nor the copy {migration.target!r}")
    migration.require("switched", "finished", step="dropping the source")
    if store.exists(drop):
        _refuse_aliases(store, drop)
        if store.info(drop, counted=False).identity != migration.source_identity:
            raise CollectionExists(
                f"{drop!r} is not the source of this migration, another client created it since: nothing was dropped"
            )


def _is_copy(store: Collections, migration: Migration) -> bool:
    copy = store.info(migration.target, counted=False).states.get(migration.field)
    return copy is not None and copy.migration == migration.id


def _drop(lease: Lease, collection: str) -> None:
    """Drop a collection if it exists, and then its write-intent log and its query samples: no job repairs or reads its
    rows any more, and no client searches it."""
    store = lease.store
    owner = CollectionId(name=collection)
    if store.exists(collection):
        info = store.info(collection, counted=False)
        owner = info.collection_id
        lease.drop(collection)
        for online_bank in info.online_banks:
            if store.exists(online_bank.samples_collection):
                store.drop(online_bank.samples_collection)
    drop_log(lease, owner)
    store.forget_helpers(collection)


def _rows(store: Rows, collection: str) -> str:
    try:
        return f"{store.count(collection):,} rows"
    except StoreError:
        return "rows not counted, as it cannot be read"


def _refuse_aliases(store: Collections, collection: str) -> None:
    if aliases := store.info(collection, counted=False).aliases:
        raise StoreError(f"{', '.join(map(repr, aliases))} still leads to {collection!r}: nothing was dropped")
