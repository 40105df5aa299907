"""Sinkhorn with all scores recomputed, kept, or of the nearest only: time and R@1, compared with POT and KeOps.

    python -m benchmarks.sinkhorn [--task NAME] [--keops] [--save]

Ten iterations at τ = 0.03 from nothing, on one thread. POT runs the same iteration, and so does KeOps, which
GeomLoss stands on: on a CPU that takes hours, so --keops compares the two, and their potentials, on the first
500 queries and items alone. Of the others R@1 is compared.
Exits with 1 where the way taken by size is slower than recomputing, or a way is off that by 0.3 points.
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

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Sinkhorn
from milvus_hubness.correction.estimators.steps import scores_for
from milvus_hubness.correction.kernels.primitives import kernel_policy
from tests.support.real_data import load_task, recall_at_1

TAU, ITERATIONS = 0.03, 10
WAYS = {"recomputed": (0, 1e12), "float32": (1 << 40, 1e12), "sparse": (0, 0)}
"""`sinkhorn_limits` under which a fit takes each way."""
MOST_APART = 0.3
KEOPS_ROWS = 500


def ours(bank: torch.Tensor, items: torch.Tensor, way: str) -> torch.Tensor:
    """(m,) potentials of the bank."""
    with kernel_policy(sinkhorn_limits=WAYS[way]):
        fitted = Sinkhorn(TAU, iterations=ITERATIONS, tol=0).fit(
            bank.numpy(), gallery=items.numpy()
        )
    return torch.from_numpy(fitted.potentials[:, 0])


def pot(bank: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    import ot

    m, n = len(bank), len(items)
    cost = -(bank @ items.T).numpy()
    _, log = ot.bregman.sinkhorn_log(
        np.full(m, 1 / m),
        np.full(n, 1 / n),
        cost,
        TAU,
        numItermax=ITERATIONS,
        stopThr=0,
        log=True,
        warn=False,
    )
    return TAU * torch.from_numpy(np.asarray(log["log_u"], np.float32))


def keops(bank: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    from pykeops.torch import LazyTensor

    scores = LazyTensor(bank[:, None]) | LazyTensor(items[None])

    def step(values: torch.Tensor, axis: int) -> torch.Tensor:
        added = LazyTensor(values[None, :, None] if axis == 1 else values[:, None, None])
        return -TAU * ((scores + added) / TAU).logsumexp(axis).squeeze(-1)

    g = torch.zeros(len(items))
    for _ in range(ITERATIONS):
        f = step(g, 1)
        g = step(f, 0)
    return f


def peers() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    try:
        return {f"POT {version('POT')}": pot}
    except ImportError:
        print("POT is not installed: pip install --group bench", file=sys.stderr)
        return {}


def beside_keops(bank: torch.Tensor, items: torch.Tensor) -> dict[str, Any]:
    """Seconds of both on the first few, and the largest difference of their potentials, of each less its mean."""
    bank, items = bank[:KEOPS_ROWS], items[:KEOPS_ROWS]
    keops(bank[:10], items[:10])  # It compiles.
    seconds, potentials = [], []
    for run in (keops, lambda bank, items: ours(bank, items, "recomputed")):
        began = time.perf_counter()
        found = run(bank, items)
        seconds.append(time.perf_counter() - began)
        potentials.append(found - found.mean())
    apart = float((potentials[0] - potentials[1]).abs().max())
    return {"version": version("pykeops"), "rows": KEOPS_ROWS, "keops_seconds": seconds[0],
            "recomputed_seconds": seconds[1], "apart": apart}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="docstring_code")
    parser.add_argument("--keops", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    one_thread()
    started = time.monotonic()
    task = load_task(options.task)
    bank, items = torch.from_numpy(task.bank), torch.from_numpy(task.gallery)
    runs = {way: (lambda bank, items, way=way: ours(bank, items, way)) for way in WAYS}
    runs |= peers()
    cells: dict[str, dict[str, Any]] = {}
    kept = QueryBank.of(task.bank)
    for name, run in runs.items():
        began = time.perf_counter()
        potentials = run(bank, items).numpy()[:, None]
        seconds = time.perf_counter() - began
        fitted = Sinkhorn(TAU).restore(kept, np.ascontiguousarray(potentials, np.float32))
        cells[name] = {"seconds": seconds, "r1": recall_at_1(task, fitted)[0]}
        print(name, cells[name], flush=True)
    raw = recall_at_1(task, None)[0]
    taken = scores_for(len(bank), len(items))
    lines = [[name, f"{cell['seconds']:.2f}", f"{cell['r1']:.2f}"] for name, cell in cells.items()]
    markdown = table(["scores", "seconds", f"R@1 (raw {raw:.2f})"], lines)
    beside = beside_keops(bank, items) if options.keops else None
    if beside:
        markdown += (
            f"\n\nKeOps {beside['version']}, {KEOPS_ROWS} queries, items: {beside['keops_seconds']:.1f} s, "
            f"recomputed here {beside['recomputed_seconds']:.3f} s, potentials {beside['apart']:.1e} apart."
        )
    print(f"{markdown}\n\nBy size: {taken}")
    if options.save:
        results = {"task": options.task, "sizes": [len(bank), len(items)], "by_size": taken, "raw": raw,
                   "keops": beside}  # fmt: skip
        save("sinkhorn", {**results, "ways": cells, "environment": environment(started)}, markdown)
    apart = max(abs(cells[way]["r1"] - cells["recomputed"]["r1"]) for way in WAYS)
    slower = cells[taken]["seconds"] > cells["recomputed"]["seconds"]
    return int(slower or apart > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
