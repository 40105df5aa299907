"""Commands that a migration runs at its steps."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from milvus_hubness.errors import HookFailed, InvalidParameter
from milvus_hubness.jobs.migration.commands import redacted, run_command
from milvus_hubness.jobs.migration.events import EVENT_NAMES, Event

log = logging.getLogger("milvus_hubness")


class Hooks:
    """A listener that runs the commands for an event's name, one after the other, through the shell.

    They find the name in $MILVUS_HUBNESS_EVENT and each fact in $MILVUS_HUBNESS_<FACT>, as JSON where it is
    neither a text nor a number, and nothing where it is None. commands: by the name of the event. secrets are
    kept from the commands, and out of what is told of them. timeout in seconds, None for none; a command that
    takes longer is killed and has failed, and so is one that runs when `cancelled` is set. Raises
    InvalidParameter for events that do not exist.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        secrets: Collection[str] = (),
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        _validate_names(commands)
        self._commands = {name: tuple(each) for name, each in commands.items()}
        self._secrets = tuple(secrets)
        self._timeout = timeout
        self._cancelled = cancelled

    def __call__(self, event: Event) -> None:
        """Raises HookFailed where a command of a before-* event fails. Failures of others are logged."""
        for command in self._commands.get(event.name, ()):
            outcome = run_command(
                command,
                variables=self._variables(event),
                secrets=self._secrets,
                timeout=self._timeout,
                cancelled=self._cancelled,
            )
            if outcome.exit_code == 0:
                continue
            failed = f"{event.name} hook {redacted(command, self._secrets)!r} failed, {outcome.complaint}"
            if event.name.startswith("before-"):
                raise HookFailed(failed)
            log.warning(failed)

    def _variables(self, event: Event) -> dict[str, str]:
        facts: dict[str, Any] = {**event.to_dict()["facts"], "event": event.name}
        return {
            f"MILVUS_HUBNESS_{name.upper().replace('-', '_')}": redacted(_text(fact), self._secrets)
            for name, fact in facts.items()
        }


def parse_hooks(specs: Iterable[str]) -> dict[str, list[str]]:
    """Commands by the name of their event, from specs such as "before-copy=./backup.sh". Raises
    InvalidParameter for events that do not exist, and specs of another form."""
    commands: dict[str, list[str]] = {}
    for spec in specs:
        name, _, command = spec.partition("=")
        if not command.strip():
            raise InvalidParameter(f"hook {spec!r} is not of the form EVENT=COMMAND")
        commands.setdefault(name.strip(), []).append(command.strip())
    _validate_names(commands)
    return commands


def _validate_names(names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(EVENT_NAMES)):
        raise InvalidParameter(
            f"no event {', '.join(map(repr, unknown))} to hook on: there are {', '.join(EVENT_NAMES)}"
        )


def _text(fact: Any) -> str:
    if fact is None:
        return ""
    return fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)
