"""The findings of a report, as plain data, between `report.diagnose` and `report_page.render`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from milvus_hubness.quality.bootstrap import Interval
from milvus_hubness.quality.hubness import HubnessSummary


class Bin(NamedTuple):
    """How many items have low ≤ N_k ≤ high."""

    low: int
    high: int
    before: int
    after: int


class Item(NamedTuple):
    """A gallery item, its N_k before and after; fields: its scalar fields, empty where none were given."""

    key: Any
    fields: dict[str, Any]
    before: int
    after: int


class Swallowed(NamedTuple):
    """A query that has a hub at place `rank`, in front of its best positive where positives are known.

    right_before, right_after: the rank of that positive.
    """

    query: int
    text: str | None
    rank: int
    right_before: int | None
    right_after: int | None


class Hub(NamedTuple):
    """An item that many queries find, and the queries that it stands nearest the top of."""

    item: Item
    swallows: list[Swallowed]


class Antihubs(NamedTuple):
    """Items that no query finds, before and after; of those before, `rescued` are found after.

    by_chance: how many there would be had every query found k items at random.
    examples: rescued ones, those found most often first; never: some found neither before nor after.
    """

    before: int
    after: int
    rescued: int
    by_chance: float
    examples: list[Item]
    never: list[Item]


class Point(NamedTuple):
    """The search at one strength; recall: R@1, where positives are known."""

    strength: float
    hubness: HubnessSummary
    recall: Interval | None


class Region(NamedTuple):
    """A cluster of gallery items; reached: how many of them a bank query finds; central: its middlemost."""

    items: int
    reached: int
    central: Any


class BankReach(NamedTuple):
    """How much of the gallery is among the first k of at least one bank query.

    reached, by_chance: how many items are, and would be if every bank query found k items at random.
    blind_answers: share of the answers, before, that are items no bank query reaches.
    farthest: the items least similar to any bank query, with that similarity.
    """

    bank_size: int
    reached: int
    by_chance: float
    blind_answers: float
    regions: list[Region]
    farthest: list[tuple[Item, float]]


@dataclass(frozen=True)
class Diagnosis:
    """HubnessSummary before (strength 0) and after correction at `strength`; recall and retrieval need
    positives.

    gain: R@1 after less R@1 before, paired. retrieval_*: as `retrieval_summary` has it.
    """

    title: str
    n_queries: int
    n_items: int
    k: int
    strength: float
    before: HubnessSummary
    after: HubnessSummary
    histogram: list[Bin]
    hubs: list[Hub]
    antihubs: Antihubs
    strengths: list[Point]
    gain: Interval | None
    retrieval_before: dict[str, float] | None
    retrieval_after: dict[str, float] | None
    coverage: BankReach | None
    verdict: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and strings, ready for JSON."""
        plain: dict[str, Any] = as_plain(self)
        return plain


def as_plain(value: Any) -> Any:
    """Dicts of dataclasses and named tuples, numbers of NumPy's, and strings of what JSON does not know."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if dataclasses.is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(one) for one in value]
    known = value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))
    return value if known else str(value)
