"""The rows of a corrected collection with their biases, in the vectors or beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import EPOCH_FIELD, Columns, Flags, RowCodec
from milvus_hubness.correction.codec.beside import SIDE_FIELD, BesideCodec, is_of
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.progress import key_pages
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo


@dataclass(frozen=True, eq=False)
class BiasedRows:
    """n rows of a corrected collection, as they were read, and the state of their biases."""

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
            new=self.new[positions],
        )


@dataclass(frozen=True)
class StoredBiases:
    """Reads the rows of one corrected field of the collection `info` with their biases."""

    store: Store
    info: CollectionInfo
    state: CollectionState

    @cached_property
    def codec(self) -> RowCodec:
        return self.state.codec

    def pending(self, partition: str | None) -> Iterator[list[Key]]:
        """Yield pages of the keys of the rows without a bias."""
        name = self.info.name
        if not self.codec.sides:
            yield from key_pages(self.store, name, partition, pending=self.codec.epoch_field)
            return

        [(slot, number), *_] = self.beside.generations
        side = self.loaded_sides[slot]
        for page in key_pages(self.store, name, partition, rows=self.info.rows):
            numbers = self.store.values(side, EPOCH_FIELD, page)
            if lacking := [key for key in page if not is_of(numbers.get(key), number)]:
                yield lacking

    def count_pending(self) -> int:
        """Return the number of rows without a bias."""
        return sum(
            len(page) for partition in self.info.partitions for page in self.pending(partition)
        )

    def read(self, keys: Sequence[Key], partition: str | None) -> BiasedRows:
        """Return the rows that still exist, in the order of `keys`."""
        batch = self.store.get(self.info.name, keys, self.codec.field, partition=partition)
        columns = self.codec.columns(batch.vectors, batch.rows)
        if self.codec.sides:
            self._add_entries(columns, batch.keys)

        return BiasedRows(
            batch=batch,
            columns=columns,
            vectors=self.codec.decode_rows(columns),
            biases=self.codec.read_biases(columns),
            unbiased=self.codec.pending(columns),
            new=self.codec.are_new(columns),
        )

    def _add_entries(self, columns: Columns, keys: list[Key]) -> None:
        """Add the entries of side collections to the columns of rows."""
        codec = self.beside
        position_of = {key: i for i, key in enumerate(keys)}
        for slot, _ in codec.generations:
            biases: list[float | None] = [None] * len(keys)
            numbers: list[int | None] = [None] * len(keys)
            entries = self.store.get(self.loaded_sides[slot], keys, SIDE_FIELD)
            rows = zip(entries.keys, entries.vectors[:, 0].tolist(), entries.rows, strict=True)
            for key, bias, row in rows:
                biases[position_of[key]] = bias
                numbers[position_of[key]] = row.get(EPOCH_FIELD)

            columns[codec.slot_keys[slot]] = biases
            columns[codec.number_keys[slot]] = numbers

    @cached_property
    def loaded_sides(self) -> dict[int, str]:
        """The side collections by slot, which Milvus Lite releases when it is opened."""
        sides = {slot: self.codec.sides[slot] for slot, _ in self.beside.generations}
        for side in sides.values():
            self.store.wait_visible(side)
        return sides

    @property
    def beside(self) -> BesideCodec:
        """The codec of a collection whose biases are beside its vectors."""
        return cast(BesideCodec, self.codec)


def needs_other_columns(store: Store, info: CollectionInfo, state: CollectionState) -> bool:
    """Whether the field's quantiser, which its owner can change at any time, needs biases in more
    columns than stored vectors have. Biases in more columns than necessary are as good.
    """
    # A state can name a field that its owner has dropped meanwhile; other checks say so.
    if state.codec.leaves_vectors or state.field not in info.vector_fields:
        return False
    return store.column_needs(info, state.field).spread > state.layout.slots.spread
