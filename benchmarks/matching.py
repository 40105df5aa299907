"""Batch matching through Milvus Lite beside a dense Sinkhorn over all pairs, and queries that ask for some rows only.

    python -m benchmarks.matching [--part recall|coverage] [task …]

recall: R@1 (%) of each task's queries: by raw score; with the biases of a Sinkhorn on the task's bank; with a dense
Sinkhorn between the queries and all rows; and by `HubnessClient.match` with 200 candidates, which may be at most 0.3
below the dense one. coverage: queries that do not cover the rows: shares of them at random, and those of one topic, a
cluster of rows by k-means. It shows the two signs that the warning rests on, and R@1 with the task's bank beside the
queries; caption_translation is cut to 4,000 of its 14,085 pairs. A run of all
tasks is kept, each part beside the other.
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
from benchmarks.new_rows import load
from milvus_hubness import HubnessClient, Sinkhorn, connect
from milvus_hubness.client.matching import QUERIES_PER_ITEM
from milvus_hubness.estimators.matching import ITERATIONS, TEMPERATURE, Pairs, balanced, moments, spread_of
from milvus_hubness.kernels import topk
from tests.galleries import plain_collection
from tests.real_data import EMBEDDING_TASKS, fit_on, load_task, recall_at_1

CANDIDATES, MOST_BELOW = 200, 0.3
SHARES, CLUSTERS, FEW = (1.0, 0.3, 0.1, 0.03), (2, 5, 20), 10
POINT = 1.0
DEPTH, TIE = 5, 5e-7


def through_milvus(name: str) -> dict[str, float]:
    task = load_task(name)
    dense = Sinkhorn(temperature=TEMPERATURE, iterations=ITERATIONS).fit(task.query, gallery=task.gallery)
    raw, bank, oracle = recall_at_1(name, None, fit_on(name, Sinkhorn()), dense)
    with tempfile.TemporaryDirectory() as folder:
        uri = str(Path(folder) / "bench.db")
        plain_collection(connect(uri), "rows", task.gallery, "IP")
        client, started = HubnessClient(uri), time.monotonic()
        matches = client.match("rows", task.query, limit=DEPTH, candidates=CANDIDATES)
        seconds = time.monotonic() - started
        client.close()
    columns = matches.columns
    query, best = columns["query"], columns["matched_score"][columns["rank"] == 1]
    # As in recall_at_1, a tie counts for the query.
    near = columns["matched_score"] >= best[query] - TIE * np.abs(best[query]).max()
    r1 = 100 * len(set(query[near & (columns["id"] == task.positives[query])].tolist())) / len(task.query)
    return {
        "queries": len(task.query),
        "rows": len(task.gallery),
        "raw": raw,
        "bank": bank,
        "dense": oracle,
        "match": r1,
        "pairs": matches.facts["pairs"],
        "seconds": round(seconds, 1),
    }


def matched(queries: npt.NDArray[np.float32], gallery: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], Any]:
    """The first row of each query, and the balance, as `match` computes them."""
    near = topk(queries, gallery, min(CANDIDATES, len(gallery)))
    back = topk(gallery, queries, min(QUERIES_PER_ITEM, len(queries)))
    numbers, items = np.arange(len(queries)), np.arange(len(gallery))
    pairs = Pairs.union(
        np.r_[np.repeat(numbers, near.indices.shape[1]), back.indices.ravel()],
        np.r_[near.indices.ravel(), np.repeat(items, back.indices.shape[1])],
        np.r_[near.values.ravel(), back.values.ravel()],
    )
    result = balanced(pairs, len(gallery), spread_of(moments(gallery @ queries.T)))
    return (queries @ gallery.T - result.biases).argmax(1), result


def coverage(name: str) -> list[dict[str, Any]]:
    """Cases of one task: R@1 of some of its queries, raw and matched, without and with the bank."""
    task, rng, cases = load(name), np.random.default_rng(0), {}
    for share in SHARES:
        count = round(share * len(task.query))
        cases["all" if share == 1 else f"{share:.0%} at random"] = rng.permutation(len(task.query))[:count]
    for clusters in CLUSTERS:
        labels = KMeans(clusters, n_init=2, random_state=0).fit_predict(task.gallery)[task.positives]
        sizes = np.bincount(labels, minlength=clusters)
        for place in (0, clusters // 2):
            chosen = np.flatnonzero(labels == np.argsort(-sizes)[place])
            cases[f"topic {place + 1} of {clusters}"] = chosen
    rows = []
    for case, chosen in cases.items():
        if len(chosen) < FEW:
            continue
        queries, positives = task.query[chosen], task.positives[chosen]
        first, result = matched(queries, task.gallery)
        joined, _ = matched(np.concatenate([queries, task.bank]), task.gallery)
        row = {"task": name, "case": case, "queries": len(chosen), "rows": len(task.gallery)}
        answers = {"raw": (queries @ task.gallery.T).argmax(1), "match": first, "with bank": joined[: len(chosen)]}
        row |= {kind: 100 * float(np.mean(own == positives)) for kind, own in answers.items()}
        row |= {sign: result.facts[sign] for sign in ("bias_spread", "best_score_gap")}
        rows.append({**row, "warned": bool(result.warnings)})
    return rows


def summary(cases: list[dict[str, Any]]) -> dict[str, int]:
    """How many cases lose or gain more than a point by matching, and how many of these are warned of."""
    changes = [(case["match"] - case["raw"], case["warned"]) for case in cases]
    losses, gains = [warned for change, warned in changes if change < -POINT], [w for c, w in changes if c > POINT]
    return {"losses": len(losses), "warned": sum(losses), "gains": len(gains), "warned for nothing": sum(gains)}


def recall_table(rows: dict[str, Any]) -> str:
    head = ["task", "queries", "rows", "raw", "bank", "dense", "match", "below dense", "pairs", "s"]
    lines = [
        [
            name,
            *(f"{row[key]:,}" for key in ("queries", "rows")),
            *(f"{row[key]:.1f}" for key in ("raw", "bank", "dense", "match")),
            f"{row['dense'] - row['match']:.2f}",
            f"{row['pairs']:,}",
            f"{row['seconds']:.0f}",
        ]
        for name, row in rows.items()
    ]
    return f"R@1 (%) through Milvus Lite with {CANDIDATES} candidates.\n\n{table(head, lines)}\n"


def coverage_table(cases: list[dict[str, Any]]) -> str:
    head = ["task", "case", "queries", "rows", "raw", "match", "with bank", "bias spread", "best score gap", "warned"]
    lines = [
        [
            case["task"],
            case["case"],
            *(f"{case[key]:,}" for key in ("queries", "rows")),
            *(f"{case[key]:.1f}" for key in ("raw", "match", "with bank")),
            *(f"{case[key]:.2f}" for key in ("bias_spread", "best_score_gap")),
            "yes" if case["warned"] else "",
        ]
        for case in cases
    ]
    counts = ", ".join(f"{name}: {count}" for name, count in summary(cases).items())
    return f"Queries for some of the rows. By more than a point, {counts}.\n\n{table(head, lines)}\n"


def main() -> None:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="task", help="of tests/real_data.py; all unless given")
    parser.add_argument("--part", choices=("recall", "coverage"), help="both unless given")
    options = parser.parse_args()
    tasks, path = options.tasks or EMBEDDING_TASKS, RESULTS / "matching.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if options.part != "coverage":
        rows = {}
        for name in tasks:
            rows[name] = through_milvus(name)
            print(name, rows[name], flush=True)
        results["recall"] = {"environment": environment(started), "tasks": rows}
        print(recall_table(rows))
    if options.part != "recall":
        cases = [case for name in tasks for case in coverage(name)]
        results["coverage"] = {"environment": environment(started), "cases": cases, "summary": summary(cases)}
        print(coverage_table(cases))
    if not options.tasks and len(results) == len(("recall", "coverage")):
        tables = recall_table(results["recall"]["tasks"]), coverage_table(results["coverage"]["cases"])
        save("matching", results, "\n".join(tables))
    kept = results.get("recall", {"tasks": {}})["tasks"]
    far = [name for name, row in kept.items() if row["dense"] - row["match"] > MOST_BELOW]
    raise SystemExit(f"match is more than {MOST_BELOW} below the dense Sinkhorn on {', '.join(far)}" if far else 0)


if __name__ == "__main__":
    main()
