"""The kernels beside other libraries', in one run on the same data: time, error against float64, memory.

    python -m benchmarks.kernels [--part exact|approximate] [--threads N …] [--rows N] [--save]

exact: the mean of the 128 largest of 113,000 products for 5,000 random unit vectors of 512 dimensions, by this package,
nnn-retrieval, FAISS flat and torch in tiles, on each number of threads; each is timed twice, in turns, and the faster
counts. approximate: what an approximate bank wins on caption_document, its gallery enlarged to 20,000 by mixing its
items; each timed three times. Exits with 1 where the exact kernel is slower than FAISS on any number of threads, or on
the largest not 1.6 times as fast as nnn-retrieval, or the approximate one is off by more than 1% of the means' standard
deviation or not 5 times as fast as nnn-retrieval.
--save: keep the results; without it they are only printed.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.environment import environment, save, table
from benchmarks.memory import measure
from milvus_hubness.kernels import topk_mean
from milvus_hubness.kernels.approximate import ApproximateBank
from milvus_hubness.kernels.dense import topk_mean as dense_topk_mean
from milvus_hubness.kernels.operands import Operands
from milvus_hubness.kernels.primitives import import_faiss, kernel_on
from tests.real_data import load_task

ROWS, BANK, DIM, K = 5_000, 113_000, 512, 128
LEAST_AGAINST_NNN, APPROXIMATE_AGAINST_NNN = 1.6, 5.0
PEERS = ("exact", "FAISS", "nnn-retrieval")
ROUNDS = 3
CHECKED_ROWS = 100
ENLARGED = 20_000
MOST_ERROR = 0.01
PARTS = ("exact", "approximate")


def unit_vectors(n: int, dim: int, seed: int) -> Any:
    vectors = np.random.default_rng(seed).standard_normal((n, dim), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def contenders(X: Any, B: Any, k: int) -> dict[str, Callable[[], Any]]:
    """What gives the (n,) means, by name."""
    faiss = import_faiss()
    flat = faiss.IndexFlatIP(B.shape[1])
    flat.add(B)
    x, b = torch.from_numpy(X), torch.from_numpy(B)
    exact = f"milvus_hubness, {kernel_on(torch.device('cpu'))}"
    chosen: dict[str, Callable[[], Any]] = {
        exact: lambda: topk_mean(X, B, k, device="cpu"),
        "torch in tiles": lambda: dense_topk_mean(Operands(X, b), k)[0].numpy(),
        f"FAISS {faiss.__version__} flat": lambda: flat.search(X, k)[0].mean(1),
    }
    try:
        from nnn import NNNRetriever
    except ImportError:
        print("nnn-retrieval is not installed: pip install --group bench", file=sys.stderr)
        return chosen
    peer = NNNRetriever(B.shape[1])
    name = f"nnn-retrieval {version('nnn-retrieval')}"

    def without_its_bar() -> Any:
        with redirect_stderr(io.StringIO()):
            return peer.compute_alignment_means(x, b, k, 128)[:, 0]

    chosen[name] = without_its_bar
    return chosen


def compare(X: Any, B: Any, k: int, threads: int) -> dict[str, dict[str, float]]:
    """{name: seconds, error against float64 of some rows, peak memory above the inputs}"""
    exact = np.sort(X[:CHECKED_ROWS].astype(np.float64) @ B.T.astype(np.float64), axis=1)[:, -k:].mean(1)
    cells: dict[str, dict[str, float]] = {}
    torch.set_num_threads(threads)
    with threadpool_limits(threads):
        runs = contenders(X, B, k)
        for name, run in runs.items():
            result = measure(run)
            cells[name] = {"seconds": result["seconds"], "peak_mb": result["peak_above_inputs_mb"]}
            cells[name]["error"] = float(np.abs(run()[:CHECKED_ROWS] - exact).max())
            print(f"{threads} threads, {name}: {cells[name]}", flush=True)
        for _ in range(ROUNDS - 2):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                cells[name]["seconds"] = min(cells[name]["seconds"], time.perf_counter() - started)
    return cells


def enlarged(gallery: Any, n: int) -> Any:
    """n unit vectors, each between two of the gallery's."""
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, len(gallery), (2, n))
    share = rng.random((n, 1), np.float32)
    mixed = share * gallery[one] + (1 - share) * gallery[other]
    return mixed / np.maximum(np.linalg.norm(mixed, axis=1, keepdims=True), 1e-9)


def approximate(k: int, threads: int) -> dict[str, Any]:
    """What the tuned index is, and how it does over all of the enlarged gallery."""
    task = load_task("caption_document")
    gallery = enlarged(task.gallery, ENLARGED)
    torch.set_num_threads(threads)
    with threadpool_limits(threads):
        started = time.perf_counter()
        near = ApproximateBank(task.bank, gallery, k)
        built = time.perf_counter() - started
        runs = {name.split()[0]: run for name, run in contenders(gallery, task.bank, k).items()}
        runs = {"exact": runs["milvus_hubness,"], "approximate": lambda: near.values(gallery)} | {
            name: runs[name] for name in ("FAISS", "nnn-retrieval") if name in runs
        }
        seconds = dict.fromkeys(runs, np.inf)
        for _ in range(ROUNDS):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                seconds[name] = min(seconds[name], time.perf_counter() - started)
        exact = topk_mean(gallery, task.bank, k, device="cpu")
        off = np.abs(near.values(gallery) - exact)
    cell = {
        "k": k,
        "threads": threads,
        **near.tuned._asdict(),
        "seconds": seconds,
        "seconds_to_build_and_tune": built,
        "error_as_share_of_std": float(off.mean() / exact.std()),
        "times_as_fast": {name: each / seconds["approximate"] for name, each in seconds.items()},
    }
    print(cell, flush=True)
    return cell


def exact_part(rows: int, threads: list[int], keep: bool) -> bool:
    """Whether the bounds hold."""
    started = time.monotonic()
    X, B = unit_vectors(rows, DIM, 0), unit_vectors(BANK, DIM, 1)
    found = {number: compare(X, B, K, number) for number in threads}
    lines, held = [], True
    for number, cells in found.items():
        ours = next(iter(cells.values()))["seconds"]
        for name, cell in cells.items():
            lines.append([str(number), name, f"{cell['seconds']:.2f}", f"{cell['seconds'] / ours:.2f}",
                          f"{cell['error']:.1e}", f"{cell['peak_mb']:.0f}"])  # fmt: skip
            held &= not name.startswith("FAISS") or cell["seconds"] >= ours
            if name.startswith("nnn") and number == max(threads):
                held &= cell["seconds"] >= LEAST_AGAINST_NNN * ours
    head = ["threads", "topk_mean", "seconds", "times ours", "largest error", "peak MB above inputs"]
    markdown = table(head, lines)
    print(markdown)
    if keep:
        sizes = {"rows": rows, "bank": BANK, "dim": DIM, "k": K}
        results = {"sizes": sizes, "by_threads": found, "environment": environment(started)}
        save("kernels_exact", results, markdown)
    return held


def approximate_part(threads: list[int], keep: bool) -> bool:
    """Whether the error is as small as was asked for, and nnn-retrieval takes so many times as long."""
    started = time.monotonic()
    near = [approximate(k, number) for number in threads for k in (16, K)]
    rows = [
        [str(each["threads"]), str(each["k"]),
         f"{each['kind']}, {each['width']}",
         f"{each['recall']:.3f}", f"{100 * each['error_as_share_of_std']:.2f}%",
         *(f"{each['times_as_fast'].get(peer, np.nan):.1f}" for peer in PEERS),
         f"{each['seconds_to_build_and_tune']:.0f}"]
        for each in near
    ]  # fmt: skip
    columns = ["threads", "k", "index", "recall", "mean error / std", "times as fast as exact",
               "as FAISS flat", "as nnn-retrieval", "seconds to build and tune"]  # fmt: skip
    markdown = table(columns, rows)
    print(markdown)
    if keep:
        save("kernels_approximate", {"cells": near, "environment": environment(started)}, markdown)
    return all(
        each["error_as_share_of_std"] <= MOST_ERROR
        and each["times_as_fast"].get("nnn-retrieval", np.inf) >= APPROXIMATE_AGAINST_NNN
        for each in near
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    threads = sorted(set(options.threads))
    held = True
    if options.part != "approximate":
        held &= exact_part(options.rows, threads, options.save)
    if options.part != "exact":
        held &= approximate_part(threads[-1:], options.save)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
