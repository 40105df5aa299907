"""LlamaIndex's metadata filters as Milvus expressions. No I/O."""

import json
import math
from collections.abc import Iterable
from typing import Any

from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

METADATA, MATCHED, LOWERED = "metadata", "matched", "lowered"
_WILD = str.maketrans({"%": "\ue000", "_": "\ue001", "\\": "\ue002"})
_LISTS = {
    FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL,
}  # fmt: skip
_POSITIVE = {FilterOperator.NE: FilterOperator.EQ, FilterOperator.NIN: FilterOperator.IN}
_CONTAINS = {
    FilterOperator.CONTAINS: "json_contains",
    FilterOperator.ANY: "json_contains_any",
    FilterOperator.ALL: "json_contains_all",
}
_TEXTS = {FilterOperator.TEXT_MATCH: MATCHED, FilterOperator.TEXT_MATCH_INSENSITIVE: LOWERED}


def filtered(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What of a node's metadata is stored to filter on, by field: the values that are not empty, and its strings as
    they are and in lower case with the wildcards of LIKE replaced, which Milvus Lite cannot escape."""
    texts = {key: value.translate(_WILD) for key, value in metadata.items() if isinstance(value, str)}
    return {
        METADATA: {key: value for key, value in metadata.items() if value is not None and value != []},
        MATCHED: texts,
        LOWERED: {key: value.lower() for key, value in texts.items()},
    }


def literal(value: Any) -> str:
    """A string, number or list of them as Milvus reads it. Raises ValueError for anything else."""
    if isinstance(value, str | int):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    raise ValueError(f"cannot filter by {value!r}")


def one_of(field: str, values: Iterable[str]) -> str:
    """True of rows whose field is one of the values."""
    return f"{field} in {literal(list(values))}"


def expression(filters: MetadataFilters) -> str:
    """The Milvus expression that holds where the filters do, "" for none. A node without the key, or with an
    empty value, is unequal to everything and in no list. NOT: none of the filters holds.

    Raises ValueError for values that the operator does not take.
    """
    return _together(filters, negated=False)


def _together(filters: MetadataFilters, negated: bool) -> str:
    condition = filters.condition or FilterCondition.AND
    if condition == FilterCondition.NOT:
        condition, negated = FilterCondition.OR, not negated
    word = "and" if (condition == FilterCondition.AND) != negated else "or"
    parts = [
        _together(each, negated) if isinstance(each, MetadataFilters) else _one(each, negated)
        for each in filters.filters
    ]
    parts = [part for part in parts if part]
    return f"({f' {word} '.join(parts)})" if parts else ""


def _one(asked: MetadataFilter, negated: bool) -> str:
    operator = asked.operator
    if isinstance(asked.value, list) != (operator in _LISTS) and operator != FilterOperator.IS_EMPTY:
        raise ValueError(f"{operator.value!r} takes {'a list' if operator in _LISTS else 'one value'}")
    field = f"{METADATA}[{literal(asked.key)}]"
    if operator in _POSITIVE:
        operator, negated = _POSITIVE[operator], not negated
    if operator == FilterOperator.IS_EMPTY or (operator == FilterOperator.EQ and asked.value is None):
        return f"(exists {field})" if negated else f"(not (exists {field}))"
    holds = _holds(operator, field, asked)
    return f"((not (exists {field})) or (not ({holds})))" if negated else f"({holds})"


def _holds(operator: FilterOperator, field: str, asked: MetadataFilter) -> str:
    value = asked.value
    if operator in _TEXTS:
        if not isinstance(value, str):
            raise ValueError(f"{operator.value!r} takes a string, got {value!r}")
        text = value.translate(_WILD)
        text = text.lower() if operator == FilterOperator.TEXT_MATCH_INSENSITIVE else text
        return f"{_TEXTS[operator]}[{literal(asked.key)}] like {literal(f'%{text}%')}"
    if operator in _CONTAINS:
        return f"{_CONTAINS[operator]}({field}, {literal(value)})"
    if operator == FilterOperator.IN:
        return " or ".join(f"({field} == {literal(each)})" for each in value) or "id in []"
    return f"{field} {operator.value} {literal(value)}"
