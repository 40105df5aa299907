"""A migration that makes room when the server is busy, and gives up when it is overwhelmed."""

from __future__ import annotations

import threading
from collections.abc import Collection

from milvus_hubness.errors import CriticalLoad
from milvus_hubness.jobs.migration.commands import Outcome, redacted, run_command
from milvus_hubness.jobs.migration.events import Events
from milvus_hubness.jobs.migration.throttle import Throttle

MAX_LOAD = "max-load"
TIMEOUT_SECONDS = 30.0


class LoadWatch:
    """Runs two of the user's shell commands every so often, while this is open.

    max_load: while it exits with anything but 0, `throttle` is paused. critical_load: once it does,
    `throttle` is stopped with CriticalLoad, whose message holds the exit code and the last line that the
    command printed; whoever catches that tells of it. A command that takes more than 30 s has failed. Both
    are run once before the body of `with`, so that nothing is written to a server that is busy already.
    every: seconds between two looks. secrets: see `run_command`.
    """

    def __init__(
        self,
        throttle: Throttle,
        events: Events,
        *,
        max_load: str | None = None,
        critical_load: str | None = None,
        every: float = 5.0,
        secrets: Collection[str] = (),
    ) -> None:
        self._throttle, self._events = throttle, events
        self._max_load, self._critical_load = max_load, critical_load
        self._every = every
        self._secrets = tuple(secrets)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="milvus-hubness-load", daemon=True)

    def __enter__(self) -> LoadWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._throttle.resume(MAX_LOAD)

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._every):
                self._look()
        except Exception as error:
            self._throttle.stop(error)

    def _look(self) -> None:
        if self._critical_load:
            outcome = self._run(self._critical_load)
            if outcome.exit_code != 0 and not self._over.is_set():
                command = redacted(self._critical_load, self._secrets)
                self._throttle.stop(CriticalLoad(f"the load is critical: {command!r}, {outcome.complaint}"))
        if self._max_load:
            outcome = self._run(self._max_load)
            if not self._over.is_set():
                self._make_room(outcome)

    def _make_room(self, outcome: Outcome) -> None:
        if outcome.exit_code == 0:
            if self._throttle.resume(MAX_LOAD):
                self._events.report("resumed", reason=MAX_LOAD)
        elif self._throttle.pause(MAX_LOAD):
            self._events.report("throttled", reason=MAX_LOAD, detail=outcome.complaint)

    def _run(self, command: str) -> Outcome:
        return run_command(command, secrets=self._secrets, timeout=TIMEOUT_SECONDS, cancelled=self._over)
