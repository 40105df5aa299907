"""The command milvus-hubness demo."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from milvus_hubness.cli.console import out, progress_bars, show_result
from milvus_hubness.cli.options import AsJson, Database, TokenFile, read_token

if TYPE_CHECKING:
    from milvus_hubness.demo.run import DemoResult


def demo(
    uri: Annotated[
        str, typer.Option(help="Milvus server, or path of a Milvus Lite .db file. [default: a temporary file]")
    ] = "",
    db: Database = "",
    token_file: TokenFile = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's collections.")] = False,
    as_json: AsJson = False,
) -> None:
    """Correct a real retriever, built from Python's standard library, and measure before and after.

    Queries are docstrings, items are function bodies. Everything is searched in Milvus; nothing is downloaded.
    """
    # The import takes a second, which no other command should pay for.
    from milvus_hubness.demo.run import run

    if keep and not uri:
        raise typer.BadParameter("--keep needs --uri: the temporary database is deleted")
    with tempfile.TemporaryDirectory(prefix="milvus-hubness-") as folder, progress_bars() as progress:
        result = run(uri or str(Path(folder, "demo.db")), read_token(token_file), db, keep=keep, progress=progress)
    show_result(as_json, result.to_dict(), lambda: _show(result))


def _show(result: DemoResult) -> None:
    out.print(
        f"\n[bold]Docstring -> function[/bold], {result.queries:,} queries over {result.gallery:,} "
        f"functions of the standard library, {result.dim}-d, on {result.server}"
    )
    out.print(f"{result.estimator} from a bank of {result.bank:,} other docstrings\n")
    table = Table(box=None)
    for heading in ("", "R@1", "R@5", "R@10", "skewness of N_10"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, measured in (("as it was", result.raw), ("corrected", result.corrected)):
        recalls = (f"{recall:.1f}" for recall in (measured.r1, measured.r5, measured.r10))
        table.add_row(name, *recalls, f"{measured.skewness:.2f}")
    out.print(table)
    if result.examples:
        out.print("\n[bold]Answered wrongly before, rightly now[/bold]")
    for example in result.examples:
        out.print(f"\n  {example.question}", highlight=False, markup=False)
        out.print(f"    [red]was[/red] {example.before}", highlight=False)
        out.print(f"    [green]now[/green] {example.after}", highlight=False)
    if result.kept:
        out.print(f"\nKept: {result.collection}, {result.corrected_collection}")
    out.print(f"\n{result.seconds} s in all")
