"""Online banks, end to end: live queries sampled, taken into the bank, and the samples dropped."""

import asyncio
import time

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker, WeightedRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    CollectionExists,
    CorrectionConfig,
    HubnessClient,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    StateError,
    StoreError,
    refresh,
)
from milvus_hubness.jobs.refresh.online_bank import (
    absorbed,
    drift,
    drop_processed,
)
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling, stop_sampling
from milvus_hubness.jobs.store.ownership import CollectionId, samples_helper
from milvus_hubness.jobs.store.records import SAMPLINGS_PROPERTY, Sample, SamplesOf
from milvus_hubness.milvus.client.query_samples import BATCH, Sampled
from milvus_hubness.milvus.store.banks import put_samples
from tests.support.async_clients import opened
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS, BANK = 12, 120, 40


class Corrected:
    """A corrected collection whose bank is to live."""

    def __init__(self, backend, metric="IP"):
        rng = np.random.default_rng(3)
        self.backend = backend
        self.items, self.bank, self.queries = (vectors(rng, n, DIM) for n in (ITEMS, BANK, 60))
        self.name, self.store = backend.name(), backend.store()
        self.samples_collection = f"{self.name}__query_samples"
        client = backend.hubness_client()
        client.create_collection(
            self.name,
            DIM,
            metric_type=metric,
            consistency_level="Strong",
            hubness=CorrectionConfig(QueryBank(self.bank), NNN(8)),
        )
        rows = [{"id": i, "vector": item, "group": i % 5} for i, item in enumerate(self.items)]
        client.insert(self.name, rows)
        client.close()
        backend.made.append(self.samples_collection)

    @property
    def state(self):
        return self.store.info(self.name).state

    def rows(self):
        return self.backend.client().query(
            self.samples_collection,
            filter="sample >= 0",
            output_fields=["*"],
            consistency_level="Strong",
        )

    def waiting(self):
        return self.store.read_query_samples(self.samples_collection, "default")

    def held(self):
        return self.store.load_bank(self.state.profile.bank).queries

    def put(self, queries, first=0, at=1_900_000_000, profile="default"):
        samples = [Sample(profile, i, first + i, at, query) for i, query in enumerate(queries)]
        put_samples(self.backend.client(), samples_of(self.store, self.name), samples, 10)


def samples_of(store, name):
    """Where the samples of the only corrected field of a collection go."""
    helper = samples_helper(f"{name}__query_samples", SAMPLINGS_PROPERTY)
    return SamplesOf(helper, store.info(name, counted=False).collection_id)


@pytest.fixture
def corrected(lite):
    return Corrected(lite)


def as_set(rows):
    return {np.asarray(row, np.float32).tobytes() for row in rows}


def test_samples_that_come_into_a_bank_are_grouped_with_it(corrected):
    assert corrected.held().groups is None, "there were no rows to find near copies by"
    start_sampling(corrected.store, corrected.name, size=100, duplicate_cosine=1.0)
    repeated = np.repeat(corrected.queries[:1], 20, axis=0)
    corrected.put(np.concatenate([corrected.queries[1:31], repeated]))
    done = refresh(corrected.store, corrected.name, live="always", force=True)
    assert done.action == "full"

    bank = corrected.held()
    assert len(bank) == len(bank.groups) == BANK + 50
    assert np.bincount(bank.groups).max() >= 20
    # What the repeated query raises, it raises as one query does.
    expected = NNN(8).fit(bank).bias(corrected.items)
    found = corrected.backend.client().query(
        corrected.name, filter="id >= 0", output_fields=["id", "hubness_bias"]
    )
    mean_bias = corrected.state.profile.mean_bias
    for row in found:
        assert row["hubness_bias"] == pytest.approx(expected[row["id"]] - mean_bias, abs=1e-4)


def test_samples_lie_in_places_and_go_by_number(backend):
    client, store = backend.client(), backend.store()
    name = backend.name()
    plain_collection(client, name, np.eye(4, dtype=np.float32), "IP")
    target = samples_of(store, name)
    samples_collection = target.helper.collection
    backend.made.append(samples_collection)
    store.create_query_samples(samples_collection, target.owner, 4)
    store.create_query_samples(samples_collection, target.owner, 4)
    stranger = CollectionId(name="another", identity="1")
    with pytest.raises(CollectionExists, match="samples of another collection than 'another'"):
        store.create_query_samples(samples_collection, stranger, 4)
    with pytest.raises(StateError, match="no helper collection of 'another'"):
        put_samples(
            client,
            SamplesOf(target.helper, stranger),
            [Sample("a", 0, 1, 5, np.ones(4, np.float32))],
            10,
        )
    first = [Sample("a", i, 10 + i, 1_000 + i, np.full(4, i + 1, np.float32)) for i in range(3)]
    put_samples(client, target, [*first, Sample("b", 0, 99, 5, np.ones(4, np.float32))], 10)
    put_samples(client, target, [Sample("a", 1, 50, 2_000, np.full(4, 9, np.float32))], 10)
    found = store.read_query_samples(samples_collection, "a")
    by_number = dict(zip(found.origins.numbers.tolist(), found.vectors.tolist(), strict=True))
    assert by_number == {10: [1] * 4, 50: [9] * 4, 12: [3] * 4}
    assert sorted(found.origins.at.tolist()) == [1_000, 1_002, 2_000]

    store.drop_samples(samples_collection, [10, 11, 12, 7_777])
    assert store.read_query_samples(samples_collection, "a").origins.numbers.tolist() == [50]
    assert store.read_query_samples(samples_collection, "b").origins.numbers.tolist() == [99]
    assert len(store.read_query_samples(f"{samples_collection}_none", "a").origins) == 0


def test_queries_of_searches_are_sampled_and_nothing_else_of_them(corrected):
    start_sampling(corrected.store, corrected.name, rate=1.0)
    client = corrected.backend.hubness_client(state_ttl=60.0)
    asked = corrected.queries
    client.search(corrected.name, data=asked[:1].tolist(), filter="group == 3", limit=2)
    for some in (asked[1:4], asked[4:8]):
        client.search(
            corrected.name, data=list(some), limit=3, output_fields=["group"], strength=0.5
        )
    requests = [
        AnnSearchRequest([asked[i]], "vector", {}, 5, expr="group < 4", expr_params={})
        for i in (8, 9)
    ]
    client.hybrid_search(corrected.name, requests, RRFRanker(), limit=3)
    client.search(corrected.name, ids=[1, 2], limit=2)
    with pytest.raises(MilvusException):
        client.search(corrected.name, data=[[1.0] * 5], limit=2)
    client.close()
    rows = corrected.rows()
    assert as_set(row["vector"] for row in rows) == as_set(asked[:10])
    assert {name for row in rows for name in row} == {
        "place",
        "vector",
        "profile",
        "sample",
        "queried_at",
    }
    assert {row["profile"] for row in rows} == {"default"}
    assert client.hubness_samples == Sampled(stored=10, dropped=0, waiting=0)


def test_an_answer_that_is_merged_samples_each_query_once(lite):
    corrected = Corrected(lite, "COSINE")
    start_sampling(corrected.store, corrected.name, rate=1.0)
    client = lite.hubness_client()
    requests = [AnnSearchRequest([query], "vector", {}, 5) for query in corrected.queries[:2]]
    client.hybrid_search(corrected.name, requests, WeightedRanker(0.5, 0.5), limit=3)
    client.close()
    assert sorted(as_set(row["vector"] for row in corrected.rows())) == sorted(
        as_set(corrected.queries[:2])
    )
    assert client.hubness_samples.stored == 2


def test_an_async_client_samples_the_same(corrected):
    start_sampling(corrected.store, corrected.name, rate=1.0)

    async def ask():
        async with opened(corrected.backend) as client:
            await asyncio.gather(
                *(
                    client.search(corrected.name, data=[query], limit=3)
                    for query in corrected.queries[:8]
                )
            )
            request = AnnSearchRequest([corrected.queries[8]], "vector", {}, 5)
            await client.hybrid_search(corrected.name, [request], RRFRanker(), limit=3)
        return client.hubness_samples

    counts = asyncio.run(ask())
    assert as_set(row["vector"] for row in corrected.rows()) == as_set(corrected.queries[:9])
    assert (counts.stored, counts.dropped) == (9, 0)


def test_the_rate_is_that_of_the_bank_and_a_client_may_sample_nothing(corrected):
    store, name = corrected.store, corrected.name
    assert client_samples(corrected) == 0
    start_sampling(store, name, rate=1e-9)
    assert client_samples(corrected) == 0
    start_sampling(store, name, rate=1.0)
    assert client_samples(corrected) == 20
    assert client_samples(corrected, sample_queries=False) == 0
    with pytest.raises(MilvusException, match="sample_queries"):
        HubnessClient(corrected.backend.uri, sample_queries=0.5)


def client_samples(corrected, **options):
    client = corrected.backend.hubness_client(**options)
    client.search(corrected.name, data=list(corrected.queries[:20]), limit=1)
    client.close()
    counts = client.hubness_samples
    return counts.stored + counts.dropped


def test_searches_do_not_suffer_where_no_sample_can_be_written(corrected):
    start_sampling(corrected.store, corrected.name, rate=1.0)
    client = corrected.backend.hubness_client()
    queries = [*corrected.queries] * (BATCH // len(corrected.queries) + 1)
    before = client.search(corrected.name, data=queries, limit=5)
    corrected.store.drop(corrected.samples_collection)
    for _ in range(3):
        found = client.search(corrected.name, data=queries, limit=5)
        assert [[(hit.id, hit.distance) for hit in hits] for hits in found] == [
            [(hit.id, hit.distance) for hit in hits] for hits in before
        ]
    corrected.backend.client().alter_collection_properties(
        corrected.name, {SAMPLINGS_PROPERTY: "{broken"}
    )
    assert client.search(corrected.name, data=queries, limit=5)
    client.close()
    assert client.hubness_samples.dropped >= 60


def test_samples_never_outgrow_their_places(corrected):
    """4,000 samples take random ones of 2,000 places."""
    assert start_sampling(corrected.store, corrected.name, rate=1.0).sampling.capacity == 2_000
    client = corrected.backend.hubness_client()
    for seed in range(8):
        some = vectors(np.random.default_rng(seed), 500, DIM)
        client.search(corrected.name, data=list(some), limit=1)
        while client.hubness_samples.waiting > 500:
            time.sleep(0.01)
    client.close()
    assert client.hubness_samples == Sampled(4_000, 0, 0)
    assert 1_500 < len(corrected.waiting().origins) <= 2_000


def test_the_bank_takes_live_queries_in_and_the_samples_go(corrected):
    store, name = corrected.store, corrected.name
    started = start_sampling(store, name, rate=1.0, seed_share=0.5, half_life_seconds=60.0)
    assert (started.seed, started.live, started.waiting) == (BANK, 0, 0)
    assert absorbed(store, name).bank is None
    corrected.put(corrected.queries[:30])
    done = absorbed(store, name)
    assert (done.seed, done.live, done.taken, done.duplicates, done.dropped) == (20, 20, 20, 0, 10)
    assert len(done.samples) == 30
    assert as_set(done.bank.vectors) <= as_set([*corrected.bank, *corrected.queries[:30]])

    result = refresh(store, name, bank=done.bank)
    assert result.action == "full"
    assert result.reason.startswith("the bank changed")
    drop_processed(store, done)
    assert len(corrected.waiting().origins) == 0
    [told] = list_samplings(store, name)
    assert (told.seed, told.live, told.waiting) == (20, 20, 0)
    assert corrected.held().fingerprint == done.bank.fingerprint
    np.testing.assert_array_equal(corrected.held().origins.numbers, done.bank.origins.numbers)

    refresh(store, name, estimator=NNN(4))
    np.testing.assert_array_equal(corrected.held().origins.numbers, done.bank.origins.numbers)
    np.testing.assert_array_equal(corrected.held().origins.at, done.bank.origins.at)


def test_whatever_a_killed_job_left_no_query_counts_twice(corrected, monkeypatch):
    store, name = corrected.store, corrected.name
    start_sampling(store, name, rate=1.0, size=60)
    corrected.put(corrected.queries[:30])
    first = absorbed(store, name)
    with monkeypatch.context() as broken:
        broken.setattr(type(store), "write_property", killed)
        with pytest.raises(KeyboardInterrupt):
            refresh(store, name, bank=first.bank)
    assert as_set(corrected.held().vectors) == as_set(corrected.bank)

    again = absorbed(store, name)
    assert again.bank.fingerprint == first.bank.fingerprint
    refresh(store, name, bank=again.bank)
    unsettled = absorbed(store, name)
    assert unsettled.bank is None
    assert (unsettled.taken, set(unsettled.samples)) == (0, set(first.samples))

    corrected.put(corrected.queries[30:40], first=100)
    third = absorbed(store, name)
    assert third.taken == 10
    refresh(store, name, bank=third.bank)
    drop_processed(store, unsettled)
    drop_processed(store, third)
    drop_processed(store, third)
    assert len(corrected.waiting().origins) == 0
    numbers = corrected.held().origins.numbers.tolist()
    assert len(set(numbers)) == len(numbers) == 60


def killed(*_):
    raise KeyboardInterrupt


def test_a_sample_that_took_a_place_meanwhile_is_not_dropped(corrected):
    start_sampling(corrected.store, corrected.name)
    corrected.put(corrected.queries[:5])
    done = absorbed(corrected.store, corrected.name)
    corrected.put(corrected.queries[10:12], first=50)
    drop_processed(corrected.store, done)
    assert sorted(corrected.waiting().origins.numbers.tolist()) == [50, 51]


def test_a_bank_given_by_hand_begins_anew(corrected):
    store, name = corrected.store, corrected.name
    start_sampling(store, name, size=80)
    corrected.put(corrected.queries[:10])
    done = absorbed(store, name)
    refresh(store, name, bank=done.bank)
    drop_processed(store, done)
    refresh(store, name, bank=QueryBank(corrected.queries[20:50]))
    assert corrected.held().origins.are_seeds.all()
    assert absorbed(store, name).seed == 30


def test_each_profile_has_a_bank_of_its_own(corrected):
    store, name = corrected.store, corrected.name
    refresh(store, name, bank=QueryBank(corrected.queries[:30]), estimator=NNN(4), profile="images")
    start_sampling(store, name, rate=1.0)
    start_sampling(store, name, rate=1.0, profile="images", size=50)
    client = corrected.backend.hubness_client()
    client.search(name, data=list(corrected.queries[40:45]), limit=1)
    client.search(name, data=list(corrected.queries[45:48]), limit=1, profile="images")
    client.close()
    assert as_set(corrected.waiting().vectors) == as_set(corrected.queries[40:45])
    done = absorbed(store, name, profile="images")
    assert (done.seed, done.live) == (30, 3)
    assert {each.sampling.profile: each.waiting for each in list_samplings(store, name)} == {
        "default": 5,
        "images": 3,
    }

    stop_sampling(store, name)
    assert [each.sampling.profile for each in list_samplings(store, name)] == ["images"]
    assert len(corrected.waiting().origins) == 0
    assert absorbed(store, name, profile="images").live == 3
    stop_sampling(store, name, profile="images")
    assert not store.exists(corrected.samples_collection)
    assert absorbed(store, name) is None
    assert stop_sampling(store, name) is None


def test_terms_can_change_and_are_checked(corrected):
    store, name = corrected.store, corrected.name
    start_sampling(store, name, rate=0.5)
    changed = start_sampling(store, name, size=70, half_life_seconds=5.0).sampling
    assert (changed.rate, changed.size, changed.half_life_seconds) == (0.5, 70, 5.0)
    assert (changed.seed_share, changed.duplicate_cosine) == (0.25, 0.99)
    wrong = {
        "rate": 0.0,
        "size": 0,
        "seed_share": 1.1,
        "half_life_seconds": 0.0,
        "duplicate_cosine": -1.0,
    }
    for option, value in wrong.items():
        with pytest.raises(InvalidParameter, match=option):
            start_sampling(store, name, **{option: value})
    with pytest.raises(InvalidInput, match="no profile"):
        start_sampling(store, name, profile="none")
    described = corrected.backend.hubness_client().describe_collection(name)
    assert SAMPLINGS_PROPERTY not in described["properties"]


def test_a_taken_name_is_refused(corrected):
    client = corrected.backend.client()
    plain_collection(client, corrected.samples_collection, corrected.items[:3], "IP")
    with pytest.raises(CollectionExists, match="is no collection of samples"):
        start_sampling(corrected.store, corrected.name)
    assert list_samplings(corrected.store, corrected.name) == []
    with pytest.raises(StoreError):
        list_samplings(corrected.store, "nowhere")


def test_drift_is_told_of_the_samples_that_wait(corrected):
    store, name = corrected.store, corrected.name
    assert "turn its online bank on" in drift(store, name).reason
    rng = np.random.default_rng(8)
    bank, alike = np.split(vectors(rng, 500, DIM), [300])
    refresh(store, name, bank=QueryBank(bank))
    start_sampling(store, name)
    assert "no recent queries" in drift(store, name).reason
    corrected.put(np.repeat(alike[:20], 10, 0))
    few = drift(store, name)
    assert (few.fired, few.recent) == (False, 20)

    corrected.put(alike)
    quiet = drift(store, name)
    assert (quiet.fired, quiet.recent) == (False, 200)
    corrected.put(vectors(rng, 200, DIM))
    other = vectors(rng, 600, DIM)
    corrected.put(other[:300])
    moved = drift(store, name)
    assert moved.fired
    assert moved.statistic > 0.002
    assert "of the variance" in moved.reason

    done = absorbed(store, name)
    assert (done.seed, done.live) == (75, 225)
    refresh(store, name, bank=done.bank, force=True)
    drop_processed(store, done)
    corrected.put(other[300:], first=1_000)
    followed = drift(store, name)
    assert (followed.fired, followed.bank) == (False, 225)


def test_a_client_of_pymilvus_sees_no_difference(corrected):
    start_sampling(corrected.store, corrected.name)
    client = corrected.backend.client(MilvusClient)
    assert client.has_collection(corrected.samples_collection)
    assert client.query(corrected.name, filter="id == 1", output_fields=["group"])[0]["group"] == 1
