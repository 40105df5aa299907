"""The bias location `second_vector`: a second vector field holds the augmented vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from milvus_hubness.correction.codec.arrays import SPACING, Floats, decode
from milvus_hubness.correction.codec.base import Columns, Flags, RowBiases, RowCodec

SECOND_VECTOR_FIELD = "hubness_vector"


@dataclass(frozen=True)
class SecondVectorCodec(RowCodec):
    """Augmented vectors in a second field; the user's own field stays as it is."""

    second: str = SECOND_VECTOR_FIELD
    """The field with the augmented vectors, which searches use."""

    location = "second_vector"
    leaves_vectors = True
    updates_in_place = True

    @property
    def searched_field(self) -> str:
        return self.second

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        return (self.bias_field, self.epoch_field, self.second)

    def columns(self, vectors: Floats, rows: Sequence[Mapping[str, Any]]) -> Columns:
        """Return the columns; an empty second vector becomes zeros."""
        columns = super().columns(vectors, rows)
        values = columns[self.second]
        # Rows that were inserted past this package have nothing in the hidden fields.
        filled = [row for row, value in enumerate(values) if value is not None]

        stored = np.zeros((len(rows), self.form.width), np.float32)
        if filled:
            stored[filled] = decode([values[row] for row in filled], self.dtype)
        return {**columns, self.second: self.form.joined(stored)}

    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        # Augmented again from the user's field, which repairs stale rows; what the new biases do
        # not name stays.
        hints = biases.locality_hints
        if hints is None:
            hints = self.layout.held_locality_hints(columns[self.second])
        kinds = biases.kinds
        if kinds is None:
            kinds = self.layout.held_kinds(columns[self.second])
        slots = self._slots(biases, self.read_biases(columns))
        stored = self.layout.augment(columns[self.field], slots, hints, kinds)
        return {self.second: stored, **self._hidden(biases, len(stored))}

    def stale(self, columns: Columns) -> Flags:
        """Return (n,) whether the second field belongs to another vector, or is empty."""
        stored = columns[self.second]
        hints = self.layout.held_locality_hints(stored)
        kinds = self.layout.held_kinds(stored)
        biases = self.read_biases(columns)
        augmented = self.layout.augment(columns[self.field], biases, hints, kinds)

        # Through the storage format and back, so that both sides have been rounded alike.
        packed = self.form.encode_rows(augmented)
        expected = self.form.joined(decode(packed, self.dtype).reshape(-1, self.form.width))

        # Two units in the last place of the largest number: another machine may sum ½‖r‖² in
        # another order.
        largest = np.abs(expected).max(axis=1, initial=0.0, keepdims=True)
        tolerance = 2 * SPACING[self.dtype] * largest
        same = (np.abs(stored - expected) <= tolerance) | (np.isnan(stored) & np.isnan(expected))
        return np.asarray(~same.all(axis=1), np.bool_)
