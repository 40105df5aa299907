"""Where two collections do not hold the same rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from milvus_hubness.halves import SMALLEST, SPACING
from milvus_hubness.jobs.key_pages import ceiling_of
from milvus_hubness.jobs.migration.faces import Face, Flags
from milvus_hubness.layout import Floats
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import Batch, Key, Store


@dataclass(frozen=True)
class Pair:
    """origin: the collection that is right; copy: the one that is to hold the same. state: of whichever of
    the two is corrected."""

    store: Store
    origin: Face
    copy: Face
    state: CollectionState

    def fetch(self, keys: Sequence[Key], partition: str | None) -> tuple[Batch, Batch]:
        """The rows of these keys in both, as they are now. The copy's are read first: clients write to the
        origin first, so that a row seen in the copy has come to the origin, or has left it, before."""
        field = self.state.field
        copied = self.store.get(self.copy.collection, keys, field, partition=partition)
        wanted = self.store.get(self.origin.collection, keys, field, partition=partition)
        return wanted, copied

    def pages(self, partition: str | None, rows: int) -> Iterator[tuple[Batch, Batch]]:
        """Both collections in key order, a page at a time, each pair of pages over the same keys; of rows
        that are written meanwhile those above all that were there near the end are left out."""
        for face in (self.origin, self.copy):
            self.store.count(face.collection)
        last: Key | None = None
        with ThreadPoolExecutor(2, "reading") as pool:

            def ask(after: Key | None) -> list[Future[Batch]]:
                return [
                    pool.submit(
                        self.store.scan,
                        face.collection,
                        self.state.field,
                        after=after,
                        upto=last,
                        limit=rows,
                        partition=partition,
                    )
                    for face in (self.origin, self.copy)
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
                wanted, copied = (_upto(page, min(ends)) for page in pages)
                yield wanted, copied

    def _ceiling(self, key: Key, partition: str | None) -> Key | None:
        """Of both collections."""
        names = (self.origin.collection, self.copy.collection)
        found = [ceiling_of(self.store, name, key, partition) for name in names]
        return None if None in found else max(cast("list[Any]", found))

    def differences(self, wanted: Batch, copied: Batch) -> dict[Key, str]:
        """What is wrong with the copy of each row that is not right."""
        found: dict[Key, str] = {}
        theirs = {key: i for i, key in enumerate(copied.keys)}
        ours = {key: i for i, key in enumerate(wanted.keys)}
        found |= {key: "missing" for key in wanted.keys if key not in theirs}
        found |= {key: f"not in {self.origin.collection!r}" for key in copied.keys if key not in ours}
        common = [key for key in wanted.keys if key in theirs]
        if not common:
            return found
        wanted = _picked(wanted, [ours[key] for key in common])
        copied = _picked(copied, [theirs[key] for key in common])
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
        """(n,) whether vectors are the same: bit for bit, or under COSINE, where one is not unit, within one
        unit in the last place of the field's type (float16: or 2⁻²⁴ of its length, near zero). Where the
        database makes vectors unit, it may have done so to either: within as many as it says."""
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
    """Of every key of either, whether both hold the very same row under it, or neither does."""
    ours, theirs = ({key: i for i, key in enumerate(batch.keys)} for batch in (a, b))
    return {
        key: key in ours
        and key in theirs
        and np.array_equal(a.vectors[ours[key]], b.vectors[theirs[key]], equal_nan=True)
        and _same(a.rows[ours[key]], b.rows[theirs[key]])
        for key in ours.keys() | theirs.keys()
    }


def _upto(batch: Batch, key: Key) -> Batch:
    count = bisect_right(cast("list[Any]", batch.keys), key)
    return replace(batch, keys=batch.keys[:count], vectors=batch.vectors[:count], rows=batch.rows[:count])


def _picked(batch: Batch, places: list[int]) -> Batch:
    if places == list(range(len(batch))):
        return batch
    return Batch([batch.keys[i] for i in places], batch.vectors[places], [batch.rows[i] for i in places])


def _same(a: Any, b: Any) -> bool:
    """Equality of field values in which NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
