"""The configuration file: read hubness.toml and report all faults at once, each with its path."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from milvus_hubness.basics.files.certificates import read_authorities, read_pair
from milvus_hubness.basics.files.opening import read_text, read_token
from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators.base import is_same, to_dict
from milvus_hubness.correction.state import Profile
from milvus_hubness.errors import (
    CollectionNotFound,
    DimensionMismatch,
    InvalidConfig,
    InvalidInput,
    ServerUnavailable,
    StateError,
    StoreError,
    UnreadableFile,
)
from milvus_hubness.jobs.common.inputs import COLLECTION_PREFIX, read_bank
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.common.samples import SAMPLES
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import TuningRecord
from milvus_hubness.serve.config import CollectionTable, HttpTable, ServeConfig, ServerTable

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

LARGEST = 4 << 20
"""Maximum size of a configuration, in bytes: enough for some ten thousand collections."""
KeyPath = Sequence[str | int]
"""Keys of tables and positions in arrays, from the top of the file."""
UNNAMED = "(no name)"
"""The name of a collection that has none, while the other faults are collected."""
TUNED = ("strength", "gate")
"""What tune chooses together with the method, and the collection state keeps."""
SECRETS = ("token", "password", "user", "api_key")
"""Keys for which people search a place, and which no configuration may have."""
BEYOND = 1 << 63
"""The first whole number that TOML does not have."""
LONG_NUMBER = "a number with thousands of digits"
_TABLES: dict[str, type[BaseModel]] = {
    "server": ServerTable,
    "http": HttpTable,
    "collection": CollectionTable,
}


class Fault(NamedTuple):
    """A fault of one key."""

    path: KeyPath
    message: str
    """Without the file and the path."""


class ConfigFile:
    """A configuration file and its faults. Raises InvalidConfig if nothing remains to check."""

    config: ServeConfig
    """The configuration without the faulty keys, so that the rest can be checked too."""

    faults: list[Fault]
    """Faults that show without the database and without other files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults = []
        try:
            self._validate(_read(path))
        except RecursionError:
            raise InvalidConfig(
                f"{path}: is nested too deeply: write tables as the reference shows them"
            ) from None

    def _validate(self, data: dict[str, Any]) -> None:
        """Set the configuration and the faults. Raises InvalidConfig."""
        folder = self.path.resolve().parent
        try:
            self.config = ServeConfig.model_validate(data, context=folder)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            self.faults = [Fault(details["loc"], _message(details)) for details in errors]
            try:
                self.config = ServeConfig.model_validate(_without(data, errors), context=folder)
            except ValidationError:
                raise self.refusal(self.faults) from None

        self.faults += self._duplicates()

    def _duplicates(self) -> Iterator[Fault]:
        seen: dict[str, int] = {}
        for number, table in enumerate(self.config.collection):
            first = seen.setdefault(f"{table.name}/{table.field}/{table.profile}", number)
            if first != number and table.name != UNNAMED:
                message = f"is the same as collection[{first}]: remove one of them"
                yield Fault(("collection", number, "name"), message)

    def refusal(self, faults: Iterable[Fault]) -> InvalidConfig:
        """Return an error with a line for each fault."""
        messages = [f"{self.path}: {_shown(fault.path)}: {fault.message}" for fault in faults]
        return InvalidConfig("\n".join(messages))


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises InvalidConfig."""
    try:
        data = tomllib.loads(read_text(path, LARGEST))
    except UnreadableFile as error:
        raise InvalidConfig(str(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path}: is not TOML: {error}") from None
    except ValueError:
        # Python reads no integer of more than some 4,300 decimal digits.
        raise InvalidConfig(f"{path}: holds {LONG_NUMBER}: write a shorter one") from None

    # Those with a prefix such as 0x it reads at any length, and then cannot print them.
    place = _long_number(data)
    if place is not None:
        raise InvalidConfig(
            f"{path}: {_shown(place)}: is a whole number of more than 64 bits: write a shorter one"
        )
    return data


def _long_number(value: Any) -> tuple[str | int, ...] | None:
    """Return the path of a whole number that TOML does not have; None if there is none."""
    if isinstance(value, int):
        return None if -BEYOND <= value < BEYOND else ()

    members: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    for step, member in members:
        place = _long_number(member)
        if place is not None:
            return (step, *place)
    return None


def _without(data: dict[str, Any], errors: Iterable[ErrorDetails]) -> dict[str, Any]:
    """Return the configuration without the faulty keys."""
    rest = deepcopy(data)
    for error in errors:
        *path, key = error["loc"]
        table: Any = rest
        for step in path:
            # A table that an earlier error has removed is empty.
            table = table.get(step, {}) if isinstance(table, dict) else table[step]

        # A collection with a faulty name stays, so that its other keys are checked.
        if path[:1] == ["collection"] and key == "name":
            table["name"] = UNNAMED
        elif isinstance(table, dict):
            table.pop(key, None)

    return rest


def _shown(path: KeyPath) -> str:
    """Return the path as text, such as "server.uri" or "collection[2].fill"."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def _message(error: ErrorDetails) -> str:
    """Return the message of pydantic in our words, with the remedy."""
    path = error["loc"]
    value = error["input"]
    if error["type"] == "extra_forbidden":
        return _unknown(path)
    if error["type"] == "missing":
        return "is missing" if path != ("collection",) else "is missing: add a [[collection]]"
    if path == ("collection",):
        return "must be written [[collection]], in double brackets, with a name in it"

    # The messages of our own validators are complete.
    context = error.get("ctx", {})
    if "error" in context:
        return str(context["error"])

    message = error["msg"].replace("Input should be", "must be")
    return message if isinstance(value, Mapping) else f"{message}, not {reprlib.repr(value)}"


def _unknown(path: KeyPath) -> str:
    key = str(path[-1])
    if key in SECRETS:
        return "secrets are not allowed here: name a token_file, or set $MILVUS_HUBNESS_TOKEN"
    if len(path) > 1 and path[0] == "collection" and key in TUNED:
        return "is chosen by tune, and refreshes keep it: remove this key"

    table = ServeConfig if len(path) == 1 else _TABLES[str(path[0])]
    keys = list(table.model_fields)
    if near := get_close_matches(key, keys, n=1):
        return f"unknown key, did you mean {near[0]!r}?"

    return f"unknown key; allowed keys: {', '.join(keys)}"


def file_faults(file: ConfigFile) -> list[Fault]:
    """Return faults for missing or unreadable files: the token, certificates, banks and pairs."""
    faults = []
    server = file.config.server
    of_server: dict[str, partial[Any]] = {}
    if server.token_file is not None:
        of_server["token_file"] = partial(read_token, server.token_file)
    if server.ca is not None:
        of_server["ca"] = partial(read_authorities, server.ca)
    # One of the two may be in the environment.
    if server.cert is not None and server.key is not None:
        of_server["key"] = partial(read_pair, server.key, server.cert)
    for key, read in of_server.items():
        if problem := _problem(read):
            faults.append(Fault(("server", key), problem))

    problems: dict[tuple[str, ...], str | None] = {}
    for number, table in enumerate(file.config.collection):
        readers: dict[str, partial[Any]] = {
            key: partial(_judging_queries if key == "queries" else QueryBank.load, bank, column)
            for key, bank, column in _banks(table)
            if not bank.startswith(COLLECTION_PREFIX)
        }
        if table.reads_pairs is not None:
            readers["pairs"] = table.reads_pairs
        if table.reads_clicks is not None:
            readers["prior_from"] = table.reads_clicks
        for key, read in readers.items():
            # Many collections may share a file, which is read once.
            kind = "bank" if key in ("bank", "target_bank") else key
            source = (kind, *map(str, read.args))
            if source not in problems:
                problems[source] = _problem(read)
            if problem := problems[source]:
                faults.append(Fault(("collection", number, key), problem))

    return faults


def _problem(read: Callable[[], object]) -> str | None:
    """Return what is wrong with a file; None if nothing is."""
    try:
        read()
    except InvalidInput as error:
        return str(error)
    return None


def _judging_queries(path: str, column: str | None) -> QueryBank | None:
    """Return real queries in a file. Raises as QueryBank.load, and InvalidInput for too few."""
    return Judging.of("skip", QueryBank.load(path, column)).queries


def _banks(table: CollectionTable) -> Iterator[tuple[str, str, str | None]]:
    """Yield the key, the value and the column of each bank in a file or a collection."""
    if table.bank is not None and table.bank != SAMPLES:
        yield "bank", table.bank, table.bank_column
    if table.target_bank is not None:
        yield "target_bank", table.target_bank, None
    if table.queries is not None:
        yield "queries", table.queries, None


def database_faults(file: ConfigFile, store: Store, *, of_states: bool = True) -> list[Fault]:
    """Return faults for names that the database lacks, and for banks that do not fit it.

    of_states: also for collections and banks that cannot be read, which are no faults of the file:
    a service goes on with the other collections. Raises ServerUnavailable.
    """
    faults = []
    seen: dict[tuple[str, str, str], int] = {}
    for number, table in enumerate(file.config.collection):
        if table.name == UNNAMED:
            continue

        try:
            for key, message in _faults_of(table, store, seen, number):
                faults.append(Fault(("collection", number, key), message))
        except StateError as error:
            if of_states:
                faults.append(Fault(("collection", number, "name"), str(error)))

    return faults


def _faults_of(
    table: CollectionTable, store: Store, seen: dict[tuple[str, str, str], int], number: int
) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each fault.

    seen: the number of the first table of each profile, which is noted here. number: of this table.
    """
    try:
        info = store.info(table.name)
        state = info.state_of(table.field)
    except CollectionNotFound as error:
        yield "name", f"{error} in this database: check the name and the uri"
        return
    except InvalidInput as error:
        yield "field", str(error)
        return

    if state is None:
        field = f"field {table.field!r} of {info.name!r}" if table.field else f"{info.name!r}"
        yield "name", f"{field} is not corrected: migrate or enable it first"
        return

    if state.phase != "ready":
        yield "name", f"{info.name!r} is unfinished: continue its migration first"

    if table.profile is not None and table.profile not in state.profiles and table.bank is None:
        profiles = ", ".join(state.profiles)
        yield (
            "profile",
            f"no profile {table.profile!r}; profiles: {profiles}; a new one needs the key bank",
        )

    # An alias and the collection's own name, or the active profile with its name and without.
    profile = table.profile or state.active
    first = seen.setdefault((info.name, state.field, profile), number)
    if first != number:
        yield (
            "name",
            f"is profile {profile!r} of {info.name!r}, as collection[{first}] is: remove one of them",
        )

    yield from _faults_of_method(table, state.profiles.get(profile))
    if table.profile in (None, state.active):
        # A verdict is about one bank: the one that the next refresh uses, unless the file names
        # another.
        in_use = state.profile.bank.queries_fingerprint
        verdict = info.verdicts.of(state.field, in_use, state.kind)
        if message := _differs_from_verdict(table, verdict):
            yield "method", message

    if table.bank == SAMPLES and info.samplings.of(state.field) is None:
        yield (
            "bank",
            f"no queries of {info.name!r} are sampled: start with milvus-hubness bank sample "
            f"{info.name}",
        )
    for key, bank, column in _banks(table):
        try:
            vectors = read_bank(store, bank, column)
            vectors.expect_dim(state.dim, f"field {state.field!r} of {info.name!r}")
            if key == "queries":
                Judging.of("skip", vectors)
        except ServerUnavailable:
            raise
        except (StoreError, InvalidInput) as error:
            # An unreadable file is `file_faults`' to report.
            if isinstance(error, DimensionMismatch) or bank.startswith(COLLECTION_PREFIX):
                yield key, str(error)


def _faults_of_method(table: CollectionTable, profile: Profile | None) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each fault that the stored profile shows; None for a new one."""
    estimator = table.estimator()
    has_targets = profile is not None and profile.bank.has_targets
    needs_targets = estimator is not None and estimator.needs_target_bank
    if needs_targets and table.target_bank is None and not has_targets:
        yield (
            "method",
            f"{table.method} needs reference items: add the key target_bank, or name another method",
        )

    has_prior = profile is not None and profile.prior is not None
    if table.prior_weight is not None and not (table.prior or table.prior_from or has_prior):
        yield (
            "prior_weight",
            "is the weight of a prior: add the key prior or prior_from, or remove this one",
        )


def _differs_from_verdict(table: CollectionTable, tuning: TuningRecord | None) -> str | None:
    """Return a message if the method of the file is not the one that tune chose."""
    estimator = table.estimator()
    if estimator is None or table.override or tuning is None or tuning.choice is None:
        return None
    if is_same(estimator, tuning.choice):
        return None

    return (
        f"{describe(to_dict(estimator))} differs from {describe(tuning.choice)}, which tune chose "
        f"on {tuning.tuned_at:%Y-%m-%d}: remove method and params, or add override = true"
    )
