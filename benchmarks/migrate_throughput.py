"""Rows a second of a migration's copy, beside a bare loop of pymilvus's iterator and insert, on one server.

    python -m benchmarks.migrate_throughput [rows] [dim]

Each leg is a process of its own, so that its peak memory is its own, and both take turns; the legs at a quarter of the
rows show whether memory grows with them. The bare loop keeps no key, computes nothing and checks nothing:
`query_iterator` pages of as many rows as our chunks have, `insert` into a collection of the same schema. Ours is
`jobs.run` up to the end of the copy, with NNN(16) on 1,000 queries: reading, biases, upsert, ledger. Time and memory of
either grow with rows × dim; the biases cost rows × 1,000 × dim multiplications besides.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.memory import resident
from milvus_hubness import Recipe

ROWS, DIM, BANK, TURNS = 200_000, 512, 1_000, 3
LOAD_ROWS = 5_000
ROOT = Path(__file__).parents[1]


def schema_of(client: Any, dim: int) -> tuple[Any, Any]:
    from pymilvus import DataType

    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("title", DataType.VARCHAR, max_length=100)
    return schema, client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")


def load(uri: str, rows: int, dim: int) -> None:
    from pymilvus import MilvusClient

    client, rng = MilvusClient(uri), np.random.default_rng(0)
    schema, index = schema_of(client, dim)
    client.create_collection(f"src{rows}", schema=schema, index_params=index)
    for start in range(0, rows, LOAD_ROWS):
        keys = range(start, min(rows, start + LOAD_ROWS))
        vectors = rng.standard_normal((len(keys), dim), np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        lines = [
            {"id": key, "vector": vector, "title": f"item {key}"}
            for key, vector in zip(keys, vectors, strict=True)
        ]
        client.insert(f"src{rows}", lines)
    client.flush(f"src{rows}")


def bare(uri: str, rows: int, dim: int) -> float:
    """Seconds of the loop."""
    from pymilvus import MilvusClient

    from milvus_hubness.milvus.store.milvus_store import MilvusStore

    client = MilvusClient(uri)
    batch = MilvusStore(client).chunk_rows(MilvusStore(client).info(f"src{rows}"))
    schema, index = schema_of(client, dim)
    client.create_collection("bare", schema=schema, index_params=index)
    began = time.perf_counter()
    pages = client.query_iterator(f"src{rows}", batch_size=batch, output_fields=["*"])
    copied = 0
    while page := pages.next():
        client.insert("bare", list(page))
        copied += len(page)
    seconds = time.perf_counter() - began
    pages.close()
    client.drop_collection("bare")
    if copied != rows:
        raise SystemExit(f"the bare loop copied {copied} rows of {rows}")
    return seconds


def ours(uri: str, rows: int, dim: int) -> float:
    """Seconds between the events around the copy."""
    from milvus_hubness import (
        NNN,
        Copy,
        MigrationOptions,
        MilvusStore,
        QueryBank,
        clean,
        connect,
        migrate,
        plan_correction,
    )
    from milvus_hubness.jobs.common.progress import Event, Events

    times: dict[str, float] = {}

    class Copied(Exception):
        """All there is to measure has happened."""

    def note(event: Event) -> None:
        times.setdefault(event.name, time.perf_counter())
        if event.name == "copying":
            times["last"] = time.perf_counter()
            if event.facts["rows"] == rows:
                raise Copied

    store = MilvusStore(connect(uri))
    bank = QueryBank(np.random.default_rng(1).standard_normal((BANK, dim), np.float32))
    plan = plan_correction(
        store, f"src{rows}", Recipe(bank, estimator=NNN(16)), Copy(target="ours")
    )
    with suppress(Copied):
        migrate(store, plan, MigrationOptions(no_writers=True, events=Events([note])))
    clean(store, "ours", drop="ours")
    return times["last"] - times["before-copy"]


def leg(which: str, uri: str, rows: int, dim: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.migrate_throughput",
        which,
        uri,
        str(rows),
        str(dim),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_process(which: str, uri: str, rows: int, dim: int) -> None:
    one_thread()
    seconds = {"bare": bare, "ours": ours}[which](uri, rows, dim)
    result = {
        "rows_per_second": rows / seconds,
        "seconds": seconds,
        "peak_mib": resident("VmHWM") / 2**20,
    }
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


def main(rows: int = ROWS, dim: int = DIM) -> None:
    from tests.support.servers import MilvusServer

    if reason := MilvusServer.unavailable():
        raise SystemExit(reason)
    started = time.monotonic()
    results: dict[str, Any] = {
        "rows": rows,
        "dim": dim,
        "bank": BANK,
        "estimator": "NNN(16)",
        "sizes": {},
    }
    with MilvusServer() as server:
        for size in (rows // 4, rows):
            load(server.uri, size, dim)
            legs: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
            for turn in range(TURNS):
                for which in ("bare", "ours") if turn % 2 == 0 else ("ours", "bare"):
                    legs[which].append(leg(which, server.uri, size, dim))
                    print(size, which, legs[which][-1], flush=True)
            speed = {
                which: statistics.median(each["rows_per_second"] for each in done)
                for which, done in legs.items()
            }
            peak = {which: max(each["peak_mib"] for each in done) for which, done in legs.items()}
            ratio = round(speed["ours"] / speed["bare"], 3)
            results["sizes"][str(size)] = {
                "median_rows_per_second": speed, "ratio": ratio, "peak_mib": peak, "legs": legs,
            }  # fmt: skip
    results["environment"] = environment(started)
    lines = [
        [f"{int(size):,}", f"{each['median_rows_per_second']['bare']:,.0f}",
         f"{each['median_rows_per_second']['ours']:,.0f}", f"{each['ratio']:.2f}",
         f"{each['peak_mib']['bare']:,.0f}", f"{each['peak_mib']['ours']:,.0f}"]
        for size, each in results["sizes"].items()
    ]  # fmt: skip
    head = [
        "rows",
        "bare loop, rows/s",
        "migrate, rows/s",
        "ratio",
        "bare loop, peak MiB",
        "migrate, peak MiB",
    ]
    title = f"# Throughput of a migration's copy, {dim}-d, Milvus 2.3.5, medians of {TURNS}"
    text = f"{title}\n\n{table(head, lines)}"
    save("migrate_throughput", results, text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in {"bare", "ours"}:
        in_process(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:]))
