"""pymilvus's search results, taken apart and put together again. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.layout import Floats, Layout
from milvus_hubness.rerank import GloballyCorrected


def keep(hits: Any, kept: list[Any]) -> None:
    """Only `kept`, in that order, in every place where pymilvus's hits hold them."""
    hits[:] = kept
    hits.ids = [hit.id for hit in kept]
    hits.distances = [hit["distance"] for hit in kept]


def rescore(hits: Any, scores: npt.ArrayLike, round_decimal: int = -1) -> None:
    """Give each hit its score, rounded to so many decimals unless that is −1."""
    values = np.asarray(scores, np.float64)
    hits.distances = (values.round(round_decimal) if round_decimal >= 0 else values).tolist()
    for hit, score in zip(hits, hits.distances, strict=True):
        hit["distance"] = score


def rescale(hits: Any, length: float) -> None:
    """Divide the scores of one query's hits by its length."""
    hits.distances = [score / length for score in hits.distances]
    for hit, score in zip(list.__iter__(hits), hits.distances, strict=True):
        hit["distance"] = score


def rerank(
    results: Any,
    queries: Floats,
    layout: Layout,
    how: GloballyCorrected,
    bank: Floats,
    page: slice,
    vectors_of: Callable[[list[Any]], Floats],
) -> None:
    """Put each query's hits in the order of `how` and cut them to `page`, in place.

    queries, bank (m, d) as the user gave them. vectors_of: (n, d) those of n hits, as the user gave them.
    """
    reduced_bank = layout.reduce_queries(bank)
    for hits, query in zip(results, queries, strict=True):
        items = layout.reduce_items(vectors_of(list(hits)))
        scores = items @ layout.reduce_queries(query[None, :])[0]
        keep(hits, [hits[i] for i in how.order(scores, items, reduced_bank)[page]])
