"""The command milvus-hubness status, and what it shows of sampled queries."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.texts import agreement_sentence, describe, span
from milvus_hubness.cli import console, options

if TYPE_CHECKING:
    from milvus_hubness.jobs.refresh.sampling import SamplingStatus, Variety
    from milvus_hubness.jobs.refresh.status import Status


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


def show_samplings(collection: str, statuses: list[SamplingStatus]) -> None:
    """Print how queries of a collection are sampled, and whether the samples are enough."""
    from milvus_hubness.jobs.refresh.sampling import ENOUGH

    for status in statuses:
        sampling = status.sampling
        facts: dict[str, object] = {
            "queries of": f"field {sampling.field}",
            "sampled": f"{sampling.rate:.3%} of live queries, into {sampling.samples_collection}",
            "samples": f"{status.samples:,} of at most {sampling.size:,}",
        }
        if status.first is not None and status.last is not None:
            facts["from"] = f"{_moment(status.first)} to {_moment(status.last)} UTC"
        if status.samples < ENOUGH:
            facts["takes"] = (
                f"about {ENOUGH / sampling.rate:,.0f} searches until {ENOUGH:,} are sampled, which are "
                "enough for a bank"
            )
        if status.variety is not None:
            facts |= _variety_facts(status.variety)
        console.show_facts(f"Sampled queries of {collection}", facts)


def _variety_facts(variety: Variety) -> dict[str, object]:
    from milvus_hubness.jobs.common.samples import NEAR_COPIES

    return {
        "varied as": f"{variety.effective:,.0f} queries, each sent equally often; "
        f"{variety.distinct:,} of {variety.compared:,} are no near copies (cosine above "
        f"{NEAR_COPIES:g}), the largest group has "
        f"{variety.largest:.1%}",
        "enough": f"{variety.enough}; with labels, R@1 to ± {variety.interval:.1f} points",
    }


def _moment(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M}"
