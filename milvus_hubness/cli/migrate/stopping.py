"""SIGTERM and SIGINT while a migration runs: nothing waits any longer, and it can be carried on with."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from milvus_hubness.jobs.migration.throttle import Throttle


class Terminated(SystemExit):
    """By SIGTERM."""


class Interrupted(SystemExit):
    """By SIGINT."""


STOPS: dict[signal.Signals, type[SystemExit]] = {
    signal.SIGTERM: Terminated,
    signal.SIGINT: Interrupted,
}


@contextmanager
def stoppable(throttle: Throttle, stopped: threading.Event) -> Iterator[None]:
    """Exit codes are 128 plus the signal's number. Writers that wait for `throttle`, and commands that end
    when `stopped` is set, are let go, so that the threads end that they are in."""

    def stop(number: int, frame: Any) -> None:
        error = STOPS[signal.Signals(number)](128 + number)
        stopped.set()
        throttle.stop(error)
        raise error

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    except (Terminated, Interrupted):
        sys.stderr.write("milvus-hubness: stopped; the same command again carries on from here\n")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
