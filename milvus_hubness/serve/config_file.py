"""hubness.toml read, with everything that is wrong with it told at once, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from milvus_hubness.errors import InvalidConfig
from milvus_hubness.serve.config import CollectionTable, HttpTable, ServeConfig, ServerTable
from milvus_hubness.serve.toml_lines import TomlLines, tomllib

UNNAMED = "(no name)"
SECRETS = ("token", "password", "user", "api_key")
_TABLES: dict[str, type[BaseModel]] = {
    "server": ServerTable,
    "http": HttpTable,
    "collection": CollectionTable,
}
_AT_LINE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)")


@dataclass(frozen=True)
class Fault:
    """path: to the key, from the top of the file."""

    path: tuple[str | int, ...]
    message: str


class ConfigFile:
    """A file that holds a configuration, whether or not that can be done.

    faults: what is wrong with it; `config` is the file without that, so that the rest can be checked too.
    Raises InvalidConfig where nothing is left to check.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidConfig(f"{path}: is not UTF-8") from None
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidConfig(_syntax(path, text, str(error))) from None
        self._lines = TomlLines(text)
        self.faults: list[Fault] = []
        try:
            self.config = ServeConfig.model_validate(given)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            self.faults += map(_fault, errors)
            try:
                self.config = ServeConfig.model_validate(_without(given, errors))
            except ValidationError:
                raise self.refusal(self.faults) from None
        self.faults += [
            Fault(
                ("collection", number, "name"),
                f"is the same as collection {first + 1}: leave one of them out",
            )
            for number, first in self.config.twins()
            if self.config.collection[number].name != UNNAMED
        ]

    @property
    def folder(self) -> Path:
        """From which the files are meant that it names."""
        return self.path.resolve().parent

    def refusal(self, faults: Iterable[Fault]) -> InvalidConfig:
        """An error with a line for each fault, in the order of the file."""
        placed = [(self._lines.line(fault.path) or 1, fault) for fault in faults]
        placed.sort(key=lambda each: each[0])
        result = [f"{self.path}:{line}: {_named(fault.path)}{fault.message}" for line, fault in placed]
        return InvalidConfig("\n".join(result))


def _without(given: dict[str, Any], errors: Iterable[ErrorDetails]) -> dict[str, Any]:
    """The configuration without the keys that are wrong; a collection that has no name gets UNNAMED."""
    rest = deepcopy(given)
    for error in errors:
        *path, key = error["loc"]
        place: Any = rest
        for step in path:
            place = place.get(step, {}) if isinstance(place, dict) else place[step]
        if path[:1] == ["collection"] and key == "name":
            place["name"] = UNNAMED
        elif isinstance(place, dict):
            place.pop(key, None)
    return rest


def _syntax(path: Path, text: str, message: str) -> str:
    found = _AT_LINE.search(message)
    line = int(found[1]) if found and found[1] else text.rstrip("\n").count("\n") + 1
    return f"{path}:{line}: is not TOML: {_AT_LINE.sub('', message)}"


def _named(path: tuple[str | int, ...]) -> str:
    """server.uri, or collection 2, schedule, with a colon behind it."""
    table, number, keys = path[:1], path[1:2], path[2:]
    if number and isinstance(number[0], int):
        return ", ".join(filter(None, [f"{table[0]} {number[0] + 1}", ".".join(map(str, keys))])) + ": "
    return ".".join(map(str, path)) + ": " if path else ""


def _fault(error: ErrorDetails) -> Fault:
    path, kind, given = error["loc"], error["type"], error["input"]
    if kind == "extra_forbidden":
        return Fault(path, _unknown(path, given))
    if kind == "missing":
        return Fault(path, "is missing" if path != ("collection",) else "there is none: add a [[collection]]")
    if path == ("collection",):
        return Fault(path, "must be written [[collection]], in double brackets, with a name in it")
    context = error.get("ctx", {})
    if "error" in context:
        return Fault(path, str(context["error"]))
    message = error["msg"].replace("Input should be", "must be")
    return Fault(path, message if isinstance(given, Mapping) else f"{message}, not {given!r}")


def _unknown(path: tuple[str | int, ...], given: Any) -> str:
    key = str(path[-1])
    if key in SECRETS:
        return "secrets are not kept here: name a token_file, or set $MILVUS_HUBNESS_TOKEN"
    table = ServeConfig if len(path) == 1 else _TABLES[str(path[0])]
    known = list(table.model_fields)
    near = get_close_matches(key, known, n=1)
    return (
        f"is no key here, did you mean {near[0]!r}?"
        if near
        else f"is no key here, there are {', '.join(known)}"
    )
