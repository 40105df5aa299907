"""Rights of a user, tried by requests without effect: servers look at rights before anything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness.jobs.migration.rights import Right
from milvus_hubness.milvus.pymilvus_private import database_of, stub_of
from milvus_hubness.milvus.store.server import message_of

NO_PARTITION = "hubness_no_such_partition"
"""A partition that no collection has: a request in it changes and finds nothing."""

_REFUSED = "permission deny"
"""In the message of a server that refuses a request for want of a right."""

SECONDS = 30
"""Timeout of a request."""

_IN_NO_PARTITION = {"partition_name": NO_PARTITION}
_IN_NO_PARTITIONS = {"partition_names": [NO_PARTITION]}
_REQUESTS: dict[Right, tuple[str, dict[str, Any]]] = {
    "Search": ("Search", _IN_NO_PARTITIONS),
    "Query": ("Query", _IN_NO_PARTITIONS),
    "Insert": ("Insert", _IN_NO_PARTITION),
    "Upsert": ("Upsert", _IN_NO_PARTITION),
    "Delete": ("Delete", _IN_NO_PARTITION),
    "GetLoadState": ("GetLoadState", _IN_NO_PARTITIONS),
    "IndexDetail": ("DescribeIndex", {}),
    "Load": ("LoadPartitions", _IN_NO_PARTITIONS),
    "CreateIndex": ("CreateIndex", {}),
    "CreatePartition": ("CreatePartition", {}),
    "CreateCollection": ("CreateCollection", {}),
    "CreateAlias": ("CreateAlias", {}),
    "GetFlushState": ("GetFlushState", {}),
    "Flush": ("Flush", {}),
}
"""For each right a request that needs it, and its fields: without rows, a filter, a vector, a schema, or
the name of what would be made or dropped."""


def is_denied(error: Exception) -> bool:
    """Whether the server refused a request because the user lacks a right."""
    code = error.code() if isinstance(error, grpc.RpcError) else None
    return code == grpc.StatusCode.PERMISSION_DENIED or _REFUSED in message_of(error)


def denied(client: MilvusClient, collection: str, rights: Iterable[Right]) -> list[Right]:
    """Return those of the rights on a collection that the user of a client lacks.

    The collection may be missing. Raises grpc.RpcError if the server does not answer.
    """
    return [right for right in rights if _is_lacking(client, collection, right)]


def _is_lacking(client: MilvusClient, collection: str, right: Right) -> bool:
    method, fields = _REQUESTS[right]
    name: dict[str, Any] = {"collection_name": collection}
    if method == "Flush":
        name = {"collection_names": [collection]}
    request = getattr(milvus_pb2, f"{method}Request")(db_name=database_of(client), **name, **fields)
    try:
        answer = getattr(stub_of(client), method)(request, timeout=SECONDS)
    except grpc.RpcError as error:
        if is_denied(error):
            return True
        # The request is incomplete, and some servers say so in this way.
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        return False
    # Some requests are answered by a status alone.
    status = getattr(answer, "status", answer)
    return is_denied(MilvusException(message=status.reason))
