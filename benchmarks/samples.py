"""What a bank of samples that clients took is worth, beside the same bank as a file.

    python -m benchmarks.samples [--workers N] [--save]

From a plain collection on a Milvus 2.3.5 of its own, as a user without a query log goes: its sampling is turned on,
20,000 queries are replayed, and `tune` and a migration take the samples as the bank. The queries go through a
HubnessClient and, again, through the proxy from a plain MilvusClient, 1 to 50 in a search. Beside it the same jobs
with the file that `bank export` writes. Demand is even, or follows Zipf's law with exponent 1. Tasks and logs are
those of `benchmarks.demand`: noisy copies of real queries, for 1,500 of the items. The verdict is required, as by
default: where it refuses, the raw search stays.

R@1 is that of searches of the collection and of the two copies with ten fresh queries an item, weighted by the demand:
with one query an item, whether the most wanted item is found would move R@1 by an eighth. The script fails if samples
and file are more than 1.0 point apart.

Whether samples are worth less than other queries of the same log is measured in memory, at full strength: "drawn" is
the mean R@1 of as many queries of the replay, drawn at random twenty times, with its standard deviation, and "samples"
that of the bank of samples.

Beside these: the standard deviation of a query's change of R@1 by the default correction, at full strength with the
own bank, on every embedding task, in memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
from pymilvus import MilvusClient

from benchmarks.defaults import draw, hits, load
from benchmarks.demand import LARGEST_BANK, Values, Vectors, biases_of, demand_of, task_of
from benchmarks.environment import environment, one_thread, save, table
from benchmarks.proxy_overhead import proxy_command, started_with
from milvus_hubness import (
    CorrectionNotRecommended,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    tune,
)
from milvus_hubness.correction.estimators import WithDemand
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.jobs.common.samples import sampled_bank, write_samples
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from tests.support.galleries import plain_collection
from tests.support.real_data import EMBEDDING_TASKS
from tests.support.servers import MilvusServer

TASKS = ("docstring_code", "caption_translation")
ZIPF = (0.0, 1.0)
ROUTES = ("client", "proxy")
REPLAYED = 20_000
RATE = 0.075
MOST_IN_A_SEARCH = 50
LIMIT = 10
QUERIES_PER_REQUEST = 500
FRESH = 10
"""Test queries of each item."""
MOST_APART = 1.0
"""Points of R@1 between a bank of samples and one from a file."""
BANKS_DRAWN = 20
"""Banks of as many queries of the same log."""


@contextmanager
def application(route: str, uri: str) -> Iterator[MilvusClient]:
    """Yield the client of an application; at the end it, or the proxy, writes what it sampled."""
    if route == "client":
        with closing(HubnessClient(uri)) as client:
            yield client
        return

    command = proxy_command(urlsplit(uri).netloc, workers=1)
    with started_with(command) as (address, _), closing(MilvusClient(f"http://{address}")) as plain:
        yield plain


def replay(client: MilvusClient, collection: str, log: Vectors, rng: np.random.Generator) -> None:
    start = 0
    while start < len(log):
        count = int(rng.integers(1, MOST_IN_A_SEARCH + 1))
        client.search(collection, log[start : start + count].tolist(), limit=LIMIT)
        start += count


class Test(NamedTuple):
    """Fresh queries (n, d), the item of each, and its weight; these add up to 1."""

    queries: Vectors
    items: npt.NDArray[np.int64]
    weights: Values

    def recall_at_1(self, found: npt.ArrayLike) -> float:
        """Return R@1 in percent. found: (n,) the first item of each answer."""
        return 100 * float(((np.asarray(found) == self.items) * self.weights).sum())


def searched(uri: str, collection: str, test: Test) -> float:
    """Return R@1 in percent of searches of a collection."""
    found: list[int] = []
    with closing(HubnessClient(uri, sample_queries=False)) as client:
        for start in range(0, len(test.queries), QUERIES_PER_REQUEST):
            queries = test.queries[start : start + QUERIES_PER_REQUEST].tolist()
            found += [hits[0]["id"] for hits in client.search(collection, queries, limit=1)]
    return test.recall_at_1(found)


def corrected(uri: str, name: str, bank: QueryBank, test: Test, raw: float) -> dict[str, Any]:
    """Return what `tune` said of a bank, and the R@1 after a migration with it."""
    began = time.monotonic()
    with closing(MilvusClient(uri)) as plain:
        store = MilvusStore(plain)
        tuned = tune(store, name, bank)
        is_corrected = True
        try:
            # benchmarks.environment skips the verdict.
            plan = plan_correction(store, name, Recipe(bank, verdict="require"))
            target = migrate(store, plan, no_writers=True).target
        except CorrectionNotRecommended:
            is_corrected = False

    return {
        "verdict": tuned.verdict,
        "strength": tuned.strength if is_corrected else 0.0,
        "r1": searched(uri, target, test) if is_corrected else raw,
        "seconds": round(time.monotonic() - began, 1),
    }


def beside_drawn(
    log: Vectors, samples: Vectors, gallery: Vectors, test: Test
) -> tuple[float, list[float]]:
    """Return R@1 in percent with the bank of samples, and with banks drawn from the log at random."""
    scores = test.queries @ gallery.T

    def recall_with(queries: Vectors) -> float:
        bank = with_groups(QueryBank(queries), gallery)
        bias = biases_of(WithDemand(), bank, gallery)
        return test.recall_at_1((scores - np.asarray(bias, np.float32)).argmax(1))

    count = len(samples)
    drawn = [draw(log, count, "by chance", number) for number in range(BANKS_DRAWN)]
    return recall_with(samples), [recall_with(queries) for queries in drawn]


def measured(uri: str, folder: Path, task_name: str, zipf: float, route: str) -> dict[str, Any]:
    """Return the figures of one task, demand and way to the database."""
    task = task_of(task_name)
    gallery = np.asarray(task.gallery, np.float32)
    rng = np.random.default_rng([int(10 * zipf), ROUTES.index(route)])
    demand = demand_of(len(gallery), zipf, rng)
    log = task.draw(rng, rng.choice(len(gallery), size=REPLAYED, p=demand))
    items = np.repeat(np.arange(len(gallery)), FRESH)
    test = Test(task.draw(rng, items), items, demand[items] / FRESH)
    name = f"{task_name}_{route}_{int(10 * zipf)}"

    with closing(MilvusClient(uri)) as plain:
        for collection in (name, f"{name}_by_file"):
            plain_collection(plain, collection, gallery, "IP")  # type: ignore[no-untyped-call]
            plain.load_collection(collection)
        start_sampling(MilvusStore(plain), name, rate=RATE)

    began = time.monotonic()
    with application(route, uri) as client:
        replay(client, name, log, rng)
    replay_seconds = time.monotonic() - began

    with closing(MilvusClient(uri)) as plain:
        store = MilvusStore(plain)
        [status] = list_samplings(store, name)
        by_samples = sampled_bank(store, name)
        file = folder / f"{name}.npy"
        write_samples(store, name, file)
    by_file = QueryBank.load(file)

    raw = searched(uri, name, test)
    after_samples = corrected(uri, name, by_samples, test, raw)
    after_file = corrected(uri, f"{name}_by_file", by_file, test, raw)
    variety = status.to_dict()["variety"]
    samples, drawn = beside_drawn(log, by_samples.vectors, gallery, test)
    return {
        "task": task_name,
        "zipf": zipf,
        "route": route,
        "items": len(gallery),
        "dim": gallery.shape[1],
        "replayed": len(log),
        "tests": len(items),
        "rate": RATE,
        "samples": len(by_samples),
        "variety": variety,
        "raw": raw,
        "after_samples": after_samples,
        "after_file": after_file,
        "difference": after_samples["r1"] - after_file["r1"],
        "in_memory": {
            "samples": samples,
            "drawn": float(np.mean(drawn)),
            "standard_deviation": float(np.std(drawn, ddof=1)),
        },
        "replay_seconds": round(replay_seconds, 1),
    }


def spread_of_gains(task_name: str) -> dict[str, Any]:
    """Return the standard deviation of a query's change of R@1 by the default correction."""
    task = load(task_name)
    gallery = np.asarray(task.gallery, np.float32)
    under = hits(task)
    raw = under(torch.zeros(len(gallery)))
    bank = with_groups(QueryBank(draw(task.bank, LARGEST_BANK, task_name)), gallery)
    bias = torch.from_numpy(np.asarray(biases_of(WithDemand(), bank, gallery)))
    changes: npt.NDArray[np.float64] = under(bias) - raw
    return {
        "task": task_name,
        "queries": len(changes),
        "gain": 100 * float(changes.mean()),
        "spread": float(changes.std()),
    }


def summary(rows: list[dict[str, Any]], spreads: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["task"],
            f"{row['zipf']:g}",
            row["route"],
            f"{row['samples']:,}",
            f"{row['variety']['effective']:,.0f}",
            f"{row['raw']:.1f}",
            f"{row['after_samples']['r1']:.1f}",
            f"{row['after_file']['r1']:.1f}",
            f"{row['difference']:+.2f}",
            f"{row['in_memory']['samples']:.2f}",
            f"{row['in_memory']['drawn']:.2f} ± {row['in_memory']['standard_deviation']:.2f}",
        ]
        for row in rows
    ]
    head = [
        "task",
        "Zipf",
        "through",
        "samples",
        "varied as",
        "raw",
        "bank of samples",
        "bank of a file",
    ]
    of_banks = table([*head, "difference", "in memory: samples", "drawn"], lines)
    of_spreads = table(
        ["task", "queries", "gain", "standard deviation of a query's change"],
        [
            [each["task"], f"{each['queries']:,}", f"{each['gain']:+.1f}", f"{each['spread']:.2f}"]
            for each in spreads
        ],
    )
    mean = np.mean([each["spread"] for each in spreads])
    return f"{of_banks}\n\n{of_spreads}\n\nMean of the standard deviations: {mean:.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--zipf", nargs="*", type=float, default=list(ZIPF))
    parser.add_argument("--routes", nargs="*", default=list(ROUTES), choices=ROUTES)
    parser.add_argument("--workers", type=int, default=2, help="processes [default: 2]")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    one_thread()
    if reason := MilvusServer.unavailable():
        raise SystemExit(reason)

    rows = []
    context = multiprocessing.get_context("spawn")
    with (
        MilvusServer(channels=2) as server,
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.workers, context) as pool,
    ):
        waiting = [
            pool.submit(measured, server.uri, Path(folder), task_name, zipf, route)
            for task_name in options.tasks
            for zipf in options.zipf
            for route in options.routes
        ]
        for done in waiting:
            row = done.result()
            rows.append(row)
            print(json.dumps(row), flush=True)

    spreads = [spread_of_gains(name) for name in EMBEDDING_TASKS]
    markdown = summary(rows, spreads)
    print(markdown)
    largest = max(abs(row["difference"]) for row in rows)
    print(f"largest difference: {largest:.2f} points, at most {MOST_APART} wanted")
    if options.save:
        facts = {
            "largest_difference": largest,
            "spread_of_gains": float(np.mean([each["spread"] for each in spreads])),
            "rows": rows,
            "spreads": spreads,
            "environment": environment(started),
        }
        save("samples", facts, markdown)
    return 0 if largest <= MOST_APART else 1


if __name__ == "__main__":
    sys.exit(main())
