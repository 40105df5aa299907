"""What the verdict without labels decides on banks that fit and on banks that do not, and what it costs or saves.

    pip install wordllama django babel && pip install --group data
    python -m benchmarks.verdict [--from-saved] [--workers N] [--tasks TASK …]

Banks: up to 2,000 queries of a task, and draws of 30 to 1,000; logs that ask for the gallery's own items, each
once or thrice; those of other encoders, data sets and modalities, and of one topic of four; the other side of the
same data set; items of the gallery and other items, also for galleries of 50 to 250 items. Tasks: the seven with
embeddings of `benchmarks.data`, the scores of a re-ranker, ten with unsuited encoders and seven recommenders of
`benchmarks.made_tasks`, and twelve of `benchmarks.text_tasks`. Galleries are cut to 1,000 items. The verdict is given
the bank alone, and 100 real queries without labels.

Gains are in points of R@1 over the raw search, of the default of jobs at full and at half strength; what is followed
is the strength of the verdict. The thresholds are chosen on every other task and reported on the rest.
--from-saved judges the figures of the last run of all tasks again; a run of some is saved apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import spearmanr
from sklearn.cluster import KMeans

from benchmarks.defaults import (
    Case,
    crowding,
    draw,
    hits,
    load,
    reranker_cases,
    same_length,
    to_dim,
)
from benchmarks.environment import RESULTS, environment, save, table
from benchmarks.made_tasks import RECOMMENDERS, UNSUITED, recommender, unsuited
from benchmarks.text_tasks import TEXT_TASKS, text_task
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR
from milvus_hubness.correction.near_copies import near_copies
from milvus_hubness.quality.tuning import apart, default_biases, judge_unlabelled
from milvus_hubness.quality.verdict import Figures, examine
from tests.support.real_data import EMBEDDING_TASKS, Task

SIZES = (30, 100, 300, 1000)
DRAWS = 2
LARGEST_BANK = 2_000
"""Queries of a whole bank that are taken, so that a case takes seconds."""
FOREIGN_BANK = 1_000
MOST_GALLERY = 1_000
"""Items of a gallery, so that a case takes a second."""
SMALL = (50, 100, 250)
"""Items of small galleries."""
COPIES = (1, 3)
"""How often a log asks for each item of the gallery."""
COSINE = 0.9
"""Of a noisy copy with its query."""
TOPICS = 4
FEWEST = 40
"""Queries of a topic."""
REAL_QUERIES = 100
Vectors = npt.NDArray[np.float32]
SHOWN = ("own_banks_lose", "expected_gain", "foretells_gain")
BINS = 5
"""Of the curve of expected gains."""
OTHER_ENCODERS = 2
SAME_ENCODER_TASKS = 3
"""Tasks of other encoders, and of the same, whose banks a task is given."""

OWN = ("whole bank", *(f"{size:,} of its queries" for size in SIZES))
SAME_ENCODER = "same encoder, other data"
OTHER_ENCODER = "other encoder"
OTHER_SIDE = "other side of the same data"
ITEMS = "items of the gallery"
OTHER_ITEMS = "other items of the same kind"
OTHER_MODALITY = "items of other data"
CROWDING = "the half that crowds few items"
TOPIC = "one topic of four"
LOG = "log that asks for each item"
SMALL_OWN = "whole bank, small gallery"
SMALL_OTHER = "other items, small gallery"
RECOMMENDER = "recommender"
RERANKER = "scores of a re-ranker"

EXAMPLE_TASKS = (*EMBEDDING_TASKS, *UNSUITED, *TEXT_TASKS)
CHOSEN_ON = (*EMBEDDING_TASKS, *UNSUITED)[::2] + TEXT_TASKS[::2]
"""Tasks on which thresholds may be chosen; the others report."""


@cache
def task_of(name: str) -> Task:
    if name in UNSUITED:
        task = unsuited(name)
    elif name in TEXT_TASKS:
        task = text_task(name)
    else:
        task = recommender(name) if name in RECOMMENDERS else load(name)
    return of_items(task, MOST_GALLERY, name)


def of_items(task: Task, count: int, *key: Any) -> Task:
    """Return the task with `count` items of its gallery, and the queries that ask for them."""
    order = np.random.default_rng(zlib.crc32(repr(key).encode())).permutation(len(task.gallery))
    chosen = np.sort(order[:count])
    is_asked = np.isin(task.positives, chosen)
    positives = np.searchsorted(chosen, task.positives[is_asked])
    queries = task.query[is_asked]
    return task._replace(query=queries, gallery=task.gallery[chosen], positives=positives)


def encoder_of(name: str) -> str:
    """Return a name that tasks of the same encoder share."""
    if name in (*UNSUITED, *TEXT_TASKS):
        return name.partition(", ")[2]
    return name.partition(" ")[0]


def cases(name: str) -> Iterator[Case]:
    """Yield the cases of a task."""
    if name == RERANKER:
        for case in reranker_cases():
            yield case._replace(kind=RERANKER)
        return
    task = task_of(name)
    if name in RECOMMENDERS:
        yield Case(RECOMMENDER, task, name, draw(task.bank, LARGEST_BANK, name))
        return

    yield from own_cases(name, task)
    yield from log_cases(name, task)
    for other in foreign_tasks(name):
        yield foreign_case(name, task, other)
        if task_of(other).gallery.shape[1] == task.gallery.shape[1]:
            rows = draw(task_of(other).gallery, FOREIGN_BANK, name, other, OTHER_MODALITY)
            title = f"{name}, items of {other}"
            yield Case(OTHER_MODALITY, task, title, same_length(rows, task.bank))

    yield Case(ITEMS, task, name, same_length(draw(task.gallery, None, name), task.bank))
    crowd = draw(crowding(task.bank[:FOREIGN_BANK], task.gallery, 0.5), None, name, CROWDING)
    yield Case(CROWDING, task, name, crowd)
    bank = task.bank[:LARGEST_BANK]
    topic = KMeans(TOPICS, n_init=1, random_state=0).fit_predict(bank)
    for number in range(TOPICS):
        rows = bank[topic == number]
        if len(rows) >= FEWEST:
            yield Case(TOPIC, task, f"{name}, topic {number}", draw(rows, None, name, number))

    others = task.target_bank
    if others is not None:
        others = same_length(draw(others, FOREIGN_BANK, name), task.bank)
        yield Case(OTHER_ITEMS, task, name, others)
    for count in SMALL:
        small = of_items(task, count, name, count)
        title = f"{name}, {count} items"
        yield Case(SMALL_OWN, small, title, draw(task.bank, FOREIGN_BANK, name, count))
        if others is not None:
            yield Case(SMALL_OTHER, small, title, others)


def log_cases(name: str, task: Task) -> Iterator[Case]:
    """Yield logs of noisy copies of the queries, one or several for each item, searched by others."""
    items, first = np.unique(task.positives, return_index=True)
    queries = task.query[first]
    rng = np.random.default_rng(0)
    tested = task._replace(query=noisy(queries, rng), positives=items)
    for copies in COPIES:
        log = np.concatenate([noisy(queries, rng) for _ in range(copies)])
        title = f"{name}, {copies} for each item"
        yield Case(LOG, tested, title, draw(log, None, name, copies))


def noisy(queries: Vectors, rng: np.random.Generator) -> Vectors:
    noise = rng.standard_normal(queries.shape)
    lengths = np.linalg.norm(queries, axis=1, keepdims=True)
    noise *= lengths / np.linalg.norm(noise, axis=1, keepdims=True)
    return np.asarray(COSINE * queries + np.sqrt(1 - COSINE**2) * noise, np.float32)


def own_cases(name: str, task: Task) -> Iterator[Case]:
    yield Case(OWN[0], task, name, draw(task.bank, LARGEST_BANK, name))
    for size, kind in zip(SIZES, OWN[1:], strict=True):
        for number in range(DRAWS if size < len(task.bank) else 0):
            yield Case(kind, task, name, draw(task.bank, size, name, number))


def foreign_tasks(name: str) -> list[str]:
    """Return all other tasks of the same encoder, and some of others."""
    others = [other for other in EXAMPLE_TASKS if other != name]
    same = [other for other in others if encoder_of(other) == encoder_of(name)]
    rest = [other for other in others if other not in same]
    rng = np.random.default_rng(EXAMPLE_TASKS.index(name))
    return [*same[:SAME_ENCODER_TASKS], *rng.permutation(rest)[:OTHER_ENCODERS].tolist()]


def foreign_case(name: str, task: Task, other: str) -> Case:
    """Return the bank of another task, at the dimension and the mean length of this one's."""
    rows = draw(task_of(other).bank, FOREIGN_BANK, name, other)
    kind = OTHER_ENCODER
    if encoder_of(other) == encoder_of(name):
        # The two directions of a data set share their vectors, as do texts that ask for each other.
        is_of_texts = name in (*UNSUITED, *TEXT_TASKS)
        kind = SAME_ENCODER if is_of_texts else OTHER_SIDE
        if is_of_texts and set(name.split(",")[0].split(" to ")) == set(
            other.split(",")[0].split(" to ")
        ):
            kind = OTHER_SIDE
    if rows.shape[1] != task.bank.shape[1]:
        rows = to_dim(rows, task.bank.shape[1])
    return Case(kind, task, f"{name}, bank of {other}", same_length(rows, task.bank))


def measured(name: str, case: Case) -> dict[str, Any]:
    task = case.task
    gallery = task.gallery
    real = draw(task.query, REAL_QUERIES, case.name)
    copies = near_copies(QueryBank(case.bank), gallery)
    bias = torch.from_numpy(DEFAULT_ESTIMATOR.fit(copies.bank, gallery=gallery).bias(gallery))
    under = hits(task)
    raw = under(torch.zeros(len(gallery))).mean()
    gain, half = (100 * float(under(strength * bias).mean() - raw) for strength in (1.0, 0.5))
    with_queries = examine(
        apart(copies, real), gallery, default_biases, queries=real, whole=copies.bank
    )
    return {
        "kind": case.kind,
        "task": name,
        "case": case.name,
        "bank": len(case.bank),
        "items": len(gallery),
        "raw": 100 * float(raw),
        "gain": gain,
        "gain_of_half": half,
        "alone": examine(copies.bank, gallery, default_biases)._asdict(),
        "with_queries": with_queries._asdict(),
    }


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return what the cases of a task show."""
    torch.set_num_threads(1)
    return [measured(name, case) for case in cases(name)]


def run(names: Sequence[str], workers: int) -> list[dict[str, Any]]:
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        for name, of_task in zip(names, pool.map(rows_of, names), strict=True):
            print(f"{name}: {len(of_task)} cases", flush=True)
            rows += of_task
    return rows


def followed(row: dict[str, Any], given: str) -> float:
    """Return the gain of following the verdict. given: "alone" or "with_queries"."""
    strength = judge_unlabelled(Figures(**row[given])).strength
    return float({0.0: 0.0, 0.5: row["gain_of_half"], 1.0: row["gain"]}[strength])


def excess_of(row: dict[str, Any]) -> float:
    return Figures(**row["alone"]).excess


def expected_gain(rows: list[dict[str, Any]]) -> list[list[float]]:
    """Return [excess, mean gain, quartiles of the gain] of fifths of the own banks of the choice."""
    pairs = np.array(
        [
            (excess_of(row), row["gain"])
            for row in rows
            if row["kind"] in OWN and row["task"] in CHOSEN_ON and row["bank"] >= SIZES[1]
        ]
    )
    curve = []
    for part in np.array_split(pairs[pairs[:, 0].argsort()], BINS):
        gains = part[:, 1]
        quartiles = np.quantile(gains, (0.25, 0.75))
        values = [round(float(value), 2) for value in (gains.mean(), *quartiles)]
        curve.append([round(float(part[:, 0].mean()), 3), *values])
    return curve


def foretold(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Spearman's correlation with the gain of own banks of the report."""
    own = [row for row in rows if row["kind"] in OWN and row["task"] not in CHOSEN_ON]
    gains = [row["gain"] for row in own]
    return {
        "excess": float(spearmanr([excess_of(row) for row in own], gains).statistic),
        "two_views": float(spearmanr([row["alone"]["two_views"] for row in own], gains).statistic),
    }


def own_banks_lose(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what own banks lose in the mean against always correcting, on choice and report."""
    losses: dict[str, dict[str, float]] = {}
    for half, is_choice in (("choice", True), ("report", False)):
        own = [
            row for row in rows if row["kind"] in OWN and (row["task"] in CHOSEN_ON) == is_choice
        ]
        losses[half] = {
            given: float(np.mean([row["gain"] - followed(row, given) for row in own]))
            for given in ("alone", "with_queries")
        }
    return losses


def summary(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return a summary of each kind of bank, on the tasks of the choice and on the others, and their table."""
    summaries = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for is_choice in (True, False):
            chosen = [
                row
                for row in rows
                if row["kind"] == kind and (row["task"] in CHOSEN_ON) == is_choice
            ]
            if not chosen:
                continue
            facts: dict[str, Any] = {
                "kind": kind,
                "tasks": "choice" if is_choice else "report",
                "cases": len(chosen),
                "always": float(np.mean([row["gain"] for row in chosen])),
            }
            for given in ("alone", "with_queries"):
                gains = [followed(row, given) for row in chosen]
                refused = [judge_unlabelled(Figures(**row[given])).strength == 0 for row in chosen]
                facts[given] = {
                    "mean": float(np.mean(gains)),
                    "worst": float(min(gains)),
                    "refused": int(sum(refused)),
                }
            summaries.append(facts)

    lines = [
        [
            facts["kind"],
            facts["tasks"],
            str(facts["cases"]),
            f"{facts['always']:+.2f}",
            *(
                f"{facts[given][figure]:+.2f}" if figure != "refused" else str(facts[given][figure])
                for given in ("alone", "with_queries")
                for figure in ("mean", "worst", "refused")
            ),
        ]
        for facts in summaries
    ]
    of_verdict = ["mean", "worst", "refused"]
    header = ["bank", "tasks", "cases", "always", *of_verdict]
    header += [f"{name} with queries" for name in of_verdict]
    return summaries, table(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from-saved", action="store_true")
    parser.add_argument("--tasks", nargs="*", default=[*EXAMPLE_TASKS, *RECOMMENDERS, RERANKER])
    parser.add_argument("--workers", type=int, default=2, help="processes [default: 2]")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if options.from_saved:
        saved = json.loads((RESULTS / "verdict.json").read_text())
        rows, where = saved["rows"], saved["environment"]
    else:
        rows = run(options.tasks, options.workers)
        where = environment(started)
    summaries, markdown = summary(rows)
    print(markdown)
    results = {
        "summary": summaries,
        "own_banks_lose": own_banks_lose(rows),
        "expected_gain": expected_gain(rows),
        "foretells_gain": foretold(rows),
        "rows": rows,
        "environment": where,
    }
    print(json.dumps({name: results[name] for name in SHOWN}))
    is_whole = {row["task"] for row in rows} >= {*EXAMPLE_TASKS, *RECOMMENDERS, RERANKER}
    save("verdict" if is_whole else "verdict_part", results, markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
