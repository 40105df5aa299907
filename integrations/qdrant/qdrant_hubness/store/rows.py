"""Points of Qdrant as rows and back. No I/O.

A row is the point's payload, and under `OTHER_VECTORS` its vectors but for the one that a batch is of. Of a
field in augmented form it shows what other databases keep with the row: the bias, which is read out of the
vector; the epoch, PENDING where the payload says so; under COSINE a norm of 1, as Qdrant makes all vectors
unit. Of these only the mark of pending points is kept, so that the payload is the user's own."""

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

OTHER_VECTORS = "hubness_vectors"
UNNAMED = ""
"""What Qdrant calls the vector of a collection that has one without a name."""
SERVER_UNITS, LOCAL_UNITS = 2, 64
"""By how many units in the last place the numbers of vectors may move that Qdrant brings to length 1: when
they are written, and the local mode, where they lie, once more at every search."""
UNIT_LENGTH = 1e-6
"""Vectors whose length is that near to 1 are unit."""

Row = dict[str, Any]
Vectors = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Others:
    """Vectors by name: lists of numbers, lists of such lists, or {"indices", "values"}. unit: the names of
    those that Qdrant brings to length 1, and so moves by up to so many units in the last place."""

    vectors: Mapping[str, Any]
    unit: frozenset[str] = frozenset()
    units: int = SERVER_UNITS

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Others) or self.vectors.keys() != other.vectors.keys():
            return False
        return all(
            _near(mine, other.vectors[name], self.units) if name in self.unit else mine == other.vectors[name]
            for name, mine in self.vectors.items()
        )

    __hash__ = None  # type: ignore[assignment]


def _near(a: Any, b: Any, units: int) -> bool:
    mine, theirs = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=units * 2.0**-23, atol=2.0**-126)


@dataclass(frozen=True)
class Form:
    """How points of a collection are read and written with one of their vectors in front. field: its name; form: how
    the rows of a layout, or the user's, lie in it; state: where these are a layout's; unit, units: see Others."""

    field: str
    form: StorageFormat
    state: CollectionState | None
    unit: frozenset[str]
    units: int

    @cached_property
    def codec(self) -> RowCodec | None:
        return self.state.codec if self.state else None

    def batch(self, records: Sequence[Any]) -> Batch:
        """The rows of points read with payload and vectors, in their order. A point without this vector has
        NaN in its place."""
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
            _show(self.state, joined, rows)
        return Batch(keys, joined, rows)

    def points(self, batch: Batch) -> list[models.PointStruct]:
        """What Qdrant takes for these rows."""
        split = self.form.split(batch.vectors).tolist()
        whole = ~np.isnan(batch.vectors[:, 0])
        made = []
        for key, vector, is_there, row in zip(batch.keys, split, whole, batch.rows, strict=True):
            payload = self._kept(row)
            others = payload.pop(OTHER_VECTORS, None)
            vectors = {name: as_taken(value) for name, value in others.vectors.items()} if others else {}
            if is_there:
                vectors[self.field] = vector
            taken = vectors[UNNAMED] if vectors.keys() == {UNNAMED} else vectors
            made.append(construct(models.PointStruct, id=key, vector=taken, payload=payload))
        return made

    def vectors(self, batch: Batch) -> list[models.PointVectors]:
        """What Qdrant takes to replace this vector of the rows that have it, and nothing else of them."""
        split = self.form.split(batch.vectors).tolist()
        whole = ~np.isnan(batch.vectors[:, 0])
        return [
            construct(models.PointVectors, id=key, vector={self.field: vector} if self.field else vector)
            for key, vector, is_there in zip(batch.keys, split, whole, strict=True)
            if is_there
        ]

    def _kept(self, row: Row) -> Row:
        codec = self.codec
        if codec is None:
            return dict(row)
        shown = {codec.bias_field, *codec.decoding_fields}
        if row.get(codec.epoch_field) != PENDING:
            shown.add(codec.epoch_field)
        return {name: value for name, value in row.items() if name not in shown}


def _show(state: CollectionState, stored: Floats, rows: Sequence[Row]) -> None:
    codec, epoch = state.codec, state.profile.epoch
    biases = codec.read_biases({codec.field: stored})[:, state.profile.slot].tolist()
    for row, bias in zip(rows, biases, strict=True):
        row |= {codec.bias_field: bias, codec.epoch_field: row.get(codec.epoch_field, epoch)}
        row |= dict.fromkeys(codec.decoding_fields, 1.0)


def _unit(vectors: Any) -> Floats:
    """Vectors (…, d) of length 1, but for those of length 0. A server makes them so when they are written;
    the local mode, of data that it reads from the disk, when they are searched."""
    rows = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    as_they_are = (np.abs(lengths - 1) <= UNIT_LENGTH) | (lengths == 0)
    return np.asarray(rows / np.where(as_they_are, 1, lengths), np.float32)


def named(vector: Any) -> Vectors:
    """The vectors of a point by name, in plain lists and dictionaries."""
    if vector is None:
        return {}
    by_name = vector if isinstance(vector, dict) else {UNNAMED: vector}
    return {name: _plain(value) for name, value in by_name.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, models.SparseVector):
        order = sorted(range(len(value.indices)), key=value.indices.__getitem__)
        return {"indices": [value.indices[i] for i in order], "values": [value.values[i] for i in order]}
    return value


def as_taken(value: Any) -> Any:
    """A vector as Qdrant takes it, from what `named` makes of it."""
    return models.SparseVector(**value) if isinstance(value, dict) else value


def in_order(records: Iterable[Any], keys: Sequence[Key]) -> list[Any]:
    """The points in the order of `keys`, those that are there."""
    by_key = {record.id: record for record in records}
    return [by_key[key] for key in keys if key in by_key]
