"""What writes, and reads that return vectors, cost through HubnessClient compared with MilvusClient.

    python -m benchmarks.writes [--server lite|2.3.5] [--rounds SHARE]

On each server, a collection of 5,000 rows of 512 dimensions is migrated with a bank of 5,000 queries, once with NNN and
once with Blend; its layout has locality hint columns. The calls of a round come in random order: MilvusClient on a copy
of the source, HubnessClient on the target, and for inserts and upserts two more: MilvusClient with the rows as the
target stores them ("same rows"), which is the server's share and pymilvus's, and NumPy's product of the rows with the
bank, which the biases need. "Least" is the sum of these two over the time of MilvusClient. Rows are Python dictionaries
with vectors as lists; reads take the vector out of each row. Everything has one thread. Times are medians; a ratio is
the median of those of a round.

Exits with 1 where a ratio of a write is above 1.6 for one row, or 1.4 for 100 and 1,000, or that of a read above 1.15.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import (
    NNN,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.correction.estimators import Blend
from tests.support.servers import MilvusServer, lite_uri

ROWS, DIM, BANK, LATENT = 5_000, 512, 5_000, 24
ROUNDS = {1: 150, 100: 40, 1_000: 12}
READS, LIMIT, READ_ROWS = 40, 100, 1_000
READ_SIZES = {"query": READ_ROWS, "get": READ_ROWS, "get of one": 1, "search": LIMIT}
BOUNDS = {1: 1.6, 100: 1.4, 1_000: 1.4}
READ_BOUND = 1.15
PRODUCT = "product alone"
ESTIMATORS = {"NNN": NNN(16), "Blend": Blend()}
CLIENTS = ("MilvusClient", "HubnessClient", "same rows", PRODUCT)

Call = Callable[[], Any]


def vectors(count: int, seed: int) -> np.ndarray:
    """Return float32 (count, DIM) vectors whose neighbours resemble each other, as embeddings do."""
    mixed = np.random.default_rng(0).standard_normal((LATENT, DIM))
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, LATENT)) @ mixed + rng.standard_normal((count, DIM))
    return rows.astype(np.float32)


def fill(client: MilvusClient, name: str, rows: np.ndarray) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params(
        "vector", index_type="HNSW", metric_type="COSINE", M=16, efConstruction=100
    )
    client.create_collection(name, schema=schema, index_params=index)
    for start in range(0, len(rows), 1_000):
        client.insert(
            name,
            [{"id": start + i, "vector": row} for i, row in enumerate(rows[start : start + 1_000])],
        )


def timed(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(rounds: int, calls: Callable[[int], dict[str, Call]]) -> dict[str, Any]:
    """Return the medians of calls(round), by client, and their ratios to MilvusClient; the first tenth is a warm-up."""
    order, seconds = random.Random(0), []
    for turn in range(rounds + rounds // 10 + 1):
        clients = list(calls(turn).items())
        order.shuffle(clients)
        seconds.append({client: timed(call) for client, call in clients})
    kept = seconds[rounds // 10 + 1 :]
    median = {
        name: statistics.median(row[name] for row in kept) for name in CLIENTS if name in kept[0]
    }
    ratio = {
        name: statistics.median(row[name] / row["MilvusClient"] for row in kept) for name in median
    }
    return {"rounds": rounds, "seconds": median, "ratio": ratio}


def measure(uri: str, method: str, share: float) -> list[dict[str, Any]]:
    plain, rows = MilvusClient(uri), vectors(ROWS, 1)
    for name in ("plain", "items"):
        fill(plain, name, rows)
    store = MilvusStore(MilvusClient(uri))
    bank = QueryBank(vectors(BANK, 2))
    target = migrate(
        store, plan_correction(store, "items", Recipe(bank, estimator=ESTIMATORS[method]))
    ).target
    store.drop("items")
    ours = HubnessClient(uri)
    state = ours.hubness_state(target)
    if state is None or not state.layout.locality_hint_count:
        raise RuntimeError(f"{target} has no locality hint columns")
    pool, numbers, results = vectors(20_000, 3), random.Random(4), []
    sample = plain.query(target, "id >= 0", output_fields=["*"], limit=READ_ROWS)

    def writes(kind: str, count: int) -> Callable[[int], dict[str, Call]]:
        def calls(turn: int) -> dict[str, Call]:
            first = len(results) * 1_000_000 + turn * count
            keys = [ROWS + first + i for i in range(count)]
            if kind == "upsert":
                keys = numbers.sample(range(ROWS), count)
            start = numbers.randrange(len(pool) - count)
            users = [
                {"id": key, "vector": row.tolist()}
                for key, row in zip(keys, pool[start:], strict=False)
            ]
            # Keys of their own, as inserts do not deduplicate.
            further = [500_000_000 + key for key in keys] if kind == "insert" else keys
            stored = [
                {**sample[i % len(sample)], "id": key, "vector": sample[i % len(sample)]["vector"]}
                for i, key in enumerate(further)
            ]
            return {
                "MilvusClient": lambda: getattr(plain, kind)("plain", users),
                "HubnessClient": lambda: getattr(ours, kind)(target, users),
                "same rows": lambda: getattr(plain, kind)(target, stored),
                PRODUCT: lambda: pool[start : start + count] @ bank.vectors.T,
            }

        return calls

    for kind in ("insert", "upsert"):
        for count, rounds in ROUNDS.items():
            found = in_turns(max(3, round(share * rounds)), writes(kind, count))
            results.append({"call": kind, "rows": count, "bound": BOUNDS[count], **found})
    for name, call in reads(plain, ours, target).items():
        found = in_turns(max(3, round(share * READS)), lambda turn, call=call: call(turn))  # type: ignore[misc]
        results.append({"call": name, "rows": READ_SIZES[name], "bound": READ_BOUND, **found})
    version = plain.get_server_version()
    for client in (plain, ours):
        client.close()
    return [{"server": version, "estimator": method, **row, "holds": holds(row)} for row in results]


def reads(
    plain: MilvusClient, ours: HubnessClient, target: str
) -> dict[str, Callable[[int], dict[str, Call]]]:
    keys, queries = list(range(READ_ROWS)), vectors(100, 5).tolist()

    def both(ask: Callable[[MilvusClient, str, int], Any]) -> Callable[[int], dict[str, Call]]:
        return lambda turn: {
            "MilvusClient": lambda: ask(plain, "plain", turn),
            "HubnessClient": lambda: ask(ours, target, turn),
        }

    fields: dict[str, Any] = {"output_fields": ["id", "vector"]}
    return {
        "query": both(
            lambda client, name, turn: [
                row["vector"]
                for row in client.query(name, f"id < {READ_ROWS}", limit=READ_ROWS, **fields)
            ]
        ),
        "get": both(
            lambda client, name, turn: [row["vector"] for row in client.get(name, keys, **fields)]
        ),
        "get of one": both(
            lambda client, name, turn: client.get(name, [turn], **fields)[0]["vector"]
        ),
        "search": both(
            lambda client, name, turn: [
                hit["entity"]["vector"]
                for hit in client.search(name, [queries[turn]], limit=LIMIT, **fields)[0]
            ]
        ),
    }


def holds(row: dict[str, Any]) -> bool:
    return bool(row["ratio"]["HubnessClient"] <= row["bound"])


def markdown(rows: list[dict[str, Any]]) -> str:
    head = [
        "server",
        "estimator",
        "call",
        "rows",
        *(f"{name}, ms" for name in CLIENTS),
        "ratio",
        "least",
        "bound",
    ]
    return table(
        head,
        [
            [
                row["server"],
                row["estimator"],
                row["call"],
                f"{row['rows']:,}",
                *(
                    f"{1e3 * row['seconds'][name]:.2f}" if name in row["seconds"] else ""
                    for name in CLIENTS
                ),
                f"{row['ratio']['HubnessClient']:.2f}",
                f"{row['ratio']['same rows'] + row['ratio'][PRODUCT]:.2f}"
                if PRODUCT in row["ratio"]
                else "",
                f"{row['bound']}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--server", choices=("lite", "2.3.5"), help="both unless given; only a run of both is saved"
    )
    parser.add_argument(
        "--rounds", type=float, default=1.0, metavar="SHARE", help="of the usual number of rounds"
    )
    parser.add_argument(
        "--estimator", choices=ESTIMATORS, help="both unless given; only a run of both is saved"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for method in ESTIMATORS:
        if options.estimator in (None, method) and options.server in (None, "lite"):
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(lite_uri(Path(folder)), method, options.rounds)
        if options.estimator in (None, method) and options.server in (None, "2.3.5"):
            with MilvusServer() as server:
                rows += measure(server.uri, method, options.rounds)
    shown = markdown(rows)
    print(shown)
    if not (options.server or options.estimator):
        sizes = {"rows": ROWS, "dim": DIM, "bank": BANK, "index": "HNSW, M 16"}
        save("writes", {"environment": environment(started), "sizes": sizes, "rows": rows}, shown)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
