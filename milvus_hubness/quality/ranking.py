"""Where the right answers come in the ranking, without ever holding the matrix of scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.errors import InvalidInput, name_some
from milvus_hubness.kernels.devices import full_precision
from milvus_hubness.kernels.operands import Operands
from milvus_hubness.quality.search import with_bias

Positives: TypeAlias = npt.NDArray[Any] | Sequence[int | Collection[int]]


class PositiveRanks(NamedTuple):
    """ranks (p,): the places, from 1, of all positives; those of query i are ranks[starts[i]:starts[i + 1]].

    They rise within a query, so the first is that of its best positive. starts: (n_queries + 1,).
    """

    ranks: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    @property
    def best(self) -> npt.NDArray[np.int64]:
        """(n_queries,) the rank of each query's best positive."""
        return self.ranks[self.starts[:-1]]


def ranks(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    positives: Positives,
    bias: npt.ArrayLike | None = None,
    *,
    device: str = "auto",
) -> PositiveRanks:
    """The rank of every positive under s(q, r) − b(r), all gallery items counted.

    queries (n_queries, d), gallery (n_items, d); positives: for each query the number of its gallery item,
    or several; bias (n_items,). An item whose score differs from a positive's by no more than float32
    rounding counts as equal, and equal items count as behind it. Holds a tile of at least one row of scores.

    Raises InvalidInput (no query, no item, positives that point nowhere or of another number than the
    queries), DimensionMismatch, NonFiniteVectors.
    """
    query_vectors, stored = with_bias(queries, gallery, bias)
    items, starts = checked_positives(positives, len(query_vectors), len(stored))
    operands = Operands.of(query_vectors, stored, device)
    found = np.empty(len(items), np.int64)
    rows, _ = operands.tile_shape(columns=len(stored))
    with full_precision(operands.device):
        for part, tile in operands.rows(rows):
            scores = tile @ operands.bank.T
            margin = 4 * torch.finfo(scores.dtype).eps * scores.abs().amax(1)
            first, last = starts[:-1][part], starts[1:][part]
            for nth in range(int((last - first).max())):
                some = np.flatnonzero(first + nth < last)
                pair = first[some] + nth
                here = torch.from_numpy(some).to(operands.device)
                own = scores if len(some) == len(scores) else scores[here]
                positive = own.gather(1, torch.from_numpy(items[pair, None]).to(operands.device))
                above = own > positive + margin[here, None]
                found[pair] = 1 + above.sum(1).cpu().numpy()
    return PositiveRanks(_in_order(found, starts), starts)


def _in_order(found: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each query's ranks rising, and one place for each of several equal positives."""
    query = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    found = found[np.lexsort((found, query))]
    nth = np.arange(len(found)) - starts[query]
    apart = found.max(initial=0) + len(found) + 1
    rising = np.maximum.accumulate(found - nth + query * apart)
    in_order: npt.NDArray[np.int64] = rising + nth - query * apart
    return in_order


def checked_positives(
    positives: Positives, n_queries: int, n_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All positives, each query's own apart and once, and where each query's begin."""
    if len(positives) != n_queries:
        raise InvalidInput(f"positives are given for {len(positives)} queries and there are {n_queries}")
    if n_queries == 0 or n_items == 0:
        raise InvalidInput("there is no query, or no gallery item")
    sets = [sorted(set(one)) if isinstance(one, Iterable) else [one] for one in positives]
    missing = [query for query, one in enumerate(sets) if not one]
    if missing:
        raise InvalidInput(f"no positive is given for query {name_some(missing)}")
    starts = np.concatenate([[0], np.cumsum([len(one) for one in sets])])
    items = np.array([item for one in sets for item in one])
    if items.dtype.kind not in "iu":
        raise InvalidInput("positives must be the numbers of gallery items")
    astray = np.flatnonzero((items < 0) | (items >= n_items))
    if len(astray):
        lost = sorted({int(query) for query in np.searchsorted(starts, astray, "right") - 1})
        raise InvalidInput(f"positives of query {name_some(lost)} are not among the {n_items} gallery items")
    return items.astype(np.int64), starts
