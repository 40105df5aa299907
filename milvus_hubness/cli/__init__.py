"""The command line: one file per command."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

import typer
from pymilvus.exceptions import MilvusException

from milvus_hubness.cli import (
    demo,
    diagnose,
    enable,
    living,
    migrate,
    proxy,
    quari,
    refresh,
    serve,
    status,
    tune,
)
from milvus_hubness.cli.console import show_unexpected_error, tell_error
from milvus_hubness.errors import HubnessError, InvalidParameter

FAILURE, USAGE, TERMINATED = 1, 2, 143

app = typer.Typer(
    name="milvus-hubness",
    help="Hubness correction for cross-modal search, inside Milvus.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("tune")(tune.tune)
app.command("diagnose")(diagnose.diagnose)
app.add_typer(migrate.app, name="migrate")
app.command("enable")(enable.enable)
app.command("disable")(enable.disable)
app.command("refresh")(refresh.refresh)
app.command("living")(living.living)
app.add_typer(quari.app, name="quari")
app.command("serve")(serve.serve)
app.command("proxy")(proxy.proxy)
app.command("status")(status.status)


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated. SIGTERM cleans up as an
    error does."""
    for library in ("pymilvus", "milvus_lite", "grpc"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except HubnessError as error:
        tell_error(error, as_json="--json" in sys.argv)
        sys.exit(USAGE if isinstance(error, InvalidParameter) else FAILURE)
    except MilvusException as error:
        tell_error(error, as_json="--json" in sys.argv)
        sys.exit(FAILURE)
    except Exception as error:
        show_unexpected_error(error, as_json="--json" in sys.argv)
        sys.exit(FAILURE)


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)
