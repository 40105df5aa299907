"""Jobs: the real command line in processes that are forked from a warmed-up one, stopped and continued."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from milvus_hubness import cli
from tests.chaos.processes import FORKS, be_quiet, is_stopped, run_command_line
from tests.chaos.settings import Settings

PATIENCE = 120.0
REFUSAL = re.compile(r"\blease\b|is at work on")


def run(argv: list[str], out: str, settings: Settings) -> None:
    """Run the command line in this process, printing into `out`.out and `out`.err, and exit with its code."""
    be_quiet()
    settings.apply()
    run_command_line(cli.main, ["milvus-hubness", *argv], f"{out}.out", f"{out}.err")


class Job:
    """One process of the command line. name: in messages."""

    def __init__(self, name: str, argv: list[str], folder: Path, settings: Settings) -> None:
        self.name, self.argv = name, argv
        self._out = folder / f"{name}-{time.monotonic_ns()}"
        self._process = FORKS.Process(
            target=run, args=(argv, str(self._out), settings), daemon=True
        )
        self._process.start()

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        until = time.monotonic() + 10
        while not is_stopped(self._process) and self.is_running and time.monotonic() < until:
            time.sleep(0.005)

    def go_on(self) -> None:
        """SIGCONT."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return its exit code. Raises AssertionError where it does not end."""
        self._process.join(seconds)
        if self._process.is_alive():
            self.kill()
            raise AssertionError(f"{self.name} did not end within {seconds:.0f} s: {self.message}")
        code = self._process.exitcode
        assert code is not None
        return code

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    @property
    def result(self) -> dict[str, Any]:
        """The last JSON object that it printed."""
        for line in reversed(self._read("out").splitlines()):
            with contextlib.suppress(json.JSONDecodeError):
                return dict(json.loads(line))
        return {}

    @property
    def message(self) -> str:
        """What it says went wrong."""
        error = self.result.get("error", {})
        return (
            str(error.get("message", "") if isinstance(error, dict) else error)
            or str(self._outcome.get("message", ""))
            or self._read("err")[-600:]
        )

    @property
    def has_traceback(self) -> bool:
        return "Traceback" in self._read("err")

    @property
    def is_refused(self) -> bool:
        """Whether it did nothing because another job holds the lease, or has taken it.

        The service does not fail then.
        """
        if self._outcome.get("result") == "busy":
            return True
        return self.code == 1 and bool(REFUSAL.search(self.message))

    @property
    def _outcome(self) -> dict[str, Any]:
        """What the service said of its collection; nothing of another command."""
        return dict(self.result.get("facts", {}))

    def _read(self, ending: str) -> str:
        path = Path(f"{self._out}.{ending}")
        return path.read_text(errors="replace") if path.exists() else ""
