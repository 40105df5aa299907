"""The metrics of the service, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import datetime

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from milvus_hubness.serve.config import CollectionTable
from milvus_hubness.serve.look import ACTIONS, RESULTS, UNFINISHED, Reconciliation, now

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600)
LABELS = ("collection", "field", "profile")
REASONS = ("late", "running")


class ServiceMetrics:
    """Counts in a registry of its own. All begin with milvus_hubness_ and, but for ready, have the labels
    collection, field and profile, as the configuration names them.

    last_success_timestamp_seconds, rows, pending_rows (found by the last run), write_intents,
    rows_scanned_total,
    rows_changed_total, rows_skipped_total, bias_age_seconds, skewness (by its label biases, "raw", "old" and
    "new"), overlap_ratio, drift_ratio, refreshes_total (by action and result), refresh_seconds (a histogram),
    refreshing (0 or 1), failures_in_a_row, busy_total, missed_runs_total (by reason, "late" or "running"),
    ready (0 or 1).
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._ages: dict[tuple[str, ...], tuple[float, datetime]] = {}
        self._ready = Gauge(
            "milvus_hubness_ready", "Whether every collection was looked at.", registry=self._registry
        )
        gauge, counter = self._gauge, self._counter
        self._success = gauge("last_success_timestamp_seconds", "When a look last succeeded.")
        self._rows = gauge("rows", "Rows of the collection.")
        self._pending = gauge("pending_rows", "Rows without a bias that the last run found.")
        self._intents = gauge(
            "write_intents", "Rows in the log of write intents that a killed job had left at the last run."
        )
        self._age = gauge("bias_age_seconds", "Age of the biases.")
        self._skewness = gauge("skewness", "Skewness of N_10 over held-out bank queries.", "biases")
        self._overlap = gauge("overlap_ratio", "Mean share of the old top tens in the new ones.")
        self._failures = gauge("failures_in_a_row", "Looks that failed since one did not.")
        self._drift = gauge("drift_ratio", "Share of variance between the bank and recent queries.")
        self._refreshing = gauge("refreshing", "Whether a look is under way.")
        self._scanned = counter("rows_scanned_total", "Rows looked at.")
        self._changed = counter("rows_changed_total", "Rows whose biases were written.")
        self._skipped = counter("rows_skipped_total", "Rows left as they were right.")
        self._refreshes = counter("refreshes_total", "Looks, by what they came to.", "action", "result")
        self._busy = counter("busy_total", "Looks that found another process at work.")
        self._missed = counter("missed_runs_total", "Scheduled looks that were made up for.", "reason")
        self._seconds = Histogram(
            "milvus_hubness_refresh_seconds", "Seconds a look took.", LABELS, buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def watch(self, table: CollectionTable) -> None:
        """Have the counters of a collection, from 0."""
        labels = _labels(table)
        for metric in (
            self._scanned,
            self._changed,
            self._skipped,
            self._busy,
            self._refreshing,
            self._failures,
            self._seconds,
        ):
            metric.labels(*labels)
        for action in ACTIONS:
            self._refreshes.labels(*labels, action, "ok")
        for result in RESULTS[1:]:
            self._refreshes.labels(*labels, UNFINISHED, result)
        for reason in REASONS:
            self._missed.labels(*labels, reason)

    def remember(self, table: CollectionTable, outcomes: Iterable[Reconciliation]) -> None:
        """What looks of an earlier process found; nothing is counted."""
        with self._lock:
            for outcome in outcomes:
                self._measure(_labels(table), outcome)

    def reconciled(self, table: CollectionTable, outcome: Reconciliation, failures: int) -> None:
        """failures: how many looks have failed in a row."""
        labels = _labels(table)
        with self._lock:
            self._failures.labels(*labels).set(failures)
            self._measure(labels, outcome)
            self._refreshes.labels(*labels, outcome.action, outcome.result).inc()
            self._seconds.labels(*labels).observe(outcome.seconds)
            self._scanned.labels(*labels).inc(outcome.scanned)
            self._changed.labels(*labels).inc(outcome.changed)
            self._skipped.labels(*labels).inc(outcome.skipped)
            self._busy.labels(*labels).inc(outcome.result == "busy")

    def missed(self, table: CollectionTable, reason: str, count: int) -> None:
        """reason: one of REASONS."""
        self._missed.labels(*_labels(table), reason).inc(count)

    def refreshing(self, table: CollectionTable, is_under_way: bool) -> None:
        self._refreshing.labels(*_labels(table)).set(is_under_way)

    def text(self, *, ready: bool) -> str:
        """In the text format that Prometheus scrapes."""
        with self._lock:
            self._ready.set(ready)
            for labels, (age, at) in self._ages.items():
                self._age.labels(*labels).set(age + (now() - at).total_seconds())
            return generate_latest(self._registry).decode()

    def _measure(self, labels: tuple[str, ...], outcome: Reconciliation) -> None:
        if outcome.result != "ok":
            return
        self._success.labels(*labels).set(outcome.at.timestamp())
        self._rows.labels(*labels).set(outcome.rows)
        self._pending.labels(*labels).set(outcome.pending)
        self._intents.labels(*labels).set(outcome.write_intents)
        if outcome.bias_age_seconds is not None:
            self._ages[labels] = outcome.bias_age_seconds, outcome.at
        for biases, skewness in outcome.skewness.items():
            self._skewness.labels(*labels, biases).set(skewness)
        if outcome.drift is not None:
            self._drift.labels(*labels).set(outcome.drift)
        if outcome.overlap is not None:
            self._overlap.labels(*labels).set(outcome.overlap)

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(f"milvus_hubness_{name}", documentation, (*LABELS, *labels), registry=self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"milvus_hubness_{name}", documentation, (*LABELS, *labels), registry=self._registry)


def _labels(table: CollectionTable) -> tuple[str, ...]:
    return table.name, table.field or "", table.profile or ""
