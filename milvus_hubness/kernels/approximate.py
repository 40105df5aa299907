"""Approximate top-k means: `routed.RoutedBank`, tuned on a sample of the gallery until its error is small.

If it is not faster than the exact kernel then, the exact kernel is used.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

import numpy as np
import torch

from milvus_hubness.errors import InvalidInput
from milvus_hubness.kernels.operands import (
    Array,
    Matrix,
    Operands,
    as_tensor,
    import_faiss,
    positive_number,
    whole_number,
)
from milvus_hubness.kernels.primitives import check_k, topk, topk_mean
from milvus_hubness.kernels.routed import RoutedBank, Routing

ERROR = 0.01
SAMPLE, LEAST_SAMPLE, TIMED = 1024, 32, 8192
SHARES = (0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.25)
"""Shares of the bank to read, as they are tried."""
LEAST_ROUTED = 2_000
"""Smallest bank that is divided into lists."""
ROWS_AT_ONCE = 1 << 16


class Tuned(NamedTuple):
    """The chosen kernel, and its results on the half of the sample that it was not chosen on.

    kind: "exact" if lists were not both accurate enough and faster. width: the thousandths of the bank that a
    row reads on average; 0 for "exact". recall: share of the k nearest that are in the lists read.
    mean_error, max_error: of the means, in units of the score; share: mean_error as a share of the standard
    deviation of the exact means. speedup: seconds of the exact kernel over seconds of this one, on up to
    8,192 rows.
    """

    kind: Literal["exact", "routed"] = "exact"
    width: int = 0
    recall: float = 1.0
    mean_error: float = 0.0
    max_error: float = 0.0
    share: float = 0.0
    speedup: float = 1.0


class ApproximateBank:
    """Means of the k largest inner products with a bank B (m, d), for many rows similar to those of X (n, d).

    error: largest acceptable mean |Δ| of the means, as a share of their standard deviation. measured: how
    many rows the reported errors were measured on. Computes on the CPU. Raises as `topk_mean` does,
    InvalidInput for fewer than 32 rows of X, InvalidParameter, FaissConflict.
    """

    def __init__(self, B: Matrix, X: Matrix, k: int, *, error: float = ERROR, seed: int = 0) -> None:
        import_faiss()
        self._bank = Operands.of(X, B, "cpu").bank.float().contiguous()
        self.k = check_k(k, self._bank)
        if X.shape[0] < LEAST_SAMPLE:
            raise InvalidInput(f"an index is tuned on {LEAST_SAMPLE} rows at least, not {X.shape[0]}")
        self._seed = whole_number("seed", seed, at_least=0)
        rng, here = np.random.default_rng(self._seed), torch.device("cpu")
        sample, timed = (
            as_tensor(X[rng.choice(X.shape[0], min(size, X.shape[0]), replace=False)], torch.float32, here)
            for size in (SAMPLE, TIMED)
        )
        self.measured = len(sample) - len(sample) // 2
        self._routed: RoutedBank | None = None
        self._routing: Routing | None = None
        self.tuned = self._tune(sample, timed, positive_number("error", error))

    def values(self, X: Matrix) -> Array:
        """Return means of the k largest products for rows X (n, d), float32 (n,).

        A row whose means are not reliable is computed exactly. Raises DimensionMismatch, InvalidInput.
        """
        operands = Operands.of(X, self._bank, "cpu")
        values = np.empty(X.shape[0], np.float32)
        for part, x in operands.rows(ROWS_AT_ONCE):
            values[part] = self._means(x)
        return values

    def _tune(self, sample: torch.Tensor, timed: torch.Tensor, error: float) -> Tuned:
        """Choose the smallest share that is accurate enough on the first half of the sample."""
        if len(self._bank) < LEAST_ROUTED:
            return Tuned()
        scores, nearest = topk(sample, self._bank, self.k, device="cpu")
        means, half = scores.mean(1, dtype=torch.float64).numpy(), len(sample) // 2
        exact_seconds = self._seconds(timed)
        routed = self._routed = RoutedBank(self._bank, self._seed)
        for share, routing in routed.routings(sample[:half], self.k, scores[:half], SHARES):
            self._routing = routing
            if np.abs(self._means(sample[:half]) - means[:half]).mean() > error * means.std():
                continue
            speedup = exact_seconds / self._seconds(timed)
            if speedup <= 1:
                break
            off = np.abs(self._means(sample[half:]) - means[half:])
            read = routed.looked_into(sample[half:], routing).gather(1, nearest[half:])
            return Tuned(
                kind="routed",
                width=round(1000 * share),
                recall=float(read.float().mean()),
                mean_error=float(off.mean()),
                max_error=float(off.max()),
                share=float(off.mean() / means.std()),
                speedup=speedup,
            )
        self._routing = None
        return Tuned()

    def _seconds(self, rows: torch.Tensor) -> float:
        """Return the seconds that the means of these rows take in the second run."""
        for _ in range(2):
            started = time.perf_counter()
            self._means(rows)
            taken = time.perf_counter() - started
        return taken

    def _means(self, rows: torch.Tensor) -> Array:
        if self._routed is None or self._routing is None:
            return topk_mean(rows, self._bank, self.k, device="cpu").numpy()
        means, sure = self._routed.means(rows, self._routing)
        if not sure.all():
            means[~sure] = topk_mean(rows[torch.from_numpy(~sure)], self._bank, self.k, device="cpu")
        return means
