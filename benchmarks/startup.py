"""CPU time of the start, imports, help and `status`, each in a process of its own; and inserts by NumPy and by torch.

    python -m benchmarks.startup [--rounds 9]

All of them take turns, in an order that each round draws anew, and the medians of user and system time are compared,
which other work on the machine changes less than it changes the clock. Bounds:

    from milvus_hubness import HubnessClient       1.15 times from pymilvus import MilvusClient
    milvus-hubness --help, and of each command     0.4 s
    milvus-hubness status                          1.3 times from pymilvus import MilvusClient
    an insert with NumPy's kernels                 1.1 times with torch's

`status` is asked of a corrected collection in Milvus Lite, which this process serves, so that its work does not count.
Its ratio to a process that imports MilvusClient, connects, and describes the collection is saved as well. Inserts of
1, 100 and 1,000 rows of 512 dimensions with a bank of 5,000 take turns; their wall time, that of Milvus Lite
included, and that of the biases alone are compared by their medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401, so that its kernels can take their turns
from milvus_lite.server_manager import server_manager_instance
from typer.main import get_command

from benchmarks.environment import environment, save, table
from milvus_hubness import (
    NNN,
    Beside,
    CorrectionConfig,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    enable,
    plan_correction,
)
from milvus_hubness.cli import app
from milvus_hubness.correction.kernels import topk_mean
from milvus_hubness.correction.kernels.policy import kernel_policy

ROUNDS = 9
MAX_IMPORT, MAX_HELP, MAX_STATUS, MAX_INSERT = 1.15, 0.4, 1.3, 1.1
INSERTED, WIDE, LARGE_BANK, K = (1, 100, 1_000), 512, 5_000, 16
BELOW = {"numpy": 1 << 62, "torch": 0}
"""The number of products up to which NumPy computes, for either library to compute all of them."""
ROWS, DIM, BANK = 1_000, 64, 64
PYMILVUS, HUBNESS = "from pymilvus import MilvusClient", "from milvus_hubness import HubnessClient"
COMMAND = ("-m", "milvus_hubness")


def cpu_seconds(arguments: tuple[str, ...]) -> float:
    """User and system time of a Python process with these arguments, which must succeed."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def in_turns(processes: dict[str, tuple[str, ...]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each process, after one round as warm-up."""
    order, taken = random.Random(0), {name: [] for name in processes}
    for turn in range(rounds + 1):
        for name in order.sample(sorted(processes), len(processes)):
            seconds = cpu_seconds(processes[name])
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(each) for name, each in taken.items()}


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a group, and of each command and group under it."""
    yield words
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, word))


def corrected_collection(folder: str) -> tuple[str, str]:
    """The address of a Milvus Lite server in this process, and the name of a corrected collection there."""
    uri = server_manager_instance.start_and_get_uri(str(Path(folder, "startup.db")))
    client, rng = connect(uri), np.random.default_rng(0)
    client.create_collection(
        "items", dimension=DIM, metric_type="COSINE", consistency_level="Strong"
    )
    client.insert(
        "items",
        [{"id": i, "vector": row} for i, row in enumerate(rng.standard_normal((ROWS, DIM)))],
    )
    bank = QueryBank(rng.standard_normal((BANK, DIM), np.float32))
    store = MilvusStore(client)
    enable(
        store,
        plan_correction(store, "items", Recipe(bank, estimator=NNN(8), verdict="warn"), Beside()),
    )
    return uri, "items"


def both(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median seconds of `work` with the kernels of each library, in turns, after a round as warm-up."""
    taken: dict[str, list[float]] = {library: [] for library in BELOW}
    for turn in range(rounds + 1):
        for library, below in sorted(BELOW.items(), reverse=bool(turn % 2)):
            with kernel_policy(numpy_below=below):
                began = time.perf_counter()
                work()
                if turn:
                    taken[library].append(time.perf_counter() - began)
    return {library: statistics.median(each) for library, each in taken.items()}


def inserts(uri: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of inserts, and of their biases alone, by the number of rows."""
    client, rng = HubnessClient(uri), np.random.default_rng(0)
    bank = rng.standard_normal((LARGE_BANK, WIDE), np.float32)
    config = CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(K)))
    client.create_collection("new_rows", WIDE, metric_type="IP", auto_id=True, hubness=config)
    found = {}
    for count in INSERTED:
        vectors = rng.standard_normal((count, WIDE), np.float32)
        rows = [{"vector": vector} for vector in vectors]
        found[str(count)] = {
            "insert": both(
                lambda rows=rows: client.insert("new_rows", [dict(row) for row in rows]), rounds
            ),
            "biases": both(lambda vectors=vectors: topk_mean(vectors, bank, K), rounds),
        }
        for seconds in found[str(count)].values():
            seconds["ratio"] = seconds["numpy"] / seconds["torch"]
    client.close()
    return found


def main(rounds: int = ROUNDS) -> None:
    started = time.monotonic()
    helps = {
        " ".join(("milvus-hubness", *words, "--help")): words
        for words in commands(get_command(app))
    }
    with tempfile.TemporaryDirectory() as folder:
        uri, name = corrected_collection(folder)
        described = f"{PYMILVUS}\nMilvusClient({uri!r}).describe_collection({name!r})"
        medians = in_turns(
            {
                PYMILVUS: ("-c", PYMILVUS),
                HUBNESS: ("-c", HUBNESS),
                "describe_collection": ("-c", described),
                "milvus-hubness status": (*COMMAND, "status", name, "--uri", uri),
                **{title: (*COMMAND, *words, "--help") for title, words in helps.items()},
            },
            rounds,
        )
        new_rows = inserts(uri, 2 * rounds)
        server_manager_instance.release_all()
    status = medians["milvus-hubness status"]
    ratios = {
        HUBNESS: medians[HUBNESS] / medians[PYMILVUS],
        "milvus-hubness status": status / medians[PYMILVUS],
        "milvus-hubness status, to describe_collection": status / medians["describe_collection"],
    }
    slowest = max(helps, key=lambda title: medians[title])
    missed = [
        *([HUBNESS] if ratios[HUBNESS] > MAX_IMPORT else []),
        *(title for title in helps if medians[title] > MAX_HELP),
        *(["milvus-hubness status"] if ratios["milvus-hubness status"] > MAX_STATUS else []),
        *(
            f"{count} rows"
            for count, each in new_rows.items()
            if each["insert"]["ratio"] > MAX_INSERT
        ),
    ]
    shown = {title: f"{seconds:.3f}" for title, seconds in medians.items()}
    bounds = {HUBNESS: f"{MAX_IMPORT}", "milvus-hubness status": f"{MAX_STATUS}"} | dict.fromkeys(
        helps, f"{MAX_HELP} s"
    )
    rows = [
        [
            title,
            shown[title],
            f"{ratios[title]:.2f}" if title in ratios else "",
            bounds.get(title, ""),
        ]
        for title in medians
    ]
    lines = [
        [
            f"{count} rows: {what}",
            f"{each['numpy'] * 1e3:.1f}",
            f"{each['torch'] * 1e3:.1f}",
            f"{each['ratio']:.2f}",
        ]
        for count, of in new_rows.items()
        for what, each in of.items()
    ]
    markdown = table(["process", "CPU s", "ratio", "bound"], rows) + "\n\n"
    markdown += table(["512-d, bank of 5,000", "NumPy, ms", "torch, ms", "ratio"], lines)
    print(markdown)
    results = {
        "cpu_seconds": medians,
        "ratios": ratios,
        "slowest_help": slowest,
        "new_rows": new_rows,
        "missed": missed,
    }
    save("startup", {"environment": environment(started), "rounds": rounds, **results}, markdown)
    if missed:
        raise SystemExit(f"above the bound: {', '.join(missed)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(parser.parse_args().rounds)
