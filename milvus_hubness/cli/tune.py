"""The command milvus-hubness tune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

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
    from milvus_hubness.correction.banks.bank import QueryBank
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.jobs.store.protocols import Store


@dataclass(frozen=True)
class Trying:
    """The options that say what is tried with the bank, and on which queries."""

    target_bank: options.TargetBank = None
    queries: options.Queries = None
    prior: Annotated[
        str | None,
        "Field of the rows that says how often each is wanted; its weight is chosen on --pairs.",
    ] = None
    prior_from: Annotated[
        str | None, "In place of --prior: a log of clicks in the form of --pairs."
    ] = None
    kind: options.Kind = None

    def __post_init__(self) -> None:
        # It raises for a prior with two sources.
        _ = self.preferring

    @property
    def preferring(self) -> options.PriorOptions:
        return options.PriorOptions(self.prior, self.prior_from)

    def recipe(self, store: Store, bank: QueryBank | None, judging: options.PairsOptions) -> Recipe:
        """Return the recipe of these options with a bank. Raises as `Recipe`, and what reads files."""
        from milvus_hubness.jobs.common.recipe import Recipe

        return Recipe(
            bank,
            target_bank=options.read_vectors(store, self.target_bank),
            queries=options.read_vectors(store, self.queries),
            prior=self.preferring.read_prior(judging.key_column, judging.pairs),
            kind=self.kind,
        )

    def words(self, judging: options.PairsOptions) -> list[str]:
        """Return the words of a command that name the prior."""
        from milvus_hubness.jobs.common.gallery import key_column_of

        if self.prior_from:
            column = key_column_of(self.prior_from, judging.key_column, judging.pairs)
            words = ["--prior-from", self.prior_from]
            return [*words, "--key-column", column] if column else words
        return ["--prior", self.prior] if self.prior else []


def tune(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    judging: options.PairsOptions,
    connection: options.Connection,
    trying: Trying,
    field: options.Field = None,
    replaces: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Store the verdict even in place of one on this bank that rests on more: on labelled "
            "queries, or on real ones.",
        ),
    ] = False,
    show_all: ShowAll = False,
    as_json: options.AsJson = False,
) -> None:
    """Try every method on a collection and recommend one, or none; migrate and refresh follow it.

    Compares R@1, or another --measure, with --pairs, and otherwise how evenly answers fall on the
    items. Without --bank, uses the bank of a corrected collection.

    Example: milvus-hubness tune products --bank queries.npy --pairs pairs.parquet
    """
    from milvus_hubness.reports.tuned import CollectionTuning

    if trying.queries and judging.pairs:
        raise typer.BadParameter("give --queries or --pairs, not both")
    store = connection.open()
    judgements = judging.read(other=trying.prior_from)
    with console.progress_bars() as progress:
        reading = CollectionTuning.read(
            store,
            collection,
            trying.recipe(store, bank.read(store, collection, field), judging),
            field=field,
            judgements=judgements,
            measure=judging.measure,
            progress=progress,
        )
        tuned = reading.run(replaces=replaces, progress=progress)
    tuning = tuned.tuning.to_dict()

    # The clicks are in no verdict, unlike a field; and a refresh has a prior, which it would keep.
    prior_words = trying.words(judging)
    to_type = next_command(
        tuning,
        collection,
        bank,
        connection,
        field,
        target_bank=trying.target_bank,
        prior=prior_words,
    )

    def show() -> None:
        show_verdict(collection, tuning, to_type)
        show_trials(tuning, show_all=show_all)
        show_reasons(tuning, show_all=show_all)
        if prior_words and judgements is None:
            console.say(NO_WEIGHT)

    console.show_result(as_json, {"tune": {**tuning, "next": to_type}}, show)
    store_verdict(store, reading.info.name, tuned.unstored, replaces=replaces)


NO_WEIGHT = (
    "\nThe weight of the prior stays 0: only right answers can choose it (--pairs), or "
    "--prior-weight of migrate, enable and refresh"
)
