"""The service: its workers, their scheduler, and its HTTP endpoint.

| event      | facts                                                                        |
|------------|------------------------------------------------------------------------------|
| started    | url                                                                          |
| waiting    | message: the database does not answer yet                                    |
| ready      | every collection was reconciled once                                         |
| reconciled | collection, and those of `Reconciliation`                                    |
| missed     | collection, reason, count: scheduled runs that the next run makes up for     |
| warning    | collection, message                                                          |
| stopping   | running reconciliations end after their batch                                |
| stopped    |                                                                              |
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from importlib.metadata import version
from zoneinfo import ZoneInfo

from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED, JobSubmissionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from milvus_hubness.errors import StoreError
from milvus_hubness.operations.progress import Event, Events, Listener
from milvus_hubness.refresh.run import refresh
from milvus_hubness.serve.config import Timing, count_between
from milvus_hubness.serve.config_file import ConfigFile, database_faults
from milvus_hubness.serve.reconcile import OpenStore, Reconciler, Reconciliation, Refresh, Task, now
from milvus_hubness.serve.worker import CollectionView, ServiceMetrics, ServiceView, Worker
from milvus_hubness.stores.protocols import Store

SAME_TIME = timedelta(seconds=1)
"""A reconciliation that began at most this long ago also serves another schedule of the same moment."""


@dataclass(frozen=True)
class ServicePolicy:
    """connect_seconds: time between two attempts to reach the database. share_seconds: time between two checks of the
    share of pending rows. results: number that the database keeps of each collection."""

    connect_seconds: float = 2.0
    share_seconds: int = 10
    results: int = 500


class Scheduler:
    """Triggers the workers by their schedules, and never waits for their results. A worker that is busy runs again
    afterwards, and of several runs that this process missed only the last is made up for. zone: the time zone of cron
    schedules. missed: gets the worker, "late" (this process was delayed) or "running", and the number of such runs."""

    def __init__(
        self, workers: Iterable[Worker], zone: tzinfo, missed: Callable[[Worker, str, int], None], share_seconds: int
    ) -> None:
        self._missed = missed
        self._expected: dict[str, datetime] = {}
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(1)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=timezone.utc,
            daemon=True,
        )
        self._scheduler.add_listener(self._ticked, EVENT_JOB_SUBMITTED | EVENT_JOB_MAX_INSTANCES)
        for worker in workers:
            timings: dict[Task, Timing] = {"pending": worker.table.schedule, "full": worker.table.full_schedule}
            if worker.table.pending_share is not None:
                timings["share"] = Timing.parse(f"{share_seconds}s")
            for task, timing in timings.items():
                name = f"{worker.table.label} {task}"
                self._scheduler.add_job(self._tick, timing.trigger(zone), id=name, args=[worker, task])

    def start(self) -> None:
        self._scheduler.start()
        for job in self._scheduler.get_jobs():
            self._expected[job.id] = job.next_run_time

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown()

    @property
    def is_running(self) -> bool:
        return bool(self._scheduler.running)

    def next_run(self, worker: Worker) -> datetime | None:
        """Return the next time at which the worker will check its rows; None before the start."""
        if not self.is_running:
            return None
        jobs = [job for job in self._scheduler.get_jobs() if job.args[0] is worker and job.args[1] != "share"]
        return min((job.next_run_time for job in jobs if job.next_run_time), default=None)

    def _tick(self, worker: Worker, task: Task) -> None:
        running_since = worker.request(task)
        if task != "share" and running_since is not None and now() - running_since > SAME_TIME:
            self._missed(worker, "running", 1)

    def _ticked(self, event: JobSubmissionEvent) -> None:
        """Report the runs that were missed since the previous tick; run a task whose tick the scheduler dropped."""
        job = self._scheduler.get_job(event.job_id)
        (worker, task), trigger = job.args, job.trigger
        at = event.scheduled_run_times[-1]
        count = count_between(trigger, self._expected.get(event.job_id, at), at)
        self._expected[event.job_id] = trigger.get_next_fire_time(at, at) or at
        if event.code == EVENT_JOB_MAX_INSTANCES:
            worker.request(task)
            count += 1
        if count and task != "share":
            self._missed(worker, "late", count)


class Service:
    """Runs the workers of all configured collections. database: its address without secrets. open_store: called by each
    worker. listeners: get the events above."""

    def __init__(
        self,
        file: ConfigFile,
        database: str,
        open_store: OpenStore,
        listeners: Sequence[Listener],
        *,
        refresh: Refresh = refresh,
        policy: ServicePolicy | None = None,
    ) -> None:
        self._policy = policy = policy or ServicePolicy()
        self._file, self._database, self._open_store = file, database, open_store
        self._stop = stop = threading.Event()
        self._events = Events([*listeners, self._heard])
        self._metrics = ServiceMetrics()
        self._started_at = now()
        self._no_database = "the database"
        self._is_keeping = self._was_ready = False
        shared = self._events, self._metrics
        locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._workers = [
            Worker(Reconciler(table, open_store, refresh, stop), *shared, locks[table.name], stop, policy.results)
            for table in file.config.collection
        ]
        self._scheduler = Scheduler(self._workers, ZoneInfo(file.config.timezone), self._missed, policy.share_seconds)

    def stop(self) -> None:
        """Have `run` or `once` return soon: reconciliations end after their current batch. Call it from any thread."""
        if not self._stop.is_set():
            self._events.report("stopping")
            self._stop.set()

    def run(self) -> None:
        """Run until `stop`. Raises InvalidConfig if the database does not fit, InvalidParameter for a port in use."""
        # Only a running service loads Starlette and uvicorn.
        from milvus_hubness.operations.http_server import HttpServer
        from milvus_hubness.serve.page import service_routes

        routes = service_routes(self.view, self.is_alive, self._metrics)
        with HttpServer(self._file.config.http.listen, routes, name="milvus-hubness-http") as server:
            self._events.report("started", url=server.url)
            self._await_database()
            if not self._stop.is_set():
                self._is_keeping = True
                for worker in self._workers:
                    worker.start()
                self._scheduler.start()
                self._stop.wait()
                self._scheduler.stop()
                for worker in self._workers:
                    worker.join()
        self._events.report("stopped")

    def once(self) -> list[Reconciliation]:
        """Reconcile every collection once, in turn. Raises StoreError, InvalidConfig if the database does not fit."""
        self._check(self._open_store())
        return [outcome for worker in self._workers if (outcome := worker.reconcile("full")) is not None]

    def is_alive(self) -> bool:
        """Whether all required threads are running."""
        running = self._scheduler.is_running and all(worker.is_alive for worker in self._workers)
        return running or not self._is_keeping or self._stop.is_set()

    def view(self) -> ServiceView:
        return ServiceView(
            version=version("milvus-hubness"),
            database=self._database,
            started_at=self._started_at,
            at=now(),
            waiting_for=self._waiting_for(),
            collections=tuple(
                CollectionView(
                    worker.table, worker.standing(), self._scheduler.next_run(worker), worker.history.outcomes
                )
                for worker in self._workers
            ),
        )

    def _waiting_for(self) -> str:
        if not self._is_keeping:
            return self._no_database
        unseen = [worker.table.label for worker in self._workers if not worker.standing().is_ready]
        return f"the first reconciliation of {', '.join(unseen)}" if unseen else ""

    def _await_database(self) -> None:
        """Wait until the database answers, or `stop` is called. Raises InvalidConfig."""
        while not self._stop.is_set():
            try:
                self._check(self._open_store())
                return
            except StoreError as error:
                if self._no_database != str(error):
                    self._no_database = str(error)
                    self._events.report("waiting", message=str(error))
                self._stop.wait(self._policy.connect_seconds)

    def _check(self, store: Store) -> None:
        if faults := database_faults(self._file, store):
            raise self._file.refusal(faults)

    def _missed(self, worker: Worker, reason: str, count: int) -> None:
        self._metrics.missed(worker.table, reason, count)
        self._events.report("missed", collection=worker.table.label, reason=reason, count=count)

    def _heard(self, event: Event) -> None:
        """Report `ready` after the last of the first reconciliations."""
        if event.name == "reconciled" and not self._was_ready and self._is_keeping and not self._waiting_for():
            self._was_ready = True
            self._events.report("ready")
