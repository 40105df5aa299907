"""The primitives on rows of tokens: the scores come in tiles of whole rows, from any device.

A MaxSim takes hundreds of inner products, so NumPy may do the little that is left.
"""

from __future__ import annotations

import numpy as np

from milvus_hubness.correction.kernels.checks import Array
from milvus_hubness.correction.kernels.on_numpy import largest, running_logsumexp
from milvus_hubness.correction.kernels.token_rows import TokenRows, score_rows


def topk_mean(X: TokenRows, B: TokenRows, k: int, device: str) -> Array:
    """Return means of the k largest scores, float32 (n,), 1 ≤ k ≤ m, summed in float64."""
    means = np.empty(len(X), np.float32)
    for rows, scores in score_rows(X, B, device):
        means[rows] = largest(scores, k).mean(1, dtype=np.float64)
    return means


def topk(X: TokenRows, B: TokenRows, k: int, device: str) -> tuple[Array, Array]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest scores."""
    values = np.empty((len(X), k), np.float32)
    indices = np.empty((len(X), k), np.int64)
    for rows, scores in score_rows(X, B, device):
        candidates = np.argpartition(scores, -k, axis=1)[:, -k:]
        best = np.take_along_axis(scores, candidates, 1)
        order = np.argsort(-best, axis=1)
        values[rows] = np.take_along_axis(best, order, 1)
        indices[rows] = np.take_along_axis(candidates, order, 1)
    return values, indices


def logsumexp(X: TokenRows, B: TokenRows, tau: float, weights: Array | None, device: str) -> Array:
    """Return tau · log Σ_i exp((s(x, b_i) + w_i) / tau), float32 (n,), summed in float64."""
    sums = np.empty(len(X), np.float32)
    added = np.zeros(len(B), np.float32) if weights is None else np.asarray(weights, np.float32)
    for rows, scores in score_rows(X, B, device):
        sums[rows] = running_logsumexp([scores + added], tau, len(scores), scores.dtype)
    return sums
