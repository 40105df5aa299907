"""Control of a running migration: its settings, its control file, and its Prometheus metrics.

A control file is JSON, for example:

{"paused": false, "rows_per_second": 500, "bytes_per_second": null, "chunk_seconds": 1.5, "cutover": "now"}
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, write_to_textfile

from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.operations.progress import LIMITS, PHASES, Event, Events, Throttle, checked_limit

CHUNK_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class MigrationMetrics:
    """A listener that keeps Prometheus metrics in a registry of its own. All metrics begin with
    milvus_hubness_migration_ and have the labels source and target.

    rows_copied_total, bytes_copied_total, rows_differing_total and rows_repaired_total (both by the catch-up
    passes), source_rows (number of rows to copy), chunk_seconds (a histogram), phase (1 for the value of the
    further label phase that is current, 0 for others), paused (0 or 1), eta_seconds (NaN while unknown),
    last_progress_timestamp_seconds. Safe to read from any thread.
    """

    def __init__(self, source: str, target: str) -> None:
        labels = {"source": source, "target": target}
        self._registry = registry = CollectorRegistry()

        def counter(name: str, documentation: str) -> Counter:
            return Counter(_named(name), documentation, list(labels), registry=registry).labels(**labels)

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(_named(name), documentation, list(labels), registry=registry).labels(**labels)

        self._rows = _Rising(counter("rows_copied_total", "Rows copied."))
        self._bytes = counter("bytes_copied_total", "Bytes copied.")
        self._differing = _Rising(counter("rows_differing_total", "Rows found to differ from the source."))
        self._repaired = _Rising(counter("rows_repaired_total", "Differing rows that were written anew."))
        self._source_rows = gauge("source_rows", "Rows to copy.")
        self._paused = gauge("paused", "Whether copying rests, for an operator or for the load.")
        self._eta = gauge("eta_seconds", "Seconds until all rows are copied, NaN while unknown.")
        self._last_progress = gauge("last_progress_timestamp_seconds", "When rows were last worked off.")
        self._chunk_seconds = Histogram(
            _named("chunk_seconds"),
            "Seconds that a chunk of rows took.",
            list(labels),
            buckets=CHUNK_SECONDS,
            registry=registry,
        ).labels(**labels)
        phases = Gauge(_named("phase"), "1 for the current phase.", [*labels, "phase"], registry=registry)
        self._phases = {phase: phases.labels(**labels, phase=phase) for phase in PHASES.values()}
        self._eta.set(math.nan)
        self._reasons: set[str] = set()
        self._pass: int | None = None
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._follow_phase(event)
            self._follow_pauses(event)
            if event.name == "copying":
                self._follow_copy(event)
            elif event.name == "catching-up":
                self._follow_pass(event)

    def text(self) -> str:
        """Return the metrics in the text format that Prometheus scrapes."""
        with self._lock:
            return generate_latest(self._registry).decode()

    def write_textfile(self, path: Path) -> None:
        """Write a .prom file for the textfile collector of node_exporter. Replace the file atomically."""
        with self._lock:
            write_to_textfile(str(path), self._registry)

    def _follow_phase(self, event: Event) -> None:
        if event.name in PHASES:
            for phase, gauge in self._phases.items():
                gauge.set(phase == PHASES[event.name])

    def _follow_pauses(self, event: Event) -> None:
        if event.name in ("paused", "throttled"):
            self._reasons.add(event.facts["reason"])
        elif event.name == "resumed":
            self._reasons.discard(event.facts["reason"])
        self._paused.set(bool(self._reasons))

    def _follow_copy(self, event: Event) -> None:
        facts = event.facts
        self._rows.reach(facts["rows"])
        self._bytes.inc(facts["bytes"])
        self._chunk_seconds.observe(facts["seconds"])
        self._source_rows.set(facts["rows_total"])
        self._eta.set(math.nan if facts["eta_seconds"] is None else facts["eta_seconds"])
        self._last_progress.set(event.time.timestamp())

    def _follow_pass(self, event: Event) -> None:
        if event.facts["pass"] != self._pass:
            self._pass = event.facts["pass"]
            self._differing.restart()
            self._repaired.restart()
        self._differing.reach(event.facts["differing"])
        self._repaired.reach(event.facts["repaired"])
        self._last_progress.set(event.time.timestamp())


class _Rising:
    """A counter that takes absolute positions and counts the increments between them."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.restart()

    def restart(self) -> None:
        self._reached = 0

    def reach(self, value: int) -> None:
        self._counter.inc(max(0, value - self._reached))
        self._reached = max(value, self._reached)


def _named(name: str) -> str:
    return f"milvus_hubness_migration_{name}"


CUTOVER = ("postponed", "now")
SETTINGS = ("paused", *LIMITS, "cutover")


class CutoverGate:
    """A gate that postpones or releases the cutover. Safe to use from any thread."""

    def __init__(self, *, postponed: bool = False) -> None:
        self._released = threading.Event()
        if not postponed:
            self._released.set()

    @property
    def postponed(self) -> bool:
        return not self._released.is_set()

    def postpone(self) -> None:
        """Postpone the cutover until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Allow the cutover."""
        self._released.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gate is released, at most `timeout` seconds. Return whether it is released."""
        return self._released.wait(timeout)


class Controls:
    """The controls of one operator, `name`, over a running migration. They report changes to `events`.

    Pauses count per name: a migration continues when every operator that paused it has resumed it.
    """

    def __init__(self, name: str, throttle: Throttle, gate: CutoverGate, events: Events) -> None:
        self.name = name
        self._throttle, self._gate, self._events = throttle, gate, events

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Change the named settings: paused (true or false), rows_per_second, bytes_per_second, chunk_seconds
        (a positive number, or None for no limit), cutover ("postponed" or "now"). Raises InvalidParameter,
        and then changes nothing."""
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
        """Return the throttle's snapshot, and cutover, "postponed" or "now"."""
        return {**self._throttle.snapshot(), "cutover": "postponed" if self._gate.postponed else "now"}

    def _set_paused(self, paused: bool) -> None:
        if paused:
            if self._throttle.pause(self.name):
                self._events.report("paused", reason=self.name)
        elif self._throttle.resume(self.name):
            self._events.report("resumed", reason=self.name)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check that all of `settings` can be applied. Raises InvalidParameter."""
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


POLL_SECONDS = 0.5


class ControlFile:
    """Applies the settings in a JSON file, and later changes to the file, while this context is open.

    The settings that are in the file at the start apply from the first line of the `with` body. When the file
    changes, only settings with a changed value are applied, so that settings made in other ways stay. A file
    that does not exist, or no longer exists, changes nothing. If the file is invalid, `events` gets one
    warning and the former settings stay.
    """

    def __init__(self, path: Path, controls: Controls, events: Events) -> None:
        self._path, self._controls, self._events = path, controls, events
        self._content: bytes | None = None
        self._settings: dict[str, Any] = {}
        self._problem: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="milvus-hubness-control-file", daemon=True)

    def __enter__(self) -> ControlFile:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            content = _content(self._path)
            if content is None or content == self._content:
                return
            settings = _parsed(self._path, content)
            changed = {name: value for name, value in settings.items() if value != self._settings.get(name, ...)}
            self._controls.apply(changed)
        except (InvalidParameter, UnreadableFile) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._events.report("warning", message=f"the control file is not followed: {error}")
        else:
            self._content, self._settings, self._problem = content, settings, None


def write_control(path: Path, **changes: Any) -> dict[str, Any]:
    """Change these settings in the control file at `path`, keep its others, and return all settings. Create
    the file if it does not exist, and replace it atomically. Raises InvalidParameter, and UnreadableFile if
    the file is invalid or cannot be written."""
    content = _content(path)
    settings = {**(_parsed(path, content) if content is not None else {}), **changes}
    check_settings(settings)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(settings))
        os.replace(temporary, path)
    except OSError as error:
        raise UnreadableFile(f"cannot write the control file {path}: {error.strerror}") from None
    return settings


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableFile(f"cannot read {path}: {error.strerror}") from None


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise UnreadableFile(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UnreadableFile(f"{path} does not hold a JSON object")
    check_settings(settings)
    return settings
