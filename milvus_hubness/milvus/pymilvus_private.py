"""Private members of pymilvus that this package uses, each with the reason.

They stand in no other file. `PRIVATE_MEMBERS` lists them, and tests/milvus/test_pymilvus_private.py
says which of them an installed pymilvus lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from pymilvus import DataType, MilvusClient
from pymilvus.client import ts_utils
from pymilvus.client.iterator import QueryIterator, SearchIterator
from pymilvus.exceptions import ParamError

from milvus_hubness.errors import UnsupportedVersion
from milvus_hubness.milvus.filters import escaped, is_one_of


class PrivateMember(NamedTuple):
    """A member that pymilvus may change without notice."""

    owner: str
    """The class that has it, or in which pymilvus reads it, as module:class."""

    name: str


_GRPC_HANDLER = "pymilvus.client.grpc_handler:GrpcHandler"

PRIVATE_MEMBERS = (
    PrivateMember("pymilvus:MilvusClient", "_get_connection"),
    PrivateMember("pymilvus:AsyncMilvusClient", "_get_connection"),
    PrivateMember("pymilvus:MilvusClient", "_generate_call_context"),
    PrivateMember("pymilvus:AsyncMilvusClient", "_generate_call_context"),
    PrivateMember("pymilvus:MilvusClient", "_pack_pks_expr"),
    PrivateMember("pymilvus:AsyncMilvusClient", "_pack_pks_expr"),
    PrivateMember(_GRPC_HANDLER, "_invalidate_schema"),
    PrivateMember("pymilvus.client.async_grpc_handler:AsyncGrpcHandler", "_invalidate_schema"),
    PrivateMember(_GRPC_HANDLER, "_create_grpc_channel"),
    PrivateMember(_GRPC_HANDLER, "_grpc_options"),
    PrivateMember(_GRPC_HANDLER, "_stub"),
    PrivateMember(_GRPC_HANDLER, "_async"),
    PrivateMember(_GRPC_HANDLER, "_callback"),
    PrivateMember("pymilvus.client.prepare:Prepare", "_load_fields"),
    PrivateMember(_GRPC_HANDLER, "_original_idx"),
    PrivateMember("pymilvus.client.types:HybridExtraList", "_lazy_field_data"),
    PrivateMember("pymilvus.client.iterator:QueryIterator", "_next_id"),
    PrivateMember("pymilvus.client.iterator:QueryIterator", "_QueryIterator__setup_next_expr"),
    PrivateMember("pymilvus.client.iterator:SearchIterator", "_filtered_ids"),
    PrivateMember(
        "pymilvus.client.iterator:SearchIterator",
        "_SearchIterator__filtered_duplicated_result_expr",
    ),
)


# -- connections ----------------------------------------------------------------------------------


def connection_of(client: Any) -> Any:
    """Return the handler of a client's connection; of an AsyncMilvusClient, an awaitable of it.

    The client has no public member for it, and what the functions below need is on it alone.
    """
    return client._get_connection()


def stub_of(client: MilvusClient) -> Any:
    """Return the methods of the protocol, with a client's token.

    The client's own methods read the schema first and complete a request, for which they need
    further rights.
    """
    return connection_of(client)._stub


def database_of(client: Any) -> str:
    """Return the database that a client uses, "" for the default one; no public member has it."""
    return str(client._generate_call_context().get_db_name() or "")


def last_write_of(client: MilvusClient, collection: str) -> int:
    """Return Milvus's timestamp of the last write of this process to a collection; 0 without one.

    The client's methods leave it out of their answers, and keep it for their own searches.
    """
    address = connection_of(client).server_address
    return int(ts_utils.get_collection_ts(collection, address, database_of(client)))


def forget_schema(client: Any, connection: Any, collection: str) -> None:
    """Have a client read the schema of a collection again before its next write.

    pymilvus keeps schemas, and servers before 2.6 do not report that one has changed.
    """
    connection._invalidate_schema(collection, db_name=database_of(client))


def reason_of_failed_index(client: MilvusClient, collection: str, index: str) -> str:
    """Return why the server could not build an index.

    `MilvusClient.describe_index` returns the state of the index, and leaves out the reason.
    """
    context = client._generate_call_context()
    _, reason = connection_of(client).get_index_state(collection, index, context=context)
    return str(reason)


def open_channels_with(client: MilvusClient, open_channel: Callable[..., Any]) -> None:
    """Have a client open its later channels with this function.

    A channel can be passed to a new client, but pymilvus opens another one, of its own, after the
    server was unreachable.
    """
    connection_of(client)._create_grpc_channel = open_channel


def grpc_options_of(connection: Any) -> Mapping[str, Any]:
    """Return the options with which a connection was opened; no public member has them."""
    options: Mapping[str, Any] = connection._grpc_options
    return options


def reconnect_with(connection: Any, grpc_options: Mapping[str, Any]) -> None:
    """Open a connection again with other options.

    No public member changes them. A new client would not help where pymilvus shares the connection.
    """
    connection._grpc_options = dict(grpc_options)
    connection.reconnect()


# -- keys in filters ------------------------------------------------------------------------------

_WORD = re.compile(r"[\w.+-]*", re.ASCII)


class EscapedKeys:
    """A client that escapes keys in the filters of `get`, `delete` and `query(ids=...)`.

    pymilvus writes them as they are: a quote in a key ends the text, and the rest is a filter.
    """

    def _pack_pks_expr(self, schema_dict: Mapping[str, Any], pks: Sequence[Any]) -> str:
        key_field = next(field for field in schema_dict["fields"] if field.get("is_primary"))
        name = key_field["name"]
        texts = [str(key) for key in pks]
        if key_field["type"] == DataType.VARCHAR:
            return is_one_of(name, texts)

        if odd := next((text for text in texts if not _WORD.fullmatch(text)), None):
            raise ParamError(
                message=f"key {odd!r} of field {name!r} is not a whole number: correct it"
            )

        return f"{name} in [{', '.join(texts)}]"


if not hasattr(MilvusClient, "_pack_pks_expr"):
    # The method above would be called by nobody, and keys would go out as they are.
    raise UnsupportedVersion(
        f"pymilvus {version('pymilvus')} cannot escape keys: pip install 'pymilvus>=3.0.1,<4'"
    )


def with_escaped_keys(iterator: Any) -> Any:
    """Have an iterator escape the keys in the filter of its next request, and return it.

    An iterator writes the keys of the last page into the filter of the
    next one, as they are. It has no public place for another filter,
    so its method that writes the filter runs with escaped keys.
    """
    if isinstance(iterator, QueryIterator):
        _escape_last_key(iterator)
    elif isinstance(iterator, SearchIterator):
        _escape_keys_of_page(iterator)
    return iterator


def _escape_last_key(iterator: Any) -> None:
    filter_of_next_page = iterator._QueryIterator__setup_next_expr

    def escaped_filter(*args: Any) -> Any:
        last_key = iterator._next_id
        iterator._next_id = _escaped_in(last_key)
        try:
            return filter_of_next_page(*args)
        finally:
            iterator._next_id = last_key

    iterator._QueryIterator__setup_next_expr = escaped_filter


def _escape_keys_of_page(iterator: Any) -> None:
    filter_of_next_page = iterator._SearchIterator__filtered_duplicated_result_expr

    def escaped_filter(*args: Any) -> Any:
        keys_of_page = iterator._filtered_ids
        iterator._filtered_ids = _escaped_in(keys_of_page)
        try:
            return filter_of_next_page(*args)
        finally:
            iterator._filtered_ids = keys_of_page

    iterator._SearchIterator__filtered_duplicated_result_expr = escaped_filter


def _escaped_in(keys: Any) -> Any:
    """Return the keys, or lists of keys, with the texts escaped."""
    if isinstance(keys, list):
        return [_escaped_in(key) for key in keys]
    return escaped(keys) if isinstance(keys, str) else keys


def starts_at_the_first_key(iterator: Any) -> bool:
    """Return whether a query iterator has no key yet after which its next page starts."""
    return bool(iterator._next_id is None)


def start_after(iterator: Any, key: Any) -> None:
    """Have the next page of a query iterator start after this key.

    pymilvus can skip no more rows than a page holds, and has no argument for the key.
    """
    iterator._next_id = key


# -- rows that were not read yet ------------------------------------------------------------------

ORIGINAL_ROW = "_original_idx"
"""Key of a row whose place in the columns of the answer is another than its place in the list."""


def unread_columns(rows: Any) -> Any:
    """Return the columns from which rows of a query take their vectors when they are read.

    None for rows without them. Vectors are decoded there at once, instead of row by row.
    """
    return getattr(rows, "_lazy_field_data", None)


# -- arguments that no signature names ------------------------------------------------------------

IN_BACKGROUND = ("_async", "_callback")
"""Arguments with which pymilvus answers later, with rows that nobody would convert: refused."""

WITHOUT_WAITING = {"_async": True}
"""Argument with which `load_collection` returns at once, so that this package can wait itself, as
long as the load goes forward: pymilvus waits for a fixed time.
"""

LOADED_FIELDS = ("load_fields", "_load_fields")
"""Arguments that name the fields to load. pymilvus reads the second name as the first."""
