"""The last event of each name, for whoever asks how a migration is doing."""

from __future__ import annotations

import threading
from typing import Any

from milvus_hubness.jobs.migration.events import PHASES, Event


class LatestEvents:
    """A listener that remembers the last event of each name. Safe to read from any thread."""

    def __init__(self) -> None:
        self._events: dict[str, Event] = {}
        self._phase = PHASES["plan"]
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._events[event.name] = event
            self._phase = PHASES.get(event.name, self._phase)

    def to_dict(self) -> dict[str, Any]:
        """phase, one of the values of PHASES, and events by their name, as plain data."""
        with self._lock:
            phase, events = self._phase, dict(self._events)
        return {"phase": phase, "events": {name: event.to_dict() for name, event in events.items()}}
