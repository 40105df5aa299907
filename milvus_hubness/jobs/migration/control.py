"""What an operator may ask of a running migration: to pause, to go slower or faster, to cut over now."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.migration.events import Events
from milvus_hubness.jobs.migration.throttle import LIMITS, Throttle, checked_limit

CUTOVER = ("postponed", "now")
SETTINGS = ("paused", *LIMITS, "cutover")


class CutoverGate:
    """Whether the cut-over may happen yet. Safe to use from any thread."""

    def __init__(self, *, postponed: bool = False) -> None:
        self._released = threading.Event()
        if not postponed:
            self._released.set()

    @property
    def postponed(self) -> bool:
        return not self._released.is_set()

    def postpone(self) -> None:
        """Hold the cut-over back until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Let the cut-over happen as soon as it can."""
        self._released.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is released, or for `timeout` seconds. Whether it is released."""
        return self._released.wait(timeout)


class Controls:
    """The handle of one operator, `name`, on a running migration. What is changed is told to `events`.

    Each name pauses for itself: a migration goes on when everyone who paused it has resumed it.
    """

    def __init__(self, name: str, throttle: Throttle, gate: CutoverGate, events: Events) -> None:
        self.name = name
        self._throttle, self._gate, self._events = throttle, gate, events

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Change what is named: paused (true or false), rows_per_second, bytes_per_second, chunk_seconds (a
        positive number, or None for no limit), cutover ("postponed" or "now"). Raises InvalidParameter, and
        then nothing is changed."""
        check_settings(settings)
        limits = {name: settings[name] for name in LIMITS if name in settings}
        if limits:
            self._throttle.set_rate(**limits)
            now = self._throttle.snapshot()
            self._events.report("rate", **{name: now[name] for name in LIMITS})
        if settings.get("cutover") == "postponed":
            self._gate.postpone()
        if settings.get("cutover") == "now":
            self._gate.release()
        if "paused" in settings:
            self._set_paused(settings["paused"])

    def snapshot(self) -> dict[str, Any]:
        """The throttle's snapshot, and cutover, "postponed" or "now"."""
        return {**self._throttle.snapshot(), "cutover": "postponed" if self._gate.postponed else "now"}

    def _set_paused(self, paused: bool) -> None:
        if paused:
            if self._throttle.pause(self.name):
                self._events.report("paused", reason=self.name)
        elif self._throttle.resume(self.name):
            self._events.report("resumed", reason=self.name)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises InvalidParameter unless all of `settings` can be applied."""
    for name, value in settings.items():
        if name in LIMITS:
            checked_limit(name, value)
        elif name == "paused":
            if not isinstance(value, bool):
                raise InvalidParameter(f"paused must be true or false, not {value!r}")
        elif name == "cutover":
            if value not in CUTOVER:
                raise InvalidParameter(f"cutover must be one of {', '.join(CUTOVER)}, not {value!r}")
        else:
            raise InvalidParameter(f"{name!r} is not one of {', '.join(SETTINGS)}")
