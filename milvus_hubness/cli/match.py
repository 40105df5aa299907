"""The command milvus-hubness match."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.files.writing import check_writable, expect_different, whole_file
from milvus_hubness.cli import console, options

if TYPE_CHECKING:
    from milvus_hubness.milvus.client.matching import Matches

SUFFIXES = (".parquet", ".npz")
"""The formats of the file of matches."""


@dataclass(frozen=True)
class Matching:
    """The options of `HubnessClient.match` of the same names."""

    limit: Annotated[int, "Rows for each query.", {"min": 1}] = 10
    candidates: Annotated[
        int, "Rows that the index finds for each query, by raw score.", {"min": 1}
    ] = 200
    with_bank: Annotated[
        bool, "The stored bank joins the queries, if these ask for some of the rows only."
    ] = False
    one_to_one: Annotated[bool, "Give each row to at most one query."] = False
    filter: Annotated[str, "Match only rows of this filter, in Milvus's syntax."] = ""


def match(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    queries: Annotated[str, "Queries to match, in the forms of --bank."],
    out: Annotated[
        Path, "File to write: .parquet or .npz. Its parts are in OUT.parts until it is complete."
    ],
    connection: options.Connection,
    matching: Matching,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Match many queries at once with the rows of a collection, and write the matches to a file.

    The queries are balanced against all rows (query-aware Sinkhorn). An interrupted run continues
    where it stopped.

    Example: milvus-hubness match products --queries titles.parquet --out matches.parquet
    """
    from milvus_hubness.jobs.common.inputs import read_bank
    from milvus_hubness.milvus.client.sync import HubnessClient

    if out.suffix not in SUFFIXES:
        raise typer.BadParameter(f"--out must end in {' or '.join(SUFFIXES)}, not {out.name!r}")

    # Before hours of work, not after them.
    expect_different([("--queries", Path(queries)), ("--out", out)])
    check_writable(out)
    folder = out.with_name(f"{out.name}.parts")
    bank = read_bank(connection.open(), queries)
    client = HubnessClient(connection.uri, **connection.for_client())

    with console.progress_bars() as progress:
        matches = client.match(
            collection,
            bank,
            **vars(matching),
            anns_field=field,
            folder=folder,
            progress=progress,
        )
    client.close()

    # The folder goes last: until the file is complete, an interrupted run continues from it.
    _write(matches, out)
    shutil.rmtree(folder)

    result = {
        "collection": collection,
        "out": str(out),
        "queries": len(matches),
        "matches": len(matches.columns["query"]),
        "unmatched": matches.unmatched,
        "warnings": matches.warnings,
        **matches.facts,
    }
    console.show_result(as_json, {"match": result}, lambda: _show(matches, collection, out))


def _write(matches: Matches, out: Path) -> None:
    """Write the columns of the matches to a file. Raises UnreadableFile."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns: dict[str, Any] = dict(matches.columns)
    with whole_file(out) as file:
        if out.suffix == ".parquet":
            parquet.write_table(pa.table(columns), file.buffer)
        else:
            # An array of objects would be pickled, which readers should not have to trust.
            np.savez(file.buffer, **{**columns, "id": np.array(columns["id"].tolist())})


def _show(matches: Matches, collection: str, out: Path) -> None:
    facts = {
        "queries": f"{len(matches):,} against {matches.facts['items']:,} rows",
        "candidates": f"{matches.facts['pairs']:,} pairs",
        "without a row": f"{len(matches.unmatched):,} queries" if matches.unmatched else None,
        "written": f"{len(matches.columns['query']):,} matches to {out}",
    }
    console.show_facts(f"Matched with {collection}", facts)
    for warning in matches.warnings:
        console.say(f"milvus-hubness: warning: {warning}", to_stderr=True)
