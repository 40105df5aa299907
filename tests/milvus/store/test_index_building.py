"""Waiting for a server that builds indexes and loads collections: with a word, and with an end."""

import logging
import re
import threading
import time
from itertools import cycle, pairwise
from types import SimpleNamespace

import pytest
from pymilvus.client.types import LoadState

from milvus_hubness import InvalidParameter, MilvusStore, StoreError
from milvus_hubness.basics.waiting import Standing, WaitPolicy, reported, wait_seconds, wait_until
from milvus_hubness.errors import WaitedTooLong
from milvus_hubness.milvus.store.requests import DEFAULT_GROUP
from tests.support.times import Time

FAILED = 4


class Server:
    """Answers `describe_index` with one state after the other, as pymilvus 3.0.2 does: without the reason."""

    def __init__(self, *states, reason="", index_type="HNSW", loads=("Loaded",)):
        self.states, self.reason, self.loaded = list(states), reason, []
        self.index_type, self.loads = index_type, list(loads)

    def get_server_version(self):
        return "v2.6.18"

    def list_indexes(self, collection):
        return ["vector_index"]

    def describe_index(self, collection, index):
        assert self.states, "it asks for more than the server has to say"
        state, pending = self.states.pop(0)
        return {
            "index_name": index,
            "index_type": self.index_type,
            "state": state,
            "pending_index_rows": pending,
        }

    def load_collection(self, collection, **options):
        self.loaded.append(collection)

    def get_load_state(self, collection):
        state = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        return {"state": LoadState[state], **({"progress": 40} if state == "Loading" else {})}

    def describe_replica(self, collection):
        return [SimpleNamespace(resource_group=DEFAULT_GROUP)]

    def _generate_call_context(self):
        return "context"

    def _get_connection(self):
        return self

    def get_index_state(self, collection, index, *, context):
        assert (collection, index, context) == ("products", "vector_index", "context")
        return FAILED, self.reason


def test_it_waits_until_the_index_is_built_and_loaded():
    server = Server(
        ("InProgress", 5), ("Finished", 5), ("Finished", 0), loads=("Loading", "Loading", "Loaded")
    )
    MilvusStore(server).load("products")
    assert (server.states, server.loaded, server.loads) == ([], ["products"], ["Loaded"])


def test_a_flat_index_is_not_waited_for():
    """Milvus 2.3.5 counts its rows as pending while the builds of other collections are queued."""
    server = Server(("Finished", 3_000), index_type="FLAT")
    MilvusStore(server).load("products")
    assert (server.states, server.loaded) == ([], ["products"])


@pytest.mark.parametrize("states", [[("Failed", 60)], [("InProgress", 60), ("Failed", 0)]])
def test_an_index_that_cannot_be_built_is_an_error_with_the_reason(states):
    server = Server(*states, reason="M must be\n at most 2048")
    with pytest.raises(StoreError) as raised:
        MilvusStore(server).load("products")
    said = str(raised.value)
    for words in (
        "'products'",
        "'vector_index'",
        "M must be at most 2048",
        "create it again",
        "run the command again",
    ):
        assert words in said
    assert "\n" not in said
    assert not server.loaded


def test_a_server_that_gives_no_reason():
    with pytest.raises(StoreError, match="it gives no reason"):
        MilvusStore(Server(("Failed", 1))).load("products")


def test_a_load_that_the_server_gives_up_ends_with_its_reason():
    server = Server(("Finished", 0), loads=("Loading", "NotLoad"))
    MilvusStore(server).load("products")
    assert server.loaded == ["products", "products"], "the second call waits, and raises the reason"


def test_a_job_that_waits_says_for_what_and_how_far_it_is_and_ends(caplog, monkeypatch):
    """For real, with short times: the index of another collection blocks the queue."""
    monkeypatch.setenv("MILVUS_HUBNESS_WAIT_SECONDS", "0.5")
    monkeypatch.setattr(WaitPolicy, "default", short_policy(WaitPolicy.default()))
    server = Server(*[("InProgress", 3_000)] * 100)
    with caplog.at_level(logging.WARNING), pytest.raises(WaitedTooLong) as raised:
        MilvusStore(server).load("products")
    told = caplog.messages[0]
    assert re.fullmatch(
        r"waiting for index 'vector_index' of 'products' since \d s: 3,000 rows are left to index",
        told,
    )
    for words in (
        "index 'vector_index' of 'products'",
        "3,000 rows",
        "run the command again",
        "WAIT_SECONDS",
    ):
        assert words in str(raised.value)


def short_policy(policy):
    return lambda: WaitPolicy(
        first_report=0.05, next_reports=0.2, limit=policy.limit, longest_pause=0.1
    )


def test_the_limit_counts_from_the_last_progress(caplog):
    """A build that moves may take longer than the limit; the words come after 5 s, and then every 30 s."""
    left = iter(
        [Standing(f"{rows} rows", rows) for rows in range(10, 0, -1) for _ in range(10)] + [None]
    )
    time_of = Time()
    policy = WaitPolicy(limit=60)
    with caplog.at_level(logging.WARNING):
        wait_until(
            "the index", lambda: next(left), policy, clock=time_of.clock, sleep=time_of.sleep
        )
    assert time_of.now > 400
    seconds = [float(re.search(r"since (\d+) s", line)[1]) for line in caplog.messages]
    assert 5 <= seconds[0] <= 10
    assert all(30 <= later - earlier <= 36 for earlier, later in pairwise(seconds))


def test_what_goes_up_and_down_for_ever_is_no_progress():
    """Writes of others: rows are indexed, and others come."""
    time_of = Time()
    rows = cycle([30, 20, 40, 25])

    def how_far():
        left = next(rows)
        return Standing(f"{left} rows", left)

    with pytest.raises(WaitedTooLong, match="it got no further"):
        wait_until(
            "the index", how_far, WaitPolicy(limit=60), clock=time_of.clock, sleep=time_of.sleep
        )
    assert 60 <= time_of.now <= 80


def test_a_short_wait_says_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        wait_until("the index", iter([Standing("1 row", 1), None]).__next__)
        with reported("a flush"):
            pass
        assert not wait_seconds("all clients", 0.01)
    assert caplog.messages == []


def test_a_call_that_only_blocks_is_reported_and_ends(caplog):
    policy = WaitPolicy(first_report=0.02, next_reports=0.05, limit=0.1)

    def flush():
        with reported("the flush of 'products'", lambda: "half", policy) as limit:
            time.sleep(limit + 0.02)
            raise StoreError("deadline")

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WaitedTooLong, match="the flush of 'products'"),
    ):
        flush()
    assert re.fullmatch(r"waiting for the flush of 'products' since 0 s: half", caplog.messages[0])
    with pytest.raises(StoreError, match="refused"), reported("the flush", policy=policy):
        raise StoreError("refused")


def test_a_wait_for_clients_can_be_stopped():
    stop = threading.Event()
    stop.set()
    assert wait_seconds("all clients", 600, stop)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_an_odd_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv("MILVUS_HUBNESS_WAIT_SECONDS", text)
    with pytest.raises(InvalidParameter, match="a number of seconds above 0"):
        WaitPolicy.default()


def test_qdrant_is_waited_for_with_a_word_and_an_end(caplog, monkeypatch):
    from qdrant_client import models

    from qdrant_hubness import QdrantStore

    monkeypatch.setenv("MILVUS_HUBNESS_WAIT_SECONDS", "0.3")
    monkeypatch.setattr(WaitPolicy, "default", short_policy(WaitPolicy.default()))
    described = SimpleNamespace(
        status=models.CollectionStatus.YELLOW, indexed_vectors_count=2_000, points_count=9_000
    )
    store = object.__new__(QdrantStore)
    store.ask = lambda *args, **options: described
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WaitedTooLong, match="run the command again"),
    ):
        store.load("products")
    assert "2,000 vectors of 9,000 points are indexed" in caplog.messages[0]
