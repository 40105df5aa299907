"""Whether the collections of a migration are still those that the ledger means.

A record of the ledger says what was true when it was written. Since then, the copy or the source
may have been dropped, renamed, or replaced by another collection of the same name, and a job that
went on would print old results as new or make a stranger's rows equal to its own. So each command
looks first: the copy carries the id of its migration in its collection state, and the source has
the identity that the ledger noted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from shlex import quote

from milvus_hubness.errors import CollectionExists, CollectionNotFound, HubnessError, StoreError
from milvus_hubness.jobs.migration.ledger import Migration
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, Identity

SWITCHED = {"switched", "rolling back", "finished"}
"""Phases in which the application reads the copy."""


def identified(store: Store, info: CollectionInfo) -> str:
    """Return the identity of a collection that was just described.

    Where the database has none, as Milvus Lite and Qdrant, write one into a property, which a new
    collection of the same name lacks.
    """
    if info.identity:
        return info.identity
    identity = Identity(id=uuid.uuid4().hex)
    store.write_property(info.name, identity.property_name, identity)
    return identity.id


def is_copy(info: CollectionInfo, migration: Migration) -> bool:
    """Whether a migration created this collection."""
    state = info.states.get(migration.field)
    return state is not None and state.migration == migration.id


def is_source(info: CollectionInfo, migration: Migration) -> bool:
    """Whether a migration began with this collection, under whatever name."""
    return not migration.source_identity or info.identity == migration.source_identity


def require_collections(store: Store, migration: Migration) -> None:
    """Raise CollectionNotFound or CollectionExists unless
    the source and the copy are those of the migration.
    """
    require_source(store, migration)
    require_copy(store, migration)


def require_copy(store: Store, migration: Migration) -> None:
    """Raise CollectionNotFound if the copy is gone,
    CollectionExists if another collection has its name.
    """
    name = migration.target
    if store.exists(name) and is_copy(store.info(name, counted=False, checked=False), migration):
        return

    renamed = renamed_copy(store, migration)
    what = f"the copy {name!r} of {migration.source!r}"
    raise _gone(store, what, name, renamed, _remedy(migration))


def require_source(store: Store, migration: Migration) -> None:
    """Raise CollectionNotFound if the source is gone,
    CollectionExists if another collection has its name.
    """
    # While a cutover or a rollback renames the source, it has one of two names.
    names = dict.fromkeys([migration.source_now, migration.source])
    for name in names:
        if store.exists(name):
            info = store.info(name, counted=False, checked=False)
            if info.name == name and is_source(info, migration):
                return

    name = migration.source_now
    renamed = renamed_source(store, migration)
    what = f"the source {name!r} of {migration.target!r}"
    raise _gone(store, what, name, renamed, _remedy(migration))


def problem_of(store: Store, migration: Migration) -> str:
    """Return why the ledger's record of a migration is no longer true; empty if it is."""
    try:
        if migration.phase == "finished":
            require_copy(store, migration)
        elif migration.phase not in {"preparing", "copying"}:
            require_collections(store, migration)
        elif migration.phase == "copying":
            require_source(store, migration)
    except StoreError as error:
        return str(error)

    return ""


def renamed_copy(store: Store, migration: Migration) -> str | None:
    """Return the name that somebody gave to the copy; None if it has its own name or is gone."""
    name = _name_of(store, lambda info: is_copy(info, migration))
    return None if name == migration.target else name


def renamed_source(store: Store, migration: Migration) -> str | None:
    """Return the name that somebody gave to the source; None if it has its own name or is gone."""
    if not migration.source_identity:
        return None
    name = _name_of(store, lambda info: info.identity == migration.source_identity)
    return None if name == migration.source_now else name


def _remedy(migration: Migration) -> str:
    source = quote(migration.source)
    target = quote(migration.target)
    if migration.phase in SWITCHED:
        return (
            "point the application's name at a collection that you have, and let "
            f"milvus-hubness migrate clean {source} --drop {target} forget this migration"
        )
    return f"milvus-hubness migrate run {source} --bank FILE --restart begins again"


def _gone(store: Store, thing: str, name: str, renamed: str | None, remedy: str) -> StoreError:
    if renamed is not None:
        return CollectionNotFound(
            f"{thing} was renamed to {renamed!r}: rename it to {name!r} again, or {remedy}"
        )

    if store.exists(name):
        return CollectionExists(
            f"{thing} is gone, and another collection has its name and stays untouched: {remedy}"
        )
    return CollectionNotFound(f"{thing} is gone: {remedy}")


def _name_of(store: Store, is_meant: Callable[[CollectionInfo], bool]) -> str | None:
    """Return the name of the collection that is meant,
    among all of the database; None if there is none.
    """
    for name in store.collection_names():
        # Another process may have dropped it meanwhile, and broken states belong to nobody.
        with suppress(HubnessError):
            if is_meant(store.info(name, counted=False, checked=False)):
                return name
    return None
