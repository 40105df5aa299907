"""The command milvus-hubness refresh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import (
    KEEP_FORMER,
)
from milvus_hubness.basics.texts import points
from milvus_hubness.cli import console, options
from milvus_hubness.errors import InvalidParameter, LeaseHeld

if TYPE_CHECKING:
    from milvus_hubness.jobs.refresh.result import RefreshResult


@dataclass(frozen=True)
class Refreshing:
    """The options of the same names in RefreshOptions."""

    field: options.Field = None
    profile: Annotated[str | None, "Bias profile; a new name adds a profile, from --bank."] = None
    force: Annotated[
        bool,
        "Compute all biases again, even if they are unchanged, evaluated as worse, or advised against.",
    ] = False
    refit: Annotated[bool, "Fit sn, dbsn or blend again although nothing changed."] = False
    refit_share: Annotated[
        float | None,
        "Share of rows that are new or changed since the bank was fitted, from which on the "
        "sampled queries become the bank and all biases are computed. [default: never]",
    ] = None
    rename: Annotated[
        bool,
        "Give the collection's own name to the copy, as an alias; the former copy is renamed.",
    ] = False
    keep_former: Annotated[int, "Number of former copies that stay for a rollback."] = KEEP_FORMER
    restart_ttl: Annotated[
        bool,
        "Write all rows of a collection with a time to live, which starts again for each of them.",
    ] = False
    plan: Annotated[bool, "Show the refresh plan; write nothing."] = False

    def fields(self) -> dict[str, Any]:
        """Return the fields of RefreshOptions that these options set.

        Raises InvalidParameter, which names options as the shell has them.
        """
        fields = vars(self).copy()
        del fields["plan"]
        share = fields.pop("refit_share")
        if share is None:
            fields["refit"] = "always" if self.refit else "changed"
            return fields

        if self.refit:
            raise InvalidParameter(
                "--refit-share decides whether to refit: leave out --refit, which has decided"
            )
        if not 0 < share <= 1:
            raise InvalidParameter(f"--refit-share is above 0 and up to 1, got {share:g}")
        fields["refit"] = share
        return fields


def refresh(
    collection: Annotated[str, typer.Argument(help="Corrected collection or its alias.")],
    recipe: options.RecipeOptions,
    refreshing: Refreshing,
    judging: options.PairsOptions,
    connection: options.Connection,
    no_prior: Annotated[bool, "Drop the prior: only the biases count."] = False,
    rows_per_second: options.RowsPerSecond = None,
    once: Annotated[bool, "For CronJobs: exit with 0 if another process holds the lease."] = False,
    as_json: options.AsJson = False,
) -> None:
    """Compute new biases if the bank, the method or a prior changed, in a copy that takes over the aliases.

    Biases beside the vectors are written next to the old ones, and rows without a bias get theirs.

    Exits with 3 if the new biases were not adopted: the verdict on --bank is to leave the collection
    alone, they are evaluated as worse, or rows that expire would live longer.

    Example: milvus-hubness refresh products --bank new_queries.npy --plan
    """
    from milvus_hubness.correction.state import require_state
    from milvus_hubness.jobs.common.progress import Throttle
    from milvus_hubness.jobs.refresh.options import RefreshOptions
    from milvus_hubness.jobs.refresh.run import refresh

    store = connection.open()
    # --param alone changes the estimator of the profile, so its state is read first.
    current = None
    if recipe.names_estimator:
        state = require_state(store.info(collection).state_of(refreshing.field), collection)
        profile = state.profiles.get(refreshing.profile or state.active)
        current = profile.estimator if profile else None

    refresh_options = RefreshOptions(
        recipe.recipe(
            store,
            collection,
            refreshing.field,
            key_column=judging.key_column,
            pairs=judging.pairs,
            current=current,
            no_prior=no_prior,
        ),
        **refreshing.fields(),
        judgements=judging.read(other=recipe.prior_from),
        measure=judging.measure,
        throttle=Throttle(rows_per_second),
    )
    try:
        with console.progress_bars() as progress:
            result = refresh(
                store, collection, options=refresh_options, plan=refreshing.plan, progress=progress
            )
    except LeaseHeld as error:
        if not once:
            raise
        # A CronJob that fails is run again or raises an alarm; here another process does the work.
        data = {"refresh": {"collection": collection, "action": "busy", "reason": str(error)}}
        text = {"busy": data["refresh"]["reason"]}
        console.show_result(
            as_json, data, lambda: console.show_facts(f"Nothing done to {collection}", text)
        )
        return

    console.show_result(as_json, {"refresh": result.to_dict()}, lambda: show_refresh(result))
    if result.action == "refused":
        raise typer.Exit(console.REFUSED)


def show_refresh(result: RefreshResult) -> None:
    """Print what a refresh has done or would do."""
    planned = result.planned
    evaluation = result.judged
    facts = {
        "to do" if planned else "done": f"{result.action} ({result.reason})",
        "rows scanned": f"{result.scanned:,}",
        "rows to write" if planned else "rows written": f"{result.written:,}",
        "epoch": result.epoch,
        "took": f"{result.seconds} s",
    }
    facts["verdict"] = console.verdict_words(result.verdict.facts if result.verdict else None)
    if evaluation:
        excess = evaluation.excess_answers
        shares = ", ".join(f"{name} {share:.1%}" for name, share in excess.items())
        skews = ", ".join(f"{name} {skew:.2f}" for name, skew in evaluation.skewness.items())
        kind = "real" if evaluation.real_queries else "held-out"
        facts["excess answers taken by hubs"] = shares
        facts["skewness of N_10"] = skews
        among = _among(evaluation.items, result.rows)
        facts["measured on"] = f"{evaluation.queries:,} {kind} queries, {among}"
        facts["old top tens kept"] = f"{evaluation.overlap:.1%}"
        if evaluation.measured:
            measured = [f"{name} {value:.1%}" for name, value in evaluation.measured.items()]
            measured += [
                f"new over {name} {points(gain)}" for name, gain in evaluation.gains.items()
            ]
            among = _among(evaluation.measured_rows, result.rows)
            facts[evaluation.measure] = f"{', '.join(measured)}, {among}"

    if result.unfitted_share is not None:
        facts["rows new or changed"] = f"{result.unfitted_share:.1%} since the bank was fitted"
    facts |= _copy_facts(result)
    facts["former copy"] = result.former_copy
    facts["dropped"] = ", ".join(result.dropped)

    title = "Would refresh" if planned else "Refreshed"
    if result.action == "refused":
        title = "Would not refresh" if planned else "Did not refresh"

    console.show_facts(f"{title} {result.collection}", facts)


def _among(measured: int, rows: int) -> str:
    """Return among how many rows something is measured. rows: of the collection."""
    if measured >= rows:
        return f"among {measured:,} rows"
    return f"among {measured:,} of {rows:,} rows, which flatters all three"


def _copy_facts(result: RefreshResult) -> dict[str, object]:
    """Return what a planned copy takes."""
    copy = result.copy
    if copy is None:
        return {}
    names = ", ".join(copy.names)
    if copy.renamed:
        names += f" (the former copy becomes {copy.renamed})"
    memory = {name: f"{size / 2**20:,.1f} MiB" for name, size in copy.memory_bytes.items()}
    minutes = "less than a minute"
    if copy.seconds > 60:
        minutes = f"{copy.seconds / 60:,.1f} minutes"
    return {
        "copy": f"{copy.target}, {copy.rows:,} rows",
        "names that move": names,
        "memory": "{source} now, {target} for the copy".format(**memory),
        "about": f"{minutes}, and {copy.waiting_seconds:,.0f} s until clients follow",
        "note": "\n".join(copy.remarks),
    }
