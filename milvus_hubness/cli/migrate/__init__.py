"""The commands milvus-hubness migrate."""

from __future__ import annotations

from milvus_hubness.cli.command_line import command_line
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

app = command_line(
    "Copy a live collection into its corrected form, cut the application over to it, and back."
    "\n\nExample: milvus-hubness migrate rehearse products --bank queries.npy",
    *(plan, rehearse, run, status, verify, cutover, rollback, clean, pause, resume, set_rate, release),
)
