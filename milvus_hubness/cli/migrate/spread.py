"""Options that several commands share, declared once as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer reads it: each parameter that is a dataclass stands for its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def taken_apart(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    signature = inspect.Signature(list(_parameters(command, groups, hints)))
    taken_apart.__dict__["__signature__"] = signature
    taken_apart.__annotations__ = {}
    return taken_apart


def _parameters(
    command: Callable[..., None], groups: dict[str, Any], hints: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(command).parameters.values():
        kind = inspect.Parameter.KEYWORD_ONLY
        if parameter.name not in groups:
            yield parameter.replace(kind=kind, annotation=hints[parameter.name])
            continue
        group = groups[parameter.name]
        annotations = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(field.name, kind, default=default, annotation=annotations[field.name])
