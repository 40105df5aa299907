"""Columns and descriptions of corrected collections, as their user knows them. No I/O.

The columnar counterpart of `client.reading`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from milvus_hubness.client.reading import FieldRequest, is_ours
from milvus_hubness.errors import StateError
from milvus_hubness.halves import encode, rounded
from milvus_hubness.proxy.columns import column_named, put_vectors, vectors_in
from milvus_hubness.state import CollectionState, read_states


@dataclass(frozen=True)
class ColumnReading:
    """states: of every corrected field of the collection."""

    states: tuple[CollectionState, ...]

    def columns_out(self, message: Any, fields: FieldRequest) -> None:
        """The fields_data and output_fields of a message with the vectors that the user gave and without what
        is hidden, in place. Raises StateError where the vectors are not in augmented form."""
        columns = message.fields_data
        for state in self.states:
            column = column_named(columns, state.field)
            if column is not None and not state.leaves_vectors:
                _read_back(state, column, columns)
        _keep(columns, [each for each in columns if each.field_name not in fields.hidden])
        shown = [name for name in message.output_fields if name not in fields.hidden]
        message.output_fields[:] = shown

    def index_out(self, indexes: Any) -> None:
        """Index descriptions with the user's metrics, and without the index of a second field, in place."""
        by_field = {state.field: state for state in self.states}
        ours = {state.second_vector for state in self.states if state.second_vector}
        _keep(indexes, [each for each in indexes if each.field_name not in ours])
        for index in indexes:
            if index.field_name in by_field:
                put_pair(index.params, "metric_type", by_field[index.field_name].metric)


def description_out(description: Any) -> None:
    """A DescribeCollectionResponse as of the collection that the user made, in place. Raises StateError."""
    states = read_states({pair.key: pair.value for pair in description.properties})
    ours = {name for state in states.values() for name in state.hidden_fields}
    fields = description.schema.fields
    if states:
        _keep(fields, [each for each in fields if each.name not in ours])
    for field in fields:
        if field.name in states:
            put_pair(field.type_params, "dim", states[field.name].dim)
    for properties in (description.properties, description.schema.properties):
        _keep(properties, [pair for pair in properties if not is_ours(pair.key)])


def pairs_of(pairs: Iterable[Any]) -> Mapping[str, str]:
    """KeyValuePairs as a mapping."""
    return {pair.key: pair.value for pair in pairs}


def put_pair(pairs: Any, key: str, value: object) -> None:
    """Give the pairs of that key this value; where there is none, add one."""
    there = [pair for pair in pairs if pair.key == key]
    for pair in there:
        pair.value = str(value)
    if not there:
        pairs.add(key=key, value=str(value))


def _read_back(state: CollectionState, column: Any, columns: Any) -> None:
    stored = vectors_in(column, state.dtype)
    if len(stored) and stored.shape[1] != state.form.width:
        raise StateError(
            f"field {state.field!r} holds vectors of width {stored.shape[1]}, "
            f"its state speaks of {state.form.width}"
        )
    if not len(stored):
        column.vectors.dim = state.dim
        return
    norms = None
    if state.norm_field:
        norms = np.array(column_named(columns, state.norm_field).scalars.double_data.data, np.float64)
    vectors = rounded(state.layout.decode_vectors(state.form.joined(stored), norms), state.dtype)
    put_vectors(column, encode(vectors, state.dtype), state.dim, state.dtype)


def _keep(messages: Any, kept: list[Any]) -> None:
    """Only these of a repeated field, in place."""
    if len(kept) < len(messages):
        copies = [type(each).FromString(each.SerializeToString()) for each in kept]
        del messages[:]
        messages.extend(copies)
