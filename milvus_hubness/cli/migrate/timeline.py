"""How long each part of a migration took, and how much it moved, from the events that it tells."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from milvus_hubness.jobs.migration.events import Event

BEGINNINGS = {
    "plan": "preparing",
    "before-copy": "copying",
    "after-copy": "catching up",
    "before-verify": "verifying",
    "verified": None,
}


class Timeline:
    """A listener. What an earlier run did, that this one carries on, is not counted."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._doing: str | None = None
        self._since: datetime | None = None
        self._bytes = 0
        self._rows_per_second: float | None = None
        self._passes: dict[int, dict[str, int]] = {}

    def __call__(self, event: Event) -> None:
        facts = event.facts
        if event.name == "copying":
            self._turn("indexing", event.time, since="copying")
            self._bytes += facts["bytes"]
            self._rows_per_second = facts["rows_per_second"]
        elif event.name in BEGINNINGS:
            self._turn(BEGINNINGS[event.name], event.time)
        elif event.name == "catching-up" and facts["pass"]:
            self._passes[facts["pass"]] = {"rows": facts["rows"], "carried": facts["repaired"]}

    def to_dict(self) -> dict[str, Any]:
        """seconds by what was done, the speed of the copying, and of each pass the rows that were compared
        and those carried over, as plain data."""
        copying = self._seconds.get("copying")
        return {
            "seconds": {doing: round(seconds, 2) for doing, seconds in self._seconds.items()},
            "rows_per_second": round(self._rows_per_second, 1) if self._rows_per_second else None,
            "mib_per_second": round(self._bytes / copying / 2**20, 2) if copying else None,
            "passes": [{"pass": number, **facts} for number, facts in sorted(self._passes.items())],
        }

    def _turn(self, doing: str | None, at: datetime, *, since: str | None = None) -> None:
        """What was being done ends here. since: what it was, where it goes by another name from now on."""
        if self._since is not None and (done := since or self._doing):
            self._seconds[done] = self._seconds.get(done, 0.0) + (at - self._since).total_seconds()
        self._doing, self._since = doing, at
