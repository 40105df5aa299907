"""The k largest of many scores by a threshold from a sample of them, at a cost that hardly depends on k."""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple


class Threshold(NamedTuple):
    """The `rank`-th largest of `sample` scores of a row; `room` for as many as may reach it."""

    sample: int
    rank: int
    room: int


def threshold_for(k: int, m: int, sample: int, most: int | None = None) -> Threshold | None:
    """How to find the k largest of m scores; None where it is of no use, as where k is close to m, or where
    more than `most` may reach the threshold.

    Of the k largest k·sample/m are expected in the sample, a Poisson number: the rank lies four standard
    deviations and four above. The room is for five standard deviations more than are expected to reach it.
    """
    expected = k * sample / m
    rank = ceil(expected + 4 * sqrt(expected) + 4)
    room = ceil((rank + 5 * sqrt(rank)) * m / sample)
    if m <= sample or rank >= sample // 2 or room > min(most or m, m // 2):
        return None
    return Threshold(sample, rank, room)
