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
from milvus_hubness.serve.look import Course, Look, now
from milvus_hubness.serve.looker import Looker, Wish
from milvus_hubness.serve.metrics import ServiceMetrics

STRONGEST_FIRST: tuple[Wish, ...] = ("full", "pending", "share")


@dataclass(frozen=True)
class Standing:
    """running: the look under way. last: the last of this process. last_success: of any process. failing: the
    last look that failed, until one of its kind does not; failures: how many did so in a row. is_ready:
    whether one has succeeded, or was left to another process that is at work."""

    running: Course | None = None
    last: Look | None = None
    last_success: datetime | None = None
    failing: Look | None = None
    failures: int = 0
    is_ready: bool = False


class Keeper:
    """Every look is counted, told and kept. one_at_a_time: held while it looks; the same lock for keepers of
    the same collection. stop: set, then `join`, to end it."""

    def __init__(
        self,
        looker: Looker,
        events: Events,
        metrics: ServiceMetrics,
        one_at_a_time: threading.Lock,
        stop: threading.Event,
    ) -> None:
        self.table = looker.table
        self.history = History(self.table.label)
        self._looker, self._events, self._metrics = looker, events, metrics
        self._one_at_a_time, self._stop = one_at_a_time, stop
        self._lock = threading.Lock()
        self._wishes: set[Wish] = set()
        self._asked = threading.Event()
        self._standing = Standing()
        self._owes_full = False
        self._thread = threading.Thread(
            target=self._serve, name=f"milvus-hubness {self.table.label}", daemon=True
        )
        metrics.watch(self.table)

    def start(self) -> None:
        """Look at once, and then whenever asked to."""
        self.ask("full")
        self._thread.start()

    def ask(self, wish: Wish) -> datetime | None:
        """Have it look soon. Since when it has been looking already, where it does so again after that."""
        with self._lock:
            self._wishes.add(wish)
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

    def look(self, wish: Wish, *, alone: bool = False) -> Look | None:
        """Look now, in this thread; None where nothing was looked for. alone: as the only service."""
        with self._one_at_a_time:
            if self._stop.is_set():
                self._stand(running=None)
                return None
            began = now()
            self._stand(running=Course(began))
            self._metrics.refreshing(self.table, True)
            try:
                look = self._looker.look(wish, partial(self._progress, began), alone=alone)
            finally:
                self._stand(running=None)
                self._metrics.refreshing(self.table, False)
        if look is not None:
            self._record(wish, look)
        return look

    def standing(self) -> Standing:
        with self._lock:
            return self._standing

    def _serve(self) -> None:
        self._remember()
        while not self._stop.is_set():
            self._asked.wait()
            with self._lock:
                self._asked.clear()
                wish = next((each for each in STRONGEST_FIRST if each in self._wishes), None)
                self._wishes.clear()
                if wish is not None:
                    self._standing = replace(self._standing, running=Course(now(), "waiting for its turn"))
            if wish is not None:
                self._fulfil(wish)
        self._looker.release()

    def _fulfil(self, wish: Wish) -> None:
        """A full look that failed, or was left to another process, is tried again at the next tick. New rows
        do not wait for that, a bank that cannot be read, say."""
        if self._owes_full and wish == "pending":
            wish = "full"
        look = self.look(wish, alone=True)
        if wish == "full" and look is not None:
            self._owes_full = look.result != "ok"
            if look.result == "failed" and self._looker.is_connected:
                self.look("pending", alone=True)

    def _remember(self) -> None:
        """What an earlier process found."""
        try:
            self.history.read(self._looker.store)
        except HubnessError as error:
            self._events.tell("warning", collection=self.table.label, message=f"no history: {error}")
        self._metrics.remember(self.table, self.history.kept)
        succeeded = [look.at for look in self.history.kept if look.result == "ok"]
        self._stand(last_success=succeeded[-1] if succeeded else None)

    def _progress(self, began: datetime, doing: str, done: int, total: int) -> None:
        self._stand(running=Course(began, doing, done, total))

    def _stand(self, **changes: Any) -> None:
        with self._lock:
            self._standing = replace(self._standing, **changes)

    def _record(self, wish: Wish, look: Look) -> None:
        before, failed = self.standing(), look.result == "failed"
        if failed:
            self._stand(failing=look, failures=before.failures + 1)
        elif wish == "full" or not self._owes_full:
            self._stand(failing=None, failures=0)
        self._stand(
            last=look,
            last_success=look.at if look.result == "ok" else before.last_success,
            is_ready=before.is_ready or look.result in ("ok", "busy"),
        )
        self._metrics.looked(self.table, look, self.standing().failures)
        self._events.tell("looked", collection=self.table.label, **look.model_dump(exclude={"at"}))
        self.history.add(look)
        if not self._looker.is_connected:
            return
        try:
            self.history.write(self._looker.store)
        except HubnessError as error:
            message = f"the history was not kept: {error}"
            self._events.tell("warning", collection=self.table.label, message=message)
