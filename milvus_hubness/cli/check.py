"""The command milvus-hubness check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import WHERE_FROM
from milvus_hubness.basics.files.writing import check_writable, expect_different
from milvus_hubness.cli import console, options
from milvus_hubness.cli.verdicts import (
    ShowAll,
    next_command,
    show_reasons,
    show_trials,
    show_verdict,
    store_verdict,
)

if TYPE_CHECKING:
    from milvus_hubness.reports.check import Check


def check(
    bank: options.BankOptions,
    judging: options.PairsOptions,
    connection: options.Connection,
    collection: Annotated[
        str | None, typer.Argument(help="Collection, corrected or not; none with --items.")
    ] = None,
    items: Annotated[
        str | None,
        "Without a database: vectors of the items, in the forms of --bank. Their keys are those of "
        "--key-column or of a column such as `key`, `id` or `sku`, or else the numbers of the rows, from "
        "0.",
    ] = None,
    metric: Annotated[str, "With --items: how searches compare: COSINE, IP or L2."] = "COSINE",
    queries: Annotated[
        str | None,
        "Real queries apart from --bank, in its forms, without labels; with --items and without "
        "--bank, the past queries themselves.",
    ] = None,
    target_bank: options.TargetBank = None,
    kind: options.Kind = None,
    field: options.Field = None,
    quick: Annotated[
        bool,
        "Look at 5,000 rows and 1,000 queries of the bank only, in half a minute. Nothing is stored.",
    ] = False,
    page: Annotated[
        Path | None, "HTML page to write: the hubs, and what correction does about them."
    ] = None,
    show_all: ShowAll = False,
    as_json: options.AsJson = False,
) -> None:
    """Show faults of the data and whether correction helps, and, on a page, the hubs.

    Needs past queries only; with --pairs it measures the gain. Writes no row; the verdict is stored
    at the end, and a line says if that fails. Exits with 3 if a fault of the data makes the figures
    worthless, or if the verdict is to leave the search alone.

    Example: milvus-hubness check --items items.npy --queries past.npy --pairs pairs.npz
    """
    # torch, which any check needs, takes seconds: first what is wrong with the command line.
    _expect_source(collection, items, kind, field)
    if queries and judging.pairs and (bank.bank or not items):
        raise typer.BadParameter("give --queries or --pairs, not both")
    if items:
        bank, queries = _past_queries(bank, queries)
    named = (
        ("--items", items),
        ("--bank", bank.bank),
        ("--queries", queries),
        ("--pairs", judging.pairs),
    )
    if page is not None:
        for option, path in named:
            if path:
                expect_different([(option, Path(path)), ("--page", page)])
        check_writable(page)

    result = _checked(
        bank,
        judging,
        connection,
        collection,
        items,
        metric,
        queries,
        target_bank,
        kind,
        field,
        quick=quick,
        diagnosed=page is not None,
    )
    if page is not None:
        result.save(page)
    tuning = result.tuning.to_dict()
    files = ["--items", str(items), *(["--metric", metric] if metric != "COSINE" else [])]
    to_type = next_command(tuning, collection, bank, connection, field, files=files)
    if any(fault.is_grave for fault in result.faults):
        to_type = "remedy the data as the first lines say, then check again."
    data = {**result.to_dict(diagnosed=page is not None), "next": to_type}
    if page is not None:
        data["page"] = str(page)
    console.show_result(
        as_json, {"check": data}, lambda: _show(result, tuning, to_type, page, show_all)
    )
    if collection is not None:
        store_verdict(connection.open(), result.title, result.unstored)
    if result.is_refused:
        raise typer.Exit(console.REFUSED)


def _expect_source(
    collection: str | None, items: str | None, kind: str | None, field: str | None
) -> None:
    """Raise typer.BadParameter unless there is one thing to check."""
    if (collection is None) == (items is None):
        raise typer.BadParameter("nothing to check: give a COLLECTION or --items FILE")
    if items and (kind or field):
        raise typer.BadParameter("--kind and --field are those of a collection: leave them out")


def _past_queries(
    bank: options.BankOptions, queries: str | None
) -> tuple[options.BankOptions, str | None]:
    """Return the bank, and the queries apart from it, where there is no database."""
    if bank.bank:
        return bank, queries
    if not queries:
        raise typer.BadParameter(f"no past queries: pass --queries FILE ({WHERE_FROM})")
    return options.BankOptions(queries, bank.bank_column), None


def _checked(
    bank: options.BankOptions,
    judging: options.PairsOptions,
    connection: options.Connection,
    collection: str | None,
    items: str | None,
    metric: str,
    queries: str | None,
    target_bank: str | None,
    kind: str | None,
    field: str | None,
    *,
    quick: bool,
    diagnosed: bool,
) -> Check:
    """Return the check. diagnosed: whether with its diagnosis."""
    from milvus_hubness.correction.banks.bank import QueryBank
    from milvus_hubness.jobs.common.inputs import key_column_of
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.reports.check import check

    with console.progress_bars(has_lines=True) as progress:
        if items is not None:
            result = check(
                items,
                recipe=Recipe(
                    QueryBank.load(bank.bank, bank.bank_column),
                    queries=queries,
                    target_bank=target_bank,
                ),
                judgements=judging.read(other=items),
                measure=judging.measure,
                metric=metric,
                key_column=key_column_of(items, judging.key_column, judging.pairs),
                quick=quick,
                progress=progress,
            )
        else:
            assert collection is not None, "the command line names items or a collection"
            store = connection.open()
            result = check(
                store,
                collection,
                Recipe(
                    bank.read(store, collection, field),
                    queries=options.read_vectors(store, queries),
                    target_bank=options.read_vectors(store, target_bank),
                    kind=kind,
                ),
                judgements=judging.read(),
                measure=judging.measure,
                field=field,
                # After the result is shown.
                stores=False,
                quick=quick,
                progress=progress,
            )

        # It is searched when it is first read: here, where the progress is shown.
        if diagnosed:
            _ = result.diagnosis
        return result


def _show(
    result: Check, tuning: dict[str, Any], to_type: str, page: Path | None, show_all: bool
) -> None:
    """Print the faults, the verdict, and then what it rests on."""
    if result.faults:
        console.show_styled(("First: the data", "bold"))
        console.say("\n".join(f"- {fault}" for fault in result.faults) + "\n")
    show_verdict(result.title, tuning, to_type)
    show_trials(tuning, show_all=show_all)
    show_reasons(tuning, show_all=show_all)
    shown = "--page hubness.html writes a page" if page is None else page
    console.say(f"\nThe hubs, and what correction does about them: {shown}")
