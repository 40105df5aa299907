"""Scores as arrays or as tensors, and the steps that NumPy and torch name differently.

Whoever counts or orders scores takes them as they come: as tensors where torch is installed, which
computes on all cores or on a CUDA device, and else as arrays. Steps of one name in both libraries
are those of `library_of`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from milvus_hubness.correction.kernels.checks import Array, is_tensor
from milvus_hubness.correction.kernels.policy import has_torch
from milvus_hubness.correction.kernels.primitives import score_tiles

Scores: TypeAlias = Any
"""An array of NumPy or a tensor of torch."""


def tiles_of_scores(
    queries: Array, gallery: Array, own: Array | None = None
) -> Iterator[tuple[slice, Scores]]:
    """Yield the inner products of queries (m, d) with all items (n, d), in tiles of whole rows.

    They are tensors where torch is installed, whoever multiplied, and else arrays. own: (m,), the
    number of the item that each query itself is, which gets −inf as no answer; −1 for none.
    """
    for tile, scores in score_tiles(queries, gallery):
        if has_torch() and not is_tensor(scores):
            import torch

            scores = torch.from_numpy(scores)
        yield tile, scores if own is None else _without_own(scores, own[tile])


def _without_own(scores: Scores, own: Array) -> Scores:
    # Others may read the same scores.
    without = scores + 0
    rows = np.flatnonzero(own >= 0)
    without[as_scores(rows, scores), as_scores(own[rows], scores)] = -np.inf
    return without


def largest_sizes(scores: Scores) -> Scores:
    """Return (m,) the largest absolute value of each row of scores, without the −inf of own items."""
    library = library_of(scores)
    sizes = library.amax(abs(scores), 1)
    if library.isinf(sizes).any():
        finite = library.where(library.isinf(scores), library.zeros_like(scores), scores)
        sizes = library.amax(abs(finite), 1)
    return sizes


def library_of(scores: Scores) -> Any:
    """Return the module of the library that computes with these scores: numpy or torch."""
    # A tensor exists, so torch has been imported: no need to import it by name.
    return sys.modules["torch"] if is_tensor(scores) else np


def as_scores(values: Array, scores: Scores) -> Scores:
    """Return an array as these scores are: itself, or as a tensor on their device."""
    if is_tensor(scores):
        return library_of(scores).from_numpy(values).to(scores.device)
    return values


def as_array(scores: Scores) -> Array:
    """Return an array of scores, which may be a tensor on any device."""
    array: Array = scores.cpu().numpy() if is_tensor(scores) else scores
    return array


def filled(shape: tuple[int, ...], value: float, scores: Scores) -> Scores:
    """Return one value in this shape, of the type of the scores and on their device."""
    if is_tensor(scores):
        return scores.new_full(shape, value)
    return np.full(shape, value, scores.dtype)


def at_columns(scores: Scores, columns: Scores) -> Scores:
    """Return scores (m, n) at these columns (m, p) of their rows, (m, p)."""
    if is_tensor(scores):
        return scores.gather(1, columns)
    return np.take_along_axis(scores, columns, 1)


def largest(scores: Scores, count: int) -> tuple[Scores, Scores]:
    """Return the largest scores of each row, falling, and their columns, both (m, count).

    Equal scores are in no particular order.
    """
    if is_tensor(scores):
        best = scores.topk(count, dim=1)
        return best.values, best.indices

    column_count = scores.shape[1]
    columns = np.argpartition(scores, column_count - count, axis=1)[:, column_count - count :]
    values = np.take_along_axis(scores, columns, 1)
    order = np.argsort(-values, axis=1)
    return np.take_along_axis(values, order, 1), np.take_along_axis(columns, order, 1)


def where_true(mask: Scores) -> tuple[Scores, Scores]:
    """Return the rows and the columns of all that is true in a mask (m, n), row by row."""
    if is_tensor(mask) and mask.is_cuda:
        on_device: Any = mask.nonzero(as_tuple=True)
        return on_device[0], on_device[1]
    # Where little is true, ten times as fast as in two dimensions.
    rows, columns = np.divmod(np.flatnonzero(as_array(mask)), mask.shape[1])
    return as_scores(rows, mask), as_scores(columns, mask)
