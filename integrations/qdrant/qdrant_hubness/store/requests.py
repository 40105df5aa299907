"""Requests to Qdrant: connections, errors, and a lock for the local mode."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import grpc
from qdrant_client import AsyncQdrantClient, QdrantClient
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import META_INFO_FILENAME, QdrantLocal

from milvus_hubness.errors import (
    CollectionNotFound,
    InvalidInput,
    InvalidParameter,
    ServerUnavailable,
    StoreError,
    UnsupportedVersion,
    redacted,
    secrets_in,
)

KEEPS_METADATA = (1, 16)
"""The version from which servers keep metadata of collections."""
OLDEST_SERVER = (1, 10)
"""The version from which servers have the query API, by which all searches are sent."""
FORMULAS = (1, 14)
"""The version from which a query can have a formula, which subtracts biases that are in payloads."""
FAILURES = (ApiException, grpc.RpcError, ValueError, KeyError, RuntimeError)
"""The exceptions of qdrant-client. Its local mode raises plain ValueErrors, and KeyErrors for points."""

_NO_POINT = "no point with id"
_NO_COLLECTION = re.compile(
    r"(collection|alias)\b.*(doesn't exist|does not exist|not found)", re.IGNORECASE | re.DOTALL
)
_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def connect(uri: str, api_key: str | None = None, *, timeout: int = 60, create: bool = False) -> QdrantClient:
    """Connect a QdrantClient to a server (http://… or https://…), a folder of the local mode, or ":memory:".

    create: make the database of a folder that holds none, as QdrantClient does. Without it a
    mistyped path is an error, and not an empty database.

    Raises ServerUnavailable, which names no user, password and key, and InvalidParameter for a file in place of a
    folder.
    """
    if "://" not in uri and uri != ":memory:" and os.path.exists(uri) and not os.path.isdir(uri):
        raise InvalidParameter(f"{uri}: is no folder of the local mode: name a folder, or a server as http://HOST:PORT")
    is_folder = "://" not in uri and uri != ":memory:"
    if is_folder and not create and not Path(uri, META_INFO_FILENAME).exists():
        raise ServerUnavailable(
            f"no database of Qdrant's local mode at {uri}: correct the path, or create the database "
            "first, with QdrantClient(path=...) or connect(..., create=True)"
        )
    try:
        if "://" in uri:
            client = QdrantClient(url=uri, api_key=api_key, timeout=timeout, check_compatibility=False)
            server_version = str(client.info().version)
            if _numbers(server_version) >= OLDEST_SERVER:
                return client
            raise UnsupportedVersion(
                f"the server at {redacted(uri, secrets_in(uri))} runs Qdrant {server_version}: upgrade it to "
                f"{'.'.join(map(str, OLDEST_SERVER))} or newer"
            )
        return QdrantClient(":memory:") if uri == ":memory:" else QdrantClient(path=uri)
    except FAILURES as error:
        # Assumes nothing: no command has begun.
        message = f"no Qdrant answers at {uri}: {error_text(error)}"
    raise ServerUnavailable(redacted(message, {api_key or "", *secrets_in(uri)}))


def plain_client_of(client: Any) -> QdrantClient:
    """Return a client that shows collections as they are stored: a HubnessQdrantClient has one. Raises InvalidInput."""
    if isinstance(client, str | PathLike):
        address = redacted(repr(str(client)))
        raise InvalidInput(
            f"QdrantStore needs a client, not the address {address}: pass QdrantStore(connect({address}))"
        )
    if hasattr(type(client), "plain_client"):
        return client.plain_client()
    if isinstance(client, AsyncQdrantClient) or not hasattr(client, "get_collection"):
        raise InvalidInput(
            f"QdrantStore needs a QdrantClient, not {type(client).__name__}: pass QdrantStore(connect(uri))"
        )
    return client


def is_local(client: Any) -> bool:
    """Whether the client is in the local mode, in which it stores the data itself."""
    return isinstance(client._client, QdrantLocal | AsyncQdrantLocal)


def turn(client: Any) -> Any:
    """Return a context in which a thread may call this client: the local mode allows one thread at a time."""
    if not is_local(client):
        return nullcontext()
    with _locks_lock:
        return _locks.setdefault(client._client, threading.RLock())


def has_formulas(version: str) -> bool:
    """Whether a server of this version takes formulas in queries."""
    return _numbers(version) >= FORMULAS


def keeps_metadata(version: str) -> bool:
    """Whether a server of this version keeps metadata of collections."""
    return _numbers(version) >= KEEPS_METADATA


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; greater ones than any for a version that has none."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) or (99,)


class PointsMissing(StoreError):
    """Points of a request did not exist, and Qdrant carried out an unknown part of it for the others.

    A server stops at the missing point: it works in parts of 32 points, in an order of its own for vectors, in each
    shard apart. The local mode carries out all the rest. So nobody who gets this error may count a point as written.
    """


def is_missing(error: BaseException) -> bool:
    """Whether the error says that a collection or an alias does not exist.

    The text must say so: a 404 may also be about a point, or come from a proxy in front of the server.
    """
    if isinstance(error, KeyError) or lacks_points(error):
        return False
    return _NO_COLLECTION.search(error_text(error)) is not None


def lacks_points(error: BaseException) -> bool:
    """Whether the error is one of those that become PointsMissing."""
    return isinstance(error, KeyError | PointsMissing) or _NO_POINT in error_text(error).lower()


@contextmanager
def translated(collection: str) -> Iterator[None]:
    """Convert qdrant-client's errors to errors of milvus_hubness about `collection`."""
    try:
        yield
    except FAILURES as error:
        if isinstance(error, StoreError):
            raise
        if lacks_points(error):
            message = redacted(f"a request on {collection!r} was carried out in part: {error_text(error)}")
            raise PointsMissing(message) from error
        if is_missing(error):
            raise CollectionNotFound(f"no collection or alias {collection!r}") from error
        if isinstance(error, ResponseHandlingException):
            raise ServerUnavailable(
                redacted(f"the server stopped answering about {collection!r}: {error_text(error)}")
            ) from error
        message = redacted(f"Qdrant refused a request on {collection!r}: {error_text(error)}")
        raise StoreError(message) from error


def error_text(error: BaseException) -> str:
    """Return Qdrant's message of an error."""
    if isinstance(error, UnexpectedResponse):
        return f"{error.status_code} {error.content.decode(errors='replace')[:500]}"
    if isinstance(error, grpc.RpcError):
        return str(error.details())
    return str(error)
