"""Waits for the server: each says after some seconds
what it waits for and how far that is, and has an end.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from milvus_hubness.basics.defaults import WAIT_SECONDS, WAIT_VARIABLE
from milvus_hubness.basics.logs import log
from milvus_hubness.errors import InvalidParameter, WaitedTooLong


@dataclass(frozen=True)
class WaitPolicy:
    """The times of a wait, in seconds."""

    first_report: float = 5.0
    """A wait that is over sooner says nothing."""
    next_reports: float = 30.0
    """The time from one report to the next."""
    limit: float = WAIT_SECONDS
    """The wait ends with WaitedTooLong if it has not got further for so long."""
    shortest_pause: float = 0.1
    """The first pause between two looks at the server; each further one is twice as long."""
    longest_pause: float = 5.0

    @classmethod
    def default(cls) -> WaitPolicy:
        """Return the default policy; $MILVUS_HUBNESS_WAIT_SECONDS sets `limit`.

        Raises InvalidParameter.
        """
        text = os.environ.get(WAIT_VARIABLE) or str(cls.limit)
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan

        if not 0 < limit < math.inf:
            raise InvalidParameter(
                f"${WAIT_VARIABLE} must be a number of seconds above 0, not {text!r}"
            )

        return cls(limit=limit)


@dataclass(frozen=True)
class Standing:
    """How far a server is with what a job waits for."""

    text: str
    """For messages: "3,000 rows are left to index"."""

    left: float
    """How much is left, in any unit. Only less than ever before is progress: writes of others make
    it go up and down for ever.
    """


def wait_until(
    awaited: str,
    how_far: Callable[[], Standing | None],
    policy: WaitPolicy | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Call `how_far` again and again until it returns None.

    awaited: what this waits for, for messages: "the index 'v' of 'products'". how_far: looks at the
    server; the limit counts from the last progress.
    Raises WaitedTooLong, and the exceptions of `how_far`.
    """
    policy = policy or WaitPolicy.default()
    began = clock()
    last_progress = began
    next_report = began + policy.first_report
    pause = policy.shortest_pause

    standing = how_far()
    least = math.inf if standing is None else standing.left
    while standing is not None:
        now = clock()
        if now - last_progress >= policy.limit:
            raise _too_long(awaited, standing.text, policy)

        if now >= next_report:
            _report(awaited, standing.text, now - began)
            next_report = now + policy.next_reports

        sleep(pause)
        pause = min(2 * pause, policy.longest_pause)

        standing = how_far()
        if standing is not None and standing.left < least:
            least = standing.left
            last_progress = clock()


@contextmanager
def reported(
    awaited: str, how_far: Callable[[], str] = lambda: "", policy: WaitPolicy | None = None
) -> Iterator[float]:
    """Report the wait of a block that only waits, and yield the seconds after which it must end.

    awaited, how_far: as in `wait_until`; `how_far` is called in another thread. An error of the
    block after this time is raised as WaitedTooLong.
    """
    policy = policy or WaitPolicy.default()
    over = threading.Event()
    began = time.monotonic()

    # In a thread: the block itself hangs in one request, and can say nothing.
    def report() -> None:
        seconds = policy.first_report
        while not over.wait(seconds):
            _report(awaited, how_far(), time.monotonic() - began)
            seconds = policy.next_reports

    thread = threading.Thread(target=report, name="milvus-hubness-wait", daemon=True)
    thread.start()
    try:
        yield policy.limit
    except Exception as error:
        if time.monotonic() - began < policy.limit:
            raise

        raise _too_long(awaited, "", policy) from error
    finally:
        over.set()
        thread.join()


def wait_seconds(awaited: str, seconds: float, stop: threading.Event | None = None) -> bool:
    """Wait for a number of seconds, or until `stop` is set, and report it as `wait_until` does.

    Return whether `stop` ended the wait.
    """
    began = time.monotonic()
    stop = stop or threading.Event()
    if seconds <= WaitPolicy.first_report:
        return stop.wait(seconds)

    with reported(awaited, lambda: f"{max(0.0, seconds - (time.monotonic() - began)):,.0f} s left"):
        return stop.wait(seconds)


def _report(awaited: str, standing: str, seconds: float) -> None:
    # A warning: Python prints warnings of a library also in programs that have not set up logging.
    log.warning(
        "waiting for %s since %.0f s%s", awaited, seconds, f": {standing}" if standing else ""
    )


def _too_long(awaited: str, standing: str, policy: WaitPolicy) -> WaitedTooLong:
    where = f" ({standing})" if standing else ""
    return WaitedTooLong(
        f"waited {policy.limit:,.0f} s for {awaited}{where}, and it got no further: see what keeps "
        "the server busy, "
        f"and run the command again, which carries on; ${WAIT_VARIABLE} sets how long it waits"
    )
