"""The commands milvus-hubness tune, diagnose and status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from milvus_hubness.charts import span
from milvus_hubness.cli.console import (
    check_writable,
    describe,
    out,
    progress_bars,
    rounded_shares,
    show_facts,
    show_json,
    show_result,
    write_page,
)
from milvus_hubness.cli.options import (
    AsJson,
    BankOptions,
    ClientTtl,
    Connection,
    EstimatorOptions,
    Field,
    Pairs,
    TargetBank,
    read_vectors,
)
from milvus_hubness.migration.plan import CLIENT_TTL
from milvus_hubness.operations.inputs import read_bank, read_pairs
from milvus_hubness.operations.lease import holder_of
from milvus_hubness.quality.collections import diagnose as diagnose_collection
from milvus_hubness.quality.collections import render
from milvus_hubness.quality.collections import tune as tune_collection
from milvus_hubness.quality.report import Diagnosis
from milvus_hubness.refresh.status import Status
from milvus_hubness.refresh.status import repair as repair_collection
from milvus_hubness.refresh.status import status as read_status

SHOWN = 12
"""Trials that `tune` prints besides those in its choice."""
BANK_ALONE = (
    "Measured on the bank alone: this does not notice a bank of items instead of queries, or of one topic. "
    "Pass --queries or --pairs to be sure."
)


def tune(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: BankOptions,
    connection: Connection,
    target_bank: TargetBank = None,
    pairs: Pairs = None,
    queries: Annotated[
        str | None, typer.Option(help="Queries without answers that are not in the bank: a file, or collection:NAME.")
    ] = None,
    field: Field = None,
    as_json: AsJson = False,
) -> None:
    """Try every method on a collection and recommend one, or none; migrate and refresh follow it.

    Compares R@1 with --pairs, and otherwise how evenly answers fall on the items. Without --bank, uses the
    bank of a corrected collection.
    """
    if queries and pairs:
        raise typer.BadParameter("give --queries or --pairs, not both")
    store = connection.open()
    query_vectors, answers = read_pairs(pairs) if pairs else (read_vectors(store, queries), None)
    with progress_bars() as progress:
        tuning = tune_collection(
            store,
            collection,
            bank.read(store),
            field=field,
            queries=query_vectors,
            answers=answers,
            target_bank=read_vectors(store, target_bank),
            progress=progress,
        ).to_dict()
    note = BANK_ALONE if query_vectors is None else ""
    show_result(as_json, {"tune": tuning}, lambda: _show_tuning(collection, tuning, note))


def _show_tuning(collection: str, tuning: dict[str, Any], note: str) -> None:
    choice = tuning["choice"]
    parts, weights = (choice.get("estimators", [choice]), choice.get("weights", [1])) if choice else ([], [])
    shares = dict(zip(map(describe, parts), rounded_shares(weights), strict=True))
    is_mixed = len(shares) > 1
    table = Table(box=None, title=f"The best of {len(tuning['rows']) - 1} trials", title_justify="left")
    for heading in ("method", "strength", "R@1", "gain, 95%", "unevenness", "share"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for number, row in enumerate(tuning["rows"]):
        method = describe(row["estimator"]) if row["estimator"] else "as it is"
        gain, share = row["gain"], shares.pop(method, None)
        if number <= SHOWN or share is not None:
            table.add_row(
                method,
                f"{row['strength']:.2f}",
                "" if row["r1"] is None else f"{100 * row['r1']:.1f}",
                "" if gain is None else f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}",
                f"{row['unevenness']:.3f}",
                "" if share is None else f"{share}%",
            )
    out.print(table)
    out.print(f"\n[bold]{collection}: {tuning['verdict']}[/bold]")
    if choice:
        chosen = f"the mean of the methods with a share, {describe(choice)}" if is_mixed else describe(choice)
        out.print(f"{chosen} at strength {tuning['strength']:.2f}", highlight=False, markup=False)
    out.print("\n".join(filter(None, (tuning["reason"], note))), highlight=False, markup=False)


def diagnose(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: BankOptions,
    estimating: EstimatorOptions,
    connection: Connection,
    queries: Annotated[
        str | None, typer.Option(help="Queries that are not in the bank: a file, or collection:NAME.")
    ] = None,
    pairs: Pairs = None,
    field: Field = None,
    output: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("hubness.html"),
    as_json: AsJson = False,
) -> None:
    """Write a page that shows the hubs of a collection, and what correction does or would do about them.

    Takes --queries or --pairs; a collection that is not corrected needs --bank.
    """
    if bool(queries) == bool(pairs):
        raise typer.BadParameter("give either --queries or --pairs")
    check_writable(output)
    estimator = estimating.estimator()
    store = connection.open()
    query_vectors, answers = read_pairs(pairs) if pairs else (read_bank(store, str(queries)), None)
    with progress_bars() as progress:
        diagnosis = diagnose_collection(
            store,
            collection,
            query_vectors,
            bank=bank.read(store),
            estimator=estimator,
            field=field,
            answers=answers,
            progress=progress,
        )
    write_page(output, render(diagnosis))
    result = {"diagnosis": diagnosis.to_dict(), "page": str(output)}
    show_result(as_json, result, lambda: _show_diagnosis(diagnosis, output))


def _show_diagnosis(diagnosis: Diagnosis, page: Path) -> None:
    before, after, k = diagnosis.before, diagnosis.after, diagnosis.k

    def change(name: str, style: str) -> str:
        return f"{getattr(before, name):{style}} -> {getattr(after, name):{style}}"

    facts = {
        "queries": f"{diagnosis.n_queries:,} over {diagnosis.n_items:,} items",
        "strength": f"{diagnosis.strength:g}",
        f"skewness of N_{k}": change("skewness", ".2f"),
        "largest hub": f"{change('largest', ',')} of {diagnosis.n_queries:,} queries",
        "excess answers taken by hubs": change("robin_hood", ".1%"),
        "items never found": f"{diagnosis.antihubs.before:,} -> {diagnosis.antihubs.after:,}",
    }
    if diagnosis.gain is not None and diagnosis.retrieval_before and diagnosis.retrieval_after:
        gain = diagnosis.gain
        facts["R@1"] = (
            f"{diagnosis.retrieval_before['R@1']:.1%} -> {diagnosis.retrieval_after['R@1']:.1%} "
            f"({100 * gain.estimate:+.1f} points, 95% interval {100 * gain.low:+.1f} to "
            f"{100 * gain.high:+.1f})"
        )
    show_facts(f"{diagnosis.title}, without and with correction", {**facts, "page": page})


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    connection: Connection,
    field: Field = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair the rows that a killed job left, as a refresh would.")
    ] = False,
    client_ttl: ClientTtl = CLIENT_TTL,
    as_json: AsJson = False,
) -> None:
    """Show how a collection is corrected, and how fresh its biases are."""
    store = connection.open()
    repaired = repair_collection(store, collection, client_ttl=client_ttl) if repair else None
    result = read_status(store, collection, field=field)
    holder = holder_of(store, result.collection)
    if as_json:
        lease = holder.model_dump(mode="json", include={"token", "owner", "expires_at"}) if holder else None
        show_json({"status": {**result.to_dict(), "lease": lease, "repaired": repaired}})
        return
    facts: dict[str, object] = {
        "corrected": "yes" if result.corrected else "no",
        "rows": f"{result.rows:,}",
        "aliases": ", ".join(result.aliases),
        "lease": holder,
        "repaired": f"{repaired:,} rows" if repair else None,
        "write intents": f"{result.write_intents:,} rows in the log" if result.write_intents else None,
        "batches": f"{result.open_batches} open: a job is running, or was killed (repair with --repair)"
        if result.open_batches
        else None,
    }
    if result.estimator and result.bank and result.age_seconds is not None:
        facts |= {
            "phase": result.phase,
            "copied from": result.source if result.where == "vectors" and not result.second_vector else None,
            "field": f"{result.field}, {result.dim}-d {result.metric}, stored {result.width} wide",
            "biases": _bias_location(result),
            "estimator": f"{describe(result.estimator)}, strength {result.strength}",
            "profiles": ", ".join(result.profiles) if len(result.profiles) > 1 else None,
            "corrected fields": ", ".join(result.fields) if len(result.fields) > 1 else None,
            "bank": f"{result.bank['collection']}, {result.bank['count']:,} queries, {result.bank['fingerprint'][:19]}",
            "rows without bias": f"{result.pending:,}",
            "last refresh": f"{span(result.age_seconds)} ago ({result.refreshed_at}), epoch {result.epoch}",
        }
    show_facts(result.collection, facts)


def _bias_location(status: Status) -> str:
    if status.second_vector:
        return f"in {status.second_vector}, a second vector field"
    if status.missed is None:
        return "in the vectors"
    location = f"in the side collection {status.side}" if status.side else "in fields of the collection"
    missed = f"{100 * status.missed:.1f}% of the top 10"
    return f"{location}; {status.candidates} candidates a search miss {missed}"
