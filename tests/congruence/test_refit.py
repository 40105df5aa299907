"""A refit when the gallery changes: with queries of today, once, and never with the old bank."""

import logging

import numpy as np
import pytest

from milvus_hubness import (
    InvalidParameter,
    QueryBank,
    RefreshOptions,
    disable,
    refresh,
    rollback,
)
from milvus_hubness.jobs.common.fits import FITS
from milvus_hubness.jobs.migration.clean import clean
from milvus_hubness.jobs.migration.corrected import unfinished
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.refresh.status import status
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.support.databases import OnMilvus
from tests.support.galleries import vectors
from tests.support.growing import DIM, ITEMS, Growing
from tests.support.recipes import as_recipe


@pytest.fixture
def growing(database):
    return Growing(database, is_created=isinstance(database, OnMilvus))


@pytest.fixture
def sampling(backend):
    """On Milvus, where clients sample queries."""
    return Growing(OnMilvus.of(backend), is_created=True)


def test_the_share_counts_rows_that_are_new_or_changed(growing):
    assert growing.share() == 0
    growing.put({n: growing.items[n] for n in range(100)})
    assert growing.share() == 0, "replaced by themselves"
    growing.delete(range(40))
    assert growing.share() == 0, "deleted rows are no new ones"
    growing.put({n: growing.items[n] for n in range(40)})
    assert growing.share() == 0, "deleted and inserted again"
    growing.put({n: growing.topic[n] for n in range(24)})
    assert growing.share() == pytest.approx(24 / ITEMS)
    growing.grow(60)
    assert growing.share() == pytest.approx((24 + 60) / (ITEMS + 60))
    growing.delete(range(ITEMS, ITEMS + 60))
    growing.put({n: growing.items[n] for n in range(24)})
    assert growing.share() == 0, "all is as it was"


def test_without_sampled_queries_a_new_bank_is_due_and_nothing_is_refitted(growing, caplog):
    growing.grow(40)
    assert growing.refresh().new_bank_due == "", "14% are new"
    growing.grow(40, first=40)
    before = growing.profile
    with caplog.at_level(logging.WARNING, logger="milvus_hubness"):
        done = growing.refresh()
    assert done.action == "none"
    assert growing.profile.bank == before.bank
    wanted = (
        "a new bank is due: 25.0% of the rows are new or changed since the bank was fitted on "
        f"{before.fitted_at:%Y-%m-%d}, and no queries of '{growing.collection}' are sampled"
    )
    assert done.new_bank_due.startswith(wanted)
    assert wanted in done.reason
    assert wanted in caplog.text
    present = status(growing.store, growing.name)
    assert present.unfitted_share == 0.25
    assert present.new_bank_due == done.new_bank_due
    assert present.fitted_at == before.fitted_at.isoformat(timespec="seconds")

    same = growing.refresh(bank=QueryBank(growing.bank))
    assert "the given bank is the one in use" in same.new_bank_due

    other = growing.refresh(bank=QueryBank(growing.queries), force=True)
    assert (other.action, other.new_bank_due, other.unfitted_share) == ("full", "", 0.0)
    present = status(growing.store, growing.name)
    assert (present.unfitted_share, present.new_bank_due) == (0.0, "")
    growing.assert_biases()


def test_a_growing_gallery_is_refitted_once_with_the_sampled_queries(sampling):
    sampling.sample(200)
    sampling.grow(59)
    assert sampling.refresh().action == "none", "19.7% are new"
    sampling.grow(1, first=59)
    planned = sampling.refresh(plan=True)
    reason = (
        "20.0% of the rows are new or changed since the bank was fitted on "
        f"{sampling.profile.fitted_at:%Y-%m-%d}: refitted with 200 sampled queries, 200 of them sent since"
    )
    assert (planned.action, planned.reason.startswith(reason)) == ("full", True)
    assert sampling.profile.epoch == 1, "a plan writes nothing"

    done = sampling.refresh()
    assert done.action == "full"
    assert done.reason.startswith(reason)
    assert done.judged is not None
    assert (done.unfitted_share, done.new_bank_due) == (0.0, "")
    bank = sampling.store.load_bank(sampling.profile.bank).queries.vectors
    fresh = {query.tobytes() for query in sampling.queries[:100]}
    assert sum(row.tobytes() in fresh for row in bank) > 50, "the bank has queries of the topic"
    sampling.assert_biases()

    sampling.sample(200)
    again = sampling.refresh()
    assert (again.action, again.unfitted_share, again.new_bank_due) == ("none", 0.0, "")
    sampling.put({n: sampling.items[n] for n in range(120)})
    assert sampling.refresh().action == "none"
    refresh(sampling.store, sampling.name, force=True, client_ttl=0)
    assert sampling.refresh().action == "none"
    assert sampling.profile.epoch == 3


@pytest.mark.lite_only
def test_no_profile_of_several_gets_the_samples_of_all(sampling):
    """Profiles are for queries of other kinds, and samples are of a field: each would have one bank."""
    added = QueryBank(sampling.bank[::-1])
    options = {**as_recipe(added, verdict="skip"), "client_ttl": 0}
    refresh(sampling.store, sampling.name, profile="image", **options)
    sampling.sample(200)
    sampling.grow(80)
    for profile in ("default", "image"):
        before = sampling.store.info(sampling.name).state.profiles[profile].bank
        done = sampling.refresh(profile=profile)
        assert done.action == "none"
        assert "the samples are of the queries of all 2 profiles" in done.new_bank_due
        assert sampling.store.info(sampling.name).state.profiles[profile].bank == before


def test_too_few_samples_wait_for_more(sampling):
    sampling.grow(120)
    sampling.sample(98)
    done = sampling.refresh()
    assert done.action == "none"
    assert "98 queries were sampled since, of 100 that a refit needs" in done.new_bank_due
    assert status(sampling.store, sampling.name).new_bank_due == done.new_bank_due

    # All biases are written again, but the bank has no query more: what is due stays due.
    forced = refresh(sampling.store, sampling.name, force=True, client_ttl=0)
    assert forced.action == "full"
    present = status(sampling.store, sampling.name)
    assert present.unfitted_share == pytest.approx(1 / 3, abs=1e-4)
    assert present.new_bank_due == done.new_bank_due
    sampling.sample(100)
    lacking = "only 100 queries are sampled, of 150 for a bank in place of one of 300"
    assert lacking in sampling.refresh().new_bank_due
    sampling.sample(150)
    assert sampling.refresh().action == "full"
    assert status(sampling.store, sampling.name).new_bank_due == ""


@pytest.mark.long
def test_rows_that_are_inserted_twice_are_no_new_ones(sampling):
    """Milvus counts both rows of a key."""
    rows = [{"id": n, "vector": row, "group": 1, "note": ""} for n, row in sampling.rows.items()]
    sampling.sample(300)
    for _ in range(2):
        sampling.application.insert(sampling.name, rows)
        done = sampling.refresh()
        assert (done.action, done.unfitted_share, done.new_bank_due) == ("none", 0, "")
    sampling.grow(120)
    done = sampling.refresh()
    assert (done.action, done.unfitted_share) == ("full", 0)
    assert "33.3% of the rows are new or changed" in done.reason
    assert sampling.refresh().action == "none"


@pytest.mark.long
def test_samples_from_before_the_fit_are_none_of_today(sampling):
    sampling.grow(120)
    sampling.sample(200, at=1_000_000_000)
    assert ", and 0 queries were sampled since" in sampling.refresh().new_bank_due


@pytest.mark.long
def test_a_worse_bank_is_refused_by_the_evaluation(sampling, monkeypatch):
    sampling.grow(120)
    sampling.sample(200)
    # Queries that the application never asks: near one item, so that the biases of others are off.
    rng = np.random.default_rng(0)
    foreign = sampling.items[7] + 0.01 * rng.normal(size=(200, DIM))
    sampling.queries = foreign.astype(np.float32) * 30
    before = sampling.profile
    sampling.sample(400)
    real = QueryBank(vectors(np.random.default_rng(2), 150, DIM))
    done = sampling.refresh(queries=real)
    assert done.action == "refused", done
    assert "are new or changed" in done.reason
    assert "excess answers taken by hubs rise" in done.reason
    assert sampling.profile.bank == before.bank
    assert done.unfitted_share == pytest.approx(1 / 3)


@pytest.mark.long
def test_without_an_evaluation_nothing_is_adopted(sampling):
    small = QueryBank(sampling.bank[:100])
    refresh(sampling.store, sampling.name, small, force=True, client_ttl=0)
    sampling.grow(120)
    sampling.sample(200)
    done = sampling.refresh(queries=None)
    assert done.action == "refused"
    assert done.reason.endswith("or a bank of 250")
    assert sampling.refresh(queries=None, force=True).action == "full"


def test_a_killed_refit_is_continued_and_not_repeated(sampling, monkeypatch):
    sampling.grow(120)
    sampling.sample(200)
    store_class = type(sampling.store)
    with monkeypatch.context() as broken:
        broken.setattr(store_class, "flush", killed)
        with pytest.raises(KeyboardInterrupt):
            sampling.refresh()
    assert sampling.profile.epoch == 1

    # More samples have come: the refit is finished with the bank that it has.
    migration = unfinished_refresh(sampling)
    begun = migration.state.profile.bank
    sampling.sample(300)
    done = sampling.refresh()
    assert (done.action, done.reason) == ("full", "one was not finished")
    assert (done.epoch, sampling.profile.bank.generation) == (2, begun.generation)
    assert done.unfitted_share == 0
    sampling.assert_biases()
    assert sampling.refresh().action == "none"


@pytest.mark.long
@pytest.mark.parametrize("method", ["put_records", "write_property", "save_bank"])
def test_a_refit_that_is_killed_anywhere_is_made_once(sampling, monkeypatch, method):
    sampling.grow(120)
    sampling.sample(200)
    with monkeypatch.context() as broken:
        broken.setattr(type(sampling.store), method, killed)
        with pytest.raises(KeyboardInterrupt):
            sampling.refresh()
    sampling.refresh()
    assert sampling.refresh().action == "none"
    assert (sampling.profile.epoch, sampling.share()) == (2, 0)
    assert sampling.notes() == 1
    sampling.assert_biases()


def killed(*_, **__):
    raise KeyboardInterrupt


def unfinished_refresh(growing):
    """The migration that a killed refresh has begun."""
    info = growing.store.info(growing.name)
    return unfinished(
        growing.store, Ledger(growing.store).migrations(info.name), info, info.state.field
    )


@pytest.mark.long
def test_a_refit_that_is_taken_back_leaves_the_former_share(sampling):
    sampling.grow(120)
    sampling.sample(200)
    former = sampling.profile.bank
    assert sampling.refresh().action == "full"
    rollback(sampling.store, sampling.name)
    assert sampling.profile.bank.fingerprint == former.fingerprint
    assert sampling.share() == pytest.approx(1 / 3), "the former copy is as far behind as it was"
    sampling.assert_biases()


@pytest.mark.long
def test_the_share_of_many_rows_is_what_it_is_at_least(growing):
    fit = growing.fit
    # Of each kind of keys, and of the rows that change below, the half. The sample has no order.
    chosen = {growing.database.key(number) for number in range(ITEMS) if number % 4 < 2}
    fit.write(ITEMS, [row for row in fit.note.sample if row.key in chosen])
    assert growing.share() == 0
    growing.grow(60)
    assert growing.share() == pytest.approx(0.2), "no sampled row has changed"
    growing.put({n: growing.topic[n] for n in range(120)})
    assert 0.45 < growing.share() <= 0.6
    growing.delete(range(120, ITEMS))
    assert 0.8 < growing.share() <= 1


@pytest.mark.long
def test_a_collection_that_was_created_empty_counts_from_its_first_thousand_rows(growing):
    growing.store.drop_records(LEDGER, growing.fit.group)
    assert growing.refresh().unfitted_share is None
    rng = np.random.default_rng(3)
    growing.put({1_000 + n: row for n, row in enumerate(vectors(rng, 760, DIM))})
    assert growing.refresh(plan=True).unfitted_share is None
    assert growing.share() is None, "a plan notes nothing"
    assert growing.refresh().unfitted_share is None
    assert growing.share() == 0


@pytest.mark.long
def test_biases_beside_are_refitted_too(backend):
    growing = Growing(OnMilvus.of(backend), is_beside=True)
    assert growing.share() == 0
    growing.put({n: growing.items[n] for n in range(100)})
    assert growing.share() == 0
    growing.grow(60)
    growing.sample(200)
    done = growing.refresh()
    assert (done.action, done.unfitted_share) == ("full", 0)
    growing.assert_stored()
    assert growing.refresh().action == "none"
    note = growing.fit.group
    disable(growing.store, growing.name)
    assert growing.store.records(LEDGER, note) == []


@pytest.mark.long
def test_a_copy_that_takes_over_has_the_note_of_its_fit(lite):
    growing = Growing(OnMilvus.of(lite))
    alias = growing.name
    growing.sample(200)
    growing.grow(120)
    options = {"refit": 0.2, "queries": growing.real, "client_ttl": 0}
    done = refresh(growing.store, alias, **as_recipe(**options))
    assert (done.action, done.unfitted_share) == ("full", 0)
    growing.assert_stored(done.collection)
    assert refresh(growing.store, alias, **as_recipe(**options)).action == "none"
    assert status(growing.store, alias).unfitted_share == 0

    # The former copy, taken back, is as far behind as it was.
    rollback(growing.store, alias)
    assert status(growing.store, alias).unfitted_share == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.long
def test_rows_in_partitions_are_told_apart(backend):
    growing = Growing(OnMilvus.of(backend), is_created=True)
    backend.client().create_partition(growing.name, "north")
    assert growing.share() == 0
    rows = [
        {"id": ITEMS + n, "vector": growing.topic[n], "group": 1, "note": ""} for n in range(60)
    ]
    growing.application.upsert(growing.name, rows, partition_name="north")
    assert growing.share() == 0.2
    growing.fit.write_now()
    assert growing.share() == 0
    growing.delete(range(120))
    backend.client().release_collection(growing.name)
    backend.client().drop_partition(growing.name, "north")
    backend.client().load_collection(growing.name)
    assert growing.share() == 0
    growing.grow(30, first=100)
    assert growing.share() == pytest.approx(30 / 150)
    growing.grow(30)
    assert growing.share() == pytest.approx(30 / 180), "they were in the other partition before"


@pytest.mark.long
def test_a_dropped_copy_leaves_no_note(database):
    growing = Growing(database)
    assert growing.notes() == 1
    group = growing.fit.group
    assert group.startswith(FITS)
    copy = growing.collection
    growing.store.drop_alias(growing.name)
    clean(growing.store, copy, drop=copy)
    assert growing.store.records(LEDGER, group) == []


@pytest.mark.parametrize("share", [1, 0.2, np.float32(0.25), np.float64(1), np.int64(1)])
def test_a_share_is_a_number_of_any_type(share):
    assert RefreshOptions(refit=share).refit_share == share


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "0.2", True, None, "never"])
def test_what_is_neither_a_share_nor_a_word_is_refused(share):
    with pytest.raises(InvalidParameter, match=r"^refit is .*pending, changed, always"):
        RefreshOptions(refit=share)
