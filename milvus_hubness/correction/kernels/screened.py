"""Top-k means on devices with native bfloat16: screened in bfloat16, then computed exactly.

The screen subtracts the mean of the bank, which changes all scores of a row by the same number. It
subtracts the mean c of X too, and adds c·b in float32, as three more columns of the bank, if there
is room for them or c is large. Rounding both factors and the product to bfloat16 changes a score by
at most an error e, computed for each row. A lower bound of the k-th largest score is the k-th
largest of the maxima of many groups of scores; all scores that reach that bound less 2·e are
computed again in float32. The dense kernel computes rows with too many of them, as with many ties.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

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
Primitive: TypeAlias = Callable[[Operands, int], Results]

SECOND_CACHE = 1 << 20
"""Assumed bytes of the cache of a core: the least that CPUs with native bfloat16 have."""
THIRD_CACHE = 32 << 20
"""Assumed bytes of the cache of a CPU: the least that CPUs with native bfloat16 have."""
ALIGNED = 64
"""Factor of the width of rounded vectors: cuBLAS is slow for widths such as 514."""
PARTS = 3
"""Numbers in bfloat16 whose sum is one in float32."""
LARGE_MEAN = 0.8
"""Norm of the mean of X, as a share of the mean norm, from which it is worth more columns."""
GROUP = 8
"""Scores of a group."""
GROUPS_TOGETHER = 8
"""Groups whose maximum is one of the numbers that bound the k-th largest score."""
WHOLE = GROUP * GROUPS_TOGETHER
"""Factor of the width of a tile in memory."""
LEAST_COLUMNS = 1 << 14
CUDA_ROWS = 8192
LEAST_GROUPS = 4
"""Least number of groups for each of the k: with fewer, two of the k largest fall into one group."""
MOST_SELECTED = 8
"""Largest number of selected groups of a row for each of the k.

If `USUAL_SHARE` of all groups are more, then that."""
USUAL_SHARE = 1 / 16
HALF_UNIT = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
SUM_UNIT = 2.0**-22
"""Largest error of a term of a sum in float32, in units of the product of the norms.

It covers any order, tensor cores, which cut instead of rounding, and the rounding of the centred
bank and of the norms."""


class Tiles(NamedTuple):
    """Rows of X and of the bank whose scores are in memory at once."""

    rows: int
    columns: int


class RoundedBank(NamedTuple):
    """The bank in two precisions."""

    exact: torch.Tensor
    """(m, d) float32."""

    center: torch.Tensor
    """(d,), which is subtracted from X."""

    rounded: torch.Tensor
    """(m, q) bfloat16: the bank less its mean, then the products with the center in PARTS, then
    zeros up to a multiple of ALIGNED."""

    norm: float
    """That of the longest row of `rounded`, without the PARTS."""

    error: float
    """The largest norm of a row's rounding error."""


Search: TypeAlias = Callable[
    [torch.Tensor, RoundedBank, int, Tiles], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
"""A search for the k largest products, with the results of `_largest`."""


def tiles_for(dim: int, device: torch.device) -> Tiles:
    """Return the policy's tiles or, by default, tiles that fit the caches.

    On a CPU, they have as many rows of X in bfloat16 as half the second-level cache holds, 128 to
    1,024, and so many columns that their scores would fill the third-level cache. On CUDA they are
    larger.
    """
    policy = POLICY.get()
    if policy.screened_tile:
        return Tiles(*policy.screened_tile)

    if device.type == "cuda":
        rows = CUDA_ROWS
        scores = policy.tile_size_of("screened")
    else:
        fitting_rows = SECOND_CACHE // (4 * dim) // 128 * 128
        rows = min(1024, max(128, fitting_rows))
        scores = THIRD_CACHE // 2
    columns = max(LEAST_COLUMNS, scores // rows) // WHOLE * WHOLE
    return Tiles(rows, columns)


def topk_mean(operands: Operands, k: int) -> Results:
    """Return means of the k largest products, (n,), summed in float64."""
    return means_by(_largest, operands, k, dense.topk_mean)


def topk(operands: Operands, k: int) -> Results:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    return largest_by(_largest, operands, k, dense.topk)


def means_by(search: Search, operands: Operands, k: int, exact: Primitive) -> Results:
    """Return what `topk_mean` does, by a search and, for rows that it is unsure of, by `exact`."""
    means = operands.empty(operands.X.shape[0])

    def mean(values: torch.Tensor, _: torch.Tensor) -> Results:
        return (values.sum(1, dtype=torch.float64) / k,)

    return _screened(search, operands, k, exact, mean, (means,))


def largest_by(search: Search, operands: Operands, k: int, exact: Primitive) -> Results:
    """Return what `topk` does, by a search and, for rows that it is unsure of, by `exact`."""
    row_count = operands.X.shape[0]
    values = operands.empty(row_count, k)
    indices = operands.empty(row_count, k, dtype=torch.int64)
    return _screened(search, operands, k, exact, lambda *largest: largest, (values, indices))


def _screened(
    search: Search,
    operands: Operands,
    k: int,
    exact: Primitive,
    reduce: Callable[[torch.Tensor, torch.Tensor], Results],
    results: Results,
) -> Results:
    """Set and return `results`, those of the search and of `exact` for the rows left over.

    reduce: returns the results of the k largest products and their columns, both (rows, k).
    """
    bank = _rounded(operands)
    tiles = tiles_for(bank.exact.shape[1], operands.device)
    is_sure = torch.empty(operands.X.shape[0], dtype=torch.bool, device=operands.device)

    def work(task: tuple[slice, torch.Tensor]) -> None:
        part, x = task
        values, columns, is_sure[part] = search(x, bank, k, tiles)
        for result, rows in zip(results, reduce(values, columns), strict=True):
            result[part] = rows

    share_out(work, operands.rows(tiles.rows), operands.threads)
    unsure = (~is_sure).nonzero()[:, 0].cpu().numpy()
    if len(unsure):
        exact_results = exact(Operands(operands.X[unsure], operands.bank), k)
        for result, rows in zip(results, exact_results, strict=True):
            result[unsure] = rows
    return results


def _rounded(operands: Operands) -> RoundedBank:
    exact = operands.bank.contiguous()
    row_count, dim = exact.shape
    sample = as_tensor(operands.X[:: max(1, len(operands.X) // 1024)], exact.dtype, exact.device)
    mean = exact.mean(0)
    center = sample.mean(0)

    # X is centered where the three columns cost nothing, or where they are worth more width.
    is_large = bool(center.norm() > LARGE_MEAN * sample.norm(dim=1).mean())
    width = -(-(dim + PARTS * is_large) // ALIGNED) * ALIGNED
    center *= width >= dim + PARTS

    rounded = exact.new_zeros(row_count, width, dtype=torch.bfloat16)
    norms = []
    for exact_rows, rounded_rows in zip(
        torch.split(exact, 4096), torch.split(rounded, 4096), strict=True
    ):
        centered = exact_rows - mean
        rounded_rows[:, :dim] = centered

        # Each of the three columns has what the ones before have rounded off.
        rest = centered @ center
        for column in rounded_rows[:, dim : dim + PARTS].T:
            column.copy_(rest)
            rest -= column

        rounding_error = centered - rounded_rows[:, :dim]
        norms.append(torch.stack([centered.norm(dim=1).max(), rounding_error.norm(dim=1).max()]))
    norm, error = torch.stack(norms).amax(0).tolist()
    return RoundedBank(exact, center, rounded, norm, error)


def rounded_rows(x: torch.Tensor, bank: RoundedBank) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows x (rows, d) as they are multiplied with the rounded bank, (rows, q) bfloat16, and
    how far a score of each may be off before it is rounded itself, (rows,).
    """
    centered = x - bank.center
    rounded = centered.bfloat16()

    # By rounding x, by rounding the bank, and by the sum.
    error = (centered - rounded).norm(dim=1) * bank.norm
    error = error + rounded.float().norm(dim=1) * bank.error
    terms = x.shape[1] + PARTS
    error += terms * SUM_UNIT * (centered.norm(dim=1) + bank.center.norm()) * bank.norm

    # Ones take in the three columns of products with the center.
    missing = bank.rounded.shape[1] - x.shape[1]
    return torch.nn.functional.pad(rounded, (0, missing), value=1.0), error


def kth_largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest score of each row (rows, p), float32 (rows,)."""
    return scores.topk(k, dim=1, sorted=False).values.amin(1).float()


def least_score(lower_bound: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return the least score in bfloat16 that one of the k largest products may have, (rows,).

    lower_bound: of the k-th largest score in bfloat16. error: of `rounded_rows`.
    """
    return lower_bound - 2 * (error + HALF_UNIT * (lower_bound.abs() + 2 * error))


def _largest(
    x: torch.Tensor, bank: RoundedBank, k: int, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest products of x (rows, d), falling, and their indices, both (rows, k).

    The third value is whether they are certain, (rows,).
    """
    rounded, error = rounded_rows(x, bank)
    scores, columns, threshold = _selected(rounded, bank, k, error, tiles)
    has_enough = (columns >= 0).sum(1) >= k
    if not has_enough.any():
        return x.new_empty(len(x), k), columns.new_empty(len(x), k), has_enough

    # A bound by the k-th largest score itself, which is closer than the threshold of the groups.
    cut = least_score(kth_largest(scores, k), error)
    is_sure = has_enough & (threshold <= cut)
    columns[(scores < cut[:, None]) | ~is_sure[:, None]] = -1
    exact = _products(x, bank.exact, columns)
    values, chosen = exact.topk(k, dim=1)
    return values, columns.gather(1, chosen), is_sure


def _selected(
    x: torch.Tensor, bank: RoundedBank, k: int, error: torch.Tensor, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores that reach a threshold and their columns, both (rows, p), and the
    threshold.

    Scores are float32; unused ones are −inf, and their columns −1. The threshold, (rows,), is
    infinite for rows that would select too many. x: (rows, q) rounded. error: (rows,).
    """
    row_count = len(x)
    bank_size = len(bank.rounded)
    memory = x.new_empty(row_count * min(tiles.columns, -(-bank_size // WHOLE) * WHOLE))

    best = x.new_empty(row_count, 0, dtype=torch.float32)
    group_counts = x.new_zeros(row_count, dtype=torch.int64)
    most_groups = max(MOST_SELECTED * k, USUAL_SHARE * bank_size / GROUP)
    columns_by_tile = []
    scores_by_tile = []
    for start in range(0, bank_size, tiles.columns):
        tile = bank.rounded[start : start + tiles.columns]
        width = -(-len(tile) // WHOLE) * WHOLE
        scores = memory[: row_count * width].view(row_count, width)
        torch.mm(x, tile.T, out=scores[:, : len(tile)])
        scores[:, len(tile) :] = -torch.inf

        # The threshold rises from tile to tile, with the k largest maxima of groups so far.
        highest = _highest(scores, GROUP)
        best = torch.cat([best, _bounding(highest, k).float()], 1)
        best = best.topk(min(k, best.shape[1]), dim=1, sorted=False).values
        lower_bound = best.amin(1)
        threshold = (lower_bound - 2 * error - 4 * HALF_UNIT * lower_bound.abs()).to(x.dtype)

        # Below 0, the integers of `_highest` do not have the order of the numbers.
        if (threshold > 0).all():
            is_reached = highest.view(torch.int16) >= threshold.view(torch.int16)[:, None]
        else:
            is_reached = scores.view(row_count, GROUP, -1).amax(1) >= threshold[:, None]
        group_counts += is_reached.sum(1)
        is_reached[group_counts > most_groups] = False

        tile_columns, tile_scores = _reaching(scores, is_reached, threshold, start)
        columns_by_tile.append(tile_columns)
        scores_by_tile.append(tile_scores)

    threshold[group_counts > most_groups] = torch.inf
    return torch.cat(scores_by_tile, 1), torch.cat(columns_by_tile, 1), threshold.float()


def _highest(scores: torch.Tensor, together: int) -> torch.Tensor:
    """Return the largest of every `together` scores (rows, p), (rows, p / together).

    If none is above 0, it is one of these scores. Numbers above 0 have the same order as their bits
    read as integers, which are compared many times faster.
    """
    return scores.view(torch.int16).view(len(scores), together, -1).amax(1).view(torch.bfloat16)


def _bounding(highest: torch.Tensor, k: int) -> torch.Tensor:
    """Return the numbers whose k-th largest bounds the k-th largest score, (rows, p).

    highest: (rows, groups), the maxima of groups.
    """
    has_few_groups = highest.shape[1] // GROUPS_TOGETHER < LEAST_GROUPS * k
    return highest if has_few_groups else _highest(highest, GROUPS_TOGETHER)


def bound_by_groups(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return a lower bound of the k-th largest of scores (rows, p) in bfloat16, float32 (rows,).

    p is a multiple of WHOLE, and of enough groups for the k.
    """
    return kth_largest(_bounding(_highest(scores, GROUP), k), k)


def _reaching(
    scores: torch.Tensor, is_reached: torch.Tensor, threshold: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns (rows, p), counted from `start`, and float32 scores that reach the threshold.

    is_reached: (rows, groups) whether a group has such scores. threshold: (rows,). Rows with fewer
    than p end in −1 and −inf.
    """
    # The members of a group are as many columns apart as there are groups.
    group_count = is_reached.shape[1]
    group_rows, group = is_reached.nonzero(as_tuple=True)
    first = (group_rows * GROUP * group_count + group)[:, None]
    members = scores.take(first + group_count * torch.arange(GROUP, device=group.device))

    which, member = (members >= threshold[group_rows, None]).nonzero(as_tuple=True)
    rows = group_rows[which]
    counts = rows.bincount(minlength=len(scores))
    starts = counts.cumsum(0) - counts
    slots = torch.arange(len(rows), device=rows.device) - starts[rows]

    columns = rows.new_full((len(scores), max(1, int(counts.max()))), -1)
    values = scores.new_full(columns.shape, -torch.inf, dtype=torch.float32)
    columns[rows, slots] = start + member * group_count + group[which]
    values[rows, slots] = members[which, member].float()
    return columns, values


def _products(x: torch.Tensor, bank: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return inner products of x (rows, d) with the rows `columns` (rows, p) of the bank, (rows,
    p).

    Those of −1 are −inf.
    """
    x = x.contiguous()
    columns = columns.contiguous()
    if x.is_cuda or find_spec("faiss") is None:
        return _gathered_products(x, bank, columns)
    products = torch.empty_like(columns, dtype=torch.float32)
    with faiss_with_own_threads() as faiss:
        pointers = [faiss.swig_ptr(tensor.numpy()) for tensor in (products, x, bank, columns)]
        faiss.fvec_inner_products_by_idx(*pointers, x.shape[1], *columns.shape)
    return products


def _gathered_products(x: torch.Tensor, bank: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return what `_products` does, on any device.

    It copies a tile of the bank's rows at a time.
    """
    # Sorted, the columns that are not −1 are on the left: only so many are multiplied.
    width = int((columns >= 0).sum(1).max())
    columns, order = columns.sort(1, descending=True)
    products = x.new_full(columns.shape, -torch.inf)
    size = max(1, POLICY.get().tile_size_of(x.device.type) // max(1, width * x.shape[1]))
    for start in range(0, len(x), size):
        tile = slice(start, start + size)
        rows_of_bank = bank[columns[tile, :width].clamp(min=0)]
        products[tile, :width] = torch.bmm(rows_of_bank, x[tile, :, None])[:, :, 0]
    products[columns < 0] = -torch.inf
    return torch.empty_like(products).scatter_(1, order, products)
