"""The calls that the proxy rewrites, step by step. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness.client.state_cache import CachedState
from milvus_hubness.client.steps import Operation
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy.messages import ColumnReading, Overrides, Send, description_out, pairs_of, put_pair
from milvus_hubness.proxy.searching import WireHybrid
from milvus_hubness.proxy.writing import WireWriting

WireOperation = Callable[["WireOperations", Any, Overrides], Operation[Any]]


class WireOperations(WireWriting, WireHybrid):
    """All of it, over one memory."""

    def query_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A QueryResults for a QueryRequest, its rows as the user knows them."""

        def call(cached: CachedState) -> Operation[Any]:
            if not cached.states:
                response = yield Send("Query", request)
                if not any(name.startswith("hubness_epoch") for name in response.output_fields):
                    return response
                # The augmented form: the collection was corrected after it was last asked.
                self.forget(request.collection_name)
                now = yield from self.cached_state(request.collection_name)
                return (yield from call(now)) if now.states else response
            fields = cached.reading.fields(list(request.output_fields))
            sent = milvus_pb2.QueryRequest()
            sent.CopyFrom(request)
            sent.output_fields[:] = fields.requested or []
            response = yield Send("Query", sent)
            ColumnReading(tuple(cached.states.values())).columns_out(response, fields)
            return response

        return self._as_it_is(request.collection_name, None, call)

    def describe_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A DescribeCollectionResponse, of the collection as the user made it."""
        response = yield Send("DescribeCollection", request)
        description_out(response)
        return response

    def describe_batch_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A BatchDescribeCollectionResponse likewise."""
        response = yield Send("BatchDescribeCollection", request)
        for each in response.responses:
            description_out(each)
        return response

    def describe_index_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A DescribeIndexResponse with the user's metric."""
        response = yield Send("DescribeIndex", request)
        cached = yield from self.cached_state(request.collection_name)
        ColumnReading(tuple(cached.states.values())).index_out(response.index_descriptions)
        return response

    def index_statistics_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A GetIndexStatisticsResponse with the user's metric."""
        response = yield Send("GetIndexStatistics", request)
        cached = yield from self.cached_state(request.collection_name)
        ColumnReading(tuple(cached.states.values())).index_out(response.index_descriptions)
        return response

    def create_index_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """The Status of a CreateIndexRequest, on corrected fields for the metric that serves them. Raises
        InvalidParameter for another metric than the one that a field was corrected for."""
        cached = yield from self.cached_state(request.collection_name)
        state = cached.states.get(request.field_name)
        if state is not None and not state.leaves_vectors:
            asked = pairs_of(request.extra_params).get("metric_type", state.metric).upper()
            if asked != state.metric:
                raise InvalidParameter(
                    f"field {request.field_name!r} was corrected for {state.metric}: "
                    f"its index cannot take {asked}"
                )
            put_pair(request.extra_params, "metric_type", "IP")
        return (yield Send("CreateIndex", request))

    def drop_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """The Status of a DropCollectionRequest; see Catalog."""
        return self.drop_collection(request.collection_name, Send("DropCollection", request))

    def truncate_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A TruncateCollectionResponse; see Catalog."""
        return self.truncate_collection(request.collection_name, Send("TruncateCollection", request))

    def drop_partition_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """The Status of a DropPartitionRequest; see Catalog."""
        return self.drop_partition(request.collection_name, Send("DropPartition", request))

    def rename_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """The Status of a RenameCollectionRequest; see Catalog."""
        elsewhere = request.newDBName if request.newDBName != request.db_name else ""
        return self.rename_collection(request.oldName, elsewhere, Send("RenameCollection", request))

    def restore_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A RestoreSnapshotResponse; see Catalog."""
        elsewhere = request.target_db_name if request.target_db_name != request.db_name else ""
        return self.restore_snapshot(request.collection_name, elsewhere, Send("RestoreSnapshot", request))

    def load_wire(self, method: str, request: Any) -> Operation[Any]:
        """The Status of a LoadCollectionRequest or LoadPartitionsRequest, of which the fields that are named
        may leave out hidden ones."""
        if not request.load_fields:
            return (yield Send(method, request))
        sent = type(request)()
        sent.CopyFrom(request)
        sent.load_fields[:] = yield from self.fields_loaded(request.collection_name, request.load_fields)
        return (yield Send(method, sent))


REWRITTEN: dict[str, WireOperation] = {
    "Search": WireOperations.search_wire,
    "HybridSearch": WireOperations.hybrid_wire,
    "Query": WireOperations.query_wire,
    "Insert": lambda operations, request, overrides: operations.write_wire("Insert", request),
    "Upsert": lambda operations, request, overrides: operations.write_wire("Upsert", request),
    "Delete": lambda operations, request, overrides: operations.delete_wire(request),
    "DescribeCollection": WireOperations.describe_wire,
    "BatchDescribeCollection": WireOperations.describe_batch_wire,
    "DescribeIndex": WireOperations.describe_index_wire,
    "GetIndexStatistics": WireOperations.index_statistics_wire,
    "CreateIndex": WireOperations.create_index_wire,
    "DropCollection": WireOperations.drop_wire,
    "TruncateCollection": WireOperations.truncate_wire,
    "DropPartition": WireOperations.drop_partition_wire,
    "RenameCollection": WireOperations.rename_wire,
    "RestoreSnapshot": WireOperations.restore_wire,
    "LoadCollection": lambda operations, request, overrides: operations.load_wire("LoadCollection", request),
    "LoadPartitions": lambda operations, request, overrides: operations.load_wire("LoadPartitions", request),
}
"""The methods that are not passed through as bytes."""

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
"""The methods after which a remembered state may be wrong."""
