"""What the link and the locality hint columns are worth: the distances that an HNSW graph computes for a recall.

    python -m benchmarks.graph_hint [--rows N]

FAISS HNSW (M 16, efConstruction 200) over the items of two tasks, enlarged to N by mixing them; for each of
some breadths of the search recall@10 against the exact answers, and the distances computed for a query, which
unlike times do not depend on what else a machine does. At recall 0.95 and 0.97, the logarithmic miss
interpolated: of the raw index, and of augmented form with NNN(32, 0.75) without a graph hint column and with
one of some λ, without locality hint columns and with them, asked with strength 1 and with strength 0. Exits
with 1 where the corrected search of the form that migrations write needs more distances than without these
columns, or the raw one more than 1.25 times what the raw index does."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, save, table
from benchmarks.kernels import enlarged
from milvus_hubness import NNN, Layout, QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import GRAPH_HINT_SHARE, measured_on
from milvus_hubness.correction.fitted import Correction
from tests.support.real_data import load_task

TASKS = ("docstring_code", "caption_translation")
QUERIES, LIMIT = 500, 10
LINKS, BUILD_BREADTH = 16, 200
BREADTHS = (10, 14, 20, 26, 32, 40, 48, 64, 96, 128, 192)
RECALLS = (0.95, 0.97)
FORMS = ((0.0, False), (0.5, False), (0.75, False), (0.5, True), (0.75, True), (1.0, True))
"""λ, and whether there are locality hint columns."""
MOST = 1.25


def distances(
    rows: Floats, query_vectors: dict[str, Floats], exact: dict[str, npt.NDArray[np.int64]]
) -> dict[str, Any]:
    """For each kind of query the distances of a query at each of RECALLS, None where that is not reached."""
    index = faiss.IndexHNSWFlat(rows.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_BREADTH
    index.add(rows)
    found: dict[str, Any] = {}
    for kind, queries in query_vectors.items():
        max_miss_rate, costs = [], []
        for breadth in BREADTHS:
            index.hnsw.efSearch = breadth
            faiss.cvar.hnsw_stats.reset()
            _, got = index.search(queries, LIMIT)
            hits = np.mean(
                [np.isin(own, true).mean() for own, true in zip(got, exact[kind], strict=True)]
            )
            max_miss_rate.append(math.log(max(1 - float(hits), 1e-6)))
            costs.append(faiss.cvar.hnsw_stats.ndis / len(queries))
        found[kind] = {str(recall): _at(recall, max_miss_rate, costs) for recall in RECALLS}
    return found


def _at(recall: float, max_miss_rate: list[float], costs: list[float]) -> float | None:
    wanted = math.log(1 - recall)
    for i in range(1, len(max_miss_rate)):
        if max_miss_rate[i] <= wanted <= max_miss_rate[i - 1]:
            share = (max_miss_rate[i - 1] - wanted) / (max_miss_rate[i - 1] - max_miss_rate[i] or 1)
            return round(costs[i - 1] + share * (costs[i] - costs[i - 1]))
    return None


def measured(name: str, count: int) -> dict[str, Any]:
    task = load_task(name)
    items = np.concatenate(
        [task.gallery, enlarged(task.gallery, max(0, count - len(task.gallery)))]
    )[:count]
    queries = task.query[np.linalg.norm(task.query, axis=1) > 0][:QUERIES]
    plain = Layout(items.shape[1], "IP")
    uncentred = Correction.fit(plain, NNN(32, 0.75), QueryBank.of(task.bank))
    biases = replace(uncentred, mean_bias=float(uncentred.centred(items).mean())).centred(items)
    scores = queries @ items.T
    exact = {
        kind: np.argsort(-(scores - w * biases), axis=1)[:, :LIMIT]
        for kind, w in (("raw", 0.0), ("corrected", 1.0))
    }
    found = {"raw index": distances(items, {"raw": queries}, exact)}
    for pull, locality_hints in FORMS:
        layout = measured_on(
            plain, items, task.bank, graph_hint=pull > 0, locality_hints=locality_hints
        )
        if layout.graph_hint is not None:
            share = pull / GRAPH_HINT_SHARE["IP"]
            hint = replace(layout.graph_hint, pull=layout.graph_hint.pull * share)
            layout = replace(layout, graph_hint=hint)
        stored = layout.augment(
            items, biases, replace(uncentred, layout=layout).locality_hints(items)
        )
        query_vectors = {
            "raw": layout.encode_queries(queries, 0.0),
            "corrected": layout.encode_queries(queries, 1.0),
        }
        found[_form(pull, locality_hints)] = distances(stored, query_vectors, exact)
        print(name, _form(pull, locality_hints), found[_form(pull, locality_hints)], flush=True)
    return found


def _form(pull: float, cells: bool) -> str:
    return (f"λ = {pull:g}" if pull else "no link") + (", locality hint columns" if cells else "")


def shown(found: dict[str, dict[str, Any]]) -> str:
    lines = []
    for task, forms in found.items():
        for form, kinds in forms.items():
            cells = [
                kinds.get(kind, {}).get(str(recall))
                for kind in ("corrected", "raw")
                for recall in RECALLS
            ]
            lines.append([task, form, *("–" if cell is None else f"{cell:,}" for cell in cells)])
    head = [f"strength {w}, recall {recall}" for w in (1, 0) for recall in RECALLS]
    return f"Distances of a query.\n\n{table(['task', 'form', *head], lines)}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    options = parser.parse_args()
    started = time.monotonic()
    found = {name: measured(name, options.rows) for name in TASKS}
    print(shown(found))
    save(
        "graph_hint",
        {
            "rows": options.rows,
            "queries": QUERIES,
            "tasks": found,
            "environment": environment(started),
        },
        shown(found),
    )
    worse = 0
    for forms in found.values():
        ours, without = forms[_form(GRAPH_HINT_SHARE["IP"], True)], forms[_form(0.0, False)]
        for recall in map(str, RECALLS):
            worse += ours["corrected"][recall] > without["corrected"][recall]
            worse += ours["raw"][recall] > MOST * forms["raw index"]["raw"][recall]
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
