"""Many switches between copies of one width and unlike meaning, under searches and writes of clients of every
age: each answer is one of the two oracles', and no write is lost.

One takes seconds: SWITCHES=1000 pytest -n 0 -m long tests/congruence/test_many_switches.py takes an hour or more."""

import os
import random
import threading
import time

import numpy as np
import pytest

from milvus_hubness import HubnessClient, NotCaughtUp
from milvus_hubness.milvus.client.steps import Ask
from tests.support.galleries import vectors
from tests.support.switching import DIM, FIXED, ITEMS, answered_by, on_milvus, oracles

pytestmark = pytest.mark.long

SWITCHES = int(os.environ.get("SWITCHES", 50))
CLIENT_TTL = 0.1
HELD_SECONDS = 4 * CLIENT_TTL
"""For which a client is suspended between its look and its request: its state expires meanwhile."""
AGES = (0.0, CLIENT_TTL / 2, CLIENT_TTL)
PAUSE = 0.1
"""Seconds between the calls of a thread: the machine is to switch, not only to search."""
KEYS = 40
"""Of one writer; nobody else writes them."""


class Held(HubnessClient):
    """A client whose process is suspended now and then as it is about to send a request."""

    def _answer(self, step):
        if isinstance(step, Ask) and step.method in REQUESTS and random.random() < 0.1:
            time.sleep(HELD_SECONDS)
        return super()._answer(step)


REQUESTS = {"search", "query", "get", "insert", "upsert", "delete"}


class Searcher(threading.Thread):
    """Searches until it is told to end, and keeps what was wrong."""

    def __init__(self, world, client, expected):
        super().__init__(daemon=True)
        self.world, self.client, self.expected = world, client, expected
        self.counts = dict.fromkeys(expected, 0)
        self.wrong, self.ended = [], threading.Event()

    def run(self):
        while not self.ended.is_set() and not self.wrong:
            try:
                self.once()
            except Exception as error:
                self.wrong.append(error)
            time.sleep(PAUSE)

    def once(self):
        found = self.client.search(
            self.world.alias,
            list(self.world.queries),
            filter=FIXED,
            limit=ITEMS,
            consistency_level="Strong",
        )
        answering = answered_by(self.expected, found)
        if len(answering) != 1:
            self.wrong.append(f"an answer of {sorted(answering) or 'neither'}: {found}")
            return

        self.counts[answering.pop()] += 1


class Writer(Searcher):
    """Writes rows of its own, and reads each back by a client of another age."""

    def __init__(self, world, client, reader, number):
        super().__init__(world, client, {})
        self.reader = reader
        self.rng = np.random.default_rng(number)
        self.keys = range(10_000 + number * KEYS, 10_000 + (number + 1) * KEYS)
        self.rows, self.count = {}, 0

    def once(self):
        key = int(self.rng.choice(self.keys))
        kind = self.rng.integers(5)
        if kind < 3:
            vector = vectors(self.rng, 1, DIM)[0]
            method = "upsert" if key in self.rows or kind else "insert"
            row = {"id": key, "vector": vector, "group": 7}
            getattr(self.client, method)(self.world.alias, [row])
            self.rows[key] = vector
        else:
            which = {"ids": [key]} if kind == 3 else {"filter": f"id == {key}"}
            self.client.delete(self.world.alias, **which)
            self.rows.pop(key, None)
        self.count += 1
        for client in (self.client, self.reader):
            found = client.query(
                self.world.alias,
                f"id == {key}",
                ["vector"],
                consistency_level="Strong",
            )
            wanted = [self.rows[key]] if key in self.rows else []
            got = [row["vector"] for row in found]
            if len(got) != len(wanted) or not np.allclose(got, wanted, rtol=1e-5):
                self.wrong.append(f"row {key} after write {self.count}: {got} for {wanted}")


@pytest.mark.parametrize("backend", ["lite", "served"])
def test_many_switches_under_searches_and_writes(backend, request):
    world = on_milvus(request.getfixturevalue(backend), CLIENT_TTL)
    world.forth()
    expected = oracles(world, world.states)
    world.back()

    clients = [world.backend.client(HubnessClient, state_ttl=age) for age in AGES]
    held = [world.backend.client(Held, state_ttl=CLIENT_TTL) for _ in range(2)]
    threads = [Searcher(world, client, expected) for client in (*clients, held[0])]
    writers = [
        Writer(world, client, clients[number % len(clients)], number)
        for number, client in enumerate([*clients[1:], held[1]])
    ]
    for thread in (*threads, *writers):
        thread.start()

    switches, late = 0, 0
    try:
        while switches < SWITCHES and not any(thread.wrong for thread in (*threads, *writers)):
            try:
                leads_to = world.store.alias_target(world.alias)
                world.forth() if leads_to == world.first else world.back()
                switches += 1
            except NotCaughtUp:
                # Held clients write longer after an announcement than `client_ttl` allows.
                late += 1
    finally:
        for thread in (*threads, *writers):
            thread.ended.set()
        for thread in (*threads, *writers):
            thread.join(60)

    assert [thread.wrong for thread in (*threads, *writers) if thread.wrong] == []
    assert switches == SWITCHES
    assert late < switches / 10
    for thread in threads:
        assert min(thread.counts.values()) > switches / 20, thread.counts

    reader = world.backend.client(HubnessClient)
    wanted = {key: row for writer in writers for key, row in writer.rows.items()}
    found = reader.query(world.alias, "group == 7", ["vector"], consistency_level="Strong")
    got = {row["id"]: row["vector"] for row in found}
    assert sorted(got) == sorted(wanted)
    for key, vector in wanted.items():
        np.testing.assert_allclose(got[key], vector, rtol=1e-5)
    world.plain.drop_alias(world.alias)
