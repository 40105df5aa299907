"""The command line."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar

import typer

from milvus_hubness import __version__
from milvus_hubness.cli.command_line import Group, as_command, command_line
from milvus_hubness.cli.console import TERMINATED, run, say

COMMANDS = {
    "demo": "milvus_hubness.cli.demo:demo",
    "check": "milvus_hubness.cli.check:check",
    "tune": "milvus_hubness.cli.tune:tune",
    "status": "milvus_hubness.cli.status:status",
    "hubs": "milvus_hubness.cli.hubs:hubs",
    "grants": "milvus_hubness.cli.grants:grants",
    "experiment": "milvus_hubness.cli.experiment:app",
    "migrate": "milvus_hubness.cli.migrate:app",
    "enable": "milvus_hubness.cli.enable:enable",
    "disable": "milvus_hubness.cli.enable:disable",
    "match": "milvus_hubness.cli.match:match",
    "quari": "milvus_hubness.cli.quari:app",
    "refresh": "milvus_hubness.cli.refresh:refresh",
    "bank": "milvus_hubness.cli.bank:app",
    "adopt": "milvus_hubness.cli.adopt:adopt",
    "sweep": "milvus_hubness.cli.sweep:sweep",
    "serve": "milvus_hubness.cli.servers:serve",
    "proxy": "milvus_hubness.cli.servers:proxy",
}
"""The function or the command line of each command, as module:name, in the order of the help."""

HEADINGS = {
    "Look": (
        "demo",
        "check",
        "tune",
        "status",
        "hubs",
        "grants",
        "experiment",
    ),
    "Correct": ("migrate", "enable", "disable", "match", "quari"),
    "Keep": ("refresh", "bank", "adopt", "sweep"),
    "Serve": ("serve", "proxy"),
}
"""What people do with the commands: the headings of the help. Look writes no row."""


class _LazyCommands(Mapping[str, Any]):
    """COMMANDS as click's commands.

    Each is imported when it is looked up, so that a command does not wait for the imports of the
    others.
    """

    def __getitem__(self, name: str) -> Any:
        return as_command(resolve_name(COMMANDS[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _LazyGroup(Group):
    """The group of COMMANDS. Typer gives it none, since none is registered with `app`."""

    headings: ClassVar[Mapping[str, str]] = {
        name: heading for heading, names in HEADINGS.items() for name in names
    }

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = _LazyCommands()
        super().__init__(**settings)


app = command_line(
    "Correct hubness in cross-modal search, inside the database.\n\nExample: milvus-hubness demo",
    completion=True,
)


def _show_version(is_requested: bool) -> None:
    # Typer calls it with False too, when the option is absent.
    if is_requested:
        say(f"milvus-hubness {__version__}")
        raise typer.Exit


@app.callback(cls=_LazyGroup)
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. SIGTERM cleans up as an error does, and exits with 143."""
    # Imports make some 250,000 objects that stay: collections among them take a tenth of the time
    # of a short command.
    gc.set_threshold(300_000)
    # By default, SIGTERM ends Python without `finally` blocks, and leases and files would stay.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    run(app)
