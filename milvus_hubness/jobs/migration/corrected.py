"""Migrations whose source is corrected itself, as each refresh makes one: found, begun and, once
they are history, cleared away.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

from milvus_hubness.basics.progress import Progress
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.migration.clean import drop_collection, without_source
from milvus_hubness.jobs.migration.ledger import Ledger, Migration, Switch, switch_of_refresh
from milvus_hubness.jobs.migration.presence import identified, is_copy, is_source
from milvus_hubness.jobs.migration.survey import survey
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo

OVER = {"switched", "rolled back", "finished"}
"""Phases in which a refresh has nothing left to do."""


def unfinished(
    store: Store, migrations: Sequence[Migration], info: CollectionInfo, field: str
) -> Migration | None:
    """Return the unfinished refresh of this field of the collection, if any. None of its names has moved
    yet: `half_switched` has the others.
    """
    of_this_collection = (
        refresh
        for refresh in reversed(migrations)
        if refresh.is_refresh
        and refresh.source == info.name
        and refresh.field == field
        and is_source(info, refresh)
    )
    return next(
        (
            refresh
            for refresh in of_this_collection
            if refresh.phase not in OVER and not is_half_switched(store, refresh)
        ),
        None,
    )


def half_switched(store: Store, migrations: Sequence[Migration], name: str) -> Migration | None:
    """Return the migration of whose names a killed run has moved some, there or back, if `name` is one
    of them or one of its collections.
    """
    moving = (migration for migration in migrations if name in migration.moving)
    return next((each for each in moving if is_half_switched(store, each)), None)


def is_half_switched(store: Store, migration: Migration) -> bool:
    """Whether the names of a migration move back, or some of them have moved to the copy."""
    if migration.phase == "switching":
        return has_moved(store, migration)
    return migration.phase == "rolling back"


def has_moved(store: Store, migration: Migration) -> bool:
    """Whether a name has moved to the copy, or the source has its new name already, of a migration whose
    names are to move.
    """
    switch = migration.switch
    # A lost switch is an error of the move itself.
    if switch is None:
        return True
    if switch.source_renamed is not None and store.exists(switch.source_renamed):
        return True
    return any(store.alias_target(name) == migration.target for name in switch.names)


def expect_copyable(
    store: Store, info: CollectionInfo, state: CollectionState, *, rename: bool
) -> Switch:
    """Return the switch of a refresh. Raises CannotMigrate, which names every obstacle to a copy, and
    as `switch_of_refresh` does.
    """
    if obstacles := store.obstacles(info, state.field, state.suffix):
        raise CannotMigrate(
            f"a refresh makes a copy of {info.name!r}, which cannot be copied: {'; '.join(obstacles)}"
        )
    return switch_of_refresh(store, info, rename=rename)


def target_of(store: Store, info: CollectionInfo, epoch: int, avoided: str = "") -> str:
    """Return a free name for the copy with the biases of this epoch. avoided: a name that it must not
    have, free or not.
    """
    # products, products_r2, products_r3: the copy of a copy does not pile up endings.
    base = re.sub(r"_r\d+$", "", info.name)
    names = (f"{base}_r{number}" for number in count(epoch))
    return next(name for name in names if name != avoided and not store.exists(name))


def begun(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    *,
    rename: bool,
    progress: Progress,
    avoided: str = "",
) -> Migration:
    """Record a copy of `info` with the biases of `state`, whose active profile is the refreshed one,
    in the ledger. avoided: a name that the copy must not have.
    """
    surveyed = survey(store, info, store.chunk_rows(info), progress=progress)
    ledger = Ledger(store)
    present = info.states[state.field]
    copy = state.model_copy(
        update={"source": info.name, "phase": "copying", "active": present.active}
    )
    migration = Migration(
        source=info.name,
        target=target_of(store, info, state.profile.epoch, avoided),
        field=state.field,
        bank_collection=state.profile.bank.collection,
        arguments={
            "schema": store.schema_facts(info),
            "rename": rename,
            "profile": state.active,
        },
        phase="copying",
        source_identity=identified(store, store.info(info.name, counted=False)),
        corrected_source=present,
        rows=surveyed.rows,
        chunks=len(surveyed.chunks),
    )

    # The record comes last: without it, nobody looks for the chunks, and the next refresh begins
    # a copy of its own.
    ledger.write_chunks(migration, surveyed.chunks)
    return ledger.write(migration, state=copy.model_copy(update={"migration": migration.id}))


def replaced_copies(store: Store, migration: Migration, kept: int) -> list[Migration]:
    """Return the refreshes whose sources are former copies that may be dropped, before a refresh that
    has succeeded: the oldest first, as each copy passes what it was made from on to the next.

    kept: how many former copies stay. A collection is one only if a migration of the ledger made it,
    carries its id, and no alias leads to it: the user's own are none.
    """
    ledger = Ledger(store)
    history: list[Migration] = []
    latest: Migration | None = migration
    while latest is not None and latest.is_refresh:
        history.append(latest)
        latest = ledger.of_target(latest.source)

    droppable = []
    for replacing in reversed(history[kept:]):
        made = ledger.of_target(replacing.source)
        is_over = replacing.phase == "switched" and made is not None and made.phase in OVER
        if made is None or not is_over:
            continue
        # A refresh may have renamed it.
        if store.exists(replacing.source_now):
            info = store.info(replacing.source_now, counted=False, checked=False)
            if info.aliases or not (is_copy(info, made) and is_source(info, replacing)):
                continue
        droppable.append(replacing)
    return droppable


def drop_former(lease: Lease, replacing: Migration) -> None:
    """Drop a former copy: the refresh that has replaced it takes its place in the ledger."""
    drop_collection(lease, replacing.source_now, other=replacing.target)
    without_source(Ledger(lease.store), replacing)
