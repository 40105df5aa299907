"""The verification of a copy: equal rows, the planned index, correct biases, and searches that find its
rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.errors import StateError, VerificationFailed, name_some
from milvus_hubness.migration.catch_up import Pass, compare
from milvus_hubness.migration.compare import Pair
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.plan import MigrationOptions
from milvus_hubness.migration.prepare import forward
from milvus_hubness.migration.survey import Chunk, key_pages
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo

COUNTS = 3
SAMPLED_CHUNKS = 16
SAMPLED_ROWS = 16
BIAS_TOLERANCE = 1e-5
TOP = 10
SEARCHED = 100
"""Number of requested results: a graph index then searches widely; the plan measures narrow searches."""

FEWER_ALLOWED = 0.1
FEWEST_MISSES = 3


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    rows, fields: number compared one by one. biases: number of biases that were computed again and are equal.
    searched: number of rows whose own vector was searched for. found_in_source, found_in_copy: number of
    those rows that were among the ten best.
    """

    rows: int
    fields: int
    biases: int
    searched: int
    found_in_source: int
    found_in_copy: int


def verified(
    pair: Pair, partitions: Sequence[str | None], chunks: Sequence[Chunk], equal: Pass
) -> Verification:
    """Check properties of the copy that the comparison of rows, `equal`, does not show: no row is there
    twice, the biases of a sample equal those that the bank gives now, and searches find rows in the copy as
    in the source.

    Raises VerificationFailed, and StateError if the ledger has lost the chunks of the migration.
    """
    if not chunks:
        raise StateError(
            f"the ledger has lost what it held of the migration to {pair.copy.collection!r}: begin it anew "
            "with --restart"
        )
    _none_twice(pair, partitions, equal.rows)
    biases = searched = in_source = in_copy = 0
    for wanted, copied in _samples(pair, chunks):
        _biases_as_computed(pair, wanted, copied)
        biases += len(copied)
        found = _find_themselves(pair, copied)
        searched, in_source, in_copy = searched + found[0], in_source + found[1], in_copy + found[2]
    if in_copy < in_source - max(FEWEST_MISSES, FEWER_ALLOWED * searched):
        raise VerificationFailed(
            f"of {searched} rows searched for by their own vectors {in_source} are found in "
            f"{pair.origin.collection!r} and {in_copy} in {pair.copy.collection!r}: is its index built?"
        )
    return Verification(equal.rows, equal.fields, biases, searched, in_source, in_copy)


def index_as_planned(store: Store, migration: Migration, source: CollectionInfo) -> None:
    """Check that the copy has the planned index, as far as the database shows it. Skip the check if the copy
    has taken over: its owner may have created another index. Raises VerificationFailed."""
    if migration.phase in {"switched", "rolling back", "rolled back"}:
        return
    planned = migration.indexed(source).vector_fields[migration.field]
    found = store.info(migration.target, counted=False).vector_fields[migration.field]
    # Milvus Lite does not return index parameters.
    differing = {
        name: value
        for name, value in planned.index_params.items()
        if found.index_params and str(found.index_params.get(name)) != str(value)
    }
    if found.index_type != planned.index_type or differing:
        there = f"{found.index_type or 'no index'} {found.index_params or ''}".rstrip()
        wanted = f"{planned.index_type} {planned.index_params or ''}".rstrip()
        raise VerificationFailed(
            f"field {migration.field!r} of {migration.target!r} has {there}, planned was {wanted}: drop that "
            "index, create the planned one and load the collection"
        )


def _none_twice(pair: Pair, partitions: Sequence[str | None], rows: int) -> None:
    """Check that no row is there twice. While clients write, only a stable count is meaningful, and a count
    can also look stable because inserts and deletes balance: so this counts several times."""
    store, copy = pair.store, pair.copy.collection
    for _ in range(COUNTS):
        counted = store.count(copy)
        if counted == rows:
            return
        keys = sum(len(page) for partition in partitions for page in key_pages(store, copy, partition))
        if counted <= keys or store.count(copy) != counted:
            return
    raise VerificationFailed(f"{copy!r} counts {counted} rows for {keys} keys: rows were doubled")


def _samples(pair: Pair, chunks: Sequence[Chunk]) -> list[tuple[Batch, Batch]]:
    picked = [chunks[i] for i in np.unique(np.linspace(0, len(chunks) - 1, SAMPLED_CHUNKS).astype(int))]
    found = []
    for chunk in picked:
        batch = pair.store.scan(
            pair.origin.collection,
            pair.state.field,
            after=chunk.after,
            upto=chunk.upto,
            limit=SAMPLED_ROWS,
            partition=chunk.partition,
        )
        wanted, copied = pair.fetch(batch.keys, chunk.partition)
        both = set(wanted.keys) & set(copied.keys)
        found.append((_only(wanted, both), _only(copied, both)))
    return [(wanted, copied) for wanted, copied in found if len(copied)]


def _biases_as_computed(pair: Pair, wanted: Batch, copied: Batch) -> None:
    if pair.copy.codec is None:
        return
    state = pair.state
    stored = state.layout.biases(copied.vectors, state.profile.slot)
    fresh = pair.copy.encode_rows(pair.copy.decode_rows(copied))
    computed = state.layout.biases(fresh.vectors, state.profile.slot)
    off = np.abs(stored - computed) > BIAS_TOLERANCE * np.maximum(1, np.abs(computed))
    if off.any():
        broken = [copied.keys[i] for i in np.flatnonzero(off)]
        raise VerificationFailed(
            f"biases in {pair.copy.collection!r} are not what its bank gives: rows {name_some(broken)}"
        )


def _find_themselves(pair: Pair, copied: Batch) -> tuple[int, int, int]:
    """Return the number of rows that were searched for, and of those found in the origin and in the copy."""
    layout, field = pair.state.layout, pair.state.field
    rows = pair.copy.decode_rows(copied)
    valid = ~layout.invalid(rows.vectors)
    keys = [key for key, fine in zip(rows.keys, valid, strict=True) if fine]
    if not keys:
        return 0, 0, 0
    vectors = rows.vectors[valid]
    counts = []
    for endpoint in (pair.origin, pair.copy):
        found = endpoint.nearest(pair.store, field, vectors, SEARCHED)
        counts.append(sum(key in best[:TOP] for key, best in zip(keys, found, strict=True)))
    return len(keys), counts[0], counts[1]


def _only(batch: Batch, keys: set[Key]) -> Batch:
    return batch.take([i for i, key in enumerate(batch.keys) if key in keys])


def verify(store: Store, name: str, *, options: MigrationOptions | None = None) -> Verification:
    """Compare every row and field of a migration's two collections, and check the other parts of
    `Verification`.

    name: the source, the copy or the alias. Vectors must be equal bit for bit; under COSINE, vectors that are
    not unit may differ by one unit in the last place of the field's type. Rows that clients are writing at
    this moment are read again. After the cutover, rows that the application changed since then differ. Raises
    VerificationFailed, which names the first rows that differ or an index that is not as planned,
    NoMigration, and WrongPhase before there is a copy or after the source is dropped.
    """
    options = options or MigrationOptions()
    ledger = Ledger(store)
    migration = ledger.find(name)
    migration.require(
        "copying", "catching up", "verified", "switching", "switched", "rolling back", "rolled back",
        step="verification",
    )  # fmt: skip
    source = store.info(migration.source_now)
    index_as_planned(store, migration, source)
    pair = forward(store, migration)
    equal = compare(
        pair,
        source.partitions,
        rows_per_page=store.chunk_rows(source),
        rows_total=migration.rows,
        throttle=options.throttle,
        events=options.events,
    )
    return verified(pair, source.partitions, ledger.chunks(migration), equal)
