"""The command milvus-hubness experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness.cli import console, options
from milvus_hubness.cli.command_line import command_line


def report(
    file: Annotated[
        str,
        typer.Argument(
            help="Table of both arms: a .csv, .jsonl, .parquet, .arrow or .npz file with 'unit' (the "
            "user or session that was put into an arm), 'arm' and 'success' (true or false, or a "
            "number from 0 to 1)."
        ),
    ],
    control_arm: Annotated[
        str | None,
        "Arm that the other one is compared with. [default: the one named control or raw]",
    ] = None,
    share: Annotated[
        float, "Probability with which a unit was put into the arm that is not the control."
    ] = 0.5,
    as_json: options.AsJson = False,
) -> None:
    """Show what a test on live users has shown so far, with a verdict that is right at any look.

    Example: milvus-hubness experiment report log.csv --control-arm raw
    """
    from milvus_hubness.reports.experiment import experiment_report

    shown = experiment_report(file, control=control_arm, share=share)
    console.show_result(as_json, shown.to_dict(), lambda: console.say(str(shown)))


app = command_line(
    "Compare the corrected ranking with the raw one by what users do, from a table of your own log."
    "\n\nExample: milvus-hubness experiment report log.csv",
    report,
)
