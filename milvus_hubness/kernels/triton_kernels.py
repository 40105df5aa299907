"""What runs on the device, in Triton: tiles of scores that are reduced where they are made.

X (n, d) and B (m, d) are contiguous, of one dtype, and may be larger than 32-bit offsets reach. The bank is
parted into `splits`, programs of their own, of which each takes every splits-th tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _scores(
    x_ptr, b_ptr, rows, columns, n, m, d,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(BM, BN) float32 inner products; those of rows past n and of columns past m repeat the last one."""
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
def sum_exponentials(
    x_ptr, b_ptr, w_ptr, shift_ptr, sum_ptr, n, m, d, scale,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sum_ptr (splits, n): Σ_i 2^(scale·x·b_i + w_i − shift) over the split; w_i and shift in powers of 2."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    shift = tl.load(shift_ptr + rows, mask=rows < n, other=-LOWEST)
    total = tl.zeros((BM,), tl.float32)
    for start in range(split * BN, m, tl.num_programs(1) * BN):
        columns = start + tl.arange(0, BN)
        scores = _scores(x_ptr, b_ptr, rows, columns, n, m, d, EVEN, PRECISION, BM, BN, BK)
        w = tl.load(w_ptr + columns, mask=columns < m, other=LOWEST)
        total += tl.sum(tl.exp2(scores * scale + w[None, :] - shift[:, None]), 1)
    tl.store(sum_ptr + split.to(tl.int64) * n + rows, total, mask=rows < n)


@triton.jit
def sum_under_maximum(
    x_ptr, b_ptr, w_ptr, max_ptr, sum_ptr, n, m, d, scale,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `sum_exponentials`, but the shift is the split's own maximum, max_ptr (splits, n)."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    largest = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for start in range(split * BN, m, tl.num_programs(1) * BN):
        columns = start + tl.arange(0, BN)
        scores = _scores(x_ptr, b_ptr, rows, columns, n, m, d, EVEN, PRECISION, BM, BN, BK)
        w = tl.load(w_ptr + columns, mask=columns < m, other=LOWEST)
        scores = scores * scale + w[None, :]
        above = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(above == LOWEST, 0.0, above)
        total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(scores - finite[:, None]), 1)
        largest = above
    place = split.to(tl.int64) * n + rows
    tl.store(max_ptr + place, largest, mask=rows < n)
    tl.store(sum_ptr + place, total, mask=rows < n)


@triton.jit
def sum_cached(
    s_ptr, w_ptr, max_ptr, sum_ptr, n, m, row_stride, column_stride, scale,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """As `sum_under_maximum`, of scores (n, m) that were written to memory, by rows or by columns."""
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
        scores = s.to(tl.float32) * scale + w[None, :]
        above = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(above == LOWEST, 0.0, above)
        total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(scores - finite[:, None]), 1)
        largest = above
    place = split.to(tl.int64) * n + rows
    tl.store(max_ptr + place, largest, mask=rows < n)
    tl.store(sum_ptr + place, total, mask=rows < n)


@triton.jit
def keep_survivors(
    x_ptr, b_ptr, threshold_ptr, value_ptr, index_ptr, count_ptr, n, m, d, room,
    INDICES: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The scores of at least a row's threshold, and their columns: value_ptr and index_ptr (n, room).

    count_ptr (n,), 0 before: how many there were, also where that is more than the room, and some are lost.
    Survivors are rare, so that a place is taken for each by an atomic addition; n · room < 2^31.
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
        kept = survives & (slot < room)
        place = where * room + slot
        tl.store(value_ptr + place, scores, mask=kept)
        if INDICES:
            tl.store(index_ptr + place, tl.broadcast_to(columns[None, :], (BM, BN)), mask=kept)


@triton.jit
def mean_of_largest(value_ptr, mean_ptr, width, k, WIDTH: tl.constexpr):
    """mean_ptr (n,) float64: of the k largest of value_ptr (n, width), −inf where nothing is; WIDTH ≥ width.

    The k-th largest is found bit by bit in the integers that are ordered as the floats are.
    """
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
