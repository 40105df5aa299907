"""Milvus Lite, spared work that it repeats; its answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from milvus_lite.engine import collection, projection
from milvus_lite.storage.memtable import MemTable
from milvus_lite.storage.segment import Segment

Row = dict[str, Any]
MOST_ROWS = 20_000
"""Rows in memory; of the tests' collections, few have more than some hundreds."""


def spare_work() -> None:
    """Let Milvus Lite compute less for each request.

    It makes the dictionary of each row once, and not for every hit of every query.

    A migration searches for 256 of its rows, 100 hits each, three times: nine tenths of what it
    costs on Lite are the dictionaries of the same few hundred rows. The batches of rows never
    change: a batch and a place in it tell which row it is.

    A request takes the vectors of a batch at once, and not one by one. The JSON
    text of dynamic fields is parsed where a request asks for one of them.
    """
    # For each field of each hit it looks through all fields for the primary one.
    projection._is_primary = _is_primary
    collection.project_record = _projected(projection.project_record)
    MemTable.to_search_snapshot = _at_once(MemTable.to_search_snapshot)
    MemTable._row_to_dict = _remembering(MemTable._row_to_dict, lambda _, batch: batch)
    Segment.row_to_dict = _remembering(Segment.row_to_dict, lambda segment: segment.table)


def _is_primary(schema: Any, field_name: str) -> bool:
    primary = next((field for field in schema.fields if field.is_primary), None)
    return primary is not None and primary.name == field_name


def _projected(project_record: Callable[..., Row]) -> Callable[..., Row]:
    def projected(record: Row, schema: Any, plan: Any) -> Row:
        if plan.include_all_dynamic or plan.explicit_dynamic_fields:
            return project_record(record, schema, plan)

        primary = next(field.name for field in schema.fields if field.is_primary)
        names = [*plan.response_schema_fields, primary]
        if plan.api_kind == "search":
            names = [name for name in names if name != primary]
        return {name: record[name] for name in names if name in record and name != "$meta"}

    return projected


def _at_once(to_search_snapshot: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, faster where all rows count and each has a vector of numbers."""

    def snapshot(
        self: Any,
        vector_field: str | None,
        partition_names: Any = None,
        include_table: bool = False,
    ) -> Any:
        with self._lock:
            whole = _in_one_batch(self)
            entries = list(self._pk_index.items())

        is_plain = (
            whole is not None
            and vector_field is not None
            and pa.types.is_fixed_size_list(whole.schema.field(vector_field).type)
            and not whole.column(vector_field).null_count
        )
        if partition_names is not None or not entries or not is_plain:
            return to_search_snapshot(self, vector_field, partition_names, include_table)

        references = [(batch, row) for _, (batch, row, _) in entries]
        places = np.array([self._starts[batch] + row for batch, row in references])
        vectors = whole.column(vector_field).flatten().to_numpy().reshape(len(whole), -1)
        table = None
        if include_table:
            table = pa.Table.from_batches([whole]).drop(["_partition"])
            if not np.array_equal(places, np.arange(len(whole))):
                table = table.take(pa.array(places))

        sequence = np.array([number for _, (_, _, number) in entries], np.uint64)
        return [key for key, _ in entries], sequence, vectors[places], references, table

    return snapshot


def _in_one_batch(table: Any) -> Any:
    """Return all batches of rows that a MemTable has got as one, which grows with them; None if they are unlike."""
    batches = table._insert_batches
    starts = getattr(table, "_starts", [0])
    new = batches[len(starts) - 1 :]
    if new:
        former = [table._whole] if len(starts) > 1 else []
        is_alike = all(
            each is not None and each.schema == new[0].schema for each in [*former, *new]
        )
        table._whole = pa.concat_batches([*former, *new]) if is_alike else None
        table._starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
    return getattr(table, "_whole", None)


def _remembering(
    row_to_dict: Callable[..., Row], batch_of: Callable[..., Any]
) -> Callable[..., Row]:
    """Return the method with a memory. Its last argument is the place of the row."""
    remembered: dict[tuple[int, int], tuple[Any, Row]] = {}

    def remembering(*args: Any) -> Row:
        batch = batch_of(*args[:-1])
        # The batch is held beside its row, so that no other batch gets its id.
        key = (id(batch), args[-1])
        entry = remembered.get(key)
        if entry is None:
            if len(remembered) >= MOST_ROWS:
                remembered.clear()
            entry = (batch, row_to_dict(*args))
            remembered[key] = entry
        return dict(entry[1])

    return remembering
