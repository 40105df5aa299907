"""Many switches below proxies of several ages, under searches and writes of plain clients: each answer is one of the
two oracles', and no write is lost. Some take seconds: SWITCHES=1000 takes an hour."""

import os
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from pymilvus import MilvusClient

from tests.milvus.proxy.running import ProxyHere
from tests.support.switching import (
    Searcher,
    Writer,
    assert_read_by,
    assert_switches_under,
    on_milvus,
    oracles,
)

pytestmark = pytest.mark.long

SWITCHES = int(os.environ.get("SWITCHES", 25))
CLIENT_TTL = 0.1
AGES = (0.0, CLIENT_TTL / 2, CLIENT_TTL)


def test_many_switches_below_proxies(backend):
    world = on_milvus(backend, CLIENT_TTL)
    world.forth()
    expected = oracles(world, world.states)
    world.back()

    where = urlsplit(backend.uri)
    with ExitStack() as stack:
        proxies = [stack.enter_context(ProxyHere(where.netloc, state_ttl=age)) for age in AGES]
        clients = [MilvusClient(proxy.uri + where.path) for proxy in proxies]
        searchers = [Searcher(world, client, expected) for client in clients]
        # Each reads its rows back through the proxy of another age.
        writers = [
            Writer(world, client, clients[number - 1], number)
            for number, client in enumerate(clients)
        ]
        assert_switches_under(world, searchers, writers, SWITCHES)
        for client in clients:
            assert_read_by(client, world, writers)
    world.plain.drop_alias(world.alias)
