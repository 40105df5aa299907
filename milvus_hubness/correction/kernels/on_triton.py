"""The two kernels of Triton by which `buffered` reads scores once and multiplies only candidates.

Neither multiplies matrices: both are bound by memory. Matrices are contiguous by rows. Importing
this needs triton, which the builds of torch for CUDA bring.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

SCORES = 1024
"""Scores that a program compares at a time."""
CANDIDATES = 32
"""Candidates that a program multiplies at a time."""
DIMENSIONS = 64
"""Numbers of each of their vectors that it multiplies at a time."""
WARPS = 4


def append_reaching(
    tile: torch.Tensor,
    width: int,
    thresholds: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    first: int,
    step: int,
) -> None:
    """Append the scores of a tile that reach their row's threshold to the row's buffer.

    tile: (rows, p) bfloat16, of which `width` columns count; p is a multiple of SCORES. thresholds:
    (rows,) float32. buffers: scores and columns, both (rows, places), in which column j of the tile
    is `first` + `step`·j, and the counts, (rows,) int32, which go on where there is no place left.
    A row's candidates are in no particular order.
    """
    scores, columns, counts = buffers
    with _launching_on(tile.device):
        _append_reaching[(len(tile),)](
            tile,
            thresholds,
            scores,
            columns,
            counts,
            tile.shape[1],
            width,
            scores.shape[1],
            first,
            step,
            BLOCK=SCORES,
            num_warps=WARPS,
        )


def products_of_candidates(
    x: torch.Tensor,
    bank: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cuts: torch.Tensor,
) -> torch.Tensor:
    """Return products of x (rows, d) with the rows of the bank in the buffers, (rows, places).

    Those with scores below the row's cut are −inf, and cost nothing. x, bank and the products:
    float32. buffers: as above. cuts: (rows,) float32.
    """
    scores, columns, counts = buffers
    products = x.new_full(scores.shape, -torch.inf)
    with _launching_on(x.device):
        _products_of_candidates[(len(x),)](
            x,
            bank,
            scores,
            columns,
            counts,
            cuts,
            products,
            x.shape[1],
            scores.shape[1],
            BLOCK=CANDIDATES,
            PART=DIMENSIONS,
            num_warps=WARPS,
        )
    return products


# Without its alignment, a thread reads single scores that are far apart. It could read eight side by
# side, but places and columns would have to change threads before they are written.
@triton.jit(do_not_specialize=["tile_columns", "width", "first", "step"])
def _append_reaching(
    tile: tl.tensor,
    thresholds: tl.tensor,
    scores: tl.tensor,
    columns: tl.tensor,
    counts: tl.tensor,
    tile_columns: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(tile + row * tile_columns + column).to(tl.float32)
        # Few blocks have a candidate, and few of these have more than some.
        if tl.max(score, axis=0) >= threshold:
            is_candidate = (score >= threshold) & (column < width)
            counter = counts + row + tl.zeros((BLOCK,), tl.int32)
            place = tl.atomic_add(counter, 1, mask=is_candidate, sem="relaxed")
            fits = is_candidate & (place < places)
            tl.store(scores + row * places + place, score, mask=fits)
            tl.store(columns + row * places + place, first + step * column, mask=fits)


@triton.jit
def _products_of_candidates(
    x: tl.tensor,
    bank: tl.tensor,
    scores: tl.tensor,
    columns: tl.tensor,
    counts: tl.tensor,
    cuts: tl.tensor,
    products: tl.tensor,
    dim: tl.tensor,
    places: tl.tensor,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(cuts + row)
    count = tl.minimum(tl.load(counts + row), places)
    for start in range(0, count, BLOCK):
        place = row * places + start + tl.arange(0, BLOCK)
        is_filled = start + tl.arange(0, BLOCK) < count
        score = tl.load(scores + place, mask=is_filled, other=float("-inf"))
        is_candidate = (score.to(tl.float32) >= cut) & is_filled
        if tl.max(is_candidate.to(tl.int32), axis=0) > 0:
            column = tl.load(columns + place, mask=is_candidate, other=0).to(tl.int64)
            sums = tl.zeros((BLOCK, PART), tl.float32)
            for first in range(0, dim, PART):
                part = first + tl.arange(0, PART)
                of_x = tl.load(x + row * dim + part, mask=part < dim, other=0.0)
                of_bank = tl.load(
                    bank + column[:, None] * dim + part[None, :],
                    mask=is_candidate[:, None] & (part < dim)[None, :],
                    other=0.0,
                )
                sums += of_bank * of_x[None, :]
            tl.store(products + place, tl.sum(sums, axis=1), mask=is_candidate)


def _launching_on(device: torch.device) -> Any:
    """Return a context in which Triton launches on this device: else it takes the current one."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
