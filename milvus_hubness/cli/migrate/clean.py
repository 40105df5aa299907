"""milvus-hubness migrate clean"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import AsJson, out, show_facts, show_json
from milvus_hubness.cli.migrate.facts import told
from milvus_hubness.cli.migrate.options import Connection, Name
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.stores import MilvusStore


def clean(
    name: Name,
    drop: Annotated[str, typer.Option(help="Which of the two collections to drop: the source or the copy.")],
    connection: Connection,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop for good what a migration leaves: the source after the switch, or the copy while or once more the
    application reads the source. Never what the application reads."""
    store = connection.open()
    migration = Ledger(store).find(name)
    going = _going(store, migration, drop)
    if not as_json:
        show_facts("Dropping for good" if yes else "Would be dropped for good", going)
    if going and not yes:
        if as_json or not sys.stdin.isatty():
            raise typer.BadParameter("nothing was dropped: say --yes")
        if not typer.confirm("Drop this?"):
            out.print("Nothing was dropped.")
            return
    done = jobs.clean(store, migration.target, drop=drop)
    if as_json:
        show_json({"clean": {"dropped": going, **told(done)}})


def _going(store: MilvusStore, migration: Migration, drop: str) -> dict[str, str]:
    """By its kind, what goes with the collection; nothing for one that is not of this migration."""
    going = {}
    if drop in {migration.target, migration.source_now} and store.exists(drop):
        side = "the copy" if drop == migration.target else "the source"
        going[side] = f"{drop}, {store.count(drop):,} rows"
    if drop == migration.target and migration.made_bank != "nothing":
        whole = migration.made_bank == "collection"
        going["the bank"] = (
            migration.bank_collection if whole else f"what this added to {migration.bank_collection}"
        )
    return going
