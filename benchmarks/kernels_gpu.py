"""The exact kernels on one device compared with other libraries', and the product of the same shape alone.

    python -m benchmarks.kernels_gpu [--device cpu] [--rows N] [--bank N] [--dim N] [--k N …] [--save]

Means of the k largest products, and log-sum-exps. The vectors are random and of unit length: float32 arrays, float32
and bfloat16 tensors on the device, with the two columns of L2, and with a mean cosine of 0.8; and those of
docstring_code (384-d), repeated with noise. The float32 arrays and docstring_code go to other libraries too, each time
from the memory of the host: torch.topk over tiles, FAISS flat and nnn-retrieval, all on the device. The product alone
is that of bfloat16 tiles on the device, by the library of the vendor: all that multiplies all pairs takes longer. Each
is timed after a run on a few rows, once, or three times if that takes less than a second; the fastest counts. At
last ten iterations of Sinkhorn are compared with the products of their passes alone.

Without a CUDA device it runs on the CPU, at small sizes. After five minutes the other libraries are left out. Exits
with 1 where the screened kernel is off by more than 1e-5 of the means' standard deviation and twice as far as the dense
one. --save: keep the results; without it they are only printed.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import torch

from benchmarks.data import data_folder, missing
from benchmarks.environment import environment, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Sinkhorn
from milvus_hubness.correction.kernels import logsumexp, topk_mean
from milvus_hubness.correction.kernels.approximate import GPU_LIMIT
from milvus_hubness.correction.kernels.primitives import import_faiss, kernel_policy
from tests.support.real_data import load_task

SIZES = {"cuda": (65_536, 1_000_000), "cpu": (512, 20_000)}
"""Rows of X and of the bank."""
SINKHORN = {"cuda": (100_000, 1_000_000), "cpu": (100, 1000)}
"""Queries of the bank, and items."""
ITERATIONS = 10
COSINE, NOISE, TAU = 0.8, 0.3, 0.05
"""The norm of the noise that is added to vectors of norm 1."""
TILE = {"cuda": 1 << 28, "cpu": 1 << 23}
"""Scores in memory at once, of the product and of torch.topk."""
CHECKED_ROWS, WARM_ROWS = 64, 512
MOST_ERROR = 1e-5
SECONDS = 300.0
"""After these the other libraries are left out."""
REAL, ARRAYS, ON_DEVICE = "docstring_code", "float32", "float32 on the device"
PRODUCT, SOFT, NNN, SHARE = "product alone", "log-sum-exp", "nnn-retrieval", "share_of_product"
TARGETS = [(ON_DEVICE, k, "screened", SHARE, 0.5) for k in ("16", "128", "512")]
TARGETS += [(ON_DEVICE, SOFT, "dense", SHARE, 0.5)]
TARGETS += [(ARRAYS, k, "screened", f"times_as_fast_as_{NNN}", 10.0) for k in ("16", "128", "512")]
"""Vectors, k, kernel, figure, and its least value, on an H200."""
MOST_SINKHORN = 1.5
"""Times as long as the products alone."""
FIGURES = {
    "seconds": "seconds",
    "tflops": "TFLOP/s",
    SHARE: "share of the product alone",
    "times_as_slow_as_screened": "times as slow as screened",
    "peak_mb": "peak MB of torch on the device",
    "error_over_std": "error / std",
}
Cell = dict[str, float]


def unit_vectors(n: int, dim: int, cosine: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim), np.float32)
    rows *= np.sqrt(1 - cosine) / np.linalg.norm(rows, axis=1, keepdims=True)
    rows += np.float32(np.sqrt(cosine / dim))
    return rows


def repeated(rows: Any, n: int, seed: int) -> Any:
    """n rows of unit length: these, in turn, each with noise of its own."""
    noisy = NOISE * unit_vectors(n, rows.shape[1], 0, seed)
    noisy += rows[np.arange(n) % len(rows)]
    noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
    return noisy


def inputs(n: int, m: int, dim: int, device: str) -> Iterator[tuple[str, Any, Any]]:
    """Names, X and banks, one at a time: at the sizes for CUDA each takes gigabytes."""
    X, B = unit_vectors(n, dim, 0, 0), unit_vectors(m, dim, 0, 1)
    yield ARRAYS, X, B
    yield ON_DEVICE, *tensors(X, B, device, torch.float32)
    yield "bfloat16", *tensors(X, B, device, torch.bfloat16)
    lengths = np.random.default_rng(2).uniform(0.9, 1.1, (m, 1)).astype(np.float32)
    ones = np.ones((n, 1), np.float32)
    yield (
        "L2",
        np.hstack([X, ones, 0 * ones]),
        np.hstack([lengths * B, -0.5 * lengths**2, 0 * lengths]),
    )
    yield f"cosine {COSINE}", unit_vectors(n, dim, COSINE, 0), unit_vectors(m, dim, COSINE, 1)
    if reason := missing(REAL, data_folder()):
        print(f"{REAL} is left out: {reason}", file=sys.stderr)
        return
    task = load_task(REAL)
    yield REAL, repeated(task.gallery, n, 3), repeated(task.bank, m, 4)


def tensors(X: Any, B: Any, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, b = (torch.as_tensor(rows).to(device, dtype) for rows in (X, B))
    return x, b


def product_alone(X: Any, B: Any, device: str) -> Callable[[int], Any]:
    x, b = tensors(X, B, device, torch.bfloat16)
    size = max(1, TILE[device] // len(b))
    room = torch.empty(size, len(b), dtype=torch.bfloat16, device=device)

    def run(rows: int) -> Any:
        for part in torch.split(x[:rows], size):
            torch.mm(part, b.T, out=room[: len(part)])
        return room[0]

    return run


def kernels(X: Any, B: Any, k: int, device: str) -> dict[str, Callable[[int], Any]]:
    """What gives the (n,) means of the first rows, by name."""

    def by_kernel(kernel: str) -> Callable[[int], Any]:
        def run(rows: int) -> Any:
            with kernel_policy(kernel=kernel, least_screened=(0, 0)):
                return topk_mean(X[:rows], B, k, device=device)

        return run

    return {name: by_kernel(name) for name in ("screened", "dense")}


def others(X: Any, B: Any, k: int, device: str) -> dict[str, Callable[[int], Any]]:
    """The same by other libraries."""

    def by_tiles(rows: int) -> Any:
        x, b = tensors(X[:rows], B, device, torch.float32)
        parts = torch.split(x, max(1, TILE[device] // len(b)))
        return torch.cat([(part @ b.T).topk(k, dim=1).values.mean(1) for part in parts])

    def by_flat(rows: int) -> Any:
        index = faiss.IndexFlatIP(B.shape[1])
        if device == "cuda":
            index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
        index.add(B)
        return index.search(X[:rows], k)[0].mean(1)

    def by_nnn(rows: int) -> Any:
        x, b = tensors(X[:rows], B, device, torch.float32)
        with redirect_stderr(io.StringIO()):  # Its progress bar.
            return NNNRetriever(b.shape[1]).compute_alignment_means(x, b, k, 128)[:, 0]

    runs: dict[str, Callable[[int], Any]] = {"torch.topk over tiles": by_tiles}
    faiss = import_faiss()
    if device == "cpu" or (k <= GPU_LIMIT and hasattr(faiss, "StandardGpuResources")):
        runs["FAISS flat"] = by_flat
    try:
        from nnn import NNNRetriever
    except ImportError:
        print("nnn-retrieval is not installed: pip install --group bench", file=sys.stderr)
        return runs
    return {**runs, NNN: by_nnn}


def measured(run: Callable[[int], Any], n: int, pairs: float, device: str) -> tuple[Cell, Any]:
    """Seconds, TFLOP/s, and peak memory of torch on the device, and the result. pairs: products of numbers."""

    def timed(rows: int) -> tuple[float, Any]:
        started = time.perf_counter()
        result = run(rows)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, result

    timed(min(n, WARM_ROWS))
    held = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    seconds, result = timed(n)
    cell = {"peak_mb": (torch.cuda.max_memory_allocated() - held) / 1e6} if device == "cuda" else {}
    if seconds < 1:
        seconds = min(seconds, timed(n)[0], timed(n)[0])
    return {"seconds": seconds, "tflops": 2 * pairs / seconds / 1e12, **cell}, result


def compare(
    name: str, X: Any, B: Any, ks: list[int], device: str, started: float
) -> dict[str, dict[str, Cell]]:
    """{k, or log-sum-exp: {kernel: figures}}"""
    x, b = tensors(X[:CHECKED_ROWS], B, device, torch.float64)
    scores = x @ b.T
    del x, b
    n, pairs = len(X), float(len(X)) * len(B) * X.shape[1]
    product = measured(product_alone(X, B, device), n, pairs, device)[0]
    cells: dict[str, dict[str, Cell]] = {}
    for k in [*ks, 0]:
        runs = (
            kernels(X, B, k, device)
            if k
            else {"dense": lambda rows: logsumexp(X[:rows], B, TAU, device=device)}
        )
        if k and name in (ARRAYS, REAL) and time.monotonic() - started < SECONDS:
            runs |= others(X, B, k, device)
        exact = (
            scores.topk(k, dim=1).values.mean(1) if k else TAU * torch.logsumexp(scores / TAU, 1)
        )
        row = cells[str(k or SOFT)] = {PRODUCT: dict(product)}
        for kernel, run in runs.items():
            row[kernel], values = measured(run, n, pairs, device)
            off = torch.as_tensor(values)[:CHECKED_ROWS].to(device, torch.float64) - exact
            row[kernel]["error_over_std"] = float(off.abs().max() / exact.std())
        for kernel, cell in row.items():
            cell[SHARE] = product["seconds"] / cell["seconds"]
            if k:
                cell["times_as_slow_as_screened"] = cell["seconds"] / row["screened"]["seconds"]
            if kernel == "screened" and NNN in row:
                cell[f"times_as_fast_as_{NNN}"] = row[NNN]["seconds"] / cell["seconds"]
    return cells


def sinkhorn(m: int, n: int, dim: int, device: str) -> dict[str, Any]:
    """Ten iterations for n items and a bank of m, and the products of their eleven passes alone."""
    items, bank = unit_vectors(n, dim, 0, 5), unit_vectors(m, dim, 0, 6)
    product = measured(product_alone(bank, items, device), m, float(n) * m * dim, device)[0]
    started = time.perf_counter()
    fitted = Sinkhorn(tau=TAU, iterations=ITERATIONS, tol=1e-12, device=device).fit(
        QueryBank.of(bank), gallery=items
    )
    seconds, products = time.perf_counter() - started, (ITERATIONS + 1) * product["seconds"]
    how = fitted.diagnostics
    return {"bank": m, "items": n, "dim": dim, "iterations": how.iterations, "scores": how.scores, "seconds": seconds,
            "seconds_of_products_alone": products, "times_as_long": seconds / products}  # fmt: skip


def targets(cells: dict[str, Any], times_as_long: float) -> list[dict[str, Any]]:
    """The targets for an H200 that this run has a figure for."""
    rows = [
        {
            "target": f"{name}, {k}, {kernel}: {figure} ≥ {least}",
            "measured": value,
            "reached": value >= least,
        }
        for name, k, kernel, figure, least in TARGETS
        if (value := cells.get(name, {}).get(k, {}).get(kernel, {}).get(figure)) is not None
    ]
    name = f"{ITERATIONS} iterations of Sinkhorn, in times of the products alone ≤ {MOST_SINKHORN}"
    return [
        *rows,
        {"target": name, "measured": times_as_long, "reached": times_as_long <= MOST_SINKHORN},
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu"
    )
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
        cells[name] = compare(name, X, B, ks, device, started)
        errors = [
            [cells[name][str(k)][kernel]["error_over_std"] for kernel in ("screened", "dense")]
            for k in ks
        ]
        failed |= any(error > max(MOST_ERROR, 2 * by_dense) for error, by_dense in errors)
        for k, row in cells[name].items():
            for kernel, cell in row.items():
                rows.append(
                    [
                        name,
                        k,
                        kernel,
                        *(f"{cell[key]:.2g}" if key in cell else "" for key in FIGURES),
                    ]
                )
    del X, B
    iterations = sinkhorn(*SINKHORN[device], options.dim, device)
    reached = targets(cells, iterations["times_as_long"])
    markdown = "\n\n".join(
        [
            table(["vectors", "k", "by", *FIGURES.values()], rows),
            f"{ITERATIONS} iterations of Sinkhorn on {iterations['bank']:,} × {iterations['items']:,} take "
            f"{iterations['seconds']:.2g} s ({iterations['scores']}), {iterations['times_as_long']:.2g} times as long "
            f"as the products of their passes alone.",
            table(
                ["target for an H200", "measured", "reached"],
                [
                    [row["target"], f"{row['measured']:.2g}", "yes" if row["reached"] else "no"]
                    for row in reached
                ],
            ),
        ]
    )
    print(markdown)
    if options.save:
        results = {
            "device": device,
            "rows": n,
            "bank": m,
            "dim": options.dim,
            "cells": cells,
            "sinkhorn": iterations,
        }
        save(
            "kernels_gpu",
            {**results, "targets": reached, "environment": environment(started)},
            markdown,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
