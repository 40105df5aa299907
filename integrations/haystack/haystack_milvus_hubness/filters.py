"""Haystack's filters as Milvus expressions. No I/O."""

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from haystack.errors import FilterError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPPOSITE = {
    "==": "!=",
    "!=": "==",
    ">": "<=",
    "<=": ">",
    "<": ">=",
    ">=": "<",
    "in": "not in",
    "not in": "in",
    "AND": "OR",
    "OR": "AND",
}
_ORDERS = (">", ">=", "<", "<=")


@dataclass(frozen=True)
class Fields:
    """The fields to filter on."""

    primary: str
    """The primary key."""

    declared: Collection[str]
    """The fields of the schema."""

    may_be_dynamic: bool = True
    """Whether any other name is a dynamic field; otherwise there is none."""

    @property
    def none(self) -> str:
        """An expression that no document fulfils."""
        return f"{self.primary} in []"

    @property
    def all(self) -> str:
        """An expression that every document fulfils."""
        return f'{self.primary} != ""'

    def absent(self, name: str) -> str:
        """Return an expression for documents without the field."""
        return f"{name} is null" if name in self.declared else f"not (exists {name})"

    def present(self, name: str) -> str:
        """Return an expression for documents with the field."""
        return f"{name} is not null" if name in self.declared else f"exists {name}"


def expression(filters: dict[str, Any], fields: Fields) -> str:
    """Return the Milvus expression of the filters.

    For a document without the field only `!=`, `not in` and `== None` hold. Raises FilterError for
    filters that Haystack does not have, for values that cannot be compared, and for fields that no
    document can have.
    """
    return _parsed(filters, fields, negated=False)


def _parsed(filters: Any, fields: Fields, negated: bool) -> str:
    if not isinstance(filters, dict):
        raise FilterError(
            f"the filter {filters!r} is not a dictionary: pass field, operator and value"
        )
    keys = ("field", "operator", "value") if "field" in filters else ("operator", "conditions")
    for key in keys:
        if key not in filters:
            raise FilterError(f"the filter {filters} has no {key!r}: add it")
    if "field" in filters:
        return _comparison(filters["field"], filters["operator"], filters["value"], fields, negated)
    return _logic(filters["operator"], filters["conditions"], fields, negated)


def _logic(operator: str, conditions: Any, fields: Fields, negated: bool) -> str:
    if operator not in ("AND", "OR", "NOT"):
        raise FilterError(f"unknown logical operator {operator!r}: use AND, OR or NOT")
    if not isinstance(conditions, list) or not conditions:
        raise FilterError(
            f"the conditions of {operator} are not a list with at least one condition: add one"
        )
    if operator == "NOT":
        operator = "AND"
        negated = not negated
    # De Morgan: a negation goes into the conditions and turns the operator.
    word = _OPPOSITE[operator] if negated else operator
    parts = [_parsed(condition, fields, negated) for condition in conditions]
    return f"({f' {word.lower()} '.join(parts)})"


def _comparison(field: Any, operator: Any, value: Any, fields: Fields, negated: bool) -> str:
    name = str(field).removeprefix("meta.")
    if not _NAME.fullmatch(name):
        raise FilterError(f"field name {field!r} is invalid: use letters, digits and underscores")
    if not fields.may_be_dynamic and name not in fields.declared:
        raise FilterError(
            f"the collection has no field {name!r}: filter by one of {', '.join(fields.declared)}"
        )
    if operator not in _OPPOSITE or operator in ("AND", "OR"):
        raise FilterError(
            f"unknown comparison operator {operator!r}: use ==, !=, >, >=, <, <=, in or 'not in'"
        )
    if operator in _ORDERS:
        _check_order(operator, value)
    if operator in ("in", "not in") and not isinstance(value, list):
        raise FilterError(f"{operator!r} needs a list, got {type(value).__name__}")
    if operator in _ORDERS and value is None:
        return f"({fields.all if negated else fields.none})"
    missing = negated if operator in _ORDERS else (operator in ("!=", "not in")) != negated
    word = _OPPOSITE[operator] if negated else operator
    if value is None:
        return f"({fields.absent(name) if word == '==' else fields.present(name)})"
    if word in ("in", "not in"):
        return _membership(name, word, value, fields)
    comparison = f"{name} {word} {_literal(value)}"
    return f"({_or_absent(name, comparison, fields) if missing else comparison})"


def _membership(name: str, word: str, values: list[Any], fields: Fields) -> str:
    literals = [_literal(value) for value in values if value is not None]
    listed = f"{name} in [{', '.join(literals)}]" if literals else fields.none
    unlisted = f"not ({listed})" if literals else fields.all
    if word == "in":
        return f"({listed} or {fields.absent(name)})" if None in values else f"({listed})"
    if None in values:
        return f"({fields.present(name)} and {unlisted})"
    return f"({_or_absent(name, unlisted, fields)})"


def _or_absent(name: str, condition: str, fields: Fields) -> str:
    return condition if name in fields.declared else f"{fields.absent(name)} or {condition}"


def _check_order(operator: str, value: Any) -> None:
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError as error:
            raise FilterError(
                f"{operator!r} needs a number or an ISO date, got {value!r}"
            ) from error
    elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise FilterError(f"{operator!r} needs a number or an ISO date, got {type(value).__name__}")


def _literal(value: Any) -> str:
    if isinstance(value, str | bool | int):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise FilterError(
        f"a filter cannot compare with {value!r}: use a string, a boolean or a finite number"
    )
