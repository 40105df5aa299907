"""The writes of a refresh: new biases go into the standby slot row by row, or into a rebuilt copy.

Sustained upserts starve a database's compaction. If most rows need a write, a copy that takes over the alias
costs no more, and leaves the live collection alone until the copy is complete.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from milvus_hubness.banks.generations import Key
from milvus_hubness.codec.base import RowBiases
from milvus_hubness.codec.index_hints import measured_on
from milvus_hubness.codec.layout import Layout
from milvus_hubness.correction import Banks, Correction, load_corrections
from milvus_hubness.errors import Cancelled, InvalidInput
from milvus_hubness.migration.clean import drop_copy
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.migrator import opened
from milvus_hubness.migration.plan import MigrationOptions
from milvus_hubness.migration.survey import Chunk, survey
from milvus_hubness.operations.bias_backends import BiasBackend
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.lease_records import LEDGER
from milvus_hubness.operations.progress import Progress, chunks
from milvus_hubness.operations.row_writer import RowWriter
from milvus_hubness.refresh.plan import RefreshOptions
from milvus_hubness.state import BankReference, CollectionState, FrozenModel, Profile
from milvus_hubness.stores.protocols import Collections, Store
from milvus_hubness.stores.records import CollectionInfo, Record

REFRESHES = "refreshes"
CHUNKS_PER_RECORD = 8
BYTES_PER_NUMBER = 4
Waiting = Mapping[str | None, Sequence[Key]]
"""Keys of the rows without a bias, by partition."""


def waiting_rows(store: Store, info: CollectionInfo, state: CollectionState) -> Waiting:
    bias_location = BiasBackend(store, info, state)
    return {partition: bias_location.pending(partition) for partition in info.partitions}


class _Reached(FrozenModel):
    """The progress of a refresh. bank, slot: identify the refresh. after: the last finished key, by partition."""

    bank: BankReference
    slot: int
    after: tuple[tuple[str | None, Key], ...] = ()
    scanned: int = 0
    written: int = 0


@dataclass(frozen=True)
class Renewal:
    """Writes the biases of a refresh. state: with the new biases, if there are any. names_epoch: whether rows
    get the epoch of the new biases."""

    lease: Lease
    info: CollectionInfo
    state: CollectionState
    names_epoch: bool
    writer: RowWriter
    options: RefreshOptions
    banks: Banks

    @property
    def store(self) -> Store:
        return self.lease.store

    def fill_pending(self, waiting: Waiting | None = None) -> int:
        """Write the biases of all profiles, and those of an unfinished refresh, to the rows without a bias; return the
        number of rows. waiting: the keys of these rows, if they were read already. Raises Cancelled, LeaseLost."""
        bias_location = BiasBackend(self.store, self.info, self.state, self.writer)
        if waiting is None:
            waiting = waiting_rows(self.store, self.info, self.state)
        if not any(waiting.values()):
            return 0
        corrections, written = self._for_new_rows, 0
        for partition, keys in waiting.items():
            for part in chunks(keys, self._rows_per_chunk, "computing missing biases", self.options.progress):
                self._admit(len(part))
                written += bias_location.write(part, partition, corrections, self.state.profile.epoch)
        return written

    def run(self) -> tuple[int, int]:
        """Write the new biases; return the numbers of scanned and of written rows, which include earlier runs
        of this refresh. Raises Cancelled, LeaseLost."""
        incoming = self.state.incoming
        if incoming is None:
            raise InvalidInput(f"no biases of {self.info.name!r} are on their way")
        corrections = self._corrections
        reached = self._reached(incoming.profile.bank, incoming.profile.slot)
        after = dict(reached.after)
        scanned, written, since = reached.scanned, reached.written, 0
        for partition in self.info.partitions:
            keys = self.store.keys(self.info.name, partition=partition)
            done = after.get(partition)
            start = bisect_right(cast("list[Any]", keys), done) if done is not None else 0
            for part in chunks(keys[start:], self._rows_per_chunk, "writing biases", self.options.progress):
                written += self._renew(part, partition, incoming.profile, corrections)
                scanned, since, after[partition] = scanned + len(part), since + 1, part[-1]
                if since % CHUNKS_PER_RECORD == 0:
                    found = {"after": tuple(after.items()), "scanned": scanned, "written": written}
                    self._record(reached.model_copy(update=found))
        return scanned, written

    def _renew(
        self, keys: Sequence[Key], partition: str | None, coming: Profile, corrections: Mapping[int, Correction]
    ) -> int:
        """Write the new biases to rows where they differ, and all biases to rows without any. Return the
        number of written rows."""
        self._admit(0)
        bias_location = BiasBackend(self.store, self.info, self.state, self.writer)
        biased_rows = bias_location.read(keys, partition)
        wanted = corrections[coming.slot].centred(biased_rows.vectors)
        off = (np.abs(wanted - biased_rows.biases[:, coming.slot]) > self.options.tolerance) & ~biased_rows.pending
        if off.any():
            moved = biased_rows.only(off)
            self._admit(len(moved.batch))
            epoch = coming.epoch if self.names_epoch else None
            bias_location.put(moved, partition, RowBiases({coming.slot: wanted[off]}, epoch))
            bias_location.repair(moved, partition, corrections, epoch)
        bare = biased_rows.only(biased_rows.pending).batch.keys
        if bare:
            self._admit(len(bare))
            bias_location.write(bare, partition, corrections, self.state.profile.epoch)
        return int(off.sum()) + len(bare)

    @property
    def _for_new_rows(self) -> dict[int, Correction]:
        """The corrections for rows that are newer than the fits. The fit of the new biases covers all rows,
        so their correction is as in `_corrections`."""
        incoming = self.state.incoming
        known = {id(each): replace(each, are_new=True) for each in self._corrections.values()}
        return {
            slot: each if incoming is not None and slot == incoming.profile.slot else known[id(each)]
            for slot, each in self._corrections.items()
        }

    @cached_property
    def _corrections(self) -> dict[int, Correction]:
        # A refresh replaces the biases of the active profile, whose bank may have been edited by hand.
        return load_corrections(self.store, self.state, self.options.engine, self.banks, unchecked=[self.state.active])

    @staticmethod
    def forget(store: Store, collection: str) -> None:
        """Delete the progress of a refresh of this collection."""
        store.drop_records(LEDGER, REFRESHES, [_key(collection)])

    def _admit(self, rows: int) -> None:
        if self.options.stop.is_set():
            raise Cancelled(f"stopped as asked: the next refresh of {self.info.name!r} carries on from here")
        if not rows:
            return
        self.options.throttle.admit(rows, rows * BYTES_PER_NUMBER * self.state.layout.width)

    def _reached(self, bank: BankReference, slot: int) -> _Reached:
        record = self.store.record(LEDGER, _key(self.info.name))
        try:
            found = _Reached.model_validate_json(record.body) if record else None
        except ValidationError:
            found = None
        if found and (found.bank.generation, found.slot) == (bank.generation, slot):
            return found
        return _Reached(bank=bank, slot=slot)

    def _record(self, reached: _Reached) -> None:
        self.store.put_records(LEDGER, [Record(_key(self.info.name), REFRESHES, reached.model_dump_json())])

    @property
    def _rows_per_chunk(self) -> int:
        return self.store.chunk_rows(self.info)


def _key(collection: str) -> str:
    return f"{REFRESHES}/{collection}"


FEWEST_ROWS = 50_000
"""Minimum number of rows for a rebuild: fewer rows are upserted in less time than a copy takes to load."""


def choose_rebuild(
    info: CollectionInfo, requested: str, state: CollectionState, share: float, options: RefreshOptions
) -> tuple[bool, str]:
    """Return whether to rebuild, and why. requested: the collection name or alias that the caller used.
    share: the share of rows that need a write."""
    moved = f"{share:.0%} of {info.rows:,} rows change"
    if share < options.rebuild_share:
        return False, f"{moved}: they are upserted"
    if info.rows < FEWEST_ROWS:
        return False, f"{moved}, fewer than {FEWEST_ROWS:,} in all: they are upserted"
    if state.codec.leaves_vectors:
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
    """Plan a copy of `info` with the biases of `state`, and record it in the ledger."""
    looked = survey(store, info, store.chunk_rows(info), progress=progress)
    ledger = Ledger(store)
    target = _free_name(store, info.name, state)
    layout = _copy_layout(store, info, state, looked.chunks[:1])
    copy = state.model_copy(update={"layout": layout, "source": info.name, "phase": "copying"})
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
    )
    ledger.write_chunks(migration, looked.chunks)
    return ledger.write(migration, state=copy.model_copy(update={"migration": migration.id}))


def _copy_layout(store: Store, info: CollectionInfo, state: CollectionState, some: Sequence[Chunk]) -> Layout:
    """Return the layout of the copy, whose index hint columns depend on the bank. A source without these
    columns, for example a copy by an earlier version, gets them too. some: chunks whose vector lengths are
    typical of all rows."""
    if not some or not store.takes_locality_hints(info, state.field) or state.layout.metric == "L2":
        return state.layout
    first = some[0]
    rows = store.scan(info.name, state.field, after=first.after, upto=first.upto, partition=first.partition)
    bank = store.load_bank(state.profile.bank).queries
    vectors = state.codec.decode_rows(state.codec.columns(rows.vectors, rows.rows))
    graph_hint = store.takes_graph_hint(info, state.field)
    return measured_on(state.layout, vectors, bank.vectors, graph_hint=graph_hint, locality_hints=True)


def rebuildings(store: Store) -> list[Migration]:
    """Return all rebuilds in the ledger, finished or not."""
    return [each for each in Ledger(store).migrations() if each.rebuilds is not None]


def unfinished(known: Sequence[Migration], collection: str) -> Migration | None:
    """Return the unfinished rebuild of this collection, if any."""
    over = {"switched", "rolled back", "finished"}
    found = [each for each in known if each.source == collection and each.phase not in over]
    return found[-1] if found else None


def half_switched(known: Sequence[Migration], copy: CollectionInfo) -> Migration | None:
    """Return the rebuild that made this copy, if the alias already leads to it and the rest of its cutover is
    unfinished."""
    found = [each for each in known if each.target == copy.name and each.phase == "switching"]
    return next((each for each in found if each.arguments["alias"] in copy.aliases), None)


def carry_out(migration: Migration, options: MigrationOptions, lease: Lease) -> Migration:
    """Copy, verify and move the alias; continue where an earlier run stopped. Raises as migrations do."""
    with opened(lease.store, migration, options, lease) as migrator:
        return migrator.run(alias=migration.arguments["alias"])


def abandon(lease: Lease, migration: Migration) -> None:
    """Drop the copy of a rebuild; the collection stays as it is."""
    lease.include(migration.target)
    drop_copy(lease, Ledger(lease.store), migration)


def _free_name(store: Collections, name: str, state: CollectionState) -> str:
    base = re.sub(r"_r\d+$", "", name)
    number = state.profile.epoch
    while store.exists(f"{base}_r{number}"):
        number += 1
    return f"{base}_r{number}"
