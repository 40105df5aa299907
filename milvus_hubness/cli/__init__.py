"""The command line."""

from __future__ import annotations

import logging
import signal
from typing import Annotated, Any

import typer

from milvus_hubness import __version__
from milvus_hubness.cli import demo, enable, migrate, quari, refresh, reports, servers
from milvus_hubness.cli.console import run

TERMINATED = 143


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"milvus-hubness {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
]

app = typer.Typer(
    name="milvus-hubness",
    help="Hubness correction for cross-modal search, inside Milvus.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("tune")(reports.tune)
app.command("diagnose")(reports.diagnose)
app.add_typer(migrate.app, name="migrate")
app.command("enable")(enable.enable)
app.command("disable")(enable.disable)
app.command("refresh")(refresh.refresh)
app.command("bank")(refresh.bank)
app.add_typer(quari.app, name="quari")
app.command("serve")(servers.serve)
app.command("proxy")(servers.proxy)
app.command("status")(reports.status)


@app.callback()
def _options(version: Version = False) -> None:
    """Show the version where that is asked for."""


def main() -> None:
    """Run the command line. SIGTERM cleans up as an error does, and exits with 143."""
    for library in ("pymilvus", "milvus_lite", "grpc"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    signal.signal(signal.SIGTERM, _terminate)
    run(app)


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)
