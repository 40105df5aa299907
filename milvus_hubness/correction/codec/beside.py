"""The bias location `beside`: searches re-rank candidates.

Vectors are stored as the user gave them. Biases are in a side collection on Milvus, and in keys of
the payloads on Qdrant.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import Floats, KindWeights, Metric, StorageFormat
from milvus_hubness.correction.codec.base import (
    BIAS_FIELD,
    EPOCH_FIELD,
    PENDING,
    Columns,
    Flags,
    RowBiases,
    RowCodec,
)

SLOT_KEYS = (BIAS_FIELD, "hubness_bias_1")
"""Keys of payloads with the biases, by slot, without their suffix."""
SIDE_FIELD = "biases"
"""Vector field of a side collection; its components are the slots."""


class CandidateCodec(RowCodec):
    """Vectors as the user gave them; the client corrects the scores of candidates."""

    location = "beside"
    leaves_vectors = True
    needs_candidates = True

    @property
    def served_metric(self) -> Metric:
        return self.layout.metric

    def lacks_locality_hints(self, columns: Columns) -> Flags:
        return np.zeros(len(columns[self.field]), np.bool_)

    @property
    def form(self) -> StorageFormat:
        # No numbers follow the vector: its dtype is all that counts.
        return StorageFormat(self.dtype, self.layout.dim)

    def encode_query(
        self,
        queries: npt.ArrayLike,
        strength: float = 1.0,
        *,
        slot: int = 0,
        kinds: KindWeights | None = None,
    ) -> Floats:
        return self.layout.require_finite(queries, "query")

    def decode_scores(
        self,
        scores: npt.ArrayLike,
        queries: npt.ArrayLike,
        strength: float = 1.0,
        biases: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float64]:
        raw = np.asarray(scores, np.float64)
        if biases is None:
            return raw
        return raw + self.bias_factor * strength * np.asarray(biases, np.float64)


class PayloadKeysCodec(CandidateCodec):
    """Biases in keys of the rows' payloads, one for each slot, for databases without a schema."""

    @property
    def slot_keys(self) -> tuple[str, ...]:
        """The keys that hold the slots."""
        return tuple(name + self.suffix for name in SLOT_KEYS)

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        return (*self.slot_keys, self.epoch_field)

    def encode_rows(self, vectors: Floats, biases: RowBiases) -> Columns:
        slots = self._slots(biases, len(vectors))
        columns: Columns = dict(zip(self.slot_keys, slots.T.tolist(), strict=True))
        columns[self.epoch_field] = [biases.epoch] * len(vectors)
        return columns

    def read_biases(self, columns: Columns) -> Floats:
        # Rows that were inserted past this package lack the keys.
        slots = [[bias or 0.0 for bias in columns[name]] for name in self.slot_keys]
        return np.array(slots, np.float32).T

    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        changed: Columns = {
            self.slot_keys[slot]: biases_of_slot.tolist()
            for slot, biases_of_slot in biases.by_slot.items()
        }
        if biases.epoch is not None:
            changed[self.epoch_field] = [biases.epoch] * len(columns[self.field])
        return changed


class SideCollectionCodec(CandidateCodec):
    """Biases in the vectors of a side collection, whose columns are SIDE_FIELD and EPOCH_FIELD.

    In columns that are read, SIDE_FIELD is (n, slots) with NaN in rows without biases.
    """

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        return ()

    def encode_rows(self, vectors: Floats, biases: RowBiases) -> Columns:
        return self._entries(self._slots(biases, len(vectors)), biases.epoch)

    def read_biases(self, columns: Columns) -> Floats:
        return np.asarray(np.nan_to_num(columns[SIDE_FIELD]), np.float32)

    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        # A row of the side collection is written whole, so the other slots are written again.
        return self._entries(self._slots(biases, self.read_biases(columns)), biases.epoch)

    def _entries(self, slots: Floats, epoch: int | None) -> Columns:
        """Return the columns of the side collection for biases (n, slots)."""
        return {SIDE_FIELD: slots, EPOCH_FIELD: [epoch or PENDING] * len(slots)}

    def pending(self, columns: Columns) -> Flags:
        return np.asarray(np.isnan(columns[SIDE_FIELD]).any(axis=1), np.bool_)
