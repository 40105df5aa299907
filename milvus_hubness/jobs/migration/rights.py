"""What an application's user must be granted for the copy of a collection, and does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from milvus_hubness.jobs.store.ownership import LEDGER

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Migration

Right = Literal["Search", "Query", "Insert", "Upsert", "Delete", "GetLoadState", "IndexDetail"]
"""A privilege of Milvus, by the name in its protocol."""

READS: tuple[Right, ...] = ("Search", "Query")
WRITES: tuple[Right, ...] = ("Insert", "Upsert", "Delete")


@runtime_checkable
class TriesRights(Protocol):
    """Optional: a store that can try the rights of its user."""

    def denied(self, collection: str, rights: Iterable[Right]) -> list[Right]:
        """Return those of the rights on a collection that the user lacks; change nothing."""


@dataclass(frozen=True)
class ApplicationRights:
    """The rights of an application's user."""

    has: tuple[Right, ...]
    """Those to read and write that it has on the source, under any of its names."""

    lacks: dict[str, tuple[Right, ...]]
    """By name of the collection, those that it needs further, during the migration and after it."""


def try_rights(
    application: TriesRights, migration: Migration, names: Sequence[str]
) -> ApplicationRights:
    """Return what the user has on the source, and lacks to go on so while it is migrated and after.

    names: of the source, its own and its aliases. A user who may write needs what dual writes and
    biases of new rows need; see docs/operations/permissions.md.
    """
    every = (*READS, *WRITES)
    denied = {name: set(application.denied(name, every)) for name in names}
    has = tuple(right for right in every if any(right not in denied[name] for name in names))

    needed: dict[str, set[Right]] = {name: {*has} for name in (*names, migration.target)}
    if not set(has).isdisjoint(WRITES):
        needed[migration.source].add("Query")
        needed[migration.target] |= {"Upsert", "Delete"}
        needed[migration.bank_collection] = {"GetLoadState", "Query"}
        needed[LEDGER] = {"IndexDetail", "GetLoadState", "Query"}

    lacks = {name: tuple(application.denied(name, sorted(needed[name]))) for name in needed}
    return ApplicationRights(has, {name: rights for name, rights in lacks.items() if rights})
