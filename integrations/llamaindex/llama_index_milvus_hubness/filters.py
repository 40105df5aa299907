"""LlamaIndex's metadata filters as Milvus expressions. No I/O."""

import json
import math
from collections.abc import Iterable
from typing import Any

from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

METADATA = "metadata"
MATCHED = "matched"
LOWERED = "lowered"
_WILD = str.maketrans({"%": "\ue000", "_": "\ue001", "\\": "\ue002"})
_LISTS = {FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL}
_POSITIVE = {FilterOperator.NE: FilterOperator.EQ, FilterOperator.NIN: FilterOperator.IN}
_CONTAINS = {
    FilterOperator.CONTAINS: "json_contains",
    FilterOperator.ANY: "json_contains_any",
    FilterOperator.ALL: "json_contains_all",
}
_TEXTS = {FilterOperator.TEXT_MATCH: MATCHED, FilterOperator.TEXT_MATCH_INSENSITIVE: LOWERED}


def filtered(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields by which a node is filtered: its metadata that is not empty, and its
    strings.

    The strings are stored unchanged and in lower case, with the wildcards of LIKE replaced: Milvus
    Lite cannot escape them.
    """
    texts = {
        key: value.translate(_WILD) for key, value in metadata.items() if isinstance(value, str)
    }
    return {
        METADATA: {
            key: value for key, value in metadata.items() if value is not None and value != []
        },
        MATCHED: texts,
        LOWERED: {key: value.lower() for key, value in texts.items()},
    }


def literal(value: Any) -> str:
    """Return a string, a number or a list of these in the syntax of Milvus.

    Raises ValueError for other values.
    """
    if isinstance(value, str | int):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    raise ValueError(
        f"cannot filter by {value!r}: use a string, a finite number or a list of these"
    )


def one_of(field: str, values: Iterable[str]) -> str:
    """Return an expression for rows whose field has one of the values."""
    return f"{field} in {literal(list(values))}"


def expression(filters: MetadataFilters) -> str:
    """Return the Milvus expression of the filters; empty without filters.

    For a node without the key, or with an empty value, only `!=`, `nin` and `is_empty` hold. NOT:
    no filter holds. Raises ValueError for values that do not fit the operator.
    """
    return _combined(filters, negated=False)


def _combined(filters: MetadataFilters, negated: bool) -> str:
    condition = filters.condition or FilterCondition.AND
    if condition == FilterCondition.NOT:
        condition = FilterCondition.OR
        negated = not negated
    word = "and" if (condition == FilterCondition.AND) != negated else "or"
    parts = [
        _combined(part, negated) if isinstance(part, MetadataFilters) else _condition(part, negated)
        for part in filters.filters
    ]
    parts = [part for part in parts if part]
    return f"({f' {word} '.join(parts)})" if parts else ""


def _condition(condition: MetadataFilter, negated: bool) -> str:
    operator = condition.operator
    if (
        isinstance(condition.value, list) != (operator in _LISTS)
        and operator != FilterOperator.IS_EMPTY
    ):
        raise ValueError(
            f"{operator.value!r} needs {'a list' if operator in _LISTS else 'one value'}"
        )
    field = f"{METADATA}[{literal(condition.key)}]"
    if operator in _POSITIVE:
        operator = _POSITIVE[operator]
        negated = not negated
    if operator == FilterOperator.IS_EMPTY or (
        operator == FilterOperator.EQ and condition.value is None
    ):
        return f"(exists {field})" if negated else f"(not (exists {field}))"
    holds = _holds(operator, field, condition)
    return f"((not (exists {field})) or (not ({holds})))" if negated else f"({holds})"


def _holds(operator: FilterOperator, field: str, condition: MetadataFilter) -> str:
    value = condition.value
    if operator in _TEXTS:
        if not isinstance(value, str):
            raise ValueError(f"{operator.value!r} needs a string, got {value!r}")
        text = value.translate(_WILD)
        text = text.lower() if operator == FilterOperator.TEXT_MATCH_INSENSITIVE else text
        return f"{_TEXTS[operator]}[{literal(condition.key)}] like {literal(f'%{text}%')}"
    if operator in _CONTAINS:
        return f"{_CONTAINS[operator]}({field}, {literal(value)})"
    if operator == FilterOperator.IN:
        return " or ".join(f"({field} == {literal(item)})" for item in value) or "id in []"
    return f"{field} {operator.value} {literal(value)}"
