"""Whether a refresh refuses banks that are worse than the one in use, and adopts those that are as good.

    OMP_NUM_THREADS=1 python -m benchmarks.refresh_evaluation [--from-saved] [task …]

Pairs of an old and a new bank on each task, with the default method: two random halves of its bank, and draws of
which three quarters are the same (as good); a quarter in place of the whole; the half that crowds few items, the
fifth nearest to one query, the bank of another task and items (unsuited), each in place of the whole; and the reverse
of all these. Each new bank is evaluated without labels, once on its held-out queries and once on 100 real ones. R@1 on
the other queries says whether it is worse.

Rules: the skewness of N_10 must not rise (the former one), and the excess answers taken by hubs must not rise by more
than so many standard errors of the change. Their number is chosen on every other task and reported on the rest.
--from-saved counts the evaluations of the last run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from benchmarks.defaults import Vectors, crowding, draw, same_length, to_dim
from benchmarks.environment import RESULTS, environment, save, table
from benchmarks.verdict import CHOSEN_ON, EXAMPLE_TASKS, encoder_of, task_of
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import Blend
from milvus_hubness.jobs.refresh.evaluation import NOISE, ReducedSample, judge
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.quality.labelled import LabelledQueries

TASKS = tuple(name for name in EXAMPLE_TASKS if not name.startswith("caption"))
MOST_ITEMS = 1_000
LARGEST_BANK = 1_500
FOREIGN_BANK = 1_000
REAL_QUERIES = 100
DRAWS = 3
WORSE = 0.01
"""Loss of R@1 from which a new bank counts as worse; it must be above chance too."""
ERRORS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Standard errors by which the excess answers may rise, in the rules that are compared."""

HALVES = "as good: other half"
REDRAWN = "as good: three quarters the same"
LESS = "a quarter"
MORE = "four times as many"
CROWDING = "the half that crowds few items"
TOPIC = "the fifth of one topic"
FOREIGN = "bank of another task"
ITEMS = "items"
BACK = "back from it"

AS_GOOD = "as good"
UNSUITED_BANK = "unsuited, in place of suited"
SUITED_BANK = "suited, in place of unsuited"
ALL = "all"

Rule: TypeAlias = Callable[[dict[str, Any]], bool]


class Pair(NamedTuple):
    """An old bank and a new one."""

    kind: str
    old: Vectors
    new: Vectors


def pairs(name: str) -> Iterator[Pair]:
    task = task_of(name)
    bank = draw(task.bank, LARGEST_BANK, name)
    for number in range(DRAWS):
        rows = draw(bank, None, name, number)
        one, other = np.array_split(rows, 2)
        yield Pair(HALVES, one, other)
        yield Pair(HALVES, other, one)
        yield Pair(REDRAWN, rows[len(rows) // 5 :], rows[: -(len(rows) // 5)])
        quarter = rows[: len(rows) // 4]
        yield Pair(LESS, rows, quarter)
        yield Pair(MORE, quarter, rows)

    others = [other for other in TASKS if encoder_of(other) != encoder_of(name)]
    other = others[TASKS.index(name) % len(others)]
    foreign = draw(task_of(other).bank, FOREIGN_BANK, name, other)
    if foreign.shape[1] != bank.shape[1]:
        foreign = to_dim(foreign, bank.shape[1])
    centre = bank[0] / np.linalg.norm(bank[0])
    unsuited = {
        CROWDING: crowding(bank, task.gallery, 0.5),
        TOPIC: bank[np.argsort(-(bank @ centre))[: len(bank) // 5]],
        FOREIGN: same_length(foreign, bank),
        ITEMS: same_length(draw(task.gallery, LARGEST_BANK, name), bank),
    }
    for kind, rows in unsuited.items():
        shuffled = draw(rows, None, name, kind)
        yield Pair(kind, bank, shuffled)
        yield Pair(f"{kind}, {BACK}", shuffled, bank)


def plan_of(bank: Vectors) -> RefreshPlan:
    stored = StoredBank(QueryBank(bank), np.empty((len(bank), 0), np.float32))
    return RefreshPlan(Blend(), stored, 1.0, "")


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the evaluations of a task's pairs."""
    task = task_of(name)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(task.query))
    real, asked = np.split(order, [REAL_QUERIES])
    kept = np.sort(rng.permutation(len(task.gallery))[:MOST_ITEMS])
    number_of = np.full(len(task.gallery), -1)
    number_of[kept] = np.arange(len(kept))
    asked = asked[number_of[task.positives[asked]] >= 0]
    labelled = LabelledQueries.of(
        task.query[asked], [number_of[[item]] for item in task.positives[asked].tolist()]
    )

    layout = Layout(task.gallery.shape[1], "IP")
    rows = []
    for pair in pairs(name):
        old, new = plan_of(pair.old), plan_of(pair.new)
        for queries in (None, task.query[real]):
            result = judge(
                ReducedSample.of(layout, task.gallery[kept]), old, new, labelled, queries
            )
            if result is None:
                continue
            gain = result.gains["old"]
            rows.append(
                {
                    "kind": pair.kind,
                    "task": name,
                    "real_queries": result.real_queries,
                    "queries": result.queries,
                    "excess": result.excess_answers,
                    "noise": result.noise,
                    "skewness": result.skewness,
                    "r1": result.measured,
                    "gain": gain.estimate,
                    "gain_at_most": gain.high,
                }
            )
    return rows


def refused_by_skewness(row: dict[str, Any]) -> bool:
    skewness = row["skewness"]
    return bool(skewness["new"] > min(skewness["old"], skewness["raw"]))


def refused_by_excess(errors: float, row: dict[str, Any]) -> bool:
    excess = row["excess"]
    return any(
        excess["new"] > excess[name] + errors * row["noise"][name] for name in ("old", "raw")
    )


RULES: dict[str, Rule] = {
    "skewness": refused_by_skewness,
    **{f"{errors:g} errors": partial(refused_by_excess, errors) for errors in ERRORS},
}


def is_worse(row: dict[str, Any]) -> bool:
    return bool(row["gain"] <= -WORSE and row["gain_at_most"] < 0)


def group_of(kind: str) -> str:
    if kind in (HALVES, REDRAWN):
        return AS_GOOD
    if kind in (LESS, MORE):
        return kind
    return UNSUITED_BANK if BACK not in kind else SUITED_BANK


def summary(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return what each rule decides by group of banks, on the tasks of the choice and on the others."""
    summaries = []
    lines = []
    for real_queries in (True, False):
        for is_choice in (True, False):
            for group in (AS_GOOD, MORE, LESS, SUITED_BANK, UNSUITED_BANK, ALL):
                chosen = [
                    row
                    for row in rows
                    if row["real_queries"] == real_queries
                    and (row["task"] in CHOSEN_ON) == is_choice
                    and group in (group_of(row["kind"]), ALL)
                ]
                if not chosen:
                    continue
                facts: dict[str, Any] = {
                    "queries": "real" if real_queries else "held out",
                    "tasks": "choice" if is_choice else "report",
                    "banks": group,
                    "pairs": len(chosen),
                    "worse": sum(map(is_worse, chosen)),
                    "gain": 100 * float(np.mean([row["gain"] for row in chosen])),
                    "rules": {name: decided(chosen, refuses) for name, refuses in RULES.items()},
                }
                summaries.append(facts)
                shown = [facts["queries"], facts["tasks"], group, str(facts["pairs"])]
                shown += [str(facts["worse"]), f"{facts['gain']:+.2f}"]
                shown += [
                    f"{rule['refused']} / {rule['worse_adopted']} / {rule['gain']:+.2f}"
                    for rule in facts["rules"].values()
                ]
                lines.append(shown)

    header = ["queries", "tasks", "new bank", "pairs", "worse", "gain", *RULES]
    note = (
        "For each rule: pairs that are refused / worse banks that are adopted / mean gain of R@1 in "
        "points over all pairs, 0 for those refused."
    )
    return summaries, f"{table(header, lines)}\n\n{note}"


def decided(chosen: Sequence[dict[str, Any]], refuses: Rule) -> dict[str, Any]:
    adopted = [row for row in chosen if not refuses(row)]
    gains = [row["gain"] for row in adopted]
    return {
        "refused": len(chosen) - len(adopted),
        "worse_adopted": sum(map(is_worse, adopted)),
        "gain": 100 * sum(gains) / len(chosen),
        "worst": 100 * min(gains, default=0.0),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help="[default: all]")
    parser.add_argument("--from-saved", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.monotonic()
    if options.from_saved:
        saved = json.loads((RESULTS / "refresh_evaluation.json").read_text())
        rows, where = saved["rows"], saved["environment"]
    else:
        rows = []
        for name in options.tasks or TASKS:
            rows += rows_of(name)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        where = environment(started)

    summaries, markdown = summary(rows)
    print(f"{markdown}\nThe product refuses above {NOISE:g} standard errors.")
    if not options.tasks:
        saved = {"summary": summaries, "rows": rows, "environment": where}
        save("refresh_evaluation", saved, markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
