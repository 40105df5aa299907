"""The process that is killed: the command line itself, with its requests to the database counted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from milvus_hubness import cli
from tests.chaos.ports import Program
from tests.chaos.processes import be_quiet, run_command_line
from tests.chaos.stages import COURSES, Course


@dataclass(frozen=True)
class Moment:
    """The number-th request of a stage, or the first after that stage; or, without a stage, so many seconds
    after the first request. only: of the requests of this name."""

    stage: str | None
    number: int = 0
    edge: Literal["before", "after"] = "before"
    seconds: float = 0.0
    only: str | None = None

    def __str__(self) -> str:
        if self.stage is None:
            return f"{self.seconds:.2f} s after its first request"
        return f"{self.edge} {self.only or 'request'} {self.number} of {self.stage}"


@dataclass(frozen=True)
class Order:
    """argv: of the program. log: what it prints. victims: process ids that get `sign` at the moment, 0 for
    its own. timing: a file that gets the seconds from the first request to the end. counts: one that gets the
    number of requests in each stage. follows: the course to follow, where
    the command has several. client_ttl: seconds that it waits for clients to hear of a change."""

    program: type[Program]
    argv: tuple[str, ...]
    log: Path
    moment: Moment | None = None
    victims: tuple[int, ...] = (0,)
    sign: signal.Signals = signal.SIGKILL
    timing: Path | None = None
    counts: Path | None = None
    follows: str = ""
    client_ttl: float = 0.0

    @property
    def course(self) -> Course:
        """Of the command."""
        return COURSES[self.follows or self.argv[0]]


class Watch:
    """Counts requests, and strikes at the moment."""

    def __init__(self, order: Order) -> None:
        self._order, self._moment = order, order.moment
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stages = order.course.stages
        self._stage = self._stages[0]
        self._first: float | None = None

    def enter(self, stage: str | None) -> None:
        with self._lock:
            self._stage = max(self._stage, stage or self._stage, key=self._stages.index)

    def is_due(self, name: str) -> bool:
        """Counts a request. Whether it is the one."""
        with self._lock:
            moment = self._moment
            if moment and moment.only not in (None, name):
                return False
            self._counts[self._stage] += 1
            if self._first is None:
                self._first = time.monotonic()
                if moment and moment.stage is None:
                    timer = threading.Timer(moment.seconds, self.strike)
                    timer.daemon = True
                    timer.start()
            if moment is None or moment.stage is None:
                return False
            here, there = self._stages.index(self._stage), self._stages.index(moment.stage)
            due = here > there or (here == there and self._counts[self._stage] >= moment.number)
            if due:
                self._moment = None
            return due

    @property
    def edge(self) -> str:
        return self._order.moment.edge if self._order.moment else ""

    def strike(self) -> None:
        for victim in self._order.victims:
            os.kill(victim or os.getpid(), self._order.sign)

    def write_down(self) -> None:
        if self._order.timing and self._first is not None:
            self._order.timing.write_text(str(time.monotonic() - self._first))
        if self._order.counts:
            self._order.counts.write_text(json.dumps(self._counts))


class Counted:
    """A request to the database. `future` is for those of gRPC."""

    def __init__(self, name: str, call: Any, watch: Watch) -> None:
        self._name, self._call, self._watch = name, call, watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        due = self._watch.is_due(self._name)
        if due and self._watch.edge == "before":
            self._watch.strike()
        answer = self._call(*args, **options)
        if due and self._watch.edge == "after":
            self._watch.strike()
        return answer

    def future(self, *args: Any, **options: Any) -> Any:
        due = self._watch.is_due(self._name)
        if due and self._watch.edge == "before":
            self._watch.strike()
        answer = self._call.future(*args, **options)
        if due and self._watch.edge == "after":
            answer.result()
            self._watch.strike()
        return answer


def run(order: Order) -> None:
    """Run the command line as ordered. Exits with its exit code, unless it is killed."""
    be_quiet()
    os.environ["MILVUS_HUBNESS_CLIENT_TTL"] = str(order.client_ttl)
    watch, program = Watch(order), order.program
    program.store.chunk_rows = lambda store, source: order.course.rows_per_chunk
    program.count_requests(watch)
    order.course.follow(watch.enter, program.store)

    def main() -> None:
        try:
            cli.main()
        finally:
            watch.write_down()

    run_command_line(main, ["milvus-hubness", *order.argv], order.log, order.log)
