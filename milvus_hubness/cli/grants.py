"""The command milvus-hubness grants."""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness.basics.defaults import GrantsFor
from milvus_hubness.cli import console, options

PREFIX = "hubness_"


def grants(
    collection: Annotated[str, typer.Argument(help="Collection that is to be corrected.")],
    purpose: Annotated[
        GrantsFor,
        typer.Option(
            "--for",
            help="Who gets them: an application that reads and writes, a reader, or the user of jobs.",
        ),
    ] = "application",
    alias: Annotated[
        str | None, "Alias by which applications read it: before 2.6.9 it needs grants of its own."
    ] = None,
    newer: Annotated[bool, "For Milvus 2.4 and newer, which ask for two further rights."] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the calls of pymilvus that grant a user what a corrected collection needs on Milvus.

    Asks no server. The rights are those before, during and after a migration; a refresh grants on its
    copy what is granted on the former one. On Milvus 2.3.5 each was tried, on newer ones not yet.

    Example: milvus-hubness grants products --for application --alias live
    """
    from milvus_hubness.milvus.needed_grants import grant_calls, needed_grants

    needed = needed_grants(purpose, collection, alias=alias, newer=newer)
    named = {name: sorted(privileges) for name, privileges in needed.items()}
    calls = grant_calls(f"{PREFIX}{purpose}", needed)
    console.show_result(
        as_json, {"grants": named, "calls": calls}, lambda: console.say("\n".join(calls))
    )
