"""The kernels beside other libraries', in one run on the same data: time, error against float64, memory.

    python -m benchmarks.kernels [--threads N] [--rows N] [--save]
    python -m benchmarks.kernels --gpu [--save]

On the CPU: the mean of the 128 largest of 113,000 products for 5,000 random unit vectors of 512 dimensions,
by this package, nnn-retrieval, FAISS flat and torch in tiles; and on caption_document, its gallery enlarged
to 20,000 by mixing its items, what an approximate bank wins. Each is timed three times, in turns, and the
fastest counts. Exits with 1 where the exact kernel is not 1.6 times as fast as nnn-retrieval, or slower than
FAISS.
--gpu: `benchmarks.kernels_gpu`. --save: keep the results; without it they are only printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.environment import environment, save, table
from benchmarks.memory import measure
from milvus_hubness.kernels import ApproximateBank, kernel_on, topk_mean
from milvus_hubness.kernels.dense import topk_mean as dense_topk_mean
from milvus_hubness.kernels.faiss_module import import_faiss
from milvus_hubness.kernels.operands import Operands
from tests.real_data import load_task

ROWS, BANK, DIM, K = 5_000, 113_000, 512, 128
LEAST_AGAINST_NNN = 1.6
ROUNDS = 3
CHECKED_ROWS = 100
ENLARGED = 20_000


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
    chosen[name] = lambda: peer.compute_alignment_means(x, b, k, 128)[:, 0]
    return chosen


def compare(X: Any, B: Any, k: int) -> dict[str, dict[str, float]]:
    """{name: seconds, error against float64 of some rows, peak memory above the inputs}"""
    runs = contenders(X, B, k)
    exact = np.sort(X[:CHECKED_ROWS].astype(np.float64) @ B.T.astype(np.float64), axis=1)[:, -k:].mean(1)
    cells: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        told = measure(run)
        error = float(np.abs(run()[:CHECKED_ROWS] - exact).max())
        cells[name] = {"seconds": told["seconds"], "peak_mb": told["peak_above_inputs_mb"], "error": error}
    for _ in range(ROUNDS - 1):
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


def approximate(k: int) -> dict[str, Any]:
    """What the tuned index is, and how it does over all of the enlarged gallery."""
    task = load_task("caption_document")
    gallery = enlarged(task.gallery, ENLARGED)
    started = time.perf_counter()
    near = ApproximateBank(task.bank, gallery, k, kinds=("ivf", "hnsw"))
    built = time.perf_counter() - started
    seconds = {"exact": np.inf, "FAISS flat": np.inf, "approximate": np.inf}
    runs = contenders(gallery, task.bank, k)
    flat = next(run for name, run in runs.items() if name.startswith("FAISS"))
    for _ in range(ROUNDS):
        for name, run in (
            ("exact", lambda: topk_mean(gallery, task.bank, k, device="cpu")),
            ("FAISS flat", flat),
            ("approximate", lambda: near.values(gallery)),
        ):
            started = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    exact = topk_mean(gallery, task.bank, k, device="cpu")
    off = np.abs(near.values(gallery) - exact)
    return {
        "k": k,
        **near.tuned._asdict(),
        "seconds": seconds,
        "seconds_to_build_and_tune": built,
        "error_as_share_of_std": float(off.mean() / exact.std()),
        "times_as_fast_as_exact": seconds["exact"] / seconds["approximate"],
        "times_as_fast_as_faiss_flat": seconds["FAISS flat"] / seconds["approximate"],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        from benchmarks.kernels_gpu import main as on_gpu

        return on_gpu(keep=options.save)
    started = time.monotonic()
    torch.set_num_threads(options.threads)
    with threadpool_limits(options.threads):
        cells = compare(unit_vectors(options.rows, DIM, 0), unit_vectors(BANK, DIM, 1), K)
        near = [approximate(k) for k in (16, K)]
    fastest = next(iter(cells.values()))["seconds"]
    lines = [
        [name, f"{cell['seconds']:.2f}", f"{cell['seconds'] / fastest:.2f}", f"{cell['error']:.1e}",
         f"{cell['peak_mb']:.0f}"]
        for name, cell in cells.items()
    ]  # fmt: skip
    head = ["topk_mean", "seconds", "times ours", "largest error", "peak MB above inputs"]
    rows = [
        [str(each["k"]), f"{each['kind']}, {each['width']}{', moved' if each['moved'] else ''}",
         f"{each['recall']:.3f}", f"{100 * each['error_as_share_of_std']:.2f}%",
         f"{each['times_as_fast_as_exact']:.1f}", f"{each['times_as_fast_as_faiss_flat']:.1f}"]
        for each in near
    ]  # fmt: skip
    columns = ["k", "index", "recall", "mean error / std", "times as fast as exact", "as FAISS flat"]
    markdown = f"{table(head, lines)}\n\n{table(columns, rows)}"
    print(markdown)
    if options.save:
        sizes = {"rows": options.rows, "bank": BANK, "dim": DIM, "k": K}
        results = {"sizes": sizes, "topk_mean": cells, "approximate": near}
        save("kernels", {**results, "environment": environment(started)}, markdown)
    worst = {"nnn-retrieval": LEAST_AGAINST_NNN, "FAISS": 1.0}
    return int(
        any(
            cell["seconds"] < bound * fastest
            for name, cell in cells.items()
            for peer, bound in worst.items()
            if name.startswith(peer)
        )
    )


if __name__ == "__main__":
    sys.exit(main())
