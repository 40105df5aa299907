"""Writes entries beside the vectors, and repairs those whose rows clients change meanwhile.

The rows themselves stay as the clients wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.base import RowBiases
from milvus_hubness.correction.codec.beside import SIDE_FIELD
from milvus_hubness.correction.prior import Values
from milvus_hubness.errors import NotCaughtUp, name_some
from milvus_hubness.jobs.common.progress import absent, key_pages
from milvus_hubness.jobs.common.stored_biases import BiasedRows, StoredBiases
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import BiasKeys, capability

if TYPE_CHECKING:
    from milvus_hubness.correction.fitted import Correction

REPAIR_ROUNDS = 20
"""How often the biases of rows that change meanwhile are computed again."""

NO_CORRECTIONS: Mapping[int, Correction] = {}
"""By slot: rows without an entry stay pending."""


@dataclass(frozen=True)
class Entries(StoredBiases):
    """The entries of a collection whose biases are beside its vectors."""

    def write(
        self,
        keys: Sequence[Key],
        partition: str | None,
        corrections: Mapping[int, Correction],
        *,
        are_new: bool = False,
    ) -> int:
        """Compute and write the biases beside the rows that still exist, of these slots; return how
        many rows were written. are_new: compute them as those of new rows. Raises NotCaughtUp for rows
        that change faster than this.
        """
        epoch = self.state.profile.epoch
        if are_new:
            if any(correction.leaves_room for correction in corrections.values()):
                epoch = -epoch
            corrections = {
                slot: replace(correction, are_new=True) for slot, correction in corrections.items()
            }

        rows = self.read(keys, partition)
        count = self.put(rows, _computed(rows, corrections, epoch))
        self.repair(rows, partition, corrections, epoch)
        return count

    def put(self, biased_rows: BiasedRows, biases: RowBiases) -> int:
        """Write entries beside rows, which stay as they are: no write of a client can be undone.

        Return how many rows the database acknowledged.
        """
        codec = self.beside
        batch = biased_rows.batch
        columns = codec.set_biases(biased_rows.columns, biases)
        if not codec.sides:
            in_rows = capability(self.store, BiasKeys)
            return in_rows.put_bias_keys(self.info.name, batch.with_columns(columns), list(columns))

        for slot, _ in codec.generations:
            if codec.slot_keys[slot] in columns:
                side_columns = codec.side_columns(columns, slot)
                stored = side_columns.pop(SIDE_FIELD)
                keyed = [{self.info.key_field: key} for key in batch.keys]
                entries = Batch(batch.keys, stored, keyed).with_columns(side_columns)
                self.store.upsert(codec.sides[slot], entries, SIDE_FIELD)

        return len(batch)

    def repair(
        self,
        biased_rows: BiasedRows,
        partition: str | None,
        corrections: Mapping[int, Correction],
        epoch: int,
    ) -> None:
        """After `put`, give fresh biases to rows whose vector, or value for a prior, a client has
        changed since the read, and to rows whose new entry another client has replaced by one of an
        earlier generation. Raises NotCaughtUp for rows that change faster than this.
        """
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

            lack = np.isnan(current.biases[:, list(corrections)]).any(axis=1)
            biased_rows = current.only(np.array(has_moved, np.bool_) | lack)
            if not len(biased_rows.batch):
                return

            self.put(biased_rows, _computed(biased_rows, corrections, epoch))

        raise NotCaughtUp(
            f"rows {name_some(biased_rows.batch.keys)} of {self.info.name!r} change faster than "
            "their biases are written: run it again when there are fewer writes"
        )

    def wait_visible(self, corrections: Mapping[int, Correction] = NO_CORRECTIONS) -> None:
        """Wait until every search sees all writes, and
        remove the biases of rows that no longer exist.

        corrections: by slot, for rows that a client has inserted again meanwhile, and whose entries
        went with those of the former rows.
        """
        name = self.info.name
        if not self.codec.sides:
            self.store.wait_visible(name)
            return

        for slot, side in self.loaded_sides.items():
            for page in absent(key_pages(self.store, side), self.store, name):
                # Clients write a row before its bias, so the
                # row of every key that was read already exists.
                existing = set(self.store.get(name, page, self.codec.field).keys)
                orphans = [key for key in page if key not in existing]
                if not orphans:
                    continue

                self.store.delete(side, orphans)
                back = self.store.get(name, orphans, self.codec.field).keys
                if back and slot in corrections:
                    self.write(back, None, {slot: corrections[slot]})

            self.store.wait_visible(side)


def _computed(rows: BiasedRows, corrections: Mapping[int, Correction], epoch: int) -> RowBiases:
    """Return the biases of rows from the corrections by slot."""
    by_slot = {
        slot: correction.centred(rows.vectors, rows.batch)
        for slot, correction in corrections.items()
    }
    return RowBiases(by_slot, epoch)


def _prior_values(corrections: Mapping[int, Correction], batch: Batch) -> Values:
    """Return the values of the rows for the priors of the corrections, (n, priors)."""
    distinct = {id(correction): correction for correction in corrections.values()}
    columns = [
        correction.prior.values_of(batch, correction.clicks)
        for correction in distinct.values()
        if correction.prior is not None
    ]
    return np.stack(columns, axis=1) if columns else np.empty((len(batch), 0))
