"""Samples of the queries of plain clients, which the proxy takes from their searches."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException
from scipy.stats import binomtest

from milvus_hubness import (
    HubnessClient,
)
from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling, stop_sampling
from milvus_hubness.milvus.client.query_samples import BATCH
from tests.milvus.proxy.running import ProxyHere, ProxyProcess, eventually
from tests.support.galleries import plain_collection, vectors

DIM, OTHER_DIM, ITEMS = 12, 6, 100
PLACES = 10**7
"""So many that hardly two samples of a test take the same."""


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def plain(lite, rng, *, alias=None):
    """Return the name of a plain collection."""
    name = lite.name()
    plain_collection(lite.client(), name, vectors(rng, ITEMS, DIM), "IP")
    lite.made.append(f"{name}__query_samples_vector")
    if alias:
        lite.client().create_alias(name, f"{name}{alias}")
    return name


def as_set(rows):
    return {np.asarray(row, np.float32).tobytes() for row in rows}


def waiting(store, name):
    [status] = list_samplings(store, name)
    return status.samples


def test_a_plain_client_of_a_plain_collection_is_sampled(lite, rng):
    name, store = plain(lite, rng), lite.store()
    start_sampling(store, name, rate=1.0, size=PLACES)

    client = lite.hubness_client()
    assert isinstance(client, MilvusClient)
    queries = vectors(rng, 9, DIM)
    direct = lite.client().search(name, queries.tolist(), limit=5)
    answers = client.search(name, queries[:8].tolist(), limit=5)
    assert [hits.ids for hits in answers] == [hits.ids for hits in direct[:8]]
    requests = [AnnSearchRequest([queries[8].tolist()], "vector", {}, limit=5)] * 2
    client.hybrid_search(name, requests, RRFRanker(), limit=5)

    def stored():
        assert waiting(store, name) == 10
        return sampled_bank(store, name).vectors

    assert as_set(eventually(stored)) == as_set(queries)


def test_each_field_and_each_alias_is_sampled_through_a_proxy(lite, rng):
    client, store, name = lite.client(), lite.store(), lite.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("text", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("image", DataType.FLOAT_VECTOR, dim=OTHER_DIM)
    index = client.prepare_index_params()
    for field in ("text", "image"):
        index.add_index(field, index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    row = {"id": 1, "text": vectors(rng, 1, DIM)[0], "image": vectors(rng, 1, OTHER_DIM)[0]}
    client.insert(name, [row])
    client.create_alias(name, f"{name}_alias")
    lite.made += [f"{name}__query_samples_{field}" for field in ("text", "image")]

    start_sampling(store, f"{name}_alias", field="image", rate=1.0, size=PLACES)
    texts, images = vectors(rng, 4, DIM), vectors(rng, 4, OTHER_DIM)
    foreign = lite.hubness_client()
    for collection, part in ((name, slice(2)), (f"{name}_alias", slice(2, 4))):
        foreign.search(collection, texts[part].tolist(), anns_field="text", limit=1)
        foreign.search(collection, images[part].tolist(), anns_field="image", limit=1)

    def stored():
        assert waiting(store, name) == 4
        return sampled_bank(store, name, "image").vectors

    assert as_set(eventually(stored)) == as_set(images)


def test_what_is_changed_reaches_a_running_proxy_within_state_ttl(lite, rng):
    name, store, ttl = plain(lite, rng), lite.store(), 0.3
    queries = vectors(rng, 180, DIM)
    with (
        ProxyHere(urlsplit(lite.uri).netloc, state_ttl=ttl) as proxy,
        closing(MilvusClient(proxy.uri)) as client,
    ):

        def search(part):
            time.sleep(ttl)
            assert len(client.search(name, queries[part].tolist(), limit=1)) == 30

        search(slice(0, 30))
        start_sampling(store, name, rate=1.0, size=PLACES)
        search(slice(30, 60))
        start_sampling(store, name, rate=1e-9)
        search(slice(60, 90))
        start_sampling(store, name, rate=1.0)
        search(slice(90, 120))

        def stored():
            assert waiting(store, name) == 60
            return sampled_bank(store, name).vectors

        wanted = [*queries[30:60], *queries[90:120]]
        assert as_set(eventually(stored)) == as_set(wanted)
        stop_sampling(store, name)
        search(slice(120, 150))
    assert not store.exists(f"{name}__query_samples_vector")


@pytest.mark.parametrize("problem", ["no right", "dropped", "stranger"])
def test_a_proxy_that_can_write_no_samples_answers_on(lite, rng, monkeypatch, problem):
    name, store = plain(lite, rng), lite.store()
    samples_collection = f"{name}__query_samples_vector"
    start_sampling(store, name, rate=1.0, size=PLACES)
    queries = vectors(rng, BATCH, DIM).tolist()
    wanted = [hits.ids for hits in lite.client().search(name, queries, limit=3)]
    refusals = []
    if problem == "no right":

        def refuse(*arguments, **options):
            refusals.append(arguments)
            raise MilvusException(code=65535, message="privilege Upsert is not permitted")

        monkeypatch.setattr(MilvusClient, "upsert", refuse)
    else:
        lite.client().drop_collection(samples_collection)
    if problem == "stranger":
        plain_collection(lite.client(), samples_collection, np.eye(DIM, dtype=np.float32)[:3], "IP")

    with (
        ProxyHere(urlsplit(lite.uri).netloc) as proxy,
        closing(MilvusClient(proxy.uri)) as client,
    ):
        for _ in range(3):
            assert [hits.ids for hits in client.search(name, queries, limit=3)] == wanted
    if problem == "no right":
        assert waiting(store, name) == 0
        assert refusals
    if problem == "stranger":
        rows = lite.client().query(samples_collection, filter="id >= 0", output_fields=["*"])
        assert sorted(row["id"] for row in rows) == [0, 1, 2]


CLIENTS, SEARCHES, IN_A_SEARCH = 10, 20, 50
"""Of two proxies and of the database, and what each of them sends."""


@pytest.mark.parametrize(("rate", "places"), [(0.1, PLACES), (0.5, 40)], ids=["rate", "places"])
def test_two_proxies_and_ten_clients_keep_the_rate_and_the_places(lite, rng, rate, places):
    name, store = plain(lite, rng), lite.store()
    start_sampling(store, name, rate=rate, size=places)
    queries = vectors(rng, CLIENTS * SEARCHES * IN_A_SEARCH, DIM)
    begin = threading.Barrier(CLIENTS)

    def search(number, client):
        begin.wait(30)
        own = np.array_split(queries, CLIENTS)[number]
        for some in np.array_split(own, SEARCHES):
            client.search(name, some.tolist(), limit=1)

    with ExitStack() as stack:
        upstream = urlsplit(lite.uri).netloc
        proxies = [stack.enter_context(ProxyHere(upstream)) for _ in range(2)]
        clients = [
            stack.enter_context(
                closing(
                    MilvusClient(proxies[number % 2].uri) if number < 6 else HubnessClient(lite.uri)
                )
            )
            for number in range(CLIENTS)
        ]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(search, range(CLIENTS), clients))

    # All have stored what they sampled when they close.
    count = waiting(store, name)
    stored = as_set(sampled_bank(store, name).vectors)
    assert stored <= as_set(queries)
    if places == PLACES:
        assert binomtest(count, len(queries), rate).pvalue > 1e-4
        for own in np.array_split(queries, CLIENTS):
            assert binomtest(len(as_set(own) & stored), len(own), rate).pvalue > 1e-5
    else:
        assert count == places


def test_a_killed_proxy_loses_no_sample_that_it_stored(lite, rng):
    name, store = plain(lite, rng), lite.store()
    start_sampling(store, name, rate=1.0, size=PLACES)
    queries = vectors(rng, 2 * BATCH + 29, DIM)
    with ProxyProcess(urlsplit(lite.uri).netloc) as proxy:
        with closing(MilvusClient(proxy.uri)) as client:
            client.search(name, queries[:BATCH].tolist(), limit=1)

            def some():
                assert waiting(store, name) == BATCH

            eventually(some)
            answers = client.search(name, queries[BATCH : BATCH + 29].tolist(), limit=1)
        assert len(answers) == 29
        proxy.process.send_signal(signal.SIGKILL)
        assert proxy.process.wait(20) == -signal.SIGKILL

    kept = as_set(sampled_bank(store, name).vectors)
    assert as_set(queries[:BATCH]) <= kept <= as_set(queries[: BATCH + 29])
    with (
        ProxyHere(urlsplit(lite.uri).netloc) as another,
        closing(MilvusClient(another.uri)) as client,
    ):
        client.search(name, queries[BATCH + 29 :].tolist(), limit=1)
    assert as_set(sampled_bank(store, name).vectors) == kept | as_set(queries[BATCH + 29 :])
