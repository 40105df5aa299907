"""One job at a time on a collection: a lease in the database, with fencing tokens and fencing aliases.

Milvus has no compare-and-set. Two mechanisms stand in for it.

*Who holds the lease* is decided by flags, one record for each taking: a process reads the records, writes its
own with the next token, and reads again. Of two processes that write the same token, at least the one that
reads last sees the other and withdraws (the flag principle: Herlihy and Shavit, The Art of Multiprocessor
Programming, 2008, section 2.9). No clock and no speed matters. The highest token holds the lease. A holder
renews only its own record, so a renewal that arrives late changes nothing.

*A write that is already on its way* cannot be recalled. So a holder sends no write by the name of the
collection: it creates an alias of its own, `<collection>__lease_<token>_<owner>`, and sends all writes by
that (`Lease.store`). The next holder drops this alias before it does anything else. Whatever the former
holder sent, however long it was held up, then finds no collection and is refused.

Clocks: the time at which a lease expires is compared between machines, whose clocks may differ by `skew`
seconds. If they differ by more, a holder can lose its lease too early and then stops with LeaseLost; its
writes are fenced all the same.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from milvus_hubness.errors import HubnessError, InvalidParameter, LeaseHeld, LeaseLost, StateError
from milvus_hubness.operations.owner import LEDGER, Owner, now
from milvus_hubness.stores.base import CollectionInfo, Record, Store

LEASES = "leases"
RENEWALS = 3
"""Renewals in the time after which a lease would expire."""
LOOKS = 30
"""Reads of the records in the same time, at most."""
ATTEMPTS = 10
LONGEST_PAUSE = 0.2
"""Seconds before the second attempt, drawn at random up to this; longer before each further one."""
LONGEST_NAME = 200
"""Characters of a collection's name in that of an alias: Milvus allows 255 in all."""


@dataclass(frozen=True)
class LeasePolicy:
    """seconds: after which the lease of a silent holder expires. skew: by how much the clocks of machines may
    differ. fenced_write: after how many seconds a server that resolved an alias before it was dropped has
    applied the write."""

    seconds: float = 30.0
    skew: float = 5.0
    fenced_write: float = 1.0

    @classmethod
    def default(cls) -> LeasePolicy:
        """Return the policy that the environment asks for: MILVUS_HUBNESS_LEASE_SECONDS, 30 unless set, and a
        sixth of that as the skew. Raises InvalidParameter."""
        text = os.environ.get("MILVUS_HUBNESS_LEASE_SECONDS", "30")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidParameter(f"MILVUS_HUBNESS_LEASE_SECONDS must be a number above 0, got {text!r}")
        return cls(seconds, seconds / 6)


class Entry(BaseModel):
    """The record of one taking of the lease. expires_at: None once the lease was released."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collection: str
    token: int = Field(ge=1)
    owner_id: str
    owner: Owner
    skew: float
    expires_at: datetime | None

    @property
    def key(self) -> str:
        return f"{LEASES}/{self.collection}/{self.token:012}/{self.owner_id}"

    @property
    def alias(self) -> str:
        """The fencing alias by which the holder writes to the collection."""
        return f"{self.collection[:LONGEST_NAME]}__lease_{self.token}_{self.owner_id[:8]}"

    @property
    def ledger_alias(self) -> str:
        """The fencing alias by which the holder writes to the ledger."""
        return f"{LEDGER}__lease_{self.owner_id[:8]}"

    @property
    def is_held(self) -> bool:
        """Whether the holder may be at work: it has not released the lease, the lease has not expired by any
        clock, and its process is not known to be gone."""
        if self.expires_at is None or self.expires_at + timedelta(seconds=self.skew) <= now():
            return False
        return not self.owner.is_known_dead

    def __str__(self) -> str:
        until = f", until {self.expires_at:%H:%M:%S} UTC unless renewed" if self.expires_at else ""
        return f"{self.owner} holds the lease on {self.collection!r} (token {self.token}{until})"


class Lease:
    """The lease on one or more collections, held within `with` and renewed meanwhile.

    collections: their real names; one that does not exist yet can be leased too. fenced: False for a lease on
    anything else than a collection. Raises LeaseHeld, naming the holder.
    """

    def __init__(
        self, store: Store, *collections: str, policy: LeasePolicy | None = None, fenced: bool = True
    ) -> None:
        self.policy = policy or LeasePolicy.default()
        self._store, self._names = store, tuple(dict.fromkeys(collections))
        self._entries: dict[str, Entry] = {}
        self._seen, self._fences_writes = -math.inf, fenced
        self._owner_id = uuid.uuid4().hex
        self._fences: dict[str, str] = {}
        self._fenced = store.fenced(self._fences)
        self._over = threading.Event()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> Lease:
        try:
            self._claim(self._names)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def include(self, *collections: str) -> None:
        """Lease further collections too, until the end of the block. Raises LeaseHeld."""
        if further := [name for name in collections if name not in self._entries]:
            self._claim(further)

    @property
    def token(self) -> int:
        """The fencing token of the first collection."""
        return self._entries[self._names[0]].token

    @property
    def is_held(self) -> bool:
        """Whether this process holds it, as far as it knows."""
        return bool(self._entries)

    @property
    def store(self) -> Store:
        """The store, its writes to the leased collections and to the ledger fenced."""
        return self._fenced

    def fence(self, collection: str) -> None:
        """Write to a leased collection, which was created just now, by a fencing alias from here on. Raises
        LeaseLost."""
        alias = self._entries[collection].alias
        self._store.fence(collection, alias)
        self._fences[collection] = alias
        self._look()

    def drop(self, collection: str) -> None:
        """Drop a leased collection if it is there.

        A call that drops a collection cannot be fenced: it may arrive when another job uses that name. So
        the collection is renamed first, and dropped by its new name if the lease is still held then. If the
        call that renames arrives late, the collection keeps its rows and aliases. Raises LeaseLost.
        """
        self.include(collection)
        store, entry = self.store, self._entries[collection]
        dropped = f"{collection[:LONGEST_NAME]}__dropped_{entry.token}_{self._owner_id[:8]}"
        if not store.renames():
            self._look()
            store.drop(collection)
            return
        if not store.exists(collection):
            return
        self._look()
        store.rename(collection, dropped)
        try:
            self._look()
        except LeaseLost:
            store.rename(dropped, collection)
            raise
        if alias := self._fences.pop(collection, None):
            store.unfence(alias)
        store.drop(dropped)

    def check(self) -> None:
        """Call this before every write. Raises LeaseLost if another process has the lease by now.

        What was read within 1/`LOOKS` of the time after which the lease expires still holds: nobody takes it
        sooner.
        """
        if time.monotonic() - self._seen >= self.policy.seconds / LOOKS:
            self._look()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise LeaseLost in place of any error within if another process has the lease: that process may
        have dropped what this one works with."""
        try:
            yield
        except LeaseLost:
            raise
        except HubnessError as error:
            try:
                self._look()
            except LeaseLost as lost:
                raise lost from error
            raise

    # -- the records --------------------------------------------------------------------------------------

    def _claim(self, names: Sequence[str]) -> None:
        for attempt in range(ATTEMPTS):
            found = {name: self._read(name) for name in names}
            for entries in found.values():
                for each in entries:
                    if each.token == entries[-1].token and each.is_held:
                        raise LeaseHeld(f"{each}: wait until it ends, or stop it")
            mine = {name: self._entry(name, entries) for name, entries in found.items()}
            began = time.monotonic()
            try:
                if self._wins(found, mine):
                    break
            except BaseException:
                with suppress(HubnessError):
                    self._withdraw(mine)
                raise
            self._withdraw(mine)
            time.sleep(random.uniform(0, LONGEST_PAUSE * (attempt + 1)))
        else:
            raise LeaseHeld(
                f"the lease on {', '.join(map(repr, names))} could not be taken: in each of {ATTEMPTS} "
                "attempts another process tried at the same moment: try again"
            )
        for name, entries in found.items():
            self._forget(each for each in entries if each.token < mine[name].token)
        if not self._entries:
            self._seen = began
        self._entries |= mine
        if self._renewing is None:
            self._over.clear()
            self._renewing = threading.Thread(target=self._renew, name="milvus-hubness-lease", daemon=True)
            self._renewing.start()

    def _wins(self, found: Mapping[str, Sequence[Entry]], mine: Mapping[str, Entry]) -> bool:
        """Write this process's records and fences. Whether it has written the highest token of each
        collection, and no other process has written it too."""
        self._put(mine.values())
        self._drop_fences(found)
        for name, entry in mine.items() if self._fences_writes else ():
            self._create_fence(name, entry.alias)
            self._create_fence(LEDGER, entry.ledger_alias)
        for entry in mine.values():
            top = [each for each in self._read(entry.collection) if each.token >= entry.token]
            if [each.owner_id for each in top] != [self._owner_id]:
                return False
        return True

    def _withdraw(self, mine: Mapping[str, Entry]) -> None:
        self._forget(mine.values())
        for name, entry in mine.items():
            if self._fences.get(name) == entry.alias:
                self._store.unfence(self._fences.pop(name))

    def _entry(self, name: str, entries: Sequence[Entry]) -> Entry:
        return Entry(
            collection=name,
            token=1 + (entries[-1].token if entries else 0),
            owner_id=self._owner_id,
            owner=Owner.here(),
            skew=self.policy.skew,
            expires_at=self._expiry(),
        )

    def _drop_fences(self, found: Mapping[str, Sequence[Entry]]) -> None:
        """Drop the aliases of former holders that did not, so that whatever is read from here on has their
        last writes. If this process does not get the lease, the next holder would have done so."""
        former = [each for entries in found.values() for each in entries if each.expires_at is not None]
        if not self._fences_writes:
            return
        for each in former:
            self._store.unfence(each.alias)
            self._store.unfence(each.ledger_alias)
        if former:
            time.sleep(self.policy.fenced_write)

    def _create_fence(self, collection: str, alias: str) -> None:
        if self._fences.get(collection) == alias or not self._store.exists(collection):
            return
        if self._store.alias_target(collection) is None:
            self._store.fence(collection, alias)
            self._fences[collection] = alias

    def _release(self) -> None:
        self._over.set()
        if self._renewing:
            self._renewing.join()
            self._renewing = None
        # If the database does not answer, the lease expires and the next holder drops the aliases.
        with suppress(HubnessError):
            for alias in list(self._fences.values()):
                self._store.unfence(alias)
            self._put(entry.model_copy(update={"expires_at": None}) for entry in self._entries.values())
        self._entries = {}
        self._fences.clear()

    def _renew(self) -> None:
        while not self._over.wait(self.policy.seconds / RENEWALS):
            # If the database does not answer, the next round tries again; `check` finds a lost lease.
            with suppress(Exception):
                expiry = self._expiry()
                entries = list(self._entries.values())
                self._put(entry.model_copy(update={"expires_at": expiry}) for entry in entries)

    def _look(self) -> None:
        if not self._entries:
            raise LeaseLost(f"the lease on {', '.join(map(repr, self._names))} is not held")
        began = time.monotonic()
        for name, mine in list(self._entries.items()):
            entries = self._read(name)
            newer = [each for each in entries if each.token > mine.token]
            if newer or all(each.owner_id != mine.owner_id for each in entries):
                self._seen = -math.inf
                holder = f"{max(newer, key=lambda each: each.token).owner} has it" if newer else "it is gone"
                raise LeaseLost(
                    f"the lease on {name!r} was lost, {holder}: this process changes nothing more"
                )
        self._seen = began

    def _expiry(self) -> datetime:
        return now() + timedelta(seconds=self.policy.seconds)

    def _read(self, name: str) -> list[Entry]:
        return read_entries(self._store, name)

    def _put(self, entries: Iterable[Entry]) -> None:
        records = [Record(each.key, _group(each.collection), each.model_dump_json()) for each in entries]
        if records:
            self._store.put_records(LEDGER, records)

    def _forget(self, entries: Iterable[Entry]) -> None:
        keys: dict[str, list[str]] = {}
        for each in entries:
            keys.setdefault(each.collection, []).append(each.key)
        for collection, of_it in keys.items():
            self._store.drop_records(LEDGER, _group(collection), of_it)


def lease_on(store: Store, info: CollectionInfo) -> Lease:
    """Return the lease that every job takes that changes biases: on the collection and on those beside it."""
    sides = [state.beside.side for state in info.states.values() if state.beside and state.beside.side]
    return Lease(store, info.name, *sides)


def read_entries(store: Store, collection: str) -> list[Entry]:
    """Return the records of the lease on a collection, the one with the highest token last. Raises
    StateError."""
    entries = []
    for record in store.records(LEDGER, _group(collection)):
        try:
            entries.append(Entry.model_validate_json(record.body))
        except ValidationError as error:
            raise StateError(
                f"the lease record {record.key!r} is broken ({error.errors()[0]['msg']}): delete it from "
                f"{LEDGER!r}"
            ) from None
    return sorted(entries, key=lambda entry: entry.token)


def holder_of(store: Store, collection: str) -> Entry | None:
    """Return the record of the process that may be at work on a collection; None if there is none."""
    entries = read_entries(store, collection)
    return entries[-1] if entries and entries[-1].is_held else None


def forget_leases(store: Store, *collections: str) -> None:
    """Delete the lease records of collections that are gone for good."""
    for collection in collections:
        store.drop_records(LEDGER, _group(collection))


def _group(collection: str) -> str:
    return f"{LEASES}/{collection}"
