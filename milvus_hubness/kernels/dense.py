"""The primitives on torch, tile by tile, on any device; also the log-sum-exp over cached scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from milvus_hubness.kernels.operands import Operands, full_precision, product
from milvus_hubness.kernels.primitives import POLICY


def topk_mean(operands: Operands, k: int) -> tuple[torch.Tensor]:
    """Return means of the k largest products, (n,), 1 ≤ k ≤ m; the k values are summed in float64."""
    means = operands.empty(operands.X.shape[0])
    if k == len(operands.bank):
        center = operands.bank.mean(0, dtype=torch.float64)
        for part, x in operands.rows(operands.tile_shape()[0]):
            means[part] = x.double() @ center
    else:
        for part, best, _ in _running_topk(operands, k):
            means[part] = best.sum(1, dtype=torch.float64) / k
    return (means,)


def topk(operands: Operands, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    n = operands.X.shape[0]
    values, indices = operands.empty(n, k), operands.empty(n, k, dtype=torch.int64)
    for part, best, places in _running_topk(operands, k):
        values[part], order = best.sort(1, descending=True)
        indices[part] = places.gather(1, order)
    return values, indices


def logsumexp(operands: Operands, tau: float, weights: torch.Tensor) -> tuple[torch.Tensor]:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), (n,), under a running maximum and summed in float64."""
    result = operands.empty(operands.X.shape[0])
    rows, columns = operands.tile_shape()
    for part, x in operands.rows(rows):
        tiles = (product(x, tile).add_(weights[span]) for span, tile in operands.columns(columns))
        result[part] = running_logsumexp(tiles, tau, x.new_empty(len(x)))
    return (result,)


def running_logsumexp(tiles: Iterable[torch.Tensor], tau: float, like: torch.Tensor) -> torch.Tensor:
    """Return tau · log Σ exp(s / tau), like `like` (n,), along the rows of all tiles (n, p), which are overwritten."""
    largest = like.new_full((len(like), 1), torch.finfo(like.dtype).min)
    total = like.new_zeros((len(like), 1), dtype=torch.float64)
    for scores in tiles:
        above = torch.maximum(largest, scores.amax(1, keepdim=True))
        rescale = ((largest - above) / tau).exp_()
        total = total * rescale + scores.sub_(above).div_(tau).exp_().sum(1, keepdim=True)
        largest = above
    return (largest + tau * total.log_()).squeeze(1).to(like.dtype)


def _running_topk(operands: Operands, k: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield parts of X, the k largest products of their rows, and the places of these, both (rows, k), unsorted."""
    rows, columns = operands.tile_shape(columns=k, spare_columns=k)
    for part, x in operands.rows(rows):
        best = x.new_empty(len(x), 0)
        places = best.long()
        for span, tile in operands.columns(columns):
            scores = product(x, tile)
            fresh, where = scores.topk(min(k, scores.shape[1]), dim=1, sorted=False)
            best = torch.cat([best, fresh], 1)
            places = torch.cat([places, where + span.start], 1)
            if best.shape[1] > k:
                best, chosen = best.topk(k, dim=1, sorted=False)
                places = places.gather(1, chosen)
        yield part, best, places


def cached_scores(X: torch.Tensor, B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return inner products of X (n, d) and B (m, d), on one device, (n, m) in `dtype`, float32 or float16."""
    scores = X.new_empty(len(X), len(B), dtype=dtype)
    size = max(1, POLICY.get().tile_size_of(X.device.type) // len(B))
    with full_precision(X.device):
        for start in range(0, len(X), size):
            scores[start : start + size] = product(X[start : start + size], B.T)
    return scores


def cached_logsumexp(scores: torch.Tensor, tau: float, weights: torch.Tensor) -> torch.Tensor:
    """Return tau · log Σ_j exp((s_ij + w_j) / tau) of scores (n, m), as they are or transposed, float32 (n,). weights:
    (m,) float32. Needs no memory as large as the scores."""
    size = max(1, POLICY.get().tile_size_of(scores.device.type) // scores.shape[1])
    with full_precision(scores.device):
        parts = [
            running_logsumexp([tile.float() + weights], tau, weights.new_empty(len(tile)))
            for tile in torch.split(scores, size)
        ]
    return torch.cat(parts)
