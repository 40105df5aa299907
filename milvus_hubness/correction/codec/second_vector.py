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
    """Augmented vectors in the field `second`, which searches use; the user's own field stays as it
    is.
    """

    second: str = SECOND_VECTOR_FIELD

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
        stored = np.zeros((len(rows), self.form.width), np.float32)
        filled = [i for i, value in enumerate(columns[self.second]) if value is not None]
        if filled:
            stored[filled] = decode([columns[self.second][i] for i in filled], self.dtype)
        return {**columns, self.second: self.form.joined(stored)}

    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        hints = biases.locality_hints
        if hints is None:
            hints = self.layout.held_locality_hints(columns[self.second])
        slots = self._slots(biases, self.read_biases(columns))
        stored = self.layout.augment(columns[self.field], slots, hints)
        return {self.second: stored, **self._hidden(biases, len(stored))}

    def stale(self, columns: Columns) -> Flags:
        """Return (n,) whether the second field is empty or holds the augmented form of another
        vector.
        """
        stored = columns[self.second]
        hints = self.layout.held_locality_hints(stored)
        packed = self.form.encode_rows(
            self.layout.augment(columns[self.field], self.read_biases(columns), hints)
        )
        expected = self.form.joined(decode(packed, self.dtype).reshape(-1, self.form.width))
        last_place = (
            2 * SPACING[self.dtype] * np.abs(expected).max(axis=1, initial=0.0, keepdims=True)
        )
        same = (np.abs(stored - expected) <= last_place) | (np.isnan(stored) & np.isnan(expected))
        return np.asarray(~same.all(axis=1), np.bool_)
