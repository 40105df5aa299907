"""What a log of queries does as a bank where demand is uneven, and what near copies and priors change.

    python -m benchmarks.demand [--draws N] [--tuned-draws N] [--workers N] [--save] [--add] [--from-saved [--even]]

A log has 3,000 queries for items that are drawn by a demand of Zipf's law; tests are one fresh query an item,
weighted by the same demand. caption_document has real captions: 1 to 4 for the log, the fifth for the test. The
others have noisy copies of their queries at a cosine of 0.85 to 0.95; recommenders are made here
(`benchmarks.made_tasks`), and their users are the queries.

Gains are points of R@1 over the raw search. "followed" applies what the verdict without labels says: nothing, half or
all of the default of jobs. The uniform bank is a log with even demand. λ of clicks is fixed; that of `tune` is its own.
Rules and numbers were chosen on CHOSEN_ON, at other draws, and are reported on the rest.

"even" has banks of `benchmarks.defaults`, which ask for each item about as often as for any other, without copies:
the default blend, and what jobs do by default. "grouping" has the seconds that the groups of a large log take.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.defaults import draw, hits, load
from benchmarks.environment import RESULTS, environment, save, table
from benchmarks.made_tasks import recommender, unsuited
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Blend, Estimator, WithDemand
from milvus_hubness.correction.estimators.base import score_spread
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.tuning import judge_bank, tune
from tests.support.real_data import EMBEDDING_TASKS

Vectors = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]
DrawQueries = Callable[[np.random.Generator, npt.NDArray[np.int64]], Vectors]

ZIPF = (0.0, 0.5, 1.0, 1.3)
LOG = 3_000
"""Queries of a log."""
MOST_ITEMS = 1_500
PAIRS = 500
"""Labelled pairs of the same log, for `tune`."""
LAMBDA = 0.25
"""Weight of the clicks of the log, in units of the spread of scores."""

COSINES = {
    "clip_products t2i": 0.85,
    "clip_products i2t": 0.85,
    "text_video_msrvtt t2v": 0.85,
    "text_video_msrvtt v2t": 0.85,
    "docstring_code": 0.9,
    "caption_translation": 0.9,
    "German to English, trigrams": 0.9,
    "code to docstring, trigrams": 0.95,
    "name to code, trigrams": 0.95,
}
"""The cosine of a noisy copy with its query, by task."""
REAL_COPIES = "caption_document"
RECOMMENDERS = ("factors of weighted counts", "alternating least squares")
TASKS = (REAL_COPIES, *COSINES, *RECOMMENDERS)
CHOSEN_ON = (REAL_COPIES, *tuple(COSINES)[:6])
"""Tasks with whose other draws the mechanism was chosen."""


class Task(NamedTuple):
    gallery: Vectors
    draw: DrawQueries
    """Draws a query for each of some items."""
    test: Vectors
    """(n, d): a fresh query for each item."""


@cache
def task_of(name: str) -> Task:
    if name == REAL_COPIES:
        source = load(name)
        captions = np.asarray(source.query, np.float32).reshape(5, len(source.gallery), -1)
        return Task(
            source.gallery,
            lambda rng, items: captions[rng.integers(4, size=len(items)), items],
            captions[4],
        )

    if name in RECOMMENDERS:
        source = recommender(name)
    elif "," in name:
        source = unsuited(name)
    else:
        source = load(name)
    gallery, queries = _one_query_each(source)
    cosine = COSINES.get(name, 0.95)

    def noisy(rng: np.random.Generator, items: npt.NDArray[np.int64]) -> Vectors:
        lengths = np.linalg.norm(queries[items], axis=1, keepdims=True)
        noise = rng.standard_normal((len(items), queries.shape[1])).astype(np.float32)
        noise *= lengths / np.linalg.norm(noise, axis=1, keepdims=True)
        copies = cosine * queries[items] + np.sqrt(1 - cosine**2) * noise
        return np.asarray(copies, np.float32)

    return Task(gallery, noisy, noisy(np.random.default_rng(1), np.arange(len(gallery))))


def _one_query_each(source: Any) -> tuple[Vectors, Vectors]:
    """Return items that are the right answer of some query, and one such query for each."""
    positives = np.asarray(source.positives)
    items, first = np.unique(positives, return_index=True)
    chosen = np.sort(np.random.default_rng(0).permutation(len(items))[:MOST_ITEMS])
    gallery = np.asarray(source.gallery, np.float32)[items[chosen]]
    return gallery, np.asarray(source.query, np.float32)[first[chosen]]


def demand_of(count: int, zipf: float, rng: np.random.Generator) -> Values:
    """Return the shares (n,) of items in random order."""
    shares = 1 / (1 + rng.permutation(count)) ** zipf
    demand: Values = shares / shares.sum()
    return demand


def biases_of(estimator: Estimator, bank: QueryBank, gallery: Vectors) -> Vectors:
    return estimator.fit(bank, gallery=gallery).bias(gallery)


def drawn(name: str, zipf: float, number: int, tuned: bool) -> dict[str, float]:
    """Return the gains of one draw of a log."""
    task = task_of(name)
    gallery = task.gallery
    rng = np.random.default_rng([int(10 * zipf), number])
    demand = demand_of(len(gallery), zipf, rng)
    items = rng.choice(len(gallery), size=LOG, p=demand)
    log = QueryBank(task.draw(rng, items))
    uniform = QueryBank(task.draw(rng, rng.integers(len(gallery), size=LOG)))
    scores = task.test @ gallery.T

    def r1(bias: npt.ArrayLike) -> float:
        best = (scores - np.asarray(bias, np.float32)).argmax(1)
        return 100 * float(((best == np.arange(len(gallery))) * demand).sum())

    grouped = with_groups(log, gallery)
    clicks = np.bincount(items, minlength=len(gallery)) + 1.0
    prior = LAMBDA * score_spread(grouped.condensed, gallery) * np.log(clicks / clicks.sum())
    near_uniform = with_groups(uniform, gallery)

    neutral = biases_of(Blend(), grouped, gallery)
    demanded = biases_of(WithDemand(), grouped, gallery)
    judgement = judge_bank(grouped, gallery)
    biases = {
        "log": biases_of(Blend(), log, gallery),
        "groups": neutral,
        "groups and demand": demanded,
        "followed": judgement.strength * demanded,
        "followed, groups": judgement.strength * neutral,
        "uniform": biases_of(Blend(), near_uniform, gallery),
        "clicks": -prior,
        "groups and clicks": neutral - prior,
    }
    if tuned:
        pairs = rng.choice(len(gallery), size=PAIRS, p=demand)
        choice = tune(log, gallery, queries=LabelledQueries.of(task.draw(rng, pairs), pairs))
        biases["tune"] = np.zeros(len(gallery), np.float32)
        if choice.choice is not None:
            biases["tune"] = choice.strength * biases_of(choice.choice, grouped, gallery)

    raw = r1(np.zeros(len(gallery)))
    gains = {method: r1(bias) - raw for method, bias in biases.items()}
    groups = np.sort(grouped.condensed.counts)[::-1]
    largest = groups[: max(1, len(groups) // 100)].sum() / groups.sum()
    facts = {
        "raw": raw,
        "strength": judgement.strength,
        "group_count": len(groups),
        "largest": float(largest),
    }
    return {**facts, **gains}


def rows_of(name: str, zipf: float, draws: int, tuned_draws: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [
        {
            "task": name,
            "zipf": zipf,
            "draw": number,
            **drawn(name, zipf, number, number < tuned_draws),
        }
        for number in range(draws)
    ]


OF_100 = 5
"""Draws of banks of 100 queries."""
LARGEST_BANK = 4_000


def even_rows(name: str) -> list[dict[str, Any]]:
    """Return the gains of own banks of a task with even demand."""
    torch.set_num_threads(1)
    task = load(name)
    gallery = np.asarray(task.gallery, np.float32)
    under = hits(task)
    raw = 100 * float(under(torch.zeros(len(gallery))).mean())
    banks = [("whole", draw(task.bank, LARGEST_BANK, name))]
    banks += [("of 100", draw(task.bank, 100, name, number)) for number in range(OF_100)]

    rows = []
    for kind, vectors in banks:
        bank = QueryBank(vectors)
        grouped = with_groups(bank, gallery)
        biases = {
            "blend": biases_of(Blend(), bank, gallery),
            "default": biases_of(WithDemand(), grouped, gallery),
        }
        gains = {
            method: 100 * float(under(torch.from_numpy(bias)).mean()) - raw
            for method, bias in biases.items()
        }
        groups = len(grouped.condensed)
        rows.append({"task": name, "bank": kind, "queries": len(bank), "groups": groups, **gains})
    return rows


def even_means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        kind: {
            method: float(np.mean([row[method] for row in rows if row["bank"] == kind]))
            for method in ("blend", "default")
        }
        for kind in dict.fromkeys(row["bank"] for row in rows)
    }


LARGE_LOG = 100_000
LARGE_GALLERY = 20_000


def grouping_seconds() -> dict[str, Any]:
    """Return how long the groups of a large log of Zipf's law take."""
    task = task_of("docstring_code")
    rng = np.random.default_rng(0)
    dim = task.gallery.shape[1]
    items = rng.standard_normal((LARGE_GALLERY, dim)).astype(np.float32)
    items += task.gallery.mean(0) * np.sqrt(dim)
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    wanted = rng.choice(LARGE_GALLERY, size=LARGE_LOG, p=demand_of(LARGE_GALLERY, 1.0, rng))
    noise = rng.standard_normal((LARGE_LOG, dim)).astype(np.float32) / np.sqrt(dim)
    log = QueryBank(0.9 * items[wanted] + np.sqrt(1 - 0.9**2) * noise)

    began = time.monotonic()
    groups = with_groups(log, items)
    seconds = time.monotonic() - began
    facts = {"queries": LARGE_LOG, "items": LARGE_GALLERY, "dim": dim}
    return {**facts, "groups": len(groups.condensed), "seconds": round(seconds, 1)}


METHODS = ("log", "groups", "groups and demand", "followed, groups", "followed", "uniform")
METHODS += ("clicks", "groups and clicks", "tune")


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean gain of each method; of `tune`, over the draws that were tuned."""
    return {
        method: float(np.mean([row[method] for row in rows if method in row]))
        for method in METHODS
        if any(method in row for row in rows)
    }


def summary(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    lines = []
    facts: dict[str, Any] = {"by_task": {}, "by_zipf": {}}
    for zipf in ZIPF:
        of_zipf = [row for row in rows if row["zipf"] == zipf]
        by_task = {
            name: means([row for row in of_zipf if row["task"] == name])
            for name in TASKS
            if any(row["task"] == name for row in of_zipf)
        }
        facts["by_task"][str(zipf)] = by_task
        kinds = {
            "choice": [name for name in by_task if name in CHOSEN_ON],
            "report": [name for name in by_task if name not in (*CHOSEN_ON, *RECOMMENDERS)],
            "recommenders": [name for name in by_task if name in RECOMMENDERS],
        }
        for kind, names in kinds.items():
            if not names:
                continue
            of_kind = {
                method: {
                    "mean": float(np.mean([by_task[name][method] for name in names])),
                    "worst": float(min(by_task[name][method] for name in names)),
                }
                for method in METHODS
                if method in by_task[names[0]]
            }
            facts["by_zipf"].setdefault(str(zipf), {})[kind] = of_kind
            cells = [
                f"{of_kind[method]['mean']:+.1f} ({of_kind[method]['worst']:+.1f})"
                if method in of_kind
                else ""
                for method in METHODS
            ]
            lines.append([f"{zipf:g}", kind, str(len(names)), *cells])
    return facts, table(["Zipf", "tasks", "number", *METHODS], lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--tuned-draws", type=int, default=4, help="draws that `tune` gets too")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--zipf", nargs="*", type=float, default=list(ZIPF))
    parser.add_argument("--workers", type=int, default=2, help="processes [default: 2]")
    parser.add_argument("--from-saved", action="store_true")
    parser.add_argument(
        "--even", action="store_true", help="with --from-saved: measure the own banks again"
    )
    parser.add_argument("--add", action="store_true", help="keep the saved rows of other tasks")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if options.from_saved:
        saved = json.loads((RESULTS / "demand.json").read_text())
        rows, where = saved["rows"], saved["environment"]
        even, grouping = saved["even_rows"], saved["grouping"]
        if options.even:
            even = [row for name in EMBEDDING_TASKS for row in even_rows(name)]
    else:
        rows = []
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, context) as pool:
            waiting = [
                pool.submit(rows_of, name, zipf, options.draws, options.tuned_draws)
                for name in options.tasks
                for zipf in options.zipf
            ]
            for done in waiting:
                of_case = done.result()
                figures = ", ".join(f"{name} {gain:+.1f}" for name, gain in means(of_case).items())
                print(f"{of_case[0]['task']}, Zipf {of_case[0]['zipf']:g}: {figures}", flush=True)
                rows += of_case
            even = [row for rows in pool.map(even_rows, EMBEDDING_TASKS) for row in rows]
        grouping = grouping_seconds()
        where = environment(started)
        if options.add:
            saved = json.loads((RESULTS / "demand.json").read_text())
            rows += [row for row in saved["rows"] if row["task"] not in options.tasks]
    facts, markdown = summary(rows)
    facts["even"] = even_means(even)
    facts["grouping"] = grouping
    print(markdown)
    print(json.dumps({name: facts[name] for name in ("even", "grouping")}))
    if options.save or options.from_saved:
        results = {**facts, "rows": rows, "even_rows": even, "environment": where}
        save("demand", results, markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
