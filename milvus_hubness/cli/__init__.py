"""The command line."""

from __future__ import annotations

import logging
import signal
from typing import Annotated, Any

import typer

from milvus_hubness import __version__
from milvus_hubness.cli import demo, enable, migrate, quari, refresh, reports, servers
from milvus_hubness.cli.console import TERMINATED, run
from milvus_hubness.cli.options import add_commands

app = typer.Typer(
    name="milvus-hubness",
    help="Hubness correction for cross-modal search, inside Milvus.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_commands(app, demo.demo, reports.tune, reports.diagnose, enable.enable, enable.disable, refresh.refresh)
add_commands(app, refresh.bank, servers.serve, servers.proxy, reports.status)
app.add_typer(migrate.app, name="migrate")
app.add_typer(quari.app, name="quari")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"milvus-hubness {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. SIGTERM cleans up as an error does, and exits with 143."""
    for library in ("pymilvus", "milvus_lite", "grpc"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    signal.signal(signal.SIGTERM, _terminate)
    run(app)


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)
