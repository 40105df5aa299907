"""The first items of each query in an order that evaluators keep, as runs have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.kernels.scores import (
    as_array,
    as_scores,
    largest,
    tiles_of_scores,
)
from milvus_hubness.quality.retrieval import PositiveRanks

_SMALLEST = np.finfo(np.float32).smallest_normal.view(np.int32)
"""The bits of the smallest float32 above 0 that no processor setting turns into 0."""


class Ranking(NamedTuple):
    """The first items of a query."""

    items: npt.NDArray[np.int64]
    """(depth,) their numbers, best first."""

    scores: npt.NDArray[np.float32]
    """(depth,) their scores, each less than the one before."""


def rankings(
    queries: Vectors,
    gallery: Vectors,
    depth: int,
    ranks: PositiveRanks | None = None,
    own: npt.NDArray[np.int64] | None = None,
) -> Iterator[Ranking]:
    """Yield the first `depth` items of each query by inner product, or all of a smaller gallery.

    ranks: of positives, with their items, which get these ranks. `measures.ranks` counts an item
    whose score differs from the positive's by rounding alone as behind it, and so does the order of
    these rankings; all other items are in the order of their scores. own: as for `ranks`; without
    these, each ranking has an item less than the gallery at most. Memory: a tile of at least one
    row of scores, and as many of first items.
    """
    depth = min(depth, len(gallery) if own is None else len(gallery) - 1)
    most = 0 if ranks is None else int(ranks.right.counts.max())
    for tile, scores in tiles_of_scores(queries, gallery, own):
        # Without the positives, there are still enough.
        best_scores, best = largest(scores, min(depth + most, len(gallery)))
        first_items = as_array(best)
        first_scores = as_array(best_scores)
        # The order of equal scores is left open: it becomes that of the rows.
        order = np.lexsort((first_items, -first_scores))
        first_items = np.take_along_axis(first_items, order, 1)
        first_scores = np.take_along_axis(first_scores, order, 1)

        for row, query in enumerate(range(tile.start, tile.start + len(first_items))):
            ranking = Ranking(first_items[row], first_scores[row])
            if ranks is not None:
                of_query = slice(*ranks.right.starts[query : query + 2])
                right = ranks.right.items[of_query]
                right_scores = as_array(scores[row][as_scores(right, scores)])
                ranking = _with_positives(
                    ranking, Ranking(right, right_scores), ranks.ranks[of_query], depth
                )
            yield Ranking(ranking.items[:depth], falling(ranking.scores[:depth]))


def _with_positives(
    ranking: Ranking, positives: Ranking, ranks: npt.NDArray[np.int64], depth: int
) -> Ranking:
    """Return a ranking in which the positives have their ranks, and the others keep their order."""
    is_within = ranks <= depth
    positions = ranks[is_within] - 1
    is_other = ~np.isin(ranking.items, positives.items)
    free = np.ones(depth, bool)
    free[positions] = False

    items = np.empty(depth, np.int64)
    items[positions] = positives.items[is_within]
    items[free] = ranking.items[is_other][: free.sum()]
    scores = np.empty(depth, np.float32)
    scores[positions] = positives.scores[is_within]
    scores[free] = ranking.scores[is_other][: free.sum()]
    return Ranking(items, scores)


def falling(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return scores (n,) of which each is less than the one before, by one float32 if need be.

    trec_eval reads scores as float32, sorts by them, and puts equal ones in an order of its own.
    """
    # Floats of one sign are in the order of their bits, as whole numbers. Those too near 0 count as
    # 0, since some processor settings take them for it.
    bits = np.abs(scores).view(np.int32).astype(np.int64)
    steps = np.sign(scores).astype(np.int64) * np.maximum(bits - _SMALLEST + 1, 0)

    # A step is at least one less than the one before: a running minimum of step + n does that.
    nth = np.arange(len(steps))
    steps = np.minimum.accumulate(steps + nth) - nth
    bits = np.where(steps == 0, 0, np.abs(steps) + _SMALLEST - 1)
    sizes = bits.astype(np.int32).view(np.float32)
    falling: npt.NDArray[np.float32] = np.copysign(sizes, steps.astype(np.float32))
    return falling
