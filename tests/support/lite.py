"""Milvus Lite, spared work that it repeats; its answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milvus_lite.engine import projection
from milvus_lite.storage.memtable import MemTable
from milvus_lite.storage.segment import Segment

Row = dict[str, Any]
MOST_ROWS = 20_000
"""Rows in memory; of the tests' collections, few have more than some hundreds."""


def remember_rows() -> None:
    """Let Milvus Lite make the dictionary of each row once, and not for every hit of every query.

    A migration searches for 256 of its rows, 100 hits each, three times: nine tenths of what it
    costs on Lite are the dictionaries of the same few hundred rows. The batches of rows never
    change: a batch and a place in it tell which row it is.
    """
    # For each field of each hit it looks through all fields for the primary one.
    projection._is_primary = _is_primary
    MemTable._row_to_dict = _remembering(MemTable._row_to_dict, lambda _, batch: batch)
    Segment.row_to_dict = _remembering(Segment.row_to_dict, lambda segment: segment.table)


def _is_primary(schema: Any, field_name: str) -> bool:
    primary = next((field for field in schema.fields if field.is_primary), None)
    return primary is not None and primary.name == field_name


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
