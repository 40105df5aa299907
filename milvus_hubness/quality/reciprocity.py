"""Two-way agreement of queries and items: a measure of hubness that needs no labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.codec.arrays import lengths_of
from milvus_hubness.correction.kernels.policy import prefer_torch
from milvus_hubness.correction.kernels.scores import (
    as_array,
    as_scores,
    library_of,
    tiles_of_scores,
    where_true,
)
from milvus_hubness.quality.retrieval import MARGIN

Floats = npt.NDArray[np.float32]


class Reciprocity(NamedTuple):
    """The share of queries whose first item has them as its first query."""

    before: float
    """Without correction."""

    after: float
    """With correction."""

    distinct: int
    """Number of queries that count: those of a group of near copies count as one."""

    at_most: float
    """The share that can be reached: an item has one first query, so fewer items than queries leave
    some queries without one."""


def reciprocities(
    queries: Vectors,
    gallery: Vectors,
    biases: npt.ArrayLike,
    strengths: Sequence[npt.ArrayLike],
    *,
    groups: npt.NDArray[np.int64] | None = None,
    lengths: npt.ArrayLike | None = None,
) -> list[float]:
    """Return the reciprocity of each search: the share of queries whose first item has them as its
    first query.

    queries: (m, d). gallery: (n, d). biases: (n,). strengths: for each search w, one number or (m,),
    one for each query: 0 for a query that is searched raw. groups: (m,), the number of each query's
    group of near copies, 0 … g − 1; None for queries that all differ. lengths: (m,), by which the
    scores of a query are divided before they are compared with those of other queries.

    The first item of a query q has the highest s(q, r) − w·b(r). The first query of an item r has
    the highest s(q, r) of all queries: the bias b(r) is the same for all of them and cannot change
    the choice. So a correction moves what queries choose, never what items choose.

    A group counts as one query: an item that has a near copy of q first has q first, and each query
    of a group of c has the weight 1/c. Where scores are equal up to float32 rounding, as those of
    equal rows are, all of them are first, and any pair of a query and an item that have each other
    first is enough. Memory: a tile of at least one row of scores.

    Source: mutual nearest neighbours as in arXiv 2605.26575, where hubs explain more of what
    encoders lack of it than anything else that was tested.
    """
    prefer_torch()
    count = len(queries)
    if groups is None:
        groups = np.arange(count)
    by_query = np.ones(count, np.float32) if lengths is None else np.asarray(lengths, np.float32)
    subtracted = np.asarray(biases, np.float32)
    weights = np.stack([np.broadcast_to(np.asarray(w, np.float32), count) for w in strengths])
    limits = _limits(queries, gallery, subtracted, weights)

    # An error of rounding is relative to the products of lengths, however small a score is.
    longest = float((lengths_of(queries) / by_query).max())
    margins = np.asarray(MARGIN * longest * lengths_of(gallery), np.float32)

    group_count = int(groups.max()) + 1
    is_mutual = np.zeros(weights.shape, np.bool_)
    for tile, scores in tiles_of_scores(gallery, queries):
        library = library_of(scores)
        group_of = as_scores(groups, scores)
        compared = scores / as_scores(by_query, scores)
        least = library.amax(compared, 1) - as_scores(margins[tile], scores)
        item, query = where_true(compared >= least[:, None])
        chosen_by_items = library.unique(item * group_count + group_of[query])

        bias = as_scores(subtracted[tile], scores)[:, None]
        for search, (weight, limit) in enumerate(zip(weights, limits, strict=True)):
            corrected = scores - as_scores(weight, scores) * bias
            item, query = where_true(corrected >= as_scores(limit, scores))
            is_chosen = library.isin(item * group_count + group_of[query], chosen_by_items)
            is_mutual[search, as_array(query[is_chosen])] = True

    shares = 1 / np.bincount(groups)[groups]
    return [float(mutual @ shares / shares.sum()) for mutual in is_mutual]


def _limits(queries: Vectors, gallery: Vectors, biases: Floats, weights: Floats) -> Floats:
    """Return the score from which on an item counts as a query's first, (n_searches, m).

    biases: (n,). weights: (n_searches, m), with which each query subtracts them.
    """
    longest = float(lengths_of(gallery).max())
    largest_bias = float(np.abs(biases).max())
    sizes = lengths_of(queries) * longest + np.abs(weights) * largest_bias
    limits = np.asarray(-MARGIN * sizes, np.float32)
    for tile, scores in tiles_of_scores(queries, gallery):
        bias = as_scores(biases, scores)
        for limit, weight in zip(limits, weights, strict=True):
            strength = as_scores(weight[tile], scores)[:, None]
            corrected = scores - strength * bias
            limit[tile] += as_array(library_of(scores).amax(corrected, 1))
    return limits
