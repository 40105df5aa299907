"""milvus-hubness refresh"""

from __future__ import annotations

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
from milvus_hubness.cli.estimator_options import Alpha, K, Method, Params, chosen_estimator
from milvus_hubness.jobs.refresh import DEFAULT_TOLERANCE
from milvus_hubness.state import require_state


def refresh(
    collection: Annotated[str, typer.Argument(help="A corrected collection.")],
    bank: Annotated[str, typer.Option(help="New reference queries: a file, or collection:NAME.")] = "",
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    target_bank: Annotated[
        str | None, typer.Option(help="New reference items, as --bank, for dualis and dbsn.")
    ] = None,
    method: Method = None,
    param: Params = None,
    k: K = None,
    alpha: Alpha = None,
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Set of biases; one of a new name is added, from --bank.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="Recompute all though nothing changed, for sn, dbsn and blend.")
    ] = False,
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
    if any(option is not None for option in (method, param, k, alpha)):
        state = require_state(store.info(collection).state_of(field), collection)
        current = state.profiles.get(profile or state.active)
        estimator = chosen_estimator(method, param, k, alpha, current.estimator if current else None)
    given = read_bank(store, bank, bank_column) if bank else None
    targets = read_bank(store, target_bank, None) if target_bank else None
    with progress_bars() as progress:
        done = jobs.refresh(
            store,
            collection,
            bank=given,
            target_bank=targets,
            estimator=estimator,
            field=field,
            profile=profile,
            refit=refit,
            tolerance=tolerance,
            progress=progress,
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
