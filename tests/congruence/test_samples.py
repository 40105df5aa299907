"""Samples of live queries on collections that nothing corrects, and what jobs make of them."""

import numpy as np
import pytest

from milvus_hubness import (
    Beside,
    CollectionNotFound,
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    MigrationOptions,
    QueryBank,
    Recipe,
    StoreError,
    check,
    diagnose,
    enable,
    migrate,
    plan_correction,
    refresh,
    tune,
)
from milvus_hubness.jobs.common.inputs import read_bank
from milvus_hubness.jobs.common.samples import sampled_bank, write_samples
from milvus_hubness.jobs.refresh.sampling import (
    list_samplings,
    start_sampling,
    stop_sampling,
)
from milvus_hubness.jobs.store.records import SAMPLINGS_PROPERTY
from tests.support.aliases import aliased
from tests.support.async_clients import opened
from tests.support.galleries import plain_collection, vectors
from tests.support.samples import put_queries

DIM, ITEMS = 12, 200


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def plain(lite, rng):
    """The name of a plain collection."""
    name = lite.name()
    items = vectors(rng, ITEMS, DIM)
    plain_collection(lite.client(), name, items, "IP")
    lite.made += [f"{name}__query_samples_vector"]
    return name


def as_set(rows):
    return {np.asarray(row, np.float32).tobytes() for row in rows}


def test_queries_of_a_plain_collection_are_sampled_and_answered_as_before(lite, plain, rng):
    store, client = lite.store(), lite.hubness_client()
    queries = vectors(rng, 30, DIM)
    before = client.search(plain, queries.tolist(), limit=5)
    assert client.hubness_samples.waiting == 0, "nothing is sampled unless somebody wants it"

    start_sampling(store, plain, rate=1.0, size=10**7)
    client = lite.hubness_client()
    after = client.search(plain, queries.tolist(), limit=5)
    client.search(plain, [queries[0]], limit=5)
    client.close()
    assert [hits.ids for hits in after] == [hits.ids for hits in before]
    [status] = list_samplings(store, plain)
    assert status.samples == 31
    assert as_set(sampled_bank(store, plain).vectors) == as_set(queries)
    assert status.variety.distinct == 30
    assert status.variety.effective == pytest.approx(31**2 / (29 + 4))


async def test_asynchronous_clients_sample_them_too(lite, plain, rng):
    start_sampling(lite.store(), plain, rate=1.0, size=10**7)
    queries = vectors(rng, 7, DIM)
    async with opened(lite) as client:
        await client.search(plain, queries.tolist(), limit=5)
    assert as_set(sampled_bank(lite.store(), plain).vectors) == as_set(queries)


def test_samples_are_bounded_and_their_rate_holds(lite, plain, rng):
    start_sampling(lite.store(), plain, rate=0.1, size=40)
    client = lite.hubness_client()
    for _ in range(4):
        client.search(plain, vectors(rng, 500, DIM).tolist(), limit=1)
    client.close()
    stored = client.hubness_samples.stored
    assert 120 < stored < 290
    [status] = list_samplings(lite.store(), plain)
    assert 30 < status.samples <= 40


def test_a_bank_of_samples_is_the_bank_of_a_file(lite, plain, rng, tmp_path):
    """tune, migrate and enable do with samples what they do with the same queries as an array."""
    store = lite.store()
    queries = vectors(rng, 100, DIM)
    start_sampling(store, plain, rate=1.0, size=10**7)
    client = lite.hubness_client()
    client.search(plain, queries.tolist(), limit=1)
    client.close()

    bank = sampled_bank(store, plain)
    assert as_set(bank.vectors) == as_set(queries)
    file = tmp_path / "queries.npz"
    assert write_samples(store, plain, file) == 100
    assert np.array_equal(QueryBank.load(file, "queries").vectors, bank.vectors)

    done = migrate(
        store,
        plan_correction(store, plain, Recipe(bank, verdict="skip")),
        MigrationOptions(no_writers=True),
    )
    lite.made += [done.target, f"{done.target}__query_samples_vector", f"{plain}__bank"]
    assert store.info(done.target).state.profile.bank.count == 100

    # The copy is sampled as its source was, into a collection of its own.
    [status] = list_samplings(store, done.target)
    assert status.sampling.samples_collection == f"{done.target}__query_samples_vector"
    assert (status.sampling.rate, status.samples) == (1.0, 0)
    client = lite.hubness_client()
    client.search(done.target, queries[:9].tolist(), limit=1)
    client.close()
    assert list_samplings(store, done.target)[0].samples == 9
    assert list_samplings(store, plain)[0].samples == 100


def test_a_field_that_is_corrected_in_place_stays_sampled(lite, plain, rng):
    store = lite.store()
    start_sampling(store, plain, rate=1.0, size=10**7)
    client = lite.hubness_client()
    client.search(plain, vectors(rng, 60, DIM).tolist(), limit=1)
    client.close()
    bank = sampled_bank(store, plain)
    lite.made.append(f"{plain}__bank")
    enable(store, plan_correction(store, plain, Recipe(bank, verdict="skip"), Beside()))
    assert list_samplings(store, plain)[0].samples == 60

    client = lite.hubness_client()
    client.search(plain, vectors(rng, 5, DIM).tolist(), limit=1)
    client.close()
    assert list_samplings(store, plain)[0].samples == 65


def test_a_bank_of_samples_needs_a_sampling_and_a_sample(lite, plain):
    store = lite.store()
    with pytest.raises(InvalidInput, match=r"no queries of .* are sampled"):
        sampled_bank(store, plain)
    start_sampling(store, plain, size=120)
    with pytest.raises(EmptyBank, match=r"no query of .* is sampled yet"):
        sampled_bank(store, plain)


def test_fewer_places_hold_the_newest_samples(lite, plain, rng):
    store = lite.store()
    start_sampling(store, plain, size=100)
    queries = vectors(rng, 90, DIM)
    put_queries(store, plain, queries)
    assert start_sampling(store, plain, size=30).samples == 30
    assert as_set(sampled_bank(store, plain).vectors) <= as_set(queries)
    assert start_sampling(store, plain, size=60).samples == 30


def test_commands_say_that_samples_exist(lite, plain, rng):
    store = lite.store()
    start_sampling(store, plain)
    put_queries(store, plain, vectors(rng, 25, DIM))
    for job in (lambda: tune(store, plain), lambda: diagnose(store, plain, vectors(rng, 5, DIM))):
        with pytest.raises(
            InvalidInput, match=r"25 queries of .* are sampled, pass --bank samples"
        ):
            job()


@pytest.fixture
def stored_queries(lite, plain, rng):
    """A sampled bank of `plain`, and a collection with other queries."""
    store = lite.store()
    start_sampling(store, plain)
    put_queries(store, plain, vectors(rng, 80, DIM))
    others = lite.name()
    plain_collection(lite.client(), others, vectors(rng, 60, DIM), "IP")
    return others


@pytest.mark.parametrize("text", ["samples", "collection"])
def test_jobs_in_python_take_banks_that_are_in_the_database(lite, plain, stored_queries, text):
    """By the names that the command line has for them."""
    store = lite.store()
    named = text if text == "samples" else f"collection:{stored_queries}"
    bank = sampled_bank(store, plain) if text == "samples" else read_bank(store, named)
    assert tune(store, plain, named).to_dict() == tune(store, plain, bank).to_dict()
    assert diagnose(store, plain, recipe=named, queries=f"collection:{stored_queries}").bank
    looked = check(store, plain, named)
    assert looked.tuning.bank_size == len(bank)

    for plan in (
        plan_correction(store, plain, Recipe(named, verdict="skip")),
        plan_correction(store, plain, Recipe(named, verdict="skip"), Beside()),
    ):
        assert as_set(plan.chosen.bank.vectors) == as_set(bank.vectors)
    migrate(store, plan_correction(store, plain, Recipe(bank, verdict="skip")), no_writers=True)
    other = f"collection:{stored_queries}"
    live = aliased(store, f"{plain}_hubness")
    refresh(store, live, Recipe(other, verdict="skip"))
    profile = store.info(live).state_of(None).profile
    assert profile.bank.queries_fingerprint == read_bank(store, other).fingerprint


def test_a_bank_that_is_not_in_the_database_is_an_error(lite, plain):
    with pytest.raises(InvalidInput, match=r"no queries of .* are sampled"):
        tune(lite.store(), plain, "samples")
    with pytest.raises(CollectionNotFound):
        plan_correction(lite.store(), plain, "collection:nowhere")


def test_sampling_stops_and_what_it_stored_goes(lite, plain, rng):
    store, client = lite.store(), lite.hubness_client()
    assert stop_sampling(store, plain) is None
    start_sampling(store, plain, rate=1.0)
    client.search(plain, vectors(rng, 3, DIM).tolist(), limit=1)
    stopped = stop_sampling(store, plain)
    assert stopped.rate == 1.0
    properties = client.describe_collection(plain)["properties"]
    assert not properties.get(SAMPLINGS_PROPERTY)
    client.search(plain, vectors(rng, 300, DIM).tolist(), limit=1)
    client.close()
    assert not store.exists(f"{plain}__query_samples_vector")


def test_what_belongs_to_a_plain_collection_goes_with_it(lite, plain, rng):
    store, client = lite.store(), lite.hubness_client()
    start_sampling(store, plain, rate=1.0, size=10**7)
    client.search(plain, vectors(rng, 3, DIM).tolist(), limit=1)
    assert f"{plain}__query_samples_vector" not in client.list_collections()
    client.rename_collection(plain, f"{plain}_renamed")
    client.load_collection(f"{plain}_renamed")
    lite.made += [f"{plain}_renamed"]
    assert sampled_after(lite, store, f"{plain}_renamed", rng) >= 5
    client.drop_collection(f"{plain}_renamed")
    client.close()
    assert not store.exists(f"{plain}__query_samples_vector")


def sampled_after(lite, store, name, rng):
    client = lite.hubness_client()
    client.search(name, vectors(rng, 5, DIM).tolist(), limit=1)
    client.close()
    [status] = list_samplings(store, name)
    return status.samples


def test_settings_that_make_no_sense_are_refused(lite, plain):
    store = lite.store()
    with pytest.raises(InvalidParameter, match="rate"):
        start_sampling(store, plain, rate=2.0)
    with pytest.raises(InvalidParameter, match="places"):
        start_sampling(store, plain, places=5)
    with pytest.raises(InvalidInput, match="no float vector field 'nothing'"):
        start_sampling(store, plain, field="nothing")
    with pytest.raises(InvalidInput, match=r"no queries of .* are sampled"):
        sampled_bank(store, plain)
    with pytest.raises(StoreError):
        start_sampling(store, "nowhere")
    assert list_samplings(store, plain) == []
