"""Top-k means on CUDA with Triton: screened in bfloat16 by one pass over the scores.

Rounding, its bounds and the exact products in float32 are those of `screened`; candidates are found
in another way. One kernel reads each tile of scores once, and appends those that reach the row's
threshold to a buffer of the row. The threshold is what a lower bound of the k-th largest score
leaves to the k largest products: the bound by groups in the first tile, and after 1, 2, 4, 8, …
tiles the k-th largest score of the buffer. Tiles are taken alike from all of the bank, so that its
order does not matter, and a row appends about k candidates each time that the tiles double. The
CPU awaits no number: rows with more candidates than places, as with many ties, are left to
`screened`.

No GPU has run this yet. It is off unless the policy names this kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from milvus_hubness.correction.kernels import screened
from milvus_hubness.correction.kernels.operands import Operands
from milvus_hubness.correction.kernels.screened import Results, RoundedBank, Tiles

PLACES_FOR_EACH = 12
SPARE_PLACES = 1024
"""Places of a buffer are so many for each of the k, and these."""


class _Buffers(NamedTuple):
    """The candidates of each row, in the order of the tiles."""

    scores: torch.Tensor
    """(rows, places) bfloat16; −inf in free places."""

    columns: torch.Tensor
    """(rows, places) int32, rows of the bank."""

    counts: torch.Tensor
    """(rows,) int32, more than there are places where some found none."""


def topk_mean(operands: Operands, k: int) -> Results:
    """Return means of the k largest products, (n,), summed in float64."""
    return screened.means_by(_largest, operands, k, screened.topk_mean)


def topk(operands: Operands, k: int) -> Results:
    """Return values (n, k), falling, and indices (n, k) int64 of the k largest products."""
    return screened.largest_by(_largest, operands, k, screened.topk)


def _largest(
    x: torch.Tensor, bank: RoundedBank, k: int, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest products of x (rows, d), falling, and their indices, both (rows, k).

    The third value is whether they are certain, (rows,).
    """
    # Only devices with Triton have it.
    from milvus_hubness.correction.kernels import on_triton

    rounded, error = screened.rounded_rows(x, bank)
    found = _candidates(rounded, bank.rounded, k, error, tiles)
    places = found.scores.shape[1]
    is_sure = (found.counts >= k) & (found.counts <= places)

    cuts = screened.least_score(screened.kth_largest(found.scores, k), error)
    products = on_triton.products_of_candidates(x.contiguous(), bank.exact, found, cuts)
    values, chosen = products.topk(k, dim=1)
    return values, found.columns.gather(1, chosen).long(), is_sure


def _candidates(
    x: torch.Tensor, bank: torch.Tensor, k: int, error: torch.Tensor, tiles: Tiles
) -> _Buffers:
    """Return all scores that one of the k largest products may have, and some more.

    x: (rows, q), bank: (m, q), both rounded. error: (rows,).
    """
    from milvus_hubness.correction.kernels import on_triton

    row_count = len(x)
    tile_count = -(-len(bank) // tiles.columns)
    places = PLACES_FOR_EACH * k + SPARE_PLACES
    found = _Buffers(
        x.new_full((row_count, places), -torch.inf),
        x.new_empty(row_count, places, dtype=torch.int32),
        x.new_zeros(row_count, dtype=torch.int32),
    )

    width = -(-len(bank) // tile_count)
    padded = -(-width // on_triton.SCORES) * on_triton.SCORES
    scores = x.new_full((row_count, padded), -torch.inf)
    for number in range(tile_count):
        # Each tile has every tile_count-th row of the bank: a sorted bank looks like any other.
        tile = bank[number::tile_count]
        torch.mm(x, tile.T, out=scores[:, : len(tile)])

        if number == 0:
            lower_bound = screened.bound_by_groups(scores, k)
        elif number & (number - 1) == 0:
            lower_bound = screened.kth_largest(found.scores, k)
        threshold = screened.least_score(lower_bound, error)
        on_triton.append_reaching(scores, len(tile), threshold, found, number, tile_count)
    return found
