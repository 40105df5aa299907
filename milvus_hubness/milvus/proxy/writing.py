"""Writes to corrected collections, by columns, or row by row while a job works on the collection. No I/O."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from pymilvus.grpc_gen import milvus_pb2, schema_pb2

from milvus_hubness.correction.codec.base import RowCodec
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    UnsupportedOperation,
    WriteIntentFailed,
)
from milvus_hubness.milvus.client.messages import Deletion, Write
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.parts import REFUSALS
from milvus_hubness.milvus.client.state_cache import CachedState
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.proxy.columns import (
    column_named,
    json_in,
    keys_of,
    put_keys,
    put_vectors,
    rows_of,
    vectors_in,
)
from milvus_hubness.milvus.proxy.messages import Send, method_of
from milvus_hubness.milvus.store.server import exceeds_limit


def write(operations: Operations, request: Any) -> Operation[Any]:
    """Answer an InsertRequest or an UpsertRequest; each row with a vector gets its bias.

    Raises DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows; InvalidInput,
    UnsupportedOperation, WriteIntentFailed, DualWriteFailed.
    """
    collection, method = request.collection_name, method_of(request).lower()
    adds = method == "upsert" and bool(request.field_ops)

    @cache
    def as_write() -> Write:
        """Return the write in the form of HubnessClient's operations."""
        if adds:
            raise UnsupportedOperation(
                "field_ops while a job rewrites the collection: wait for its end"
            )
        options = {"partial_update": True} if getattr(request, "partial_update", False) else {}
        rows = rows_of(request.fields_data, request.num_rows)
        return Write(method, collection, rows, None, request.partition_name, options=options)

    def by_row(write: Write) -> Operation[Any]:
        answer, _ = yield from operations.writes.write(write)
        result = milvus_pb2.MutationResult(acknowledged=True, succ_index=range(request.num_rows))
        setattr(
            result, f"{method}_cnt", answer.get("insert_count") or answer.get("upsert_count") or 0
        )
        put_keys(result.IDs, list(answer.get("ids") or answer.get("primary_keys") or ()))
        return result

    def call(cached: CachedState) -> Operation[Any]:
        states = cached.states.values()
        if cached.intent_log is not None or any(state.codec.needs_candidates for state in states):
            return (yield from by_row(as_write()))
        if cached.dual_write is not None:
            as_write()  # Refuse first what the copy cannot take.
        if not states:
            return (yield Send(request))
        sent = deepcopy(request)
        for state in states:
            yield from _fill(operations, state, sent, are_new=method == "insert")
        try:
            return (yield Send(sent))
        except REFUSALS as error:
            if not exceeds_limit(error):
                raise
        # The server has refused it before it read it. By rows it is sent in parts.
        return (yield from by_row(as_write()))

    def again(_: CachedState) -> Operation[Any]:
        if adds:
            raise WriteIntentFailed(
                f"the write to {collection!r} was so slow that a refresh, which began meanwhile, may have undone "
                "it: read the rows again, and write the update again where it is missing"
            )
        return by_row(replace(as_write(), method="upsert"))

    first, _, cached = yield from operations.intents.noted(collection, None, call, again)
    if cached.dual_write is not None:
        yield from operations.dual_writes.carry(cached, keys_of(first.IDs), as_write())
    return first


def delete(operations: Operations, request: Any) -> Operation[Any]:
    """Answer a DeleteRequest. Raises WriteIntentFailed, DualWriteFailed, UnsupportedOperation."""
    cached = yield from operations.states.cached_state(request.collection_name)
    if cached.intent_log is None and cached.dual_write is None:

        def call(_: CachedState) -> Operation[Any]:
            return (yield Send(request))

        def again(_: CachedState) -> Operation[Any]:
            return _delete_by_filter(operations, request)

        first, _, cached = yield from operations.intents.noted(
            request.collection_name, None, call, again
        )
        if cached.dual_write is not None:
            yield from _delete_by_filter(operations, request)
        return first
    answer = yield from _delete_by_filter(operations, request)
    if isinstance(answer, dict):
        return milvus_pb2.MutationResult(delete_cnt=answer["delete_count"])
    result = milvus_pb2.MutationResult(delete_cnt=len(answer))
    put_keys(result.IDs, answer)  # Milvus Lite returns the keys, and so does pymilvus.
    return result


def _delete_by_filter(operations: Operations, request: Any) -> Operation[Any]:
    options: dict[str, Any] = {"consistency_level": request.consistency_level}
    if values := request.expr_template_values:
        options["filter_params"] = {name: _filter_value(value) for name, value in values.items()}
    partition = request.partition_name or None
    deletion = Deletion(request.collection_name, None, None, request.expr, partition, options)
    return operations.dual_writes.delete(deletion)


def _filter_value(value: Any) -> Any:
    """Return a filter value as pymilvus's filter_params take it."""
    kind = value.WhichOneof("val")
    if kind != "array_val":
        return getattr(value, kind)
    kind = value.array_val.WhichOneof("data")
    if kind not in ("bool_data", "long_data", "double_data", "string_data"):
        raise UnsupportedOperation(
            f"a filter value of type {kind} while a job rewrites the collection: use text"
        )
    return list(getattr(value.array_val, kind).data)


def _fill(
    operations: Operations, state: CollectionState, sent: Any, *, are_new: bool
) -> Operation[None]:
    """Write the augmented vectors of a field, and its hidden columns, into the request."""
    columns, codec = sent.fields_data, state.codec
    _expect_no_hidden_fields(columns, codec)
    column = column_named(columns, state.field)
    if column is None:
        if getattr(sent, "partial_update", False):
            return
        raise InvalidInput(f"the rows have no field {state.field!r}: add their vectors")
    vectors = vectors_in(column, state.dtype)
    if vectors.shape != (sent.num_rows, state.dim):
        raise DimensionMismatch(
            f"{sent.num_rows} rows need as many vectors of dimension {state.dim} in field {state.field!r}, "
            f"not {len(vectors)} of dimension {vectors.shape[1]}"
        )
    vectors = state.require_storable(vectors)
    biases = yield from operations.biases.of_rows(
        sent.collection_name, state, vectors, "compute", are_new=are_new
    )
    stored = codec.pack(codec.encode_rows(vectors, biases))
    if codec.searched_field != codec.field:
        column = columns.add(type=column.type, field_name=codec.searched_field)
    put_vectors(column, stored.pop(codec.searched_field), codec.form.width, codec.dtype)
    kinds = {
        codec.bias_field: (schema_pb2.DataType.Float, "float_data"),
        codec.epoch_field: (schema_pb2.DataType.Int64, "long_data"),
    }
    for name, values in stored.items():
        kind, data = kinds.get(name, (schema_pb2.DataType.Double, "double_data"))
        getattr(columns.add(type=kind, field_name=name).scalars, data).data.extend(values)


def _expect_no_hidden_fields(columns: Any, codec: RowCodec) -> None:
    """Raise InvalidInput if rows set a hidden field, as a column or among their dynamic fields."""
    dynamic = [column.scalars.json_data.data for column in columns if column.is_dynamic]
    for name in codec.hidden_fields:
        if column_named(columns, name) is not None:
            raise InvalidInput(
                f"the rows set {name!r}, which is computed from the bank: leave it out"
            )
        quoted = json.dumps(name).encode()
        for values in dynamic:
            for i, value in enumerate(values):
                if quoted in value and name in json_in(value, f"the dynamic fields of row {i}"):
                    raise InvalidInput(
                        f"row {i} sets {name!r}, which is computed from the bank: leave it out"
                    )
