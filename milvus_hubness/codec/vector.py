"""The bias location `vector`: the field holds augmented vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.base import NORM_FIELD, Columns, Flags, RowCodec
from milvus_hubness.codec.half_precision import kept, rounded


class VectorCodec(RowCodec):
    """Biases in columns of the field's vectors; a scalar field shows the active one."""

    location = "vectors"
    leaves_vectors = False

    @property
    def norm_field(self) -> str | None:
        """The scalar field with ‖r‖, which COSINE needs to decode vectors; None for other metrics."""
        return NORM_FIELD + self.suffix if self.layout.metric == "COSINE" else None

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        return (self.bias_field, self.epoch_field, *([self.norm_field] if self.norm_field else []))

    def encode_rows(
        self, vectors: Floats, biases: Floats, epoch: int, locality_hints: Floats | None = None
    ) -> Columns:
        shown = {self.shown_slot: biases[:, self.shown_slot]}
        stored = {self.field: self.layout.augment(vectors, biases, locality_hints)}
        norms = {self.norm_field: self.layout.norms(vectors).tolist()} if self.norm_field else {}
        return stored | self._hidden(shown, epoch, len(vectors)) | norms

    def decode_rows(self, columns: Columns) -> Floats:
        norms = columns[self.norm_field] if self.norm_field else None
        return rounded(self.layout.decode_vectors(columns[self.field], norms), self.dtype)

    def read_biases(self, columns: Columns) -> Floats:
        return self.layout.biases(columns[self.field], slice(None))

    def set_biases(
        self,
        columns: Columns,
        biases: Mapping[int, Floats],
        epoch: int | None,
        locality_hints: Floats | None = None,
    ) -> Columns:
        stored = self.layout.with_biases(columns[self.field], biases)
        if locality_hints is not None:
            stored = self.layout.with_locality_hints(stored, locality_hints)
        return {self.field: stored, **self._hidden(biases, epoch, len(stored))}

    def lacks_locality_hints(self, columns: Columns) -> Flags:
        return self.layout.lacks_locality_hints(columns[self.field])

    def valid(self, columns: Columns, slots: Sequence[int]) -> Flags:
        """Also check that one of these slots has the bias of the bias field."""
        scale = np.float32(self.layout.scale)
        shown = kept(np.array(columns[self.bias_field], np.float32) / scale, self.dtype) * scale
        same = (self.read_biases(columns)[:, list(slots)] == shown[:, None]).any(axis=1)
        return np.asarray(super().valid(columns, slots) & same, np.bool_)
