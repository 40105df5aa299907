"""milvus-hubness migrate: one file per command."""

from __future__ import annotations

import typer

from milvus_hubness.cli.migrate.clean import clean
from milvus_hubness.cli.migrate.cutover import cutover
from milvus_hubness.cli.migrate.plan import plan
from milvus_hubness.cli.migrate.rehearse import rehearse
from milvus_hubness.cli.migrate.rollback import rollback
from milvus_hubness.cli.migrate.run import run
from milvus_hubness.cli.migrate.spread import spread
from milvus_hubness.cli.migrate.status import status
from milvus_hubness.cli.migrate.steer import pause, release, resume, set_rate
from milvus_hubness.cli.migrate.verify import verify

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
