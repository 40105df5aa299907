"""Answers as what corrects and merges them takes them, and the rows that it picks. No I/O.

`client.rewrite` and `client.hybrid` put hits in order, whatever else these carry: here, each says which row
of an answer's columns it is, so that columns are picked by row and otherwise stay as the server sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milvus_hubness.proxy.columns import column_named, take_rows

Key = int | str


class Hit(dict[str, Any]):
    """id: the key. row: its place in the columns. Under "distance" and "entity", as pymilvus has them, its
    score and those fields that a correction looks at."""

    def __init__(self, key: Key, score: float, row: int, entity: dict[str, Any]) -> None:
        super().__init__(distance=score, entity=entity)
        self.id, self.row = key, row


class Hits(list[Hit]):
    """What was found for one query."""

    def __init__(self, hits: Sequence[Hit]) -> None:
        super().__init__(hits)
        self.ids = [hit.id for hit in hits]
        self.distances = [hit["distance"] for hit in hits]


def hits_of(results: Any, fields: Sequence[str] = ()) -> list[Hits]:
    """Those of each query of a SearchResultData. fields: of numbers, which the hits are to carry."""
    keys, scores = keys_of(results.ids), list(results.scores)
    columns = {name: _numbers(column_named(results.fields_data, name)) for name in fields}
    found, start = [], 0
    for count in results.topks:
        rows = range(start, start + count)
        of_one = [
            Hit(
                keys[row], scores[row], row, {name: column[row] for name, column in columns.items() if column}
            )
            for row in rows
        ]
        found.append(Hits(of_one))
        start += count
    return found


def pick(results: Any, chosen: Sequence[Hits]) -> None:
    """Make a SearchResultData hold these of its rows, by query, with the scores that they have, in place."""
    rows = [hit.row for hits in chosen for hit in hits]
    keys = keys_of(results.ids)
    results.num_queries = len(chosen)
    results.topks[:] = [len(hits) for hits in chosen]
    results.top_k = max(results.topks, default=0)
    results.scores[:] = [hit["distance"] for hits in chosen for hit in hits]
    put_keys(results.ids, [keys[row] for row in rows])
    if results.element_indices.data:
        results.element_indices.data[:] = [results.element_indices.data[row] for row in rows]
    for column in results.fields_data:
        take_rows(column, rows)
    if results.HasField("group_by_field_value"):
        take_rows(results.group_by_field_value, rows)
    for column in results.group_by_field_values:
        take_rows(column, rows)
    for highlights in results.highlight_results:
        kept = [type(each).FromString(each.SerializeToString()) for each in highlights.datas]
        del highlights.datas[:]
        highlights.datas.extend(kept[row] for row in rows)


def keys_of(ids: Any) -> list[Key]:
    """The keys in an IDs message."""
    kept = ids.WhichOneof("id_field")
    return list(getattr(ids, kept).data) if kept else []


def put_keys(ids: Any, keys: Sequence[Key]) -> None:
    """Make these the keys of an IDs message, of the kind that it has; without any, by the first of them."""
    kept = ids.WhichOneof("id_field") or ("str_id" if keys and isinstance(keys[0], str) else "int_id")
    getattr(ids, kept).data[:] = keys


def _numbers(column: Any) -> list[float] | None:
    """None where the answer has no such column, as one that found nothing."""
    if column is None:
        return None
    kept = column.scalars.WhichOneof("data")
    return list(getattr(column.scalars, kept).data) if kept else None
