"""Connections of the HTTP server: how many there are, and how long a client may hold one.

uvicorn closes no connection whose request never arrives, and counts such connections towards its
own limit. A client that opens a hundred and sends nothing, or a byte a second, would keep the
probes of Kubernetes out for ever.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from milvus_hubness.serve.http_limits import HttpLimits

BACKLOG = 128
"""Connections that the kernel accepts before this process does; asyncio takes as many at once."""


class Waiting:
    """The connections that wait for their client, longest first: for its request, or until it has
    taken the response. These are the ones that may be closed to make room.
    """

    def __init__(self) -> None:
        self._connections: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None

    def discard(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def close_one(self) -> None:
        """Close the connection that has waited longest."""
        connection, _ = self._connections.popitem(last=False)
        # uvicorn hears of its end later, and up to BACKLOG
        # further connections may come before that.
        connection.connections.discard(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    """uvicorn's connection, for one request, which its client must send and whose response it must
    take in time.

    One more than `limits.connections` closes the connection that has waited longest for its client.
    Requests of probes arrive within milliseconds, so that a client which holds all other
    connections does not keep them out.
    """

    def __init__(self, *args: Any, waiting: Waiting, limits: HttpLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting = waiting
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self._limits.request_seconds)

        # uvicorn has added this connection, and at least this one waits for its client.
        if len(self.connections) > self._limits.connections:
            self._waiting.close_one()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)

        # No route reads a body: once the head has arrived, this side is the one that is waited for.
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_deadline()
            self._waiting.discard(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to stay open: a client that closed
        its sending side gets the response to its request.
        """
        return self.cycle is not None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait(self._limits.response_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_deadline()
        self._waiting.discard(self)

    def _wait(self, seconds: float) -> None:
        """Close the connection after `seconds`, or sooner for another one."""
        self._end_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

        # Discarded first, so that it is added at the end of the queue.
        self._waiting.discard(self)
        self._waiting.add(self)

    def _end_deadline(self) -> None:
        # A timer that is left would keep the connection and its buffers until it ends.
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
