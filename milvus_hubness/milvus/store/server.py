"""A Milvus server: connections, errors, filters, request sizes and index types.

Source: milvus.io/docs, "Floating Vector Indexes" and "GPU-enabled Indexes"; where these pages
differ from Knowhere's own checks (nbits), the checks count.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from inspect import getattr_static, iscoroutinefunction, isfunction
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import ErrorCode, MilvusException
from pymilvus.grpc_gen import common_pb2

from milvus_hubness.basics.files.certificates import HTTPS, Certificates
from milvus_hubness.basics.requirements import naming_extras, unsupported_lite, unsupported_milvus
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
from milvus_hubness.milvus.pymilvus_private import EscapedKeys
from milvus_hubness.milvus.store.keepalive import with_keepalive

if TYPE_CHECKING:
    from milvus_hubness.jobs.store.records import VectorField

S = TypeVar("S")
T = TypeVar("T")

_NOT_FOUND = 100
_NOT_LOADED = 101
"""Milvus's codes of errors, for the functions below: nothing else compares codes."""

FEW_KEYS = 4_096
"""Keys that are read at once, without pages."""

DUPLICATES_PER_KEY = 4
"""Milvus 2.3 counts duplicates of a key towards the limit, and returns fewer rows."""

KEYS_PER_REQUEST = 2_000
"""Keys of rows that one request deletes."""

ROWS_PER_PAGE = 8_000
"""Most rows that one request reads. Milvus goes through all keys for each page, so that a million rows
take twice as long in pages of 2,000.
"""

_TOO_LARGE = (
    "larger than max",
    "resource_exhausted",
    "exceeds the maximum",
    "message size",
    "too large",
    "maxoutputsize",
)
"""What servers and gRPC write of a message that is too large."""

_TOO_MANY_QUERIES = re.compile(r"\bnq\b.* should be in range", re.DOTALL)


class PlainClient(EscapedKeys, MilvusClient):  # type: ignore[misc]
    """MilvusClient with escaped keys."""


def connect(
    uri: str,
    token: str = "",
    *,
    timeout: float = 10.0,
    create: bool = False,
    **options: Any,
) -> MilvusClient:
    """Connect a MilvusClient with further `options`.

    create: make the database of a Milvus Lite path that does not exist yet, as MilvusClient does.
    Without it a mistyped path is an error, and not an empty database.

    Raises InvalidParameter for an invalid address, MissingExtra without Milvus Lite, and
    ServerUnavailable, which names no user, password and token.
    """
    _validate_address(uri)
    if uri.endswith(".db"):
        with naming_extras():
            import_module("milvus_lite")
    expect_milvus(uri)
    if uri.endswith(".db") and not create:
        _expect_database(uri)

    options = with_keepalive(uri, options)
    # Milvus Lite closes connections that were idle for
    # half a minute; pymilvus connects without retrying.
    for pause in (0.0,) if "://" in uri else (0.0, 0.5, 0.5):
        time.sleep(pause)
        try:
            return PlainClient(uri, token=token, timeout=timeout, **options)
        except MilvusException as error:
            message = _unreachable(uri, error, options)

    # This is outside `except`: pymilvus's error would
    # be its context and may contain the whole address.
    raise ServerUnavailable(redacted(message, {token, *secrets_in(uri)}))


def tls_options(uri: str, certificates: Certificates) -> dict[str, Any]:
    """Return the options of a MilvusClient that connect it with these certificates.

    Raises InvalidParameter for an address without TLS, and for what pymilvus cannot do.
    """
    certificates.expect_https(uri)
    if not certificates:
        return {}

    # pymilvus would share a connection that was made with other certificates, or without TLS.
    options: dict[str, Any] = {"dedicated": True}
    if certificates.cert is None or certificates.key is None:
        # So pymilvus calls the authorities of a client that has no certificate.
        return {**options, "server_pem_path": certificates.ca}

    if certificates.ca is None:
        raise InvalidParameter(
            "pymilvus takes a client's certificate only with the authorities of the server: pass "
            "their file in $MILVUS_HUBNESS_CA too, such as /etc/ssl/certs/ca-certificates.crt for the "
            "system's"
        )

    return {
        **options,
        "ca_pem_path": certificates.ca,
        "client_pem_path": certificates.cert,
        "client_key_path": certificates.key,
    }


def plain_client_of(client: Any) -> MilvusClient:
    """Return a client that shows collections as they are stored: a HubnessClient has one.

    Raises InvalidInput.
    """
    if isinstance(client, str | os.PathLike):
        address = redacted(repr(str(client)))
        raise InvalidInput(
            f"MilvusStore needs a client, not the address {address}: pass "
            f"MilvusStore(connect({address}))"
        )

    if hasattr(type(client), "plain_client"):
        return cast(MilvusClient, client.plain_client())

    get_version = getattr(client, "get_server_version", None)
    if get_version is None or iscoroutinefunction(get_version):
        raise InvalidInput(
            f"MilvusStore needs a MilvusClient, not {type(client).__name__}: pass "
            "MilvusStore(connect(uri))"
        )

    return cast(MilvusClient, client)


def expect_milvus(uri: str) -> None:
    """Raise InvalidParameter for the address of another database, for one without http:// and for one of
    several databases, UnsupportedVersion for a path of Milvus Lite if the installed one is too old or the
    file is one of Milvus Lite 2, and ServerUnavailable if there is another file.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator and not uri.endswith(".db"):
        _expect_no_host(uri)
    if separator and "+" in scheme:
        raise InvalidParameter(
            f"{redacted(uri, secrets_in(uri))} is no address of Milvus, which this needs: write "
            "http://HOST:PORT, or the path of a .db file"
        )
    # pymilvus would take the first part, and leave the others out.
    if separator and not uri.endswith(".db") and "/" in urlsplit(uri).path.strip("/"):
        raise InvalidParameter(
            redacted(f"the address {uri} ends with more than a database", secrets_in(uri))
            + ": write http://HOST:PORT/DATABASE"
        )
    if uri.endswith(".db"):
        if fault := unsupported_lite():
            raise UnsupportedVersion(fault)
        _expect_no_file(uri)


_HOST = re.compile(r"(?:([a-z]+)\+)?((?:[^/@\s]*@)?[\w.-]+|\[[0-9a-fA-F:]+\])(:\d+)?")
"""What may be the address of a server without its scheme: a database of a package, a host, a port."""

MILVUS_PORT = ":19530"


def _expect_no_host(address: str) -> None:
    """Raise InvalidParameter for an address without its scheme, with the one that may be meant."""
    matched = _HOST.fullmatch(address)
    if matched is None or os.path.exists(address):
        return

    package, host, port = matched.groups()
    begin = f"{package}+http://" if package else "http://"
    meant = f"{begin}{host}{port or ('' if package else MILVUS_PORT)}"
    raise InvalidParameter(
        f"the address {redacted(address)} has no http:// or https://: write {redacted(meant)}, or a "
        "path that ends with .db for Milvus Lite"
    )


def supported_version(client: MilvusClient) -> str:
    """Return the version of the client's server. Raises UnsupportedVersion."""
    try:
        server_version = str(client.get_server_version())
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNIMPLEMENTED:
            raise

        raise UnsupportedVersion(
            unsupported_lite()
            or "the server does not report its version: upgrade it to Milvus 2.3 or newer"
        ) from error

    if fault := unsupported_milvus(server_version):
        raise UnsupportedVersion(fault)

    return server_version


def _validate_address(uri: str) -> None:
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


_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def validate_name(name: str) -> None:
    """Raise InvalidParameter for a name that no collection or alias of a server can have.

    Milvus Lite takes any: its data may move to a server.
    """
    # A client that names no collection loads no pydantic.
    from milvus_hubness.basics.bounds import LONGEST_NAME, shown

    if _NAME.fullmatch(name) is None or len(name) > LONGEST_NAME:
        raise InvalidParameter(
            f"{shown(name)!r} is no name for a collection or alias: choose one of letters, digits and "
            f"underscores, with no digit at the beginning, and at most {LONGEST_NAME} of them"
        )


SQLITE = b"SQLite format 3\0"
"""The first bytes of a database of Milvus Lite 2."""


def _expect_no_file(path: str) -> None:
    """Raise UnsupportedVersion, or ServerUnavailable, for a file where Milvus Lite has a folder."""
    if not os.path.exists(path) or os.path.isdir(path):
        return
    begin = b""
    if os.path.isfile(path):
        with suppress(OSError), open(path, "rb") as file:
            begin = file.read(len(SQLITE))
    if begin == SQLITE:
        raise UnsupportedVersion(
            f"{path} is a file of Milvus Lite 2, and Milvus Lite 3 has its database in a folder: "
            "write its collections out with Milvus Lite 2 (milvus-lite dump), and insert them into "
            "a new one"
        )
    raise ServerUnavailable(
        f"{path} is a file, and a database of Milvus Lite is a folder: correct the path"
    )


def _expect_database(path: str) -> None:
    """Raise ServerUnavailable if there is no Milvus Lite database at this path."""
    is_empty_folder = os.path.isdir(path) and not os.listdir(path)
    if os.path.exists(path) and not is_empty_folder:
        return

    raise ServerUnavailable(
        f"no Milvus Lite database at {path}: correct the path, or create the database first, "
        "with MilvusClient, HubnessClient or connect(..., create=True)"
    )


_CAUSES: Mapping[str, str] = {
    "CERTIFICATE_VERIFY_FAILED.*expired": "its certificate has expired: renew it on the server",
    "CERTIFICATE_VERIFY_FAILED": (
        "no trusted authority has signed its certificate: name the file of its authority "
        "($MILVUS_HUBNESS_CA)"
    ),
    "Hostname Verification": (
        "its certificate is of another host: use a name that is in the certificate"
    ),
    "WRONG_VERSION_NUMBER": "it does not use TLS: write http://",
    "[Cc]onnection refused": "connection refused: check host and port, and whether it runs",
    "errors resolving|[Nn]ame resolution": "no such host: correct the name",
}
"""The causes for which no connection comes about, by what gRPC's text about it has."""

_CLOSED = re.compile("Socket closed|[Cc]onnection reset|Broken pipe|ALERT|End of TCP stream")
"""How gRPC's text reads if the server has ended the connection before any request."""


def _unreachable(uri: str, error: MilvusException, options: Mapping[str, Any]) -> str:
    """Return a message that names the cause, with the secrets of the address.

    options: of the MilvusClient. pymilvus's own text is the same for all causes.
    """
    if "://" in uri:
        answer = error.__cause__
        if not isinstance(answer, grpc.RpcError):
            return f"no Milvus answers at {uri}: {error.message}"
        if answer.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return (
                f"Milvus at {uri} refuses the token: give USER:PASSWORD or an API key in "
                f"$MILVUS_HUBNESS_TOKEN ({answer.details()})"
            )
        return f"no Milvus answers at {uri}: {_cause(uri, str(answer.details()), options)}"

    hint = "another process may hold it" if os.path.exists(uri) else "its folder must exist"
    if not uri.endswith(".db"):
        hint = "its name must end with .db; a server's address begins with http://"
    return f"cannot open the Milvus Lite file {uri} ({hint}): {error.message}"


def _cause(uri: str, details: str, options: Mapping[str, Any]) -> str:
    """Return why no connection came about, and the remedy; gRPC's text if that is all we know."""
    for pattern, cause in _CAUSES.items():
        if re.search(pattern, details):
            return cause

    if not _CLOSED.search(details):
        return details
    if not uri.startswith(HTTPS):
        return "it ends the connection: if it uses TLS, write https://"
    if certificate := options.get("client_pem_path"):
        return (
            f"it ends the connection: it may want another certificate than {certificate} "
            "($MILVUS_HUBNESS_CERT)"
        )
    return (
        "it ends the connection: it may want a client's certificate ($MILVUS_HUBNESS_CERT and _KEY)"
    )


PAUSES = (0.01, 0.03, 0.1, 0.3, 1.0, *(3.0 for _ in range(70)))
"""Seconds between two attempts at a write; these are pymilvus's own."""
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


def may_arrive(error: Exception) -> bool:
    """Whether a request that failed with this error may reach the server later."""
    code = error.code() if isinstance(error, grpc.RpcError) else getattr(error, "code", None)
    return isinstance(code, grpc.StatusCode) and code not in _REFUSALS


def is_rate_limited(error: Exception) -> bool:
    return any(
        isinstance(cause, MilvusException)
        and (cause.code == ErrorCode.RATE_LIMIT or cause.compatible_code == common_pb2.RateLimit)
        for cause in (error, error.__cause__)
    )


def is_missing(error: Exception) -> bool:
    """Whether a server refused a request because it has no such collection or alias.

    A proxy that describes collections from a cache, as since 2.6, does so with the older code only.
    """
    return isinstance(error, MilvusException) and (
        error.code == _NOT_FOUND or error.compatible_code == common_pb2.CollectionNotExists
    )


def is_not_loaded(error: Exception) -> bool:
    """Whether a server refused a request because the collection is not loaded."""
    return isinstance(error, MilvusException) and error.code == _NOT_LOADED


@contextmanager
def translated(collection: str) -> Iterator[None]:
    """Convert pymilvus's errors to errors of this package about `collection`."""
    try:
        yield
    except grpc.RpcError as error:
        raise StoreError(f"a request on {collection!r} failed: {message_of(error)}") from error
    except MilvusException as error:
        if is_missing(error):
            raise CollectionNotFound(f"no collection or alias {collection!r}") from error
        if "connect" in error.message.lower() or "unavailable" in error.message.lower():
            raise ServerUnavailable(
                f"the server stopped answering about {collection!r}: {message_of(error)}"
            ) from error

        raise StoreError(
            f"Milvus refused a request on {collection!r}: {message_of(error)}"
        ) from error
    except JSONDecodeError as error:
        # Milvus Lite returns the text of a JSON field without its quotes.
        raise StoreError(
            f"a JSON field of {collection!r} has a text that Milvus Lite returns as invalid JSON, "
            "so that no client can read the row: keep the text in an object, or move the "
            "collection to a Milvus server"
        ) from error


def translating(store: type[S]) -> type[S]:
    """Have the public methods of a store convert
    pymilvus's errors to errors about their first argument.
    """
    for name in dir(store):
        if not name.startswith("_") and isfunction(method := getattr_static(store, name)):
            setattr(store, name, _translating(method))
    return store


def _translating(method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> T:
        # A name, a description of a collection, or a log, which has the name of its first one.
        subject = next(iter((*args, *options.values())), "")
        name = getattr(subject, "collection", getattr(subject, "name", subject))
        with translated(name):
            return method(self, *args, **options)

    return call


Feature = Literal[
    "load fields",
    "the right to list aliases",
]
NEVER = (99,)
"""A version that no server has."""

NEWEST = NEVER
"""The version of a server whose version is not a number."""

_SINCE: dict[Feature, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "load fields": ((2, 5), NEVER),
    "the right to list aliases": ((2, 4), (0,)),
}
"""The first versions of Milvus and of Milvus Lite with a feature."""


def is_lite(server_version: str) -> bool:
    return server_version.startswith("milvus_lite")


def supports(server_version: str, feature: Feature) -> bool:
    return version_numbers(server_version) >= _SINCE[feature][is_lite(server_version)]


def version_numbers(server_version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", server_version)[:3]))


def in_fitting_parts(call: Callable[[Sequence[T]], Any], items: Sequence[T]) -> list[Any]:
    """Return the results of `call` on parts of `items`
    that fit the message limit (64 MB by default).
    """
    try:
        return [call(items)]
    except (MilvusException, grpc.RpcError) as error:
        if len(items) < 2 or not is_too_large(error):
            raise

    middle = len(items) // 2
    return in_fitting_parts(call, items[:middle]) + in_fitting_parts(call, items[middle:])


def in_parts(items: Sequence[T], size: int = KEYS_PER_REQUEST) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def is_too_large(error: Exception) -> bool:
    """Whether a request failed because it, or its answer, exceeds the message limit."""
    return any(mark in message_of(error).lower() for mark in _TOO_LARGE)


def exceeds_limit(error: Exception) -> bool:
    """Whether a request failed as it, or its answer, has too many bytes or queries, and smaller
    ones may succeed.

    Nothing of such a request is carried out: the server refuses it before it reads it.
    """
    return not is_rate_limited(error) and (
        is_too_large(error) or _TOO_MANY_QUERIES.search(message_of(error)) is not None
    )


def message_of(error: Exception) -> str:
    """Return the server's message; pymilvus passes some errors of gRPC on unchanged."""
    words = (
        error.details() if isinstance(error, grpc.RpcError) else getattr(error, "message", error)
    )
    return redacted(str(words))


Rule = range | tuple[str, ...]
"""The values of an index parameter: a range of integers, also as text, or words in any case."""


@dataclass(frozen=True)
class IndexType:
    """An index type."""

    parameters: Mapping[str, Rule] = field(default_factory=dict)
    """By name."""

    since: tuple[int, ...] = (2, 3)
    """The first version of Milvus with it."""

    on_lite: bool = False
    """Whether Milvus Lite has it."""


BOOL = ("TRUE", "FALSE")
REFINE: dict[str, Rule] = {
    "refine": BOOL,
    "refine_type": ("SQ4U", "SQ6", "SQ8", "BF16", "FP16", "FP32", "FLAT"),
}
CELLS: dict[str, Rule] = {"nlist": range(1, 65_537)}
GRAPH: dict[str, Rule] = {"M": range(2, 2_049), "efConstruction": range(1, 2**31)}
PRODUCT: dict[str, Rule] = {"m": range(1, 65_537), "nbits": range(1, 25)}
CACHED: dict[str, Rule] = {"cache_dataset_on_device": BOOL}
DEFAULT_SINCE = dict.fromkeys(("nlist", "M", "efConstruction"), (2, 4))
"""The versions from which Milvus has a default for a parameter; m of IVF_PQ never has one."""

INDEX_TYPES = {
    "AUTOINDEX": IndexType(on_lite=True),
    "FLAT": IndexType(on_lite=True),
    "IVF_FLAT": IndexType(CELLS, on_lite=True),
    "IVF_SQ8": IndexType(CELLS, on_lite=True),
    "IVF_PQ": IndexType({**CELLS, **PRODUCT, **REFINE}),
    "IVF_RABITQ": IndexType({**CELLS, **REFINE}, since=(2, 6)),
    "SCANN": IndexType({**CELLS, "with_raw_data": BOOL}),
    "HNSW": IndexType(GRAPH, on_lite=True),
    "HNSW_SQ": IndexType(
        {**GRAPH, "sq_type": ("SQ4U", "SQ6", "SQ8", "BF16", "FP16"), **REFINE},
        since=(2, 5),
        on_lite=True,
    ),
    "HNSW_PQ": IndexType({**GRAPH, **PRODUCT, **REFINE}, since=(2, 5)),
    "HNSW_PRQ": IndexType({**GRAPH, **PRODUCT, "nrq": range(1, 17), **REFINE}, since=(2, 5)),
    "DISKANN": IndexType({"max_degree": range(1, 2_049), "search_list_size": range(1, 65_537)}),
    "GPU_CAGRA": IndexType(
        {
            "intermediate_graph_degree": range(1, 2**31),
            "graph_degree": range(1, 2**31),
            "build_algo": ("IVF_PQ", "NN_DESCENT"),
            "adapt_for_cpu": BOOL,
            **CACHED,
        },
        since=(2, 4),
    ),
    "GPU_IVF_FLAT": IndexType({**CELLS, **CACHED}),
    "GPU_IVF_PQ": IndexType({**CELLS, **PRODUCT, **CACHED}),
    "GPU_BRUTE_FORCE": IndexType(since=(2, 4)),
}


def _accepts(rule: Rule, value: Any) -> bool:
    text = str(value)
    if isinstance(rule, range):
        return text.isascii() and text.isdecimal() and int(text) in rule
    return text.upper() in rule


def _described(rule: Rule) -> str:
    if isinstance(rule, range):
        return f"a whole number from {rule.start:,} to {rule.stop - 1:,}"
    return f"one of {', '.join(rule)}"


def _validate_index_parameter(index_type: str, name: str, value: Any) -> None:
    """Raise InvalidParameter unless indexes of this type take this value."""
    parameters = INDEX_TYPES[index_type].parameters
    # Every index can be memory-mapped.
    rule = BOOL if name == "mmap.enabled" else parameters.get(name)
    if rule is None:
        names = ", ".join(parameters) or "none"
        raise InvalidParameter(
            f"index type {index_type} has no parameter {name!r}, it has: {names}"
        )

    if not _accepts(rule, value):
        raise InvalidParameter(f"{name} of {index_type} must be {_described(rule)}, not {value!r}")


def validate_index(planned: VectorField, source: VectorField, server_version: str) -> None:
    """Raise InvalidParameter if a server of this version does not build the planned index.

    Settings of the source's index are valid: its server
    has built it, and may be newer than this table.
    """
    index_type = planned.index_type
    is_same_type = index_type == source.index_type
    if is_same_type and index_type not in INDEX_TYPES:
        return

    version = version_numbers(server_version) or NEWEST
    lite = is_lite(server_version)
    built = [
        name
        for name, index in INDEX_TYPES.items()
        if (index.on_lite if lite else index.since <= version)
    ]
    if not is_same_type and index_type not in built:
        raise InvalidParameter(
            f"index type {index_type!r} is unknown to this server ({server_version}): use one of "
            f"{', '.join(built)}, or build that index on the source"
        )

    parameters = INDEX_TYPES[index_type].parameters
    for name, value in planned.index_params.items():
        if is_same_type and str(source.index_params.get(name)) == str(value):
            continue

        _validate_index_parameter(index_type, name, value)

    # Older Milvus servers lack some defaults; the source's index was built with what it needs.
    if is_same_type or lite:
        return

    for name, rule in parameters.items():
        since = NEWEST if (index_type, name) == ("IVF_PQ", "m") else DEFAULT_SINCE.get(name, (0,))
        if version < since and name not in planned.index_params:
            raise InvalidParameter(
                f"index type {index_type} needs {name} on this server ({server_version}): give "
                f"{_described(rule)} with --index-param {name}=…"
            )
