"""The primitives on NumPy, block by block, for search services, which do without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from milvus_hubness.correction.kernels.primitives import POLICY, Array

LEAST_ROWS = 64
"""Rows of X in a block, if X has so many: with fewer, the products take longer."""


def topk_mean(X: Array, B: Array, k: int) -> tuple[Array]:
    """Return means of the k largest products, (n,), 1 ≤ k ≤ m; the k values are summed in float64."""
    if k == len(B):
        return ((X @ B.mean(0, dtype=np.float64)).astype(_dtype(X, B)),)
    means = np.empty(len(X), _dtype(X, B))
    for rows, x in _rows(X, B, k):
        best = x[:, :0]
        for _, scores in _scores(x, B, k):
            best = _largest(np.hstack([best, _largest(scores, k)]), k)
        means[rows] = best.mean(1, dtype=np.float64)
    return (means,)


def topk(X: Array, B: Array, k: int) -> tuple[Array, Array]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    values, indices = np.empty((len(X), k), _dtype(X, B)), np.empty((len(X), k), np.int64)
    for rows, x in _rows(X, B, k):
        best, places = x[:, :0], np.empty((len(x), 0), np.int64)
        for start, scores in _scores(x, B, k):
            near = np.argpartition(scores, -min(k, scores.shape[1]), axis=1)[:, -k:]
            best = np.hstack([best, np.take_along_axis(scores, near, 1)])
            places = np.hstack([places, near + start])
            order = np.argsort(-best, axis=1)[:, :k]
            best, places = np.take_along_axis(best, order, 1), np.take_along_axis(places, order, 1)
        values[rows], indices[rows] = best, places
    return values, indices


def logsumexp(X: Array, B: Array, tau: float, weights: Array | None) -> tuple[Array]:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), (n,), under a running maximum and summed in float64."""
    result = np.empty(len(X), _dtype(X, B))
    for rows, x in _rows(X, B, 1):
        own = np.zeros(len(B), x.dtype) if weights is None else weights.astype(x.dtype)
        tiles = (
            scores + own[start : start + scores.shape[1]] for start, scores in _scores(x, B, 1)
        )
        result[rows] = _running_logsumexp(tiles, tau, len(x), x.dtype)
    return (result,)


def _running_logsumexp(tiles: Iterable[Array], tau: float, rows: int, dtype: np.dtype) -> Array:
    """Return tau · log Σ exp(s / tau), float64 (n,), along the rows of all tiles (n, p), which are overwritten."""
    tau = max(tau, float(np.finfo(dtype).tiny))
    largest, total = np.full((rows, 1), np.finfo(dtype).min, dtype), np.zeros((rows, 1))
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for scores in tiles:
            above = np.maximum(largest, scores.max(1, keepdims=True))
            scores -= above
            scores /= tau
            np.exp(scores, out=scores)
            total = total * np.exp((largest - above) / tau) + scores.sum(
                1, keepdims=True, dtype=np.float64
            )
            largest = above
        return (largest + tau * np.log(total))[:, 0]


def _largest(scores: Array, k: int) -> Array:
    """Return the k largest numbers of each row, unsorted, or all if there are no more; `scores` is reordered."""
    if scores.shape[1] > k:
        scores.partition(scores.shape[1] - k, axis=1)
    return scores[:, -k:]


def _dtype(X: Array, B: Array) -> type[np.floating]:
    return np.float64 if X.dtype == B.dtype == np.float64 else np.float32


def _rows(X: Array, B: Array, k: int) -> Iterator[tuple[slice, Array]]:
    """Yield X in blocks of rows."""
    size = max(1, POLICY.get().tile_size_of("numpy") // _width(X, B, k))
    for start in range(0, len(X), size):
        rows = slice(start, start + size)
        yield rows, np.ascontiguousarray(X[rows], _dtype(X, B))


def _scores(x: Array, B: Array, k: int) -> Iterator[tuple[int, Array]]:
    """Yield the products of rows x with all rows of B in turn, and the number of the first of these."""
    width = _width(x, B, k)
    for start in range(0, len(B), width):
        yield start, x @ np.asarray(B[start : start + width], x.dtype).T


def _width(X: Array, B: Array, k: int) -> int:
    """Return how many rows of B make a block: at least k."""
    return min(
        len(B), max(k, POLICY.get().tile_size_of("numpy") // max(1, min(len(X), LEAST_ROWS)))
    )
