"""A migration under threshold: who listens to it, who steers it, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from milvus_hubness.cli.console import err, known_tokens
from milvus_hubness.cli.migrate.narration import narrated
from milvus_hubness.cli.migrate.options import Pace, Watching, Writers
from milvus_hubness.cli.migrate.stopping import stoppable
from milvus_hubness.cli.migrate.stream import stream
from milvus_hubness.cli.migrate.timeline import Timeline
from milvus_hubness.errors import UnreadableFile
from milvus_hubness.jobs import MigrationOptions
from milvus_hubness.jobs.migration.bulk import BulkTarget
from milvus_hubness.jobs.migration.control import Controls, CutoverGate
from milvus_hubness.jobs.migration.control_file import ControlFile, write_control
from milvus_hubness.jobs.migration.events import Event, Events, Listener
from milvus_hubness.jobs.migration.hooks import Hooks, parse_hooks
from milvus_hubness.jobs.migration.latest import LatestEvents
from milvus_hubness.jobs.migration.load import LoadWatch
from milvus_hubness.jobs.migration.metrics import MigrationMetrics
from milvus_hubness.jobs.migration.throttle import Throttle


class Course:
    """What the options decide, checked before anything is read: raises InvalidParameter."""

    def __init__(
        self,
        writers: Writers,
        watching: Watching,
        pace: Pace | None = None,
        *,
        postponed: bool = False,
        as_json: bool = False,
    ) -> None:
        self._watching, self._pace = watching, pace or Pace()
        self._as_json = as_json
        self._hooks = parse_hooks(watching.on or [])
        self._throttle = Throttle(
            self._pace.rows_per_second, self._pace.bytes_per_second, self._pace.chunk_seconds
        )
        self._gate = CutoverGate(postponed=postponed)
        self._steering = MigrationOptions(
            no_writers=writers.no_writers,
            client_ttl=writers.client_ttl,
            throttle=self._throttle,
            gate=self._gate,
            bulk=BulkTarget.parse(self._pace.bulk_folder) if self._pace.bulk_folder else None,
            engine=self._pace.engine,
        )
        self.timeline = Timeline()

    @contextmanager
    def open(self, source: str, target: str) -> Iterator[MigrationOptions]:
        """While it is open the migration is told of and can be steered. Raises InvalidParameter where --http
        cannot listen, UnreadableFile for a --metrics-file that cannot be written."""
        secrets = known_tokens()
        latest, metrics = LatestEvents(), MigrationMetrics(source, target)
        with ExitStack() as stack:
            listeners: list[Listener] = [self.timeline, latest, metrics]
            if path := self._watching.metrics_file:
                listeners.append(_MetricsFile(path, metrics))
            listeners.append(stream if self._as_json else stack.enter_context(narrated()))
            stopped = threading.Event()
            events = Events(listeners, hooks=Hooks(self._hooks, secrets=secrets, cancelled=stopped))
            stack.enter_context(stoppable(self._throttle, stopped))
            if path := self._watching.control:
                if self._gate.postponed:
                    write_control(path, cutover="postponed")
                controls = Controls("the control file", self._throttle, self._gate, events)
                stack.enter_context(ControlFile(path, controls, events))
            if address := self._watching.http:
                # Only a migration with --http loads Starlette and uvicorn.
                from milvus_hubness.jobs.migration.control_server import control_server

                controls = Controls("http", self._throttle, self._gate, events)
                server = stack.enter_context(control_server(address, controls, latest, metrics))
                err.print(f"steered at {server.url}", highlight=False, markup=False)
            stack.enter_context(
                LoadWatch(
                    self._throttle,
                    events,
                    max_load=self._pace.max_load,
                    critical_load=self._pace.critical_load,
                    every=self._pace.load_every,
                    secrets=secrets,
                )
            )
            yield replace(self._steering, events=events)


class _MetricsFile:
    """A listener that keeps the metrics in a file. One that cannot be written at the start is an error, and
    later no reason to stop."""

    def __init__(self, path: Path, metrics: MigrationMetrics) -> None:
        self._path, self._metrics = path, metrics
        try:
            metrics.write_textfile(path)
        except OSError as error:
            raise UnreadableFile(f"cannot write the metrics file {path}: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        with suppress(OSError):
            self._metrics.write_textfile(self._path)
