"""milvus-hubness migrate clean"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import AsJson, out, show_facts, show_json
from milvus_hubness.cli.migrate.facts import migration_facts
from milvus_hubness.cli.migrate.options import Connection, Name, Target


def clean(
    name: Name,
    drop: Annotated[str, typer.Option(help="Which of the two collections to drop: the source or the copy.")],
    connection: Connection,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Drop for good what a migration leaves: the source after the switch, or the copy while or once more the
    application reads the source. Never what the application reads."""
    store = connection.open()
    going = jobs.would_drop(store, name, drop=drop, target=target)
    if not as_json:
        show_facts("Dropping for good" if yes else "Would be dropped for good", going)
    if going and not yes:
        if as_json or not sys.stdin.isatty():
            raise typer.BadParameter("nothing was dropped: say --yes")
        if not typer.confirm("Drop this?"):
            out.print("Nothing was dropped.")
            return
    done = jobs.clean(store, name, drop=drop, target=target)
    if as_json:
        show_json({"clean": {"dropped": going, **migration_facts(done)}})
