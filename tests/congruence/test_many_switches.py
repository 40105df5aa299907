"""Many switches between copies of one width and unlike meaning, under searches and writes of clients of every
age: each answer is one of the two oracles', and no write is lost.

One takes seconds: SWITCHES=1000 pytest -n 0 -m long tests/congruence/test_many_switches.py takes an hour or more."""

import os
import random
import time

import pytest

from milvus_hubness import HubnessClient
from milvus_hubness.clients.steps import Ask
from tests.support.switching import (
    Searcher,
    Writer,
    assert_read_by,
    assert_switches_under,
    on_milvus,
    oracles,
)

pytestmark = pytest.mark.long

SWITCHES = int(os.environ.get("SWITCHES", 50))
CLIENT_TTL = 0.1
HELD_SECONDS = 4 * CLIENT_TTL
"""For which a client is suspended between its look and its request: its state expires meanwhile."""
AGES = (0.0, CLIENT_TTL / 2, CLIENT_TTL)
REQUESTS = {"search", "query", "get", "insert", "upsert", "delete"}


class Held(HubnessClient):
    """A client whose process is suspended now and then as it is about to send a request."""

    def _answer(self, step):
        if isinstance(step, Ask) and step.method in REQUESTS and random.random() < 0.1:
            time.sleep(HELD_SECONDS)
        return super()._answer(step)


@pytest.mark.parametrize("backend", ["lite", "served"])
def test_many_switches_under_searches_and_writes(backend, request):
    world = on_milvus(request.getfixturevalue(backend), CLIENT_TTL)
    world.forth()
    expected = oracles(world, world.states)
    world.back()

    clients = [world.backend.client(HubnessClient, state_ttl=age) for age in AGES]
    held = [world.backend.client(Held, state_ttl=CLIENT_TTL) for _ in range(2)]
    searchers = [Searcher(world, client, expected) for client in (*clients, held[0])]
    writers = [
        Writer(world, client, clients[number % len(clients)], number)
        for number, client in enumerate([*clients[1:], held[1]])
    ]
    assert_switches_under(world, searchers, writers, SWITCHES)
    assert_read_by(world.backend.client(HubnessClient), world, writers)
    world.plain.drop_alias(world.alias)
