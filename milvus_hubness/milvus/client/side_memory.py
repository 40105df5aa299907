"""Biases of side collections that a client keeps in memory. No I/O.

A search whose candidates have all been seen needs no second request for their biases.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.base import EPOCH_FIELD
from milvus_hubness.correction.codec.beside import SIDE_FIELD, is_of
from milvus_hubness.correction.state import CollectionState, Profile
from milvus_hubness.milvus.client.steps import Operation

T = TypeVar("T")

MAX_KEYS = 1_000_000
"""Largest number of biases in the memory of a client."""


class SideBiases(NamedTuple):
    """One generation of biases in a side collection."""

    collection: str
    """The side collection."""
    slot: int
    number: int
    """The number of the generation, which no other one has."""

    @classmethod
    def of(cls, state: CollectionState, profile: Profile) -> SideBiases | None:
        """Return the biases of a profile; None if they are not in a side collection."""
        sides = state.codec.sides
        if not sides:
            return None
        return cls(sides[profile.slot], profile.slot, profile.generation)

    @classmethod
    def written(cls, state: CollectionState) -> list[SideBiases]:
        """Return the generations that get the biases of new rows: that which searches read, and that
        which a refresh is filling.
        """
        every = (cls.of(state, profile) for profile in state.written_profiles)
        return [generation for generation in every if generation is not None]

    def bias_in(self, row: Mapping[str, Any]) -> float | None:
        """Return the bias of a row of the side collection; None if it is of another generation."""
        return float(row[SIDE_FIELD][0]) if is_of(row[EPOCH_FIELD], self.number) else None


class _Entry(NamedTuple):
    bias: float
    read_at: float
    """When the request that read it began, by the monotonic clock."""


@dataclass(eq=False)
class _Request:
    """A request to a side collection that has no answer yet."""

    generation: SideBiases
    """What it reads or writes."""
    began: float
    """When it began, by the monotonic clock."""
    written: set[Key] = field(default_factory=set)
    """Keys that another request of this client wrote meanwhile: what this one read, or in which
    order the two were stored, is unknown.
    """


class SideMemory:
    """Biases by key, those least recently used go first; threads and tasks may share it.

    ttl: seconds for which a bias is used after the request that read it. A bias that another client
    has written is seen after this time.
    """

    def __init__(self, ttl: float, max_keys: int = MAX_KEYS) -> None:
        self._ttl = ttl
        self._max_keys = max_keys
        self._lock = Lock()
        self._kept: OrderedDict[str, tuple[SideBiases, OrderedDict[Key, _Entry]]] = OrderedDict()
        """Biases by key, by side collection; what was used last is at the end of both."""
        self._requests: set[_Request] = set()

    def __len__(self) -> int:
        with self._lock:
            return self._count()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def read(
        self,
        generation: SideBiases,
        keys: Iterable[Key],
        ask: Callable[[list[Key]], Operation[Mapping[Key, float]]],
    ) -> Operation[dict[Key, float]]:
        """Return the bias of each key.

        ask: reads the biases of keys that are not in memory. A key without a row has the mean bias,
        which is 0.
        """
        biases, missing = self._known(generation, keys)
        if missing:
            with self._under_way(generation) as request:
                found = yield from ask(missing)
                read = {key: float(found.get(key, 0.0)) for key in missing}
                self._keep(request, read.items())

            biases |= read
        return biases

    def write(
        self, generation: SideBiases, biases: Mapping[Key, float | None], send: Operation[T]
    ) -> Operation[T]:
        """Send a write to a side collection, and keep what it stored.

        biases: by key, as the write stores them; None for deleted ones. After an error nothing is
        known of these keys.
        """
        with self._under_way(generation) as request:
            stored: Mapping[Key, float | None] = {}
            try:
                result = yield from send
                stored = biases
                return result
            finally:
                self._forget(request, biases)
                changed = ((key, bias) for key, bias in stored.items() if bias is not None)
                self._keep(request, changed)

    @contextmanager
    def _under_way(self, generation: SideBiases) -> Iterator[_Request]:
        request = _Request(generation, time.monotonic())
        with self._lock:
            self._requests.add(request)
        try:
            yield request
        finally:
            with self._lock:
                self._requests.discard(request)

    def _known(
        self, generation: SideBiases, keys: Iterable[Key]
    ) -> tuple[dict[Key, float], list[Key]]:
        """Return the biases that are in memory and not too old, and the other keys."""
        with self._lock:
            entries = self._entries(generation)
            oldest = time.monotonic() - self._ttl
            known: dict[Key, float] = {}
            missing: list[Key] = []
            for key in keys:
                entry = entries.get(key)
                if entry is None or entry.read_at <= oldest:
                    missing.append(key)
                else:
                    known[key] = entry.bias
                    entries.move_to_end(key)

            return known, missing

    def _keep(self, request: _Request, biases: Iterable[tuple[Key, float]]) -> None:
        """Keep biases that a request has read or written."""
        with self._lock:
            entries = self._entries(request.generation)
            for key, bias in biases:
                if key not in request.written:
                    entries[key] = _Entry(bias, request.began)
                    entries.move_to_end(key)

            self._evict()

    def _forget(self, request: _Request, keys: Iterable[Key]) -> None:
        """Forget keys that a request has written, here and in the answers that are still to come."""
        with self._lock:
            for other in self._requests:
                if (
                    other is not request
                    and other.generation.collection == request.generation.collection
                ):
                    other.written.update(keys)

            entries = self._entries(request.generation)
            for key in keys:
                entries.pop(key, None)

    def _entries(self, generation: SideBiases) -> OrderedDict[Key, _Entry]:
        """Return what is kept of these biases. Others of the same side collection are dropped."""
        kept = self._kept.get(generation.collection)
        if kept is None or kept[0] != generation:
            kept = self._kept[generation.collection] = (generation, OrderedDict())

        self._kept.move_to_end(generation.collection)
        return kept[1]

    def _evict(self) -> None:
        """Drop what is too old or too much, from the least recently used on."""
        oldest = time.monotonic() - self._ttl
        too_many = self._count() - self._max_keys
        for collection, (_, entries) in list(self._kept.items()):
            while entries:
                first = next(iter(entries))
                if too_many <= 0 and entries[first].read_at > oldest:
                    break
                del entries[first]
                too_many -= 1

            # The last one was used just now.
            if not entries and collection != next(reversed(self._kept)):
                del self._kept[collection]

    def _count(self) -> int:
        return sum(len(entries) for _, entries in self._kept.values())
