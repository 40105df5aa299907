"""The inputs of a job: galleries, banks, labelled pairs, and the nearest rows of bank queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import Key
from milvus_hubness.codec.arrays import Floats, as_metric
from milvus_hubness.codec.base import form_of
from milvus_hubness.codec.half_precision import Dtype, decode, rounded
from milvus_hubness.codec.layout import Layout
from milvus_hubness.errors import CannotMigrate, EmptyCollection, InvalidInput, UnreadableFile, name_some
from milvus_hubness.operations.bias_backends import BiasBackend
from milvus_hubness.operations.progress import Progress, chunks, silent
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo

MEASURED_ROWS, MEASURED_QUERIES, NEAREST = 1_000, 200, 10
ALIKE = 1e-6
"""Relative difference below which a raw search in float32 treats two scores as equal."""
LEAST_IN_ORDER, REMARKED = 0.5, 0.99
"""Minimum shares of queries that keep their order: below the first, rows cannot be told apart under L2; below
the second, the plan has a remark."""

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Resolution:
    """How well the scores of the augmented form keep the raw order.

    rows, queries: how many were measured. in_order: the share of queries whose ten nearest rows keep the raw
    order at strength 0. gap: the score difference of neighbours among those ten (L2: squared distance).
    error: the error of the score of the augmented form. gap and error are medians.
    """

    rows: int
    queries: int
    in_order: float
    gap: float
    error: float

    def require(self, field: str) -> None:
        """Check that the augmented form tells rows apart under L2. Raises CannotMigrate."""
        if self.in_order < LEAST_IN_ORDER:
            raise CannotMigrate(
                f"field {field!r} has rows that float32 does not tell apart: the {NEAREST} nearest of a "
                f"query differ by {self.gap:.3g} in squared distance and scores are off by {self.error:.3g}, "
                f"as groups of rows lie far apart ({self.in_order:.0%} of {self.queries} queries keep their "
                f"order among {self.rows:,} rows at strength 0): keep each group in a collection of its own"
            )

    def remark(self, dtype: Dtype) -> list[str]:
        """Return the remarks of a plan about the resolution."""
        if self.in_order >= REMARKED:
            return []
        reason = "" if dtype == "float32" else f", as the augmented form is rounded to {dtype} once more"
        return [
            f"at strength 0 {self.in_order:.0%} of {self.queries} queries keep the order of their {NEAREST} "
            f"nearest among {self.rows:,} rows{reason}"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self)


def resolution(layout: Layout, vectors: Floats, queries: Floats, dtype: Dtype) -> Resolution | None:
    """Measure the resolution in float32, as a server computes, on at most MEASURED_ROWS vectors (n, d) and
    MEASURED_QUERIES queries (m, d), spread evenly. Return None if there are fewer than a dozen usable rows,
    or no query."""
    rows = _some(vectors[~layout.invalid(vectors)], MEASURED_ROWS)
    query_vectors = rounded(_some(queries[~layout.invalid(queries)], MEASURED_QUERIES), dtype)
    if len(rows) < NEAREST + 2 or not len(query_vectors):
        return None
    layout = layout.measured_on(rows, query_vectors)
    form = form_of(layout, dtype)
    stored = decode(form.encode_rows(layout.augment(rows, np.zeros(len(rows)))), dtype)
    products = decode(form.encode_queries(layout.encode_queries(query_vectors, 0.0)), dtype) @ stored.T
    found = layout.scores(products, query_vectors, 0.0) * (-1 if layout.metric == "L2" else 1)
    exact = _exact(layout, rows, query_vectors)
    order = np.argsort(-exact, axis=1, kind="stable")[:, : NEAREST + 1]
    nearest = np.take_along_axis(exact, order, 1)
    theirs = np.argsort(-found, axis=1, kind="stable")[:, :NEAREST]
    same = np.isclose(np.take_along_axis(exact, theirs, 1), nearest[:, :NEAREST], rtol=ALIKE, atol=0)
    gaps = -np.diff(nearest, axis=1)
    errors = np.abs(np.take_along_axis(found, order, 1) - nearest)
    return Resolution(
        len(rows),
        len(query_vectors),
        float(same.all(axis=1).mean()),
        float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0,
        float(np.median(errors)),
    )


def _exact(layout: Layout, rows: Floats, queries: Floats) -> Scores:
    """Return the scores (m, n) of the user's metric in float64; higher means nearer."""
    wide, query_vectors = rows.astype(np.float64), queries.astype(np.float64)
    if layout.metric == "L2":
        return -np.stack([np.square(wide - query).sum(axis=1) for query in query_vectors])
    if layout.metric == "COSINE":
        wide, query_vectors = (
            each / np.linalg.norm(each, axis=1, keepdims=True) for each in (wide, query_vectors)
        )
    return np.asarray(query_vectors @ wide.T)


def _some(rows: Floats, count: int) -> Floats:
    return rows[:: max(1, -(-len(rows) // count))]


COLLECTION_PREFIX = "collection:"
WHERE_FROM = 'see "Where do I get reference queries?" in the README'


def read_bank(store: Store, spec: str, column: str | None = None) -> QueryBank:
    """Read a query bank. column: the array, column or vector field, required if there are several. Raises as
    QueryBank.load and the store do."""
    if spec.startswith(COLLECTION_PREFIX):
        return store.read_vectors(spec.removeprefix(COLLECTION_PREFIX), column)
    return QueryBank.load(spec, column)


QUERY_COLUMN, KEY_COLUMN = "query", "key"


def read_pairs(path: str) -> tuple[QueryBank, list[Key]]:
    """Read the arrays `query` (n, d) and `key` (n,) of an .npz file, or the columns of these names of a
    .parquet or .arrow file.

    Raises UnreadableFile, and InvalidInput if one of them is missing or their lengths differ.
    """
    queries = QueryBank.load(path, QUERY_COLUMN)
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as arrays:
                keys = arrays[KEY_COLUMN].tolist()
        else:
            read = parquet.read_table if path.endswith(".parquet") else feather.read_table
            keys = read(path, columns=[KEY_COLUMN]).column(KEY_COLUMN).to_pylist()
    except (KeyError, pa.ArrowException):
        raise InvalidInput(f"{Path(path).name} has no {KEY_COLUMN!r} beside {QUERY_COLUMN!r}") from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot read {KEY_COLUMN!r} of {path}: {error}") from None
    if len(keys) != len(queries):
        raise InvalidInput(f"{Path(path).name} has {len(keys)} keys for {len(queries)} queries")
    if odd := [key for key in keys if isinstance(key, bool) or not isinstance(key, int | str)]:
        raise InvalidInput(
            f"{KEY_COLUMN!r} of {Path(path).name} must hold whole numbers or texts, not {name_some(odd, 1)}"
        )
    return queries, keys


@dataclass(frozen=True, eq=False)
class Gallery:
    """The rows of a collection that have a usable vector.

    vectors: (n, d), as inserted. fields: the scalar fields of each row. biases: (n,), those that searches use
    now; None if the collection is not corrected.
    """

    layout: Layout
    keys: list[Key]
    vectors: Floats
    fields: list[Mapping[str, Any]]
    biases: Floats | None

    def positions(self, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
        """Return the positions of the rows of these keys. Raises InvalidInput, which names missing keys."""
        where = {key: i for i, key in enumerate(self.keys)}
        if unknown := [key for key in keys if key not in where]:
            raise InvalidInput(f"no usable rows of these keys: {name_some(unknown)}")
        return np.array([where[key] for key in keys], np.int64)


def require_resolved(gallery: Gallery, bank: QueryBank, field: str, dtype: Dtype) -> None:
    """Check that scores under L2 tell the gallery's rows apart in float32. Raises CannotMigrate."""
    if gallery.layout.metric == "L2":
        found = resolution(gallery.layout, gallery.vectors, bank.vectors, dtype)
        if found is not None:
            found.require(field)


def only_field(info: CollectionInfo) -> str:
    """Return the vector field if there is exactly one. Raises InvalidInput, CannotMigrate."""
    if state := info.state_of(None):
        return state.field
    if len(info.users_fields) == 1:
        return next(iter(info.users_fields))
    if info.users_fields:
        raise InvalidInput(
            f"{info.name!r} has several vector fields: choose one with --field: "
            f"{', '.join(info.users_fields)}"
        )
    raise CannotMigrate(f"{info.name!r} has no float vector field, and only those are corrected")


def read_gallery(
    store: Store, info: CollectionInfo, field: str | None = None, *, progress: Progress = silent
) -> Gallery:
    """Read all rows with a usable vector. Raises EmptyCollection, InvalidInput, and InvalidParameter if the
    metric cannot be corrected."""
    field = field or only_field(info)
    info.require_field(field)
    state = info.states.get(field)
    hidden = {name for each in info.states.values() for name in each.hidden_fields}
    vector = info.vector_fields[field]
    layout = state.layout if state else Layout(vector.dim, as_metric(vector.metric))
    bias_location = BiasBackend(store, info, state) if state else None
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


def keep_nearest(store: Store, collection: str, state: CollectionState) -> CollectionState:
    """Store the keys of the raw nearest rows of each bank query for every profile with a gate, and of each
    target if the gate uses targets.

    Return the state that names them. Clients read the former keys until that state is written.
    """
    for name, profile in state.profiles.items():
        if profile.gate is None:
            continue
        bank = store.load_bank(profile.bank, checked=False)
        nearest = _nearest(store, collection, state, bank.queries, profile.gate)
        if profile.gate_targets is not None and bank.targets is not None:
            nearest += _nearest(store, collection, state, bank.targets, profile.gate_targets)
        reference = store.save_nearest(profile.bank, collection, nearest)
        state = state.with_profile(profile.model_copy(update={"bank": reference}), name)
    return state


def _nearest(
    store: Store, collection: str, state: CollectionState, bank: QueryBank, k: int
) -> list[list[Key]]:
    """Return the keys of the k raw nearest rows of each vector of `bank`; none for vectors without a
    direction."""
    valid = ~state.layout.invalid(bank.vectors)
    query_vectors = bank.vectors[valid]
    if state.reranking is None:
        query_vectors = state.layout.encode_queries(query_vectors, 0.0, slot=state.profile.slot)
    found = iter(store.nearest(collection, state.searched_field, query_vectors, k))
    return [next(found) if is_sound else [] for is_sound in valid]
