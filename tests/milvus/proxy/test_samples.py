"""Samples of the queries of plain clients, which the proxy takes from their searches."""

import numpy as np
from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker

from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from tests.milvus.proxy.running import eventually
from tests.support.galleries import plain_collection, vectors

DIM = 12


def as_set(rows):
    return {np.asarray(row, np.float32).tobytes() for row in rows}


def test_a_plain_client_of_a_plain_collection_is_sampled(lite):
    rng = np.random.default_rng(5)
    name = lite.name()
    plain_collection(lite.client(), name, vectors(rng, 100, DIM), "IP")
    lite.made.append(f"{name}__query_samples_vector")
    store = lite.store()
    start_sampling(store, name, rate=1.0, size=10**7)

    client = lite.hubness_client()
    assert isinstance(client, MilvusClient)
    queries = vectors(rng, 9, DIM)
    direct = lite.client().search(name, queries.tolist(), limit=5)
    answers = client.search(name, queries[:8].tolist(), limit=5)
    assert [hits.ids for hits in answers] == [hits.ids for hits in direct[:8]]
    requests = [AnnSearchRequest([queries[8].tolist()], "vector", {}, limit=5)] * 2
    client.hybrid_search(name, requests, RRFRanker(), limit=5)

    def stored():
        [status] = list_samplings(store, name)
        assert status.waiting == 10
        return sampled_bank(store, name).vectors

    assert as_set(eventually(stored)) == as_set(queries)
