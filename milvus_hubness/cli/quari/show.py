"""milvus-hubness quari show"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milvus_hubness.charts import learning_curves
from milvus_hubness.cli.console import AsJson, show_facts, show_json, write_page
from milvus_hubness.cli.quari.options import NetworkFile
from milvus_hubness.cli.quari.train import in_words, training_facts
from milvus_hubness.quari import Checkpoint


def show(
    network: NetworkFile,
    plot: Annotated[Path | None, typer.Option(help="Write its learning curves there, as .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a network is: its sizes, what it was trained on, and how that went."""
    kept = Checkpoint.load(network)
    if plot is not None:
        write_page(plot, learning_curves(kept.history, kept.best_epoch))
    found = {**training_facts(kept), "network": str(network), "curves": str(plot) if plot else None}
    if as_json:
        show_json({"quari": found})
    else:
        show_facts(f"Trained on {kept.pairs} pairs", in_words(found))
