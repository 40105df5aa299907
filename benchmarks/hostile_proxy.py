"""What hostile clients of the proxy cost others: how long a search waits, and the proxy's memory.

    python -m benchmarks.hostile_proxy [--seconds 15] [--only NAME] [--before FOLDER]

Each hostile client speaks the protocol as it is, and does what no library does by itself: it never
sends its message, takes no answer, invents headers, connections or tokens. Milvus 2.3.5 asks for a
token, and the proxy may open 1,024 files. Large answers come from a relay before Milvus. Each
scenario has a new proxy. Meanwhile another user searches every 20 ms, on one connection and on a
new one each time; where a new connection is refused, it tries again after 20 ms, and that counts
as waiting. Memory is the resident set from /proc. `--before` measures the proxy of an earlier
checkout too. Clients, proxy and Milvus share the machine: the first scenario, in which nobody is
hostile, shows how long a search waits there anyway.

Exits with 1 where, with this checkout, a search waits longer than LONGEST_SECONDS, or the peak is
above MOST_MIB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient
from pymilvus.client.prepare import Prepare
from pymilvus.grpc_gen import milvus_pb2, schema_pb2

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.proxy_memory import ROOT_TOKEN, UNLIMITED, Server, authorization, memory_of
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.cli.servers import GRPC_THREADS
from tests.support.http2 import Http2
from tests.support.servers import die_with_parent

ROWS, DIM, BANK, LIMIT = 5_000, 128, 300, 10
LARGE_BANK = 60_000
"""Queries in the bank of the collection of the hostile user: 31 MB."""

TEXTS, TEXT_BYTES = "texts", 60_000
"""A plain collection whose answers are large."""

OPEN_FILES = 1_024
SERVICE = "/milvus.proto.milvus.MilvusService/"
OTHER, HOSTILE, SECOND = "reader:reader-1", "hostile:hostile-1", "second:second-1"
MIB = 1 << 20

PAUSE_SECONDS = 0.02
"""Between two searches of the other user, and between two tries to connect."""

CALL_SECONDS = 120.0
LONGEST_SECONDS = 1.0
MOST_MIB = 512


class Target(NamedTuple):
    """Where hostile calls go."""

    address: str
    collection: str
    large: str
    """A collection with a large bank."""


Attack = Callable[[Target, Event], Counter[str]]
"""Calls until the event, and returns how the calls have ended."""


def calm(target: Target, ended: Event) -> Counter[str]:
    ended.wait()
    return Counter()


def silent(calls: int, connections: int, tokens: list[str], invented: str | None = None) -> Attack:
    """Keep as many calls that never send their message. invented: an entry with another value each."""

    def attack(target: Target, ended: Event) -> Counter[str]:
        return asyncio.run(_silent(target, ended, calls, connections, tokens, invented))

    return attack


async def _silent(
    target: Target,
    ended: Event,
    calls: int,
    connections: int,
    tokens: list[str],
    invented: str | None,
) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    channels = [
        grpc.aio.insecure_channel(target.address, [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(connections)
    ]

    async def one(number: int) -> None:
        metadata = authorization(tokens[number % len(tokens)])
        if invented:
            metadata = [*metadata, (invented, str(number))]
        search = channels[number % connections].stream_unary(SERVICE + "Search")
        while True:
            call = search(metadata=metadata)
            try:
                outcomes[(await call.code()).name] += 1
            finally:
                call.cancel()
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(one(number)) for number in range(calls)]
    await asyncio.to_thread(ended.wait)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close()
    return outcomes


def half_sent(target: Target, ended: Event) -> Counter[str]:
    """Send 63 MiB of a message, four times at once by two users, and then nothing."""
    message = bytes(63 * MIB)

    def one(token: str) -> None:
        while not ended.is_set():
            with suppress(OSError, EOFError), Http2(target.address) as connection:
                stream = connection.begin(SERVICE + "Insert", authorization(token))
                connection.send(stream, message, missing=1)
                while not ended.is_set() and b"grpc-status" not in connection.statuses:
                    connection.take()
                outcomes["given up"] += 1

    outcomes: Counter[str] = Counter()
    return _in_threads(
        [lambda token=token: one(token) for token in (HOSTILE, SECOND) * 2], ended, outcomes
    )


def many_headers(target: Target, ended: Event) -> Counter[str]:
    """Insert rows with an invented header each time: the proxy reads the bank for the biases."""
    outcomes: Counter[str] = Counter()
    vectors = np.random.default_rng(3).standard_normal((2, DIM), np.float32)
    with grpc.insecure_channel(target.address, UNLIMITED) as channel:
        insert = channel.unary_unary(SERVICE + "Insert")
        number = 0
        while not ended.is_set():
            number += 1
            request = milvus_pb2.InsertRequest(collection_name=target.large, num_rows=2)
            keys = schema_pb2.LongArray(data=[10**6 + 2 * number, 10**6 + 2 * number + 1])
            request.fields_data.add(
                type=5, field_name="id", scalars=schema_pb2.ScalarField(long_data=keys)
            )
            numbers = schema_pb2.FloatArray(data=vectors.ravel())
            request.fields_data.add(
                type=101,
                field_name="vector",
                vectors=schema_pb2.VectorField(dim=DIM, float_vector=numbers),
            )
            metadata = [*authorization(HOSTILE), ("x-foo", str(number % 64))]
            outcomes[_status(insert, request, metadata, milvus_pb2.MutationResult)] += 1
    return outcomes


def unread(calls: int, connections: int, rows: int) -> Attack:
    """Query rows of 60 KB, and take none of the answers."""

    def attack(target: Target, ended: Event) -> Counter[str]:
        request = milvus_pb2.QueryRequest(
            collection_name=TEXTS, expr=f"id < {rows}", output_fields=["text"]
        ).SerializeToString()
        outcomes: Counter[str] = Counter()

        def one() -> None:
            while not ended.is_set():
                with suppress(OSError, EOFError), Http2(target.address, window=0) as connection:
                    for _ in range(calls // connections):
                        stream = connection.begin(SERVICE + "Query", authorization(HOSTILE))
                        connection.send(stream, request)
                    while not ended.is_set():
                        with suppress(TimeoutError):
                            connection.take()
                outcomes["connection ended"] += not ended.is_set()

        return _in_threads([one] * connections, ended, outcomes)

    return attack


def idle(token: str | None) -> Attack:
    """Keep 1,050 connections, with one call on each if there is a token, and open them again."""

    def attack(target: Target, ended: Event) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        held: list[Http2] = []

        def connect() -> None:
            connection = Http2(target.address)
            held.append(connection)
            if token:
                stream = connection.begin(SERVICE + "ShowCollections", authorization(token))
                connection.send(stream, b"")
            connection.socket.setblocking(False)

        while not ended.is_set():
            for connection in list(held):
                try:
                    while True:
                        connection.take()
                except BlockingIOError:
                    pass
                except (OSError, EOFError):
                    outcomes["connection ended"] += 1
                    connection.close()
                    held.remove(connection)
            while len(held) < 1_050 and not ended.is_set():
                with suppress(OSError, EOFError):
                    connect()
            ended.wait(0.2)
        for connection in held:
            connection.close()
        return outcomes

    return attack


def wrong_tokens(method: str, length: int = 24) -> Attack:
    """Call with another invented token each time, 256 calls at once on eight connections."""

    def attack(target: Target, ended: Event) -> Counter[str]:
        return asyncio.run(_wrong_tokens(target, ended, method, length))

    return attack


async def _wrong_tokens(target: Target, ended: Event, method: str, length: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target.address, options) for _ in range(8)]
    is_over = False

    async def one(number: int) -> None:
        call = channels[number % 8].unary_unary(SERVICE + method)
        while not is_over:
            token = f"reader:{os.urandom(length).hex()}"
            try:
                await call(b"", metadata=authorization(token), timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                outcomes[error.code().name] += 1
            else:
                outcomes["OK"] += 1

    tasks = [asyncio.create_task(one(number)) for number in range(256)]
    await asyncio.to_thread(ended.wait)
    is_over = True
    await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return outcomes


ATTACKS: dict[str, Attack] = {
    "nobody is hostile": calm,
    "8 silent calls, a header each": silent(8, 1, [HOSTILE], "x-foo"),
    "8 silent calls by 2 users": silent(8, 2, [HOSTILE, SECOND]),
    "4,100 silent calls on 3 connections": silent(4_100, 3, [HOSTILE]),
    "4,100 silent calls on 40 connections, a header each": silent(4_100, 40, [HOSTILE], "x-foo"),
    "4 messages of 63 MiB that stop before the end, by 2 users": half_sent,
    "inserts with 64 headers, a bank of 31 MB": many_headers,
    "40 answers of 24 MB that nobody takes": unread(40, 4, 400),
    "1,000 answers of 240 KB that nobody takes": unread(1_000, 4, 4),
    "1,050 idle connections, no token": idle(None),
    "1,050 idle connections of one user": idle(HOSTILE),
    "256 calls at once with wrong tokens": wrong_tokens("Search"),
    "256 calls at once with wrong tokens of 6 KB": wrong_tokens("Search", 2_000),
    "256 drops at once with wrong tokens": wrong_tokens("DropCollection"),
}


def _in_threads(
    works: list[Callable[[], None]], ended: Event, outcomes: Counter[str]
) -> Counter[str]:
    threads = [Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    ended.wait()
    return outcomes


def _status(call: Any, request: Any, metadata: Any, response: Any) -> str:
    try:
        answer = call(request.SerializeToString(), metadata=metadata, timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        return str(error.code().name)

    status = response.FromString(answer).status
    return f"status {status.code}" if status.code or status.error_code else "OK"


def run_attack(name: str, target: Target, ended: Event) -> dict[str, int]:
    """Runs in its own process, which may open all its files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return dict(ATTACKS[name](target, ended))


def search_on(
    address: str, message: bytes, connects: bool, ready: Event, ended: Event
) -> list[float]:
    """Search until `ended`, and return the seconds of each search. Runs in its own process."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    metadata = authorization(OTHER)
    kept = grpc.insecure_channel(address, options)

    def search(channel: grpc.Channel) -> bool:
        try:
            answer = channel.unary_unary(SERVICE + "Search")(
                message, metadata=metadata, timeout=CALL_SECONDS
            )
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise RuntimeError(f"the other user's search ended: {error}") from None
            return False

        status = milvus_pb2.SearchResults.FromString(answer).status
        if status.code:
            raise RuntimeError(f"the other user's search failed: {status.reason}")
        return True

    seconds = []
    for number in range(10**9):
        began = time.perf_counter()
        while True:
            channel = grpc.insecure_channel(address, options) if connects else kept
            is_answered = search(channel)
            if connects:
                channel.close()
            if is_answered or ended.is_set():
                break
            time.sleep(PAUSE_SECONDS)
        # The first ones read the collection's state.
        if number >= 10:
            seconds.append(time.perf_counter() - began)
            ready.set()
        if ended.wait(PAUSE_SECONDS):
            return seconds
    raise AssertionError("unreachable")


def collections(uri: str) -> tuple[str, str]:
    """Create the users and two corrected collections, one with a large bank. Return their names."""
    client = MilvusClient(uri, token=ROOT_TOKEN)
    for token in (OTHER, HOSTILE, SECOND):
        user, _, password = token.partition(":")
        client.create_user(user, password)
        client.grant_role(user, "admin")
    rng = np.random.default_rng(0)
    names = []
    for name, count in (("items", BANK), ("large", LARGE_BANK)):
        client.create_collection(name, DIM, metric_type="COSINE")
        for start in range(0, ROWS, 1_000):
            vectors = rng.standard_normal((1_000, DIM), np.float32)
            client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(vectors)])
        store = MilvusStore(client)
        bank = QueryBank(rng.standard_normal((count, DIM), np.float32))
        names.append(
            migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(16)))).target
        )

    schema = MilvusClient.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    schema.add_field("text", DataType.VARCHAR, max_length=TEXT_BYTES)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(TEXTS, schema=schema, index_params=index)
    client.close()
    return names[0], names[1]


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers queries of large rows itself, and passes all other calls on to Milvus.

    To make the large answers keeps Milvus busy for seconds, in which searches straight to it wait.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: Any) -> Any:
        async def answer(message: bytes, context: Any) -> bytes:
            if details.method == SERVICE + "Query":
                request = milvus_pb2.QueryRequest.FromString(message)
                if request.collection_name == TEXTS:
                    return _large_answer(int(request.expr.rpartition(" ")[2]))

            metadata = [
                entry for entry in context.invocation_metadata() if entry[0] != "user-agent"
            ]
            passed_on: bytes = await self._channel.unary_unary(details.method)(
                message, metadata=metadata
            )
            return passed_on

        return grpc.unary_unary_rpc_method_handler(answer)


@cache
def _large_answer(rows: int) -> bytes:
    texts = schema_pb2.StringArray(data=["x" * TEXT_BYTES] * rows)
    response = milvus_pb2.QueryResults(collection_name=TEXTS, output_fields=["text"])
    response.fields_data.add(
        type=21, field_name="text", scalars=schema_pb2.ScalarField(string_data=texts)
    )
    return response.SerializeToString()


def relay(upstream: str, ports: Any) -> None:
    """Put the port of a relay before Milvus. Runs in its own process, for ever."""
    asyncio.run(_relay(upstream, ports))


async def _relay(upstream: str, ports: Any) -> None:
    handlers = [Relay(grpc.aio.insecure_channel(upstream, UNLIMITED))]
    server = grpc.aio.server(handlers=handlers, options=UNLIMITED)
    ports.put(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


@contextmanager
def proxy(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of the proxy of a checkout, which may open few files."""
    # The shell sets the limit: a function of Python must not run between fork and exec here.
    limited = ["/bin/sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$0" "$@"']
    program = [*limited, sys.executable, "-m", "milvus_hubness", "proxy"]
    options = ["--upstream", upstream, "--port", "0", "--json"]
    settings = {"GRPC_EXPERIMENTS": GRPC_THREADS, **os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        die_with_parent([*program, *options]),
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
        process.kill()
        process.wait()


def measure(
    folder: Path, upstream: str, name: str, collection: str, large: str, seconds: float
) -> dict[str, Any]:
    query = np.random.default_rng(7).standard_normal((1, DIM), np.float32)
    message = Prepare.search_requests_with_expr(
        collection, "vector", {}, LIMIT, data=list(query), output_fields=["id"]
    ).SerializeToString()
    context = multiprocessing.get_context("spawn")
    with proxy(folder, upstream) as (address, process), context.Manager() as manager:
        ready = [manager.Event(), manager.Event()]
        ended, over = manager.Event(), manager.Event()
        target = Target(address, collection, large)
        with context.Pool(3) as pool:
            searches = [
                pool.apply_async(search_on, (address, message, connects, ready[connects], over))
                for connects in (False, True)
            ]
            for event, search in zip(ready, searches, strict=True):
                # A search that has failed says why.
                while not event.wait(1):
                    if search.ready():
                        search.get()

            at_rest = memory_of(process, "VmRSS")
            attack = pool.apply_async(run_attack, (name, target, ended))
            time.sleep(seconds)
            ended.set()
            over.set()
            waits: list[float | None] = []
            for search in searches:
                try:
                    waits.append(max(search.get(CALL_SECONDS + 10)))
                except (RuntimeError, multiprocessing.TimeoutError) as error:
                    print(name, error, flush=True)
                    waits.append(None)
            outcomes = attack.get(60)
        return {
            "scenario": name,
            "rest_mib": round(at_rest),
            "peak_mib": round(memory_of(process, "VmHWM")),
            "longest_ms": _milliseconds(waits[0]),
            "longest_connecting_ms": _milliseconds(waits[1]),
            "outcomes": outcomes,
        }


def _milliseconds(seconds: float | None) -> int | None:
    """None where a search of the other user was refused."""
    return None if seconds is None else round(1e3 * seconds)


def report(rows: list[dict[str, Any]], seconds: float, started: float) -> None:
    """Print the table, and save it with the figures."""
    shown = table(
        ["hostile", "proxy", "longest wait, ms", "on a new connection, ms", "peak, MiB"],
        [
            [
                row["scenario"],
                row["checkout"],
                *(
                    "refused" if row[name] is None else f"{row[name]:,}"
                    for name in ("longest_ms", "longest_connecting_ms")
                ),
                f"{row['peak_mib']:,}",
            ]
            for row in rows
        ],
    )
    sizes = {
        "rows": ROWS,
        "dim": DIM,
        "bank": BANK,
        "large_bank": LARGE_BANK,
        "limit": LIMIT,
        "open_files": OPEN_FILES,
        "pause_seconds": PAUSE_SECONDS,
        "seconds": seconds,
    }
    versions = {"grpcio": grpc.__version__, "pymilvus": version("pymilvus"), "milvus": "2.3.5"}
    facts = {"environment": {**environment(started), **versions}, "sizes": sizes, "rows": rows}
    save("hostile_proxy", facts, shown)
    print(shown)


def main() -> int:
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each scenario")
    parser.add_argument("--only", help="a word of the scenarios to run; nothing is saved")
    parser.add_argument("--before", type=Path, help="folder of an earlier checkout")
    options, started = parser.parse_args(), time.monotonic()
    checkouts = {"now": Path(__file__).parents[1]}
    if options.before:
        checkouts["before"] = options.before

    rows: list[dict[str, Any]] = []
    with Server() as server:
        names = collections(server.uri)
        upstream = server.uri.removeprefix("http://")
        context = multiprocessing.get_context("spawn")
        ports = context.Queue()
        relaying = context.Process(target=relay, args=(upstream, ports), daemon=True)
        relaying.start()
        relayed = f"127.0.0.1:{ports.get(timeout=60)}"
        for checkout, folder in checkouts.items():
            for name in ATTACKS:
                if options.only and options.only not in name:
                    continue

                to = relayed if "answers" in name else upstream
                row = measure(folder, to, name, *names, options.seconds)
                rows.append({"checkout": checkout, **row})
                print(rows[-1], flush=True)

        relaying.terminate()

    if not options.only:
        report(rows, options.seconds, started)
    return int(any(is_broken(row) for row in rows if row["checkout"] == "now"))


def is_broken(row: dict[str, Any]) -> bool:
    waits = [row["longest_ms"], row["longest_connecting_ms"]]
    return row["peak_mib"] >= MOST_MIB or any(
        wait is None or wait > 1e3 * LONGEST_SECONDS for wait in waits
    )


if __name__ == "__main__":
    sys.exit(main())
