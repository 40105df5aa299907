"""The client's caches: collection states with a TTL, and banks up to a number of bytes. No I/O."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from pymilvus.exceptions import MilvusException

from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.state import CollectionState, Profile, read_states
from milvus_hubness.errors import (
    BankTooLarge,
    CollectionNotFound,
    DimensionMismatch,
    EmptyBank,
    StateError,
    WriteIntentFailed,
)
from milvus_hubness.jobs.store.ownership import (
    LEDGER,
    CollectionId,
    Helper,
    expect_copy,
    expect_helper,
    side_helper,
)
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    DualWrite,
    OnlineBank,
    WriteIntentLog,
)
from milvus_hubness.milvus.client.candidates import rewrite_of
from milvus_hubness.milvus.client.held_errors import HeldErrors
from milvus_hubness.milvus.client.messages import expect_state_ttl
from milvus_hubness.milvus.client.query_samples import online_banks_in
from milvus_hubness.milvus.client.rewrite import Asking, Reading, Rewrite
from milvus_hubness.milvus.client.steps import (
    Ask,
    ClientPolicy,
    InStore,
    LearnSchema,
    Operation,
    Pause,
)
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.server import (
    COLLECTION_NOT_FOUND,
    COLLECTION_NOT_LOADED,
    is_lite,
    supports,
)

if TYPE_CHECKING:
    from milvus_hubness.correction.codec.layout import Layout
    from milvus_hubness.correction.fitted import Correction
    from milvus_hubness.milvus.store.milvus_store import MilvusStore

Name = tuple[str, str, int]
"""Collection, field, and the slot that searches of the profile read, which a refresh switches."""


@dataclass(eq=False)
class CachedBank:
    """The bank of a profile, and its fitted estimator once that was needed."""

    profile: Profile
    bank: StoredBank
    _fitted: Correction | None = None

    @property
    def size(self) -> int:
        targets = self.bank.targets.vectors.nbytes if self.bank.targets else 0
        return self.bank.queries.vectors.nbytes + self.bank.potentials.nbytes + targets

    def correction(self, layout: Layout) -> Correction:
        """Return the fitted estimator of the bank, restored once per layout."""
        if self._fitted is None or self._fitted.layout != layout:
            from milvus_hubness.correction.estimators import from_dict
            from milvus_hubness.correction.fitted import Correction

            estimator = from_dict(self.profile.estimator)
            self._fitted = Correction.restore(layout, estimator, self.bank, self.profile.mean_bias)
        return self._fitted


class BankCache:
    """Banks by profile, up to `budget` bytes; those in use stay, whatever their size."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._cached: OrderedDict[Name, CachedBank] = OrderedDict()

    def get(self, name: Name, profile: Profile) -> CachedBank | None:
        """Return the bank of exactly this profile; None if it is not in the cache."""
        cached = self._cached.get(name)
        if cached is None or cached.profile != profile:
            return None
        self._cached.pop(name, None)
        self._cached[name] = cached
        return cached

    def keep(
        self, name: Name, profile: Profile, bank: StoredBank, in_use: Collection[Name] = ()
    ) -> CachedBank:
        """Keep a bank, and evict others but those in use."""
        self._cached.pop(name, None)
        self._cached[name] = cached = CachedBank(profile, bank)
        self.evict({name, *in_use})
        return cached

    def evict(self, in_use: Collection[Name]) -> None:
        """Evict the banks that were not used for longest, but none in use, until the budget has room for the rest."""
        entries = list(self._cached.items())
        size = sum(entry.size for _, entry in entries)
        for name, entry in entries:
            if size <= self.budget:
                break
            if name not in in_use:
                self._cached.pop(name, None)
                size -= entry.size


T = TypeVar("T")

CUT_OVER_PAUSE = 0.02
CLOSING_SECONDS = 0.1
_OTHER_WIDTH = re.compile(r"num_rows|should divide the dim|not equal to schema dim")

PERHAPS_OUTDATED = (
    MilvusException,
    DimensionMismatch,
    EmptyBank,
    BankTooLarge,
    CollectionNotFound,
    WriteIntentFailed,
    StateError,
)
"""Errors of a call that may be due to an outdated collection state."""


@dataclass(frozen=True)
class PreparedSearch:
    """A search of one request, which `ask` builds for any data. field: the arguments that name the field."""

    state: CollectionState
    ask: Asking
    field: Mapping[str, Any]


NO_COLLECTION = CollectionId(name="")


def id_in(description: Mapping[str, Any], collection: str) -> CollectionId:
    """Return which collection is described; `collection` may be an alias."""
    name = str(description.get("collection_name") or collection)
    return CollectionId(name=name, identity=str(description.get("collection_id") or ""))


@dataclass(frozen=True)
class CachedState:
    """A collection state in the cache.

    states: of its corrected fields, by name. prepared: prepared searches by their kind. checked: the collections that
    the properties name and that were found to belong to this one. dual_write: the copy that also gets the writes.
    online_banks: by field and profile. intent_log: the log that takes notes of writes first.
    """

    key_field: str
    states: Mapping[str, CollectionState]
    collection_id: CollectionId = NO_COLLECTION
    prepared: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False)
    checked: set[Helper | DualWrite] = field(default_factory=set, compare=False)
    dual_write: DualWrite | None = None
    online_banks: Mapping[tuple[str, str], OnlineBank] = field(default_factory=dict)
    intent_log: WriteIntentLog | None = None

    @cached_property
    def sides(self) -> tuple[Helper, ...]:
        """The side collections."""
        return tuple(side for state in self.states.values() if (side := side_helper(state)))

    @cached_property
    def reading(self) -> Reading:
        return Reading(tuple(self.states.values()))

    def state_of(self, anns_field: str | None) -> CollectionState | None:
        """Return the state of the named field; without a name, the state of the only corrected field."""
        if anns_field:
            return self.states.get(anns_field)
        return next(iter(self.states.values())) if len(self.states) == 1 else None

    def searched(self, anns_field: str | None) -> CollectionState | None:
        """Return the state that corrects a search on this field; None if the search is not corrected."""
        state = self.state_of(anns_field)
        return state if state and state.serves else None

    def uncorrected(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of an uncorrected search: Milvus needs the field's name if there is a second one."""
        state = self.state_of(options.get("anns_field"))
        if state is None or state.searched_field == state.field:
            return options
        return {**options, "anns_field": state.field}


NOTHING = CachedState("", {})


class StateCache:
    """The cache of collection states. state_ttl: TTL of a state, in seconds. Raises InvalidParameter."""

    def __init__(self, state_ttl: float, policy: ClientPolicy) -> None:
        expect_state_ttl(state_ttl)
        self._state_ttl, self.policy, self._chains = state_ttl, policy, policy.chains
        self._states: dict[str, tuple[float, CachedState]] = {}
        self._last: dict[str, CachedState] = {}
        self._changed: dict[str, float] = {}
        self._loaded: set[str] = set()
        self._metrics: dict[tuple[str, str], str] = {}
        self._forgotten = 0
        self._version: str | None = None

    def forget(self, collection: str | None = None) -> None:
        """Drop the cached state of a collection, or of all collections."""
        self._forgotten += 1
        self._loaded.clear()
        self._metrics.clear()
        if collection is None:
            self._states.clear()
            self._last.clear()
        else:
            self._states.pop(collection, None)

    def forgetting(self, call: Ask) -> Operation[Any]:
        """Make a call that may outdate every cached state."""
        try:
            return (yield call)
        finally:
            self.forget()

    def remembered(self, collection: str) -> CachedState | None:
        """Return the state if it is cached and not older than the TTL."""
        remembered = self._states.get(collection)
        return (
            remembered[1] if remembered is not None and time.monotonic() < remembered[0] else None
        )

    def cached_state(self, collection: str, timeout: float | None = None) -> Operation[CachedState]:
        """Return the collection state, read at most once in `state_ttl` seconds.

        A missing collection has an empty state: the call that follows reports it in Milvus's own words. If it had a
        copy, the operation waits, because a cutover may be moving its name to the copy.
        """
        if remembered := self.remembered(collection):
            return remembered
        until = time.monotonic() + self.policy.cut_over_seconds
        while True:
            forgotten, began = self._forgotten, time.monotonic()
            try:
                description = yield Ask("describe_collection", (collection, timeout))
                break
            except MilvusException as error:
                if error.code != COLLECTION_NOT_FOUND:
                    raise
            last = self._last.get(collection, NOTHING)
            if last.dual_write is None or time.monotonic() > until:
                self._last.pop(collection, None)
                return NOTHING
            yield Pause(CUT_OVER_PAUSE)
        key_field = next(
            str(entry["name"]) for entry in description["fields"] if entry.get("is_primary")
        )
        properties = description.get("properties", {})
        cached = CachedState(
            key_field,
            read_states(properties, collection),
            id_in(description, collection),
            dual_write=DualWrite.read(properties, collection),
            online_banks=online_banks_in(properties, collection),
            intent_log=WriteIntentLog.read(properties, collection),
        )
        if cached.states and self._last.get(collection, NOTHING).states != cached.states:
            yield LearnSchema(collection)
        if (
            cached.intent_log
            and self._last.get(collection, NOTHING).intent_log != cached.intent_log
        ):
            for name in (cached.intent_log.collection, cached.intent_log.rows):
                yield LearnSchema(name)
        if self._last.get(collection, cached) != cached:
            self._changed[collection] = began
        self._last[collection] = cached
        if forgotten == self._forgotten:  # no other task or thread has invalidated it
            self._states[collection] = (began + self._state_ttl, cached)
        return cached

    def retrying(
        self, collection: str, timeout: float | None, call: Callable[[CachedState], Operation[T]]
    ) -> Operation[T]:
        """Run `call` on the cached state, and again if it fails and the collection has changed."""
        with HeldErrors(collection) as held:
            cached = self.remembered(collection) or (
                yield from self.cached_state(collection, timeout)
            )
            try:
                return (yield from call(cached))
            except PERHAPS_OUTDATED as error:
                now = yield from self.read_again(collection, timeout)
                if (
                    now == cached
                    and cached.dual_write is not None
                    and isinstance(error, MilvusException)
                ):
                    # The name may be moving: Milvus Lite closes a collection before it renames it.
                    yield Pause(CLOSING_SECONDS)
                    now = yield from self.read_again(collection, timeout)
                was_away = cached.dual_write is not None and _code(error) == COLLECTION_NOT_FOUND
                if (
                    now == cached
                    and not was_away
                    and not self._met_another(collection, cached, error)
                ):
                    raise
                held.recovered.append(error)
            until = time.monotonic() + self.policy.cut_over_seconds
            while True:
                try:
                    return (yield from call(now))
                except PERHAPS_OUTDATED as error:
                    used = now
                    # Milvus Lite gives a collection its new name before it can be read under that name.
                    may_go_on = (
                        cached.dual_write is not None and _code(error) == COLLECTION_NOT_LOADED
                    )
                    if not may_go_on:
                        # A switch has several steps: the next may have come after the state was read.
                        now = yield from self.read_again(collection, timeout)
                        may_go_on = now != used or self._met_another(collection, now, error)
                    if not may_go_on or time.monotonic() > until:
                        raise
                    held.recovered.append(error)
                yield Pause(CUT_OVER_PAUSE)

    def read_again(self, collection: str, timeout: float | None = None) -> Operation[CachedState]:
        """Return the state as the collection has it now."""
        self.forget(collection)
        return self.cached_state(collection, timeout)

    def _met_another(self, collection: str, cached: CachedState, error: Exception) -> bool:
        """Whether one part of the server refused rows because the name has just moved to another collection."""
        changed = self._changed.get(collection, -self.policy.cut_over_seconds)
        is_moving = (
            cached.dual_write is not None
            or time.monotonic() - changed < self.policy.cut_over_seconds
        )
        # pymilvus raises its own refusals as subclasses.
        return (
            is_moving and type(error) is MilvusException and bool(_OTHER_WIDTH.search(str(error)))
        )

    # -- the collections that properties name ---------------------------------------------------------

    def expect_sides(self, cached: CachedState, timeout: float | None) -> Operation[None]:
        """Raise StateError unless the side collections belong to this collection."""
        yield from self._expect(cached, cached.sides, timeout)

    def expect_log(self, cached: CachedState, timeout: float | None) -> Operation[None]:
        """Raise StateError unless the write-intent log belongs to this collection."""
        if cached.intent_log is not None:
            yield from self._expect(cached, cached.intent_log.helpers, timeout)

    def _expect(
        self, cached: CachedState, helpers: Iterable[Helper], timeout: float | None
    ) -> Operation[None]:
        """Check each helper once for a cached state, which is renewed after its TTL."""
        for helper in helpers:
            if helper in cached.checked:
                continue
            try:
                described = yield Ask("describe_collection", (helper.collection, timeout))
            except MilvusException as error:
                if error.code != COLLECTION_NOT_FOUND:
                    raise
                continue  # The request that follows reports it.
            owner = cached.collection_id
            listed: frozenset[str] = frozenset()
            if not helper.is_derived_from(owner.name):
                listed = yield InStore(partial(_listed_helpers, owner))
            expect_helper(helper, owner, described["properties"], listed)
            cached.checked.add(helper)

    def expect_copy(self, cached: CachedState, dual_write: DualWrite) -> Operation[None]:
        """Raise StateError unless a migration lets the writes of this collection go to the copy, too."""
        if dual_write in cached.checked:
            return
        origin, copy = cached.collection_id, dual_write.collection
        bodies = yield InStore(partial(migrations_to, (origin.name, copy)))
        expect_copy(origin, copy, DUAL_WRITE_PROPERTY, bodies)
        cached.checked.add(dual_write)

    def rewrite(self, cached: CachedState, state: CollectionState) -> Operation[Rewrite]:
        """Return the rewrite of a corrected field, with function chains if the server runs them."""
        codec = state.codec
        if codec.needs_candidates and codec.side_collection is None and self._chains is None:
            self._chains = supports((yield from self._server_version()), "function chains")
        return rewrite_of(state, cached.reading, chains=bool(self._chains))

    def insertable(
        self, rows: Iterable[dict[str, Any]], description: dict[str, Any]
    ) -> Operation[list[dict[str, Any]]]:
        """Return rows of a query in the form that pymilvus inserts; see `milvus_schema.insertable_rows`."""
        lite = is_lite((yield from self._server_version()))
        return milvus_schema.insertable_rows(rows, description, lite=lite)

    def _server_version(self) -> Operation[str]:
        if self._version is None:
            self._version = str((yield Ask("get_server_version")))
        return self._version

    def ensure_loaded(self, collection: str, timeout: float | None) -> Operation[None]:
        """Load a side collection or a bank, which the user may not have loaded, unless it is loaded."""
        if collection not in self._loaded:
            if (yield Ask("get_load_state", (collection,)))["state"].name != "Loaded":
                yield Ask("load_collection", (collection, timeout))
            self._loaded.add(collection)

    def metric(self, collection: str, field: str, timeout: float | None) -> Operation[str]:
        key = (collection, field)
        if key not in self._metrics:
            names = yield Ask("list_indexes", key)
            index = yield Ask("describe_index", (collection, names[0], timeout))
            self._metrics[key] = str(index["metric_type"]).upper()
        return self._metrics[key]


def _listed_helpers(owner: CollectionId, store: MilvusStore) -> frozenset[str]:
    return store.listed_helpers(owner)


def migrations_to(targets: Sequence[str], store: MilvusStore) -> list[str]:
    """Return the ledger's records of the migrations to these collections, as JSON."""
    records = [store.record(LEDGER, target) for target in targets]
    return [record.body for record in records if record is not None]


def _code(error: Exception) -> Any:
    return getattr(error, "code", None)
