"""Samples of live queries for online banks, written in the background."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tenacity import Retrying, stop_after_attempt, wait_fixed

from milvus_hubness.codec.half_precision import decode
from milvus_hubness.errors import InvalidParameter, StateError
from milvus_hubness.job_properties import OnlineBank, read_online_banks
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.milvus_banks import Sample

BUFFERED = 1_000
"""Samples that wait to be written, at most; more are dropped."""
BATCH = 200
FLUSH_SECONDS = 2.0
WRITE_SECONDS = 5.0
IDLE_SECONDS = 30.0
"""After so long without a sample the thread that writes them ends, until there is one."""
REST_SECONDS = 60.0
"""For how long no samples are kept for a collection that did not take them."""
CLOSE_SECONDS = 2.0
NUMBER_BITS = 52

Write = Callable[[str, Sequence[Sample]], None]
"""Puts samples into the collection of that name."""

_log = logging.getLogger("milvus_hubness")


@dataclass(frozen=True)
class Sampled:
    """How many queries were sampled: written, dropped because they could not be, and still waiting."""

    written: int
    dropped: int
    waiting: int


class Sampler:
    """rate: the share of queries to sample, whatever collections say; None for what they say.

    A sample is a vector, the profile it was asked under and the time: nothing else of a search is kept. What
    cannot be written is dropped. `write` is called from one thread, which runs while there are samples.
    """

    def __init__(self, rate: float | None, write: Write) -> None:
        self._rate = rate
        self._put = write
        self._gaps: dict[tuple[str, str, float], int] = {}
        self._resting: dict[str, float] = {}
        self._waiting: list[tuple[str, Sample]] = []
        self._written = self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = self._is_writing = False

    def offer(self, online_bank: OnlineBank, state: CollectionState, queries: Any) -> None:
        """Sample some of the queries (m, d) of a search that was answered."""
        try:
            rate = online_bank.rate if self._rate is None else self._rate
            name = (online_bank.samples_collection, online_bank.profile, rate)
            gap, count = self._gaps.get(name), len(queries)
            gap = _gap(rate) if gap is None else gap
            while gap < count:
                self._take(online_bank, state, queries[gap])
                gap += 1 + _gap(rate)
            self._gaps[name] = gap - count
        except Exception as error:
            self._dropped += 1
            _log.warning("a query of %r was not sampled: %s", online_bank.samples_collection, error)

    @property
    def counts(self) -> Sampled:
        """Since the client was made."""
        with self._changed:
            return Sampled(self._written, self._dropped, len(self._waiting))

    def discard(self, seconds: float = CLOSE_SECONDS) -> None:
        """Forget what waits, and let what is being written come to its end, as far as that takes no longer
        than so many seconds: to be called before `write` leads elsewhere."""
        with self._changed:
            self._dropped += len(self._waiting)
            self._waiting = []
            self._resting.clear()
            self._changed.wait_for(lambda: not self._is_writing, seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, as far as that takes no longer than so many seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _take(self, online_bank: OnlineBank, state: CollectionState, query: Any) -> None:
        vector = decode([query], state.dtype)[0]
        if vector.shape != (state.dim,) or not np.isfinite(vector).all() or not vector.any():
            return
        sample = Sample(
            online_bank.profile,
            random.randrange(online_bank.capacity),
            random.getrandbits(NUMBER_BITS),
            int(time.time()),
            vector,
        )
        with self._changed:
            rests = time.monotonic() < self._resting.get(online_bank.samples_collection, 0.0)
            if self._closing or rests or len(self._waiting) >= BUFFERED:
                self._dropped += 1
                return
            self._waiting.append((online_bank.samples_collection, sample))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="hubness-sampler", daemon=True)
                self._thread.start()
            elif len(self._waiting) in (1, BATCH):
                self._changed.notify_all()

    def _run(self) -> None:
        while batch := self._next_batch():
            by_samples_collection: dict[str, list[Sample]] = {}
            for samples_collection, sample in batch:
                by_samples_collection.setdefault(samples_collection, []).append(sample)
            for samples_collection, samples in by_samples_collection.items():
                self._write(samples_collection, samples)

    def _next_batch(self) -> list[tuple[str, Sample]]:
        """What is to be written now; nothing where the thread is to end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing, IDLE_SECONDS)
            if self._waiting:
                self._changed.wait_for(lambda: len(self._waiting) >= BATCH or self._closing, FLUSH_SECONDS)
            batch, self._waiting = self._waiting, []
            if not batch:
                self._thread = None
            self._is_writing = bool(batch)
            return batch

    def _write(self, samples_collection: str, samples: Sequence[Sample]) -> None:
        # Milvus Lite hangs up on clients that were idle for half a minute, who then have to ask again.
        retrying = Retrying(stop=stop_after_attempt(2), wait=wait_fixed(0.1), reraise=True)
        try:
            retrying(self._put, samples_collection, samples)
        except Exception as error:
            with self._changed:
                self._dropped += len(samples)
                self._resting[samples_collection] = time.monotonic() + REST_SECONDS
            _log.warning(
                "%d sampled queries were not written to %r, which is left alone for %.0f s: %s",
                len(samples),
                samples_collection,
                REST_SECONDS,
                error,
            )
        else:
            with self._changed:
                self._written += len(samples)


def sampler_for(sample_queries: float | None, write: Write) -> Sampler | None:
    """The sampler that a client's argument asks for: None for the rates that collections say, False or 0 for
    no sampling, or a rate for all. Raises InvalidParameter."""
    if sample_queries is None:
        return Sampler(None, write)
    if sample_queries is False:
        return None
    result = type(sample_queries) in (int, float) and 0 <= sample_queries <= 1
    if not result:
        raise InvalidParameter(
            f"sample_queries is None, False or a share of queries from 0 to 1, got {sample_queries!r}"
        )
    return Sampler(float(sample_queries), write) if sample_queries else None


def online_banks_in(properties: Mapping[str, str]) -> dict[tuple[str, str], OnlineBank]:
    """The online banks, by field and profile. Where what the collection says of them is broken no query is
    sampled, and searches go on."""
    try:
        return {(each.field, each.profile): each for each in read_online_banks(properties)}
    except StateError as error:
        _log.warning("no queries are sampled: %s", error)
        return {}


def _gap(rate: float) -> int:
    """How many queries to pass by before the next that is sampled: geometrically distributed."""
    return 0 if rate >= 1 else int(math.log(1.0 - random.random()) / math.log1p(-rate))
