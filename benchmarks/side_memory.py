"""Measure what a search costs whose biases are in a side collection, beside the search of its candidates.

    python -m benchmarks.side_memory [rows] [dim]

On Milvus Lite and on Milvus 2.3.5, one query a request, in random order: a plain search for as many
hits as there are candidates; a corrected search that reads all biases from the side collection; one
whose client keeps them in memory, with the default `state_ttl`. Saves the medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from pymilvus import MilvusClient

from benchmarks.enable_cost import fill
from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import (
    NNN,
    Beside,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    enable,
    plan_correction,
)
from milvus_hubness.milvus.client.side_memory import SideMemory
from tests.support.servers import MilvusServer

ROWS, DIM, BANK, QUERIES = 20_000, 256, 2_000, 50
SEARCHES, WARM_UP = 400, 100
NAME = "goods"
EF = {"params": {"ef": 128}}


def measured(uri: str, rows: int, dim: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    items, queries, bank = (
        rng.standard_normal((count, dim), np.float32) for count in (rows, QUERIES, BANK)
    )
    store = MilvusStore(connect(uri, create=True))
    fill(store.client, NAME, items)
    plan = plan_correction(
        store, NAME, Recipe(QueryBank(bank), estimator=NNN(16), verdict="warn"), Beside()
    )
    candidates = enable(store, plan, client_ttl=0.0).candidates

    plain, without, client = MilvusClient(uri), HubnessClient(uri), HubnessClient(uri)
    without._operations.states.side_memory = SideMemory(0.0)
    calls = {
        "candidates": lambda query: plain.search(NAME, query, limit=candidates, search_params=EF),
        "without": lambda query: without.search(NAME, query, limit=10, search_params=EF),
        "with": lambda query: client.search(NAME, query, limit=10, search_params=EF),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + SEARCHES):
        query = [queries[turn % QUERIES]]
        for name in rng.permutation(sorted(calls)):
            began = time.perf_counter()
            calls[name](query)
            if turn >= WARM_UP:
                taken[name].append(time.perf_counter() - began)

    for opened in (plain, without, client):
        opened.close()
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {"hits": candidates, **medians}


def main(rows: int = ROWS, dim: int = DIM) -> None:
    one_thread()
    started = time.monotonic()
    results: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        results["Milvus Lite"] = measured(str(Path(folder) / "lite.db"), rows, dim)
        if reason := MilvusServer.unavailable():
            sys.stderr.write(f"{reason}\n")
        else:
            results["Milvus 2.3.5"] = measured(stack.enter_context(MilvusServer()).uri, rows, dim)

    lines = [
        [
            server,
            str(found["hits"]),
            *(f"{1_000 * found[name]:.2f}" for name in ("candidates", "without", "with")),
            *(f"{found[name] / found['candidates']:.2f}" for name in ("without", "with")),
        ]
        for server, found in results.items()
    ]
    head = [
        "database", "candidates", "their search, ms", "corrected, all biases read, ms",
        "corrected, from memory, ms", "ratio, read", "ratio, from memory",
    ]  # fmt: skip
    text = (
        f"{rows:,} rows x {dim}, HNSW, {QUERIES} queries in turn; medians of {SEARCHES}.\n\n"
        + table(head, lines)
    )
    save(
        "side_memory",
        {"rows": rows, "dim": dim, **results, "environment": environment(started)},
        text,
    )
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
