"""The commands milvus-hubness migrate."""

from __future__ import annotations

import typer

from milvus_hubness.cli.migrate.commands import (
    clean,
    cutover,
    pause,
    plan,
    release,
    resume,
    rollback,
    set_rate,
    status,
    verify,
)
from milvus_hubness.cli.migrate.run import rehearse, run
from milvus_hubness.cli.options import add_commands

app = typer.Typer(
    help="Copy a live collection into its corrected form, cut the application over to it, and back.",
    no_args_is_help=True,
)
add_commands(app, plan, rehearse, run, status, verify, cutover, rollback, clean, pause, resume, set_rate, release)
