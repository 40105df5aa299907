"""Queries of searches on a corrected collection: sampled, counted, and taken as a bank."""

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
    InvalidParameter,
    QueryBank,
    Recipe,
    StateError,
    StoreError,
    refresh,
)
from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.refresh.refit import samples_for_refresh
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from milvus_hubness.jobs.store.ownership import CollectionId, samples_helper
from milvus_hubness.jobs.store.records import SAMPLINGS_PROPERTY, Sample, SamplesOf
from milvus_hubness.milvus.client.query_samples import BATCH, Sampled
from milvus_hubness.milvus.store.banks import put_samples
from tests.support.aliases import aliased
from tests.support.async_clients import opened
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS, BANK = 12, 120, 40


class Corrected:
    """A corrected collection whose queries are to be sampled."""

    def __init__(self, backend, metric="IP"):
        rng = np.random.default_rng(3)
        self.backend = backend
        self.items, self.bank, self.queries = (vectors(rng, n, DIM) for n in (ITEMS, BANK, 60))
        collection, self.store = backend.name(), backend.store()
        client = backend.hubness_client()
        client.create_collection(
            collection,
            DIM,
            metric_type=metric,
            consistency_level="Strong",
            hubness=CorrectionConfig(Recipe(QueryBank(self.bank), estimator=NNN(8))),
        )
        rows = [{"id": i, "vector": item, "group": i % 5} for i, item in enumerate(self.items)]
        client.insert(collection, rows)
        client.close()
        self.name = aliased(self.store, collection)

    @property
    def samples_collection(self):
        """Each copy has its own."""
        return f"{self.store.info(self.name, counted=False).name}__query_samples_vector"

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
        return self.store.read_query_samples(self.samples_collection, 10_000)

    def held(self):
        return self.store.load_bank(self.state.profile.bank).queries

    def put(self, queries, first=0, at=None):
        at = int(time.time()) + 60 if at is None else at
        samples = [Sample(i, first + i, at, query) for i, query in enumerate(queries)]
        put_samples(self.backend.client(), samples_of(self.store, self.name), samples, 10)


def samples_of(store, name):
    """Where the samples of the only corrected field of a collection go."""
    info = store.info(name, counted=False)
    helper = samples_helper(f"{info.name}__query_samples_vector", SAMPLINGS_PROPERTY)
    return SamplesOf(helper, info.collection_id)


@pytest.fixture
def corrected(lite):
    return Corrected(lite)


def as_set(rows):
    return {np.asarray(row, np.float32).tobytes() for row in rows}


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
            [Sample(0, 1, 5, np.ones(4, np.float32))],
            10,
        )
    first = [Sample(i, 10 + i, 1_000 + i, np.full(4, i + 1, np.float32)) for i in range(3)]
    put_samples(client, target, first, 10)
    put_samples(client, target, [Sample(1, 50, 2_000, np.full(4, 9, np.float32))], 10)
    found = store.read_query_samples(samples_collection, 3)
    by_number = dict(zip(found.numbers.tolist(), found.vectors.tolist(), strict=True))
    assert by_number == {10: [1] * 4, 50: [9] * 4, 12: [3] * 4}
    assert sorted(found.at.tolist()) == [1_000, 1_002, 2_000]

    store.drop_samples(samples_collection, 2)
    left = store.read_query_samples(samples_collection, 3).numbers
    assert sorted(left.tolist()) == [10, 50]
    assert len(store.read_query_samples(f"{samples_collection}_none", 3)) == 0


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
    assert {name for row in rows for name in row} == {"place", "vector", "sample", "queried_at"}
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


def test_the_rate_is_that_of_the_collection_and_a_client_may_sample_nothing(corrected):
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
    start_sampling(corrected.store, corrected.name, rate=1.0, size=2_000)
    client = corrected.backend.hubness_client()
    for seed in range(8):
        some = vectors(np.random.default_rng(seed), 500, DIM)
        client.search(corrected.name, data=list(some), limit=1)
        while client.hubness_samples.waiting > 500:
            time.sleep(0.01)
    client.close()
    assert client.hubness_samples == Sampled(4_000, 0, 0)
    assert 1_500 < len(corrected.waiting()) <= 2_000


def test_searches_of_every_profile_are_sampled(corrected):
    store, name = corrected.store, corrected.name
    refresh(
        store, name, Recipe(QueryBank(corrected.queries[:30]), estimator=NNN(4)), profile="images"
    )
    start_sampling(store, name, rate=1.0)
    client = corrected.backend.hubness_client()
    client.search(name, data=list(corrected.queries[40:45]), limit=1)
    client.search(name, data=list(corrected.queries[45:48]), limit=1, profile="images")
    client.close()
    assert as_set(corrected.waiting().vectors) == as_set(corrected.queries[40:48])


def test_samples_are_the_bank_of_a_refresh_and_stay(corrected):
    store, name = corrected.store, corrected.name
    start_sampling(store, name)
    repeated = np.repeat(corrected.queries[:1], 20, axis=0)
    corrected.put(np.concatenate([corrected.queries[1:31], repeated]))
    sampled = sampled_bank(store, name)
    done = refresh(store, name, Recipe(sampled, verdict="skip"), force=True)
    assert done.action == "full"
    assert as_set(corrected.held().vectors) == as_set(corrected.queries[:31])
    assert len(corrected.waiting()) == 50

    # What the repeated query raises, it raises as one query does.
    bank = corrected.held()
    assert np.bincount(bank.groups).max() >= 20
    expected = NNN(8).fit(bank).bias(corrected.items)
    found = corrected.backend.client().query(
        corrected.name, filter="id >= 0", output_fields=["id", "hubness_bias"]
    )
    mean_bias = corrected.state.profile.mean_bias
    for row in found:
        assert row["hubness_bias"] == pytest.approx(expected[row["id"]] - mean_bias, abs=1e-4)

    # Without a newer sample, the next refresh finds the bank that it has.
    assert refresh(store, name, sampled_bank(store, name)).action == "none"


def test_a_killed_refresh_with_samples_goes_on_with_the_bank_it_began_with(corrected, monkeypatch):
    store, name = corrected.store, corrected.name
    start_sampling(store, name)
    corrected.put(corrected.queries[:30])
    begun = samples_for_refresh(store, name)
    with monkeypatch.context() as broken:
        broken.setattr(type(store), "flush", killed)
        with pytest.raises(KeyboardInterrupt):
            refresh(store, name, Recipe(begun, verdict="skip"), force=True, client_ttl=0)

    corrected.put(corrected.queries[30:60], first=100)
    assert samples_for_refresh(store, name) is None, "the samples that came since wait"
    assert refresh(store, name, client_ttl=0).action == "full"
    assert as_set(corrected.held().vectors) == as_set(begun.vectors)
    assert as_set(samples_for_refresh(store, name).vectors) == as_set(corrected.queries[30:60])


def killed(*_, **__):
    raise KeyboardInterrupt


def test_settings_can_change_and_are_checked(corrected):
    store, name = corrected.store, corrected.name
    start_sampling(store, name, rate=0.5)
    changed = start_sampling(store, name, size=70).sampling
    assert (changed.rate, changed.size) == (0.5, 70)
    for option, value in {"rate": 0.0, "size": 0}.items():
        with pytest.raises(InvalidParameter, match=option):
            start_sampling(store, name, **{option: value})
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


def test_a_client_of_pymilvus_sees_no_difference(corrected):
    start_sampling(corrected.store, corrected.name)
    client = corrected.backend.client(MilvusClient)
    assert client.has_collection(corrected.samples_collection)
    assert client.query(corrected.name, filter="id == 1", output_fields=["group"])[0]["group"] == 1
