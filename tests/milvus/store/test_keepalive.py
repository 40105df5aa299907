"""Milvus Lite closes connections that ping too often: those of this package do not, and users may choose others."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import pytest
from pymilvus.client.connection_manager import ConnectionManager

from milvus_hubness import AsyncHubnessClient, HubnessClient
from milvus_hubness.milvus.proxy import ProxyOptions
from milvus_hubness.milvus.store import keepalive
from milvus_hubness.milvus.store.keepalive import LITE_KEEPALIVE, is_on_this_machine, with_keepalive
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from milvus_hubness.milvus.store.server import connect
from tests.milvus.proxy.running import LiteServer, ProxyProcess
from tests.support.servers import lite_uri

PYMILVUS = {"grpc.keepalive_time_ms": 10_000, "grpc.keepalive_permit_without_calls": True}
GRPC_ALLOWS_MS = 300_000
"""The default of gRPC's http2.min_ping_interval_without_data_ms, which Milvus Lite leaves as it is."""


@pytest.fixture(scope="module")
def lite_server(tmp_path_factory):
    server = LiteServer(tmp_path_factory.mktemp("lite") / "data").start()
    yield server
    server.kill()


@pytest.fixture
def opened(monkeypatch):
    """The keepalive options of each channel that is opened. pymilvus shares no channel of an earlier test."""
    monkeypatch.setattr(ConnectionManager, "_instance", None)
    seen = []

    def recording(opening):
        def open_channel(address, *args, options=(), **more):
            names = ("grpc.keepalive_time_ms", "grpc.keepalive_permit_without_calls")
            seen.append({name: value for name, value in options if name in names})
            return opening(address, *args, options=options, **more)

        return open_channel

    monkeypatch.setattr(grpc, "insecure_channel", recording(grpc.insecure_channel))
    monkeypatch.setattr(grpc.aio, "insecure_channel", recording(grpc.aio.insecure_channel))
    yield seen
    ConnectionManager.get_instance().close_all()


async def ask_async(uri):
    client = AsyncHubnessClient(uri)
    await client.list_collections()
    await asyncio.to_thread(client._plain.client)
    await client.close()


def ask(uri):
    with closing(HubnessClient(uri)) as client:
        client.list_collections()
        client._plain.client()


CONNECTIONS = {
    "a job": lambda uri: connect(uri, create=True).close(),
    "a client": ask,
    "an async client": lambda uri: asyncio.run(ask_async(uri)),
}


@pytest.mark.parametrize("where", ["file", "server"])
@pytest.mark.parametrize("kind", CONNECTIONS)
def test_connections_to_milvus_lite_ping_as_it_allows(kind, where, opened, lite_server, tmp_path):
    CONNECTIONS[kind](lite_uri(tmp_path) if where == "file" else f"http://{lite_server.address}")
    assert opened
    for options in opened:
        assert options == LITE_KEEPALIVE
        assert options["grpc.keepalive_time_ms"] > GRPC_ALLOWS_MS


def test_a_connection_to_milvus_lite_elsewhere_pings_as_it_allows(monkeypatch, opened, lite_server):
    monkeypatch.setattr(keepalive, "is_on_this_machine", lambda uri: False)
    with closing(connect(f"http://{lite_server.address}")) as client:
        assert opened == [PYMILVUS]
        for _ in range(3):
            assert MilvusStore(client).is_lite
        assert opened == [PYMILVUS, LITE_KEEPALIVE]
        assert client.list_collections() == []


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_proxy_and_its_workers_ping_as_the_upstream_allows(opened, workers):
    for api in (grpc, grpc.aio):
        for upstream in ("127.0.0.1:19530", "[::1]:19530", "localhost:19530"):
            ProxyOptions(upstream, workers=workers).open_channel(api)
    assert opened == [LITE_KEEPALIVE] * 6
    ProxyOptions("milvus.example:19530", workers=workers).open_channel(grpc)
    assert opened[-1] == {"grpc.keepalive_time_ms": 30_000}


@pytest.mark.parametrize(
    "uri",
    [
        "shop.db",
        "./folder/shop.db",
        "unix:/run/milvus.sock",
        "http://localhost:19530",
        "http://LOCALHOST",
        "http://127.0.0.1:19530/database",
        "http://user:password@127.1.2.3:1",
        "http://[::1]:19530",
        "http://0.0.0.0:19530",
        "tcp://127.0.0.1:1",
        "127.0.0.1:19530",
    ],
)
def test_addresses_of_this_machine(uri):
    assert is_on_this_machine(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "http://milvus:19530",
        "https://in01-x.cloud.example:443",
        "http://10.0.0.1:19530",
        "http://localhost.example:1",
        "http://127.0.0.1.example",
        "http://[::2]:1",
        "http://[::1:1",
        "http://",
        "",
    ],
)
def test_addresses_elsewhere_keep_the_pings_of_pymilvus(uri):
    assert not is_on_this_machine(uri)
    assert with_keepalive(uri, {"secure": True}) == {"secure": True}


def test_users_choose_their_own_pings():
    own = {"grpc_options": {"grpc.keepalive_time_ms": 20_000}}
    assert with_keepalive("shop.db", own) == own
    other = {"grpc_options": {"grpc.enable_retries": 0}}
    assert with_keepalive("shop.db", other) == {
        "grpc_options": {**LITE_KEEPALIVE, "grpc.enable_retries": 0}
    }
    assert with_keepalive("shop.db", {"grpc_options": None}) == {"grpc_options": LITE_KEEPALIVE}


HOLD = """
import asyncio, sys, time
from contextlib import closing
from pymilvus import MilvusClient
from milvus_hubness import AsyncHubnessClient, HubnessClient
from milvus_hubness.milvus.store.server import connect

async def hold_async():
    client = AsyncHubnessClient(uri)
    await client.list_collections()
    await asyncio.sleep(seconds)
    await client.close()

kind, uri, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
if kind == "an async client":
    asyncio.run(hold_async())
else:
    with closing({"pymilvus": MilvusClient, "a client": HubnessClient, "a job": connect}[kind](uri)) as client:
        client.list_collections()
        time.sleep(seconds)
"""


@pytest.mark.slow
@pytest.mark.long
def test_milvus_lite_does_not_hang_up_on_idle_connections(lite_server):
    """It does on pymilvus's own, which shows that the time suffices."""

    def complains(kind):
        command = [sys.executable, "-c", HOLD, kind, f"http://{lite_server.address}", "180"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return "too_many_pings" in done.stderr

    kinds = ["pymilvus", *CONNECTIONS]
    with ThreadPoolExecutor(len(kinds)) as threads:
        complaints = dict(zip(kinds, threads.map(complains, kinds), strict=True))
    assert complaints == {
        "pymilvus": True,
        "a job": False,
        "a client": False,
        "an async client": False,
    }


class Hanging(grpc.GenericRpcHandler):
    """A server with gRPC's defaults, whose calls of Flush take very long."""

    def __init__(self):
        self.ended = threading.Event()

    def service(self, details):
        if not details.method.endswith("/Flush"):
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.ended.wait(300) and b""
        )


@pytest.mark.slow
@pytest.mark.long
def test_workers_of_a_proxy_keep_a_long_call_to_milvus_lite():
    handler = Hanging()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with (
        ProxyProcess(f"127.0.0.1:{port}", "--workers", "2") as proxy,
        grpc.insecure_channel(proxy.address) as channel,
    ):
        call = channel.unary_unary("/milvus.proto.milvus.MilvusService/Flush").future(
            b"", timeout=250
        )
        with pytest.raises(grpc.FutureTimeoutError):
            call.exception(timeout=200)
        handler.ended.set()
        assert call.result(10) == b""
    server.stop(0)
