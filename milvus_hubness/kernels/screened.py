"""The first primitive on CPUs that multiply bfloat16 natively: screened in that, and then computed exactly.

Rounding to bfloat16, of both factors and of the product, moves a score by no more than an error e that is
known for each row. Those of its scores that lie within 2·e of the k-th largest hold the k largest exact ones,
and are computed again in float32. The screen keeps scores above a threshold from a random sample of the bank;
a row where that lies too high, or keeps too many, is left to the dense kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from milvus_hubness.kernels import dense
from milvus_hubness.kernels.faiss_module import import_faiss
from milvus_hubness.kernels.operands import Operands
from milvus_hubness.kernels.threshold import Threshold, threshold_for

logsumexp = dense.logsumexp

LEAST_WORK = 1 << 32
LEAST_ROWS = 128
SAMPLE = 4096
TILE_ROWS, TILE_COLUMNS = 1024, 8192
"""A tile of scores is 16 MiB in bfloat16, half of a usual third-level cache; both were the fastest tried."""

GROUP = 8
MOST_KEPT = 1 / 16
HALF_UNIT = 2.0**-8
"""Of a number in bfloat16, relative, at most lost in rounding to it."""


class _Bank(NamedTuple):
    """exact (m, d) float32; rounded (m, d) bfloat16, with rows of zeros up to a multiple of GROUP; sample
    (s, d) of those. norm: the longest row's, and error: the longest difference of a row from its rounding."""

    exact: torch.Tensor
    rounded: torch.Tensor
    sample: torch.Tensor
    norm: float
    error: float


def topk_mean(operands: Operands, k: int) -> tuple[torch.Tensor]:
    """(n,) means of the k largest products, summed in float64."""
    way = _way(operands, k)
    if way is None:
        return dense.topk_mean(operands, k)
    bank = _rounded(operands.bank, way)
    means = operands.empty(operands.X.shape[0])
    for part, x in operands.rows(TILE_ROWS):
        values, _, sure = _largest(x, bank, k, way)
        found = values.sum(1, dtype=torch.float64) / k
        if not sure.all():
            [again] = dense.topk_mean(operands.in_full(x[~sure]), k)
            found[~sure] = again.double()
        means[part] = found
    return (means,)


def topk(operands: Operands, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    way = _way(operands, k)
    if way is None:
        return dense.topk(operands, k)
    bank = _rounded(operands.bank, way)
    n = operands.X.shape[0]
    values, indices = operands.empty(n, k), operands.empty(n, k, dtype=torch.int64)
    for part, x in operands.rows(TILE_ROWS):
        best, places, sure = _largest(x, bank, k, way)
        if not sure.all():
            best[~sure], places[~sure] = dense.topk(operands.in_full(x[~sure]), k)
        values[part], indices[part] = best, places
    return values, indices


def _way(operands: Operands, k: int) -> Threshold | None:
    """How to screen; None where it is not worth it."""
    n, (m, d) = operands.X.shape[0], operands.bank.shape
    if n < LEAST_ROWS or n * m * d < LEAST_WORK:
        return None
    return threshold_for(k, m, SAMPLE)


def _rounded(bank: torch.Tensor, way: Threshold) -> _Bank:
    m, d = bank.shape
    exact = bank.contiguous()
    rounded = torch.zeros(-(-m // GROUP) * GROUP, d, dtype=torch.bfloat16)
    norm = error = 0.0
    for start in range(0, m, TILE_COLUMNS):
        part = exact[start : start + TILE_COLUMNS]
        near = part.bfloat16()
        rounded[start : start + len(part)] = near
        norm = max(norm, float(part.norm(dim=1).max()))
        error = max(error, float((part - near).norm(dim=1).max()))
    drawn = torch.randperm(m, generator=torch.Generator().manual_seed(0))[: way.sample]
    return _Bank(exact, rounded, rounded[drawn], norm, error)


def _largest(
    x: torch.Tensor, bank: _Bank, k: int, way: Threshold
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values (rows, k) float32, falling, and indices (rows, k) of the k largest products of x (rows, d); and
    (rows,) whether they are surely those."""
    near = x.bfloat16()
    product = (x - near.float()).norm(dim=1) * bank.norm + near.float().norm(dim=1) * bank.error
    product += x.shape[1] * 2.0**-23 * x.norm(dim=1) * bank.norm
    sample = near @ bank.sample.T
    low = sample.topk(way.rank, dim=1).values[:, -1].float()
    threshold = (low - 2 * product - 4 * HALF_UNIT * low.abs()).bfloat16()
    crowded = (sample >= threshold[:, None]).float().mean(1) > MOST_KEPT
    threshold[crowded] = torch.inf
    scores, columns = _kept(near, bank, threshold)
    enough = (columns >= 0).sum(1) >= k
    if not enough.any():
        return x.new_empty(len(x), k), columns.new_empty(len(x), k), enough
    scores, order = scores.sort(1, descending=True)
    last = scores[:, k - 1]
    cut = last - 2 * (product + HALF_UNIT * (last.abs() + 2 * product))
    sure = enough & (threshold.float() <= cut)
    width = max(k, int((scores >= cut[:, None]).sum(1)[sure].max())) if sure.any() else k
    near_the_top = columns.gather(1, order[:, :width])
    near_the_top[(scores[:, :width] < cut[:, None]) | ~sure[:, None]] = -1
    exact = _products(x, bank.exact, near_the_top)
    values, chosen = exact.topk(k, dim=1)
    return values, near_the_top.gather(1, chosen), sure


def _kept(near: torch.Tensor, bank: _Bank, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (rows, p) float32 of at least the row's threshold, and their columns; −inf and −1 at the end of
    rows with fewer than p."""
    room = near.new_empty(len(near) * min(TILE_COLUMNS, len(bank.rounded)))
    hits = [_hits(near, bank, start, threshold, room) for start in range(0, len(bank.rounded), TILE_COLUMNS)]
    rows, columns, scores = (torch.cat(parts) for parts in zip(*hits, strict=True))
    inside = columns < len(bank.exact)
    rows, columns, scores = rows[inside], columns[inside], scores[inside]
    rows, order = rows.sort(stable=True)
    counts = rows.bincount(minlength=len(near))
    width = max(1, int(counts.max()))
    slot = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    padded = torch.full((len(near), width), -torch.inf)
    places = torch.full((len(near), width), -1)
    padded[rows, slot] = scores[order].float()
    places[rows, slot] = columns[order]
    return padded, places


def _hits(
    near: torch.Tensor, bank: _Bank, start: int, threshold: torch.Tensor, room: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, columns and scores, each (hits,), of one tile's scores of at least the row's threshold.

    GROUP columns are looked at as one. bfloat16 above 0 are ordered as their bits, read as integers, are, and
    integers are compared many times faster. room: memory for the tile, which it costs time to have anew.
    """
    part = bank.rounded[start : start + TILE_COLUMNS]
    scores = room[: len(near) * len(part)].view(len(near), len(part))
    torch.mm(near, part.T, out=scores)
    apart = len(part) // GROUP
    grouped = scores.view(len(near), GROUP, apart)
    if (threshold > 0).all():
        highest = grouped.view(torch.int16).amax(1)
        reached = highest >= threshold.view(torch.int16)[:, None]
    else:
        reached = grouped.amax(1) >= threshold[:, None]
    rows, group = reached.nonzero(as_tuple=True)
    members = grouped[rows, :, group]
    which, member = (members >= threshold[rows, None]).nonzero(as_tuple=True)
    return rows[which], start + member * apart + group[which], members[which, member]


def _products(x: torch.Tensor, bank: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(rows, p) float32 inner products of x (rows, d) with the rows of the bank (m, d) that `columns` (rows,
    p) name, −inf for −1."""
    faiss = import_faiss()
    x, columns = x.contiguous(), columns.contiguous()
    found = torch.empty(columns.shape)
    faiss.fvec_inner_products_by_idx(
        *(faiss.swig_ptr(each.numpy()) for each in (found, x, bank, columns)), x.shape[1], *columns.shape
    )
    return found
