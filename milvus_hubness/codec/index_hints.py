"""Index hints: columns that are zero in every query and place similar items near each other. No I/O.

An index divides items into cells (IVF), or links them (HNSW), by how they lie among each other. Where
queries are of another modality or language, the items that one query looks for lie in many cells, and few
links lead from one to the next: raw searches are saved by the hubs, which are few; corrected ones are not.
So an item carries, in COLUMNS further columns,

    reach · c/‖c‖,    c = the mean of its NEAR nearest bank queries in the main axes of the bank,

by which the product of two items grows with how much the same queries ask for both, and the distance shrinks.
The query holds 0 there: no score changes. That graphs for cross-modal search are better built by the queries
that they will serve, RoarGraph shows (Chen et al., PVLDB 17, 2024); here the vectors bring this to an index
that knows nothing of queries. benchmarks/cells.py and benchmarks/link.py show what the columns are worth.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np
import numpy.typing as npt

from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import InvalidParameter

COLUMNS, FEWEST = 13, 8
"""As many as the width has to spare, from FEWEST to COLUMNS: fewer are worth little, more nothing."""

MOST_NUMBERS = 15_360
"""In the axes of all columns: a migration's record, of 65,535 bytes at most, holds them twice, as text."""

NEAR = 32
FEWEST_QUERIES = 4 * NEAR
"""In a smaller bank the nearest queries of all items are much the same."""

LANDMARKS = 8_192
"""Among so many queries, spread evenly over the bank, the nearest are looked for."""

REACH = 0.5
"""reach, in lengths of an item."""

_LARGEST = 127


def evenly(bank: Floats) -> Floats:
    """At most LANDMARKS rows of the bank (m, d), of length 1."""
    some = bank if len(bank) <= LANDMARKS else bank[np.linspace(0, len(bank) - 1, LANDMARKS).astype(np.int64)]
    return np.asarray(_unit(some), np.float32)


def hint_directions(bank: Floats, count: int) -> str:
    """The `count` main axes of a bank (m, d), count ≤ d, the foremost last, as text: d·count bytes in base64.
    Such small numbers are enough, as the columns need not be those axes, but the same for all items."""
    some = evenly(bank).astype(np.float64)
    some -= some.mean(axis=0)
    directions = np.linalg.eigh(some.T @ some)[1][:, -count:]
    return _as_text(np.rint(directions * (_LARGEST / np.abs(directions).max())).astype(np.int8))


def foremost(text: str, dim: int, count: int) -> str:
    """Of such axes at most the `count` foremost; none where fewer than FEWEST are left."""
    return _as_text(_numbers(text, dim)[:, -count:]) if count >= FEWEST else ""


def directions_in(text: str, dim: int) -> Floats:
    """(dim, c) what `hint_directions` wrote. Raises InvalidParameter for anything else."""
    return np.asarray(_numbers(text, dim) / _LARGEST, np.float32)


def lying(landmarks: Floats, directions: Floats) -> Floats:
    """(m, c) where queries (m, d) lie along the axes, as seen from their mean."""
    return np.asarray((landmarks - landmarks.mean(axis=0)) @ directions, np.float32)


def columns(near: Floats, reach: float) -> Floats:
    """(n, c) the columns of items whose nearest queries lie there (n, NEAR, c)."""
    return np.asarray(reach * _unit(near.mean(axis=1)), np.float32)


def _as_text(directions: npt.NDArray[np.int8]) -> str:
    return base64.b64encode(directions.tobytes()).decode()


def _numbers(text: str, dim: int) -> npt.NDArray[np.int8]:
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), np.int8)
    except binascii.Error as error:
        raise InvalidParameter(f"the axes of the locality hint columns are no base64: {error}") from None
    if len(numbers) % dim:
        raise InvalidParameter(f"{len(numbers)} numbers are no axes of dimension {dim}")
    return numbers.reshape(dim, -1)


def _unit(rows: Floats) -> npt.NDArray[np.floating]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths == 0, 1, lengths))
