"""Migrations whose name was being moved, or has been, when they are run once more."""

from __future__ import annotations

from milvus_hubness.errors import NoMigration
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


def unfinished(store: Store, name: str | None) -> Migration:
    """The migration of this name; without one, the only one that is not over. Raises NoMigration."""
    ledger = Ledger(store)
    if name is not None:
        return ledger.find(name)
    going = [
        each for each in ledger.migrations() if each.phase not in {"switched", "rolled back", "finished"}
    ]
    if len(going) == 1:
        return going[0]
    names = ", ".join(sorted(each.source for each in going)) or "none"
    raise NoMigration(f"without a name the one unfinished migration is meant, and there are: {names}")
