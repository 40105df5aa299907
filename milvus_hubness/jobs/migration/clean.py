"""What a migration leaves, taken away: only what is named, and never what the application reads."""

from __future__ import annotations

from milvus_hubness.errors import CollectionExists, InvalidInput, StoreError
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.write_intents import drop_intents
from milvus_hubness.stores.base import Store


def clean(store: Store, name: str, *, drop: str) -> Migration:
    """Drop one side of a migration for good.

    name: of its source, target or alias. drop: the source, once the application reads the copy, which
    finishes the migration; or the copy, as long as or once more the application reads the source, which takes
    back everything. Raises InvalidInput for any other collection, NoMigration, LeaseHeld, WrongPhase,
    and StoreError where an alias leads to what would be dropped.
    """
    found = Ledger(store).find(name)
    with Lease(store, found.source_now, found.target) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        migration = ledger.again(found)
        if drop == migration.target:
            migration.require(
                "preparing", "copying", "catching up", "verified", "rolled back", step="dropping the copy"
            )
            drop_copy(lease, ledger, migration)
            return migration
        if drop != migration.source_now:
            raise InvalidInput(
                f"{drop!r} is neither the source {migration.source_now!r} nor the copy {migration.target!r}"
            )
        migration.require("switched", "finished", step="dropping the source")
        if store.exists(drop):
            _refuse_aliases(store, drop)
            info = store.info(drop, counted=False)
            if info.identity != migration.source_identity:
                raise CollectionExists(
                    f"{drop!r} is not the source of this migration, somebody has created it since: nothing "
                    "was dropped"
                )
            drop_intents(store, info)
            lease.drop(drop)
        ledger.forget_chunks(migration)
        return ledger.write(migration, phase="finished")


def drop_copy(lease: Lease, ledger: Ledger, migration: Migration) -> None:
    """Take back everything that the migration made: the source is as it was. Only a copy that carries the
    migration's id is dropped: for another collection of its name, CollectionExists is raised at the end."""
    store, target, state = lease.store, migration.target, migration.state
    info = store.info(target, counted=False) if store.exists(target) else None
    copy = info.states.get(migration.field) if info else None
    is_ours = copy is not None and copy.migration == migration.id
    if is_ours:
        _refuse_aliases(store, target)
    if store.exists(migration.source_now):
        mirror = store.info(migration.source_now, counted=False).mirror
        if mirror is not None and mirror.collection == target:
            store.write_mirror(migration.source_now, None)
    if info is not None and is_ours:
        drop_intents(store, info)
        lease.drop(target)
    bank = migration.bank_collection
    if migration.made_bank != "nothing" and store.exists(bank):
        if state is not None:
            store.drop_bank_generation(state.profile.bank)
        others = [
            each for each in ledger.migrations() if each.target != target and each.bank_collection == bank
        ]
        unsaved = state is None and not others
        if migration.made_bank == "collection" and (unsaved or not store.count(bank)):
            store.drop(bank)
    ledger.forget(migration)
    if info is not None and not is_ours:
        raise CollectionExists(
            f"{target!r} is not the copy of this migration, somebody else has created it: it "
            "stays, everything else of the migration was dropped"
        )


def _refuse_aliases(store: Store, collection: str) -> None:
    if aliases := store.info(collection, counted=False).aliases:
        raise StoreError(
            f"{', '.join(map(repr, aliases))} still leads to {collection!r}: nothing was dropped"
        )
