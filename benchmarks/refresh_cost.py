"""What it costs to give new rows their bias, beside a refresh of all rows, on one server.

    python -m benchmarks.refresh_cost [rows] [dim]

Turns: all rows refreshed from a new bank; then 1% new rows inserted without a bias, and the refresh that
finds them. Neither waits for clients (`client_ttl=0`): the wait is the same for both, and takes no work.
Exits with 1 where the median of the second is above 2% of that of the first. Either grows with rows × dim
that are read and written, and with rows × bank × dim for the biases.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import (
    NNN,
    CorrectionConfig,
    HubnessClient,
    MilvusStore,
    QueryBank,
    connect,
    refresh,
)
from tests.support.servers import MilvusServer

ROWS, DIM, BANK, TURNS = 100_000, 768, 5_000, 3
NEW_SHARE, BOUND = 0.01, 0.02
ROWS_PER_INSERT = 5_000
NAME = "items"


def vectors(seed: int, count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim), np.float32)


def insert(client: HubnessClient, first: int, rows: np.ndarray, **options: str) -> None:
    for start in range(0, len(rows), ROWS_PER_INSERT):
        part = rows[start : start + ROWS_PER_INSERT]
        lines = [{"id": first + start + i, "vector": vector} for i, vector in enumerate(part)]
        client.insert(NAME, lines, **options)


def main(rows: int = ROWS, dim: int = DIM) -> None:
    one_thread()
    if reason := MilvusServer.unavailable():
        raise SystemExit(reason)
    started, new = time.monotonic(), int(NEW_SHARE * rows)
    times: dict[str, list[float]] = {"full": [], "pending": []}
    with MilvusServer() as server:
        client, store = HubnessClient(server.uri, state_ttl=0.0), MilvusStore(connect(server.uri))
        born = CorrectionConfig(QueryBank(vectors(0, BANK, dim)), NNN(16))
        client.create_collection(NAME, dim, metric_type="COSINE", hubness=born)
        insert(client, 0, vectors(1, rows, dim))
        client.flush(NAME)
        for turn in range(TURNS):
            done = refresh(
                store, NAME, bank=QueryBank(vectors(2 + turn, BANK, dim)), force=True, client_ttl=0
            )
            times["full"].append(done.seconds)
            print(done, flush=True)
            insert(client, rows + turn * new, vectors(100 + turn, new, dim), bias="pending")
            done = refresh(store, NAME, client_ttl=0)
            times["pending"].append(done.seconds)
            print(done, flush=True)
            if (done.action, done.written) != ("pending", new):
                raise SystemExit(f"{done.written} rows were given a bias, not {new}")
        client.close()
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    ratio = medians["pending"] / medians["full"]
    results = {
        "rows": rows, "dim": dim, "bank": BANK, "new": new, "turns": TURNS, "seconds": times,
        "median_seconds": medians, "ratio": round(ratio, 4), "bound": BOUND,
        "environment": environment(started),
    }  # fmt: skip
    text = table(
        ["rows", "refresh of all, s", f"of {new:,} new ones, s", "ratio"],
        [[f"{rows:,}", f"{medians['full']:.1f}", f"{medians['pending']:.2f}", f"{ratio:.1%}"]],
    )
    save("refresh_cost", results, text)
    print(text)
    sys.exit(0 if ratio <= BOUND else 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
