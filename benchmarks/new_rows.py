"""Rows that join a gallery after the fit: R@1 of their queries and of those of the other rows.

    python -m benchmarks.new_rows [--part few|many] [task …]

few: a share of each task's rows is drawn as new, and the estimator is fitted on the others. The new
rows then get the biases of the formula alone ("before"), those that leave room for each other
("after"), in one batch and in batches of 100, or everything is fitted again ("refit"). Means over
10 draws, over one of tasks with more than 1,000 queries; caption_translation is cut to 4,000 of its
14,085 pairs. excess: how much higher the new rows' biases are, in units of tau and in the mean,
than in the refit, where the mean bias of the other rows is the same.

many: one insert of 10% to 200% of the fitted rows. The new rows are drawn at random, or are a topic
(the nearest of 16 k-means clusters of the items); then the bank has queries for the topic, or lacks
those whose best answer is a new row. Banks and galleries are cut to 2,000, queries too; four draws,
or two of galleries above 1,000. The share of new rows that counts in full is chosen on the tasks
CHOSEN_ON, by the mean change of R@1 against the formula alone over all inserts, and reported on the
others. Exits with 1 where it is not the product's.

Results are saved by a run of all tasks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Blend, Estimator, FittedBias
from milvus_hubness.correction.estimators.products import (
    FULL_SHARE,
    FittedItems,
    logsumexp_with_room,
)
from milvus_hubness.quality.outcomes import assess
from milvus_hubness.quality.right_items import RightItems
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
    return {"Sinkhorn": parts_of(blend)[1], "Blend": blend}


def parts_of(blend: FittedBias) -> list[FittedBias]:
    """The fits that a Blend mixes."""
    mixed: Any = blend.estimator
    return [
        estimator.restore(blend.bank, blend.potentials[:, columns])
        for estimator, columns in mixed.with_columns()
    ]


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
            100
            * assess(task.query, task.gallery, list(biases), RightItems.of(task.positives)).values
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


class Limit(NamedTuple):
    """How much of a batch of new rows counts."""

    share: float
    """So many rows count in full, as a share of the fitted ones."""

    by_demand: bool
    """Whether the others count by how much the bank asks for them, or not at all."""

    def __str__(self) -> str:
        if math.isinf(self.share):
            return "no limit"
        return (
            f"{self.share:.0%} in full, others by demand" if self.by_demand else f"{self.share:.0%}"
        )


SIZES = (0.1, 0.25, 0.5, 1.0, 2.0)
"""New rows, as a share of the fitted ones."""
INSERTS = ("at random", "topic", "topic, not in the bank")
NO_LIMIT = Limit(math.inf, by_demand=True)
CANDIDATES = (
    NO_LIMIT,
    *(Limit(share, by_demand=False) for share in (0.05, 0.1, 0.2, 0.5, 1.0)),
    *(Limit(share, by_demand=True) for share in (0.0, 0.05, 0.1, 0.2, 0.5)),
)
RAW, ALONE, SAME_BANK, NEW_BANK = "raw", "formula alone", "refit, same bank", "refit, new bank"
MANY_WAYS = (RAW, ALONE, *map(str, CANDIDATES), SAME_BANK, NEW_BANK)
CHOSEN_ON = ("docstring_code", "text_video_msrvtt t2v", "text_video_msrvtt v2t")
MOST, TOPICS = 2000, 16

Cells = dict[str, dict[str, dict[str, list[float]]]]
"""By insert and method, R@1 of all queries, of those of new rows and of the others, by way."""


def run_many(name: str) -> Cells:
    """Measure inserts of all kinds and sizes into a task."""
    task = cut(load_task(name))
    whole = QueryBank(task.bank)
    refits = fits(whole, task.gallery)
    answers = (task.bank @ task.gallery.T - refits["Blend"].bias(task.gallery)).argmax(1)

    draws = 4 if len(task.gallery) <= FEW_QUERIES else 2
    cells: Cells = {}
    for insert in INSERTS:
        for size in SIZES:
            results = []
            for draw in range(draws):
                is_new = drawn(task.gallery, insert, size, draw)
                bank = whole
                same_bank = refits
                if insert == INSERTS[2]:
                    bank = QueryBank(task.bank[~is_new[answers]])
                    same_bank = fits(bank, task.gallery)
                results.append(measure_many(task, bank, is_new, same_bank, refits))
            cells[f"{insert}, {size:.0%}"] = {
                method: {
                    way: np.mean([result[method][way] for result in results], 0).round(3).tolist()
                    for way in MANY_WAYS
                }
                for method in METHODS
            }
    print(name, "done", flush=True)
    return cells


def cut(task: Task) -> Task:
    """Return the task with at most MOST items, queries and bank queries."""
    query, gallery, positives = task.query, task.gallery, task.positives
    if len(gallery) > MOST:
        # Tasks with so many items have a query for each, in their order.
        chosen = np.random.default_rng(0).permutation(len(gallery))[:MOST]
        query, gallery, positives = query[chosen], gallery[chosen], np.arange(MOST)
    return task._replace(
        query=query[:MOST], gallery=gallery, positives=positives[:MOST], bank=task.bank[:MOST]
    )


def drawn(
    gallery: npt.NDArray[np.float32], insert: str, size: float, draw: int
) -> npt.NDArray[np.bool_]:
    """Return which items (n,) are new."""
    rng = np.random.default_rng(draw)
    if insert == INSERTS[0]:
        order = rng.permutation(len(gallery))
    else:
        clusters = KMeans(TOPICS, n_init=1, random_state=draw).fit(gallery)
        centres = clusters.cluster_centers_
        # Whole clusters, from one on to those near it; of the last one the items at its centre.
        away = ((centres - centres[rng.integers(TOPICS)]) ** 2).sum(1)
        within = ((gallery - centres[clusters.labels_]) ** 2).sum(1)
        order = np.lexsort((within, away[clusters.labels_]))

    is_new = np.zeros(len(gallery), np.bool_)
    is_new[order[: round(len(gallery) * size / (1 + size))]] = True
    return is_new


def measure_many(
    task: Task,
    bank: QueryBank,
    is_new: npt.NDArray[np.bool_],
    same_bank: dict[str, FittedBias],
    new_bank: dict[str, FittedBias],
) -> dict[str, dict[str, list[float]]]:
    """Return R@1 of all queries, of those of new rows and of the others, by method and way."""
    blend = Blend().fit(bank, gallery=task.gallery[~is_new])
    relative, balanced = parts_of(blend)
    new = task.gallery[is_new]
    of_relative = relative.bias(new)
    strengths = {"Sinkhorn": (0.0, 1.0), "Blend": (blend.estimator.share / 2,) * 2}

    rows = []
    for method, (of_first, of_second) in strengths.items():
        fitted = balanced if method == "Sinkhorn" else blend
        alone = fitted.bias(task.gallery).astype(np.float64)
        rows += [np.zeros(len(alone)), alone]
        for limit in CANDIDATES:
            biases = alone.copy()
            biases[is_new] = of_first * of_relative + of_second * with_room(balanced, new, limit)
            rows.append(biases)
            # What is measured is what the product computes, as far as its limit is a candidate.
            if limit == Limit(FULL_SHARE, by_demand=True):
                np.testing.assert_allclose(biases[is_new], fitted.new_bias(new), atol=1e-4)
        rows += [same_bank[method].bias(task.gallery), new_bank[method].bias(task.gallery)]

    hits = 100 * assess(task.query, task.gallery, rows, RightItems.of(task.positives)).values
    of_new = is_new[task.positives]
    shown = [[row.mean(), row[of_new].mean(), row[~of_new].mean()] for row in hits]
    by_method = np.split(np.array(shown), len(METHODS))
    return {
        method: dict(zip(MANY_WAYS, values.tolist(), strict=True))
        for method, values in zip(METHODS, by_method, strict=True)
    }


def with_room(
    balanced: FittedBias, new: npt.NDArray[np.float32], limit: Limit
) -> npt.NDArray[np.float64]:
    """Return biases of new items under a limit, by a fit of Sinkhorn."""
    estimator: Any = balanced.estimator
    # No item comes near an infinite mean bias: then only the share counts.
    mean_bias = estimator.mean_bias if limit.by_demand else math.inf
    return logsumexp_with_room(
        new @ balanced.bank.vectors.T,
        balanced.potentials[:, 0],
        estimator.tau,
        FittedItems(estimator.items, mean_bias),
        limit.share,
    )


def changes(
    tasks: dict[str, Cells], names: Sequence[str], insert: str, method: str, way: str, of: int = 0
) -> list[float]:
    """Return how much higher R@1 is than by the formula alone, by task.

    of: 0 for all queries, 1 for those of new rows, 2 for those of the others.
    """
    return [
        tasks[name][insert][method][way][of] - tasks[name][insert][method][ALONE][of]
        for name in names
    ]


def chosen_limit(tasks: dict[str, Cells]) -> Limit:
    """Return the candidate with the highest mean change on the tasks for it, both methods."""
    names = [name for name in tasks if name in CHOSEN_ON]
    return max(CANDIDATES, key=lambda limit: mean_and_worst(tasks, names, METHODS, limit)[0])


def mean_and_worst(
    tasks: dict[str, Cells], names: Sequence[str], methods: Sequence[str], limit: Limit
) -> tuple[float, float, float]:
    """Return the mean change, the worst mean of one insert, and its worst on one task."""
    by_insert = [
        changes(tasks, names, insert, method, str(limit))
        for insert in tasks[names[0]]
        for method in methods
    ]
    means = [float(np.mean(values)) for values in by_insert]
    return float(np.mean(means)), min(means), min(min(values) for values in by_insert)


def markdown_many(tasks: dict[str, Cells]) -> str:
    chosen = str(chosen_limit(tasks))
    halves = {
        "choice": [name for name in tasks if name in CHOSEN_ON],
        "report": [name for name in tasks if name not in CHOSEN_ON],
    }
    head = ["how much counts", *(f"{half}: {method}" for half in halves for method in METHODS)]
    lines = []
    for limit in CANDIDATES:
        texts = [
            "{:+.2f} ({:+.2f}, {:+.1f})".format(*mean_and_worst(tasks, names, [method], limit))
            for names in halves.values()
            for method in METHODS
        ]
        lines.append([str(limit), *texts])
    parts = [
        "Change of R@1 (points) against the formula alone: the mean over all inserts (the worst "
        f"mean of one kind and size, the worst of one task). Chosen: {chosen}; the product has "
        f"{FULL_SHARE:.0%}.\n\n{table(head, lines)}"
    ]

    ways = [str(NO_LIMIT), chosen, SAME_BANK, NEW_BANK]
    head = ["insert", RAW, ALONE, *(f"{way}" for way in ways), f"{chosen}: new / old"]
    for half, names in halves.items():
        for method in METHODS:
            lines = []
            for insert in tasks[names[0]]:
                level = [
                    float(np.mean([tasks[name][insert][method][way][0] for name in names]))
                    for way in (RAW, ALONE)
                ]
                moved = [changes(tasks, names, insert, method, way) for way in ways]
                new, old = (
                    np.mean(changes(tasks, names, insert, method, chosen, of)) for of in (1, 2)
                )
                lines.append(
                    [
                        insert,
                        *(f"{value:.1f}" for value in level),
                        *(f"{np.mean(values):+.2f} ({min(values):+.1f})" for values in moved),
                        f"{new:+.2f} / {old:+.2f}",
                    ]
                )
            parts.append(f"{method}, {half} ({', '.join(names)})\n\n{table(head, lines)}")
    return "One insert of many rows.\n\n" + "\n\n".join(parts) + "\n"


def main() -> None:
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="task", help="of tests/support/real_data.py; all unless given"
    )
    parser.add_argument("--part", choices=("few", "many"))
    options = parser.parse_args()
    names = options.tasks or EMBEDDING_TASKS

    if options.part != "many":
        started = time.monotonic()
        rows = {name: run(name) for name in names}
        print(markdown(rows))
        if not options.tasks:
            results = {"environment": environment(started), "pairs": PAIRS, "tasks": rows}
            save("new_rows", results, markdown(rows))

    if options.part != "few":
        started = time.monotonic()
        cells = {name: run_many(name) for name in names}
        if options.tasks:
            print(cells)
            return
        text = markdown_many(cells)
        print(text)
        chosen = chosen_limit(cells)
        results = {"environment": environment(started), "chosen": chosen._asdict(), "tasks": cells}
        save("new_rows_many", results, text)
        sys.exit(chosen != Limit(FULL_SHARE, by_demand=True))


if __name__ == "__main__":
    main()
