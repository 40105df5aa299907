"""The commands milvus-hubness migrate."""

from __future__ import annotations

import typer

from milvus_hubness.cli.migrate.commands import clean, cutover, plan, rollback, status, verify
from milvus_hubness.cli.migrate.options import spread
from milvus_hubness.cli.migrate.run import rehearse, run
from milvus_hubness.cli.migrate.session import pause, release, resume, set_rate

app = typer.Typer(
    help="Copy a live collection into its corrected form, let the application read the copy, and back.",
    no_args_is_help=True,
)
app.command("plan")(spread(plan))
app.command("rehearse")(spread(rehearse))
app.command("run")(spread(run))
app.command("status")(spread(status))
app.command("verify")(spread(verify))
app.command("cutover")(spread(cutover))
app.command("rollback")(spread(rollback))
app.command("clean")(spread(clean))
app.command("pause")(pause)
app.command("resume")(resume)
app.command("set-rate")(set_rate)
app.command("release")(release)
