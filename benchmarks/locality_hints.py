"""Why a corrected IVF index probes more locality_hints: where the answers of raw and corrected searches lie.

    python -m benchmarks.locality_hints [--rows N] [--cells C]

Two tasks, their galleries as they are, with a quarter of the cells, and enlarged to N by mixing, with C and with twice
as many. Items go into cells by FAISS's spherical k-means, as IVF under IP does it, as they are and in augmented form,
without locality hint columns and with them, b that of NNN(32, 0.75). For each kind the cells that a query must probe,
and the items that it then scans, for 95% of its ten best by s or s − b: in the order in which IVF takes them, by the
score of the centroid; and in that of each cell's true mean score of this very query plus twice the deviation, which no
index can know. Where corrected searches need more in the second order too, it is not for the centroids that they do."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.kernels import enlarged
from milvus_hubness import NNN, Layout, QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.fitted import Correction
from tests.support.real_data import load_task

TASKS = ("docstring_code", "caption_translation")
QUERIES, LIMIT, RECALL, DEVIATIONS = 1_000, 10, 0.95, 2.0

Cells = npt.NDArray[np.int64]


def needed(order: Floats, of: Cells, answers: Cells) -> dict[str, float]:
    """Cells probed and items scanned, where each query takes cells in descending order, until RECALL of the
    answers is found over all queries."""
    probed = np.argsort(-order, axis=1)
    rank = np.argsort(probed, axis=1)
    found = np.take_along_axis(rank, of[answers], axis=1)
    probes = int(np.quantile(found, RECALL, method="higher")) + 1
    sizes = np.bincount(of, minlength=order.shape[1])
    return {"cells": probes, "items": float(sizes[probed[:, :probes]].sum(axis=1).mean())}


def measured(items: Floats, queries: Floats, bank: Floats, count: int) -> dict[str, Any]:
    raw = queries @ items.T
    found = {"raw": both_orders(items, queries, raw, count)}
    for locality_hints in (False, True):
        layout = measured_on(
            Layout(items.shape[1], "IP"), items, bank, locality_hints=locality_hints
        )
        correction = Correction.fit(layout, NNN(32, 0.75), QueryBank.of(bank))
        biases = correction.centred(items)
        biases -= biases.mean()
        stored = layout.augment(items, biases, correction.locality_hints(items))
        kind = f"corrected, {layout.locality_hint_count or 'no'} locality hint columns"
        found[kind] = both_orders(stored, layout.encode_queries(queries), raw - biases, count)
    return found


def both_orders(
    stored: Floats, query_vectors: Floats, scores: Floats, count: int
) -> dict[str, Any]:
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(stored.shape[1]), stored.shape[1], count, faiss.METRIC_INNER_PRODUCT
    )
    index.train(stored)
    of = index.quantizer.search(stored, 1)[1][:, 0]
    answers = np.argsort(-scores, axis=1)[:, :LIMIT]
    routed = query_vectors @ index.quantizer.reconstruct_n(0, count).T
    knowing = np.full(routed.shape, -np.inf)
    for cell in range(count):
        if (of == cell).any():
            part = scores[:, of == cell]
            knowing[:, cell] = part.mean(axis=1) + DEVIATIONS * part.std(axis=1)
    return {
        "by centroid": needed(routed, of, answers),
        "knowing each cell": needed(knowing, of, answers),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--cells", type=int, default=256)
    options = parser.parse_args()
    one_thread()
    faiss.omp_set_num_threads(1)
    started = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for name in TASKS:
        task = load_task(name)
        queries = task.query[np.linalg.norm(task.query, axis=1) > 0][:QUERIES]
        mixed = enlarged(task.gallery, max(0, options.rows - len(task.gallery)))
        larger = np.concatenate([task.gallery, mixed])[: options.rows]
        for items, cells in (
            (task.gallery, options.cells // 4),
            (larger, options.cells),
            (larger, 2 * options.cells),
        ):
            found[f"{name}, {len(items):,} items, {cells} cells"] = measured(
                items, queries, task.bank, cells
            )
    print(shown(found))
    save("locality_hints", {"galleries": found, "environment": environment(started)}, shown(found))
    return 0


def shown(found: dict[str, Any]) -> str:
    lines = [
        [name, kind, *(f"{each['cells']}, {each['items']:,.0f}" for each in orders.values())]
        for name, kinds in found.items()
        for kind, orders in kinds.items()
    ]
    head = ["gallery", "search", "cells, items by centroid", "cells, items knowing each cell"]
    return f"For {RECALL:.0%} of the ten best:\n\n{table(head, lines)}"


if __name__ == "__main__":
    sys.exit(main())
