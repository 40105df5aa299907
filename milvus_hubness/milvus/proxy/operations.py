"""The calls that the proxy rewrites: each answers a
request with a response, over a client's operations.

No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.milvus.client.catalog import aliases_out, other_database
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.state_cache import CachedState
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.proxy.messages import (
    METRIC,
    Send,
    addressed,
    description_out,
    index_out,
    pairs_of,
    put_pair,
)
from milvus_hubness.milvus.proxy.searching import hybrid_search, search, send_for_rows
from milvus_hubness.milvus.proxy.writing import delete, write


def query(operations: Operations, request: Any) -> Operation[Any]:
    """Answer a QueryRequest with a QueryResults or its bytes, with rows in the user's form."""

    def call(cached: CachedState) -> Operation[Any]:
        if not cached.states:
            response, content = yield Send(addressed(request, cached), with_bytes=True)
            now = yield from operations.states.corrected_since(
                request.collection_name,
                cached,
                None,
                response.fields_data,
                response.output_fields,
            )
            return content if now is None else (yield from call(now))

        return (yield from send_for_rows(cached, deepcopy(request)))

    return operations.states.retrying(request.collection_name, None, call)


def describe(operations: Operations, request: Any) -> Operation[Any]:
    """Answer DescribeCollection or BatchDescribeCollection
    with the collections that the user created.
    """
    response = yield Send(request)
    for description in getattr(response, "responses", [response]):
        description_out(description)
    return response


def list_aliases(operations: Operations, request: Any) -> Operation[Any]:
    """Answer ListAliases with the aliases that the user created."""
    response = yield Send(request)
    response.aliases[:] = aliases_out(response.aliases)
    return response


def describe_index(operations: Operations, request: Any) -> Operation[Any]:
    """Answer DescribeIndex or GetIndexStatistics with the user's metric."""
    response = yield Send(request)
    cached = yield from operations.states.cached_state(request.collection_name)
    index_out(cached, response.index_descriptions)
    return response


def create_index(operations: Operations, request: Any) -> Operation[Any]:
    """Create an index, of the augmented vectors if the field is corrected.

    Raises InvalidParameter if the metric of a corrected
    field differs from the metric of its correction.
    """
    cached = yield from operations.states.cached_state(request.collection_name)
    state = cached.states.get(request.field_name)
    requested = pairs_of(request.extra_params).get(METRIC)
    if state is not None and (metric := state.index_metric(requested)):
        put_pair(request.extra_params, METRIC, metric)
    return (yield Send(request))


def load(operations: Operations, request: Any) -> Operation[Any]:
    """Answer LoadCollection or LoadPartitions; load_fields need not name the hidden fields."""
    if request.load_fields:
        fields = yield from operations.catalog.fields_loaded(
            request.collection_name, list(request.load_fields)
        )
        request.load_fields[:] = fields
    return (yield Send(request))


def rename(operations: Operations, request: Any) -> Operation[Any]:
    database = other_database(request.newDBName, request.db_name)
    return operations.catalog.rename_collection(
        request.oldName, request.newName, database, Send(request)
    )


def restore(operations: Operations, request: Any) -> Operation[Any]:
    database = other_database(request.target_db_name, request.db_name)
    return operations.catalog.restore_snapshot(
        request.collection_name, request.target_collection_name, database, Send(request)
    )


REWRITTEN: dict[str, Callable[[Operations, Any], Operation[Any]]] = {
    "Query": query,
    "Insert": write,
    "Upsert": write,
    "Delete": delete,
    "DescribeCollection": describe,
    "BatchDescribeCollection": describe,
    "ListAliases": list_aliases,
    "DescribeIndex": describe_index,
    "GetIndexStatistics": describe_index,
    "CreateIndex": create_index,
    "DropCollection": lambda on, request: on.catalog.drop_collection(
        request.collection_name, Send(request)
    ),
    "TruncateCollection": lambda on, request: on.catalog.truncate_collection(
        request.collection_name, Send(request)
    ),
    "DropPartition": lambda on, request: on.catalog.drop_partition(
        request.collection_name, Send(request)
    ),
    "RenameCollection": rename,
    "RestoreSnapshot": restore,
    "LoadCollection": load,
    "LoadPartitions": load,
}
"""The rewritten methods but searches; all others pass through as bytes."""

SEARCHES: dict[str, Callable[[Operations, Any, Overrides], Operation[Any]]] = {
    "Search": search,
    "HybridSearch": hybrid_search,
}

OUTDATES = re.compile("(Create|Drop|Rename|Alter)(Collection|Alias|Database)")
"""The methods after which a cached state may be outdated."""
