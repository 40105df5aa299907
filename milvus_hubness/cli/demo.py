"""The command milvus-hubness demo."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from milvus_hubness.cli import console, options


@dataclass(frozen=True)
class DemoConnection(options.Connection):
    """The options that select a database, or none."""

    uri: Annotated[
        str, "Milvus server, or path of a Milvus Lite .db file. [default: a temporary file]"
    ] = ""


def demo(
    connection: DemoConnection,
    keep: Annotated[bool, "Keep the demo's collections."] = False,
    as_json: options.AsJson = False,
) -> None:
    """Correct a real retriever, built from Python's standard library, and measure before and after.

    Queries are docstrings, items are function bodies. Everything is searched in Milvus; nothing is
    downloaded.

    Example: milvus-hubness demo
    """
    # The import takes a second, which no other command should pay for.
    from milvus_hubness.demo.run import run

    if keep and not connection.uri:
        raise typer.BadParameter("--keep needs --uri: the temporary database is deleted")

    # A temporary file needs no token, no database and no certificate.
    access = connection.for_client() if connection.uri else {}
    with (
        tempfile.TemporaryDirectory(prefix="milvus-hubness-") as folder,
        console.progress_bars() as progress,
    ):
        uri = connection.uri or str(Path(folder, "demo.db"))
        # The temporary file goes with all collections in it.
        stay = keep or not connection.uri
        result = {**run(uri, keep=stay, progress=progress, **access), "kept": keep}

    console.show_result(as_json, result, lambda: _show(result))


SIZES = (
    "{queries:,} queries over {gallery:,} functions of the standard library, {dim}-d, on {server}"
)

NEXT = (
    "milvus-hubness check --items items.npy --queries past_queries.npy",
    "milvus-hubness check COLLECTION --bank past_queries.npy --uri http://localhost:19530",
)
"""The lines to type after the demo."""


def _show(result: dict[str, Any]) -> None:
    console.show_styled(("\nDocstring -> function", "bold"), ", ", SIZES.format(**result))
    console.say("{estimator} from a bank of {bank:,} other docstrings\n".format(**result))

    measures = {"as it was": result["raw"], "corrected": result["corrected"]}
    rows = [
        (name, *"{r1:.1f} {r5:.1f} {r10:.1f} {skewness:.2f}".format(**measure).split())
        for name, measure in measures.items()
    ]
    console.show_table(None, ("", "R@1", "R@5", "R@10", "skewness of N_10"), rows)

    if result["examples"]:
        console.show_styled(("\nAnswered wrongly before, rightly now", "bold"))
    for example in result["examples"]:
        console.say(f"\n  {example['question']}")
        console.show_styled("    ", ("was", "red"), f" {example['before']}")
        console.show_styled("    ", ("now", "green"), f" {example['after']}")

    if result["kept"]:
        console.say("\nKept: {collection}, {corrected_collection}".format(**result))

    console.say(f"\n{result['seconds']} s in all")
    console.show_styled(("\nNext, with your own vectors or your own collection", "bold"))
    console.say("\n".join(NEXT))
