"""New biases written into the slot that searches do not read, row by row, from wherever it was left."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from milvus_hubness.correction import Correction
from milvus_hubness.errors import Cancelled, InvalidInput
from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.jobs.placement import bias_location_of
from milvus_hubness.jobs.progress import Progress, chunks
from milvus_hubness.jobs.restored import Banks, load_corrections
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.owner import LEDGER
from milvus_hubness.operations.row_writer import RowWriter
from milvus_hubness.state import BankReference, CollectionState, Profile
from milvus_hubness.stores.base import CollectionInfo, Key, Record, Store

REFRESHES = "refreshes"
CHUNKS_PER_RECORD = 8
BYTES_PER_NUMBER = 4
Waiting = Mapping[str | None, Sequence[Key]]
"""Keys of the rows without a bias, by partition."""


class _Reached(BaseModel):
    """How far a refresh came. bank, slot: which it is. after: the last key that is done, by partition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bank: BankReference
    slot: int
    after: list[tuple[str | None, Key]] = []
    scanned: int = 0
    written: int = 0


@dataclass(frozen=True)
class Renewal:
    """state: with the biases that are on their way, if any. names_epoch: whether rows are to tell theirs."""

    store: Store
    info: CollectionInfo
    state: CollectionState
    names_epoch: bool
    tolerance: float
    writer: RowWriter
    lease: Lease
    throttle: Throttle
    stop: threading.Event
    progress: Progress
    banks: Banks
    engine: Engine = "local"

    def fill_pending(self, waiting: Waiting | None = None) -> int:
        """Write every profile's biases, and those of an unfinished refresh, to the rows without a bias, and
        return how many rows there were. waiting: their keys, if they were read already. Raises Cancelled,
        LeaseLost."""
        bias_location = bias_location_of(self.store, self.info, self.state, self.writer)
        if waiting is None:
            waiting = {partition: bias_location.pending(partition) for partition in self.info.partitions}
        if not any(waiting.values()):
            return 0
        corrections, written = self._for_new_rows, 0
        for partition, keys in waiting.items():
            for part in chunks(keys, self._rows_per_chunk, "computing missing biases", self.progress):
                self._admit(len(part))
                written += bias_location.write(part, partition, corrections, self.state.profile.epoch)
        return written

    def run(self) -> tuple[int, int]:
        """Rows scanned and rows written by this refresh, those of earlier runs of it counted too. Raises
        Cancelled, LeaseLost."""
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
            for part in chunks(keys[start:], self._rows_per_chunk, "writing biases", self.progress):
                written += self._renew(part, partition, incoming.profile, corrections)
                scanned, since, after[partition] = scanned + len(part), since + 1, part[-1]
                if since % CHUNKS_PER_RECORD == 0:
                    found = {"after": list(after.items()), "scanned": scanned, "written": written}
                    self._record(reached.model_copy(update=found))
        return scanned, written

    def _renew(
        self,
        keys: Sequence[Key],
        partition: str | None,
        coming: Profile,
        corrections: Mapping[int, Correction],
    ) -> int:
        """The biases that are on their way for rows where they are off, all biases for rows without any."""
        self._admit(0)
        bias_location = bias_location_of(self.store, self.info, self.state, self.writer)
        biased_rows = bias_location.read(keys, partition)
        wanted = corrections[coming.slot].centred(biased_rows.vectors)
        off = (np.abs(wanted - biased_rows.biases[:, coming.slot]) > self.tolerance) & ~biased_rows.pending
        if off.any():
            moved = biased_rows.only(off)
            self._admit(len(moved.batch))
            epoch = coming.epoch if self.names_epoch else None
            bias_location.put(moved, partition, {coming.slot: wanted[off]}, epoch)
            bias_location.repair(moved, partition, corrections, epoch)
        bare = biased_rows.only(biased_rows.pending).batch.keys
        if bare:
            self._admit(len(bare))
            bias_location.write(bare, partition, corrections, self.state.profile.epoch)
        return int(off.sum()) + len(bare)

    @property
    def _for_new_rows(self) -> dict[int, Correction]:
        """As `_corrections`, of rows that came after the fits; the biases on their way are fitted on all."""
        incoming = self.state.incoming
        known = {id(each): replace(each, are_new=True) for each in self._corrections.values()}
        return {
            slot: each if incoming is not None and slot == incoming.profile.slot else known[id(each)]
            for slot, each in self._corrections.items()
        }

    @cached_property
    def _corrections(self) -> dict[int, Correction]:
        # A refresh replaces the biases of the active profile, whose bank may have been edited by hand.
        return load_corrections(
            self.store, self.state, self.engine, self.banks, unchecked=[self.state.active]
        )

    @staticmethod
    def forget(store: Store, collection: str) -> None:
        """How far a refresh of this collection came."""
        store.drop_records(LEDGER, REFRESHES, [_key(collection)])

    def _admit(self, rows: int) -> None:
        if self.stop.is_set():
            raise Cancelled(f"stopped as asked: the next refresh of {self.info.name!r} carries on from here")
        if not rows:
            return
        self.throttle.admit(rows, rows * BYTES_PER_NUMBER * self.state.layout.width)

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
