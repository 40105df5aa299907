"""How many rows of a collection its bank was not fitted for: rows that are new or changed since.

When a bank is fitted, the number of rows is noted in the ledger, with a random sample of their keys
and two marks of each vector. Later, the number of rows and the sampled rows themselves say how many
rows are unfitted. So nothing is counted as rows are written, and it does not matter who writes
them: a row that is replaced by itself, or deleted and inserted again, is still the row that was
fitted. Only a row whose key or vector is another one is unfitted.

A note belongs to one fit, which `Profile.fitted_at` names. A refresh writes the note of its own fit
before it announces its biases, and the switch to them is what makes it count. So a killed refresh
changes nothing, and no process that was paused can write over the note of another fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from math import sqrt
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.bounds import Count, FrozenModel, Moment, Text
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.kernels.rows import pooled
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.lease_records import now, read_ledger
from milvus_hubness.jobs.common.progress import key_pages
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, Record

FITS = "fits"
"""The first part of the group of a fit's records in the ledger."""

SAMPLED_ROWS = 2_048
"""Rows that stand for all: the share of changed ones among them is off by about a point."""

STANDARD_ERRORS = 2.0
"""Standard errors by which an estimated share is lowered, so that chance demands no refit."""

LARGEST_RECORD = 50_000
"""Bytes of the rows of one record. A row whose key alone takes more is not sampled."""

SAME = 1e-3
"""Part of its length, in one dimension of many, by which a vector may move and stay the same: encoders
that compute in half precision, and databases that normalise, repeat a vector to less than this.
"""

Marks = npt.NDArray[np.float64]
"""(n, 2) numbers of n vectors, which show whether a later vector is the same."""


class FittedRow(NamedTuple):
    """A sampled row, as it was when the bank was fitted."""

    partition: str | None
    key: Key
    marks: tuple[float, float]


class DrawnKeys(NamedTuple):
    """Keys that were drawn at random from those of all rows."""

    rows: int
    """The number of all rows."""
    by_partition: Mapping[str | None, Sequence[Key]]
    """About SAMPLED_ROWS keys; all if there are few."""


class _Body(FrozenModel):
    """A record of a fit. Each has the facts of the whole note, and some of the sampled rows."""

    at: Moment
    rows: Count
    sampled: Count
    some: tuple[FittedRow, ...] = ()


class _Due(FrozenModel):
    """The record that a new bank is due."""

    message: Text


@dataclass(frozen=True)
class FitNote:
    """What is noted of a fit."""

    at: Moment
    """When it was noted: for a collection that was created empty, later than the fit."""
    rows: int
    """The number of rows."""
    sample: tuple[FittedRow, ...]
    """Some of them, at random; all if there are few."""


class Fit:
    """The last fit of a profile's bank, and its note in the ledger.

    state: with the profile as the active one.
    """

    def __init__(self, store: Store, info: CollectionInfo, state: CollectionState) -> None:
        self._store = store
        self._info = info
        self._state = state
        self.group = _group_of(state)
        """The group of its records in the ledger."""

    @cached_property
    def _records(self) -> list[Record]:
        return self._store.records(LEDGER, self.group)

    @property
    def _due_key(self) -> str:
        return f"{self.group}/due"

    @cached_property
    def note(self) -> FitNote | None:
        """The note; None without a whole one. Raises StateError for a broken record."""
        bodies = [
            read_ledger(_Body.model_validate_json, record)
            for record in self._records
            if record.key != self._due_key
        ]
        if not bodies:
            return None

        # Two processes may have noted the same fit: the records of one of them count.
        at = max(body.at for body in bodies)
        bodies = [body for body in bodies if body.at == at]
        sample = tuple(row for body in bodies for row in body.some)
        first = bodies[0]
        is_whole = len(sample) == first.sampled and 0 < first.sampled <= first.rows
        return FitNote(first.at, first.rows, sample) if is_whole else None

    @cached_property
    def due(self) -> str:
        """Why a new bank is due; empty if none is known to be."""
        record = next((record for record in self._records if record.key == self._due_key), None)
        return read_ledger(_Due.model_validate_json, record).message if record else ""

    def set_due(self, message: str) -> None:
        """Note why a new bank is due, for `status`; an empty message withdraws that."""
        if message and message != self.due:
            body = _Due(message=message).model_dump_json()
            self._store.put_records(LEDGER, [Record(self._due_key, self.group, body)])
        elif self.due and not message:
            self._store.drop_records(LEDGER, self.group, [self._due_key])

    def write(self, rows: int, sample: Sequence[FittedRow]) -> None:
        """Write the note. rows: the number of all rows."""
        sample = [row for row in sample if _size(row) <= LARGEST_RECORD]
        if not sample:
            return

        facts = {
            "at": now().isoformat(),
            "rows": max(rows, len(sample)),
            "sampled": len(sample),
        }
        records = [
            Record(f"{self.group}/{number}", self.group, json.dumps({**facts, "some": some}))
            for number, some in enumerate(_in_records(sample))
        ]
        self._store.put_records(LEDGER, records)

    def write_now(self, drawn: DrawnKeys | None = None) -> None:
        """Write the note with the present rows, of which a sample is read.

        drawn: the sample; by default, all keys are read and some of them drawn.
        """
        drawn = drawn or _drawn_keys(self._store, self._info)
        self.write(drawn.rows, _drawn_rows(self._store, self._info, self._state, drawn))

    def is_over(self, collection: str) -> bool:
        """Whether the bank was fitted again since. collection: the one that has the biases now."""
        states = self._store.info(collection, counted=False).states
        state = states.get(self._state.field)
        profile = state.profiles.get(self._state.active) if state else None
        return profile is None or profile.fitted_at != self._state.profile.fitted_at

    def unfitted_share(self, note: FitNote, rows: int) -> float:
        """Return the share of the rows that are new or changed since the fit, from 0 to 1.

        rows: the present number of rows. It is exact where all fitted rows were sampled, or all
        sampled ones are still there. Else it is what the share is at least, but for chance.
        """
        if not rows:
            return 0.0

        size = len(note.sample)
        there = self._still_there(note.sample) / size
        is_complete = size >= note.rows
        error = 0.0 if is_complete else sqrt(there * (1 - there) / size)
        fitted = note.rows * min(1.0, there + STANDARD_ERRORS * error)
        return max(0.0, (rows - fitted) / rows)

    def _still_there(self, sample: Sequence[FittedRow]) -> int:
        """Return the number of these rows that are there with the same vector."""
        store = self._store
        partitions = {*self._info.partitions}
        count = 0
        for partition, rows in groupby(_by_partition(sample), key=attrgetter("partition")):
            # The whole collection is read where it had no partitions, or has none left. Else a
            # partition may be gone, with its rows.
            whole = partition is None or partitions == {None}
            if not whole and partition not in partitions:
                continue

            marks_of = {row.key: row.marks for row in rows}
            keys = list(marks_of)
            size = store.chunk_rows(self._info)
            for start in range(0, len(keys), size):
                some = keys[start : start + size]
                place = None if whole else partition
                there, vectors = _vectors(store, self._info, self._state, some, place)
                former = np.array([marks_of[key] for key in there]).reshape(-1, 2)
                count += int(_are_same(vectors, former).sum())
        return count


def fit_of(store: Store, info: CollectionInfo, state: CollectionState, profile: str) -> Fit:
    """Return the fit of this profile."""
    return Fit(store, info, state.model_copy(update={"active": profile}))


def note_fits(
    store: Store, info: CollectionInfo, state: CollectionState, drawn: DrawnKeys | None = None
) -> None:
    """Write the notes that the profiles of a field lack. drawn: as for `Fit.write_now`."""
    for name in state.profiles:
        fit = fit_of(store, info, state, name)
        if fit.note is None:
            fit.write_now(drawn)


def forget_fits(
    store: Store, states: Sequence[CollectionState], others: Sequence[CollectionState] = ()
) -> None:
    """Delete the notes of these states that no other state needs."""
    needed = _groups_of(others)
    for group in _groups_of(states) - needed:
        store.drop_records(LEDGER, group)


def key_count(store: Store, info: CollectionInfo, expected: int) -> int:
    """Return the number of rows with different keys, each partition for itself.

    A database counts a row twice that was inserted twice.
    """
    pages = (
        page
        for partition in info.partitions
        for page in key_pages(store, info.name, partition, rows=expected)
    )
    return sum(len({*page}) for page in pages)


def fitted_rows(
    partitions: Sequence[str | None], keys: Sequence[Key], vectors: Floats
) -> list[FittedRow]:
    """Return at most SAMPLED_ROWS of these rows, at random. vectors: (n, d), as users see them."""
    drawn = np.random.default_rng(0).permutation(len(keys))[:SAMPLED_ROWS]
    drawn.sort()
    marks = _marks(vectors[drawn])
    return [
        FittedRow(partitions[row], keys[row], (float(f"{first:.8g}"), float(f"{second:.8g}")))
        for row, (first, second) in zip(drawn.tolist(), marks.tolist(), strict=True)
    ]


def _group_of(state: CollectionState) -> str:
    """Return the group of the records of the active profile's fit.

    A copy that a refresh makes for other reasons than its bank has the same fit.
    """
    profile = state.profile
    subject = [
        profile.bank.collection,
        state.field,
        state.active,
        profile.fitted_at.isoformat(),
    ]
    digest = hashlib.sha256(json.dumps(subject).encode()).hexdigest()
    return f"{FITS}/{digest[:32]}"


def _groups_of(states: Sequence[CollectionState]) -> set[str]:
    return {
        _group_of(state.model_copy(update={"active": name}))
        for state in states
        for name in state.profiles
    }


def _size(row: FittedRow) -> int:
    """Return the bytes of a row in a record."""
    return len(json.dumps(row))


def _in_records(sample: Sequence[FittedRow]) -> Iterator[list[FittedRow]]:
    """Yield the rows for each record."""
    some: list[FittedRow] = []
    size = 0
    for row in sample:
        added = _size(row)
        if some and size + added > LARGEST_RECORD:
            yield some
            some = []
            size = 0
        some.append(row)
        # With the comma and the blank behind it.
        size += added + 2
    yield some


def _by_partition(sample: Sequence[FittedRow]) -> list[FittedRow]:
    return sorted(sample, key=lambda row: row.partition or "")


def _drawn_keys(store: Store, info: CollectionInfo) -> DrawnKeys:
    """Read all keys, and draw some of them."""
    rng = np.random.default_rng(0)
    expected = store.count(info.name)
    share = SAMPLED_ROWS / max(1, expected)
    rows = 0
    by_partition: dict[str | None, list[Key]] = {}
    for partition in info.partitions:
        drawn: list[Key] = []
        for page in key_pages(store, info.name, partition, rows=expected):
            rows += len({*page})
            draws = rng.random(len(page)).tolist()
            drawn += [key for key, draw in zip(page, draws, strict=True) if draw < share]
        by_partition[partition] = drawn
    return DrawnKeys(rows, by_partition)


def _drawn_rows(
    store: Store, info: CollectionInfo, state: CollectionState, drawn: DrawnKeys
) -> list[FittedRow]:
    """Return those of the drawn rows that have a valid vector."""
    size = store.chunk_rows(info)
    partitions: list[str | None] = []
    keys: list[Key] = []
    vectors: list[Floats] = []
    for partition, drawn_keys in drawn.by_partition.items():
        for start in range(0, len(drawn_keys), size):
            some = drawn_keys[start : start + size]
            there, read = _vectors(store, info, state, some, partition)
            valid = np.flatnonzero(~state.layout.invalid(read))
            keys += [there[row] for row in valid.tolist()]
            partitions += [partition] * len(valid)
            vectors.append(read[valid])
    return fitted_rows(partitions, keys, state.layout.stacked(vectors))


def _vectors(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    keys: Sequence[Key],
    partition: str | None,
) -> tuple[list[Key], Floats]:
    """Return the keys of the rows that exist, and their vectors (n, d) as users see them."""
    batch = store.get(info.name, keys, state.field, partition=partition)
    vectors = state.codec.decode_rows(state.codec.columns(batch.vectors, batch.rows))
    return list(batch.keys), state.layout.stacked([vectors])


@lru_cache(maxsize=16)
def _directions(dim: int) -> npt.NDArray[np.float64]:
    """Return two directions (d, 2) of length about 1, the same with every version of NumPy."""
    drawn = np.frombuffer(hashlib.shake_256(b"marks of fitted rows").digest(8 * dim), "<u4")
    uniform = drawn.astype(np.float64).reshape(dim, 2) / 2**32 - 0.5
    return uniform * sqrt(12 / dim)


def _marks(vectors: Floats) -> Marks:
    """Return the marks of vectors (n, d)."""
    numbers = pooled(vectors)
    # Sums of numbers near the largest float32 are infinite only in float32.
    marks: Marks = numbers.astype(np.float64) @ _directions(numbers.shape[1])
    return marks


def _are_same(vectors: Floats, former: Marks) -> npt.NDArray[np.bool_]:
    """Return which vectors (n, d) have these marks (n, 2)."""
    numbers = pooled(vectors)
    lengths = np.linalg.norm(numbers.astype(np.float64), axis=1)
    allowed = SAME * lengths / sqrt(numbers.shape[1])
    with np.errstate(invalid="ignore"):
        same = np.abs(_marks(vectors) - former) <= allowed[:, None]
    result: npt.NDArray[np.bool_] = same.all(axis=1)
    return result
