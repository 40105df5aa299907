"""What large messages cost the proxy: its memory, and how long another user's searches wait meanwhile.

    python -m benchmarks.proxy_memory [--before FOLDER]

Milvus 2.3.5 asks for a token. Four messages of 99 MB arrive at once with a token that is not valid,
and eight of 49 MB in turn with a valid one. They are searches of three kinds: many queries of a wrong
dimension, millions of empty search parameters, and the same with a wrong byte at the end. Each
scenario has a new proxy. Another user searches every 20 ms from a process of its own. Memory is the
resident set from /proc. `--before` measures the proxy of an earlier checkout too. Clients, proxy
and Milvus share the machine: eight small searches show how long a search waits there anyway.

Exits with 1 where, with this checkout, a search waits 200 ms or longer, or the peak is above
MOST_MIB more than at rest.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from pymilvus import MilvusClient
from pymilvus.client.prepare import Prepare
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.cli.servers import GRPC_THREADS
from tests.support.servers import MilvusServer, die_with_parent

ROWS, DIM, BANK, LIMIT = 5_000, 128, 300, 10
ROOT_TOKEN, OTHER, PASSWORD = "root:Milvus", "reader", "reader-1"
SEARCH = "/milvus.proto.milvus.MilvusService/Search"
MB = 10**6
MIB = 1 << 20
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

PAUSE_SECONDS = 0.02
"""Between two searches of the other user."""

REST_SECONDS = 3.0
"""After the last message, before the memory is read again."""

CALL_SECONDS = 120.0
LONGEST_SECONDS = 0.2
MOST_MIB = 700


class Scenario(NamedTuple):
    name: str
    megabytes: int
    messages: int
    at_once: bool
    token: str
    max_message_mib: int | None
    """None is the proxy's default."""


SMALL = "8 small ones in turn, valid token"
STRANGERS = "4 × 99 MB at once, no valid token"
SCENARIOS = (
    # What a search waits for on this machine anyway.
    Scenario(SMALL, 0, 8, False, ROOT_TOKEN, None),
    Scenario(STRANGERS, 99, 4, True, "root:wrong", 256),
    Scenario(STRANGERS, 99, 4, True, "root:wrong", None),
    Scenario("8 × 49 MB in turn, valid token", 49, 8, False, ROOT_TOKEN, None),
)


class Server(MilvusServer):
    """Milvus 2.3.5 that asks for a token."""

    def start(self) -> None:
        os.environ["COMMON_SECURITY_AUTHORIZATIONENABLED"] = "true"
        super().start()

    def _serves_requests(self) -> bool:
        try:
            MilvusClient(self.uri, token=ROOT_TOKEN, timeout=10).list_collections()
        except MilvusException:
            return False
        return True


def corrected(uri: str) -> str:
    """Create a corrected collection and the other user. Return the name of the collection."""
    client = MilvusClient(uri, token=ROOT_TOKEN)
    client.create_user(OTHER, PASSWORD)
    client.grant_role(OTHER, "admin")
    rng = np.random.default_rng(0)
    client.create_collection("items", DIM, metric_type="COSINE")
    for start in range(0, ROWS, 1_000):
        vectors = rng.standard_normal((1_000, DIM), np.float32)
        client.insert("items", [{"id": start + i, "vector": row} for i, row in enumerate(vectors)])
    store = MilvusStore(client)
    bank = QueryBank(rng.standard_normal((BANK, DIM), np.float32))
    return migrate(store, plan_correction(store, "items", Recipe(bank, estimator=NNN(16)))).target


def message_of(kind: str, collection: str, size: int) -> bytes:
    """Return a search of that kind, of about `size` bytes."""
    request = milvus_pb2.SearchRequest(collection_name=collection)
    if kind == "queries":
        vector = bytes(4 * (DIM - 1))
        count = size // (len(vector) + 4)
        placeholder = common_pb2.PlaceholderValue(
            tag="$0", type=common_pb2.PlaceholderType.FloatVector, values=[vector] * count
        )
        group = common_pb2.PlaceholderGroup(placeholders=[placeholder])
        request.placeholder_group = group.SerializeToString()
        request.nq = count
        return request.SerializeToString()

    number = milvus_pb2.SearchRequest.DESCRIPTOR.fields_by_name["search_params"].number
    empty = bytes([number << 3 | 2, 0])
    parts = request.SerializeToString() + empty * (size // 2)
    return parts if kind == "parts" else parts + b"\xff"


KINDS = ("queries", "parts", "malformed")


def send(address: str, scenario: Scenario, kind: str, collection: str) -> list[str]:
    """Send the messages, and return the status of each call. Runs in its own process."""
    message = message_of(kind, collection, scenario.megabytes * MB)
    metadata = authorization(scenario.token)

    def call(_: int) -> str:
        with grpc.insecure_channel(address, UNLIMITED) as channel:
            try:
                answer = channel.unary_unary(SEARCH)(
                    message, metadata=metadata, timeout=CALL_SECONDS
                )
            except grpc.RpcError as error:
                return str(error.code().name)
        status = milvus_pb2.SearchResults.FromString(answer).status
        return f"status {status.code}" if status.code else "OK"

    with ThreadPoolExecutor(scenario.messages if scenario.at_once else 1) as threads:
        return list(threads.map(call, range(scenario.messages)))


def search_on(address: str, message: bytes, ready: Event, ended: Event) -> list[float]:
    """Search until `ended`, and return the seconds of each search. Runs in its own process."""
    seconds = []
    metadata = authorization(f"{OTHER}:{PASSWORD}")
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        search = channel.unary_unary(SEARCH)
        for number in range(10**9):
            began = time.perf_counter()
            answer = search(message, metadata=metadata, timeout=CALL_SECONDS)
            if number >= 10:  # The first ones connect and read the collection's state.
                seconds.append(time.perf_counter() - began)
                ready.set()
            status = milvus_pb2.SearchResults.FromString(answer).status
            if status.code:
                raise RuntimeError(f"the other user's search failed: {status.reason}")
            if ended.wait(PAUSE_SECONDS):
                break
    return seconds


def authorization(token: str) -> list[tuple[str, str]]:
    return [("authorization", base64.b64encode(token.encode()).decode())]


def memory_of(process: int, name: str) -> float:
    """Return VmRSS, resident now, or VmHWM, the peak, in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) / 1024


@contextmanager
def proxy(folder: Path, upstream: str, max_message_mib: int | None) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of the proxy of a checkout."""
    command = [
        sys.executable,
        "-m",
        "milvus_hubness",
        "proxy",
        "--upstream",
        upstream,
        "--port",
        "0",
        "--json",
    ]
    if max_message_mib:
        command += ["--max-message-mib", str(max_message_mib)]
    settings = {"GRPC_EXPERIMENTS": GRPC_THREADS, **os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        die_with_parent(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=settings,
        cwd=folder,
    )
    try:
        if process.stdout is None:
            raise RuntimeError("the proxy has no output")
        yield json.loads(process.stdout.readline())["address"], process.pid
    finally:
        process.terminate()
        process.wait()


def measure(
    folder: Path, upstream: str, scenario: Scenario, kind: str, collection: str
) -> dict[str, Any]:
    query = np.random.default_rng(7).standard_normal((1, DIM), np.float32)
    request = Prepare.search_requests_with_expr(
        collection, "vector", {}, LIMIT, data=list(query), output_fields=["id"]
    )
    context = multiprocessing.get_context("spawn")
    with (
        proxy(folder, upstream, scenario.max_message_mib) as (address, process),
        context.Manager() as manager,
    ):
        ready, ended = manager.Event(), manager.Event()
        with context.Pool(2) as pool:
            searches = pool.apply_async(
                search_on, (address, request.SerializeToString(), ready, ended)
            )
            if not ready.wait(60):
                raise RuntimeError("the other user's searches did not begin")
            at_rest = memory_of(process, "VmRSS")
            Path(f"/proc/{process}/clear_refs").write_text("5")  # The peak begins here.

            began = time.monotonic()
            outcomes = pool.apply(send, (address, scenario, kind, collection))
            taken = time.monotonic() - began

            time.sleep(REST_SECONDS)
            ended.set()
            seconds = searches.get(60)
        return {
            "scenario": scenario.name,
            "max_message_mib": scenario.max_message_mib,
            "kind": kind,
            "rest_mib": round(at_rest),
            "peak_mib": round(memory_of(process, "VmHWM")),
            "after_mib": round(memory_of(process, "VmRSS")),
            "longest_ms": round(1e3 * max(seconds), 1),
            "median_ms": round(1e3 * sorted(seconds)[len(seconds) // 2], 1),
            "searches": len(seconds),
            "seconds": round(taken, 1),
            "outcomes": sorted(set(outcomes)),
        }


def report(rows: list[dict[str, Any]], started: float) -> None:
    """Print the table, and save it with the figures."""
    figures = ("rest_mib", "peak_mib", "after_mib", "longest_ms")
    shown = table(
        [
            "messages",
            "kind",
            "--max-message-mib",
            "proxy",
            "at rest, MiB",
            "peak",
            "after",
            "longest wait, ms",
            "ended with",
        ],
        [
            [
                row["scenario"],
                row["kind"],
                str(row["max_message_mib"] or "default"),
                row["checkout"],
                *(f"{row[figure]:.0f}" for figure in figures),
                ", ".join(row["outcomes"]),
            ]
            for row in rows
        ],
    )
    sizes = {"rows": ROWS, "dim": DIM, "bank": BANK, "limit": LIMIT, "pause_seconds": PAUSE_SECONDS}
    save("proxy_memory", {"environment": environment(started), "sizes": sizes, "rows": rows}, shown)
    print(shown)


def main() -> int:
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="folder of an earlier checkout")
    options, started = parser.parse_args(), time.monotonic()
    checkouts = {"now": Path(__file__).parents[1]}
    if options.before:
        checkouts = {"before": options.before, **checkouts}

    rows: list[dict[str, Any]] = []
    with Server() as server:
        collection = corrected(server.uri)
        upstream = server.uri.removeprefix("http://")
        for scenario in SCENARIOS:
            for kind in KINDS if scenario.megabytes else KINDS[:1]:
                for checkout, folder in checkouts.items():
                    row = measure(folder, upstream, scenario, kind, collection)
                    rows.append({"checkout": checkout, **row})
                    print(rows[-1], flush=True)

    report(rows, started)
    broken = [
        row
        for row in rows
        if row["checkout"] == "now"
        and (
            row["longest_ms"] >= 1e3 * LONGEST_SECONDS
            or row["peak_mib"] - row["rest_mib"] > MOST_MIB
        )
    ]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
