"""Rows that join a gallery after the fit: R@1 of their queries and of those of the other rows, until a refit.

    python -m benchmarks.new_rows [task …]

A share of each task's rows is drawn as new, and the estimator is fitted on the others. The new rows then get the biases
of the formula alone ("before"), those that leave room for each other ("after"), in one batch and in batches of 100, or
everything is fitted again ("refit"). Means over 10 draws, over one of tasks with more than 1,000 queries;
caption_translation is cut to 4,000 of its 14,085 pairs. excess: how much higher the new rows' biases are, in units of
tau and in the mean, than in the refit, where the mean bias of the other rows is the same. Only a full run is kept.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Blend, Estimator, FittedBias
from milvus_hubness.quality.measures import assess
from tests.support.real_data import EMBEDDING_TASKS, Task, load_task

SHARES = (0.01, 0.1, 0.3)
METHODS = ("Sinkhorn", "Blend")
PAIRS = {"caption_translation": 4000}
WAYS = ("before", "after", "after, in 100s", "refit")
BANK, BATCH, DRAWS, FEW_QUERIES = 9000, 100, 10, 1000


def run(name: str) -> dict[str, Any]:
    task = load(name)
    bank = QueryBank(task.bank[:BANK])
    refits = fits(bank, task.gallery)
    draws = DRAWS if len(task.query) <= FEW_QUERIES else 1
    row = {}
    for share in SHARES:
        cells = [measure(task, bank, refits, share, draw) for draw in range(draws)]
        row[f"{share:.0%}"] = {
            method: {way: mean_of([cell[method][way] for cell in cells]) for way in WAYS}
            for method in METHODS
        }
        print(name, f"{share:.0%}", row[f"{share:.0%}"], flush=True)
    return row


def load(name: str) -> Task:
    task = load_task(name)
    if name not in PAIRS:
        return task
    kept = np.random.default_rng(0).permutation(len(task.query))[: PAIRS[name]]
    return task._replace(
        query=task.query[kept], gallery=task.gallery[kept], positives=np.arange(len(kept))
    )


def fits(bank: QueryBank, gallery: npt.NDArray[np.float32]) -> dict[str, FittedBias]:
    """The default Blend, and the Sinkhorn in it."""
    blend = Blend().fit(bank, gallery=gallery)
    mixed: Any = blend.estimator
    return {"Sinkhorn": mixed.estimators[1].restore(bank, blend.potentials), "Blend": blend}


def measure(
    task: Task, bank: QueryBank, refits: dict[str, FittedBias], share: float, draw: int
) -> dict[str, dict[str, dict[str, float]]]:
    order = np.random.default_rng(draw).permutation(len(task.gallery))
    is_new = np.zeros(len(order), np.bool_)
    is_new[order[: max(1, round(share * len(order)))]] = True
    new, found = task.gallery[is_new], {}
    for method, fitted in fits(bank, task.gallery[~is_new]).items():
        biases = np.stack([fitted.bias(task.gallery)] * 3 + [refits[method].bias(task.gallery)])
        parts = np.array_split(new, -(-len(new) // BATCH))
        biases[1, is_new] = fitted.new_bias(new)
        biases[2, is_new] = np.concatenate([fitted.new_bias(part) for part in parts])
        hits = (
            100 * assess(task.query, task.gallery, list(biases), list(task.positives[:, None])).hits
        )
        of_new = is_new[task.positives]
        shift = biases - biases[-1]
        shift = (shift[:, is_new].mean(1) - shift[:, ~is_new].mean(1)) / tau_of(fitted.estimator)
        found[method] = {
            way: {"new": row[of_new].mean(), "old": row[~of_new].mean(), "excess": above}
            for way, row, above in zip(WAYS, hits, shift, strict=True)
        }
    return found


def tau_of(estimator: Estimator) -> float:
    balanced: Any = estimator.estimators[1] if isinstance(estimator, Blend) else estimator
    return float(balanced.tau)


def mean_of(cells: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([cell[name] for cell in cells])), 3) for name in cells[0]}


def markdown(rows: dict[str, Any]) -> str:
    head = ["task", "new rows", *(f"{way}: new / old" for way in WAYS), "excess before → after"]
    parts = []
    for method in METHODS:
        lines = [
            [
                name,
                share,
                *(
                    f"{cells[method][way]['new']:.1f} / {cells[method][way]['old']:.1f}"
                    for way in WAYS
                ),
                f"{cells[method]['before']['excess']:+.2f} → {cells[method]['after']['excess']:+.2f}",
            ]
            for name, row in rows.items()
            for share, cells in row.items()
        ]
        parts.append(f"{method}\n\n{table(head, lines)}")
    return "R@1 (%) of the queries of new rows and of the others.\n\n" + "\n\n".join(parts) + "\n"


def main() -> None:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="task", help="of tests/support/real_data.py; all unless given"
    )
    tasks = parser.parse_args().tasks
    rows = {name: run(name) for name in tasks or EMBEDDING_TASKS}
    print(markdown(rows))
    if not tasks:
        save(
            "new_rows",
            {"environment": environment(started), "pairs": PAIRS, "tasks": rows},
            markdown(rows),
        )


if __name__ == "__main__":
    main()
