"""Index hints and the other constants of a layout, measured on a gallery and a bank. No I/O.

Index hints are columns that are zero in every query and place similar items near each other in the
index.

If queries are of another modality or language, the items that one query wants are in many cells of
an index (IVF), and few links (HNSW) lead from one to the next. So an item has, in COLUMNS further
columns,

    reach · c/‖c‖,    c = the mean of its NEAR nearest bank queries in the principal directions of
                      the bank.

They bring two items nearer to each other, the more the same queries want both, and no score
changes. RoarGraph shows that graphs for cross-modal search improve if queries take part in the
construction (Chen et al., PVLDB 17, 2024); here the index need not know them.
benchmarks/locality_hints.py and benchmarks/graph_hint.py measure the effect.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, replace

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
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import (
    LARGEST_SCALE,
    GraphHint,
    HalfSquares,
    LocalityHints,
)
from milvus_hubness.correction.codec.quantisation import scale_of_half_squares

Doubles = npt.NDArray[np.float64]

COLUMNS = 13
"""Most locality hint columns: a layout has as many as its width has to spare, or none."""
FEWEST = 8
"""Fewest locality hint columns."""
MOST_NUMBERS = 15_360
"""Most numbers in the directions of all columns.

A migration record of 65,535 bytes contains them twice, as text.
"""
MOST_CHARACTERS = 58_000
"""Most characters of these directions, of the means of kinds and of their offsets in a migration record
of 65,535 bytes.
"""
NEAR = 32
"""Number of the nearest bank queries that an item's hints are the mean of."""
FEWEST_QUERIES = 4 * NEAR
"""Smallest bank for locality hints.

In a smaller one the nearest queries of all items are much the same.
"""
LANDMARKS = 8_192
"""Most bank queries, spread evenly over the bank, that the nearest ones are searched among."""
REACH = 0.5
"""`reach`, in lengths of an item."""
NEIGHBOUR_HINTS = 0.35
"""Least `neighbour_hints` for which hints are of use.

Random vectors have 0.07, the embeddings of benchmarks 0.63.
"""
COMPARED_ROWS = 2_048
"""Number of items, and of bank queries, from which that cosine is measured."""


def landmark_rows(size: int, most: int = LANDMARKS) -> slice | npt.NDArray[np.int64]:
    """Return at most `most` rows of a bank of this size, spread evenly."""
    return slice(None) if size <= most else np.linspace(0, size - 1, most).astype(np.int64)


def evenly(bank: Floats, most: int = LANDMARKS) -> Floats:
    """Return the rows of the bank (m, d) at these `landmark_rows`, scaled to length 1."""
    return np.asarray(_unit(bank[landmark_rows(len(bank), most)]), np.float32)


def hint_directions(bank: Floats, count: int) -> str:
    """Return the `count` ≤ d principal directions of a bank (m, d), the most important last.

    They are d·count bytes in base64. The low precision is enough: the directions need not be exact,
    only the same for all items.
    """
    queries = evenly(bank).astype(np.float64)
    queries -= queries.mean(axis=0)
    # eigh returns the eigenvectors in the order of their eigenvalues, the largest last.
    _, eigenvectors = np.linalg.eigh(queries.T @ queries)
    directions = eigenvectors[:, -count:]

    to_int8 = LARGEST_NUMBER / np.abs(directions).max()
    return _as_text(np.rint(directions * to_int8).astype(np.int8))


def coordinates(landmarks: Floats, directions: Floats) -> Floats:
    """Return the coordinates of queries (m, d) along directions (d, c), from their mean on."""
    return np.asarray((landmarks - landmarks.mean(axis=0)) @ directions, np.float32)


def columns(near: Floats, reach: float) -> Floats:
    """Return the locality hint columns of items, (n, c).

    near: (n, NEAR, c) coordinates of their nearest queries.
    """
    return np.asarray(reach * _unit(near.mean(axis=1)), np.float32)


def neighbour_hints(rows: Floats, bank: Floats, directions: str) -> float:
    """Return the mean cosine of the locality hints of items (n, d) and of their nearest items."""
    items = evenly(rows, COMPARED_ROWS)
    queries = evenly(bank, COMPARED_ROWS)
    positions = coordinates(
        queries, hint_directions_in(directions, rows.shape[1]).astype(np.float32)
    )
    nearest = np.argpartition(-(items @ queries.T), NEAR, axis=1)[:, :NEAR]
    hints = columns(positions[nearest], 1.0)

    cosines = items @ items.T
    np.fill_diagonal(cosines, -np.inf)
    hints_of_neighbours = hints[cosines.argmax(axis=1)]
    return float(np.einsum("ij,ij->i", hints, hints_of_neighbours).mean())


def _as_text(directions: npt.NDArray[np.int8]) -> str:
    return base64.b64encode(directions.tobytes()).decode()


def _unit(rows: Floats) -> npt.NDArray[np.floating]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths == 0, 1, lengths))


MOST_DIMENSIONS = 5_120
"""Largest dimension of a mean.

A migration record of at most 65,535 bytes contains the mean twice, as text.
"""
MEASURED_ROWS = 10_000
"""Largest number of rows, spread evenly, from which the mean is computed."""
FAR = 8
"""Least ratio of |mean| to the spread around it for a dimension that is stored without its mean."""
LEAST_FAR = 2.0**-14
"""Smallest number of a mean that is subtracted.

float16 may round when it subtracts smaller ones.
"""
SPREADS = 3
"""s² over the range of half squares.

The graph then places an item at most a third farther away than it is.
"""
GRAPH_HINT_SHARE: dict[Metric, float] = {"IP": 0.75, "COSINE": 0.75, "L2": 0.5}
"""λ by metric.

Above it corrected searches gain little and raw ones lose; under L2 that begins sooner.
"""

LENGTHS_VARY = 0.2
"""Range of the items' lengths under IP above which a layout has the constants below.

It is from the 1st to the 99th percentile, in units of the median. Vectors of nearly one length do
without them.
"""
LENGTH_SHARE = 0.1
"""κ, the share of −½‖r‖² in the links of items of varying lengths. At 1 the graph is that of L2."""
FAR_ANCHOR = 8.0
"""a, in lengths of an item, if lengths vary.

The products of what the graph hint column subtracts are then small, and its terms only add up.
"""
SMALL_BIASES = 0.25
"""Size of a stored bias if lengths vary, where 1 is its size for queries of length 1.

The inner product of two stored vectors has b·b' once for each slot, which draws links to the items
that corrected searches avoid; a sixteenth of that does no harm.
"""
MOST_HALVINGS = 60
"""Largest number of times that biases are halved for queries that are long."""


@dataclass(frozen=True)
class _Sizes:
    """½‖r‖² of the rows r, without the mean: their size, and how far they vary."""

    low: float
    """The 1st percentile."""
    middle: float
    """The median."""
    high: float
    """The 99th percentile."""

    @property
    def median_length(self) -> float:
        """The median length of a row; 1 if more than half of the rows are zero."""
        return math.sqrt(2 * self.middle) or 1.0

    @property
    def lengths_vary(self) -> bool:
        """Whether the range of the lengths exceeds LENGTHS_VARY medians."""
        range_of_lengths = math.sqrt(self.high) - math.sqrt(self.low)
        return range_of_lengths > LENGTHS_VARY * math.sqrt(self.middle)


def _sizes_of(squares: Doubles) -> _Sizes:
    return _Sizes(*np.percentile(squares, [1, 50, 99]).tolist())


def lengths_vary(layout: Layout, vectors: Floats) -> bool:
    """Whether the lengths of vectors (n, d) vary so much that a graph needs more for them.

    Only inner products look at lengths: false for other metrics. Invalid rows are left out.
    """
    if layout.metric != "IP" or layout.multi_vectors:
        return False
    squares = half_squares(vectors[~layout.invalid(vectors)])
    return bool(squares.any()) and _sizes_of(squares).lengths_vary


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

    The mean of half squares: see `with_mean`, also for taken_off; keeps_mean: that of the layout
    stays. Their offset and scale: see `_with_scale`. Locality hints: see `_with_locality_hints`. The
    graph hint, and the scale of biases under IP: see `_with_graph_hint`; the argument length_pull is
    false for indexes that gain nothing by that of the hint, and by the scale. Layouts of several
    vectors a row have none of them.
    """
    if layout.multi_vectors:
        return layout
    if layout.metric == "IP" and layout.slots.spread == 1:
        # Of an earlier measurement.
        layout = replace(layout, slots=replace(layout.slots, scale=1.0))
        if layout.graph_hint is not None:
            layout = replace(layout, graph_hint=replace(layout.graph_hint, length_pull=0.0))
    rows = layout.rows(vectors)
    rows = rows[~layout.invalid(rows)]

    measured = layout if keeps_mean else with_mean(layout, rows, taken_off=taken_off)
    columns_of_squares = measured.half_squares
    squares = half_squares(
        rows if columns_of_squares is None else columns_of_squares.without_mean(rows)
    )
    if not squares.any():
        return measured

    sizes = _sizes_of(squares)
    if columns_of_squares is not None:
        measured = _with_scale(measured, columns_of_squares, squares, sizes)
    elif locality_hints and queries is not None:
        # The graph hint takes one of the columns that the width has to spare.
        spare = layout.spare - graph_hint
        measured = _with_locality_hints(measured, rows, layout.rows(queries), sizes, spare)
    if not (graph_hint and measured.spare):
        return measured

    query_lengths = np.empty(0) if queries is None else lengths_of(layout.rows(queries))
    return _with_graph_hint(measured, sizes, query_lengths, length_pull=length_pull)


def rows_measured(
    layout: Layout, query_count: int, *, graph_hint: bool, locality_hints: bool
) -> int | None:
    """Return how many valid vectors suffice to measure the constants that a bank of so many queries
    gives this layout: 0 if they do not depend on vectors; None for as many as can be had.

    graph_hint, locality_hints: as in `measured_on`.
    """
    if layout.multi_vectors and layout.slots.spread == 1:
        return 0
    if layout.metric != "COSINE" or layout.slots.spread > 1:
        return None
    has_room = _hint_columns(layout, layout.spare - graph_hint) >= FEWEST
    if locality_hints and has_room and query_count >= FEWEST_QUERIES:
        return COMPARED_ROWS
    return 0


def room_for_hints(layout: Layout) -> int:
    """Return the characters that a migration record has left for hints with the kinds of a layout.

    It has the offsets twice, and the means at most three times, as a refit has former and new ones.
    """
    count = layout.kinds.count if layout.kinds is not None else 0
    offsets = layout.kinds.offsets if layout.kinds is not None else ""
    means = characters_of(3 * (1 + count) * layout.dim)
    return max(0, MOST_CHARACTERS - means - 2 * len(offsets))


def characters_of(count: int) -> int:
    """Return the length of the text of so many bytes."""
    return math.ceil(4 * count / 3)


def _hint_columns(layout: Layout, spare: int) -> int:
    """Return how many locality hint columns a layout can have in its `spare` columns."""
    count = min(COLUMNS, spare, layout.dim, MOST_NUMBERS // layout.dim)
    if layout.kinds is not None:
        count = min(count, room_for_hints(layout) // characters_of(2 * layout.dim))
    return count


def _with_scale(layout: Layout, former: HalfSquares, squares: Doubles, sizes: _Sizes) -> Layout:
    """Return the layout with offset and scale of its half squares.

    With H the median of ½‖r‖² and R the range from its 1st to its 99th percentile, the scale s is
    the least power of two with s² ≥ H + 3R, and the offset m = H + s². Scores are rounded in
    proportion to s²: a single long row must not cost all others their accuracy. A spread layout has
    s as `scale_of_half_squares` returns it. Biases are stored in units of s.
    """
    least = sizes.middle + SPREADS * (sizes.high - sizes.low)
    if least <= 0:
        return layout

    scale = 2.0 ** math.ceil(math.log2(least) / 2)
    if layout.slots.spread > 1:
        scale = scale_of_half_squares(layout, squares)
    scale = max(scale, 1 / LARGEST_SCALE)
    return replace(
        layout,
        slots=replace(layout.slots, scale=layout.slots.scale * former.scale / scale),
        half_squares=replace(former, offset=sizes.middle + scale**2, scale=scale),
    )


def _with_locality_hints(
    layout: Layout, rows: Floats, bank: Floats, sizes: _Sizes, spare: int
) -> Layout:
    """Return the layout with locality hint columns, if they help, under IP and COSINE.

    They are the principal directions of the queries, and reach is REACH times the median length of
    the items. There are none for d > 1,920, for few queries, and unless the hints of neighbours
    resemble each other. spare: the columns that the width has room for.
    """
    count = _hint_columns(layout, spare)
    if count < FEWEST or len(bank) < FEWEST_QUERIES:
        return layout

    directions = hint_directions(bank, count)
    # Few rows have no near neighbours whose hints could be compared.
    is_measurable = len(rows) >= COMPARED_ROWS
    if is_measurable and neighbour_hints(rows, bank, directions) < NEIGHBOUR_HINTS:
        return layout

    reach = REACH * (1.0 if layout.metric == "COSINE" else sizes.median_length)
    return replace(layout, locality_hints=LocalityHints(directions, reach))


def _with_graph_hint(
    layout: Layout, sizes: _Sizes, query_lengths: Doubles, *, length_pull: bool
) -> Layout:
    """Return the layout with a graph hint.

    anchor, pull: a is the power of two at the median length, under L2 it is s. p =
    GRAPH_HINT_SHARE/a; under IP it is multiplied by the median length of the items over that of the
    queries, as biases grow with the queries.

    length_pull, under IP if lengths vary: LENGTH_SHARE/a, with an anchor that is FAR_ANCHOR times
    as large. The scale of biases, under IP and with a spread of 1: such that biases, which grow with the
    queries, are as small as those for queries of length 1, or SMALL_BIASES of that if lengths vary.

    query_lengths: (m,), of bank queries; if there are none, they are as long as the items.
    """
    share = GRAPH_HINT_SHARE[layout.metric]
    if layout.metric != "IP":
        anchor = layout.half_squares.scale if layout.half_squares is not None else 1.0
        return replace(layout, graph_hint=GraphHint(anchor, share / anchor))

    length = sizes.median_length
    query_length = length
    if len(query_lengths):
        query_length = float(np.median(query_lengths)) or 1.0

    vary = length_pull and sizes.lengths_vary
    anchor = 2.0 ** round(math.log2(length)) * (FAR_ANCHOR if vary else 1.0)
    hint = GraphHint(
        anchor,
        pull=share * length / query_length / anchor,
        length_pull=LENGTH_SHARE / anchor if vary else 0.0,
    )
    layout = replace(layout, graph_hint=hint)
    if layout.slots.spread > 1 or not length_pull:
        return layout

    size_of_biases = query_length / SMALL_BIASES if vary else query_length
    return replace(layout, slots=replace(layout.slots, scale=_bias_scale(size_of_biases)))


def _bias_scale(factor: float) -> float:
    """Return the power of two that makes biases smaller by `factor`, or 1 if they would grow."""
    return float(2.0 ** min(0, max(-MOST_HALVINGS, -round(math.log2(factor)))))


def with_mean(layout: Layout, vectors: npt.ArrayLike, *, taken_off: bool = True) -> Layout:
    """Return the layout with the mean of vectors (n, d), under L2 if half squares need it.

    Invalid vectors are left out. taken_off: whether rows may be stored without the mean, which
    suits rows similar to these.
    """
    if layout.half_squares is None:
        return layout
    rows = layout.rows(vectors)
    mean = mean_of(rows[~layout.invalid(rows)], taken_off=taken_off)
    return replace(layout, half_squares=replace(layout.half_squares, mean=mean))


def mean_of(rows: Floats, *, taken_off: bool = True) -> str:
    """Return the mean of finite rows (n, d) as text.

    It is empty if half squares lose next to nothing without it. In each dimension, numbers beyond
    the 1st and 99th percentile are clipped to these.

    taken_off: see `with_mean`.
    """
    sample = rows[:: -(-len(rows) // MEASURED_ROWS)] if len(rows) else rows
    if not sample.any() or sample.shape[1] > MOST_DIMENSIONS:
        return ""

    low, high = np.percentile(sample, [1, 99], axis=0)
    clipped = np.clip(sample, low, high, dtype=np.float64)
    mean = _rounded_as(sample, clipped.mean(axis=0).astype(np.float32))
    # Half squares are sums over all dimensions: they lose digits to a mean that outweighs the rest.
    if np.square(mean, dtype=np.float64).sum() <= clipped.var(axis=0).sum():
        return ""

    is_far = np.maximum(high - mean, mean - low) * FAR <= np.abs(mean)
    is_far &= np.abs(mean) >= LEAST_FAR
    is_far &= ~lost(sample, mean).any(axis=0)
    return as_text(mean, is_far & taken_off)


def _rounded_as(rows: Floats, mean: Floats) -> Floats:
    """Round the mean to as many bits as any number of the rows has, but to no fewer than bfloat16
    has.
    """
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(rows).view(np.uint32), axis=None))
    step = np.uint32(min(used & -used, 2**16))
    return np.asarray(
        ((mean.view(np.uint32) + step // 2) & ~(step - np.uint32(1))).view(np.float32)
    )
