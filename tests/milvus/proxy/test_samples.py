"""Samples of the queries of plain clients, which the proxy takes from their searches."""

import grpc
import numpy as np
from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker

from milvus_hubness import (
    Blend,
    Experiment,
    HubnessClient,
    MigrationOptions,
    MilvusStore,
    QueryBank,
    migrate,
    plan_migration,
)
from milvus_hubness.jobs.common.outcomes import recorded_answers
from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from tests.milvus.proxy.running import ProxyHere, eventually
from tests.support.galleries import plain_collection, vectors

DIM = 12


class Listening(grpc.UnaryUnaryClientInterceptor):
    """Notes what the trailing metadata of searches says of the correction."""

    def __init__(self, said):
        self._said = said

    def intercept_unary_unary(self, continuation, details, request):
        answer = continuation(details, request)
        if details.method.endswith("/Search"):
            entries = dict(answer.trailing_metadata())
            self._said.append({k: v for k, v in entries.items() if k.startswith("hubness-")})
        return answer


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


def test_a_proxy_puts_searches_into_arms_and_says_which(lite_server_uri):
    """As a client with the same settings would; the arm and a token are in the trailing metadata."""
    rng = np.random.default_rng(5)
    plain = MilvusClient(lite_server_uri)
    store = MilvusStore(plain)
    plain_collection(plain, "experimented", vectors(rng, 200, DIM), "IP")
    plan = plan_migration(
        store, "experimented", QueryBank(vectors(rng, 100, DIM)), estimator=Blend(), verdict="skip"
    )
    name = migrate(store, plan, MigrationOptions(no_writers=True)).target
    start_sampling(store, name, rate=1e-9, outcomes=1.0)

    experiment = Experiment("november")
    upstream = lite_server_uri.removeprefix("http://")
    direct = HubnessClient(lite_server_uri, experiment=experiment, sample_queries=False)
    said = []
    with ProxyHere(upstream, experiment=experiment) as proxy:
        listening = grpc.intercept_channel(grpc.insecure_channel(proxy.address), Listening(said))
        client = MilvusClient(proxy.uri, channel=listening, dedicated=True)
        arms = []
        for query in vectors(rng, 12, DIM):
            expected = direct.search(name, [query.tolist()], limit=5)
            answer = client.search(name, [query.tolist()], limit=5)
            assert answer[0].ids == expected[0].ids
            arms.append(expected.hubness.arm)
        client.close()
    assert [entries["hubness-arm"] for entries in said] == arms
    assert direct.feedback_by_token(name, said[0]["hubness-answer"], 1) is False, (
        "it samples nothing"
    )
    assert len(set(arms)) == 2
    recorded = recorded_answers(store, name)
    assert sorted(each.facts["treated"] for each in recorded) == sorted(
        arm == "corrected" for arm in arms
    )
    direct.close()
