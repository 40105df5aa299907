"""What the hub guard costs an insert: pairs of writes of the same rows, with the guard and without.

    python -m benchmarks.guard_costs [--rounds 80]

Rows are written to two migrated copies of one collection, which differ in the guard alone, in an order
drawn by chance, on Milvus Lite and on a 2.3.5 server of its own; no row looks like a hub. Each figure is
the median over the pairs of the ratio within a pair, with its interval of 95% by the sign test:

CPU      CPU time of the client's process. On Milvus Lite the database runs in that process, so that this
         is all the work of an insert; other processes hardly move it.
time     time of the insert, which a busy machine stretches

and share: what the guard adds to the CPU time of the client's process, as a share of the faster quarter
of the inserts without it. numbers: the CPU time of the biases of the rows alone.

`benchmarks.guard` saves them. Exits with 1 where the guard adds more than 2% to the work of an insert:
to the CPU time on Milvus Lite, or to the share on a server.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import MilvusClient

from benchmarks.client_overhead import median_difference
from benchmarks.environment import one_thread
from milvus_hubness import (
    Blend,
    Copy,
    HubnessClient,
    MigrationOptions,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    migrate,
    plan_correction,
)
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import Correction
from tests.support.real_data import load_task
from tests.support.servers import MilvusServer, lite_uri

TASK = "docstring_code"
ROWS, BATCH, BANK = 1_000, 500, 4_000
WARM_UP = 4
WAYS = ("off", "warn")
"""What becomes of rows like hubs: all rows are written either way."""
MOST = 0.02


class Pairs:
    """Measurements of the same rounds, without the guard and with it."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {way: [] for way in WAYS}

    def add(self, way: str, value: float) -> None:
        self._values[way].append(value)

    @property
    def without(self) -> list[float]:
        return self._values["off"]

    def facts(self, unit: float = 1e3) -> dict[str, Any]:
        """The median without the guard and of the ratios, with its interval."""
        ratios = [guarded / bare for bare, guarded in zip(*self._values.values(), strict=True)]
        ratio, interval = median_difference(ratios, [0.0] * len(ratios))
        return {
            "without, ms": round(unit * statistics.median(self.without), 3),
            "ratio": round(ratio, 4),
            "interval": [round(end, 4) for end in interval],
            "pairs": len(ratios),
        }

    def added(self) -> tuple[float, tuple[float, float]]:
        """The median of the differences, and its interval."""
        return median_difference(self._values["warn"], self._values["off"])


def work() -> tuple[Floats, Floats]:
    """The gallery and the bank."""
    task = load_task(TASK)
    rng = np.random.default_rng(0)
    return task.gallery, task.bank[rng.permutation(len(task.bank))[:BANK]]


def of_numbers(rounds: int) -> dict[str, Any]:
    """The CPU time of the biases of a batch with the guard and without."""
    gallery, bank = work()
    layout = Layout(gallery.shape[1], "COSINE")
    plain = Correction.fit(layout, Blend(), QueryBank(bank), gallery=gallery[:ROWS])
    guarded = plain.measured(gallery[:ROWS])
    calls: dict[str, Callable[[Floats], Any]] = {
        "off": lambda rows: plain.of_written(rows, are_new=True),
        "warn": lambda rows: guarded.of_written(rows, are_new=True, with_measures=True),
    }
    order = random.Random(0)
    pairs = Pairs()
    for turn in range(rounds + WARM_UP):
        rows = gallery[ROWS + np.arange(turn * BATCH, (turn + 1) * BATCH) % (len(gallery) - ROWS)]
        for way in order.sample(WAYS, 2):
            began = time.process_time()
            calls[way](rows)
            if turn >= WARM_UP:
                pairs.add(way, time.process_time() - began)
    return pairs.facts()


def of_inserts(uri: str, rounds: int) -> dict[str, Any]:
    """The figures of inserts of BATCH rows through HubnessClient."""
    gallery, bank = work()
    client = connect(uri, create=True)
    _fill(client, gallery[:ROWS])
    store = MilvusStore(client)
    for way in WAYS:
        plan = plan_correction(
            store,
            "shop",
            Recipe(QueryBank(bank), estimator=Blend(), verdict="skip", on_hub=way),
            Copy(target=way),
            bank_collection=f"{way}_bank",
        )
        migrate(store, plan, MigrationOptions(no_writers=True))

    cpu = Pairs()
    wall = Pairs()
    order = random.Random(1)
    with closing(HubnessClient(uri)) as ours:
        for turn in range(rounds + WARM_UP):
            first = ROWS + turn * BATCH
            some = gallery[
                ROWS + np.arange(turn * BATCH, (turn + 1) * BATCH) % (len(gallery) - ROWS)
            ]
            rows = [{"id": first + i, "vector": row} for i, row in enumerate(some)]
            for way in order.sample(WAYS, 2):
                began, cpu_began = time.perf_counter(), time.process_time()
                ours.insert(way, rows)
                if turn >= WARM_UP:
                    cpu.add(way, time.process_time() - cpu_began)
                    wall.add(way, time.perf_counter() - began)
        version = client.get_server_version()

    added, interval = cpu.added()
    fast = float(np.quantile(wall.without, 0.25))
    return {
        "server": version,
        "rows": BATCH,
        "CPU": cpu.facts(),
        "time": wall.facts(),
        "share": round(added / fast, 4),
        "share, interval": [round(end / fast, 4) for end in interval],
    }


def _fill(client: MilvusClient, items: Floats) -> None:
    client.create_collection("shop", dimension=items.shape[1], metric_type="COSINE")
    client.insert("shop", [{"id": i, "vector": row} for i, row in enumerate(items)])


def costs(rounds: int) -> dict[str, Any]:
    """All figures, with the load of the machine meanwhile."""
    before = Path("/proc/loadavg").read_text().split()[:3]
    results: dict[str, Any] = {"numbers": of_numbers(2 * rounds)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        results["Milvus Lite"] = of_inserts(lite_uri(Path(folder)), rounds)
        if reason := MilvusServer.unavailable():
            results["server"] = {"skipped": reason}
        else:
            server = stack.enter_context(MilvusServer())
            results["server"] = of_inserts(server.uri, rounds)
    after = Path("/proc/loadavg").read_text().split()[:3]
    return {**results, "load before": before, "load after": after}


def is_cheap(results: dict[str, Any]) -> bool:
    """Whether the guard adds at most 2% to an insert."""
    on_server = results["server"].get("share", 0.0)
    return bool(results["Milvus Lite"]["CPU"]["ratio"] <= 1 + MOST and on_server <= MOST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    one_thread()
    results = costs(options.rounds)
    for name, figures in results.items():
        print(name, figures, flush=True)
    return int(not is_cheap(results))


if __name__ == "__main__":
    sys.exit(main())
