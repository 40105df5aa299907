"""Approximate top-k means: FAISS's inverted lists of the bank, tuned on a sample of the gallery.

The lists are on the CPU, or with faiss-gpu on a CUDA device. The exact kernel of the device is used where it is faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from milvus_hubness.errors import InvalidInput
from milvus_hubness.kernels.operands import Operands, as_tensor
from milvus_hubness.kernels.primitives import (
    Array,
    Matrix,
    import_faiss,
    positive_number,
    resolve_device,
    topk,
    topk_mean,
    validate_k,
)

ERROR = 0.01
SAMPLE, LEAST_SAMPLE, TIMED = 1024, 32, 8192
LEAST_BANK = 2_000
"""Smallest bank that is divided into lists."""
ROWS_AT_ONCE = 1 << 16
TRAINING_ROWS_PER_LIST = 25


class Tuned(NamedTuple):
    """The chosen kernel, and its results on the half of the sample that it was not chosen on.

    kind: "exact" if no index was both accurate enough and faster. width: nprobe, the number of lists to read; 0 for
    "exact". recall: share of the k nearest that are in these lists.
    mean_error, max_error: of the means, in units of the score; share: mean_error over the standard deviation of the
    exact means. speedup: over the exact kernel, on up to 8,192 rows.
    """

    kind: Literal["exact", "ivf"] = "exact"
    width: int = 0
    recall: float = 1.0
    mean_error: float = 0.0
    max_error: float = 0.0
    share: float = 0.0
    speedup: float = 1.0


class InvertedLists:
    """FAISS's inverted lists over a bank (m, d) float32, on a CUDA device or on the CPU."""

    def __init__(self, bank: torch.Tensor, k: int, device: torch.device) -> None:
        self._faiss, self._k = import_faiss(), k
        m, d = bank.shape
        self._count = max(1, min(int(8 * sqrt(m)), m // TRAINING_ROWS_PER_LIST))
        metric = self._faiss.METRIC_INNER_PRODUCT
        index: Any = self._faiss.IndexIVFFlat(self._faiss.IndexFlatIP(d), d, self._count, metric)
        index.cp.seed = 0
        index.cp.min_points_per_centroid = 1
        index.cp.max_points_per_centroid = TRAINING_ROWS_PER_LIST
        if device.type == "cuda":
            self._resources = self._faiss.StandardGpuResources()
            index = self._faiss.index_cpu_to_gpu(self._resources, device.index or 0, index)
        index.train(bank.numpy())
        index.add(bank.numpy())
        self._index = index

    def widths(self) -> Iterator[int]:
        """Yield numbers of lists to read, which grow by half."""
        width = 1
        while width < self._count:
            yield width
            width = max(width + 1, width * 3 // 2)
        yield self._count

    def search(self, x: torch.Tensor, width: int) -> tuple[Array, Array]:
        """Return the k largest products of rows x (n, d) in `width` lists, and their rows of the bank or −1, (n, k)."""
        scores, rows = self._index.search(x.numpy(), self._k, params=self._faiss.SearchParametersIVF(nprobe=width))
        return scores, rows

    def means(self, x: torch.Tensor, width: int) -> tuple[Array, Array]:
        """Return means for rows x (n, d), float64 (n,), and whether the lists have k rows, (n,)."""
        scores, rows = self.search(x, width)
        return scores.mean(1, dtype=np.float64), np.asarray((rows >= 0).all(1))

    def recall(self, x: torch.Tensor, width: int, nearest: torch.Tensor) -> float:
        """Return the share of the nearest rows (n, k) that a search of `width` lists finds."""
        rows = self.search(x, width)[1]
        return float(np.mean([np.isin(a, b).mean() for a, b in zip(nearest.numpy(), rows, strict=True)]))


class ApproximateBank:
    """Means of the k largest inner products with a bank B (m, d), for many rows similar to those of X (n, d).

    error: largest acceptable mean |Δ| of the means, as a share of their standard deviation. device: as for `topk_mean`;
    on CUDA an index needs faiss-gpu, without which the exact kernel is used. measured: how many rows the reported
    errors were measured on. Raises as `topk_mean` does, InvalidInput for fewer than 32 rows of X, FaissConflict.
    """

    def __init__(self, B: Matrix, X: Matrix, k: int, *, error: float = ERROR, device: str = "cpu") -> None:
        self._has_gpu_lists = hasattr(import_faiss(), "StandardGpuResources")
        self._bank = Operands.of(X, B, "cpu").bank.float().contiguous()
        self._device, self._place = device, resolve_device(device)
        self.k = validate_k(k, self._bank)
        if X.shape[0] < LEAST_SAMPLE:
            raise InvalidInput(f"an approximate bank needs at least {LEAST_SAMPLE} items to tune on, not {X.shape[0]}")
        rng, here = np.random.default_rng(0), torch.device("cpu")
        sample, timed = (
            as_tensor(X[rng.choice(X.shape[0], min(size, X.shape[0]), replace=False)], torch.float32, here)
            for size in (SAMPLE, TIMED)
        )
        self.measured = len(sample) - len(sample) // 2
        self._index: InvertedLists | None = None
        self._width = 0
        self.tuned = self._tune(sample, timed, positive_number("error", error))

    def values(self, X: Matrix) -> Array:
        """Return means of the k largest products for rows X (n, d), float32 (n,). A row whose mean is not reliable is
        computed exactly. Raises DimensionMismatch, InvalidInput."""
        values = np.empty(X.shape[0], np.float32)
        for part, x in Operands.of(X, self._bank, "cpu").rows(ROWS_AT_ONCE):
            values[part] = self._means(x)
        return values

    def _tune(self, sample: torch.Tensor, timed: torch.Tensor, error: float) -> Tuned:
        """Choose the narrowest search that is accurate enough on the first half of the sample."""
        if len(self._bank) < LEAST_BANK or (self._place.type == "cuda" and not self._has_gpu_lists):
            return Tuned()
        scores, nearest = topk(sample, self._bank, self.k, device=self._device)
        means, half = scores.mean(1, dtype=torch.float64).numpy(), len(sample) // 2
        exact_seconds = self._seconds(timed)
        self._index = index = InvertedLists(self._bank, self.k, self._place)
        for width in index.widths():
            self._width = width
            if np.abs(self._means(sample[:half]) - means[:half]).mean() > error * means.std():
                continue
            speedup = exact_seconds / self._seconds(timed)
            if speedup <= 1:
                break
            off = np.abs(self._means(sample[half:]) - means[half:])
            return Tuned(
                kind="ivf",
                width=width,
                recall=index.recall(sample[half:], width, nearest[half:]),
                mean_error=float(off.mean()),
                max_error=float(off.max()),
                share=float(off.mean() / means.std()),
                speedup=speedup,
            )
        self._index = None
        return Tuned()

    def _seconds(self, rows: torch.Tensor) -> float:
        """Return the seconds that the means of these rows take in the second run."""
        for _ in range(2):
            started = time.perf_counter()
            self._means(rows)
            taken = time.perf_counter() - started
        return taken

    def _means(self, rows: torch.Tensor) -> Array:
        if self._index is None:
            return topk_mean(rows, self._bank, self.k, device=self._device).numpy()
        means, reliable = self._index.means(rows, self._width)
        if not reliable.all():
            doubtful = rows[torch.from_numpy(~reliable)]
            means[~reliable] = topk_mean(doubtful, self._bank, self.k, device=self._device)
        return means
