"""The progress bar of a command, and a standard output that does not run into it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from milvus_hubness.basics.texts import visible_line

if TYPE_CHECKING:
    from rich.console import Console


class Bar:
    """A bar for the current step of a job, while this context is open.

    Call it as a `Progress` of jobs, from any thread. A step that is over leaves nothing behind.
    What is printed on standard output meanwhile stands above the bar; if standard output is no
    terminal, it passes unchanged.

    console: a terminal, on standard error.
    """

    def __init__(self, console: Console) -> None:
        columns = (
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        # rich would send standard output to standard error, also where only one of them is a file.
        self._bars = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        # Reentrant: what a thread prints while it updates the bar comes back here.
        self._lock = threading.RLock()
        self._doing: str | None = None
        self._task: TaskID | None = None
        self._stdout: Any = None

    def __call__(self, doing: str, done: int, total: int) -> None:
        with self._lock:
            if doing != self._doing:
                self._remove()
                self._doing = doing

            # A step that is over, or had nothing to do.
            if done == total:
                self._remove()
                return

            # Clients may write meanwhile, so that a job finds more rows than it has counted before.
            total = max(done, total)
            # rich shows a step without a total as one of unknown length.
            if self._task is None:
                self._task = self._bars.add_task(visible_line(doing), total=total or None)

            self._bars.update(self._task, completed=done, total=total or None)

    def __enter__(self) -> Bar:
        self._bars.start()
        if sys.stdout.isatty():
            self._stdout = sys.stdout
            sys.stdout = _Above(self._stdout, self)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._bars.stop()
        if self._stdout is not None:
            sys.stdout.flush()
            sys.stdout = self._stdout

    @property
    def is_shown(self) -> bool:
        return self._bars.live.is_started

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Show no bar within the block, in which other threads may print and report as before."""
        with self._lock:
            self._bars.stop()
        # A prompt without an end of line is printed at once where no bar follows it.
        try:
            yield
        finally:
            with self._lock:
                self._bars.start()

    @contextmanager
    def taken_away(self) -> Iterator[None]:
        """Take the bar off the terminal within the block, which prints."""
        with self._lock:
            was_shown = self.is_shown
            self._bars.stop()
            try:
                yield
            finally:
                if was_shown:
                    self._bars.start()

    def _remove(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


class _Above:
    """A standard output that prints whole lines above a bar."""

    def __init__(self, stream: Any, bar: Bar) -> None:
        self._stream = stream
        self._bar = bar
        self._unfinished = ""

    def write(self, text: str) -> int:
        # The rest of a line waits: the bar would be drawn into it.
        lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
        if newline:
            with self._bar.taken_away():
                self._stream.write(lines + newline)
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Print an unfinished line once no bar would follow on it."""
        if self._unfinished and not self._bar.is_shown:
            self._stream.write(self._unfinished)
            self._unfinished = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return what else a stream has, such as `isatty` and `encoding`."""
        return getattr(self._stream, name)
