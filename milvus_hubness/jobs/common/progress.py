"""The progress of a job: callbacks, events, the throttle that limits its pace, and the keys of its
rows in pages.

docs/how-to/control.md lists the events of a migration and their facts.
"""

from __future__ import annotations

import math
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from pydantic_core import to_jsonable_python

from milvus_hubness.basics.progress import Progress
from milvus_hubness.errors import InvalidParameter

if TYPE_CHECKING:
    from milvus_hubness.correction.banks.stored import Key
    from milvus_hubness.jobs.store.protocols import Rows
    from milvus_hubness.jobs.store.records import CollectionInfo

T = TypeVar("T")


def chunks(items: Sequence[T], size: int, doing: str, progress: Progress) -> Iterator[Sequence[T]]:
    """Yield `items` in chunks of `size`, and report to `progress` after each chunk is processed."""
    progress(doing, 0, len(items))
    for start in range(0, len(items), size):
        chunk = items[start : start + size]
        yield chunk
        # The caller asks for the next chunk once it has processed this one.
        progress(doing, start + len(chunk), len(items))


EVENT_NAMES = (
    "plan",
    "before-copy",
    "copying",
    "after-copy",
    "catching-up",
    "filling",
    "before-verify",
    "verified",
    "postponed",
    "before-cutover",
    "after-cutover",
    "before-rollback",
    "after-rollback",
    "stopped",
    "failed",
    "continuing",
    "paused",
    "resumed",
    "rate",
    "warning",
)


@dataclass(frozen=True)
class Event:
    """An event of a job."""

    name: str
    """What happened; for a migration, one of EVENT_NAMES."""
    facts: Mapping[str, Any]
    """What listeners get with it."""
    time: datetime
    """When it was reported, in UTC."""

    def to_dict(self) -> dict[str, Any]:
        """Return name, time (ISO 8601) and facts as
        JSON-compatible data; infinite numbers and NaN become None.
        """
        facts = to_jsonable_python(self.facts, fallback=_plain, inf_nan_mode="null")
        return {"name": self.name, "time": self.time.isoformat(), "facts": facts}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


Listener = Callable[[Event], None]


class Events:
    """Passes each event to every listener, in order, one at a time, in the thread that reports it."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._listeners = tuple(listeners)
        self._one_at_a_time = threading.RLock()

    def report(self, name: str, /, **facts: Any) -> None:
        """Report an event.

        If a listener raises, raise its exception and skip the remaining ones.
        """
        with self._one_at_a_time:
            event = Event(name, facts, datetime.now(timezone.utc))
            for listener in self._listeners:
                listener(event)


def as_events(progress: Progress) -> Events:
    """Return events that call `progress`."""

    def show(event: Event) -> None:
        if event.name == "copying":
            progress("copying", event.facts["rows"], event.facts["rows_total"])
        elif event.name == "filling":
            progress(event.facts["doing"], event.facts["rows"], event.facts["rows_total"])
        elif event.name == "catching-up":
            doing = f"comparing, pass {event.facts['pass']}" if event.facts["pass"] else "verifying"
            progress(doing, event.facts["rows"], event.facts["rows_total"])

    return Events([show])


@contextmanager
def polling(poll: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call `poll` every `seconds` while this context is open, in a thread of this name."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            poll()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


BURST_SECONDS = 1.0
"""A full bucket holds the tokens of so many seconds."""

SMALLEST_REQUEST = 16
"""Least rows of a request, however slow the rates: each request has a cost of its own."""

LARGEST_STEP = 2.0
"""The rows of a request grow or shrink by at most this factor from one request to the next."""

LONGEST_WAIT = 3_600.0
"""Seconds after which a waiting job looks again; a pause may last longer."""

STOP_POLL_SECONDS = 0.2

INSTANT = 1e-9
"""Seconds below which rounding errors of the clock count as no time."""

LIMITS = ("rows_per_second", "chunk_seconds")
"""The names of the limits of a throttle."""

Wait = Callable[[threading.Condition, float], object]
"""Waits for a condition, at most so many seconds."""


class Throttle:
    """Limits the pace of a job: a writer calls `admit` before each request and `took` after it,
    from any thread.

    rows_per_second: a token bucket that holds the tokens of one second; a larger request is admitted
    from a full bucket, and the next waits longer. chunk_seconds: the target duration of a request.
    None: no limit. clock, wait: time.monotonic and Condition.wait. Raises InvalidParameter.
    """

    def __init__(
        self,
        rows_per_second: float | None = None,
        chunk_seconds: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Condition.wait,
    ) -> None:
        self._clock = clock
        self._wait = wait
        self._changed = threading.Condition()

        self._check: Callable[[], object] = lambda: None
        self._error: BaseException | None = None
        self.stopped = threading.Event()
        """Set by `stop`, for waits that are no requests."""
        # A dictionary keeps the order in which reasons came.
        self._paused_by: dict[str, None] = {}

        rate = checked_limit("rows_per_second", rows_per_second)
        self._rows = _Bucket(rate, clock(), BURST_SECONDS)

        self._chunk_seconds = checked_limit("chunk_seconds", chunk_seconds)
        self._adapted_rows: float | None = None

    def admit(self, rows: int) -> None:
        """Block until a request of so many rows may be sent: while paused, and as long as the rate
        requires. `admit(0)` waits only for the end of a pause. Raises the error that was passed to
        `stop`.
        """
        self._check()
        with self._changed:
            while delay := self._delay(rows):
                # Meanwhile another thread may pause, resume, stop
                # or change a rate, so the delay is computed again.
                self._wait(self._changed, min(delay, LONGEST_WAIT))
            self._rows.take(rows)

    @contextmanager
    def checking(self, check: Callable[[], object]) -> Iterator[None]:
        """Have `admit` call `check` first within the block, and raise its exceptions."""
        outer_check = self._check
        self._check = check
        try:
            yield
        finally:
            self._check = outer_check

    def check(self) -> None:
        """Raise the error that was passed to `stop`, without waiting."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def pause(self, reason: str) -> bool:
        """Admit nothing until every reason to pause is over. Return whether this one is new."""
        with self._changed:
            is_new = reason not in self._paused_by
            self._paused_by[reason] = None
            self._changed.notify_all()
            return is_new

    def resume(self, reason: str) -> bool:
        """End the pause for `reason`. Return whether there was one."""
        with self._changed:
            was_paused = reason in self._paused_by
            self._paused_by.pop(reason, None)
            self._changed.notify_all()
            return was_paused

    def stop(self, error: BaseException) -> None:
        """Have all current and later calls of `admit` raise `error`. The first error stays."""
        with self._changed:
            self._error = self._error or error
            self.stopped.set()
            self._changed.notify_all()

    @contextmanager
    def stopped_by(self, event: threading.Event, error: BaseException) -> Iterator[None]:
        """Call `stop` with `error` soon after the event is set within the block."""

        def poll() -> None:
            if event.is_set():
                self.stop(error)

        with polling(poll, STOP_POLL_SECONDS, "milvus-hubness-stop"):
            yield

    def set_rate(self, **limits: float | None) -> None:
        """Change the named limits; None removes one.

        A changed limit starts from an empty bucket, without the former debt. Raises
        InvalidParameter, and then changes nothing.
        """
        limits = {name: checked_limit(name, value) for name, value in limits.items()}
        with self._changed:
            rate = limits.get("rows_per_second", self._rows.rate)
            self._rows = self._rows.at(rate, self._clock())
            self._chunk_seconds = limits.get("chunk_seconds", self._chunk_seconds)
            self._changed.notify_all()

    def rows_per_request(self, default: int, ceiling: int) -> int:
        """Return the number of rows for the next request: `default` at first and while
        chunk_seconds is None; later the number that takes about chunk_seconds, at most the rows of
        one second, from 16 to `ceiling`.
        """
        with self._changed:
            rows = float(default)
            if self._chunk_seconds is not None:
                rows = self._adapted_rows = max(self._adapted_rows or rows, SMALLEST_REQUEST)
            if self._rows.rate is not None:
                rows = min(rows, self._rows.rate * BURST_SECONDS)
            return min(max(int(rows), SMALLEST_REQUEST), ceiling)

    def took(self, rows: int, seconds: float) -> None:
        """Record the duration of a request, so that the next takes closer to chunk_seconds, by at
        most a factor of two. A request with fewer rows than planned counts only if it was slow.
        """
        with self._changed:
            if self._chunk_seconds is None or self._adapted_rows is None:
                return

            # The last rows of a chunk are few, and say nothing about a whole request.
            if rows < int(self._adapted_rows) and seconds < self._chunk_seconds:
                return

            factor = self._chunk_seconds / max(seconds, INSTANT)
            self._adapted_rows *= min(max(factor, 1 / LARGEST_STEP), LARGEST_STEP)

    def snapshot(self) -> dict[str, Any]:
        """Return paused_by, the reasons of the pause in their order, and the limits."""
        with self._changed:
            return {
                "paused_by": list(self._paused_by),
                "rows_per_second": self._rows.rate,
                "chunk_seconds": self._chunk_seconds,
            }

    def _delay(self, rows: int) -> float:
        """Return the seconds until the request may be
        sent if nothing changes; infinite while paused.
        """
        if self._error is not None:
            raise self._error
        if self._paused_by:
            return math.inf

        return self._rows.delay(rows, self._clock())


class _Bucket:
    """A bucket that gains `rate` tokens a second and holds at most those of one second; its level
    may be negative.
    """

    def __init__(self, rate: float | None, now: float, seconds_full: float) -> None:
        self.rate = rate
        self._capacity = (rate or 0.0) * BURST_SECONDS
        self._level = (rate or 0.0) * seconds_full
        self._filled_at = now

    def at(self, rate: float | None, now: float) -> _Bucket:
        """Return this bucket, or an empty one if the rate is another."""
        return self if rate == self.rate else _Bucket(rate, now, 0.0)

    def delay(self, amount: float, now: float) -> float:
        """Return the seconds until this amount, or a full bucket, is there."""
        if self.rate is None:
            return 0.0

        self._level = min(self._capacity, self._level + self.rate * (now - self._filled_at))
        self._filled_at = now
        # A request larger than the bucket waits until it is full. `take`
        # then makes the level negative, and later requests pay for it.
        seconds = (min(amount, self._capacity) - self._level) / self.rate
        return seconds if amount and seconds > INSTANT else 0.0

    def take(self, amount: float) -> None:
        if self.rate is not None:
            self._level -= amount


def checked_limit(name: str, value: object) -> float | None:
    """Return `value` if it is a positive number or None, and `name` is one of LIMITS.

    Raises InvalidParameter.
    """
    if name not in LIMITS:
        raise InvalidParameter(f"{name!r} is not one of {', '.join(LIMITS)}")
    if value is None:
        return None

    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= sys.float_info.max
    ):
        raise InvalidParameter(
            f"{name} must be a positive number, or null for no limit, not {reprlib.repr(value)}"
        )

    return value


KEYS_PER_PAGE = 16_384
"""Keys that one request returns: the most that Milvus allows."""

Pages: TypeAlias = "Callable[[str | None], Iterable[list[Key]]]"
"""Returns pages of the keys of a partition."""


def key_pages(
    store: Rows,
    name: str,
    partition: str | None = None,
    *,
    rows: int = 0,
    after: Key | None = None,
    pending: str = "",
) -> Iterator[list[Key]]:
    """Yield pages of keys in ascending order: all keys that exist at the start, and some of those
    that clients write meanwhile. after: the key before the first one. pending: as in
    Rows.scan_keys. rows: the expected number of keys; from there on this looks for the end, as
    clients may write rising keys faster than a job takes them.
    """
    if after is not None:
        # Only a first page is strongly consistent, and what follows it.
        store.count(name)

    ceiling: Key | None = None
    seen = 0
    while page := store.scan_keys(
        name, limit=KEYS_PER_PAGE, after=after, partition=partition, pending=pending
    ):
        after = page[-1]
        seen += len(page)
        if ceiling is None and seen >= rows:
            ceiling = ceiling_of(store, name, after, partition, pending)
        if ceiling is not None:
            page = [key for key in page if key <= ceiling]  # type: ignore[operator]
        if not page:
            return
        yield page


def ceiling_of(
    store: Rows, collection: str, key: Key, partition: str | None = None, pending: str = ""
) -> Key | None:
    """Return a key that is at least the greatest current key, searched from
    `key` up; None if there is none. A reader that stops here ends even if
    clients write rising keys faster than it reads. A page with fewer rows than
    requested does not show the end: Milvus 2.3 returns some rows one by one.
    """
    options: Any = {"limit": 1, "partition": partition, "pending": pending}
    keys = (store.above(key, step) for step in count())
    return next(
        above
        for above in keys
        if above is None or not store.scan_keys(collection, after=above, **options)
    )


def absent(pages: Iterable[list[Key]], store: Rows, other: str) -> Iterator[list[Key]]:
    """Yield, from ascending pages of keys, the keys that the collection `other` does not have."""
    # Both collections have one order of keys, so `other` is read once, alongside the pages.
    after: Key | None = None
    for page in pages:
        lacking = set(page)
        while keys := store.scan_keys(other, after=after, limit=KEYS_PER_PAGE):
            lacking.difference_update(keys)
            after = keys[-1]
            if after >= page[-1]:  # type: ignore[operator]
                break

        after = page[-1]
        if lacking:
            yield [key for key in page if key in lacking]


def key_chunks(
    store: Rows,
    info: CollectionInfo,
    doing: str,
    progress: Progress,
    pages: Pages | None = None,
    total: int = -1,
    most: int | None = None,
) -> Iterator[tuple[str | None, list[Key]]]:
    """Yield partitions and chunks of their keys, of a suitable size for one read, and report each
    processed chunk. pages: of the keys of a partition, by default all. total: their expected
    number, by default that of all rows. most: keys of a chunk, where a read may have more.
    """
    size = store.chunk_rows(info)
    if most is not None:
        size = min(size, most)
    total = info.rows if total < 0 else total
    done = 0
    progress(doing, done, total)
    for partition in info.partitions:
        waiting: list[Key] = []
        keys = pages(partition) if pages else key_pages(store, info.name, partition, rows=info.rows)
        # Pages and chunks have other sizes; None stands for the end, where the last chunk is short.
        for page in chain(keys, [None]):
            waiting += page or []
            while len(waiting) >= size or (waiting and page is None):
                chunk = waiting[:size]
                waiting = waiting[size:]
                yield partition, chunk

                # Clients may have added rows, so that there are more than were counted.
                done += len(chunk)
                progress(doing, done, max(done, total))
