"""A name moves between copies whose stored vectors have one width and unlike meaning: no answer mixes the two, and no
write is lost, whenever a client hears of it."""

import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import HubnessClient, resume, rollback
from milvus_hubness.jobs.store.records import DualWrite
from tests.support.async_clients import opened
from tests.support.galleries import plain_collection, vectors
from tests.support.late_readers import READS, LateReaders
from tests.support.switching import DIM, FIXED, ITEMS, answered_by, on_milvus, oracles

AN_HOUR = 3_600.0


def search(client, world, **options):
    return client.search(world.alias, list(world.queries), filter=FIXED, limit=ITEMS, **options)


@pytest.fixture
def world(lite):
    made = on_milvus(lite)
    yield made
    made.plain.drop_alias(made.alias)


async def test_a_client_that_has_not_heard_of_a_switch_asks_the_copy_that_it_knows(world):
    """Its queries fit the width of the other copy, so nothing but the name keeps them from it."""
    client = world.backend.client(HubnessClient, state_ttl=AN_HOUR)
    search(client, world)
    pages = client.query_iterator(world.alias, batch_size=20, output_fields=["vector"])
    ranked = client.search_iterator(world.alias, [world.queries[0]], batch_size=20, filter=FIXED)
    begun = [pages.next(), ranked.next()]
    async with opened(world.backend, state_ttl=AN_HOUR) as tasks:
        await tasks.search(world.alias, list(world.queries), filter=FIXED, limit=ITEMS)
        task_pages = tasks.query_iterator(world.alias, batch_size=20, output_fields=["vector"])
        first_page = await task_pages.next()

        world.forth()
        expected = oracles(world, world.states)
        # A row that only the new copy has.
        world.plain.delete(world.second, ids=[59])
        assert answered_by(expected, search(client, world)) == {world.first}
        found = await tasks.search(world.alias, list(world.queries), filter=FIXED, limit=ITEMS)
        assert answered_by(expected, found) == {world.first}
        [row] = client.get(world.alias, 59, output_fields=["vector"])
        np.testing.assert_allclose(row["vector"], world.items[59], rtol=1e-6)

        keys = [row["id"] for row in first_page]
        async for page in task_pages:
            keys += [row["id"] for row in page]
        assert keys == list(range(ITEMS))

    keys = [row["id"] for row in begun[0]]
    while page := pages.next():
        keys += [row["id"] for row in page]
    assert keys == list(range(ITEMS))

    scores = {hit["id"]: hit["distance"] for hit in begun[1]}
    while page := ranked.next():
        scores |= {hit["id"]: hit["distance"] for hit in page}
    wanted = expected[world.first][0]
    assert scores == pytest.approx(dict(enumerate(wanted)), abs=3e-5)

    client._operations.states.forget()
    found = client.search(world.alias, list(world.queries), filter="id < 59", limit=ITEMS)
    assert {name for name, wanted in expected.items() if _scored(found, wanted)} == {world.second}


def _scored(found, wanted):
    return all(
        abs(hit["distance"] - scores[hit["id"]]) < 3e-5
        for hits, scores in zip(found, wanted, strict=True)
        for hit in hits
    )


def test_between_the_move_and_the_end_of_every_ttl_both_copies_get_every_write(world, monkeypatch):
    """One client has heard of the switch, and one has not: each writes what the other reads."""
    old = world.backend.client(HubnessClient, state_ttl=AN_HOUR)
    seen = []
    fresh = vectors(np.random.default_rng(5), 4, DIM)

    def write(key, client):
        client.upsert(world.alias, [{"id": key, "vector": fresh[key - 100], "group": 7}])

    def waiting(*_):
        origin = world.store.alias_target(world.alias)
        dual_writes = {
            name: world.store.info(name).dual_write for name in (world.first, world.second)
        }
        if not seen and origin == world.first:
            # Until now this client has heard that its writes go to the copy too.
            old._operations.states.forget()
            search(old, world)
        seen.append((origin, dual_writes))
        if origin == world.second:
            young = world.backend.client(HubnessClient, state_ttl=AN_HOUR)
            write(100, old)
            write(101, young)
            old.delete(world.alias, ids=[58])
            young.delete(world.alias, filter="id == 57")
            expected = oracles(world, world.states)
            for client, name in ((old, world.first), (young, world.second)):
                assert len(client.get(world.alias, [100, 101])) == 2
                assert client.get(world.alias, [57, 58]) == []
                found = client.search(
                    world.alias, list(world.queries), filter="id < 57", limit=ITEMS
                )
                assert {each for each, wanted in expected.items() if _scored(found, wanted)} == {
                    name
                }
            young.close()
        return 0.0

    monkeypatch.setattr("milvus_hubness.jobs.migration.switching.wait_seconds", waiting)
    world.forth()
    target, dual_writes = seen[-1]
    assert target == world.second
    assert dual_writes == {
        world.first: DualWrite(collection=world.second, required=True),
        world.second: DualWrite(collection=world.first, former=True),
    }
    for name in (world.first, world.second):
        assert world.store.info(name).dual_write is None
        rows = {row["id"] for row in old.query(name, filter="id >= 0", consistency_level="Strong")}
        assert rows == {*range(57), 59, 100, 101}
        for key in (100, 101):
            [row] = old.get(name, key)
            np.testing.assert_allclose(row["vector"], fresh[key - 100], rtol=1e-6)


def test_a_source_that_gets_another_name_is_asked_by_it_before_the_copy_has_its_own(
    lite, monkeypatch
):
    """Of a client that knows the source by its own name, which leads to the copy afterwards."""
    world = on_milvus(lite, rename=True)
    live, world.alias = world.alias, world.first
    name = world.first
    renamed = f"{name}__before_hubness"
    world.backend.made.append(renamed)
    old = world.backend.client(HubnessClient, state_ttl=AN_HOUR)
    search(old, world)
    answers = []

    def answer(client):
        expected = oracles(world, {renamed: former, world.second: world.states[world.second]})
        answers.append(
            (world.store.alias_target(name), answered_by(expected, search(client, world)))
        )

    def waiting(*_):
        leads_to = world.store.alias_target(name)
        if leads_to is not None:
            # It has not heard of this step; then it has.
            answer(old)
            old._operations.states.forget()
            answer(old)

    former = world.store.info(world.first).state
    world.banks[renamed] = world.banks[world.first]
    monkeypatch.setattr("milvus_hubness.jobs.migration.switching.wait_seconds", waiting)
    resume(world.store, world.second, world.options, rename=True)
    answer(old)
    assert answers == [
        (renamed, {renamed}),
        (renamed, {renamed}),
        (world.second, {renamed}),
        (world.second, {world.second}),
        (world.second, {world.second}),
    ]

    answers.clear()
    rollback(world.store, world.second, options=world.options)
    answer(old)
    assert answers[-3:] == [(renamed, {world.second}), (renamed, {renamed}), (None, {renamed})]
    assert world.store.info(name).dual_write is None
    world.plain.drop_alias(live)


@pytest.mark.parametrize("method", ["insert", "upsert", "delete"])
def test_a_write_that_outlives_its_state_is_made_where_the_name_leads_by_then(
    world, monkeypatch, method
):
    """The client is suspended between its look and its write, and the switch is over when it goes on."""
    client = world.backend.client(HubnessClient, state_ttl=0.0)
    call, held = getattr(MilvusClient, method), []

    def late(self, *args, **kwargs):
        if self is client and not held:
            held.append(args)
            world.forth()
        return call(self, *args, **kwargs)

    row = {"id": 200, "vector": world.items[3] * 2, "group": 7}
    with monkeypatch.context() as patched:
        patched.setattr(MilvusClient, method, late)
        if method == "delete":
            client.delete(world.alias, ids=[56])
        else:
            getattr(client, method)(world.alias, [row])
    assert held[0][0] == world.first
    if method == "delete":
        assert client.get(world.alias, 56) == []
    else:
        [found] = client.get(world.alias, 200)
        np.testing.assert_allclose(found["vector"], row["vector"], rtol=1e-6)


def test_a_former_copy_that_is_gone_is_not_missed(world):
    client = world.backend.client(HubnessClient, state_ttl=AN_HOUR)
    search(client, world)
    world.forth()
    world.plain.drop_collection(world.first)
    found = search(client, world)
    assert answered_by(oracles(world, world.states), found) == {world.second}


def test_an_error_names_the_collection_as_the_user_did(world):
    client = world.backend.client(HubnessClient, state_ttl=AN_HOUR)
    search(client, world)
    world.plain.release_collection(world.first)
    with pytest.raises(MilvusException) as raised:
        search(client, world)
    assert world.first not in str(raised.value)
    assert world.alias in str(raised.value)
    world.plain.load_collection(world.first)


def test_a_collection_without_a_correction_is_asked_by_the_name_that_the_user_gave(world):
    client = world.backend.client(HubnessClient)
    alias = f"{world.source}_plain"
    world.plain.create_alias(world.source, alias)
    sent = []

    def kept(self, name, *args, **kwargs):
        sent.append(name)
        return []

    with pytest.MonkeyPatch.context() as patched:
        for method in ("search", "query", "get", "upsert"):
            patched.setattr(MilvusClient, method, kept)
        client.search(alias, [[0.0] * DIM])
        client.query(alias, "id > 0")
        client.get(alias, 3)
    assert sent == [alias] * 3
    world.plain.drop_alias(alias)


def test_a_client_that_knows_the_uncorrected_collection_reads_the_vectors_of_the_user(lite):
    world = LateReaders(lite)
    clients = {name: lite.client(HubnessClient, state_ttl=AN_HOUR) for name in READS}
    for name, client in clients.items():
        world.assert_of_the_user(READS[name](world, client))
    world.correct()
    for name, client in clients.items():
        world.assert_of_the_user(READS[name](world, client))
    world.plain.drop_alias(world.alias)


def test_a_wider_collection_that_is_not_corrected_either_is_read_as_it_is(lite):
    world = LateReaders(lite)
    client = lite.client(HubnessClient, state_ttl=AN_HOUR)
    client.get(world.alias, [3])
    wide = lite.name("wide")
    plain_collection(world.plain, wide, np.ones((4, 3 * DIM), np.float32), "IP")
    world.plain.alter_alias(wide, world.alias)
    [row] = client.get(world.alias, [3], output_fields=["vector"])
    assert row["vector"] == [1.0] * 3 * DIM
    world.plain.drop_alias(world.alias)
