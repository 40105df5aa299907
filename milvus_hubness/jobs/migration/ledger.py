"""The ledger: checkpoints of migrations in the
database, with which any machine can resume a migration.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from milvus_hubness.basics.bounds import (
    MOST_ROWS,
    CollectionName,
    Count,
    FrozenModel,
    Moment,
    Name,
    Seconds,
    read_value,
)
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.state import CollectionState, read_states
from milvus_hubness.errors import (
    MOST_SIMILAR,
    CollectionExists,
    HubnessError,
    InvalidInput,
    InvalidParameter,
    NoMigration,
    ResumeRefused,
    StateError,
    WrongPhase,
)
from milvus_hubness.jobs.common.lease_records import described_record, now, read_ledger
from milvus_hubness.jobs.store.generations import Made
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import Renaming, Store
from milvus_hubness.jobs.store.records import CollectionInfo, Record

MIGRATIONS = "migrations"
"""The group of the ledger's records of migrations; a record has the name of the copy as its key."""

Phase = Literal[
    "preparing",
    "copying",
    "catching up",
    "verified",
    "switching",
    "switched",
    "rolling back",
    "rolled back",
    "finished",
]
"""preparing: only the bank may exist, or what an interrupted `clean` has left. verified: the copy
may take over. switching: the name is being moved. finished: the source is dropped.
"""

MOVING: tuple[Phase, ...] = ("switching", "rolling back")
"""Phases in which names move."""


class Chunk(FrozenModel):
    """The rows of a partition with after < key ≤ upto."""

    number: Count
    partition: Name | None
    after: Key | None
    upto: Key
    rows: int = Field(ge=1, le=MOST_ROWS)
    """Their number at first."""
    seconds: Seconds | None = None
    """Duration of their write; None until it is done."""
    invalid: Count = 0
    """Number of rows without a usable vector."""
    invalid_keys: tuple[Key, ...] = ()
    """Keys of some of these."""


class Switch(FrozenModel):
    """The move of the alias or of the source's own name to the copy."""

    name: CollectionName
    """What is moved."""
    others: tuple[CollectionName, ...] = ()
    """Further aliases, which move before it, one after the other."""
    source_renamed: CollectionName | None = None
    """The new name of the source, if any."""
    window: Seconds | None = None
    """Duration in seconds; if the source was renamed, the name led nowhere that long."""
    at: Moment | None = None
    """When it was done; None before."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that move, in their order."""
        return (*self.others, self.name)


class Migration(FrozenModel):
    """The record of one migration."""

    version: Literal[1] = 1
    id: Name = Field(default_factory=lambda: uuid.uuid4().hex)
    """Random; the copy carries it."""
    source: CollectionName
    target: CollectionName
    field: Name
    bank_collection: CollectionName
    arguments: dict[str, Any]
    """Those of PlannedCopy; every further run must have the same."""
    phase: Phase
    state: CollectionState | None = None
    """The state of the copy, once it is planned."""
    corrected_source: CollectionState | None = None
    """The state by which the rows of a corrected source are decoded, in a refresh; None for a plain
    source.
    """
    made_bank: Made = "nothing"
    """What the run created for the bank, which `clean` may drop."""
    rows: Count = 0
    """Number of rows of the source at first."""
    chunks: Count = 0
    """Number of chunks."""
    invalid: Count = 0
    """Number of rows without a usable vector."""
    invalid_keys: tuple[int | str, ...] = ()
    """Keys of some of these."""
    passes: Count = 0
    """Number of catch-up passes so far."""
    announced_at: Moment | None = None
    """When clients were first made to write to the copy too."""
    begun_at: Moment = Field(default_factory=now)
    changed_at: Moment = Field(default_factory=now)
    verified: dict[str, Any] | None = None
    """The numbers of the verification; None before."""
    switch: Switch | None = None
    """The cutover; None before."""
    source_identity: Name = ""
    """Separates the source from a later collection of its name, see CollectionInfo."""

    @model_validator(mode="after")
    def _expect_arguments(self) -> Migration:
        """Check the arguments that every further run reads."""
        names = {"schema", "rename", "profile"} if self.is_refresh else {"schema"}
        if missing := sorted(names - self.arguments.keys()):
            raise InvalidParameter(f"arguments has no {missing[0]!r}")

        index = self.arguments.get("index")
        if index is not None and (
            not isinstance(index, dict) or set(index) != {"index_type", "index_params"}
        ):
            raise InvalidParameter("arguments.index is not an index type with its parameters")
        return self

    @property
    def is_refresh(self) -> bool:
        """Whether the source is corrected itself, and the copy gets other biases."""
        return self.corrected_source is not None

    @property
    def source_now(self) -> str:
        """The current name of the source: the cutover may have renamed it."""
        return (self.switch and self.switch.source_renamed) or self.source

    @property
    def alias(self) -> str | None:
        """The name that leads to the copy; None if no name was moved."""
        return self.switch.name if self.switch else None

    @property
    def moving(self) -> frozenset[str]:
        """The names that move, there or back, and the collections between which they do; empty while no
        name moves.
        """
        if self.phase not in MOVING or self.switch is None:
            return frozenset()
        return frozenset({*self.switch.names, self.source, self.source_now, self.target})

    def expect_no_move(self) -> None:
        """Raise WrongPhase while names move, there or back: no alias fences a call that moves one, so it
        may arrive late, and then has to lead to where the name is.
        """
        if self.phase in MOVING:
            remedy = "" if self.is_refresh else ", without --restart"
            raise WrongPhase(
                f"the name {self.alias or self.source!r} is moving between {self.source_now!r} and "
                f"{self.target!r}: end that first, by the command that began it{remedy}"
            )

    def corrected(self) -> CollectionState:
        """Return the state of the copy. Raises WrongPhase if there is none yet."""
        if self.state is None:
            raise WrongPhase(
                f"the migration of {self.source!r} to {self.target!r} is still being prepared"
            )
        return self.state

    def indexed(self, source: CollectionInfo) -> CollectionInfo:
        """Return the source as described, with the copy's index."""
        index = self.arguments.get("index")
        return source.with_index(self.field, **index) if index else source

    def expect(self, arguments: dict[str, Any]) -> None:
        """Check that `arguments` equal the original arguments.

        Raises ResumeRefused, which names those that differ.
        """
        if changes := self.changes(arguments):
            raise ResumeRefused(f"{changes}: repeat them, or use --restart, which drops it first")

    def expect_name(self, alias: str | None, rename: bool) -> None:
        """Check that a name that is to move to the copy is the one that moves or has moved.

        Before a cutover begins, any name may be chosen. Raises InvalidParameter.
        """
        switch = self.switch
        if switch is None or not (alias or rename):
            return
        if alias == switch.name or (rename and switch.source_renamed is not None):
            return

        former = "--rename" if switch.source_renamed else f"--alias {switch.name}"
        raise InvalidParameter(
            f"{f'--alias {alias}' if alias else '--rename'}: the migration of {self.source!r} to "
            f"{self.target!r} is {self.phase!r} with {former}: repeat that, or leave the name out"
        )

    def changes(self, arguments: dict[str, Any]) -> str:
        """Return a sentence that names the arguments that
        differ from the original ones; empty if none does.
        """
        names = sorted(self.arguments.keys() | arguments.keys())
        pairs = [(name, self.arguments.get(name), arguments.get(name)) for name in names]
        changes = [_change(name, then, now) for name, then, now in pairs if then != now]
        if not changes:
            return ""

        what = "an unfinished copy"
        if self.phase == "rolled back":
            what = "a copy, from before a rollback,"
        return (
            f"{self.target!r} is {what} of {self.source!r} that was started with other options "
            f"({'; '.join(changes)})"
        )

    def require(self, *phases: Phase, step: str) -> None:
        """Check that the migration is in one of these phases. Raises WrongPhase."""
        if self.phase in phases:
            return

        remedy = ""
        if self.phase in {"preparing", "copying", "catching up"}:
            remedy = ": complete it with a run"
        elif self.phase == "rolled back":
            remedy = ": a run makes the copy ready again"
        raise WrongPhase(
            f"the migration of {self.source!r} to {self.target!r} is {self.phase!r}: {step} needs "
            f"it to be {' or '.join(map(repr, phases))}{remedy}"
        )


class _Unreadable(NamedTuple):
    """An entry that cannot be read."""

    target: str
    names: frozenset[str]
    """The collections and aliases that it seems to be about."""
    problem: StateError


def _names_in(record: Record) -> frozenset[str]:
    """Return the names in an entry that is no valid migration, as far as they can be found."""
    names = {record.key}
    with suppress(StateError):
        value = read_value(record.body, described_record(record), "")
        switch = value.get("switch") if isinstance(value, dict) else None
        for entry in (value, switch):
            if isinstance(entry, dict):
                values = (entry.get(key) for key in ("source", "target", "name", "source_renamed"))
                names |= {text for text in values if isinstance(text, str)}
    return frozenset(names)


LONGEST_VALUE = 80
"""Most characters of an argument that a message shows."""
_NOT_SHOWN = {"schema", "bank", "target_bank"}
"""Arguments whose values, descriptions and digests, no person compares."""


def _change(name: str, then: object, now: object) -> str:
    """Return a change of an argument in words, without values that nobody would read to the end."""
    if name == "estimator":
        then, now = (describe(value) if isinstance(value, dict) else value for value in (then, now))
    if name in _NOT_SHOWN or max(len(str(then)), len(str(now))) > LONGEST_VALUE:
        return f"another {name.replace('_', ' ')}"
    return f"{name}: {then} then, {now} now"


def _names_of(migration: Migration) -> set[str]:
    """Return the names of the two collections of a migration."""
    return {migration.source, migration.source_now, migration.target}


def _similar(name: str, migrations: Iterable[Migration]) -> str:
    """Return a question with the migrations whose names are near to a mistyped one; empty without
    any. The others are no concern of the one who asks, and there may be many.
    """
    names = {
        name: migration
        for migration in migrations
        for name in (*_names_of(migration), migration.alias or "")
    }
    similar = get_close_matches(name, names, MOST_SIMILAR)
    meant = dict.fromkeys(
        f"{names[similar_name].source} -> {names[similar_name].target}" for similar_name in similar
    )
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


class Ledger:
    """The migrations of one database."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def migrations(self, about: str = "") -> list[Migration]:
        """Return the migrations that can be read, and warn of the others.

        about: a collection or alias that the caller works on. Raises StateError if an entry that
        names it cannot be read.
        """
        migrations, unreadable = self._entries()
        for entry in unreadable:
            # One entry that cannot be read must not stop the work on all other collections.
            if about and about in entry.names:
                raise entry.problem
            log.warning("a migration to %r is left as it is: %s", entry.target, entry.problem)
        return migrations

    def may_use_bank(self, bank_collection: str, but: str) -> bool:
        """Whether a migration other than the one to the copy `but` may use this bank collection:
        entries that cannot be read count as such.
        """
        migrations, unreadable = self._entries()
        used = any(
            other.bank_collection == bank_collection for other in migrations if other.target != but
        )
        return used or any(entry.target != but for entry in unreadable)

    def used_banks(self) -> set[tuple[str, str]] | None:
        """Return the collection and the name of each bank generation that the state of a copy names,
        also of a copy that is not made yet; None if an entry cannot be read, which may name any.
        """
        migrations, unreadable = self._entries()
        if unreadable:
            return None
        states = [migration.state for migration in migrations if migration.state is not None]
        return {bank.rows for state in states for bank in state.banks}

    def _entries(self) -> tuple[list[Migration], list[_Unreadable]]:
        migrations: list[Migration] = []
        unreadable: list[_Unreadable] = []
        for record in self._store.records(LEDGER, MIGRATIONS):
            try:
                migrations.append(read_ledger(Migration.model_validate_json, record))
            except StateError as error:
                unreadable.append(_Unreadable(record.key, _names_in(record), error))
        return migrations, unreadable

    def of_target(self, target: str) -> Migration | None:
        """Return the migration to this collection, with the current state of the copy.

        Raises StateError if its entry cannot be read.
        """
        migrations = self._shown_migrations(
            target,
            lambda read: any(migration.target == target for migration in read),
            copies=lambda: [target],
        )
        migration = next((entry for entry in migrations if entry.target == target), None)
        return self._up_to_date(migration) if migration else None

    def _shown_migrations(
        self,
        about: str,
        suffices: Callable[[list[Migration]], bool],
        copies: Callable[[], Iterable[str]],
        behind: str | None = None,
    ) -> list[Migration]:
        """Return the migrations, as `migrations` does, with those that the database may hide.

        behind: the collection, if `about` is an alias. suffices: whether these migrations answer
        the caller. If not, and one of the collections `copies` says that another migration made it,
        the database hides that one.
        """

        @cache
        def makers() -> frozenset[str]:
            names = {about, behind}
            return frozenset(maker for copy in copies() for maker in self._makers(copy, names))

        return self._store.read_back(
            LEDGER,
            lambda: self.migrations(about),
            lambda read: suffices(read) or makers() <= {migration.id for migration in read},
        )

    def _makers(self, collection: str, names: Collection[str | None]) -> list[str]:
        """Return the ids of the migrations that made a collection, if it or its source has one of
        these names.
        """
        # Another process may have dropped it meanwhile, and broken states belong to nobody.
        with suppress(HubnessError):
            if self._store.exists(collection):
                states = read_states(self._store.properties_of(collection), collection)
                return [
                    state.migration
                    for state in states.values()
                    if state.migration and (collection in names or state.source in names)
                ]
        return []

    def related(self, name: str) -> list[Migration]:
        """Return the migrations that a chain of migrations connects with a collection or alias, the
        oldest first: those of the collection, of its copies, and of what it is a copy of.
        """
        migrations = self.migrations(name)
        names = {name, self._store.alias_target(name) or name}
        # Each round adds the neighbours of what is there; a refresh makes a copy of a copy.
        related: list[Migration] = []
        while more := [
            m for m in migrations if m not in related and not names.isdisjoint(_names_of(m))
        ]:
            related += more
            names.update(*map(_names_of, more))
        return sorted(related, key=lambda migration: migration.begun_at)

    def reread(self, former: Migration) -> Migration:
        """Read a migration again under its lease. Raises NoMigration."""
        migration = self.of_target(former.target)
        if migration is None or migration.id != former.id:
            raise NoMigration(
                f"the migration of {former.source!r} to {former.target!r} is gone: repeat the "
                "command"
            )
        return migration

    def find(self, name: str, target: str | None = None) -> Migration:
        """Return the migration of this collection or alias.

        If there are several, prefer one to it, then one that is not over. target: select the
        migration to this copy. Raises NoMigration, and InvalidInput if several remain.
        """
        behind = self._store.alias_target(name)

        def matching_in(migrations: list[Migration]) -> list[Migration]:
            # What an alias leads to comes before what the ledger says of a name.
            matching = [m for m in migrations if behind in {m.source_now, m.target}]
            matching = matching or [
                m for m in migrations if name in {m.source, m.target, m.source_now, m.alias}
            ]
            return [m for m in matching if target in {None, m.target}]

        migrations = self._shown_migrations(
            name,
            lambda read: bool(matching_in(read)),
            copies=self._store.collection_names,
            behind=behind,
        )
        matching = matching_in(migrations)
        if not matching:
            self._expect_no_copy(behind or name, migrations)
            to = "" if target is None else f" to {target!r}"
            raise NoMigration(
                f"no migration of {name!r}{to} in this database{_similar(name, migrations)}"
            )

        # Those that are over count only if all are.
        latest = max(matching, key=lambda m: m.begun_at)
        matching = [m for m in matching if m.phase != "finished"] or [latest]
        matching = [m for m in matching if m.phase != "rolled back"] or matching
        best = [m for m in matching if m.target == (behind or name)] or matching
        if len(best) > 1:
            copies = ", ".join(sorted(m.target for m in best))
            raise InvalidInput(
                f"{name!r} has several copies ({copies}): name the copy itself, or choose one with "
                "--target"
            )

        return self._up_to_date(best[0])

    def _expect_no_copy(self, collection: str, migrations: Iterable[Migration]) -> None:
        """Raise NoMigration if the collection says that a migration made it, which has no record.

        Milvus 2.3.5 does not show all rows at once after it was killed and started again.
        """
        if not self._store.exists(collection):
            return
        shown = {migration.id for migration in migrations}
        # Not by `info`, which would look for the banks of the copy in the ledger that hides rows.
        states = read_states(self._store.properties_of(collection), collection)
        for state in states.values():
            if state.migration and state.migration not in shown:
                raise NoMigration(
                    f"the ledger shows no migration to {collection!r}, which is a copy of "
                    f"{state.source!r}: if the server has just been started again, repeat the "
                    "command in a minute; a migration that was forgotten can be neither continued "
                    "nor rolled back"
                )

    def _up_to_date(self, migration: Migration) -> Migration:
        """Return the migration with the copy's own state, once the copy is complete: refreshes may
        have changed it.
        """
        if migration.state is None or not self._store.exists(migration.target):
            return migration
        # Another collection may have the name by now: what its state names is not this migration's.
        states = read_states(self._store.properties_of(migration.target), migration.target)
        state = states.get(migration.field)
        if state is None or state.phase != "ready" or state.migration != migration.id:
            return migration

        # It raises if the state names collections of others.
        self._store.info(migration.target, counted=False)
        return migration.model_copy(update={"state": state})

    def write(self, migration: Migration, **changes: Any) -> Migration:
        """Record a migration with these changes, and return it."""
        renewed = migration.model_copy(update={**changes, "changed_at": now()})
        self._store.put_records(
            LEDGER, [Record(renewed.target, MIGRATIONS, renewed.model_dump_json())]
        )
        return renewed

    def write_state(self, migration: Migration) -> None:
        """Write the state of a migration to its copy, if that exists."""
        state = migration.corrected()
        if self._store.exists(migration.target):
            self._store.write_property(migration.target, state.property_name, state)

    def chunks(self, migration: Migration) -> list[Chunk]:
        """Return the chunks of the migration in their original order."""
        stored = self._store.records(LEDGER, migration.id)
        return [read_ledger(Chunk.model_validate_json, record) for record in stored]

    def write_chunks(self, migration: Migration, chunks: Iterable[Chunk]) -> None:
        key = f"{migration.id}/{{:010}}"
        records = [
            Record(key.format(chunk.number), migration.id, chunk.model_dump_json())
            for chunk in chunks
        ]
        self._store.put_records(LEDGER, records)

    def forget_chunks(self, migration: Migration) -> None:
        self._store.drop_records(LEDGER, migration.id)

    def forget(self, migration: Migration) -> None:
        # The migration goes last: a killed job finds it, and with it the chunks that are left.
        self.forget_chunks(migration)
        self._store.drop_records(LEDGER, MIGRATIONS, [migration.target])


RENAMED = "{}__before_hubness"
"""The new name of a source whose own name moves to the copy."""


def switch_of_refresh(store: Store, source: CollectionInfo, *, rename: bool) -> Switch:
    """Return the switch of a refresh: all aliases of the corrected source move, and its own name too
    if it is renamed. Raises InvalidInput without a name that can move, and CollectionExists if the
    new name of the source is in use.
    """
    if rename:
        own = chosen_switch(store, source.name, "", None, rename)
        return own.model_copy(update={"others": tuple(sorted(source.aliases))})

    if not source.aliases:
        by_name = " or pass --rename (rename)" if isinstance(store, Renaming) else ""
        raise InvalidInput(
            f"a refresh makes a copy of {source.name!r}, and no alias leads there that could move to "
            f"it: give it one that applications read{by_name}; where a second copy has no room, "
            "enable keeps biases beside the vectors"
        )
    *others, name = sorted(source.aliases)
    return Switch(name=name, others=tuple(others))


def chosen_switch(
    store: Store, source: str, target: str, alias: str | None, rename: bool
) -> Switch:
    """Return the switch: an alias moves from source to target, or source is renamed and its name
    becomes an alias of target. Raises InvalidInput, and CollectionExists if the new name of the
    source is in use.
    """
    if (alias is None) == (not rename):
        raise InvalidInput(
            "one name moves: pass either the alias that the application uses, or rename"
        )

    if rename and not isinstance(store, Renaming):
        raise InvalidInput(
            f"this database cannot rename collections: let applications read {source!r} by an alias"
        )

    if alias is None:
        renamed = RENAMED.format(source)
        if store.exists(renamed):
            raise CollectionExists(f"the source would be renamed to {renamed!r}, which is taken")

        return Switch(name=source, source_renamed=renamed)

    if alias in {source, target}:
        raise InvalidInput(f"alias {alias!r} is the name of a collection of this migration")

    # An empty text, such as of a variable that is not set, is no name that a database could have.
    behind = store.alias_target(alias) if alias else None
    if behind is None:
        store.validate_name(alias)
        if store.exists(alias):
            raise InvalidInput(f"{alias!r} is a collection, not an alias")
    if behind not in {None, source, target}:
        raise InvalidInput(f"alias {alias!r} points at {behind!r}, not at {source!r}")

    return Switch(name=alias)
