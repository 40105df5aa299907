"""Kill it anywhere, run it again: the same result. On the local mode, where the database dies with it."""

import json
import logging
import os
import random
import signal
from contextlib import closing

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from milvus_hubness.jobs import verify
from milvus_hubness.jobs.lease import LEASES, Entry
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.renewal import REFRESHES
from milvus_hubness.jobs.runner import LEDGER
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from tests.crash.driver import Moment
from tests.galleries import nnn, vectors
from tests.qdrant.killed import command
from tests.qdrant.worlds import METRICS, key

SEED = int(os.environ.get("CRASH_SEED") or random.randrange(10**6))
DIM, ROWS, K = 12, 400, "8"
STAGES = {
    "migrate": ("preparing", "creating", "copying", "catching up", "verifying", "switching"),
    "rollback": ("rolling back",),
    "refresh": ("announcing", "filling", "writing", "flipping", "cleaning up"),
}
MOST_REQUESTS = 20
KILLED = -signal.SIGKILL


class World:
    """A collection behind the alias `live`, and what it is to hold."""

    def __init__(self, folder, rng):
        self.folder, self.distance = folder, rng.choice(list(METRICS))
        numbers = np.random.default_rng(rng.getrandbits(32))
        self.items = vectors(numbers, ROWS, DIM)
        self.banks = {name: vectors(numbers, 40, DIM) for name in ("old", "new")}
        for name, bank in self.banks.items():
            np.save(folder / f"{name}.npy", bank)
        with self.open() as client:
            config = models.VectorParams(size=DIM, distance=self.distance)
            client.create_collection("items", vectors_config=config)
            client.upsert("items", [self.point(i) for i in range(ROWS)])
            QdrantStore(client).point_alias("live", "items")

    def open(self):
        return closing(QdrantClient(path=str(self.folder / "data")))

    def point(self, i):
        return models.PointStruct(id=key(i), vector=self.items[i].tolist(), payload={"n": i})

    def bank(self, name):
        return ("--bank", str(self.folder / f"{name}.npy"), "--k", K)

    def run(self, *argv, **how):
        return command(self.folder, *argv, **how)

    def change(self, rng):
        """As an application does: some changed, some deleted."""
        with self.open() as client:
            hubness = HubnessQdrantClient(client=client, state_ttl=0.0)
            for i in rng.sample(range(ROWS), 5):
                self.items[i] = vectors(np.random.default_rng(i), 1, DIM)[0]
                hubness.upsert("live", [self.point(i)])

    def assert_corrected(self, client, bank):
        """All points, once, with biases of this bank."""
        store, hubness = QdrantStore(client), HubnessQdrantClient(client=client, state_ttl=0.0)
        rows = {r.id: r for r in hubness.scroll("live", limit=2 * ROWS, with_vectors=True)[0]}
        assert rows.keys() == {key(i) for i in range(ROWS)}
        assert {r.payload["n"]: r.id for r in rows.values()} == {i: key(i) for i in range(ROWS)}
        state = store.info("live").state
        assert (state.phase, state.incoming) == ("ready", None)
        batch = store.fetch("live", [key(i) for i in range(ROWS)], "")
        biases = state.layout.biases(batch.vectors, state.profile.slot) + state.profile.centre
        wanted = nnn(self.banks[bank], self.items, METRICS[self.distance], int(K), 0.75)
        np.testing.assert_allclose(biases, wanted, atol=1e-4)

    def assert_plain(self, client):
        found = {r.id: r.vector for r in client.scroll("items", limit=2 * ROWS, with_vectors=True)[0]}
        assert found.keys() == {key(i) for i in range(ROWS)}
        for i, item in enumerate(self.items):
            mine, wanted = np.array(found[key(i)]), item
            if self.distance == "Cosine":
                mine, wanted = mine / np.linalg.norm(mine), wanted / np.linalg.norm(wanted)
            np.testing.assert_allclose(mine, wanted, atol=1e-6)


def drawn(what, number):
    rng = random.Random(f"{SEED} {what} {number}")
    stage = STAGES[what][number % len(STAGES[what])]
    moment = Moment(stage, rng.randint(1, MOST_REQUESTS), rng.choice(["before", "after"]))
    logging.getLogger(__name__).warning("CRASH_SEED=%s: %s killed %s", SEED, what, moment)
    return rng, moment


@pytest.fixture
def folder(quick_folder):
    return quick_folder


@pytest.mark.parametrize("number", [2, pytest.param(0, marks=pytest.mark.long), 5, 4])
def test_a_migration(folder, number):
    rng, moment = drawn("migrate", number)
    world = World(folder, rng)
    how = ("--alias", "live", "--client-ttl", "0")
    assert world.run("migrate", "items", *world.bank("old"), *how, moment=moment) == KILLED
    world.change(rng)
    assert world.run("migrate", "items", *world.bank("old"), *how) == 0, (folder / "log").read_text()[-600:]
    with world.open() as client:
        world.assert_corrected(client, "old")
        store = QdrantStore(client)
        assert store.alias_target("live") == "items_hubness"
        assert Ledger(store).find("items").phase == "switched"
        assert store.info("items").mirror is None
        names = {each.name for each in client.get_collections().collections}
        assert names == {"items", "items_hubness", "items__bank", LEDGER}


def test_a_rollback(folder):
    rng, moment = drawn("rollback", 0)
    world = World(folder, rng)
    how = ("--alias", "live", "--client-ttl", "0")
    assert world.run("migrate", "items", *world.bank("old"), *how) == 0
    world.change(rng)
    assert world.run("rollback", "live", "--client-ttl", "0", moment=moment) == KILLED
    with world.open() as client:
        is_over = Ledger(QdrantStore(client)).find("items").phase == "rolled back"
    assert world.run("rollback", "items_hubness", "--client-ttl", "0") == (1 if is_over else 0)
    with world.open() as client:
        world.assert_plain(client)
        assert QdrantStore(client).alias_target("live") == "items"
        assert QdrantStore(client).info("items_hubness").mirror is None
        verify(QdrantStore(client), "items_hubness")


@pytest.mark.parametrize("number", [2, 3, pytest.param(0, marks=pytest.mark.long)])
def test_a_refresh(folder, number):
    rng, moment = drawn("refresh", number)
    world = World(folder, rng)
    how = ("--alias", "live", "--frozen")
    assert world.run("migrate", "items", *world.bank("old"), *how) == 0
    again = ("refresh", "live", *world.bank("new"), "--force", "--client-ttl", "0")
    assert world.run(*again, moment=moment) == KILLED
    world.change(rng)
    counts = folder / "counts"
    assert world.run(*again, counts=counts) == 0, (folder / "log").read_text()[-600:]
    assert sum(json.loads(counts.read_text()).values()) > MOST_REQUESTS, "requests are counted"
    with world.open() as client:
        world.assert_corrected(client, "new")
        store = QdrantStore(client)
        info = store.info("live")
        assert info.journal is None
        assert store.journals(info.name) == []
        assert store.record(LEDGER, f"{REFRESHES}/{info.name}") is None
        held = Entry.model_validate_json(store.record(LEDGER, f"{LEASES}/{info.name}").body)
        assert held.expires_at is None, "the lease was given back"
        bank = info.state.profile.bank.collection
        assert client.count(bank).count == sum(each.count for each in info.state.banks)
