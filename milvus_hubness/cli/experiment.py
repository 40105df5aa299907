"""The commands milvus-hubness experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from milvus_hubness.cli import console, options
from milvus_hubness.cli.command_line import command_line

Collection = Annotated[str, typer.Argument(help="Corrected collection or its alias.")]
Name = Annotated[str | None, "Name of the experiment. [default: the latest]"]
Outcome = Annotated[str, "Kind of the outcomes that count, as the application calls them."]
Profile = Annotated[str | None, "Bias profile. [default: the active one]"]


def report(
    collection: Collection,
    connection: options.Connection,
    name: Name = None,
    outcome: Outcome = "click",
    field: options.Field = None,
    profile: Profile = None,
    output: Annotated[Path | None, "HTML page to write, with what was recorded over time."] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a test on live queries has shown so far, with a verdict that is right at any look.

    Example: milvus-hubness experiment report products
    """
    from milvus_hubness.basics.files.writing import check_writable
    from milvus_hubness.reports.experiments import experiment_page, experiment_report

    if output is not None:
        check_writable(output)
    store = connection.open()
    chosen, shown = experiment_report(
        store, collection, name, field=field, profile=profile, kind=outcome
    )
    if output is not None:
        page = experiment_page(
            store, collection, chosen, field=field, profile=profile, kind=outcome
        )
        console.write_page(output, page)

    result = {"experiment": chosen, "report": shown.to_dict()}
    console.show_result(
        as_json, result, lambda: console.say(f"Experiment {chosen} of {collection}\n\n{shown}")
    )


def names(
    collection: Collection,
    connection: options.Connection,
    field: options.Field = None,
    profile: Profile = None,
    as_json: options.AsJson = False,
) -> None:
    """List the experiments of a collection, the latest first, with their recorded answers.

    Example: milvus-hubness experiment list products
    """
    from milvus_hubness.reports.experiments import experiment_names

    counts = experiment_names(connection.open(), collection, field=field, profile=profile)
    console.show_result(as_json, {"experiments": counts}, lambda: _show_names(collection, counts))


def _show_names(collection: str, counts: Mapping[str, int]) -> None:
    if not counts:
        console.say(f"No answer of an experiment is recorded of {collection!r}.")
        return
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    console.show_table(f"Experiments of {collection}", ("name", "answers"), rows)


app = command_line(
    "Compare the corrected ranking with the raw one by what users choose."
    "\n\nExample: milvus-hubness experiment report products",
    report,
    list=names,
)
