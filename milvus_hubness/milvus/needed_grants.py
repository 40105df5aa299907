"""The grants that users of Milvus need, as docs/operations/permissions.md has them line by line. No
I/O; a test compares both, and the lines of the page are run on Milvus 2.3.5.
"""

from __future__ import annotations

from milvus_hubness.basics.defaults import GrantsFor
from milvus_hubness.jobs.store.ownership import LEDGER, bank_name

ALL = "*"
"""All collections."""

GLOBAL = {
    "CreateAlias", "CreateCollection", "DescribeCollection", "DropAlias", "DropCollection",
    "ManageOwnership", "RenameCollection", "SelectOwnership", "ShowCollections",
}  # fmt: skip
"""The privileges that Milvus grants for a whole database, as an object of the kind Global."""

READS = {"Search", "Query"}
WRITES = {"Insert", "Upsert", "Delete"}
OF_JOBS = {
    "CreateAlias", "CreateCollection", "CreateIndex", "CreatePartition", "Delete", "DescribeCollection",
    "DropAlias", "DropCollection", "Flush", "GetFlushState", "HasPartition", "IndexDetail", "Insert",
    "Load", "ManageOwnership", "Query", "RenameCollection", "Search", "SelectOwnership",
    "ShowPartitions", "Upsert",
}  # fmt: skip
"""Those of `migrate`, `bank sample`, `refresh`, `serve`, `enable` and what drops, on all collections."""


def needed_grants(
    purpose: GrantsFor, collection: str, *, alias: str | None = None, newer: bool = False
) -> dict[str, set[str]]:
    """Return the privileges by collection, before, while and after a migration of `collection`.

    alias: by which applications read it; Milvus before 2.6.9 asks for grants on the name that a
    request has. newer: for Milvus 2.4 and newer, where a load state is a right of its own, and so is
    the list of aliases.
    """
    if purpose == "job":
        privileges = OF_JOBS | ({"GetLoadState", "ListAliases"} if newer else set())
        return {ALL: set(privileges)}

    rights = READS if purpose == "reader" else READS | WRITES
    copy = f"{collection}_hubness"
    names = [collection, copy, *([alias] if alias else [])]
    needed = {ALL: {"DescribeCollection"}, **{name: set(rights) for name in names}}
    if purpose == "application":
        # Milvus 2.3.5 asks for Load where a load state is read.
        load = "GetLoadState" if newer else "Load"
        needed[bank_name(collection)] = {load, "Query"}
        needed[LEDGER] = {"IndexDetail", load, "Query"}
    return needed


def grant_calls(role: str, needed: dict[str, set[str]]) -> list[str]:
    """Return the lines of Python that grant these to a role, with a MilvusClient `client`."""
    calls = [f"client.create_role({role!r})"]
    for name, privileges in needed.items():
        for privilege in sorted(privileges):
            kind = "Global" if privilege in GLOBAL else "Collection"
            calls.append(f"client.grant_privilege({role!r}, {kind!r}, {privilege!r}, {name!r})")
    return calls
