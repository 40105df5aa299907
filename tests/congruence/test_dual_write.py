"""Rows written by applications while a migration carries their collection to its corrected form, or back."""

import asyncio
import logging
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    DualWriteFailed,
    MigrationOptions,
    QueryBank,
    Recipe,
    Sinkhorn,
    StoreError,
    enable,
    migrate,
    plan_correction,
    rollback,
)
from milvus_hubness.jobs.common.progress import Events
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite
from tests.support.async_clients import opened
from tests.support.databases import write_state
from tests.support.dual_writes import DIM, ITEMS, WRITES, K, Moving
from tests.support.galleries import all_keys, nnn, plain_collection, vectors
from tests.support.ledgers import MIGRATION, let_write

AN_HOUR = 3_600.0
LITE = pytest.mark.lite_only


@pytest.fixture
def moving(backend):
    return Moving(backend)


def write(moving, asynchronous, method, arguments):
    if not asynchronous:
        return getattr(moving.client, method)(moving.source, **arguments)

    async def written():
        async with opened(moving.backend) as client:
            return await getattr(client, method)(moving.source, **arguments)

    return asyncio.run(written())


@pytest.mark.parametrize(
    "asynchronous", [False, pytest.param(True, marks=LITE)], ids=["sync", "async"]
)
def test_both_hold_what_was_written_to_one(moving, asynchronous):
    moving.forward()
    twin = moving.backend.name("twin")
    plain_collection(moving.plain, twin, moving.items, "IP")
    for method, make in WRITES:
        arguments = make(moving)
        told = getattr(moving.plain, method)(twin, **arguments)
        got = write(moving, asynchronous, method, arguments)
        assert type(got) is type(told)
        assert got == told or got["ids"] == told["ids"]
        held = moving.assert_equal()
        left = moving.plain.query(twin, filter="id >= 0", output_fields=["id"])
        assert sorted(held) == sorted(row["id"] for row in left)


@pytest.mark.lite_only
def test_a_mirrored_row_is_the_row_that_is_written_to_the_copy_itself(moving):
    [row] = moving.rows([100])
    moving.forward()
    moving.client.insert(moving.source, row)
    moving.client.insert(moving.target, {**row, "id": 101})
    mirrored, direct = (moving.plain.get(moving.target, key)[0] for key in (100, 101))
    assert {**mirrored, "id": 101} == direct


@pytest.mark.beyond_contract
@pytest.mark.parametrize("metric", [pytest.param("IP", marks=LITE), "COSINE"])
def test_on_the_way_back_the_plain_one_gets_the_users_rows(backend, metric):
    moving = Moving(backend, metric).backward()
    rows = moving.rows([100, 101, 7])
    moving.client.upsert(moving.target, rows)
    moving.client.delete(moving.target, ids=[8])
    moving.client.delete(moving.target, filter="group == 3")
    held = {
        row["id"]: row
        for row in moving.plain.query(moving.source, filter="id >= 0", output_fields=["*"])
    }
    assert sorted(held) == sorted({*range(ITEMS), 100, 101} - {8} - set(range(3, ITEMS, 5)))
    for row in rows:
        np.testing.assert_array_equal(np.float32(held[row["id"]]["vector"]), row["vector"])
        assert {k: v for k, v in held[row["id"]].items() if k != "vector"} == {
            k: v for k, v in row.items() if k != "vector"
        }
    moving.assert_equal()


def test_a_partial_update_reaches_both(lite):
    moving = Moving(lite).forward()
    moving.client.upsert(
        moving.source, [{"id": 3, "note": "x"}, {"id": 4, "note": "y"}], partial_update=True
    )
    moving.client.upsert(moving.source, moving.rows([5]), partial_update=True)
    held = moving.assert_equal()
    assert [held[key]["note"] for key in (3, 4, 5)] == ["x", "y", "new 5"]
    np.testing.assert_array_equal(np.float32(held[3]["vector"]), moving.items[3])


def test_a_partial_update_reaches_rows_that_the_copy_lacks(lite):
    moving = Moving(lite).forward()
    moving.plain.delete(moving.target, ids=[3])
    moving.client.upsert(moving.source, [{"id": 3, "note": "x"}], partial_update=True)
    assert moving.assert_equal()[3]["note"] == "x"


def auto_id_collection(client, name, items, metric):
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True, auto_id=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=items.shape[1])
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type=metric)
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    client.insert(name, [{"vector": vector, "note": f"n{i}"} for i, vector in enumerate(items)])


def test_odd_texts_as_keys_are_deleted_from_both(backend):
    client, name = backend.client(), backend.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.VARCHAR, max_length=40, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    keys = ["o'hara", 'say "hi"', "back\\slash", "plain"]
    items = vectors(np.random.default_rng(4), 4, 8)
    client.insert(name, [{"id": key, "vector": row} for key, row in zip(keys, items, strict=True)])
    store = backend.store()
    done = migrate(
        store,
        plan_correction(store, name, Recipe(QueryBank(items), estimator=NNN(2))),
        no_writers=True,
    )
    store.write_property(
        name, DUAL_WRITE_PROPERTY, DualWrite(collection=done.target, required=True)
    )
    backend.hubness_client().delete(name, filter='id != "plain"')
    for there in (name, done.target):
        assert all_keys(store, there) == ["plain"]


def test_rows_whose_keys_the_server_makes_have_the_same_in_both(lite):
    moving = Moving(lite, make=auto_id_collection).forward()
    fresh = vectors(moving.rng, 3, DIM)
    told = moving.client.insert(
        moving.source, [{"vector": vector, "note": "new"} for vector in fresh]
    )
    held = moving.assert_equal()
    assert len(held) == ITEMS + 3
    for key, vector in zip(told["ids"], fresh, strict=True):
        np.testing.assert_array_equal(np.float32(held[key]["vector"]), vector)


def test_a_vector_without_a_direction_has_bias_0_in_the_copy(lite):
    moving = Moving(lite, "COSINE").forward(required=True)
    moving.client.insert(moving.source, moving.rows([100], vector=[0.0] * DIM))
    row = moving.held(moving.target, "hubness_bias")[100]
    assert row["hubness_bias"] == 0
    assert row["vector"] == [0.0] * DIM


def test_a_bank_too_large_for_the_client_leaves_the_bias_to_the_migration(lite):
    moving = Moving(lite, estimator=Sinkhorn(0.1)).forward(required=True)
    small = lite.hubness_client(bank_budget=1)
    small.insert(moving.source, moving.rows([100]))
    row = moving.held(moving.target, "hubness_bias", "hubness_epoch")[100]
    assert (row["hubness_bias"], row["hubness_epoch"]) == (0, 0)


def test_a_pending_bias_is_pending_in_the_copy(lite):
    moving = Moving(lite).forward()
    moving.client.insert(moving.source, moving.rows([100]), bias="pending")
    assert moving.held(moving.target, "hubness_epoch")[100]["hubness_epoch"] == 0


def test_a_copy_with_its_biases_in_a_side_collection(lite):
    moving = Moving(lite)
    reranking = lite.name("beside")
    plain_collection(moving.plain, reranking, moving.items, "IP")
    lite.made += [f"{reranking}__bias_a", f"{reranking}__bias_b"]
    enable(
        moving.store,
        plan_correction(
            moving.store, reranking, Recipe(QueryBank(moving.bank), estimator=NNN(K)), Beside()
        ),
    )
    state = moving.store.info(reranking).state.model_copy(update={"migration": MIGRATION})
    write_state(moving.store, reranking, state)
    let_write(moving.store, moving.source, reranking)
    moving.dual_write(moving.source, reranking)
    rows = moving.rows([100, 101])
    moving.client.insert(moving.source, rows)
    moving.client.delete(moving.source, filter="id in [3, 101]")
    mean_bias = moving.store.info(reranking).state.profile.mean_bias
    side = {
        row["id"]: row["biases"][0]
        for row in moving.plain.query(f"{reranking}__bias_a", filter="id >= 0")
    }
    assert sorted(side) == sorted({*range(ITEMS), 100} - {3})
    wanted = nnn(moving.bank, rows[0]["vector"][None], "IP", K, 0.75)[0] - mean_bias
    assert side[100] == pytest.approx(wanted, abs=2e-5)


# -- what the copy does not take --------------------------------------------------------------------------


CALLS = [
    lambda m: m.client.insert(m.source, m.rows([100])),
    lambda m: m.client.upsert(m.source, m.rows([3])),
    lambda m: m.client.delete(m.source, ids=[4]),
    lambda m: m.client.delete(m.source, filter="id == 5"),
]


def assert_written(moving):
    held = moving.held(moving.source)
    assert 100 in held
    assert held[3]["note"] == "new 3"
    assert not {4, 5} & set(held)


@pytest.mark.lite_only
def test_while_the_copy_is_made_its_failures_are_logged(moving, caplog):
    moving.forward()
    moving.client.drop_collection(moving.target)
    for call in CALLS:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "milvus_hubness"):
            call(moving)
        [record] = [each for each in caplog.records if each.name == "milvus_hubness"]
        assert moving.source in record.getMessage()
        assert moving.target in record.getMessage()
    assert_written(moving)


@pytest.mark.lite_only
def test_once_the_copy_is_complete_its_failures_are_raised(moving):
    moving.forward(required=True)
    moving.client.drop_collection(moving.target)
    for call in CALLS:
        message = f"the write reached '{moving.source}'.*'{moving.target}'.*Write again"
        with pytest.raises(DualWriteFailed, match=message) as raised:
            call(moving)
        assert isinstance(raised.value, MilvusException)
        assert isinstance(raised.value, StoreError)
    assert_written(moving)


@pytest.mark.lite_only
def test_a_migration_that_was_given_up_fails_no_write(moving, caplog):
    moving.client = moving.backend.hubness_client(state_ttl=AN_HOUR)
    moving.plain.drop_collection(moving.target)
    for call in CALLS:
        moving.forward(required=True)
        moving.client.query_iterator(moving.source)  # reads the state
        moving.plain.alter_collection_properties(moving.source, {DUAL_WRITE_PROPERTY: ""})
        call(moving)
    assert not [each for each in caplog.records if each.name == "milvus_hubness"]
    assert_written(moving)


@pytest.mark.lite_only
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_stranger_that_has_got_the_name_of_the_copy_gets_no_writes(moving, way, required):
    getattr(moving, way)(required=required)
    written, copy = moving.source, moving.target
    if way == "backward":
        written, copy = copy, written
    moving.plain.drop_collection(copy)
    plain_collection(moving.plain, copy, np.ones((2, DIM), np.float32), "IP")
    for method, arguments in [
        ("insert", {"data": moving.rows([100])}),
        ("upsert", {"data": moving.rows([1])}),
        ("delete", {"ids": [0]}),
        ("delete", {"filter": "id == 1"}),
    ]:
        message = f"the write reached '{written}'.*'{copy}' is another collection than the one"
        with pytest.raises(DualWriteFailed, match=message) if required else nullcontext():
            getattr(moving.client, method)(written, **arguments)
    assert set(moving.held(written)) == {*range(2, ITEMS), 100}
    rows = moving.plain.query(copy, filter="id >= 0", output_fields=["*"])
    assert {row["id"]: row["vector"] for row in rows} == {0: [1.0] * DIM, 1: [1.0] * DIM}


@pytest.mark.lite_only
def test_a_delete_that_failed_can_be_repeated(moving):
    moving.forward(required=True)
    moving.plain.delete(moving.source, filter="id in [3, 4]")  # as if the copy had not answered
    moving.client.delete(moving.source, filter="id in [3, 4]")
    assert len(moving.assert_equal()) == ITEMS - 2


# -- the switch --------------------------------------------------------------------------------------------


class Meddled(MilvusClient):
    """A client that calls `then` behind the first request of the method `after`."""

    after, then = "", None

    def insert(self, *arguments, **options):
        return self.meddled("insert", super().insert(*arguments, **options))

    def upsert(self, *arguments, **options):
        return self.meddled("upsert", super().upsert(*arguments, **options))

    def delete(self, *arguments, **options):
        return self.meddled("delete", super().delete(*arguments, **options))

    def meddled(self, method, outcome):
        if self.then and self.after == method:
            then, self.then = self.then, None
            then()
        return outcome


@pytest.fixture
def alias(moving):
    name = f"{moving.source}_alias"
    moving.plain.create_alias(moving.source, name)
    yield name
    moving.plain.drop_alias(name)


@pytest.mark.parametrize("required", [pytest.param(False, marks=LITE), True])
@pytest.mark.parametrize("moment", [pytest.param("before", marks=LITE), "between"])
def test_the_alias_moves_while_rows_are_written(moving, alias, moment, required):
    client = moving.backend.hubness_client(Meddled, state_ttl=AN_HOUR)
    moving.forward(required=required)
    client.search(alias, data=[moving.items[0]])
    wanted = set(range(ITEMS))
    options = {"partial_update": True} if moving.backend.is_lite else {}
    writes = [
        ("insert", lambda: client.insert(alias, moving.rows([100])), {100}, set()),
        ("upsert", lambda: client.upsert(alias, moving.rows([3, 101])), {101}, set()),
        ("upsert", lambda: client.upsert(alias, moving.rows([4]), **options), set(), set()),
        ("delete", lambda: client.delete(alias, ids=[5]), set(), {5}),
        ("delete", lambda: client.delete(alias, filter="id in [6, 100]"), set(), {6, 100}),
    ]
    for method, write, added, lost in writes:
        client.after = method
        client.then = lambda: moving.plain.alter_alias(moving.target, alias)
        if moment == "before":
            client.then()
            client.then = None
        write()
        assert client.then is None
        wanted = wanted - lost | added
        held = moving.held(moving.target, "hubness_bias")
        assert set(held) == wanted
        biases = moving.biases([row["vector"] for row in held.values()])
        np.testing.assert_allclose(
            [row["hubness_bias"] for row in held.values()], biases, atol=2e-5
        )
        moving.plain.alter_alias(moving.source, alias)
        client.search(alias, data=[moving.items[0]])
        client.query_iterator(alias)  # reads the state
    assert {row["id"]: row["note"] for row in moving.plain.get(moving.target, [3, 4])} == {
        3: "new 3",
        4: "new 4",
    }


@pytest.fixture
def renaming(moving):
    """Gives the collection's name to its copy, 0.3 s later."""
    old = f"{moving.source}_old"
    moving.backend.made.append(old)

    def rename():
        moving.plain.rename_collection(moving.source, old)
        time.sleep(0.3)
        moving.plain.create_alias(moving.target, moving.source)

    yield rename
    if moving.plain.has_collection(old):
        moving.plain.drop_alias(moving.source)


@pytest.mark.beyond_contract
@pytest.mark.parametrize("state_ttl", [pytest.param(0.0, marks=LITE), AN_HOUR])
def test_nobody_notices_that_the_name_is_given_to_the_copy(moving, renaming, state_ttl):
    moving.forward(required=True)
    failures, stop, done = [], threading.Event(), [0, 0, 0]

    def loop(number, call):
        client = moving.backend.hubness_client(state_ttl=state_ttl)
        try:
            while not stop.is_set():
                call(client, done[number])
                done[number] += 1
                time.sleep(0.002)
        except BaseException as error:
            failures.append(error)

    calls = [
        lambda client, i: client.search(moving.source, data=[moving.items[i % ITEMS]], limit=3),
        lambda client, i: client.get(moving.source, [i % ITEMS]),
        lambda client, i: client.upsert(moving.source, moving.rows([1_000 + i])),
    ]
    threads = [threading.Thread(target=loop, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    renaming()
    before = list(done)
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures, failures[0]
    assert all(now > then for now, then in zip(done, before, strict=True))
    held = moving.held(moving.target)
    assert set(range(1_000, 1_000 + done[2])) <= set(held)


@pytest.mark.parametrize("rename", [False, True], ids=["alias", "rename"])
@pytest.mark.parametrize("by", [{"ids": [5]}, {"filter": "id == 5"}], ids=str)
def test_a_delete_that_meets_the_end_of_a_rollback_fails_nobody(backend, rename, by):
    """The client has read that deletes go to both collections. At its first delete the name is back already, and the
    ledger says so."""
    rng, plain, store, name = (
        np.random.default_rng(3),
        backend.client(),
        backend.store(),
        backend.name("moving"),
    )
    plain_collection(plain, name, vectors(rng, ITEMS, DIM), "IP")
    backend.made += [f"{name}__before_hubness", f"{name}_hubness"]
    uses = name if rename else backend.name("moving_live")
    plan = plan_correction(
        store,
        name,
        Recipe(QueryBank(vectors(rng, 30, DIM)), estimator=NNN(K)),
        Copy(rename=rename, alias=None if rename else uses),
    )
    migrate(store, plan)
    clients = []

    def reads(event):
        if event.name == "catching-up":
            clients.append(backend.hubness_client(state_ttl=AN_HOUR))
            clients[-1].get(uses, [1])

    rollback(store, plan.body.target, options=MigrationOptions(events=Events([reads])))
    assert store.info(uses).name == name
    clients[-1].delete(uses, **by)
    assert 5 not in all_keys(store, name)
    assert len(all_keys(store, name)) == ITEMS - 1


@pytest.mark.lite_only
def test_tasks_wait_for_a_name_that_is_given_to_the_copy(moving, renaming):
    moving.forward()

    async def search():
        async with opened(moving.backend, state_ttl=AN_HOUR) as client:
            await client.search(moving.source, data=[moving.items[0]])
            moved = asyncio.create_task(asyncio.to_thread(renaming))
            await asyncio.sleep(0.1)
            others = 0
            waiting = asyncio.create_task(
                client.search(moving.source, data=[moving.items[0]], limit=ITEMS)
            )
            inserting = asyncio.create_task(client.insert(moving.source, moving.rows([100])))
            while not waiting.done():
                await asyncio.sleep(0.01)
                others += 1
            await moved
            await inserting
            return others, await waiting

    others, [hits] = asyncio.run(search())
    assert others > 1, "the loop stood still"
    wanted = moving.items[:1] @ moving.items.T - moving.biases(moving.items)
    assert next(hit["id"] for hit in hits if hit["id"] < ITEMS) == int(wanted.argmax())
    assert 100 in moving.held(moving.target)


@pytest.mark.lite_only
def test_a_collection_that_is_gone_for_good_is_reported(moving):
    client = moving.backend.hubness_client(policy={"cut_over_seconds": 0.2})
    moving.forward()
    client.get(moving.source, [1])
    moving.plain.drop_collection(moving.source)
    for _ in range(2):
        with pytest.raises(MilvusException, match=r"(?i)not found|not exist"):
            client.get(moving.source, [1])
