"""The commands milvus-hubness tune, diagnose and status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import RUN_DEPTH
from milvus_hubness.basics.files.writing import check_writable, expect_different
from milvus_hubness.basics.texts import (
    agreement_sentence,
    describe,
    points,
    span,
)
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
    from milvus_hubness.jobs.refresh.status import Status
    from milvus_hubness.quality.groups import Group
    from milvus_hubness.quality.measures import Interval
    from milvus_hubness.reports.report import Diagnosis
    from milvus_hubness.reports.runs import RunFiles


def tune(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    judging: options.PairsOptions,
    connection: options.Connection,
    target_bank: options.TargetBank = None,
    queries: options.Queries = None,
    prior: Annotated[
        str | None,
        "Field of the rows that says how often each is wanted; its weight is chosen on --pairs.",
    ] = None,
    prior_from: Annotated[
        str | None, "In place of --prior: a log of clicks in the form of --pairs."
    ] = None,
    kind: options.Kind = None,
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
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.reports.collections import tune_collection

    if queries and judging.pairs:
        raise typer.BadParameter("give --queries or --pairs, not both")

    preferring = options.PriorOptions(prior, prior_from)
    store = connection.open()
    query_vectors = options.read_vectors(store, queries)
    judgements = judging.read(other=prior_from)
    with console.progress_bars() as progress:
        tuned = tune_collection(
            store,
            collection,
            Recipe(
                bank.read(store, collection, field),
                target_bank=options.read_vectors(store, target_bank),
                queries=query_vectors,
                prior=preferring.read_prior(judging.key_column, judging.pairs),
                kind=kind,
            ),
            field=field,
            judgements=judgements,
            measure=judging.measure,
            replaces=replaces,
            progress=progress,
        )
    tuning = tuned.tuning.to_dict()

    to_type = next_command(tuning, collection, bank, connection, field)

    def show() -> None:
        show_verdict(collection, tuning, to_type)
        show_trials(tuning, show_all=show_all)
        show_reasons(tuning, show_all=show_all)
        if (prior or prior_from) and judgements is None:
            console.say(NO_WEIGHT)

    console.show_result(as_json, {"tune": {**tuning, "next": to_type}}, show)
    store_verdict(store, tuned.title, tuned.unstored, replaces=replaces)


NO_WEIGHT = (
    "\nThe weight of the prior stays 0: only right answers can choose it (--pairs), or "
    "--prior-weight of migrate, enable and refresh"
)


def diagnose(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    estimating: options.EstimatorOptions,
    judging: options.PairsOptions,
    connection: options.Connection,
    queries: Annotated[
        str | None, "Queries that are not in the bank: a file, or collection:NAME."
    ] = None,
    query_text: options.QueryText = None,
    field: options.Field = None,
    kind: Annotated[
        str | None,
        "If not corrected yet: field of the rows with the kind of each, or `auto`, as --kind of "
        "migrate; a corrected collection has its own.",
    ] = None,
    page: Annotated[Path, "HTML page to write."] = Path("hubness.html"),
    image_field: Annotated[
        str | None,
        "Scalar field with the URL of an image of the row, or with its path below --image-folder.",
    ] = None,
    image_folder: Annotated[
        Path | None, "Folder of the images that the page embeds; files elsewhere are not read."
    ] = None,
    slice_by: Annotated[
        str | None, "Scalar field; each of its frequent values gets a report of its own."
    ] = None,
    group_by: Annotated[
        str | None,
        "Scalar field; each of its frequent values gets its share of the answers, and the share "
        "due to it.",
    ] = None,
    max_skewness: Annotated[
        float | None, "Exit with 3 if the skewness after correction is above this."
    ] = None,
    min_gain: Annotated[
        float | None,
        "Exit with 3 if correction gains fewer points of --measure than this; needs --pairs.",
    ] = None,
    save_run: Annotated[
        tuple[Path, Path] | None,
        "Two files to write for evaluators such as trec_eval: the rankings of all queries without "
        "and with correction, as TREC runs, or as dictionaries if the names end in .json.",
        {"metavar": "RAW CORRECTED"},
    ] = None,
    save_qrels: Annotated[
        Path | None,
        "File to write with the judgements that the figures are about; needs --save-run.",
    ] = None,
    run_depth: Annotated[int, "Rows of each query in --save-run.", {"min": 1}] = RUN_DEPTH,
    as_json: options.AsJson = False,
) -> None:
    """Write a page that shows the hubs of a collection, and what correction does or would do about them.

    Takes --queries or --pairs; a collection that is not corrected needs --bank. Exits with 3 if a
    measured value is beyond --max-skewness or --min-gain; the page is written first.

    Example: milvus-hubness diagnose products --pairs pairs.parquet --page hubness.html
    """
    from milvus_hubness.jobs.common.inputs import read_texts
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.reports import collections
    from milvus_hubness.reports.images import Images
    from milvus_hubness.reports.page import render
    from milvus_hubness.reports.runs import QRELS_OPTION, RUN_OPTION, RunFiles

    if image_folder is not None:
        if image_field is None:
            raise typer.BadParameter(
                "--image-folder needs --image-field, the field that names the images"
            )
        if not image_folder.is_dir():
            raise typer.BadParameter(f"--image-folder {str(image_folder)!r} is no folder: name one")

    if min_gain is not None and not judging.pairs:
        raise typer.BadParameter("--min-gain needs right answers: pass --pairs")
    if bool(queries) == bool(judging.pairs):
        raise typer.BadParameter("give either --queries or --pairs")

    runs = None
    if save_run is not None:
        runs = RunFiles(*save_run, qrels=save_qrels, depth=run_depth)
        read = [
            (option, Path(path))
            for option, path in (
                ("--bank", bank.bank),
                ("--queries", queries),
                ("--pairs", judging.pairs),
                ("--pairs-queries", judging.pairs_queries),
            )
            if path
        ]
        # Two inputs may be one file.
        for one in read:
            expect_different([one, *runs.named, ("--page", page)])
    elif save_qrels is not None:
        raise typer.BadParameter(
            f"{QRELS_OPTION} needs {RUN_OPTION}, whose rankings they are to judge"
        )

    # Before the work, not after it.
    check_writable(page)
    estimator = estimating.estimator()
    store = connection.open()
    judgements = judging.read(query_text)
    query_vectors = options.read_vectors(store, queries)
    texts = None
    if query_text and queries and query_vectors is not None:
        texts = read_texts(store, queries, query_text, len(query_vectors))

    with console.progress_bars() as progress:
        diagnosis = collections.diagnose(
            store,
            collection,
            query_vectors,
            Recipe(bank.read(store, collection, field), estimator=estimator, kind=kind),
            judgements=judgements,
            measure=judging.measure,
            field=field,
            texts=texts,
            slice_by=slice_by,
            group_by=group_by,
            runs=runs,
            progress=progress,
        )

    images = Images(image_folder)
    console.write_page(page, render(diagnosis, image_field, images))
    crossed = _crossed(diagnosis, max_skewness, min_gain)
    result = {
        "diagnosis": diagnosis.to_dict(),
        "page": str(page),
        "crossed": crossed,
        "images_left_out": images.left_out,
        "runs": list(map(str, runs.paths)) if runs else [],
    }
    console.show_result(as_json, result, lambda: _show_diagnosis(diagnosis, page, runs))
    remark = None
    if runs and judgements:
        remark = runs.remark(diagnosis.measure, diagnosis.n_items, judgements)
    for warning in filter(None, (images.remark, remark)):
        console.say(f"milvus-hubness: warning: {warning}", to_stderr=True)

    # The page is written by now: who looks into a failed job finds it.
    for message in crossed:
        console.say(f"milvus-hubness: {message}", to_stderr=True)
    if crossed:
        raise typer.Exit(console.REFUSED)


def _crossed(diagnosis: Diagnosis, max_skewness: float | None, min_gain: float | None) -> list[str]:
    """Return a message about each threshold that a measured value is beyond."""
    skewness = diagnosis.after.skewness
    gain = diagnosis.gain
    messages = []
    if max_skewness is not None and skewness > max_skewness:
        messages.append(
            f"the skewness after correction, {skewness:.2f}, is above --max-skewness "
            f"{max_skewness:g}"
        )

    if min_gain is not None and gain is not None and 100 * gain.estimate < min_gain:
        messages.append(
            f"the gain of {diagnosis.measure}, {100 * gain.estimate:+.2f} points, is below "
            f"--min-gain {min_gain:g}"
        )

    return messages


def _show_diagnosis(diagnosis: Diagnosis, page: Path, runs: RunFiles | None = None) -> None:
    from milvus_hubness.quality.verdict import chance_excess

    before = diagnosis.before
    after = diagnosis.after
    measured = None
    if diagnosis.gain is not None:
        values = f"{diagnosis.value_before:.1%} -> {diagnosis.value_after:.1%}"
        measured = f"{values}: {points(diagnosis.gain)}"

    chance = chance_excess(diagnosis.k * diagnosis.n_queries / diagnosis.n_items)
    antihubs = diagnosis.antihubs
    reciprocity = diagnosis.reciprocity
    at_most = f"; at most {reciprocity.at_most:.1%}" if reciprocity.at_most < 1 else ""
    facts = {
        "queries": f"{diagnosis.n_queries:,} over {diagnosis.n_items:,} items",
        "strength": f"{diagnosis.strength:g}",
        f"skewness of N_{diagnosis.k}": f"{before.skewness:.2f} -> {after.skewness:.2f}",
        "reciprocity": (
            f"{reciprocity.before:.1%} -> {reciprocity.after:.1%} of {reciprocity.distinct:,} "
            f"distinct queries{at_most}"
        ),
        "largest hub": (
            f"{before.largest:,} -> {after.largest:,} of {diagnosis.n_queries:,} queries"
        ),
        f"answers from hubs, N_{diagnosis.k} ≥ {2 * diagnosis.k}": (
            f"{before.hub_occurrence:.1%} -> {after.hub_occurrence:.1%}"
        ),
        "excess answers taken by hubs": (
            f"{before.excess_answers:.1%} -> {after.excess_answers:.1%}; {chance:.1%} by chance"
        ),
        "items never found": (
            f"{antihubs.before:,} -> {antihubs.after:,}; {antihubs.by_chance:,.0f} by chance, with "
            f"{diagnosis.n_queries:,} queries"
        ),
        diagnosis.measure: measured,
        "the bank": next((str(one) for one in diagnosis.findings if one.name == "log"), None),
        "demand": diagnosis.demand.sentence if diagnosis.demand else None,
        "page": page,
        "runs": ", ".join(map(str, runs.paths)) if runs else None,
    }
    console.show_facts(f"{diagnosis.title}, without and with correction", facts)
    if diagnosis.slices:
        _show_slices(diagnosis)
    if diagnosis.kinds:
        _show_kinds(diagnosis)
    if diagnosis.groups:
        _show_groups(diagnosis)


def _show_slices(diagnosis: Diagnosis) -> None:
    rows = [
        (
            value.name,
            f"{value.items:,}",
            f"{value.share_before:.1%} -> {value.share_after:.1%}",
            f"{value.before.skewness:.2f} -> {value.after.skewness:.2f}",
            f"{100 * value.gain.estimate:+.1f}" if value.gain else "",
            ", ".join(str(hub.key) for hub in value.hubs),
        )
        for value in diagnosis.slices
    ]
    measures = ("items", "share of answers", "skewness", "gain, points", "worst hubs")
    console.show_table("\nBy value", (str(diagnosis.slice_by), *measures), rows)


def _show_kinds(diagnosis: Diagnosis) -> None:
    rows = []
    for kind in diagnosis.kinds:
        value = ""
        if kind.value_before is not None and kind.value_after is not None:
            value = f"{kind.value_before:.1%} -> {kind.value_after:.1%}"
        rows.append((*_share_cells(kind.shares), value))

    headings = ("kind", *_share_headings(diagnosis), diagnosis.measure if diagnosis.gain else "")
    title = f"\nBy kind: {diagnosis.kind}; excess of the first answers in points, 95%"
    console.show_table(title, headings, rows)


def _show_groups(diagnosis: Diagnosis) -> None:
    rows = list(map(_share_cells, diagnosis.groups))
    headings = (str(diagnosis.group_by), *_share_headings(diagnosis))
    title = "\nShares by value; excess of the first answers in points, 95%"
    console.show_table(title, headings, rows)


def _share_headings(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the headings of what `_share_cells` returns, without the first."""
    answers = ("first answers", f"first {diagnosis.k}", "excess, raw", "corrected")
    return ("items", "right answers", *answers)


def _share_cells(group: Group) -> tuple[str, ...]:
    return (
        group.name,
        f"{group.gallery:.1%}",
        f"{group.right.estimate:.1%}" if group.right else "",
        f"{group.first_before.estimate:.1%} -> {group.first_after.estimate:.1%}",
        f"{group.top_before.estimate:.1%} -> {group.top_after.estimate:.1%}",
        _in_points(group.excess_before),
        _in_points(group.excess_after),
    )


def _in_points(interval: Interval) -> str:
    estimate, low, high = (100 * bound for bound in interval)
    return f"{estimate:+.1f} ({low:+.1f} … {high:+.1f})"


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    connection: options.Connection,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Show how a collection is corrected, and how fresh its biases are.

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
    data = {"status": {**result.to_dict(), "lease": lease}}
    facts = {**status_words(result), "lease": holder}
    console.show_result(as_json, data, lambda: console.show_facts(result.collection, facts))


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
        "verdicts": "\n".join(map(_verdict_words, status.verdicts)) or None,
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


def _verdict_words(verdict: dict[str, Any]) -> str:
    """Return a stored verdict in one line. Of fingerprints, the first letters are enough."""
    line = "{tuned_at:.16} UTC on {bank_fingerprint:.19}".format(**verdict)
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
