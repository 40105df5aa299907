"""A set of biases looked after: a thread that looks when it is asked to, and never twice at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from milvus_hubness.errors import HubnessError
from milvus_hubness.jobs.migration.events import Events
from milvus_hubness.serve.history import History
from milvus_hubness.serve.look import Course, Reconciliation, now
from milvus_hubness.serve.looker import Reconciler, Task
from milvus_hubness.serve.metrics import ServiceMetrics

STRONGEST_FIRST: tuple[Task, ...] = ("full", "pending", "share")


@dataclass(frozen=True)
class Standing:
    """running: the look under way. last: the last of this process. last_success: of any process. failing: the
    last run that failed, until one of its kind does not; failures: how many did so in a row. is_ready:
    whether one has succeeded, or was left to another process that is at work."""

    running: Course | None = None
    last: Reconciliation | None = None
    last_success: datetime | None = None
    failing: Reconciliation | None = None
    failures: int = 0
    is_ready: bool = False


class Worker:
    """Every look is counted, told and kept. one_at_a_time: held while it looks; the same lock for workers of
    the same collection. stop: set, then `join`, to end it."""

    def __init__(
        self,
        reconciler: Reconciler,
        events: Events,
        metrics: ServiceMetrics,
        one_at_a_time: threading.Lock,
        stop: threading.Event,
    ) -> None:
        self.table = reconciler.table
        self.history = History(self.table.label)
        self._reconciler, self._events, self._metrics = reconciler, events, metrics
        self._one_at_a_time, self._stop = one_at_a_time, stop
        self._lock = threading.Lock()
        self._requested: set[Task] = set()
        self._asked = threading.Event()
        self._standing = Standing()
        self._owes_full = False
        self._thread = threading.Thread(
            target=self._serve, name=f"milvus-hubness {self.table.label}", daemon=True
        )
        metrics.watch(self.table)

    def start(self) -> None:
        """Reconciliation at once, and then whenever asked to."""
        self.ask("full")
        self._thread.start()

    def ask(self, task: Task) -> datetime | None:
        """Have it look soon. Since when it has been looking already, where it does so again after that."""
        with self._lock:
            self._requested.add(task)
            self._asked.set()
            return self._standing.running.since if self._standing.running else None

    def join(self) -> None:
        """Wait for its end, once `stop` is set."""
        self._asked.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def reconcile(self, task: Task, *, alone: bool = False) -> Reconciliation | None:
        """Reconciliation now, in this thread; None where nothing was looked for. alone: as the only
        service."""
        with self._one_at_a_time:
            if self._stop.is_set():
                self._stand(running=None)
                return None
            began = now()
            self._stand(running=Course(began))
            self._metrics.refreshing(self.table, True)
            try:
                outcome = self._reconciler.reconcile(task, partial(self._progress, began), alone=alone)
            finally:
                self._stand(running=None)
                self._metrics.refreshing(self.table, False)
        if outcome is not None:
            self._record(task, outcome)
        return outcome

    def standing(self) -> Standing:
        with self._lock:
            return self._standing

    def _serve(self) -> None:
        self._remember()
        while not self._stop.is_set():
            self._asked.wait()
            with self._lock:
                self._asked.clear()
                task = next((each for each in STRONGEST_FIRST if each in self._requested), None)
                self._requested.clear()
                if task is not None:
                    self._standing = replace(self._standing, running=Course(now(), "waiting for its turn"))
            if task is not None:
                self._fulfil(task)
        self._reconciler.release()

    def _fulfil(self, task: Task) -> None:
        """A full look that failed, or was left to another process, is tried again at the next tick. New rows
        do not wait for that, a bank that cannot be read, say."""
        if self._owes_full and task == "pending":
            task = "full"
        outcome = self.reconcile(task, alone=True)
        if task == "full" and outcome is not None:
            self._owes_full = outcome.result != "ok"
            if outcome.result == "failed" and self._reconciler.is_connected:
                self.reconcile("pending", alone=True)

    def _remember(self) -> None:
        """What an earlier process found."""
        try:
            self.history.read(self._reconciler.store)
        except HubnessError as error:
            self._events.report("warning", collection=self.table.label, message=f"no history: {error}")
        self._metrics.remember(self.table, self.history.kept)
        succeeded = [outcome.at for outcome in self.history.kept if outcome.result == "ok"]
        self._stand(last_success=succeeded[-1] if succeeded else None)

    def _progress(self, began: datetime, doing: str, done: int, total: int) -> None:
        self._stand(running=Course(began, doing, done, total))

    def _stand(self, **changes: Any) -> None:
        with self._lock:
            self._standing = replace(self._standing, **changes)

    def _record(self, task: Task, outcome: Reconciliation) -> None:
        before, failed = self.standing(), outcome.result == "failed"
        if failed:
            self._stand(failing=outcome, failures=before.failures + 1)
        elif task == "full" or not self._owes_full:
            self._stand(failing=None, failures=0)
        self._stand(
            last=outcome,
            last_success=outcome.at if outcome.result == "ok" else before.last_success,
            is_ready=before.is_ready or outcome.result in ("ok", "busy"),
        )
        self._metrics.reconciled(self.table, outcome, self.standing().failures)
        self._events.report("reconciled", collection=self.table.label, **outcome.model_dump(exclude={"at"}))
        self.history.add(outcome)
        if not self._reconciler.is_connected:
            return
        try:
            self.history.write(self._reconciler.store)
        except HubnessError as error:
            message = f"the history was not kept: {error}"
            self._events.report("warning", collection=self.table.label, message=message)
