"""Clients sample live queries, whatever happens meanwhile to the collection, to its samples and to their sampling."""

import threading
import time

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    CollectionExists,
    Copy,
    InvalidInput,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.correction.codec.arrays import encode, rounded
from milvus_hubness.correction.overrides import NONE
from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling, stop_sampling
from milvus_hubness.jobs.store.ownership import QUERY_SAMPLES_PROPERTY, CollectionId
from milvus_hubness.jobs.store.records import SAMPLINGS_PROPERTY, Sampling, Samplings
from milvus_hubness.milvus.client.query_samples import BATCH, Sampler
from milvus_hubness.milvus.client.searches import Searches
from milvus_hubness.milvus.client.state_cache import CachedState
from tests.support.galleries import not_called, plain_collection, vectors

DIM, OTHER_DIM, ITEMS = 12, 6, 80
PLACES = 10**7
"""So many that hardly two samples of a test take the same."""
SHARED_PLACES = 2
"""Samples that may have taken the place of another one."""
TTL = 0.3
HALVES = {"float16": DataType.FLOAT16_VECTOR, "bfloat16": DataType.BFLOAT16_VECTOR}
MADE = {"test_fields_of_half_precision_are_sampled": {"running": ["server-current"]}}
"""Milvus Lite and 2.3.5 have no such fields."""


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def sampled_collection(backend, rng, **settings):
    """Return the name of a plain collection whose queries are all sampled."""
    name = backend.name()
    plain_collection(backend.client(), name, vectors(rng, ITEMS, DIM), "IP")
    backend.made.append(f"{name}__query_samples_vector")
    start_sampling(backend.store(), name, **{"rate": 1.0, "size": PLACES, **settings})
    return name


def as_set(rows):
    return {np.asarray(row, np.float32).tobytes() for row in rows}


def samples(store, name, field=None):
    return as_set(sampled_bank(store, name, field).vectors)


def taken(client):
    """Return the number of queries that a client sampled."""
    counts = client.hubness_samples
    return counts.stored + counts.dropped + counts.waiting


# -- several fields, halves, other names ---------------------------------------------------------


def two_fields(backend, rng):
    client, name = backend.client(), backend.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("text", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("image", DataType.FLOAT_VECTOR, dim=OTHER_DIM)
    index = client.prepare_index_params()
    for field in ("text", "image"):
        index.add_index(field, index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    texts, images = vectors(rng, ITEMS, DIM), vectors(rng, ITEMS, OTHER_DIM)
    client.insert(
        name,
        [
            {"id": i, "text": text, "image": image}
            for i, (text, image) in enumerate(zip(texts, images, strict=True))
        ],
    )
    backend.made += [f"{name}__query_samples_{field}" for field in ("text", "image")]
    return name


def test_of_several_vector_fields_each_is_sampled_by_itself(lite, rng):
    name, store = two_fields(lite, rng), lite.store()
    texts, images = vectors(rng, 9, DIM), vectors(rng, 9, OTHER_DIM)
    with pytest.raises(InvalidInput, match="field"):
        start_sampling(store, name, rate=1.0)

    def search(start, end):
        client = lite.hubness_client()
        client.search(name, texts[start : end - 1].tolist(), anns_field="text", limit=2)
        client.search(name, images[start : end - 1].tolist(), anns_field="image", limit=2)
        last = [
            AnnSearchRequest(texts[end - 1 : end].tolist(), "text", {}, limit=2),
            AnnSearchRequest(images[end - 1 : end].tolist(), "image", {}, limit=2),
        ]
        client.hybrid_search(name, last, RRFRanker(), limit=2)
        client.close()

    start_sampling(store, name, field="image", rate=1.0, size=PLACES)
    search(0, 3)
    assert samples(store, name, "image") == as_set(images[:3])
    with pytest.raises(InvalidInput, match=r"no queries of .* are sampled"):
        sampled_bank(store, name, "text")

    start_sampling(store, name, field="text", rate=1.0, size=PLACES)
    search(3, 6)
    assert samples(store, name, "image") == as_set(images[:6])
    assert samples(store, name, "text") == as_set(texts[3:6])

    stop_sampling(store, name, field="image")
    search(6, 9)
    assert samples(store, name, "text") == as_set(texts[3:9])
    assert [status.sampling.field for status in list_samplings(store, name)] == ["text"]
    assert not store.exists(f"{name}__query_samples_image")


@pytest.mark.parametrize("dtype", HALVES)
def test_fields_of_half_precision_are_sampled(backend, rng, dtype):
    client, name = backend.client(), backend.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", HALVES[dtype], dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    client.insert(name, [{"id": 1, "vector": encode(vectors(rng, 1, DIM), dtype)[0]}])

    start_sampling(backend.store(), name, rate=1.0, size=PLACES)
    queries = rounded(vectors(rng, 5, DIM), dtype)
    sampling = backend.hubness_client()
    sampling.search(name, list(encode(queries, dtype)), limit=1)
    sampling.close()
    assert samples(backend.store(), name) == as_set(queries)


@pytest.mark.parametrize("dtype", HALVES)
def test_queries_of_half_precision_are_sampled_as_numbers(rng, dtype):
    """What a search of such a field, that nothing corrects, gives to the sampler."""
    stored = []
    sampler = Sampler(lambda target, some: stored.extend(each.vector for each in some))
    searches = Searches(not_called, not_called, not_called, NONE, sampler)
    sampling = Sampling(
        field="vector", samples_collection="s", rate=1.0, size=9, dim=DIM, dtype=dtype
    )
    cached = CachedState(
        CollectionId(name="c", identity="7"), samplings=Samplings(fields=(sampling,))
    )
    queries = rounded(vectors(rng, 4, DIM), dtype)
    as_sent = encode(queries, dtype)
    searches.notify(cached, lambda: (None, as_sent[:2]))
    searches.notify(cached, lambda: ("vector", as_sent[2:]))
    searches.notify(cached, lambda: ("another", as_sent))
    sampler.close()
    assert [row.tolist() for row in stored] == queries.tolist()


def test_searches_through_an_alias_are_sampled(backend, rng):
    name, store, plain = sampled_collection(backend, rng), backend.store(), backend.client()
    other = backend.name()
    plain_collection(plain, other, vectors(rng, ITEMS, DIM), "IP")
    alias = f"{name}_alias"
    plain.create_alias(name, alias)
    changed = start_sampling(store, alias, rate=1.0)
    assert changed.sampling.samples_collection == f"{name}__query_samples_vector"

    queries = vectors(rng, 9, DIM)
    client = backend.hubness_client()
    client.search(alias, queries[:4].tolist(), limit=1)
    client.search(name, queries[4:6].tolist(), limit=1)

    # An alias that moves takes no sampling with it.
    plain.alter_alias(other, alias)
    client.search(alias, queries[6:].tolist(), limit=1)
    client.close()
    assert samples(store, name) == as_set(queries[:6])
    assert list_samplings(store, alias) == []
    assert client.hubness_samples.stored == 6


def renamed(client, name, backend):
    """Rename a collection by this client; return the new name."""
    client.rename_collection(name, f"{name}_renamed")
    client.load_collection(f"{name}_renamed")
    backend.made.append(f"{name}_renamed")
    return f"{name}_renamed"


def test_a_renamed_collection_is_sampled_on(backend, rng):
    name, store = sampled_collection(backend, rng), backend.store()
    queries = vectors(rng, 9, DIM)
    client = backend.hubness_client()
    client.search(name, queries[:2].tolist(), limit=1)
    client.close()

    client = backend.hubness_client()
    client.search(name, queries[2:4].tolist(), limit=1)
    new_name = renamed(client, name, backend)
    client.search(new_name, queries[4:].tolist(), limit=1)
    client.close()

    # Milvus Lite does not number collections: samples that wait during the rename name no other one.
    lost = as_set(queries[2:4]) if backend.is_lite else set()
    assert as_set(queries) - samples(store, new_name) <= lost
    assert [status.sampling.rate for status in list_samplings(store, new_name)] == [1.0]


# -- changes while clients run -------------------------------------------------------------------


def test_what_is_changed_reaches_running_clients_within_state_ttl(lite, rng):
    name, store = lite.name(), lite.store()
    plain_collection(lite.client(), name, vectors(rng, ITEMS, DIM), "IP")
    lite.made.append(f"{name}__query_samples_vector")
    client = lite.hubness_client(state_ttl=TTL)
    queries = vectors(rng, 30, DIM).tolist()

    def sampled_by_a_search():
        before = taken(client)
        time.sleep(TTL)
        assert len(client.search(name, queries, limit=1)) == len(queries)
        return taken(client) - before

    assert sampled_by_a_search() == 0
    start_sampling(store, name, rate=1.0, size=PLACES)
    assert sampled_by_a_search() == 30
    start_sampling(store, name, rate=1e-9)
    assert sampled_by_a_search() == 0
    start_sampling(store, name, rate=0.999999)
    assert sampled_by_a_search() >= 29
    stop_sampling(store, name)
    assert sampled_by_a_search() == 0
    client.close()


@pytest.mark.parametrize("by_name", ["alias", "rename"])
def test_a_cutover_under_a_sampling_client_mixes_no_samples(backend, rng, by_name):
    """Each query is a sample of the collection that answered it, before and after."""
    name, store = sampled_collection(backend, rng), backend.store()
    live, source = name, f"{name}__before_hubness"
    switch = {"rename": True}
    if by_name == "alias":
        live, source = f"{name}_live", name
        backend.client().create_alias(name, live)
        switch = {"alias": live}
    backend.made += [source, f"{name}_hubness__query_samples_vector"]

    queries = vectors(rng, 5_000, DIM)
    client = backend.hubness_client(state_ttl=TTL)
    answered, failures, ended = [], [], threading.Event()

    def search():
        while not ended.is_set():
            query = queries[len(answered)]
            try:
                assert len(client.search(live, [query.tolist()], limit=3)[0]) == 3
            except Exception as error:
                failures.append(error)
            answered.append(query)
            time.sleep(0.01)

    def wait_for(count):
        until = time.monotonic() + 60
        while len(answered) < count:
            assert time.monotonic() < until, failures
            time.sleep(0.01)

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    try:
        wait_for(20)
        until = time.monotonic() + 60
        while not client.hubness_samples.stored:
            assert time.monotonic() < until, "nothing is sampled"
            time.sleep(0.01)
        plan = plan_correction(
            store, name, Recipe(QueryBank(vectors(rng, 40, DIM)), estimator=NNN(4)), Copy(**switch)
        )
        target = migrate(store, plan, client_ttl=TTL).target
        time.sleep(2 * TTL)
        moved = len(answered) + 1
        wait_for(moved + 20)
    finally:
        ended.set()
        thread.join(60)
    client.close()

    assert not failures
    asked = [query.tobytes() for query in answered]
    before, after = samples(store, source), samples(store, target)
    assert before | after <= set(asked)
    assert before & after == set()
    assert set(asked[:20]) <= before
    assert set(asked[moved:]) <= after

    lost = [number for number, query in enumerate(asked) if query not in before | after]
    dropped_count = client.hubness_samples.dropped
    assert dropped_count <= len(lost) <= dropped_count + SHARED_PLACES
    if by_name == "alias" or not backend.is_lite:
        assert dropped_count == 0
    elif dropped_count:
        # Milvus Lite does not number collections: what waits during a rename is dropped.
        first_after = next(number for number, query in enumerate(asked) if query in after)
        assert np.median(lost) < min(lost[0] + dropped_count + SHARED_PLACES, first_after)


# -- samples that cannot be written --------------------------------------------------------------


def refused(monkeypatch):
    """Have the server refuse what samples are written with, as it does without the right to."""
    upsert = MilvusClient.upsert

    def upsert_or_refuse(self, collection_name, *arguments, **options):
        if "__query_samples" in collection_name:
            raise MilvusException(code=65535, message="privilege Upsert is not permitted")
        return upsert(self, collection_name, *arguments, **options)

    monkeypatch.setattr(MilvusClient, "upsert", upsert_or_refuse)


def dropped(lite, name):
    lite.client().drop_collection(f"{name}__query_samples_vector")


def taken_by_a_stranger(lite, name):
    dropped(lite, name)
    rows = np.eye(DIM, dtype=np.float32)[:3]
    plain_collection(lite.client(), f"{name}__query_samples_vector", rows, "IP")


@pytest.mark.parametrize("problem", ["no right", "dropped", "stranger"])
def test_a_client_that_can_write_no_samples_searches_on(lite, rng, monkeypatch, problem):
    name = sampled_collection(lite, rng)
    queries = vectors(rng, BATCH, DIM).tolist()
    wanted = [hits.ids for hits in lite.client().search(name, queries, limit=3)]
    if problem == "no right":
        refused(monkeypatch)
    elif problem == "dropped":
        dropped(lite, name)
    else:
        taken_by_a_stranger(lite, name)

    client = lite.hubness_client()
    for _ in range(3):
        assert [hits.ids for hits in client.search(name, queries, limit=3)] == wanted
    client.close()
    counts = client.hubness_samples
    assert (counts.stored, counts.dropped) == (0, 3 * BATCH)
    if problem == "stranger":
        rows = lite.client().query(
            f"{name}__query_samples_vector", filter="id >= 0", output_fields=["*"]
        )
        assert sorted(row["id"] for row in rows) == [0, 1, 2]


# -- who may turn sampling on ---------------------------------------------------------------------


def forged(backend, name):
    """Have a stranger create a collection for samples of `name`, and say so in its properties."""
    plain, store = backend.client(), backend.store()
    owner = store.info(name, counted=False).collection_id
    samples_collection = f"{name}__query_samples_vector"
    schema = plain.create_schema()
    schema.add_field("place", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("sample", DataType.INT64)
    schema.add_field("queried_at", DataType.INT64)
    index = plain.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    plain.create_collection(
        samples_collection,
        schema=schema,
        index_params=index,
        properties={QUERY_SAMPLES_PROPERTY: owner.model_dump_json()},
        consistency_level="Strong",
    )
    sampling = Sampling(
        field="vector", samples_collection=samples_collection, rate=1.0, size=100, dim=DIM
    )
    text = Samplings(fields=(sampling,)).model_dump_json()
    plain.alter_collection_properties(name, {SAMPLINGS_PROPERTY: text})
    return samples_collection


@pytest.mark.parametrize("before", ["never sampled", "stopped"])
def test_a_property_alone_samples_nothing(lite, rng, caplog, before):
    if before == "stopped":
        name = sampled_collection(lite, rng)
        stop_sampling(lite.store(), name)
    else:
        name = lite.name()
        plain_collection(lite.client(), name, vectors(rng, ITEMS, DIM), "IP")
        lite.made.append(f"{name}__query_samples_vector")

    samples_collection = forged(lite, name)
    client = lite.hubness_client()
    client.search(name, vectors(rng, 5, DIM).tolist(), limit=3)
    client.close()
    assert client.hubness_samples.stored == 0
    assert not lite.client().query(samples_collection, filter="place >= 0")
    assert "is no helper collection of" in caplog.text

    assert list_samplings(lite.store(), name) == []
    with pytest.raises(CollectionExists, match="the ledger does not list it"):
        start_sampling(lite.store(), name, rate=1.0)


def test_samples_of_strangers_count_for_nothing(lite, rng):
    name = sampled_collection(lite, rng, size=50)
    client, store = lite.hubness_client(), lite.store()
    honest = vectors(rng, 8, DIM)
    plain = lite.client()

    def row(place, number, at, vector):
        return {"place": place, "sample": number, "queried_at": at, "vector": vector.tolist()}

    now = int(time.time())
    rows = [row(place, 100 + place, now, vector) for place, vector in enumerate(honest)]
    strangers = vectors(rng, 9, DIM)
    rows += [
        row(20, 1, 32_503_680_000, strangers[0]),
        row(21, 2, 2**63 - 1, strangers[1]),
        row(22, 3, -(2**63), strangers[2]),
        row(23, -4, now, strangers[3]),
        row(24, 100, now, strangers[4]),
        row(50, 5, now, strangers[5]),
        row(2**62, 6, now, strangers[6]),
        row(-1, 7, now, strangers[7]),
        row(25, 8, now, np.zeros(DIM)),
        row(26, 9, now + 3_600, strangers[8]),
    ]
    plain.upsert(f"{name}__query_samples_vector", rows)
    assert samples(store, name) == as_set(honest)
    [status] = list_samplings(store, name)
    assert (status.samples, status.first, status.last) == (8, now, now)

    # As many rows as a stranger likes: no more are read than there are places.
    crowd = [row(1_000 + n, 1_000 + n, now, strangers[0]) for n in range(3_000)]
    plain.upsert(f"{name}__query_samples_vector", crowd)
    read = []
    query = MilvusClient.query
    with pytest.MonkeyPatch.context() as patch:

        def counted(self, *arguments, **options):
            rows = query(self, *arguments, **options)
            read.append(len(rows))
            return rows

        patch.setattr(MilvusClient, "query", counted)
        assert samples(lite.store(), name) == as_set(honest)
    assert sum(read) < 100
    client.close()
