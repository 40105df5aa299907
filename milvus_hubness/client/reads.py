"""Rows and descriptions read. No I/O: see `steps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from milvus_hubness.client.knowledge import CachedState, StateCache
from milvus_hubness.client.reading import Reading
from milvus_hubness.client.steps import Ask, Operation
from milvus_hubness.state import read_states


class Reads(StateCache):
    """What shows a collection as its user knows it."""

    def query(
        self,
        collection: str,
        filter: str,
        output_fields: list[str] | None,
        timeout: float | None,
        ids: Any,
        partition_names: list[str] | None,
        options: Mapping[str, Any],
    ) -> Operation[Any]:
        """query, its rows as the user knows them."""

        def ask(requested: list[str] | None) -> Ask:
            return Ask("query", (collection, filter, requested, timeout, ids, partition_names), dict(options))

        strict = bool(options.get("strict_float32"))
        return self._read(collection, output_fields, timeout, ask, strict)

    def get(
        self,
        collection: str,
        ids: Any,
        output_fields: list[str] | None,
        timeout: float | None,
        partition_names: list[str] | None,
        options: Mapping[str, Any],
    ) -> Operation[Any]:
        """get, its rows as the user knows them."""

        def ask(requested: list[str] | None) -> Ask:
            return Ask("get", (collection, ids, requested, timeout, partition_names), dict(options))

        strict = bool(options.get("strict_float32"))
        return self._read(collection, output_fields, timeout, ask, strict)

    def _read(
        self,
        collection: str,
        output_fields: list[str] | None,
        timeout: float | None,
        ask: Callable[[list[str] | None], Ask],
        strict_float32: bool,
    ) -> Operation[Any]:
        def call(cached: CachedState) -> Operation[Any]:
            if not cached.states:
                rows = yield ask(output_fields)
                if not any(name.startswith("hubness_epoch") for row in rows[:1] for name in row):
                    return rows
                # The augmented form: the collection was corrected after it was last asked.
                self.forget(collection)
                now = yield from self.cached_state(collection, timeout)
                return (yield from call(now)) if now.states else rows
            fields = cached.reading.fields(output_fields, default_all=True)
            rows = yield ask(fields.requested)
            cached.reading.rows_out(rows, fields, strict_float32=strict_float32)
            return rows

        return self._as_it_is(collection, timeout, call)

    def describe_collection(
        self, collection: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[dict[str, Any]]:
        """The collection as the user made it."""
        description: dict[str, Any] = yield Ask("describe_collection", (collection, timeout), dict(options))
        states = read_states(description.get("properties", {}))
        return Reading(tuple(states.values())).description_out(description) if states else description

    def describe_index(
        self, collection: str, index_name: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """The index with the user's metric."""
        index = yield Ask("describe_index", (collection, index_name, timeout), dict(options))
        cached = yield from self.cached_state(collection, timeout)
        return cached.reading.index_out(index)

    def list_indexes(
        self, collection: str, field_name: str | None, options: Mapping[str, Any]
    ) -> Operation[list[str]]:
        """The indexes of the fields that the user knows, or of the one that is named."""
        names: list[str] = yield Ask("list_indexes", (collection, field_name), dict(options))
        cached = yield from self.cached_state(collection)
        for state in cached.states.values():
            if state.second_vector and not field_name:
                ours = yield Ask("list_indexes", (collection, state.second_vector), dict(options))
                names = [name for name in names if name not in ours]
        return names
