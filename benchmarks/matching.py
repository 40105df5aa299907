"""Batch matching through Milvus Lite and a dense Sinkhorn over all pairs, and queries that ask for some rows only.

    python -m benchmarks.matching [--part recall|coverage|memory] [task …]

recall: R@1 (%) of each task's queries: by raw score; with the biases of a Sinkhorn on the task's bank; with a dense
Sinkhorn between the queries and all rows; and by `HubnessClient.match` with 200 candidates, which may be at most 0.3
below the dense one. The rows "first 1,000" have a set-up of query-aware normalisation that is often printed: 1,000
pairs, a bank of as many queries, τ 0.01 and 10 iterations; `match` has its own τ there too. coverage: queries that do
not cover the rows: shares of them at random, and those of one topic, a cluster of rows by k-means. It shows the two
signs that the warning rests on, and R@1 where the task's bank joins the queries, and its target bank joins the rows as
well; caption_translation is cut to 4,000 of its 14,085 pairs. memory: the peak of the client above its inputs,
by the number of pairs. A run of all tasks is saved, and each part replaces its own results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans

from benchmarks.environment import RESULTS, environment, one_thread, save, table
from benchmarks.memory import measure
from benchmarks.new_rows import load
from milvus_hubness import HubnessClient, Sinkhorn, connect
from milvus_hubness.correction.estimators.matching import (
    ITERATIONS,
    TEMPERATURE,
    Pairs,
    balanced,
    moments,
    spread_of,
)
from milvus_hubness.correction.kernels import topk
from milvus_hubness.milvus.client.matching import QUERIES_PER_ITEM
from tests.support.galleries import plain_collection
from tests.support.real_data import EMBEDDING_TASKS, Task, load_task, recall_at_1

PARTS = ("recall", "coverage", "memory")
CANDIDATES, MOST_BELOW = 200, 0.3
SHARES, CLUSTERS, FEW = (1.0, 0.3, 0.1, 0.03), (2, 5, 20), 10
POINT = 1.0
DEPTH, TIE = 5, 5e-7
FIRST, PUBLISHED = 1_000, Sinkhorn(tau=0.01, iterations=10)
CUT_TASKS = ("docstring_code", "caption_translation", "clip_products i2t")
SIZES, DIM, FEWER_CANDIDATES = (5_000, 10_000, 20_000), 64, 100


def first(task: Task) -> Task:
    parts = (part[:FIRST] for part in (task.query, task.gallery, task.bank))
    return Task(*parts, None, task.positives[:FIRST])


def through_milvus(task: Task, of_bank: Sinkhorn, of_queries: Sinkhorn) -> dict[str, float]:
    fits = (
        of_bank.fit(task.bank, gallery=task.gallery),
        of_queries.fit(task.query, gallery=task.gallery),
    )
    raw, bank, dense = recall_at_1(task, None, *fits)
    with tempfile.TemporaryDirectory() as folder:
        uri = str(Path(folder) / "bench.db")
        plain_collection(connect(uri, create=True), "rows", task.gallery, "IP")
        client, started = HubnessClient(uri), time.monotonic()
        matches = client.match("rows", task.query, DEPTH, candidates=CANDIDATES)
        seconds = time.monotonic() - started
        client.close()
    columns = matches.columns
    query, best = columns["query"], columns["matched_score"][columns["rank"] == 1]
    # As in recall_at_1, a tie counts for the query.
    near = columns["matched_score"] >= best[query] - TIE * np.abs(best[query]).max()
    found = len(set(query[near & (columns["id"] == task.positives[query])].tolist()))
    row = {"queries": len(task.query), "rows": len(task.gallery), "bank_queries": len(task.bank)}
    row |= {"raw": raw, "bank": bank, "dense": dense, "match": 100 * found / len(task.query)}
    return {**row, "pairs": matches.facts["pairs"], "seconds": round(seconds, 1)}


def matched(queries: npt.NDArray[np.float32], gallery: npt.NDArray[np.float32]) -> Any:
    """The balance as `match` computes it."""
    near = topk(queries, gallery, min(CANDIDATES, len(gallery)))
    back = topk(gallery, queries, min(QUERIES_PER_ITEM, len(queries)))
    numbers, items = (
        np.arange(len(queries), dtype=np.int32),
        np.arange(len(gallery), dtype=np.int32),
    )
    parts = [
        Pairs(
            np.repeat(numbers, near.indices.shape[1]),
            near.indices.ravel().astype(np.int32),
            near.values.ravel(),
        ),
        Pairs(
            back.indices.ravel().astype(np.int32),
            np.repeat(items, back.indices.shape[1]),
            back.values.ravel(),
        ),
    ]
    return balanced(
        Pairs.union(parts, len(gallery)), len(gallery), spread_of(moments(gallery @ queries.T))
    )


def coverage(name: str) -> list[dict[str, Any]]:
    """Cases of one task: R@1 of some of its queries, raw and matched, without and with the bank."""
    task, rng, cases = load(name), np.random.default_rng(0), {}
    for share in SHARES:
        count = round(share * len(task.query))
        cases["all" if share == 1 else f"{share:.0%} at random"] = rng.permutation(len(task.query))[
            :count
        ]
    for clusters in CLUSTERS:
        labels = KMeans(clusters, n_init=2, random_state=0).fit_predict(task.gallery)[
            task.positives
        ]
        sizes = np.bincount(labels, minlength=clusters)
        for place in (0, clusters // 2):
            chosen = np.flatnonzero(labels == np.argsort(-sizes)[place])
            cases[f"topic {place + 1} of {clusters}"] = chosen
    rows = []
    for case, chosen in cases.items():
        if len(chosen) < FEW:
            continue
        queries, positives = task.query[chosen], task.positives[chosen]
        joined, result = np.concatenate([queries, task.bank]), matched(queries, task.gallery)
        biases = {
            "raw": 0,
            "match": result.biases,
            "with bank": matched(joined, task.gallery).biases,
        }
        if task.target_bank is not None:
            both = matched(joined, np.concatenate([task.gallery, task.target_bank])).biases
            biases["with both banks"] = both[: len(task.gallery)]
        row = {"task": name, "case": case, "queries": len(chosen), "rows": len(task.gallery)}
        scores = queries @ task.gallery.T
        row |= {
            kind: 100 * float(np.mean((scores - b).argmax(1) == positives))
            for kind, b in biases.items()
        }
        row |= {sign: result.facts[sign] for sign in ("bias_spread", "best_score_gap")}
        rows.append({**row, "warned": bool(result.warnings)})
    return rows


def memory() -> list[dict[str, float]]:
    """The peak of the client's memory while random queries are matched with as many rows, above its inputs."""
    rows = []
    for size in (SIZES[0], *SIZES):  # the first run also loads the libraries
        rng = np.random.default_rng(0)
        queries, items = (rng.standard_normal((size, DIM), np.float32) for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            uri = str(Path(folder) / "bench.db")
            plain_collection(connect(uri, create=True), "rows", items, "COSINE")
            client, facts = HubnessClient(uri), {}

            def run(
                client: HubnessClient = client,
                queries: Any = queries,
                facts: dict[str, float] = facts,
            ) -> Any:
                matches = client.match("rows", queries, DEPTH, candidates=FEWER_CANDIDATES)
                facts.update(matches.facts)
                return matches.columns["score"]

            peak = measure(run)["peak_above_inputs_mb"]
            client.close()
        dense = 4 * size * size / 1e6
        rows.append(
            {
                "queries": size,
                "rows": size,
                "pairs": facts["pairs"],
                "peak_mb": peak,
                "all_pairs_mb": dense,
            }
        )
    return rows[1:]


def bytes_per_pair(rows: list[dict[str, float]]) -> float:
    return 1e6 * (rows[-1]["peak_mb"] - rows[0]["peak_mb"]) / (rows[-1]["pairs"] - rows[0]["pairs"])


def summary(cases: list[dict[str, Any]]) -> dict[str, int]:
    """How many cases lose or gain more than a point by matching, and how many of these are warned of."""
    changes = [(case["match"] - case["raw"], case["warned"]) for case in cases]
    losses, gains = (
        [warned for change, warned in changes if change < -POINT],
        [w for c, w in changes if c > POINT],
    )
    return {
        "losses": len(losses),
        "warned": sum(losses),
        "gains": len(gains),
        "warned for nothing": sum(gains),
    }


def recall_table(rows: dict[str, Any]) -> str:
    head = [
        "task",
        "queries",
        "rows",
        "bank queries",
        "raw",
        "bank",
        "dense",
        "match",
        "below dense",
        "pairs",
        "s",
    ]
    lines = [
        [
            name,
            *(f"{row[key]:,}" for key in ("queries", "rows", "bank_queries")),
            *(f"{row[key]:.1f}" for key in ("raw", "bank", "dense", "match")),
            f"{row['dense'] - row['match']:.2f}",
            f"{row['pairs']:,}",
            f"{row['seconds']:.0f}",
        ]
        for name, row in rows.items()
    ]
    return f"R@1 (%) through Milvus Lite with {CANDIDATES} candidates.\n\n{table(head, lines)}\n"


def coverage_table(cases: list[dict[str, Any]]) -> str:
    recalls = ("raw", "match", "with bank", "with both banks")
    head = ["task", "case", "queries", "rows", *recalls, "bias spread", "best score gap", "warned"]
    lines = [
        [
            case["task"],
            case["case"],
            *(f"{case[key]:,}" for key in ("queries", "rows")),
            *(f"{case[key]:.1f}" if key in case else "" for key in recalls),
            *(f"{case[key]:.2f}" for key in ("bias_spread", "best_score_gap")),
            "yes" if case["warned"] else "",
        ]
        for case in cases
    ]
    counts = ", ".join(f"{name}: {count}" for name, count in summary(cases).items())
    return (
        f"Queries for some of the rows. By more than a point, {counts}.\n\n{table(head, lines)}\n"
    )


def memory_table(rows: list[dict[str, float]]) -> str:
    head = ["queries", "rows", "pairs", "peak above inputs, MB", "all pairs in float32, MB"]
    lines = [
        [
            *(f"{row[key]:,}" for key in ("queries", "rows", "pairs")),
            *(f"{row[key]:.0f}" for key in ("peak_mb", "all_pairs_mb")),
        ]
        for row in rows
    ]
    about = f"Memory with {FEWER_CANDIDATES} candidates: {bytes_per_pair(rows):.0f} bytes for each further pair."
    return f"{about}\n\n{table(head, lines)}\n"


def main() -> None:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="task", help="of tests/support/real_data.py; all unless given"
    )
    parser.add_argument("--part", choices=PARTS, help="all unless given")
    options = parser.parse_args()
    tasks, path = options.tasks or EMBEDDING_TASKS, RESULTS / "matching.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    far = []
    if options.part in (None, "recall"):
        cases: list[tuple[str, Task, Sinkhorn, Sinkhorn]] = []
        dense, rows = Sinkhorn(temperature=TEMPERATURE, iterations=ITERATIONS), {}
        cases += [(name, load_task(name), Sinkhorn(), dense) for name in tasks]
        cases += [
            (f"{name}, first {FIRST:,}", first(load_task(name)), *[PUBLISHED] * 2)
            for name in CUT_TASKS
            if name in tasks
        ]
        for name, *case in cases:
            rows[name] = through_milvus(*case)
            print(name, rows[name], flush=True)
        results["recall"] = {"environment": environment(started), "tasks": rows}
        far = [name for name, row in rows.items() if row["dense"] - row["match"] > MOST_BELOW]
        print(recall_table(rows))
    if options.part in (None, "coverage"):
        found = [case for name in tasks for case in coverage(name)]
        results["coverage"] = {
            "environment": environment(started),
            "cases": found,
            "summary": summary(found),
        }
        print(coverage_table(found))
    if options.part in (None, "memory"):
        sizes = memory()
        results["memory"] = {
            "environment": environment(started),
            "sizes": sizes,
            "bytes_per_pair": bytes_per_pair(sizes),
        }
        print(memory_table(sizes))
    if not options.tasks and set(results) == set(PARTS):
        tables = [
            recall_table(results["recall"]["tasks"]),
            coverage_table(results["coverage"]["cases"]),
        ]
        save("matching", results, "\n".join([*tables, memory_table(results["memory"]["sizes"])]))
    raise SystemExit(
        f"match is more than {MOST_BELOW} below the dense Sinkhorn on {', '.join(far)}"
        if far
        else 0
    )


if __name__ == "__main__":
    main()
