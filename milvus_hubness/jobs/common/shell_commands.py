"""Shell commands of the user: hooks, and the load check that pauses or stops a migration."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from milvus_hubness.basics.logs import log
from milvus_hubness.errors import (
    SECRET_VARIABLES,
    CriticalLoad,
    HookFailed,
    InvalidParameter,
    all_secrets,
    redacted,
)
from milvus_hubness.jobs.common.progress import EVENT_NAMES, Event, Events, Throttle, polling

POLL_SECONDS = 0.1
"""Seconds between two looks whether a command is cancelled."""

TAIL_BYTES = 65_536
"""How much of the end of an output is searched for its last line."""

LINE_LENGTH = 500
"""Most characters of that line in a message."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command."""

    exit_code: int | None
    """Negative for a signal; None if the command took too long or was cancelled."""
    last_line: str
    """The last line of its standard error, or else of its standard output, with secrets replaced by
    ***.
    """

    @property
    def complaint(self) -> str:
        """How the command failed, in words."""
        how = "did not end in time" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{how}: {self.last_line}" if self.last_line else how


def run_command(
    command: str,
    *,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
    cancelled: threading.Event | None = None,
) -> Outcome:
    """Run `command` through the shell; wait at most `timeout` seconds or until `cancelled` is set.
    variables: added to its environment, which lacks the token and all variables whose value
    contains a secret.
    """
    secrets = all_secrets()
    environment = {
        name: value
        for name, value in {**os.environ, **(variables or {})}.items()
        if name not in SECRET_VARIABLES and not any(secret in value for secret in secrets)
    }
    # Files, not pipes: nobody reads while the command runs, and a process that it leaves in the
    # background would hold a pipe open.
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
                # The command has a session of its own, so its children end with it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        return Outcome(exit_code, _last_line(complained) or _last_line(printed))


def _wait(
    process: subprocess.Popen[bytes], timeout: float | None, cancelled: threading.Event | None
) -> int | None:
    """Return the exit code; None if the process did not end in time, or was cancelled."""
    ends_at = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        seconds = min(POLL_SECONDS, ends_at - time.monotonic())
        try:
            return process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            if seconds <= 0 or (cancelled is not None and cancelled.is_set()):
                return None


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = redacted(output.read().decode(errors="replace")).strip().splitlines()
    return lines[-1].strip()[-LINE_LENGTH:] if lines else ""


class Hooks:
    """A listener that runs the user's commands, lists by event name.

    A command gets $MILVUS_HUBNESS_EVENT, and each fact in $MILVUS_HUBNESS_<FACT>: None as an empty
    value, data as JSON. It is killed, and has failed, when `cancelled` is set. Raises
    InvalidParameter for unknown events.
    """

    def __init__(
        self, commands: Mapping[str, Sequence[str]], *, cancelled: threading.Event | None = None
    ) -> None:
        if unknown := sorted(commands.keys() - set(EVENT_NAMES)):
            names = ", ".join(EVENT_NAMES)
            raise InvalidParameter(
                f"unknown event {', '.join(map(repr, unknown))}: use one of {names}"
            )

        self._commands = {name: tuple(listed) for name, listed in commands.items()}
        self._cancelled = cancelled

    def __call__(self, event: Event) -> None:
        """Run the commands of the event.

        Raises HookFailed for a before-* event; other failures are logged.
        """
        for command in self._commands.get(event.name, ()):
            outcome = run_command(
                command, variables=self._variables(event), cancelled=self._cancelled
            )
            if outcome.exit_code == 0:
                continue

            failed = f"{event.name} hook {redacted(command)!r} failed, {outcome.complaint}"
            if event.name.startswith("before-"):
                # The step has not happened yet, and must not happen.
                raise HookFailed(failed)

            log.warning(failed)

    def _variables(self, event: Event) -> dict[str, str]:
        """Return what a command gets in its environment."""
        facts: dict[str, Any] = {**event.to_dict()["facts"], "event": event.name}
        return {
            f"MILVUS_HUBNESS_{name.upper().replace('-', '_')}": redacted(_text(fact))
            for name, fact in facts.items()
        }


def parse_hooks(specs: Iterable[str]) -> dict[str, list[str]]:
    """Return lists of commands by event name, from specs such as "before-copy=./backup.sh".

    Raises InvalidParameter.
    """
    commands: dict[str, list[str]] = {}
    for spec in specs:
        name, _, command = spec.partition("=")
        if not command.strip():
            raise InvalidParameter(f"the hook must be EVENT=COMMAND, not {spec!r}")

        commands.setdefault(name.strip(), []).append(command.strip())
    return commands


def _text(fact: Any) -> str:
    if fact is None:
        return ""
    return fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)


MAX_LOAD = "max-load"
"""The reason of a pause for the load; other reasons are names of operators."""

TIMEOUT_SECONDS = 30.0


@contextmanager
def watching_load(
    throttle: Throttle,
    events: Events,
    *,
    max_load: str | None = None,
    critical_load: str | None = None,
    every: float = 5.0,
) -> Iterator[None]:
    """Run two shell commands of the user before the body of `with`, and every `every` seconds
    within it. max_load: `throttle` is paused while it fails. critical_load: once it fails,
    `throttle` is stopped with CriticalLoad. To fail is to exit with a code other than 0, or to take
    more than 30 s.
    """
    over = threading.Event()

    def run(command: str | None) -> Outcome | None:
        outcome = run_command(command, timeout=TIMEOUT_SECONDS, cancelled=over) if command else None
        return None if over.is_set() else outcome

    def check() -> None:
        critical = run(critical_load)
        if critical and critical_load and critical.exit_code != 0:
            command = redacted(critical_load)
            throttle.stop(CriticalLoad(f"the load is critical: {command!r}, {critical.complaint}"))

        if outcome := run(max_load):
            if outcome.exit_code == 0:
                if throttle.resume(MAX_LOAD):
                    events.report("resumed", reason=MAX_LOAD)
            elif throttle.pause(MAX_LOAD):
                events.report("throttled", reason=MAX_LOAD, detail=outcome.complaint)

    def poll() -> None:
        try:
            check()
        except Exception as error:
            throttle.stop(error)

    check()
    try:
        with polling(poll, every, "milvus-hubness-load"):
            try:
                yield
            finally:
                # A command that still runs is cancelled, so that the end of the polling is not
                # delayed by it; its outcome no longer counts.
                over.set()
    finally:
        throttle.resume(MAX_LOAD)
