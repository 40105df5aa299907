"""Several answers as one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milvus_hubness.proxy.columns import column_named

_IN_ONE_PIECE = ("binary_vector", "float16_vector", "bfloat16_vector", "int8_vector")


def joined(answers: Sequence[Any]) -> Any:
    """The SearchResults made of the first in place: what was found for its queries, then for the others'."""
    first, *others = answers
    for other in others:
        _join(first.results, other.results)
    return first


def _join(first: Any, other: Any) -> None:
    first.num_queries += other.num_queries
    first.top_k = max(first.top_k, other.top_k)
    first.scores.extend(other.scores)
    first.topks.extend(other.topks)
    first.ids.MergeFrom(other.ids)
    first.recalls.extend(other.recalls)
    if other.HasField("element_indices"):
        first.element_indices.MergeFrom(other.element_indices)
    if other.HasField("group_by_field_value"):
        first.group_by_field_value.MergeFrom(other.group_by_field_value)
    for columns, others in (
        (first.highlight_results, other.highlight_results),
        (first.fields_data, other.fields_data),
        (first.group_by_field_values, other.group_by_field_values),
    ):
        for column in others:
            there = column_named(columns, column.field_name)
            if there is None:
                columns.add().CopyFrom(column)
            else:
                _append(there, column)


def _append(column: Any, other: Any) -> None:
    """Protobuf joins lists when it merges, but puts bytes in place of others."""
    has_vectors = "vectors" in column.DESCRIPTOR.fields_by_name and column.HasField("vectors")
    kept = column.vectors.WhichOneof("data") if has_vectors else None
    before = getattr(column.vectors, kept) if kept in _IN_ONE_PIECE else b""
    column.MergeFrom(other)
    if kept in _IN_ONE_PIECE:
        setattr(column.vectors, kept, before + getattr(other.vectors, kept))
