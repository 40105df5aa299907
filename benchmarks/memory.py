"""Peak memory of the two kernels above their inputs: 200,000 × 100,000 random unit vectors, 512-d.

    python -m benchmarks.memory [rows of X]

Exits with 1 where a kernel takes 2 GB or more. Linux only: it reads /proc.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment, one_thread, save
from milvus_hubness.correction.kernels import logsumexp, topk_mean

ROWS, BANK, DIM = 200_000, 100_000, 512
LIMIT = 2e9


def unit_vectors(n: int, seed: int) -> Any:
    vectors = np.random.default_rng(seed).standard_normal((n, DIM), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def resident(field: str) -> int:
    """Bytes of VmRSS, now, or VmHWM, at most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def measure(kernel: Callable[[], Any]) -> dict[str, float]:
    """Peak resident bytes above those before, from the system's high-water mark and from samples."""
    largest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not stop.wait(0.02):
            largest = max(largest, resident("VmRSS"))

    try:
        Path("/proc/self/clear_refs").write_text("5")
        reset = True
    except OSError:
        reset = False
    before = resident("VmRSS")
    started = time.monotonic()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        values = kernel()
    finally:
        stop.set()
        watcher.join()
    if reset:
        largest = max(largest, resident("VmHWM"))
    return {
        "peak_above_inputs_mb": (largest - before) / 1e6,
        "seconds": time.monotonic() - started,
        "mean": float(np.mean(values)),
    }


def main() -> int:
    one_thread()
    started = time.monotonic()
    rows = int(sys.argv[1]) if sys.argv[1:] else ROWS
    X, B = unit_vectors(rows, 0), unit_vectors(BANK, 1)
    results: dict[str, Any] = {
        "rows": rows,
        "bank": BANK,
        "dim": DIM,
        "inputs_mb": (X.nbytes + B.nbytes) / 1e6,
    }
    kernels: dict[str, Callable[[], Any]] = {
        "logsumexp tau=0.05": lambda: logsumexp(X, B, 0.05, device="cpu"),
        "topk_mean k=128": lambda: topk_mean(X, B, 128, device="cpu"),
    }
    for name, kernel in kernels.items():
        results[name] = measure(kernel)
        print(name, results[name], flush=True)
    results["environment"] = environment(started)
    if rows == ROWS:
        save("memory", results)
    return int(any(1e6 * results[name]["peak_above_inputs_mb"] >= LIMIT for name in kernels))


if __name__ == "__main__":
    sys.exit(main())
