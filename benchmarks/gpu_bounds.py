"""What should bound each path on an H200, by arithmetic: no GPU has been measured.

    python -m benchmarks.gpu_bounds [--rows N] [--bank N] [--dim N]

A path multiplies, then moves its scores through memory, one after the other; nothing else takes time. So it takes at
least as long as this says. Prints the table of benchmarks/kernels.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from benchmarks.environment import table

BFLOAT16, FLOAT32 = 700e12, 50e12
"""Sustained FLOP/s: the data sheet has 989e12 and 67e12, which no library reaches."""
MEMORY, PCIE = 4.8e12, 50e9
"""Bytes per second."""
TILE = 4.0
"""Bytes of a score that is written in bfloat16 and read once."""
MAXIMA = 1.4
"""Bytes per score of the maxima of groups, written, read and compared, and of the flags of groups."""
SURVIVORS = 2
"""Rows of the bank for each of the k that the screen computes again. Each is read, written and read in float32."""
LOGSUMEXP_PASSES, SINKHORN_PASSES = 40.0, 48.0
"""Bytes per score in float32: written by the product, then read, and often written, by each operation of torch."""
ONCE = 8.0
"""Bytes of a score in float32 that is written and read once."""
NNN = 20.0
"""Bytes per score of nnn-retrieval: written once, and read four times by torch.topk, which selects by parts of bits."""
SINKHORN = (100_000, 1_000_000, 11)
"""Bank, items and passes of ten iterations."""
SM_FLOPS, SCHEDULERS = 4096, 4
"""Of bfloat16, for each multiprocessor and cycle; and its schedulers, which each issue an instruction a cycle."""
TRITON_TILE, TRITON_WARPS, TRITON_INSTRUCTIONS = 128 * 128, 8, 2490
"""Scores, warps, and instructions after the product, of a tile of the last top-k kernel in Triton."""


class Path(NamedTuple):
    """Picoseconds a score: of multiplying, and of moving."""

    name: str
    multiply: float
    move: float

    @property
    def total(self) -> float:
        return self.multiply + self.move


def paths(m: int, dim: int) -> list[Path]:
    """The product alone is the first."""
    one, exact = 2e12 * dim / BFLOAT16, 2e12 * dim / FLOAT32
    again = {k: SURVIVORS * k * 3 * 4 * dim / m for k in (16, 128, 512)}
    by_screen = [Path(f"screened top-k, k = {k}", one, 1e12 * (TILE + MAXIMA + more) / MEMORY)
                 for k, more in again.items()]  # fmt: skip
    cycles = TRITON_TILE * 2 * dim / SM_FLOPS
    issued = TRITON_INSTRUCTIONS * TRITON_WARPS / SCHEDULERS
    return [
        Path("product alone", one, 0),
        *by_screen,
        Path("top-k in Triton, as compiled", one, one * BFLOAT16 / 989e12 * issued / cycles),
        Path("log-sum-exp, three products", 3 * one, 1e12 * LOGSUMEXP_PASSES / MEMORY),
        Path("the same, if a score was moved once", 3 * one, 1e12 * ONCE / MEMORY),
        Path("Sinkhorn's pass, three products", 3 * one, 1e12 * SINKHORN_PASSES / MEMORY),
        Path("FAISS flat, float32", exact, 1e12 * ONCE / MEMORY),
        Path("nnn-retrieval, float32", exact, 1e12 * NNN / MEMORY),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--bank", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    options = parser.parse_args(arguments)
    n, m, dim = options.rows, options.bank, options.dim
    found = {path.name: path for path in paths(m, dim)}
    product = found["product alone"]
    rows = [[path.name, f"{path.multiply:.2f}", f"{path.move:.2f}", f"{path.total:.2f}",
             f"{100 * product.total / path.total:.0f}%"] for path in found.values()]  # fmt: skip
    print(
        table(
            ["path", "ps to multiply", "ps to move", "ps a score", "share of the product alone"],
            rows,
        ),
        end="\n\n",
    )
    copies = 4 * dim * (n + m) / PCIE
    theirs = copies + 1e-12 * n * m * found["nnn-retrieval, float32"].total
    jobs = []
    for k in (16, 128, 512):
        ours = 4 * dim * m / PCIE + 1e-12 * n * m * found[f"screened top-k, k = {k}"].total
        jobs.append([str(k), f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}"])
    print(
        table(["a job from float32 arrays, k", "s", "s of nnn-retrieval", "times as fast"], jobs),
        end="\n\n",
    )
    bank, items, passes = SINKHORN
    whole = 1e-12 * passes * bank * items
    step = found["Sinkhorn's pass, three products"]
    products, three, all_of_it = (whole * ps for ps in (product.total, step.multiply, step.total))
    print(
        f"Ten iterations of Sinkhorn take {passes} passes, {all_of_it:.0f} s: {all_of_it / products:.1f} times as long"
    )
    print(
        f"as the products alone, {products:.1f} s, and {all_of_it / three:.1f} times as the three, {three:.1f} s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
