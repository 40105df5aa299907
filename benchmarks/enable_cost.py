"""What `enable` costs: biases in a side collection, beside a raw collection.

    python -m benchmarks.enable_cost [rows] [dim]

Of two collections with the same rows on one Milvus 2.3.5 server one is enabled. Searches of both come in
random order, one query a request; so do upserts of 1,000 rows.
Saves the seconds that `enable` takes, and the medians of searches and upserts.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

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
from tests.support.servers import MilvusServer

ROWS, DIM, BANK = 20_000, 256, 2_000
SEARCHES, UPSERTS, ROWS_PER_UPSERT = 400, 15, 1_000
RAW, BESIDE = "raw", "beside"


def fill(client: MilvusClient, name: str, rows: np.ndarray) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=rows.shape[1])
    index = client.prepare_index_params(
        "vector", index_type="HNSW", metric_type="COSINE", M=16, efConstruction=100
    )
    client.create_collection(name, schema=schema, index_params=index)
    for start in range(0, len(rows), 5_000):
        part = rows[start : start + 5_000]
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(part)])
    client.flush(name)


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, after a tenth of the rounds as warm-up."""
    order, taken = random.Random(0), {name: [] for name in calls}
    for turn in range(rounds + rounds // 10):
        for name in order.sample(sorted(calls), len(calls)):
            seconds = timed(lambda name=name, turn=turn: calls[name](turn))
            if turn >= rounds // 10:
                taken[name].append(seconds)
    return {name: statistics.median(each) for name, each in taken.items()}


def main(rows: int = ROWS, dim: int = DIM) -> None:
    one_thread()
    if reason := MilvusServer.unavailable():
        raise SystemExit(reason)
    started = time.monotonic()
    rng = np.random.default_rng(0)
    items, queries = (rng.standard_normal((count, dim), np.float32) for count in (rows, 200))
    bank = QueryBank(rng.standard_normal((BANK, dim), np.float32))
    enabling: dict[str, float] = {}
    candidates: dict[str, int] = {}
    with MilvusServer() as server:
        client, plain = HubnessClient(server.uri), MilvusClient(server.uri)
        store = MilvusStore(connect(server.uri))
        for name in (RAW, BESIDE):
            fill(plain, name, items)
        plan = plan_correction(
            store, BESIDE, Recipe(bank, estimator=NNN(16), verdict="warn"), Beside()
        )
        enabling[BESIDE] = timed(lambda: enable(store, plan, client_ttl=0.0))
        candidates[BESIDE] = store.info(BESIDE).state.reranking.candidates
        clients = {RAW: plain, BESIDE: client}
        searching = in_turns(
            {
                name: lambda turn, name=name, own=own: own.search(
                    name,
                    [queries[turn % len(queries)]],
                    limit=10,
                    search_params={"params": {"ef": 128}},
                )
                for name, own in clients.items()
            },
            SEARCHES,
        )
        batch = [{"id": i, "vector": row} for i, row in enumerate(items[:ROWS_PER_UPSERT])]
        writing = in_turns(
            {
                name: lambda turn, name=name, own=own: own.upsert(name, batch)
                for name, own in clients.items()
            },
            UPSERTS,
        )
        client.close()
    results = {
        "rows": rows, "dim": dim, "bank": BANK, "candidates": candidates, "enable_seconds": enabling,
        "search_seconds": searching, "upsert_seconds": writing, "rows_per_upsert": ROWS_PER_UPSERT,
        "environment": environment(started),
    }  # fmt: skip
    lines = [
        [
            name,
            f"{enabling[name]:.1f}" if name in enabling else "–",
            f"{1_000 * searching[name]:.2f}",
            f"{1_000 * writing[name]:.0f}",
        ]
        for name in clients
    ]
    head = ["biases", "enable, s", "search, ms", f"upsert of {ROWS_PER_UPSERT:,} rows, ms"]
    text = f"{rows:,} rows x {dim}, HNSW, Milvus 2.3.5; medians.\n\n" + table(head, lines)
    save("enable_cost", results, text)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
