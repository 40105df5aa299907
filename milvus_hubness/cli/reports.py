"""The commands milvus-hubness tune, diagnose and status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import STATE_TTL
from milvus_hubness.basics.texts import (
    agreement_sentence,
    describe,
    points,
    rounded_shares,
    span,
    visible_line,
)
from milvus_hubness.cli import console, options

if TYPE_CHECKING:
    from milvus_hubness.jobs.refresh.status import Status
    from milvus_hubness.reports.report import Diagnosis

MAX_TRIALS = 12
"""Trials that `tune` prints, without further ones in its choice."""
GATED = (
    "only queries whose raw best item is the nearest of some bank query{} are corrected, as with "
    "--gate 1{}; migrate, "
    "enable and refresh follow, and --gate 0 corrects all"
)
BANK_ALONE = (
    "Measured on the bank alone: this does not notice a bank of items instead of queries, or of "
    "one topic. "
    "Pass --queries or --pairs to be sure."
)


def tune(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    connection: options.Connection,
    target_bank: options.TargetBank = None,
    pairs: options.Pairs = None,
    queries: Annotated[
        str | None, "Queries without answers that are not in the bank: a file, or collection:NAME."
    ] = None,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Try every method on a collection and recommend one, or none; migrate and refresh follow it.

    Compares R@1 with --pairs, and otherwise how evenly answers fall on the items. Without --bank,
    uses the bank of a corrected collection.

    Example: milvus-hubness tune products --bank queries.npy --pairs pairs.parquet
    """
    from milvus_hubness.jobs.common.inputs import read_pairs
    from milvus_hubness.reports.collections import tune

    if queries and pairs:
        raise typer.BadParameter("give --queries or --pairs, not both")

    store = connection.open()
    query_vectors, answers = (
        read_pairs(pairs) if pairs else (options.read_vectors(store, queries), None)
    )
    with console.progress_bars() as progress:
        tuning = tune(
            store,
            collection,
            bank.read(store),
            field=field,
            queries=query_vectors,
            answers=answers,
            target_bank=options.read_vectors(store, target_bank),
            progress=progress,
        ).to_dict()

    note = BANK_ALONE if query_vectors is None else ""
    console.show_result(as_json, {"tune": tuning}, lambda: _show_tuning(collection, tuning, note))


def _show_tuning(collection: str, tuning: dict[str, Any], note: str) -> None:
    choice = tuning["choice"]
    parts = []
    weights = []
    if choice:
        parts = [choice]
        weights = [1]
        if tuning["labelled"]:  # Then a Blend is a mix of trials.
            parts = choice.get("estimators", parts)
            weights = choice.get("weights", weights)

    shares = dict(zip(map(describe, parts), rounded_shares(weights), strict=True))
    rows = []
    for number, trial in enumerate(tuning["rows"]):
        method = describe(trial["estimator"]) if trial["estimator"] else "as it is"
        is_alike = (trial["gate"], trial["gate_targets"]) == (
            tuning["gate"],
            tuning["gate_targets"],
        )
        if number <= MAX_TRIALS or (is_alike and method in shares):
            r1 = trial["r1"]
            gain = trial["gain"]
            gain_text = f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}" if gain else ""
            share = f"{shares.pop(method)}%" if is_alike and method in shares else ""
            gate = f", gate {trial['gate']}" if trial["gate"] else ""
            method += gate + (" over targets too" if trial["gate_targets"] else "")
            recall = "" if r1 is None else f"{100 * r1:.1f}"
            excess = f"{trial['excess_answers']:.1%}"
            rows.append((method, f"{trial['strength']:.2f}", recall, gain_text, excess, share))

    headings = ("method", "strength", "R@1", "gain, 95%", "excess answers", "share")
    console.show_table(f"The best of {len(tuning['rows']) - 1} trials", headings, rows)
    console.show_styled((f"\n{visible_line(collection)}: {tuning['verdict']}", "bold"))
    if choice:
        mixed = "the mean of the methods with a share, " if len(parts) > 1 else ""
        console.say(f"{mixed}{describe(choice)} at strength {tuning['strength']:.2f}")

    if tuning["gate"]:
        over = (" or target", " --gate-targets 1") if tuning["gate_targets"] else ("", "")
        console.say(GATED.format(*over))

    others = [row for row in tuning["findings"] if row["text"] not in tuning["reason"]]
    findings = [f"- {': '.join(filter(None, (row['text'], row['remedy'])))}" for row in others]
    console.say(
        "\n".join(
            filter(
                None, (tuning["reason"], *(["\nThe bank:"] if findings else []), *findings, note)
            )
        )
    )


def diagnose(
    collection: Annotated[str, typer.Argument(help="Collection, corrected or not.")],
    bank: options.BankOptions,
    estimating: options.EstimatorOptions,
    connection: options.Connection,
    queries: Annotated[
        str | None, "Queries that are not in the bank: a file, or collection:NAME."
    ] = None,
    pairs: options.Pairs = None,
    query_text: options.QueryText = None,
    field: options.Field = None,
    output: Annotated[Path, "HTML page to write."] = Path("hubness.html"),
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
        "Exit with 3 if correction gains fewer points of R@1 than this; needs --pairs.",
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a page that shows the hubs of a collection, and what correction does or would do about them.

    Takes --queries or --pairs; a collection that is not corrected needs --bank. Exits with 3 if a
    measured value is beyond --max-skewness or --min-gain; the page is written first.

    Example: milvus-hubness diagnose products --pairs pairs.parquet --output hubness.html
    """
    from milvus_hubness.jobs.common.inputs import read_bank, read_pairs, read_texts
    from milvus_hubness.reports import collections
    from milvus_hubness.reports.images import Images

    if image_folder is not None:
        if image_field is None:
            raise typer.BadParameter(
                "--image-folder needs --image-field, the field that names the images"
            )
        if not image_folder.is_dir():
            raise typer.BadParameter(f"--image-folder {str(image_folder)!r} is no folder: name one")

    if min_gain is not None and not pairs:
        raise typer.BadParameter("--min-gain needs right answers: pass --pairs")
    if bool(queries) == bool(pairs):
        raise typer.BadParameter("give either --queries or --pairs")

    console.check_writable(output)
    estimator = estimating.estimator()
    store = connection.open()
    query_vectors, answers = read_pairs(pairs) if pairs else (read_bank(store, str(queries)), None)
    texts = (
        read_texts(store, str(pairs or queries), query_text, len(query_vectors))
        if query_text
        else None
    )

    with console.progress_bars() as progress:
        diagnosis = collections.diagnose(
            store,
            collection,
            query_vectors,
            bank=bank.read(store),
            estimator=estimator,
            field=field,
            answers=answers,
            texts=texts,
            slice_by=slice_by,
            group_by=group_by,
            progress=progress,
        )

    images = Images(image_folder)
    console.write_page(output, collections.render(diagnosis, image_field, images))
    crossed = _crossed(diagnosis, max_skewness, min_gain)
    result = {
        "diagnosis": diagnosis.to_dict(),
        "page": str(output),
        "crossed": crossed,
        "images_left_out": images.left_out,
    }
    console.show_result(as_json, result, lambda: _show_diagnosis(diagnosis, output))
    if images.remark:
        console.say(f"milvus-hubness: warning: {images.remark}", to_stderr=True)

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
            f"the gain of R@1, {100 * gain.estimate:+.2f} points, is below --min-gain {min_gain:g}"
        )

    return messages


def _show_diagnosis(diagnosis: Diagnosis, page: Path) -> None:
    before = diagnosis.before
    after = diagnosis.after
    recall = None
    if diagnosis.gain is not None and diagnosis.retrieval_before and diagnosis.retrieval_after:
        r1s = f"{diagnosis.retrieval_before['R@1']:.1%} -> {diagnosis.retrieval_after['R@1']:.1%}"
        recall = f"{r1s}: {points(diagnosis.gain)}"

    facts = {
        "queries": f"{diagnosis.n_queries:,} over {diagnosis.n_items:,} items",
        "strength": f"{diagnosis.strength:g}",
        f"skewness of N_{diagnosis.k}": f"{before.skewness:.2f} -> {after.skewness:.2f}",
        "largest hub": f"{before.largest:,} -> {after.largest:,} of {diagnosis.n_queries:,} queries",
        f"answers from hubs, N_{diagnosis.k} ≥ {2 * diagnosis.k}": (
            f"{before.hub_occurrence:.1%} -> {after.hub_occurrence:.1%}"
        ),
        "excess answers taken by hubs": f"{before.excess_answers:.1%} -> {after.excess_answers:.1%}",
        "items never found": f"{diagnosis.antihubs.before:,} -> {diagnosis.antihubs.after:,}",
        "R@1": recall,
        "page": page,
    }
    console.show_facts(f"{diagnosis.title}, without and with correction", facts)
    if diagnosis.slices:
        rows = [
            (
                part.name,
                f"{part.items:,}",
                f"{part.share_before:.1%} -> {part.share_after:.1%}",
                f"{part.before.skewness:.2f} -> {part.after.skewness:.2f}",
                f"{100 * part.gain.estimate:+.1f}" if part.gain else "",
                ", ".join(str(hub.key) for hub in part.hubs),
            )
            for part in diagnosis.slices
        ]
        headings = (
            str(diagnosis.slice_by),
            "items",
            "share of answers",
            "skewness",
            "gain, points",
            "worst hubs",
        )
        console.show_table("\nBy value", headings, rows)

    if diagnosis.groups:
        table = []
        for group in diagnosis.groups:
            intervals = [
                [100 * value for value in own] for own in (group.excess_before, group.excess_after)
            ]
            excess = ["{:+.1f} ({:+.1f} … {:+.1f})".format(*own) for own in intervals]
            right = f"{group.right.estimate:.1%}" if group.right else ""
            first = f"{group.first_before.estimate:.1%} -> {group.first_after.estimate:.1%}"
            top = f"{group.top_before.estimate:.1%} -> {group.top_after.estimate:.1%}"
            table.append((group.name, f"{group.gallery:.1%}", right, first, top, *excess))

        answers = "first answers", f"first {diagnosis.k}", "excess, raw", "corrected"
        columns = (str(diagnosis.group_by), "items", "right answers", *answers)
        console.show_table(
            "\nShares by value; excess of the first answers in points, 95%", columns, table
        )


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    connection: options.Connection,
    field: options.Field = None,
    repair: Annotated[bool, "Repair the rows that a killed job left, as a refresh would."] = False,
    client_ttl: options.ClientTtl = STATE_TTL,
    as_json: options.AsJson = False,
) -> None:
    """Show how a collection is corrected, and how fresh its biases are.

    Example: milvus-hubness status products --json
    """
    from milvus_hubness.jobs.common.lease import holder_of
    from milvus_hubness.jobs.refresh import status as statuses

    store = connection.open()
    repaired = statuses.repair(store, collection, client_ttl=client_ttl) if repair else None
    result = statuses.status(store, collection, field=field)
    holder = holder_of(store, result.collection)
    lease = (
        holder.model_dump(mode="json", include={"token", "owner", "expires_at"}) if holder else None
    )
    data = {"status": {**result.to_dict(), "lease": lease, "repaired": repaired}}
    facts = {"lease": holder, "repaired": f"{repaired:,} rows" if repaired else None}
    console.show_result(
        as_json,
        data,
        lambda: console.show_facts(
            result.collection, {**status_words(result, repair="repair with --repair"), **facts}
        ),
    )


def status_words(status: Status, *, repair: str) -> dict[str, object]:
    """Return the status in words. repair: how to repair the rows of a killed job."""
    intents = status.write_intents
    batches = status.open_batches
    facts: dict[str, object] = {
        "corrected": "yes" if status.corrected else "no",
        "rows": f"{status.rows:,}",
        "aliases": ", ".join(status.aliases),
        "write intents": f"{intents:,} rows in the log" if intents else None,
        "batches": f"{batches} open: a job is running, or was killed ({repair})"
        if batches
        else None,
        "verdicts": "\n".join(map(_verdict_words, status.verdicts)) or None,
    }
    if status.estimator and status.bank and status.age_seconds is not None:
        facts |= {
            "phase": status.phase,
            "copied from": status.source if status.where == "vector" else None,
            "field": f"{status.field or console.UNNAMED}, {status.dim}-d {status.metric}, stored {status.width} wide",
            "biases": _bias_location(status),
            "quantizer": "needs biases in more columns: a refresh by the alias makes a copy that has them"
            if status.needs_other_columns
            else None,
            "estimator": f"{describe(status.estimator)}, strength {status.strength}",
            "agreement": agreement_sentence(status.estimator),
            "profiles": ", ".join(status.profiles) if len(status.profiles) > 1 else None,
            "corrected fields": ", ".join(status.corrected_fields)
            if len(status.corrected_fields) > 1
            else None,
            "bank": "{collection}, {count:,} queries, {fingerprint:.19}".format(**status.bank),
            "rows without bias": f"{status.pending:,}",
            "last refresh": f"{span(status.age_seconds)} ago ({status.refreshed_at}), epoch {status.epoch}",
        }

    return facts


def _verdict_words(verdict: dict[str, Any]) -> str:
    method = (
        f", {describe(verdict['choice'])} at strength {verdict['strength']:g}"
        if verdict["choice"]
        else ""
    )
    in_use = ", the bank in use" if verdict["in_use"] else ""
    return "{tuned_at:.16} UTC on {bank_fingerprint:.19}{in_use}: {verdict}{method}".format(
        **verdict | {"in_use": in_use, "method": method}
    )


def _bias_location(status: Status) -> str:
    columns = ""
    if status.spread and status.spread > 1:
        columns = f", each in {status.spread} columns, times {status.bias_scale:g}, for a quantizer"

    if status.second_vector:
        return f"in {status.second_vector}, a second vector field{columns}"
    if status.missed is None:
        return f"in the vectors{columns}"

    location = (
        f"in the side collection {status.side_collection}"
        if status.side_collection
        else "in fields of the collection"
    )
    return f"{location}; {status.candidates} candidates a search miss {status.missed:.1%} of the top 10"
