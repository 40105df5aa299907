"""What the quari commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PairsFile = Annotated[
    str,
    typer.Option(
        "--pairs",
        help="Labelled pairs: .npz, .parquet or .arrow with 'query' and either 'item', the vector of the "
        "right answer, or with --collection 'key', of its row.",
        show_default=False,
    ),
]
Collection = Annotated[
    str | None,
    typer.Option(help="Collection, corrected or not, whose rows are the gallery; without it the items are."),
]
Field = Annotated[str | None, typer.Option(help="Vector field, where there are several.")]
Encoder = Annotated[
    str | None,
    typer.Option(
        help="Name and version of what made the vectors; a network is for the one it was trained on."
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:<number>.")]
NetworkFile = Annotated[Path, typer.Argument(help="The network, as quari train wrote it.")]
