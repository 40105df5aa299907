"""The cached states of collections, for the clients of any database. No I/O.

A client reads the state of a collection once in its TTL, and works by it meanwhile. Where that went
wrong because the collection has changed, the client reads the state and works once more.
"""

from __future__ import annotations

import numbers
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from milvus_hubness.basics.logs import log
from milvus_hubness.clients.steps import CUT_OVER_SECONDS, Ask, Operation
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.state import BankReference, CollectionState
from milvus_hubness.errors import DualWriteFailed, InvalidParameter, StoreError
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.records import DualWrite

T = TypeVar("T")
Item = TypeVar("Item")

_NOT_ON_COPY = (
    "a write reached %r, but not %r: a later pass repairs an unfinished copy, and a former one serves "
    "for some seconds those who have not heard of the switch: %s"
)

NO_COLLECTION = CollectionId(name="")


class Lifetime(NamedTuple):
    """How long a cached state counts, in seconds of the monotonic clock."""

    expires_at: float
    """End of the TTL."""
    serves_until: float
    """End of the time for which a copy that has lost its name serves those who work by this state."""


OVER = Lifetime(0.0, 0.0)


@dataclass(frozen=True)
class CachedCollection:
    """The state of a collection in the cache, as its properties had it when they were read.

    A client of a database adds what else it reads with them. Without a name it is that of a
    collection that does not exist.
    """

    collection_id: CollectionId = NO_COLLECTION
    """Which collection it is. Without a correction the name may be an alias."""

    states: Mapping[str, CollectionState] = field(default_factory=dict)
    """The states of its corrected fields, by field."""

    dual_write: DualWrite | None = None
    """The copy that also gets the writes, during a migration."""

    identity: str = field(default="", compare=False)
    """Separates the collection from a later one of its name, see CollectionInfo; often empty."""

    lifetime: Lifetime = field(default=OVER, compare=False)
    """How long it counts."""

    checked: set[Any] = field(default_factory=set, compare=False)
    """What the properties name and was found to belong to this collection."""

    @property
    def exists(self) -> bool:
        return bool(self.collection_id.name)

    @cached_property
    def real_name(self) -> str:
        """The name for all requests by this state; empty for the name that the user gave.

        What this state encodes is meant for the collection that it was read from. By an alias it
        could reach the copy to which the alias has moved since, whose vectors may have the same
        width and other columns. An uncorrected collection has nothing that could be mixed up.
        """
        return self.collection_id.name if self.states or self.dual_write else ""


C = TypeVar("C", bound=CachedCollection)


def expect_state_ttl(seconds: Any) -> None:
    """Check a TTL: a number of at least 0. Raises InvalidParameter."""
    expect_number_of("seconds", "state_ttl", seconds)


def expect_number_of(unit: str, name: str, value: Any) -> None:
    """Check a setting of a client: a number of at least 0, infinity too. Raises InvalidParameter."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and value >= 0):
        raise InvalidParameter(f"{name} must be a number of {unit} of at least 0, not {value!r}")


class CachedStates(ABC, Generic[C]):
    """The cache of collection states, and attempts by it; a client of a database says how to read.

    state_ttl: TTL of a state, in seconds. cut_over_seconds: how much longer a former copy serves.
    Raises InvalidParameter for an invalid TTL.
    """

    failures: ClassVar[tuple[type[Exception], ...]]
    """The errors of this package and of the database's own client."""

    perhaps_outdated: ClassVar[tuple[type[Exception], ...]]
    """Errors of a call that may be due to an outdated collection state."""

    writes_can_be_repeated: ClassVar[bool] = False
    """Whether a caller may make any write again as it was, as no write adds a row."""

    write_again: ClassVar[str] = "Write again"
    """The remedy of a write of which a part is missing."""

    def __init__(self, state_ttl: float, cut_over_seconds: float = CUT_OVER_SECONDS) -> None:
        expect_state_ttl(state_ttl)
        self._cut_over_seconds = cut_over_seconds
        self._state_ttl = state_ttl

        self._states: dict[str, C] = {}
        """States by the names that calls use."""
        self._forgotten = 0
        """How often states were invalidated."""

    # -- what the client of a database adds --------------------------------------------------------

    @abstractmethod
    def read_state(self, collection: str, timeout: float | None) -> Operation[C]:
        """Return the state as the collection has it now, which expires `state_ttl` seconds after it
        was requested. Without a collection it has no name: the call that follows reports that.
        """

    @abstractmethod
    def bodies_of(self, keys: Sequence[str]) -> Operation[list[str]]:
        """Return these records of the ledger, as JSON; the key of a migration is its target."""

    @abstractmethod
    def load_bank(self, reference: BankReference) -> Operation[StoredBank]:
        """Read a bank from the database."""

    @abstractmethod
    def text_of(self, error: Exception) -> str:
        """Return the message of an error."""

    @abstractmethod
    def exceeds_limit(self, error: Exception) -> bool:
        """Whether the database refused a request unread that it may take in smaller parts."""

    def sent_in_parts(self, collection: str, error: Exception) -> None:
        """Note that a request was sent in parts after this error."""

    @abstractmethod
    def copy_now(
        self, collection: str, cached: C, dual_write: DualWrite, timeout: float | None
    ) -> Operation[tuple[C, DualWrite] | None]:
        """Return the state and the copy by which a write that did not reach the copy is to be made on
        it once more, as names may have moved; None if the dual writes have ended.
        """

    # -- the cache ---------------------------------------------------------------------------------

    def lifetime(self, requested_at: float) -> Lifetime:
        """Return how long a state counts that was requested at that moment."""
        expires_at = requested_at + self._state_ttl
        return Lifetime(expires_at, expires_at + self._cut_over_seconds)

    def forget(self, collection: str | None = None) -> None:
        """Drop the cached state of a collection, or of all collections."""
        self._forgotten += 1
        if collection is None:
            self._states.clear()
        else:
            self._states.pop(collection, None)

    def remembered(self, collection: str) -> C | None:
        """Return the state if it is cached and not older than the TTL."""
        cached = self._states.get(collection)
        if cached is None or time.monotonic() >= cached.lifetime.expires_at:
            return None
        return cached

    def cached_state(self, collection: str, timeout: float | None = None) -> Operation[C]:
        """Return the collection state, read at most once in `state_ttl` seconds.

        A missing collection has an empty state: the call that follows
        reports it in the database's own words.
        """
        if remembered := self.remembered(collection):
            return remembered

        forgotten = self._forgotten
        cached = yield from self.read_state(collection, timeout)
        # Unless another task or thread has invalidated the state while it was read.
        if cached.exists and forgotten == self._forgotten:
            self._states[collection] = cached
        return cached

    def forgetting(self, call: Ask) -> Operation[Any]:
        """Make a call that may outdate every cached state."""
        try:
            return (yield call)
        finally:
            self.forget()

    def read_again(self, collection: str, timeout: float | None = None) -> Operation[C]:
        """Return the state as the collection has it now."""
        self.forget(collection)
        return self.cached_state(collection, timeout)

    # -- attempts ----------------------------------------------------------------------------------

    def retrying(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[C], Operation[T]],
        again: Callable[[C], Operation[T]] | None = None,
    ) -> Operation[T]:
        """Run an operation as `used` does, and return its result."""
        result, _ = yield from self.used(collection, timeout, call, again)
        return result

    def used(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[C], Operation[T]],
        again: Callable[[C], Operation[T]] | None = None,
        *,
        failed: tuple[C, Exception] | None = None,
    ) -> Operation[tuple[T, C]]:
        """Run `call` on the cached state, and again if it fails and the collection has changed.

        Return its result and the state that it ran on.

        So the operation `call` may run several times, each time from
        its start and on another state, and any of its requests may
        have been answered before: it must be one that can be repeated.

        again: repeats a write. It is run if the name leads to another collection at the end, and
        the write went to the former one alone. failed: the state and the error of a first attempt.
        """
        if failed is None:
            used = self.remembered(collection) or (
                yield from self.cached_state(collection, timeout)
            )
            try:
                result = yield from call(used)
            except self.perhaps_outdated as error:
                failed = used, error
        if failed is not None:
            result, used = yield from self._repeated(collection, timeout, call, *failed)

        assert used is not None, "an attempt has its state"
        if not used.real_name:
            return result, used
        is_outlived = time.monotonic() > used.lifetime.serves_until
        if again is not None:
            is_outlived = self.remembered(collection) is not used
        if not is_outlived:
            return result, used

        # The former copy serves clients until their states have expired, and no longer: this call
        # began before that, and was held up. Its answer may be out of date, or its write lost.
        try:
            now = yield from self.cached_state(collection, timeout)
        except self.failures as error:
            if again is None or self.writes_can_be_repeated:
                raise

            # Of a class after which no caller repeats the call, which would store rows twice.
            raise StoreError(
                f"the write to {collection!r} is stored, but whether a copy has taken its name "
                f"meanwhile could not be read: {self.text_of(error)}. {self.write_again}"
            ) from error

        if again is None:
            is_moved = (now.collection_id, now.states) != (used.collection_id, used.states)
        else:
            is_moved = used.dual_write is None and not used.collection_id.is_same(now.collection_id)
        if not is_moved:
            return result, used

        repeated = again or call
        try:
            return (yield from repeated(now)), now
        except self.perhaps_outdated as error:
            return (yield from self._repeated(collection, timeout, repeated, now, error))

    def written(
        self,
        collection: str,
        timeout: float | None,
        write: Callable[[C], Operation[T]],
        again: Callable[[C], Operation[T]] | None = None,
    ) -> Operation[tuple[T, C]]:
        """Run write(cached) as `used` does, with `again` or else `write` for a repetition.

        Return the result, and the state that says whether a copy gets the write, too: that of the
        write if it names one, else the newest, because a migration may have begun meanwhile.
        """
        result, cached = yield from self.used(collection, timeout, write, again or write)
        if cached.dual_write is not None:
            return result, cached

        try:
            return result, (yield from self.cached_state(collection, timeout))
        except self.failures:
            return result, cached

    def _repeated(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[C], Operation[T]],
        state: C,
        error: Exception,
    ) -> Operation[tuple[T, C]]:
        """Run `call` again after an error on this state, as `used` says.

        Raises the error if it is not due to a change of the collection.
        """
        changed = yield from self.read_again(collection, timeout)
        if changed == state:
            raise error

        return (yield from call(changed)), changed

    # -- the collections that properties name ------------------------------------------------------

    def expect_banks(self, collection: str, state: CollectionState) -> Operation[None]:
        """Raise StateError unless the banks of a state belong to this collection.

        It is for the time at which a bank is read: a bank in memory was checked with its state.
        """
        owner = (yield from self.cached_state(collection)).collection_id
        if keys := owner.bank_records(state):
            owner.require_listed_banks(state, (yield from self.bodies_of(keys)))

    def expect_copy(
        self, cached: C, dual_write: DualWrite, timeout: float | None = None
    ) -> Operation[None]:
        """Raise StateError unless a migration lets the writes go to this copy, too."""
        if dual_write in cached.checked:
            return

        origin = cached.collection_id
        copy = dual_write.collection
        permits = dual_write.permits(origin, (yield from self.bodies_of((origin.name, copy))))

        # Another collection may have got the name. The write that follows needs the state anyway.
        found = yield from self.read_again(copy, timeout)
        if not found.exists:
            return  # The write reports it.

        dual_write.require_copy(origin, permits, found.states, found.identity)
        cached.checked.add(dual_write)

    # -- requests in parts, and writes to a copy ---------------------------------------------------

    def in_parts(
        self,
        collection: str,
        parts: Iterable[Sequence[Item]],
        put: Callable[[Sequence[Item]], Operation[T]],
        stopped: Callable[[int, list[T], Exception], Exception] | None = None,
    ) -> Operation[list[T]]:
        """Run put(part) for each part, in order, and for its halves where the database refuses it as
        too large; return the answers.

        stopped: returns the error in place of one that came after answers, from the number of items
        that these are about, the answers, and the error.
        """
        answers: list[T] = []
        item_count = 0
        waiting = list(parts)[::-1]  # The next part is at the end.

        while waiting:
            part = waiting.pop()
            try:
                answers.append((yield from put(part)))
            except self.failures as error:
                # The database refuses such a request before it reads it, so nothing is done twice.
                if len(part) > 1 and self.exceeds_limit(error):
                    self.sent_in_parts(collection, error)
                    middle = len(part) // 2
                    waiting += [part[middle:], part[:middle]]
                    continue

                if stopped is None or not answers:
                    raise

                raise stopped(item_count, answers, error) from error

            item_count += len(part)

        return answers

    def reach_copy(
        self,
        collection: str,
        cached: C,
        timeout: float | None,
        work: Callable[[C, DualWrite], Operation[None]],
    ) -> Operation[None]:
        """Run work(cached, dual_write), which makes a write on the copy that this state names, and
        again if the copy has moved.

        Raises DualWriteFailed if the migration needs the write and it does not reach the copy.
        """
        dual_write = cached.dual_write
        if dual_write is None:
            return

        try:
            yield from self.expect_copy(cached, dual_write, timeout)
            yield from work(cached, dual_write)
            return
        except self.failures as error:
            if not dual_write.required:
                log.warning(_NOT_ON_COPY, collection, dual_write.collection, self.text_of(error))
                return

        # A cutover or a rollback may have moved the names: the second attempt reads them again.
        self.forget(dual_write.collection)
        try:
            now = yield from self.copy_now(collection, cached, dual_write, timeout)
            if now is None:
                return

            cached, dual_write = now
            yield from self.expect_copy(cached, dual_write, timeout)
            yield from work(cached, dual_write)
        except self.failures as error:
            raise DualWriteFailed(
                f"the write reached {collection!r}, but not its copy {dual_write.collection!r}: "
                f"{self.text_of(error)}. {self.write_again}"
            ) from error
