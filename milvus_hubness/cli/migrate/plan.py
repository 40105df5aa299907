"""milvus-hubness migrate plan"""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness.cli.console import AsJson, out, show_json
from milvus_hubness.cli.migrate.facts import show_plan
from milvus_hubness.cli.migrate.options import Connection, Measuring, Planning, Switching, Writers
from milvus_hubness.jobs.bank_source import WHERE_FROM


def plan(
    source: Annotated[str, typer.Argument(help="Collection to correct.")],
    planning: Planning,
    switching: Switching,
    measuring: Measuring,
    writers: Writers,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """Say what a migration would do. Reads only.

    Without --method: nnn where --k or --alpha is given; else what tune chose for this bank; else blend, the
    best choice known without labels.
    """
    if not planning.bank:
        raise typer.BadParameter(f"give the reference queries: --bank FILE ({WHERE_FROM})")
    store = connection.open()
    wanted = planning.plan(store, source, switching=switching, measuring=measuring, writers=writers)
    found = wanted.to_dict()
    if as_json:
        show_json({"plan": found})
        return
    show_plan(found)
    out.print("\nNothing was written. migrate rehearse does all of it but the switch, migrate run all of it.")
