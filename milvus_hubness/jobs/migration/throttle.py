"""How fast a migration may write, steered while it runs."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from milvus_hubness.errors import InvalidParameter

BURST_SECONDS = 1.0
SMALLEST_REQUEST = 16
LARGEST_STEP = 2.0
LONGEST_WAIT = 3_600.0
INSTANT = 1e-9

LIMITS = ("rows_per_second", "bytes_per_second", "chunk_seconds")

Wait = Callable[[threading.Condition, float], object]


class Throttle:
    """Whoever writes asks `admit` before each request, and reports to `took` after it.

    rows_per_second, bytes_per_second: token buckets that hold at most one second's worth; a request larger
    than that is admitted from a full bucket, and the next waits the longer. chunk_seconds: how long one
    request should take. None is no limit. clock in seconds; wait: on a condition, for so many seconds or
    until it is notified. Safe to use from any thread. Raises InvalidParameter.
    """

    def __init__(
        self,
        rows_per_second: float | None = None,
        bytes_per_second: float | None = None,
        chunk_seconds: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Condition.wait,
    ) -> None:
        self._clock, self._wait = clock, wait
        self._changed = threading.Condition()
        self._guard: Callable[[], object] = lambda: None
        self._paused_by: dict[str, None] = {}
        self._error: BaseException | None = None
        self._rows = _Bucket(checked_limit("rows_per_second", rows_per_second), clock(), BURST_SECONDS)
        self._bytes = _Bucket(checked_limit("bytes_per_second", bytes_per_second), clock(), BURST_SECONDS)
        self._chunk_seconds = checked_limit("chunk_seconds", chunk_seconds)
        self._with_options: float | None = None
        self._bytes_per_row = 0.0

    def admit(self, rows: int, size: int) -> None:
        """Blocks until a request of so many rows and `size` bytes may be sent: while paused, and as long as
        the limits ask; `admit(0, 0)` waits for no more than the end of a pause. Raises the error that `stop`
        was given."""
        self._guard()
        with self._changed:
            while delay := self._delay(rows, size):
                self._wait(self._changed, min(delay, LONGEST_WAIT))
            self._rows.take(rows)
            self._bytes.take(size)
            if rows:
                self._bytes_per_row = size / rows

    @contextmanager
    def guarded(self, guard: Callable[[], object]) -> Iterator[None]:
        """Have `admit` call `guard` first, for the length of the block, and raise what it raises."""
        before, self._guard = self._guard, guard
        try:
            yield
        finally:
            self._guard = before

    def check(self) -> None:
        """Raises the error that `stop` was given; waits for nothing."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def pause(self, reason: str) -> bool:
        """Admit nothing until each reason to pause was resumed. Whether this reason is a new one."""
        with self._changed:
            is_new = reason not in self._paused_by
            self._paused_by[reason] = None
            self._changed.notify_all()
            return is_new

    def resume(self, reason: str) -> bool:
        """Take back the pause for `reason`. Whether there was one."""
        with self._changed:
            was_paused = reason in self._paused_by
            self._paused_by.pop(reason, None)
            self._changed.notify_all()
            return was_paused

    def stop(self, error: BaseException) -> None:
        """Have everyone who waits in `admit`, or calls it from now on, raise `error`. The first one stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def set_rate(self, **limits: float | None) -> None:
        """Change those of rows_per_second, bytes_per_second and chunk_seconds that are named; None takes a
        limit away. A changed limit starts from an empty bucket, without the debts of the old one. Raises
        InvalidParameter, and then nothing is changed."""
        limits = {name: checked_limit(name, value) for name, value in limits.items()}
        with self._changed:
            self._rows = self._rows.at(limits.get("rows_per_second", self._rows.rate), self._clock())
            self._bytes = self._bytes.at(limits.get("bytes_per_second", self._bytes.rate), self._clock())
            self._chunk_seconds = limits.get("chunk_seconds", self._chunk_seconds)
            self._changed.notify_all()

    def rows_per_request(self, default: int, ceiling: int) -> int:
        """How many rows the next request should have: `default` at first and where chunk_seconds is None,
        then what makes it take about chunk_seconds; no more than the rates allow for one second, no fewer
        than 16, and never more than `ceiling`."""
        with self._changed:
            wanted = float(default)
            if self._chunk_seconds is not None:
                self._with_options = max(self._with_options or wanted, SMALLEST_REQUEST)
                wanted = self._with_options
            if self._rows.rate is not None:
                wanted = min(wanted, self._rows.rate * BURST_SECONDS)
            if self._bytes.rate is not None and self._bytes_per_row:
                wanted = min(wanted, self._bytes.rate * BURST_SECONDS / self._bytes_per_row)
            return min(max(int(wanted), SMALLEST_REQUEST), ceiling)

    def took(self, rows: int, seconds: float) -> None:
        """A request of so many rows took that long: the next should take nearer to chunk_seconds, by at most
        twice or half the rows. A request of fewer rows than that, the last of a partition, say, counts only
        if it was slow."""
        with self._changed:
            if self._chunk_seconds is None or self._with_options is None:
                return
            if rows < int(self._with_options) and seconds < self._chunk_seconds:
                return
            step = self._chunk_seconds / max(seconds, INSTANT)
            self._with_options *= min(max(step, 1 / LARGEST_STEP), LARGEST_STEP)

    def snapshot(self) -> dict[str, Any]:
        """running; paused_by, the reasons; the three limits; rows_per_request, None while it was never
        steered; stopped, the message of the error that `stop` was given."""
        with self._changed:
            return {
                "running": not self._paused_by and self._error is None,
                "paused_by": list(self._paused_by),
                "rows_per_second": self._rows.rate,
                "bytes_per_second": self._bytes.rate,
                "chunk_seconds": self._chunk_seconds,
                "rows_per_request": None if self._with_options is None else int(self._with_options),
                "stopped": None if self._error is None else str(self._error),
            }

    def _delay(self, rows: int, size: int) -> float:
        """Seconds until the request may be sent, unless something changes; infinite while paused."""
        if self._error is not None:
            raise self._error
        if self._paused_by:
            return math.inf
        now = self._clock()
        return max(self._rows.delay(rows, now), self._bytes.delay(size, now))


class _Bucket:
    """rate tokens a second, of which it holds those of the last second; below zero it is in debt."""

    def __init__(self, rate: float | None, now: float, seconds_full: float) -> None:
        self.rate = rate
        self._capacity = (rate or 0.0) * BURST_SECONDS
        self._level = (rate or 0.0) * seconds_full
        self._filled_at = now

    def at(self, rate: float | None, now: float) -> _Bucket:
        return self if rate == self.rate else _Bucket(rate, now, 0.0)

    def delay(self, amount: float, now: float) -> float:
        if self.rate is None:
            return 0.0
        self._level = min(self._capacity, self._level + self.rate * (now - self._filled_at))
        self._filled_at = now
        seconds = (min(amount, self._capacity) - self._level) / self.rate
        return seconds if amount and seconds > INSTANT else 0.0

    def take(self, amount: float) -> None:
        if self.rate is not None:
            self._level -= amount


def checked_limit(name: str, value: object) -> float | None:
    """`value`, where it is a positive number or None, and `name` one of LIMITS. Raises InvalidParameter."""
    if name not in LIMITS:
        raise InvalidParameter(f"{name!r} is not one of {', '.join(LIMITS)}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise InvalidParameter(f"{name} must be a positive number, or null for no limit, not {value!r}")
    return value
