"""The metrics of a migration, for Prometheus."""

from __future__ import annotations

import math
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, write_to_textfile

from milvus_hubness.jobs.migration.events import PHASES, Event

CHUNK_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class MigrationMetrics:
    """A listener that counts in a registry of its own. All metrics begin with milvus_hubness_migration_ and
    have the labels source and target.

    rows_copied_total, bytes_copied_total, rows_differing_total, rows_repaired_total (by the catch-up passes),
    source_rows (how many there are to copy), chunk_seconds (a histogram), phase (1 for the one in its further
    label phase, 0 for others), paused (0 or 1), eta_seconds (NaN while unknown),
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
        """In the text format that Prometheus scrapes."""
        with self._lock:
            return generate_latest(self._registry).decode()

    def write_textfile(self, path: Path) -> None:
        """A .prom file for the textfile collector of node_exporter, in one step for those who read it."""
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
    """A counter that is told how far something is, rather than by how much it rose."""

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
