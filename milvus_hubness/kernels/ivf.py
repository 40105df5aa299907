"""The first primitive, approximate: an inverted-file index over the bank, and how far off it is."""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
import torch

from milvus_hubness.kernels.arguments import whole_number
from milvus_hubness.kernels.faiss_module import import_faiss
from milvus_hubness.kernels.operands import Array, Matrix, Operands, as_tensor
from milvus_hubness.kernels.primitives import check_k, topk_mean

SAMPLE = 512
TRAINING_POINTS_PER_LIST = 39


class ApproximateMean(NamedTuple):
    """values (n,) float32; the mean and the largest |value − exact value| over `sampled` of the n rows."""

    values: Array
    mean_error: float
    max_error: float
    sampled: int


class IvfIndex:
    """A FAISS IVF index, on the CPU, over a bank B (m, d): build once, ask for many X and k.

    nlist: lists that the bank is parted into, 4·√m unless given. nprobe: lists looked into per row; unless
    given an eighth of them, or more where k is large. Raises what `topk_mean` raises for B,
    InvalidParameter for nlist > m or numbers below 1, and FaissConflict.
    """

    def __init__(
        self, B: Matrix, *, nlist: int | None = None, nprobe: int | None = None, seed: int = 0
    ) -> None:
        self._faiss = import_faiss()
        self._bank = Operands.of(B, B, "cpu").bank.float()
        size, dim = self._bank.shape
        if nlist is None:
            nlist = max(1, min(int(4 * sqrt(size)), size // TRAINING_POINTS_PER_LIST))
        self.nlist = whole_number("nlist", nlist, at_most=size)
        self.nprobe = None if nprobe is None else whole_number("nprobe", nprobe)
        self.seed = whole_number("seed", seed, at_least=0)
        quantizer = self._faiss.IndexFlatIP(dim)
        self._index = self._faiss.IndexIVFFlat(quantizer, dim, self.nlist, self._faiss.METRIC_INNER_PRODUCT)
        self._index.cp.seed = self.seed
        self._index.cp.min_points_per_centroid = 1
        self._index.train(self._bank.numpy())
        self._index.add(self._bank.numpy())

    def topk_mean(self, X: Matrix, k: int) -> ApproximateMean:
        """`values` for X and k, and the errors that they have on up to 512 rows of X, drawn with the seed."""
        values = self.values(X, k)
        rows = sample_rows(len(values), self.seed)
        if not len(rows):
            return ApproximateMean(values, 0.0, 0.0, 0)
        some = as_tensor(X[rows], torch.float32, torch.device("cpu"))
        exact = topk_mean(some, self._bank, k, device="cpu").numpy()
        errors = np.abs(values[rows] - exact)
        return ApproximateMean(values, float(errors.mean()), float(errors.max()), len(rows))

    def values(self, X: Matrix, k: int) -> Array:
        """(n,) float32: mean of the k largest inner products of each row of X (n, d) with the probed lists.

        1 ≤ k ≤ m; a row for which the lists hold fewer than k is computed exactly. Raises what the dense
        `topk_mean` raises.
        """
        operands = Operands.of(X, self._bank, "cpu")
        k = check_k(k, operands.bank)
        rows, _ = operands.tile_shape(columns=k)
        probes = self._faiss.SearchParametersIVF(nprobe=self._probes(k))
        values = np.empty(X.shape[0], np.float32)
        for part, x in operands.rows(rows):
            scores, found = self._index.search(x.numpy(), k, params=probes)
            values[part] = scores.mean(1, dtype=np.float64)
            short = (found < 0).any(1)
            if short.any():
                missed = x[torch.from_numpy(short)]
                values[part][short] = topk_mean(missed, self._bank, k, device="cpu").numpy()
        return values

    def _probes(self, k: int) -> int:
        """Unless told: an eighth of the lists, and so many that they hold about eight times k."""
        enough = ceil(8 * k * self.nlist / len(self._bank))
        return min(self.nlist, self.nprobe or max(ceil(self.nlist / 8), enough))


def sample_rows(n: int, seed: int) -> Array:
    """Up to 512 of the row numbers 0 … n − 1, in order."""
    return (
        np.sort(np.random.default_rng(seed).choice(n, min(SAMPLE, n), replace=False)) if n else np.arange(0)
    )


def topk_mean_ivf(
    X: Matrix, B: Matrix, k: int, *, nlist: int | None = None, nprobe: int | None = None, seed: int = 0
) -> ApproximateMean:
    """`topk_mean` through an `IvfIndex` made for this one call; arguments and errors are those of the two."""
    return IvfIndex(B, nlist=nlist, nprobe=nprobe, seed=seed).topk_mean(X, k)
