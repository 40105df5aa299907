"""What HubnessClient costs beside MilvusClient: the same corrected collection, asked by both.

    python -m benchmarks.client_overhead

The plain client sends queries that are in the augmented query already, so that the server does the same work for both.
Both are given queries as arrays, and as lists. The calls of a round come in random order, and the overhead is the
median over the rounds of the difference within a round, with its interval of 95% (order statistics, by the sign test).

A server's own time varies by more than what is measured. So the same is measured once more with one recorded answer in
the place of a server: it pushes the clients' code out of the processor's caches, as a server's work does, and its time
counts for nothing. There the median is that of the clients alone, and queries are measured at length 1, too.
Exits with 1 where it is above 5% of the median with a server, or above 100 µs a query at batch 1."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import (
    NNN,
    CorrectionConfig,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.milvus.pymilvus_private import connection_of
from tests.support.servers import MilvusServer, lite_uri

ROWS, DIM, BANK = 20_000, 768, 500
ROUNDS = {1: 1_000, 100: 200}
RECORDED_ROUNDS = 300
RECORDED = "recorded"
LIMIT, QUERIES = 10, 100
RELATIVE, ABSOLUTE = 0.05, 100e-6


def fill(client: MilvusClient, name: str) -> None:
    rng = np.random.default_rng(0)
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params(
        "vector", index_type="HNSW", metric_type="COSINE", M=16, efConstruction=100
    )
    client.create_collection(name, schema=schema, index_params=index)
    for start in range(0, ROWS, 2_000):
        vectors = rng.standard_normal((2_000, DIM), np.float32)
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(vectors)])


class Recorded:
    """A stub of Milvus that answers each search as it did the first one."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._answer: Any = None
        self._other_data = np.zeros(8_000_000)
        self.waited = 0.0
        """Seconds for which clients have waited for answers."""

    def Search(self, *args: Any, **options: Any) -> Any:  # noqa: N802  gRPC has this name
        began = time.perf_counter()
        if self._answer is None:
            self._answer = self._stub.Search(*args, **options)
        self.flush()
        self.waited += time.perf_counter() - began
        return self._answer

    def flush(self) -> None:
        """Read and write more than the caches of a processor hold."""
        self._other_data += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)


def timed(call: Callable[[], Any], recorded: Recorded | None) -> float:
    """Return the seconds of a call, but for those of a recorded answer."""
    if recorded is not None:
        recorded.flush()
        recorded.waited = 0.0
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    return seconds if recorded is None else seconds - recorded.waited


def median_difference(ours: list[float], theirs: list[float]) -> tuple[float, tuple[float, float]]:
    """The median of the differences of two measurements of the same rounds, and its interval of 95%."""
    differences = sorted(one - other for one, other in zip(ours, theirs, strict=True))
    n = len(differences)
    reach = math.ceil(0.98 * math.sqrt(n))
    return statistics.median(differences), (
        differences[n // 2 - reach],
        differences[n // 2 + reach],
    )


class Timed(NamedTuple):
    """A client whose searches are timed."""

    name: str
    client: MilvusClient
    vectors: npt.NDArray[np.float32]
    """The queries that it sends, (100, its width)."""


def times_of(
    clients: Sequence[Timed],
    collection: str,
    batch: int,
    rounds: int,
    order: random.Random,
    recorded: Recorded | None = None,
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each round's search, by the form of the queries and the client."""
    taken: dict[tuple[str, str], list[float]] = {}
    warming = rounds // 10
    for i in range(rounds + warming):
        some = [(i + j) % QUERIES for j in range(batch)]
        calls = [
            (
                given,
                each,
                [each.vectors[j] if given == "arrays" else each.vectors[j].tolist() for j in some],
            )
            for given in ("arrays", "lists")
            for each in clients
        ]
        order.shuffle(calls)
        for given, each, data in calls:
            seconds = timed(
                lambda each=each, data=data: each.client.search(  # type: ignore[misc]
                    collection, data=data, limit=LIMIT, output_fields=["id"]
                ),
                recorded,
            )
            taken.setdefault((given, each.name), []).append(seconds)
    return {name: seconds[warming:] for name, seconds in taken.items()}


def measure(uri: str) -> list[dict[str, Any]]:
    plain = MilvusClient(uri)
    fill(plain, "items")
    store = MilvusStore(MilvusClient(uri))
    bank = QueryBank(np.random.default_rng(1).standard_normal((BANK, DIM), np.float32))
    name = migrate(store, plan_correction(store, "items", Recipe(bank, estimator=NNN(16)))).target
    store.drop("items")
    ours = HubnessClient(uri)
    state = ours.hubness_state(name)
    if state is None:
        raise RuntimeError(f"{name} carries no biases")

    queries = np.random.default_rng(2).standard_normal((QUERIES, DIM), np.float32)
    pair = pair_of(plain, ours, state, queries)
    order = random.Random(3)
    taken = {batch: times_of(pair, name, batch, rounds, order) for batch, rounds in ROUNDS.items()}
    rows = [
        facts_of(plain.get_server_version(), batch, given, taken[batch])
        for batch in ROUNDS
        for given in ("arrays", "lists")
    ]
    plain.close()
    ours.close()
    return rows


def pair_of(
    plain: MilvusClient,
    ours: HubnessClient,
    state: CollectionState,
    queries: npt.NDArray[np.float32],
) -> list[Timed]:
    encoded = state.layout.encode_queries(queries, 1.0, slot=state.profile.slot)
    return [Timed("MilvusClient", plain, encoded), Timed("HubnessClient", ours, queries)]


def measure_recorded(uri: str) -> list[dict[str, Any]]:
    """Measure with a recorded answer of Milvus Lite."""
    rng = np.random.default_rng(0)
    items, bank, queries = (
        rng.standard_normal((count, DIM), np.float32) for count in (200, BANK, QUERIES)
    )
    ours = HubnessClient(uri, state_ttl=math.inf)
    recipe = Recipe(QueryBank(bank), estimator=NNN(16), verdict="skip")
    ours.create_collection("items", DIM, metric_type="COSINE", hubness=CorrectionConfig(recipe))
    ours.insert("items", [{"id": i, "vector": row} for i, row in enumerate(items)])
    state = ours.hubness_state("items")
    plain = MilvusClient(uri)
    connection = connection_of(plain)
    if state is None or connection is not connection_of(ours):
        raise RuntimeError("both clients need one connection to a corrected collection")

    recorded = connection._stub = Recorded(connection._stub)
    lengths = np.linalg.norm(queries, axis=1, keepdims=True)
    rows = []
    for suffix, sent in (("", queries), (" of length 1", queries / lengths)):
        pair = pair_of(plain, ours, state, sent)
        taken = times_of(pair, "items", 1, RECORDED_ROUNDS, random.Random(3), recorded)
        for given in ("arrays", "lists"):
            facts = facts_of(RECORDED, 1, given, taken)
            rows.append({**facts, "queries": given + suffix})
    plain.close()
    ours.close()
    return rows


def facts_of(
    server: str, batch: int, given: str, taken: dict[tuple[str, str], list[float]]
) -> dict[str, Any]:
    """Return what one form of queries shows."""
    medians = {
        who: statistics.median(taken[given, who]) for who in ("MilvusClient", "HubnessClient")
    }
    over, interval = median_difference(taken[given, "HubnessClient"], taken[given, "MilvusClient"])
    is_within = over <= RELATIVE * medians["MilvusClient"]
    return {
        "server": server,
        "batch": batch,
        "queries": given,
        "rounds": len(taken[given, "HubnessClient"]),
        "median_seconds": medians,
        "overhead_seconds_per_query": over / batch,
        "interval_seconds_per_query": [end / batch for end in interval],
        "overhead_ratio": over / medians["MilvusClient"],
        "holds": server == RECORDED or (is_within and (batch > 1 or over <= ABSOLUTE)),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    one_thread()
    started = time.monotonic()
    with MilvusServer() as server:
        rows = measure(server.uri)
    with tempfile.TemporaryDirectory() as folder:
        rows += measure_recorded(lite_uri(Path(folder)))
    shown = table(
        [
            "server",
            "batch",
            "queries",
            "MilvusClient, ms",
            "HubnessClient, ms",
            "overhead",
            "µs a query",
            "95% interval",
        ],
        [
            [
                row["server"],
                str(row["batch"]),
                row["queries"],
                *(f"{1e3 * seconds:.2f}" for seconds in row["median_seconds"].values()),
                f"{row['overhead_ratio']:+.1%}",
                f"{1e6 * row['overhead_seconds_per_query']:.0f}",
                " to ".join(f"{1e6 * end:.0f}" for end in row["interval_seconds_per_query"]),
            ]
            for row in rows
        ],
    )
    sizes = {"rows": ROWS, "dim": DIM, "bank": BANK, "limit": LIMIT, "index": "HNSW, M 16"}
    results = {
        "environment": environment(started),
        "sizes": sizes,
        "bounds": [RELATIVE, ABSOLUTE],
        "rows": rows,
    }
    save("client_overhead", results, shown)
    print(shown)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
