"""The bias locations `fields` and `side_collection`: vectors stay, and searches re-rank candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milvus_hubness.codec.arrays import Floats, Metric
from milvus_hubness.codec.base import BIAS_FIELD, EPOCH_FIELD, PENDING, Columns, Flags, RowCodec
from milvus_hubness.codec.half_precision import StorageFormat

SLOT_FIELDS = (BIAS_FIELD, "hubness_bias_1")
"""Fields with the biases, by slot, in the bias location `fields`."""
SIDE_FIELD = "biases"
"""Vector field of a side collection; its components are the slots."""


class CandidateCodec(RowCodec):
    """Vectors as the user gave them; the client corrects the scores of candidates."""

    leaves_vectors = True
    needs_candidates = True

    @property
    def served_metric(self) -> Metric:
        return self.layout.metric

    @property
    def form(self) -> StorageFormat:
        return StorageFormat(self.dtype, self.layout.dim)

    @property
    def bias_factor(self) -> float:
        """Factor of a bias in the user's metric: squared distances grow by twice the bias, others fall."""
        return 2.0 if self.layout.metric == "L2" else -1.0

    def encode_query(self, queries: npt.ArrayLike, strength: float = 1.0, *, slot: int = 0) -> Floats:
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


class FieldsCodec(CandidateCodec):
    """Biases in scalar fields of the rows, one for each slot."""

    location = "fields"

    @property
    def slot_fields(self) -> tuple[str, ...]:
        """The scalar fields that hold the slots."""
        return tuple(name + self.suffix for name in SLOT_FIELDS)

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        return (*self.slot_fields, self.epoch_field)

    def encode_rows(
        self, vectors: Floats, biases: Floats, epoch: int, locality_hints: Floats | None = None
    ) -> Columns:
        return {
            **dict(zip(self.slot_fields, biases.T.tolist(), strict=True)),
            self.epoch_field: [epoch] * len(vectors),
        }

    def read_biases(self, columns: Columns) -> Floats:
        slots = [[bias or 0.0 for bias in columns[name]] for name in self.slot_fields]
        return np.array(slots, np.float32).T

    def set_biases(
        self,
        columns: Columns,
        biases: Mapping[int, Floats],
        epoch: int | None,
        locality_hints: Floats | None = None,
    ) -> Columns:
        changed = {self.slot_fields[slot]: column.tolist() for slot, column in biases.items()}
        return changed if epoch is None else {**changed, self.epoch_field: [epoch] * len(columns[self.field])}


@dataclass(frozen=True)
class SideCollectionCodec(CandidateCodec):
    """Biases in the vectors of a side collection, whose columns are SIDE_FIELD and EPOCH_FIELD.

    In columns that are read, SIDE_FIELD is (n, slots) with NaN in rows without biases.
    """

    side_collection: str | None = ""

    location = "side"

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        return ()

    def encode_rows(
        self, vectors: Floats, biases: Floats, epoch: int, locality_hints: Floats | None = None
    ) -> Columns:
        """Return no columns: the rows themselves are stored as they are."""
        return {}

    def read_biases(self, columns: Columns) -> Floats:
        return np.asarray(np.nan_to_num(columns[SIDE_FIELD]), np.float32)

    def set_biases(
        self,
        columns: Columns,
        biases: Mapping[int, Floats],
        epoch: int | None,
        locality_hints: Floats | None = None,
    ) -> Columns:
        """Return the columns of the side collection."""
        slots = self.read_biases(columns).copy()
        for slot, column in biases.items():
            slots[:, slot] = column
        return {SIDE_FIELD: slots, EPOCH_FIELD: [epoch or PENDING] * len(slots)}

    def pending(self, columns: Columns) -> Flags:
        return np.asarray(np.isnan(columns[SIDE_FIELD]).any(axis=1), np.bool_)
