"""Options that several commands share, declared once as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` as typer reads it: each parameter that is a dataclass stands for its fields.

    Annotations come from `inspect.signature`: `get_type_hints` wraps those with the default None in Optional
    on Python 3.10, which hides what Annotated says.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }

    @wraps(command)
    def taken_apart(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    signature = inspect.Signature(list(_parameters(parameters, groups)))
    taken_apart.__dict__["__signature__"] = signature
    taken_apart.__annotations__ = {}
    return taken_apart


def _parameters(
    parameters: Mapping[str, inspect.Parameter], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for parameter in parameters.values():
        kind = inspect.Parameter.KEYWORD_ONLY
        if parameter.name not in groups:
            yield parameter.replace(kind=kind)
            continue
        group = groups[parameter.name]
        annotations = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(field.name, kind, default=default, annotation=annotations[field.name])
