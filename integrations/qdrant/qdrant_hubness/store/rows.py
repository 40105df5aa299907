"""Points of Qdrant converted to rows, and rows to points. No I/O.

A row is the payload of a point, and an `OtherVector` for each of its vectors
but that of the batch. For an augmented vector the row also has the fields that
other databases store: the bias, read from the vector; the epoch, PENDING if the
payload says so; for COSINE a norm of 1, because Qdrant normalises vectors. Of
these, only the mark of pending points is stored, so the payload is the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from qdrant_client import models
from qdrant_client._pydantic_compat import construct

from milvus_hubness import MultiVectors
from milvus_hubness.extending import (
    PENDING,
    Batch,
    CollectionState,
    Dtype,
    Floats,
    Key,
    RowCodec,
    StorageFormat,
    packed_vectors,
    same_directions,
)
from qdrant_hubness.store.limits import NO_LIMITS, Limits

OTHER_VECTOR = "hubness_vector/"
"""Beginning of the fields of a row that hold its other vectors; their names follow."""

UNNAMED = ""
"""Qdrant's name for the single vector of a collection without vector names."""

SERVER_UNITS = 2
LOCAL_UNITS = 64
"""Units in the last place by which normalisation may change the numbers of a vector. A server
normalises on a write, the local mode again in every search.
"""

UNIT_LENGTH = 1e-6
"""Tolerance of the length of unit vectors."""

Row = dict[str, Any]
Vectors = dict[str, Any]


def vector_words(name: str) -> str:
    """Return what messages call a vector."""
    return f"vector {name!r}" if name != UNNAMED else "the vector"


class Uncopied(list[float]):
    """A vector that was made for one request, so that nobody else holds it.

    QdrantClient copies each search deeply, number by number, before it sends it: this vector stays.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return self


@dataclass(frozen=True)
class Normalisation:
    """What Qdrant does to a Cosine vector that is written.

    It leaves a vector alone whose squared length is within 1e-6 of 1, divides any other by its
    length, in float32, and then rounds it to the numbers that it stores. So the copy of a vector
    has its direction, up to rounding.
    """

    dtype: Dtype
    """Type of the numbers."""

    units: int
    """Units in the last place by which it may change them."""

    def is_same(self, a: Floats, b: Floats) -> bool:
        """Whether two vectors (…, d) have the same direction."""
        return same_directions(a, b, self.dtype, self.units)


@dataclass(frozen=True, eq=False)
class OtherVector:
    """A vector of a point that is not the vector of the batch."""

    value: Any
    """A list of numbers, a list of such lists, or {"indices", "values"}."""

    normalisation: Normalisation | None = None
    """None if Qdrant keeps the numbers as they come, up to the decimals that REST prints."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        """Return the numbers; those of a sparse vector without their places."""
        numbers = self.value["values"] if isinstance(self.value, dict) else self.value
        return np.array(numbers, dtype or np.float32)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OtherVector):
            return False
        if self._sparse_indices() != other._sparse_indices():
            return False

        numbers = np.asarray(self)
        other_numbers = np.asarray(other)
        if numbers.shape != other_numbers.shape:
            return False
        if np.array_equal(numbers, other_numbers):
            return True

        return self.normalisation is not None and self.normalisation.is_same(numbers, other_numbers)

    def _sparse_indices(self) -> list[int] | None:
        return self.value["indices"] if isinstance(self.value, dict) else None

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Form:
    """Conversion of a collection's points for one of their vectors."""

    field: str
    """The name of the vector."""

    form: StorageFormat
    """The storage format of the vector."""

    state: CollectionState | None
    """How the vector is augmented; None for a plain one."""

    normalised: Mapping[str, Normalisation]
    """What Qdrant does to the Cosine vectors of the collection, by their names."""

    limits: Limits = NO_LIMITS
    """What strict mode of the collection allows."""

    multi_vectors: bool = False
    """Whether a point has several vectors under this name, which Qdrant scores by MaxSim."""

    @cached_property
    def codec(self) -> RowCodec | None:
        return self.state.codec if self.state else None

    def batch(self, records: Sequence[Any]) -> Batch:
        """Return points as rows, in their order; NaN in place of a missing vector."""
        rows: list[Row] = []
        vectors: list[Any] = []
        missing: list[int] = []
        for position, record in enumerate(records):
            row = dict(record.payload or {})
            vector = record.vector
            # A collection with one vector returns it as it is; all others return vectors by name.
            if self.field != UNNAMED or type(vector) is not list:
                by_name = named(vector)
                vector = by_name.pop(self.field, None)
                for name, value in by_name.items():
                    row[OTHER_VECTOR + name] = OtherVector(value, self.normalised.get(name))

            if vector is None:
                missing.append(position)
                vector = None if self.multi_vectors else [0.0] * self.form.width
            vectors.append(vector)
            rows.append(row)

        stored = rows_of_vectors(vectors, self.form.width, are_multi=self.multi_vectors)
        if self.field in self.normalised:
            stored = _unit(stored)
        joined = self.form.joined(stored)
        # Only the user's numbers are missing: the others would make a bias that is not finite.
        if isinstance(joined, MultiVectors):
            joined.tokens[joined.offsets[missing], self.form.dim :] = 0
        else:
            joined[missing, : self.form.dim] = np.nan
        if self.state is not None:
            _add_columns(self.state, joined, rows)
        return Batch([record.id for record in records], joined, rows)

    def points(self, batch: Batch) -> list[models.PointStruct]:
        """Return rows as points."""
        stored = self.form.split(batch.vectors).tolist()
        has_vector = have_vectors(batch.vectors)
        points = []
        for key, stored_vector, is_present, row in zip(
            batch.keys, stored, has_vector, batch.rows, strict=True
        ):
            payload = self._payload(row)
            vectors = {
                name.removeprefix(OTHER_VECTOR): as_model(payload.pop(name).value)
                for name, value in row.items()
                if isinstance(value, OtherVector)
            }
            if is_present:
                vectors[self.field] = stored_vector
            vector = vectors[UNNAMED] if vectors.keys() == {UNNAMED} else vectors
            points.append(construct(models.PointStruct, id=key, vector=vector, payload=payload))

        return points

    @cached_property
    def _derived_fields(self) -> frozenset[str]:
        """The fields of a row that Qdrant does not keep, since its vector gives them."""
        if self.codec is None:
            return frozenset()
        return frozenset({self.codec.bias_field, *self.codec.decoding_fields})

    def _payload(self, row: Row) -> Row:
        payload = {name: value for name, value in row.items() if name not in self._derived_fields}
        if self.codec is not None:
            # The epoch of the collection state is that of all
            # rows, but those without a bias and new ones.
            epoch = payload.get(self.codec.epoch_field, 0)
            if epoch is None or epoch > PENDING:
                payload.pop(self.codec.epoch_field, None)
        return payload


def rows_of_vectors(vectors: list[Any], width: int, *, are_multi: bool) -> Floats:
    """Return stored vectors as a matrix (n, width), or as multi-vectors, NaN where one is None."""
    if are_multi:
        return cast(Floats, MultiVectors.stored(vectors, width))
    matrix = np.zeros((len(vectors), width), np.float32)
    if vectors:
        packed = packed_vectors(vectors, width)
        matrix[:] = np.array(vectors, np.float32) if packed is None else packed
    return matrix


def queries_of(form: StorageFormat, encoded: Sequence[Any]) -> list[Any]:
    """Return augmented queries as Qdrant takes them, rounded as the vectors of the field are stored.

    encoded: as `StorageFormat.encode_queries` returns them, of several vectors lists of lists.
    """
    if encoded and isinstance(encoded[0], list):
        return [queries_of(form, tokens) for tokens in encoded]
    return cast("list[Any]", form.decode(encoded).tolist())


def width_of(vector: Any) -> int:
    """Return how many numbers a vector, or each of several, has."""
    first = vector[0] if len(vector) else 0.0
    return len(first) if hasattr(first, "__len__") else len(vector)


def have_vectors(vectors: Floats) -> npt.NDArray[np.bool_]:
    """Return which rows (n, width), or multi-vectors, are not NaN in place of a missing vector."""
    rows = vectors.first_tokens if isinstance(vectors, MultiVectors) else vectors
    return ~np.isnan(rows[:, 0])


def _add_columns(state: CollectionState, stored: Floats, rows: Sequence[Row]) -> None:
    """Add the bias, the epoch and the norm to rows of augmented vectors."""
    codec = state.codec
    slots = codec.read_biases({codec.field: stored})
    biases = slots[:, state.profile.slot].tolist()
    lengths = dict.fromkeys(codec.decoding_fields, 1.0)
    for row, bias in zip(rows, biases, strict=True):
        row[codec.bias_field] = bias
        row.setdefault(codec.epoch_field, state.profile.epoch)
        row.update(lengths)


def _unit(vectors: Any) -> Floats:
    """Return vectors (…, d), or the tokens of multi-vectors, normalised, except those of length 0.

    The local mode does not normalise stored data.
    """
    if isinstance(vectors, MultiVectors):
        return cast(Floats, vectors.with_tokens(_unit(vectors.tokens)))
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
    if type(value) is list:
        return value
    if isinstance(value, models.SparseVector):
        order = sorted(range(len(value.indices)), key=value.indices.__getitem__)
        return {
            "indices": [value.indices[i] for i in order],
            "values": [value.values[i] for i in order],
        }

    return value


def as_model(value: Any) -> Any:
    """Return a vector as qdrant-client expects it, from a value of `named`."""
    return models.SparseVector(**value) if isinstance(value, dict) else value


def in_order(records: Iterable[Any], keys: Sequence[Key]) -> list[Any]:
    """Return the existing points in the order of `keys`."""
    by_key = {record.id: record for record in records}
    return [by_key[key] for key in keys if key in by_key]
