"""The bias locations: read and write the biases of live rows, in one class per location."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import SPACING, decode
from milvus_hubness.correction import Correction, read_back
from milvus_hubness.errors import NotCaughtUp, StoreError, name_some
from milvus_hubness.operations.row_writer import RowWriter
from milvus_hubness.state import EPOCH_FIELD, PENDING, SIDE_FIELD, SLOT_FIELDS, CollectionState
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo

REPAIR_ROUNDS = 20


@dataclass(frozen=True, eq=False)
class BiasedRows:
    """Rows and their biases.

    batch: the rows as read. vectors: (n, d), as users see them. biases: (n, slots), 0 where a row has none.
    pending: (n,), whether a row still lacks its first bias. Two fields are None except for a second vector
    field: locality_hints (n, c), and bare (n,), whether a row is pending only because its locality hint
    columns are empty.
    """

    batch: Batch
    vectors: Floats
    biases: Floats
    pending: npt.NDArray[np.bool_]
    locality_hints: Floats | None = None
    bare: npt.NDArray[np.bool_] | None = None

    def only(self, rows: npt.NDArray[np.bool_]) -> BiasedRows:
        """Return the rows for which `rows` (n,) is true."""
        places = np.flatnonzero(rows).tolist()
        batch = Batch(
            [self.batch.keys[i] for i in places],
            self.batch.vectors[places],
            [self.batch.rows[i] for i in places],
        )
        locality_hints = None if self.locality_hints is None else self.locality_hints[places]
        bare = None if self.bare is None else self.bare[places]
        return BiasedRows(
            batch, self.vectors[places], self.biases[places], self.pending[places], locality_hints, bare
        )


class BiasLocation(Protocol):
    """The biases of the rows of one corrected collection."""

    def pending(self, partition: str | None) -> list[Key]:
        """Return the keys of the rows without a bias."""
        ...

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        """Return the rows that still exist, in the order of `keys`."""
        ...

    def write(
        self,
        keys: Sequence[Key],
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> int:
        """Compute and write the biases of these slots for the rows that still exist; return the number of
        rows. Change nothing else.

        epoch: None keeps the epoch of each row.
        """
        ...

    def put(
        self, biased_rows: BiasedRows, partition: str | None, biases: Mapping[int, Floats], epoch: int | None
    ) -> None:
        """Store the rows as read, with new biases (n,) in these slots, and a new epoch unless `epoch` is
        None."""
        ...

    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        """Give rows whose vector a client has changed since the read fresh biases in these slots. Call this
        after `put`, with the rows as read. Raises NotCaughtUp for rows that change faster than this."""
        ...

    def wait_visible(self) -> None:
        """Wait until every search sees all writes, and remove the biases of rows that no longer exist."""
        ...


def bias_location_of(
    store: Store, info: CollectionInfo, state: CollectionState, writer: RowWriter | None = None
) -> BiasLocation:
    """Return the bias location that the state names, for the collection `info`. writer: rewrites rows; None
    for reading only."""
    if state.second_vector is not None:
        return InSecondVector(store, info, state, writer, state.second_vector)
    if state.reranking is None:
        return InVector(store, info, state, writer)
    if state.reranking.side is None:
        return InFields(store, info, state, writer)
    return InSideCollection(store, info, state, writer, state.reranking.side)


@dataclass(frozen=True)
class _BiasLocation(ABC):
    store: Store
    info: CollectionInfo
    state: CollectionState
    writer: RowWriter | None

    @abstractmethod
    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows: ...

    @abstractmethod
    def put(
        self, biased_rows: BiasedRows, partition: str | None, biases: Mapping[int, Floats], epoch: int | None
    ) -> None: ...

    def write(
        self,
        keys: Sequence[Key],
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> int:
        placed = self.read(keys, partition)
        self._put_all(placed, partition, corrections, epoch)
        return len(placed.batch)

    @abstractmethod
    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None: ...

    def _put_all(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        known: dict[int, Floats] = {}
        for correction in corrections.values():
            if id(correction) not in known:
                known[id(correction)] = correction.centred(biased_rows.vectors)
        self.put(biased_rows, partition, {slot: known[id(each)] for slot, each in corrections.items()}, epoch)

    def pending(self, partition: str | None) -> list[Key]:
        return self.store.keys(self.info.name, partition=partition, pending=self.state.epoch_field)

    def wait_visible(self) -> None:
        self.store.wait_visible(self.info.name)

    def _fetch(self, keys: Sequence[Key], partition: str | None) -> Batch:
        if self.writer is not None:
            return self.writer.read(keys, partition)
        return self.store.get(self.info.name, keys, self.state.field, partition=partition)

    def _with_fields(
        self, batch: Batch, vectors: Floats, columns: Mapping[str, Floats], epoch: int | None
    ) -> Batch:
        """Return the rows with these vectors, these fields and this epoch."""
        changed = {name: column.tolist() for name, column in columns.items()}
        if epoch is not None:
            changed[self.state.epoch_field] = [epoch] * len(batch)
        rows = [
            {**row, **{name: column[i] for name, column in changed.items()}}
            for i, row in enumerate(batch.rows)
        ]
        return Batch(batch.keys, vectors, rows)

    def _pending(self, batch: Batch) -> npt.NDArray[np.bool_]:
        epochs = [row.get(self.state.epoch_field) for row in batch.rows]
        return np.array([epoch in (None, PENDING) for epoch in epochs], np.bool_)

    def _dated(self, biased_rows: BiasedRows, epoch: int | None) -> list[str]:
        """Return the epoch field if some of the rows had no bias until now. For other rows the epoch is
        history only, which does not justify a change of the field."""
        return [self.state.epoch_field] if epoch is not None and biased_rows.pending.any() else []

    def _rewrite(self, batch: Batch, changed: Sequence[str], partition: str | None) -> None:
        self._row_writer.rewrite(batch, changed, partition)

    @property
    def _row_writer(self) -> RowWriter:
        if self.writer is None:
            raise RuntimeError(f"the rows of {self.info.name!r} were opened for reading only")
        return self.writer


class _InRows(_BiasLocation):
    """Biases in the rows themselves, which a RowWriter writes and repairs."""

    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        """Do nothing: the RowWriter repairs."""


@dataclass(frozen=True)
class InVector(_InRows):
    """Biases in columns of the vectors, which have augmented form. A row is also pending while its locality
    hint columns are empty."""

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        batch, layout = self._fetch(keys, partition), self.state.layout
        return BiasedRows(
            batch,
            read_back(self.state, batch.vectors, batch.rows),
            np.column_stack([layout.biases(batch.vectors, slot) for slot in range(layout.slots)]),
            self._pending(batch) | layout.lacks_locality_hints(batch.vectors),
        )

    def _put_all(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        locality_hints = corrections[self.state.profile.slot].locality_hints(biased_rows.vectors)
        batch = biased_rows.batch
        filled = replace(batch, vectors=self.state.layout.with_locality_hints(batch.vectors, locality_hints))
        super()._put_all(replace(biased_rows, batch=filled), partition, corrections, epoch)

    def put(
        self, biased_rows: BiasedRows, partition: str | None, biases: Mapping[int, Floats], epoch: int | None
    ) -> None:
        stored = self.state.layout.with_biases(biased_rows.batch.vectors, biases)
        profile = self.state.profile
        shown = [biases[slot] for slot in (profile.standby, profile.slot) if slot in biases]
        columns = {self.state.bias_field: shown[0]} if shown else {}
        changed = [self.state.field, *columns, *self._dated(biased_rows, epoch)]
        self._rewrite(self._with_fields(biased_rows.batch, stored, columns, epoch), changed, partition)


@dataclass(frozen=True)
class InSecondVector(_InRows):
    """Biases in columns of a second vector field; the user's vectors stay as they are. A row is also pending
    while the second field is empty, holds the augmented form of another vector, or has empty locality hint
    columns."""

    second: str

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        return self._read(keys, partition)[0]

    def write(
        self,
        keys: Sequence[Key],
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> int:
        """Write the biases as BiasLocation.write does. Raises NotCaughtUp for a row that changes faster than
        this writes it."""
        placed = self.read(keys, partition)
        self._put_all(placed, partition, corrections, epoch)
        self.repair(placed, partition, corrections, epoch)
        return len(placed.batch)

    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        # A client may change the vector of a row before this job writes the second field for the old vector.
        # The second read shows such a change. If the client writes after that read, it writes both fields,
        # and they stay.
        keys = biased_rows.batch.keys
        for _ in range(REPAIR_ROUNDS):
            found, differing = self._read(keys, partition)
            moved = found.only(differing)
            keys = moved.batch.keys
            if not keys:
                return
            self._put_all(moved, partition, corrections, epoch)
        raise NotCaughtUp(
            f"rows {name_some(list(keys))} of {self.info.name!r} change faster than {self.second!r} is filled"
        )

    def _read(self, keys: Sequence[Key], partition: str | None) -> tuple[BiasedRows, npt.NDArray[np.bool_]]:
        """Return the rows, and (n,) whether the second field holds the form of another vector."""
        batch, layout, form = self._fetch(keys, partition), self.state.layout, self.state.form
        held = np.zeros((len(batch), form.width), np.float32)
        there = [i for i, row in enumerate(batch.rows) if row.get(self.second) is not None]
        if there:
            held[there] = decode([batch.rows[i][self.second] for i in there], form.dtype)
        stored = form.joined(held)
        biases = np.column_stack([layout.biases(stored, slot) for slot in range(layout.slots)])
        locality_hints = layout.held_locality_hints(stored)
        made = decode(self._stored(batch.vectors, biases, locality_hints), form.dtype)
        wanted = form.joined(made.reshape(held.shape))
        differing = self._differing(stored, wanted)
        pending = self._pending(batch) | differing
        bare = layout.lacks_locality_hints(stored) & ~pending
        return BiasedRows(batch, batch.vectors, biases, pending | bare, locality_hints, bare), differing

    def _put_all(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        cells = corrections[self.state.profile.slot].locality_hints(biased_rows.vectors)
        super()._put_all(replace(biased_rows, locality_hints=cells), partition, corrections, epoch)

    def put(
        self, biased_rows: BiasedRows, partition: str | None, biases: Mapping[int, Floats], epoch: int | None
    ) -> None:
        slots = biased_rows.biases.copy()
        for slot, column in biases.items():
            slots[:, slot] = column
        profile = self.state.profile
        shown = [biases[slot] for slot in (profile.standby, profile.slot) if slot in biases]
        columns = {self.state.bias_field: shown[0]} if shown else {}
        batch = self._with_fields(biased_rows.batch, biased_rows.vectors, columns, epoch)
        rows = [
            {**row, self.second: vector}
            for row, vector in zip(
                batch.rows, self._stored(biased_rows.vectors, slots, biased_rows.locality_hints), strict=True
            )
        ]
        changed = [self.second, *columns, *([self.state.epoch_field] if epoch is not None else [])]
        self._update(Batch(batch.keys, batch.vectors, rows), partition, changed)

    def _update(self, batch: Batch, partition: str | None, changed: Sequence[str]) -> None:
        """Update the rows that still exist: the database refuses some fields of a row that does not."""
        try:
            self._row_writer.update(batch, changed, partition)
        except StoreError:
            there = set(self._fetch(batch.keys, partition).keys)
            left = [i for i, key in enumerate(batch.keys) if key in there]
            if len(left) == len(batch):
                raise
            kept = Batch([batch.keys[i] for i in left], batch.vectors[left], [batch.rows[i] for i in left])
            if left:
                self._row_writer.update(kept, changed, partition)

    def _stored(self, vectors: Floats, slots: Floats, locality_hints: Floats | None) -> list[Any]:
        return self.state.form.encode_rows(self.state.layout.augment(vectors, slots, locality_hints))

    def _differing(self, stored: Floats, wanted: Floats) -> npt.NDArray[np.bool_]:
        """Return (n,) whether the two forms differ by more than rounding in the last place."""
        last = 2 * SPACING[self.state.dtype]
        size = np.abs(wanted).max(axis=1, initial=0.0, keepdims=True)
        same = (np.abs(stored - wanted) <= last * size) | (np.isnan(stored) & np.isnan(wanted))
        return np.asarray(~same.all(axis=1), np.bool_)


@dataclass(frozen=True)
class InFields(_InRows):
    """Biases in scalar fields of the rows."""

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        batch = self._fetch(keys, partition)
        fields = self.state.slot_fields
        columns = [[row.get(field) or 0.0 for field in fields] for row in batch.rows]
        biases = np.array(columns, np.float32).reshape(len(batch), len(fields))
        return BiasedRows(batch, batch.vectors, biases, self._pending(batch))

    def put(
        self, biased_rows: BiasedRows, partition: str | None, biases: Mapping[int, Floats], epoch: int | None
    ) -> None:
        columns = {self.state.slot_fields[slot]: column for slot, column in biases.items()}
        changed = [*columns, *self._dated(biased_rows, epoch)]
        self._rewrite(
            self._with_fields(biased_rows.batch, biased_rows.vectors, columns, epoch), changed, partition
        )


@dataclass(frozen=True)
class InSideCollection(_BiasLocation):
    """Biases in a side collection with the same keys. A row is pending while the side collection lacks its
    key."""

    side: str

    def pending(self, partition: str | None) -> list[Key]:
        known = set(self.store.keys(self.side))
        return [key for key in self.store.keys(self.info.name, partition=partition) if key not in known]

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        batch = self._fetch(keys, partition)
        side_biases = self.store.get(self.side, batch.keys, SIDE_FIELD)
        where = {key: i for i, key in enumerate(side_biases.keys)}
        pending = np.array([key not in where for key in batch.keys], np.bool_)
        biases = np.zeros((len(batch), len(SLOT_FIELDS)), np.float32)
        biases[~pending] = side_biases.vectors[[where[key] for key in batch.keys if key in where]]
        return BiasedRows(batch, batch.vectors, biases, pending)

    def write(
        self,
        keys: Sequence[Key],
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> int:
        placed = self.read(keys, partition)
        self._put_all(placed, partition, corrections, epoch)
        self.repair(placed, partition, corrections, epoch)
        return len(placed.batch)

    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        # Clients write a row and then its bias: this read sees the row, or the client's bias comes later.
        for _ in range(REPAIR_ROUNDS):
            known = dict(zip(biased_rows.batch.keys, biased_rows.vectors, strict=True))
            there = self.read(biased_rows.batch.keys, partition)
            differs = [
                not np.array_equal(known[key], vector, equal_nan=True)
                for key, vector in zip(there.batch.keys, there.vectors, strict=True)
            ]
            biased_rows = there.only(np.array(differs, np.bool_))
            if not len(biased_rows.batch):
                return
            self._put_all(biased_rows, partition, corrections, epoch)
        raise NotCaughtUp(
            f"rows {name_some(biased_rows.batch.keys)} of {self.info.name!r} change faster than their biases "
            "in "
            f"{self.side!r}"
        )

    def wait_visible(self) -> None:
        # Clients write a row before its bias, so the row of every key that was read here already exists.
        kept = self.store.keys(self.side)
        rows = set(self.store.keys(self.info.name))
        if orphans := [key for key in kept if key not in rows]:
            self.store.delete(self.side, orphans)
        self.store.wait_visible(self.side)

    def put(
        self, biased_rows: BiasedRows, partition: str | None, biases: Mapping[int, Floats], epoch: int | None
    ) -> None:
        columns = biased_rows.biases.copy()
        for slot, column in biases.items():
            columns[:, slot] = column
        rows = [{self.info.key_field: key, EPOCH_FIELD: epoch or PENDING} for key in biased_rows.batch.keys]
        self.store.upsert(self.side, Batch(biased_rows.batch.keys, columns, rows), SIDE_FIELD)
