"""Collections to migrate, and all that is in them."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.chaos.ports import Sameness
from tests.support.galleries import vectors

DIM, ROWS, TOUCHED = 16, 2_400, 8
PARTITIONS = {"north": ("tenant 1", "tenant 2", "tenant 3"), "south": ("tenant 4", "tenant 5")}
"""Where rows have named partitions: the tenants in each. Others are in the default one."""

Key = int | str
Rows = dict[Key, dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """key: numbers, texts, UUIDs, or numbers and UUIDs mixed. bias_location: by a partition key, in named
    partitions, or neither. is_named: where vectors need no name, it has one."""

    key: str
    metric: str
    index: str
    bias_location: str
    nullable: bool
    is_named: bool = True

    def key_of(self, number: int) -> Key:
        if self.key == "varchar":
            return str(number)
        if self.key == "uuid" or (self.key == "mixed" and number % 2):
            return str(uuid.UUID(int=(number * 2**97 + 77) % 2**128))
        return number


@dataclass(frozen=True)
class Change:
    """What an application does in one go: rows that it changes or adds, of the rows that are there, and keys
    of those it deletes. partition: where all of them are."""

    rows: list[dict[str, Any]]
    gone: list[Key]
    partition: str

    def made(self, reference: Rows) -> None:
        """It was made to these too."""
        for row in self.rows:
            reference[row["pk"]] = dict(row)
        for key in self.gone:
            reference.pop(key, None)


def drawn_change(there: Rows, shape: Shape, rng: random.Random, new: int) -> Change:
    """Eight rows changed, eight added and eight deleted. new: the number of the first that is added."""
    partition = "north" if shape.bias_location == "partitions" else ""
    tenants = PARTITIONS.get(partition)
    keys = [key for key, row in there.items() if not tenants or row["tenant"] in tenants]
    keys.sort(key=lambda key: (isinstance(key, str), key))
    first = rng.randrange(len(keys) - 3 * TOUCHED)
    models = keys[first : first + 3 * TOUCHED]
    fresh = vectors(np.random.default_rng(new), 2 * TOUCHED, DIM)
    rows = []
    for i, vector in enumerate(fresh):
        key = models[i] if i < TOUCHED else shape.key_of(new + i)
        rows.append({**there[models[i]], "pk": key, "count": new + i, "vec": vector.tolist()})
    return Change(rows, models[-TOUCHED:], partition)


def assert_same(found: Rows, wanted: Rows, sameness: Sameness = "bit for bit") -> None:
    """Keys, fields and vectors."""
    missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    assert not missing, f"{len(missing)} rows are lost: {sorted(missing, key=str)[:5]}"
    assert not extra, f"{len(extra)} rows too many: {sorted(extra, key=str)[:5]}"
    for key, row in wanted.items():
        theirs = found[key]
        assert {**theirs, "vec": 0} == {**row, "vec": 0}, f"row {key!r} differs"
        a, b = np.float32(theirs["vec"]), np.float32(row["vec"])
        assert _is_same(a, b, sameness), (
            f"the vector of row {key!r} differs by {np.abs(a - b).max()}"
        )


def _is_same(a: np.ndarray, b: np.ndarray, sameness: Sameness) -> bool:
    if sameness == "bit for bit":
        return np.array_equal(a, b)
    if sameness == "in direction":
        # qdrant-client's local mode divides the vectors that it keeps by their lengths at every search.
        a, b = (each / np.linalg.norm(each.astype(float)) for each in (a, b))
        return np.allclose(a, b, rtol=2.0**-17, atol=0)
    return np.allclose(a, b, rtol=2.0**-22, atol=0)
