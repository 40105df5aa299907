"""The log-sum-exp over scores that were computed once and are kept, for iterations over the same pairs."""

from __future__ import annotations

import torch

from milvus_hubness.kernels import dense
from milvus_hubness.kernels.devices import full_precision, kernel_on
from milvus_hubness.kernels.operands import TILE_SIZE


def cached_scores(X: torch.Tensor, B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(n, m) inner products of X (n, d) and B (m, d), on one device, kept in `dtype`, float32 or float16."""
    scores = X.new_empty(len(X), len(B), dtype=dtype)
    size = max(1, TILE_SIZE[X.device.type] // len(B))
    with full_precision(X.device):
        for start in range(0, len(X), size):
            scores[start : start + size] = X[start : start + size] @ B.T
    return scores


def cached_logsumexp(scores: torch.Tensor, tau: float, weights: torch.Tensor) -> torch.Tensor:
    """(n,) float32 tau · log Σ_j exp((s_ij + w_j) / tau) of scores (n, m), as they are or transposed.

    weights: (m,) float32. Nothing as large as the scores is made.
    """
    if kernel_on(scores.device) == "fused":
        from milvus_hubness.kernels import fused

        return fused.cached_logsumexp(scores, tau, weights)
    n, m = scores.shape
    result = weights.new_empty(n)
    size = max(1, TILE_SIZE[scores.device.type] // m)
    with full_precision(scores.device):
        for start in range(0, n, size):
            part = slice(start, start + size)
            tile = scores[part].float() + weights
            result[part] = dense.running_logsumexp([tile], tau, result[part])
    return result
