"""The configuration file: read hubness.toml and report all faults at once, each with its line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.errors import (
    CollectionNotFound,
    InvalidConfig,
    InvalidInput,
    ServerUnavailable,
    StoreError,
)
from milvus_hubness.operations.reading import COLLECTION_PREFIX, read_bank, read_pairs
from milvus_hubness.serve.config import CollectionTable, HttpTable, ServeConfig, ServerTable
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.protocols import Store

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

KeyPath = Sequence[str | int]
"""Keys of tables and positions in arrays, from the top of the file."""


class TomlLines:
    """The lines of a TOML file. text: a whole file that parses."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def line(self, path: KeyPath) -> int | None:
        """Return the line, from 1, of the statement with the last existing part of the path; None if no part
        of it exists."""
        for end in range(len(path), 0, -1):
            for first, so_far in self._statements:
                if _is_there(so_far, path[:end]):
                    return first
        return None

    @cached_property
    def _statements(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the first line of each statement, and the data of the file up to its end. A statement ends
        at the first line at which the file so far parses."""
        found, first = [], 1
        for end in range(1, len(self._lines) + 1):
            try:
                so_far = tomllib.loads("\n".join(self._lines[:end]))
            except tomllib.TOMLDecodeError:
                continue
            found.append((first, so_far))
            first = end + 1
        return found


def _is_there(value: Any, path: KeyPath) -> bool:
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True


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
    """A fault in the configuration. path: to the key, from the top of the file."""

    path: tuple[str | int, ...]
    message: str


class ConfigFile:
    """A configuration file, which may have faults.

    faults: the faults that were found. config: the configuration without the faulty keys, so that the rest
    can be checked too. Raises InvalidConfig if nothing remains to check.
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
        """The folder to which the paths in the file are relative."""
        return self.path.resolve().parent

    def refusal(self, faults: Iterable[Fault]) -> InvalidConfig:
        """Return an error with a line for each fault, in the order of the file."""
        placed = [(self._lines.line(fault.path) or 1, fault) for fault in faults]
        placed.sort(key=lambda each: each[0])
        result = [f"{self.path}:{line}: {_named(fault.path)}{fault.message}" for line, fault in placed]
        return InvalidConfig("\n".join(result))


def _without(given: dict[str, Any], errors: Iterable[ErrorDetails]) -> dict[str, Any]:
    """Return the configuration without the faulty keys; a collection without a name gets UNNAMED."""
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
    """Return the path in words, such as "server.uri: " or "collection 2, schedule: "."""
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
        f"unknown key, did you mean {near[0]!r}?"
        if near
        else f"unknown key; allowed keys: {', '.join(known)}"
    )


BANKS = ("bank", "target_bank")


@dataclass(frozen=True)
class BankFile:
    """A bank that the configuration names."""

    spec: str
    column: str | None

    @classmethod
    def named(cls, table: CollectionTable, key: str, folder: Path) -> BankFile | None:
        """Return the bank of this key; None if there is none. key: one of BANKS. folder: the base of relative
        paths."""
        spec: str | None = getattr(table, key)
        if spec is None:
            return None
        is_file = not spec.startswith(COLLECTION_PREFIX)
        return cls(str(folder / spec) if is_file else spec, table.bank_column if key == "bank" else None)

    @property
    def is_file(self) -> bool:
        return not self.spec.startswith(COLLECTION_PREFIX)


def file_faults(file: ConfigFile) -> list[Fault]:
    """Return faults for banks that do not exist or cannot be read, and for a missing token."""
    faults = []
    token = file.config.server.token_file
    if token is not None and not (file.folder / token).is_file():
        faults.append(Fault(("server", "token_file"), f"there is no file {file.folder / token}"))
    for number, table in enumerate(file.config.collection):
        for key, read in _readers(table, file.folder):
            try:
                read()
            except InvalidInput as error:
                faults.append(Fault(("collection", number, key), str(error)))
    return faults


def _readers(table: CollectionTable, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a reader for each file of the table, with the key that names the file."""
    for key in BANKS:
        bank = BankFile.named(table, key, folder)
        if bank is not None and bank.is_file:
            yield key, partial(QueryBank.load, bank.spec, bank.column)
    if table.pairs is not None:
        yield "pairs", partial(read_pairs, str(folder / table.pairs))


def database_faults(file: ConfigFile, store: Store) -> list[Fault]:
    """Return faults for names that the database lacks, and for banks that do not fit it. Raises
    ServerUnavailable."""
    return [
        Fault(("collection", number, key), message)
        for number, table in enumerate(file.config.collection)
        for key, message in _faults_of(table, file.folder, store)
    ]


def _faults_of(table: CollectionTable, folder: Path, store: Store) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each fault."""
    if table.name == UNNAMED:
        return
    try:
        info = store.info(table.name)
        state = info.state_of(table.field)
    except CollectionNotFound as error:
        yield "name", f"{error} in this database: check the name, and the db"
        return
    except InvalidInput as error:
        yield "field", str(error)
        return
    if state is None:
        of = f"field {table.field!r} of {info.name!r}" if table.field else f"{info.name!r}"
        yield "name", f"{of} carries no biases: migrate or enable it first"
        return
    if state.phase != "ready":
        yield "name", f"{info.name!r} is unfinished: carry on with its migration first"
    if table.profile is not None and table.profile not in state.profiles and table.bank is None:
        there = ", ".join(state.profiles)
        yield "profile", f"there is no profile {table.profile!r}, but {there}; a new one needs a bank"
    for key in BANKS:
        if (bank := BankFile.named(table, key, folder)) is not None:
            yield from _faults_of_bank(key, bank, state, info.name, store)


def _faults_of_bank(
    key: str, bank: BankFile, state: CollectionState, collection: str, store: Store
) -> Iterator[tuple[str, str]]:
    try:
        queries = read_bank(store, bank.spec, bank.column)
    except ServerUnavailable:
        raise
    except (StoreError, InvalidInput) as error:
        if not bank.is_file:
            yield key, str(error)
        return
    if queries.dim != state.dim:
        yield (
            key,
            (
                f"{bank.spec} has {queries.dim} dimensions and field {state.field!r} of {collection!r} has "
                f"{state.dim}: give queries that the same model embedded"
            ),
        )
