"""The bias backend of a collection: it reads, writes
and repairs the biases of live rows, at any location.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import EPOCH_FIELD, Columns, Flags, RowBiases, RowCodec
from milvus_hubness.correction.codec.beside import SIDE_FIELD
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors
from milvus_hubness.correction.prior import Values
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import NotCaughtUp, name_some
from milvus_hubness.jobs.common.progress import absent, key_pages
from milvus_hubness.jobs.common.row_writer import RowWriter
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo

if TYPE_CHECKING:
    from milvus_hubness.correction.fitted import Correction

REPAIR_ROUNDS = 20
"""How often the biases of rows that change meanwhile are computed again."""


@dataclass(frozen=True, eq=False)
class BiasedRows:
    """n rows of a corrected collection, as they were read, and the state of their biases.

    A bias belongs to one vector. A job compares it with the bias that it computes, and writes rows
    again whose bias is missing or too far from the new one.
    """

    batch: Batch
    """The rows as the database has them."""

    columns: Columns
    """The same rows as the codec takes them: by field name,
    with the biases of a side collection.
    """

    vectors: Floats
    """(n, d), as users see them."""

    biases: Floats
    """(n, slots), as stored; NaN where a side collection has none."""

    unbiased: Flags
    """(n,) whether no bias is stored."""

    incomplete: Flags
    """(n,) whether the row has no bias, lacks locality hints that it could have, or is stored with
    another kind than it has."""

    new: Flags
    """(n,) whether the bias was computed when a client wrote the row, and not by a job."""

    def only(self, chosen: Flags) -> BiasedRows:
        """Return the rows for which `chosen` (n,) is true."""
        positions = np.flatnonzero(chosen).tolist()
        columns = {
            name: values[positions]
            if isinstance(values, np.ndarray | MultiVectors)
            else [values[position] for position in positions]
            for name, values in self.columns.items()
        }
        return BiasedRows(
            batch=self.batch.take(positions),
            columns=columns,
            vectors=self.vectors[positions],
            biases=self.biases[positions],
            unbiased=self.unbiased[positions],
            incomplete=self.incomplete[positions],
            new=self.new[positions],
        )


@dataclass(frozen=True)
class BiasBackend:
    """The biases of the rows of one corrected field of the collection `info`."""

    store: Store
    info: CollectionInfo
    state: CollectionState
    writer: RowWriter | None = None
    """What writes the rows; None for reading only."""

    @cached_property
    def codec(self) -> RowCodec:
        return self.state.codec

    def pending(self, partition: str | None) -> Iterator[list[Key]]:
        """Yield pages of the keys of the rows without a bias."""
        side = self.codec.side_collection
        name = self.info.name
        if side is None:
            return key_pages(self.store, name, partition, pending=self.codec.epoch_field)

        # The epoch is in the side collection too, so a row without a bias is one that it lacks.
        all_keys = key_pages(self.store, name, partition, rows=self.info.rows)
        return absent(all_keys, self.store, side)

    def count_pending(self) -> int:
        """Return the number of rows without a bias."""
        return sum(
            len(page) for partition in self.info.partitions for page in self.pending(partition)
        )

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        """Return the rows that still exist, in the order of `keys`."""
        batch = self._rows(keys, partition)
        columns = self.codec.columns(batch.vectors, batch.rows)
        if self.codec.side_collection is None:
            new = self.codec.are_new(columns)
        else:
            columns[SIDE_FIELD], new = self._in_side(self.codec.side_collection, batch.keys)

        unbiased = self.codec.pending(columns)
        vectors = self.codec.decode_rows(columns)
        incomplete = unbiased | self.codec.lacks_locality_hints(columns)
        if self.state.kinds is not None:
            # The field of the kind is the user's, who may have changed it.
            kinds = self.state.kinds.numbers_of(vectors, batch)
            incomplete |= self.codec.read_kinds(columns) != kinds
        return BiasedRows(
            batch=batch,
            columns=columns,
            vectors=vectors,
            biases=self.codec.read_biases(columns),
            unbiased=unbiased,
            incomplete=incomplete,
            new=new,
        )

    def write(
        self,
        keys: Sequence[Key],
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> int:
        """Compute and write the biases of these slots for the rows that still exist; return how
        many were written. epoch: None keeps each row's. Raises NotCaughtUp for rows that change
        faster than this.
        """
        biased_rows = self.read(keys, partition)
        count = self._compute(biased_rows, partition, corrections, epoch)
        self.repair(biased_rows, partition, corrections, epoch)
        return count

    def _compute(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> int:
        from milvus_hubness.correction.fitted import row_biases

        vectors = biased_rows.vectors
        biases = row_biases(corrections, vectors, biased_rows.batch, self.state, epoch)
        return self.put(biased_rows, partition, biases)

    def put(self, biased_rows: BiasedRows, partition: str | None, biases: RowBiases) -> int:
        """Store the rows as read, with these biases; return how many the database acknowledged."""
        codec = self.codec
        batch = biased_rows.batch
        columns = codec.set_biases(biased_rows.columns, biases)
        if codec.side_collection is not None:
            # The rows themselves stay as they are, so no write of a client can be undone.
            epochs = [{self.info.key_field: key} for key in batch.keys]
            side_rows = Batch(batch.keys, columns.pop(SIDE_FIELD), epochs).with_columns(columns)
            self.store.upsert(codec.side_collection, side_rows, SIDE_FIELD)
            return len(side_rows)

        if self.writer is None:
            raise RuntimeError(f"the rows of {self.info.name!r} were opened for reading only")

        changed = list(columns)
        vectors = columns.pop(codec.field, batch.vectors)
        rows = Batch(batch.keys, vectors, batch.rows).with_columns(codec.pack(columns))

        # The epoch of a row that had a bias before is history,
        # which does not justify a change of the field.
        if not biased_rows.incomplete.any() and codec.epoch_field in changed:
            changed.remove(codec.epoch_field)
        return self.writer.rewrite(rows, changed, partition)

    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int | None,
    ) -> None:
        """After `put`, give fresh biases to rows whose vector, or value for a prior, a client has
        changed since the read.

        A writer of whole rows repairs them itself. Raises
        NotCaughtUp for rows that change faster than this.
        """
        if self.codec.writes_rows:
            return

        # A client may write a vector before this job writes the bias of the
        # former vector. The next read shows such a change. If the client
        # writes after that read, it also writes the bias, which stays.
        for _ in range(REPAIR_ROUNDS):
            keys = biased_rows.batch.keys
            vector_of = dict(zip(keys, biased_rows.vectors, strict=True))
            values_of = dict(zip(keys, _prior_values(corrections, biased_rows.batch), strict=True))
            current = self.read(keys, partition)
            values = _prior_values(corrections, current.batch)
            has_moved = [
                not np.array_equal(vector_of[key], vector, equal_nan=True)
                or not np.array_equal(values_of[key], value)
                for key, vector, value in zip(
                    current.batch.keys, current.vectors, values, strict=True
                )
            ]

            biased_rows = current.only(np.array(has_moved, np.bool_))
            if not len(biased_rows.batch):
                return

            self._compute(biased_rows, partition, corrections, epoch)

        raise NotCaughtUp(
            f"rows {name_some(biased_rows.batch.keys)} of {self.info.name!r} change faster than "
            "their biases are written: run it again when there are fewer writes"
        )

    def wait_visible(self) -> None:
        """Wait until every search sees all writes, and
        remove the biases of rows that no longer exist.
        """
        side = self.codec.side_collection
        if side is None:
            self.store.wait_visible(self.info.name)
            return

        name = self.info.name
        for page in absent(key_pages(self.store, side), self.store, name):
            # Clients write a row before its bias, so the
            # row of every key that was read already exists.
            existing = set(self.store.get(name, page, self.codec.field).keys)
            if orphans := [key for key in page if key not in existing]:
                self.store.delete(side, orphans)

        self.store.wait_visible(side)

    def _rows(self, keys: Sequence[Key], partition: str | None) -> Batch:
        if self.writer is not None:
            return self.writer.read(keys, partition)
        return self.store.get(self.info.name, keys, self.codec.field, partition=partition)

    def _in_side(self, side: str, keys: list[Key]) -> tuple[Floats, Flags]:
        """Return the biases in a side collection, (n, slots), NaN for keys that it lacks, and which
        are of new rows.
        """
        entries = self.store.get(side, keys, SIDE_FIELD)
        position_of = {key: i for i, key in enumerate(keys)}
        present = [position_of[key] for key in entries.keys]

        biases = np.full((len(keys), self.state.slots), np.nan, np.float32)
        biases[present] = entries.vectors
        new = np.zeros(len(keys), np.bool_)
        new[present] = self.codec.are_new(
            {self.codec.epoch_field: [row.get(EPOCH_FIELD) for row in entries.rows]}
        )
        return biases, new


def _prior_values(corrections: Mapping[int, Correction], batch: Batch) -> Values:
    """Return the values of the rows for the priors of the corrections, (n, priors)."""
    distinct = {id(correction): correction for correction in corrections.values()}
    columns = [
        correction.prior.values_of(batch, correction.clicks)
        for correction in distinct.values()
        if correction.prior is not None
    ]
    return np.stack(columns, axis=1) if columns else np.empty((len(batch), 0))
