"""Top-k means on devices with native bfloat16, CPUs and CUDA: screened in bfloat16, then computed exactly.

The screen subtracts the mean of the bank, which changes all scores of a row by the same number. It subtracts the mean c
of X too, and adds c·b in float32, as three more columns of the bank, if there is room for them or c is large. Rounding
both factors and the product to bfloat16 changes a score by at most an error e, computed for each row. A lower bound of
the k-th largest score is the k-th largest of the maxima of many groups of scores; all scores that reach that bound less
2·e are computed again in float32. The dense kernel computes rows with too many of them, as with many ties.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from milvus_hubness.correction.kernels import dense
from milvus_hubness.correction.kernels.operands import (
    Operands,
    as_tensor,
    faiss_with_own_threads,
    share_out,
)
from milvus_hubness.correction.kernels.policy import POLICY

Results: TypeAlias = tuple[torch.Tensor, ...]

SECOND_CACHE, THIRD_CACHE = 1 << 20, 32 << 20
"""Assumed bytes of the caches of a core and of a CPU: the least that CPUs with native bfloat16 have."""
ALIGNED = 64
"""Factor of the width of rounded vectors: cuBLAS is slow for widths such as 514."""
PARTS = 3
"""Numbers in bfloat16 whose sum is one in float32."""
LARGE_MEAN = 0.8
"""Norm of the mean of X, as a share of the mean norm, from which it is worth more columns."""
GROUP, GROUPS_TOGETHER = 8, 8
LEAST_COLUMNS, CUDA_ROWS = 1 << 14, 4096
LEAST_GROUPS = 4
"""Least number of groups for each of the k: with fewer, two of the k largest fall into one group."""
MOST_SELECTED = 8
"""Largest number of selected groups of a row for each of the k; or, if more, the usual share of all groups."""
USUAL_SHARE = 1 / 16
HALF_UNIT = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
SUM_UNIT = 2.0**-22
"""Largest error of a term of a sum in float32, in units of the product of the norms: it covers any order, tensor cores,
which cut instead of rounding, and the rounding of the centred bank and of the norms."""


class Tiles(NamedTuple):
    """Rows of X and of the bank whose scores are in memory at once."""

    rows: int
    columns: int


class _Bank(NamedTuple):
    """The bank in two precisions. exact: (m, d) float32. center: subtracted from X, (d,). rounded: the bank less its
    mean, and the products with the center in PARTS, (m, q) bfloat16, with zeros up to a multiple of ALIGNED. norm: of
    its longest row, without the PARTS. error: the largest norm of a row's rounding error."""

    exact: torch.Tensor
    center: torch.Tensor
    rounded: torch.Tensor
    norm: float
    error: float


def tiles_for(dim: int, device: torch.device) -> Tiles:
    """Return tiles with as many rows of X in bfloat16 as half the second-level cache holds, 128 to 1,024, and so many
    columns that their scores would fill the third-level cache; on CUDA larger ones; or those of the policy."""
    policy, whole = POLICY.get(), GROUP * GROUPS_TOGETHER
    rows, scores = min(1024, max(128, SECOND_CACHE // (4 * dim) // 128 * 128)), THIRD_CACHE // 2
    if device.type == "cuda":
        rows, scores = CUDA_ROWS, policy.tile_size_of("screened")
    return Tiles(
        *policy.screened_tile or (rows, max(LEAST_COLUMNS, scores // rows) // whole * whole)
    )


def topk_mean(operands: Operands, k: int) -> Results:
    """Return means of the k largest products, (n,), summed in float64."""
    means = operands.empty(operands.X.shape[0])
    return _screened(
        operands,
        k,
        dense.topk_mean,
        lambda values, _: (values.sum(1, dtype=torch.float64) / k,),
        (means,),
    )


def topk(operands: Operands, k: int) -> Results:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    shape = operands.X.shape[0], k
    results = operands.empty(*shape), operands.empty(*shape, dtype=torch.int64)
    return _screened(operands, k, dense.topk, lambda *largest: largest, results)


def _screened(
    operands: Operands,
    k: int,
    exact: Callable[[Operands, int], Results],
    reduce: Callable[[torch.Tensor, torch.Tensor], Results],
    results: Results,
) -> Results:
    """Set and return `results`, by `reduce` from the k largest products and their columns, both (rows, k). exact: the
    dense kernel, for the rows that the screen is not certain of."""
    bank = _rounded(operands)
    tiles, unsure = tiles_for(bank.exact.shape[1], operands.device), []

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        values, columns, sure = _largest(x, bank, k, tiles)
        for result, rows in zip(results, reduce(values, columns), strict=True):
            result[part] = rows
        if not sure.all():
            unsure.append(part.start + (~sure).nonzero()[:, 0].cpu().numpy())

    share_out(work, operands.rows(tiles.rows), operands.threads)
    if unsure:
        numbers = np.concatenate(unsure)
        for result, rows in zip(
            results, exact(Operands(operands.X[numbers], operands.bank), k), strict=True
        ):
            result[numbers] = rows
    return results


def _rounded(operands: Operands) -> _Bank:
    exact, (m, d) = operands.bank.contiguous(), operands.bank.shape
    sample = as_tensor(operands.X[:: max(1, len(operands.X) // 1024)], exact.dtype, exact.device)
    mean, center = exact.mean(0), sample.mean(0)
    is_large = bool(center.norm() > LARGE_MEAN * sample.norm(dim=1).mean())
    width = -(-(d + PARTS * is_large) // ALIGNED) * ALIGNED
    center *= width >= d + PARTS
    rounded = exact.new_zeros(m, width, dtype=torch.bfloat16)
    norms = []
    for part, near in zip(torch.split(exact, 4096), torch.split(rounded, 4096), strict=True):
        centered = part - mean
        near[:, :d] = centered
        rest = centered @ center
        for column in near[:, d : d + PARTS].T:
            column.copy_(rest)
            rest -= column
        norms.append(
            torch.stack([centered.norm(dim=1).max(), (centered - near[:, :d]).norm(dim=1).max()])
        )
    return _Bank(exact, center, rounded, *torch.stack(norms).amax(0).tolist())


def _largest(
    x: torch.Tensor, bank: _Bank, k: int, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest products of x (rows, d), falling, their indices, both (rows, k), and whether they are
    certain, (rows,)."""
    centered = x - bank.center
    near = centered.bfloat16()
    error = (centered - near).norm(dim=1) * bank.norm + near.float().norm(dim=1) * bank.error
    error += (
        (x.shape[1] + PARTS) * SUM_UNIT * (centered.norm(dim=1) + bank.center.norm()) * bank.norm
    )
    near = torch.nn.functional.pad(near, (0, bank.rounded.shape[1] - x.shape[1]), value=1.0)
    scores, columns, threshold = _selected(near, bank, k, error, tiles)
    enough = (columns >= 0).sum(1) >= k
    if not enough.any():
        return x.new_empty(len(x), k), columns.new_empty(len(x), k), enough
    last = scores.topk(k, dim=1, sorted=False).values.amin(1)
    cut = last - 2 * (error + HALF_UNIT * (last.abs() + 2 * error))
    sure = enough & (threshold <= cut)
    columns[(scores < cut[:, None]) | ~sure[:, None]] = -1
    exact = _products(x, bank.exact, columns)
    values, chosen = exact.topk(k, dim=1)
    return values, columns.gather(1, chosen), sure


def _selected(
    near: torch.Tensor, bank: _Bank, k: int, error: torch.Tensor, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores that reach a threshold, float32, their columns, both (rows, p), and the threshold, (rows,).
    Unused places are −inf and −1; the threshold is infinite for rows that would select too many. error: (rows,)."""
    whole = GROUP * GROUPS_TOGETHER
    room = near.new_empty(len(near) * min(tiles.columns, -(-len(bank.rounded) // whole) * whole))
    best = near.new_empty(len(near), 0, dtype=torch.float32)
    counted = near.new_zeros(len(near), dtype=torch.int64)
    most = max(MOST_SELECTED * k, USUAL_SHARE * len(bank.rounded) / GROUP)
    survivors = []
    for start in range(0, len(bank.rounded), tiles.columns):
        part = bank.rounded[start : start + tiles.columns]
        width = -(-len(part) // whole) * whole
        scores = room[: len(near) * width].view(len(near), width)
        torch.mm(near, part.T, out=scores[:, : len(part)])
        scores[:, len(part) :] = -torch.inf
        highest = _highest(scores, GROUP)
        few = highest.shape[1] // GROUPS_TOGETHER < LEAST_GROUPS * k
        bounds = highest if few else _highest(highest, GROUPS_TOGETHER)
        best = torch.cat([best, bounds.float()], 1)
        best = best.topk(min(k, best.shape[1]), dim=1, sorted=False).values
        low = best.amin(1)
        threshold = (low - 2 * error - 4 * HALF_UNIT * low.abs()).to(near.dtype)
        if (threshold > 0).all():
            reached = highest.view(torch.int16) >= threshold.view(torch.int16)[:, None]
        else:
            reached = scores.view(len(near), GROUP, -1).amax(1) >= threshold[:, None]
        counted += reached.sum(1)
        reached[counted > most] = False
        survivors.append(_padded(scores, reached, threshold, start))
    threshold[counted > most] = torch.inf
    places, values = (torch.cat(parts, 1) for parts in zip(*survivors, strict=True))
    return values, places, threshold.float()


def _highest(scores: torch.Tensor, together: int) -> torch.Tensor:
    """Return the largest of every `together` scores (rows, p), (rows, p / together), if one is above 0. Otherwise the
    result is one of these scores. Numbers above 0 have the same order as their bits read as integers, which are
    compared many times faster."""
    return scores.view(torch.int16).view(len(scores), together, -1).amax(1).view(torch.bfloat16)


def _padded(
    scores: torch.Tensor, reached: torch.Tensor, threshold: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns (rows, p), counted from `start`, and float32 scores that reach the threshold (rows,). reached: the
    groups that have such scores. Rows with fewer than p end in −1 and −inf."""
    apart = reached.shape[1]
    rows, group = reached.nonzero(as_tuple=True)
    first = (rows * GROUP * apart + group)[:, None]
    members = scores.take(first + apart * torch.arange(GROUP, device=rows.device))
    which, member = (members >= threshold[rows, None]).nonzero(as_tuple=True)
    rows = rows[which]
    counts = rows.bincount(minlength=len(scores))
    slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    places = rows.new_full((len(scores), max(1, int(counts.max()))), -1)
    values = scores.new_full(places.shape, -torch.inf, dtype=torch.float32)
    places[rows, slot] = start + member * apart + group[which]
    values[rows, slot] = members[which, member].float()
    return places, values


def _products(x: torch.Tensor, bank: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return inner products of x (rows, d) with the rows `columns` (rows, p) of the bank, −inf for −1, (rows, p)."""
    x, columns = x.contiguous(), columns.contiguous()
    if x.is_cuda or find_spec("faiss") is None:
        return _gathered_products(x, bank, columns)
    products = torch.empty_like(columns, dtype=torch.float32)
    with faiss_with_own_threads() as faiss:
        pointers = [faiss.swig_ptr(tensor.numpy()) for tensor in (products, x, bank, columns)]
        faiss.fvec_inner_products_by_idx(*pointers, x.shape[1], *columns.shape)
    return products


def _gathered_products(x: torch.Tensor, bank: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return what `_products` does, on any device. It copies a tile of the bank's rows at a time."""
    width = int((columns >= 0).sum(1).max())
    columns, order = columns.sort(1, descending=True)
    products = x.new_full(columns.shape, -torch.inf)
    size = max(1, POLICY.get().tile_size_of(x.device.type) // max(1, width * x.shape[1]))
    for part, near, result in zip(
        *(torch.split(M, size) for M in (x, columns[:, :width], products)), strict=True
    ):
        result[:, :width] = torch.bmm(bank[near.clamp(min=0)], part[:, :, None])[:, :, 0]
    products[columns < 0] = -torch.inf
    return torch.empty_like(products).scatter_(1, order, products)
