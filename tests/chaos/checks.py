"""What must hold of a corrected collection after any refresh, whatever was killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from milvus_hubness.correction.estimators.base import is_same
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.common.lease import read_entries
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo
from tests.chaos.corrected import Biases, Corrected, expected_biases
from tests.chaos.ports import Database
from tests.chaos.sources import assert_same
from tests.support.galleries import all_keys
from tests.support.incomplete import incomplete

OFF = 1e-4
OFF_OF_NEW_ROWS = 0.1
"""Standard deviations of the biases, beyond what rows have that come alone, or all together. Rows that come
after a fit on the gallery share the room that they take with those of the same batch, and a kill may split
it."""


def assert_refreshed(
    database: Database,
    corrected: Corrected,
    biases: Biases,
    *,
    wrote_on: bool = False,
    leased: str = "",
) -> None:
    """Nothing lost, nothing doubled, each row's bias from these alone, and nothing left lying about.

    wrote_on: rows were deleted by a filter since, whose biases in a side collection the next refresh takes
    away. leased: the collection that was refreshed, where that is another.
    """
    store = database.store
    info = store.info(corrected.name)
    state = info.state
    assert state is not None
    _assert_rows(database, corrected, wrote_on)
    assert is_same(biases.estimator, state.profile.estimator), (
        f"biases are of {state.profile.estimator}"
    )
    _assert_biases(store, info, state, corrected, biases)
    assert state.filling is None, "the collection says that biases are on their way"
    there = corrected.ours(database)
    wanted = corrected.collections | {*state.codec.sides}
    left = there - wanted
    assert not left, f"left lying about: {sorted(left)}"
    assert there == wanted
    _assert_banks(database, state, corrected.kept)
    _assert_ledger(store, leased or corrected.name)


def _assert_rows(database: Database, corrected: Corrected, wrote_on: bool) -> None:
    metric, converted = corrected.shape.metric, corrected.bias_location == "vector"
    found = database.shown(corrected.name)
    assert_same(found, corrected.wanted, database.sameness(metric, converted=converted))
    there = database.counted(corrected.name)
    assert there == len(corrected.wanted), f"{there} rows for {len(corrected.wanted)} keys"
    if corrected.bias_location == "beside" and not wrote_on:
        state = database.store.info(corrected.name).state
        sides = state.codec.sides
        there = database.counted(sides[state.profile.slot]) if sides else len(corrected.wanted)
        assert there == len(corrected.wanted), f"{there} biases for {len(corrected.wanted)} keys"


def _assert_biases(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    corrected: Corrected,
    biases: Biases,
) -> None:
    stored, slot = StoredBiases(store, info, state), state.profile.slot
    got: dict[object, float] = {}
    differs: list[object] = []
    for partition in info.partitions:
        biased_rows = stored.read(all_keys(store, info.name, partition), partition)
        waiting = [
            key
            for key, waits in zip(
                biased_rows.batch.keys, incomplete(state, biased_rows), strict=True
            )
            if waits
        ]
        assert not waiting, f"{len(waiting)} rows wait for a bias: {waiting[:5]}"
        got |= dict(zip(biased_rows.batch.keys, biased_rows.biases[:, slot].tolist(), strict=True))
        if corrected.bias_location == "vector":
            shown = np.array(
                [row[state.codec.bias_field] for row in biased_rows.batch.rows]
            ).reshape(-1, 1)
            same = np.abs(shown - biased_rows.biases[:, [slot]]).max(axis=1, initial=0.0) <= OFF
            differs += [
                key
                for key, is_same in zip(biased_rows.batch.keys, same, strict=True)
                if not is_same
            ]
    assert got.keys() == corrected.wanted.keys(), "rows are in no partition, or in two"
    items = {key: corrected.wanted[key]["vec"] for key in got}
    wanted = expected_biases(store, state, biases, [*items.values()])
    lowest, highest = wanted - OFF, wanted + OFF

    if biases.estimator.needs_gallery:
        correction = load_correction(store, state, state.profile)
        margin = OFF_OF_NEW_ROWS * wanted.std()
        numbers = {key: number for number, key in enumerate(got)}
        for key, low, high in _of_rows_that_came_together(correction, corrected, items):
            number = numbers[key]
            lowest[number] = min(lowest[number], low - margin)
            highest[number] = max(highest[number], high + margin)

    off = {
        key: max(low - bias, bias - high)
        for (key, bias), low, high in zip(got.items(), lowest, highest, strict=True)
    }
    wrong = [key for key, by in off.items() if by > 0]
    assert not wrong, f"{len(wrong)} biases are off by up to {max(off.values()):.4g}: {wrong[:5]}"
    assert not differs, f"{len(differs)} rows show another bias than they carry: {differs[:5]}"


def _of_rows_that_came_together(
    correction: Correction, corrected: Corrected, items: dict[Any, Any]
) -> Iterator[tuple[Any, float, float]]:
    """Yield the keys of rows that came after the fit and are as they came, each with the lowest and the
    highest of its biases if it had come alone, and with all others that came."""
    as_they_came = replace(correction, are_new=True)
    batch = {key: np.float32(vector) for key, vector in corrected.pending.items()}
    if not batch:
        return
    together = as_they_came.centred(np.stack([*batch.values()]))
    for (key, vector), with_all in zip(batch.items(), together.tolist(), strict=True):
        if key in items and np.array_equal(vector, np.float32(items[key])):
            alone = float(as_they_came.centred(vector[None])[0])
            yield key, min(alone, with_all), max(alone, with_all)


def _assert_banks(database: Database, state: CollectionState, former_copies: set[str]) -> None:
    bank = state.profile.bank.collection
    # What killed jobs have left goes a day later.
    database.store.drop_spare_generations(bank, Ledger(database.store).used_banks, older_than=-60)
    there = database.generations(bank)
    states = [state, *(database.store.info(copy).state for copy in former_copies)]
    named = {bank.generation: bank.count for each in states if each for bank in each.banks}
    assert there == named, f"the bank holds generations {dict(there)}, the states name {named}"


def _assert_ledger(store: Store, name: str) -> None:
    entries = read_entries(store, name)
    assert entries, "no lease was taken"
    assert entries[-1].expires_at is None, "the lease was not released"
