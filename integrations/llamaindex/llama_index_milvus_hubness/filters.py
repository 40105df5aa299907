"""LlamaIndex's metadata filters as Milvus expressions. No I/O."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Protocol

from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)
from pymilvus import DataType

from milvus_hubness.extending import RowForm

METADATA = "metadata"
MATCHED = "matched"
LOWERED = "lowered"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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


class Keys(Protocol):
    """Where the metadata of nodes is stored, for filters."""

    def value(self, key: str) -> str:
        """Return the expression of a value."""

    def container(self, key: str) -> str:
        """Return the expression of a list, as functions take it."""

    def absent(self, key: str) -> str:
        """Return an expression for nodes without the key; empty if there can be none."""

    def empty(self, key: str) -> str:
        """Return an expression for nodes without the key or with an empty value."""

    def like(self, key: str, text: str, operator: FilterOperator) -> str:
        """Return an expression for nodes whose value holds the text."""


class OwnKeys:
    """The metadata is in JSON fields, as `filtered` returns it."""

    def value(self, key: str) -> str:
        return f"{METADATA}[{literal(key)}]"

    container = value

    def absent(self, key: str) -> str:
        return f"not (exists {self.value(key)})"

    empty = absent  # empty values are not stored

    def like(self, key: str, text: str, operator: FilterOperator) -> str:
        text = text.translate(_WILD)
        text = text.lower() if operator == FilterOperator.TEXT_MATCH_INSENSITIVE else text
        return f"{_TEXTS[operator]}[{literal(key)}] like {literal(f'%{text}%')}"


class DynamicKeys:
    """The metadata is in fields of the schema and in dynamic fields, as MilvusVectorStore writes it.

    Raises ValueError for filters that Milvus may answer wrongly.
    """

    def __init__(self, form: RowForm) -> None:
        self._form = form

    def value(self, key: str) -> str:
        field = self._form.fields.get(key)
        if field is None:
            return f"$meta[{literal(key)}]"
        if DataType(field["type"]).name.endswith("VECTOR"):
            raise ValueError(
                f"{key!r} of collection {self._form.collection!r} is a vector: filter by metadata"
            )
        return key

    def container(self, key: str) -> str:
        # Milvus Lite takes a name here, and no $meta.
        return key if _NAME.fullmatch(key) else self.value(key)

    def absent(self, key: str) -> str:
        field = self._form.fields.get(key)
        if field is None:
            return f"not (exists {self.value(key)})"
        return f"{self.value(key)} is null" if field.get("nullable") else ""

    def empty(self, key: str) -> str:
        raise ValueError(
            f"{FilterOperator.IS_EMPTY.value!r} of {key!r} cannot be answered in collection "
            f"{self._form.collection!r}, which MilvusVectorStore created: Milvus versions differ "
            "in what is empty; filter by another operator"
        )

    def like(self, key: str, text: str, operator: FilterOperator) -> str:
        if operator != FilterOperator.TEXT_MATCH or any(character in text for character in "%_\\"):
            raise ValueError(
                f"{operator.value!r} of {text!r} cannot be found in collection "
                f"{self._form.collection!r}, which MilvusVectorStore created: use "
                f"{FilterOperator.TEXT_MATCH.value!r}, without %, _ and backslash"
            )
        return f"{self.value(key)} like {literal(f'%{text}%')}"


def expression(filters: MetadataFilters, keys: Keys) -> str:
    """Return the Milvus expression of the filters; empty without filters.

    For a node without the key, or with an empty value, only `!=`, `nin` and `is_empty` hold. NOT:
    no filter holds. Raises ValueError for values that do not fit the operator.
    """
    return _combined(filters, keys, negated=False)


def _combined(filters: MetadataFilters, keys: Keys, negated: bool) -> str:
    condition = filters.condition or FilterCondition.AND
    if condition == FilterCondition.NOT:
        condition = FilterCondition.OR
        negated = not negated
    word = "and" if (condition == FilterCondition.AND) != negated else "or"
    parts = [
        _combined(part, keys, negated)
        if isinstance(part, MetadataFilters)
        else _condition(part, keys, negated)
        for part in filters.filters
    ]
    parts = [part for part in parts if part]
    return f"({f' {word} '.join(parts)})" if parts else ""


def _condition(condition: MetadataFilter, keys: Keys, negated: bool) -> str:
    operator = condition.operator
    if (
        isinstance(condition.value, list) != (operator in _LISTS)
        and operator != FilterOperator.IS_EMPTY
    ):
        raise ValueError(
            f"{operator.value!r} needs {'a list' if operator in _LISTS else 'one value'}"
        )
    if operator in _POSITIVE:
        operator = _POSITIVE[operator]
        negated = not negated
    if operator == FilterOperator.IS_EMPTY or (
        operator == FilterOperator.EQ and condition.value is None
    ):
        empty = keys.empty(condition.key)
        return f"(not ({empty}))" if negated else f"({empty})"

    holds = _holds(operator, keys, condition)
    if not negated:
        return f"({holds})"
    absent = keys.absent(condition.key)
    return f"(({absent}) or (not ({holds})))" if absent else f"(not ({holds}))"


def _holds(operator: FilterOperator, keys: Keys, condition: MetadataFilter) -> str:
    value = condition.value
    key = condition.key
    if operator in _TEXTS:
        if not isinstance(value, str):
            raise ValueError(f"{operator.value!r} needs a string, got {value!r}")
        return keys.like(key, value, operator)
    if operator in _CONTAINS:
        return f"{_CONTAINS[operator]}({keys.container(key)}, {literal(value)})"
    field = keys.value(key)
    if operator == FilterOperator.IN:
        return " or ".join(f"({field} == {literal(item)})" for item in value) or "id in []"
    return f"{field} {operator.value} {literal(value)}"
