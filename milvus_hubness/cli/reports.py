"""The commands milvus-hubness tune and status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.texts import (
    agreement_sentence,
    describe,
    span,
)
from milvus_hubness.cli import console, options
from milvus_hubness.cli.bank import show_samplings
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
    from milvus_hubness.jobs.refresh.sampling import SamplingStatus
    from milvus_hubness.jobs.refresh.status import Status
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


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    connection: options.Connection,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Show how a collection is corrected, how fresh its biases are, and what of its queries is sampled.

    Example: milvus-hubness status products --json
    """
    from milvus_hubness.jobs.common.lease import holder_of
    from milvus_hubness.jobs.refresh import status as statuses

    store = connection.open()
    result = statuses.status(store, collection, field=field)

    holder = holder_of(store, result.collection)
    lease = None
    if holder:
        lease = holder.model_dump(mode="json", include={"token", "owner", "expires_at"})
    samplings: list[SamplingStatus] = []
    if result.sampled_fields:
        from milvus_hubness.jobs.refresh.sampling import list_samplings

        samplings = list_samplings(store, result.collection)

    sampled = [sampling.to_dict() for sampling in samplings]
    data = {"status": {**result.to_dict(), "lease": lease, "samplings": sampled}}
    facts = {**status_words(result), "lease": holder}

    def show() -> None:
        console.show_facts(result.collection, facts)
        if samplings:
            show_samplings(result.collection, samplings)

    console.show_result(as_json, data, show)


LEFT_BY_A_JOB = "{}: repeat the command that was interrupted"


def status_words(status: Status) -> dict[str, object]:
    """Return the status in words."""
    facts: dict[str, object] = {
        "corrected": "yes" if status.corrected else "no",
        "rows": f"{status.rows:,}",
        "aliases": ", ".join(status.aliases),
        "left by a job": LEFT_BY_A_JOB.format(", ".join(status.leftovers))
        if status.leftovers
        else None,
        "verdicts": _verdicts_in_words(status),
    }
    # A corrected collection has all three; they are tested for the sake of their types.
    if status.estimator and status.bank and status.age_seconds is not None:
        field = f"{status.field or console.UNNAMED}, {status.dim}-d {status.metric}"
        ago = span(status.age_seconds)
        facts |= {
            "phase": status.phase,
            "copied from": status.source if status.where == "vector" else None,
            "field": f"{field}, stored {status.width} wide",
            "biases": _bias_location(status),
            "quantizer": OTHER_COLUMNS if status.needs_other_columns else None,
            "estimator": f"{describe(status.estimator)}, strength {status.strength}",
            "agreement": agreement_sentence(status.estimator),
            "prior": console.prior_words(status.prior),
            "kinds": console.kind_words(status.kinds),
            "profiles": ", ".join(status.profiles) if len(status.profiles) > 1 else None,
            "corrected fields": ", ".join(status.corrected_fields)
            if len(status.corrected_fields) > 1
            else None,
            "bank": "{collection}, {count:,} queries, {fingerprint:.19}".format(**status.bank),
            "rows without bias": f"{status.pending:,}",
            "last refresh": f"{ago} ago ({status.refreshed_at}), epoch {status.epoch}",
            "bank fitted": _fit_words(status),
            "new bank": status.new_bank_due,
        }

    return facts


def _fit_words(status: Status) -> str:
    """Return when the bank was fitted, and how many rows are new or changed since."""
    share = status.unfitted_share
    since = "rows that are new or changed since are not counted yet"
    if share is not None:
        since = f"{share:.1%} of the rows are new or changed since"
    return f"{status.fitted_at}; {since}"


OTHER_COLUMNS = "needs biases in more columns: a refresh makes a copy that has them"


def _verdicts_in_words(status: Status) -> str | None:
    """Return a line for each stored verdict, which names the field where it may be another one."""
    fields = {verdict["field"] for verdict in status.verdicts}
    if status.field is not None:
        fields.add(status.field)
    lines = [_verdict_words(verdict, named=len(fields) > 1) for verdict in status.verdicts]
    return "\n".join(lines) or None


def _verdict_words(verdict: dict[str, Any], *, named: bool) -> str:
    """Return a stored verdict in one line. Of fingerprints, the first letters are enough.

    named: whether with the field.
    """
    line = "{tuned_at:.16} UTC on {bank_fingerprint:.19}".format(**verdict)
    if named:
        line += f", field {verdict['field'] or console.UNNAMED}"
    if verdict["in_use"]:
        line += ", the bank in use"
    if verdict["kind"]:
        line += f", by the kinds of {verdict['kind']}"
    line += f": {verdict['verdict']}"
    if verdict["choice"]:
        line += f", {describe(verdict['choice'])} at strength {verdict['strength']:g}"
    return f"{line}, by {verdict['judged_by']}"


def _bias_location(status: Status) -> str:
    columns = ""
    if status.spread and status.spread > 1:
        columns = f", each in {status.spread} columns, times {status.bias_scale:g}, for a quantizer"

    if status.missed is None:
        return f"in the vectors{columns}"

    location = "in keys of the payloads"
    if status.side_collection:
        location = f"in the side collection {status.side_collection}"
    missed = f"{status.candidates} candidates a search miss {status.missed:.1%} of the top 10"
    return f"{location}; {missed}"
