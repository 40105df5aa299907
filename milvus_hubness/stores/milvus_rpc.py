"""Talking to Milvus: connecting, errors in our terms, filters, requests that fit the message limit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import ErrorCode, MilvusException, ParamError
from pymilvus.grpc_gen import common_pb2
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from milvus_hubness.errors import CollectionNotFound, InvalidParameter, ServerUnavailable, StoreError
from milvus_hubness.redaction import redacted, secrets_in

T = TypeVar("T")

COLLECTION_NOT_FOUND = 100
COLLECTION_NOT_LOADED = 101
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"})
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_TOO_LARGE = ("larger than max", "resource_exhausted", "exceeds the maximum", "message size", "too large")


class EscapedKeys:
    """A client whose filters by key match the rows of these keys only.

    pymilvus builds the filter of `get`, `delete` and `query(ids=...)` in `_pack_pks_expr`, and pastes keys
    into it as they are.
    """

    def _pack_pks_expr(self, schema_dict: Mapping[str, Any], pks: Sequence[Any]) -> str:
        field = next(field for field in schema_dict["fields"] if field.get("is_primary"))
        texts = [str(key) for key in pks]
        if field["type"] == DataType.VARCHAR:
            return is_one_of(field["name"], texts)
        if odd := next((text for text in texts if not _WORD.fullmatch(text)), None):
            raise ParamError(message=f"key {odd!r} of field {field['name']!r} is no whole number: correct it")
        return f"{field['name']} in [{', '.join(texts)}]"


if not hasattr(MilvusClient, "_pack_pks_expr"):
    raise ImportError("this release of pymilvus is not supported, keys cannot be escaped in it: install 3.0")


class PlainClient(EscapedKeys, MilvusClient):  # type: ignore[misc]
    """MilvusClient with escaped keys."""


def connect(
    uri: str, token: str = "", db_name: str = "", *, timeout: float = 10.0, **options: Any
) -> MilvusClient:
    """A plain MilvusClient; options are further arguments of it.

    Raises ServerUnavailable, which names the address without its user and password, and never the token;
    InvalidParameter for an address of another form.
    """
    _validate_address(uri)
    # Milvus Lite hangs up on clients that were idle for half a minute; pymilvus connects without retrying.
    attempts = 1 if "://" in uri else 3
    retrying = Retrying(
        retry=retry_if_exception_type(MilvusException),
        stop=stop_after_attempt(attempts),
        wait=wait_fixed(0.5),
        reraise=True,
    )
    try:
        return retrying(PlainClient, uri, token=token, db_name=db_name, timeout=timeout, **options)
    except MilvusException as error:
        message = f"{_unreachable(uri)}: {error.message}"
    # Outside of `except`: the error of pymilvus, which would be its context, may name the whole address.
    raise ServerUnavailable(redacted(message, {token, *secrets_in(uri)}))


def _validate_address(uri: str) -> None:
    """Raises InvalidParameter where a URI has no port that is a number, or its user and password no end."""
    _, scheme, rest = uri.partition("://")
    if not scheme:
        return
    try:
        parts = urlsplit(uri)
        _ = parts.port
        valid = ("@" in rest) == ("@" in parts.netloc)
    except ValueError:
        valid = False
    if not valid:
        raise InvalidParameter(
            redacted(f"the address {uri} is invalid: write http://HOST:PORT", secrets_in(uri))
            + "; in a user and a password, percent-encode / ? # and @"
        )


def _unreachable(uri: str) -> str:
    if "://" in uri:
        return f"no Milvus answers at {uri}"
    hint = "another process may hold it" if os.path.exists(uri) else "its folder must exist"
    if not uri.endswith(".db"):
        hint = "its name must end with .db; a server's address begins with http://"
    return f"cannot open the Milvus Lite file {uri} ({hint})"


PAUSES = (0.01, 0.03, 0.1, 0.3, 1.0, *(3.0 for _ in range(70)))
"""Seconds between two attempts at a write; pymilvus's own."""
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


def may_arrive(error: Exception) -> bool:
    """Return whether a request that failed with this error may reach the server later."""
    code = error.code() if isinstance(error, grpc.RpcError) else getattr(error, "code", None)
    return isinstance(code, grpc.StatusCode) and code not in _REFUSALS


def is_rate_limited(error: Exception) -> bool:
    """Return whether the server asks for the same request later."""
    return any(
        isinstance(each, MilvusException)
        and (each.code == ErrorCode.RATE_LIMIT or each.compatible_code == common_pb2.RateLimit)
        for each in (error, error.__cause__)
    )


def is_missing(error: Exception) -> bool:
    """Return whether the server found no collection or alias of that name."""
    return isinstance(error, MilvusException) and error.code == COLLECTION_NOT_FOUND


@contextmanager
def translated(collection: str) -> Iterator[None]:
    """pymilvus's errors as ours, about `collection`."""
    try:
        yield
    except grpc.RpcError as error:
        raise StoreError(f"a request on {collection!r} failed: {_told(error)}") from error
    except MilvusException as error:
        if error.code == COLLECTION_NOT_FOUND:
            raise CollectionNotFound(f"no collection or alias {collection!r}") from error
        if "connect" in error.message.lower() or "unavailable" in error.message.lower():
            raise ServerUnavailable(
                f"the server stopped answering about {collection!r}: {_told(error)}"
            ) from error
        raise StoreError(f"Milvus refused a request on {collection!r}: {_told(error)}") from error


def literal(key: int | str) -> str:
    """A key as Milvus's filter language writes it."""
    return str(key) if isinstance(key, int) else f'"{escaped(key)}"'


def escaped(text: str) -> str:
    """Return a text as it stands between double quotes in Milvus's filter language."""
    return text.translate(_ESCAPES)


def is_one_of(field: str, keys: Sequence[int | str]) -> str:
    """The filter that picks rows by key."""
    return f"{field} in [{', '.join(map(literal, keys))}]"


def runs_function_chains(server_version: str) -> bool:
    """Whether a server of this version applies function chains to a search: Milvus from 3.0, Lite from 3.2.
    Older ones do not refuse them, they ignore them."""
    return version_numbers(server_version) >= ((3, 2) if server_version.startswith("milvus_lite") else (3, 0))


def adds_fields(server_version: str) -> bool:
    """Whether a live collection can be given a field: Milvus from 2.6, Lite never."""
    return not server_version.startswith("milvus_lite") and version_numbers(server_version) >= (2, 6)


def imports_parquet(server_version: str) -> bool:
    """Whether a server of this version reads rows from Parquet files: Milvus from 2.3.4, Lite never."""
    return not server_version.startswith("milvus_lite") and version_numbers(server_version) >= (2, 3, 4)


def adds_vector_fields(server_version: str) -> bool:
    """Whether it can be given a vector field, null in all its rows: Milvus from 2.6.18, Lite never."""
    return not server_version.startswith("milvus_lite") and version_numbers(server_version) >= (2, 6, 18)


def drops_fields(server_version: str) -> bool:
    """Whether a field can be taken from a live collection: Milvus from 3.0, Lite never."""
    return not server_version.startswith("milvus_lite") and version_numbers(server_version) >= (3, 0)


def updates_fields(server_version: str) -> bool:
    """Whether some fields of a row can be replaced and the others left: Milvus from 2.6, Lite from 3.2."""
    return version_numbers(server_version) >= ((3, 2) if server_version.startswith("milvus_lite") else (2, 6))


def version_numbers(server_version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", server_version)[:3]))


def in_fitting_parts(call: Callable[[Sequence[T]], Any], items: Sequence[T]) -> list[Any]:
    """call(items), cut in halves as often as the message limit (64 MB by default) asks for."""
    try:
        return [call(items)]
    except (MilvusException, grpc.RpcError) as error:
        if len(items) < 2 or not is_too_large(error):
            raise
    middle = len(items) // 2
    return in_fitting_parts(call, items[:middle]) + in_fitting_parts(call, items[middle:])


def is_too_large(error: Exception) -> bool:
    """Whether a request failed because it, or its answer, passes the message limit."""
    return any(mark in _told(error).lower() for mark in _TOO_LARGE)


def _told(error: Exception) -> str:
    """What went wrong, in the server's words: pymilvus passes some of gRPC's errors on as they are."""
    words = error.details() if isinstance(error, grpc.RpcError) else getattr(error, "message", error)
    return redacted(str(words))
