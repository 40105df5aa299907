"""The cached states of collections, and their banks. No I/O: see `Operation` in
milvus_hubness.extending."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse

from milvus_hubness import HubnessError
from milvus_hubness.extending import (
    DUAL_WRITE_PROPERTY,
    LEDGER,
    Ask,
    BankCache,
    CachedBank,
    CollectionId,
    CollectionState,
    Compute,
    DualWrite,
    Floats,
    Pause,
    Profile,
    StoredBank,
    WriteIntentLog,
    bank_parts,
    expect_copy,
    expect_helper,
    fitted_bank,
    read_states,
    validated_bank,
)
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.store import schema
from qdrant_hubness.store.banks import rows_of
from qdrant_hubness.store.ledger import ON_QDRANT
from qdrant_hubness.store.limits import Limits
from qdrant_hubness.store.properties import STATES, of_metadata, payload_keys_in, point_id
from qdrant_hubness.store.requests import FAILURES, is_missing, is_too_large, keeps_metadata
from qdrant_hubness.store.rows import UNNAMED, named

T = TypeVar("T")
Operation = Generator[Ask | Compute | Pause, Any, T]

ROWS_PER_PAGE = 1_000
LONGEST_WAIT = 60.0
"""Longest wait of a client for a rate of strict mode, in seconds, for one request that it adds to
the user's."""
NOTHING = CachedState("")


class StateCache:
    """The cached states, and the banks in memory.

    strength: w of queries without one; None for that of the collection. state_ttl: seconds for
    which a state stays cached. bank_budget: bytes of banks in memory. local: whether the client is
    in the local mode.
    """

    def __init__(
        self, strength: float | None, state_ttl: float, bank_budget: int, *, local: bool
    ) -> None:
        self.strength = strength
        self._state_ttl = state_ttl
        self._banks = BankCache(bank_budget)
        self._states: dict[str, tuple[float, CachedState]] = {}
        self._in_metadata: bool | None = True if local else None

    def forget(self, collection: str) -> None:
        """Drop the cached state of a collection."""
        self._states.pop(collection, None)

    def cached_state(self, collection: str) -> Operation[CachedState]:
        """Return the state of a collection; NOTHING if it does not exist: the next call fails with
        Qdrant's error."""
        cached = self._states.get(collection)
        if cached is not None and time.monotonic() < cached[0]:
            return cached[1]
        requested_at = time.monotonic()
        try:
            described = yield Ask("get_collection", (collection,))
        except FAILURES as error:
            # Assumes that there is no such collection, so that the request which follows fails with
            # Qdrant's error.
            if is_missing(error):
                return NOTHING
            raise
        name, properties = yield from self._properties(collection, described)
        state = CachedState(
            name,
            {
                field: params.size
                for field, params in schema.dense(described).items()
                if _is_single(params)
            },
            read_states(properties, name),
            DualWrite.read(properties, name),
            WriteIntentLog.read(properties, name),
            payload_keys_in(properties),
            Limits.of(described),
        )
        self._states[collection] = (requested_at + self._state_ttl, state)
        return state

    def patiently(self, collection: str, *args: Any, **options: Any) -> Operation[Any]:
        """Ask what the user's call did not: wait if a rate of strict mode is exceeded, and ask
        again.

        args: the method, and its arguments after the collection.
        """
        method, *further = args
        waited = 0.0
        while True:
            try:
                return (yield Ask(method, (collection, *further), options))
            except ResourceExhaustedResponse as error:
                seconds = float(max(1, error.retry_after_s))
                waited += seconds
                if waited > LONGEST_WAIT:
                    raise
                yield Pause(seconds)

    def divided(
        self,
        collection: str,
        method: str,
        items: list[Any],
        options: dict[str, Any],
        *,
        is_added: bool = True,
    ) -> Operation[Any]:
        """Ask with a list of items as the argument after the collection; in halves if the request
        is too large. Return the last answer, or the answers to all items in a list. is_added:
        whether this waits as `patiently` does."""
        try:
            if is_added:
                return (yield from self.patiently(collection, method, items, **options))
            return (yield Ask(method, (collection, items), options))
        except FAILURES as error:
            if not is_too_large(error) or len(items) < 2:
                raise
        middle = len(items) // 2
        first = yield from self.divided(
            collection, method, items[:middle], options, is_added=is_added
        )
        # The rest belongs to a request that has begun.
        second = yield from self.divided(collection, method, items[middle:], options)
        return [*first, *second] if isinstance(first, list) else second

    def with_state(
        self, collection: str, call: Callable[[CachedState], Operation[T]]
    ) -> Operation[T]:
        """Return call(state). If it fails and the collection has another state by now, call once
        more."""
        cached = yield from self.cached_state(collection)
        try:
            return (yield from call(cached))
        except (HubnessError, *FAILURES):
            # Assumes nothing about what was carried out: with another state all is sent once more,
            # which overwrites it.
            self.forget(collection)
            now = yield from self.cached_state(collection)
            if now == cached:
                raise
        return (yield from call(now))

    def with_state_of_vectors(
        self,
        collection: str,
        call: Callable[[CachedState], Operation[T]],
        vectors: Callable[[T], list[Any]],
    ) -> Operation[T]:
        """As `with_state`, for a call that returns stored vectors, whose width shows if an alias
        was moved.

        vectors: returns some vectors of an answer.
        """

        def checked(cached: CachedState) -> Operation[T]:
            answer = yield from call(cached)
            if not all(cached.fits(vector) for vector in vectors(answer)):
                self.forget(collection)
                answer = yield from call((yield from self.cached_state(collection)))
            return answer

        return self.with_state(collection, checked)

    def _properties(self, collection: str, described: Any) -> Operation[tuple[str, dict[str, str]]]:
        """Return the collection's real name, which is read only if it matters, and its
        properties."""
        if self._in_metadata is None:
            self._in_metadata = keeps_metadata((yield Ask("info")).version)
        if self._in_metadata:
            properties = of_metadata(described)
            if not (
                DualWrite.read(properties, collection)
                or WriteIntentLog.read(properties, collection)
            ):
                return collection, properties
            return (yield from self._real_name(collection)), properties
        name = yield from self._real_name(collection)
        try:
            points = yield Ask("retrieve", (STATES, [point_id(name)]))
        except FAILURES as error:
            # As Properties.of.
            if is_missing(error):
                return name, {}
            raise
        return name, dict(points[0].payload["properties"]) if points else {}

    def _real_name(self, collection: str) -> Operation[str]:
        aliases = (yield Ask("get_aliases")).aliases
        names = (alias.collection_name for alias in aliases if alias.alias_name == collection)
        return next(names, collection)

    # -- the collections that properties name ------------------------------------------------------

    def expect_log(self, cached: CachedState, intent_log: WriteIntentLog) -> Operation[None]:
        """Raise StateError unless the write-intent log belongs to this collection."""
        helper = intent_log.helpers[0]
        if helper in cached.checked:
            return
        try:
            described = yield Ask("get_collection", (helper.collection,))
        except FAILURES as error:
            if is_missing(error):
                return  # The request that follows reports it.
            raise
        _, properties = yield from self._properties(helper.collection, described)
        expect_helper(helper, CollectionId(name=cached.name), properties, commands=ON_QDRANT)
        cached.checked.add(helper)

    def expect_copy(self, cached: CachedState, dual_write: DualWrite) -> Operation[None]:
        """Raise StateError unless a migration lets the writes of this collection go to the copy,
        too."""
        if dual_write in cached.checked:
            return
        copy = dual_write.collection
        try:
            records = yield Ask("retrieve", (LEDGER, [point_id(cached.name), point_id(copy)]))
        except FAILURES as error:
            # Without a ledger no migration allows writes to the copy: expect_copy refuses.
            if not is_missing(error):
                raise
            records = []
        bodies = [str((record.payload or {}).get("body")) for record in records]
        expect_copy(CollectionId(name=cached.name), copy, DUAL_WRITE_PROPERTY, bodies)
        cached.checked.add(dual_write)

    # -- biases of new points ----------------------------------------------------------------------

    def slots(self, collection: str, state: CollectionState, vectors: Floats) -> Operation[Floats]:
        """Return the biases (n, slots) of vectors (n, d): of all profiles, and both sets of a
        running refresh."""
        biases = np.zeros((len(vectors), state.slots), np.float32)
        profiles = {
            slot: own for own in state.profiles.values() for slot in (own.slot, own.standby)
        }
        moving = [
            update.profile for update in (state.outgoing, state.incoming) if update is not None
        ]
        profiles |= {profile.slot: profile for profile in moving}
        computed: list[tuple[Profile, Floats]] = []
        for slot, profile in profiles.items():
            done = next((values for other, values in computed if other is profile), None)
            if done is None:
                done = yield from self._biases(collection, state, profile, vectors)
                computed.append((profile, done))
            biases[:, slot] = done
        return biases

    def _biases(
        self, collection: str, state: CollectionState, profile: Profile, vectors: Floats
    ) -> Operation[Floats]:
        bank = yield from self._bank(collection, state, profile)
        biases: Floats = yield Compute(lambda: bank.correction(state.layout).centred(vectors))
        return biases

    def locality_hints(
        self, collection: str, state: CollectionState, vectors: Floats
    ) -> Operation[Floats]:
        """Return the locality hint columns (n, c) of vectors (n, d), by the active profile's
        bank."""
        profile = state.profile
        if not state.layout.locality_hint_count:
            return np.zeros((len(vectors), 0), np.float32)
        bank = yield from self._bank(collection, state, profile)
        hints: Floats = yield Compute(lambda: bank.correction(state.layout).locality_hints(vectors))
        return hints

    def _bank(
        self, collection: str, state: CollectionState, profile: Profile
    ) -> Operation[CachedBank]:
        of = (collection, state.field, profile.slot)
        cached = self._banks.get(of, profile)
        return cached or self._banks.keep(of, profile, (yield from self._load_bank(profile)))

    def _load_bank(self, profile: Profile) -> Operation[StoredBank]:
        reference = profile.bank
        records: list[Any] = []
        offset: Any = None
        described = yield Ask("get_collection", (reference.collection,))
        rows = min(ROWS_PER_PAGE, Limits.of(described).rows_per_read)
        while True:
            options = {"limit": rows, "offset": offset, "with_vectors": True}
            where = {"scroll_filter": rows_of(reference, bank_parts(reference))}
            page, offset = yield from self.patiently(
                reference.collection, "scroll", **options, **where
            )
            records += page
            if offset is None:
                break
        return validated_bank(reference, fitted_bank(reference, "qdrant", *_rows(records)))


def _rows(records: list[Any]) -> tuple[Floats, list[dict[str, Any]]]:
    vectors = np.array([named(record.vector)[UNNAMED] for record in records], np.float32)
    return vectors, [record.payload for record in records]


def _is_single(params: Any) -> bool:
    return params.multivector_config is None
