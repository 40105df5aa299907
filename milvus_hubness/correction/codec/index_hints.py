"""Index hints and the other constants of a layout, measured on a gallery and a bank. No I/O.

Index hints are columns that are zero in every query and place similar items near each other in the index.

If queries are of another modality or language, the items that one query wants are in many cells of an index (IVF), and
few links (HNSW) lead from one to the next. So an item has, in COLUMNS further columns,

    reach · c/‖c‖,    c = the mean of its NEAR nearest bank queries in the principal directions of the bank.

They bring two items nearer to each other, the more the same queries want both, and no score changes. RoarGraph shows
that graphs for cross-modal search improve if queries take part in the construction (Chen et al., PVLDB 17, 2024); here
the index need not know them. benchmarks/locality_hints.py and benchmarks/graph_hint.py measure the effect.
"""

from __future__ import annotations

import base64
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import (
    LARGEST_NUMBER,
    Floats,
    Metric,
    as_text,
    half_squares,
    hint_directions_in,
    lengths_of,
    lost,
)
from milvus_hubness.correction.codec.layout import LARGEST_SCALE, Layout
from milvus_hubness.correction.codec.quantisation import scale_of_half_squares

COLUMNS, FEWEST = 13, 8
"""Most and fewest locality hint columns: a layout has as many as its width has to spare, or none."""
MOST_NUMBERS = 15_360
"""Most numbers in the directions of all columns: a migration record of 65,535 bytes contains them twice, as text."""
NEAR = 32
FEWEST_QUERIES = 4 * NEAR
"""Smallest bank for locality hints: in a smaller one the nearest queries of all items are much the same."""
LANDMARKS = 8_192
"""Largest number of bank queries, spread evenly over the bank, that the nearest queries are searched among."""
REACH = 0.5
"""`reach`, in lengths of an item."""
NEIGHBOUR_HINTS = 0.35
"""Least `neighbour_hints` for which hints are of use: random vectors have 0.07, the embeddings of benchmarks 0.63."""
COMPARED_ROWS = 2_048
"""Number of items, and of bank queries, from which that cosine is measured."""


def places(size: int, most: int = LANDMARKS) -> slice | npt.NDArray[np.int64]:
    """Return at most `most` places in a bank of this size, spread evenly."""
    return slice(None) if size <= most else np.linspace(0, size - 1, most).astype(np.int64)


def evenly(bank: Floats, most: int = LANDMARKS) -> Floats:
    """Return the rows of the bank (m, d) at these `places`, scaled to length 1."""
    return np.asarray(_unit(bank[places(len(bank), most)]), np.float32)


def hint_directions(bank: Floats, count: int) -> str:
    """Return the `count` ≤ d principal directions of a bank (m, d), the most important last: d·count bytes in base64.
    The low precision is enough: the directions need not be exact, only the same for all items.
    """
    some = evenly(bank).astype(np.float64)
    some -= some.mean(axis=0)
    directions = np.linalg.eigh(some.T @ some)[1][:, -count:]
    return _as_text(
        np.rint(directions * (LARGEST_NUMBER / np.abs(directions).max())).astype(np.int8)
    )


def foremost(text: str, dim: int, count: int) -> str:
    """Return the `count` most important directions of `text`; an empty text if count is below
    FEWEST.
    """
    return _as_text(hint_directions_in(text, dim)[:, -count:]) if count >= FEWEST else ""


def coordinates(landmarks: Floats, directions: Floats) -> Floats:
    """Return the coordinates of queries (m, d) along directions (d, c), relative to their mean, (m,
    c).
    """
    return np.asarray((landmarks - landmarks.mean(axis=0)) @ directions, np.float32)


def columns(near: Floats, reach: float) -> Floats:
    """Return the locality hint columns of items, (n, c).

    near: (n, NEAR, c) coordinates of their nearest queries.
    """
    return np.asarray(reach * _unit(near.mean(axis=1)), np.float32)


def neighbour_hints(rows: Floats, bank: Floats, directions: str) -> float:
    """Return the mean cosine between the locality hints of items (n, d) and those of their nearest
    neighbours.
    """
    items = evenly(rows, COMPARED_ROWS)
    queries = evenly(bank, COMPARED_ROWS)
    positions = coordinates(
        queries, hint_directions_in(directions, rows.shape[1]).astype(np.float32)
    )
    nearest = np.argpartition(-(items @ queries.T), NEAR, axis=1)[:, :NEAR]
    hints = columns(positions[nearest], 1.0)
    cosines = items @ items.T
    np.fill_diagonal(cosines, -np.inf)
    return float(np.einsum("ij,ij->i", hints, hints[cosines.argmax(axis=1)]).mean())


def _as_text(directions: npt.NDArray[np.int8]) -> str:
    return base64.b64encode(directions.tobytes()).decode()


def _unit(rows: Floats) -> npt.NDArray[np.floating]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths == 0, 1, lengths))


MOST_DIMENSIONS = 5_120
"""Largest dimension of a mean: a migration record of at most 65,535 bytes contains the mean twice, as text."""
MEASURED_ROWS = 10_000
"""Largest number of rows, spread evenly, from which the mean is computed."""
FAR = 8
"""Least ratio of |mean| to the spread around it for a dimension that is stored without its mean."""
LEAST_FAR = 2.0**-14
"""Smallest number of a mean that is subtracted: float16 may round when it subtracts smaller ones."""
SPREADS = 3
"""s² over the range of half squares: the graph then places an item at most a third farther away than it is."""
GRAPH_HINT_SHARE: dict[Metric, float] = {"IP": 0.75, "COSINE": 0.75, "L2": 0.5}
"""λ by metric. Above it corrected searches gain little and raw ones lose; under L2 that begins sooner."""

LENGTHS_VARY = 0.2
"""Range of the items' lengths under IP, from the 1st to the 99th percentile and in units of the median,
above which a layout has the constants below. Vectors of nearly one length do without them."""
LENGTH_SHARE = 0.1
"""κ, the share of −½‖r‖² in the links of items of varying lengths. At 1 the graph is that of L2."""
FAR_ANCHOR = 8.0
"""a, in lengths of an item, if lengths vary: the products of what the graph hint column subtracts are
then small, and its terms only add up."""
SMALL_BIASES = 0.25
"""Size of a stored bias if lengths vary, where 1 is its size for queries of length 1. The inner product
of two stored vectors has b·b' once for each slot, which draws links to the items that corrected
searches avoid; a sixteenth of that does no harm."""
MOST_HALVINGS = 60
"""Largest number of times that biases are halved for queries that are long."""


def measured_on(
    layout: Layout,
    vectors: npt.ArrayLike,
    queries: npt.ArrayLike | None = None,
    *,
    graph_hint: bool = True,
    locality_hints: bool = False,
    taken_off: bool = True,
    keeps_mean: bool = False,
    length_pull: bool = True,
) -> Layout:
    """Return the layout with the constants under which an index finds most.

    vectors: (n, d) items, or a sample of them; invalid rows are left out. queries: (m, d) bank
    queries, for locality hint columns, and for IP, where their lengths may differ from those of the
    items.

    mean, under L2: see `with_mean`, also for taken_off; keeps_mean: that of the layout stays.
    offset, scale, under L2: with H the median of ½‖r‖² and R the range from its 1st to its 99th percentile, s is the
    least power of two with s² ≥ H + 3R, and m = H + s². Scores are rounded in proportion to s²: a single long row must
    not cost all others their accuracy. A spread layout has s as `scale_of_half_squares` returns it.

    anchor, pull: a is the power of two at the median length, under L2 it is s. p = GRAPH_HINT_SHARE/a; under IP it is
    multiplied by the median length of the items over that of the queries, as biases grow with the queries.
    length_pull, under IP if lengths vary by LENGTHS_VARY: LENGTH_SHARE/a, with an anchor that is FAR_ANCHOR times
    as large. bias_scale, under IP and with a spread of 1: such that biases, which grow with the queries, are as small
    as those for queries of length 1, or SMALL_BIASES of that if lengths vary. The argument length_pull is false for
    indexes that gain nothing by these two.
    locality_hints, reach: the principal directions of the queries, and REACH times the median length of the items; not
    for L2, d > 1,920, or few queries, and only if the hints of neighbours resemble each other.
    """
    if layout.metric == "IP" and layout.spread == 1:
        # Of an earlier measurement.
        layout = replace(layout, length_pull=0.0, bias_scale=1.0)
    rows = layout.rows(vectors)
    rows = rows[~layout.invalid(rows)]
    measured = layout if keeps_mean else with_mean(layout, rows, taken_off=taken_off)
    squares = half_squares(measured.without_mean(rows))
    if not squares.any():
        return measured
    low, middle, high = np.percentile(squares, [1, 50, 99]).tolist()
    least = middle + SPREADS * (high - low)
    if layout.metric == "L2" and least > 0:
        scale = 2.0 ** math.ceil(math.log2(least) / 2)
        if layout.spread > 1:
            scale = scale_of_half_squares(layout, squares)
        scale = max(scale, 1 / LARGEST_SCALE)
        measured = replace(measured, offset=middle + scale**2, scale=scale)
    length = math.sqrt(2 * middle) or 1.0
    bank = layout.rows(queries) if locality_hints and queries is not None else rows[:0]
    count = min(COLUMNS, layout.spare - graph_hint, layout.dim, MOST_NUMBERS // layout.dim)
    if layout.metric != "L2" and count >= FEWEST and len(bank) >= FEWEST_QUERIES:
        directions = hint_directions(bank, count)
        if len(rows) < COMPARED_ROWS or neighbour_hints(rows, bank, directions) >= NEIGHBOUR_HINTS:
            reach = REACH * (1.0 if layout.metric == "COSINE" else length)
            measured = replace(measured, locality_hints=directions, reach=reach)
    if not (graph_hint and measured.spare):
        return measured
    if layout.metric != "IP":
        return replace(
            measured, anchor=measured.scale, pull=GRAPH_HINT_SHARE[layout.metric] / measured.scale
        )
    query_lengths = lengths_of(layout.rows(queries)) if queries is not None else np.array([length])
    query_length = float(np.median(query_lengths)) or 1.0
    vary = length_pull and math.sqrt(high) - math.sqrt(low) > LENGTHS_VARY * math.sqrt(middle)
    anchor = 2.0 ** round(math.log2(length)) * (FAR_ANCHOR if vary else 1.0)
    measured = replace(
        measured,
        anchor=anchor,
        pull=GRAPH_HINT_SHARE["IP"] * length / query_length / anchor,
        length_pull=LENGTH_SHARE / anchor if vary else 0.0,
    )
    if measured.spread > 1 or not length_pull:
        return measured
    return replace(
        measured, bias_scale=_bias_scale(query_length / SMALL_BIASES if vary else query_length)
    )


def _bias_scale(factor: float) -> float:
    """Return the power of two that makes biases smaller by `factor`, or 1 if they would grow."""
    return float(2.0 ** min(0, max(-MOST_HALVINGS, -round(math.log2(factor)))))


def with_mean(layout: Layout, vectors: npt.ArrayLike, *, taken_off: bool = True) -> Layout:
    """Return the layout with the mean of vectors (n, d), invalid ones left out, under L2 if half squares need it.
    taken_off: whether rows may be stored without the mean, which suits rows similar to these.
    """
    if layout.metric != "L2":
        return layout
    rows = layout.rows(vectors)
    return replace(layout, mean=mean_of(rows[~layout.invalid(rows)], taken_off=taken_off))


def mean_of(rows: Floats, *, taken_off: bool = True) -> str:
    """Return the mean of finite rows (n, d) as text; empty if half squares lose next to nothing
    without it. In each dimension, numbers beyond the 1st and 99th percentile are clipped to these.
    taken_off: see `with_mean`.
    """
    some = rows[:: -(-len(rows) // MEASURED_ROWS)] if len(rows) else rows
    if not some.any() or some.shape[1] > MOST_DIMENSIONS:
        return ""
    low, high = np.percentile(some, [1, 99], axis=0)
    inner = np.clip(some, low, high, dtype=np.float64)
    mean = _rounded_as(some, inner.mean(axis=0).astype(np.float32))
    if np.square(mean, dtype=np.float64).sum() <= inner.var(axis=0).sum():
        return ""
    far = np.maximum(high - mean, mean - low) * FAR <= np.abs(mean)
    far &= (np.abs(mean) >= LEAST_FAR) & ~lost(some, mean).any(axis=0) & taken_off
    return as_text(mean, far)


def _rounded_as(rows: Floats, mean: Floats) -> Floats:
    """Round the mean to as many bits as any number of the rows has, but to no fewer than bfloat16
    has.
    """
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(rows).view(np.uint32), axis=None))
    step = np.uint32(min(used & -used, 2**16))
    return np.asarray(
        ((mean.view(np.uint32) + step // 2) & ~(step - np.uint32(1))).view(np.float32)
    )
