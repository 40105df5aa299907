"""The service: workers, their schedules, and what they show over HTTP.

| event    | facts                                                                                  |
|----------|----------------------------------------------------------------------------------------| |
started  | url                                                                                    | | waiting
| message: the database does not answer yet                                              | | ready    | every
collection was looked at                                                         | | looked   | collection,
and those of `Reconciliation`                                                        | | missed   |
collection, reason, count: scheduled runs that the next one makes up for              | | warning  |
collection, message                                                                    | | stopping | looks
that are under way end after their batch                                         | | stopped  |
|"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version

from milvus_hubness.errors import StoreError
from milvus_hubness.jobs.migration.events import Event, Events, Listener
from milvus_hubness.jobs.upkeep import keep_up
from milvus_hubness.serve.config_checks import database_faults
from milvus_hubness.serve.config_file import ConfigFile
from milvus_hubness.serve.keeper import Worker
from milvus_hubness.serve.look import Reconciliation, now
from milvus_hubness.serve.looker import Keep, OpenStore, Reconciler
from milvus_hubness.serve.metrics import ServiceMetrics
from milvus_hubness.serve.ticker import Scheduler
from milvus_hubness.serve.view import CollectionView, ServiceView
from milvus_hubness.stores.base import Store

CONNECT_SECONDS = 2.0


class Service:
    """database: its address, as it may be shown. open_store: called by each worker for itself. listeners:
    told of the events above."""

    def __init__(
        self,
        file: ConfigFile,
        database: str,
        open_store: OpenStore,
        listeners: Sequence[Listener],
        *,
        keep: Keep = keep_up,
    ) -> None:
        self._file, self._database, self._open_store = file, database, open_store
        self._stop = threading.Event()
        self._events = Events([*listeners, self._heard])
        self._metrics = ServiceMetrics()
        self._started_at = now()
        self._no_database = "the database"
        self._is_keeping = self._was_ready = False
        locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._workers = [
            Worker(
                Reconciler(table, file.folder, open_store, keep, self._stop),
                self._events,
                self._metrics,
                locks[table.name],
                self._stop,
            )
            for table in file.config.collection
        ]
        self._scheduler = Scheduler(self._workers, file.config.zone, self._missed)

    def stop(self) -> None:
        """Have `run` or `once` return soon: looks end after the batch that is under way. From any thread."""
        if not self._stop.is_set():
            self._events.report("stopping")
            self._stop.set()

    def run(self) -> None:
        """Until `stop`. Raises InvalidConfig for what the database has not, and InvalidParameter where the
        port is taken."""
        # Only what serves loads Starlette and uvicorn.
        from milvus_hubness.jobs.http_server import HttpServer
        from milvus_hubness.serve.site import service_routes

        routes = service_routes(self.view, self.is_alive, self._metrics)
        with HttpServer(self._file.config.http.listen, routes, name="milvus-hubness-http") as server:
            self._events.report("started", url=server.url)
            self._await_database()
            if not self._stop.is_set():
                self._keep_up()
        self._events.report("stopped")

    def once(self) -> list[Reconciliation]:
        """One look at everything, in turn. Raises StoreError, and InvalidConfig for what the database has
        not."""
        self._check(self._open_store())
        return [outcome for worker in self._workers if (outcome := worker.reconcile("full")) is not None]

    def is_alive(self) -> bool:
        """Whether everything that should run does."""
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
                CollectionView.of(worker, self._scheduler.next_run(worker)) for worker in self._workers
            ),
        )

    def _waiting_for(self) -> str:
        if not self._is_keeping:
            return self._no_database
        unseen = [worker.table.label for worker in self._workers if not worker.standing().is_ready]
        return f"a first look at {', '.join(unseen)}" if unseen else ""

    def _await_database(self) -> None:
        """Until it answers, or `stop`. Raises InvalidConfig."""
        while not self._stop.is_set():
            try:
                self._check(self._open_store())
                return
            except StoreError as error:
                if self._no_database != str(error):
                    self._no_database = str(error)
                    self._events.report("waiting", message=str(error))
                self._stop.wait(CONNECT_SECONDS)

    def _check(self, store: Store) -> None:
        if faults := database_faults(self._file, store):
            raise self._file.refusal(faults)

    def _keep_up(self) -> None:
        self._is_keeping = True
        for worker in self._workers:
            worker.start()
        self._scheduler.start()
        self._stop.wait()
        self._scheduler.stop()
        for worker in self._workers:
            worker.join()

    def _missed(self, worker: Worker, reason: str, count: int) -> None:
        self._metrics.missed(worker.table, reason, count)
        self._events.report("missed", collection=worker.table.label, reason=reason, count=count)

    def _heard(self, event: Event) -> None:
        """The last of the first looks."""
        if (
            event.name == "reconciled"
            and not self._was_ready
            and self._is_keeping
            and not self._waiting_for()
        ):
            self._was_ready = True
            self._events.report("ready")
