"""New biases by rebuilding: a copy that has them, made beside the collection, takes over its alias.

Sustained upserts starve a database's compaction. Where most rows would be written anew, a copy costs no more
and leaves the collection that is searched alone until it is done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from milvus_hubness.correction import read_back
from milvus_hubness.jobs.migration.chunks import Chunk, survey
from milvus_hubness.jobs.migration.clean import drop_copy
from milvus_hubness.jobs.migration.cutover import cutover
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.run import resume
from milvus_hubness.jobs.migration.steering import MigrationOptions
from milvus_hubness.jobs.progress import Progress
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.owner import now
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import CollectionInfo, Store

FEWEST_ROWS = 50_000
"""Fewer are upserted whatever their share: that is done before a copy is loaded."""

REBUILD_SHARE = 0.5


def choose_rebuild(
    info: CollectionInfo, requested: str, state: CollectionState, share: float, threshold: float
) -> tuple[bool, str]:
    """Whether to rebuild, and why. requested: the name that the refresh was asked for by. share: of the rows,
    those that would be written anew; threshold: from which share on."""
    moved = f"{share:.0%} of {info.rows:,} rows change"
    if share < threshold:
        return False, f"{moved}: they are upserted"
    if info.rows < FEWEST_ROWS:
        return False, f"{moved}, fewer than {FEWEST_ROWS:,} in all: they are upserted"
    if state.leaves_vectors:
        return False, f"{moved}, and are upserted: biases that do not lie in the field itself are not rebuilt"
    if len(info.states) > 1:
        return False, f"{moved}, and are upserted: other fields of {info.name!r} are corrected too"
    if len(info.aliases) != 1:
        what = "several aliases lead" if info.aliases else "no alias leads"
        return False, f"{moved}, and are upserted: {what} to {info.name!r}, and one is moved in one step"
    if requested == info.name:
        alias = info.aliases[0]
        return False, f"{moved}, and are upserted: asked for by its alias {alias!r}, a copy would take over"
    return True, f"{moved}: a copy takes over the alias {info.aliases[0]!r}"


def begin(store: Store, info: CollectionInfo, state: CollectionState, *, progress: Progress) -> Migration:
    """A copy of `info` that is to have the biases of `state`, kept in the ledger."""
    looked = survey(store, info, store.chunk_rows(info), progress=progress)
    ledger, moment = Ledger(store), now()
    target = _free_name(store, info.name, state)
    copy = state.model_copy(
        update={**_columns(store, info, state, looked.chunks[:1]), "source": info.name, "phase": "copying"}
    )
    migration = Migration(
        source=info.name,
        target=target,
        field=state.field,
        bank_collection=state.profile.bank.collection,
        arguments={"schema": store.schema_facts(info), "alias": info.aliases[0]},
        phase="copying",
        source_identity=info.identity,
        rebuilds=info.states[state.field],
        rows=looked.rows,
        chunks=len(looked.chunks),
        begun_at=moment,
        changed_at=moment,
    )
    ledger.write_chunks(migration, looked.chunks)
    return ledger.write(migration, state=copy.model_copy(update={"migration": migration.id}))


def _columns(
    store: Store, info: CollectionInfo, state: CollectionState, some: Sequence[Chunk]
) -> dict[str, Any]:
    """Of the copy's columns that no query asks, what goes by the bank of its biases; also where the rows have
    had none of them, as a copy that an earlier version made. some: rows whose lengths are those of all."""
    if not some or not store.takes_locality_hints(info, state.field) or state.layout.metric == "L2":
        return {}
    first = some[0]
    rows = store.scan(info.name, state.field, after=first.after, upto=first.upto, partition=first.partition)
    bank = store.load_bank(state.profile.bank).queries
    vectors, graph_hint = read_back(state, rows.vectors, rows.rows), store.takes_graph_hint(info, state.field)
    found = state.layout.measured_on(vectors, bank.vectors, graph_hint=graph_hint, locality_hints=True)
    return {name: getattr(found, name) for name in ("anchor", "pull", "locality_hints", "reach")}


def rebuildings(store: Store) -> list[Migration]:
    """All that the ledger knows of, whatever became of them."""
    return [each for each in Ledger(store).migrations() if each.rebuilds is not None]


def unfinished(known: Sequence[Migration], collection: str) -> Migration | None:
    """The rebuilding of this collection that an earlier run left, if any."""
    over = {"switched", "rolled back", "finished"}
    found = [each for each in known if each.source == collection and each.phase not in over]
    return found[-1] if found else None


def half_switched(known: Sequence[Migration], copy: CollectionInfo) -> Migration | None:
    """The rebuilding that made this copy, where the alias leads to it already and an earlier run left the
    rest of the switch undone."""
    found = [each for each in known if each.target == copy.name and each.phase == "switching"]
    return next((each for each in found if each.arguments["alias"] in copy.aliases), None)


def carry_out(store: Store, migration: Migration, options: MigrationOptions, lease: Lease) -> Migration:
    """Copy, verify, and move the alias; from wherever it was left. Raises what migrations raise."""
    options = replace(options, lease=lease)
    if migration.phase in {"copying", "catching up"}:
        resume(store, migration.target, options)
    return cutover(store, migration.target, alias=migration.arguments["alias"], options=options)


def abandon(lease: Lease, migration: Migration) -> None:
    """Drop the copy: the collection stays as it is."""
    lease.include(migration.target)
    drop_copy(lease, Ledger(lease.store), migration)


def _free_name(store: Store, name: str, state: CollectionState) -> str:
    base = re.sub(r"_r\d+$", "", name)
    number = state.profile.epoch
    while store.exists(f"{base}_r{number}"):
        number += 1
    return f"{base}_r{number}"
