"""The answers that go to groups of items, by the values of a field, before and after correction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality import measures
from milvus_hubness.quality.right_items import RightItems

MOST_GROUPS = 12
"""Values of a field with a group of their own."""
RESAMPLES = 2000

Members = npt.NDArray[np.bool_]
"""(n_items,) whether an item is in a group."""


class Group(NamedTuple):
    """The items with one value of a field, and their shares of the answers."""

    value: str | None
    """None for all values without a group of their own."""
    items: int
    gallery: float
    """Share of the gallery."""
    right: measures.Interval | None
    """Share of the right answers; None without positives."""
    first_before: measures.Interval
    """Share of the first answers without correction."""
    first_after: measures.Interval
    """Share of the first answers with correction."""
    top_before: measures.Interval
    """Share of the first k answers without correction."""
    top_after: measures.Interval
    """Share of the first k answers with correction."""
    excess_before: measures.Interval
    """Share of the first answers less that of the right ones or,
    without positives, of the gallery; without correction."""
    excess_after: measures.Interval
    """The same with correction."""

    @property
    def name(self) -> str:
        return "another value" if self.value is None else self.value


def expect_field(fields: Sequence[Mapping[str, Any]] | None, field: str, option: str) -> None:
    """Raise InvalidInput if no item has the field.

    option: the option that names the field, for the message.
    """
    names = sorted({name for row in fields or () for name in row})
    if field in names:
        return
    if not names:
        raise InvalidInput(f"no scalar field {field!r}, nor any other: leave out {option}")
    raise InvalidInput(f"no scalar field {field!r}: choose one of {', '.join(names)} with {option}")


def by_value(
    fields: Sequence[Mapping[str, Any]] | None, field: str | None, option: str
) -> list[tuple[str | None, Members]]:
    """Return the frequent values of a field, largest group first, with the items that have it.

    The last group, None, has all further values; without a field there are no groups. option: the
    option that names the field, for the message. Raises InvalidInput if no item has the field.
    """
    if field is None:
        return []
    expect_field(fields, field, option)

    values = [str(measures.as_plain(row.get(field))) for row in fields or ()]
    frequent = dict(Counter(values).most_common(MOST_GROUPS))
    groups: list[tuple[str | None, Members]] = [
        (name, np.array([value == name for value in values])) for name in frequent
    ]

    if len(frequent) < len(set(values)):
        groups.append((None, np.array([value not in frequent for value in values])))
    return groups


def shares(
    members: Sequence[tuple[str | None, Members]],
    before: npt.NDArray[np.int64],
    after: npt.NDArray[np.int64],
    right_items: RightItems | None,
    *,
    seed: int = 0,
) -> list[Group]:
    """Return the shares of each group in the answers (n_queries, k) before and after.

    They have 95% bootstrap intervals over the queries, jointly for all. right_items: of the queries, if
    they are known. Raises InvalidInput for fewer than two queries.
    """
    if not members:
        return []
    if len(before) < 2:
        raise InvalidInput("shares by group need at least two queries: pass more")
    rows: list[npt.NDArray[np.float64]] = []
    for _, inside in members:
        rows += _per_query(inside, before, after, right_items)

    # One bootstrap for all groups: their shares add up in every resample, as in the data.
    intervals = iter(measures.bootstrap(np.stack(rows), resamples=RESAMPLES, seed=seed))
    groups = []
    for value, inside in members:
        due, *taken = islice(intervals, ROWS_PER_GROUP)
        right = None if right_items is None else due
        groups.append(Group(value, int(inside.sum()), float(inside.mean()), right, *taken))
    return groups


ROWS_PER_GROUP = 7
"""Rows of `_per_query`: what is due to a group, then the last six fields of `Group`, in order."""


def _per_query(
    inside: Members,
    before: npt.NDArray[np.int64],
    after: npt.NDArray[np.int64],
    right_items: RightItems | None,
) -> list[npt.NDArray[np.float64]]:
    """Return the shares (n_queries,) of one group in the answers to each query."""
    if right_items is None:
        due = np.full(len(before), inside.mean())
    else:
        right_counts = right_items.sums(inside[right_items.items].astype(np.float64))
        due = right_counts / right_items.counts

    first = [inside[answers[:, 0]].astype(np.float64) for answers in (before, after)]
    top = [inside[answers].mean(1) for answers in (before, after)]
    excess = [taken - due for taken in first]
    return [due, *first, *top, *excess]
