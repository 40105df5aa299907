"""milvus-hubness tune"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from milvus_hubness import jobs
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    open_store,
    out,
    progress_bars,
    read_bank,
    show_json,
)
from milvus_hubness.cli.estimator_options import describe, rounded_shares
from milvus_hubness.cli.pairs import read_pairs

SHOWN = 12
BANK_ALONE = (
    "Told of the bank alone, this does not notice a bank of items instead of queries, or of one topic: "
    "give --queries or --pairs to be sure."
)


def tune(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: Annotated[
        str,
        typer.Option(help="Reference queries: a file, or collection:NAME. [default: its own]"),
    ] = "",
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    target_bank: Annotated[
        str | None, typer.Option(help="Reference items, as --bank, to try dualis and dbsn too.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Labelled pairs: .npz, .parquet or .arrow with 'query' and 'key' of the right row."
        ),
    ] = None,
    queries: Annotated[
        str,
        typer.Option(
            help="Instead of --pairs: queries as they are asked, not in the bank; a file, or collection:NAME."
        ),
    ] = "",
    field: Annotated[str | None, typer.Option(help="Vector field, where there are several.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of samples and splits.")] = 0,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Should this collection be corrected, and with what? Tries every method on its rows; migrate and refresh
    follow the finding. With labelled pairs R@1 decides, without them how evenly answers fall on the items."""
    if queries and pairs:
        raise typer.BadParameter("give --queries or --pairs, not both")
    store = open_store(uri, db, token_file)
    asked, answers = read_pairs(pairs) if pairs else (None, None)
    if queries:
        asked = read_bank(store, queries, None)
    with progress_bars() as progress:
        found = jobs.tune(
            store,
            collection,
            read_bank(store, bank, bank_column) if bank else None,
            field=field,
            queries=asked,
            answers=answers,
            target_bank=read_bank(store, target_bank, None) if target_bank else None,
            seed=seed,
            progress=progress,
        ).to_dict()
    if as_json:
        show_json({"tune": found})
    else:
        _show(collection, found)
        if asked is None:
            out.print(BANK_ALONE, highlight=False, markup=False)


def describe_row(row: dict[str, Any]) -> str:
    """Return the name of a trial's method."""
    return describe(row["estimator"]) if row["estimator"] else "as it is"


def _shares(choice: dict[str, Any] | None) -> dict[str, str]:
    """The share of each method in the choice, by its name; they add up to 100%."""
    if choice is None:
        return {}
    if "estimators" not in choice:
        return {describe(choice): "100%"}
    shares = rounded_shares(choice["weights"])
    return {describe(part): f"{share}%" for part, share in zip(choice["estimators"], shares, strict=True)}


def _show(collection: str, found: dict[str, Any]) -> None:
    table = Table(box=None, title=f"The best of {len(found['rows']) - 1} trials", title_justify="left")
    shares = _shares(found["choice"])
    left = dict(shares)
    for heading in ("method", "strength", "R@1", "gain, 95%", "unevenness", "share"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for number, row in enumerate(found["rows"]):
        gain, share = row["gain"], left.pop(describe_row(row), "")
        if number > SHOWN and not share:
            continue
        table.add_row(
            describe_row(row),
            f"{row['strength']:.2f}",
            "" if row["r1"] is None else f"{100 * row['r1']:.1f}",
            "" if gain is None else f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}",
            f"{row['unevenness']:.3f}",
            share,
        )
    out.print(table)
    out.print(f"\n[bold]{collection}: {found['verdict']}[/bold]")
    if found["choice"]:
        mixed = "the mean of the methods with a share, " if len(shares) > 1 else ""
        chosen = f"{mixed}{describe(found['choice'])}"
        out.print(f"{chosen} at strength {found['strength']:.2f}", highlight=False, markup=False)
    out.print(found["reason"], highlight=False, markup=False)
