"""Index hints: columns that are zero in every query and place similar items near each other. No I/O.

An index divides items into cells (IVF), or links them (HNSW), by their positions among each other. If queries
are of another modality or language, the items that one query looks for are in many cells, and few links lead
from one to the next. Raw searches still find the hubs, which are few; corrected searches suffer. So an item
has, in COLUMNS further columns,

    reach · c/‖c‖,    c = the mean of its NEAR nearest bank queries in the main axes of the bank.

They raise the inner product of two items, and shrink their distance, the more the same queries want both. The
query has 0 in these columns, so no score changes. RoarGraph shows that graphs for cross-modal search improve
if the queries that they will serve take part in the construction (Chen et al., PVLDB 17, 2024); here the
vectors bring this to an index that does not know the queries. benchmarks/cells.py and benchmarks/link.py
measure the effect of the columns.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np
import numpy.typing as npt

from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import InvalidParameter

COLUMNS, FEWEST = 13, 8
"""Most and fewest locality hint columns.

A layout has as many as its width has to spare, up to COLUMNS, and none if that is below FEWEST: fewer columns
have little effect, more have none.
"""

MOST_NUMBERS = 15_360
"""Largest count of numbers in the axes of all columns: a migration record of at most 65,535 bytes contains
them twice, as text.
"""

NEAR = 32
FEWEST_QUERIES = 4 * NEAR
"""Smallest bank for locality hints: in a smaller one the nearest queries of all items are much the same."""

LANDMARKS = 8_192
"""Largest number of bank queries, spread evenly over the bank, that the nearest queries are searched
among."""

REACH = 0.5
"""`reach`, in lengths of an item."""

_LARGEST = 127


def evenly(bank: Floats) -> Floats:
    """Return at most LANDMARKS rows of the bank (m, d), spread evenly and scaled to length 1."""
    some = bank if len(bank) <= LANDMARKS else bank[np.linspace(0, len(bank) - 1, LANDMARKS).astype(np.int64)]
    return np.asarray(_unit(some), np.float32)


def hint_directions(bank: Floats, count: int) -> str:
    """Return the `count` main axes of a bank (m, d) as text, the most important last.

    count ≤ d. The text is d·count bytes in base64. The low precision is enough: the columns need not be
    exactly the main axes, only the same for all items.
    """
    some = evenly(bank).astype(np.float64)
    some -= some.mean(axis=0)
    directions = np.linalg.eigh(some.T @ some)[1][:, -count:]
    return _as_text(np.rint(directions * (_LARGEST / np.abs(directions).max())).astype(np.int8))


def foremost(text: str, dim: int, count: int) -> str:
    """Return the `count` most important axes of `text`; an empty text if count is below FEWEST."""
    return _as_text(_numbers(text, dim)[:, -count:]) if count >= FEWEST else ""


def directions_in(text: str, dim: int) -> Floats:
    """Read the axes that `hint_directions` returns, (dim, c). Raises InvalidParameter for anything else."""
    return np.asarray(_numbers(text, dim) / _LARGEST, np.float32)


def lying(landmarks: Floats, directions: Floats) -> Floats:
    """Return the coordinates of queries (m, d) along the axes, relative to their mean, (m, c)."""
    return np.asarray((landmarks - landmarks.mean(axis=0)) @ directions, np.float32)


def columns(near: Floats, reach: float) -> Floats:
    """Return the locality hint columns of items, (n, c).

    near: (n, NEAR, c) the coordinates of each item's nearest queries.
    """
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
