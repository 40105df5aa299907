"""The primitives on NumPy, block by block, for search services, which do without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from milvus_hubness.correction.kernels.checks import Array
from milvus_hubness.correction.kernels.policy import POLICY

LEAST_ROWS = 64
"""Rows of X in a block, if X has so many: with fewer, the products take longer."""


def topk_mean(X: Array, B: Array, k: int) -> Array:
    """Return means of the k largest products, (n,), 1 ≤ k ≤ m.

    The k values are summed in float64.
    """
    if k == len(B):
        center = B.mean(0, dtype=np.float64)
        means_of_all: Array = (X @ center).astype(_dtype(X, B))
        return means_of_all

    means = np.empty(len(X), _dtype(X, B))
    for rows, x in _row_blocks(X, B, k):
        best = x[:, :0]
        for _, scores in _score_blocks(x, B, k):
            best = largest(np.hstack([best, largest(scores, k)]), k)
        means[rows] = best.mean(1, dtype=np.float64)
    return means


def topk(X: Array, B: Array, k: int) -> tuple[Array, Array]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    values = np.empty((len(X), k), _dtype(X, B))
    indices = np.empty((len(X), k), np.int64)
    for rows, x in _row_blocks(X, B, k):
        best = x[:, :0]
        best_columns = np.empty((len(x), 0), np.int64)
        for start, scores in _score_blocks(x, B, k):
            candidate_count = min(k, scores.shape[1])
            candidates = np.argpartition(scores, -candidate_count, axis=1)[:, -candidate_count:]
            best = np.hstack([best, np.take_along_axis(scores, candidates, 1)])
            best_columns = np.hstack([best_columns, candidates + start])

            order = np.argsort(-best, axis=1)[:, :k]
            best = np.take_along_axis(best, order, 1)
            best_columns = np.take_along_axis(best_columns, order, 1)
        values[rows] = best
        indices[rows] = best_columns
    return values, indices


def logsumexp(X: Array, B: Array, tau: float, weights: Array | None) -> Array:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), (n,).

    It is summed in float64, under a running maximum.
    """
    dtype = _dtype(X, B)
    result = np.empty(len(X), dtype)
    added = np.zeros(len(B), dtype) if weights is None else weights.astype(dtype)
    for rows, x in _row_blocks(X, B, 1):
        tiles = (
            scores + added[start : start + scores.shape[1]]
            for start, scores in _score_blocks(x, B, 1)
        )
        result[rows] = running_logsumexp(tiles, tau, len(x), x.dtype)
    return result


def running_logsumexp(tiles: Iterable[Array], tau: float, row_count: int, dtype: np.dtype) -> Array:
    """Return tau · log Σ exp(s / tau), float64 (n,), along the rows of all tiles (n, p).

    The tiles are overwritten. Each sum is that of exp((s − largest) / tau), with the largest score
    so far, so that nothing overflows; a larger score rescales it.
    """
    # A smaller tau would divide by a number that the dtype rounds to 0.
    tau = max(tau, float(np.finfo(dtype).tiny))
    largest = np.full((row_count, 1), np.finfo(dtype).min, dtype)
    total = np.zeros((row_count, 1))
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for scores in tiles:
            new_largest = np.maximum(largest, scores.max(1, keepdims=True))
            scores -= new_largest
            scores /= tau
            np.exp(scores, out=scores)

            rescale = np.exp((largest - new_largest) / tau)
            total = total * rescale + scores.sum(1, keepdims=True, dtype=np.float64)
            largest = new_largest
        return (largest + tau * np.log(total))[:, 0]


def largest(scores: Array, k: int) -> Array:
    """Return the k largest numbers of each row, unsorted, or all if there are no more.

    `scores` is reordered.
    """
    if scores.shape[1] > k:
        scores.partition(scores.shape[1] - k, axis=1)
    return scores[:, -k:]


def _dtype(X: Array, B: Array) -> type[np.floating]:
    return np.float64 if X.dtype == B.dtype == np.float64 else np.float32


def _row_blocks(X: Array, B: Array, k: int) -> Iterator[tuple[slice, Array]]:
    """Yield X in blocks of rows."""
    row_count = max(1, POLICY.get().tile_size_of("numpy") // _width(X, B, k))
    for start in range(0, len(X), row_count):
        rows = slice(start, start + row_count)
        yield rows, np.ascontiguousarray(X[rows], _dtype(X, B))


def _score_blocks(x: Array, B: Array, k: int) -> Iterator[tuple[int, Array]]:
    """Yield the products of rows x with all rows of B in turn, and the number of the first row."""
    width = _width(x, B, k)
    for start in range(0, len(B), width):
        yield start, x @ np.asarray(B[start : start + width], x.dtype).T


def _width(X: Array, B: Array, k: int) -> int:
    """Return how many rows of B make a block: at least k."""
    row_count = max(1, min(len(X), LEAST_ROWS))
    fitting = POLICY.get().tile_size_of("numpy") // row_count
    return min(len(B), max(k, fitting))
