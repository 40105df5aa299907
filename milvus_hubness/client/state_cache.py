"""The client's caches: collection states with a TTL, and banks up to a number of bytes. No I/O."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from pymilvus.exceptions import MilvusException

from milvus_hubness.banks.generations import StoredBank
from milvus_hubness.client.messages import (
    Asking,
    AskingOne,
    Manner,
    Reading,
    expect_state_ttl,
    expect_strength,
)
from milvus_hubness.client.other_locations import rewrite_of
from milvus_hubness.client.query_samples import Sampler, online_banks_in
from milvus_hubness.client.rewrite import Rewrite
from milvus_hubness.client.steps import Ask, LearnSchema, Operation, Pause, held_errors
from milvus_hubness.correction import Correction
from milvus_hubness.errors import (
    CollectionNotFound,
    DimensionMismatch,
    EmptyBank,
    StateError,
    WriteIntentFailed,
)
from milvus_hubness.estimators import from_dict
from milvus_hubness.estimators.nearest import Doubles
from milvus_hubness.job_properties import (
    DualWrite,
    OnlineBank,
    WriteIntentLog,
    read_dual_write,
    read_intent_log,
)
from milvus_hubness.state import CollectionState, Profile, read_states
from milvus_hubness.stores.milvus_server import (
    COLLECTION_NOT_FOUND,
    COLLECTION_NOT_LOADED,
    runs_function_chains,
)

Name = tuple[str, str, int]
"""Collection, field, and the slot that searches of the profile read. A refresh gives a profile another one,
which it tells of before: what was kept for that is at hand then."""


@dataclass(frozen=True, eq=False)
class BankSummary:
    """What is read once of a bank that is searched instead of kept: no more than its estimator needs.

    mean: (d,) float64 of the queries as the layout reduces them. masses: (p,) float64 τ·log Σ exp(f_i/τ) of
    each column of potentials. targets: rows of the target bank.
    """

    mean: Doubles | None
    masses: Doubles
    targets: int


@dataclass(eq=False)
class _Kept:
    profile: Profile
    bank: StoredBank
    correction: Correction | None = None

    @property
    def size(self) -> int:
        targets = self.bank.targets.vectors.nbytes if self.bank.targets else 0
        return self.bank.queries.vectors.nbytes + self.bank.potentials.nbytes + targets


class BankCache:
    """Banks as they were when their profiles were first seen. The one used longest ago goes first; the one in
    use stays, whatever its size. Summaries of others are kept beside them, the latest of each profile."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: OrderedDict[Name, _Kept] = OrderedDict()
        self._summaries: dict[Name, tuple[Profile, BankSummary]] = {}

    def bank(self, name: Name, profile: Profile) -> StoredBank | None:
        """The bank of this very profile, None where it is not kept."""
        kept = self._kept.get(name)
        if kept is None or kept.profile != profile:
            return None
        self._kept.pop(name, None)
        self._kept[name] = kept
        return kept.bank

    def keep(self, name: Name, profile: Profile, bank: StoredBank) -> None:
        """Keep it, and let go of others until all fit."""
        self._kept.pop(name, None)
        self._kept[name] = _Kept(profile, bank)
        while len(self._kept) > 1 and sum(each.size for each in list(self._kept.values())) > self.budget:
            self._kept.popitem(last=False)

    def summary(self, name: Name, profile: Profile) -> BankSummary | None:
        """The summary of this very profile's bank, None where it is not kept."""
        kept = self._summaries.get(name)
        return kept[1] if kept is not None and kept[0] == profile else None

    def keep_summary(self, name: Name, profile: Profile, summary: BankSummary) -> None:
        """Keep it in place of that of an earlier profile."""
        self._summaries[name] = (profile, summary)

    def correction(
        self, name: Name, state: CollectionState, profile: Profile, bank: StoredBank
    ) -> Correction:
        """The fitted estimator over a bank, loaded once for a layout."""
        kept = self._kept.get(name)
        # Profiles that came after one another may have read the same bank at once.
        if kept is not None and (kept.bank is not bank or kept.profile != profile):
            kept = None
        made = kept.correction if kept is not None else None
        if made is not None and made.layout == state.layout:
            return made
        correction = Correction.restore(
            state.layout,
            from_dict(profile.estimator),
            bank.queries,
            bank.potentials,
            target_bank=bank.targets,
            mean_bias=profile.mean_bias,
        )
        if kept is not None:
            kept.correction = correction
        return correction


T = TypeVar("T")

CUT_OVER_SECONDS = 5.0
"""How long a collection is waited for whose name is being given to its copy."""
CUT_OVER_PAUSE = 0.02
CLOSING_SECONDS = 0.1
_OTHER_WIDTH = re.compile(r"num_rows|should divide the dim|not equal to schema dim")

PERHAPS_OUTDATED = (
    MilvusException,
    DimensionMismatch,
    EmptyBank,
    CollectionNotFound,
    WriteIntentFailed,
    StateError,
)
"""What a call on a collection raises whose state is no longer what is remembered of it."""


@dataclass(frozen=True)
class CachedState:
    """What a collection says of itself.

    states: of its corrected fields, by name. asking: by their manner, what it takes to ask searches like
    earlier ones: the field's state, what makes requests of data, and of one list of numbers. dual_write:
    where its rows are carried to. online_banks: the banks that take in live queries, by field and profile.
    intent_log: where writes are noted first."""

    key_field: str
    states: Mapping[str, CollectionState]
    asking: dict[Manner, tuple[CollectionState, Asking, AskingOne | None]] = field(
        default_factory=dict, compare=False
    )
    dual_write: DualWrite | None = None
    online_banks: Mapping[tuple[str, str], OnlineBank] = field(default_factory=dict)
    intent_log: WriteIntentLog | None = None

    @cached_property
    def reading(self) -> Reading:
        """How its rows are read."""
        return Reading(tuple(self.states.values()))

    def state_of(self, anns_field: str | None) -> CollectionState | None:
        """The state of the field that is named; of the corrected one where none is."""
        if anns_field:
            return self.states.get(anns_field)
        return next(iter(self.states.values())) if len(self.states) == 1 else None

    def searched(self, anns_field: str | None) -> CollectionState | None:
        """The state by which a search on this field is corrected."""
        state = self.state_of(anns_field)
        return state if state and state.serves else None

    def uncorrected(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a search that is not corrected. They name the user's field where a second one lies
        beside it, between which Milvus would not choose."""
        state = self.state_of(options.get("anns_field"))
        return {**options, "anns_field": state.field} if state and state.second_vector else options


NOTHING = CachedState("", {})


class Failed(NamedTuple):
    """A call, by what was known of the collection."""

    cached: CachedState
    error: Exception


class StateCache:
    """state_ttl: seconds for which what a collection says of its biases is believed without asking again.
    bank_budget: bytes of banks to keep in memory. strength: w of every search that names none. sampler: what
    takes samples of queries, if anything does. Raises InvalidParameter."""

    def __init__(
        self,
        strength: float | None,
        state_ttl: float,
        bank_budget: int,
        sampler: Sampler | None = None,
    ) -> None:
        expect_strength(strength)
        expect_state_ttl(state_ttl)
        self._strength = strength
        self._sampler = sampler
        self._state_ttl = state_ttl
        self._known: dict[str, tuple[float, CachedState]] = {}
        self._last: dict[str, CachedState] = {}
        self._changed: dict[str, float] = {}
        self._banks = BankCache(bank_budget)
        self._metrics: dict[tuple[str, str], str] = {}
        self._chains: bool | None = None
        self._loaded: set[str] = set()
        self._forgotten = 0

    def forget(self, collection: str | None = None) -> None:
        """Ask again what the collection, or every collection, says of itself."""
        self._forgotten += 1
        self._loaded.clear()
        self._metrics.clear()
        if collection is None:
            self._known.clear()
            self._last.clear()
        else:
            self._known.pop(collection, None)

    def _remembered(self, collection: str) -> CachedState | None:
        remembered = self._known.get(collection)
        return remembered[1] if remembered is not None and time.monotonic() < remembered[0] else None

    def cached_state(self, collection: str, timeout: float | None = None) -> Operation[CachedState]:
        """What the collection says of itself, asked for at most once in `state_ttl` seconds. One that is not
        there says nothing: the call that follows reports it in Milvus's own words. But one that had a copy
        may be giving its name to that: it is waited for."""
        if remembered := self._remembered(collection):
            return remembered
        until = time.monotonic() + CUT_OVER_SECONDS
        while True:
            forgotten, asked = self._forgotten, time.monotonic()
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
        key_field = next(str(each["name"]) for each in description["fields"] if each.get("is_primary"))
        properties = description.get("properties", {})
        cached = CachedState(
            key_field,
            read_states(properties),
            dual_write=read_dual_write(properties),
            online_banks=online_banks_in(properties) if self._sampler else {},
            intent_log=read_intent_log(properties),
        )
        if cached.states and self._last.get(collection, NOTHING).states != cached.states:
            yield LearnSchema(collection)
        if cached.intent_log and self._last.get(collection, NOTHING).intent_log != cached.intent_log:
            for name in (cached.intent_log.collection, cached.intent_log.rows):
                yield LearnSchema(name)
        if self._last.get(collection, cached) != cached:
            self._changed[collection] = asked
        self._last[collection] = cached
        if forgotten == self._forgotten:  # else another task or thread meanwhile made the answer wrong
            self._known[collection] = (asked + self._state_ttl, cached)
        return cached

    def _as_it_is(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[CachedState], Operation[T]],
        *,
        failed: Failed | None = None,
    ) -> Operation[T]:
        """call(known), and again where that fails and the collection turns out to have changed. failed: how
        it has failed already."""
        with held_errors(collection) as recovered:
            return (yield from self._tried(collection, timeout, call, failed, recovered))

    def _tried(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[CachedState], Operation[T]],
        failed: Failed | None,
        recovered: list[Exception],
    ) -> Operation[T]:
        """As `_as_it_is`. recovered: takes the errors after which this goes on."""
        cached = failed.cached if failed else self._remembered(collection)
        cached = cached or (yield from self.cached_state(collection, timeout))
        try:
            if failed:
                raise failed.error
            return (yield from call(cached))
        except PERHAPS_OUTDATED as error:
            self.forget(collection)
            now = yield from self.cached_state(collection, timeout)
            if now == cached and cached.dual_write is not None and isinstance(error, MilvusException):
                # The name may be going: Milvus Lite closes a collection before it renames it.
                yield Pause(CLOSING_SECONDS)
                self.forget(collection)
                now = yield from self.cached_state(collection, timeout)
            was_away = cached.dual_write is not None and getattr(error, "code", None) == COLLECTION_NOT_FOUND
            if now == cached and not was_away and not self._met_another(collection, cached, error):
                raise
            recovered.append(error)
        until = time.monotonic() + CUT_OVER_SECONDS
        while True:
            try:
                return (yield from call(now))
            except PERHAPS_OUTDATED as error:
                # Milvus Lite gives a collection its new name before it can be read by that.
                opening = (
                    cached.dual_write is not None and getattr(error, "code", None) == COLLECTION_NOT_LOADED
                )
                seen = now
                if not opening:
                    # A switch has several steps: the next may have come between the look and the call.
                    self.forget(collection)
                    now = yield from self.cached_state(collection, timeout)
                if (
                    now == seen and not opening and not self._met_another(collection, now, error)
                ) or time.monotonic() > until:
                    raise
                recovered.append(error)
            yield Pause(CUT_OVER_PAUSE)

    def _met_another(self, collection: str, cached: CachedState, error: Exception) -> bool:
        """Whether a server refused rows as they are of another width than what it found by this name, which
        is being given to another collection: one part of the server finds that sooner than the next."""
        changed = self._changed.get(collection, -CUT_OVER_SECONDS)
        is_moving = cached.dual_write is not None or time.monotonic() - changed < CUT_OVER_SECONDS
        # What pymilvus itself refuses is of a class of its own.
        return is_moving and type(error) is MilvusException and bool(_OTHER_WIDTH.search(str(error)))

    def _rewrite(self, cached: CachedState, state: CollectionState) -> Operation[Rewrite]:
        in_fields = state.reranking is not None and not state.reranking.side
        if in_fields and self._chains is None:
            self._chains = runs_function_chains((yield Ask("get_server_version")))
        return rewrite_of(state, cached.reading, chains=bool(self._chains))

    def _ensure_loaded(self, collection: str, timeout: float | None) -> Operation[None]:
        """Whoever loaded a collection need not have known of the one beside it, or of its bank."""
        if collection not in self._loaded:
            if (yield Ask("get_load_state", (collection,)))["state"].name != "Loaded":
                yield Ask("load_collection", (collection, timeout))
            self._loaded.add(collection)


def naming(state: CollectionState, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a search on this field, which they name where its vectors are halves: from the name
    pymilvus learns what the bytes of queries are; and where it is not the only one."""
    named = state.dtype != "float32" or state.second_vector is not None
    return {**options, "anns_field": state.searched_field} if named else options
