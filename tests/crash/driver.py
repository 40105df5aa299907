"""The process that is killed: the command line itself, with its requests to the database counted."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pymilvus.grpc_gen import milvus_pb2_grpc

from milvus_hubness import cli
from milvus_hubness.jobs.migration import events, ledger
from milvus_hubness.stores import milvus

CHUNK_BYTES = 150 * (milvus.ROW_OVERHEAD_BYTES + 4 * 16)

STAGES = (
    "planning", "preparing", "creating", "copying", "catching up", "verifying", "verified", "switching",
    "moving", "switched", "rolling back", "moving back", "rolled back",
)  # fmt: skip
_BEGUN_BY_EVENT = {
    "plan": "preparing",
    "before-copy": "copying",
    "after-copy": "catching up",
    "before-verify": "verifying",
    "verified": "verified",
    "before-cutover": "switching",
    "after-cutover": "switched",
    "before-rollback": "rolling back",
    "after-rollback": "rolled back",
}
_BEGUN_BY_PHASE = {"copying": "creating", "switching": "moving", "rolling back": "moving back"}


@dataclass(frozen=True)
class Moment:
    """The number-th request of a stage, or the first after that stage; or, without a stage, so many seconds
    after the first request."""

    stage: str | None
    number: int = 0
    edge: Literal["before", "after"] = "before"
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.stage is None:
            return f"{self.seconds:.2f} s after its first request"
        return f"{self.edge} request {self.number} of {self.stage}"


@dataclass(frozen=True)
class Order:
    """argv: of milvus-hubness. log: what it prints. victims: process ids that are killed at the moment, 0 for
    its own. timing: a file that gets the seconds from the first request to the end."""

    argv: tuple[str, ...]
    log: Path
    moment: Moment | None = None
    victims: tuple[int, ...] = (0,)
    timing: Path | None = None


class _Watch:
    def __init__(self, order: Order) -> None:
        self._order, self._moment = order, order.moment
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stage = STAGES[0]
        self._first: float | None = None

    def enter(self, stage: str | None) -> None:
        with self._lock:
            self._stage = max(self._stage, stage or self._stage, key=STAGES.index)

    def is_due(self) -> bool:
        """Counts a request. Whether it is the one."""
        with self._lock:
            self._counts[self._stage] += 1
            moment = self._moment
            if self._first is None:
                self._first = time.monotonic()
                if moment and moment.stage is None:
                    timer = threading.Timer(moment.seconds, self.strike)
                    timer.daemon = True
                    timer.start()
            if moment is None or moment.stage is None:
                return False
            here, there = STAGES.index(self._stage), STAGES.index(moment.stage)
            due = here > there or (here == there and self._counts[self._stage] >= moment.number)
            if due:
                self._moment = None
            return due

    @property
    def edge(self) -> str:
        return self._order.moment.edge if self._order.moment else ""

    def strike(self) -> None:
        for victim in self._order.victims:
            os.kill(victim or os.getpid(), signal.SIGKILL)

    def write_timing(self) -> None:
        if self._order.timing and self._first is not None:
            self._order.timing.write_text(str(time.monotonic() - self._first))


class _Counted:
    """A method of the database's stub."""

    def __init__(self, call: Any, watch: _Watch) -> None:
        self._call, self._watch = call, watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        due = self._watch.is_due()
        if due and self._watch.edge == "before":
            self._watch.strike()
        answer = self._call(*args, **options)
        if due and self._watch.edge == "after":
            self._watch.strike()
        return answer

    def future(self, *args: Any, **options: Any) -> Any:
        due = self._watch.is_due()
        if due and self._watch.edge == "before":
            self._watch.strike()
        answer = self._call.future(*args, **options)
        if due and self._watch.edge == "after":
            answer.result()
            self._watch.strike()
        return answer


def run(order: Order) -> None:
    """Run the command line as ordered. Exits with its exit code, unless it is killed."""
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    watch = _Watch(order)
    milvus.CHUNK_BYTES = CHUNK_BYTES
    _count_requests(watch)
    _follow_stages(watch)
    sys.argv = ["milvus-hubness", *order.argv]
    try:
        cli.main()
    finally:
        watch.write_timing()
        # A forked process ends without these, by which Milvus Lite closes its file.
        atexit._run_exitfuncs()


def _count_requests(watch: _Watch) -> None:
    class Stub(milvus_pb2_grpc.MilvusServiceStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            for name, call in list(vars(self).items()):
                setattr(self, name, _Counted(call, watch))

    milvus_pb2_grpc.MilvusServiceStub = Stub


def _follow_stages(watch: _Watch) -> None:
    tell, write = events.Events.tell, ledger.Ledger.write

    def telling(self: Any, name: str, /, **facts: Any) -> None:
        watch.enter(_BEGUN_BY_EVENT.get(name))
        tell(self, name, **facts)

    def writing(self: Any, migration: Any, **changes: Any) -> Any:
        watch.enter(_BEGUN_BY_PHASE.get(changes.get("phase", "")))
        return write(self, migration, **changes)

    events.Events.tell, ledger.Ledger.write = telling, writing
