"""The calls that the proxy rewrites, as operations without I/O."""

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
    """All rewritten calls, over one state cache."""

    def query_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer a QueryRequest with a QueryResults, with rows in the user's form."""

        def call(cached: CachedState) -> Operation[Any]:
            if not cached.states:
                response = yield Send("Query", request)
                if not any(name.startswith("hubness_epoch") for name in response.output_fields):
                    return response
                # These are augmented vectors: the collection was corrected after its state was last read.
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
        """Answer with a DescribeCollectionResponse of the collection as the user created it."""
        response = yield Send("DescribeCollection", request)
        description_out(response)
        return response

    def describe_batch_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer with a BatchDescribeCollectionResponse of collections as the user created them."""
        response = yield Send("BatchDescribeCollection", request)
        for each in response.responses:
            description_out(each)
        return response

    def describe_index_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer with a DescribeIndexResponse that has the user's metric."""
        response = yield Send("DescribeIndex", request)
        cached = yield from self.cached_state(request.collection_name)
        ColumnReading(tuple(cached.states.values())).index_out(response.index_descriptions)
        return response

    def index_statistics_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer with a GetIndexStatisticsResponse that has the user's metric."""
        response = yield Send("GetIndexStatistics", request)
        cached = yield from self.cached_state(request.collection_name)
        ColumnReading(tuple(cached.states.values())).index_out(response.index_descriptions)
        return response

    def create_index_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer a CreateIndexRequest with a Status.

        On corrected fields the index is for the augmented vectors. Raises InvalidParameter if the metric of a
        corrected field differs from the metric of its correction.
        """
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
        """Answer a DropCollectionRequest with a Status; see Catalog."""
        return self.drop_collection(request.collection_name, Send("DropCollection", request))

    def truncate_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer with a TruncateCollectionResponse; see Catalog."""
        return self.truncate_collection(request.collection_name, Send("TruncateCollection", request))

    def drop_partition_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer a DropPartitionRequest with a Status; see Catalog."""
        return self.drop_partition(request.collection_name, Send("DropPartition", request))

    def rename_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer a RenameCollectionRequest with a Status; see Catalog."""
        elsewhere = request.newDBName if request.newDBName != request.db_name else ""
        return self.rename_collection(request.oldName, elsewhere, Send("RenameCollection", request))

    def restore_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer with a RestoreSnapshotResponse; see Catalog."""
        elsewhere = request.target_db_name if request.target_db_name != request.db_name else ""
        return self.restore_snapshot(request.collection_name, elsewhere, Send("RestoreSnapshot", request))

    def load_wire(self, method: str, request: Any) -> Operation[Any]:
        """Answer a LoadCollectionRequest or LoadPartitionsRequest with a Status.

        load_fields need not name the hidden fields.
        """
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
