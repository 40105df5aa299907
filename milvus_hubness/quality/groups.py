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

MOST_GROUPS = 12
RESAMPLES = 2000

Members = npt.NDArray[np.bool_]


class Group(NamedTuple):
    """The items with one value of a field, None for all further values, and their shares: of the
    gallery, of the first answers, of the first k answers and, with positives, of the right answers.
    excess_*: the share of the first answers less that of the right ones or, without positives, of
    the gallery.
    """

    value: str | None
    items: int
    gallery: float
    right: measures.Interval | None
    first_before: measures.Interval
    first_after: measures.Interval
    top_before: measures.Interval
    top_after: measures.Interval
    excess_before: measures.Interval
    excess_after: measures.Interval

    @property
    def name(self) -> str:
        return "another value" if self.value is None else self.value


def by_value(
    fields: Sequence[Mapping[str, Any]] | None, field: str | None, option: str
) -> list[tuple[str | None, Members]]:
    """Return the frequent values of a field, largest group first, with the items (n_items,) that
    have it; then None for all further values; nothing without a field. option: for the message.
    Raises InvalidInput if no item has the field.
    """
    if field is None:
        return []
    names = sorted({name for row in fields or () for name in row})
    if field not in names:
        raise InvalidInput(
            f"no scalar field {field!r}: choose one of {', '.join(names) or 'none'} with {option}"
        )
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
    positives: measures.Positives | None,
    *,
    seed: int = 0,
) -> list[Group]:
    """Return the shares of each group in the answers (n_queries, k) before and after, with 95%
    bootstrap intervals over the queries, jointly for all. Raises InvalidInput for fewer than two
    queries.
    """
    if not members:
        return []
    if len(before) < 2:
        raise InvalidInput("shares by group need at least two queries: pass more")
    right_items = (
        None
        if positives is None
        else measures.checked_positives(positives, len(before), len(members[0][1]))
    )
    rows = []
    for _, inside in members:
        due = np.full(len(before), inside.mean())
        if right_items is not None:
            items, starts = right_items
            due = np.add.reduceat(inside[items].astype(np.float64), starts[:-1]) / np.diff(starts)
        first = [inside[answers[:, 0]].astype(np.float64) for answers in (before, after)]
        top = [inside[answers].mean(1) for answers in (before, after)]
        rows += [due, *first, *top, *(taken - due for taken in first)]
    intervals = iter(measures.bootstrap(np.stack(rows), resamples=RESAMPLES, seed=seed))
    groups = []
    for value, inside in members:
        right, *taken = islice(intervals, 7)
        groups.append(
            Group(
                value,
                int(inside.sum()),
                float(inside.mean()),
                right if right_items else None,
                *taken,
            )
        )
    return groups
