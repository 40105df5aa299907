"""milvus-hubness refresh"""

from __future__ import annotations

from typing import Annotated

import typer

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
from milvus_hubness.cli.pairs import read_pairs
from milvus_hubness.errors import LeaseHeld
from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.migration.steering import CLIENT_TTL
from milvus_hubness.jobs.rebuild import REBUILD_SHARE
from milvus_hubness.jobs.refresh import DEFAULT_TOLERANCE
from milvus_hubness.jobs.sample import Labels
from milvus_hubness.jobs.upkeep import Duty, Kept, Live, keep_up
from milvus_hubness.state import require_state

REFUSED = 3


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
    revert: Annotated[
        bool, typer.Option("--revert", help="To the bank and the parameters before the last full refresh.")
    ] = False,
    pairs: Annotated[
        str | None,
        typer.Option(help="Labelled pairs that the new biases must not make worse, as tune takes them."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Adopt new biases even where they are judged worse.")
    ] = False,
    live: Annotated[Live, typer.Option(help="When sampled queries are taken into An online bank.")] = "never",
    refit: Annotated[
        bool, typer.Option("--refit", help="Recompute all though nothing changed, for sn, dbsn and blend.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="Leave rows alone whose bias moved by no more than this.")
    ] = DEFAULT_TOLERANCE,
    rebuild_share: Annotated[
        float,
        typer.Option(help="From this share of 50,000 rows or more on, a copy takes over the alias instead."),
    ] = REBUILD_SHARE,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what would be done, and why; nothing is written.")
    ] = False,
    rows_per_second: Annotated[
        float | None, typer.Option(help="Write no faster than this.", show_default=False)
    ] = None,
    client_ttl: Annotated[
        float,
        typer.Option(help="Seconds in which every client of ours hears of it: their longest state_ttl."),
    ] = CLIENT_TTL,
    once: Annotated[
        bool,
        typer.Option("--once", help="For CronJobs: where another process is at it, say so and exit with 0."),
    ] = False,
    engine: Annotated[
        Engine,
        typer.Option(
            help="server: nnn and csls by the database's own search over the bank; ray: by the workers of "
            "the Ray cluster of $RAY_ADDRESS, or of all local cores."
        ),
    ] = "local",
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Recompute biases: of rows that have none, and of all when the bank or the parameters changed.

    Exits with 3 where the new ones are judged worse and were not adopted."""
    if (revert or refit) and live != "never":
        raise typer.BadParameter("--live takes neither --revert nor --refit")
    store = open_store(uri, db, token_file)
    estimator = None
    if any(option is not None for option in (method, param, k, alpha)):
        state = require_state(store.info(collection).state_of(field), collection)
        current = state.profiles.get(profile or state.active)
        estimator = chosen_estimator(method, param, k, alpha, current.estimator if current else None)
    labels = None
    if pairs:
        queries, keys = read_pairs(pairs)
        labels = Labels(queries.vectors, [[key] for key in keys])
    duty = Duty(
        collection,
        field=field,
        profile=profile,
        bank=read_bank(store, bank, bank_column) if bank else None,
        target_bank=read_bank(store, target_bank, None) if target_bank else None,
        estimator=estimator,
        live=live,
        labels=labels,
        force=force,
        refit=refit,
        revert=revert,
        rebuild_share=rebuild_share,
        plan=plan,
        tolerance=tolerance,
        client_ttl=client_ttl,
        rows_per_second=rows_per_second,
        engine=engine,
    )
    try:
        with progress_bars() as progress:
            done = keep_up(store, duty, progress=progress)
    except LeaseHeld as error:
        if not once:
            raise
        _report_busy(collection, error, as_json=as_json)
        return
    if as_json:
        show_json({"refresh": done.to_dict()})
    else:
        _show(done)
    if done.action == "refused":
        raise typer.Exit(REFUSED)


def _report_busy(collection: str, error: LeaseHeld, *, as_json: bool) -> None:
    if as_json:
        show_json({"refresh": {"collection": collection, "action": "busy", "reason": str(error)}})
    else:
        show_facts(f"Nothing done to {collection}", {"busy": str(error)})


def _show(done: Kept) -> None:
    facts = {
        "to do" if done.planned else "done": f"{done.action} ({done.reason})",
        "rows looked at": f"{done.scanned:,}",
        "rows to write" if done.planned else "rows written": f"{done.changed:,}",
        "epoch": done.epoch,
        "took": f"{done.seconds} s",
    }
    if done.judged:
        skews = ", ".join(f"{name} {skew:.2f}" for name, skew in done.judged.skewness.items())
        facts["skewness of N_10"] = f"{skews} (over {done.judged.queries:,} held-out queries)"
        facts["old top tens kept"] = f"{done.judged.overlap:.1%}"
        if done.judged.r1:
            facts["R@1"] = ", ".join(f"{name} {100 * r1:.1f}%" for name, r1 in done.judged.r1.items())
    if done.drift:
        facts["drift of the queries"] = done.drift.reason
    if done.online_banks:
        facts["bank"] = ", ".join(f"{name} {count:,}" for name, count in done.online_banks.items())
    title = "Would refresh" if done.planned else "Refreshed"
    if done.action == "refused":
        title = "Would not refresh" if done.planned else "Did not refresh"
    show_facts(f"{title} {done.collection}", facts)
