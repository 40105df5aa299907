"""The metadata of a call: what is passed on, who calls, and what may stand there only once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Metadata = tuple[tuple[str, str | bytes], ...]

STRENGTH_HEADER = "hubness-strength"
KINDS_HEADER = "hubness-kinds"
PROFILE_HEADER = "hubness-profile"
AUTHORIZATION = "authorization"
DATABASE = "dbname"

_OF_CORRECTION = (STRENGTH_HEADER, KINDS_HEADER, PROFILE_HEADER)
"""Entries that set the correction of a search."""

_ONCE = (AUTHORIZATION, DATABASE, *_OF_CORRECTION)
"""Entries that the proxy reads.

With two of them, the proxy and Milvus might each obey another one.
"""

_OF_CONNECTION = frozenset({"user-agent", "te", "content-type", "date", "server", *_OF_CORRECTION})

_OF_ONE_CALL = frozenset(
    {
        DATABASE,
        # Clients of Milvus number and time their calls and connections.
        "client-request-id",
        "client_request_id",
        "client-request-unixmsec",
        "client_request_unixmsec",
        "identifier",
        "log_level",
        # Tracing.
        "b3",
        "baggage",
        "elastic-apm-traceparent",
        "request-id",
        "sentry-trace",
        "traceparent",
        "tracestate",
        "uber-trace-id",
        "x-amzn-trace-id",
        "x-client-trace-id",
        "x-cloud-trace-context",
        "x-correlation-id",
        "x-ot-span-context",
        "x-request-id",
    }
)
"""Entries that say nothing about who calls, and may differ with each call."""

_PREFIXES_OF_ONE_CALL = ("x-b3-", "x-datadog-", "x-envoy-", "uberctx-")


def passed_on(metadata: Iterable[Any] | None) -> Metadata:
    """Return the metadata without entries of the incoming connection and for this package."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name not in _OF_CONNECTION and not name.startswith(("grpc-", ":"))
    )


def identity_in(metadata: Metadata) -> Metadata:
    """Return the entries, among those passed on, by which Milvus may know the caller.

    A gateway before Milvus may go by any entry (a cookie, an API key), so an entry that is not
    known to be harmless counts: two callers that differ in it share neither caches nor connections.
    """
    return tuple(
        sorted(
            (name, value)
            for name, value in metadata
            if name not in _OF_ONE_CALL and not name.startswith(_PREFIXES_OF_ONE_CALL)
        )
    )


def repeated_in(metadata: Iterable[Any] | None) -> str | None:
    """Return the name of an entry that is there twice and must not be; None without one."""
    names = [name for name, _ in metadata or ()]
    return next((name for name in _ONCE if names.count(name) > 1), None)


def header(headers: Mapping[str, str | bytes], name: str) -> str:
    """Return the value of that name; empty if there is none."""
    value = headers.get(name, "")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
