"""What a plain collection takes at once, a corrected one takes too, although the client sends more."""

import logging

import grpc
import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, Beside, QueryBank, Recipe, enable, migrate, plan_correction
from milvus_hubness.errors import HubnessError, PartialWrite
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.born import born
from tests.support.dual_writes import Moving
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS = 8, 300
RNG = np.random.default_rng(1)
ITEM_VECTORS, QUERIES, NEW = (
    vectors(RNG, ITEMS, DIM),
    vectors(RNG, 150, DIM),
    vectors(RNG, 200, DIM),
)
BANK = QueryBank(vectors(RNG, 40, DIM))
MAX_QUERIES = 200
MAX_NUMBERS = 200 * DIM


class TooLarge(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self):
        return "grpc: received message larger than max (72138869 vs. 67108864)"


class Limited(MilvusClient):
    """As a server whose limits the user's own requests just keep: 200 queries, and 200 vectors of the user."""

    failing_from = None
    sent = 0

    def search(self, collection_name, data=None, *args, **options):
        if data is not None and len(data) > MAX_QUERIES:
            raise MilvusException(
                65535,
                f"nq [{len(data)}] is invalid, nq (number of search vector per search request) should be in range "
                f"[1, {MAX_QUERIES}], but got {len(data)}",
            )
        return super().search(collection_name, data, *args, **options)

    def hybrid_search(self, collection_name, reqs, *args, **options):
        if sum(np.size(query) for request in reqs for query in request.data) > 2 * 150 * DIM:
            raise TooLarge
        return super().hybrid_search(collection_name, reqs, *args, **options)

    def insert(self, collection_name, data, *args, **options):
        self.take(data)
        return super().insert(collection_name, data, *args, **options)

    def upsert(self, collection_name, data, *args, **options):
        self.take(data)
        return super().upsert(collection_name, data, *args, **options)

    def take(self, data):
        rows = data if isinstance(data, list) else [data]
        numbers = sum(
            np.size(value)
            for row in rows
            for name, value in row.items()
            if name not in ("id", "group")
        )
        if numbers > MAX_NUMBERS:
            raise TooLarge
        self.sent += 1
        if self.failing_from is not None and self.sent >= self.failing_from:
            raise MilvusException(1, "the disk is full")


def corrected(backend, how, *, metric="IP", gate=None):
    """The name of a collection. how: "born" corrected, with a gate migrated, or "beside"."""
    if how == "born" and gate is None:
        return born(backend, ITEM_VECTORS, BANK, metric)
    client, name = backend.client(), backend.name("limits")
    plain_collection(client, name, ITEM_VECTORS, metric)
    store = backend.store()
    if how == "born":
        return migrate(
            store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8), gate=gate))
        ).target
    enable(
        store,
        plan_correction(store, name, Recipe(BANK, estimator=NNN(8), gate=gate), Beside()),
        client_ttl=0,
    )
    return name


def found(results):
    return [
        [(hit["id"], pytest.approx(hit["distance"], abs=1e-5)) for hit in hits] for hits in results
    ]


@pytest.mark.parametrize("queries", [QUERIES, list(QUERIES)], ids=["array", "list"])
@pytest.mark.parametrize("metric", ["IP", "L2"])
def test_a_gate_asks_for_no_more_queries_at_once_than_the_user(lite, metric, queries, caplog):
    name = corrected(lite, "born", metric=metric, gate=8)
    limited, free = lite.hubness_client(below=Limited), lite.hubness_client()
    wanted = free.search(name, data=queries, limit=5, output_fields=["group", "vector"])
    with caplog.at_level(logging.INFO, "milvus_hubness"):
        got = limited.search(name, data=queries, limit=5, output_fields=["group", "vector"])
    assert found(got) == found(wanted)
    assert [[hit["entity"]["group"] for hit in hits] for hits in got] == [
        [hit["entity"]["group"] for hit in hits] for hits in wanted
    ]
    assert "exceeds a limit of the server (nq [300] is invalid" in caplog.text
    assert found(limited.search(name, data=queries, limit=5)) == found(wanted), (
        "the next search, too"
    )


def test_a_request_that_a_plain_collection_refuses_too_is_refused_there_as_by_pymilvus(lite):
    limited, name = lite.hubness_client(below=Limited), lite.name("plain")
    plain_collection(lite.client(), name, ITEM_VECTORS, "IP")
    with pytest.raises(MilvusException, match=r"nq \[201\] is invalid"):
        limited.search(name, data=np.ones((201, DIM), np.float32), limit=1)
    with pytest.raises(TooLarge):
        limited.insert(name, [{"id": i, "vector": [1.0] * DIM, "group": 0} for i in range(201)])
    assert not isinstance(TooLarge(), HubnessError)


class Narrow(MilvusClient):
    """As a server whose answers have no room for more than 70 whole rows."""

    limits = ()

    def query(self, collection_name, *args, **options):
        if options.get("output_fields") == ["*"]:
            self.limits = (*self.limits, options["limit"])
            if options["limit"] > 70:
                raise TooLarge
        return super().query(collection_name, *args, **options)


def test_rows_too_large_for_a_page_are_read_in_smaller_pages_from_then_on(lite):
    """A server makes the whole answer before it refuses it."""
    client, name = lite.client(Narrow), lite.name("large_rows")
    plain_collection(client, name, ITEM_VECTORS, "IP")
    store = MilvusStore(client)
    keys = []
    while page := store.scan(name, "vector", after=keys[-1] if keys else None, limit=200).keys:
        keys += page
    assert keys == list(range(ITEMS))
    assert store.client.limits[:3] == (200, 100, 50)
    assert set(store.client.limits[3:]) == {50}


def test_hybrid_search_sends_parts_too(lite):
    client, name = lite.client(), lite.name("two")
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    index = client.prepare_index_params()
    for field in ("vector", "other"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
        index.add_index(field, index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    rows = zip(ITEM_VECTORS, ITEM_VECTORS[::-1], strict=True)
    client.insert(
        name, [{"id": i, "vector": first, "other": other} for i, (first, other) in enumerate(rows)]
    )
    store = lite.store()
    target = migrate(
        store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8)), field="vector")
    ).target
    requests = [AnnSearchRequest(list(QUERIES), field, {}, 10) for field in ("vector", "other")]
    arguments = (target, requests, RRFRanker(), 5)
    assert found(lite.hubness_client(below=Limited).hybrid_search(*arguments)) == found(
        lite.hubness_client().hybrid_search(*arguments)
    )


def rows_to_write(first=1_000):
    return [{"id": first + i, "vector": vector, "group": i} for i, vector in enumerate(NEW)]


@pytest.mark.parametrize("how", ["born", "beside"])
@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_rows_that_a_plain_collection_takes_at_once_are_taken(lite, how, method):
    name, plain = corrected(lite, how), lite.name("plain")
    limited, rows = lite.hubness_client(below=Limited), rows_to_write()
    plain_collection(lite.client(), plain, ITEM_VECTORS, "IP")
    wanted = getattr(limited, method)(plain, rows_to_write())
    answer = getattr(limited, method)(name, rows)
    assert type(answer) is type(wanted)
    assert answer[f"{method}_count"] == wanted[f"{method}_count"] == len(rows)
    assert list(answer.get("ids", [])) == list(wanted.get("ids", []))
    client = lite.hubness_client()
    stored = {
        row["id"]: row
        for row in client.query(name, "id >= 1000", output_fields=["vector", "group"])
    }
    assert [stored[row["id"]]["group"] for row in rows] == [row["group"] for row in rows]
    np.testing.assert_allclose([stored[row["id"]]["vector"] for row in rows], NEW, rtol=1e-6)
    assert lite.store().info(name).state is not None
    assert client.search(name, data=[NEW[7]], limit=600, filter="id == 1007")[0][0]["id"] == 1007


def test_keys_that_the_server_makes_are_returned_in_order(lite):
    client, name = lite.client(), lite.name("auto")
    schema = client.create_schema(auto_id=True)
    schema.add_field("id", DataType.INT64, is_primary=True, auto_id=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    client.insert(name, [{"vector": vector} for vector in ITEM_VECTORS])
    store = lite.store()
    target = migrate(store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8)))).target
    answer = lite.hubness_client(below=Limited).insert(
        target, [{"vector": vector} for vector in NEW]
    )
    read = lite.hubness_client().query(
        target, f"id in {list(answer['ids'])}", output_fields=["vector"]
    )
    by_key = {row["id"]: row["vector"] for row in read}
    np.testing.assert_allclose([by_key[key] for key in answer["ids"]], NEW, rtol=1e-6)


def test_a_write_that_fails_in_a_later_part_says_what_was_written(lite):
    name = corrected(lite, "born")
    limited, rows = lite.hubness_client(below=Limited), rows_to_write()
    limited.failing_from = 3
    with pytest.raises(
        PartialWrite, match=f"the first 100 of 200 rows were written to '{name}'"
    ) as raised:
        limited.insert(name, rows)
    assert isinstance(raised.value, MilvusException)
    assert raised.value.row_count == 100
    assert list(raised.value.answer["ids"]) == [row["id"] for row in rows[:100]]
    assert "the disk is full" in str(raised.value)
    assert "\n" not in str(raised.value)
    there = lite.client().query(name, "id >= 1000", output_fields=["count(*)"])[0]["count(*)"]
    assert there == 100
    limited.failing_from = None
    assert limited.upsert(name, rows[raised.value.row_count :])["upsert_count"] == 100


class Full(Limited):
    """As a server that takes one insert into a collection, and no second one."""

    full = ""

    def insert(self, collection_name, data, *args, **options):
        if collection_name == self.full and self.sent:
            self.take(data)
            raise MilvusException(1, "the disk is full")
        return super().insert(collection_name, data, *args, **options)


@pytest.mark.parametrize("required", [False, True])
def test_the_first_rows_of_a_write_that_fails_in_a_later_part_reach_the_copy(lite, required):
    """The caller is to write the others again: these would be lost when the copy gets the name."""
    moving = Moving(lite).backward(required=required)
    client = lite.hubness_client(below=Full)
    client.full = moving.target
    rows = moving.rows(range(1_000, 1_130))
    with pytest.raises(PartialWrite) as raised:
        client.insert(moving.target, rows)
    assert 0 < raised.value.row_count < len(rows)
    first = [row["id"] for row in rows[: raised.value.row_count]]
    assert [key for key in moving.assert_equal() if key >= 1_000] == first

    client.upsert(moving.target, rows[raised.value.row_count :])
    assert len(moving.assert_equal()) == len(moving.items) + len(rows)


def test_the_first_rows_of_a_write_that_fails_in_a_later_part_have_their_biases_beside(lite):
    name = corrected(lite, "beside")
    client = lite.hubness_client(below=Full)
    client.full = name
    rows = [*rows_to_write(), {"id": 2000, "vector": NEW[0], "group": 0}]
    with pytest.raises(PartialWrite) as raised:
        client.insert(name, rows)
    state = client.hubness_state(name)
    side = state.codec.sides[state.profile.slot]
    there = lite.client().query(side, "id >= 1000", output_fields=["id"])
    assert sorted(row["id"] for row in there) == [
        row["id"] for row in rows[: raised.value.row_count]
    ]


def test_a_write_whose_first_part_fails_raises_the_servers_error(lite):
    name = corrected(lite, "born")
    limited = lite.hubness_client(below=Limited)
    limited.failing_from = 1
    with pytest.raises(MilvusException, match="the disk is full") as raised:
        limited.insert(name, rows_to_write())
    assert not isinstance(raised.value, HubnessError)


@pytest.mark.long
def test_limits_are_kept_on_a_server(served, caplog):
    """Milvus 2.3.5 takes 16,384 queries and 64 MiB at once."""
    caplog.set_level(logging.ERROR, "pymilvus")
    name = corrected(served, "migrate", gate=8)
    client, rng = served.hubness_client(), np.random.default_rng(5)
    queries = vectors(rng, 10_000, DIM)
    got = client.search(name, data=queries, limit=3)
    assert len(got) == 10_000
    for at in (0, 4_999, 8_192, 9_999):
        assert found([got[at]]) == found(client.search(name, data=queries[at : at + 1], limit=3))

    wide, plain = 128, served.name("wide")
    plain_collection(served.client(), plain, vectors(rng, 300, wide), "IP")
    store = served.store()
    bank = QueryBank(vectors(rng, 40, wide))
    target = migrate(store, plan_correction(store, plain, Recipe(bank, estimator=NNN(8)))).target
    many = vectors(rng, 122_000, wide)
    rows = [{"id": 1_000 + i, "vector": vector, "group": 0} for i, vector in enumerate(many)]
    assert served.client().insert(plain, rows)["insert_count"] == len(rows)
    answer = client.insert(target, rows)
    assert (answer["insert_count"], list(answer["ids"])) == (len(rows), [row["id"] for row in rows])
    assert [record for record in caplog.records if record.name.startswith("pymilvus")] == []
