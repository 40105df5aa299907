"""Rows and descriptions of collections with corrected fields, as their user knows them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from milvus_hubness.correction import read_back
from milvus_hubness.errors import StateError
from milvus_hubness.halves import decode, returned
from milvus_hubness.state import (
    DUAL_WRITE_PROPERTY,
    ONLINE_BANKS_PROPERTY,
    PROPERTY,
    TUNING_PROPERTY,
    WRITE_INTENTS_PROPERTY,
    CollectionState,
)
from milvus_hubness.stores.base import is_fence

Row = MutableMapping[str, Any]

_OURS = {PROPERTY, TUNING_PROPERTY, DUAL_WRITE_PROPERTY, WRITE_INTENTS_PROPERTY, ONLINE_BANKS_PROPERTY}
"""Properties of collections."""


def is_ours(property: str) -> bool:
    """Whether this package keeps something of its own in that property of a collection."""
    return property in _OURS or property.startswith(f"{PROPERTY}.")


@dataclass(slots=True)
class FieldRequest:
    """requested: what to ask the server for. hidden: fields to take out of what comes back."""

    requested: list[str] | None
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """states: of every corrected field of the collection."""

    states: tuple[CollectionState, ...]

    def fields(self, output_fields: list[str] | None, *, default_all: bool = False) -> FieldRequest:
        """What to ask for so that vectors can be read back, and what to hide again.

        default_all: no output_fields means every field, as query and get take it. What is no list is for
        pymilvus to refuse.
        """
        if output_fields is not None and not isinstance(output_fields, list):
            return FieldRequest(output_fields, ())
        named = list(output_fields or [])
        hidden = tuple(name for name in self._hidden if name not in named)
        if "*" not in named:
            norms = [state.norm_field for state in self.states if state.field in named]
            named += [norm for norm in norms if norm and norm in hidden]
        return FieldRequest(named or (["*"] if default_all else output_fields), hidden)

    def rows_out(self, rows: Iterable[Row], fields: FieldRequest, *, strict_float32: bool = False) -> None:
        """Rows with the vectors that the user gave and without what is hidden, changed in place.
        strict_float32: vectors are lists of NumPy's float32.

        Raises StateError where the vectors are not in augmented form.
        """
        rows = list(rows)
        for state in self.states:
            with_vector = [row for row in rows if row.get(state.field) is not None]
            if with_vector and not state.leaves_vectors:
                stored = decode([row[state.field] for row in with_vector], state.dtype)
                if stored.shape[1:] != (state.form.width,):
                    raise StateError(
                        f"field {state.field!r} holds vectors of width {stored.shape[1]}, "
                        f"its state speaks of {state.form.width}"
                    )
                vectors = read_back(state, state.form.joined(stored), with_vector)
                for row, vector in zip(with_vector, returned(vectors, state.dtype), strict=True):
                    in_list = isinstance(vector, bytes) and isinstance(row[state.field], list)
                    row[state.field] = [vector] if in_list else vector
                    if strict_float32 and state.dtype == "float32":
                        row[state.field] = list(np.asarray(vector, np.float32))
        for row in rows:
            for name in fields.hidden:
                row.pop(name, None)

    def hits_out(self, results: Any, fields: FieldRequest) -> Any:
        """The same of the rows that searches found. Those of one query have the same fields."""
        for hits in results:
            if hits and not self._changed.isdisjoint(hits[0]["entity"]):
                self.rows_out((hit["entity"] for hit in hits), fields)
        return results

    @cached_property
    def _hidden(self) -> tuple[str, ...]:
        return tuple(name for state in self.states for name in state.hidden_fields)

    @cached_property
    def _changed(self) -> frozenset[str]:
        """The fields that users see otherwise than they are stored, or not at all."""
        return frozenset([*self._hidden, *(state.field for state in self.states)])

    def description_out(self, description: dict[str, Any]) -> dict[str, Any]:
        """describe_collection as of the collection the user made."""
        ours = {name for state in self.states for name in state.hidden_fields}
        dims = {state.field: state.dim for state in self.states}
        fields = [each for each in description["fields"] if each["name"] not in ours]
        for each in fields:
            if each["name"] in dims:
                each["params"] = {**each["params"], "dim": dims[each["name"]]}
        properties = {name: value for name, value in description["properties"].items() if not is_ours(name)}
        shown = {**description, "fields": fields, "properties": properties}
        if "aliases" in description:
            shown["aliases"] = [alias for alias in description["aliases"] if not is_fence(alias)]
        return shown

    def index_out(self, index: dict[str, Any] | None) -> dict[str, Any] | None:
        """describe_index with the metric the user knows."""
        metrics = {state.field: state.metric for state in self.states}
        if index and index.get("field_name") in metrics:
            return {**index, "metric_type": metrics[index["field_name"]]}
        return index
