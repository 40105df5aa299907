"""TLS to the upstream, whose certificate an authority signed that only this test knows."""

import asyncio
import ssl
import subprocess
import threading

import grpc
import numpy as np
import pytest
from pymilvus import MilvusClient

from milvus_hubness import NNN
from tests.milvus.proxy.running import ProxyHere
from tests.support.born import born
from tests.support.galleries import vectors

DIM = 12


def openssl(*arguments):
    try:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A folder: ca.pem, the authority; cert.pem and key.pem, which it signed for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    new, of_one_day = ["-newkey", "rsa:2048", "-nodes"], ["-days", "1"]
    authority = [
        "-keyout",
        folder / "ca.key",
        "-out",
        folder / "ca.pem",
        "-subj",
        "/CN=an authority",
    ]
    openssl("req", "-x509", *new, *of_one_day, *authority)
    asked = ["-keyout", folder / "key.pem", "-out", folder / "asked.pem", "-subj", "/CN=localhost"]
    openssl("req", *new, *asked)
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    by = ["-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial"]
    out = ["-extfile", folder / "names", "-out", folder / "cert.pem"]
    openssl("x509", "-req", "-in", folder / "asked.pem", *by, *of_one_day, *out)
    return folder


class Terminator:
    """Speaks TLS for a server that does not."""

    def __init__(self, upstream, signed):
        self.host, _, self.port = upstream.rpartition(":")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(signed / "cert.pem", signed / "key.pem")
        self.context.set_alpn_protocols(["h2"])
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = asyncio.run_coroutine_threadsafe(self.listen(), self.loop).result(20)
        self.address = f"localhost:{self.server.sockets[0].getsockname()[1]}"

    async def listen(self):
        return await asyncio.start_server(self.accepted, "127.0.0.1", 0, ssl=self.context)

    async def accepted(self, reader, writer):
        there = await asyncio.open_connection(self.host, self.port)
        await asyncio.gather(
            pumped(reader, there[1]), pumped(there[0], writer), return_exceptions=True
        )

    def stop(self):
        self.loop.call_soon_threadsafe(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


async def pumped(reader, writer):
    while some := await reader.read(65_536):
        writer.write(some)
        await writer.drain()
    writer.close()


@pytest.fixture
def secured(lite, signed):
    """(backend, HOST:PORT) of a Milvus that speaks TLS only to those who trust the authority."""
    before = Terminator(lite.uri.removeprefix("http://"), signed)
    yield lite, before.address
    before.stop()


def test_all_that_goes_upstream_is_encrypted(secured, signed):
    """What is passed on, and what the proxy asks for itself, as the bank of new rows."""
    lite, upstream = secured
    rng = np.random.default_rng(6)
    items, bank = vectors(rng, 60, DIM), vectors(rng, 30, DIM)
    target = born(lite, items, bank, "COSINE", estimator=NNN(4))
    fresh = vectors(rng, 1, DIM)
    with ProxyHere(upstream, upstream_tls=True, upstream_ca=str(signed / "ca.pem")) as proxy:
        client = MilvusClient(proxy.uri)
        assert (
            client.insert(target, {"id": 900, "vector": fresh[0], "group": 1})["insert_count"] == 1
        )
        [found] = client.search(target, data=fresh, limit=20)
        [expected] = lite.hubness_client().behind.search(target, data=fresh, limit=20)
        assert found.ids == expected.ids
        assert 900 in found.ids
        np.testing.assert_allclose(found.distances, expected.distances, atol=1e-5)
        client.close()


@pytest.mark.parametrize("trusted", ["nobody", "another"])
def test_an_upstream_of_an_unknown_authority_is_not_spoken_to(secured, tmp_path, trusted):
    _, upstream = secured
    further = {}
    if trusted == "another":
        other = tmp_path / "other.pem"
        subject = ["-nodes", "-days", "1", "-subj", "/CN=another authority"]
        openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            *subject,
            "-keyout",
            tmp_path / "key",
            "-out",
            other,
        )
        further["upstream_ca"] = str(other)
    with (
        ProxyHere(upstream, upstream_tls=True, **further) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        channel.unary_unary("/milvus.proto.milvus.MilvusService/ShowCollections")(b"", timeout=20)
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
