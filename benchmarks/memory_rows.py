"""Peak memory and time per row of `migrate` and `refresh` on collections of two sizes, on one server.

    python -m benchmarks.memory_rows [rows ...]

Rows have a number as key and 8 dimensions, so that memory per row would show: a list of a million keys takes 40 MB.
Each job is a process of its own, so that its peak memory is its own. The first one works on 10,000 rows and shows what
the libraries take. `migrate` copies, compares and verifies, with NNN(16) on 1,000 queries; `refresh` then
makes a copy of the copy, with the biases of another bank. No client writes. Exits with 1 where a job takes over a tenth
more memory for the most rows than for the fewest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.memory import resident
from milvus_hubness import Recipe

SIZES, SMALL, DIM, BANK = (1_000_000, 4_000_000), 10_000, 8, 1_000
LOAD_ROWS = 20_000
BOUND = 1.1
ROOT = Path(__file__).parents[1]


def load(uri: str, rows: int) -> None:
    from pymilvus import DataType, MilvusClient

    client, rng = MilvusClient(uri), np.random.default_rng(0)
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(f"src{rows}", schema=schema, index_params=index)
    for start in range(0, rows, LOAD_ROWS):
        vectors = rng.standard_normal((min(LOAD_ROWS, rows - start), DIM), np.float32)
        client.insert(
            f"src{rows}",
            [{"id": key, "vector": vector} for key, vector in enumerate(vectors, start)],
        )
    client.flush(f"src{rows}")


def migrate_job(uri: str, rows: int) -> float:
    """Return the seconds of a migration, without its cutover."""
    from milvus_hubness import NNN, Copy, MilvusStore, QueryBank, connect, migrate, plan_correction

    store, bank = (
        MilvusStore(connect(uri)),
        QueryBank(np.random.default_rng(1).standard_normal((BANK, DIM))),
    )
    began = time.perf_counter()
    plan = plan_correction(
        store, f"src{rows}", Recipe(bank, estimator=NNN(16)), Copy(target=f"copy{rows}")
    )
    done = migrate(store, plan, no_writers=True)
    if done.rows != rows:
        raise SystemExit(f"{done.rows} rows were copied, not {rows}")
    return time.perf_counter() - began


def refresh_job(uri: str, rows: int) -> float:
    """Return the seconds of a refresh of all rows."""
    from milvus_hubness import MilvusStore, QueryBank, connect, refresh

    store, bank = (
        MilvusStore(connect(uri)),
        QueryBank(np.random.default_rng(2).standard_normal((BANK, DIM))),
    )
    store.point_alias(f"live{rows}", f"copy{rows}")
    done = refresh(store, f"live{rows}", bank, force=True, client_ttl=0)
    if (done.action, done.scanned) != ("full", rows):
        raise SystemExit(f"{done.action}: {done.scanned} rows were read, not {rows}")
    return done.seconds


JOBS = {"migrate": migrate_job, "refresh": refresh_job}


def in_process(job: str, uri: str, rows: int) -> None:
    one_thread()
    seconds = JOBS[job](uri, rows)
    print(
        json.dumps({"seconds": round(seconds, 1), "peak_mib": round(resident("VmHWM") / 2**20, 1)})
    )


def leg(job: str, uri: str, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory_rows", job, uri, str(rows)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result | {"us_per_row": round(1e6 * result["seconds"] / rows, 1)}


def main(*sizes: int) -> int:
    from tests.support.servers import MilvusServer

    if reason := MilvusServer.unavailable():
        raise SystemExit(reason)
    started, sizes = time.monotonic(), sizes or SIZES
    results: dict[str, Any] = {"dim": DIM, "bank": BANK, "estimator": "NNN(16)", "sizes": {}}
    with MilvusServer() as server:
        for rows in (SMALL, *sizes):
            began = time.perf_counter()
            load(server.uri, rows)
            taken: dict[str, Any] = {"load_seconds": round(time.perf_counter() - began, 1)}
            for job in JOBS:
                taken[job] = leg(job, server.uri, rows)
                print(rows, job, taken[job], flush=True)
            results["sizes"][str(rows)] = taken
    results["environment"] = environment(started)
    measured = results["sizes"]
    ratios = {
        job: round(
            measured[str(max(sizes))][job]["peak_mib"] / measured[str(min(sizes))][job]["peak_mib"],
            3,
        )
        for job in JOBS
    }
    results["ratios"], results["bound"] = ratios, BOUND
    head = ["rows", *(f"{job}, {what}" for job in JOBS for what in ("peak MiB", "s", "µs per row"))]
    lines = [
        [f"{int(rows):,}"]
        + [text for job in JOBS for text in (
            f"{taken[job]['peak_mib']:,.0f}", f"{taken[job]['seconds']:,.0f}", f"{taken[job]['us_per_row']:,.0f}"
        )]
        for rows, taken in measured.items()
    ]  # fmt: skip
    text = f"# Memory of jobs and time per row, {DIM}-d, Milvus 2.3.5\n\n{table(head, lines)}"
    save("memory_rows", results, text)
    print(text)
    return int(max(ratios.values()) > BOUND)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in JOBS:
        in_process(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
