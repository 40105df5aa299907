"""The lease: a lock in the database that lets one job at a time change a collection.

Milvus has no compare-and-set. *Flags decide which process holds the lease*: a process reads the
records, writes its own with the next token, and reads them again. If two write the same token, at
least the one that reads last sees the other and withdraws (Herlihy and Shavit, The Art of
Multiprocessor Programming, 2008, section 2.9). The highest token holds the lease, and a holder
renews only its own record, so a renewal that arrives late changes nothing.

*Fencing aliases stop late writes.* A holder writes by an alias,
`<collection>__lease_<token>_<digits>`, never by the name (`Lease.store`). The next holder first
drops this alias, so that the database refuses delayed writes. A holder does the same to its own
failed writes (`Lease.renew`). It records an alias before it creates it, and reads the lease
again afterwards, so that at least one of a holder and its successor sees the other.

The clocks of machines may differ by `skew` seconds. If they differ by more, a holder can lose its
lease too early and then stops with LeaseLost; its writes are fenced all the same.
"""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache

from pydantic import TypeAdapter

from milvus_hubness.errors import HubnessError, LeaseHeld, LeaseLost, StateError, StoreError
from milvus_hubness.jobs.common.lease_records import (
    LEASES,
    Entry,
    Fence,
    LeasePolicy,
    Owner,
    now,
    read_ledger,
)
from milvus_hubness.jobs.store.ownership import LEDGER, CollectionId, Helper
from milvus_hubness.jobs.store.protocols import Ledger, Renaming, Store, capability
from milvus_hubness.jobs.store.records import CollectionInfo, Record

RENEWALS = 3
"""Number of renewals within the lifetime of a lease."""

CHECKS = 10
"""Most reads of the records within the lifetime of a lease, however often `check` is called."""

ATTEMPTS = 10
"""How often a process tries to win against others that claim the lease at the same moment, and to read
whether it holds the lease.
"""

LATEST_ANSWER = 0.5
"""Share of the lifetime within which an answer about the lease holds: renewals leave two thirds of it."""

LONGEST_PAUSE = 0.2
"""Longest pause before the second attempt, in seconds; it grows with every further attempt."""

FENCE = "__lease_"
"""What follows the name of the collection in a fencing alias."""

DROPPED = "__dropped_"
"""What follows the name of a collection that is about to be dropped."""

LONGEST_NAME = 200
"""Maximum number of characters of a collection's name in an alias: Milvus allows 255 in all."""


BUSY = "{}: wait until it ends, or stop it"


class Lease:
    """The lease on one or more collections: a context manager that renews it in the background.

    collections: their real names; they need not exist yet. fenced:
    False for a lease on something else. Its attribute `store` is the
    store, with fenced writes. Raises LeaseHeld, which names the holder.
    """

    def __init__(
        self,
        store: Store,
        *collections: str,
        policy: LeasePolicy | None = None,
        fenced: bool = True,
    ) -> None:
        self.policy = policy or LeasePolicy.default()
        self._unfenced = store
        self._names = tuple(dict.fromkeys(collections))

        self._owner_id = uuid.uuid4().hex
        self._entries: dict[str, Entry] = {}
        self._checked_at = -math.inf

        self._fences_writes = fenced
        self._fences: dict[str, Fence] = {}
        self._undropped: set[str] = set()
        # A write that needs an alias waits while the alias is being renewed.
        self._renewal = threading.RLock()
        self.store: Store = store.fenced(self)

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
        """Extend the lease to further collections until the end of the block. Raises LeaseHeld."""
        if further := [name for name in collections if name not in self._entries]:
            self._claim(further)

    def reconnect(self, store: Store) -> None:
        """Go on by another connection to the same database."""
        self._unfenced = store
        self.store = store.fenced(self)

    @property
    def token(self) -> int:
        """The fencing token of the first collection."""
        return self._entries[self._names[0]].token

    @property
    def owner_id(self) -> str:
        """The id of this holding of the lease, which its records have."""
        return self._owner_id

    def fence(self, collection: str) -> None:
        """Write by a fencing alias of a leased collection that is new. Raises LeaseLost."""
        made = self._make_fence(collection)
        self.check_now()
        self._fences[collection] = made

    def alias_of(self, collection: str) -> str | None:
        """Return the fencing alias, as Fences.alias_of does; wait while it is being renewed."""
        with self._renewal:
            fence = self._fences.get(collection)
        return fence.alias if fence else None

    def token_of(self, collection: str) -> int:
        """Return the fencing token, as Fences.token_of does."""
        with self._renewal:
            fence = self._fences.get(collection)
        return fence.token if fence else 0

    def renew(self, collection: str) -> None:
        """Replace the alias of a collection, as Fences.renew does."""
        with self._renewal:
            self._drop_fence(self._fences[collection])
            # The server may still apply a write whose alias it resolved before the drop.
            time.sleep(self.policy.fenced_write)

            made = self._make_fence(collection)
            self.check_now()
            self._fences[collection] = made

    def drop_helper(self, helper: Helper, owner: CollectionId) -> None:
        """Drop a helper collection of `owner` if it exists, and no other one that got its name.

        Raises LeaseLost, and StateError if the collection of this name is no helper of `owner`.
        """
        store = self.store

        def expect_own(name: str) -> None:
            listed = store.listed_helpers(owner)
            helper.require_owner(owner, store.properties_of(name), listed)

        self.drop(helper.collection, expect_own)

    def drop(self, collection: str, check: Callable[[str], None] | None = None) -> None:
        """Drop a leased collection if it exists, and what an interrupted drop of it has left.

        This cannot be fenced, and may arrive when another job uses the name: so the collection is
        renamed first, and dropped if the lease is still held then.

        check: raises if the collection of this name must stay; it sees the name that nobody else
        knows, so that nothing else is dropped. Raises as it does, and LeaseLost.
        """
        self.include(collection)
        store = self.store
        token = self._entries[collection].token
        if not isinstance(store, Renaming):
            if check is not None and store.exists(collection):
                check(collection)
            self.check_now()
            store.drop(collection)
            return

        self._drop_renamed(collection, check)
        if not store.exists(collection):
            return

        self.check_now()
        dropped = f"{collection[:LONGEST_NAME]}{DROPPED}{token}_{self._owner_id[:8]}"
        # Before the renaming: an interrupted drop leaves the collection under this name.
        group = _dropped_group(collection)
        store.put_records(LEDGER, [Record(f"{group}/{dropped}", group, dropped)])
        store.rename(collection, dropped)
        try:
            if check is not None:
                check(dropped)
            self.check_now()
        except (LeaseLost, StateError):
            # Without the check of a fenced store, which the lease may not pass any more.
            capability(self._unfenced, Renaming).rename(dropped, collection)
            raise

        if fence := self._fences.pop(collection, None):
            self._drop_fence(fence)
        self._drop_renamed(collection, check)

    def _drop_renamed(self, collection: str, check: Callable[[str], None] | None) -> None:
        """Drop what `drop` has renamed; a run that was killed may not have checked it."""
        store = self.store
        group = _dropped_group(collection)
        for record in store.records(LEDGER, group):
            if store.exists(record.body):
                if check is not None:
                    check(record.body)
                store.drop(record.body)
            store.drop_records(LEDGER, group, [record.key])

    def check(self) -> None:
        """Raise LeaseLost if another process holds the lease; call this before every write.

        A read of the records stays valid for 1/`CHECKS` of the lease's lifetime: nobody can take
        the lease sooner.
        """
        if time.monotonic() - self._checked_at >= self.policy.seconds / CHECKS:
            self.check_now()

    def check_now(self) -> None:
        """Read the records. Raises LeaseLost if another process holds the lease."""
        if not self._entries:
            raise LeaseLost(f"the lease on {self._named} is not held")

        for _ in range(ATTEMPTS):
            # What is read may be as old as the request.
            began = time.monotonic()
            self._expect_held()
            self._checked_at = began
            # An answer that came late says nothing of now, as to a process that was stopped: another
            # one may have taken the lease meanwhile.
            if time.monotonic() - began < LATEST_ANSWER * self.policy.seconds:
                return

        raise LeaseLost(
            f"whether the lease on {self._named} is still held cannot be known: {ATTEMPTS} answers "
            f"of the database took half as long as it lasts, {self.policy.seconds:g} s"
        )

    @property
    def _named(self) -> str:
        """The names of the collections, for messages."""
        return ", ".join(map(repr, self._names))

    def _expect_held(self) -> None:
        """Raise LeaseLost if the records say that another process holds the lease."""
        held = dict(self._entries)
        current = self._read_back(held)
        for name, mine in held.items():
            entries = [entry for entry in current if entry.collection == name]
            newer = [entry for entry in entries if entry.token > mine.token]
            if newer or all(entry.owner_id != mine.owner_id for entry in entries):
                self._checked_at = -math.inf
                holder = f"{newer[-1].owner} has it" if newer else "it is gone"
                raise LeaseLost(
                    f"the lease on {name!r} was lost, {holder}: this process changes nothing more"
                )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error within the block into LeaseLost if another process holds the lease."""
        try:
            yield
        except LeaseLost:
            raise
        except HubnessError as error:
            try:
                self.check_now()
            except LeaseLost as lost:
                raise lost from error

            raise

    def _claim(self, names: Sequence[str]) -> None:
        for attempt in range(ATTEMPTS):
            read = self._former_records(names)
            former = {
                name: [record for record in read if record.collection == name] for name in names
            }
            mine = {
                name: self._next_entry(name, _entries(records)) for name, records in former.items()
            }
            planned = self._planned(mine.values())

            began = time.monotonic()
            try:
                if self._wins(former, mine, planned):
                    break
            except BaseException:
                with suppress(HubnessError):
                    self._withdraw(mine, planned)
                raise

            # Another process claimed it at the same moment; the random pause lets one go first.
            self._withdraw(mine, planned)
            time.sleep(random.uniform(0, LONGEST_PAUSE * (attempt + 1)))
        else:
            raise LeaseHeld(
                f"the lease on {', '.join(map(repr, names))} could not be taken: in {ATTEMPTS} "
                "attempts another process tried at the same moment every time: try again"
            )

        # Only after the win: had a process that withdraws removed the former records, the
        # highest token would be gone, and a later holder would get one that is not higher.
        for name, records in former.items():
            self._forget(name, [record for record in records if record.token < mine[name].token])

        # An extension reads the records of the further collections only: the last check stays.
        if not self._entries:
            self._checked_at = began
        self._entries |= mine
        if time.monotonic() - began >= self.policy.seconds / RENEWALS:
            # The records may be about to expire: the database hid them for a while.
            self._put_expiry(self._expiry())

        if self._renewing is None:
            self._over.clear()
            self._renewing = threading.Thread(
                target=self._renew, name="milvus-hubness-lease", daemon=True
            )
            self._renewing.start()

    def _former_records(self, names: Sequence[str]) -> list[Entry | Fence]:
        """Return the lease records of these collections, with those that the database may hide.

        Every alias has a record, which is older than it. The database hides rows, but no aliases:
        so one without a record says that some are hidden.
        """
        store = self._unfenced
        strays: set[str] = set()

        def names_all_fences(read: Sequence[Entry | Fence]) -> bool:
            strays.clear()
            for name in names if self._fences_writes else ():
                # A renamed collection has aliases of its former name.
                own = f"{name[:LONGEST_NAME]}{FENCE}"
                strays.update(each for each in store.fences_of(name) if each.startswith(own))
            strays.difference_update(fence.alias for fence in read if isinstance(fence, Fence))
            return not strays

        read = store.read_back(LEDGER, lambda: _records(store, *names), names_all_fences)
        # These came late, after their records were gone: nobody may write by them.
        for alias in strays:
            store.unfence(alias)
        if strays:
            time.sleep(self.policy.fenced_write)
        return read

    def _next_entry(self, name: str, entries: Sequence[Entry]) -> Entry:
        """Return the entry by which this process claims the lease. Raises LeaseHeld."""
        token = entries[-1].token if entries else 0
        for entry in entries:
            if entry.token == token and entry.is_held:
                raise LeaseHeld(BUSY.format(entry))

        return Entry(
            collection=name,
            token=token + 1,
            owner_id=self._owner_id,
            owner=Owner.here(),
            skew=self.policy.skew,
            expires_at=self._expiry(),
        )

    def _wins(
        self,
        former: Mapping[str, Sequence[Entry | Fence]],
        mine: Mapping[str, Entry],
        planned: Sequence[Fence],
    ) -> bool:
        """Write this process's records and aliases; return whether it alone wrote the highest token
        of every one.
        """
        # The records come first: what a process that is killed here has
        # created is in the ledger, where the next holder looks for it.
        self._put([*mine.values(), *planned])
        self._drop_former_fences(former)
        for fence in planned:
            # All collections of a lease share one alias of the ledger.
            if self.alias_of(fence.target) != fence.alias:
                self._create(fence)
                self._fences[fence.target] = fence

        # This read comes after all writes above, so it sees every rival that does not see them.
        entries = self._read_back(mine)
        if not _are_shown(mine, entries):
            names = ", ".join(map(repr, mine))
            raise StoreError(
                f"the lease on {names} cannot be taken: the database does not show the rows of "
                f"{LEDGER!r} that it acknowledges: repeat the command in a minute"
            )

        for name, claim in mine.items():
            top = [
                entry.owner_id
                for entry in entries
                if entry.collection == name and entry.token >= claim.token
            ]
            if top != [self._owner_id]:
                return False

        return True

    def _read_back(self, mine: Mapping[str, Entry]) -> list[Entry]:
        """Return the lease records of these collections, in which this process has records."""
        # Who takes a lease over drops the aliases of the former holder before its records.
        return self._unfenced.read_back(
            LEDGER,
            lambda: read_entries(self._unfenced, *mine),
            lambda entries: _are_shown(mine, entries) or self._is_fenced_off(),
        )

    def _is_fenced_off(self) -> bool:
        """Whether an alias by which this process writes is gone."""
        aliases = [fence.alias for fence in self._fences.values()]
        return not all(map(self._unfenced.exists, aliases))

    def _planned(self, entries: Iterable[Entry]) -> list[Fence]:
        """Return the aliases that this process must create for the collections of `entries`."""
        planned: list[Fence] = []
        if not self._fences_writes:
            return planned

        store = self._unfenced
        for entry in entries:
            name = entry.collection
            # Only a collection of that name can have an alias; some are created later.
            if store.exists(name) and store.alias_target(name) is None:
                planned.append(_fence(entry, name))

            # The ledger has one alias for all collections of the lease.
            ledger = self._fences.get(LEDGER) or next(
                (fence for fence in planned if fence.target == LEDGER), None
            )
            planned.append(_fence(entry, LEDGER, ledger.alias if ledger else ""))
        return planned

    def _create(self, fence: Fence) -> None:
        # Before the request, which may create the alias even if it fails.
        self._undropped.add(fence.alias)
        self._unfenced.fence(fence.target, fence.alias)

    def _make_fence(self, target: str) -> Fence:
        """Record and create a new alias of a collection or
        the ledger; before a write by it, call `check_now`.
        """
        attempt = 0
        while True:
            entries = list(self._entries.values()) if target == LEDGER else [self._entries[target]]
            made = _fence(entries[0], target)
            self._put(_fence(entry, target, made.alias) for entry in entries)
            try:
                self._create(made)
                return made
            except HubnessError:
                self.check_now()
                attempt += 1
                if attempt == ATTEMPTS:
                    raise

            time.sleep(random.uniform(0, LONGEST_PAUSE * attempt))

    def _drop_fence(self, fence: Fence) -> None:
        self._unfenced.unfence(fence.alias)
        self._undropped.discard(fence.alias)

    def _withdraw(self, mine: Mapping[str, Entry], planned: Sequence[Fence]) -> None:
        for fence in planned:
            if self._fences.get(fence.target) == fence:
                del self._fences[fence.target]
                self._drop_fence(fence)
        for name, entry in mine.items():
            self._forget(name, [entry, *(fence for fence in planned if fence.collection == name)])

    def _drop_former_fences(self, former: Mapping[str, Sequence[Entry | Fence]]) -> None:
        """Drop the aliases that former holders left, so that later reads see all their writes."""
        records = [record for group in former.values() for record in group]
        # Who released the lease has dropped its aliases before.
        released = {entry.owner_id for entry in _entries(records) if entry.expires_at is None}
        left = {
            record.alias
            for record in records
            if isinstance(record, Fence) and record.owner_id not in released
        }
        for alias in left:
            self._unfenced.unfence(alias)
        # The server may still apply writes whose alias it resolved before the drop.
        if left:
            time.sleep(self.policy.fenced_write)

    def _release(self) -> None:
        self._over.set()
        if self._renewing:
            self._renewing.join()
            self._renewing = None

        # If the database does not answer, the lease expires and the next holder drops the aliases.
        with suppress(HubnessError):
            for alias in sorted(self._undropped):
                self._unfenced.unfence(alias)
            # The records stay, without an expiry: the next token must be higher.
            self._put_expiry(None)

        self._entries = {}
        self._fences = {}
        self._undropped = set()

    def _renew(self) -> None:
        while not self._over.wait(self.policy.seconds / RENEWALS):
            # If the database does not answer, the next round
            # tries again; `check` notices a lost lease.
            with suppress(Exception):
                self._put_expiry(self._expiry())

    def _expiry(self) -> datetime:
        return now() + timedelta(seconds=self.policy.seconds)

    def _put_expiry(self, moment: datetime | None) -> None:
        self._put(
            entry.model_copy(update={"expires_at": moment})
            for entry in list(self._entries.values())
        )

    def _put(self, records: Iterable[Entry | Fence]) -> None:
        rows = [
            Record(record.key, _group(record.collection), record.model_dump_json())
            for record in records
        ]
        if rows:
            self._unfenced.put_records(LEDGER, rows)

    def _forget(self, collection: str, records: Sequence[Entry | Fence]) -> None:
        if records:
            self._unfenced.drop_records(
                LEDGER, _group(collection), [record.key for record in records]
            )


def lease_on(store: Store, info: CollectionInfo) -> Lease:
    """Return the lease for jobs that change biases: on the collection and its side collections."""
    sides = [side for state in info.states.values() for side in state.codec.sides]
    return Lease(store, info.name, *sides)


@contextmanager
def leasing(
    store: Store, name: str, validate: Callable[[CollectionInfo], object] = lambda _: None
) -> Iterator[tuple[Lease, CollectionInfo]]:
    """Hold the lease on the collection that `name` leads to, even if an alias moves; yield the
    lease and current info. validate: raises, before the lease is taken, if the collection is not
    valid. Raises LeaseHeld.
    """
    while True:
        validated = store.info(name, counted=False)
        validate(validated)
        with lease_on(store, validated) as lease:
            # An alias that moved before the lease was held leads to another collection now.
            info = store.info(name, counted=False)
            if info.name == validated.name:
                yield lease, info
                return


def read_entries(store: Store, *collections: str) -> list[Entry]:
    """Return the lease records of collections, ordered by token. Raises StateError."""
    return _entries(_records(store, *collections))


def _records(store: Ledger, *collections: str) -> list[Entry | Fence]:
    stored = store.records(LEDGER, *map(_group, collections))
    return [read_ledger(_adapter().validate_json, record) for record in stored]


@cache
def _adapter() -> TypeAdapter[Entry | Fence]:
    return TypeAdapter(Entry | Fence)


def _entries(records: Iterable[Entry | Fence]) -> list[Entry]:
    return sorted(
        (record for record in records if isinstance(record, Entry)), key=lambda entry: entry.token
    )


def _are_shown(mine: Mapping[str, Entry], entries: Sequence[Entry]) -> bool:
    """Whether the records of a process are among these, unless a later holder removed them."""
    return all(
        any(
            entry.collection == name
            and (entry.owner_id == claim.owner_id or entry.token > claim.token)
            for entry in entries
        )
        for name, claim in mine.items()
    )


def _fence(entry: Entry, target: str, alias: str = "") -> Fence:
    """Return the record of `alias`, or of a new alias if that is empty."""
    token = "" if target == LEDGER else f"{entry.token}_"
    return Fence(
        collection=entry.collection,
        token=entry.token,
        owner_id=entry.owner_id,
        target=target,
        alias=alias or f"{target[:LONGEST_NAME]}{FENCE}{token}{uuid.uuid4().hex[:8]}",
    )


def holder_of(store: Store, collection: str) -> Entry | None:
    """Return the record of the process that may be changing a collection; None if there is none."""
    entries = read_entries(store, collection)
    return entries[-1] if entries and entries[-1].is_held else None


def expect_free(store: Store, *collections: str) -> None:
    """Raise LeaseHeld, as a lease would, if another process may be changing one of these.

    Read only: for work that comes before the lease.
    """
    for collection in collections:
        if holder := holder_of(store, collection):
            raise LeaseHeld(BUSY.format(holder))


def forget_leases(store: Ledger, *collections: str) -> None:
    """Delete the lease records of collections that are gone for good."""
    for collection in collections:
        store.drop_records(LEDGER, _group(collection))


def _dropped_group(collection: str) -> str:
    return f"dropped/{collection}"


def _group(collection: str) -> str:
    return f"{LEASES}/{collection}"
