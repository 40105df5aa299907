"""The command milvus-hubness hubs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from milvus_hubness.basics.defaults import ALERT_BUDGET, OnHub
from milvus_hubness.cli import console, options
from milvus_hubness.cli.explained import TOP, Explaining, read_rows

if TYPE_CHECKING:
    from milvus_hubness.correction.banks.bank import QueryBank
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.reports.biased import BiasedGallery
    from milvus_hubness.reports.explain import Hubs
    from milvus_hubness.reports.suspicious import HubScan

LISTED = 50
"""Rows of a list, unless a number is given."""


@dataclass(frozen=True)
class Listing:
    """The options of a list of hubs."""

    queries: Annotated[
        str | None, "Queries to count, in the forms of --bank. [default: those of the bank]"
    ] = None
    top: Annotated[
        int | None,
        f"Number of rows or queries to list. [default: {LISTED}; of an explanation {TOP}]",
        {"min": 1},
    ] = None


@dataclass(frozen=True)
class Planted:
    """The options about rows that look like planted hubs."""

    suspicious: Annotated[
        bool, "List rows that look like planted hubs, with the evidence for each."
    ] = False
    alert_budget: Annotated[
        float, "With --suspicious: exit with 1 if a larger share of the rows is suspicious."
    ] = ALERT_BUDGET
    on_hub: Annotated[
        OnHub | None, "Choose what clients do with new rows that look like planted hubs."
    ] = None


def hubs(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    estimating: options.EstimatorOptions,
    explaining: Explaining,
    connection: options.Connection,
    listing: Listing,
    planted: Planted,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """List the hubs of a collection, or rows that look planted; explain one row or query; guard new rows.

    N_k counts the queries that have a row in their top k. Hubs have the largest N_k, anti-hubs have
    none; the share is that of all answers. A collection that is not corrected needs --bank.
    --suspicious exits with 1 if more rows look planted than --alert-budget allows.

    Example: milvus-hubness hubs products --suspicious
    """
    outputs = {
        explaining.option: explaining.is_named,
        "--suspicious": planted.suspicious,
        "--on-hub": planted.on_hub is not None,
    }
    chosen = [name for name, is_given in outputs.items() if is_given]
    if len(chosen) > 1:
        raise typer.BadParameter(f"give {chosen[0]} or {chosen[1]}, not both")

    if explaining.is_named and listing.queries:
        raise typer.BadParameter("--queries counts answers: to explain one query, pass --query")
    if planted.alert_budget != ALERT_BUDGET and not planted.suspicious:
        raise typer.BadParameter("--alert-budget needs --suspicious, which counts suspicious rows")
    estimator = estimating.estimator()
    if estimator is not None and estimator.needs_target_bank:
        raise typer.BadParameter(
            f"{type(estimator).__name__} needs reference items, which hubs does not take: name another "
            "--method"
        )
    given = {
        "--queries": listing.queries,
        "--method": estimating.method,
        "--param": estimating.param,
        "--bank": bank.bank,
        "--bank-column": bank.bank_column,
        "--top": listing.top,
    }
    # A scan asks the bank whatever the method, and the guard has that of the collection.
    of_list = ("--queries", "--method", "--param") if planted.suspicious else tuple(given)
    if planted.suspicious or planted.on_hub is not None:
        for option in of_list:
            if given[option]:
                raise typer.BadParameter(f"{chosen[0]} takes no {option}: leave it out")

    store = connection.open()
    if explaining.is_named:
        explaining.show(store, collection, bank, estimator, field, listing.top, as_json=as_json)
    elif planted.suspicious:
        budget = planted.alert_budget
        named = bank.read(store, collection, field)
        _scan(store, collection, named, field, listing.top or LISTED, budget, as_json=as_json)
    elif planted.on_hub is not None:
        _guard(store, collection, field, planted.on_hub, as_json=as_json)
    else:
        counted = options.read_vectors(store, listing.queries)
        biased = read_rows(store, collection, bank, estimator, field)
        _list(biased, counted, listing, as_json=as_json)


def _list(
    biased: BiasedGallery, counted: QueryBank | None, listing: Listing, *, as_json: bool
) -> None:
    from milvus_hubness.quality.measures import as_plain
    from milvus_hubness.reports import explain

    listed = explain.list_hubs(biased, counted, top=listing.top or LISTED)
    result = {"hubs": {"collection": biased.title, **as_plain(listed)}}
    console.show_result(as_json, result, lambda: _show_hubs(biased.title, listed))


def _show_hubs(collection: str, listed: Hubs) -> None:
    counts = f"{listed.antihubs_before:,} -> {listed.antihubs_after:,} of {listed.n_items:,} rows"
    facts = {"queries": f"{listed.n_queries:,}", "anti-hubs": counts}
    console.show_facts(f"{collection}, without and with correction", facts)
    lines = [
        (
            row.kind,
            str(row.key),
            f"{row.before:,} -> {row.after:,}",
            f"{row.share_before:.2%} -> {row.share_after:.2%}",
            f"{row.bias:+.4f}",
        )
        for row in listed.rows
    ]
    console.show_table(
        None, ("", "key", f"N_{listed.k}", "share of answers", "bias"), lines, texts=2
    )


def _scan(
    store: Store,
    collection: str,
    bank: QueryBank | None,
    field: str | None,
    top: int,
    alert_budget: float,
    *,
    as_json: bool,
) -> None:
    from milvus_hubness.reports.suspicious import scan_hubs

    with console.progress_bars() as progress:
        result = scan_hubs(
            store,
            collection,
            bank,
            alert_budget=alert_budget,
            field=field,
            top=top,
            progress=progress,
        )
    console.show_result(as_json, {"suspicious": result.to_dict()}, lambda: _show_scan(result, top))
    if result.is_above_budget:
        raise typer.Exit(console.FAILURE)


def _show_scan(result: HubScan, top: int) -> None:
    found = result.found
    verdict = "above" if result.is_above_budget else "within"
    repeated = [
        f"{len(group):,} rows are copies of {result.keys[group[0]]}" for group in found.repeated
    ]
    facts = {
        "scanned": f"{found.rows:,} rows",
        "suspicious": f"{len(found.suspicious):,} rows, {found.share:.2%}: {verdict} the alert "
        f"budget of {result.alert_budget:.2%}",
        "limit": f"an answer of {found.limit:.1%} of the bank's queries",
        "zero vectors": f"{len(found.zero_vectors):,}" if found.zero_vectors else None,
        "no valid vector": f"{result.invalid:,} rows" if result.invalid else None,
        "repeated": "\n".join(repeated),
    }
    console.show_facts(f"{result.collection}, rows that look like planted hubs", facts)
    lines = [
        (
            str(result.keys[row.row]),
            ", ".join([row.scope, *row.remarks] if row.suspicion > 1 else row.remarks),
            f"{row.suspicion:.2f}",
            f"{row.reach:.1%}",
            f"{row.robust_z:.1f}",
            f"{row.spread:.0%}",
            "" if row.bias_quantile is None else f"{row.bias_quantile:.2%}",
            f"{row.nearest_cosine:.3f}",
        )
        for row in found.listed[:top]
    ]
    headings = ("key", "why", "x limit", "reach", "z", "topics", "bias", "query")
    console.show_table(None, headings, lines, texts=2)


def _guard(
    store: Store, collection: str, field: str | None, on_hub: OnHub, *, as_json: bool
) -> None:
    from milvus_hubness.jobs.refresh.guard import guard_hubs

    with console.progress_bars() as progress:
        done = guard_hubs(store, collection, on_hub, field=field, progress=progress)
    limit = None
    if done.limit is not None:
        limit = f"{done.limit:.1%} of the bank" if done.by == "reach" else f"bias {done.limit:+.4f}"
    facts = {
        "on a hub": done.on_hub,
        "measured on": f"{done.measured_rows:,} rows" if done.measured_rows else None,
        "limit": limit,
        "note": None
        if done.measured_rows or done.on_hub == "off"
        else "fewer than 200 rows: no row is stopped before a refresh finds more",
    }
    console.show_result(
        as_json,
        {"guard": done.to_dict()},
        lambda: console.show_facts(f"Hub guard of {done.collection}", facts),
    )
