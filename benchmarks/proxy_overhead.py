"""What the proxy costs: searches of a corrected collection through it, and straight, at 1 and 64 connections.

    python -m benchmarks.proxy_overhead [--seconds 2.5] [--rounds 5]

Straight means queries that are in the augmented form already, so that the server does the same work for all. A relay
passes the same bytes on by grpc.aio and does nothing else: no proxy on that library costs less. The ways take turns, in
rounds; medians over the rounds are compared. A process of its own sends serialized requests by gRPC and does not decode
the answers. It, the proxy and the server share the machine. CPU time is that of all threads and processes of each, per
search, from /proc."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from pymilvus import MilvusClient
from pymilvus.client.prepare import Prepare
from pymilvus.grpc_gen import milvus_pb2

from benchmarks.client_overhead import BANK, DIM, LIMIT, ROWS, fill
from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.cli.servers import GRPC_THREADS
from tests.support.servers import MilvusServer, die_with_parent

CONNECTIONS = (1, 64)
WORKERS = (1, 2)
SEARCH = "/milvus.proto.milvus.MilvusService/Search"
QUERIES = 100
STARTUP_SECONDS = 0.5


class Way(NamedTuple):
    """Where searches go, the process whose CPU time is the proxy's, and what is sent."""

    address: str
    process: int | None
    requests: list[bytes]


def load(address: str, requests: list[bytes], connections: int, seconds: float) -> dict[str, float]:
    """Send searches from `connections` connections, one after the other from each. Runs in its own process."""
    return asyncio.run(_load(address, requests, connections, seconds))


async def _load(
    address: str, requests: list[bytes], connections: int, seconds: float
) -> dict[str, float]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(connections)]
    taken: list[float] = []

    async def search(channel: Any, first: int) -> bytes:
        call, answer = channel.unary_unary(SEARCH), b""
        for request in islice(cycle(requests), first, None):
            began = time.perf_counter()
            if began >= until:
                break
            answer = await call(request)
            taken.append(time.perf_counter() - began)
        return answer

    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    cpu, until = time.process_time(), time.perf_counter() + seconds
    answers = await asyncio.gather(*(search(channel, i) for i, channel in enumerate(channels)))
    cpu = time.process_time() - cpu
    for answer in answers:
        results = milvus_pb2.SearchResults.FromString(answer)
        if results.status.code or len(results.results.scores) != LIMIT:
            raise RuntimeError(f"a search failed: {results.status.reason}")
    await asyncio.gather(*(channel.close() for channel in channels))
    return {
        "latency": statistics.median(taken),
        "throughput": len(taken) / seconds,
        "searches": len(taken),
        "client_cpu": cpu,
    }


def cpu_seconds(process: int) -> float:
    """CPU time of a process and of its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


async def relay(upstream: str) -> None:
    """Pass searches on, and print the address as the proxy does. Runs in its own process, with the proxy's settings."""
    from milvus_hubness.milvus.proxy import ProxyOptions

    options = ProxyOptions(upstream)
    forward = options.open_channel(grpc.aio).unary_unary(SEARCH)

    async def answer(request: bytes, context: Any) -> Any:
        return await forward(request)

    handlers = {SEARCH.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(answer)}
    service = grpc.method_handlers_generic_handler(SEARCH.split("/")[1], handlers)
    server = grpc.aio.server(handlers=[service], options=options.server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(json.dumps({"address": address}), flush=True)
    await server.wait_for_termination()


def proxy_command(upstream: str, workers: int) -> list[str]:
    command = ["-m", "milvus_hubness", "proxy", "--upstream", upstream, "--port", "0", "--json"]
    return [*command, "--workers", str(workers)]


@contextmanager
def started_with(command: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a proxy or a relay."""
    environment = {"GRPC_EXPERIMENTS": GRPC_THREADS, **os.environ}
    process = subprocess.Popen(
        die_with_parent([sys.executable, *command]), stdout=subprocess.PIPE, env=environment
    )
    try:
        if process.stdout is None:
            raise RuntimeError(f"{command} has no output")
        yield json.loads(process.stdout.readline())["address"], process.pid
    finally:
        process.terminate()
        process.wait()


def corrected(uri: str) -> tuple[list[bytes], list[bytes]]:
    """Create a corrected collection, and return requests for the server and for the proxy."""
    plain = MilvusClient(uri)
    fill(plain, "items")
    store = MilvusStore(plain)
    bank = QueryBank(np.random.default_rng(1).standard_normal((BANK, DIM), np.float32))
    name = migrate(store, plan_correction(store, "items", Recipe(bank, estimator=NNN(16)))).target
    store.drop("items")
    state = store.info(name).state
    if state is None:
        raise RuntimeError(f"{name} has no biases")
    queries = np.random.default_rng(2).standard_normal((QUERIES, DIM), np.float32)
    encoded = state.layout.encode_queries(queries, 1.0, slot=state.profile.slot)
    plain.close()
    straight, through = (
        [
            Prepare.search_requests_with_expr(
                name, "", {}, LIMIT, data=[query], output_fields=["id"]
            )
            for query in vectors
        ]
        for vectors in (encoded, queries)
    )
    return [request.SerializeToString() for request in straight], [
        request.SerializeToString() for request in through
    ]


def measure(ways: dict[str, Way], server: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as generator:

        def measured(way: Way, connections: int, seconds: float) -> dict[str, float]:
            before = {
                name: cpu_seconds(pid)
                for name, pid in (("server", server), ("proxy", way.process))
                if pid
            }
            result = generator.submit(
                load, way.address, way.requests, connections, seconds
            ).result()
            for name, process in (("server", server), ("proxy", way.process)):
                result[f"{name}_cpu"] = cpu_seconds(process) - before[name] if process else 0.0
            return result

        rows = []
        for connections in CONNECTIONS:
            each: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
            for way in ways.values():
                measured(way, connections, STARTUP_SECONDS)
            for number in range(rounds):
                for name in sorted(ways, reverse=number % 2 == 1):
                    each[name].append(measured(ways[name], connections, seconds))
            rows += [_row(connections, name, each) for name in ways]
    return rows


def _row(connections: int, name: str, each: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"connections": connections, "way": name, "rounds": each[name]}
    for figure in ("latency", "throughput"):
        row[figure] = statistics.median(result[figure] for result in each[name])
        row[f"{figure}_ratio"] = row[figure] / statistics.median(
            result[figure] for result in each["straight"]
        )
    searches = sum(result["searches"] for result in each[name])
    for who in ("client", "server", "proxy"):
        row[f"{who}_cpu"] = sum(result[f"{who}_cpu"] for result in each[name]) / searches
    return row


def main() -> None:
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.5, help="of one way in one round")
    parser.add_argument("--rounds", type=int, default=5)
    options, started = parser.parse_args(), time.monotonic()
    with MilvusServer() as server, ExitStack() as stack:
        straight, through = corrected(server.uri)
        upstream = server.uri.removeprefix("http://")
        relaying = [
            "-c",
            f"import asyncio, {__spec__.name} as b; asyncio.run(b.relay({upstream!r}))",
        ]
        ways = {"straight": Way(upstream, None, straight)}
        ways["relay"] = Way(*stack.enter_context(started_with(relaying)), straight)
        for workers in WORKERS:
            proxied = stack.enter_context(started_with(proxy_command(upstream, workers)))
            ways[f"proxy, {workers} worker{'s' if workers > 1 else ''}"] = Way(*proxied, through)
        rows = measure(ways, server.pid, options.rounds, options.seconds)
    shown = table(
        [
            "connections",
            "way",
            "latency, ms",
            "ratio",
            "searches/s",
            "ratio",
            "CPU ms: client",
            "server",
            "between",
        ],
        [
            [
                str(row["connections"]),
                row["way"],
                f"{1e3 * row['latency']:.2f}",
                f"{row['latency_ratio']:.2f}",
                f"{row['throughput']:.0f}",
                f"{row['throughput_ratio']:.2f}",
                *(f"{1e3 * row[f'{who}_cpu']:.2f}" for who in ("client", "server", "proxy")),
            ]
            for row in rows
        ],
    )
    sizes = {
        "rows": ROWS,
        "dim": DIM,
        "bank": BANK,
        "limit": LIMIT,
        "index": "HNSW, M 16",
        **vars(options),
    }
    save(
        "proxy_overhead", {"environment": environment(started), "sizes": sizes, "rows": rows}, shown
    )
    print(shown)


if __name__ == "__main__":
    main()
