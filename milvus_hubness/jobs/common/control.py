"""Control of a running migration: its settings, its Prometheus metrics, and its control file in
JSON, for example {"paused": false, "rows_per_second": 500, "bytes_per_second": null,
"chunk_seconds": 1.5, "cutover": "now"}.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    write_to_textfile,
)

from milvus_hubness.basics.files.opening import MissingFile, read_bytes
from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.jobs.common.progress import (
    LIMITS,
    PHASES,
    Event,
    Events,
    Throttle,
    checked_limit,
    polling,
)

CHUNK_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""The upper bounds of the histogram's buckets."""

COUNTERS = {
    "rows_copied_total": "Rows copied.",
    "bytes_copied_total": "Bytes copied.",
    "rows_differing_total": "Rows that differed from the source.",
    "rows_repaired_total": "Differing rows that were written again.",
}
GAUGES = {
    "source_rows": "Rows to copy.",
    "paused": "Whether the copy pauses, for an operator or for the load.",
    "eta_seconds": "Seconds until all rows are copied, NaN while unknown.",
    "last_progress_timestamp_seconds": "Time of the last progress.",
}


class MigrationMetrics:
    """A listener that keeps Prometheus metrics, milvus_hubness_migration_*,
    with the labels source and target: COUNTERS, GAUGES, chunk_seconds, and
    phase, 1 for the current one. Safe to use from any thread.
    """

    def __init__(self, source: str, target: str) -> None:
        labels = {"source": source, "target": target}
        self._registry = CollectorRegistry()
        options: dict[str, Any] = {
            "namespace": "milvus_hubness_migration",
            "registry": self._registry,
        }
        self._counters = {
            name: Counter(name, text, list(labels), **options).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(name, text, list(labels), **options).labels(**labels)
            for name, text in GAUGES.items()
        }
        chunk_seconds = Histogram(
            "chunk_seconds",
            "Seconds that a chunk of rows took.",
            list(labels),
            buckets=CHUNK_SECONDS,
            **options,
        )
        self._chunk_seconds = chunk_seconds.labels(**labels)
        phases = Gauge("phase", "1 for the current phase.", [*labels, "phase"], **options)
        self._phases = {phase: phases.labels(**labels, phase=phase) for phase in PHASES.values()}
        self._gauges["eta_seconds"].set(math.nan)
        # An alert on a long time without progress counts from the start.
        self._gauges["last_progress_timestamp_seconds"].set(time.time())

        # The values of the counters, as far as events have reported them.
        self._reached = dict.fromkeys(COUNTERS, 0)
        # Why the migration pauses.
        self._reasons: set[str] = set()
        # The number of the comparison whose rows are counted now.
        self._pass: int | None = None
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        name = event.name
        facts = event.facts
        with self._lock:
            # A run that continues an earlier one says in which phase that was.
            phase = facts["phase"] if name == "continuing" else PHASES.get(name)
            if phase is not None:
                self._show_phase(phase)

            self._follow_pauses(name, facts)

            if name == "copying":
                self._follow_copy(facts)
            elif name == "catching-up":
                self._follow_pass(facts)
            elif name == "continuing":
                self._reach("rows_copied_total", facts["rows"])

            if facts.get("rows_total") is not None:
                self._gauges["source_rows"].set(facts["rows_total"])
            if name in ("continuing", "copying", "catching-up"):
                self._gauges["last_progress_timestamp_seconds"].set(event.time.timestamp())

    def text(self) -> str:
        """Return the metrics as Prometheus reads them."""
        with self._lock:
            return generate_latest(self._registry).decode()

    def write_textfile(self, path: Path) -> None:
        """Write a .prom file for the textfile collector of node_exporter.

        Replace the file atomically.
        """
        with self._lock:
            write_to_textfile(str(path), self._registry)

    def _show_phase(self, current: str) -> None:
        for phase, gauge in self._phases.items():
            gauge.set(phase == current)

    def _follow_pauses(self, name: str, facts: Mapping[str, Any]) -> None:
        """Note a pause or its end: a migration pauses while at least one reason is left."""
        if name in ("paused", "throttled"):
            self._reasons.add(facts["reason"])
        elif name == "resumed":
            self._reasons.discard(facts["reason"])
        self._gauges["paused"].set(bool(self._reasons))

    def _follow_copy(self, facts: Mapping[str, Any]) -> None:
        """Count a copied chunk."""
        self._reach("rows_copied_total", facts["rows"])
        self._counters["bytes_copied_total"].inc(facts["bytes"])
        self._chunk_seconds.observe(facts["seconds"])

        eta_seconds = facts["eta_seconds"]
        self._gauges["eta_seconds"].set(math.nan if eta_seconds is None else eta_seconds)

    def _follow_pass(self, facts: Mapping[str, Any]) -> None:
        """Count the rows of a pass; events report them from 0 again in each pass."""
        if facts["pass"] != self._pass:
            self._pass = facts["pass"]
            self._reached |= {"rows_differing_total": 0, "rows_repaired_total": 0}
        self._reach("rows_differing_total", facts["differing"])
        self._reach("rows_repaired_total", facts["repaired"])

    def _reach(self, name: str, value: int) -> None:
        """Count the increments between the absolute values that events report."""
        # A counter of Prometheus may only rise; a fall would look like a restart.
        self._counters[name].inc(max(0, value - self._reached[name]))
        self._reached[name] = max(value, self._reached[name])


CUTOVER = ("postponed", "now")
"""The values of the setting `cutover`."""

SETTINGS = ("paused", *LIMITS, "cutover")
"""The names of all settings."""


class Controls:
    """The controls of one operator, `name`: a migration continues when every operator that paused
    it has resumed it. events: get the changes. release: set while the cutover may take place.
    """

    def __init__(
        self, name: str, throttle: Throttle, release: threading.Event, events: Events
    ) -> None:
        self.name = name
        self._throttle = throttle
        self._release = release
        self._events = events

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Change the named settings: paused, rows_per_second, bytes_per_second, chunk_seconds (a
        positive number, or None for no limit), cutover ("postponed" or "now"). Raises
        InvalidParameter, and then changes nothing.
        """
        check_settings(settings)
        limits = {name: settings[name] for name in LIMITS if name in settings}
        if limits:
            self._throttle.set_rate(**limits)
            now = self._throttle.snapshot()
            self._events.report("rate", **{name: now[name] for name in LIMITS})

        if settings.get("cutover") == "postponed":
            self._release.clear()
        if settings.get("cutover") == "now":
            self._release.set()

        paused = settings.get("paused")
        if paused is True and self._throttle.pause(self.name):
            self._events.report("paused", reason=self.name)
        if paused is False and self._throttle.resume(self.name):
            self._events.report("resumed", reason=self.name)

    def snapshot(self) -> dict[str, Any]:
        """Return the throttle's snapshot, and cutover, "postponed" or "now"."""
        return {
            **self._throttle.snapshot(),
            "cutover": "now" if self._release.is_set() else "postponed",
        }


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InvalidParameter unless all of `settings` can be applied."""
    for name, value in settings.items():
        if name in LIMITS:
            checked_limit(name, value)
        elif name == "paused":
            if not isinstance(value, bool):
                raise InvalidParameter(f"paused must be true or false, not {value!r}")
        elif name == "cutover":
            if value not in CUTOVER:
                raise InvalidParameter(
                    f"cutover must be one of {', '.join(CUTOVER)}, not {value!r}"
                )
        else:
            raise InvalidParameter(f"{name!r} is not one of {', '.join(SETTINGS)}")


@contextmanager
def following_control_file(
    path: Path, controls: Controls, events: Events, *, poll_seconds: float = 0.5
) -> Iterator[None]:
    """Apply the settings in a JSON file now, and whenever one of them changes while this context is
    open. A missing file changes nothing; an invalid file neither, and `events` gets one warning.
    """
    former_content: bytes | None = None
    applied: dict[str, Any] = {}
    problem: str | None = None

    def poll() -> None:
        nonlocal former_content, applied, problem
        try:
            content = _content(path)
            if content is None or content == former_content:
                return

            # What another operator has changed meanwhile stays, unless the file changes it too.
            settings = _parsed(path, content)
            changed = {
                name: value for name, value in settings.items() if value != applied.get(name, ...)
            }
            controls.apply(changed)

            former_content = content
            applied = settings
            problem = None
        except (InvalidParameter, UnreadableFile) as error:
            # The file is read twice a second; one problem is reported once.
            if str(error) != problem:
                problem = str(error)
                events.report("warning", message=f"the control file is not followed: {error}")

    poll()
    with polling(poll, poll_seconds, "milvus-hubness-control-file"):
        yield


def postpone_cutover(path: Path) -> None:
    """Take back a release of the cutover that the control file has from an earlier run.

    Raises UnreadableFile.
    """
    content = _content(path)
    settings = _parsed(path, content) if content is not None else {}
    if settings.get("cutover") == "now":
        # Another process may read the file at any moment, and must not see half of it.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({**settings, "cutover": "postponed"}))
            os.replace(temporary, path)
        except OSError as error:
            raise UnreadableFile(
                f"cannot write the control file {path}: {error.strerror}"
            ) from None


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except MissingFile:
        return None


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path} is not JSON: {error}") from None

    if not isinstance(settings, dict):
        raise UnreadableFile(f"{path} does not hold a JSON object")

    check_settings(settings)
    return settings
