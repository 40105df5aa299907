"""What a migration tells while it runs: to the log, the metrics, the status and the hooks.

| event           | facts                                                                                   |
|-----------------|-----------------------------------------------------------------------------------------|
| plan            | the plan                                                                                |
| before-copy     | source, target, rows_total                                                              |
| copying         | after each chunk: partition, chunk and chunks (its number and how many there are), rows |
|                 | copied so far, rows_total, bytes and seconds of this chunk, rows_per_second,            |
|                 | eta_seconds (None while unknown)                                                        |
| after-copy      | source, target, rows                                                                    |
| catching-up     | pass (from 1), and in this pass so far: rows compared, rows_total, differing, repaired; |
|                 | pass 0 only compares                                                                    |
| before-verify   | source, target, rows_total                                                              |
| verified        | rows, fields                                                                            |
| postponed       | the cut-over waits to be released                                                       |
| before-cutover  | source, target, alias                                                                   |
| after-cutover   | source, target, alias                                                                   |
| before-rollback | source, target, alias                                                                   |
| after-rollback  | source, target, alias                                                                   |
| throttled       | reason, detail: the server is under load, and copying rests until `resumed`             |
| paused          | reason: who paused                                                                      |
| resumed         | reason: whose pause is over; copying goes on when none is left                          |
| rate            | rows_per_second, bytes_per_second, chunk_seconds as they are now, None for no limit     |
| warning         | message: something was not done, and the migration goes on without                      |
| stopped         | reason: ended on request; it can be resumed                                             |
| failed          | type and message of the error                                                           |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

PHASES = {
    "plan": "preparing",
    "before-copy": "copying",
    "copying": "copying",
    "after-copy": "catching up",
    "catching-up": "catching up",
    "before-verify": "verifying",
    "verified": "verified",
    "postponed": "postponed",
    "before-cutover": "switching",
    "after-cutover": "switched",
    "before-rollback": "rolling back",
    "after-rollback": "rolled back",
    "stopped": "stopped",
    "failed": "failed",
}
"""The phase that a migration is in from an event on; other events leave it as it is."""

EVENT_NAMES = (*PHASES, "throttled", "paused", "resumed", "rate", "warning")


@dataclass(frozen=True)
class Event:
    """name: one of EVENT_NAMES. facts: see the table above. time: when it was told, in UTC."""

    name: str
    facts: Mapping[str, Any]
    time: datetime

    def to_dict(self) -> dict[str, Any]:
        """name, time (ISO 8601) and facts as plain data that JSON can carry; what JSON has no number for,
        such as an infinite rest of the time, is None."""
        return {"name": self.name, "time": self.time.isoformat(), "facts": _plain(self.facts)}


Listener = Callable[[Event], None]


class Events:
    """Tells each event to every listener, in their order, in the thread that tells.

    Listeners hear one event at a time, whichever threads tell. hooks are called after them and hold nobody
    up but who result: they may take long, and may themselves steer the migration.
    """

    def __init__(self, listeners: Iterable[Listener], hooks: Listener | None = None) -> None:
        self._listeners = tuple(listeners)
        self._hooks = hooks
        self._one_at_a_time = threading.RLock()

    def report(self, name: str, /, **facts: Any) -> None:
        """Raises what a listener or hook raises, and does not tell those after it."""
        with self._one_at_a_time:
            event = Event(name, facts, datetime.now(timezone.utc))
            for listener in self._listeners:
                listener(event)
        if self._hooks:
            self._hooks(event)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else str(value)
