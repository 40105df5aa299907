"""Biases of a gallery by one Ray worker and by two, each on one thread of its own core, on the same data.

    python -m benchmarks.ray_scaling [--rows N] [--save]

NNN(128) over a bank of 40,000 and a Sinkhorn fit of 5 iterations over one of 4,000, random unit vectors of
256 dimensions, in shards of a sixth of the gallery each; a first round, which starts the workers, is not
timed, and the fastest of two others counts. Exits with 1 where two workers are not 1.6 times as fast as one,
or where the biases are off those of one machine by 1e-5.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.kernels import unit_vectors
from milvus_hubness import NNN, QueryBank, Sinkhorn
from milvus_hubness.extras.ray.ray_gallery import RayGallery

ROWS, SINKHORN_ROWS, DIM, SHARDS = 24_000, 12_000, 256, 6
BANK, SINKHORN_BANK = 40_000, 4_000
ITERATIONS = 5
LEAST, MOST_OFF = 1.6, 1e-5


def fastest(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the faster of two runs after a first one, and what it gives."""
    run()
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        found = run()
        seconds.append(time.perf_counter() - started)
    return min(seconds), found


def on_workers(count: int, rows: int) -> dict[str, tuple[float, Any]]:
    """{what: seconds and biases} on a cluster of so many workers."""
    import ray

    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=count,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    try:
        items = unit_vectors(rows, DIM, 0)
        near = RayGallery(np.array_split(items, SHARDS))
        fitted = NNN(128).fit(QueryBank(unit_vectors(BANK, DIM, 1)))
        few = RayGallery(np.array_split(items[:SINKHORN_ROWS], SHARDS))
        bank = QueryBank(unit_vectors(SINKHORN_BANK, DIM, 2))
        estimator = Sinkhorn(0.05, iterations=ITERATIONS, tol=0)
        return {
            "NNN(128)": fastest(lambda: np.concatenate(list(near.biases(fitted)))),
            "Sinkhorn": fastest(lambda: few.fit(estimator, bank).potentials[:, 0]),
        }
    finally:
        ray.shutdown()


def alone(rows: int) -> dict[str, Any]:
    """The same in this process."""
    items = unit_vectors(rows, DIM, 0)
    bank = QueryBank(unit_vectors(SINKHORN_BANK, DIM, 2))
    estimator = Sinkhorn(0.05, iterations=ITERATIONS, tol=0)
    return {
        "NNN(128)": NNN(128).fit(QueryBank(unit_vectors(BANK, DIM, 1))).bias(items),
        "Sinkhorn": estimator.fit(bank, gallery=items[:SINKHORN_ROWS]).potentials[:, 0],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    one_thread()
    started = time.monotonic()
    true = alone(options.rows)
    by_count = {count: on_workers(count, options.rows) for count in (1, 2)}
    cells, lines = {}, []
    for name in true:
        seconds = {count: found[name][0] for count, found in by_count.items()}
        off = max(float(np.abs(found[name][1] - true[name]).max()) for found in by_count.values())
        ratio = seconds[1] / seconds[2]
        cells[name] = {"seconds": seconds, "ratio": ratio, "off": off}
        lines.append([name, f"{seconds[1]:.1f}", f"{seconds[2]:.1f}", f"{ratio:.2f}", f"{off:.0e}"])
    head = [
        "work",
        "one worker, seconds",
        "two workers, seconds",
        "ratio",
        "largest difference from one machine",
    ]
    markdown = table(head, lines)
    print(markdown)
    if options.save:
        sizes = {"rows": options.rows, "sinkhorn_rows": SINKHORN_ROWS, "dim": DIM, "shards": SHARDS}
        results = {"sizes": sizes, "work": cells, "environment": environment(started)}
        save("ray_scaling", results, markdown)
    return int(any(cell["ratio"] < LEAST or cell["off"] > MOST_OFF for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
