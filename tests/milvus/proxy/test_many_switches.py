"""Many switches below proxies of several ages, under searches and writes of plain clients: each answer is one of the
two oracles', and no write is lost. Some take seconds: SWITCHES=1000 takes an hour."""

import os
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import numpy as np
import pytest
from pymilvus import MilvusClient

from milvus_hubness import NotCaughtUp
from tests.milvus.proxy.running import ProxyHere
from tests.support.galleries import vectors
from tests.support.switching import DIM, FIXED, ITEMS, answered_by, on_milvus, oracles

pytestmark = pytest.mark.long

SWITCHES = int(os.environ.get("SWITCHES", 25))
CLIENT_TTL = 0.1
AGES = (0.0, CLIENT_TTL / 2, CLIENT_TTL)
PAUSE = 0.1
"""Seconds between the calls of a thread: the machine is to switch, not only to search."""
KEYS = 40
"""Of one writer; nobody else writes them."""


class Threaded(threading.Thread):
    """Repeats `once` until it is to end, and keeps what was wrong."""

    def __init__(self, world, client):
        super().__init__(daemon=True)
        self.world, self.client = world, client
        self.wrong, self.ended, self.count = [], threading.Event(), 0

    def run(self):
        while not self.ended.is_set() and not self.wrong:
            try:
                self.once()
            except Exception as error:
                self.wrong.append(error)
            self.count += 1
            time.sleep(PAUSE)


class Searcher(Threaded):
    def __init__(self, world, client, expected):
        super().__init__(world, client)
        self.expected = expected
        self.counts = dict.fromkeys(expected, 0)

    def once(self):
        queries = list(self.world.queries)
        options = {"filter": FIXED, "limit": ITEMS, "consistency_level": "Strong"}
        found = self.client.search(self.world.alias, queries, **options)
        answering = answered_by(self.expected, found)
        if len(answering) != 1:
            self.wrong.append(f"an answer of {sorted(answering) or 'neither'}: {found}")
            return
        self.counts[answering.pop()] += 1


class Writer(Threaded):
    """Writes rows of its own, and reads each back through another proxy."""

    def __init__(self, world, client, reader, number):
        super().__init__(world, client)
        self.reader = reader
        self.rng = np.random.default_rng(number)
        self.keys = range(10_000 + number * KEYS, 10_000 + (number + 1) * KEYS)
        self.rows = {}

    def once(self):
        key = int(self.rng.choice(self.keys))
        kind = self.rng.integers(5)
        if kind < 3:
            vector = vectors(self.rng, 1, DIM)[0]
            method = "upsert" if key in self.rows or kind else "insert"
            row = {"id": key, "vector": vector.tolist(), "group": 7}
            getattr(self.client, method)(self.world.alias, [row])
            self.rows[key] = vector
        else:
            which = {"ids": [key]} if kind == 3 else {"filter": f"id == {key}"}
            self.client.delete(self.world.alias, **which)
            self.rows.pop(key, None)

        for client in (self.client, self.reader):
            found = client.query(
                self.world.alias, f"id == {key}", ["vector"], consistency_level="Strong"
            )
            wanted = [self.rows[key]] if key in self.rows else []
            got = [row["vector"] for row in found]
            if len(got) != len(wanted) or not np.allclose(got, wanted, rtol=1e-5):
                self.wrong.append(f"row {key} after write {self.count}: {got} for {wanted}")


def test_many_switches_below_proxies(backend):
    world = on_milvus(backend, CLIENT_TTL)
    world.forth()
    expected = oracles(world, world.states)
    world.back()

    with ExitStack() as stack:
        where = urlsplit(backend.uri)
        proxies = [stack.enter_context(ProxyHere(where.netloc, state_ttl=age)) for age in AGES]
        clients = [MilvusClient(proxy.uri + where.path) for proxy in proxies]
        searchers = [Searcher(world, client, expected) for client in clients]
        writers = [
            Writer(world, client, clients[number - 1], number)
            for number, client in enumerate(clients)
        ]
        threads = [*searchers, *writers]
        for thread in threads:
            thread.start()

        switches, late = 0, 0
        try:
            while switches < SWITCHES and not any(thread.wrong for thread in threads):
                try:
                    is_first = world.store.alias_target(world.alias) == world.first
                    world.forth() if is_first else world.back()
                    switches += 1
                except NotCaughtUp:
                    late += 1
        finally:
            for thread in threads:
                thread.ended.set()
            for thread in threads:
                thread.join(60)

        assert [thread.wrong for thread in threads if thread.wrong] == []
        assert switches == SWITCHES
        assert late <= switches / 10
        for searcher in searchers:
            assert min(searcher.counts.values()) > switches / 20, searcher.counts

        wanted = {key: row for writer in writers for key, row in writer.rows.items()}
        for client in clients:
            found = client.query(world.alias, "group == 7", ["vector"], consistency_level="Strong")
            got = {row["id"]: row["vector"] for row in found}
            assert sorted(got) == sorted(wanted)
            for key, vector in wanted.items():
                np.testing.assert_allclose(got[key], vector, rtol=1e-5)
    world.plain.drop_alias(world.alias)
