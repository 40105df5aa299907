"""Points of Qdrant converted to rows, and rows to points. No I/O.

A row is the payload of a point; `OTHER_VECTORS` holds all its vectors but that of the batch. For an augmented vector
the row also has the fields that other databases store: the bias, read from the vector; the epoch, PENDING if the
payload says so; for COSINE a norm of 1, because Qdrant normalises vectors. Of these, only the mark of pending points is
stored, so the payload is the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from qdrant_client import models
from qdrant_client._pydantic_compat import construct

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.codec.arrays import Floats, StorageFormat
from milvus_hubness.codec.base import PENDING, RowCodec
from milvus_hubness.state import CollectionState
from qdrant_hubness.store.limits import NO_LIMITS, Limits

OTHER_VECTORS = "hubness_vectors"
UNNAMED = ""
"""Qdrant's name for the single vector of a collection without vector names."""
SERVER_UNITS, LOCAL_UNITS = 2, 64
"""Units in the last place by which normalisation may change the numbers of a vector. A server normalises on a write,
the local mode again in every search."""
UNIT_LENGTH = 1e-6
"""Tolerance of the length of unit vectors."""

Row = dict[str, Any]
Vectors = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Others:
    """Vectors by name: lists of numbers, lists of such lists, or {"indices", "values"}; equal up to normalisation.

    unit: the names of vectors that Qdrant normalises. units: tolerance for these, in units in the last place.
    """

    vectors: Mapping[str, Any]
    unit: frozenset[str] = frozenset()
    units: int = SERVER_UNITS

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Others) or self.vectors.keys() != other.vectors.keys():
            return False
        return all(
            _near(vector, other.vectors[name], self.units) if name in self.unit else vector == other.vectors[name]
            for name, vector in self.vectors.items()
        )

    __hash__ = None  # type: ignore[assignment]


def _near(a: Any, b: Any, units: int) -> bool:
    first, second = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return first.shape == second.shape and np.allclose(first, second, rtol=units * 2.0**-23, atol=2.0**-126)


@dataclass(frozen=True)
class Form:
    """Conversion of a collection's points for one of their vectors.

    field: the vector's name. form: its storage format. state: if it is an augmented vector. unit, units: see Others.
    """

    field: str
    form: StorageFormat
    state: CollectionState | None
    unit: frozenset[str]
    units: int
    limits: Limits = NO_LIMITS
    """What strict mode of the collection allows."""

    @cached_property
    def codec(self) -> RowCodec | None:
        return self.state.codec if self.state else None

    def batch(self, records: Sequence[Any]) -> Batch:
        """Return points as rows, in their order; NaN in place of a missing vector."""
        keys: list[Key] = []
        rows: list[Row] = []
        stored = np.zeros((len(records), self.form.width), np.float32)
        missing = []
        for i, record in enumerate(records):
            vectors = named(record.vector)
            own = vectors.pop(self.field, None)
            if own is None:
                missing.append(i)
            else:
                stored[i] = own
            row = dict(record.payload or {})
            if vectors:
                unit = self.unit & vectors.keys()
                vectors |= {name: _unit(vectors[name]).tolist() for name in unit}
                row[OTHER_VECTORS] = Others(vectors, unit, self.units)
            keys.append(record.id)
            rows.append(row)
        joined = self.form.joined(_unit(stored) if self.field in self.unit else stored)
        joined[missing, : self.form.dim] = np.nan
        if self.state is not None:
            _add_columns(self.state, joined, rows)
        return Batch(keys, joined, rows)

    def points(self, batch: Batch) -> list[models.PointStruct]:
        """Return rows as points."""
        split = self.form.split(batch.vectors).tolist()
        present = ~np.isnan(batch.vectors[:, 0])
        points = []
        for key, own, has_own, row in zip(batch.keys, split, present, batch.rows, strict=True):
            payload = self._payload(row)
            others = payload.pop(OTHER_VECTORS, None)
            vectors = {name: as_model(value) for name, value in others.vectors.items()} if others else {}
            if has_own:
                vectors[self.field] = own
            vector = vectors[UNNAMED] if vectors.keys() == {UNNAMED} else vectors
            points.append(construct(models.PointStruct, id=key, vector=vector, payload=payload))
        return points

    def vectors(self, batch: Batch) -> list[models.PointVectors]:
        """Return the arguments of update_vectors for the rows that have this vector."""
        split = self.form.split(batch.vectors).tolist()
        present = ~np.isnan(batch.vectors[:, 0])
        return [
            construct(models.PointVectors, id=key, vector={self.field: vector} if self.field else vector)
            for key, vector, has_own in zip(batch.keys, split, present, strict=True)
            if has_own
        ]

    def _payload(self, row: Row) -> Row:
        codec = self.codec
        if codec is None:
            return dict(row)
        derived = {codec.bias_field, *codec.decoding_fields}
        # The epoch of the collection state is that of all rows, but those without a bias and new ones.
        if row.get(codec.epoch_field) is None or row[codec.epoch_field] > PENDING:
            derived.add(codec.epoch_field)
        return {name: value for name, value in row.items() if name not in derived}


def _add_columns(state: CollectionState, stored: Floats, rows: Sequence[Row]) -> None:
    """Add the bias, the epoch and the norm to rows of augmented vectors."""
    codec, epoch = state.codec, state.profile.epoch
    biases = codec.read_biases({codec.field: stored})[:, state.profile.slot].tolist()
    for row, bias in zip(rows, biases, strict=True):
        row |= {codec.bias_field: bias, codec.epoch_field: row.get(codec.epoch_field, epoch)}
        row |= dict.fromkeys(codec.decoding_fields, 1.0)


def _unit(vectors: Any) -> Floats:
    """Return vectors (…, d) normalised, except those of length 0. The local mode does not normalise stored data."""
    rows = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    unchanged = (np.abs(lengths - 1) <= UNIT_LENGTH) | (lengths == 0)
    return np.asarray(rows / np.where(unchanged, 1, lengths), np.float32)


def named(vector: Any) -> Vectors:
    """Return the vectors of a point by name, as plain lists and dictionaries."""
    if vector is None:
        return {}
    by_name = vector if isinstance(vector, dict) else {UNNAMED: vector}
    return {name: _plain(value) for name, value in by_name.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, models.SparseVector):
        order = sorted(range(len(value.indices)), key=value.indices.__getitem__)
        return {"indices": [value.indices[i] for i in order], "values": [value.values[i] for i in order]}
    return value


def as_model(value: Any) -> Any:
    """Return a vector as qdrant-client expects it, from a value of `named`."""
    return models.SparseVector(**value) if isinstance(value, dict) else value


def in_order(records: Iterable[Any], keys: Sequence[Key]) -> list[Any]:
    """Return the existing points in the order of `keys`."""
    by_key = {record.id: record for record in records}
    return [by_key[key] for key in keys if key in by_key]
