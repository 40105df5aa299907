"""The gallery of a job: rows of a collection, or items of an array or a file."""

from __future__ import annotations

import os
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.columns import FORMATS, Columns, format_of, open_columns
from milvus_hubness.basics.files.names import ITEM_NAMES, KEY_OPTION, key_named
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import QueryBank, as_vectors, vectors_in
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats, as_metric
from milvus_hubness.correction.codec.index_hints import with_mean
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.correction.kinds import KindNumbers, KindRule
from milvus_hubness.correction.prior import Values
from milvus_hubness.errors import CannotMigrate, EmptyCollection, InvalidInput, name_some, redacted
from milvus_hubness.jobs.common.priors import ChosenPrior
from milvus_hubness.jobs.common.progress import key_chunks
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo


@dataclass(frozen=True, eq=False)
class Gallery:
    """The rows of a collection, or the items of an array or a file, that have a usable vector."""

    title: str
    """The name of the collection or of the file; "items" for those of an array."""

    layout: Layout
    keys: list[Key]
    vectors: Floats
    """(n, d), as inserted."""
    fields: list[Mapping[str, Any]]
    """The scalar fields of the rows, without those of the correction."""
    biases: Floats | None
    """(n,), those that searches use now; None if the collection is not corrected."""
    unusable: int = 0
    """Number of further rows whose vector is zero under COSINE, or not finite."""

    @classmethod
    def of(
        cls,
        vectors: npt.ArrayLike | QueryBank,
        metric: str = "COSINE",
        keys: Sequence[Key] | None = None,
        *,
        title: str = "items",
    ) -> Gallery:
        """Return items (n, d) without a collection.

        metric: COSINE, IP or L2, by which searches compare them. keys: by default their numbers. Raises
        InvalidParameter for another metric, InvalidInput, NonFiniteVectors and EmptyCollection.
        """
        items = (
            vectors.vectors
            if isinstance(vectors, QueryBank)
            else as_vectors(vectors, "the gallery")
        )
        keys = list(range(len(items))) if keys is None else list(keys)
        if len(keys) != len(items):
            raise InvalidInput(f"{title} has {len(keys)} keys for {len(items)} items")
        layout_class = MultiVectorLayout if is_token_rows(items) else Layout
        layout = layout_class(items.shape[1], as_metric(metric))
        valid = np.flatnonzero(~layout.invalid(items))
        if not len(valid):
            raise EmptyCollection(f"{title} has no items with a valid vector")

        usable = items[valid]
        return cls(
            title,
            with_mean(layout, usable),
            [keys[row] for row in valid.tolist()],
            usable,
            [{} for _ in valid],
            None,
            unusable=len(keys) - len(valid),
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        metric: str = "COSINE",
        *,
        key_column: str | None = None,
    ) -> Gallery:
        """Read the vectors of a file as items without a collection.

        Their keys are those of `key_column`, by default of a column such as `key` or `id`, or else the
        numbers of the rows; a warning says so if the file has texts that could be keys. metric: as of
        `of`. Raises as `of` and QueryBank.load do.
        """
        name = os.fspath(path)
        if "://" in name or name.endswith(".db"):
            address = redacted(repr(name))
            raise InvalidInput(
                f"{address} is a database: pass MilvusStore(connect({address})) and a collection"
            )
        with open_columns(path, "a file of items") as columns:
            of_vectors = vectors_in(columns, ITEM_NAMES)
            vectors = as_vectors(columns.vectors(of_vectors), f"the file {path}")
            others = [other for other in columns.names if other != of_vectors]
            of_keys = key_named(others, name, key_column, holds_vectors=columns.holds_vectors)
            keys = None
            if of_keys is not None:
                keys = _checked_keys(columns, of_keys)
            elif texts := _like_keys(columns, others, len(vectors)):
                log.warning(
                    "%s has no column of keys, so its rows are numbered from 0: if %s has the keys, name "
                    "it with %s",
                    path,
                    " or ".join(map(repr, texts)),
                    KEY_OPTION,
                )
        return cls.of(vectors, metric, keys, title=name)

    @property
    def items(self) -> Items:
        """The rows for a prior."""
        return Items(self.keys, self.fields)

    def take(self, rows: npt.NDArray[np.int64]) -> Gallery:
        """Return some of the rows."""
        numbers = rows.tolist()
        return replace(
            self,
            keys=[self.keys[row] for row in numbers],
            vectors=self.vectors[rows],
            fields=[self.fields[row] for row in numbers],
            biases=None if self.biases is None else self.biases[rows],
        )


def only_field(info: CollectionInfo) -> str:
    """Return the vector field if there is exactly one. Raises InvalidInput, CannotMigrate."""
    if state := info.state_of(None):
        return state.field
    if len(info.vector_fields) == 1:
        return next(iter(info.vector_fields))

    if info.vector_fields:
        raise InvalidInput(
            f"{info.name!r} has several vector fields: choose one with --field: "
            f"{', '.join(info.vector_fields)}"
        )

    raise CannotMigrate(f"{info.name!r} has no float vector field, and only those are corrected")


def read_gallery(
    store: Store, info: CollectionInfo, field: str | None = None, *, progress: Progress = silent
) -> Gallery:
    """Read all rows with a usable vector.

    Raises EmptyCollection, InvalidInput, and InvalidParameter if the metric cannot be corrected.
    """
    field = field or only_field(info)
    info.require_field(field)
    state = info.states.get(field)
    hidden = {name for other in info.states.values() for name in other.codec.hidden_fields}
    vector = info.vector_fields[field]
    layout = state.layout if state else vector.plain_layout
    stored = StoredBiases(store, info, state) if state else None

    keys: list[Key] = []
    fields: list[Mapping[str, Any]] = []
    biases: list[Floats] = []
    read = 0

    # `Layout.stacked` asks for one chunk of vectors after the other and puts each where it belongs, so
    # that all vectors are never in memory twice. The lists above are filled on the way.
    def vectors_by_chunk() -> Iterator[Floats]:
        nonlocal read
        for partition, chunk in key_chunks(store, info, "reading the gallery", progress):
            if stored and state:
                biased_rows = stored.read(chunk, partition)
                batch = biased_rows.batch
                plain = biased_rows.vectors
            else:
                batch = store.get(info.name, chunk, field, partition=partition)
                plain = batch.vectors

            read += len(plain)
            valid = np.flatnonzero(~layout.invalid(plain)).tolist()
            keys.extend(batch.keys[i] for i in valid)
            for row in batch.take(valid).rows:
                fields.append({name: value for name, value in row.items() if name not in hidden})
            if stored and state:
                biases.append(biased_rows.biases[valid, state.profile.slot])
            yield plain[valid]

    vectors = layout.stacked(vectors_by_chunk())
    if not keys:
        raise EmptyCollection(f"{info.name!r} has no rows with a valid vector")

    layout = layout if state else with_mean(layout, vectors)
    return Gallery(
        info.name,
        layout,
        keys,
        vectors,
        fields,
        np.concatenate(biases) if biases else None,
        unusable=read - len(keys),
    )


def key_column_of(
    path: str | os.PathLike[str], column: str | None, other: str | os.PathLike[str] | None
) -> str | None:
    """Return the column of keys that a caller names for two files, as it is for one of them.

    None where only the other file has it: this one has a usual name then. Raises UnreadableFile.
    """
    if column is None or other is None or _has_column(path, column):
        return column
    return None if _has_column(other, column) else column


def _has_column(path: str | os.PathLike[str], column: str) -> bool:
    if format_of(Path(path)) not in FORMATS:
        return False
    with open_columns(path) as columns:
        return column in columns.names


def _checked_keys(columns: Columns, name: str) -> list[Key]:
    """Return the keys of items. Raises InvalidInput for a value that is no key."""
    keys = [str(key) if isinstance(key, float) else key for key in columns.values(name)]
    for row, key in enumerate(keys):
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise InvalidInput(
                f"{name!r} of {columns.source} must hold whole numbers or texts, not "
                f"{reprlib.repr(key)} ({columns.place(row)}): correct it, or name another column with "
                f"{KEY_OPTION}"
            )
    return keys


def expect_distinct(keys: Sequence[Key], source: str) -> None:
    """Raise InvalidInput if several items have one key, as only one of them would count as it."""
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise InvalidInput(
            f"{source} has several items with the key {name_some(repeated)}: give each a key of "
            f"its own, or name another column with {KEY_OPTION}"
        )


def _like_keys(columns: Columns, names: Sequence[str], count: int) -> list[str]:
    """Return those of the columns that have another text in each of `count` rows."""
    found = []
    for name in names:
        if columns.holds_vectors(name):
            continue
        try:
            values = columns.values(name)
        # An array of another shape has no value for each row.
        except InvalidInput:
            continue
        if all(isinstance(value, str) for value in values) and len(set(values)) == count:
            found.append(name)
    return found


@dataclass(frozen=True, eq=False)
class FitRows:
    """n rows of a field that a correction is fitted on."""

    vectors: Floats
    """(n, d), as users see them."""
    values: Values | None = None
    """(n,), those for the prior; None without one."""
    kinds: KindNumbers | None = None
    """(n,), their kinds; None without kinds."""

    @classmethod
    def of(
        cls, vectors: Floats, items: Items, chosen: ChosenPrior, rule: KindRule | None
    ) -> FitRows:
        """Return rows with these vectors and fields. Raises as `ChosenPrior.values_of` does."""
        kinds = None if rule is None else rule.numbers_of(vectors, items)
        return cls(vectors, chosen.values_of(items), kinds)
