"""The commands milvus-hubness tune, diagnose and status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

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
    check_writable,
    chosen_estimator,
    describe,
    open_store,
    out,
    progress_bars,
    rounded_shares,
    show_facts,
    show_json,
    write_page,
)
from milvus_hubness.migration.plan import CLIENT_TTL
from milvus_hubness.operations.lease import holder_of
from milvus_hubness.operations.reading import read_bank, read_pairs
from milvus_hubness.quality.collections import diagnose as diagnose_collection
from milvus_hubness.quality.collections import render
from milvus_hubness.quality.collections import tune as tune_collection
from milvus_hubness.quality.report import Diagnosis
from milvus_hubness.refresh.upkeep import Status
from milvus_hubness.refresh.upkeep import repair as repair_collection
from milvus_hubness.refresh.upkeep import status as read_status

SHOWN = 12
BANK_ALONE = (
    "Told of the bank alone, this does not notice a bank of items instead of queries, or of one topic: "
    "give --queries or --pairs to be sure."
)


def tune(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: Annotated[
        str,
        typer.Option(help="Reference queries: a file, or collection:NAME. [default: its own]"),
    ] = "",
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    target_bank: Annotated[
        str | None, typer.Option(help="Reference items, as --bank, to try dualis and dbsn too.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Labelled pairs: .npz, .parquet or .arrow with 'query' and 'key' of the right row."
        ),
    ] = None,
    queries: Annotated[
        str,
        typer.Option(
            help="Instead of --pairs: queries as they are asked, not in the bank; a file, or collection:NAME."
        ),
    ] = "",
    field: Annotated[str | None, typer.Option(help="Vector field, where there are several.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of samples and splits.")] = 0,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Should this collection be corrected, and with what? Tries every method on its rows; migrate and refresh
    follow the finding. With labelled pairs R@1 decides, without them how evenly answers fall on the items."""
    if queries and pairs:
        raise typer.BadParameter("give --queries or --pairs, not both")
    store = open_store(uri, db, token_file)
    asked, answers = read_pairs(pairs) if pairs else (None, None)
    if queries:
        asked = read_bank(store, queries, None)
    with progress_bars() as progress:
        found = tune_collection(
            store,
            collection,
            read_bank(store, bank, bank_column) if bank else None,
            field=field,
            queries=asked,
            answers=answers,
            target_bank=read_bank(store, target_bank, None) if target_bank else None,
            seed=seed,
            progress=progress,
        ).to_dict()
    if as_json:
        show_json({"tune": found})
    else:
        _show(collection, found)
        if asked is None:
            out.print(BANK_ALONE, highlight=False, markup=False)


def describe_row(row: dict[str, Any]) -> str:
    """Return the name of a trial's method."""
    return describe(row["estimator"]) if row["estimator"] else "as it is"


def _shares(choice: dict[str, Any] | None) -> dict[str, str]:
    """Return the share of each method in the choice, by name; the shares add up to 100%."""
    if choice is None:
        return {}
    if "estimators" not in choice:
        return {describe(choice): "100%"}
    shares = rounded_shares(choice["weights"])
    return {describe(part): f"{share}%" for part, share in zip(choice["estimators"], shares, strict=True)}


def _show(collection: str, found: dict[str, Any]) -> None:
    table = Table(box=None, title=f"The best of {len(found['rows']) - 1} trials", title_justify="left")
    shares = _shares(found["choice"])
    left = dict(shares)
    for heading in ("method", "strength", "R@1", "gain, 95%", "unevenness", "share"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for number, row in enumerate(found["rows"]):
        gain, share = row["gain"], left.pop(describe_row(row), "")
        if number > SHOWN and not share:
            continue
        table.add_row(
            describe_row(row),
            f"{row['strength']:.2f}",
            "" if row["r1"] is None else f"{100 * row['r1']:.1f}",
            "" if gain is None else f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}",
            f"{row['unevenness']:.3f}",
            share,
        )
    out.print(table)
    out.print(f"\n[bold]{collection}: {found['verdict']}[/bold]")
    if found["choice"]:
        mixed = "the mean of the methods with a share, " if len(shares) > 1 else ""
        chosen = f"{mixed}{describe(found['choice'])}"
        out.print(f"{chosen} at strength {found['strength']:.2f}", highlight=False, markup=False)
    out.print(found["reason"], highlight=False, markup=False)


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
        found = diagnose_collection(
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
        _show_diagnosis(found, output)


def _show_diagnosis(found: Diagnosis, page: Path) -> None:
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


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Repair the rows that a killed job left, as the next refresh would."),
    ] = False,
    client_ttl: Annotated[
        float, typer.Option(help="With --repair: the longest state_ttl of a HubnessClient that writes.")
    ] = CLIENT_TTL,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether a collection is corrected, how, and how fresh its biases are."""
    store = open_store(uri, db, token_file)
    repaired = repair_collection(store, collection, client_ttl=client_ttl) if repair else None
    found = read_status(store, collection, field=field)
    holder = holder_of(store, found.collection)
    if as_json:
        lease = holder.model_dump(mode="json", include={"token", "owner", "expires_at"}) if holder else None
        show_json({"status": {**found.to_dict(), "lease": lease, "repaired": repaired}})
        return
    facts: dict[str, object] = {
        "corrected": "yes" if found.corrected else "no",
        "rows": f"{found.rows:,}",
        "aliases": ", ".join(found.aliases),
        "at work": holder,
        "repaired": f"{repaired:,} rows" if repair else None,
        "write intents": f"{found.write_intents:,} rows in memory" if found.write_intents else None,
        "batches": f"{found.open_batches} open: a job is at work, or was killed (repair with --repair)"
        if found.open_batches
        else None,
    }
    if found.corrected and found.estimator and found.bank and found.age_seconds is not None:
        facts |= {
            "phase": found.phase,
            "copied from": found.source if found.where == "vectors" and not found.second_vector else None,
            "field": f"{found.field}, {found.dim}-d {found.metric}, stored {found.width} wide",
            "biases": _place(found),
            "estimator": f"{describe(found.estimator)}, strength {found.strength}",
            "profiles": ", ".join(found.profiles) if len(found.profiles) > 1 else None,
            "corrected fields": ", ".join(found.fields) if len(found.fields) > 1 else None,
            "bank": f"{found.bank['collection']}, {found.bank['count']:,} queries, "
            f"{found.bank['fingerprint'][:19]}",
            "rows without bias": f"{found.pending:,}",
            "last refresh": f"{_age(found.age_seconds)} ago ({found.refreshed_at}), epoch {found.epoch}",
        }
    show_facts(found.collection, facts)


def _place(found: Status) -> str:
    if found.second_vector:
        return f"in {found.second_vector}, a second vector field"
    if found.missed is None:
        return "in the vectors"
    place = f"in {found.side}, beside the vectors" if found.side else "in fields beside the vectors"
    return f"{place}; {found.candidates} candidates a search miss {100 * found.missed:.1f}% of the top 10"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
