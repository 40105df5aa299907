"""The first primitive, sublinear: a FAISS index over the bank, tuned until its means are near enough.

Bank and gallery lie apart, on two sides of the modality gap, which k-means over the bank knows nothing of. As
s(q, r) = (q − μ)·r + μ·r, the bank may be moved by any μ without a change to the order of its rows: that, the
kind of index and how widely it looks are tried on a sample of the gallery, and the fastest that is near
enough is taken. Where none is faster than the exact kernel, that is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from milvus_hubness.errors import InvalidInput
from milvus_hubness.kernels.arguments import positive_number, whole_number
from milvus_hubness.kernels.faiss_module import import_faiss
from milvus_hubness.kernels.operands import Array, Matrix, Operands, as_tensor
from milvus_hubness.kernels.primitives import check_k, topk, topk_mean

Kind = Literal["exact", "ivf", "hnsw"]

ERROR = 0.01
SAMPLE = 1024
LEAST_SAMPLE = 32
TRAINING_POINTS_PER_LIST = 25
GRAPH_LINKS, GRAPH_WIDTH = 16, 80


class Tuned(NamedTuple):
    """What was chosen, and how it did on the half of the sample that it was not chosen on.

    kind: "exact" where no index was both near enough and faster. moved: whether the bank's mean was taken
    off. width: nprobe or ef, 0 for "exact". recall: share of the k nearest found. mean_error, max_error: of
    the means, in units of the score; share: mean_error as a share of the standard deviation of the exact
    means. speedup: seconds of the exact kernel over seconds of this one, on the sample.
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
    """Means of the k largest inner products with a bank B (m, d), for many rows like those of X (n, d).

    error: largest mean |Δ| of the means that will do, as a share of their standard deviation. kinds: the
    indexes to try. measured: how many rows the errors told of were measured on. With faiss-gpu the inverted
    lists lie on the device that `device` names. Raises what `topk_mean` raises, InvalidInput for fewer than
    32 rows of X, InvalidParameter, FaissConflict.
    """

    def __init__(
        self,
        B: Matrix,
        X: Matrix,
        k: int,
        *,
        error: float = ERROR,
        kinds: tuple[Literal["ivf", "hnsw"], ...] = ("ivf",),
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
        sample = as_tensor(X[rows], torch.float32, torch.device("cpu")).numpy()
        self.measured = len(sample) - len(sample) // 2
        self._mean = self._bank.mean(0).numpy()
        self._index: Any = None
        self.tuned = self._chosen(sample, positive_number("error", error), kinds)

    def values(self, X: Matrix) -> Array:
        """(n,) float32 means of the k largest found for rows X (n, d); a row for which fewer than k are is
        computed exactly. Raises DimensionMismatch, InvalidInput."""
        operands = Operands.of(X, self._bank, "cpu")
        values = np.empty(X.shape[0], np.float32)
        rows, _ = operands.tile_shape(columns=self.k)
        for part, x in operands.rows(rows):
            values[part] = self._means(x.numpy(), self.tuned)[0]
        return values

    def _chosen(self, sample: Array, error: float, kinds: tuple[str, ...]) -> Tuned:
        """The fastest near enough on the first half of the sample, as measured on the second."""
        self.tuned = Tuned("exact", False, 0, 1.0, 0.0, 0.0, 0.0, 1.0)
        began = time.perf_counter()
        exact, nearest = (np.asarray(each) for each in topk(sample, self._bank, self.k, device="cpu"))
        means, spent = exact.mean(1, dtype=np.float64), time.perf_counter() - began
        half = len(sample) // 2
        best, kept = self.tuned, None
        for kind in kinds:
            for moved in (False, True):
                self._index = self._built(kind, moved)
                for width in self._widths(kind):
                    tried = Tuned(kind, moved, width, 0.0, 0.0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
                    started = time.perf_counter()
                    found, columns = self._means(sample, tried)
                    taken = time.perf_counter() - started
                    off = np.abs(found - means)
                    if off[:half].mean() > error * means.std():
                        continue
                    hits = [np.isin(a, b).mean() for a, b in zip(nearest[half:], columns[half:], strict=True)]
                    apart = off[half:]
                    tried = tried._replace(
                        recall=float(np.mean(hits)),
                        mean_error=float(apart.mean()),
                        max_error=float(apart.max()),
                        share=float(apart.mean() / means.std()),
                        speedup=spent / taken,
                    )
                    if tried.speedup > best.speedup:
                        best, kept = tried, self._index
                    break
        self._index = kept
        return best

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
        """On the GPU where FAISS has been built for it and one was asked for."""
        if not self._device.startswith("cuda") or not hasattr(self._faiss, "StandardGpuResources"):
            return index
        number = int(self._device.partition(":")[2] or 0)
        return self._faiss.index_cpu_to_gpu(self._faiss.StandardGpuResources(), number, index)

    @property
    def _lists(self) -> int:
        size = len(self._bank)
        return max(1, min(int(8 * sqrt(size)), size // TRAINING_POINTS_PER_LIST))

    def _widths(self, kind: str) -> Iterator[int]:
        """From narrow to wide, each half as wide again as the one before."""
        width, most = (self.k, len(self._bank)) if kind == "hnsw" else (1, self._lists)
        while width < most:
            yield width
            width = max(width + 1, width * 3 // 2)
        yield most

    def _means(self, rows: Array, how: Tuned) -> tuple[Array, Array]:
        """(n,) means and (n, k) columns of what is found."""
        if how.kind == "exact":
            found = topk_mean(rows, self._bank, self.k, device="cpu")
            return np.asarray(found), np.empty((len(rows), 0), np.int64)
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
