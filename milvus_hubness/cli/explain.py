"""The command milvus-hubness explain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from milvus_hubness.basics.texts import visible_line
from milvus_hubness.cli import console, options
from milvus_hubness.errors import InvalidInput

if TYPE_CHECKING:
    from milvus_hubness.correction.estimators import Estimator
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.reports.collections import BiasedGallery
    from milvus_hubness.reports.explain import QueryExplanation, RowExplanation

Top = Annotated[int, "Number of rows or queries to list.", {"min": 1}]


def explain(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    estimating: options.EstimatorOptions,
    connection: options.Connection,
    key: Annotated[str | None, typer.Argument(help="Primary key of the row to explain.")] = None,
    query: Annotated[
        str | None,
        "Queries, in the forms of --bank, of which to explain one. [default: those of the bank]",
    ] = None,
    query_number: Annotated[
        int | None, "Number of the query to explain, from 0. [default: 0 with --query]", {"min": 0}
    ] = None,
    query_text: options.QueryText = None,
    field: options.Field = None,
    top: Top = 10,
    as_json: options.AsJson = False,
) -> None:
    """Show why a row is found or not, or why the answers to a query stand where they stand.

    With KEY: its bias, and the bank queries that it answers, with its ranks before and after
    correction. With --query or --query-number: the scores, biases and ranks of the answers, and of
    KEY if it is given. A collection that is not corrected needs --bank.

    Example: milvus-hubness explain products 4711 --bank queries.parquet --query-text text
    """
    from milvus_hubness.jobs.common.inputs import read_texts
    from milvus_hubness.quality.measures import as_plain
    from milvus_hubness.reports import explain

    if key is None and query is None and query_number is None:
        raise typer.BadParameter(
            "nothing to explain: give the KEY of a row, --query FILE or --query-number"
        )

    # Texts are those of the queries to explain; the stored bank keeps vectors alone.
    texts_from = query or bank.bank
    if query_text and not texts_from:
        raise InvalidInput(
            "the stored bank has no texts: pass --bank FILE, the file that it was read from"
        )

    estimator = estimating.estimator()
    store = connection.open()
    queries = options.read_vectors(store, query)
    biased = read_rows(store, collection, bank, estimator, field)
    texts = None
    if query_text:
        texts = read_texts(store, texts_from, query_text, len(queries or biased.bank))

    if query is None and query_number is None:
        row = explain.explain_row(biased, str(key), texts)
        result = {"explain": {"collection": biased.info.name, "row": as_plain(row)}}
        console.show_result(as_json, result, lambda: _show_row(row, top))
        return

    answers = explain.explain_query(
        biased, queries, query_number or 0, top=top, key=key, texts=texts
    )
    result = {"explain": {"collection": biased.info.name, "query": as_plain(answers)}}
    console.show_result(as_json, result, lambda: _show_answers(answers, query_number or 0, key))


def read_rows(
    store: Store,
    collection: str,
    bank: options.BankOptions,
    estimator: Estimator | None,
    field: str | None,
) -> BiasedGallery:
    from milvus_hubness.reports.collections import read_biased

    with console.progress_bars() as progress:
        return read_biased(
            store,
            collection,
            bank.read(store, collection, field),
            estimator=estimator,
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
