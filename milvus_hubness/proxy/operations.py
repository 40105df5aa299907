"""The calls that the proxy rewrites, over the operations of a client. No I/O.

Each answers a request message with a response message.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from milvus_hubness.client.operations import Operations
from milvus_hubness.client.state_cache import CachedState
from milvus_hubness.client.steps import Operation
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy.messages import Overrides, Send, description_out, index_out, pairs_of, put_pair
from milvus_hubness.proxy.searching import hybrid_search, search, send_for_rows
from milvus_hubness.proxy.writing import delete, write


def query(operations: Operations, request: Any) -> Operation[Any]:
    """Answer a QueryRequest with a QueryResults, with rows in the user's form."""

    def call(cached: CachedState) -> Operation[Any]:
        if not cached.states:
            response = yield Send("Query", request)
            if not any(name.startswith("hubness_epoch") for name in response.output_fields):
                return response
            # These are augmented vectors: the collection was corrected after its state was last read.
            now = yield from operations.states.read_again(request.collection_name)
            return (yield from call(now)) if now.states else response
        return (yield from send_for_rows("Query", cached, deepcopy(request)))

    return operations.states.retrying(request.collection_name, None, call)


def describe(method: str, request: Any) -> Operation[Any]:
    """Answer DescribeCollection or BatchDescribeCollection with the collections that the user created."""
    response = yield Send(method, request)
    for description in response.responses if method.startswith("Batch") else [response]:
        description_out(description)
    return response


def describe_index(operations: Operations, method: str, request: Any) -> Operation[Any]:
    """Answer DescribeIndex or GetIndexStatistics with the user's metric."""
    response = yield Send(method, request)
    cached = yield from operations.states.cached_state(request.collection_name)
    index_out(cached, response.index_descriptions)
    return response


def create_index(operations: Operations, request: Any) -> Operation[Any]:
    """Answer a CreateIndexRequest with a Status.

    On corrected fields the index is for the augmented vectors. Raises InvalidParameter if the metric of a
    corrected field differs from the metric of its correction.
    """
    cached = yield from operations.states.cached_state(request.collection_name)
    state = cached.states.get(request.field_name)
    if state is not None and not state.codec.leaves_vectors:
        metric = pairs_of(request.extra_params).get("metric_type", state.metric).upper()
        if metric != state.metric:
            raise InvalidParameter(
                f"field {request.field_name!r} was corrected for {state.metric}: its index cannot take {metric}"
            )
        put_pair(request.extra_params, "metric_type", "IP")
    return (yield Send("CreateIndex", request))


def load(operations: Operations, method: str, request: Any) -> Operation[Any]:
    """Answer LoadCollection or LoadPartitions; load_fields need not name the hidden fields."""
    if request.load_fields:
        fields = yield from operations.catalog.fields_loaded(request.collection_name, list(request.load_fields))
        request.load_fields[:] = fields
    return (yield Send(method, request))


def _elsewhere(database: str, request: Any) -> str:
    """Return the database that a request names if it is not its own."""
    return database if database != request.db_name else ""


REWRITTEN: dict[str, Callable[[Operations, Any, Overrides], Operation[Any]]] = {
    "Search": search,
    "HybridSearch": hybrid_search,
    "Query": lambda on, request, _: query(on, request),
    "Insert": lambda on, request, _: write(on, "Insert", request),
    "Upsert": lambda on, request, _: write(on, "Upsert", request),
    "Delete": lambda on, request, _: delete(on, request),
    "DescribeCollection": lambda _, request, __: describe("DescribeCollection", request),
    "BatchDescribeCollection": lambda _, request, __: describe("BatchDescribeCollection", request),
    "DescribeIndex": lambda on, request, _: describe_index(on, "DescribeIndex", request),
    "GetIndexStatistics": lambda on, request, _: describe_index(on, "GetIndexStatistics", request),
    "CreateIndex": lambda on, request, _: create_index(on, request),
    "DropCollection": lambda on, request, _: on.catalog.drop_collection(
        request.collection_name, Send("DropCollection", request)
    ),
    "TruncateCollection": lambda on, request, _: on.catalog.truncate_collection(
        request.collection_name, Send("TruncateCollection", request)
    ),
    "DropPartition": lambda on, request, _: on.catalog.drop_partition(
        request.collection_name, Send("DropPartition", request)
    ),
    "RenameCollection": lambda on, request, _: on.catalog.rename_collection(
        request.oldName, _elsewhere(request.newDBName, request), Send("RenameCollection", request)
    ),
    "RestoreSnapshot": lambda on, request, _: on.catalog.restore_snapshot(
        request.collection_name, _elsewhere(request.target_db_name, request), Send("RestoreSnapshot", request)
    ),
    "LoadCollection": lambda on, request, _: load(on, "LoadCollection", request),
    "LoadPartitions": lambda on, request, _: load(on, "LoadPartitions", request),
}
"""The rewritten methods; all others pass through as bytes."""

OUTDATES = frozenset(
    {
        "CreateCollection",
        "DropCollection",
        "RenameCollection",
        "AlterCollection",
        "CreateAlias",
        "AlterAlias",
        "DropAlias",
        "DropDatabase",
    }
)
"""The methods after which a cached state may be outdated."""
