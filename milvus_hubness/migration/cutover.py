"""Cutover and rollback, which move the application's name; and clean, which drops one side."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milvus_hubness.errors import CollectionExists, CollectionNotFound, InvalidInput, StoreError
from milvus_hubness.job_properties import DUAL_WRITE_PROPERTY, DualWrite
from milvus_hubness.migration.catch_up import announced, one_pass, until_equal
from milvus_hubness.migration.ledger import Ledger, Migration, Switch, chosen_switch, leased
from milvus_hubness.migration.plan import MigrationOptions
from milvus_hubness.migration.prepare import backward, forward
from milvus_hubness.operations.control import CutoverGate
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.lease_records import now
from milvus_hubness.operations.progress import Throttle
from milvus_hubness.operations.reading import keep_nearest
from milvus_hubness.operations.write_intents import drop_log
from milvus_hubness.stores.protocols import Renaming, Store, capability


def clean(store: Store, name: str, *, drop: str, target: str | None = None) -> Migration:
    """Drop one side of a migration for good.

    name: its source, target or alias. drop: the source, once the application reads the copy, which finishes
    the migration; or the copy, while the application reads the source, which undoes the migration. target:
    the copy, if the source has several. Raises LeaseHeld, and as `would_drop` does.
    """
    found = _found(Ledger(store), name, drop, target)
    with Lease(store, found.source_now, found.target) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        migration = ledger.again(found)
        _validate(store, migration, drop)
        if drop == migration.target:
            drop_copy(lease, ledger, migration)
            return migration
        _drop(lease, drop)
        ledger.forget_chunks(migration)
        return ledger.write(migration, phase="finished")


def would_drop(store: Store, name: str, *, drop: str, target: str | None = None) -> dict[str, str]:
    """Return the names that `clean` would drop, by kind. Read only; no index and no load is required.

    Raises InvalidInput if `drop` does not belong to this migration, NoMigration, WrongPhase, CollectionExists
    if another collection has the name, and StoreError if an alias leads to it.
    """
    migration = _found(Ledger(store), name, drop, target)
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
            store.drop_bank_generation(state.profile.bank)
        others = [
            each for each in ledger.migrations() if each.target != target and each.bank_collection == bank
        ]
        unsaved = state is None and not others
        if migration.made_bank == "collection" and (unsaved or not store.count(bank)):
            store.drop(bank)
    ledger.forget(migration)
    if is_others:
        raise CollectionExists(
            f"{target!r} is not the copy of this migration, somebody else has created it: it "
            "stays, everything else of the migration was dropped"
        )


def _found(ledger: Ledger, name: str, drop: str, target: str | None) -> Migration:
    """Return the migration of `name` whose copy is `drop`, if that is a copy; else the one to `target`."""
    return ledger.find(name, drop if ledger.of_target(drop) is not None else target)


def _validate(store: Store, migration: Migration, drop: str) -> None:
    if drop == migration.target:
        migration.require(
            "preparing", "copying", "catching up", "verified", "rolled back", step="dropping the copy"
        )
        if store.exists(drop) and _is_copy(store, migration):
            _refuse_aliases(store, drop)
        return
    if drop != migration.source_now:
        raise InvalidInput(
            f"{drop!r} is neither the source {migration.source_now!r} nor the copy {migration.target!r}"
        )
    migration.require("switched", "finished", step="dropping the source")
    if store.exists(drop):
        _refuse_aliases(store, drop)
        if store.info(drop, counted=False).identity != migration.source_identity:
            raise CollectionExists(
                f"{drop!r} is not the source of this migration, somebody has created it since: nothing "
                "was dropped"
            )


def _is_copy(store: Store, migration: Migration) -> bool:
    """Return whether the collection with the target's name is the copy that this migration created."""
    copy = store.info(migration.target, counted=False).states.get(migration.field)
    return copy is not None and copy.migration == migration.id


def _drop(lease: Lease, collection: str) -> None:
    """Drop a collection if it exists, and then its write-intent log: no job repairs or reads its rows any
    more."""
    if lease.store.exists(collection):
        lease.drop(collection)
    drop_log(lease, collection)


def _rows(store: Store, collection: str) -> str:
    try:
        return f"{store.count(collection):,} rows"
    except StoreError:
        return "rows not counted, as it cannot be read"


def _refuse_aliases(store: Store, collection: str) -> None:
    if aliases := store.info(collection, counted=False).aliases:
        raise StoreError(
            f"{', '.join(map(repr, aliases))} still leads to {collection!r}: nothing was dropped"
        )


POSTPONED_SECONDS = 30
"""Seconds between two passes while the cutover is postponed."""

WARMING_SEARCHES = 100


def cutover(
    store: Store,
    name: str,
    *,
    alias: str | None = None,
    rename: bool = False,
    options: MigrationOptions | None = None,
) -> Migration:
    """Let the application read the copy: catch up once more, then move the name that the application uses.

    name: the source, the copy or the alias. alias: the alias that is moved or created, in one step of the
    database. rename: the application uses the source's own name: the source gets a new name, and its own name
    becomes an alias of the copy. In between, for some milliseconds, the name leads nowhere; a HubnessClient
    waits that out. An interrupted step is finished with its original arguments.

    Raises WrongPhase unless the copy is verified, InvalidInput, NotCaughtUp, and the exceptions of the store.
    """
    options = options or MigrationOptions()
    found = Ledger(store).find(name)
    found.require("verified", "switching", "switched", step="cutover")
    names = dict.fromkeys([found.source_now, found.target, found.source])
    with options.reporting_failures(), leased(store, names, options.lease, options.throttle) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        migration = ledger.again(found)
        migration.require("verified", "switching", "switched", step="cutover")
        if migration.phase == "verified":
            switch = chosen_switch(store, migration.source, migration.target, alias, rename)
            facts = {"source": migration.source, "target": migration.target, "alias": switch.name}
            _warm(store, migration)
            migration = _postponed(store, ledger, migration, options)
            options.events.report("before-cutover", **facts)
            migration = _caught_up(store, ledger, migration, options)
            state = keep_nearest(store, migration.target, migration.corrected())
            if state != migration.state:
                store.write_property(migration.target, state.property_name, state)
            migration = ledger.write(migration, phase="switching", switch=switch, state=state)
        if migration.phase == "switching":
            migration = _moved(lease, ledger, migration)
            facts = {"source": migration.source_now, "target": migration.target}
            if done := migration.switch:
                options.events.report("after-cutover", **facts, alias=done.name, window=done.window)
    return migration


@dataclass(frozen=True)
class Rollback:
    """The result of a rollback. alias: leads to `source` again, unless it is the source's own name. carried:
    number of rows that clients wrote to the corrected collection since the cutover and that were carried
    back."""

    alias: str
    source: str
    target: str
    carried: int


def rollback(store: Store, name: str, *, options: MigrationOptions | None = None) -> Rollback:
    """Let the application read the source again, after the source has caught up with writes since the
    cutover.

    name: the source, the copy or the alias. Raises WrongPhase unless the copy took over, CollectionNotFound
    if the source no longer exists, NotCaughtUp, and the exceptions of the store.
    """
    options = options or MigrationOptions()
    found = Ledger(store).find(name)
    found.require("switched", "rolling back", step="rollback")
    names = dict.fromkeys([found.source_now, found.target, found.source])
    carried = 0
    with options.reporting_failures(), leased(store, names, options.lease, options.throttle) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        migration = ledger.again(found)
        migration.require("switched", "rolling back", step="rollback")
        switch = migration.switch
        if switch is None or (not store.exists(migration.source_now) and not store.exists(migration.source)):
            raise CollectionNotFound(f"the source {migration.source_now!r} of {migration.target!r} is gone")
        facts = {"source": migration.source, "target": migration.target, "alias": switch.name}
        if migration.phase == "switched":
            options.events.report("before-rollback", **facts)
            pair, partitions = backward(store, migration), store.info(migration.source_now).partitions
            for required in (False, True):
                if not options.no_writers:
                    dual_write = DualWrite(collection=migration.source_now, required=required)
                    migration = announced(store, ledger, migration, migration.target, dual_write)
                    options.wait_for_clients(migration.announced_at)
                try:
                    migration, _, rows = until_equal(ledger, migration, pair, partitions, options)
                except Exception:
                    if not options.no_writers:
                        dual_write = DualWrite(collection=migration.source_now)
                        store.write_property(migration.target, DUAL_WRITE_PROPERTY, dual_write)
                    raise
                carried += rows
            migration = ledger.write(migration, phase="rolling back")
        migration = _moved_back(lease, ledger, migration, switch)
        options.events.report("after-rollback", **facts, carried=carried)
    return Rollback(switch.name, migration.source, migration.target, carried)


def _warm(store: Store, migration: Migration) -> None:
    """Load the copy and search it, so that its index is in memory."""
    store.load(migration.target)
    state = migration.corrected()
    queries = store.load_bank(state.profile.bank).queries.vectors[:WARMING_SEARCHES]
    valid = queries[~state.layout.invalid(queries)]
    if len(valid):
        query_vectors = state.layout.encode_queries(valid, state.profile.strength, slot=state.profile.slot)
        store.nearest(migration.target, state.field, np.asarray(query_vectors), 10)


def _postponed(store: Store, ledger: Ledger, migration: Migration, options: MigrationOptions) -> Migration:
    """Run catch-up passes while the cutover is postponed."""
    if options.gate is None or not options.gate.postponed:
        return migration
    options.events.report("postponed", source=migration.source, target=migration.target)
    pair, partitions = forward(store, migration, options.engine), store.info(migration.source).partitions
    while not _released(options.gate, options.throttle):
        one_pass(pair, partitions, migration, migration.passes + 1, options)
        migration = ledger.write(migration, passes=migration.passes + 1)
    return migration


def _released(gate: CutoverGate, throttle: Throttle) -> bool:
    """Wait for the release of the cutover, at most until the next pass is due; return whether it is
    released."""
    for _ in range(POSTPONED_SECONDS):
        throttle.admit(0, 0)
        if gate.wait(1):
            return True
    return False


def _caught_up(store: Store, ledger: Ledger, migration: Migration, options: MigrationOptions) -> Migration:
    if not options.no_writers:
        dual_write = DualWrite(collection=migration.target, required=True)
        migration = announced(store, ledger, migration, migration.source, dual_write)
        options.wait_for_clients(migration.announced_at)
    pair, partitions = forward(store, migration, options.engine), store.info(migration.source).partitions
    try:
        migration, _, _ = until_equal(ledger, migration, pair, partitions, options)
    except Exception:
        if not options.no_writers:
            store.write_property(
                migration.source, DUAL_WRITE_PROPERTY, DualWrite(collection=migration.target)
            )
        raise
    return migration


def _moved(lease: Lease, ledger: Ledger, migration: Migration) -> Migration:
    """Move the name to the copy, and record that in the ledger."""
    store, switch, target = lease.store, migration.switch, migration.target
    if switch is None:
        raise StoreError(f"the ledger does not say which name of {migration.source!r} is being moved")
    if switch.kept_as:
        lease.include(switch.kept_as)
    lease.check()
    began = time.perf_counter()
    if switch.kept_as and not store.exists(switch.kept_as):
        capability(store, Renaming).rename(switch.name, switch.kept_as)
    if store.alias_target(switch.name) != target:
        store.point_alias(switch.name, target)
    window = time.perf_counter() - began
    _confirm(store, switch.name, target)
    done = switch.model_copy(update={"window": round(window, 4), "at": now()})
    state = migration.corrected().model_copy(update={"source": migration.source_now})
    if switch.kept_as:
        store.write_property(target, state.property_name, state)
        lease.fence(switch.kept_as)
    store.write_property(migration.source_now, DUAL_WRITE_PROPERTY, None)
    return ledger.write(migration, phase="switched", switch=done, state=state)


def _moved_back(lease: Lease, ledger: Ledger, migration: Migration, switch: Switch) -> Migration:
    store = lease.store
    lease.check()
    if switch.kept_as is None:
        store.point_alias(switch.name, migration.source)
        _confirm(store, switch.name, migration.source)
    else:
        if store.alias_target(switch.name) == migration.target:
            store.drop_alias(switch.name)
        if store.exists(switch.kept_as):
            capability(store, Renaming).rename(switch.kept_as, switch.name)
    state = migration.corrected().model_copy(update={"source": migration.source})
    if switch.kept_as:
        store.write_property(migration.target, state.property_name, state)
    store.write_property(migration.target, DUAL_WRITE_PROPERTY, None)
    return ledger.write(migration, phase="rolled back", switch=None, state=state)


def _confirm(store: Store, alias: str, collection: str) -> None:
    behind = store.alias_target(alias)
    if behind != collection:
        raise StoreError(f"alias {alias!r} was to lead to {collection!r} and leads to {behind!r}")
