"""What qdrant-hubness costs beside qdrant-client: CPU time of the same work by both, in turns.

    python -m benchmarks.qdrant_speed [--url URL] [--rounds N] [--only PART …] [--save]

Counted is the CPU time of this process alone, all threads together, so that neither the server nor
other work on the machine enters: what a user's program pays. Each part takes turns between the two
clients, in an order drawn anew in each round, after a round as warm-up; the ratio is that of the
medians.

    migrate   rows per CPU second of `migrate`, whole and up to the end of the copy, beside a loop
              of QdrantClient.scroll and upsert, which keeps no key, compares and computes nothing
    upsert    1,000 points, by HubnessQdrantClient into a corrected collection, by QdrantClient into
              its source; again at 256 dimensions, and with a bank of 4,000 queries
    batch     64 searches in one request, of the same collections
    search    one search
    start     CPU time and peak memory of commands, beside `from qdrant_client import QdrantClient`
    judge     CPU time of the process `milvus-hubness migrate run --plan` with a verdict on the bank and
              without one, 5,000 points of 256 dimensions and 4,000 queries, in one thread and in as
              many as there are cores: threads that wait for each other count too

URL is that of a Qdrant server; without --url and $QDRANT_URL it is the server of the tests, in a
process of its own, which speaks the same HTTP and gives the answer to a search that it has given
before at once. The local mode has no place here: it does the work of the server in the process of
the client. --save: keep the results, beside those of parts that --only leaves out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models

from benchmarks.environment import RESULTS, environment, one_thread, save, table
from milvus_hubness import NNN, Copy, MigrationOptions, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.jobs.common.progress import Event, Events
from milvus_hubness.jobs.store.ownership import LEDGER
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from qdrant_hubness.store import connect
from tests.support.galleries import hubby_gallery

ROWS, DIM, BANK, K = 6_000, 128, 500, 16
PAGE = 1_000
"""Points in a request of the plain copy."""
UPSERTED, SEARCHES, LIMIT = 1_000, 64, 10
ROUNDS = {"migrate": 5, "upsert": 9, "batch": 21, "search": 101, "start": 7, "judge": 3}
WIDER = ((256, 500), (256, 4_000))
"""Dimensions and queries in the bank of further upserts."""
JUDGED = "speed_judged"
JUDGED_ROWS, JUDGED_QUERIES, JUDGED_DIM = 5_000, 4_000, 256
SOURCE, COPY, PLAIN_COPY = "speed_items", "speed_items_hubness", "speed_items_plain"
MADE = (COPY, PLAIN_COPY, f"{COPY}__bank", f"{SOURCE}__bank", LEDGER)
"""Collections of a migration and of the plain copy."""
TARGETS = {"migrate, rows per CPU second": 2.0, "upsert of 1,000": 2.0, "batch of 64 searches": 1.2}
"""The largest ratio of CPU time to that of qdrant-client that is aimed at."""
PLAIN_IMPORT = "from qdrant_client import QdrantClient"
COMMAND = ("-c", "from milvus_hubness.cli import main; main()")

Work = Callable[[], object]


# -- the server of the tests, in a process of its own ---------------------------------------------


def serve(address: Any) -> None:
    """Serve until the other process ends; send it the address first."""
    from tests.qdrant.strict import StrictServer, listening

    class Remembering(StrictServer):
        """Answers a search at once that it has answered since the last write."""

        def __init__(self) -> None:
            super().__init__()
            self._answers: dict[tuple[str, bytes], Any] = {}

        def answer(self, request: Any) -> Any:
            if "/points/query" not in request.url.path:
                if request.method != "GET":
                    self._answers.clear()
                return super().answer(request)
            search = (request.url.path, request.read())
            if search not in self._answers:
                self._answers[search] = super().answer(request)
            return self._answers[search]

    with listening(Remembering()) as url:
        address.send(url)
        # The benchmark never writes to the pipe: this ends with it, also where it is killed.
        with suppress(EOFError):
            address.recv()


@contextmanager
def server_of_tests() -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs,), daemon=True
    )
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


# -- measuring ------------------------------------------------------------------------------------


def cpu_seconds(work: Work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_turns(
    works: dict[str, Work], rounds: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median CPU seconds of each work, after a round as warm-up.

    prepare: runs before each work, and does not count.
    """
    order = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in order.sample(sorted(works), len(works)):
            prepare()
            seconds = cpu_seconds(works[name])
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(each) for name, each in taken.items()}


def compared(what: str, plain: float, ours: float, count: int) -> dict[str, Any]:
    """Return a line of the results. plain, ours: CPU seconds for `count` rows or searches."""
    target = TARGETS.get(what)
    return {
        "what": what,
        "qdrant_client_ms": round(1e3 * plain, 3),
        "qdrant_hubness_ms": round(1e3 * ours, 3),
        "per_cpu_second": [round(count / plain), round(count / ours)],
        "ratio": round(ours / plain, 3),
        "target": target,
        "holds": None if target is None else ours / plain <= target,
    }


# -- the parts ------------------------------------------------------------------------------------


def drop(client: QdrantClient, *names: str) -> None:
    for name in names:
        if client.collection_exists(name):
            client.delete_collection(name)


def fill(client: QdrantClient, vectors: np.ndarray, name: str = SOURCE) -> None:
    """Create a collection of vectors (n, d)."""
    drop(client, name)
    config = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    client.create_collection(name, vectors_config=config)
    for start in range(0, len(vectors), PAGE):
        client.upsert(name, points_of(vectors[start : start + PAGE], start), wait=True)


def random_vectors(seed: int, count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim), np.float32)


def points_of(vectors: np.ndarray, start: int = 0) -> list[models.PointStruct]:
    return [
        models.PointStruct(
            id=start + i, vector=vector, payload={"n": start + i, "title": f"item {start + i}"}
        )
        for i, vector in enumerate(vectors.tolist())
    ]


def plain_copy(client: QdrantClient) -> None:
    """Copy the collection as the documentation of Qdrant does."""
    config = models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    client.create_collection(PLAIN_COPY, vectors_config=config)
    offset: Any = None
    while True:
        records, offset = client.scroll(
            SOURCE, limit=PAGE, offset=offset, with_payload=True, with_vectors=True
        )
        points = [
            models.PointStruct(id=record.id, vector=record.vector, payload=record.payload)
            for record in records
        ]
        client.upsert(PLAIN_COPY, points, wait=True)
        if offset is None:
            return


def migrated(
    client: QdrantClient, copied: list[float] | None = None, *, dim: int = DIM, bank: int = BANK
) -> None:
    """Migrate the collection. copied: gets the CPU seconds up to the end of the copy.

    bank: the number of its queries.
    """
    began = time.process_time()

    def note(event: Event) -> None:
        if event.name == "after-copy" and copied is not None:
            copied.append(time.process_time() - began)

    store = QdrantStore(client)
    queries = QueryBank(random_vectors(1, bank, dim))
    plan = plan_correction(store, SOURCE, Recipe(queries, estimator=NNN(K)), Copy(target=COPY))
    migrate(store, plan, MigrationOptions(no_writers=True, events=Events([note])))


def migrations(url: str, rounds: int) -> list[dict[str, Any]]:
    client = connect(url)
    copied: list[float] = []
    works = {"plain": lambda: plain_copy(client), "ours": lambda: migrated(client, copied)}
    medians = in_turns(works, rounds, lambda: drop(client, *MADE))
    migrated(client)
    until_copied = statistics.median(copied[1:])
    return [
        compared("migrate, rows per CPU second", medians["plain"], until_copied, ROWS),
        compared("migrate with its verification", medians["plain"], medians["ours"], ROWS),
    ]


def upserts_in_turns(url: str, rounds: int, what: str, dim: int) -> dict[str, Any]:
    """Compare upserts into the source and into its copy."""
    plain, ours = connect(url), HubnessQdrantClient(url=url, check_compatibility=False)
    points = points_of(random_vectors(2, UPSERTED, dim))
    medians = in_turns(
        {
            "plain": lambda: plain.upsert(SOURCE, points, wait=True),
            "ours": lambda: ours.upsert(COPY, points, wait=True),
        },
        rounds,
    )
    return compared(what, medians["plain"], medians["ours"], UPSERTED)


def upserts(url: str, rounds: int) -> list[dict[str, Any]]:
    lines = [upserts_in_turns(url, rounds, "upsert of 1,000", DIM)]

    client = connect(url)
    for dim, bank in WIDER:
        drop(client, *MADE)
        fill(client, random_vectors(0, UPSERTED, dim))
        migrated(client, dim=dim, bank=bank)
        what = f"upsert of 1,000 × {dim}, a bank of {bank:,}"
        lines.append(upserts_in_turns(url, rounds, what, dim))

    # The further parts use the collection of the usual size.
    drop(client, *MADE)
    fill(client, random_vectors(0, ROWS, DIM))
    migrated(client)
    return lines


def searches(url: str, rounds: int, count: int) -> list[dict[str, Any]]:
    """Search the source by QdrantClient, and the copy by HubnessQdrantClient: one, or a batch."""
    plain, ours = connect(url), HubnessQdrantClient(url=url, check_compatibility=False)
    queries = np.random.default_rng(3).standard_normal((count, DIM), np.float32).tolist()
    if count == 1:
        medians = in_turns(
            {
                "plain": lambda: plain.query_points(SOURCE, queries[0], limit=LIMIT),
                "ours": lambda: ours.query_points(COPY, queries[0], limit=LIMIT),
            },
            rounds,
        )
        return [compared("one search", medians["plain"], medians["ours"], 1)]
    requests = [
        models.QueryRequest(query=query, limit=LIMIT, with_payload=True) for query in queries
    ]
    medians = in_turns(
        {
            "plain": lambda: plain.query_batch_points(SOURCE, requests),
            "ours": lambda: ours.query_batch_points(COPY, requests),
        },
        rounds,
    )
    return [compared(f"batch of {count} searches", medians["plain"], medians["ours"], count)]


MEASURED = """
import os, sys
process = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, *sys.argv[1:]])
_, status, usage = os.wait4(process, 0)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A small process that starts Python with its arguments. Linux counts to the peak of a process also that of
the process which has started it, and the one of this benchmark is large."""


def process_costs(arguments: tuple[str, ...], **variables: str) -> tuple[float, float]:
    """Return CPU seconds and peak MiB of a Python process, which must succeed.

    variables: of its environment, beside those of this process.
    """
    process = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    if process.returncode:
        raise SystemExit(
            f"python {' '.join(arguments)} exited with {process.returncode}: {process.stderr}"
        )
    seconds, peak = process.stderr.splitlines()[-1].split()
    return float(seconds), float(peak)


def starts(url: str, rounds: int) -> list[dict[str, Any]]:
    address = f"qdrant+{url}"
    with tempfile.TemporaryDirectory() as folder:
        bank = os.path.join(folder, "bank.npy")
        np.save(bank, random_vectors(1, BANK, DIM))
        processes = {
            PLAIN_IMPORT: ("-c", PLAIN_IMPORT),
            "from qdrant_hubness import HubnessQdrantClient": (
                "-c",
                "from qdrant_hubness import HubnessQdrantClient",
            ),
            "milvus-hubness --help": (*COMMAND, "--help"),
            "milvus-hubness status": (*COMMAND, "status", COPY, "--uri", address),
            "milvus-hubness migrate run --plan": (
                *COMMAND, "migrate", "run", "--plan", SOURCE, "--target", "speed_planned", "--bank", bank,
                "--uri", address,
            ),
        }  # fmt: skip
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
        order = random.Random(0)
        for turn in range(rounds + 1):
            for name in order.sample(sorted(processes), len(processes)):
                costs = process_costs(processes[name])
                if turn:
                    taken[name].append(costs)
    return [
        {
            "process": name,
            "cpu_seconds": round(statistics.median(seconds for seconds, _ in each), 3),
            "peak_mib": round(statistics.median(peak for _, peak in each)),
        }
        for name, each in taken.items()
    ]


def judgings(url: str, rounds: int) -> list[dict[str, Any]]:
    """Return the CPU seconds of plans with a verdict and without, by the number of threads."""
    items, queries, _ = hubby_gallery(JUDGED_ROWS, JUDGED_QUERIES, JUDGED_DIM)
    client = connect(url)
    fill(client, items, JUDGED)
    taken: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bank = os.path.join(folder, "bank.npy")
        np.save(bank, queries)
        plan = (*COMMAND, "migrate", "plan", JUDGED, "--bank", bank, "--uri", f"qdrant+{url}")
        for _ in range(rounds):
            for threads in ("1", str(os.cpu_count())):
                for mode in ("skip", "warn"):
                    seconds, _ = process_costs(
                        plan,
                        MILVUS_HUBNESS_VERDICT=mode,
                        OMP_NUM_THREADS=threads,
                        OPENBLAS_NUM_THREADS=threads,
                    )
                    taken.setdefault((threads, mode), []).append(seconds)
    drop(client, JUDGED)
    medians = {key: statistics.median(each) for key, each in taken.items()}
    return [
        {
            "threads": int(threads),
            "without_verdict_seconds": round(medians[threads, "skip"], 2),
            "with_verdict_seconds": round(medians[threads, "warn"], 2),
        }
        for threads in dict.fromkeys(threads for threads, _ in taken)
    ]


PARTS: dict[str, Callable[[str, int], list[dict[str, Any]]]] = {
    "migrate": migrations,
    "upsert": upserts,
    "batch": lambda url, rounds: searches(url, rounds, SEARCHES),
    "search": lambda url, rounds: searches(url, rounds, 1),
    "start": starts,
    "judge": judgings,
}


def measured(url: str, rounds: int | None, parts: list[str]) -> dict[str, Any]:
    client = connect(url)
    drop(client, *MADE)
    fill(client, random_vectors(0, ROWS, DIM))
    migrated(client)
    results: dict[str, Any] = {"server": str(client.info().version)}
    try:
        for part in parts:
            results[part] = PARTS[part](url, rounds or ROUNDS[part])
            print(part, results[part], flush=True)
    finally:
        drop(client, SOURCE, *MADE)
    return results


def shown(results: dict[str, Any]) -> str:
    """Return the tables."""
    lines = [
        [
            line["what"],
            f"{line['qdrant_client_ms']:,.1f}",
            f"{line['qdrant_hubness_ms']:,.1f}",
            " / ".join(f"{number:,}" for number in line["per_cpu_second"]),
            f"{line['ratio']:.2f}",
            "" if line["target"] is None else f"{line['target']:.1f}",
        ]
        for part in PARTS
        if part not in ("start", "judge")
        for line in results.get(part, [])
    ]
    head = ["work", "qdrant-client, ms", "qdrant-hubness, ms", "per CPU second", "ratio", "at most"]
    texts = [table(head, lines)]
    if "start" in results:
        rows = [
            [line["process"], f"{line['cpu_seconds']:.2f}", f"{line['peak_mib']:,}"]
            for line in results["start"]
        ]
        texts.append(table(["process", "CPU seconds", "peak MiB"], rows))
    if "judge" in results:
        head = ["threads", "plan without a verdict, CPU s", "with a verdict, CPU s"]
        rows = [
            [
                str(line["threads"]),
                f"{line['without_verdict_seconds']:.1f}",
                f"{line['with_verdict_seconds']:.1f}",
            ]
            for line in results["judge"]
        ]
        about = (
            f"`milvus-hubness migrate run --plan` of {JUDGED_ROWS:,} × {JUDGED_DIM}, a bank of "
            f"{JUDGED_QUERIES:,}; threads that wait for each other count too:"
        )
        texts.append(f"{about}\n\n{table(head, rows)}")
    return "\n\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default=os.environ.get("QDRANT_URL"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    one_thread()
    started = time.monotonic()
    if arguments.url:
        results = measured(arguments.url, arguments.rounds, arguments.only)
    else:
        with server_of_tests() as url:
            results = measured(url, arguments.rounds, arguments.only)
        results["server"] = f"that of the tests, as {results['server']}"

    earlier = RESULTS / "qdrant_speed.json"
    if arguments.save and earlier.exists():
        kept = json.loads(earlier.read_text())
        results = {part: kept[part] for part in PARTS if part in kept} | results

    text = shown(results)
    print(text)
    if arguments.save:
        sizes = {"rows": ROWS, "dim": DIM, "bank": BANK, "estimator": f"NNN({K})", "limit": LIMIT}
        where = environment(started) | {"qdrant_client": version("qdrant-client")}
        title = f"# CPU time of qdrant-hubness beside qdrant-client, {ROWS:,} × {DIM}"
        save(
            "qdrant_speed",
            {"environment": where, "sizes": sizes, **results},
            f"{title}\n\nServer: {results['server']}.\n\n{text}",
        )


if __name__ == "__main__":
    main()
