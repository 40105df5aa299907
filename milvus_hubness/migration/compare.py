"""The comparison of the rows of two collections, with plain or augmented vectors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.codec.arrays import SMALLEST, SPACING, Floats
from milvus_hubness.codec.base import Columns, Flags, RowCodec
from milvus_hubness.correction import Correction, row_biases
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.migration.survey import ceiling_of
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.protocols import Rows, Store


@dataclass(frozen=True)
class Endpoint:
    """One of the two collections of a migration, and the form of its rows.

    state, corrections: the collection state and the corrections by bias slot; None and empty if the rows are
    as users wrote them.
    """

    collection: str
    state: CollectionState | None = None
    corrections: Mapping[int, Correction] = field(default_factory=dict)

    @cached_property
    def codec(self) -> RowCodec | None:
        return self.state.codec if self.state else None

    def decode_rows(self, stored: Batch) -> Batch:
        """Return the rows as users see them, from stored rows of this collection."""
        if self.codec is None:
            return stored
        hidden = set(self.codec.hidden_fields)
        rows = [{name: value for name, value in row.items() if name not in hidden} for row in stored.rows]
        return Batch(stored.keys, self.codec.decode_rows(self.codec.columns(stored.vectors, stored.rows)), rows)

    def encode_rows(self, rows: Batch) -> Batch:
        """Return stored rows of this collection, from rows as users see them.

        Raises CannotMigrate for a row that could not be read back bit for bit.
        """
        if self.codec is None or self.state is None:
            return rows
        if problem := self.state.unreadable(rows.vectors, rows.keys):
            raise CannotMigrate(f"row {problem}: correct {self.state.source!r} by enable in place of a copy")
        biases = row_biases(self.corrections, rows.vectors, self.state, self.state.profile.epoch)
        return self._stored(rows, self.codec.encode_rows(rows.vectors, biases))

    def carried(self, origin: Endpoint, stored: Batch) -> Batch:
        """Return rows of this collection from stored rows of the origin. Vectors of another corrected
        collection stay equal bit for bit."""
        rows = origin.decode_rows(stored)
        if origin.codec is None or self.codec is None or self.state is None:
            return self.encode_rows(rows)
        columns = self.codec.columns(stored.vectors, stored.rows)
        biases = row_biases(self.corrections, rows.vectors, self.state, self.state.profile.epoch)
        return self._stored(stored, self.codec.set_biases(columns, biases))

    def _stored(self, rows: Batch, columns: Columns) -> Batch:
        vectors = columns.pop(self.state.field) if self.state else rows.vectors
        return Batch(rows.keys, vectors, rows.rows).with_columns(columns)

    def valid(self, stored: Batch) -> Flags:
        """Return (n,) whether the bias is finite, not pending, and equal in the vector and in the bias field.
        That field shows the active bias or, in rows that an unfinished refresh has written, the new bias."""
        if self.codec is None or self.state is None:
            return np.ones(len(stored), np.bool_)
        slots = {self.state.profile.slot, self.state.shown_slot}
        return self.codec.valid(self.codec.columns(stored.vectors, stored.rows), list(slots))

    def nearest(self, store: Rows, field: str, vectors: Floats, k: int) -> list[list[Key]]:
        """Return the keys of the k raw nearest rows of vectors (m, d)."""
        if self.codec is not None and self.state is not None:
            vectors = self.codec.encode_query(vectors, 0.0, slot=self.state.profile.slot)
        return store.nearest(self.collection, field, vectors, k)


@dataclass(frozen=True)
class Pair:
    """Two collections of which one copies the other.

    origin: the collection that holds the correct rows. copy: the collection that must equal it. state: the
    state of the corrected one of the two.
    """

    store: Store
    origin: Endpoint
    copy: Endpoint
    state: CollectionState

    def fetch(self, keys: Sequence[Key], partition: str | None) -> tuple[Batch, Batch]:
        """Return the current rows of these keys in the origin and in the copy. This reads the copy first:
        clients write to the origin first, so a row that appears in the copy was written to the origin, and
        perhaps deleted from it, before."""
        field = self.state.field
        copied = self.store.get(self.copy.collection, keys, field, partition=partition)
        wanted = self.store.get(self.origin.collection, keys, field, partition=partition)
        return wanted, copied

    def pages(self, partition: str | None, rows: int) -> Iterator[tuple[Batch, Batch]]:
        """Yield pages of both collections in key order; both pages of a pair cover the same keys. Near the end, rows
        with keys above all keys of that moment are left out, so that the loop ends while clients write."""
        for endpoint in (self.origin, self.copy):
            self.store.count(endpoint.collection)
        last: Key | None = None
        with ThreadPoolExecutor(2, "reading") as pool:

            def ask(after: Key | None) -> list[Future[Batch]]:
                return [
                    pool.submit(
                        self.store.scan,
                        endpoint.collection,
                        self.state.field,
                        after=after,
                        upto=last,
                        limit=rows,
                        partition=partition,
                    )
                    for endpoint in (self.origin, self.copy)
                ]

            asked = ask(None)
            while True:
                pages = [each.result() for each in asked]
                ends = [page.keys[-1] for page in pages if page.keys]
                if not ends:
                    return
                if last is None and all(len(page) < rows for page in pages):
                    last = self._ceiling(max(ends), partition)
                asked = ask(min(ends))
                wanted, copied = (
                    page.take(range(bisect_right(cast("list[Any]", page.keys), min(ends)))) for page in pages
                )
                yield wanted, copied

    def _ceiling(self, key: Key, partition: str | None) -> Key | None:
        """Return the ceiling of the keys of both collections, as `ceiling_of` does."""
        names = (self.origin.collection, self.copy.collection)
        found = [ceiling_of(self.store, name, key, partition) for name in names]
        return None if None in found else max(cast("list[Any]", found))

    def differences(self, wanted: Batch, copied: Batch) -> dict[Key, str]:
        """Return, for each row that is wrong in the copy, what is wrong."""
        found: dict[Key, str] = {}
        theirs = {key: i for i, key in enumerate(copied.keys)}
        ours = {key: i for i, key in enumerate(wanted.keys)}
        found |= {key: "missing" for key in wanted.keys if key not in theirs}
        found |= {key: f"not in {self.origin.collection!r}" for key in copied.keys if key not in ours}
        common = [key for key in wanted.keys if key in theirs]
        if not common:
            return found
        wanted = wanted.take([ours[key] for key in common])
        copied = copied.take([theirs[key] for key in common])
        before, after = self.origin.decode_rows(wanted), self.copy.decode_rows(copied)
        vectors = self._recovered(before.vectors, after.vectors)
        valid = self.copy.valid(copied)
        for i, key in enumerate(common):
            ours_row, their_row = before.rows[i], after.rows[i]
            names = sorted(ours_row.keys() | their_row.keys())
            differing = [name for name in names if not _same(ours_row.get(name), their_row.get(name))]
            if not vectors[i]:
                differing.append(self.state.field)
            if differing:
                found[key] = f"differs in {', '.join(differing)}"
            elif not valid[i]:
                found[key] = "bias pending, not finite or not the one in its field"
        return found

    def _recovered(self, wanted: Floats, found: Floats) -> Flags:
        """Return (n,) whether the vectors are equal bit for bit. Under COSINE, vectors that are not unit may
        differ by one unit in the last place of the field's type (float16: or 2⁻²⁴ of their length, near
        zero). If the database normalizes vectors, it may have done so in either collection: they may differ
        by the number of units that the store states."""
        exact = ((wanted == found) | (np.isnan(wanted) & np.isnan(found))).all(axis=1)
        if self.state.metric != "COSINE" or exact.all():
            return np.asarray(exact, np.bool_)
        norms = self.state.layout.norms(wanted)
        moved = self.store.units_moved()
        units = np.full(len(norms), moved) if moved else np.where(norms != 1, 1, 0)
        unit = SPACING[self.state.dtype] * np.abs(wanted)
        floor = SMALLEST[self.state.dtype] * np.maximum(norms, 1)[:, None]
        near = (np.abs(found - wanted) <= units[:, None] * np.maximum(unit, floor)).all(axis=1)
        return np.asarray(exact | near, np.bool_)


def same_rows(a: Batch, b: Batch) -> dict[Key, bool]:
    """Return for every key of `a` or `b` whether both have the same row under it."""
    ours, theirs = ({key: i for i, key in enumerate(batch.keys)} for batch in (a, b))
    return {
        key: key in ours
        and key in theirs
        and np.array_equal(a.vectors[ours[key]], b.vectors[theirs[key]], equal_nan=True)
        and _same(a.rows[ours[key]], b.rows[theirs[key]])
        for key in ours.keys() | theirs.keys()
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
