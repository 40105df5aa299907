"""The command line."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from milvus_hubness import __version__
from milvus_hubness.cli.command_line import Group, command_line
from milvus_hubness.cli.console import TERMINATED, run, say

MODULES = {
    "demo": "demo",
    "tune": "reports",
    "diagnose": "reports",
    "explain": "explain",
    "hubs": "explain",
    "match": "match",
    "enable": "enable",
    "disable": "enable",
    "adopt": "adopt",
    "refresh": "refresh",
    "bank": "refresh",
    "serve": "servers",
    "proxy": "servers",
    "status": "reports",
    "migrate": "migrate",
    "quari": "quari",
}
"""The module of each command; a module of several has a command line `app` of its own."""


class _Commands(Mapping[str, Any]):
    """The commands by name, each of which is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        module = import_module(f"{__name__}.{MODULES[name]}")
        return get_command(getattr(module, "app", None) or command_line("", getattr(module, name)))

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class _Group(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Commands()})


app = command_line(
    "Correct hubness in cross-modal search, inside Milvus.\n\nExample: milvus-hubness demo",
    completion=True,
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        say(f"milvus-hubness {__version__}")
        raise typer.Exit


@app.callback(cls=_Group)
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
    # Imports make some 250,000 objects that stay: collections among them take a tenth of the time of a short command.
    gc.set_threshold(300_000)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    run(app)
