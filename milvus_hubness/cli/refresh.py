"""The commands milvus-hubness refresh and bank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from milvus_hubness.cli.console import REFUSED, out, progress_bars, show_facts, show_result
from milvus_hubness.cli.options import (
    AsJson,
    BankOptions,
    ClientTtl,
    Connection,
    EngineName,
    EstimatorOptions,
    Field,
    Pairs,
    RowsPerSecond,
    TargetBank,
    read_vectors,
)
from milvus_hubness.errors import LeaseHeld
from milvus_hubness.migration.plan import CLIENT_TTL
from milvus_hubness.operations.progress import Throttle
from milvus_hubness.refresh.online_bank import OnlineBankStatus, start_online_bank, stop_online_bank
from milvus_hubness.refresh.online_bank import list_online_banks as online_bank_statuses
from milvus_hubness.refresh.plan import DEFAULT_TOLERANCE, REBUILD_SHARE, Labels, Live, RefreshOptions
from milvus_hubness.refresh.run import RefreshResult
from milvus_hubness.refresh.run import refresh as refresh_biases
from milvus_hubness.state import require_state

HOUR = 3_600.0


def refresh(
    collection: Annotated[str, typer.Argument(help="Corrected collection or its alias.")],
    bank: BankOptions,
    estimating: EstimatorOptions,
    connection: Connection,
    target_bank: TargetBank = None,
    field: Field = None,
    profile: Annotated[str | None, typer.Option(help="Bias profile; a new name adds a profile, from --bank.")] = None,
    revert: Annotated[
        bool, typer.Option("--revert", help="Restore the bank and parameters before the last full refresh.")
    ] = False,
    pairs: Pairs = None,
    force: Annotated[
        bool, typer.Option("--force", help="Adopt new biases even if they are evaluated as worse.")
    ] = False,
    live: Annotated[Live, typer.Option(help="When sampled queries are added to the online bank.")] = "never",
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit sn, dbsn or blend again although nothing changed.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="Change of a bias up to which its row is not written.")
    ] = DEFAULT_TOLERANCE,
    rebuild_share: Annotated[
        float, typer.Option(help="Share of 50,000 or more rows from which on a copy replaces in-place updates.")
    ] = REBUILD_SHARE,
    plan: Annotated[bool, typer.Option("--plan", help="Show the refresh plan; write nothing.")] = False,
    rows_per_second: RowsPerSecond = None,
    client_ttl: ClientTtl = CLIENT_TTL,
    once: Annotated[
        bool, typer.Option("--once", help="For CronJobs: exit with 0 if another process holds the lease.")
    ] = False,
    engine: EngineName = "local",
    as_json: AsJson = False,
) -> None:
    """Compute the biases of rows that have none, and of all rows if the bank or the parameters changed.

    Exits with 3 if the new biases are evaluated as worse and were not adopted.
    """
    if (revert or refit) and live != "never":
        raise typer.BadParameter("--live takes neither --revert nor --refit")
    store = connection.open()
    estimator = None
    if estimating.is_named:
        state = require_state(store.info(collection).state_of(field), collection)
        current = state.profiles.get(profile or state.active)
        estimator = estimating.estimator(current.estimator if current else None)
    options = RefreshOptions(
        field=field,
        profile=profile,
        bank=bank.read(store),
        target_bank=read_vectors(store, target_bank),
        estimator=estimator,
        live=live,
        labels=Labels.load(pairs) if pairs else None,
        force=force,
        refit=refit,
        revert=revert,
        rebuild_share=rebuild_share,
        plan=plan,
        tolerance=tolerance,
        client_ttl=client_ttl,
        throttle=Throttle(rows_per_second),
        engine=engine,
    )
    try:
        with progress_bars() as progress:
            done = refresh_biases(store, collection, options, progress=progress)
    except LeaseHeld as error:
        if not once:
            raise
        title, reason = f"Nothing done to {collection}", str(error)
        result = {"refresh": {"collection": collection, "action": "busy", "reason": reason}}
        show_result(as_json, result, lambda: show_facts(title, {"busy": reason}))
        return
    show_result(as_json, {"refresh": done.to_dict()}, lambda: _show(done))
    if done.action == "refused":
        raise typer.Exit(REFUSED)


def _show(done: RefreshResult) -> None:
    facts = {
        "to do" if done.planned else "done": f"{done.action} ({done.reason})",
        "rows scanned": f"{done.scanned:,}",
        "rows to write" if done.planned else "rows written": f"{done.written:,}",
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


def bank(
    collection: Annotated[str, typer.Argument(help="Corrected collection or its alias.")],
    connection: Connection,
    rate: Annotated[
        float | None, typer.Option(help="Share of live queries that clients sample. [default: 0.01]")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Maximum number of queries in the bank. [default: its current size]")
    ] = None,
    seed_share: Annotated[
        float | None, typer.Option(help="Share of the bank kept for its first queries. [default: 0.25]")
    ] = None,
    half_life: Annotated[
        float | None, typer.Option(help="Hours after which the weight of a query halves. [default: 168]")
    ] = None,
    duplicate_cosine: Annotated[
        float | None, typer.Option(help="Cosine above which two queries are duplicates. [default: 0.99]")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Stop sampling; the bank stays as it is.")] = False,
    field: Field = None,
    profile: Annotated[str | None, typer.Option(help="Bias profile of the bank. [default: the active one]")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn the online bank of a collection on, change its terms, or turn it off.

    Clients then sample live queries. Without options, shows the online banks of the collection.
    """
    options = {
        "rate": rate,
        "size": size,
        "seed_share": seed_share,
        "half_life_seconds": None if half_life is None else HOUR * half_life,
        "duplicate_cosine": duplicate_cosine,
    }
    terms = {name: value for name, value in options.items() if value is not None}
    if off and terms:
        raise typer.BadParameter("--off takes no terms: give one or the other")
    store = connection.open()
    if off:
        stopped = stop_online_bank(store, collection, field=field, profile=profile)
        result: dict[str, Any] = {"online_banks": [], "stopped": stopped.model_dump() if stopped else None}
        text = "Turned off." if stopped else f"{collection!r} has no online bank."
        show_result(as_json, result, lambda: out.print(text))
        return
    if terms:
        start_online_bank(store, collection, field=field, profile=profile, **terms)
    statuses = online_bank_statuses(store, collection)
    result = {"online_banks": [status.to_dict() for status in statuses]}
    show_result(as_json, result, lambda: _show_online_banks(collection, statuses))


def _show_online_banks(collection: str, statuses: Sequence[OnlineBankStatus]) -> None:
    for status in statuses:
        terms = status.online_bank
        facts = {
            "bank of": f"{terms.field}, profile {terms.profile}",
            "sampled": f"{terms.rate:.3%} of live queries, into {terms.samples_collection}",
            "waiting": f"{status.waiting:,} of at most {terms.capacity:,}",
            "bank": f"{status.seed:,} first queries and {status.live:,} live ones, of at most {terms.size:,}",
            "share of the first": f"{terms.seed_share:.0%} of the bank",
            "half-life": f"{terms.half_life_seconds / HOUR:g} h",
            "duplicates": f"cosine above {terms.duplicate_cosine:g}",
        }
        show_facts(collection, facts)
    if not statuses:
        out.print(f"{collection!r} has no online bank: turn one on with --rate.")
