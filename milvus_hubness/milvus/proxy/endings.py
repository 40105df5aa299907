"""How calls end: statuses of the proxy's own, and errors that keep no request in memory."""

from __future__ import annotations

import logging
import traceback
from time import monotonic
from typing import Any

import grpc


class CallEnded(grpc.aio.AioRpcError):  # type: ignore[misc]
    """Ends a client's call with a status code, which pymilvus does not retry unless UNAVAILABLE."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    def result(self, timeout: float | None = None) -> Any:
        # gRPC's interceptors call this method of a failed call.
        raise self


def release(error: BaseException) -> None:
    """Forget the frames in which an error was raised, and those of its causes.

    Frames of awaited calls hold the request, and some hold the error itself (the future that
    brought it): such a circle keeps a request of any size until the garbage collector comes.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue

        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None


LOG_SECONDS = 10.0
"""The time over which lines are counted."""

MOST_LINES = 5
"""Lines in LOG_SECONDS; a caller decides how many calls fail."""


class FailureLog:
    """Logs calls that failed for a reason that nobody foresaw, one line each, some lines at a time.

    The traceback follows at level DEBUG.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._began = -LOG_SECONDS
        self._lines = 0
        self._left_out = 0

    def add(self, method: str, error: BaseException) -> None:
        now = monotonic()
        if now - self._began >= LOG_SECONDS:
            if self._left_out:
                self._log.error("%d more calls failed in %.0f s", self._left_out, now - self._began)
            self._began = now
            self._lines = 0
            self._left_out = 0

        if self._lines == MOST_LINES:
            self._left_out += 1
            return

        self._lines += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"
        text = " ".join(str(error).split())[:200]
        self._log.error("%s failed: %s: %s (%s)", method, type(error).__name__, text, place)
        self._log.debug("traceback of %s", method, exc_info=error)
