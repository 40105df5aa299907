"""R@1 in galleries of two kinds of items, and what a correction by kind adds to the default one.

    python -m benchmarks.mixed [task …]

Queries and bank are of one kind, and half of the items; the right item is of either kind. caption_document has
MixBench's shape (arXiv 2507.19054): an item is one of its English captions or its German document, and its other four
captions ask for it; five draws. The other tasks have no second form of the queries' kind. There it is simulated: the
query and a multiple of the difference of two bank queries, such that the raw search in a gallery of this kind alone
finds it as often as the right item in a gallery of the other kind alone ("as hard") or for 90% of the queries ("easy").
Two draws. Intervals are bootstraps over the items, paired with Blend.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.reference import unit
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN, Blend, Estimator
from milvus_hubness.quality.measures import confidence_interval, paired_difference
from milvus_hubness.quality.outcomes import assess
from tests.support.real_data import EMBEDDING_TASKS, Task, load_task

Floats = npt.NDArray[np.float32]
BANK = 9000
EASY = 0.9
TASKS = ["caption_document"] + [
    f"{name}, {form}"
    for name in EMBEDDING_TASKS
    if name not in ("docstring_code", "caption_document")
    for form in ("as hard", "easy")
]


class Mixed(NamedTuple):
    """own: (n_items,) whether an item is of the queries' kind. positives: (n_queries,) each query's right item."""

    query: Floats
    gallery: Floats
    bank: Floats
    own: npt.NDArray[np.bool_]
    positives: npt.NDArray[np.int64]


def draws(name: str) -> Iterator[Mixed]:
    """Yield the mixed galleries of a task; each item is of either kind in some."""
    task_name, _, form = name.partition(", ")
    task = load_task(task_name)
    bank, n_items = task.bank[:BANK], len(task.gallery)
    order = np.random.default_rng(0).permutation(n_items)
    captions = task.query.reshape(-1, n_items, task.query.shape[1])
    assert (task.positives.reshape(-1, n_items) == np.arange(n_items)).all()
    second = simulated(task, EASY if form == "easy" else None)[None] if form else captions
    for number in range(max(2, len(captions))):
        own = (order < n_items // 2) ^ bool(number % 2)
        others = captions if form else np.delete(captions, number, axis=0)
        gallery = np.where(own[:, None], second[number % len(second)], task.gallery)
        yield Mixed(
            others.reshape(-1, gallery.shape[1]),
            gallery,
            bank,
            own,
            np.tile(np.arange(n_items), len(others)),
        )


def simulated(task: Task, wanted: float | None) -> Floats:
    """Return (n_items, d) second forms of the queries, of their lengths. wanted: their R@1 in the raw search; None for
    that of the items."""
    rng = np.random.default_rng(1)
    first, second = (
        task.bank[rng.integers(len(task.bank), size=len(task.query))] for _ in range(2)
    )
    lengths = np.linalg.norm(task.query, axis=1, keepdims=True)

    def moved(share: float) -> Floats:
        return unit(task.query + np.float32(share) * (first - second)) * lengths

    def recall(items: Floats) -> float:
        zeros = np.zeros(len(items), np.float32)
        return float(
            assess(task.query, items, [zeros], list(task.positives[:, None])).values.mean()
        )

    wanted = wanted or recall(task.gallery)
    low, high = 0.0, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if recall(moved(middle)) > wanted else (low, middle)
    return moved(low)


def centred(mixed: Mixed) -> Mixed:
    """Return all vectors less the mean of their kind, at unit length (GR-CLIP, arXiv 2507.19054). The mean of the
    queries' kind is that of the bank."""
    gallery = mixed.gallery.copy()
    centre = mixed.bank.mean(0)
    gallery[mixed.own] -= centre
    gallery[~mixed.own] -= gallery[~mixed.own].mean(0)
    return mixed._replace(
        query=unit(mixed.query - centre), bank=unit(mixed.bank - centre), gallery=unit(gallery)
    )


def standardised(mixed: Mixed, statistics: Callable[[Floats], tuple[float, float]]) -> Mixed:
    """Return vectors whose inner products are (s − μ) / σ, the statistics of the scores of the bank by kind."""
    columns = np.empty((len(mixed.gallery), 2), np.float32)
    for kind in (mixed.own, ~mixed.own):
        columns[kind] = statistics(mixed.bank @ mixed.gallery[kind].T)
    mean, spread = columns.T[:, :, None]
    return mixed._replace(
        query=_with_ones(mixed.query),
        bank=_with_ones(mixed.bank),
        gallery=np.hstack([mixed.gallery, -mean]) / spread,
    )


def _with_ones(rows: Floats) -> Floats:
    return np.hstack([rows, np.ones((len(rows), 1), np.float32)])


def of_nearest(scores: Floats) -> tuple[float, float]:
    """Return mean and deviation of the best score of each bank query (pseudo-positives, arXiv 2511.22141)."""
    best = scores.max(1)
    return float(best.mean()), float(best.std())


def of_all(scores: Floats) -> tuple[float, float]:
    return float(scores.mean()), float(scores.std())


def mean_of_all(scores: Floats) -> tuple[float, float]:
    return float(scores.mean()), 1.0


FORMS: dict[str, Callable[[Mixed], Mixed]] = {
    "": lambda mixed: mixed,
    "means of scores": lambda mixed: standardised(mixed, mean_of_all),
    "means of vectors": centred,
    "standardised by all scores": lambda mixed: standardised(mixed, of_all),
    "standardised by the nearest": lambda mixed: standardised(mixed, of_nearest),
}
ESTIMATORS: dict[str, Estimator | None] = {
    "raw": None,
    "NNN 16, .75": NNN(16, 0.75),
    "Blend": Blend(),
    "Blend at strength 1": Blend(strength=1.0),
}


def run(name: str) -> dict[str, dict[str, Any]]:
    """{method: its cell}. R@1 is the mean of that where the right item is of the queries' kind and where not."""
    totals: dict[str, Floats] = {}  # (2, n_items): by kind
    shares: dict[str, list[float]] = {}
    asked = np.zeros((2, len(load_task(name.partition(", ")[0]).gallery)))
    for mixed in draws(name):
        kind = mixed.own[mixed.positives].astype(int)
        np.add.at(asked, (kind, mixed.positives), 1)
        for form, change in FORMS.items():
            changed = change(mixed)
            biases = [
                np.zeros(len(changed.gallery), np.float32)
                if estimator is None
                else estimator.fit(QueryBank(changed.bank), gallery=changed.gallery).bias(
                    changed.gallery
                )
                for estimator in ESTIMATORS.values()
            ]
            outcome = assess(
                changed.query, changed.gallery, biases, list(changed.positives[:, None])
            )
            for method, right, retrieved in zip(
                ESTIMATORS, outcome.values, outcome.retrieved, strict=True
            ):
                full = ", ".join(filter(None, (method, form)))
                np.add.at(
                    totals.setdefault(full, np.zeros_like(asked)),
                    (kind, mixed.positives),
                    100 * right,
                )
                shares.setdefault(full, []).append(100 * float(mixed.own[retrieved[:, 0]].mean()))
    by_kind = {method: total / asked for method, total in totals.items()}
    blend = by_kind["Blend"].mean(0)
    cells = {}
    for method, values in by_kind.items():
        other, own = (confidence_interval(of_kind, resamples=1000)._asdict() for of_kind in values)
        over = paired_difference(blend, values.mean(0), resamples=1000)._asdict()
        share = float(np.mean(shares[method]))
        cells[method] = {"own": own, "other": other, "over_blend": over, "first_of_own_kind": share}
    print(
        name,
        {method: f"{cell['over_blend']['estimate']:+.2f}" for method, cell in cells.items()},
        flush=True,
    )
    return cells


def markdown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = []
    for method in next(iter(results.values())):
        shown = []
        for cells in results.values():
            cell = cells[method]
            over = cell["over_blend"]
            gain = (
                f"; {over['estimate']:+.1f} ({over['low']:+.1f} … {over['high']:+.1f})"
                if method != "Blend"
                else ""
            )
            kinds = " / ".join(f"{cell[kind]['estimate']:.1f}" for kind in ("own", "other"))
            shown.append(f"{kinds}{gain}; {cell['first_of_own_kind']:.0f}%")
        rows.append([method, *shown])
    return (
        "R@1 (%) where the right item is of the queries' own kind / of the other kind; the mean of both less that of "
        "Blend, with its 95% interval; the share of first answers of the queries' own kind, as half of the right ones "
        "are.\n\n" + table(["method", *results], rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="task", help=f"one of {', '.join(TASKS)}; all unless given"
    )
    names = parser.parse_args().tasks or TASKS
    one_thread()
    started = time.monotonic()
    results = {name: run(name) for name in names}
    text = markdown(results)
    print(text)
    if names == TASKS:
        save("mixed", {"environment": environment(started), "tasks": results}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
