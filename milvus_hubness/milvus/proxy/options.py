"""The options of a proxy."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from milvus_hubness.basics.defaults import (
    DRAIN_SECONDS,
    MAX_CALLS,
    MAX_MESSAGE,
    MESSAGES_IN_FLIGHT,
    PROXY_HOST,
    PROXY_PORT,
    STATE_TTL,
)
from milvus_hubness.basics.files.certificates import NO_CERTIFICATES, Certificates, read_pair
from milvus_hubness.clients.states import expect_state_ttl
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.errors import InvalidParameter, redacted
from milvus_hubness.milvus.store.keepalive import LITE_KEEPALIVE, is_on_this_machine

LAST_PORT = 65_535

PING_MS = 30_000
"""Milliseconds between the pings by which a proxy finds that a client or its upstream is gone."""

CALLS_OF_USER = 1_024
"""Running calls of one user. One that waits takes some 50 KiB."""

CALLS_OF_CONNECTION = 256
"""Running calls of one connection."""

MOST_PENDING = 16_384
"""Calls that have come and have not begun."""

_NO_PROBE = ("grpc.http2.bdp_probe", 0)
"""On a fast connection gRPC would receive megabytes of each message before it is read."""

HANDSHAKE_MS = 10_000
"""Milliseconds for TLS and the first bytes of HTTP/2 of a connection."""

IDLE_MS = 300_000
"""Milliseconds after which a connection without calls is closed. Clients open another."""

AGE_MS = 3_600_000
"""Milliseconds after which a connection takes no more calls; its running ones go on."""

LARGEST_MESSAGE = (1 << 31) - 1
"""Most bytes of a message that gRPC takes, in 32 bits."""

MAX_ANSWER = 256 << 20
"""Bytes of an answer of Milvus, which sends more than it takes (proxy.grpc.serverMaxSendSize)."""

_UPSTREAM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class Tls(NamedTuple):
    """A key and its certificate, both in PEM, in gRPC's order."""

    key: bytes
    certificate: bytes

    @classmethod
    def read(cls, key: str, certificate: str) -> Tls:
        """Read the files of a key and its certificate.

        Raises InvalidParameter unless they belong together.
        """
        return cls(*read_pair(key, certificate))


@dataclass(frozen=True)
class ProxyOptions:
    """Options of a proxy. Raises InvalidParameter."""

    upstream: str
    """HOST:PORT of Milvus."""

    upstream_tls: bool = False
    """Use TLS to Milvus."""

    certificates: Certificates = NO_CERTIFICATES
    """Files for TLS to Milvus."""

    host: str = PROXY_HOST

    port: int = PROXY_PORT
    """0 takes a free port."""

    tls: Tls | None = None
    """Use TLS with clients."""

    overrides: Overrides = NONE
    """Settings of searches that name none."""

    state_ttl: float = STATE_TTL
    """Of the cached collection states, in seconds."""

    max_message: int = MAX_MESSAGE
    """Of a request, in bytes."""

    max_in_flight: int | None = None
    """Bytes of messages in memory, half of them for one user; None is four times max_message."""

    drain: float = DRAIN_SECONDS
    """Seconds that running calls have to end when the proxy stops."""

    max_calls: int = MAX_CALLS
    """Running calls of one user on one collection; further ones are refused."""

    workers: int = 1
    """Processes on the port, each with caches and limits of its own."""

    def __post_init__(self) -> None:
        expect_upstream(self.upstream)
        if not 0 <= self.port <= LAST_PORT:
            raise InvalidParameter(f"port must be from 0 to {LAST_PORT}, not {self.port}")

        self.overrides.checked()
        expect_state_ttl(self.state_ttl)
        if self.certificates and not self.upstream_tls:
            raise InvalidParameter(
                "certificates ($MILVUS_HUBNESS_CA, _CERT, _KEY) need TLS to Milvus: pass "
                "--upstream-tls, or leave them out"
            )

        if min(self.max_message, self.max_calls, self.workers) < 1:
            raise InvalidParameter("max_message, max_calls and workers must be at least 1")
        if self.max_message > LARGEST_MESSAGE:
            raise InvalidParameter(
                f"max_message must be at most {LARGEST_MESSAGE >> 20:,} MiB, which is what gRPC takes, "
                f"not {self.max_message >> 20:,} MiB"
            )
        if not 0 <= self.drain <= threading.TIMEOUT_MAX:
            raise InvalidParameter(
                f"drain must be a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, not {self.drain}"
            )

        if self.budget < 2 * self.max_message:
            raise InvalidParameter(
                f"max_in_flight must be at least twice max_message, {2 * self.max_message:,} "
                f"bytes, not {self.budget:,}: a user may have half of it"
            )

    @property
    def budget(self) -> int:
        """Bytes of messages in memory."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        return MESSAGES_IN_FLIGHT * self.max_message

    @property
    def calls_of_user(self) -> int:
        """Running calls of one user on all collections."""
        return max(CALLS_OF_USER, self.max_calls)

    def open_channel(self, api: Any) -> Any:
        """Open a channel to the upstream with `grpc`, for threads, or `grpc.aio`.

        Raises InvalidParameter.
        """
        keepalive: Mapping[str, int] = {"grpc.keepalive_time_ms": PING_MS}
        if is_on_this_machine(self.upstream):
            keepalive = LITE_KEEPALIVE

        options = [
            ("grpc.max_receive_message_length", self._max_answer),
            # Stored vectors are wider than the caller's. Milvus says what is too large for it.
            ("grpc.max_send_message_length", -1),
            *keepalive.items(),
            _NO_PROBE,
            # By default, gRPC waits up to two minutes before it tries a lost connection again.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Clients repeat calls themselves; an insert that gRPC repeats would insert twice.
            ("grpc.enable_retries", 0),
        ]
        if not self.upstream_tls:
            return api.insecure_channel(self.upstream, options=options)

        credentials = grpc.ssl_channel_credentials(*self.certificates.credentials())
        return api.secure_channel(self.upstream, credentials, options=options)

    def server_options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self.max_message),
            ("grpc.max_send_message_length", self._max_answer),
            ("grpc.keepalive_time_ms", PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.max_connection_age_ms", AGE_MS),
            # Clients keep further calls back. One beyond a small --max-calls comes, and is refused.
            ("grpc.max_concurrent_streams", min(2 * self.max_calls, CALLS_OF_CONNECTION)),
            # By default gRPC ends some calls, whosever they are, where a thousand have just come.
            ("grpc.server.max_pending_requests", MOST_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
            _NO_PROBE,
            # pymilvus pings every 10 s: gRPC would end such connections for too many pings.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            # Without workers, a second proxy on the port is a mistake, and fails.
            ("grpc.so_reuseport", int(self.workers > 1)),
        ]

    @property
    def _max_answer(self) -> int:
        return max(self.max_message, MAX_ANSWER)


def expect_upstream(upstream: str) -> None:
    """Raise InvalidParameter unless this is HOST:PORT."""
    match = _UPSTREAM.fullmatch(upstream)
    if match and 0 < int(match["port"]) <= LAST_PORT:
        return

    # What people write in its place: an address with a scheme, a user or a path.
    scheme, _, rest = upstream.rpartition("://")
    address = _UPSTREAM.fullmatch(rest.rpartition("@")[2].partition("/")[0])
    remedy = ""
    if "@" in rest:
        remedy = ": leave out user and password, which each client sends itself"
    elif scheme and address:
        tls = " and add --upstream-tls" if scheme == "https" else ""
        remedy = f": write {address[0]}{tls}"

    raise InvalidParameter(f"the upstream must be HOST:PORT, not {redacted(upstream)!r}{remedy}")
