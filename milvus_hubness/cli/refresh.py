"""milvus-hubness refresh"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    open_store,
    progress_bars,
    read_bank,
    show_facts,
    show_json,
)
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import NNN, from_dict
from milvus_hubness.jobs.refresh import DEFAULT_TOLERANCE
from milvus_hubness.state import require_state


def refresh(
    collection: Annotated[str, typer.Argument(help="A corrected collection.")],
    bank: Annotated[str, typer.Option(help="New reference queries: a file, or collection:NAME.")] = "",
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    k: Annotated[int | None, typer.Option(help="NNN: change how many bank queries count.")] = None,
    alpha: Annotated[float | None, typer.Option(help="NNN: change the share that is subtracted.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="Leave rows alone whose bias moved by no more than this.")
    ] = DEFAULT_TOLERANCE,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Recompute biases: of rows that have none, and of all when the bank or the parameters changed."""
    store = open_store(uri, db, token_file)
    estimator = None
    if k is not None or alpha is not None:
        state = require_state(store.info(collection).state, collection)
        current = from_dict(state.profile.estimator)
        if not isinstance(current, NNN):
            raise InvalidParameter(
                f"--k and --alpha are NNN's, {collection!r} uses {state.profile.estimator['name']}"
            )
        estimator = replace(
            current, k=current.k if k is None else k, alpha=current.alpha if alpha is None else alpha
        )
    given = read_bank(store, bank, bank_column) if bank else None
    with progress_bars() as progress:
        done = jobs.refresh(
            store, collection, bank=given, estimator=estimator, tolerance=tolerance, progress=progress
        )
    if as_json:
        show_json({"refresh": done.to_dict()})
        return
    show_facts(
        f"Refreshed {done.collection}",
        {
            "mode": f"{done.mode} ({done.reason})",
            "rows looked at": f"{done.scanned:,}",
            "rows written": f"{done.written:,}",
            "epoch": done.epoch,
            "took": f"{done.seconds} s",
        },
    )
