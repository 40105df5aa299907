"""The Prometheus metrics of a running migration, and its control file in JSON, for example
{"paused": false, "rows_per_second": 500, "bytes_per_second": null, "chunk_seconds": 1.5,
"cutover": "now"}.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
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
    "paused": "Whether the control file pauses the run.",
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

            if name in ("paused", "resumed"):
                self._gauges["paused"].set(name == "paused")
            elif name == "copying":
                self._follow_copy(facts)
            elif name == "catching-up":
                self._follow_pass(facts)
            elif name == "continuing":
                self._reach("rows_copied_total", facts["rows"])

            if facts.get("rows_total") is not None:
                self._gauges["source_rows"].set(facts["rows_total"])
            if name in ("continuing", "copying", "catching-up"):
                self._gauges["last_progress_timestamp_seconds"].set(event.time.timestamp())

    def write_textfile(self, path: Path) -> None:
        """Write a .prom file for the textfile collector of node_exporter.

        Replace the file atomically.
        """
        with self._lock:
            write_to_textfile(str(path), self._registry)

    def _show_phase(self, current: str) -> None:
        for phase, gauge in self._phases.items():
            gauge.set(phase == current)

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

CONTROL_FILE = "the control file"
"""The reason of a pause by the control file."""


@contextmanager
def following_control_file(
    path: Path,
    throttle: Throttle,
    release: threading.Event,
    events: Events,
    *,
    poll_seconds: float = 0.5,
) -> Iterator[None]:
    """Apply the settings in a JSON file now, and again whenever its content changes while this
    context is open. Settings that it leaves out stay as they are. A missing file changes nothing;
    an invalid one neither, and `events` gets one warning. release: set while the cutover may take
    place.
    """
    applied: bytes | None = None
    problem: str | None = None
    is_reported = False

    def look() -> None:
        nonlocal applied, problem, is_reported
        try:
            content = _content(path)
            settings = _parsed(path, content) if content is not None else {}
        except UnreadableFile as error:
            # A file is invalid for a moment while it is written: a problem counts at the second look.
            if str(error) != problem:
                problem = str(error)
                is_reported = False
            elif not is_reported:
                is_reported = True
                message = f"{problem}; nothing changes until the file is corrected"
                events.report("warning", message=message)
            return

        problem = None
        if content is not None and content != applied:
            applied = content
            _apply(settings, throttle, release, events)

    def poll() -> None:
        try:
            look()
        except Exception as error:
            # A listener has failed: a paused run would wait for this thread for ever.
            throttle.stop(error)

    look()
    with polling(poll, poll_seconds, "milvus-hubness-control-file"):
        yield


def _apply(
    settings: Mapping[str, Any], throttle: Throttle, release: threading.Event, events: Events
) -> None:
    """Change what the settings name, and report what is different then."""
    former_limits = _limits(throttle)
    throttle.set_rate(**{name: settings[name] for name in LIMITS if name in settings})
    limits = _limits(throttle)
    if limits != former_limits:
        events.report("rate", **limits)

    cutover = settings.get("cutover")
    if cutover == "postponed":
        release.clear()
    elif cutover == "now":
        release.set()

    paused = settings.get("paused")
    if paused is True and throttle.pause(CONTROL_FILE):
        events.report("paused", reason=CONTROL_FILE)
    elif paused is False and throttle.resume(CONTROL_FILE):
        events.report("resumed", reason=CONTROL_FILE)


def _limits(throttle: Throttle) -> dict[str, float | None]:
    snapshot = throttle.snapshot()
    return {name: snapshot[name] for name in LIMITS}


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
    """Return the settings. Raises UnreadableFile unless all of them can be applied."""
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path}: is not JSON: {error}") from None

    if not isinstance(settings, dict):
        raise UnreadableFile(f'{path}: is not a JSON object such as {{"paused": true}}')

    try:
        check_settings(settings)
    except InvalidParameter as error:
        raise UnreadableFile(f"{path}: {error}") from None

    return settings


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InvalidParameter unless all of `settings` can be applied."""
    for name, value in settings.items():
        if name in LIMITS:
            checked_limit(name, value)
        elif name == "paused":
            if not isinstance(value, bool):
                raise InvalidParameter(f"paused must be true or false, not {reprlib.repr(value)}")
        elif name == "cutover":
            if value not in CUTOVER:
                raise InvalidParameter(
                    f"cutover must be one of {', '.join(CUTOVER)}, not {reprlib.repr(value)}"
                )
        else:
            raise InvalidParameter(f"{reprlib.repr(name)} is not one of {', '.join(SETTINGS)}")
