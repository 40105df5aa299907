"""What the proxy costs: searches of a corrected collection through it, and straight, at 1 and 64 connections.

    python -m benchmarks.proxy_overhead [--seconds 10]

Straight means queries that are in the augmented query already, so that the server does the same work for both. The two
take turns, in rounds; medians over the rounds are compared. Clients, proxy and server share the machine."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from pymilvus import MilvusClient

from benchmarks.client_overhead import BANK, DIM, LIMIT, ROWS, fill
from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import NNN, MilvusStore, QueryBank, migrate, plan_migration
from tests.servers import MilvusServer, die_with_parent

CONNECTIONS = (1, 64)
ROUNDS = 5


def timed(clients: list[MilvusClient], name: str, queries: list[Any], seconds: float) -> dict[str, float]:
    """Median latency, and searches per second, of one thread for each client."""
    taken: list[float] = []
    until = time.perf_counter() + seconds

    def search(client: MilvusClient) -> None:
        number = 0
        while (began := time.perf_counter()) < until:
            client.search(name, data=[queries[number % len(queries)]], limit=LIMIT, output_fields=["id"])
            taken.append(time.perf_counter() - began)
            number += 1

    threads = [threading.Thread(target=search, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"latency": statistics.median(taken), "throughput": len(taken) / seconds}


def measure(upstream: str, proxy: str, seconds: float) -> list[dict[str, Any]]:
    plain = MilvusClient(upstream)
    fill(plain, "items")
    store = MilvusStore(plain)
    bank = QueryBank(np.random.default_rng(1).standard_normal((BANK, DIM), np.float32))
    name = migrate(store, plan_migration(store, "items", bank, estimator=NNN(16))).target
    state = store.info(name).state
    if state is None:
        raise RuntimeError(f"{name} carries no biases")
    queries = np.random.default_rng(2).standard_normal((100, DIM), np.float32)
    query_vectors = {
        "straight": list(state.layout.encode_queries(queries, 1.0, slot=state.profile.slot)),
        "proxy": list(queries),
    }
    rows = []
    for connections in CONNECTIONS:
        clients = {
            who: [MilvusClient(uri, dedicated=True) for _ in range(connections)]
            for who, uri in (("straight", upstream), ("proxy", proxy))
        }
        rounds: dict[str, list[dict[str, float]]] = {"straight": [], "proxy": []}
        for number in range(ROUNDS + 1):
            for who in sorted(rounds, reverse=number % 2 == 1):
                rounds[who].append(timed(clients[who], name, query_vectors[who], seconds))
        row: dict[str, Any] = {"connections": connections, "rounds": rounds}
        for measured in ("latency", "throughput"):
            medians = {who: statistics.median(each[measured] for each in rounds[who][1:]) for who in rounds}
            row[measured] = {**medians, "ratio": medians["proxy"] / medians["straight"]}
        rows.append(row)
        for client in (*clients["straight"], *clients["proxy"]):
            client.close()
    return rows


def main() -> None:
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one round")
    seconds, started = parser.parse_args().seconds, time.monotonic()
    with MilvusServer() as server:
        upstream = server.uri.removeprefix("http://")
        command = ["-m", "milvus_hubness", "proxy", "--upstream", upstream, "--port", "0", "--json"]
        proxy = subprocess.Popen(die_with_parent([sys.executable, *command]), stdout=subprocess.PIPE)
        try:
            if proxy.stdout is None:
                raise RuntimeError("the proxy tells nothing")
            address = json.loads(proxy.stdout.readline())["address"]
            rows = measure(server.uri, f"http://{address}", seconds)
        finally:
            proxy.terminate()
            proxy.wait()
    shown = table(
        ["connections", "straight, ms", "proxy, ms", "ratio", "straight, 1/s", "proxy, 1/s", "ratio"],
        [
            [
                str(row["connections"]),
                *(f"{1e3 * row['latency'][who]:.2f}" for who in ("straight", "proxy")),
                f"{row['latency']['ratio']:.2f}",
                *(f"{row['throughput'][who]:.0f}" for who in ("straight", "proxy")),
                f"{row['throughput']['ratio']:.2f}",
            ]
            for row in rows
        ],
    )
    sizes = {"rows": ROWS, "dim": DIM, "bank": BANK, "limit": LIMIT, "index": "HNSW, M 16", "seconds": seconds}
    save("proxy_overhead", {"environment": environment(started), "sizes": sizes, "rows": rows}, shown)
    print(shown)


if __name__ == "__main__":
    main()
