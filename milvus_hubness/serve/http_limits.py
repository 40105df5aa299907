"""The limits of the service's HTTP server, without the libraries that it needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """How many clients an HTTP server has at a time, and how long each may take."""

    request_seconds: float = 5.0
    """Time that a client has to send the head of a request."""

    response_seconds: float = 10.0
    """Time that a client has to receive a response."""

    connections: int = 512
    """Maximum number of open connections, within the
    1,024 files that a process may open by default.
    """

    requests: int = 256
    """Maximum number of requests in progress, apart from probes; further ones get status 503."""
