"""The workers of the service, its metrics, and the data that the status page shows."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic_core import to_jsonable_python

from milvus_hubness.basics.texts import number
from milvus_hubness.errors import HubnessError
from milvus_hubness.jobs.common.progress import Events
from milvus_hubness.serve.config import Calendar, CollectionTable
from milvus_hubness.serve.http_limits import HttpLimits
from milvus_hubness.serve.reconcile import (
    ACTIONS,
    UNFINISHED,
    Course,
    History,
    Reconciler,
    Reconciliation,
    Result,
    Task,
    now,
)

SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600)
"""Upper bounds of the buckets of the histogram."""
LABELS = ("collection", "field", "profile")


class ServiceMetrics:
    """Prometheus metrics in a registry of their own.

    All except ready have the labels collection, field and profile, as in the configuration. The
    label biases is "raw", "old" or "new", the label reason is "late" or "running".
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        # By labels, an age and when it was measured: it has grown since, as a scrape computes.
        self._ages: dict[tuple[str, ...], tuple[float, datetime]] = {}
        self._ready = Gauge(
            "milvus_hubness_ready",
            "Whether every collection was reconciled.",
            registry=self._registry,
        )
        gauge = partial(self._metric, Gauge)
        counter = partial(self._metric, Counter)
        self._success = gauge("last_success_timestamp_seconds", "Time of the last success.")
        self._rows = gauge("rows", "Rows of the collection.")
        self._pending = gauge("pending_rows", "Rows without a bias at the last run.")
        self._age = gauge("bias_age_seconds", "Age of the biases.")
        self._excess = gauge("excess_answers_ratio", "Excess answers taken by hubs.", "biases")
        self._overlap = gauge("overlap_ratio", "Mean share of the old top tens in the new ones.")
        self._failures = gauge("failures_in_a_row", "Failed runs since the last success.")
        self._unfitted = gauge(
            "unfitted_rows_ratio",
            "Share of rows that are new or changed since the bank was fitted.",
        )
        self._new_bank_due = gauge(
            "new_bank_due", "Whether a refit is due, but too few queries were sampled for it."
        )
        self._suspicious = gauge("suspicious_rows", "Rows that look like planted hubs.")
        self._suspicious_share = gauge(
            "suspicious_rows_ratio", "Share of the rows that look like planted hubs."
        )
        self._refreshing = gauge("refreshing", "Whether a run is in progress.")
        self._scanned = counter("rows_scanned_total", "Rows read.")
        self._changed = counter("rows_changed_total", "Rows whose biases were written.")
        self._skipped = counter("rows_skipped_total", "Rows left unchanged.")
        self._refreshes = counter(
            "refreshes_total", "Runs, by action and result.", "action", "result"
        )
        self._busy = counter("busy_total", "Runs that another process prevented.")
        self._missed = counter(
            "missed_runs_total", "Scheduled runs that were made up for.", "reason"
        )
        self._seconds = self._metric(
            Histogram, "refresh_seconds", "Duration of a run.", buckets=SECONDS
        )

    def _metric(
        self, metric_class: Any, name: str, documentation: str, *labels: str, **options: Any
    ) -> Any:
        return metric_class(
            f"milvus_hubness_{name}",
            documentation,
            (*LABELS, *labels),
            registry=self._registry,
            **options,
        )

    def watch(self, table: CollectionTable) -> None:
        """Create the counters of a collection, from 0."""
        # Prometheus computes rates from differences: a counter that appears with a value of 1 would
        # hide its first event.
        labels = _labels(table)
        counters = (self._scanned, self._changed, self._skipped, self._busy)
        for metric in (*counters, self._refreshing, self._failures, self._seconds):
            metric.labels(*labels)

        for action in ACTIONS:
            self._refreshes.labels(*labels, action, "ok")

        # The first result is "ok", with the actions above.
        for result in get_args(Result)[1:]:
            self._refreshes.labels(*labels, UNFINISHED, result)

        for reason in ("late", "running"):
            self._missed.labels(*labels, reason)

    def remember(self, table: CollectionTable, outcomes: Iterable[Reconciliation]) -> None:
        """Set the gauges from stored results of an earlier process, and count nothing."""
        with self._lock:
            for outcome in outcomes:
                self._measure(_labels(table), outcome)

    def reconciled(self, table: CollectionTable, outcome: Reconciliation, failures: int) -> None:
        """Record a result. failures: number of consecutive failed reconciliations."""
        labels = _labels(table)
        with self._lock:
            self._failures.labels(*labels).set(failures)
            self._measure(labels, outcome)
            self._refreshes.labels(*labels, outcome.action, outcome.result).inc()
            self._seconds.labels(*labels).observe(outcome.seconds)
            self._scanned.labels(*labels).inc(outcome.scanned)
            self._changed.labels(*labels).inc(outcome.written)
            self._skipped.labels(*labels).inc(outcome.skipped)
            self._busy.labels(*labels).inc(outcome.result == "busy")

    def missed(self, table: CollectionTable, reason: str, count: int) -> None:
        """Count scheduled times that passed without a run."""
        self._missed.labels(*_labels(table), reason).inc(count)

    def refreshing(self, table: CollectionTable, is_running: bool) -> None:
        self._refreshing.labels(*_labels(table)).set(is_running)

    def text(self, *, ready: bool) -> str:
        """Return the metrics in the text format that Prometheus scrapes."""
        with self._lock:
            self._ready.set(ready)
            for labels, (age, at) in self._ages.items():
                self._age.labels(*labels).set(age + (now() - at).total_seconds())
            return generate_latest(self._registry).decode()

    def _measure(self, labels: tuple[str, ...], outcome: Reconciliation) -> None:
        """Set the gauges from a result; one without success has measured nothing."""
        if outcome.result != "ok":
            return

        if outcome.bias_age_seconds is not None:
            self._ages[labels] = outcome.bias_age_seconds, outcome.at

        for biases, share in outcome.excess_answers.items():
            self._excess.labels(*labels, biases).set(share)

        for gauge, value in (
            (self._success, outcome.at.timestamp()),
            (self._rows, outcome.rows),
            (self._pending, outcome.pending),
            (self._overlap, outcome.overlap),
            (self._unfitted, outcome.unfitted_share),
            (self._new_bank_due, outcome.is_new_bank_due),
            (self._suspicious, outcome.suspicious),
            (self._suspicious_share, outcome.suspicious_share),
        ):
            if value is not None:
                gauge.labels(*labels).set(value)


def _labels(table: CollectionTable) -> tuple[str, ...]:
    """Return the values of `LABELS`."""
    return table.name, table.field or "", table.profile or ""


@dataclass(frozen=True)
class Standing:
    """The state of a worker."""

    running: Course | None = None
    """The progress of the present reconciliation; None between two."""
    last: Reconciliation | None = None
    """The last result of this process."""
    last_success: datetime | None = None
    """The time of the last success of any process."""
    failing: Reconciliation | None = None
    """The last failed result, until its kind succeeds."""
    failures: int = 0
    """Number of consecutive failures."""
    is_ready: bool = False
    """Whether a reconciliation has succeeded, or was left to another process."""


@dataclass(frozen=True)
class ServicePolicy:
    """The times and limits of the service that its configuration does not have."""

    connect_seconds: float = 2.0
    """Time between two attempts to reach the database."""
    longest_wait: float = 60.0
    """Time after which a worker looks at the clock again, which may be set while it waits."""
    results: int = 500
    """Number of results of each collection that the database keeps."""
    http: HttpLimits = field(default_factory=HttpLimits)
    """Limits of the HTTP endpoint."""


class Worker:
    """The worker thread of a bias profile.

    It runs tasks at their times, and counts, reports and stores each result. Of several times that
    passed while it was busy or this process was delayed, it makes up for the last. one_at_a_time: a
    lock that the workers of a collection share. stop: set it, then call `join`, to end the worker.
    zone: of cron.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        one_at_a_time: threading.Lock,
        events: Events,
        metrics: ServiceMetrics,
        stop: threading.Event,
        policy: ServicePolicy,
        zone: tzinfo,
    ) -> None:
        self.table = table = reconciler.table
        self.history = History(table.label, policy.results)
        self._longest_wait = policy.longest_wait
        self._calendar = Calendar({"fill": table.fill, "refresh": table.refresh}, zone)
        self._reconciler = reconciler
        self._events = events
        self._metrics = metrics
        self._one_at_a_time = one_at_a_time
        self._stop = stop

        # Guards what the thread shares with others: the requests, the times and the standing.
        self._lock = threading.Lock()
        self._requested: set[Task] = set()
        self._standing = Standing()
        self._woken = threading.Event()
        # Whether the last refresh did not succeed, see `_fulfil`.
        self._owes_refresh = False
        self._thread = threading.Thread(
            target=self._serve, name=f"milvus-hubness {table.label}", daemon=True
        )
        metrics.watch(table)

    def start(self) -> None:
        """Start the thread: reconcile at once, and then at the times of the schedules."""
        self._calendar.begin(now())
        self.request("refresh")
        self._thread.start()

    def request(self, task: Task) -> None:
        """Have the worker run this task soon, or after its current run."""
        with self._lock:
            self._requested.add(task)
        self._woken.set()

    @property
    def next_run(self) -> datetime | None:
        """The next time at which the worker will check its rows; None before the start."""
        with self._lock:
            return min(self._calendar.next_times.values(), default=None)

    def join(self) -> None:
        """Wait for the end of the thread, once `stop` is set."""
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def reconcile(self, task: Task, *, alone: bool = False) -> Reconciliation | None:
        """Reconcile now, in this thread; return None if nothing was checked.

        alone: hold the lease of the service.
        """
        with self._one_at_a_time:
            # It may have waited here for long.
            if self._stop.is_set():
                self._stand(running=None)
                return None

            course = Course(now())
            self._stand(running=course)
            self._metrics.refreshing(self.table, True)
            try:
                outcome = self._reconciler.reconcile(
                    task, partial(self._progress, course), alone=alone
                )
            finally:
                self._stand(running=None)
                self._metrics.refreshing(self.table, False)

        if outcome is not None:
            self._record(task, outcome)

        return outcome

    def standing(self) -> Standing:
        """Return the present state, which never changes in itself."""
        with self._lock:
            return self._standing

    def _serve(self) -> None:
        """Run tasks until `stop` is set: the body of the thread."""
        self._remember()
        reason = "late"
        while not self._stop.is_set():
            # Cleared before the requests are read, so that a request after that wakes the thread.
            self._woken.clear()
            task = self._next_task(reason)
            if task is not None:
                self._fulfil(task)
                reason = "running"
            else:
                next_time = min(self._calendar.next_times.values())
                seconds = (next_time - now()).total_seconds()
                self._woken.wait(min(max(0.0, seconds), self._longest_wait))
                reason = "late"

        self._reconciler.release()

    def _next_task(self, reason: str) -> Task | None:
        """Return the largest task that is requested or due, and report times that passed unused.

        reason: why they passed: "late", this process was
        delayed, or "running", the last run was not over.
        """
        with self._lock:
            passed = self._calendar.passed(now())
            # In the order of Task, so the last one does the work of all.
            due = [task for task in get_args(Task) if task in self._requested or task in passed]
            self._requested.clear()
            if due:
                waiting = Course(now(), "waiting for its turn")
                self._standing = replace(self._standing, running=waiting)

        for times in passed.values():
            # A late thread uses one of the times now. After a run, all of them passed during it.
            count = times - (reason == "late")
            if count:
                self._metrics.missed(self.table, reason, count)
                self._events.report(
                    "missed", collection=self.table.label, reason=reason, count=count
                )

        return due[-1] if due else None

    def _fulfil(self, task: Task) -> None:
        """Run a task, and what an earlier one has left undone."""
        # A refresh that failed, or was left to another process, is tried again at the
        # next time for pending rows.
        if self._owes_refresh and task == "fill":
            task = "refresh"

        outcome = self.reconcile(task, alone=True)
        if task == "refresh" and outcome is not None:
            self._owes_refresh = outcome.result != "ok"
            # Rows without a bias do not wait for that, for example if a bank cannot be read.
            if outcome.result == "failed" and self._reconciler.is_connected:
                self.reconcile("fill", alone=True)

    def _remember(self) -> None:
        """Load the results of an earlier process."""
        try:
            self.history.read(self._reconciler.store)
        except HubnessError as error:
            self._events.report(
                "warning", collection=self.table.label, message=f"no history: {error}"
            )

        self._metrics.remember(self.table, self.history.stored)
        succeeded = [outcome.at for outcome in self.history.stored if outcome.result == "ok"]
        self._stand(last_success=succeeded[-1] if succeeded else None)

    def _progress(self, course: Course, doing: str, done: int, total: int) -> None:
        self._stand(running=replace(course, doing=doing, done=done, total=total))

    def _stand(self, **changes: Any) -> None:
        """Change fields of the standing."""
        with self._lock:
            self._standing = replace(self._standing, **changes)

    def _record(self, task: Task, outcome: Reconciliation) -> None:
        """Count, report and store a result."""
        previous = self.standing()
        if outcome.result == "failed":
            self._stand(failing=outcome, failures=previous.failures + 1)
        # Filled rows do not make up for a refresh that failed.
        elif task == "refresh" or not self._owes_refresh:
            self._stand(failing=None, failures=0)

        self._stand(
            last=outcome,
            last_success=outcome.at if outcome.result == "ok" else previous.last_success,
            is_ready=previous.is_ready or outcome.result in ("ok", "busy"),
        )
        self._metrics.reconciled(self.table, outcome, self.standing().failures)
        self._events.report(
            "reconciled", collection=self.table.label, **outcome.model_dump(exclude={"at"})
        )

        self.history.add(outcome)
        # What is not written now is written with the next result.
        if not self._reconciler.is_connected:
            return

        try:
            self.history.write(self._reconciler.store)
        except HubnessError as error:
            message = f"the history was not stored: {error}"
            self._events.report("warning", collection=self.table.label, message=message)


@dataclass(frozen=True)
class CollectionView:
    """The data of one collection for the page."""

    table: CollectionTable
    standing: Standing
    next_run: datetime | None
    """The next time by schedule."""
    outcomes: tuple[Reconciliation, ...]
    """The results in `History`."""

    @property
    def state(self) -> tuple[str, str]:
        """The class and the words of the collection's state."""
        last = self.standing.last
        course = self.standing.running
        if course:
            doing = f": {course.doing}" if course.doing else ""
            done = f", {number(course.done)} of {number(course.total)}" if course.total else ""
            return "busy", f"at work{doing}{done}"

        if last is None:
            return "busy", "not reconciled yet"
        if self.standing.failures:
            return "bad", "failed"
        if last.result == "busy":
            return "busy", "another process holds the lease"
        if last.result == "stopped":
            return "busy", "stopped"
        if last.action == "refused":
            return "weak", "the new biases were refused"
        if self.last_checked is not None and self.last_checked.new_bank_due:
            return "weak", "a new bank is due"
        if self.last_scanned is not None and self.last_scanned.has_hub_alert:
            return "weak", "rows look like planted hubs"
        return "good", "up to date"

    @property
    def trouble(self) -> Reconciliation | None:
        """The outcome that failed, or that explains why new biases are not used."""
        last = self.standing.last
        is_unused = last is not None and (last.result == "busy" or last.action == "refused")
        checked = self.last_checked
        is_due = checked is not None and bool(checked.new_bank_due)
        return self.standing.failing or (last if is_unused else checked if is_due else None)

    @property
    def last_checked(self) -> Reconciliation | None:
        """The last success that checked whether a refit is due."""
        outcomes = (self.standing.last, *reversed(self.outcomes))
        return next((each for each in outcomes if each and each.is_refit_checked), None)

    @property
    def last_scanned(self) -> Reconciliation | None:
        """The last success that scanned the rows for planted hubs."""
        outcomes = (self.standing.last, *reversed(self.outcomes))
        return next((each for each in outcomes if each and each.suspicious is not None), None)

    @property
    def last_done(self) -> Reconciliation | None:
        """The last success, which may be stored or, if nothing changed, in the standing alone."""
        outcomes = (self.standing.last, *reversed(self.outcomes))
        return next((outcome for outcome in outcomes if outcome and outcome.result == "ok"), None)

    def to_dict(self) -> dict[str, Any]:
        table = self.table
        return {
            "collection": table.name,
            "field": table.field,
            "profile": table.profile,
            "fill": table.fill.text,
            "refresh": table.refresh.text,
            **to_jsonable_python(self.standing),
            "next_run": to_jsonable_python(self.next_run),
            "history": to_jsonable_python(self.outcomes),
        }


@dataclass(frozen=True)
class ServiceView:
    """The data of the service for the page."""

    version: str
    database: str
    """The address without secrets."""
    started_at: datetime
    at: datetime
    waiting_for: str
    """What the service waits for; empty if it is ready."""
    collections: tuple[CollectionView, ...]

    def to_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "collections"}
        return {
            **to_jsonable_python(facts),
            "ready": not self.waiting_for,
            "collections": [view.to_dict() for view in self.collections],
        }
