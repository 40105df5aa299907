"""What `tune` chooses is worth on queries it has not seen: 20 random splits of every real set's pairs.

    python -m benchmarks.tune [--splits 20] [task …]

Each split halves a task's labelled pairs into validation and test; the gallery stays whole. With labels, tune
chooses on the validation half; without, it sees the bank and the gallery only, once on the large tasks and
with three seeds on the small ones. caption_translation is cut to 4,000 of its 14,085 pairs. The scores of a
task are swept once and shared by its splits, which is what `tune` does with each. Every split is also decided without
the trials that have a gate. Exits with 1 where a bound
does not hold; only a full run of 20 splits is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.near_copies import near_copies, with_groups
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.outcomes import assess
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.trials import Trial, search, sweep
from milvus_hubness.quality.tuning import Swept, decide, folds, tune
from tests.support.real_data import EMBEDDING_TASKS, TASKS, Task, load_task

SPLITS = 20
LABEL_FREE_SEEDS = 3
FEW_QUERIES = 1000
PAIRS = {"caption_translation": 4000}
BELOW_RAW = 0.3
BELOW_HINDSIGHT = 1.0
BELOW_NO_GATE = 0.3
ALONE = 0.9


def load(name: str) -> Task:
    task = load_task(name)
    if name not in PAIRS:
        return task
    kept = np.random.default_rng(0).permutation(len(task.query))[: PAIRS[name]]
    return task._replace(
        query=task.query[kept], gallery=task.gallery[kept], positives=np.arange(len(kept))
    )


def split(n: int, seed: int) -> tuple[Any, Any]:
    order = np.random.default_rng(seed).permutation(n)
    return order[: n // 2], order[n // 2 :]


def run(name: str, splits: int) -> dict[str, Any]:
    started = time.monotonic()
    task = load(name)
    n = len(task.query)
    bank, positives = QueryBank(task.bank, name), task.positives[:, None]
    copies = near_copies(bank, task.gallery)
    targets = None if task.target_bank is None else QueryBank(task.target_bank)
    trials = sweep(copies.bank, task.gallery, targets)
    outcome = search(trials, task.query, task.gallery, RightItems.of(positives))
    hits = outcome.values
    plain = np.array([trial.gate is None for trial in trials])
    without = [trial for trial in trials if trial.gate is None]
    fixed = np.mean([hits[:, split(n, seed)[1]].mean(1) for seed in range(splits)], 0)
    best = int(fixed.argmax())
    swept = time.monotonic() - started

    free = [
        label_free(task, bank, seed) for seed in range(LABEL_FREE_SEEDS if n <= FEW_QUERIES else 1)
    ]
    labelled, ungated, unlabelled, verdicts, intervals, agreed, gated = [], [], [], [], [], 0, 0
    for seed in range(splits):
        validation, test = split(n, seed)
        pairs = LabelledQueries.of(task.query[validation], positives[validation])
        seen = outcome.of(validation)
        for tried, known, means in (
            (without, seen.of_biases(np.array([True, *plain])), ungated),
            (trials, seen, labelled),
        ):
            fold = folds(pairs.queries, copies.cosine, seed)
            chosen, judged, *_ = decide(
                Swept(tried, known, copies.bank, task.gallery), pairs, fold, seed=seed
            )
            applied = chosen._replace(
                bias=np.float32(judged.strength / chosen.strength) * chosen.bias
            )
            means.append(
                search([applied], task.query[test], task.gallery, RightItems.of(positives[test]))
                .values[1]
                .mean()
            )
        gated += chosen.gate is not None and judged.verdict != "leave it alone"
        verdicts.append(judged.verdict)
        intervals.append(judged.interval)
        verdict, found = free[seed % len(free)]
        unlabelled.append(found[test].mean())
        agreed += (verdict == "leave it alone") == (judged.verdict == "leave it alone")
    row = {
        "queries": n,
        "items": len(task.gallery),
        "bank": len(bank),
        "trials": len(trials),
        "raw": 100 * float(fixed[0]),
        "default": 100 * float(fixed[-1]),
        "hindsight": 100 * float(fixed[best]),
        "hindsight_choice": "raw" if best == 0 else name_of(trials[best - 1]),
        "labelled": 100 * float(np.mean(labelled)),
        "without_gate": 100 * float(np.mean(ungated)),
        "gated": gated,
        "label_free": 100 * float(np.mean(unlabelled)),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        "label_free_verdicts": [verdict for verdict, _ in free],
        "agreement": agreed / splits,
        "mean_interval": (100 * np.mean(intervals, 0)).round(2).tolist(),
        "seconds": {"sweep": swept, "all": time.monotonic() - started},
    }
    row["broken"] = broken(name, row)
    print(name, {key: value for key, value in row.items() if key != "hindsight_choice"}, flush=True)
    return row


def name_of(trial: Trial) -> str:
    gate = "" if trial.gate is None else f", gate {trial.gate}"
    return f"{trial.estimator!r} × {trial.strength:g}{gate}"


def label_free(task: Task, bank: QueryBank, seed: int) -> tuple[str, Any]:
    """The verdict, and whether each query of the task finds its item first under what is applied."""
    result = tune(bank, task.gallery, target_bank=task.target_bank, seed=seed)
    bias = np.zeros(len(task.gallery), np.float32)
    if result.choice is not None:
        log = with_groups(bank, task.gallery)
        fitted = result.choice.fit(log, gallery=task.gallery, target_bank=task.target_bank)
        bias = np.float32(result.strength) * fitted.bias(task.gallery)
    return result.verdict, assess(
        task.query, task.gallery, [bias], RightItems.of(task.positives)
    ).values[0]


def broken(name: str, row: dict[str, Any]) -> list[str]:
    """The bounds that do not hold, and by how much."""
    found = []
    if row["labelled"] < row["raw"] - BELOW_RAW:
        found.append(f"labelled is {row['raw'] - row['labelled']:.2f} below raw")
    if row["labelled"] < row["hindsight"] - BELOW_HINDSIGHT:
        found.append(
            f"labelled is {row['hindsight'] - row['labelled']:.2f} below the best in hindsight"
        )
    if row["labelled"] < row["without_gate"] - BELOW_NO_GATE:
        found.append(
            f"labelled is {row['without_gate'] - row['labelled']:.2f} below what it is without a gate"
        )
    if name in EMBEDDING_TASKS and row["label_free"] < row["raw"] - BELOW_RAW:
        found.append(f"label-free is {row['raw'] - row['label_free']:.2f} below raw")
    alone = row["verdicts"].get("leave it alone", 0) / sum(row["verdicts"].values())
    if name not in EMBEDDING_TASKS and alone < ALONE:
        found.append(f'"leave it alone" in {100 * alone:.0f}% of the splits only')
    return found


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    head = [
        "task",
        "raw",
        "Blend",
        "best fixed in hindsight",
        "tune, labels",
        "without a gate",
        "gated",
    ]
    head += ["verdicts (labels)"]
    head += ["tune, no labels", "verdicts (no labels)", "agreement", "lost without labels"]
    lines = []
    for name, row in rows.items():
        numbers = [
            row["raw"],
            row["default"],
            row["hindsight"],
            row["labelled"],
            row["without_gate"],
        ]
        counts = ", ".join(f"{count} {verdict}" for verdict, count in row["verdicts"].items())
        lines.append(
            [
                name,
                *(f"{number:.2f}" for number in numbers),
                str(row["gated"]),
                counts,
                f"{row['label_free']:.2f}",
                ", ".join(row["label_free_verdicts"]),
                f"{100 * row['agreement']:.0f}%",
                f"{row['labelled'] - row['label_free']:+.2f}",
            ]
        )
    return f"Mean R@1 (%) of the test halves of random splits.\n\n{table(head, lines)}\n"


def main() -> int:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks",
        nargs="*",
        metavar="task",
        help="a task of tests/support/real_data.py; all unless given",
    )
    parser.add_argument("--splits", type=int, default=SPLITS, help="random splits per task")
    given = parser.parse_args()
    rows = {name: run(name, given.splits) for name in (given.tasks or TASKS)}
    text = markdown(rows)
    print(text)
    faults = [f"{name}: {fault}" for name, row in rows.items() for fault in row["broken"]]
    print("\n".join(faults) or "all bounds hold")
    if not given.tasks and given.splits == SPLITS:
        kept = {
            "environment": environment(started),
            "splits": SPLITS,
            "pairs": PAIRS,
            "tasks": rows,
        }
        save("tune", kept, text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
