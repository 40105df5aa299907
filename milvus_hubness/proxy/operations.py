"""The calls that the proxy rewrites, as operations without I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milvus_hubness.client.state_cache import CachedState
from milvus_hubness.client.steps import Operation
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy.messages import ColumnReading, Overrides, Send, description_out, pairs_of, put_pair
from milvus_hubness.proxy.searching import WireSearching
from milvus_hubness.proxy.writing import WireWriting


class WireOperations(WireWriting, WireSearching):
    """All rewritten calls, over one state cache. Each answers a request message with a response message."""

    def query_wire(self, request: Any) -> Operation[Any]:
        """Answer a QueryRequest with a QueryResults, with rows in the user's form."""

        def call(cached: CachedState) -> Operation[Any]:
            if not cached.states:
                response = yield Send("Query", request)
                if not any(name.startswith("hubness_epoch") for name in response.output_fields):
                    return response
                # These are augmented vectors: the collection was corrected after its state was last read.
                now = yield from self.states.read_again(request.collection_name)
                return (yield from call(now)) if now.states else response
            sent = type(request)()
            sent.CopyFrom(request)
            return (yield from self._send_for_rows("Query", cached, sent))

        return self.states.retrying(request.collection_name, None, call)

    def describe_wire(self, method: str, request: Any) -> Operation[Any]:
        """Answer DescribeCollection or BatchDescribeCollection with the collections that the user created."""
        response = yield Send(method, request)
        for description in response.responses if method.startswith("Batch") else [response]:
            description_out(description)
        return response

    def index_wire(self, method: str, request: Any) -> Operation[Any]:
        """Answer DescribeIndex or GetIndexStatistics with the user's metric."""
        response = yield Send(method, request)
        cached = yield from self.states.cached_state(request.collection_name)
        ColumnReading(tuple(cached.states.values())).index_out(response.index_descriptions)
        return response

    def create_index_wire(self, request: Any) -> Operation[Any]:
        """Answer a CreateIndexRequest with a Status.

        On corrected fields the index is for the augmented vectors. Raises InvalidParameter if the metric of a
        corrected field differs from the metric of its correction.
        """
        cached = yield from self.states.cached_state(request.collection_name)
        state = cached.states.get(request.field_name)
        if state is not None and not state.codec.leaves_vectors:
            metric = pairs_of(request.extra_params).get("metric_type", state.metric).upper()
            if metric != state.metric:
                raise InvalidParameter(
                    f"field {request.field_name!r} was corrected for {state.metric}: "
                    f"its index cannot take {metric}"
                )
            put_pair(request.extra_params, "metric_type", "IP")
        return (yield Send("CreateIndex", request))

    def load_wire(self, method: str, request: Any) -> Operation[Any]:
        """Answer LoadCollection or LoadPartitions; load_fields need not name the hidden fields."""
        if request.load_fields:
            fields = yield from self.catalog.fields_loaded(request.collection_name, list(request.load_fields))
            request.load_fields[:] = fields
        return (yield Send(method, request))


def _elsewhere(database: str, request: Any) -> str:
    """Return the database that a request names if it is not its own."""
    return database if database != request.db_name else ""


REWRITTEN: dict[str, Callable[[WireOperations, Any, Overrides], Operation[Any]]] = {
    "Search": WireOperations.search_wire,
    "HybridSearch": WireOperations.hybrid_wire,
    "Query": lambda on, request, _: on.query_wire(request),
    "Insert": lambda on, request, _: on.write_wire("Insert", request),
    "Upsert": lambda on, request, _: on.write_wire("Upsert", request),
    "Delete": lambda on, request, _: on.delete_wire(request),
    "DescribeCollection": lambda on, request, _: on.describe_wire("DescribeCollection", request),
    "BatchDescribeCollection": lambda on, request, _: on.describe_wire("BatchDescribeCollection", request),
    "DescribeIndex": lambda on, request, _: on.index_wire("DescribeIndex", request),
    "GetIndexStatistics": lambda on, request, _: on.index_wire("GetIndexStatistics", request),
    "CreateIndex": lambda on, request, _: on.create_index_wire(request),
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
    "LoadCollection": lambda on, request, _: on.load_wire("LoadCollection", request),
    "LoadPartitions": lambda on, request, _: on.load_wire("LoadPartitions", request),
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
