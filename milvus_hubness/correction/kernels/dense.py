"""The primitives on torch, tile by tile, on any device; on a CPU, FAISS finds the k largest of many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

import torch

from milvus_hubness.correction.kernels.operands import Operands, faiss_with_own_threads, share_out
from milvus_hubness.correction.kernels.primitives import POLICY

LEAST_ROWS, MOST_ROWS = 256, 1024
"""Rows of a part: with fewer FAISS is many times slower, and with more no faster."""


def topk_mean(operands: Operands, k: int) -> tuple[torch.Tensor]:
    """Return means of the k largest products, (n,), 1 ≤ k ≤ m; the k values are summed in float64."""
    means = operands.empty(operands.X.shape[0])
    if k == len(operands.bank):
        center = operands.bank.mean(0, dtype=torch.float64)
        for part, x in operands.rows(operands.tile_shape()[0]):
            means[part] = x.double() @ center
    else:

        def take(part: slice, best: torch.Tensor, _: torch.Tensor) -> None:
            means[part] = best.sum(1, dtype=torch.float64) / k

        _find_largest(operands, k, take)
    return (means,)


def topk(operands: Operands, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    n = operands.X.shape[0]
    values, indices = operands.empty(n, k), operands.empty(n, k, dtype=torch.int64)

    def take(part: slice, best: torch.Tensor, places: torch.Tensor) -> None:
        values[part], order = best.sort(1, descending=True)
        indices[part] = places.gather(1, order)

    _find_largest(operands, k, take)
    return values, indices


def logsumexp(operands: Operands, tau: float, weights: torch.Tensor) -> tuple[torch.Tensor]:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), (n,), under a running maximum and summed in float64."""
    result = operands.empty(operands.X.shape[0])
    rows, columns = operands.tile_shape()
    rows = min(rows, max(LEAST_ROWS, -(-len(result) // (2 * operands.threads))))

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        tiles = (scores.add_(weights[span]) for span, scores in operands.scores(x, columns))
        result[part] = running_logsumexp(tiles, tau, x.new_empty(len(x)))

    share_out(work, operands.rows(rows), operands.threads)
    return (result,)


def running_logsumexp(
    tiles: Iterable[torch.Tensor], tau: float, like: torch.Tensor
) -> torch.Tensor:
    """Return tau · log Σ exp(s / tau), like `like` (n,), along the rows of all tiles (n, p), which are overwritten."""
    largest = like.new_full((len(like), 1), torch.finfo(like.dtype).min)
    total = like.new_zeros((len(like), 1), dtype=torch.float64)
    for scores in tiles:
        above = torch.maximum(largest, scores.amax(1, keepdim=True))
        rescale = ((largest - above) / tau).exp_()
        total = total * rescale + scores.sub_(above).div_(tau).exp_().sum(1, keepdim=True)
        largest = above
    return (largest + tau * total.log_()).squeeze(1).to(like.dtype)


def _find_largest(
    operands: Operands, k: int, take: Callable[[slice, torch.Tensor, torch.Tensor], None]
) -> None:
    """Call `take` with parts of X, the k largest products of their rows, and the places of these, both (rows, k)."""
    n, bank = operands.X.shape[0], operands.bank
    most = min(MOST_ROWS, POLICY.get().tile_size_of("cpu") // k)
    if (
        bank.is_cuda
        or bank.dtype != torch.float32
        or min(n, most) < LEAST_ROWS
        or find_spec("faiss") is None
    ):
        for part, best, places in _running_topk(operands, k):
            take(part, best, places)
        return

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        with faiss_with_own_threads() as faiss:
            best, places = faiss.knn(x.numpy(), bank.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
        take(part, torch.from_numpy(best), torch.from_numpy(places))

    parts = max(-(-n // most), min(2 * operands.threads, n // LEAST_ROWS))
    share_out(work, operands.rows(-(-n // parts)), operands.threads)


def _running_topk(operands: Operands, k: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield parts of X, the k largest products of their rows, and the places of these, both (rows, k), unsorted."""
    rows, columns = operands.tile_shape(columns=k, spare_columns=k)
    for part, x in operands.rows(rows):
        best = x.new_empty(len(x), 0)
        places = best.long()
        for span, scores in operands.scores(x, columns):
            fresh, where = scores.topk(min(k, scores.shape[1]), dim=1, sorted=False)
            best = torch.cat([best, fresh], 1)
            places = torch.cat([places, where + span.start], 1)
            if best.shape[1] > k:
                best, chosen = best.topk(k, dim=1, sorted=False)
                places = places.gather(1, chosen)
        yield part, best, places
