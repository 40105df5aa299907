"""Samples of live queries, stored in the background."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pymilvus import MilvusClient

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.codec.arrays import decode, without_tensors
from milvus_hubness.errors import StateError
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.records import Sample, SamplesOf, Sampling, Samplings
from milvus_hubness.milvus.client.messages import AnsweredSearch

BUFFERED = 1_000
"""Largest number of samples that are not yet stored; further samples are dropped."""
BATCH = 200
"""Number of waiting samples that are written at once."""
FLUSH_SECONDS = 2.0
"""Longest time until fewer samples are written."""
WRITE_SECONDS = 5.0
"""Time limit of a write."""
REST_SECONDS = 60.0
"""Time for which samples of a collection are dropped after a failed write to it, in seconds."""
CLOSE_SECONDS = 2.0
"""Longest wait of a client that closes, until the waiting samples are written."""
NUMBER_BITS = 52
"""Bits of a sample's random number: what a float64 holds exactly."""

Write = Callable[[SamplesOf, Sequence[Sample]], None]
"""Writes samples of a collection."""


@dataclass(frozen=True)
class Target:
    """What of a field is sampled, and where the samples go."""

    sampling: Sampling
    samples: SamplesOf

    @classmethod
    def of(cls, sampling: Sampling, owner: CollectionId) -> Target:
        """owner: the searched collection."""
        return cls(sampling, SamplesOf(sampling.helper, owner))


@dataclass(frozen=True)
class Sampled:
    """Counts of sampled queries."""

    stored: int
    dropped: int
    """Those that could not be stored."""
    waiting: int
    """Those that are still to be stored, and those whose write is not answered yet."""


class Searched(Protocol):
    """A collection that was searched, as its cached state describes it."""

    @property
    def collection_id(self) -> CollectionId: ...

    @property
    def samplings(self) -> Samplings: ...


class Sampler:
    """Samples live queries at the rates of the collections.

    One thread stores them, which runs while samples wait. Samples that it cannot store are dropped.
    """

    @classmethod
    def through(cls, connected: Callable[[], MilvusClient]) -> Sampler:
        """Return one that writes by the client that `connected` returns."""

        def write(samples_of: SamplesOf, samples: Sequence[Sample]) -> None:
            # Imported late: most clients sample nothing.
            from milvus_hubness.milvus.store.banks import put_samples

            put_samples(connected(), samples_of, samples, WRITE_SECONDS)

        return cls(write)

    def __init__(self, write: Write) -> None:
        self._write_samples = write
        self._gaps: dict[tuple[str, float], int] = {}
        """How many queries to skip before the next sample, by collection of samples and rate."""
        self._resting: dict[SamplesOf, float] = {}
        """Until when samples of a collection are dropped, after a failed write."""
        self._waiting: list[tuple[SamplesOf, Sample]] = []
        self._stored = 0
        self._dropped = 0

        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._being_written = 0
        """How many samples of the last batch were neither stored nor dropped yet."""

    def listens_to(self, cached: Searched) -> bool:
        """Whether queries of this collection are sampled."""
        return bool(cached.samplings.fields)

    def searched(self, cached: Searched, answered: Callable[[], AnsweredSearch]) -> None:
        """Sample some of the queries of an answered search, as `SearchListener` says."""
        fields = cached.samplings.fields
        if not fields:
            return
        try:
            name, queries = answered()
            sampling = cached.samplings.of(name) if name else None
            # Without a name, Milvus would refuse a search on several fields.
            if not name and len(fields) == 1:
                sampling = fields[0]
            if sampling is not None:
                self.offer(Target.of(sampling, cached.collection_id), without_tensors(queries))
        except Exception as error:
            # The search was answered: no fault of a sample may fail it.
            self._dropped += 1
            log.warning("a query of %r was not sampled: %s", cached.collection_id.name, error)

    def offer(self, target: Target, queries: Sequence[Any] | npt.NDArray[Any]) -> None:
        """Sample some of m vectors, as pymilvus takes them for the sampled field."""
        sampling = target.sampling
        rate = sampling.rate
        name = (sampling.samples_collection, rate)
        gap = self._gaps.get(name)
        if gap is None:
            gap = _gap(rate)

        count = len(queries)
        while gap < count:
            sample = _sample(sampling, queries[gap])
            if sample is not None:
                self._put(target.samples, sample)
            gap += 1 + _gap(rate)
        self._gaps[name] = gap - count

    @property
    def counts(self) -> Sampled:
        with self._changed:
            return Sampled(self._stored, self._dropped, self._unstored)

    @property
    def _unstored(self) -> int:
        return len(self._waiting) + self._being_written

    def discard(self, seconds: float = CLOSE_SECONDS) -> None:
        """Drop the waiting samples before `write` changes its destination.

        Waits at most `seconds` for a write in progress.
        """
        with self._changed:
            self._dropped += len(self._waiting)
            self._waiting = []
            self._resting.clear()
            self._changed.wait_for(lambda: not self._being_written, seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the waiting samples, and wait at most `seconds` for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread

        if thread is not None:
            thread.join(seconds)

    def _put(self, target: SamplesOf, sample: Sample) -> None:
        """Have a sample written by the thread, if there is room for it."""
        # No search may wait for a sample: what cannot be taken at once is dropped.
        with self._changed:
            rests = bool(self._resting) and time.monotonic() < self._resting.get(target, 0.0)
            if self._closing or rests or self._unstored >= BUFFERED:
                self._dropped += 1
                return

            self._waiting.append((target, sample))
            count = len(self._waiting)
            if count == 1 or count == BATCH:
                self._have_written()

    def _have_written(self) -> None:
        """Start the thread if there is none, and wake it up."""
        # In a process that was forked, the thread of its parent is not alive.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="hubness-sampler", daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    def _run(self) -> None:
        while batch := self._next_batch():
            by_target: dict[SamplesOf, list[Sample]] = {}
            for target, sample in batch:
                by_target.setdefault(target, []).append(sample)
            for target, samples in by_target.items():
                self._write(target, samples)

    def _next_batch(self) -> list[tuple[SamplesOf, Sample]]:
        """Return the samples to write now; an empty list ends the thread."""
        with self._changed:
            # Whoever discards waits until nothing is being written.
            self._changed.notify_all()
            if self._waiting:
                self._changed.wait_for(
                    lambda: len(self._waiting) >= BATCH or self._closing, FLUSH_SECONDS
                )

            batch = self._waiting
            self._waiting = []
            if not batch:
                self._thread = None
            self._being_written = len(batch)
            return batch

    def _write(self, target: SamplesOf, samples: Sequence[Sample]) -> None:
        try:
            try:
                self._write_samples(target, samples)
            except Exception:
                # Milvus Lite closes connections that were idle for half a minute.
                time.sleep(0.1)
                self._write_samples(target, samples)
        except Exception as error:
            with self._changed:
                self._dropped += len(samples)
                self._being_written -= len(samples)
                self._resting[target] = time.monotonic() + REST_SECONDS
            message = (
                "%d sampled queries were not stored in %r; its samples are dropped for %.0f s: %s"
            )
            log.warning(message, len(samples), target.helper.collection, REST_SECONDS, error)
        else:
            with self._changed:
                self._stored += len(samples)
                self._being_written -= len(samples)


def samplings_in(properties: Mapping[str, str], collection: str) -> Samplings:
    """Return what of a collection is sampled: nothing if the record of it is broken, so that
    searches continue.
    """
    try:
        return Samplings.read(properties, collection) or Samplings()
    except StateError as error:
        log.warning("no queries are sampled: %s", error)
        return Samplings()


def _sample(sampling: Sampling, query: Any) -> Sample | None:
    """Return a query as a sample; None for one that no bank can hold."""
    if sampling.dtype == "float32" and isinstance(query, bytes):
        query = np.frombuffer(query, "<f4")
    with np.errstate(over="ignore"):
        vector = decode([query], sampling.dtype)[0]
    if vector.shape != (sampling.dim,) or not np.isfinite(vector).all() or not vector.any():
        return None
    return Sample(
        place=random.randrange(sampling.size),
        number=random.getrandbits(NUMBER_BITS),
        at=int(time.time()),
        vector=vector,
    )


def _gap(rate: float) -> int:
    """Return how many queries to skip before the next sample.

    The number is geometrically distributed, as if each query were drawn by itself.
    """
    if rate >= 1:
        return 0
    return int(math.log(1.0 - random.random()) / math.log1p(-rate))
