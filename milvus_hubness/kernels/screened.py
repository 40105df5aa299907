"""Top-k means on CPUs with native bfloat16: screened in bfloat16, then computed exactly.

Rounding both factors and the product to bfloat16 changes a score by at most an error e, computed for each row. A lower
bound of the k-th largest score is the k-th largest of the maxima of many groups of scores; all scores that reach that
bound less 2·e are computed again in float32. The dense kernel computes rows with too many of them, as with many ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from milvus_hubness.kernels import dense
from milvus_hubness.kernels.operands import Operands, share_out
from milvus_hubness.kernels.primitives import POLICY, import_faiss

Results: TypeAlias = tuple[torch.Tensor, ...]

SECOND_CACHE, THIRD_CACHE = 1 << 20, 32 << 20
"""Assumed bytes of the caches of a core and of a CPU: the least that CPUs with native bfloat16 have."""
GROUP, GROUPS_TOGETHER = 8, 8
LEAST_COLUMNS = 1 << 14
LEAST_GROUPS = 4
"""Least number of groups for each of the k: with fewer, two of the k largest fall into one group."""
MOST_SELECTED = 8
"""Largest number of selected groups of a row for each of the k; or, if more, the usual share of all groups."""
USUAL_SHARE = 1 / 16
HALF_UNIT = 2.0**-8
"""Largest relative error of rounding to bfloat16."""


class Tiles(NamedTuple):
    """Rows of X and of the bank whose scores are in memory at once."""

    rows: int
    columns: int


class _Bank(NamedTuple):
    """The bank in two precisions. exact: (m, d) float32. rounded: (p, d) bfloat16, with rows of zeros up to a multiple
    of the groups. norm: of the longest row. error: the largest norm of a row's rounding error."""

    exact: torch.Tensor
    rounded: torch.Tensor
    norm: float
    error: float


def tiles_for(dim: int) -> Tiles:
    """Return tiles with as many rows of X in bfloat16 as half the second-level cache holds, 128 to 1,024, and so many
    columns that their scores would fill the third-level cache; or those of the policy."""
    rows = min(1024, max(128, SECOND_CACHE // (4 * dim) // 128 * 128))
    whole = GROUP * GROUPS_TOGETHER
    return Tiles(*POLICY.get().screened_tile or (rows, max(LEAST_COLUMNS, THIRD_CACHE // (2 * rows)) // whole * whole))


def topk_mean(operands: Operands, k: int) -> Results:
    """Return means of the k largest products, (n,), summed in float64."""
    means = operands.empty(operands.X.shape[0])
    return _screened(
        operands, k, dense.topk_mean, lambda values, _: (values.sum(1, dtype=torch.float64) / k,), (means,)
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
    threads, bank = torch.get_num_threads(), _rounded(operands.bank)
    tiles, unsure = tiles_for(bank.exact.shape[1]), []

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        values, columns, sure = _largest(x, bank, k, tiles)
        for result, rows in zip(results, reduce(values, columns), strict=True):
            result[part] = rows
        if not sure.all():
            unsure.append(part.start + (~sure).nonzero()[:, 0].numpy())

    share_out(work, operands.rows(tiles.rows), threads)
    if unsure:
        numbers = np.concatenate(unsure)
        for result, rows in zip(results, exact(operands.in_full(operands.X[numbers]), k), strict=True):
            result[numbers] = rows
    return results


def _rounded(bank: torch.Tensor) -> _Bank:
    m, d = bank.shape
    whole, size = GROUP * GROUPS_TOGETHER, 4096
    exact = bank.contiguous()
    rounded = torch.zeros(-(-m // whole) * whole, d, dtype=torch.bfloat16)
    norm = error = 0.0
    for start in range(0, m, size):
        part = exact[start : start + size]
        near = part.bfloat16()
        rounded[start : start + len(part)] = near
        norm = max(norm, float(part.norm(dim=1).max()))
        error = max(error, float((part - near).norm(dim=1).max()))
    return _Bank(exact, rounded, norm, error)


def _largest(x: torch.Tensor, bank: _Bank, k: int, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest products of x (rows, d), falling, their indices, both (rows, k), and whether they are
    certain, (rows,)."""
    near = x.bfloat16()
    product = (x - near.float()).norm(dim=1) * bank.norm + near.float().norm(dim=1) * bank.error
    product += x.shape[1] * 2.0**-23 * x.norm(dim=1) * bank.norm
    scores, columns, threshold = _selected(near, bank, k, product, tiles)
    enough = (columns >= 0).sum(1) >= k
    if not enough.any():
        return x.new_empty(len(x), k), columns.new_empty(len(x), k), enough
    last = scores.topk(k, dim=1).values[:, -1]
    cut = last - 2 * (product + HALF_UNIT * (last.abs() + 2 * product))
    sure = enough & (threshold <= cut)
    columns[(scores < cut[:, None]) | ~sure[:, None]] = -1
    exact = _products(x, bank.exact, columns)
    values, chosen = exact.topk(k, dim=1)
    return values, columns.gather(1, chosen), sure


def _selected(
    near: torch.Tensor, bank: _Bank, k: int, product: torch.Tensor, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores that reach a threshold, float32, their columns, both (rows, p), and the threshold, (rows,).
    Unused places are −inf and −1; the threshold is infinite for rows that would select too many. product: (rows,)
    errors."""
    room = near.new_empty(len(near) * min(tiles.columns, len(bank.rounded)))
    best = near.new_empty(len(near), 0, dtype=torch.float32)
    counted = torch.zeros(len(near), dtype=torch.int64)
    most = max(MOST_SELECTED * k, USUAL_SHARE * len(bank.rounded) / GROUP)
    survivors = []
    for start in range(0, len(bank.rounded), tiles.columns):
        part = bank.rounded[start : start + tiles.columns]
        scores = torch.mm(near, part.T, out=room[: len(near) * len(part)].view(len(near), len(part)))
        scores[:, max(0, len(bank.exact) - start) :] = -torch.inf
        highest = _highest(scores, GROUP)
        few = highest.shape[1] // GROUPS_TOGETHER < LEAST_GROUPS * k
        bounds = highest if few else _highest(highest, GROUPS_TOGETHER)
        best = torch.cat([best, bounds.float()], 1)
        best = best.topk(min(k, best.shape[1]), dim=1).values
        low = best[:, -1]
        threshold = (low - 2 * product - 4 * HALF_UNIT * low.abs()).bfloat16()
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
    """Return the largest of every `together` scores (rows, p) bfloat16, (rows, p / together), if one is above 0.
    Otherwise the result is one of these scores. bfloat16 numbers above 0 have the same order as their bits read as
    integers, which are compared many times faster."""
    grouped = scores.view(torch.int16).view(len(scores), together, -1)
    return grouped.amax(1).view(torch.bfloat16)


def _padded(
    scores: torch.Tensor, reached: torch.Tensor, threshold: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns (rows, p), counted from `start`, and float32 scores that reach the threshold (rows,). reached: the
    groups that have such scores. Rows with fewer than p end in −1 and −inf."""
    apart = reached.shape[1]
    rows, group = reached.nonzero(as_tuple=True)
    members = scores.view(len(scores), GROUP, apart)[rows, :, group]
    which, member = (members >= threshold[rows, None]).nonzero(as_tuple=True)
    rows = rows[which]
    counts = rows.bincount(minlength=len(scores))
    slot = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    places = torch.full((len(scores), max(1, int(counts.max()))), -1)
    values = torch.full(places.shape, -torch.inf)
    places[rows, slot] = start + member * apart + group[which]
    values[rows, slot] = members[which, member].float()
    return places, values


def _products(x: torch.Tensor, bank: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return inner products of x (rows, d) with the rows `columns` (rows, p) of the bank, −inf for −1, (rows, p)."""
    faiss = import_faiss()
    x, columns = x.contiguous(), columns.contiguous()
    products = torch.empty(columns.shape)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        pointers = [faiss.swig_ptr(tensor.numpy()) for tensor in (products, x, bank, columns)]
        faiss.fvec_inner_products_by_idx(*pointers, x.shape[1], *columns.shape)
    finally:
        faiss.omp_set_num_threads(threads)
    return products
