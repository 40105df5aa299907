"""Whether what a configuration asks for can be done: its files, and the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from milvus_hubness.banks import QueryBank
from milvus_hubness.errors import CollectionNotFound, InvalidInput, ServerUnavailable, StoreError
from milvus_hubness.jobs.bank_source import COLLECTION_PREFIX, read_bank
from milvus_hubness.jobs.pairs import read_pairs
from milvus_hubness.serve.config import CollectionTable
from milvus_hubness.serve.config_file import UNNAMED, ConfigFile, Fault
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import Store

BANKS = ("bank", "target_bank")


@dataclass(frozen=True)
class BankFile:
    """A bank as the configuration names it."""

    spec: str
    column: str | None

    @classmethod
    def named(cls, table: CollectionTable, key: str, folder: Path) -> BankFile | None:
        """key: one of BANKS; files from `folder`."""
        spec: str | None = getattr(table, key)
        if spec is None:
            return None
        is_file = not spec.startswith(COLLECTION_PREFIX)
        return cls(str(folder / spec) if is_file else spec, table.bank_column if key == "bank" else None)

    @property
    def is_file(self) -> bool:
        return not self.spec.startswith(COLLECTION_PREFIX)


def file_faults(file: ConfigFile) -> list[Fault]:
    """Banks that are not there or cannot be read, and a token that is not there."""
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
    """What reads each of its files, by the key that names it."""
    for key in BANKS:
        bank = BankFile.named(table, key, folder)
        if bank is not None and bank.is_file:
            yield key, partial(QueryBank.load, bank.spec, bank.column)
    if table.pairs is not None:
        yield "pairs", partial(read_pairs, str(folder / table.pairs))


def database_faults(file: ConfigFile, store: Store) -> list[Fault]:
    """What the database has not that is asked for, and banks that do not fit it. Raises ServerUnavailable."""
    return [
        Fault(("collection", number, key), message)
        for number, table in enumerate(file.config.collection)
        for key, message in _faults_of(table, file.folder, store)
    ]


def _faults_of(table: CollectionTable, folder: Path, store: Store) -> Iterator[tuple[str, str]]:
    """The key and what is wrong with it."""
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
