"""The commands milvus-hubness migrate."""

from __future__ import annotations

from milvus_hubness.cli.command_line import command_line
from milvus_hubness.cli.migrate import commands
from milvus_hubness.cli.migrate.run import run
from milvus_hubness.cli.migrate.status import status

# In the order in which they are used, which is that of the help.
app = command_line(
    "Copy a live collection into its corrected form, cut the application over to it, and back."
    "\n\nExample: milvus-hubness migrate run products --bank queries.npy --plan",
    run,
    status,
    commands.verify,
    commands.cutover,
    commands.rollback,
    commands.clean,
)
