"""Migrations whose name was being moved, or has been, when they are run once more."""

from __future__ import annotations

from contextlib import AbstractContextManager

from milvus_hubness import jobs
from milvus_hubness.errors import NoMigration
from milvus_hubness.jobs.bank_source import WHERE_FROM
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.stores import Store


def moving(store: Store, source: str, target: str | None) -> Migration | None:
    """The migration of this name, or to this target, if the application's name has begun to move: nothing is
    to be planned then, and the source may go by another name, or be behind none at all."""
    ledger = Ledger(store)
    try:
        found = ledger.of_target(target) if target else ledger.find(source)
    except NoMigration:
        return None
    return found if found and found.phase in {"switching", "switched", "rolling back"} else None


def moved_on(
    store: Store, known: Migration, opened: AbstractContextManager[jobs.MigrationOptions]
) -> Migration:
    """What was begun is finished, as it was begun. opened: entered if there is anything left to do."""
    if known.phase == "switched" and not store.exists(known.source_now):
        return known
    with opened as options:
        if known.phase != "rolling back":
            return jobs.cutover(store, known.target, options=options)
        jobs.rollback(store, known.target, options=options)
    return Ledger(store).find(known.target)


def unfinished(store: Store, name: str | None, target: str | None = None) -> Migration:
    """The migration of this name and to this copy; without a name, the only one that is not over. Raises
    NoMigration, and InvalidInput where the name has several copies."""
    ledger = Ledger(store)
    if name is not None or target is not None:
        try:
            return ledger.find(name or str(target), target)
        except NoMigration as error:
            raise NoMigration(
                f"{error}; to begin one, give reference queries: --bank FILE ({WHERE_FROM})"
            ) from None
    going = [
        each for each in ledger.migrations() if each.phase not in {"switched", "rolled back", "finished"}
    ]
    if len(going) == 1:
        return going[0]
    names = ", ".join(sorted(each.source for each in going)) or "none"
    raise NoMigration(f"without a name the one unfinished migration is meant, and there are: {names}")
