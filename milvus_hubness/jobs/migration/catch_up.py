"""The comparison passes over a migration's two
collections: they carry rows over, and verify the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np

from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import SPACING
from milvus_hubness.correction.codec.base import Flags
from milvus_hubness.correction.fitted import BIAS_TOLERANCE, Correction
from milvus_hubness.errors import NotCaughtUp, StateError, VerificationFailed, name_some
from milvus_hubness.jobs.common.corrections import NONE_READ, Banks, load_corrections
from milvus_hubness.jobs.common.fits import SAMPLED_ROWS
from milvus_hubness.jobs.common.progress import Throttle, key_pages
from milvus_hubness.jobs.migration.compare import Endpoint, Pair, same_rows
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.migration.presence import require_collections
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import Collections, Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo

RECHECK_DELAYS = (0.0, 0.2, 1.0)
"""Seconds before the further reads of a row that differs: a client may be between its two writes.
"""

REPAIR_ROUNDS = 20
"""How often rows that change meanwhile are carried over again."""

ROWS_PER_WARMING_SEARCH = 25
MOST_WARMING_SEARCHES = 100
"""Queries of the bank that are searched before the cutover: 4 for 100 rows, all 100 for 2,500 and
more. They bring into memory what a search reads, which is little of a small collection.
"""


def pair_of(
    store: Store,
    migration: Migration,
    *,
    back: bool = False,
    banks: Banks = NONE_READ,
) -> Pair:
    """Return the source and the copy, whose biases come from the saved bank.

    back: the copy is the origin. banks: those that the caller has read. Raises as `load_corrections` does.
    """
    state = migration.corrected()

    former_state = migration.corrected_source
    former: dict[int, Correction] = {}
    # Its biases are computed only for rows that a rollback carries back, by a bank that may have been
    # edited by hand since.
    if former_state is not None and back:
        former = load_corrections(store, former_state, unchecked=former_state.profiles)

    source = Endpoint(migration.source_now, former_state, former)
    copy = Endpoint(migration.target, state, load_corrections(store, state, banks))
    return Pair(store, copy, source, state) if back else Pair(store, source, copy, state)


VERIFIED_ROWS = 256
"""Number of rows whose biases and searches a verification checks."""

DEFECTS_NAMED = 3
"""Most rows that a message names."""


class Sample:
    """Keys drawn at random from all keys that are added, each with the same probability.

    Every key gets a random number, and those with the smallest numbers are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rng = np.random.default_rng()
        self._drawn: list[tuple[float, str | None, Key]] = []

    def add(self, partition: str | None, keys: Sequence[Key]) -> None:
        """Let these keys take part in the draw."""
        numbers = self._rng.random(len(keys))
        limit = self._drawn[-1][0] if len(self._drawn) == self._size else np.inf
        drawn = [
            (float(numbers[i]), partition, keys[i])
            for i in np.flatnonzero(numbers < limit).tolist()
        ]
        self._drawn = sorted([*self._drawn, *drawn], key=lambda draw: draw[0])[: self._size]

    def by_partition(self, count: int | None = None) -> dict[str | None, list[Key]]:
        """Return so many of the drawn keys, all by default, for each partition."""
        keys: dict[str | None, list[Key]] = {}
        for _, partition, key in self._drawn[:count]:
            keys.setdefault(partition, []).append(key)
        return keys

    def first(self, count: int) -> set[Key]:
        """Return so many of the drawn keys, each with the same probability."""
        return {key for _, _, key in self._drawn[:count]}


@dataclass(frozen=True)
class Pass:
    """The result of one comparison."""

    rows: int
    """Number of compared rows of the origin."""
    fields: int
    """Number of compared values of these rows."""
    differing: int
    """Number of rows that differed when read again, and were carried over."""
    sample: Sample
    """Keys drawn at random from those of all rows: for the verification, and for the note of a fit."""
    defects: tuple[str, ...]
    """Some of the differing rows, in words."""
    example: str = ""
    """A field of the first of them, with both values; may be empty."""


def run_pass(
    pair: Pair,
    partitions: Sequence[str | None],
    migration: Migration,
    options: MigrationOptions,
    *,
    number: int,
) -> Pass:
    """Compare all rows once, and carry over those that differ.

    number: from 1; 0 writes nothing. Raises NotCaughtUp for a row that changes faster than it can
    be carried over, and, if number is 0, VerificationFailed, which names rows.
    """
    throttle = options.throttle
    # A row that a client is writing may differ for a moment; without writers, none is.
    delays = RECHECK_DELAYS[:1] if number and options.no_writers else RECHECK_DELAYS

    rows = 0
    fields = 0
    differing = 0
    sample = Sample(SAMPLED_ROWS)
    defects: list[str] = []
    example = ""
    page_rows = pair.store.chunk_rows(pair.store.info(pair.origin.collection))
    for partition in partitions:
        for page, copied in pair.pages(partition, page_rows):
            throttle.admit(0)
            suspects = list(pair.differences(page, copied))
            if broken := _still_differing(pair, suspects, partition, delays):
                named = sorted(broken.items(), key=str)
                rows_named = [f"{key!r} ({defect})" for key, defect in named]
                example = example or pair.example(named[0][0], partition)
                if not number:
                    raise _not_equal(pair, rows_named, example)

                _repair_rows(pair, list(broken), partition, throttle)
                differing += len(broken)
                defects += rows_named[: DEFECTS_NAMED - len(defects)]

            sample.add(partition, page.keys)
            rows += len(page)
            fields += sum(len(row) + 1 for row in page.rows)
            facts = {
                "pass": number,
                "rows": rows,
                "rows_total": migration.rows,
                "differing": differing,
                "repaired": differing,
            }
            options.events.report("catching-up", **facts)

    return Pass(rows, fields, differing, sample, tuple(defects), example)


def _not_equal(pair: Pair, rows_named: Sequence[str], example: str) -> VerificationFailed:
    """Return the error of a copy in which these rows differ."""
    return VerificationFailed(
        f"{pair.copy.collection!r} does not hold the rows of {pair.origin.collection!r}: rows "
        f"{name_some(rows_named)}{example and f'; {example}'}: run the migration again, which "
        "carries them over; after the cutover, the application may have changed them rightly"
    )


def _still_differing(
    pair: Pair, suspects: list[Key], partition: str | None, delays: Sequence[float]
) -> dict[Key, str]:
    """Return those of these rows that differ each time they are read again, and their defects."""
    broken: dict[Key, str] = {}
    for seconds in delays:
        if not suspects:
            break

        time.sleep(seconds)
        broken = pair.differences(*pair.current(suspects, partition))
        suspects = list(broken)

    return broken


def _repair_rows(pair: Pair, keys: list[Key], partition: str | None, throttle: Throttle) -> None:
    """Carry these rows over until the copy holds the rows of the origin.

    A client writes to the origin first, and this may undo its write to the copy. The next read of
    the origin then shows it; a later write to the copy stays. Raises NotCaughtUp.
    """
    store = pair.store
    field = pair.state.field
    for _ in range(REPAIR_ROUNDS):
        rows = store.get(pair.origin.collection, keys, field, partition=partition)
        if len(rows):
            pair.send(pair.copy.carried(pair.origin, rows), partition, throttle)
        if gone := sorted(set(keys) - set(rows.keys)):
            store.delete(pair.copy.collection, gone)

        now = store.get(pair.origin.collection, keys, field, partition=partition)
        keys = [key for key, is_same in same_rows(rows, now).items() if not is_same]
        if not keys:
            return

    raise NotCaughtUp(
        f"rows {name_some(keys)} of {pair.origin.collection!r} change faster than they can be "
        "carried over"
    )


def warm(store: Store, migration: Migration) -> None:
    """Load the copy and search it, so that its index is in memory."""
    state = migration.corrected()
    store.load(migration.target)
    searches = min(MOST_WARMING_SEARCHES, ceil(migration.rows / ROWS_PER_WARMING_SEARCH))
    queries = store.load_bank(state.profile.bank).queries.vectors[:searches]
    valid = queries[~state.layout.invalid(queries)]
    if len(valid):
        vectors = state.codec.encode_queries(valid, state.query_weights(state.profile))
        store.nearest(migration.target, state.field, vectors, 10)


COUNTS = 3
"""How often the rows are counted before they count as doubled."""

TOP = 10
"""A row finds itself if it is among so many best."""

SEARCHED = 100
"""Number of requested results: a graph index then
searches widely; the plan measures narrow searches.
"""

ROWS_PER_SEARCH = 10
FEWEST_SEARCHED_ROWS = 10
"""A tenth of the rows are searched for by their own vectors, at least 10 and at most VERIFIED_ROWS.

What matters differs with the size. Databases scan a collection of some hundred rows, so a fault there,
such as vectors in other columns or a partition that is not loaded, hides most rows; a graph over many
rows may lack a few. The search for 10 rows reports a copy that hides half of the rows with a
probability of 0.99, and one that hides a quarter with 0.76; that for 100 rows one that hides 0.15 with
0.90, and that for 256 with 0.99 (binomial). A tenth passes, as two graphs may differ by that.
"""

FEWER_ALLOWED = 0.1
"""The share of rows by which the copy may find fewer than the source, and one row in any case."""


@dataclass(frozen=True)
class Verification:
    """The numbers of a verification."""

    rows: int
    """Number of rows that were compared one by one."""
    fields: int
    """Number of their values."""
    biases: int
    """Number of biases that were computed again."""
    searched: int
    """Number of rows that were searched for by their own vectors, without those that rows written meanwhile
    pushed out of the ten best or let in.
    """
    in_source: int
    """How many of these are among the ten best in the source."""
    in_copy: int
    """How many of these are among the ten best in the copy."""


def expect_chunks(ledger: Ledger, migration: Migration) -> None:
    """Raise StateError if the ledger has lost the chunks of a migration: an empty source has none."""
    if migration.chunks and not ledger.chunks(migration):
        raise StateError(
            f"the ledger has lost the chunks of the migration to {migration.target!r}: start "
            "again with --restart"
        )


def verified(pair: Pair, partitions: Sequence[str | None], equal: Pass) -> Verification:
    """Check, after the comparison `equal`, that no row is doubled, that
    sampled biases are those that the bank gives now, and that searches find
    rows in the copy as in the source. Raises VerificationFailed, StateError.
    """
    _check_counts(pair, partitions, equal.rows)

    biases = 0
    searched = 0
    in_source = 0
    in_copy = 0
    to_search = equal.sample.first(searched_rows(equal.rows))
    for copied in _samples(pair, equal.sample):
        _check_biases(pair, copied)
        biases += len(copied)

        vectors = pair.copy.decode_rows(copied).vectors
        is_drawn = np.array([key in to_search for key in copied.keys], np.bool_)
        valid = np.flatnonzero(is_drawn & ~pair.state.layout.invalid(vectors))
        if not len(valid):
            continue

        queries = vectors[valid]
        in_origin, in_its_copy = (
            partial(side.nearest, pair.store, pair.state.field, queries)
            for side in (pair.origin, pair.copy)
        )
        keys = [copied.keys[i] for i in valid]
        steady, by_origin, by_copy = find_themselves(keys, in_origin, in_its_copy)
        searched += int(steady.sum())
        in_source += int((steady & by_origin).sum())
        in_copy += int((steady & by_copy).sum())

    # An index is approximate, so the copy may miss a few rows that the source finds.
    if misses_too_many(searched, in_source, in_copy):
        raise VerificationFailed(
            f"searches in {pair.copy.collection!r} miss rows: of {searched} rows searched for by "
            f"their own vectors, {in_source} are found in {pair.origin.collection!r} and "
            f"{in_copy} in the copy: wait until the copy's index is built, or give the plan a "
            "wider index, and run the command again"
        )

    return Verification(equal.rows, equal.fields, biases, searched, in_source, in_copy)


def validate_index(store: Collections, migration: Migration, source: CollectionInfo) -> None:
    """Check the index of a copy that has not taken over. Raises VerificationFailed."""
    if migration.phase in {"switched", "rolling back", "rolled back"}:
        return

    planned = migration.indexed(source).vector_fields[migration.field]
    actual = store.info(migration.target, counted=False).vector_fields[migration.field]
    # Milvus Lite does not return index parameters.
    differing = {
        name: value
        for name, value in planned.index_params.items()
        if actual.index_params and str(actual.index_params.get(name)) != str(value)
    }
    if actual.index_type != planned.index_type or differing:
        present = f"{actual.index_type or 'no index'} {actual.index_params or ''}".rstrip()
        expected = f"{planned.index_type} {planned.index_params or ''}".rstrip()
        raise VerificationFailed(
            f"{field_words(migration.field)} of {migration.target!r} has {present}, planned was "
            f"{expected}: drop that index, create the planned one and load the collection"
        )


def _check_counts(pair: Pair, partitions: Sequence[str | None], rows: int) -> None:
    """Check that no row is doubled, by several counts:
    clients write meanwhile, and deletes may balance inserts.
    """
    store = pair.store
    copy = pair.copy.collection
    for _ in range(COUNTS):
        counted = store.count(copy)
        if counted == rows:
            return

        # Clients have written since the comparison: the keys are counted as they are now.
        keys = sum(
            len(page)
            for partition in partitions
            for page in key_pages(store, copy, partition, rows=counted)
        )
        if counted <= keys or store.count(copy) != counted:
            return

    raise VerificationFailed(
        f"{copy!r} counts {counted} rows for {keys} keys: rows were doubled, by a client that "
        "inserts keys again: stop it, and run the migration again with --restart, which makes a "
        "new copy"
    )


def _samples(pair: Pair, sample: Sample) -> Iterator[Batch]:
    """Yield the sampled rows of the copy that the origin still has."""
    page = pair.store.chunk_rows(pair.store.info(pair.origin.collection, counted=False))
    for partition, keys in sample.by_partition(VERIFIED_ROWS).items():
        for start in range(0, len(keys), page):
            current, copied = pair.current(keys[start : start + page], partition)
            existing = set(current.keys)
            common = [i for i, key in enumerate(copied.keys) if key in existing]
            if common:
                yield copied.take(common)


def _check_biases(pair: Pair, copied: Batch) -> None:
    """Check that the biases are those of the formula.

    Those of new rows are left out if the estimator balances rows against each other: they depend on
    the rows that were written together with them.
    """
    state = pair.state
    codec = state.codec
    slot = state.profile.slot
    columns = codec.columns(copied.vectors, copied.rows)
    stored = codec.read_biases(columns)[:, slot]

    # Encoded and read back, computed biases are rounded as the stored ones are.
    decoded = pair.copy.decode_rows(copied)
    fresh = pair.copy.encode_rows(decoded)
    computed = codec.read_biases({codec.field: fresh.vectors})[:, slot]
    # A unit vector that was read from the copy is rounded to the type of the field, and its bias
    # moves by as much.
    rounding = SPACING[state.dtype] if state.layout.metric == "COSINE" else 0.0
    correction = pair.copy.corrections[slot]
    allowed = correction.allowed_differences(
        decoded.vectors, computed, max(BIAS_TOLERANCE, rounding), decoded
    )
    differ = np.abs(stored - computed) > allowed
    differ |= codec.read_kinds(columns) != codec.read_kinds({codec.field: fresh.vectors})
    if correction.fitted.estimator.potentials:
        differ &= ~codec.are_new(columns)
    if differ.any():
        broken = [copied.keys[i] for i in np.flatnonzero(differ)]
        raise VerificationFailed(
            f"biases in {pair.copy.collection!r} differ from those of its bank: rows "
            f"{name_some(broken)}: another client wrote them, or the bank was changed; before the "
            "cutover, run the migration again with --restart, which makes a new copy; after it, "
            "refresh the copy with --refit"
        )


def searched_rows(rows: int) -> int:
    """Return for how many of a collection's rows a verification searches."""
    return min(VERIFIED_ROWS, max(FEWEST_SEARCHED_ROWS, ceil(rows / ROWS_PER_SEARCH)))


def misses_too_many(searched: int, in_first: int, in_second: int) -> bool:
    """Whether of so many rows searched for, the second place finds too few of those of the first."""
    return in_second < in_first - max(1, FEWER_ALLOWED * searched)


def find_themselves(
    keys: Sequence[Key],
    first: Callable[[int], list[list[Key]]],
    second: Callable[[int], list[list[Key]]],
) -> tuple[Flags, Flags, Flags]:
    """Return which rows count, and which are found by their own vectors in two places, each (n,).

    first, second: search one place for the vectors of all rows, and return so many keys of each. A
    row is found if it is among the TOP best.

    A row need not be its own nearest under IP, and new rows may push it out of its ten best. So the
    first place is searched again after the second, and a row counts only if both answers agree:
    clients write meanwhile.
    """

    def among_best(search: Callable[[int], list[list[Key]]]) -> Flags:
        return np.array(
            [key in best[:TOP] for key, best in zip(keys, search(SEARCHED), strict=True)], np.bool_
        )

    by_first = among_best(first)
    by_second = among_best(second)
    by_first_again = among_best(first)
    return by_first == by_first_again, by_first, by_second


def verify(store: Store, name: str, *, options: MigrationOptions | None = None) -> Verification:
    """Compare every row and field of a migration's two collections, and check the rest of
    `Verification`. Read only.

    name: the source, the copy or the alias. Vectors must be equal bit for bit; under COSINE,
    vectors that are not unit may differ by one unit in the last place, and with kinds also by two
    units of the offset of a kind. After the cutover, rows
    differ that the application has changed since. Raises VerificationFailed, which names rows or
    the index, NoMigration, and WrongPhase unless both collections exist.
    """
    expect_store(store)
    options = options or MigrationOptions()
    ledger = Ledger(store)
    migration = ledger.find(name)
    migration.require(
        "copying",
        "catching up",
        "verified",
        "switching",
        "switched",
        "rolling back",
        "rolled back",
        step="verification",
    )
    require_collections(store, migration)
    expect_chunks(ledger, migration)
    source = store.info(migration.source_now)
    validate_index(store, migration, source)
    pair = pair_of(store, migration)
    equal = run_pass(pair, source.partitions, migration, options, number=0)
    return verified(pair, source.partitions, equal)
