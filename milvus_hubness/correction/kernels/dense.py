"""The primitives on torch, tile by tile, on any device.

On a CPU, FAISS finds the k largest products of many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

import torch

from milvus_hubness.correction.kernels.operands import Operands, faiss_with_own_threads, share_out
from milvus_hubness.correction.kernels.policy import POLICY

LEAST_ROWS = 256
"""Rows of a part from which FAISS is worth its call: with fewer it is many times slower."""
MOST_ROWS = 1024
"""Rows of a part beyond which FAISS is no faster."""


def topk_mean(operands: Operands, k: int) -> tuple[torch.Tensor]:
    """Return means of the k largest products, (n,), 1 ≤ k ≤ m.

    The k values are summed in float64.
    """
    means = operands.empty(operands.X.shape[0])
    if k == len(operands.bank):
        # The mean of all products is the product with the mean.
        center = operands.bank.mean(0, dtype=torch.float64)
        row_count, _ = operands.tile_shape()
        for part, x in operands.rows(row_count):
            means[part] = x.double() @ center
        return (means,)

    def take(part: slice, best: torch.Tensor, _: torch.Tensor) -> None:
        means[part] = best.sum(1, dtype=torch.float64) / k

    _find_largest(operands, k, take)
    return (means,)


def topk(operands: Operands, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    row_count = operands.X.shape[0]
    values = operands.empty(row_count, k)
    indices = operands.empty(row_count, k, dtype=torch.int64)

    def take(part: slice, best: torch.Tensor, columns: torch.Tensor) -> None:
        values[part], order = best.sort(1, descending=True)
        indices[part] = columns.gather(1, order)

    _find_largest(operands, k, take)
    return values, indices


def logsumexp(operands: Operands, tau: float, weights: torch.Tensor) -> tuple[torch.Tensor]:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), (n,).

    It is summed in float64, under a running maximum.
    """
    result = operands.empty(operands.X.shape[0])
    row_count, columns = operands.tile_shape()
    # Two parts for each thread, so that none waits long for the last.
    row_count = min(row_count, max(LEAST_ROWS, -(-len(result) // (2 * operands.threads))))

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        tiles = (scores.add_(weights[span]) for span, scores in operands.scores(x, columns))
        result[part] = running_logsumexp(tiles, tau, x.new_empty(len(x)))

    share_out(work, operands.rows(row_count), operands.threads)
    return (result,)


def running_logsumexp(
    tiles: Iterable[torch.Tensor], tau: float, like: torch.Tensor
) -> torch.Tensor:
    """Return tau · log Σ exp(s / tau), like `like` (n,), along the rows of all tiles (n, p).

    The tiles are overwritten. Each sum is that of exp((s − largest) / tau), with the largest score
    so far, so that nothing overflows; a larger score rescales it.
    """
    largest = like.new_full((len(like), 1), torch.finfo(like.dtype).min)
    total = like.new_zeros((len(like), 1), dtype=torch.float64)
    for scores in tiles:
        new_largest = torch.maximum(largest, scores.amax(1, keepdim=True))
        rescale = ((largest - new_largest) / tau).exp_()
        terms = scores.sub_(new_largest).div_(tau).exp_()
        total = total * rescale + terms.sum(1, keepdim=True)
        largest = new_largest
    return (largest + tau * total.log_()).squeeze(1).to(like.dtype)


def _find_largest(
    operands: Operands, k: int, take: Callable[[slice, torch.Tensor, torch.Tensor], None]
) -> None:
    """Find the k largest products of all rows of X, by FAISS where that is faster.

    `take` is called with each part of X, the products and their columns, both (rows, k), unsorted.
    """
    row_count = operands.X.shape[0]
    bank = operands.bank
    most_rows = min(MOST_ROWS, POLICY.get().tile_size_of("cpu") // k)
    is_for_faiss = (
        not bank.is_cuda
        and bank.dtype == torch.float32
        and min(row_count, most_rows) >= LEAST_ROWS
        and find_spec("faiss") is not None
    )
    if not is_for_faiss:
        for part, best, columns in _running_topk(operands, k):
            take(part, best, columns)
        return

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        with faiss_with_own_threads() as faiss:
            best, columns = faiss.knn(x.numpy(), bank.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
        take(part, torch.from_numpy(best), torch.from_numpy(columns))

    # Two parts for each thread, so that none waits long for the last, but of sizes good for FAISS.
    least_parts = -(-row_count // most_rows)
    part_count = max(least_parts, min(2 * operands.threads, row_count // LEAST_ROWS))
    share_out(work, operands.rows(-(-row_count // part_count)), operands.threads)


def _running_topk(operands: Operands, k: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield parts of X, the k largest products of their rows, and the columns of these.

    Both are (rows, k), unsorted.
    """
    row_count, column_count = operands.tile_shape(columns=k, spare_columns=k)
    for part, x in operands.rows(row_count):
        best = x.new_empty(len(x), 0)
        best_columns = best.long()
        for span, scores in operands.scores(x, column_count):
            of_tile, in_tile = scores.topk(min(k, scores.shape[1]), dim=1, sorted=False)
            best = torch.cat([best, of_tile], 1)
            best_columns = torch.cat([best_columns, in_tile + span.start], 1)
            if best.shape[1] > k:
                best, chosen = best.topk(k, dim=1, sorted=False)
                best_columns = best_columns.gather(1, chosen)
        yield part, best, best_columns
