"""How often the connections of this package ping a Milvus server.

pymilvus pings every 10 seconds, also while it asks nothing, and real Milvus allows it. Milvus Lite
has the limits that gRPC servers have by default: one ping in 5 minutes, and none between calls. At
the third ping too many it closes the connection ("too_many_pings"), and a request that is sent at
that moment fails.

A server on this machine needs no such pings, whatever it is: the kernel ends the connection when
its process ends. So these connections ping as Milvus Lite allows. Elsewhere pings find a server
that is gone and keep routers from forgetting the connection, so pymilvus's stay unless the server
says that it is Milvus Lite.

Source: grpc.github.io/grpc/core, "Keepalive User Guide for gRPC Core".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pymilvus import MilvusClient

from milvus_hubness.milvus.pymilvus_private import (
    connection_of,
    grpc_options_of,
    reconnect_with,
)

_KEEPALIVE = "grpc.keepalive_"
LITE_KEEPALIVE: Mapping[str, int] = {
    # Half a minute more than a server demands, which measures by its own clock.
    f"{_KEEPALIVE}time_ms": 330_000,
    f"{_KEEPALIVE}permit_without_calls": 0,
}


def is_on_this_machine(uri: str) -> bool:
    """Return whether a connection to this address stays on this machine, as to a Lite file."""
    if uri.endswith(".db") or uri.startswith("unix:"):
        return True

    try:
        host = urlsplit(uri if "://" in uri else f"//{uri}").hostname or ""
        if host == "localhost":
            return True

        address = ipaddress.ip_address(host)
    except ValueError:
        return False

    return address.is_loopback or address.is_unspecified


def with_keepalive(uri: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a MilvusClient with pings that the server at `uri` accepts, unless they
    set their own.
    """
    grpc_options = options.get("grpc_options") or {}
    if not is_on_this_machine(uri) or _sets_keepalive(grpc_options):
        return dict(options)
    return {**options, "grpc_options": {**LITE_KEEPALIVE, **grpc_options}}


def keep_alive_as_lite_allows(client: MilvusClient) -> None:
    """Connect a client of Milvus Lite again, unless it has pings that Milvus Lite accepts.

    It lacks them if its server is on another machine, or if pymilvus shares the connection of a
    client that is not of this package.
    """
    connection = connection_of(client)
    grpc_options = grpc_options_of(connection)
    if not _sets_keepalive(grpc_options):
        reconnect_with(connection, {**grpc_options, **LITE_KEEPALIVE})


def _sets_keepalive(grpc_options: Mapping[str, Any]) -> bool:
    return any(name.startswith(_KEEPALIVE) for name in grpc_options)
