"""What an application's user must be granted for the copy of a collection, and does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from milvus_hubness.basics.logs import log
from milvus_hubness.errors import StoreError
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import CollectionInfo

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Migration

Right = Literal[
    "Search", "Query", "Insert", "Upsert", "Delete", "GetLoadState", "IndexDetail", "Load",
    "CreateAlias", "CreateCollection", "CreateIndex", "CreatePartition", "Flush", "GetFlushState",
]  # fmt: skip
"""A privilege of Milvus, by the name in its protocol."""

READS: tuple[Right, ...] = ("Search", "Query")
WRITES: tuple[Right, ...] = ("Insert", "Upsert", "Delete")
COPIES: tuple[Right, ...] = (
    "CreateAlias", "CreateCollection", "CreateIndex", "Delete", "Flush", "GetFlushState", "Load",
    "Query", "Search", "Upsert",
)  # fmt: skip
"""Those without which no copy is finished, as docs/operations/permissions.md has them: rights that only
some copies need are left out."""


class Grant(NamedTuple):
    """A privilege of a role on one collection."""

    role: str
    kind: str
    """What the database calls the kind of object, as "Collection"."""
    privilege: str
    """A privilege, or a group of them."""

    def __str__(self) -> str:
        return f"{self.privilege} to {self.role}"


ONCE_FOR_ALL = (
    "once for all, keep the collection in a database of its own and grant on * there, or grant a "
    "built-in group for all collections"
)
"""How applications keep their rights whatever the name of a copy."""


@runtime_checkable
class CarriesGrants(Protocol):
    """Optional: a database whose users have grants on collections, by name."""

    def grants_on(self, collection: str) -> Sequence[Grant] | None:
        """Return the grants on a collection by its own name; None if this user may not read them."""

    def grant_all(self, collection: str, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Grant these on a collection, which need not exist; return those that this user may not."""


def grant_remarks(store: object, source: str, target: str) -> list[str]:
    """Return what a plan says of the grants that a copy needs; nothing where there are none."""
    if not isinstance(store, CarriesGrants):
        return []
    grants = store.grants_on(source)
    if grants is None:
        return [
            f"this user may not read grants, and those on {source!r} do not hold for {target!r}: "
            f"grant the same there before the run; {ONCE_FOR_ALL}"
        ]
    if not grants:
        return []
    named = ", ".join(map(str, grants))
    return [
        f"grants on {source!r} are given on {target!r} too, if this user may grant ({named}); else "
        f"grant them before the run; {ONCE_FOR_ALL}"
    ]


def carry_grants(store: object, source: str, target: str) -> None:
    """Grant on a copy what is granted on its source, as far as the user may; log the rest."""
    if not isinstance(store, CarriesGrants):
        return
    grants = store.grants_on(source)
    if not grants:
        return
    if refused := store.grant_all(target, grants):
        log.warning(
            "this user may not grant on %r what is granted on %r (%s): grant it, or applications "
            "that Milvus asks for it lose their rights with the switch; %s",
            target,
            source,
            ", ".join(map(str, refused)),
            ONCE_FOR_ALL,
        )


@runtime_checkable
class TriesRights(Protocol):
    """Optional: a store that can try the rights of its user."""

    def denied(self, collection: str, rights: Iterable[Right]) -> list[Right]:
        """Return those of the rights on a collection that the user lacks; change nothing."""


def expect_rights(store: object, source: CollectionInfo, target: str) -> None:
    """Raise StoreError, before anything is written, if the user lacks a right to make this copy.

    Tried rather than read: so groups of privileges count, as does every other way to get a right.
    """
    if not isinstance(store, TriesRights):
        return
    rights = COPIES if len(source.partitions) == 1 else (*COPIES, "CreatePartition")
    if lacking := store.denied(target, rights):
        raise StoreError(
            f"this user lacks rights to make the copy {target!r} of {source.name!r}, so nothing was "
            f"written: grant {', '.join(lacking)}, as `milvus-hubness grants {source.name} --for job` "
            "prints it"
        )


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

    # Requests go to the real names; an alias is only described, which nearly every user may.
    real_names = (migration.source, migration.target)
    needed: dict[str, set[Right]] = {name: {*has} for name in real_names}
    if not set(has).isdisjoint(WRITES):
        needed[migration.source].add("Query")
        needed[migration.target] |= {"Upsert", "Delete"}
        needed[migration.bank_collection] = {"GetLoadState", "Query"}
        needed[LEDGER] = {"IndexDetail", "GetLoadState", "Query"}

    lacks = {name: tuple(application.denied(name, sorted(needed[name]))) for name in needed}
    return ApplicationRights(has, {name: rights for name, rights in lacks.items() if rights})
