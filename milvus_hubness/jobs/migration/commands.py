"""The user's shell commands: run without the database's secrets, and without telling them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import IO

from milvus_hubness.redaction import SECRET_VARIABLES, all_secrets
from milvus_hubness.redaction import redacted as redacted

POLL_SECONDS = 0.1
TAIL_BYTES = 65_536
LINE_LENGTH = 500


@dataclass(frozen=True)
class Outcome:
    """exit_code: negative for a signal, None where the command was ended for taking too long, or because
    nobody waits for it any more. last_line: of its standard error, or else of its standard output; secrets
    are replaced by ***."""

    exit_code: int | None
    last_line: str

    @property
    def complaint(self) -> str:
        """Why it does not count as a success, for an error message."""
        how = "did not end in time" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{how}: {self.last_line}" if self.last_line else how


def run_command(
    command: str,
    *,
    variables: Mapping[str, str] | None = None,
    secrets: Collection[str] = (),
    timeout: float | None = None,
    cancelled: threading.Event | None = None,
) -> Outcome:
    """Run `command` through the shell and wait for it, at most `timeout` seconds and until `cancelled`.

    variables are added to its environment. It sees neither the variables that hold the token nor any whose
    value contains one of `secrets`.
    """
    hidden = all_secrets(secrets)
    environment = _without_secrets({**os.environ, **(variables or {})}, hidden)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            command,
            shell=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=complained,
            start_new_session=True,
        )
        try:
            exit_code = _wait(process, timeout, cancelled)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Outcome(exit_code, _last_line(complained, hidden) or _last_line(printed, hidden))


def _without_secrets(environment: Mapping[str, str], secrets: Collection[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in SECRET_VARIABLES and not any(secret in value for secret in secrets)
    }


def _wait(
    process: subprocess.Popen[bytes], timeout: float | None, cancelled: threading.Event | None
) -> int | None:
    ends_at = None if timeout is None else time.monotonic() + timeout
    while True:
        left = POLL_SECONDS if ends_at is None else min(POLL_SECONDS, ends_at - time.monotonic())
        try:
            return process.wait(max(left, 0))
        except subprocess.TimeoutExpired:
            if left <= 0 or (cancelled is not None and cancelled.is_set()):
                return None


def _last_line(output: IO[bytes], secrets: Collection[str]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = redacted(output.read().decode(errors="replace"), secrets).strip().splitlines()
    return lines[-1].strip()[-LINE_LENGTH:] if lines else ""
