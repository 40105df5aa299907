"""The commands milvus-hubness refresh and bank."""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness.cli.console import (
    DEFAULT_URI,
    Alpha,
    AsJson,
    Database,
    K,
    Method,
    Params,
    TokenFile,
    Uri,
    chosen_estimator,
    open_store,
    out,
    progress_bars,
    show_facts,
    show_json,
)
from milvus_hubness.errors import LeaseHeld
from milvus_hubness.migration.plan import CLIENT_TTL
from milvus_hubness.operations.engines import Engine
from milvus_hubness.operations.reading import read_bank, read_pairs
from milvus_hubness.refresh.evaluate import Labels
from milvus_hubness.refresh.online_bank import OnlineBankStatus, start_online_bank, stop_online_bank
from milvus_hubness.refresh.online_bank import list_online_banks as online_bank_statuses
from milvus_hubness.refresh.run import DEFAULT_TOLERANCE
from milvus_hubness.refresh.upkeep import Duty, Kept, Live, keep_up
from milvus_hubness.refresh.write import REBUILD_SHARE
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
    live: Annotated[
        Live, typer.Option(help="When sampled queries are taken into the online bank.")
    ] = "never",
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
        typer.Option(
            "--once", help="For CronJobs: if another process holds the lease, say so and exit with 0."
        ),
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


HOUR = 3_600.0


def bank(
    collection: Annotated[str, typer.Argument(help="A corrected collection or its alias.")],
    rate: Annotated[
        float | None, typer.Option(help="Share of live queries that clients sample. [default: 0.01]")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Places in the bank. [default: as many as it has]")] = None,
    seed_share: Annotated[
        float | None, typer.Option(help="Share of them that its first queries keep. [default: 0.25]")
    ] = None,
    half_life: Annotated[
        float | None, typer.Option(help="Hours after which a query counts half. [default: 168]")
    ] = None,
    duplicate_cosine: Annotated[
        float | None, typer.Option(help="Queries of a cosine above this are the same. [default: 0.99]")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Sample no more; the bank stays as it is.")] = False,
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Set of biases whose bank it is. [default: the active one]")
    ] = None,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Let the bank follow live queries: clients sample them from now on, or on other terms. Without options,
    tell the online banks of the collection."""
    are_told = any(term is not None for term in (rate, size, seed_share, half_life, duplicate_cosine))
    if off and are_told:
        raise typer.BadParameter("give --off or terms, not both")
    store = open_store(uri, db, token_file)
    if off:
        stopped = stop_online_bank(store, collection, field=field, profile=profile)
        if as_json:
            show_json({"online_banks": [], "stopped": stopped.model_dump() if stopped else None})
        else:
            out.print("Turned off." if stopped else "It has no online bank.")
        return
    if are_told:
        start_online_bank(
            store,
            collection,
            field=field,
            profile=profile,
            rate=rate,
            size=size,
            seed_share=seed_share,
            half_life_seconds=None if half_life is None else HOUR * half_life,
            duplicate_cosine=duplicate_cosine,
        )
    found = online_bank_statuses(store, collection)
    if as_json:
        show_json({"online_banks": [each.to_dict() for each in found]})
        return
    for each in found:
        _show_online_bank(collection, each)
    if not found:
        out.print(f"{collection!r} has no online bank: turn one on with --rate.")


def _show_online_bank(collection: str, found: OnlineBankStatus) -> None:
    terms = found.online_bank
    held = f"{found.seed:,} queries it began with and {found.live:,} live ones"
    facts = {
        "bank of": f"{terms.field}, profile {terms.profile}",
        "sampled": f"{terms.rate:.3%} of live queries, into {terms.samples_collection}",
        "waiting": f"{found.waiting:,} of at most {terms.capacity:,}",
        "bank": f"{held}, of at most {terms.size:,}",
        "kept of the first": f"{terms.seed_share:.0%} of the places",
        "half-life": f"{terms.half_life_seconds / HOUR:g} h",
        "the same query": f"cosine above {terms.duplicate_cosine:g}",
    }
    show_facts(collection, facts)
