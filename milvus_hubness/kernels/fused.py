"""The two primitives in Triton: they write only those scores to memory that may be among the k largest.

X (n, d) and B (m, d) are contiguous, of one dtype, and may exceed the range of 32-bit offsets: float32, multiplied in
three TF32 passes, bfloat16 or float16; products are accumulated in float32. The bank is divided into `splits`, each a
program that takes every splits-th tile; a log-sum-exp joins the sums of the splits.

top-k: a random sample of the bank gives a threshold that somewhat more than k scores reach. These are stored, and the k
largest selected. The dense kernel computes rows that have fewer than k of them, or more than there is room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log, sqrt
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from milvus_hubness.kernels import dense
from milvus_hubness.kernels.operands import Operands
from milvus_hubness.kernels.primitives import POLICY


class Threshold(NamedTuple):
    """A threshold: the `rank`-th largest of `sample` scores of a row, with `room` for the scores that may reach it."""

    sample: int
    rank: int
    room: int


def threshold_for(k: int, m: int, sample: int, most: int | None = None) -> Threshold | None:
    """Return the threshold for the k largest of m scores; None if a threshold does not help.

    It does not help if k is close to m, or if more than `most` scores may reach it. The sample has an expected
    k·sample/m of the k largest, a Poisson number: the rank is that number plus four standard deviations plus four. The
    room is for five standard deviations more than the expected number of scores that reach it.
    """
    expected = k * sample / m
    rank = ceil(expected + 4 * sqrt(expected) + 4)
    room = ceil((rank + 5 * sqrt(rank)) * m / sample)
    if m <= sample or rank >= sample // 2 or room > min(most or m, m // 2):
        return None
    return Threshold(sample, rank, room)


LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _scores(
    x_ptr, b_ptr, rows, columns, n, m, d,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return inner products, (BM, BN) float32; rows from n and columns from m repeat the last one."""
    x_rows = x_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * d
    b_rows = b_ptr + tl.minimum(columns, m - 1).to(tl.int64)[None, :] * d
    scores = tl.zeros((BM, BN), tl.float32)
    for start in range(0, d, BK):
        inner = start + tl.arange(0, BK)
        if EVEN:
            x = tl.load(x_rows + inner[None, :])
            b = tl.load(b_rows + inner[:, None])
        else:
            x = tl.load(x_rows + inner[None, :], mask=inner[None, :] < d, other=0.0)
            b = tl.load(b_rows + inner[:, None], mask=inner[:, None] < d, other=0.0)
        scores = tl.dot(x, b, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _added(scores, largest, total):
    """Return the maxima and the sums of 2^(score − maximum) of rows, (BM,) each, after scores (BM, BN)."""
    above = tl.maximum(largest, tl.max(scores, 1))
    finite = tl.where(above == LOWEST, 0.0, above)
    total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(scores - finite[:, None]), 1)
    return above, total


@triton.jit
def sum_products(
    x_ptr, b_ptr, w_ptr, max_ptr, sum_ptr, n, m, d, scale,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute max_ptr and sum_ptr (splits, n): the maximum of scale·x·b_i + w_i over the split, and the sum of
    2^(scale·x·b_i + w_i − maximum). w_i is in powers of 2."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    largest = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for start in range(split * BN, m, tl.num_programs(1) * BN):
        columns = start + tl.arange(0, BN)
        scores = _scores(x_ptr, b_ptr, rows, columns, n, m, d, EVEN, PRECISION, BM, BN, BK)
        w = tl.load(w_ptr + columns, mask=columns < m, other=LOWEST)
        largest, total = _added(scores * scale + w[None, :], largest, total)
    place = split.to(tl.int64) * n + rows
    tl.store(max_ptr + place, largest, mask=rows < n)
    tl.store(sum_ptr + place, total, mask=rows < n)


@triton.jit
def sum_cached(
    s_ptr, w_ptr, max_ptr, sum_ptr, n, m, row_stride, column_stride, scale,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute sums as `sum_products` does, from stored scores (n, m), by rows or by columns."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    s_rows = s_ptr + rows.to(tl.int64)[:, None] * row_stride
    largest = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for start in range(split * BN, m, tl.num_programs(1) * BN):
        columns = start + tl.arange(0, BN)
        inside = (rows < n)[:, None] & (columns < m)[None, :]
        s = tl.load(s_rows + columns.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        w = tl.load(w_ptr + columns, mask=columns < m, other=LOWEST)
        largest, total = _added(s.to(tl.float32) * scale + w[None, :], largest, total)
    place = split.to(tl.int64) * n + rows
    tl.store(max_ptr + place, largest, mask=rows < n)
    tl.store(sum_ptr + place, total, mask=rows < n)


@triton.jit
def keep_survivors(
    x_ptr, b_ptr, threshold_ptr, value_ptr, index_ptr, count_ptr, n, m, d, room,
    INDICES: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the scores that reach a row's threshold, and their columns, in value_ptr and index_ptr (n, room).

    count_ptr: (n,), 0 before; the number of such scores, even if it exceeds the room and some are lost.
    Survivors are rare, so an atomic addition takes a place for each of them; n · room < 2^31.
    """
    split = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    threshold = tl.load(threshold_ptr + rows, mask=rows < n, other=-LOWEST)
    for start in range(split * BN, m, tl.num_programs(1) * BN):
        columns = start + tl.arange(0, BN)
        scores = _scores(x_ptr, b_ptr, rows, columns, n, m, d, EVEN, PRECISION, BM, BN, BK)
        survives = (scores >= threshold[:, None]) & (columns < m)[None, :]
        where = tl.broadcast_to(rows[:, None], (BM, BN))
        slot = tl.atomic_add(count_ptr + where, 1, mask=survives, sem="relaxed")
        fits = survives & (slot < room)
        place = where * room + slot
        tl.store(value_ptr + place, scores, mask=fits)
        if INDICES:
            tl.store(index_ptr + place, tl.broadcast_to(columns[None, :], (BM, BN)), mask=fits)


@triton.jit
def mean_of_largest(value_ptr, mean_ptr, width, k, WIDTH: tl.constexpr):
    """Compute mean_ptr (n,) float64: the mean of the k largest of value_ptr (n, width); WIDTH ≥ width. Empty places are
    −inf. The k-th largest is searched bit by bit, in integers that have the same order as the floats."""
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    values = tl.load(value_ptr + row.to(tl.int64) * width + columns, mask=columns < width, other=LOWEST)
    bits = values.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    least = tl.min(ordered, 0)
    for bit in range(32):
        step = tl.full((), 1, tl.int64) << (31 - bit)
        reached = tl.sum((ordered >= least + step).to(tl.int32), 0) >= k
        least = tl.where(reached, least + step, least)
    above = ordered > least
    largest = tl.sum(tl.where(above, values, 0.0).to(tl.float64), 0)
    tied = tl.max(tl.where(ordered == least, values, LOWEST), 0).to(tl.float64)
    mean = (largest + tied * (k - tl.sum(above.to(tl.int32), 0))) / k
    tl.store(mean_ptr + row, mean)


MOST_SURVIVORS = 16_384
PROGRAMS = 2048
ROWS = 1 << 18
LEAST_TAU = 1e-12
LOG2E = 1 / log(2)


class Tile(NamedTuple):
    """Rows of X, rows of B, and columns of both that a program multiplies at once, and its compiler options."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


SUMMING = {
    torch.bfloat16: Tile(128, 128, 64, 4, 3),
    torch.float16: Tile(128, 128, 64, 4, 3),
    torch.float32: Tile(64, 128, 32, 4, 3),
}
KEEPING = {
    torch.bfloat16: Tile(128, 128, 64, 8, 3),
    torch.float16: Tile(128, 128, 64, 8, 3),
    torch.float32: Tile(64, 64, 32, 4, 3),
}
"""No entry spills registers when compiled for the H100 and the H200."""

CACHED_TILE = (16, 256)


def logsumexp(operands: Operands, tau: float, weights: torch.Tensor) -> tuple[torch.Tensor]:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), float32 (n,); weights (m,) float32 on the device."""
    if tau < LEAST_TAU:
        return dense.logsumexp(operands.in_full(), tau, weights)
    result = operands.empty(operands.X.shape[0])
    bank, scale = operands.bank.contiguous(), LOG2E / tau
    tile = Tile(*POLICY.get().fused_tile or SUMMING[bank.dtype])
    for part, x in operands.rows(ROWS):
        x = x.contiguous()
        splits = _splits(len(x), len(bank), tile)
        largest = torch.empty(splits, len(x), device=x.device)
        sums = torch.empty_like(largest)
        with _on(x.device):
            sum_products[triton.cdiv(len(x), tile.BM), splits](
                x, bank, scale * weights, largest, sums, len(x), len(bank), x.shape[1], scale,
                **_options(x, tile),
            )  # fmt: skip
        result[part] = _joined(largest, sums, scale)
    return (result,)


def _joined(largest: torch.Tensor, sums: torch.Tensor, scale: float) -> torch.Tensor:
    """Return log-sum-exps (n,) from the maxima of the splits and the sums under them, both (splits, n)."""
    above = largest.amax(0)
    above = torch.where(above.isinf(), 0.0, above)
    total = (sums.double() * torch.exp2((largest - above).double())).sum(0)
    return ((above.double() + total.log2()) / scale).float()


def cached_logsumexp(scores: torch.Tensor, tau: float, weights: torch.Tensor) -> torch.Tensor:
    """Return what `dense.cached_logsumexp` returns."""
    n, m = scores.shape
    scale = LOG2E / tau
    BM, BN = CACHED_TILE if scores.stride(1) == 1 else CACHED_TILE[::-1]
    rows = triton.cdiv(n, BM)
    splits = max(1, min(PROGRAMS // rows, m // (8 * BN)))
    largest = torch.empty(splits, n, device=scores.device)
    sums = torch.empty_like(largest)
    with _on(scores.device):
        sum_cached[rows, splits](scores, scale * weights, largest, sums, n, m, *scores.stride(), scale, BM=BM, BN=BN)
    return _joined(largest, sums, scale)


class Survivors(NamedTuple):
    """The scores of some rows that reached the threshold; if `exact`, the k largest are among them. values: (rows,
    room) float32, −inf in empty places. indices: (rows, room) int32, empty if not requested."""

    part: slice
    values: torch.Tensor
    indices: torch.Tensor
    exact: torch.Tensor


def topk_mean(operands: Operands, k: int) -> tuple[torch.Tensor]:
    """Return means of the k largest products, (n,), summed in float64."""
    means = operands.empty(operands.X.shape[0])
    for part, x in operands.rows(ROWS):
        exact = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        values = torch.empty(len(x), dtype=torch.float64, device=x.device)
        for some in _survivors(x.contiguous(), operands.bank.contiguous(), k, indices=False):
            rows, width = some.values.shape
            with _on(x.device):
                mean_of_largest[(rows,)](some.values, values[some.part], width, k, WIDTH=triton.next_power_of_2(width))
            exact[some.part] = some.exact
        if not exact.all():
            [again] = dense.topk_mean(operands.in_full(x[~exact]), k)
            values[~exact] = again.double()
        means[part] = values
    return (means,)


def topk(operands: Operands, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    n = operands.X.shape[0]
    values, indices = operands.empty(n, k), operands.empty(n, k, dtype=torch.int64)
    for part, x in operands.rows(ROWS):
        exact = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        best = torch.empty(len(x), k, device=x.device)
        places = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
        for some in _survivors(x.contiguous(), operands.bank.contiguous(), k, indices=True):
            best[some.part], chosen = some.values.topk(k, dim=1)
            places[some.part] = some.indices.gather(1, chosen).long()
            exact[some.part] = some.exact
        if not exact.all():
            best[~exact], places[~exact] = dense.topk(operands.in_full(x[~exact]), k)
        values[part], indices[part] = best, places
    return values, indices


def _survivors(X: torch.Tensor, B: torch.Tensor, k: int, *, indices: bool) -> Iterator[Survivors]:
    """Yield survivors of rows of X, as many rows at a time as fit into memory; nothing without a threshold."""
    threshold = threshold_for(k, len(B), POLICY.get().sample, MOST_SURVIVORS)
    if threshold is None:
        return
    m, tile = len(B), Tile(*POLICY.get().fused_tile or KEEPING[X.dtype])
    drawn = torch.randperm(m, generator=torch.Generator().manual_seed(0))[: threshold.sample]
    sample = B[drawn.to(B.device)].T
    at_once = max(1, POLICY.get().tile_size_of("survivors") // threshold.room)
    for start in range(0, len(X), at_once):
        part = slice(start, start + at_once)
        x = X[part]
        shape = len(x), threshold.room
        values = torch.full(shape, -torch.inf, device=X.device)
        places = torch.zeros(shape if indices else 0, dtype=torch.int32, device=X.device)
        counts = torch.zeros(len(x), dtype=torch.int32, device=X.device)
        grid = triton.cdiv(len(x), tile.BM), _splits(len(x), m, tile)
        with _on(X.device):
            keep_survivors[grid](
                x, B, _thresholds(x, sample, threshold.rank), values, places, counts,
                len(x), m, X.shape[1], threshold.room, INDICES=indices, **_options(X, tile)
            )  # fmt: skip
        yield Survivors(part, values, places, (counts <= threshold.room) & (counts >= k))


def _thresholds(x: torch.Tensor, sample: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the rank-th largest products with the sample (d, s), float32 (rows,)."""
    at_once = max(1, POLICY.get().tile_size_of("survivors") // sample.shape[1])
    parts = [(part @ sample).topk(rank, dim=1).values[:, -1] for part in torch.split(x, at_once)]
    return torch.cat(parts).float()


def _splits(n: int, m: int, tile: Tile) -> int:
    """Return the number of parts of the bank: enough for the device to be busy, each of at least eight tiles."""
    row_blocks = -(-n // tile.BM)
    return max(1, min(PROGRAMS // row_blocks, m // (8 * tile.BN)))


def _options(X: torch.Tensor, tile: Tile) -> dict[str, Any]:
    precision = "tf32x3" if X.dtype == torch.float32 else "tf32"
    return {**tile._asdict(), "EVEN": X.shape[1] % tile.BK == 0, "PRECISION": precision}


def _on(device: torch.device) -> Any:
    """Return a context in which Triton launches on `device`: it launches on the current device."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
