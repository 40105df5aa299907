"""What `check` takes: CPU time and clock, beside one exact search of the same queries.

    python -m benchmarks.check_time [--save]

    milvus-hubness check --items items.npy --queries past.npy [--pairs pairs.npz] [--page page.html]

On ITEMS made vectors of DIM dimensions with hubs, a bank of QUERIES, and PAIRS labelled queries. The peer is one exact
search of the bank by FAISS (IndexFlatIP, the ten best), in this process. The last command has threads of OpenMP that
keep their cores busy while they wait, as they do by default.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from benchmarks.environment import environment, save, table

ITEMS, QUERIES, PAIRS, DIM, TOPICS = 30_000, 3_000, 400, 512, 200
RUNS = 3
COMMANDS: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "check": ((), {}),
    "check --pairs": (("--pairs", "pairs.npz"), {}),
    "check --pairs --page": (("--pairs", "pairs.npz", "--page", "page.html"), {}),
    "check --pairs, OMP_WAIT_POLICY=active": (
        ("--pairs", "pairs.npz"),
        {"OMP_WAIT_POLICY": "active"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/check_time.json and .md")
    chosen = parser.parse_args()

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-time-") as folder:
        results = measured(Path(folder))
    results["environment"] = environment(started)

    head = ["command", "CPU seconds", "seconds", "CPU of exact searches"]
    peer = results["parts"]["one exact search"]["cpu_seconds"]
    rows = [
        [
            part,
            f"{of['cpu_seconds']:.1f}",
            f"{of['seconds']:.1f}",
            f"{of['cpu_seconds'] / peer:.0f}",
        ]
        for part, of in results["parts"].items()
    ]
    markdown = table(head, rows)
    print(markdown)
    if chosen.save:
        save("check_time", results, markdown)


def measured(folder: Path) -> dict[str, Any]:
    """The medians of each part, whose runs take turns."""
    items, bank = files(folder)
    runs: dict[str, list[tuple[float, float]]] = {"one exact search": []}
    runs |= {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        runs["one exact search"].append(searched(items, bank))
        for name, (options, variables) in COMMANDS.items():
            runs[name].append(checked(folder, options, variables))
    parts = {}
    for name, figures in runs.items():
        cpu, seconds = np.median(figures, axis=0).round(2).tolist()
        parts[name] = {"cpu_seconds": cpu, "seconds": seconds, "runs": len(figures)}
    sizes = {"items": ITEMS, "queries": QUERIES, "pairs": PAIRS, "dimensions": DIM}
    return {"parts": parts, "sizes": sizes}


def files(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write made vectors with hubs, and return items and bank."""
    rng = np.random.default_rng(0)
    drift, topics = rng.normal(size=DIM), rng.normal(size=(TOPICS, DIM))
    items = rng.normal(size=(ITEMS, DIM)) + topics[rng.integers(TOPICS, size=ITEMS)]
    items += np.outer(rng.gamma(1, 0.5, ITEMS), drift)
    right = rng.permutation(ITEMS)[: QUERIES + PAIRS]
    queries = items[right] + 1.2 * rng.normal(size=(len(right), DIM)) + 0.8 * drift
    items, queries = (np.float32(rows / np.sqrt(DIM)) for rows in (items, queries))
    np.save(folder / "items.npy", items)
    np.save(folder / "past.npy", queries[:QUERIES])
    np.savez(folder / "pairs.npz", query=queries[QUERIES:], key=right[QUERIES:])
    return items, queries[:QUERIES]


def searched(items: np.ndarray, bank: np.ndarray) -> tuple[float, float]:
    """The CPU seconds and the seconds of an exact search."""
    index = faiss.IndexFlatIP(DIM)
    index.add(items)
    cpu, clock = time.process_time(), time.perf_counter()
    index.search(bank, 10)
    return time.process_time() - cpu, time.perf_counter() - clock


def checked(
    folder: Path, options: tuple[str, ...], variables: Mapping[str, str]
) -> tuple[float, float]:
    """The CPU seconds and the seconds of a command in a process of its own."""
    command = [str(Path(sys.executable).with_name("milvus-hubness")), "check", "--json"]
    command += ["--items", "items.npy", "--queries", "past.npy", *options]
    clock, cpu = time.perf_counter(), cpu_seconds()
    environ = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    # `check` ends with 3 where the verdict is to leave the search alone.
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return cpu_seconds() - cpu, time.perf_counter() - clock


def cpu_seconds() -> float:
    """The CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
