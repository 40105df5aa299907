"""Insert, upsert and delete on corrected collections, for the proxy. No I/O.

A write takes one of two ways:

- **By columns**, as it came: the request is sent on with augmented vectors in place of the user's,
  and with the hidden columns. This is the ordinary way, and it never makes an object of a row.
- **By rows**, as HubnessClient would write them. This is needed where a write must be carried to
  a copy, because a job copies the collection; where biases are in a side collection; and where a
  request with augmented vectors is too large for the server, and has to be sent in parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

from pymilvus.grpc_gen import milvus_pb2, schema_pb2

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import RowCodec
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    UnsupportedOperation,
)
from milvus_hubness.milvus.client.messages import Deletion, Write
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.parts import REFUSALS
from milvus_hubness.milvus.client.state_cache import CachedState
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.client.writes import SentWrite, repeated_write
from milvus_hubness.milvus.proxy.columns import (
    column_named,
    json_in,
    keys_of,
    put_keys,
    put_vectors,
    rows_of,
    vectors_in,
)
from milvus_hubness.milvus.proxy.messages import Send, TimeOfWrite, addressed, method_of
from milvus_hubness.milvus.store.server import exceeds_limit


def write(operations: Operations, request: Any) -> Operation[Any]:
    """Answer an InsertRequest or an UpsertRequest; each row with a vector gets its bias.

    Raises DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows;
    InvalidInput, UnsupportedOperation, DualWriteFailed.
    """
    return _RequestedWrite(operations, request).answer()


class _RequestedWrite:
    """A write of the proxy, by columns or by rows."""

    def __init__(self, operations: Operations, request: Any) -> None:
        self._operations = operations
        self._request = request
        self._method = method_of(request).lower()

        self._has_field_ops = self._method == "upsert" and bool(request.field_ops)
        """Whether it changes fields by what they hold: once more, it would change them twice."""

        self._sent: SentWrite | None = None
        """What the last attempt has sent by rows; None for one by columns, which sends all or none."""

    def answer(self) -> Operation[Any]:
        """Write, and write to the copy too if there is one by then; return the result."""
        collection = self._request.collection_name
        result, cached = yield from self._operations.states.written(
            collection, None, self._write, self._write_again
        )
        if cached.dual_write is not None:
            keys = keys_of(result.IDs)
            rows = self._as_rows if self._sent is None else self._sent.write
            yield from self._operations.dual_writes.carry(cached, keys, rows)
        if self._sent is not None and self._sent.failure is not None:
            raise self._sent.failure
        return result

    def _write(self, cached: CachedState) -> Operation[Any]:
        self._sent = None
        if self._has_field_ops and cached.dual_write is not None:
            raise UnsupportedOperation(
                "field_ops while a job copies the collection: wait for its end"
            )

        states = cached.states.values()
        needs_candidates = any(state.codec.needs_candidates for state in states)
        # Values that a partial update leaves out are on the server, and a client reads them.
        is_partial = bool(getattr(self._request, "partial_update", False))
        needs_values = is_partial and any(state.fields_read for state in states)
        if needs_candidates or needs_values:
            return (yield from self._write_rows(self._as_rows))

        if cached.dual_write is not None:
            # What the copy cannot take is refused before the source has it.
            _ = self._as_rows
        if not states:
            return (yield Send(addressed(self._request, cached)))

        # The request stays as it came: it may be written again, on another state or by rows.
        encoded = deepcopy(self._request)
        encoded.collection_name = cached.real_name
        for state in states:
            is_insert = self._method == "insert"
            items = _items(encoded, cached, state)
            key_at = partial(_key_at, encoded, cached.key_field)
            yield from _encode_columns(
                self._operations, state, encoded, items, are_new=is_insert, key_at=key_at
            )
        try:
            return (yield Send(encoded))
        except REFUSALS as error:
            if not exceeds_limit(error):
                raise

        # The server has refused it before it read it. By rows it is sent in parts.
        return (yield from self._write_rows(self._as_rows))

    def _write_again(self, cached: CachedState) -> Operation[Any]:
        """Write once more, because a copy may lack the write that has taken the name meanwhile."""
        return self._write_rows(repeated_write(self._as_rows, cached))

    def _write_rows(self, rows: Write) -> Operation[Any]:
        """Write as HubnessClient does, and return its answer as a message."""
        sent, cached = yield from self._operations.writes.sent(rows)
        self._sent = sent
        answer = sent.answer
        result = milvus_pb2.MutationResult(
            acknowledged=True,
            succ_index=range(self._request.num_rows),
            timestamp=(yield TimeOfWrite(cached.real_name or rows.collection)),
        )
        count = answer.get("insert_count") or answer.get("upsert_count") or 0
        if self._method == "insert":
            result.insert_cnt = count
        else:
            result.upsert_cnt = count
        put_keys(result.IDs, list(answer.get("ids") or answer.get("primary_keys") or ()))
        return result

    @cached_property
    def _as_rows(self) -> Write:
        """The write in the form of HubnessClient's operations. Raises UnsupportedOperation."""
        request = self._request
        options: dict[str, Any] = {}
        if getattr(request, "partial_update", False):
            options["partial_update"] = True
        if self._has_field_ops:
            options["field_ops"] = {change.field_name: change for change in request.field_ops}
        return Write(
            self._method,
            request.collection_name,
            rows_of(request.fields_data, request.num_rows),
            None,
            request.partition_name,
            options=options,
        )


def delete(operations: Operations, request: Any) -> Operation[Any]:
    """Answer a DeleteRequest. Raises DualWriteFailed, UnsupportedOperation."""
    collection = request.collection_name
    delete_as_client = partial(_delete_as_client, operations, request)
    cached = yield from operations.states.cached_state(collection)
    if cached.dual_write is not None:
        return (yield from delete_as_client(cached))

    def send(cached: CachedState) -> Operation[Any]:
        return (yield Send(addressed(request, cached)))

    result, cached = yield from operations.states.written(collection, None, send, delete_as_client)
    # A job may have begun meanwhile.
    if cached.dual_write is not None:
        yield from delete_as_client(cached)
    return result


def _delete_as_client(operations: Operations, request: Any, cached: CachedState) -> Operation[Any]:
    """Delete as HubnessClient does, in the copy too, and return its answer as a message."""
    options: dict[str, Any] = {"consistency_level": request.consistency_level}
    if values := request.expr_template_values:
        options["filter_params"] = {name: _filter_value(value) for name, value in values.items()}
    deletion = Deletion(
        request.collection_name,
        None,
        None,
        request.expr,
        request.partition_name or None,
        options,
    )
    answer = yield from operations.dual_writes.delete(deletion)

    result = milvus_pb2.MutationResult(
        timestamp=(yield TimeOfWrite(cached.real_name or request.collection_name))
    )
    if isinstance(answer, dict):
        result.delete_cnt = answer["delete_count"]
    else:
        # Milvus Lite returns the keys, and so does pymilvus.
        result.delete_cnt = len(answer)
        put_keys(result.IDs, answer)
    return result


_VALUE_LISTS = ("bool_data", "long_data", "double_data", "string_data")
"""The lists of filter values that pymilvus can send."""


def _filter_value(value: Any) -> Any:
    """Return a filter value as pymilvus's filter_params take it. Raises UnsupportedOperation."""
    value_field = value.WhichOneof("val")
    if value_field != "array_val":
        return getattr(value, value_field)

    list_field = value.array_val.WhichOneof("data")
    if list_field not in _VALUE_LISTS:
        raise UnsupportedOperation(
            f"a filter value of type {list_field} while a job copies the collection: use text"
        )

    return list(getattr(value.array_val, list_field).data)


def _encode_columns(
    operations: Operations,
    state: CollectionState,
    request: Any,
    items: Items,
    *,
    are_new: bool,
    key_at: Callable[[int], Any],
) -> Operation[None]:
    """Put the augmented vectors of a field and its hidden columns into a request, in place.

    items: its rows, with the fields that priors read. A partial update without the field stays as
    it is. key_at: returns the key of the row at a position. Raises InvalidInput, DimensionMismatch,
    NonFiniteVectors, ZeroVectors, and what `Biases.of_rows` raises.
    """
    columns = request.fields_data
    codec = state.codec
    _expect_no_hidden_fields(columns, codec)
    column = column_named(columns, state.field)
    if column is None:
        if getattr(request, "partial_update", False):
            return

        raise InvalidInput(f"the rows have no field {state.field!r}: add their vectors")

    vectors = _storable_vectors(column, request.num_rows, state)
    biases = yield from operations.biases.of_rows(
        request.collection_name, state, vectors, items, "compute", are_new=are_new, key_at=key_at
    )
    encoded = codec.pack(codec.encode_rows(vectors, biases))

    put_vectors(column, encoded.pop(codec.field), codec.form.width, codec.dtype)
    _add_hidden_columns(columns, codec, encoded)


def _key_at(request: Any, key_field: str, position: int) -> Any:
    """Return the key of a row of a request; its position where the server makes keys."""
    column = column_named(request.fields_data, key_field)
    return position if column is None else rows_of([column], request.num_rows)[position][key_field]


def _items(request: Any, cached: CachedState, state: CollectionState) -> Items:
    """Return the rows of a request with their keys and the fields that priors and kinds read, and no
    others.

    Raises InvalidInput for dynamic fields that are not JSON.
    """
    # Without these, no object is made of a row.
    if not state.needs_rows:
        return Items([], [])

    names = {cached.key_field, *state.fields_read}
    columns = request.fields_data
    named = [column for column in columns if column.is_dynamic or column.field_name in names]
    rows = rows_of(named, request.num_rows)
    return Items([row.get(cached.key_field) for row in rows], rows)


def _storable_vectors(column: Any, row_count: int, state: CollectionState) -> Floats:
    """Return the vectors of a column. Raises DimensionMismatch, and as `require_storable` does."""
    vectors = vectors_in(column, state.dtype)
    if vectors.shape != (row_count, state.dim):
        raise DimensionMismatch(
            f"{row_count} rows need as many vectors of dimension {state.dim} in field "
            f"{state.field!r}, not {len(vectors)} of dimension {vectors.shape[1]}"
        )
    return state.require_storable(vectors)


def _add_hidden_columns(columns: Any, codec: RowCodec, hidden: Mapping[str, Sequence[Any]]) -> None:
    """Add the bias, the epoch and what vectors are decoded by, as columns."""
    types = {
        codec.bias_field: (schema_pb2.DataType.Float, "float_data"),
        codec.epoch_field: (schema_pb2.DataType.Int64, "long_data"),
    }
    for name, values in hidden.items():
        column_type, values_field = types.get(name, (schema_pb2.DataType.Double, "double_data"))
        column = columns.add(type=column_type, field_name=name)
        getattr(column.scalars, values_field).data.extend(values)


def _expect_no_hidden_fields(columns: Any, codec: RowCodec) -> None:
    """Raise InvalidInput if rows set a hidden field, as a column or among their dynamic fields."""
    dynamic_columns = [column.scalars.json_data.data for column in columns if column.is_dynamic]
    for name in codec.hidden_fields:
        if column_named(columns, name) is not None:
            raise InvalidInput(
                f"the rows set {name!r}, which is computed from the bank: leave it out"
            )

        quoted = json.dumps(name).encode()
        for texts in dynamic_columns:
            for row, text in enumerate(texts):
                # Parsing each text would take longer than the rest of the write.
                if quoted not in text:
                    continue
                if name in json_in(text, f"the dynamic fields of row {row}"):
                    raise InvalidInput(
                        f"row {row} sets {name!r}, which is computed from the bank: leave it out"
                    )
