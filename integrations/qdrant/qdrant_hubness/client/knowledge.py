"""What collections say of themselves, remembered for a while, and banks. No I/O: see milvus_hubness.client.steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np

from milvus_hubness.banks.generations import StoredBank, fitted_bank, parts_of, validated
from milvus_hubness.client.state_cache import BankCache
from milvus_hubness.client.steps import Ask, Compute, Pause
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import HubnessError
from milvus_hubness.state import CollectionState, Profile, read_states
from milvus_hubness.stores.records import DualWrite, WriteIntentLog
from qdrant_hubness.client.known import CachedState
from qdrant_hubness.store import schema
from qdrant_hubness.store.banks import rows_of
from qdrant_hubness.store.properties import STATES, of_metadata, point_id
from qdrant_hubness.store.requests import FAILURES, is_not_found, keeps_metadata
from qdrant_hubness.store.rows import UNNAMED, named

T = TypeVar("T")
Operation = Generator[Ask | Compute | Pause, Any, T]

ROWS_PER_PAGE = 1_000
NOTHING = CachedState("")


class StateCache:
    """strength: w of every query that names none; None for each collection's own. state_ttl: seconds for
    which what a collection says of itself is believed. bank_budget: bytes of banks to keep in memory. local:
    whether the client keeps the data itself."""

    def __init__(self, strength: float | None, state_ttl: float, bank_budget: int, *, local: bool) -> None:
        self.strength = strength
        self._state_ttl = state_ttl
        self._banks = BankCache(bank_budget)
        self._known: dict[str, tuple[float, CachedState]] = {}
        self._in_metadata: bool | None = True if local else None

    def forget(self, collection: str) -> None:
        """Ask again what the collection says of itself."""
        self._known.pop(collection, None)

    def cached_state(self, collection: str) -> Operation[CachedState]:
        """What the collection says of itself. One that is not there says nothing: the call that follows tells
        of that in Qdrant's own words."""
        remembered = self._known.get(collection)
        if remembered is not None and time.monotonic() < remembered[0]:
            return remembered[1]
        asked = time.monotonic()
        try:
            described = yield Ask("get_collection", (collection,))
        except FAILURES as error:
            if is_not_found(error):
                return NOTHING
            raise
        name, told = yield from self._told(collection, described)
        found = CachedState(
            name,
            {field: each.size for field, each in schema.dense(described).items() if _is_single(each)},
            read_states(told),
            DualWrite.read(told),
            WriteIntentLog.read(told),
        )
        self._known[collection] = (asked + self._state_ttl, found)
        return found

    def as_it_is(self, collection: str, call: Callable[[CachedState], Operation[T]]) -> Operation[T]:
        """call(known), and once more where that fails and the collection turns out to have changed."""
        cached = yield from self.cached_state(collection)
        try:
            return (yield from call(cached))
        except (HubnessError, *FAILURES):
            self.forget(collection)
            now = yield from self.cached_state(collection)
            if now == cached:
                raise
        return (yield from call(now))

    def reading(
        self, collection: str, call: Callable[[CachedState], Operation[T]], vectors: Callable[[T], list[Any]]
    ) -> Operation[T]:
        """As `as_it_is`, of a call that shows stored vectors, which tell by their width that the collection
        is another one by now. vectors: one or some of each answer."""

        def looked(cached: CachedState) -> Operation[T]:
            found = yield from call(cached)
            if not all(cached.fits(each) for each in vectors(found)):
                self.forget(collection)
                found = yield from call((yield from self.cached_state(collection)))
            return found

        return self.as_it_is(collection, looked)

    def _told(self, collection: str, described: Any) -> Operation[tuple[str, dict[str, str]]]:
        """The collection's real name, which is asked for where it matters, and its properties."""
        if self._in_metadata is None:
            self._in_metadata = keeps_metadata((yield Ask("info")).version)
        if self._in_metadata:
            told = of_metadata(described)
            if not DualWrite.read(told):
                return collection, told
            return (yield from self._real_name(collection)), told
        name = yield from self._real_name(collection)
        try:
            found = yield Ask("retrieve", (STATES, [point_id(name)]))
        except FAILURES as error:
            if is_not_found(error):
                return name, {}
            raise
        return name, dict(found[0].payload["properties"]) if found else {}

    def _real_name(self, collection: str) -> Operation[str]:
        aliases = (yield Ask("get_aliases")).aliases
        found = (each.collection_name for each in aliases if each.alias_name == collection)
        return next(found, collection)

    # -- biases of new points -----------------------------------------------------------------------------

    def slots(self, collection: str, state: CollectionState, vectors: Floats) -> Operation[Floats]:
        """(n, slots) biases of vectors (n, d): each profile's in its two slots, and in theirs those that a
        refresh is about to bring or has just taken away."""
        found = np.zeros((len(vectors), state.slots), np.float32)
        profiles = {slot: each for each in state.profiles.values() for slot in (each.slot, each.standby)}
        moving = [each.profile for each in (state.outgoing, state.incoming) if each is not None]
        profiles |= {profile.slot: profile for profile in moving}
        computed: list[tuple[Profile, Floats]] = []
        for slot, profile in profiles.items():
            done = next((biases for known, biases in computed if known is profile), None)
            if done is None:
                done = yield from self._biases(collection, state, profile, vectors)
                computed.append((profile, done))
            found[:, slot] = done
        return found

    def _biases(self, collection: str, state: CollectionState, profile: Profile, vectors: Floats) -> Operation[Floats]:
        bank = yield from self._bank(collection, state, profile)
        of = (collection, state.field, profile.slot)
        found: Floats = yield Compute(lambda: self._banks.correction(of, state, profile, bank).centred(vectors))
        return found

    def cells(self, collection: str, state: CollectionState, vectors: Floats) -> Operation[Floats]:
        """(n, c) what the locality hint columns of vectors (n, d) hold, by the active profile's bank."""
        profile = state.profile
        if not state.layout.locality_hint_count:
            return np.zeros((len(vectors), 0), np.float32)
        bank = yield from self._bank(collection, state, profile)
        of = (collection, state.field, profile.slot)
        found: Floats = yield Compute(lambda: self._banks.correction(of, state, profile, bank).locality_hints(vectors))
        return found

    def _bank(self, collection: str, state: CollectionState, profile: Profile) -> Operation[StoredBank]:
        of = (collection, state.field, profile.slot)
        bank = self._banks.bank(of, profile)
        if bank is None:
            bank = yield from self._load_bank(profile)
            self._banks.keep(of, profile, bank)
        return bank

    def _load_bank(self, profile: Profile) -> Operation[StoredBank]:
        reference = profile.bank
        found: list[Any] = []
        offset: Any = None
        while True:
            options = {"limit": ROWS_PER_PAGE, "offset": offset, "with_vectors": True}
            where = {"scroll_filter": rows_of(reference, parts_of(reference))}
            page, offset = yield Ask("scroll", (reference.collection,), {**options, **where})
            found += page
            if offset is None:
                break
        return validated(reference, fitted_bank(reference, "qdrant", *_rows(found)))


def _rows(records: list[Any]) -> tuple[Floats, list[dict[str, Any]]]:
    vectors = np.array([named(each.vector)[UNNAMED] for each in records], np.float32)
    return vectors, [each.payload for each in records]


def _is_single(params: Any) -> bool:
    return params.multivector_config is None
