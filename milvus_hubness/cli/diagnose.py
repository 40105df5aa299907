"""milvus-hubness diagnose"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    check_writable,
    open_store,
    progress_bars,
    read_bank,
    show_facts,
    show_json,
    write_page,
)
from milvus_hubness.cli.estimator_options import Alpha, K, Method, Params, chosen_estimator
from milvus_hubness.cli.pairs import read_pairs
from milvus_hubness.quality.diagnosis import Diagnosis
from milvus_hubness.quality.report_page import render


def diagnose(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    queries: Annotated[
        str, typer.Option(help="Queries to ask, none of them in the bank: a file, or collection:NAME.")
    ] = "",
    queries_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Instead of --queries: .npz, .parquet or .arrow with 'query' and 'key' of its row."
        ),
    ] = None,
    bank: Annotated[
        str, typer.Option(help="Reference queries, where the collection is not corrected yet.")
    ] = "",
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the bank's queries.")
    ] = None,
    method: Method = None,
    param: Params = None,
    k: K = None,
    alpha: Alpha = None,
    field: Annotated[str | None, typer.Option(help="Vector field, where there are several.")] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("hubness.html"),
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Write one page that shows the hubs of a collection, and what correction does or would do about them."""
    if bool(queries) == bool(pairs):
        raise typer.BadParameter("give either --queries or --pairs")
    check_writable(output)
    estimator = chosen_estimator(method, param, k, alpha)
    store = open_store(uri, db, token_file)
    asked, answers = read_pairs(pairs) if pairs else (read_bank(store, queries, queries_column), None)
    with progress_bars() as progress:
        found = jobs.diagnose(
            store,
            collection,
            asked,
            bank=read_bank(store, bank, bank_column) if bank else None,
            estimator=estimator,
            field=field,
            answers=answers,
            progress=progress,
        )
    write_page(output, render(found))
    if as_json:
        show_json({"diagnosis": found.to_dict(), "page": str(output)})
    else:
        _show(found, output)


def _show(found: Diagnosis, page: Path) -> None:
    before, after, k = found.before, found.after, found.k

    def change(name: str, style: str) -> str:
        return f"{getattr(before, name):{style}} -> {getattr(after, name):{style}}"

    facts = {
        "queries": f"{found.n_queries:,} over {found.n_items:,} items",
        "strength": f"{found.strength:g}",
        f"skewness of N_{k}": change("skewness", ".2f"),
        "largest hub": f"{change('largest', ',')} of {found.n_queries:,} queries",
        "excess answers taken by hubs": change("robin_hood", ".1%"),
        "items never found": f"{found.antihubs.before:,} -> {found.antihubs.after:,}",
    }
    if found.gain is not None and found.retrieval_before and found.retrieval_after:
        gain = found.gain
        facts["R@1"] = (
            f"{found.retrieval_before['R@1']:.1%} -> {found.retrieval_after['R@1']:.1%} "
            f"({100 * gain.estimate:+.1f} points, 95% interval {100 * gain.low:+.1f} to "
            f"{100 * gain.high:+.1f})"
        )
    facts["page"] = str(page)
    show_facts(f"{found.title}, without and with correction", facts)
