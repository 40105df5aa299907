"""Scale and spread of biases, for quantisers that treat all columns alike. No I/O.

A quantiser with one range for all columns (scalar int8 in Qdrant), or one that rotates vectors
before it rounds them (RaBitQ, Qdrant's turbo), rounds a bias b as it rounds any other number of the
vector, but the query's −1 multiplies that error by some twenty times the weight of other numbers;
int8 even clips the −1 to the range of the vectors, and the correction is gone. Both end if the bias
column looks like the vector's own: f·b in n columns, −w/(n·f) in each column of the query (see
`BiasSlots`).

    f = ρ/sd(b),    ρ = the root mean square of the numbers of stored vectors

gives f·b the size of the vector's numbers. The weight is then w·sd(b)/(n·ρ): n, in proportion to
the dimension, brings it into the range as well. Quantisers with a range for each column (SQ6 and
SQ8 in FAISS and Milvus) round the same with any f and n. benchmarks/quantised_recall.py measures
all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import (
    QUERY_SCALE,
    Floats,
    Metric,
    as_metric,
    half_squares,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import LARGEST_SPREAD
from milvus_hubness.correction.kernels.multi_vectors import is_multi

DIMENSIONS_PER_COLUMN: dict[Metric, int] = {"IP": 48, "COSINE": 48, "L2": 24}
"""One column of a number for each so many dimensions, rounded up to a power of two.

That is 8 for 256 and 384, 32 for 1,536. Half squares, under L2, differ more than biases.
"""
LARGEST_WEIGHT = 2.5
"""Largest weight of a column of the query, in ρ.

99% of a vector's numbers are within it, and int8 clips others.
"""
LEAST_LENGTHS = 512
"""Least s under L2, as a fraction of the length of an item.

Rows of nearly one length need no column ½‖r‖².
"""
DEVIATIONS = 4.65
"""Standard deviations of normal numbers from their 1st to their 99th percentile."""
LARGEST_EXPONENT = 48
"""Largest exponent of two, of either sign, in f and s.

Biases that differ less, or more, are no signal, and layouts accept twice that.
"""


def spread_for(dim: int, metric: str) -> int:
    """Return n, the number of columns of a bias with vectors of this dimension.

    It is a power of two, at least 2, and 1 for metrics that cannot be corrected.
    """
    if metric not in DIMENSIONS_PER_COLUMN:
        return 1

    columns = math.ceil(dim / DIMENSIONS_PER_COLUMN[as_metric(metric)])
    rounded_up = 1 << max(1, (columns - 1).bit_length())
    return min(LARGEST_SPREAD, rounded_up)


def with_spread(layout: Layout, spread: int) -> Layout:
    """Return the layout with another spread, without the constants that are measured for one."""
    scale = 1.0 if layout.half_squares is None else 1 / layout.half_squares.scale
    slots = replace(layout.slots, scale=scale, spread=spread)
    return replace(layout.without_hints(), slots=slots)


def with_bias_scale(
    layout: Layout, vectors: Floats, biases: Floats, strength: float = 1.0
) -> Layout:
    """Return the layout with f measured on valid vectors (n, d) and their biases (n,).

    The layout stays as it is if biases have one column each, or are all alike. Behind several vectors
    a row, f = 1/√(n·σ) for biases of standard deviation σ: the stored columns f·b and the weights
    −w/(n·f) are then as large as each other.

    strength: that of the queries.
    """
    deviation = float(biases.std(dtype=np.float64)) if len(biases) else 0.0
    size = _size_of_numbers(layout, vectors)
    spread = layout.slots.spread
    if spread == 1 or not deviation or not size:
        return layout

    if layout.multi_vectors:
        scale = 1 / math.sqrt(spread * deviation)
    else:
        # At least so large that the query's weight, w/(n·f), is within the range: int8 clips others.
        like_the_vectors = size / deviation
        within_the_range = abs(strength) / (LARGEST_WEIGHT * size * spread)
        scale = max(like_the_vectors, within_the_range)
    return replace(layout, slots=replace(layout.slots, scale=_power_of_two(scale)))


def scale_of_half_squares(layout: Layout, half_squares: npt.NDArray[np.float64]) -> float:
    """Return s under L2 so that ½‖r‖²/(4·s) looks like a vector's number.

    half_squares: (n,) of the rows.
    """
    low, middle, high = np.percentile(half_squares, [1, 50, 99]).tolist()
    # The median is 0 if more than half of the rows are.
    length = math.sqrt(2 * middle) or math.sqrt(2 * float(half_squares.max()))
    size = length / math.sqrt(layout.dim)

    like_the_vectors = (high - low) / DEVIATIONS / (QUERY_SCALE * size)
    within_the_range = LARGEST_WEIGHT * size * layout.slots.spread / QUERY_SCALE
    scale = min(like_the_vectors, within_the_range)
    return _power_of_two(max(scale, length / LEAST_LENGTHS))


def _size_of_numbers(layout: Layout, vectors: Floats) -> float:
    """Return ρ of vectors (n, d) as they are stored."""
    if not len(vectors):
        return 0.0
    # Under COSINE, vectors are stored with length 1.
    if layout.metric == "COSINE":
        return 1 / math.sqrt(layout.dim)

    rows = vectors.tokens if is_multi(vectors) else vectors
    if layout.half_squares is not None:
        rows = layout.half_squares.without_mean(rows)
    # The median, so that a few long vectors change little.
    median = float(np.median(half_squares(rows)))
    return math.sqrt(2 * median / layout.dim)


def _power_of_two(number: float) -> float:
    exponent = round(math.log2(number))
    return 2.0 ** max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent))
