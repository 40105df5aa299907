"""What a refresh of biases in the vectors costs, beside the migration that made the collection, on one server.

    python -m benchmarks.refresh_cost [rows] [dim] [turns]

A plain collection is migrated, and its alias moves; then turns of a refresh from a new bank, each of which makes a copy
and moves the alias. Nobody writes, and neither waits for clients (`client_ttl=0`): the waits are the same for both, and
take no work. Exits with 1 where the median refresh takes more than BOUND times the migration. Either grows with
rows × dim that are read, written and compared, and with rows × bank × dim for the biases.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
from pymilvus import DataType, MilvusClient

from benchmarks.environment import RESULTS, environment, one_thread, save, table
from milvus_hubness import (
    NNN,
    Copy,
    MigrationOptions,
    MilvusStore,
    QueryBank,
    Recipe,
    RefreshOptions,
    connect,
    migrate,
    plan_correction,
    refresh,
)
from tests.support.servers import MilvusServer

ROWS, DIM, BANK, TURNS = 50_000, 256, 3_000, 3
BOUND = 1.5
ROWS_PER_INSERT = 5_000
SOURCE, ALIAS = "items", "live"


def vectors(seed: int, count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim), np.float32)


def fill(client: MilvusClient, rows: np.ndarray) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=rows.shape[1])
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(SOURCE, schema=schema, index_params=index, consistency_level="Strong")
    for start in range(0, len(rows), ROWS_PER_INSERT):
        part = rows[start : start + ROWS_PER_INSERT]
        client.insert(SOURCE, [{"id": start + i, "vector": row} for i, row in enumerate(part)])
    client.flush(SOURCE)


def main(rows: int = ROWS, dim: int = DIM, turns: int = TURNS) -> None:
    one_thread()
    if reason := MilvusServer.unavailable():
        raise SystemExit(reason)
    started = time.monotonic()
    seconds: list[float] = []
    with MilvusServer() as server:
        client = connect(server.uri)
        fill(client, vectors(1, rows, dim))
        client.create_alias(SOURCE, ALIAS)
        store = MilvusStore(client)
        began = time.perf_counter()
        bank = QueryBank(vectors(0, BANK, dim))
        plan = plan_correction(
            store, SOURCE, Recipe(bank, estimator=NNN(16), verdict="skip"), Copy(alias=ALIAS)
        )
        migrate(store, plan, MigrationOptions(no_writers=True))
        migration = round(time.perf_counter() - began, 2)
        print("migrated in", migration, flush=True)
        for turn in range(turns):
            bank = QueryBank(vectors(2 + turn, BANK, dim))
            done = refresh(
                store, ALIAS, options=RefreshOptions(recipe=bank, force=True, client_ttl=0)
            )
            if (done.action, done.written) != ("full", rows):
                raise SystemExit(f"{done.action}: {done.written} rows were copied, not {rows}")
            seconds.append(done.seconds)
            print(done, flush=True)
    ratio = statistics.median(seconds) / migration
    median = statistics.median(seconds)
    result = {
        "rows": rows, "dim": dim, "bank": BANK, "migration_seconds": migration, "refresh_seconds": seconds,
        "median_seconds": median, "microseconds_a_row": round(1e6 * median / rows, 1), "ratio": round(ratio, 3),
        "bound": BOUND,
    }  # fmt: skip
    # Other sizes that were measured before stay.
    path = RESULTS / "refresh_cost.json"
    sizes = json.loads(path.read_text())["sizes"] if path.exists() else []
    sizes = [each for each in sizes if (each["rows"], each["dim"]) != (rows, dim)] + [result]
    sizes.sort(key=lambda each: each["rows"])
    text = table(
        ["rows", "dimensions", "migration, s", "refresh, s", "µs a row", "ratio"],
        [
            [
                f"{each['rows']:,}",
                str(each["dim"]),
                f"{each['migration_seconds']:.1f}",
                f"{each['median_seconds']:.1f}",
                f"{each['microseconds_a_row']:.0f}",
                f"{each['ratio']:.2f}",
            ]
            for each in sizes
        ],
    )
    save("refresh_cost", {"environment": environment(started), "sizes": sizes}, text)
    print(text)
    sys.exit(0 if ratio <= BOUND else 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
