"""The command milvus-hubness check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import WHERE_FROM
from milvus_hubness.cli import console, options
from milvus_hubness.cli.pages import Hubs, PageOptions, show_diagnosis
from milvus_hubness.cli.verdicts import (
    ShowAll,
    next_command,
    show_reasons,
    show_trials,
    show_verdict,
    store_verdict,
)

if TYPE_CHECKING:
    from milvus_hubness.basics.progress import Progress
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.reports.check import Check


METRIC = "COSINE"
"""How searches of items in a file compare, unless another metric is named."""


@dataclass(frozen=True)
class Subject:
    """The options that say what is looked at, and by which queries."""

    items: Annotated[
        str | None,
        "Without a database: vectors of the items, in the forms of --bank. Their keys are those of "
        "--key-column or of a column such as `key`, `id` or `sku`, or else the numbers of the rows, from "
        "0.",
    ] = None
    metric: Annotated[str, "With --items: how searches compare: COSINE, IP or L2."] = METRIC
    queries: Annotated[
        str | None,
        "Real queries apart from --bank, in its forms, without labels; with --items and without "
        "--bank, the past queries themselves.",
    ] = None
    target_bank: options.TargetBank = None
    kind: options.Kind = None
    field: options.Field = None
    quick: Annotated[
        bool,
        "Look at 5,000 rows and 1,000 queries of the bank only, in half a minute. Nothing is stored.",
    ] = False

    def expect(self, collection: str | None) -> None:
        """Raise typer.BadParameter unless there is one thing to check."""
        if collection is None and self.items is None:
            raise typer.BadParameter("nothing to check: give a COLLECTION or --items FILE")
        if collection is not None and self.items is not None:
            raise typer.BadParameter("give a COLLECTION or --items FILE: one of them is checked")
        if collection is not None and self.metric != METRIC:
            raise typer.BadParameter(
                "--metric is of --items: a collection is compared by the metric of its index"
            )
        if self.items and (self.kind or self.field):
            raise typer.BadParameter("--kind and --field are those of a collection: leave them out")

    def past_queries(self, bank: options.BankOptions) -> tuple[options.BankOptions, Subject]:
        """Return the bank, and this with the queries apart from it, where there is no database.

        Raises typer.BadParameter.
        """
        if bank.bank:
            return bank, self
        if not self.queries:
            raise typer.BadParameter(f"no past queries: pass --queries FILE ({WHERE_FROM})")
        return options.BankOptions(self.queries, bank.bank_column), replace(self, queries=None)


def check(
    subject: Subject,
    bank: options.BankOptions,
    judging: options.PairsOptions,
    pages: PageOptions,
    connection: options.Connection,
    collection: Annotated[
        str | None, typer.Argument(help="Collection, corrected or not; none with --items.")
    ] = None,
    show_all: ShowAll = False,
    as_json: options.AsJson = False,
) -> None:
    """Show faults of the data and whether correction helps, and, on a page, the hubs.

    Needs past queries only; with --pairs it measures the gain. Writes no row; the verdict is stored
    at the end, and a line says if that fails. Exits with 3 if a fault of the data makes the figures
    worthless, or if the verdict is to leave the search alone; the page is written first.

    Example: milvus-hubness check --items items.npy --queries past.npy --pairs pairs.npz
    """
    # torch, which any check needs, takes seconds: first what is wrong with the command line.
    subject.expect(collection)
    if subject.queries and judging.pairs and (bank.bank or not subject.items):
        raise typer.BadParameter("give --queries or --pairs, not both")
    if subject.items:
        bank, subject = subject.past_queries(bank)
    read = (
        ("--items", subject.items),
        ("--bank", bank.bank),
        ("--queries", subject.queries),
        ("--pairs", judging.pairs),
        ("--pairs-queries", judging.pairs_queries),
    )
    pages.expect_possible(read, subject.queries or judging.pairs)

    with console.progress_bars(has_lines=True) as progress:
        store = None if collection is None else connection.open()
        result, hubs = _checked(subject, bank, judging, pages, store, collection, progress)

    tuning = result.tuning.to_dict()
    metric = subject.metric
    files = ["--items", str(subject.items), *(["--metric", metric] if metric != METRIC else [])]
    if judging.key_column:
        files += ["--key-column", judging.key_column]
    to_type = next_command(
        tuning,
        collection,
        bank,
        connection,
        subject.field,
        target_bank=subject.target_bank,
        files=files,
    )
    if any(fault.is_grave for fault in result.faults):
        to_type = "remedy the data as the first lines say, then check again."
    data = {**result.to_dict(diagnosed=False), "next": to_type}
    if hubs is not None:
        data |= hubs.to_dict()
    console.show_result(
        as_json, {"check": data}, lambda: _show(result, tuning, to_type, hubs, show_all)
    )
    if collection is not None:
        store_verdict(connection.open(), result.title, result.unstored)
    if hubs is not None:
        hubs.warn()
    if result.is_refused:
        raise typer.Exit(console.REFUSED)


def _checked(
    subject: Subject,
    bank: options.BankOptions,
    judging: options.PairsOptions,
    pages: PageOptions,
    store: Store | None,
    collection: str | None,
    progress: Progress,
) -> tuple[Check, Hubs | None]:
    """Return the check, and the hubs if an option is about them, whose page is written then.

    store: that of the collection; None for items in a file.
    """
    from milvus_hubness.correction.banks.bank import QueryBank
    from milvus_hubness.jobs.common.gallery import Gallery, expect_distinct, key_column_of
    from milvus_hubness.jobs.common.inputs import read_texts
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.reports.check import checked, read

    judgements = judging.read(pages.query_text, other=subject.items)
    if pages.runs is not None:
        # Before the work, not after it.
        pages.runs.check(judgements)
    reads = QueryBank.load if store is None else partial(options.read_vectors, store)
    queries = None
    texts = None
    if subject.queries is not None:
        queries = reads(subject.queries)
        if queries is not None and pages.query_text is not None:
            texts = read_texts(store, subject.queries, pages.query_text, len(queries))

    source: Store | Gallery
    if store is None:
        assert subject.items is not None, "the command line names items or a collection"
        past: QueryBank | None = QueryBank.load(bank.bank, bank.bank_column)
        targets: QueryBank | str | None = subject.target_bank
        key_column = key_column_of(subject.items, judging.key_column, judging.pairs)
        source = Gallery.load(subject.items, subject.metric, key_column=key_column)
        if pages.runs is not None:
            expect_distinct(source.keys, source.title)
    else:
        assert collection is not None, "the command line names items or a collection"
        past = bank.read(store, collection, subject.field)
        targets = options.read_vectors(store, subject.target_bank)
        source = store
    reading = read(
        source,
        collection,
        Recipe(past, queries=queries, target_bank=targets, kind=subject.kind),
        judgements=judgements,
        measure=judging.measure,
        field=subject.field,
        progress=progress,
    )
    detail = pages.detail(texts)
    if detail is not None:
        # Before the methods are tried, which takes long.
        detail.expect_possible(reading.inputs.gallery)
    result = checked(reading, quick=subject.quick, progress=progress)

    # Here, where the progress is shown.
    if detail is None:
        return result, None
    return result, Hubs.written(result.diagnosed(detail), pages, judgements)


def _show(
    result: Check, tuning: dict[str, Any], to_type: str, hubs: Hubs | None, show_all: bool
) -> None:
    """Print the faults, the verdict, and then what it rests on."""
    if result.faults:
        console.show_styled(("First: the data", "bold"))
        console.say("\n".join(f"- {fault}" for fault in result.faults) + "\n")
    show_verdict(result.title, tuning, to_type)
    show_trials(tuning, show_all=show_all)
    show_reasons(tuning, show_all=show_all)
    if hubs is not None:
        show_diagnosis(hubs.diagnosis, hubs.run_paths)
    page = hubs.named.page if hubs is not None else None
    shown = "--page hubness.html writes a page" if page is None else page
    console.say(f"\nThe hubs, and what correction does about them: {shown}")
