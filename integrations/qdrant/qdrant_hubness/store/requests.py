"""Requests to Qdrant: connections, errors, rates, and a lock for the local mode."""

from __future__ import annotations

import json
import os
import re
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import grpc
from qdrant_client import AsyncQdrantClient, QdrantClient
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import (
    ApiException,
    ResponseHandlingException,
    UnexpectedResponse,
)
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import META_INFO_FILENAME, QdrantLocal

from milvus_hubness import (
    CollectionNotFound,
    HubnessError,
    InvalidInput,
    InvalidParameter,
    ServerUnavailable,
    StoreError,
    UnsupportedVersion,
)
from milvus_hubness.extending import WaitPolicy, log, redacted, secrets_in, wait_seconds

T = TypeVar("T")

KEEPS_METADATA = (1, 16)
"""The version from which servers keep metadata of collections."""

OLDEST_SERVER = (1, 10)
"""The version from which servers have the query API, by which all searches are sent."""

FORMULAS = (1, 14)
"""The version from which a query can have a formula, which subtracts biases that are in payloads.
"""

FAILURES = (ApiException, QdrantException, grpc.RpcError, ValueError, KeyError, RuntimeError)
"""The exceptions of qdrant-client. Its local mode
raises plain ValueErrors, and KeyErrors for points.
"""

WHOLE_SERVER = ""
"""What a request is about that is about no collection."""

GATEWAY_ERRORS = {502, 503, 504}
"""Status codes of a proxy in front of a server that does not answer."""

DENIED = {401, 403}
"""Status codes of a key that is missing, wrong, or may not do this."""

LONGEST_TEXT = 500
"""Most characters of a server's text that a message shows."""

_NO_POINT = "no point with id"
_TOO_LARGE = re.compile(
    r"larger than allowed|message length too large|larger than max|split your request"
    r"|Limit exceeded .* for .(upsert|update|search) limit"
)
"""Refusals of a request that the server takes in smaller parts."""
_SILENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_ADVICE = re.compile(r"\.?\s*(Help|Hint): .*|, please try to split your request\.?", re.DOTALL)
"""What a server's text advises: a parameter of a request, which no user of a job sets."""

_STRICT_MODE = re.compile(r"\. Help: |rate limit|Exact search disabled")
"""How the texts of refusals by strict mode read."""

_NO_COLLECTION = re.compile(
    r"(collection|alias)\b.*(doesn't exist|does not exist|not found)", re.IGNORECASE | re.DOTALL
)

# One lock for each database of the local mode, however many clients and stores share it.
_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def connect(
    uri: str,
    api_key: str | None = None,
    *,
    timeout: int = 60,
    create: bool = False,
    tls: ssl.SSLContext | None = None,
) -> QdrantClient:
    """Connect a QdrantClient to a server (http://… or
    https://…), a folder of the local mode, or ":memory:".

    create: make the database of a folder that holds none, as QdrantClient does. Without it a
    mistyped path is an error, and not an empty database. tls: the context for https://, with an
    authority of your own or a certificate of the client; None for the usual one.

    Raises ServerUnavailable, which names no user, password and key, and InvalidParameter for a file
    in place of a folder.
    """
    is_server = "://" in uri
    is_folder = not is_server and uri != ":memory:"
    if is_folder and os.path.exists(uri) and not os.path.isdir(uri):
        raise InvalidParameter(
            f"{uri}: is no folder of the local mode: name a folder, or a server as http://HOST:PORT"
        )

    if is_folder and not create and not Path(uri, META_INFO_FILENAME).exists():
        raise ServerUnavailable(
            f"no database of Qdrant's local mode at {uri}: correct the path, or create the "
            "database first, with QdrantClient(path=...) or connect(..., create=True)"
        )

    try:
        if is_folder:
            return QdrantClient(path=uri)
        if not is_server:
            return QdrantClient(":memory:")

        client = _connected(uri, api_key, timeout, tls)
        server_version = str(client.info().version)
        if _numbers(server_version) < OLDEST_SERVER:
            raise UnsupportedVersion(
                f"the server at {redacted(uri, secrets_in(uri))} runs Qdrant {server_version}: "
                f"upgrade it to {'.'.join(map(str, OLDEST_SERVER))} or newer"
            )

        return client
    except FAILURES as error:
        # Assumes nothing: no command has begun.
        message = f"no Qdrant answers at {uri}: {error_text(error)}"

    raise ServerUnavailable(redacted(message, {api_key or "", *secrets_in(uri)}))


def _connected(
    uri: str, api_key: str | None, timeout: int, tls: ssl.SSLContext | None
) -> QdrantClient:
    """Return a client of a server. Says in a line of the log that a key goes over http."""
    options: dict[str, Any] = {} if tls is None else {"verify": tls}
    with warnings.catch_warnings():
        # The library's own warning shows a line of its source, and no address.
        warnings.filterwarnings("ignore", "Api key is used with an insecure connection")
        client = QdrantClient(
            url=uri, api_key=api_key, timeout=timeout, check_compatibility=False, **options
        )

    if api_key and not (uri.startswith("https://") or _is_loopback(uri)):
        address = redacted(uri, {api_key, *secrets_in(uri)})
        log.warning(
            "the API key for %s is sent unencrypted, for anybody on the way to read: use an "
            "address with https://",
            address,
        )

    return client


def _is_loopback(uri: str) -> bool:
    """Whether an address is of this machine, to which nobody is on the way."""
    try:
        host = urlsplit(uri).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def plain_client_of(client: Any) -> QdrantClient:
    """Return a client that shows collections as they are stored: a HubnessQdrantClient has one.

    Raises InvalidInput.
    """
    if isinstance(client, str | PathLike):
        address = redacted(repr(str(client)))
        raise InvalidInput(
            f"QdrantStore needs a client, not the address {address}: pass "
            f"QdrantStore(connect({address}))"
        )

    if hasattr(type(client), "plain_client"):
        return cast(QdrantClient, client.plain_client())
    if isinstance(client, AsyncQdrantClient) or not hasattr(client, "get_collection"):
        raise InvalidInput(
            f"QdrantStore needs a QdrantClient, not {type(client).__name__}: pass "
            "QdrantStore(connect(uri))"
        )

    return cast(QdrantClient, client)


def is_local(client: Any) -> bool:
    """Whether the client is in the local mode, in which it stores the data itself."""
    return isinstance(client._client, QdrantLocal | AsyncQdrantLocal)


def turn(client: Any) -> Any:
    """Return a context in which a thread may call this
    client: the local mode allows one thread at a time.
    """
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
    """Return the first two numbers of a version; without any, a greater one than all."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) or (99,)


class PointsMissing(StoreError):
    """Points of a request did not exist, and Qdrant
    carried out an unknown part of it for the others.

    A server stops at the missing point: it works in parts of 32 points, in an order of its own for
    vectors, in each shard apart. The local mode carries out all the rest. So nobody who gets this
    error may count a point as written.
    """


def is_missing(error: BaseException) -> bool:
    """Whether the error says that a collection or an alias does not exist.

    The text must say so: a 404 may also be about a
    point, or come from a proxy in front of the server.
    """
    if isinstance(error, KeyError) or lacks_points(error):
        return False
    return _NO_COLLECTION.search(error_text(error)) is not None


def lacks_points(error: BaseException) -> bool:
    """Whether the error is one of those that become PointsMissing."""
    return isinstance(error, KeyError | PointsMissing) or _NO_POINT in error_text(error).lower()


@contextmanager
def translated(collection: str, alias: str = "") -> Iterator[None]:
    """Convert qdrant-client's errors to errors of milvus_hubness about `collection`, or about the server
    for WHOLE_SERVER.

    alias: the internal name by which the request was sent, which no message shows.
    """
    try:
        yield
    except FAILURES as error:
        if isinstance(error, StoreError):
            raise

        text = _shown_text(error)
        if alias:
            text = text.replace(alias, collection)
        raise _translated(error, collection, redacted(text)) from error


def _translated(error: BaseException, collection: str, text: str) -> StoreError:
    if lacks_points(error):
        return PointsMissing(f"a request on {collection!r} was carried out in part: {text}")
    if is_missing(error):
        return CollectionNotFound(f"no collection or alias {collection!r}")
    if is_silence(error):
        about = f" about {collection!r}" if collection else ""
        return ServerUnavailable(
            f"the server stopped answering{about}: {text}: see that it runs and can be reached, and run "
            "the command again, which continues"
        )

    on = f" on {collection!r}" if collection else ""
    if _is_denied(error):
        return StoreError(
            f"Qdrant does not let this key work{on}: {text}: set $MILVUS_HUBNESS_TOKEN to one that may"
        )

    remedy = ""
    if _STRICT_MODE.search(error_text(error)):
        remedy = f": raise that limit in the strict mode of {collection!r}, with update_collection"
    error_type = TooLarge if is_too_large(error) else StoreError
    return error_type(f"Qdrant refused a request{on}: {text}{remedy}")


class TooLarge(StoreError):
    """The server refused a request that it may take in smaller parts."""


def is_too_large(error: BaseException) -> bool:
    """Whether the server may take the request in smaller parts."""
    return not isinstance(error, HubnessError) and _TOO_LARGE.search(error_text(error)) is not None


def is_silence(error: BaseException) -> bool:
    """Whether no server answered."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code in GATEWAY_ERRORS
    if isinstance(error, grpc.RpcError):
        return error.code() in _SILENT
    return isinstance(error, ResponseHandlingException)


def _is_denied(error: BaseException) -> bool:
    if isinstance(error, UnexpectedResponse):
        return error.status_code in DENIED
    return isinstance(error, grpc.RpcError) and error.code() in _DENIED


def patiently(send: Callable[[], T], collection: str) -> T:
    """Return what `send` returns; if the server asks
    to wait, because of a rate, wait and send again.

    Raises StoreError if a rate is not kept within the
    limit of all waits of jobs, and the errors of `send`.
    """
    until = time.monotonic() + WaitPolicy.default().limit
    while True:
        try:
            return send()
        except ResourceExhaustedResponse as error:
            seconds = max(1, error.retry_after_s)
            if time.monotonic() + seconds > until:
                raise

            wait_seconds(f"the rate that strict mode allows on {collection!r}", seconds)


def error_text(error: BaseException) -> str:
    """Return Qdrant's message of an error."""
    if isinstance(error, UnexpectedResponse):
        return f"{error.status_code} {_content_text(error.content)[:LONGEST_TEXT]}"
    if isinstance(error, grpc.RpcError):
        return str(error.details())
    return str(error)


def _content_text(content: bytes) -> str:
    """Return the text of an answer, from its JSON if it is some."""
    text = content.decode(errors="replace")
    try:
        return str(json.loads(text)["status"]["error"])
    except (ValueError, KeyError, TypeError):
        return text


def _shown_text(error: BaseException) -> str:
    """Return Qdrant's message as one line, without advice that is not for users of jobs."""
    text = " ".join(_ADVICE.sub("", error_text(error)).split())
    return text.removesuffix(".") or type(error).__name__
