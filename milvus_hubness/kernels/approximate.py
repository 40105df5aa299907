"""Approximate top-k means: an index over the bank, tuned until its error is small enough.

Bank and gallery are on two sides of the modality gap, which k-means over the bank does not take into account.
As s(q, r) = (q − μ)·r + μ·r, the bank may be shifted by any μ without a change to the order of its rows. That
shift, the kind of index and the width of its search are tried on a sample of the gallery, and the fastest
choice that is accurate enough wins. If none is faster than the exact kernel, the exact kernel wins. "routed"
is this package's own index, which finds no neighbours but estimates their mean; "ivf" and "hnsw" are FAISS's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import sqrt
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from milvus_hubness.errors import InvalidInput
from milvus_hubness.kernels.operands import (
    Array,
    Matrix,
    Operands,
    as_tensor,
    import_faiss,
    one_of,
    positive_number,
    whole_number,
)
from milvus_hubness.kernels.primitives import check_k, topk, topk_mean
from milvus_hubness.kernels.routed import RoutedBank, Routing

Kind = Literal["exact", "routed", "ivf", "hnsw"]
Tried = Literal["routed", "ivf", "hnsw"]

ERROR = 0.01
SAMPLE = 1024
LEAST_SAMPLE = 32
TRAINING_POINTS_PER_LIST = 25
GRAPH_LINKS, GRAPH_WIDTH = 16, 80
ROUTED_SHARES = (0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.25)
LEAST_ROUTED = 2_000
"""Smallest bank that is divided into lists."""

TIMED = 8192
ROWS_AT_ONCE = 1 << 16


class Tuned(NamedTuple):
    """The chosen kernel, and its results on the half of the sample that it was not chosen on.

    kind: "exact" if no index was both accurate enough and faster. moved: whether the bank's mean was
    subtracted. width: nprobe or ef; for "routed" the thousandths of the bank that a row reads on average; 0
    for "exact". recall: share of the k nearest that were found, or that are in the lists read. mean_error,
    max_error: of the means, in units of the score; share: mean_error as a share of the standard deviation of
    the exact means. speedup: seconds of the exact kernel over seconds of this one, on up to 8,192 rows.
    """

    kind: Kind
    moved: bool
    width: int
    recall: float
    mean_error: float
    max_error: float
    share: float
    speedup: float


class ApproximateBank:
    """Means of the k largest inner products with a bank B (m, d), for many rows similar to those of X (n, d).

    error: largest acceptable mean |Δ| of the means, as a share of their standard deviation. kinds: the
    indexes to try. measured: how many rows the reported errors were measured on. With faiss-gpu the inverted
    lists are on the device that `device` names. Raises as `topk_mean` does, InvalidInput for fewer than 32
    rows of X, InvalidParameter, FaissConflict.
    """

    def __init__(
        self,
        B: Matrix,
        X: Matrix,
        k: int,
        *,
        error: float = ERROR,
        kinds: tuple[Tried, ...] = ("routed", "ivf"),
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self._faiss = import_faiss()
        operands = Operands.of(X, B, "cpu")
        self._bank = operands.bank.float().contiguous()
        self.k = check_k(k, self._bank)
        self._device = device
        self._seed = whole_number("seed", seed, at_least=0)
        if X.shape[0] < LEAST_SAMPLE:
            raise InvalidInput(f"an index is tuned on {LEAST_SAMPLE} rows at least, not {X.shape[0]}")
        rng = np.random.default_rng(self._seed)
        rows = rng.choice(X.shape[0], min(SAMPLE, X.shape[0]), replace=False)
        here = torch.device("cpu")
        sample = as_tensor(X[rows], torch.float32, here).numpy()
        timed = rng.choice(X.shape[0], min(TIMED, X.shape[0]), replace=False)
        self._timed = as_tensor(X[timed], torch.float32, here).numpy()
        self.measured = len(sample) - len(sample) // 2
        self._mean = self._bank.mean(0).numpy()
        self._index: Any = None
        self._routing: Routing | None = None
        for kind in kinds:
            one_of("kinds", kind, get_args(Tried))
        self.tuned = self._chosen(sample, positive_number("error", error), kinds)
        del self._timed

    def values(self, X: Matrix) -> Array:
        """Return means of the k largest found for rows X (n, d), float32 (n,).

        A row with fewer than k results is computed exactly. Raises DimensionMismatch, InvalidInput.
        """
        operands = Operands.of(X, self._bank, "cpu")
        values = np.empty(X.shape[0], np.float32)
        for part, x in operands.rows(ROWS_AT_ONCE):
            values[part] = self._means(x.numpy(), self.tuned)[0]
        return values

    def _chosen(self, sample: Array, error: float, kinds: tuple[Tried, ...]) -> Tuned:
        """Return the fastest choice that is accurate enough on the first half of the sample, as measured on
        the second half.
        """
        self.tuned = Tuned("exact", False, 0, 1.0, 0.0, 0.0, 0.0, 1.0)
        exact, nearest = (np.asarray(each) for each in topk(sample, self._bank, self.k, device="cpu"))
        means, half = exact.mean(1, dtype=np.float64), len(sample) // 2
        spent = self._seconds(self.tuned)
        best = self.tuned
        kept: tuple[Any, Routing | None] = (None, None)
        for how in self._tries(kinds, sample[:half], exact[:half]):
            first = self._means(sample[:half], how)[0]
            if np.abs(first - means[:half]).mean() > error * means.std():
                continue
            speedup = spent / self._seconds(how)
            if speedup > best.speedup:
                found, columns = self._means(sample[half:], how)
                off = np.abs(found - means[half:])
                best, kept = (
                    how._replace(
                        recall=self._recall(sample[half:], how, nearest[half:], columns),
                        mean_error=float(off.mean()),
                        max_error=float(off.max()),
                        share=float(off.mean() / means.std()),
                        speedup=speedup,
                    ),
                    (self._index, self._routing),
                )
            self._enough = True
        self._index, self._routing = kept
        return best

    def _tries(self, kinds: tuple[Tried, ...], sample: Array, exact: Array) -> Iterator[Tuned]:
        """Yield choices that may be accurate enough, each kind from narrow to wide, until `_enough` is
        set."""
        for kind in kinds:
            for moved in (False, True) if kind != "routed" else (False,):
                self._enough = False
                for width in self._prepared(kind, moved, sample, exact):
                    yield Tuned(kind, moved, width, 0.0, 0.0, 0.0, 0.0, 0.0)
                    if self._enough:
                        break

    def _prepared(self, kind: Tried, moved: bool, sample: Array, exact: Array) -> Iterator[int]:
        """Yield the widths to try, after the index is built and the routing of each width learned."""
        if kind != "routed":
            self._index = self._built(kind, moved)
            yield from self._widths(kind)
        elif len(self._bank) >= LEAST_ROUTED:
            self._index = RoutedBank(self._bank, self._seed)
            x, near = torch.from_numpy(sample), torch.from_numpy(exact)
            for share, routing in self._index.routings(x, self.k, near, ROUTED_SHARES):
                self._routing = routing
                yield round(1000 * share)

    def _seconds(self, how: Tuned) -> float:
        """Return the seconds that the means of the timed rows take in the second run."""
        for _ in range(2):
            started = time.perf_counter()
            self._means(self._timed, how)
            taken = time.perf_counter() - started
        return taken

    def _recall(self, rows: Array, how: Tuned, nearest: Array, columns: Array) -> float:
        if how.kind != "routed":
            return float(np.mean([np.isin(a, b).mean() for a, b in zip(nearest, columns, strict=True)]))
        looked = self._index.looked_into(torch.from_numpy(rows), self._routing)
        return float(looked.gather(1, torch.from_numpy(nearest)).float().mean())

    def _built(self, kind: str, moved: bool) -> Any:
        rows = self._bank.numpy() - self._mean if moved else self._bank.numpy()
        dim = rows.shape[1]
        if kind == "hnsw":
            index = self._faiss.IndexHNSWFlat(dim, GRAPH_LINKS, self._faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = GRAPH_WIDTH
        else:
            lists = self._lists
            coarse = self._faiss.IndexFlatIP(dim)
            index = self._faiss.IndexIVFFlat(coarse, dim, lists, self._faiss.METRIC_INNER_PRODUCT)
            index.cp.seed = self._seed
            index.cp.min_points_per_centroid = 1
            index.cp.max_points_per_centroid = TRAINING_POINTS_PER_LIST
            index = self._on_device(index)
            index.train(rows)
        index.add(rows)
        return index

    def _on_device(self, index: Any) -> Any:
        """Return the index on the GPU, if FAISS supports it and `device` names one."""
        if not self._device.startswith("cuda") or not hasattr(self._faiss, "StandardGpuResources"):
            return index
        number = int(self._device.partition(":")[2] or 0)
        return self._faiss.index_cpu_to_gpu(self._faiss.StandardGpuResources(), number, index)

    @property
    def _lists(self) -> int:
        size = len(self._bank)
        return max(1, min(int(8 * sqrt(size)), size // TRAINING_POINTS_PER_LIST))

    def _widths(self, kind: str) -> Iterator[int]:
        """Yield widths from narrow to wide, each half as wide again as the one before."""
        width, most = (self.k, len(self._bank)) if kind == "hnsw" else (1, self._lists)
        while width < most:
            yield width
            width = max(width + 1, width * 3 // 2)
        yield most

    def _means(self, rows: Array, how: Tuned) -> tuple[Array, Array]:
        """Return means (n,) and columns (n, k) of the results.

        The columns are (n, 0) if the kernel does not find rows.
        """
        if how.kind == "exact":
            found = topk_mean(rows, self._bank, self.k, device="cpu")
            return np.asarray(found), np.empty((len(rows), 0), np.int64)
        if how.kind == "routed":
            means, sure = self._index.means(torch.from_numpy(rows), self._routing)
            if not sure.all():
                means[~sure] = topk_mean(rows[~sure], self._bank, self.k, device="cpu")
            return means, np.empty((len(rows), 0), np.int64)
        if how.kind == "hnsw":
            params = self._faiss.SearchParametersHNSW(efSearch=how.width)
        else:
            params = self._faiss.SearchParametersIVF(nprobe=how.width)
        scores, columns = self._index.search(rows, self.k, params=params)
        means = scores.mean(1, dtype=np.float64)
        if how.moved:
            means += rows @ self._mean
        short = (columns < 0).any(1)
        if short.any():
            means[short] = topk_mean(rows[short], self._bank, self.k, device="cpu")
        return means, columns
