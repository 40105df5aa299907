"""What `milvus-hubness hubs` says of one row, or of the answers to one query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from milvus_hubness.basics.texts import visible_line
from milvus_hubness.cli import console, options
from milvus_hubness.errors import InvalidInput

if TYPE_CHECKING:
    from milvus_hubness.correction.estimators import Estimator
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.reports.biased import BiasedGallery
    from milvus_hubness.reports.explain import QueryExplanation, RowExplanation

TOP = 10
"""Rows or queries of an explanation, unless a number is given."""


@dataclass(frozen=True)
class Explaining:
    """The options that choose one row, or one query, to explain."""

    row: Annotated[
        str | None,
        "Primary key of a row: show its bias, and the bank queries that it answers, with its ranks before "
        "and after correction; with a query, its place among the answers.",
    ] = None
    query: Annotated[
        str | None,
        "Queries, in the forms of --bank: show the scores, biases and ranks of the answers to one of them. "
        "[default: those of the bank]",
    ] = None
    query_number: Annotated[
        int | None, "Number of that query, from 0. [default: 0 with --query]", {"min": 0}
    ] = None
    query_text: options.QueryText = None

    def __post_init__(self) -> None:
        if self.query_text and not self.is_named:
            raise typer.BadParameter(
                "--query-text needs --row, --query or --query-number, whose texts it shows"
            )

    @property
    def is_named(self) -> bool:
        """Whether something is to be explained."""
        return self.option != ""

    @property
    def option(self) -> str:
        """The first option that names something to explain; empty if none does."""
        named = {"--row": self.row, "--query": self.query, "--query-number": self.query_number}
        return next((option for option, value in named.items() if value is not None), "")

    def show(
        self,
        store: Store,
        collection: str,
        bank: options.BankOptions,
        estimator: Estimator | None,
        field: str | None,
        top: int | None,
        *,
        as_json: bool,
    ) -> None:
        """Explain the row or the answers."""
        from milvus_hubness.jobs.common.inputs import read_texts
        from milvus_hubness.quality.measures import as_plain
        from milvus_hubness.reports import explain

        # Texts are those of the queries to explain; the stored bank keeps vectors alone.
        texts_from = self.query or bank.bank
        if self.query_text and not texts_from:
            raise InvalidInput(
                "the stored bank has no texts: pass --bank FILE, the file that it was read from"
            )

        queries = options.read_vectors(store, self.query)
        biased = read_rows(store, collection, bank, estimator, field)
        texts = None
        if self.query_text:
            count = len(queries or biased.bank)
            texts = read_texts(store, texts_from, self.query_text, count)

        shown = top or TOP
        if self.query is None and self.query_number is None:
            row = explain.explain_row(biased, str(self.row), texts)
            result = {"hubs": {"collection": biased.title, "row": as_plain(row)}}
            console.show_result(as_json, result, lambda: _show_row(row, shown))
            return

        number = self.query_number or 0
        answers = explain.explain_query(
            biased, queries, number, top=shown, key=self.row, texts=texts
        )
        result = {"hubs": {"collection": biased.title, "query": as_plain(answers)}}
        console.show_result(as_json, result, lambda: _show_answers(answers, number, self.row))


def read_rows(
    store: Store,
    collection: str,
    bank: options.BankOptions,
    estimator: Estimator | None,
    field: str | None,
) -> BiasedGallery:
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.reports.biased import read_biased

    with console.progress_bars() as progress:
        return read_biased(
            store,
            collection,
            Recipe(bank.read(store, collection, field), estimator=estimator),
            field=field,
            progress=progress,
        )


def _show_row(row: RowExplanation, top: int) -> None:
    counts = f"of {row.before:,} of {row.bank_size:,} bank queries -> {row.after:,}"
    facts = {
        "bias": f"{row.bias:+.4f}, larger than that of {row.rows_with_less_bias:.1%} of the rows",
        "strength": f"{row.strength:g}",
        f"in the top {row.k}": counts,
    }
    console.show_facts(f"Row {row.key}, without and with correction", facts)
    if not row.queries:
        console.say("\nIt is in the results of no bank query, before or after correction.")
        return

    lines = [
        (
            f"{rank.query}: {rank.text}" if rank.text else str(rank.query),
            f"{rank.raw_score:.4f}",
            f"{rank.corrected_score:.4f}",
            f"{rank.raw_rank:,}",
            f"{rank.corrected_rank:,}",
        )
        for rank in row.queries[:top]
    ]
    title = f"\nThe first {len(lines)} of {len(row.queries):,} bank queries that it answers"
    console.show_table(title, ("query", "raw score", "corrected", "raw rank", "rank"), lines)


def _show_answers(explanation: QueryExplanation, number: int, key: str | None) -> None:
    # Under L2, scores are squared distances: a bias makes an item farther.
    sign = "+ 2 x" if explanation.metric == "L2" else "-"
    by_kind = " + by kind" if explanation.kind else ""
    formula = f"raw score{by_kind} {sign} {explanation.strength:g} x bias = corrected score"
    gate = "no bias: its best item without biases is not among those that the gate lets through"
    facts = {
        "text": explanation.text and visible_line(explanation.text),
        "gate": gate if explanation.gated else None,
        "kinds": explanation.kind,
        "scores": f"{explanation.metric}: {formula}",
    }
    console.show_facts(f"Query {number}", facts)
    lines = [
        (
            f"> {answer.key}" if str(answer.key) == key else str(answer.key),
            f"{answer.raw_score:.4f}",
            *([f"{answer.by_kind:+.4f}"] if explanation.kind else []),
            f"{answer.bias:+.4f}",
            f"{answer.corrected_score:.4f}",
            f"{answer.raw_rank:,}",
            f"{answer.corrected_rank:,}",
        )
        for answer in explanation.answers
    ]
    of_kind = ["by kind"] if explanation.kind else []
    headings = ("key", "raw score", *of_kind, "bias", "corrected", "raw rank", "rank")
    console.show_table(None, headings, lines)
