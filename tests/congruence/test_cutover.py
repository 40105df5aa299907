"""Applications that were deployed before a migration, and are still there after it and after its rollback."""

import numpy as np
import pytest
from pymilvus import AsyncMilvusClient, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Copy,
    HubnessClient,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    rollback,
)
from tests.support.async_clients import opened
from tests.support.galleries import as_distance, nnn, plain_collection, similarity, vectors

DIM, ITEMS, K, AN_HOUR = 14, 150, 5, 3_600.0


class Live:
    """An alias over a collection, and a client that asked it long ago and believes what it heard."""

    def __init__(self, backend, state_ttl=AN_HOUR):
        rng = np.random.default_rng(51)
        self.backend, self.metric = backend, "COSINE"
        self.items, self.queries = vectors(rng, ITEMS, DIM), vectors(rng, 4, DIM)
        self.bank = vectors(rng, 40, DIM)
        self.plain, self.source = backend.client(), backend.name("live")
        self.alias = f"{self.source}_alias"
        plain_collection(self.plain, self.source, self.items, self.metric)
        self.plain.create_alias(self.source, self.alias)
        self.store = backend.store()
        self.client = backend.client(HubnessClient, state_ttl=state_ttl)
        self.assert_raw()

    def switch(self):
        plan = plan_correction(
            self.store,
            self.source,
            Recipe(QueryBank(self.bank), estimator=NNN(K)),
            Copy(alias=self.alias),
        )
        migrate(self.store, plan)
        mean_bias = self.store.info(self.alias).state.profile.mean_bias
        self.biases = nnn(self.bank, self.items, self.metric, K, 0.75) - mean_bias

    def hear(self):
        """Let the TTL of what the client heard end."""
        self.client._operations.states.forget()

    def assert_raw(self):
        self._assert_found(similarity(self.queries, self.items, self.metric))

    def assert_corrected(self):
        self._assert_found(similarity(self.queries, self.items, self.metric) - self.biases)

    def _assert_found(self, wanted):
        found = self.client.search(self.alias, data=list(self.queries), limit=8)
        for hits, scores in zip(found, wanted, strict=True):
            order = np.argsort(-scores)[:8]
            assert [hit["id"] for hit in hits] == order.tolist()
            np.testing.assert_allclose(
                hits.distances, as_distance(scores[order], self.metric), atol=3e-5
            )

    def assert_rows_are_the_users(self):
        for row in (
            self.client.get(self.alias, 3)[0],
            self.client.query(self.alias, filter="id == 3")[0],
            self.client.query(self.alias, filter="id == 3", output_fields=["*"])[0],
        ):
            assert set(row) == {"id", "vector", "group", "note"}
            np.testing.assert_allclose(row["vector"], self.items[3], rtol=2.0**-22)


@pytest.fixture(scope="module")
def shared(shared_backend):
    made = Live(shared_backend)
    yield made
    made.plain.drop_alias(made.alias)


def test_searches_go_on_through_a_migration_and_its_rollback(shared):
    """A client asks the copy of which it has heard last, by that copy's name."""
    shared.switch()
    shared.assert_corrected()
    shared.assert_rows_are_the_users()
    rollback(shared.store, shared.alias)
    shared.assert_corrected()
    shared.hear()
    shared.assert_raw()
    shared.assert_rows_are_the_users()
    shared.store.point_alias(shared.alias, f"{shared.source}_hubness")
    shared.assert_corrected()


@pytest.fixture
def live(lite):
    made = Live(lite)
    yield made
    made.plain.drop_alias(made.alias)


def test_reading_is_the_first_that_happens_after_the_switch(live):
    live.switch()
    live.assert_rows_are_the_users()
    rollback(live.store, live.alias)
    live.assert_rows_are_the_users()


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_writing_is_the_first_that_happens_after_the_switch(live, method):
    new = vectors(np.random.default_rng(2), 2, DIM)
    live.switch()
    getattr(live.client, method)(live.alias, [{"id": 900, "vector": new[0], "group": 0}])
    state = live.store.info(live.alias).state
    bias = nnn(live.bank, new[:1], "COSINE", K, 0.75)[0] - state.profile.mean_bias
    [row] = live.client.get(live.alias, 900, output_fields=["hubness_bias", "vector"])
    assert row["hubness_bias"] == pytest.approx(bias, abs=1e-5)
    np.testing.assert_allclose(row["vector"], new[0], rtol=2.0**-22)
    rollback(live.store, live.alias)
    live.hear()
    getattr(live.client, method)(live.alias, [{"id": 901, "vector": new[1], "group": 0}])
    [row] = live.plain.get(live.source, 901)
    assert set(row) == {"id", "vector", "group"}
    np.testing.assert_array_equal(np.float32(row["vector"]), new[1])


@pytest.mark.parametrize("method", ["insert", "upsert", "search"])
def test_a_name_that_moves_between_the_new_look_and_the_call_is_followed(lite, monkeypatch, method):
    """A switch and a rollback at once: what the client looked up anew was over when it called again. A
    search is right as of its look; a write is made once more, where the name leads to by its end."""
    live = Live(lite, state_ttl=0.0)
    live.switch()
    call, sent = getattr(MilvusClient, method), []

    def moved(self, *args, **kwargs):
        sent.append(args)
        if self is live.client and len(sent) == 1:
            rollback(live.store, live.alias)
        return call(self, *args, **kwargs)

    new = vectors(np.random.default_rng(2), 1, DIM)[0]
    with monkeypatch.context() as patched:
        patched.setattr(MilvusClient, method, moved)
        if method == "search":
            found = live.client.search(live.alias, data=[live.items[7]], limit=1)
            assert found[0][0]["id"] == 7
        else:
            getattr(live.client, method)(live.alias, [{"id": 900, "vector": new, "group": 0}])
    if method != "search":
        [row] = live.plain.get(live.source, 900)
        np.testing.assert_array_equal(np.float32(row["vector"]), new)
    assert live.store.alias_target(live.alias) == live.source
    live.plain.drop_alias(live.alias)


def test_a_collection_that_goes_and_comes_again_is_asked_anew(lite):
    rng = np.random.default_rng(3)
    client, name = lite.client(HubnessClient, state_ttl=AN_HOUR), lite.name("again")
    items, bank = vectors(rng, 40, DIM), QueryBank(vectors(rng, 20, DIM))
    plain_collection(lite.client(), name, items, "IP")
    store = lite.store()
    corrected = migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)))).target
    assert client.hubness_state(corrected) is not None
    client.drop_collection(corrected)
    client.rename_collection(name, corrected)
    client.load_collection(corrected)
    found = client.search(corrected, data=[items[0]], limit=3)
    plain = lite.client().search(corrected, data=[items[0]], limit=3)
    assert [hit["id"] for hit in found[0]] == [hit["id"] for hit in plain[0]]


def test_an_error_that_no_switch_explains_is_pymilvus_own(live):
    question = {"data": list(live.queries), "filter": "id >"}
    with pytest.raises(MilvusException) as theirs:
        live.plain.search(live.alias, **question)
    for _ in range(2):
        with pytest.raises(MilvusException) as ours:
            live.client.search(live.alias, **question)
        assert str(ours.value) == str(theirs.value)
        if live.store.info(live.alias).state is None:
            live.switch()


def test_a_search_that_fails_is_sent_once(live, monkeypatch):
    live.switch()
    sent, search = [], MilvusClient.search

    def counted(self, *args, **kwargs):
        sent.append(args)
        return search(self, *args, **kwargs)

    live.assert_corrected()
    monkeypatch.setattr(MilvusClient, "search", counted)
    live.assert_corrected()
    assert len(sent) == 1
    with pytest.raises(MilvusException):
        live.client.search(live.alias, data=list(live.queries), limit=8, filter="id ===")
    assert len(sent) == 2


async def test_a_search_of_a_task_that_fails_is_sent_once(live, monkeypatch):
    live.switch()
    sent, search = [], AsyncMilvusClient.search

    async def counted(self, *args, **kwargs):
        sent.append(args)
        return await search(self, *args, **kwargs)

    async with opened(live.backend, state_ttl=AN_HOUR) as client:
        await client.search(live.alias, data=list(live.queries), limit=8)
        monkeypatch.setattr(AsyncMilvusClient, "search", counted)
        with pytest.raises(MilvusException):
            await client.search(live.alias, data=list(live.queries), limit=8, filter="id ===")
    assert len(sent) == 1
