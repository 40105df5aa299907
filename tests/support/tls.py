"""Certificates of one day, made by openssl, and servers that speak TLS with them."""

import asyncio
import ssl
import subprocess
import threading
from pathlib import Path

import pytest


def openssl(*arguments):
    try:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")


class Authority:
    """An authority that nobody knows, with its certificate in NAME.pem of a folder."""

    def __init__(self, folder, name="ca"):
        self.folder = Path(folder)
        self.file = self.folder / f"{name}.pem"
        self._key = self.folder / f"{name}.key"
        subject = ["-days", "1", "-subj", f"/CN=the authority {name}"]
        out = ["-keyout", self._key, "-out", self.file]
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *out)

    def sign(self, name, host="localhost"):
        """(key, certificate) of a host, in NAME-key.pem and NAME-cert.pem."""
        key, certificate = (self.folder / f"{name}-{kind}.pem" for kind in ("key", "cert"))
        asked, names = self.folder / "asked.pem", self.folder / "names"
        new = ["-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
        openssl("req", *new, "-keyout", key, "-out", asked)
        names.write_text(f"subjectAltName=DNS:{host}")
        by = ["-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-days", "1"]
        openssl("x509", "-req", "-in", asked, *by, "-extfile", names, "-out", certificate)
        return key, certificate


class Terminator:
    """Speaks TLS for a server that does not."""

    def __init__(self, upstream, key, certificate, clients_of=None, protocol="h2"):
        """clients_of: the file of the authority that signs the certificates of clients, if it wants some."""
        self.host, _, self.port = upstream.rpartition(":")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)
        self.context.set_alpn_protocols([protocol])
        if clients_of is not None:
            self.context.load_verify_locations(clients_of)
            self.context.verify_mode = ssl.CERT_REQUIRED
        self.loop = asyncio.new_event_loop()
        # Clients that refuse a certificate, or are refused, are what tests are about.
        self.loop.set_exception_handler(lambda *_: None)
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
