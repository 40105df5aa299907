"""The exact kernels on one device beside plain torch and FAISS flat, and the product of the same shape alone.

    python -m benchmarks.kernels_gpu [--device cpu] [--rows N] [--bank N] [--dim N] [--k N …] [--save]

Means of the k largest products of random unit vectors: as float32 arrays and as bfloat16 tensors on the device, with a
mean cosine of 0 and of 0.8, and with the two columns of L2. The product alone is that of bfloat16 tiles, by the library
of the vendor: the screened kernel cannot be faster. Each is timed twice, in turns, and the faster counts. Without a
CUDA device it runs on the CPU, at small sizes. Exits with 1 where the screened kernel is off by more than 1e-5 of the
means' standard deviation and twice as far as the dense one. --save: keep the results; without it they are only printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.environment import environment, save, table
from milvus_hubness.kernels import logsumexp, topk_mean
from milvus_hubness.kernels.primitives import import_faiss, kernel_policy

SIZES = {"cuda": (65_536, 1_000_000), "cpu": (512, 20_000)}
"""Rows of X and of the bank."""
COSINE = 0.8
TILE = {"cuda": 1 << 28, "cpu": 1 << 23}
"""Scores in memory at once, of plain torch and of the product."""
CHECKED_ROWS = 64
MOST_ERROR = 1e-5
FAISS_K = 2048
"""The largest k of FAISS on a GPU."""
FIGURES = {
    "seconds": "seconds",
    "tflops": "TFLOP/s",
    "share_of_product": "share of the product alone",
    "peak_mb": "peak MB on the device",
    "error_over_std": "error / std",
}


def unit_vectors(n: int, dim: int, cosine: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim), np.float32)
    rows *= np.sqrt(1 - cosine) / np.linalg.norm(rows, axis=1, keepdims=True)
    rows += np.float32(np.sqrt(cosine / dim))
    return rows


def inputs(n: int, m: int, dim: int, device: str) -> Iterator[tuple[str, Any, Any]]:
    """Names, X and banks, one at a time: at the sizes for CUDA each takes gigabytes."""
    X, B = unit_vectors(n, dim, 0, 0), unit_vectors(m, dim, 0, 1)
    yield "float32", X, B
    yield "bfloat16", *tensors(X, B, device, torch.bfloat16)
    lengths = np.random.default_rng(2).uniform(0.9, 1.1, (m, 1)).astype(np.float32)
    ones = np.ones((n, 1), np.float32)
    yield "L2", np.hstack([X, ones, 0 * ones]), np.hstack([lengths * B, -0.5 * lengths**2, 0 * lengths])
    yield f"cosine {COSINE}", unit_vectors(n, dim, COSINE, 0), unit_vectors(m, dim, COSINE, 1)


def tensors(X: Any, B: Any, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, b = (torch.as_tensor(rows).to(device, dtype) for rows in (X, B))
    return x, b


def contenders(X: Any, B: Any, k: int, device: str) -> dict[str, Callable[[], Any]]:
    """What gives the (n,) means, by name, and the product alone."""

    def by_kernel(kernel: str) -> Callable[[], Any]:
        def run() -> Any:
            with kernel_policy(kernel=kernel, least_screened=(0, 0)):
                return topk_mean(X, B, k, device=device)

        return run

    def by_tiles(dtype: torch.dtype, reduce: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        def run() -> Any:
            x, b = tensors(X, B, device, dtype)
            return torch.cat([reduce(part @ b.T) for part in torch.split(x, max(1, TILE[device] // len(b)))])

        return run

    runs = {name: by_kernel(name) for name in ("screened", "dense")}
    runs["torch.topk over tiles"] = by_tiles(torch.float32, lambda scores: scores.topk(k, dim=1).values.mean(1))
    runs["product alone"] = by_tiles(torch.bfloat16, lambda scores: scores[:, 0])
    faiss = import_faiss()
    on_gpu = device == "cuda"
    if (on_gpu and not hasattr(faiss, "StandardGpuResources")) or (on_gpu and k > FAISS_K):
        return runs
    x, b = (rows.numpy() for rows in tensors(X, B, "cpu", torch.float32))
    index = faiss.IndexFlatIP(b.shape[1])
    if on_gpu:
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
    index.add(b)
    return runs | {"FAISS flat": lambda: index.search(x, k)[0].mean(1)}


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds, and the result."""
    started = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def compare(X: Any, B: Any, k: int, device: str) -> dict[str, dict[str, float | None]]:
    """{name: seconds, TFLOP/s, share of the product alone, peak memory on the device, error over the means' standard
    deviation}"""
    x, b = tensors(X[:CHECKED_ROWS], B, "cpu", torch.float32)
    exact = (x.double() @ b.double().T).topk(k, dim=1).values.mean(1)
    cells: dict[str, dict[str, float | None]] = {}
    runs = contenders(X, B, k, device)
    for name, run in runs.items():
        held = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        seconds, means = timed(run, device)
        means = torch.as_tensor(means)[:CHECKED_ROWS].double().cpu()
        error = None if name == "product alone" else float((means - exact).abs().max() / exact.std())
        peak = (torch.cuda.max_memory_allocated() - held) / 1e6 if device == "cuda" else None
        cells[name] = {"seconds": seconds, "error_over_std": error, "peak_mb": peak}
    for name, run in runs.items():
        cells[name]["seconds"] = seconds = min(cells[name]["seconds"] or 0, timed(run, device)[0])
        cells[name]["tflops"] = 2 * len(X) * len(B) * X.shape[1] / seconds / 1e12
    for cell in cells.values():
        cell["share_of_product"] = (cells["product alone"]["seconds"] or 0) / (cell["seconds"] or 1)
    return cells


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--bank", type=int)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--k", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: pass --device cpu")
    started, device = time.monotonic(), options.device
    n, m = options.rows or SIZES[device][0], options.bank or SIZES[device][1]
    ks = [k for k in options.k if k <= m]
    cells: dict[str, Any] = {}
    rows, failed = [], False
    for name, X, B in inputs(n, m, options.dim, device):
        cells[name] = {str(k): compare(X, B, k, device) for k in ks}
        errors = [[cell[kernel]["error_over_std"] for kernel in ("screened", "dense")] for cell in cells[name].values()]
        failed |= any(error > max(MOST_ERROR, 2 * by_dense) for error, by_dense in errors)
        seconds = min(timed(lambda X=X, B=B: logsumexp(X, B, 0.05, device=device), device)[0] for _ in range(2))
        cells[name]["logsumexp"] = {"dense": {"seconds": seconds, "tflops": 2 * n * m * X.shape[1] / seconds / 1e12}}
        for k, results in cells[name].items():
            for kernel, cell in results.items():
                figures = [f"{cell[key]:.2g}" if cell.get(key) is not None else "" for key in FIGURES]
                rows.append([name, k, kernel, *figures])
    markdown = table(["vectors", "k", "by", *FIGURES.values()], rows)
    print(markdown)
    if options.save:
        results = {"device": device, "rows": n, "bank": m, "dim": options.dim, "cells": cells}
        save("kernels_gpu", {**results, "environment": environment(started)}, markdown)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
