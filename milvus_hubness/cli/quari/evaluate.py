"""milvus-hubness quari eval"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    open_store,
    out,
    progress_bars,
    show_json,
)
from milvus_hubness.cli.quari.options import Collection, Device, Encoder, Field, NetworkFile, PairsFile
from milvus_hubness.jobs.quari import read_labelled
from milvus_hubness.quari import QuariReranker


def evaluate(
    network: NetworkFile,
    pairs: PairsFile,
    collection: Collection = None,
    field: Field = None,
    candidates: Annotated[int, typer.Option(help="How many items of the search are re-ranked.")] = 1000,
    correction: Annotated[
        float, typer.Option(help="What of the bias is subtracted from re-ranked scores too.")
    ] = 0.0,
    encoder: Encoder = None,
    device: Device = "auto",
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Judge a network on labelled pairs that it was not trained on: the search as it is, corrected where the
    collection carries biases, and re-ranked."""
    reranker = QuariReranker.load(
        network, encoder=encoder, candidates=candidates, correction=correction, device=device
    )
    with progress_bars() as progress:
        labelled = read_labelled(
            pairs,
            collection,
            open_store=partial(open_store, uri, db, token_file),
            field=field,
            progress=progress,
        )
        found = labelled.evaluate(reranker).to_dict()
    if as_json:
        show_json({"quari": found})
        return
    table = Table(box=None, title=f"{found['queries']} queries", title_justify="left")
    measures = list(found["raw"])
    for heading in ("", *measures):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("raw", "corrected", "reranked"):
        if name in found:
            values = found[name]
            table.add_row(name, *(_shown(measure, values[measure]) for measure in measures))
    out.print(table)
    for name, gain in found["gain"].items():
        low, high = f"{100 * gain['low']:+.1f}", f"{100 * gain['high']:+.1f}"
        out.print(
            f"R@1 against {name}: {100 * gain['estimate']:+.1f} points ({low} … {high})", highlight=False
        )
    out.print(f"{found['milliseconds']:.1f} ms a query for {found['candidates']} candidates", highlight=False)


def _shown(measure: str, value: float) -> str:
    return f"{value:.1f}" if measure in ("MdR", "MnR") else f"{100 * value:.1f}"
