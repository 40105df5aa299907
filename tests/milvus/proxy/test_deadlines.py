"""Calls whose upstream does not answer: they delay no other collection, and nothing is sent after their
deadline. The proxy makes all writes here row by row, in threads: the biases are in side collections."""

import asyncio
import threading
import time

import grpc
import numpy as np
import pytest
from pymilvus.client.prepare import Prepare
from pymilvus.grpc_gen import milvus_pb2, milvus_pb2_grpc

from milvus_hubness import NNN, Beside, QueryBank, Recipe, enable, plan_correction
from milvus_hubness.clients.steps import Compute
from milvus_hubness.milvus.proxy import ProxyOptions
from milvus_hubness.milvus.proxy.endings import CallEnded
from milvus_hubness.milvus.proxy.messages import Send
from milvus_hubness.milvus.proxy.sessions import (
    MAX_SESSIONS,
    THREADS,
    Caller,
    CollectionPools,
    Session,
)
from tests.milvus.proxy.conftest import ProxyBackend
from tests.milvus.proxy.running import ProxyHere, eventually
from tests.milvus.proxy.upstreams import Relay
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS, K = 8, 40, 3
FRESH = 700
PROMPT_SECONDS = 10


class TwoCollections:
    """Both corrected: the upstream does not answer about `hanging`, unless a test says otherwise."""

    def __init__(self, backend):
        self.backend, rng = backend, np.random.default_rng(3)
        self.hanging, self.healthy = (self.corrected(rng) for _ in range(2))
        self.vector = vectors(rng, 1, DIM)[0]
        self.plain = backend.client()
        self.fields = self.plain.describe_collection(self.hanging)["fields"]

    def corrected(self, rng):
        name = self.backend.name()
        self.backend.made += [f"{name}__bias_a", f"{name}__bias_b"]
        plain_collection(self.backend.client(), name, vectors(rng, ITEMS, DIM), "IP")
        store, bank = self.backend.store(), QueryBank(vectors(rng, 20, DIM))
        plan = plan_correction(
            store, name, Recipe(bank, estimator=NNN(K), verdict="warn"), Beside()
        )
        enable(store, plan, client_ttl=0.0)
        return name

    def upsert(self, name, key):
        row = {"id": key, "vector": self.vector, "group": 1}
        return Prepare.row_upsert_param(name, [row], "", self.fields, [], enable_dynamic=True)

    def holds(self, key):
        [found] = self.plain.query(self.hanging, filter=f"id == {key}", output_fields=["count(*)"])
        return found["count(*)"] > 0


@pytest.fixture(scope="module")
def two(lite_server_uri, proxies):
    backend = ProxyBackend("lite", lite_server_uri, proxies)
    yield TwoCollections(backend)
    backend.clean()


@pytest.fixture
def relay(two):
    here = Relay(two.backend.uri.removeprefix("http://"))
    yield here
    here.stop()


@pytest.fixture
def limit():
    return 512


@pytest.fixture
def proxy(relay, limit):
    with ProxyHere(relay.address, state_ttl=60.0, max_calls=limit) as here:
        yield here
        relay.released.set()


@pytest.fixture
def stub(two, proxy):
    """To the proxy, which has learned by two reads that both collections are corrected."""
    with grpc.insecure_channel(proxy.address) as channel:
        stub = milvus_pb2_grpc.MilvusServiceStub(channel)
        for name in (two.hanging, two.healthy):
            asked = milvus_pb2.QueryRequest(
                collection_name=name, expr="id == 0", output_fields=["id"]
            )
            assert stub.Query(asked, timeout=PROMPT_SECONDS).status.code == 0
        yield stub


def hung(two, stub, relay, count=1, **options):
    """Upserts that reach the upstream, and no further."""
    relay.held.add(("Upsert", two.hanging))
    calls = [
        stub.Upsert.future(two.upsert(two.hanging, FRESH + i), **options) for i in range(count)
    ]
    eventually(lambda: relay.reached("Upsert", two.hanging)[min(count, THREADS) - 1])
    return calls


def code_of(call):
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code()


def test_a_collection_that_hangs_delays_no_other(two, stub, relay):
    """More calls than asyncio's own pool ever has threads."""
    calls = hung(two, stub, relay, count=40)
    for _ in range(3):
        written = stub.Upsert(two.upsert(two.healthy, FRESH), timeout=PROMPT_SECONDS)
        assert (written.status.reason, written.upsert_cnt) == ("", 1)
    assert len(relay.reached("Upsert", two.hanging)) == THREADS
    assert not any(call.done() for call in calls)
    relay.released.set()
    assert {call.result(30).upsert_cnt for call in calls} == {1}


@pytest.mark.parametrize("limit", [4])
def test_too_many_calls_on_one_collection_are_refused_at_once(two, stub, relay, proxy, limit):
    calls = hung(two, stub, relay, count=limit)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Upsert(two.upsert(two.hanging, FRESH), timeout=60)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert two.hanging in refused.value.details()
    assert "--max-calls" in refused.value.details()
    assert stub.Upsert(two.upsert(two.healthy, FRESH), timeout=PROMPT_SECONDS).upsert_cnt == 1
    for call in calls:
        call.cancel()
    written = eventually(
        lambda: stub.Query(milvus_pb2.QueryRequest(collection_name=two.hanging, expr="id == 0"))
    )
    assert written.status.code == 0
    [session] = proxy.proxy.sessions.recent.values()

    def no_pool_is_left():
        assert len(session.pools) == 0

    eventually(no_pool_is_left)


def test_every_upstream_call_has_the_callers_deadline(two, stub, relay):
    relay.calls.clear()
    assert stub.Upsert(two.upsert(two.hanging, FRESH), timeout=20).upsert_cnt == 1
    methods = {method for method, _, _ in relay.calls}
    assert {"Connect", "DescribeCollection", "Query", "Upsert"} <= methods
    assert all(left is not None and left < 21 for _, _, left in relay.calls), relay.calls


@pytest.mark.parametrize("step", ["DescribeCollection", "Upsert"])
def test_a_write_that_timed_out_does_not_land_later(two, stub, relay, step):
    """Whether pymilvus was at its schema, or the row had reached the upstream, which can be told."""
    key = FRESH + 100
    relay.held.add((step, two.hanging))
    sent = len(relay.reached("Upsert", two.hanging))
    expired = code_of(lambda: stub.Upsert(two.upsert(two.hanging, key), timeout=2))
    assert expired == grpc.StatusCode.DEADLINE_EXCEEDED
    assert relay.reached(step, two.hanging)
    assert relay.cancelled.wait(5)
    relay.released.set()
    time.sleep(1)
    assert len(relay.reached("Upsert", two.hanging)) == sent + (step == "Upsert")
    assert not two.holds(key)


def test_pymilvus_repeats_nothing_after_the_deadline(two, stub, relay):
    """It waits longer and longer between its attempts, and looks at the time before it waits."""
    relay.unavailable.add(("Upsert", two.hanging))
    assert code_of(lambda: stub.Upsert(two.upsert(two.hanging, FRESH), timeout=2)) in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    )
    attempts = len(relay.reached("Upsert", two.hanging))
    assert attempts > 1
    time.sleep(4)
    assert len(relay.reached("Upsert", two.hanging)) == attempts


def test_who_cancels_cancels_the_upstream_call(two, stub, relay, caplog):
    [call] = hung(two, stub, relay)
    call.cancel()
    assert relay.cancelled.wait(5)
    relay.released.set()
    written = stub.Upsert(two.upsert(two.hanging, FRESH), timeout=PROMPT_SECONDS)
    assert written.upsert_cnt == 1
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_an_upstream_call_outlives_the_sessions_of_others(two, stub, relay, proxy):
    """Of users who have nothing under way the proxy forgets the one that it heard of longest ago."""
    [call] = hung(two, stub, relay)
    for user in range(MAX_SESSIONS + 2):
        asked = milvus_pb2.QueryRequest(
            collection_name=two.healthy, expr="id == 0", output_fields=["id"]
        )
        assert stub.Query(
            asked, metadata=[("authorization", f"other{user}")], timeout=PROMPT_SECONDS
        )
    assert len(proxy.proxy.sessions.recent) == MAX_SESSIONS
    relay.released.set()
    assert call.result(30).upsert_cnt == 1


# -- without an upstream ----------------------------------------------------------------------------------


def cancelled():
    caller = Caller(None)
    caller.cancel()
    return caller


@pytest.mark.parametrize("gone", [cancelled, lambda: Caller(0.0)], ids=["cancelled", "expired"])
async def test_nothing_is_sent_for_a_caller_that_is_gone(gone):
    sent = []

    async def send(request):
        sent.append(request)

    with pytest.raises(CallEnded):
        gone().start(lambda *args, **options: sent.append(args), b"", None, {})
    session, pools = (
        Session(ProxyOptions("localhost:1"), (), "", lambda _: None),
        CollectionPools(1),
    )
    with pools.entered("c") as pool:
        for step in (Send(milvus_pb2.UpsertRequest()), Compute(lambda: sent.append("computed"))):
            with pytest.raises(CallEnded):
                await session.answer(step, gone(), pool, send)
    assert sent == []


async def test_a_call_counts_as_long_as_it_keeps_a_thread_busy():
    pools, finished = CollectionPools(1), threading.Event()

    async def call():
        with pools.entered("c") as pool:
            await pool.run(Caller(None), finished.wait)

    task = asyncio.create_task(call())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.sleep(0.1)
    with pytest.raises(CallEnded, match="1 running calls of this user"), pools.entered("c"):
        pass
    with pools.entered("another"):
        pass
    finished.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(pools) == 0
