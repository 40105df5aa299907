"""A whole collection in memory, as its user knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank
from milvus_hubness.errors import CannotMigrate, EmptyCollection, InvalidInput, name_some
from milvus_hubness.halves import Dtype
from milvus_hubness.jobs.placement import bias_location_of
from milvus_hubness.jobs.progress import Progress, chunks, silent
from milvus_hubness.jobs.resolution import resolution
from milvus_hubness.layout import Floats, Layout, as_metric
from milvus_hubness.stores.base import CollectionInfo, Key, Store


@dataclass(frozen=True, eq=False)
class Gallery:
    """Rows that hold a usable vector. vectors (n, d) as inserted; fields: the scalar fields of each; biases
    (n,) as searches read them now, None where the collection carries none."""

    layout: Layout
    keys: list[Key]
    vectors: Floats
    fields: list[Mapping[str, Any]]
    biases: Floats | None

    def positions(self, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
        """Where the rows of these keys stand. Raises InvalidInput naming those that are not there."""
        where = {key: i for i, key in enumerate(self.keys)}
        if unknown := [key for key in keys if key not in where]:
            raise InvalidInput(f"no usable rows of these keys: {name_some(unknown)}")
        return np.array([where[key] for key in keys], np.int64)


def require_resolved(gallery: Gallery, bank: QueryBank, field: str, dtype: Dtype) -> None:
    """Raises CannotMigrate where scores under L2 do not tell the gallery's rows apart in float32."""
    if gallery.layout.metric == "L2":
        found = resolution(gallery.layout, gallery.vectors, bank.vectors, dtype)
        if found is not None:
            found.require(field)


def only_field(info: CollectionInfo) -> str:
    """The vector field, where there is just one. Raises InvalidInput, CannotMigrate."""
    if state := info.state_of(None):
        return state.field
    if len(info.users_fields) == 1:
        return next(iter(info.users_fields))
    if info.users_fields:
        raise InvalidInput(
            f"{info.name!r} has several vector fields, name one: {', '.join(info.users_fields)}"
        )
    raise CannotMigrate(f"{info.name!r} has no float vector field, and only those are corrected")


def read_gallery(
    store: Store, info: CollectionInfo, field: str | None = None, *, progress: Progress = silent
) -> Gallery:
    """Raises EmptyCollection, InvalidInput, InvalidParameter where the metric cannot be corrected."""
    field = field or only_field(info)
    info.require_field(field)
    state = info.states.get(field)
    hidden = {name for each in info.states.values() for name in each.hidden_fields}
    vector = info.vector_fields[field]
    layout = state.layout if state else Layout(vector.dim, as_metric(vector.metric))
    bias_location = bias_location_of(store, info, state) if state else None
    keys: list[Key] = []
    fields: list[Mapping[str, Any]] = []
    vectors, biases = [], []
    for partition in info.partitions:
        wanted = store.keys(info.name, partition=partition)
        for part in chunks(wanted, store.chunk_rows(info), "reading the gallery", progress):
            biased_rows = bias_location.read(part, partition) if bias_location else None
            batch = (
                biased_rows.batch if biased_rows else store.get(info.name, part, field, partition=partition)
            )
            plain = biased_rows.vectors if biased_rows else batch.vectors
            valid = ~layout.invalid(plain)
            keys += [key for key, usable in zip(batch.keys, valid, strict=True) if usable]
            fields += [_shown(row, hidden) for row, usable in zip(batch.rows, valid, strict=True) if usable]
            vectors.append(plain[valid])
            if biased_rows and state:
                biases.append(biased_rows.biases[valid, state.profile.slot])
    if not keys:
        raise EmptyCollection(f"{info.name!r} holds no rows with a usable vector")
    rows = np.concatenate(vectors)
    layout = layout if state else layout.with_mean(rows)
    return Gallery(layout, keys, rows, fields, np.concatenate(biases) if biases else None)


def _shown(row: Mapping[str, Any], hidden: set[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in hidden}
