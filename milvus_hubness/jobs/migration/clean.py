"""The removal of one side of a migration: the source after the cutover, or the copy before it."""

from __future__ import annotations

from collections.abc import Sequence

from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import CollectionExists, CollectionNotFound, InvalidInput, StoreError
from milvus_hubness.jobs.common.fits import forget_fits
from milvus_hubness.jobs.common.lease import Lease, forget_leases
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.presence import (
    is_copy,
    is_source,
    renamed_copy,
    renamed_source,
    require_copy,
)
from milvus_hubness.jobs.store.ownership import Helper
from milvus_hubness.jobs.store.protocols import Collections, Rows, Store, expect_store
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    IDENTITY_PROPERTY,
    CollectionInfo,
    identity_in,
)


def clean(
    store: Store,
    name: str,
    *,
    drop: str,
    target: str | None = None,
    keep_samples: bool = False,
) -> Migration:
    """Drop one side of a migration for good.

    name: its source, target or alias. drop: the source, which finishes the migration, or the copy,
    while the application reads the source, which undoes it. target: the copy, if the source has
    several. keep_samples: whether the collections of its sampled queries stay, for use as banks.
    Raises LeaseHeld, and as `would_drop` does.
    """
    expect_store(store)
    migration = _migration(Ledger(store), name, drop, target)
    with Lease(store, migration.source_now, migration.target) as lease:
        ledger = Ledger(lease.store)
        migration = ledger.reread(migration)
        _validate(lease.store, migration, drop)
        if drop == migration.target:
            drop_copy(lease, ledger, migration, keep_samples=keep_samples)
        else:
            drop_collection(lease, drop, other=migration.target, keep_samples=keep_samples)
            migration = without_source(ledger, migration)

    forget_leases(store, drop)
    return migration


def would_drop(
    store: Store,
    name: str,
    *,
    drop: str,
    target: str | None = None,
    keep_samples: bool = False,
) -> dict[str, str]:
    """Return the names that `clean` would drop, by kind.

    Read only. Raises NoMigration, WrongPhase, InvalidInput if `drop` is not of this migration,
    CollectionExists if it is another collection, StoreError if it has aliases.
    """
    expect_store(store)
    migration = _migration(Ledger(store), name, drop, target)
    _validate(store, migration, drop)

    going: dict[str, str] = {}
    if store.exists(drop):
        if drop == migration.target:
            what = "the copy"
        elif migration.is_refresh:
            what = "the former copy"
        else:
            what = "the source"
        going[what] = f"{drop}, {_rows(store, drop)}"
        if sides := _own_sides(store, store.info(drop, counted=False)):
            going["side collections"] = ", ".join(side.collection for side in sides)
        if not keep_samples and (samples := samples_with(store, drop)):
            listed = [f"{of}, {count:,} queries" for of, count in samples.items()]
            going["query samples"] = "\n".join(listed)

    if drop == migration.target and migration.made_bank != "nothing":
        bank = migration.bank_collection
        whole = migration.made_bank == "collection"
        going["the bank"] = bank if whole else f"what this added to {bank}"

    return going


def _own_sides(store: Store, info: CollectionInfo) -> list[Helper]:
    """Return the side collections that go with a collection.

    A copy names those of its source for the fields that it was not made for.
    """
    listed = store.listed_helpers(info.collection_id) if info.sides else ()
    return [
        side for side in info.sides if side.is_derived_from(info.name) or side.collection in listed
    ]


def samples_with(store: Store, collection: str) -> dict[str, int]:
    """Return the collections of sampled queries that go with a collection, and how many queries each
    has.
    """
    info = store.info(collection, counted=False)
    names = [sampling.samples_collection for sampling in info.samplings.fields]
    return {name: store.count(name) for name in names if store.exists(name)}


def replaced_by(ledger: Ledger, name: str, copy: str) -> Migration | None:
    """Return the refresh whose copy has taken over from the copy `copy`; None if none has.

    name: any collection or alias that a chain of migrations connects with both.
    """
    refreshes = [migration for migration in ledger.related(name) if migration.is_refresh]
    over = (refresh for refresh in refreshes if refresh.phase in {"switched", "finished"})
    return next((refresh for refresh in over if refresh.source == copy), None)


def without_source(ledger: Ledger, migration: Migration) -> Migration:
    """Note that the source of a migration is dropped, and return the new record.

    If that was itself a copy, which a refresh has replaced, the new copy takes its place in the
    ledger: it can still be rolled back to what the former copy was made from.
    """
    former = ledger.of_target(migration.source) if migration.is_refresh else None
    inherits = (
        former is not None
        and former.phase in {"switched", "finished"}
        # A refresh of another field has other vectors as stored, which no row is carried back to.
        and former.field == migration.field
    )
    if former is None or not inherits or migration.switch is None:
        ledger.forget_chunks(migration)
        finished = ledger.write(migration, phase="finished")
        if former is not None:
            ledger.forget(former)
        return finished

    switch = migration.switch
    if former.switch is not None and former.switch.source_renamed is not None:
        # The name that the source gets back is its own; the others are aliases.
        name = former.switch.name
        others = tuple(other for other in switch.names if other != name)
        renamed = former.switch.source_renamed
        switch = switch.model_copy(
            update={"name": name, "others": others, "source_renamed": renamed}
        )
    joined = ledger.write(
        migration,
        source=former.source,
        source_identity=former.source_identity,
        arguments=former.arguments,
        made_bank=former.made_bank,
        corrected_source=former.corrected_source,
        switch=switch,
        state=migration.corrected().model_copy(update={"source": former.source_now}),
        phase=former.phase,
    )
    # The new record is written above, so a process that is killed here has lost nothing.
    ledger.forget(former)
    ledger.write_state(joined)
    return joined


def drop_copy(
    lease: Lease, ledger: Ledger, migration: Migration, *, keep_samples: bool = False
) -> None:
    """Remove everything that the migration created; the source is then as before.

    Only a copy with the migration's id is dropped: if another collection has its name,
    CollectionExists is raised at the end.
    """
    store = lease.store
    target = migration.target
    state = migration.state
    is_others = store.exists(target) and not is_copy(
        store.info(target, counted=False, checked=False), migration
    )
    if store.exists(target) and not is_others:
        _refuse_aliases(store, target)

    source_exists = store.exists(migration.source_now)
    if source_exists:
        # Dual writes end before the copy goes; with a required copy, clients could not write at all.
        dual_write = store.info(migration.source_now, counted=False).dual_write
        if dual_write is not None and dual_write.collection == target:
            store.write_property(migration.source_now, DUAL_WRITE_PROPERTY, None)

    # The ledger must not name a source or a copy that is gone, or whoever takes over from here would
    # refuse to go on; a run of a migration that is being prepared begins again. Not before the
    # property is removed: the ledger then refuses writes that still go to the copy.
    migration = ledger.write(migration, phase="preparing")

    if source_exists:
        _forget_identity(store, ledger, migration)
    if not is_others:
        drop_collection(lease, target, other=migration.source_now, keep_samples=keep_samples)
    if state is not None:
        # A refresh that was interrupted early has no copy yet whose state could be read.
        _forget_fits(store, [state], migration.source_now)

    bank = migration.bank_collection
    if migration.made_bank != "nothing" and store.exists(bank):
        if state is not None:
            # Refreshes of the copy have added generations to that of the migration.
            store.drop_bank_generations(list(dict.fromkeys(state.banks)))

        unsaved = state is None and not ledger.may_use_bank(bank, but=target)
        if migration.made_bank == "collection" and (unsaved or not store.count(bank)):
            store.drop(bank)

    # Last, so that a `clean` that is killed before this can be repeated.
    ledger.forget(migration)
    if is_others:
        raise CollectionExists(
            f"{target!r} is not the copy of this migration, another client created it: it stays, "
            "everything else of the migration was dropped"
        )


def _forget_identity(store: Store, ledger: Ledger, migration: Migration) -> None:
    """Remove the identity that this migration gave to its source."""
    source = migration.source_now
    identity = migration.source_identity
    # Migrations of one source to several copies share its identity.
    others = [other for other in ledger.migrations() if other.id != migration.id]
    is_unused = identity not in {other.source_identity for other in others}
    if identity and is_unused and identity_in(store.properties_of(source), source) == identity:
        store.write_property(source, IDENTITY_PROPERTY, None)


def _migration(ledger: Ledger, name: str, drop: str, target: str | None) -> Migration:
    """Return the migration of `name` whose copy is `drop`, if that is a copy; else the one to
    `target`. A copy that a refresh has replaced is the source of that refresh.
    """
    refresh = replaced_by(ledger, name, drop)
    if refresh is not None:
        return refresh

    # An alias leads to the latest copy, and a chain of refreshes from there to what is to go.
    related = ledger.related(name)
    copies = [migration for migration in related if migration.target == drop]
    sources = [
        migration
        for migration in related
        if migration.source_now == drop and target in {None, migration.target}
    ]
    for matching in (copies, sources):
        if len(matching) == 1:
            return matching[0]
    return ledger.find(name, drop if ledger.of_target(drop) is not None else target)


def _validate(store: Store, migration: Migration, drop: str) -> None:
    if drop == migration.target:
        still_exists = store.exists(drop) and is_copy(
            store.info(drop, counted=False, checked=False), migration
        )
        if still_exists:
            migration.require(
                "preparing",
                "copying",
                "catching up",
                "verified",
                "rolled back",
                step="dropping the copy",
            )
            _refuse_aliases(store, drop)
        elif renamed := renamed_copy(store, migration):
            raise CollectionNotFound(
                f"the copy {drop!r} was renamed to {renamed!r}: rename it to {drop!r} again first"
            )

        return

    if drop != migration.source_now:
        raise InvalidInput(
            f"{drop!r} is neither the source {migration.source_now!r} nor the copy "
            f"{migration.target!r}"
        )

    migration.require("switched", "finished", step="dropping the source")
    # Without its copy, the source holds the last of the rows.
    require_copy(store, migration)
    if store.exists(drop):
        _refuse_aliases(store, drop)
        if not is_source(store.info(drop, counted=False, checked=False), migration):
            raise CollectionExists(
                f"{drop!r} is not the source of this migration, another client created it since: "
                "nothing was dropped"
            )
    elif migration.phase != "finished" and (renamed := renamed_source(store, migration)):
        raise CollectionNotFound(
            f"the source {drop!r} was renamed to {renamed!r}: rename it to {drop!r} again first"
        )


def drop_collection(
    lease: Lease, collection: str, *, other: str, keep_samples: bool = False
) -> None:
    """Drop a collection if it exists, with its side collections, its query samples and the notes of
    its fits: no job reads its rows any more, and no client searches it.

    other: the other side of its migration, which may have been made with the same fits.
    """
    store = lease.store
    if store.exists(collection):
        info = store.info(collection, counted=False)
        _forget_fits(store, [*info.states.values()], other)
        # Before the collection, which names them: whoever repeats this finds them by it.
        samples = () if keep_samples else info.samplings.fields
        for helper in (*_own_sides(store, info), *(sampling.helper for sampling in samples)):
            lease.drop_helper(helper, info.collection_id)

    lease.drop(collection)
    store.forget_helpers(collection)


def _forget_fits(store: Store, states: Sequence[CollectionState], other: str) -> None:
    """Delete the notes of the fits of these states that the collection `other` does not have."""
    others = store.info(other, counted=False).states if store.exists(other) else {}
    forget_fits(store, states, [*others.values()])


def _rows(store: Rows, collection: str) -> str:
    try:
        return f"{store.count(collection):,} rows"
    except StoreError:
        return "rows not counted, as it cannot be read"


def _refuse_aliases(store: Collections, collection: str) -> None:
    if aliases := store.info(collection, counted=False).aliases:
        raise StoreError(
            f"{', '.join(map(repr, aliases))} still leads to {collection!r}: nothing was dropped"
        )
