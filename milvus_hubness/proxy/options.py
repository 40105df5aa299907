"""The options of a proxy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from milvus_hubness.client.messages import expect_state_ttl, expect_strength
from milvus_hubness.defaults import DRAIN_SECONDS, MAX_CALLS, MAX_MESSAGE, PROXY_HOST, PROXY_PORT, STATE_TTL
from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.files.opening import read_bytes
from milvus_hubness.stores.keepalive import LITE_KEEPALIVE, is_on_this_machine

LAST_PORT = 65_535
PING_MS = 30_000
"""Milliseconds between the pings by which a proxy finds that a client or its upstream is gone."""
_PEM = re.compile(rb"^-----BEGIN [A-Z0-9 ]+-----\s*$", re.MULTILINE)


class Tls(NamedTuple):
    """A key and its certificate, both in PEM, in gRPC's order."""

    key: bytes
    certificate: bytes


@dataclass(frozen=True)
class ProxyOptions:
    """Options of a proxy.

    upstream: HOST:PORT of Milvus. upstream_tls: use TLS to it. upstream_ca: file of the authorities that sign its
    certificate; None for those of the system. port: 0 takes a free port. tls: use TLS with clients. strength: w of
    every search that names none; None uses that of each collection. state_ttl: of the cached collection states, in
    seconds. max_message: in bytes. drain: seconds that running calls have to end when the proxy stops. max_calls:
    largest number of running calls of one user on one collection; further ones are refused. workers: processes on the
    port, each with caches and a max_calls of its own. Raises InvalidParameter.
    """

    upstream: str
    upstream_tls: bool = False
    upstream_ca: str | None = None
    host: str = PROXY_HOST
    port: int = PROXY_PORT
    tls: Tls | None = None
    strength: float | None = None
    state_ttl: float = STATE_TTL
    max_message: int = MAX_MESSAGE
    drain: float = DRAIN_SECONDS
    max_calls: int = MAX_CALLS
    workers: int = 1

    def __post_init__(self) -> None:
        host, _, port = self.upstream.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= LAST_PORT:
            raise InvalidParameter(f"the upstream must be HOST:PORT, not {self.upstream!r}")
        if not 0 <= self.port <= LAST_PORT:
            raise InvalidParameter(f"port must be from 0 to {LAST_PORT}, not {self.port}")
        expect_strength(self.strength)
        expect_state_ttl(self.state_ttl)
        if self.upstream_ca and not self.upstream_tls:
            raise InvalidParameter("upstream_ca needs TLS to Milvus: pass --upstream-tls")
        if min(self.max_message, self.max_calls, self.workers) < 1 or self.drain < 0:
            raise InvalidParameter("max_message, max_calls and workers must be at least 1, and drain at least 0")

    def open_channel(self, api: Any) -> Any:
        """Open a channel to the upstream with `grpc`, for threads, or `grpc.aio`. Raises InvalidParameter."""
        keepalive = LITE_KEEPALIVE if is_on_this_machine(self.upstream) else {"grpc.keepalive_time_ms": PING_MS}
        options = [
            *self._limits(),
            *keepalive.items(),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.enable_retries", 0),
        ]
        if not self.upstream_tls:
            return api.insecure_channel(self.upstream, options=options)
        authorities = None if self.upstream_ca is None else read_pem(self.upstream_ca)
        return api.secure_channel(self.upstream, grpc.ssl_channel_credentials(authorities), options=options)

    def server_options(self) -> list[tuple[str, int]]:
        return [
            *self._limits(),
            ("grpc.keepalive_time_ms", PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", int(self.workers > 1)),
        ]

    def _limits(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self.max_message),
            ("grpc.max_send_message_length", self.max_message),
        ]


def read_pem(path: str) -> bytes:
    """Return the content of a PEM file. Raises InvalidParameter if it cannot be read, or holds no PEM."""
    try:
        content = read_bytes(path)
    except UnreadableFile as error:
        raise InvalidParameter(str(error)) from None
    if not _PEM.search(content):
        raise InvalidParameter(f"{path}: holds nothing in PEM: name a file with -----BEGIN … lines")
    return content
