"""The measure of labelled queries among all rows of a collection, of which a sample is in memory.

Among fewer rows, right ones come first more often. So the others pass by once, and those that rank before
a right row are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.quality.retrieval import (
    MARGIN,
    Grades,
    Measure,
    in_order,
    ranks,
)

MOST_SCORES = 1 << 22
"""Scores in memory at once."""


def values_among_all(
    queries: Floats,
    items: Floats,
    biases: Sequence[Floats],
    positives: Sequence[npt.NDArray[np.int64]],
    others: Iterable[tuple[Floats, Sequence[Floats]]],
    *,
    measure: Measure,
    grades: Grades | None = None,
    own: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the measure of each query (m, d) under each of the biases, (n_biases, m).

    items, biases: the sample (n, d), and its biases (n,). positives, grades, own: as of `ranks`, in the
    sample. others: parts (k, d) of the other rows, each with its biases (k,) in the same order.
    """
    counts = [len(of_query) for of_query in positives]
    starts = np.concatenate([[0], np.cumsum(counts)])
    # One search for each right row.
    query_of = np.repeat(np.arange(len(queries)), counts)
    # In float64 two equal rows have one score, whichever rows they are multiplied with.
    sent = queries[query_of].astype(np.float64)
    right_rows = np.concatenate([np.asarray(of_query) for of_query in positives])
    ignored = None if own is None else own[query_of]
    raw_scores = np.einsum("ij,ij->i", sent, items[right_rows])
    limits = [raw_scores - bias[right_rows] for bias in biases]
    ranks_by_bias = [
        ranks(queries[query_of], items, right_rows, bias, own=ignored).ranks for bias in biases
    ]

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

    flat_grades = None if grades is None else np.concatenate([np.asarray(one) for one in grades])
    return np.stack(
        [measure.values(in_order(found, starts, flat_grades)) for found in ranks_by_bias]
    )
