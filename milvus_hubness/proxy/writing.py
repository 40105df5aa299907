"""Writes to corrected collections, by columns, or row by row while a job works on the collection. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pymilvus import DataType
from pymilvus.client.entity_helper import sparse_parse_single_row
from pymilvus.grpc_gen import milvus_pb2, schema_pb2

from milvus_hubness.client.operations import Operations
from milvus_hubness.client.other_locations import rewrite_of
from milvus_hubness.client.state_cache import CachedState
from milvus_hubness.client.steps import Operation
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import DimensionMismatch, InvalidInput, UnsupportedOperation, WriteIntentFailed
from milvus_hubness.proxy.columns import column_named, floats, keys_of, put_keys, put_vectors, vectors_in
from milvus_hubness.proxy.messages import Send
from milvus_hubness.state import CollectionState


def filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return filter values as pymilvus's filter_params.

    Raises UnsupportedOperation for values of an unknown type.
    """
    return {name: _value(value) for name, value in values.items()}


def _value(value: Any) -> Any:
    kept = value.WhichOneof("val")
    if kept != "array_val":
        return getattr(value, kept)
    of = value.array_val.WhichOneof("data")
    if of not in ("bool_data", "long_data", "double_data", "string_data"):
        raise UnsupportedOperation(f"the proxy cannot take {of} as a value of a filter here")
    return list(getattr(value.array_val, of).data)


_BYTES_OF_A_NUMBER = {
    "float16_vector": 2.0,
    "bfloat16_vector": 2.0,
    "int8_vector": 1.0,
    "binary_vector": 1 / 8,
}


def rows_of(columns: Any, count: int) -> list[dict[str, Any]]:
    """Return the `count` rows of a write's columns. Raises UnsupportedOperation for unknown types."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for column in columns:
        values = _spread(column, count)
        if column.is_dynamic:
            for row, value in zip(rows, values, strict=True):
                row.update(value or {})
        else:
            for row, value in zip(rows, values, strict=True):
                row[column.field_name] = value
    return rows


def _spread(column: Any, count: int) -> list[Any]:
    """Return a value for each row, None for null rows; a column may leave these out of its data."""
    values = list(_values(column))
    valid = list(column.valid_data)
    if len(valid) != count:
        return values
    if len(values) == count:
        return [value if there else None for value, there in zip(values, valid, strict=True)]
    following = iter(values)
    return [next(following) if there else None for there in valid]


def _values(column: Any) -> Iterator[Any]:
    if column.HasField("scalars"):
        yield from _scalars(column.scalars, column.type)
    elif column.HasField("vectors"):
        yield from _vectors(column.vectors)
    else:
        raise UnsupportedOperation(f"the proxy cannot write {DataType(column.type).name} here")


def _scalars(scalars: Any, kind: int) -> Iterator[Any]:
    kept = scalars.WhichOneof("data")
    values = getattr(scalars, kept).data if kept else ()
    if kept == "json_data":
        yield from map(json.loads, values)
    elif kept == "array_data":
        for value in values:
            inner = value.WhichOneof("data")
            yield list(getattr(value, inner).data) if inner else []
    elif kept in (None, "bool_data", "int_data", "long_data", "float_data", "double_data", "string_data"):
        yield from values
    else:
        raise UnsupportedOperation(f"the proxy cannot write {DataType(kind).name} here")


def _vectors(vectors: Any) -> Iterator[Any]:
    kept = vectors.WhichOneof("data")
    if kept == "float_vector":
        yield from np.array(floats(vectors.float_vector)).reshape(-1, vectors.dim)
    elif kept == "sparse_float_vector":
        yield from map(sparse_parse_single_row, vectors.sparse_float_vector.contents)
    elif kept in _BYTES_OF_A_NUMBER:
        packed, size = getattr(vectors, kept), int(vectors.dim * _BYTES_OF_A_NUMBER[kept])
        yield from (packed[i : i + size] for i in range(0, len(packed), size))
    elif kept is not None:
        raise UnsupportedOperation(f"the proxy cannot write {kept} here")


class WireWriting(Operations):
    """The rewritten Insert, Upsert and Delete calls."""

    def write_wire(self, method: str, request: Any) -> Operation[Any]:
        """Answer an InsertRequest or an UpsertRequest with a MutationResult.

        Each row with a vector gets its bias. method: the name of the call in the protocol. Raises
        DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows;
        InvalidInput, UnsupportedOperation, WriteIntentFailed, DualWriteFailed.
        """
        by_row = _ByRow(method, request)

        def call(cached: CachedState) -> Operation[Any]:
            if cached.intent_log is not None or any(state.reranking for state in cached.states.values()):
                written, _ = yield from self._written(*by_row.arguments())
                return by_row.result(written)
            if cached.dual_write is not None:
                by_row.arguments()  # Refuse first what the copy cannot take.
            if not cached.states:
                return (yield Send(method, request))
            sent = type(request)()
            sent.CopyFrom(request)
            for state in cached.states.values():
                yield from self._fill(cached, state, sent, are_new=method == "Insert")
            return (yield Send(method, sent))

        def again(cached: CachedState) -> Operation[Any]:
            if by_row.adds:
                raise WriteIntentFailed(
                    f"written to {request.collection_name!r} so slowly that a refresh, which began since, "
                    "may have undone it: read the rows again, and repeat the update where it is missing"
                )
            written, _ = yield from self._written(*by_row.arguments(again=True))
            return by_row.result(written)

        first, _, cached = yield from self._noted(request.collection_name, None, call, again)
        if cached.dual_write is not None:
            args = by_row.arguments()
            yield from self._dual_written(cached, keys_of(first.IDs), *args[1:])
        return first

    def delete_wire(self, request: Any) -> Operation[Any]:
        """Answer a DeleteRequest with a MutationResult.

        Raises WriteIntentFailed, DualWriteFailed, UnsupportedOperation.
        """
        collection = request.collection_name
        cached = yield from self.cached_state(collection)
        if cached.intent_log is None and cached.dual_write is None:

            def call(cached: CachedState) -> Operation[Any]:
                return (yield Send("Delete", request))

            def again(cached: CachedState) -> Operation[Any]:
                yield from self._deleted_by_filter(request)
                return None

            first, _, cached = yield from self._noted(collection, None, call, again)
            if cached.dual_write is not None:
                yield from self._deleted_by_filter(request)
            return first
        done = yield from self._deleted_by_filter(request)
        if isinstance(done, list):  # Milvus Lite returns the keys, and so does pymilvus.
            result = milvus_pb2.MutationResult(delete_cnt=len(done))
            put_keys(result.IDs, done)
            return result
        return milvus_pb2.MutationResult(delete_cnt=done["delete_count"])

    def _deleted_by_filter(self, request: Any) -> Operation[Any]:
        options: dict[str, Any] = {"consistency_level": request.consistency_level}
        if request.expr_template_values:
            options["filter_params"] = filled(request.expr_template_values)
        partition = request.partition_name or None
        return (yield from self.delete(request.collection_name, None, None, request.expr, partition, options))

    def _fill(
        self, cached: CachedState, state: CollectionState, sent: Any, *, are_new: bool
    ) -> Operation[None]:
        """Write the augmented vectors of a field, and its hidden columns, into the request."""
        columns = sent.fields_data
        _expect_none_of_ours(columns, state)
        column = column_named(columns, state.field)
        if column is None:
            if getattr(sent, "partial_update", False):
                return
            raise InvalidInput(f"the rows lack field {state.field!r}")
        vectors = vectors_in(column, state.dtype)
        if vectors.shape != (sent.num_rows, state.dim):
            raise DimensionMismatch(
                f"{sent.num_rows} rows need as many vectors of dimension {state.dim} in {state.field!r}, "
                f"got {len(vectors)} of dimension {vectors.shape[1]}"
            )
        vectors = state.require_storable(vectors)
        biases = yield from self._biases(
            sent.collection_name, state, vectors, "compute", None, are_new=are_new
        )
        locality_hints = yield from self._locality_hints(sent.collection_name, state, vectors, "compute")
        slots = np.zeros((len(vectors), state.slots), np.float32)
        for slot, of_slot in biases.items():
            slots[:, slot] = of_slot
        rewrite = rewrite_of(state, cached.reading)
        stored = rewrite.form.encode_rows(rewrite.layout.augment(vectors, slots, locality_hints))
        if state.second_vector:
            column = columns.add(type=column.type, field_name=state.second_vector)
        put_vectors(column, stored, rewrite.form.width, state.dtype)
        _add_hidden(columns, state, vectors, slots[:, state.shown_slot])


class _ByRow:
    """A write in the form of HubnessClient's operations."""

    def __init__(self, method: str, request: Any) -> None:
        self._method, self._request = method, request
        self._rows: list[dict[str, Any]] | None = None

    @property
    def adds(self) -> bool:
        """Whether the write adds to existing values, so that it must not run twice."""
        return self._method == "Upsert" and bool(self._request.field_ops)

    def arguments(self, *, again: bool = False) -> tuple[Any, ...]:
        """Return method, collection, rows, timeout, partition, source of the biases, and further options."""
        if self.adds:
            raise UnsupportedOperation(
                "field_ops while a refresh or a migration is at work on the collection"
            )
        if self._rows is None:
            self._rows = rows_of(self._request.fields_data, self._request.num_rows)
        options: Mapping[str, Any] = {}
        if getattr(self._request, "partial_update", False):
            options = {"partial_update": True}
        method = "upsert" if again else self._method.lower()
        partition = self._request.partition_name
        return method, self._request.collection_name, self._rows, None, partition, "compute", options

    def result(self, written: Mapping[str, Any]) -> Any:
        """Convert the answer of pymilvus's client to the protocol."""
        ids = list(written.get("ids") or written.get("primary_keys") or ())
        count = self._request.num_rows
        result = milvus_pb2.MutationResult(acknowledged=True, succ_index=range(count))
        if self._method == "Insert":
            result.insert_cnt = written["insert_count"]
        else:
            result.upsert_cnt = written["upsert_count"]
        put_keys(result.IDs, ids)
        return result


def _expect_none_of_ours(columns: Any, state: CollectionState) -> None:
    """Raise InvalidInput if rows set a hidden field, as a column or among their dynamic fields."""
    for name in state.hidden_fields:
        if column_named(columns, name) is not None:
            raise InvalidInput(f"the rows set {name!r}, which is computed from the bank")
        quoted = json.dumps(name).encode()
        for column in columns:
            if not column.is_dynamic:
                continue
            for i, value in enumerate(column.scalars.json_data.data):
                if quoted in value and name in json.loads(value):
                    raise InvalidInput(f"row {i} sets {name!r}, which is computed from the bank")


def _add_hidden(columns: Any, state: CollectionState, vectors: Floats, biases: Floats) -> None:
    bias = columns.add(type=schema_pb2.DataType.Float, field_name=state.bias_field)
    bias.scalars.float_data.data.extend(biases.tolist())
    epoch = columns.add(type=schema_pb2.DataType.Int64, field_name=state.epoch_field)
    epoch.scalars.long_data.data.extend([state.profile.epoch] * len(vectors))
    if state.norm_field:
        norm = columns.add(type=schema_pb2.DataType.Double, field_name=state.norm_field)
        norm.scalars.double_data.data.extend(state.layout.norms(vectors).tolist())
