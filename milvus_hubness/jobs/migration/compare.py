"""The comparison of the rows of two collections, with plain or augmented vectors."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import (
    SMALLEST,
    SPACING,
    Floats,
    norms_of,
    unit_directions,
)
from milvus_hubness.correction.codec.base import Columns, Flags, RowCodec
from milvus_hubness.correction.codec.senders import QueryWeights
from milvus_hubness.correction.fitted import Correction, row_biases
from milvus_hubness.correction.kernels.multi_vectors import is_multi
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.jobs.common.progress import Throttle, ceiling_of
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import Rows, Store

LONGEST_VALUE = 60
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Endpoint:
    """One of the two collections of a migration."""

    collection: str
    state: CollectionState | None = None
    """Its state; None for a plain collection."""
    corrections: Mapping[int, Correction] = field(default_factory=dict)
    """What computes the biases, by bias slot; empty for a plain collection."""

    @cached_property
    def codec(self) -> RowCodec | None:
        return self.state.codec if self.state else None

    def decode_rows(self, stored: Batch) -> Batch:
        """Return the rows as users see them, from stored rows of this collection."""
        if self.codec is None:
            return stored

        hidden = set(self.codec.hidden_fields)
        rows = [
            {name: value for name, value in row.items() if name not in hidden}
            for row in stored.rows
        ]
        return Batch(
            stored.keys,
            self.codec.decode_rows(self.codec.columns(stored.vectors, stored.rows)),
            rows,
        )

    def encode_rows(self, rows: Batch) -> Batch:
        """Return stored rows of this collection.

        Raises CannotMigrate for a row that could not be read back exactly.
        """
        if self.codec is None or self.state is None:
            return rows

        if problem := self.state.unreadable(rows.vectors, rows.keys):
            raise CannotMigrate(
                f"row {problem}: correct {self.state.source!r} by enable in place of a copy"
            )

        epoch = self.state.profile.epoch
        biases = row_biases(self.corrections, rows.vectors, rows, self.state, epoch)
        return self._stored(rows, self.codec.encode_rows(rows.vectors, biases))

    def carried(self, origin: Endpoint, stored: Batch) -> Batch:
        """Return rows of this collection from stored rows of the origin; already corrected vectors
        stay the same, unless the two collections have them in different columns.
        """
        rows = origin.decode_rows(stored)
        if origin.codec is None or self.codec is None or self.state is None:
            return self.encode_rows(rows)
        # The copy may have other columns, for more profiles or as its quantiser needs them.
        if not self.codec.layout.stores_like(origin.codec.layout):
            return self.encode_rows(rows)

        columns = self.codec.columns(stored.vectors, stored.rows)
        epoch = self.state.profile.epoch
        biases = row_biases(self.corrections, rows.vectors, rows, self.state, epoch)
        return self._stored(stored, self.codec.set_biases(columns, biases))

    def _stored(self, rows: Batch, columns: Columns) -> Batch:
        vectors = columns.pop(self.state.field) if self.state else rows.vectors
        return Batch(rows.keys, vectors, rows.rows).with_columns(columns)

    def valid(self, stored: Batch) -> Flags:
        """Return (n,) whether the bias that searches read by default is finite, not pending, and
        equal in the vector and in the bias field.
        """
        if self.codec is None or self.state is None:
            return np.ones(len(stored), np.bool_)
        columns = self.codec.columns(stored.vectors, stored.rows)
        return self.codec.valid(columns, [self.state.profile.slot])

    def nearest(self, store: Rows, field: str, vectors: Floats, k: int) -> list[list[Key]]:
        """Return the keys of the k raw nearest rows of vectors (m, d)."""
        if self.codec is not None and self.state is not None:
            vectors = self.codec.encode_queries(vectors, QueryWeights(0.0))
        return store.nearest(self.collection, field, vectors, k)


@dataclass(frozen=True)
class Pair:
    """Two collections, of which `copy` must equal `origin`."""

    store: Store
    origin: Endpoint
    copy: Endpoint
    state: CollectionState
    """The state of the corrected one of the two."""

    def current(self, keys: Sequence[Key], partition: str | None) -> tuple[Batch, Batch]:
        """Return the current rows of these keys in the origin and in the copy.

        This reads the copy first: clients write to the origin
        first, so every row of the copy is in the origin.
        """
        field = self.state.field
        copied = self.store.get(self.copy.collection, keys, field, partition=partition)
        original = self.store.get(self.origin.collection, keys, field, partition=partition)
        return original, copied

    def send(
        self, rows: Batch, partition: str | None, throttle: Throttle, *, are_new: bool = False
    ) -> int:
        """Write rows to the copy as the throttle admits; return the bytes of their vectors in float32.

        are_new: the copy never had their keys.
        """
        write = self.store.insert if are_new else self.store.upsert
        start = 0
        while start < len(rows):
            stop = start + throttle.rows_per_request(len(rows), len(rows))
            request = rows.take(range(len(rows))[start:stop])
            throttle.admit(len(request))

            began = time.perf_counter()
            write(self.copy.collection, request, self.state.field, partition=partition)
            throttle.took(len(request), time.perf_counter() - began)
            start = stop

        return rows.vectors.nbytes

    def pages(self, partition: str | None, rows: int) -> Iterator[tuple[Batch, Batch]]:
        """Yield pages of both collections in key order; the pages of a pair cover the same keys.

        Near the end, later keys are left out, so that the loop ends while clients write.
        """
        names = (self.origin.collection, self.copy.collection)
        # A scan may lag behind; a count, which is strongly consistent, lets the server catch up.
        for name in names:
            self.store.count(name)

        # Set near the end: rows with greater keys are left to the next pass.
        last: Key | None = None
        with ThreadPoolExecutor(2, "reading") as pool:

            def read(after: Key | None) -> list[Future[Batch]]:
                options: dict[str, Any] = {
                    "after": after,
                    "upto": last,
                    "limit": rows,
                    "partition": partition,
                }
                return [
                    pool.submit(self.store.scan, name, self.state.field, **options)
                    for name in names
                ]

            reading = read(None)
            while True:
                pages = [page.result() for page in reading]
                ends = [page.keys[-1] for page in pages if page.keys]
                if not ends:
                    return

                # Both pages reach the end, so the pages from here on have a last key.
                if last is None and all(len(page) < rows for page in pages):
                    ceilings = [
                        ceiling_of(self.store, name, max(ends), partition) for name in names
                    ]
                    last = None if None in ceilings else max(cast("list[Any]", ceilings))

                # The next pages begin after the smaller of the two ends, and are read meanwhile.
                end = min(ends)
                reading = read(end)
                page, copied = (
                    page.take(range(bisect_right(cast("list[Any]", page.keys), end)))
                    for page in pages
                )
                yield page, copied

    def differences(self, page: Batch, copied: Batch) -> dict[Key, str]:
        """Return a word on the defect of each row of the
        copy that does not equal the row of the origin.
        """
        position_of = {key: i for i, key in enumerate(page.keys)}
        copy_position_of = {key: i for i, key in enumerate(copied.keys)}
        defects: dict[Key, str] = {
            key: "missing" for key in page.keys if key not in copy_position_of
        }
        defects |= {
            key: f"not in {self.origin.collection!r}"
            for key in copied.keys
            if key not in position_of
        }
        common = [key for key in page.keys if key in copy_position_of]
        if not common:
            return defects

        page = page.take([position_of[key] for key in common])
        copied = copied.take([copy_position_of[key] for key in common])
        original_rows = self.origin.decode_rows(page)
        copied_rows = self.copy.decode_rows(copied)
        same_vectors = self._recovered(original_rows.vectors, copied_rows.vectors)
        valid = self.copy.valid(copied)

        for i, key in enumerate(common):
            row = original_rows.rows[i]
            copy = copied_rows.rows[i]
            differing = [
                name
                for name in sorted(row.keys() | copy.keys())
                if not _same(row.get(name), copy.get(name))
            ]
            if not same_vectors[i]:
                differing.append(self.state.field)
            if differing:
                defects[key] = f"differs in {', '.join(name or 'the vector' for name in differing)}"
            elif not valid[i]:
                defects[key] = "bias pending, not finite or not the one in its field"

        return defects

    def _recovered(self, vectors: Floats, copied: Floats) -> Flags:
        """Return (n,) whether the vectors are equal bit for bit.

        Under COSINE, vectors that are not unit may differ by one unit in the last place of the
        field's type (float16: or 2⁻²⁴ of their length, near zero). Where the database normalizes
        vectors, only their directions count, up to the units that the store states. Where the copy
        has offsets of kinds, two units of a number and of its offset count as equal.
        """
        if is_multi(vectors) and is_multi(copied):
            recovered: Flags = vectors.lengths == copied.lengths
            candidates = vectors[recovered]
            tokens = self._recovered(candidates.tokens, copied[recovered].tokens)
            recovered[recovered] = candidates.all_of_row(tokens)
            return recovered

        layout = self.state.layout
        exact = (vectors == copied) | (np.isnan(vectors) & np.isnan(copied))
        offsets = layout.kinds if layout.kinds is not None and layout.kinds.offsets else None
        is_rounded = layout.metric == "COSINE" or offsets is not None
        if not is_rounded or exact.all():
            return np.asarray(exact.all(axis=1), np.bool_)

        expected: npt.NDArray[Any] = vectors
        actual: npt.NDArray[Any] = copied
        units_moved = self.store.units_moved()
        if units_moved:
            expected = unit_directions(vectors)
            actual = unit_directions(copied)

        norms = np.ones(len(expected))
        if layout.metric == "COSINE":
            norms = norms_of(np.asarray(expected, np.float32))
        allowed_units = (
            np.full(len(norms), units_moved) if units_moved else np.where(norms != 1, 1, 0)
        )
        spacing = SPACING[self.state.dtype]
        unit = spacing * np.abs(expected)
        smallest_unit = SMALLEST[self.state.dtype] * np.maximum(norms, 1)[:, None]
        tolerance = allowed_units[:, None] * np.maximum(unit, smallest_unit)
        if offsets is not None:
            # The difference to the offset is rounded, and the sum with it. Both happen again in rows
            # that were given another kind.
            largest = np.abs(offsets.offsets_in(layout.dim)).max(axis=0)
            tolerance = tolerance + 2 * (unit + spacing * norms[:, None] * largest)

        with np.errstate(invalid="ignore"):
            is_within = np.abs(actual - expected) <= tolerance
        return np.asarray((exact | is_within).all(axis=1), np.bool_)

    def example(self, key: Key, partition: str | None) -> str:
        """Return a field of a row that differs now, with both values; "" if both collections lack
        the row, or none of its values differ.
        """
        page, copied = self.current([key], partition)
        if not (page.keys and copied.keys) or not self.differences(page, copied):
            return ""

        source_rows = self.origin.decode_rows(page)
        copied_rows = self.copy.decode_rows(copied)
        source_row = source_rows.rows[0]
        copied_row = copied_rows.rows[0]
        names = sorted(source_row.keys() | copied_row.keys())
        pairs = {name: (source_row.get(name), copied_row.get(name)) for name in names}
        differing = {name: pair for name, pair in pairs.items() if not _same(*pair)}
        if not self._recovered(source_rows.vectors, copied_rows.vectors)[0]:
            differing[self.state.field] = (source_rows.vectors[0], copied_rows.vectors[0])
        if not differing:
            return ""

        name, (value, copied_value) = next(iter(differing.items()))
        first, second = _shown(value, copied_value)
        origin = self.origin.collection
        target = self.copy.collection
        return f"in row {key!r}, {_named(name)} is {first} in {origin!r} and {second} in {target!r}"


def _named(field: str) -> str:
    """Return the name of a field for messages: a vector of Qdrant may have none."""
    return repr(field) if field else "the vector"


def _shown(a: Any, b: Any) -> tuple[str, str]:
    """Return two values in a few words: of vectors, the number that differs most."""
    try:
        first = np.asarray(a, np.float32)
        second = np.asarray(b, np.float32)
        is_vector = first.ndim > 0 and first.shape == second.shape
    except (TypeError, ValueError):
        is_vector = False

    if not is_vector:
        return _shortened(repr(a)), _shortened(repr(b))

    largest = np.unravel_index(np.nanargmax(np.abs(first - second)), first.shape)
    number = ", ".join(str(int(i) + 1) for i in largest)
    return f"{first[largest]} at number {number}", f"{second[largest]} there"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def same_rows(a: Batch, b: Batch) -> dict[Key, bool]:
    """Return for every key of `a` or `b` whether both have the same row under it."""
    in_a = {key: i for i, key in enumerate(a.keys)}
    in_b = {key: i for i, key in enumerate(b.keys)}
    return {
        key: key in in_a
        and key in in_b
        and np.array_equal(a.vectors[in_a[key]], b.vectors[in_b[key]], equal_nan=True)
        and _same(a.rows[in_a[key]], b.rows[in_b[key]])
        for key in in_a.keys() | in_b.keys()
    }


def _same(a: Any, b: Any) -> bool:
    """Return whether two field values are equal, where NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
