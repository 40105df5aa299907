"""The measure of labelled queries among all rows of a collection, of which a sample is in memory.

Among fewer rows, right ones come first more often. So the others pass by once, and those that rank before
a right row are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.quality.retrieval import MARGIN, Measure, in_order, ranks
from milvus_hubness.quality.right_items import RightItems

MOST_SCORES = 1 << 22
"""Scores in memory at once."""


def values_among_all(
    queries: Floats,
    items: Floats,
    biases: Sequence[Floats],
    right: RightItems,
    others: Iterable[tuple[Floats, Sequence[Floats]]],
    measure: Measure,
) -> npt.NDArray[np.float64]:
    """Return the measure of each query (m, d) under each of the biases, (n_biases, m).

    items, biases: the sample (n, d), and its biases (n,). right: the right items of the queries, in the
    sample. others: parts (k, d) of the other rows, each with its biases (k,) in the same order.
    """
    # One search for each right row.
    query_of = np.repeat(np.arange(len(queries)), right.counts)
    # In float64 two equal rows have one score, whichever rows they are multiplied with.
    sent = queries[query_of].astype(np.float64)
    raw_scores = np.einsum("ij,ij->i", sent, items[right.items])
    limits = [raw_scores - bias[right.items] for bias in biases]
    alone = RightItems(
        right.items,
        np.arange(len(right.items) + 1),
        own=None if right.own is None else right.own[query_of],
    )
    ranks_by_bias = [ranks(queries[query_of], items, alone, bias).ranks for bias in biases]

    for rows, biases_of_rows in others:
        size = max(1, MOST_SCORES // max(1, len(rows)))
        for start in range(0, len(sent), size):
            block = slice(start, start + size)
            scores = sent[block] @ rows.T.astype(np.float64)
            # As `ranks` has it: what differs by the rounding of float32 is no order.
            margins = MARGIN * np.abs(scores).max(axis=1, initial=0.0)
            for limit, bias, found in zip(limits, biases_of_rows, ranks_by_bias, strict=True):
                is_before = scores - bias > (limit[block] + margins)[:, None]
                found[block] += is_before.sum(axis=1)

    return np.stack([measure.values(in_order(found, right)) for found in ranks_by_bias])
