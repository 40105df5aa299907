"""Corrected collections through the proxy: what a foreign client sees beyond the congruence suites."""

import json
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from pymilvus import (
    AnnSearchRequest,
    AsyncMilvusClient,
    DataType,
    FieldOpType,
    MilvusClient,
    RRFRanker,
    WeightedRanker,
)
from pymilvus.client import ts_utils
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import milvus_pb2, milvus_pb2_grpc

from milvus_hubness import NNN, Beside, QueryBank, Recipe, disable, enable, migrate, plan_correction
from milvus_hubness.errors import ServerUnavailable
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.milvus.client.catalog import is_ours
from milvus_hubness.milvus.proxy import messages
from milvus_hubness.milvus.pymilvus_private import connection_of
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.milvus.proxy.running import ForeignClient, ProxyHere
from tests.milvus.proxy.upstreams import Relay
from tests.support.dual_writes import WRITES, Moving
from tests.support.galleries import plain_collection, vectors
from tests.support.late_readers import READS, LateReaders
from tests.support.reranked import Enabled

DIM, ITEMS, K = 12, 80, 4


class Corrected:
    def __init__(self, backend, metric, away=0.0):
        rng, away = np.random.default_rng(9), np.float32(away)
        self.backend, self.metric = backend, metric
        self.items, self.bank = away + vectors(rng, ITEMS, DIM), away + vectors(rng, 30, DIM)
        self.query = away + vectors(rng, 1, DIM)
        source = backend.name()
        plain_collection(backend.client(), source, self.items, metric)
        store = backend.store()
        plan = plan_correction(store, source, Recipe(QueryBank(self.bank), estimator=NNN(K)))
        self.source, self.name = source, migrate(store, plan, no_writers=True).target
        self.client = backend.hubness_client()
        self.address = backend.proxies.uri(backend.uri).removeprefix("http://")

    def direct(self, **options):
        return self.client.behind.search(self.name, data=self.query, **options)


@pytest.fixture
def corrected(lite):
    return Corrected(lite, "COSINE")


def assert_same(got, expected):
    assert [hits.ids for hits in got] == [hits.ids for hits in expected]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a.distances, b.distances, atol=1e-5)


def test_the_collection_looks_as_before(corrected):
    plain = corrected.backend.client()
    expected, got = (
        plain.describe_collection(corrected.source),
        corrected.client.describe_collection(corrected.name),
    )
    assert [field["name"] for field in got["fields"]] == [
        field["name"] for field in expected["fields"]
    ]
    assert [field["params"] for field in got["fields"]] == [
        field["params"] for field in expected["fields"]
    ]
    # The migration has noted in a property of its source which collection that is.
    users = {name: value for name, value in expected["properties"].items() if not is_ours(name)}
    assert got["properties"] == users
    index = corrected.client.describe_index(corrected.name, "vector")
    assert index["metric_type"] == "COSINE"


def test_a_framework_that_builds_rows_from_the_described_fields_works_behind_an_alias(corrected):
    """As LangChain.js and LangChain4j do: they look for the name, learn its fields, load, add, search, remove."""
    client, alias = corrected.client, corrected.backend.name("alias")
    corrected.backend.client().create_alias(corrected.name, alias)
    assert client.has_collection(alias)
    client.load_collection(alias)
    described = client.describe_collection(alias)["fields"]
    names = [field["name"] for field in described]
    others = {name: 7 for name in names if name not in ("id", "vector")}

    client.upsert(alias, [{"id": 1_000, "vector": corrected.query[0], **others}])
    client.flush(alias)
    index = client.describe_index(alias, "vector")
    options = {
        "anns_field": "vector",
        "search_params": {"metric_type": index["metric_type"], "params": {"ef": 10}},
        "output_fields": [name for name in names if name != "vector"],
    }
    [hits] = client.search(alias, data=corrected.query, limit=5, **options)
    [expected] = corrected.client.behind.search(
        corrected.name, data=corrected.query, limit=5, **options
    )
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in expected]
    assert 1_000 in [hit["id"] for hit in hits]
    assert set(hits[0]["entity"]) == {*others, "id"}

    client.delete(alias, filter="id in [1000]")
    [hits] = client.search(alias, data=corrected.query, limit=5, filter="id >= 0", **options)
    assert 1_000 not in [hit["id"] for hit in hits]
    assert len(hits) == 5


def test_an_l2_gallery_far_from_zero_is_searched_read_and_written_as_before(lite):
    far = Corrected(lite, "L2", away=1_000.0)
    plain, client = lite.client(), far.client
    row = {"id": 900, "vector": far.items[3] + np.float32(0.25), "group": 1}
    plain.insert(far.source, [row])
    client.insert(far.name, [row])
    raw = plain.search(far.source, far.query, limit=20, output_fields=["vector"])
    found = client.search(far.name, far.query, limit=20, output_fields=["vector"], strength=0)
    assert_same(found, raw)
    assert [hit["entity"]["vector"] for hit in found[0]] == [
        hit["entity"]["vector"] for hit in raw[0]
    ]
    with pytest.raises(MilvusException, match="in dimension 0"):
        client.insert(far.name, [{**row, "id": 901, "vector": [0.3, *far.items[0, 1:].tolist()]}])


def test_an_index_is_made_for_the_metric_that_serves(corrected):
    client = corrected.client
    before = client.search(corrected.name, data=corrected.query)
    client.release_collection(corrected.name)
    client.drop_index(corrected.name, "vector")
    with pytest.raises(MilvusException, match="corrected for COSINE"):
        client.create_index(
            corrected.name,
            client.prepare_index_params("vector", index_type="FLAT", metric_type="L2"),
        )
    client.create_index(
        corrected.name,
        client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE"),
    )
    client.load_collection(corrected.name)
    assert (
        corrected.backend.client().describe_index(corrected.name, "vector")["metric_type"] == "IP"
    )
    assert_same(client.search(corrected.name, data=corrected.query), before)


def test_metadata_says_how_strongly(corrected):
    """And who says so by a search parameter too is believed there."""

    def search(metadata, **params):
        pairs = {"anns_field": "vector", "topk": "5", "params": "{}", **params}
        request = milvus_pb2.SearchRequest(
            collection_name=corrected.name,
            dsl="",
            nq=1,
            placeholder_group=group,
            use_default_consistency=True,
        )
        for key, value in pairs.items():
            request.search_params.add(key=key, value=value)
        with grpc.insecure_channel(corrected.address) as channel:
            return milvus_pb2_grpc.MilvusServiceStub(channel).Search(request, metadata=metadata)

    from pymilvus.client.prepare import Prepare

    group = Prepare._prepare_placeholder_str(corrected.query, False, DataType.FLOAT_VECTOR)
    for strength, response in [
        (None, search([])),
        (0, search([("hubness-strength", "0")])),
        (0.5, search([("hubness-strength", "0.5"), ("hubness-profile", "default")])),
        (0.25, search([("hubness-strength", "0.5")], params='{"hubness_strength": 0.25}')),
    ]:
        [expected] = corrected.direct(limit=5, strength=strength)
        assert list(response.results.ids.int_id.data) == expected.ids
        np.testing.assert_allclose(response.results.scores, expected.distances, atol=1e-5)
    for metadata in ([("hubness-strength", "much")], [("hubness-profile", "nowhere")]):
        assert search(metadata).status.code == 1100

    # Milvus takes what it does not know, and true is no number.
    for refused, named in [
        (search([("hubness-strenght", "0")]), "'hubness-strenght'"),
        (search([], hubness_strenght="0"), "'hubness_strenght'"),
        (search([], params='{"hubness_Strength": 0}'), "'hubness_Strength'"),
        (search([], params='{"hubness_strength": true}'), "True"),
    ]:
        assert refused.status.code == 1100
        assert named in refused.status.reason


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
def test_hybrid_searches(lite, metric):
    corrected = Corrected(lite, metric)
    asked = [
        AnnSearchRequest(corrected.query, "vector", {"params": {}}, 10),
        AnnSearchRequest(corrected.query, "vector", {"params": {}}, 10, expr="group > 2"),
    ]
    for ranker in (RRFRanker(), WeightedRanker(0.3, 0.7)):
        expected = corrected.client.behind.hybrid_search(
            corrected.name, asked, ranker, output_fields=["vector"]
        )
        got = corrected.client.hybrid_search(
            corrected.name, asked, ranker, output_fields=["vector"]
        )
        assert_same(got, expected)
        for a, b in zip(got[0], expected[0], strict=True):
            np.testing.assert_allclose(a["entity"]["vector"], b["entity"]["vector"], rtol=1e-6)


async def test_asynchronous_clients(corrected):
    client = AsyncMilvusClient(f"http://{corrected.address}")
    try:
        fresh = vectors(np.random.default_rng(1), 1, DIM)[0]
        done = await client.insert(corrected.name, [{"id": 500, "vector": fresh, "group": 1}])
        assert done["insert_count"] == 1
        got = await client.search(corrected.name, data=corrected.query, limit=ITEMS + 1)
        assert_same(got, corrected.direct(limit=ITEMS + 1))
        assert 500 in got[0].ids
        [row] = await client.query(corrected.name, filter="id == 500")
        np.testing.assert_allclose(row["vector"], fresh, rtol=1e-6)
        assert not any(name.startswith("hubness") for name in row)
    finally:
        await client.close()


def test_a_collection_that_is_corrected_meanwhile_is_found_out(lite):
    """Also by a proxy that remembers the collection states for an hour."""
    from tests.milvus.proxy.running import ProxyHere

    with ProxyHere(lite.uri.removeprefix("http://"), state_ttl=3_600.0) as proxy:
        plain, client = lite.client(), ForeignClient(proxy.uri)
        rng, name, alias = np.random.default_rng(2), lite.name(), lite.name("alias")
        items, query = vectors(rng, ITEMS, DIM), vectors(rng, 1, DIM)
        plain_collection(plain, name, items, "L2")
        plain.create_alias(name, alias)
        raw = client.search(alias, data=query)
        store = lite.store()
        plan = plan_correction(
            store, name, Recipe(QueryBank(vectors(rng, 30, DIM)), estimator=NNN(K))
        )
        target = migrate(store, plan, no_writers=True).target
        plain.alter_alias(target, alias)
        assert_same(client.search(alias, data=query, strength=0), raw)
        client.upsert(alias, {"id": 3, "vector": query[0], "group": 1})
        assert client.search(alias, data=query, strength=0)[0].ids[0] == 3
        assert len(client.query(alias, filter="id == 3")[0]["vector"]) == DIM


def test_rows_beside_the_vectors_are_written_with_their_biases(lite):
    rng, name = np.random.default_rng(4), lite.name()
    plain_collection(lite.client(), name, vectors(rng, ITEMS, DIM), "IP")
    store, query = lite.store(), vectors(rng, 1, DIM)
    lite.made += [f"{name}__bias_a", f"{name}__bias_b"]
    bank = QueryBank(vectors(rng, 30, DIM))
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(K), verdict="warn"), Beside())
    enable(store, plan, client_ttl=0.0)
    client = lite.hubness_client()
    client.insert(name, {"id": 700, "vector": query[0], "group": 1})
    assert (
        client.search(name, data=query, strength=0)[0].ids
        == lite.client().search(name, data=query)[0].ids
    )
    got = client.search(name, data=query, limit=ITEMS + 1)
    assert_same(got, client.behind.search(name, data=query, limit=ITEMS + 1))
    assert 700 in got[0].ids
    disable(store, name)


def test_an_update_by_what_fields_hold_passes_where_biases_are_beside_the_vectors(
    lite, monkeypatch
):
    """No job copies the collection. Milvus Lite knows no such updates, so the request is looked at."""
    tags = ("tags", DataType.ARRAY, {"element_type": DataType.INT64, "max_capacity": 9})
    enabled = Enabled(lite, "IP", fields=[tags], values={"tags": [1]})
    upsert, sent = MilvusClient.upsert, []

    def noted(self, name, data, *args, **options):
        sent.append((name, options.get("field_ops")))
        return upsert(self, name, data, *args, **options)

    row = {"id": 7, "tags": [2]}
    monkeypatch.setattr(MilvusClient, "upsert", noted)
    enabled.client.upsert(
        enabled.name, [row], partial_update=True, field_ops={"tags": "array_append"}
    )
    name, changes = sent[-1]
    assert (name, changes["tags"].op) == (enabled.name, FieldOpType.ARRAY_APPEND)


@pytest.mark.parametrize("method", ["insert", "upsert", "delete"])
def test_the_answer_to_a_write_has_its_time_for_the_next_search_of_a_session(lite, method):
    """Milvus Lite knows no time of a write: that which pymilvus keeps for its own searches is passed on."""
    if method == "delete":
        moving = Moving(lite).forward()
        client, name = moving.client, moving.source
    else:
        enabled = Enabled(lite, "IP")
        client, name = enabled.client, enabled.name
    connection = connection_of(lite.client())
    ts_utils.update_collection_ts(name, 1_234, connection.server_address)
    row = {"id": 900, "vector": [1.0] * 16, "group": 1}
    arguments = [900] if method == "delete" else [[row]]
    behind = connection_of(client)
    ts_utils.GlobalCache.collection_ts.invalidate(behind.server_address, "", name)
    getattr(client, method)(name, *arguments)
    assert ts_utils.get_collection_ts(name, behind.server_address) == 1_234


@pytest.mark.parametrize("kind", [MilvusException, ServerUnavailable])
def test_rows_whose_biases_could_not_be_written_are_stored_once(lite, monkeypatch, kind):
    """The state changes meanwhile, after which a write that fails is repeated."""
    enabled = Enabled(lite, "IP")
    state = json.loads(enabled.plain.describe_collection(enabled.name)["properties"]["hubness"])
    state["profiles"]["default"]["strength"] = 0.9
    inserted, insert = [], MilvusClient.insert

    def failing(*args, **options):
        enabled.plain.alter_collection_properties(enabled.name, {"hubness": json.dumps(state)})
        raise kind("rate limit") if kind is ServerUnavailable else kind(8, "rate limit")

    def noted(*args, **options):
        inserted.append(options)
        return insert(*args, **options)

    monkeypatch.setattr(MilvusClient, "upsert", failing)
    monkeypatch.setattr(MilvusClient, "insert", noted)
    row = {"id": 5_000, "vector": enabled.items[0], "group": 1}
    for client in (enabled.client, enabled.client.behind):
        inserted.clear()
        with pytest.raises(MilvusException, match=r"stored in .* rate limit.* again by upsert"):
            client.insert(enabled.name, [row])
        # Once to the proxy, and once to Milvus.
        assert len(inserted) == (2 if client is enabled.client else 1)


@pytest.mark.parametrize("method", ["Search", "Insert", "HybridSearch", "Query", "DescribeIndex"])
def test_what_nobody_foresaw_is_refused_at_once(corrected, monkeypatch, method):
    """As gRPC's UNKNOWN, pymilvus would ask 75 times."""
    asked = []

    def broken(name, message, parse=messages.request_of):
        if name != method:
            return parse(name, message)
        asked.append(message)
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(messages, "request_of", broken)
    hybrid = [AnnSearchRequest(corrected.query, "vector", {}, 3)] * 2
    call = {
        "Search": lambda c, n: c.search(n, data=corrected.query),
        "Insert": lambda c, n: c.insert(n, {"id": 600, "vector": corrected.query[0], "group": 1}),
        "HybridSearch": lambda c, n: c.hybrid_search(n, hybrid, RRFRanker()),
        "Query": lambda c, n: c.query(n, filter="id < 3"),
        "DescribeIndex": lambda c, n: c.describe_index(n, "vector"),
    }[method]
    with pytest.raises(MilvusException, match="KeyError: 'a mistake of ours'") as refusal:
        call(corrected.client, corrected.name)
    assert (refusal.value.code, len(asked)) == (65535, 1)


def test_what_milvus_did_not_answer_the_proxy_either_is_unavailable(lite, monkeypatch):
    """pymilvus repeats a request for minutes, and its last error has gRPC's code in place of Milvus's."""
    enabled = Enabled(lite, "IP")
    query = MilvusClient.query

    def unanswered(client, name, *args, **options):
        if "__bias_" in name:
            raise MilvusException(grpc.StatusCode.UNAVAILABLE, "Retry run out of 75 retry times")
        return query(client, name, *args, **options)

    monkeypatch.setattr(MilvusClient, "query", unanswered)
    with pytest.raises(MilvusException, match="run out of 75") as failed:
        enabled.client.search(enabled.name, data=enabled.queries, retry_times=0)
    assert failed.value.code == grpc.StatusCode.UNAVAILABLE


class DescribedUntil:
    """The calls that a relay does not answer: no description of a collection after a write to it."""

    def __init__(self, relay, name):
        self.relay, self.name = relay, name

    def __contains__(self, call):
        return call == ("DescribeCollection", self.name) and self.relay.reached("Insert", self.name)


@pytest.mark.parametrize("is_corrected", [True, False])
def test_a_write_after_which_no_state_can_be_read_is_made_once(corrected, is_corrected):
    """Milvus answers no more once it has taken the rows. Clients repeat what is UNAVAILABLE, up to 75 times."""
    name = corrected.name if is_corrected else corrected.source
    relay = Relay(corrected.backend.uri.removeprefix("http://"))
    relay.unavailable = DescribedUntil(relay, name)
    row = {"id": 900, "vector": corrected.query[0], "group": 1}
    with ProxyHere(relay.address, state_ttl=0.0) as proxy:
        client = MilvusClient(proxy.uri)
        if is_corrected:
            # Had a copy taken the name meanwhile, it might lack the row.
            with pytest.raises(MilvusException, match=r"is stored, but .* an insert as an upsert"):
                client.insert(name, [row], retry_times=2)
        else:
            assert client.insert(name, [row], retry_times=2)["insert_count"] == 1
        client.close()
    assert len(relay.reached("Insert", name)) == 1
    relay.stop()


# -- while a job is at work ------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_writes_are_mirrored(lite, direction):
    moving = Moving(lite)
    getattr(moving, direction)(required=True)
    name = moving.source if direction == "forward" else moving.target
    for method, arguments in WRITES:
        if arguments(moving).get("data") != []:
            getattr(moving.client, method)(name, **arguments(moving))
        moving.assert_equal()


def test_a_collection_is_dropped_with_its_bank_but_not_under_a_job(corrected):
    client, plain, store = corrected.client, corrected.backend.client(), corrected.backend.store()
    bank = store.info(corrected.name).state.profile.bank.collection
    with Lease(store, corrected.name):
        for call in (client.drop_collection, client.truncate_collection):
            with pytest.raises(MilvusException, match="holds the lease"):
                call(corrected.name)
        with pytest.raises(MilvusException, match="holds the lease"):
            client.rename_collection(corrected.name, "renamed")
    with pytest.raises(MilvusException, match="cannot move to database"):
        client.rename_collection(corrected.name, "renamed", "elsewhere")
    other = corrected.backend.name("renamed")
    client.rename_collection(corrected.name, other, "default")
    assert plain.has_collection(other)
    client.rename_collection(other, corrected.name)
    client.load_collection(corrected.name, load_fields=["id", "vector"])
    assert client.search(corrected.name, data=corrected.query)[0]
    assert plain.has_collection(bank)
    client.drop_collection(corrected.name)
    assert not plain.has_collection(bank)
    assert not plain.has_collection(corrected.name)


def test_a_collection_stays_in_the_database_that_its_client_names_in_the_metadata(lite):
    """pymilvus names it there, and not in the request of a rename."""
    rng, name, plain = np.random.default_rng(9), lite.name(), lite.client()
    database = f"of_{name}"
    plain.create_database(database)
    there = MilvusClient(lite.uri, db_name=database)
    plain_collection(there, name, vectors(rng, ITEMS, DIM), "IP")
    recipe = Recipe(QueryBank(vectors(rng, 30, DIM)), estimator=NNN(K), verdict="warn")
    store = MilvusStore(there)
    target = migrate(store, plan_correction(store, name, recipe), no_writers=True).target

    client = MilvusClient(lite.proxies.uri(lite.uri), db_name=database)
    with pytest.raises(MilvusException, match="cannot move to database 'default'"):
        client.rename_collection(target, "renamed", "default")
    client.rename_collection(target, "renamed", database)
    assert there.has_collection("renamed")
    for each in there.list_collections():
        there.drop_collection(each)
    plain.drop_database(database)


@pytest.mark.parametrize("read", READS)
def test_a_proxy_that_knows_the_uncorrected_collection_answers_with_the_vectors_of_the_user(
    lite, read
):
    world = LateReaders(lite)
    where = urlsplit(lite.uri)
    proxy = ProxyHere(where.netloc, state_ttl=3_600.0)
    client = MilvusClient(proxy.uri + where.path)
    world.assert_of_the_user(READS[read](world, client))
    world.correct()
    world.assert_of_the_user(READS[read](world, client))
    client.close()
    proxy.stop()
    world.plain.drop_alias(world.alias)
