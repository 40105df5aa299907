"""What commands print of a tuning: the verdict first, then the trials, then the reasons."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.texts import (
    MANY,
    chosen_parameters,
    describe,
    rounded_shares,
    visible_line,
)
from milvus_hubness.cli import console, options
from milvus_hubness.cli.migrate.show import ALIAS_WORDS, NO_ALIAS, alias_to_move
from milvus_hubness.errors import redacted

if TYPE_CHECKING:
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.jobs.store.records import TuningRecord

FEW_TRIALS = 5
"""Searches that a table shows, with the raw one, unless all are wanted."""

ShowAll = Annotated[
    bool, typer.Option("--all", help="Show all trials and all that the bank shows.")
]

GATED = (
    "only queries whose raw best item is the nearest of some bank query are corrected, "
    "as with --gate 1; "
    "migrate, enable and refresh follow, and --gate 0 corrects all"
)
BANK_ALONE = (
    "Measured on the bank alone: this notices a bank of one topic, or of other data, only in part. "
    "Pass --queries or --pairs to be sure."
)


def show_verdict(title: str, tuning: dict[str, Any], to_type: str) -> None:
    """Print the verdict, what to expect, the method, and the next command."""
    console.show_styled((f"{visible_line(title)}: {tuning['verdict']}", "bold"))
    console.say(_as_sentence(tuning["sentence"]))
    if choice := tuning["choice"]:
        method = method_words(choice, labelled=tuning["labelled"])
        console.say(f"Method: {method}, at strength {tuning['strength']:.2f}.")
    if tuning["prior_weight"] is not None:
        weight = tuning["prior_weight"]
        console.say(f"The prior: weight {weight:g} of the spread of scores.")
    if tuning["gate"]:
        console.say(GATED)
    console.say(f"Next: {to_type}")
    if NO_ALIAS in to_type.split():
        console.say(f"      {ALIAS_WORDS}.")


def method_words(choice: dict[str, Any], *, labelled: bool) -> str:
    """Return the method that tuning chose; a mix of many by its short name."""
    if not labelled:
        return f"the default one, {trial_words(choice)}"
    # Of a mix less the demand, the mix is what has a short name.
    mix = choice["estimators"][0] if choice["name"] == "WithDemand" else choice
    is_long = len(mix.get("estimators", ())) >= MANY
    return f"tune's {trial_words(choice)}" if is_long else trial_words(choice)


def trial_words(estimator: dict[str, Any]) -> str:
    """Return an estimator in words, with the agreement that its fit has measured."""
    return describe(chosen_parameters(estimator, "agreement", "factor"))


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def next_command(
    tuning: dict[str, Any],
    collection: str | None,
    bank: options.BankOptions,
    connection: options.Connection,
    field: str | None = None,
    *,
    target_bank: str | None = None,
    prior: Sequence[str] = (),
    files: Sequence[str] = (),
) -> str:
    """Return the command to type after a verdict, or that there is none.

    collection: as the user typed it, None if there is no database yet. target_bank: the file of
    reference items; the command has it if its method needs some. prior: the words that name the prior
    which was tried, which stay where no verdict keeps them. files: without a database, the words
    that name the items.
    """
    info = None if collection is None else connection.open().info(collection, counted=False)
    is_corrected = info is not None and info.state_of(field) is not None
    is_against = tuning["verdict"] == "leave it alone"
    if is_against and tuning["labelled"]:
        return "nothing to do, keep the search as it is."

    if is_against:
        words = ["check", *([collection] if collection else files)]
    elif is_corrected:
        words = ["refresh", str(collection)]
    else:
        words = ["migrate", "run", collection or "COLLECTION"]
    if bank.bank:
        # What a check of files calls past queries is the bank of a collection.
        words += ["--queries" if is_against and collection is None else "--bank", bank.bank]
    if bank.bank and bank.bank_column:
        words += ["--bank-column", bank.bank_column]
    if not is_against:
        words += prior
    if target_bank and (is_against or (collection and _needs_targets(tuning["choice"]))):
        words += ["--target-bank", target_bank]
    if is_against:
        words += ["--pairs", "PAIRS.npz"]
    elif not is_corrected:
        alias = NO_ALIAS if info is None else alias_to_move(info, str(collection))
        words += ["--alias", alias, "--plan"]
    if field:
        words += ["--field", field]
    kinds = tuning["kinds"]
    if kinds and kinds["chosen"] and not is_corrected:
        words += ["--kind", kinds["source"]]

    if collection is not None:
        return connection.command(*words)
    words += [] if is_against else ["--uri", "URI"]
    return redacted(shlex.join(["milvus-hubness", *words]))


def _needs_targets(choice: dict[str, Any] | None) -> bool:
    """Whether the method that tuning chose is fitted with reference items too."""
    from milvus_hubness.correction.estimators import from_dict

    return choice is not None and from_dict(choice).needs_target_bank


def show_trials(tuning: dict[str, Any], *, show_all: bool) -> None:
    """Print the first trials, or all, with the shares of those that are mixed."""
    from milvus_hubness.quality.measures import DEPTH
    from milvus_hubness.quality.verdict import chance_excess

    mixed = _mixed(tuning["choice"], is_mix=tuning["labelled"])
    # Of few queries, random answers are uneven too.
    chance = chance_excess(min(DEPTH, tuning["items"]) * tuning["queries"] / tuning["items"])
    headings = ("method", "strength", tuning["measure"], "gain, 95%", "excess answers", "share")
    rows = _trial_rows(tuning, mixed)
    title = f"All {len(rows) - 1} trials, the best first"
    if not show_all and len(rows) > FEW_TRIALS:
        title = f"The best of {len(rows) - 1} trials (--all shows all)"
        rows = rows[:FEW_TRIALS]
    console.show_table(f"\nBy chance, excess answers are {chance:.1%}. {title}", headings, rows)
    if tuning["kinds"]:
        _show_comparison(tuning["kinds"], tuning["measure"])


def show_reasons(tuning: dict[str, Any], *, show_all: bool) -> None:
    """Print why the verdict is so, and what the bank shows: its warnings, or all of it."""
    # What the verdict has said already, and the findings that a reason quotes, are not printed twice.
    lines = [f"\nWhy: {tuning['why']}", *tuning["remarks"]]
    if tuning["demand"] is not None and show_all:
        lines.append(f"the 1% of items with most pairs take {tuning['demand']:.0%} of the pairs")
    others = [
        row
        for row in tuning["findings"]
        if row["text"] not in tuning["reason"] and (show_all or row["remedy"])
    ]
    if others:
        lines.append("The bank:")
    for row in others:
        lines.append(f"- {row['text']}: {row['remedy']}" if row["remedy"] else f"- {row['text']}")
    if not tuning["real_queries"]:
        lines.append(BANK_ALONE)
    console.say("\n".join(filter(None, lines)))


def _show_comparison(kinds: dict[str, Any], measure: str) -> None:
    """Print the searches without and with kinds, and the choice between them."""
    rows = []
    for row in kinds["rows"]:
        estimator = row["estimator"]
        method = describe(estimator) if estimator else "no bias"
        rows.append(("yes" if row["kinds"] else "no", method, *_figures_of(row)))
    headings = ("by kind", "method", measure, "gain, 95%", "excess answers")
    console.show_table(f"\nWithout and with the kinds of {kinds['source']}", headings, rows)

    choice = "without kinds: leave --kind out"
    if kinds["chosen"]:
        choice = f"with kinds: migrate follows it with --kind {kinds['source']}"
    console.show_styled((f"\n{choice}", "bold"))
    console.say(kinds["reason"])


def _figures_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return the measure of a trial, its gain, and the excess answers taken by hubs."""
    gain = row["gain"]
    return (
        "" if row["value"] is None else f"{100 * row['value']:.1f}",
        f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}" if gain else "",
        f"{row['excess_answers']:.1%}",
    )


def _mixed(choice: dict[str, Any] | None, *, is_mix: bool) -> dict[str, int]:
    """Return the share in percent of each method in the choice.

    is_mix: whether a Blend is a mix of trials, as with labels; without, it is one method.
    """
    if not choice:
        return {}
    if not is_mix:
        return {trial_words(choice): 100}
    # Of a mix less the demand, the shares are those of the mix.
    mix = choice["estimators"][0] if choice["name"] == "WithDemand" else choice
    methods = mix.get("estimators", [mix])
    weights = mix.get("weights", [1])
    return dict(zip(map(trial_words, methods), rounded_shares(weights), strict=True))


def _trial_rows(tuning: dict[str, Any], mixed: dict[str, int]) -> list[tuple[str, ...]]:
    """Return the rows of the raw search and of the trials."""
    rows: list[tuple[str, ...]] = []
    # A method may be tried at several strengths: its share stands in its first row only.
    shares = dict(mixed)
    for trial in tuning["rows"]:
        if trial["estimator"] is None:
            rows.append(("as it is", "", *_figures_of({**trial, "gain": None}), ""))
            continue
        method = trial_words(trial["estimator"])
        is_chosen = trial["gate"] == tuning["gate"] and method in shares
        share = f"{shares.pop(method)}%" if is_chosen else ""
        gate = f", gate {trial['gate']}" if trial["gate"] else ""
        rows.append(
            (
                f"{method}{gate}",
                f"{trial['strength']:.2f}",
                *_figures_of(trial),
                share,
            )
        )
    return rows


def store_verdict(
    store: Store, collection: str, record: TuningRecord | None, *, replaces: bool = False
) -> None:
    """Store a verdict that was shown, and say if that fails: the exit status is that of the result."""
    from milvus_hubness.reports.tuned import store_tuned

    if unstored := store_tuned(store, collection, record, replaces=replaces):
        console.say(f"milvus-hubness: {redacted(unstored)}", to_stderr=True)
