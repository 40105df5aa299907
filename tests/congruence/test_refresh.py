"""Biases kept right: a copy has the new ones, and searches switch to it all at once."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    BankTooSmall,
    Cancelled,
    DimensionMismatch,
    EmptyBank,
    InvalidParameter,
    NotCorrected,
    QueryBank,
    Recipe,
    StateError,
    StoreError,
    UnfinishedMigration,
    refresh,
    rollback,
    status,
)
from milvus_hubness.jobs.common.progress import Throttle
from tests.support.databases import OnMilvus, write_state
from tests.support.galleries import METRICS, vectors
from tests.support.migrated import DIM, ITEMS, Corrected
from tests.support.recipes import as_recipe

ON_SERVERS = {"corrected": ["COSINE"]}


@pytest.fixture(params=METRICS)
def corrected(database, request):
    return Corrected(database, request.param)


under_cosine = pytest.mark.parametrize("corrected", ["COSINE"], indirect=True)


def test_a_new_bank_is_adopted(corrected):
    done = refresh(corrected.store, corrected.name, QueryBank(corrected.other))
    assert (done.action, done.scanned) == ("full", ITEMS)
    assert done.reason == "the bank changed"
    corrected.assert_scores(corrected.other, 8)
    kept = corrected.store.load_bank(corrected.state.profile.bank)
    assert kept.queries.fingerprint == QueryBank(corrected.other).fingerprint
    assert corrected.banked() == len(corrected.other) + len(corrected.bank), (
        "the former one is kept"
    )
    third = vectors(np.random.default_rng(5), 40, DIM)
    refresh(corrected.store, corrected.name, QueryBank(third))
    # A collection that a client has created is its owner's: it stays, and its bank with it.
    is_owners = isinstance(corrected.database, OnMilvus)
    kept = len(corrected.other) + is_owners * len(corrected.bank)
    assert corrected.banked() == len(third) + kept, "and only that"


@pytest.mark.lite_only
@under_cosine
def test_one_command_goes_back(corrected):
    before, collection = corrected.scores(), corrected.collection
    refresh(
        corrected.store, corrected.name, Recipe(QueryBank(corrected.other), estimator=NNN(3, 1.0))
    )
    corrected.database.application().upsert(corrected.name, [corrected.row(5, 5)])
    done = rollback(corrected.store, corrected.name)
    assert (done.source, corrected.collection) == (collection, collection)
    assert corrected.scores() == pytest.approx(before, abs=1e-6)


@under_cosine
def test_stopped_between_two_batches_it_is_carried_on(corrected):
    throttle, before = Throttle(), corrected.scores()
    collection = corrected.collection

    class Stopping(corrected.database.base):
        def chunk_rows(self, source):
            return 40

        def upsert(self, target, *args, **kwargs):
            super().upsert(target, *args, **kwargs)
            throttle.stop(Cancelled("somebody wants the machine"))

    store = corrected.database.store(Stopping)
    with pytest.raises(Cancelled, match="wants the machine"):
        refresh(store, corrected.name, QueryBank(corrected.other), throttle=throttle)
    assert corrected.collection == collection
    assert corrected.scores() == pytest.approx(before, abs=1e-6)
    corrected.database.application().insert(corrected.name, [corrected.row(900, 4)])
    done = refresh(corrected.store, corrected.name)
    assert (done.action, done.reason) == ("full", "one was not finished")
    assert (done.former_copy, done.written) == (collection, ITEMS + 1)
    found, wanted = corrected.scores(ITEMS + 1), corrected.wanted(corrected.other, 8)
    np.testing.assert_allclose([found[i] for i in range(ITEMS)], wanted, atol=3e-5)
    assert found[900] == pytest.approx(found[4], abs=1e-5)


@pytest.mark.lite_only
@under_cosine
def test_another_bank_takes_the_place_of_one_that_was_not_finished(corrected):
    class Breaking(corrected.database.base):
        def flush(self, *args):
            raise StoreError("the connection broke")

    third = vectors(np.random.default_rng(5), 40, DIM)
    with pytest.raises(StoreError):
        refresh(corrected.database.store(Breaking), corrected.name, QueryBank(corrected.other))
    refresh(corrected.store, corrected.name, QueryBank(third))
    corrected.assert_scores(third, 8)
    # The bank that was saved for what was not finished goes a day later.
    assert corrected.banked() == len(third) + len(corrected.bank) + len(corrected.other)


@pytest.mark.parametrize("what", ["collection", "rows"])
def test_a_bank_that_is_gone_is_replaced_by_another_one(corrected, what):
    store, reference = corrected.store, corrected.state.profile.bank
    if what == "collection":
        store.drop(reference.collection)
    else:
        rows = store._read_bank_rows(reference)
        store.delete(reference.collection, rows.keys)
    with pytest.raises(EmptyBank, match=r"run refresh with --bank FILE$"):
        refresh(store, corrected.name, refit="always")
    done = refresh(store, corrected.name, QueryBank(corrected.other))
    assert (done.action, done.reason) == ("full", "the bank in use is gone and the bank changed")
    assert done.judged is None
    corrected.assert_scores(corrected.other, 8)
    assert refresh(store, corrected.name).action == "none"


@pytest.mark.lite_only
def test_new_parameters_are_adopted_and_go_back_to_what_was(database):
    corrected = Corrected(database, is_migrated=True)
    before = corrected.scores()
    refresh(corrected.store, corrected.name, Recipe(estimator=NNN(3, 1.0)))
    corrected.assert_scores(corrected.bank, 3, 1.0)
    refresh(corrected.store, corrected.name, Recipe(estimator=NNN(8)))
    after = corrected.scores()
    np.testing.assert_allclose(
        [after[i] for i in range(ITEMS)], [before[i] for i in range(ITEMS)], atol=3e-5
    )


@pytest.mark.lite_only
def test_vectors_come_through_a_refresh_unchanged(corrected):
    def read():
        rows = corrected.database.application().query(
            corrected.name, filter="group >= 0", output_fields=["vector"], limit=ITEMS
        )
        return {row["id"]: list(row["vector"]) for row in rows}

    before = read()
    for k in (3, 5):
        refresh(corrected.store, corrected.name, Recipe(estimator=NNN(k)))
    after = read()
    assert len(after) == ITEMS
    assert after == before


@pytest.mark.lite_only
@under_cosine
def test_nothing_changed_means_nothing_written(corrected):
    done = refresh(corrected.store, corrected.name)
    assert (done.action, done.written) == ("none", 0)


def test_rows_without_a_bias_get_theirs_in_the_next_copy(corrected):
    corrected.make_pending([5, 6, 77])
    assert status(corrected.store, corrected.name).pending == 3
    done = refresh(corrected.store, corrected.name)
    assert (done.action, done.pending, done.written) == ("none", 3, 0)
    assert "3 rows have the mean bias until the next copy (--force makes one)" in done.reason
    forced = refresh(corrected.store, corrected.name, force=True)
    assert (forced.action, forced.written) == ("full", ITEMS)
    assert status(corrected.store, corrected.name).pending == 0
    corrected.assert_scores(corrected.bank, 8)


@pytest.mark.lite_only
@under_cosine
def test_a_bank_changed_in_place_is_noticed(corrected):
    bank = corrected.state.profile.bank
    corrected.add_to_bank(corrected.other[0])
    with pytest.raises(StateError, match="run refresh"):
        corrected.store.load_bank(bank)
    done = refresh(corrected.store, corrected.name)
    assert done.reason == "the bank changed"
    corrected.assert_scores(np.vstack([corrected.bank, corrected.other[:1]]), 8)
    assert refresh(corrected.store, corrected.name).action == "none"


@pytest.mark.lite_only
@under_cosine
def test_a_search_sees_the_old_biases_until_all_new_ones_are_there(corrected):
    seen = []

    class Watching(corrected.database.base):
        def upsert(self, *args, **kwargs):
            super().upsert(*args, **kwargs)
            seen.append(corrected.scores())

        def point_alias(self, *args):
            seen.append(corrected.scores())
            super().point_alias(*args)

    before = corrected.scores()
    refresh(corrected.database.store(Watching), corrected.name, QueryBank(corrected.other))
    assert seen
    assert all(scores == pytest.approx(before, abs=1e-6) for scores in seen)
    assert corrected.scores() != pytest.approx(before, abs=1e-3)


@under_cosine
def test_an_interrupted_refresh_changes_no_answer_and_can_be_run_again(corrected):
    class Breaking(corrected.database.base):
        def flush(self, *args):
            raise StoreError("the connection broke")

    before = corrected.scores()
    with pytest.raises(StoreError):
        refresh(corrected.database.store(Breaking), corrected.name, QueryBank(corrected.other))
    assert corrected.scores() == pytest.approx(before, abs=1e-6)
    done = refresh(corrected.store, corrected.name, QueryBank(corrected.other))
    assert done.written == ITEMS
    corrected.assert_scores(corrected.other, 8)


@pytest.mark.lite_only
@under_cosine
def test_rows_deleted_meanwhile_stay_deleted(corrected):
    class Deleting(corrected.database.base):
        def flush(self, *args):
            corrected.store.delete(corrected.name, corrected.keys([0, 1, 2]))
            super().flush(*args)

    refresh(corrected.database.store(Deleting), corrected.name, QueryBank(corrected.other))
    assert set(corrected.scores()) == set(range(3, ITEMS))


@pytest.mark.lite_only
def test_status_tells_what_there_is(database):
    corrected = Corrected(database, is_migrated=True)
    plain = status(corrected.store, corrected.source)
    assert (plain.corrected, plain.rows, plain.estimator) == (False, ITEMS, None)
    told = status(corrected.store, corrected.name)
    assert told.corrected
    assert told.rows == ITEMS
    assert told.source == corrected.source
    assert (told.metric, told.dim, told.width) == (corrected.metric, DIM, 16)
    assert told.estimator == {"name": "NNN", "k": 8, "alpha": 0.75, "kernel": "dense"}
    assert (told.bank["collection"], told.bank["count"]) == (f"{corrected.source}__bank", 50)
    assert told.pending == 0
    assert 0 <= told.age_seconds < 600


@pytest.mark.lite_only
@under_cosine
def test_refreshes_that_cannot_be(corrected):
    for change, error in (
        ({"prior_weight": 0.5, "no_prior": True}, InvalidParameter),
        ({"bank": QueryBank(np.ones((60, DIM + 1)))}, DimensionMismatch),
        ({"estimator": NNN(51)}, BankTooSmall),
        ({"keep_former": -1}, InvalidParameter),
        ({"keep_former": 1.5}, InvalidParameter),
    ):
        with pytest.raises(error):
            refresh(corrected.store, corrected.name, **as_recipe(**change))
    plain = corrected.database.fill(corrected.items, "COSINE", keys=corrected.keys(range(ITEMS)))
    with pytest.raises(NotCorrected):
        refresh(corrected.store, plain)
    state = corrected.state
    write_state(corrected.store, corrected.name, state.model_copy(update={"phase": "copying"}))
    with pytest.raises(UnfinishedMigration):
        refresh(corrected.store, corrected.name)
