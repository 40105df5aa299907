"""milvus-hubness quari: one file per command."""

from __future__ import annotations

import typer

from milvus_hubness.cli.quari.evaluate import evaluate
from milvus_hubness.cli.quari.show import show
from milvus_hubness.cli.quari.train import train

app = typer.Typer(
    help="Train a network that re-ranks corrected candidates by each query's own view of them, and judge it.",
    no_args_is_help=True,
)
app.command("train")(train)
app.command("show")(show)
app.command("eval")(evaluate)
