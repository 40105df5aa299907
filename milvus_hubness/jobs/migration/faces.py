"""The same rows as two collections hold them: as the user wrote them, and in augmented form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction import Correction, hidden_columns, read_back
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.halves import kept
from milvus_hubness.layout import Floats
from milvus_hubness.state import PENDING, CollectionState
from milvus_hubness.stores.base import Batch

Flags = npt.NDArray[np.bool_]


class Face(Protocol):
    """One of the two collections."""

    @property
    def collection(self) -> str: ...

    def decode_rows(self, stored: Batch) -> Batch:
        """Rows as the user knows them, from those of this collection."""
        ...

    def encode_rows(self, rows: Batch) -> Batch:
        """Rows of this collection, from those that the user knows."""
        ...

    def valid(self, stored: Batch) -> Flags:
        """(n,) whether what this collection keeps beside the user's rows is right."""
        ...


@dataclass(frozen=True)
class Plain:
    """Rows as the user wrote them."""

    collection: str

    def decode_rows(self, stored: Batch) -> Batch:
        return stored

    def encode_rows(self, rows: Batch) -> Batch:
        return rows

    def valid(self, stored: Batch) -> Flags:
        return np.ones(len(stored), np.bool_)


@dataclass(frozen=True)
class Corrected:
    """Rows in augmented form of `state`. corrections: by the slot that their biases lie in."""

    collection: str
    state: CollectionState
    corrections: Mapping[int, Correction]

    def decode_rows(self, stored: Batch) -> Batch:
        hidden = set(self.state.hidden_fields)
        rows = [{name: value for name, value in row.items() if name not in hidden} for row in stored.rows]
        return Batch(stored.keys, read_back(self.state, stored.vectors, stored.rows), rows)

    def encode_rows(self, rows: Batch) -> Batch:
        """Raises CannotMigrate for a row that could not be read back bit for bit."""
        if problem := self.state.unreadable(rows.vectors, rows.keys):
            raise CannotMigrate(f"row {problem}: correct {self.state.source!r} by enable in place of a copy")
        slots = self._biases(rows.vectors)
        shown = slots[:, self.state.shown_slot]
        hidden = hidden_columns(self.state, rows.vectors, shown, self.state.profile.epoch)
        return Batch(
            rows.keys,
            self.state.layout.augment(rows.vectors, slots, self._locality_hints(rows.vectors)),
            [{**row, **columns} for row, columns in zip(rows.rows, hidden, strict=True)],
        )

    def rebiased(self, origin: Corrected, stored: Batch) -> Batch:
        """Rows of this collection from those of another of the same layout, whose vectors stay as they are
        bit for bit."""
        vectors, layout = origin.decode_rows(stored).vectors, self.state.layout
        slots = self._biases(vectors)
        shown = slots[:, self.state.shown_slot].tolist()
        names, epoch = (self.state.bias_field, self.state.epoch_field), self.state.profile.epoch
        return Batch(
            stored.keys,
            layout.with_locality_hints(
                layout.with_biases(stored.vectors, dict(enumerate(slots.T))), self._locality_hints(vectors)
            ),
            [{**row, names[0]: bias, names[1]: epoch} for row, bias in zip(stored.rows, shown, strict=True)],
        )

    def _biases(self, vectors: Floats) -> Floats:
        """(n, slots) of the user's vectors (n, d)."""
        distinct = {id(each): each for each in self.corrections.values()}
        known = {number: each.centred(vectors) for number, each in distinct.items()}
        slots = np.zeros((len(vectors), self.state.slots), np.float32)
        for slot, correction in self.corrections.items():
            slots[:, slot] = known[id(correction)]
        return slots

    def _locality_hints(self, vectors: Floats) -> Floats:
        return self.corrections[self.state.profile.slot].locality_hints(vectors)

    def valid(self, stored: Batch) -> Flags:
        """Where the bias is finite, no longer pending, and the same in the vector and in its own field, which
        shows the bias in use or, in rows that an unfinished refresh has reached, the one on its way."""
        layout, slots = self.state.layout, {self.state.profile.slot, self.state.shown_slot}
        side_biases = np.array([row[self.state.bias_field] for row in stored.rows], np.float32)
        pending = np.array([row[self.state.epoch_field] == PENDING for row in stored.rows], np.bool_)
        scale = np.float32(layout.scale)
        shown = kept(side_biases / scale, self.state.dtype) * scale
        found = np.stack([layout.biases(stored.vectors, slot) for slot in slots])
        same = (found == shown).any(axis=0)
        return np.asarray(np.isfinite(found).all(axis=0) & same & ~pending, np.bool_)
