"""The exact kernels on one device compared with other libraries', and the product of the same shape alone.

    python -m benchmarks.kernels_gpu [--device cpu] [--rows N] [--bank N] [--dim N] [--k N …] [--save]

Means of the k largest products, and log-sum-exps. The vectors are random and of unit length: float32 arrays, float32
and bfloat16 tensors on the device, with the two columns of L2, and with mean cosines of 0.8 and 0.95; and those of
docstring_code (384-d), repeated with noise. Means are computed by the screen with groups (screened) and, with Triton,
by that with buffers (buffered). Each is compared with float64 on a few rows, and so is plain float32 (dense), which is
timed on one set of vectors. The float32 arrays and docstring_code go to nnn-retrieval too, each time from the memory of
the host, and the arrays to torch.topk over tiles and FAISS flat, all on the device. The product alone is that of
bfloat16 tiles on the device, by the library of the vendor: all that multiplies all pairs takes longer. Each is timed
after a run on a few rows, once, or three times if that takes less than a second; the fastest counts. At last ten
iterations of Sinkhorn are compared with the products of their passes alone.

Without a CUDA device it runs on the CPU, at small sizes. After 150 seconds the other libraries are left out. Exits with
1 where a screen is off by more than 1e-5 of the means' standard deviation and twice as far as the dense kernel.
--save: keep the results; without it they are only printed.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.data import data_folder, missing
from benchmarks.environment import environment, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Sinkhorn
from milvus_hubness.correction.kernels import dense, logsumexp, screened, topk_mean
from milvus_hubness.correction.kernels.approximate import GPU_LIMIT
from milvus_hubness.correction.kernels.libraries import import_faiss
from milvus_hubness.correction.kernels.operands import Operands
from milvus_hubness.correction.kernels.policy import kernel_policy, runs_triton
from tests.support.real_data import load_task

SIZES = {"cuda": (65_536, 1_000_000), "cpu": (512, 20_000)}
"""Rows of X and of the bank."""
SINKHORN = {"cuda": (25_000, 1_000_000), "cpu": (100, 1000)}
"""Queries of the bank, and items."""
ITERATIONS = 10
COSINES, NOISE, TAU = (0.8, 0.95), 0.3, 0.05
"""The norm of the noise that is added to vectors of norm 1."""
TILE = {"cuda": 1 << 28, "cpu": 1 << 23}
"""Scores in memory at once, of the product and of torch.topk."""
CHECKED_ROWS, WARM_ROWS = 64, 512
MOST_ERROR = 1e-5
SECONDS = 150.0
"""After these the other libraries are left out."""
REAL, ARRAYS, ON_DEVICE = "docstring_code", "float32", "float32 on the device"
PRODUCT, SOFT, NNN, SHARE = "product alone", "log-sum-exp", "nnn-retrieval", "share_of_product"
SCREENS = ("screened", "buffered")
FASTER_THAN_NNN, FASTER_THAN_SCREENED = f"times_as_fast_as_{NNN}", "times_as_fast_as_screened"
TARGETS = [(ON_DEVICE, k, "screened", SHARE, 0.5) for k in ("16", "128", "512")]
TARGETS += [(ON_DEVICE, SOFT, "dense", SHARE, 0.5)]
TARGETS += [(ARRAYS, k, "screened", FASTER_THAN_NNN, 10.0) for k in ("16", "128", "512")]
for k, least_share in {"16": 0.6, "128": 0.6, "512": 0.45}.items():
    TARGETS += [
        (ON_DEVICE, k, "buffered", SHARE, least_share),
        (ON_DEVICE, k, "buffered", FASTER_THAN_SCREENED, 1.3),
        (ARRAYS, k, "buffered", FASTER_THAN_NNN, 8.0),
    ]
"""Vectors, k, kernel, figure, and its least value, on an H200. The buffers become the default where they are 1.3 times
as fast as the groups."""
MOST_SINKHORN = 1.5
"""Times as long as the products alone."""
FIGURES = {
    "seconds": "seconds",
    "tflops": "TFLOP/s",
    SHARE: "share of the product alone",
    "times_as_slow_as_screened": "times as slow as screened",
    "peak_mb": "peak MB of torch on the device",
    "error_over_std": "error / std",
    "rows_left_over": "rows left to another kernel",
}
Cell = dict[str, float]


def unit_vectors(n: int, dim: int, seed: int) -> Any:
    rows = np.random.default_rng(seed).standard_normal((n, dim), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def repeated(rows: Any, n: int, seed: int) -> Any:
    """n rows of unit length: these, in turn, each with noise of its own."""
    noisy = NOISE * unit_vectors(n, rows.shape[1], seed)
    noisy += rows[np.arange(n) % len(rows)]
    noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
    return noisy


def inputs(n: int, m: int, dim: int, device: str) -> Iterator[tuple[str, Any, Any]]:
    """Names, X and banks, one at a time: at the sizes for CUDA each takes gigabytes."""
    X, B = unit_vectors(n, dim, 0), unit_vectors(m, dim, 1)
    yield ARRAYS, X, B
    x, b = tensors(X, B, device, torch.float32)
    yield ON_DEVICE, x, b
    yield "bfloat16", x.bfloat16(), b.bfloat16()
    lengths = np.random.default_rng(2).uniform(0.9, 1.1, (m, 1)).astype(np.float32)
    lengths = torch.from_numpy(lengths).to(device)
    ones = torch.ones(n, 1, device=device)
    yield (
        "L2",
        torch.hstack([x, ones, 0 * ones]),
        torch.hstack([lengths * b, -0.5 * lengths**2, 0 * lengths]),
    )
    for cosine in COSINES:
        common = (cosine / dim) ** 0.5
        yield f"cosine {cosine}", *(rows * (1 - cosine) ** 0.5 + common for rows in (x, b))
    del x, b
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


def by_kernel(kernel: str, X: Any, B: Any, k: int, device: str) -> Callable[[int], Any]:
    """What gives the (n,) means of the first rows."""

    def run(rows: int) -> Any:
        with kernel_policy(kernel=kernel, least_screened=(0, 0)):
            return topk_mean(X[:rows], B, k, device=device)

    return run


def screens_on(device: str) -> list[str]:
    has_triton = runs_triton(torch.device(device))
    return [kernel for kernel in SCREENS if kernel == "screened" or has_triton]


@contextmanager
def rows_left_over(kernel: str) -> Iterator[list[int]]:
    """The numbers of rows that a screen leaves to another kernel within the block."""
    rows: list[int] = []
    other: Any = {"screened": dense, "buffered": screened}.get(kernel)
    real = getattr(other, "topk_mean", None)

    def counted(operands: Operands, k: int) -> Any:
        rows.append(len(operands.X))
        return real(operands, k)

    with patch.object(other, "topk_mean", counted) if other else nullcontext():
        yield rows


def others(name: str, X: Any, B: Any, k: int, device: str) -> dict[str, Callable[[int], Any]]:
    """The same by other libraries, for the vectors of this name."""

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

    runs: dict[str, Callable[[int], Any]] = {}
    faiss = import_faiss()
    if name == ARRAYS:
        runs["torch.topk over tiles"] = by_tiles
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
    for k in ks:
        runs = {kernel: by_kernel(kernel, X, B, k, device) for kernel in screens_on(device)}
        if name == ON_DEVICE:
            runs["dense"] = by_kernel("dense", X, B, k, device)
        if name in (ARRAYS, REAL) and time.monotonic() - started < SECONDS:
            runs |= others(name, X, B, k, device)
        exact = scores.topk(k, dim=1).values.mean(1)
        row = cells[str(k)] = {PRODUCT: dict(product)}
        for kernel, run in runs.items():
            with rows_left_over(kernel) as left:
                row[kernel], values = measured(run, n, pairs, device)
            row[kernel]["error_over_std"] = error_over_std(values, exact)
            if kernel in SCREENS:
                row[kernel]["rows_left_over"] = max(left, default=0)
        if "dense" not in row:
            few = by_kernel("dense", X, B, k, device)(CHECKED_ROWS)
            row["dense"] = {"error_over_std": error_over_std(few, exact)}
        for cell in row.values():
            if "seconds" in cell:
                cell["times_as_slow_as_screened"] = cell["seconds"] / row["screened"]["seconds"]
        for kernel in screens_on(device):
            cell = row[kernel]
            cell[FASTER_THAN_SCREENED] = row["screened"]["seconds"] / cell["seconds"]
            if NNN in row:
                cell[FASTER_THAN_NNN] = row[NNN]["seconds"] / cell["seconds"]

    if name in (ON_DEVICE, REAL):
        cell, values = measured(
            lambda rows: logsumexp(X[:rows], B, TAU, device=device), n, pairs, device
        )
        cell["error_over_std"] = error_over_std(values, TAU * torch.logsumexp(scores / TAU, 1))
        cells[SOFT] = {PRODUCT: dict(product), "dense": cell}

    for row in cells.values():
        for cell in row.values():
            if "seconds" in cell:
                cell[SHARE] = product["seconds"] / cell["seconds"]
    return cells


def error_over_std(values: Any, exact: torch.Tensor) -> float:
    """The largest error of the first values, in units of the standard deviation of the exact ones."""
    off = torch.as_tensor(values)[: len(exact)].to(exact) - exact
    return float(off.abs().max() / exact.std())


def sinkhorn(m: int, n: int, dim: int, device: str) -> dict[str, Any]:
    """Ten iterations for n items and a bank of m, and the products of their eleven passes alone."""
    items, bank = unit_vectors(n, dim, 5), unit_vectors(m, dim, 6)
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
        for k in ks:
            row = cells[name][str(k)]
            most = max(MOST_ERROR, 2 * row["dense"]["error_over_std"])
            failed |= any(
                not row[kernel]["error_over_std"] <= most for kernel in screens_on(device)
            )
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
