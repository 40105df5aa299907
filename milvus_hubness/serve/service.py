"""The service: its workers and its HTTP endpoint.

docs/how-to/monitor.md lists its events and their facts.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from zoneinfo import ZoneInfo

from milvus_hubness.errors import StoreError
from milvus_hubness.jobs.common.progress import Event, Events, Listener
from milvus_hubness.jobs.refresh.run import refresh
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.serve.config_file import ConfigFile, database_faults
from milvus_hubness.serve.reconcile import OpenStore, Reconciler, Reconciliation, Refresh, now
from milvus_hubness.serve.worker import (
    CollectionView,
    ServiceMetrics,
    ServicePolicy,
    ServiceView,
    Worker,
)


class Service:
    """Runs the workers of all configured collections.

    database: its address without secrets. open_store:
    called by each worker. listeners: get the events.
    """

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
        self._file = file
        self._database = database
        self._open_store = open_store
        self._stop = stop = threading.Event()
        self._events = Events([*listeners, self._heard])
        self._metrics = ServiceMetrics()
        self._started_at = now()
        # What the service waits for before its workers run: the last error of the database.
        self._no_database = "the database"
        self._is_keeping = False
        self._was_ready = False

        shared = (self._events, self._metrics, stop, policy, ZoneInfo(file.config.timezone))
        # Profiles of one collection take turns: a refresh holds the lease of the collection.
        locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._workers = [
            Worker(Reconciler(table, open_store, refresh, stop), locks[table.name], *shared)
            for table in file.config.collection
        ]

    def stop(self) -> None:
        """Have `run` or `once` return soon: reconciliations end after their current batch.

        Call it from any thread.
        """
        if not self._stop.is_set():
            self._events.report("stopping")
            self._stop.set()

    def run(self) -> None:
        """Run until `stop`.

        Raises InvalidConfig if the database does not fit, InvalidParameter for a port in use.
        """
        # Only a running service loads Starlette and uvicorn.
        from milvus_hubness.serve.http_server import HttpServer
        from milvus_hubness.serve.page import service_routes

        routes = service_routes(self.view, self.is_alive, self._metrics)
        address = self._file.config.http.listen
        limits = self._policy.http
        # Before the database answers: the page and the probes say what the service waits for.
        with HttpServer(address, routes, limits) as server:
            self._events.report("started", url=server.url)
            self._await_database()
            if not self._stop.is_set():
                self._is_keeping = True
                for worker in self._workers:
                    worker.start()

                self._stop.wait()
                for worker in self._workers:
                    worker.join()

        self._events.report("stopped")

    def once(self) -> list[Reconciliation]:
        """Reconcile every collection once, in turn.

        Raises StoreError, InvalidConfig if the database does not fit.
        """
        self._check(self._open_store())
        outcomes = [worker.reconcile("refresh") for worker in self._workers]
        # None: `stop` was called meanwhile.
        return [outcome for outcome in outcomes if outcome is not None]

    def is_alive(self) -> bool:
        """Whether all required threads are running."""
        return (
            not self._is_keeping
            or self._stop.is_set()
            or all(worker.is_alive for worker in self._workers)
        )

    def view(self) -> ServiceView:
        """Return the data of the page, as it is now."""
        return ServiceView(
            version=version("milvus-hubness"),
            database=self._database,
            started_at=self._started_at,
            at=now(),
            waiting_for=self._waiting_for(),
            collections=tuple(
                CollectionView(
                    worker.table, worker.standing(), worker.next_run, worker.history.outcomes
                )
                for worker in self._workers
            ),
        )

    def _waiting_for(self) -> str:
        """Return what the service waits for; empty if it is ready."""
        if not self._is_keeping:
            return self._no_database
        unseen = [worker.table.label for worker in self._workers if not worker.standing().is_ready]
        return f"the first reconciliation of {', '.join(unseen)}" if unseen else ""

    def _await_database(self) -> None:
        """Wait until the database answers, or `stop` is called. Raises InvalidConfig."""
        while not self._stop.is_set():
            try:
                # Closed, as a database that refuses a request gets another one every two seconds.
                with closing(self._open_store()) as store:
                    self._check(store)
                return
            except StoreError as error:
                # Each error is reported once, not at every attempt.
                if self._no_database != str(error):
                    self._no_database = str(error)
                    self._events.report("waiting", message=str(error))
                self._stop.wait(self._policy.connect_seconds)

    def _check(self, store: Store) -> None:
        # Collections that cannot be read are left to their workers, which try again.
        if faults := database_faults(self._file, store, of_states=False):
            raise self._file.refusal(faults)

    def _heard(self, event: Event) -> None:
        """Report `ready` after the last of the first reconciliations."""
        if (
            event.name == "reconciled"
            and not self._was_ready
            and self._is_keeping
            and not self._waiting_for()
        ):
            self._was_ready = True
            self._events.report("ready")
