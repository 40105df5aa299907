"""CPU time of the start: imports, help and `status`, each in a process of its own.

    python -m benchmarks.startup [--rounds 9]

All of them take turns, in an order that each round draws anew, and the medians of user and system time are compared,
which other work on the machine changes less than it changes the clock. Bounds:

    from milvus_hubness import HubnessClient       1.15 times from pymilvus import MilvusClient
    milvus-hubness --help, and of each command     0.4 s
    milvus-hubness status                          1.3 times a process that imports MilvusClient, connects with it, and
                                                   describes the same collection

`status` is asked of a corrected collection in Milvus Lite, which this process serves, so that its work does not count.
Its ratio to the import alone is saved as well.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from milvus_lite.server_manager import server_manager_instance
from typer.main import get_command

from benchmarks.environment import environment, save, table
from milvus_hubness import NNN, MilvusStore, QueryBank, connect, enable, plan_enable
from milvus_hubness.cli import app

ROUNDS = 9
MAX_IMPORT, MAX_HELP, MAX_STATUS = 1.15, 0.4, 1.3
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
    client.create_collection("items", dimension=DIM, metric_type="COSINE", consistency_level="Strong")
    client.insert("items", [{"id": i, "vector": row} for i, row in enumerate(rng.standard_normal((ROWS, DIM)))])
    bank = QueryBank(rng.standard_normal((BANK, DIM), np.float32))
    store = MilvusStore(client)
    enable(store, plan_enable(store, "items", bank, estimator=NNN(8), where="side", force=True))
    return uri, "items"


def main(rounds: int = ROUNDS) -> None:
    started = time.monotonic()
    helps = {" ".join(("milvus-hubness", *words, "--help")): words for words in commands(get_command(app))}
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
        server_manager_instance.release_all()
    status = medians["milvus-hubness status"]
    ratios = {
        HUBNESS: medians[HUBNESS] / medians[PYMILVUS],
        "milvus-hubness status": status / medians["describe_collection"],
        "milvus-hubness status, to the import alone": status / medians[PYMILVUS],
    }
    slowest = max(helps, key=lambda title: medians[title])
    missed = [
        *([HUBNESS] if ratios[HUBNESS] > MAX_IMPORT else []),
        *(title for title in helps if medians[title] > MAX_HELP),
        *(["milvus-hubness status"] if ratios["milvus-hubness status"] > MAX_STATUS else []),
    ]
    shown = {title: f"{seconds:.3f}" for title, seconds in medians.items()}
    bounds = {HUBNESS: f"{MAX_IMPORT}", "milvus-hubness status": f"{MAX_STATUS}"} | dict.fromkeys(
        helps, f"{MAX_HELP} s"
    )
    rows = [
        [title, shown[title], f"{ratios[title]:.2f}" if title in ratios else "", bounds.get(title, "")]
        for title in medians
    ]
    markdown = table(["process", "CPU s", "ratio", "bound"], rows)
    print(markdown)
    results = {"cpu_seconds": medians, "ratios": ratios, "slowest_help": slowest, "missed": missed}
    save("startup", {"environment": environment(started), "rounds": rounds, **results}, markdown)
    if missed:
        raise SystemExit(f"above the bound: {', '.join(missed)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(parser.parse_args().rounds)
