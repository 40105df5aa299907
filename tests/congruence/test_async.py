"""An AsyncHubnessClient over a corrected collection against an AsyncMilvusClient over the plain one."""

import asyncio
import inspect
import random
import threading
import time

import numpy as np
import pytest
from pymilvus import (
    AnnSearchRequest,
    AsyncMilvusClient,
    DataType,
    MilvusClient,
    RRFRanker,
    WeightedRanker,
)
from pymilvus.exceptions import DataTypeNotMatchException, MilvusException, ParamError

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    Beside,
    CorrectionConfig,
    DimensionMismatch,
    GloballyCorrected,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
    QueryBank,
    Recipe,
    StoreError,
    UnsupportedOperation,
    ZeroVectors,
    enable,
    plan_correction,
)
from milvus_hubness.clients.biases import BankCache, CachedBank
from milvus_hubness.clients.steps import Ask, Compute, drive, drive_async
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.milvus.client.catalog import is_ours
from milvus_hubness.milvus.client.steps import InStore, PlainConnection
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.async_clients import opened
from tests.support.galleries import (
    AWKWARD,
    METRICS,
    all_keys,
    nnn,
    plain_collection,
    similarity,
    vectors,
)
from tests.support.pairs import DIM, ITEMS, K, Pair, assert_same_hits, hits_of, ids

ON_SERVERS = {"pair": ["L2"]}


@pytest.fixture(scope="module", params=METRICS)
def pair(shared_backend, request):
    return Pair(shared_backend, request.param)


async def of_both(pair, call, **options):
    """call(client, collection) of the plain and of the corrected side."""
    async with (
        opened(pair.backend, AsyncMilvusClient) as plain,
        opened(pair.backend, **options) as client,
    ):
        return await call(plain, pair.name), await call(client, pair.corrected)


SEARCHES = [
    {},
    {"limit": 3, "offset": 2},
    {"filter": "group in [1, 3]", "output_fields": ["group"]},
    {"output_fields": ["vector", "note"]},
    {"output_fields": ["*"], "anns_field": "vector"},
]


@pytest.mark.parametrize("question", SEARCHES, ids=str)
def test_strength_zero_is_the_plain_search(pair, question):
    expected, got = asyncio.run(
        of_both(
            pair,
            lambda client, name: client.search(name, data=list(pair.queries), **question),
            strength=0,
        )
    )
    assert type(got) is type(expected)
    assert_same_hits(hits_of(expected), hits_of(got))
    for a, b in zip(expected[0], got[0], strict=True):
        np.testing.assert_allclose(
            b["entity"].pop("vector", 0), a["entity"].pop("vector", 0), rtol=2.4e-7
        )
        assert b["entity"] == a["entity"]


@pytest.mark.parametrize("strength", [1.0, -0.3])
def test_scores_and_ranking_are_the_oracles(pair, strength):
    async def search():
        async with opened(pair.backend) as client:
            return await client.search(
                pair.corrected, data=list(pair.queries), limit=ITEMS, strength=strength
            )

    wanted = pair.oracle(pair.queries, pair.items, strength)
    for scores, hits in zip(wanted, asyncio.run(search()), strict=True):
        assert sorted(ids(hits)) == list(range(ITEMS))
        np.testing.assert_allclose([hit["distance"] for hit in hits], scores[ids(hits)], atol=2e-5)
        ordered = scores[ids(hits)] if pair.metric == "L2" else -scores[ids(hits)]
        assert (np.diff(ordered) >= -2e-5).all()


def test_searches_are_those_of_the_sync_client(pair):
    questions = [
        {"data": list(pair.queries), "with_raw_score": True},
        {"data": list(pair.queries), "rerank": GloballyCorrected(candidates=30)},
        {"ids": [3, 4], "round_decimal": 2},
        {"data": [pair.queries[0]], "strength": 0.3, "profile": "default", "filter": "group == 2"},
    ]

    async def search():
        async with opened(pair.backend) as client:
            return [await client.search(pair.corrected, **question) for question in questions]

    for question, got in zip(questions, asyncio.run(search()), strict=True):
        assert hits_of(got) == hits_of(pair.client.search(pair.corrected, **question))


@pytest.mark.parametrize(
    "ranker", [RRFRanker(), WeightedRanker(0.3, 0.7)], ids=lambda each: type(each).__name__
)
def test_hybrid_searches_are_those_of_the_sync_client(pair, ranker):
    if not pair.backend.is_lite:
        pytest.skip("this server has no hybrid search")
    requests = [AnnSearchRequest([query], "vector", {}, 20) for query in pair.queries[:2]]

    async def search():
        async with opened(pair.backend) as client:
            return await client.hybrid_search(
                pair.corrected, requests, ranker, output_fields=["note"]
            )

    expected = pair.client.hybrid_search(pair.corrected, requests, ranker, output_fields=["note"])
    assert hits_of(asyncio.run(search())) == hits_of(expected)


def test_a_hybrid_search_by_a_profile_that_is_not_there_is_refused(pair):
    request = AnnSearchRequest([pair.queries[0]], "vector", {}, 5)

    async def search():
        async with opened(pair.backend) as client:
            await client.hybrid_search(pair.corrected, [request], RRFRanker(), profile="sound")

    with pytest.raises(
        InvalidInput, match=r"no profile 'sound' for field 'vector': choose one of default"
    ):
        asyncio.run(search())


def test_reading_gives_what_was_inserted(pair):
    reads = [
        lambda client, name: client.query(name, filter="id < 5", output_fields=["*"]),
        lambda client, name: client.query(name, filter="id in [3, 4]", output_fields=["vector"]),
        lambda client, name: client.query(name, ids=[7, 8]),
        lambda client, name: client.get(name, [1, 2, 99_999]),
        lambda client, name: client.get(name, 1, output_fields=["group", "vector"]),
        lambda client, name: client.query(name, output_fields=["count(*)"]),
    ]

    async def read(client, name):
        return [
            sorted(await each(client, name), key=lambda row: row.get("id", 0)) for each in reads
        ]

    for expected, got in zip(*asyncio.run(of_both(pair, read)), strict=True):
        assert [row.keys() for row in got] == [row.keys() for row in expected]
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(b.pop("vector", 0), a.pop("vector", 0), rtol=2.4e-7)
            assert a == b


def test_rows_come_and_go_as_over_the_plain_client(pair):
    fresh = vectors(np.random.default_rng(11), 6, DIM)
    rows = [{"id": 1_000 + i, "vector": v, "group": 9, "note": "new"} for i, v in enumerate(fresh)]

    async def write(client, name):
        told = [await client.insert(name, rows[:4]), await client.insert(name, rows[4])]
        told.append(await client.upsert(name, [rows[5], {**rows[0], "vector": fresh[5]}]))
        found = await client.search(name, data=list(pair.queries), filter="group == 9", limit=10)
        deleted = await client.delete(name, ids=[row["id"] for row in rows])
        left = await client.get(name, [row["id"] for row in rows])
        return [(each.keys(), list(each["ids"])) for each in told], type(deleted), found, left

    (*expected, _, _), (*got, found, left) = asyncio.run(of_both(pair, write))
    assert got == expected
    now = fresh.copy()
    now[0] = fresh[5]
    wanted = pair.oracle(pair.queries, now, 1.0)
    for scores, hits in zip(wanted, found, strict=True):
        assert sorted(ids(hits)) == list(range(1_000, 1_006))
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits],
            scores[[hit["id"] - 1_000 for hit in hits]],
            atol=2e-5,
        )
    assert not left


def test_descriptions_speak_the_original(pair):
    async def describe(client, name):
        return await client.describe_collection(name), await client.describe_index(name, "vector")

    (expected, _), (got, index) = asyncio.run(of_both(pair, describe))
    ignored = {
        "collection_name",
        "collection_id",
        "created_timestamp",
        "update_timestamp",
        "schema_version",
    }
    # A migration notes in a property which collection its source is.
    expected["properties"] = {
        name: value for name, value in expected["properties"].items() if not is_ours(name)
    }
    assert {k: v for k, v in got.items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }
    assert index["metric_type"] == pair.metric

    async def state():
        async with opened(pair.backend) as client:
            return await client.hubness_state(pair.corrected), await client.hubness_state(pair.name)

    assert asyncio.run(state()) == (pair.client.hubness_state(pair.corrected), None)


def test_wrong_input_raises_as_over_the_sync_client(pair):
    good = [0.5] * DIM
    cases = [
        ("insert", {"data": [{"id": 1, "vector": good[:-1], "group": 1}]}, DimensionMismatch),
        (
            "upsert",
            {"data": [{"id": 1, "vector": [float("nan")] * DIM, "group": 1}]},
            NonFiniteVectors,
        ),
        (
            "insert",
            {"data": [{"id": 1, "vector": good, "group": 1, "hubness_bias": 1.0}]},
            InvalidInput,
        ),
        ("search", {"data": [[*good, 0.1]]}, DimensionMismatch),
        ("search", {"data": ["words"]}, InvalidInput),
        ("search", {"data": [good], "strength": float("nan")}, InvalidParameter),
        ("search", {"data": [good], "search_params": {"metric_type": "HAMMING"}}, InvalidParameter),
        ("query", {"filter": "no such thing"}, MilvusException),
    ]
    if pair.metric == "COSINE":
        cases.append(
            ("insert", {"data": {"id": 1, "vector": [0.0] * DIM, "group": 1}}, ZeroVectors)
        )

    async def ask():
        async with opened(pair.backend) as client:
            for method, arguments, error in cases:
                with pytest.raises(error):
                    await getattr(client, method)(pair.corrected, **arguments)
            with pytest.raises(MilvusException, match="nowhere"):
                await client.search("nowhere", data=[good])
            [counted] = await client.query(pair.corrected, output_fields=["count(*)"])
            return counted["count(*)"]

    assert asyncio.run(ask()) == ITEMS


PAGINGS = [
    {"batch_size": 70},
    {"batch_size": 30, "limit": 100, "output_fields": ["note"]},
    {"batch_size": 16, "filter": "group == 1 or id > 290", "output_fields": ["group", "vector"]},
    {"batch_size": 64, "output_fields": ["*"], "offset": 100},
    {"limit": 0},
    {"filter": "id > 1000000"},
]


@pytest.mark.parametrize("call", PAGINGS, ids=str)
def test_query_iterator_gives_the_rows_of_the_sync_one(pair, call):
    async def pages():
        async with opened(pair.backend) as client:
            plain = [page async for page in client.query_iterator(pair.name, **call)]
            return plain, [page async for page in client.query_iterator(pair.corrected, **call)]

    # Over servers, pymilvus's leaves out all but the key where no output_fields are named.
    sync = pair.client.query_iterator(pair.corrected, **{"output_fields": ["*"], **call})
    expected = []
    while page := sync.next():
        expected += page
    for got in asyncio.run(pages()):
        assert all(type(page) is list for page in got)
        assert max(map(len, got), default=0) <= call.get("batch_size", 1000)
        rows = [row for page in got for row in page]
        assert [row["id"] for row in rows] == [row["id"] for row in expected]
        for a, b in zip(expected, rows, strict=True):
            assert a.keys() == b.keys()
            np.testing.assert_allclose(b.get("vector", 0), a.get("vector", 0), rtol=2.4e-7)


def test_query_iterator_ends_with_an_empty_page_and_goes_on_after_an_error(pair, monkeypatch):
    async def iterate():
        async with opened(pair.backend) as client:
            iterator = client.query_iterator(pair.corrected, batch_size=60, output_fields=["id"])
            first = await iterator.next()
            with monkeypatch.context() as broken:

                async def fail(*args, **kwargs):
                    raise MilvusException(message="gone for a moment")

                broken.setattr(AsyncMilvusClient, "query", fail)
                with pytest.raises(MilvusException, match="moment"):
                    await iterator.next()
            rest = [await iterator.next() for _ in range(4)]
            closed = client.query_iterator(pair.corrected)
            await closed.close()
            return [first, *rest], await closed.next()

    pages, after_close = asyncio.run(iterate())
    assert [len(page) for page in pages] == [60, 60, 30, 0, 0]
    assert [row["id"] for page in pages for row in page] == list(range(ITEMS))
    assert after_close == []


def test_tasks_that_share_a_query_iterator_share_its_rows(pair):
    async def iterate():
        async with opened(pair.backend) as client:
            iterator = client.query_iterator(pair.corrected, batch_size=23, output_fields=["id"])

            async def take():
                return [row["id"] async for page in iterator for row in page]

            return await asyncio.gather(*(take() for _ in range(5)))

    assert sorted(key for taken in asyncio.run(iterate()) for key in taken) == list(range(ITEMS))


def test_wrong_iterators_are_refused(pair):
    async def ask():
        async with opened(pair.backend) as client:
            for wrong, error in (
                ({"batch_size": -1}, ParamError),
                ({"batch_size": 20_000}, ParamError),
                ({"filter": 3}, DataTypeNotMatchException),
                ({"iterator_cp_file": "cursor"}, UnsupportedOperation),
                ({"filter": "element_filter(parts, $[n] > 3)"}, UnsupportedOperation),
            ):
                with pytest.raises(error) as refused:
                    client.query_iterator(pair.corrected, **wrong)
                assert isinstance(refused.value, MilvusException)
            with pytest.raises(MilvusException):
                await client.query_iterator(pair.corrected, filter="no such thing").next()
            with pytest.raises(MilvusException, match="nowhere"):
                await client.query_iterator("nowhere").next()

    asyncio.run(ask())


def test_query_iterator_escapes_its_keys(backend):
    client, name = backend.client(), backend.name("words")
    schema = client.create_schema()
    schema.add_field("pk", DataType.VARCHAR, max_length=200, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index)
    keys = sorted(AWKWARD + [f"{word}{i}" for i, word in enumerate(AWKWARD)])
    client.insert(name, [{"pk": key, "vector": [1.0, 2.0]} for key in keys])

    async def pages():
        async with opened(backend) as asking:
            iterator = asking.query_iterator(name, batch_size=1, output_fields=["pk"])
            return [row["pk"] async for page in iterator for row in page]

    assert asyncio.run(pages()) == keys


def test_query_iterator_with_duplicates_of_keys_in_several_shards(backend):
    if backend.is_lite:
        pytest.skip("Milvus Lite replaces on insert: there are no duplicates")
    client, name = backend.client(), backend.name("twice")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="L2")
    # The level of consistency that pymilvus gives: reads may be seconds behind.
    client.create_collection(name, schema=schema, index_params=index, num_shards=2)
    for step in (1, 2, 3, 2):
        rows = [{"id": i, "vector": [float(step), i]} for i in range(0, 200, step)]
        client.insert(name, rows)
        if step == 2:
            client.flush(name)

    async def keys(size):
        async with opened(backend) as asking:
            pages = [page async for page in asking.query_iterator(name, size, output_fields=["id"])]
        assert max(map(len, pages)) <= size
        return [row["id"] for page in pages for row in page]

    for size in (7, 50, 1_000):
        assert asyncio.run(keys(size)) == list(range(200))


def test_tasks_search_and_write_at_once(pair):
    """Each task sees its own rows as they are, however its steps fall between those of others."""
    rng = np.random.default_rng(12)
    tasks, rows = 20, 5
    fresh = vectors(rng, tasks * rows, DIM).reshape(tasks, rows, DIM)
    loads = []
    load_bank = MilvusStore.load_bank

    def counted(self, reference):
        loads.append(threading.current_thread())
        return load_bank(self, reference)

    async def task(client, number):
        keys = [2_000 + number * rows + i for i in range(rows)]
        group = 100 + number
        data = [
            {"id": key, "vector": vector, "group": group, "note": f"of {number}"}
            for key, vector in zip(keys, fresh[number], strict=True)
        ]
        query = pair.queries[number % len(pair.queries)]
        await client.insert(pair.corrected, data[:3])
        await asyncio.sleep(random.random() / 50)
        for row in data[3:]:
            await client.upsert(pair.corrected, row)
        [hits] = await client.search(
            pair.corrected, data=[query], filter=f"group == {group}", strength=number / tasks
        )
        read = await client.get(pair.corrected, keys, output_fields=["vector"])
        await client.delete(pair.corrected, ids=keys[:2])
        left = await client.query(pair.corrected, filter=f"group == {group}", output_fields=["id"])
        return query, hits, read, left, keys

    async def together():
        async with opened(pair.backend, state_ttl=5.0) as client:
            try:
                return await asyncio.gather(*(task(client, number) for number in range(tasks)))
            finally:
                await client.delete(pair.corrected, filter="group >= 100")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MilvusStore, "load_bank", counted)
        done = asyncio.run(together())
    assert len(loads) == 1
    assert loads[0] is not threading.main_thread()
    for number, (query, hits, read, left, keys) in enumerate(done):
        [scores] = pair.oracle(query[None], fresh[number], number / tasks)
        assert sorted(ids(hits)) == keys
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits],
            scores[[key - keys[0] for key in ids(hits)]],
            atol=2e-5,
        )
        by_key = {row["id"]: row["vector"] for row in read}
        np.testing.assert_allclose([by_key[key] for key in keys], fresh[number], rtol=2.4e-7)
        assert sorted(row["id"] for row in left) == keys[2:]


def test_an_event_loop_goes_on_while_biases_are_computed(lite, monkeypatch):
    pair = Pair(lite, "IP")
    load_bank = MilvusStore.load_bank

    def slow(self, reference):
        time.sleep(0.5)
        return load_bank(self, reference)

    monkeypatch.setattr(MilvusStore, "load_bank", slow)

    async def write():
        async with opened(lite) as client:
            row = {"id": 9_999, "vector": pair.items[0], "group": 0}
            writing = asyncio.create_task(client.insert(pair.corrected, row))
            turns = 0
            while not writing.done():
                await asyncio.sleep(0.01)
                turns += 1
            return turns, await writing

    turns, told = asyncio.run(write())
    assert told["insert_count"] == 1
    assert turns > 20


def test_a_cancelled_task_takes_no_other_with_it(lite, monkeypatch):
    pair = Pair(lite, "IP")
    load_bank = MilvusStore.load_bank

    def slow(self, reference):
        time.sleep(0.3)
        return load_bank(self, reference)

    monkeypatch.setattr(MilvusStore, "load_bank", slow)

    async def write():
        async with opened(lite) as client:
            writing = [
                asyncio.create_task(
                    client.insert(
                        pair.corrected, {"id": 9_000 + i, "vector": pair.items[i], "group": 0}
                    )
                )
                for i in range(3)
            ]
            await asyncio.sleep(0.1)
            writing[0].cancel()
            return await asyncio.gather(*writing, return_exceptions=True)

    cancelled, *told = asyncio.run(write())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [list(each["ids"]) for each in told] == [[9_001], [9_002]]


def test_a_client_keeps_working_when_an_alias_is_switched(lite):
    pair = Pair(lite, "L2")
    alias = lite.name("alias")
    pair.plain.create_alias(pair.name, alias)

    async def search():
        async with opened(lite, state_ttl=1_000) as client:
            question = {"data": [pair.queries[0]], "limit": 5}
            before = await client.search(alias, **question)
            await client.alter_alias(pair.corrected, alias)
            own = await client.search(alias, **question)
            await client.alter_alias(pair.name, alias)
            # By someone else: the remembered state is wrong, and found out by what it leads to.
            await client.search(alias, **question)
            pair.plain.alter_alias(pair.corrected, alias)
            others = await client.search(alias, **question)
            return before, own, others

    before, own, others = map(hits_of, asyncio.run(search()))
    corrected = hits_of(pair.client.search(pair.corrected, data=[pair.queries[0]], limit=5))
    assert before == hits_of(pair.plain.search(pair.name, data=[pair.queries[0]], limit=5))
    assert own == others == corrected


def test_a_cancelled_move_of_an_alias_leaves_no_state_of_before(lite, monkeypatch):
    """The server may have moved it. Whoever keeps the error, as gather does, keeps the operation."""
    pair = Pair(lite, "L2")
    alias = lite.name("alias")
    pair.plain.create_alias(pair.corrected, alias)
    alter = AsyncMilvusClient.alter_alias

    async def alter_slowly(self, *args, **options):
        await alter(self, *args, **options)
        await asyncio.sleep(60)

    async def move():
        async with opened(lite, state_ttl=1_000) as client:
            await client.search(alias, data=[pair.queries[0]], limit=5)
            monkeypatch.setattr(AsyncMilvusClient, "alter_alias", alter_slowly)
            moving = asyncio.create_task(client.alter_alias(pair.name, alias))
            while pair.plain.describe_alias(alias)["collection_name"] != pair.name:
                await asyncio.sleep(0.01)
            moving.cancel()
            [kept] = await asyncio.gather(moving, return_exceptions=True)
            return kept, await client.search(alias, data=[pair.queries[0]], limit=5)

    kept, answer = asyncio.run(move())
    assert isinstance(kept, asyncio.CancelledError)
    assert hits_of(answer) == hits_of(pair.plain.search(pair.name, data=[pair.queries[0]], limit=5))


def test_an_interrupted_move_of_an_alias_leaves_no_state_of_before(lite, monkeypatch):
    pair = Pair(lite, "L2")
    alias = lite.name("alias")
    pair.plain.create_alias(pair.corrected, alias)
    client = lite.hubness_client(state_ttl=1_000)
    client.search(alias, data=[pair.queries[0]], limit=5)
    alter = MilvusClient.alter_alias

    def alter_interrupted(self, *args, **options):
        alter(self, *args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(MilvusClient, "alter_alias", alter_interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        client.alter_alias(pair.name, alias)
    answer = client.search(alias, data=[pair.queries[0]], limit=5)
    assert hits_of(answer) == hits_of(pair.plain.search(pair.name, data=[pair.queries[0]], limit=5))
    assert kept


def test_an_alias_that_the_client_creates_again_leads_where_it_says(lite):
    pair = Pair(lite, "L2")
    alias = lite.name("alias")
    pair.plain.create_alias(pair.corrected, alias)
    client = lite.hubness_client(state_ttl=1_000)
    client.search(alias, data=[pair.queries[0]], limit=5)
    pair.plain.drop_alias(alias)
    client.create_alias(pair.name, alias)
    answer = client.search(alias, data=[pair.queries[0]], limit=5)
    assert hits_of(answer) == hits_of(pair.plain.search(pair.name, data=[pair.queries[0]], limit=5))


def test_what_a_slow_answer_says_is_not_believed_after_a_change(lite, monkeypatch):
    pair = Pair(lite, "L2")
    alias = lite.name("alias")
    pair.plain.create_alias(pair.name, alias)
    describe = AsyncMilvusClient.describe_collection

    async def slowly(self, *args, **kwargs):
        told = await describe(self, *args, **kwargs)
        await asyncio.sleep(0.2)
        return told

    async def search():
        async with opened(lite, state_ttl=1_000) as client:
            monkeypatch.setattr(AsyncMilvusClient, "describe_collection", slowly)
            row = pair.client.get(pair.corrected, 0)[0]
            asking = asyncio.create_task(
                client.query(alias, filter="id == 0", output_fields=["group"])
            )
            await asyncio.sleep(0.1)
            await client.alter_alias(pair.corrected, alias)
            await asking
            return row, await client.query(
                alias, filter="id == 0", output_fields=["vector", "group"]
            )

    row, [got] = asyncio.run(search())
    assert len(got["vector"]) == DIM
    np.testing.assert_array_equal(got["vector"], row["vector"])


def test_biases_beside_the_vectors(lite):
    rng = np.random.default_rng(4)
    items, queries = vectors(rng, 200, 16), vectors(rng, 5, 16)
    client, name = lite.hubness_client(), lite.name("beside")
    lite.made += [f"{name}__bias_a", f"{name}__bias_b"]
    plain_collection(client, name, items, "L2")
    store = lite.store()
    enable(
        store,
        plan_correction(store, name, Recipe(QueryBank(items[:40]), estimator=NNN(K)), Beside()),
    )

    async def use():
        async with opened(lite) as asking:
            rows = [{"id": 500 + i, "vector": queries[i], "group": 1} for i in range(2)]
            await asyncio.gather(*(asking.insert(name, row) for row in rows))
            await asking.delete(name, ids=[3])
            found = await asyncio.gather(*(asking.search(name, data=[query]) for query in queries))
            pages = [page async for page in asking.query_iterator(name, 64)]
            return found, pages

    found, pages = asyncio.run(use())
    for query, got in zip(queries, found, strict=True):
        assert hits_of(got) == hits_of(client.search(name, data=[query]))
    keys = [*range(3), *range(4, 200), 500, 501]
    assert [row["id"] for page in pages for row in page] == keys
    assert all_keys(store, f"{name}__bias_a") == keys


def test_profiles_that_read_one_bank_at_once_keep_their_own_biases(lite):
    pair = Pair(lite, "IP")
    state = pair.client.hubness_state(pair.corrected)
    bank, cache = lite.store().load_bank(state.profile.bank), BankCache(1 << 30)
    older = state.profile.model_copy(update={"mean_bias": state.profile.mean_bias + 1})
    name = (pair.corrected, state.field, state.profile.slot)
    earlier, later = cache.keep(name, older, bank), cache.keep(name, state.profile, bank)
    for cached, profile in ((earlier, older), (later, state.profile), (earlier, older)):
        assert cached.correction(state).mean_bias == profile.mean_bias
    assert cache.get(name, state.profile) is later
    assert cache.get(name, older) is None


def test_tasks_that_wait_for_one_bank_fit_it_once(lite, monkeypatch):
    """Each of them fitted it by itself, in a thread of its own."""
    pair = Pair(lite, "IP")
    fitted, of_profile = [], Correction.of_profile
    monkeypatch.setattr(
        Correction, "of_profile", lambda *args: fitted.append(args) or of_profile(*args)
    )
    rows = [{"id": 9_000 + i, "vector": item, "group": 0} for i, item in enumerate(pair.items[:12])]

    async def insert():
        async with opened(lite, state_ttl=1_000) as client:
            await asyncio.gather(*(client.insert(pair.corrected, row) for row in rows))

    asyncio.run(insert())
    assert len(fitted) == 1

    state = pair.client.hubness_state(pair.corrected)
    cached = CachedBank(state.profile, MilvusStore(pair.plain).load_bank(state.profile.bank))
    threads = [threading.Thread(target=cached.correction, args=(state,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fitted) == 2


def test_ordinary_collections_are_left_alone(lite):
    rng = np.random.default_rng(3)
    items, name = vectors(rng, 50, 8), lite.name()
    plain_collection(lite.client(), name, items, "COSINE")

    async def ask(client):
        return [
            hits_of(await client.search(name, data=list(items[:3]), limit=4, output_fields=["*"])),
            list(await client.query(name, filter="id == 3")),
            list(await client.get(name, [1, 2])),
            await client.describe_collection(name),
            await client.describe_index(name, "vector"),
            name in await client.list_collections(),
        ]

    async def both():
        async with opened(lite, AsyncMilvusClient) as plain, opened(lite) as client:
            assert isinstance(client, AsyncMilvusClient)
            return await ask(plain), await ask(client)

    expected, got = asyncio.run(both())
    assert got == expected


def test_a_closed_client_connects_to_nothing(lite, monkeypatch):
    pair = Pair(lite, "IP")
    connected, closed, connect, close = [], [], PlainConnection.client, PlainConnection.close
    monkeypatch.setattr(
        PlainConnection, "client", lambda own: connected.append(own) or connect(own)
    )
    monkeypatch.setattr(PlainConnection, "close", lambda own: closed.append(own) or close(own))

    async def use():
        async with opened(lite, state_ttl=1_000) as client:
            await client.insert(pair.corrected, {"id": 9_999, "vector": pair.items[0], "group": 0})
            assert connected
            connected.clear()
            await client.close()
            await client.close()
            assert closed
            with pytest.raises(MilvusException, match="connection"):
                await client.insert(
                    pair.corrected, {"id": 9_998, "vector": pair.items[0], "group": 0}
                )
            assert not connected

    asyncio.run(use())


def test_what_outlasts_a_client_opens_no_connection(lite):
    """A connection that a late thread opened was closed by nobody: a file has one process at a time."""

    def late_work(client):
        sampler = client._operations._sampler
        for work in (client._plain.client, lambda: sampler._write_samples(None, [])):
            with pytest.raises(MilvusException, match="should create connection first"):
                work()
        assert client._plain._client is None

    def in_store():
        return (yield InStore(lambda store: store.exists("any")))

    client = lite.hubness_client()
    client.close()
    late_work(client)
    with pytest.raises(MilvusException, match="should create connection first"):
        client._run(in_store())

    async def use():
        async with opened(lite) as client:
            await client.close()
            late_work(client)
            with pytest.raises(MilvusException, match="should create connection first"):
                await client._run(in_store())

    asyncio.run(use())


def test_answers_and_errors_of_both_drives_are_the_same():
    def operation():
        try:
            yield Ask("fail")
        except KeyError as error:
            seen = str(error)
        told = yield Ask("tell")
        computed = yield Compute(lambda: 3)
        return seen, told, computed

    def answer(step):
        if isinstance(step, Compute):
            return step.work()
        if step.method == "fail":
            raise KeyError("why")
        return "told"

    async def answer_later(step):
        await asyncio.sleep(0)
        return answer(step)

    wanted = ("'why'", "told", 3)
    assert (
        drive(operation(), answer) == asyncio.run(drive_async(operation(), answer_later)) == wanted
    )

    def failing():
        yield Ask("fail")

    with pytest.raises(KeyError):
        asyncio.run(drive_async(failing(), answer_later))


def test_a_collection_is_born_corrected(backend):
    if backend.is_lite:
        pytest.skip("pymilvus makes no index in Milvus Lite for asyncio")
    name, rng = backend.name("born"), np.random.default_rng(5)
    items, bank = vectors(rng, 40, 8), vectors(rng, 20, 8)
    rows = [{"id": i, "vector": vector} for i, vector in enumerate(items)]

    async def make():
        async with opened(backend) as client:
            await client.create_collection(
                name,
                dimension=8,
                metric_type="IP",
                consistency_level="Strong",
                hubness=CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(4))),
            )
            await client.insert(name, rows)
            return await client.search(name, data=[bank[0]], limit=40)

    [hits] = asyncio.run(make())
    scores = similarity(bank[:1], items, "IP")[0] - nnn(bank, items, "IP", 4, 0.75)
    np.testing.assert_allclose([hit["distance"] for hit in hits], scores[ids(hits)], atol=2e-5)


ADDED = {
    "match",
    "hubness_state",
    "hubness_samples",
    "write_import_files",
}
OVERRIDDEN = sorted(
    name
    for name in vars(AsyncHubnessClient)
    if not name.startswith("_") and name not in {*ADDED, "query_iterator"}
)


@pytest.mark.parametrize("method", ["__init__", "query_iterator", *OVERRIDDEN])
def test_signatures_are_pymilvuss_and_what_is_added_goes_by_name(method):
    kind = MilvusClient if method == "query_iterator" else AsyncMilvusClient
    ours = dict(inspect.signature(getattr(AsyncHubnessClient, method)).parameters)
    theirs = inspect.signature(getattr(kind, method)).parameters
    added = [name for name in ours if name not in theirs]
    assert {ours.pop(name).kind for name in added} <= {inspect.Parameter.KEYWORD_ONLY}
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in theirs.values()
    ]


def test_a_server_that_pages_in_no_order_is_told(lite, monkeypatch):
    name = lite.name()
    plain_collection(lite.client(), name, vectors(np.random.default_rng(3), 50, 8), "IP")
    query = AsyncMilvusClient.query

    async def backwards(self, *args, **kwargs):
        rows = await query(self, *args, **kwargs)
        rows.reverse()
        return rows

    async def iterate():
        async with opened(lite) as client:
            monkeypatch.setattr(AsyncMilvusClient, "query", backwards)
            await client.query_iterator(name, 10).next()

    with pytest.raises(StoreError, match="key order"):
        asyncio.run(iterate())


def test_pages_are_read_as_of_one_moment_where_the_server_tells_it(lite, monkeypatch):
    name, asked = lite.name(), []
    plain_collection(lite.client(), name, vectors(np.random.default_rng(3), 50, 8), "IP")
    query = AsyncMilvusClient.query

    async def told(self, *args, **options):
        asked.append((options.get("consistency_level"), options.get("guarantee_timestamp")))
        rows = await query(self, *args, **options)
        rows.extra["iterator_session_ts"] = 1_000 + len(asked)
        return rows

    async def iterate():
        async with opened(lite) as client:
            monkeypatch.setattr(AsyncMilvusClient, "query", told)
            return [page async for page in client.query_iterator(name, 30)]

    assert [len(page) for page in asyncio.run(iterate())] == [30, 20]
    assert asked == [("Strong", None), (None, 1_001), (None, 1_001), (None, 1_001)]
