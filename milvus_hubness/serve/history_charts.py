"""The history of a collection drawn: its skewness, and the age of its biases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from milvus_hubness.serve.charts import Line, Mark, timeline
from milvus_hubness.serve.look import Look
from milvus_hubness.serve.wording import UNITS, span

MOST_TEETH = 100


def skewness_chart(looks: Sequence[Look], until: datetime) -> str:
    """Without correction and with the biases in use, at each look that measured it; new biases that were
    refused as rings."""
    measured = [look for look in looks if look.skewness]
    raw = [(look.at, look.skewness.get("raw")) for look in measured]
    in_use = [(look.at, look.skewness_now) for look in measured]
    lines = [
        Line(f"{name} {points[-1][1]:.2f}", kind, _held(points, until))
        for name, kind, found in (("raw", "before", raw), ("in use", "after", in_use))
        if (points := [(at, value) for at, value in found if value is not None])
    ]
    if not lines:
        return '<p class="empty">Not measured yet: every full refresh does.</p>'
    marks = [
        Mark(look.at, look.skewness["new"], "refused", f"refused {look.skewness['new']:.2f}")
        for look in measured
        if look.action == "refused" and "new" in look.skewness
    ]
    return timeline(
        "Skewness over time", lines, looks[0].at, until, lambda value: f"{value:.4g}", marks, least=0
    )


def age_chart(looks: Sequence[Look], until: datetime) -> str:
    """What it had grown to before each look, and where that left it; of very many looks only the first."""
    known = [(look, look.bias_age_seconds) for look in looks if look.bias_age_seconds is not None]
    if not known:
        return '<p class="empty">Not known yet.</p>'
    points: list[tuple[datetime, float]] = []
    for look, age in known:
        if look.oldest_seconds:
            points.append((look.at, look.oldest_seconds))
        if len(known) <= MOST_TEETH or not points:
            points.append((look.at, age))
    last, last_age = known[-1]
    current = last_age + (until - last.at).total_seconds()
    points.append((until, current))
    most = max(age for _, age in points)
    unit, size = next((each for each in UNITS if most >= 2 * each[1]), UNITS[-1])
    scaled = [(at, age / size) for at, age in points]
    line = Line(f"now {span(current)}", "after", scaled, dots=False)
    return timeline(
        "Age of the biases over time",
        [line],
        looks[0].at,
        until,
        lambda value: f"{value:.4g} {unit}",
        least=0,
    )


def _held(points: Sequence[tuple[datetime, float]], until: datetime) -> list[tuple[datetime, float]]:
    """With the last value held until now."""
    return [*points, (until, points[-1][1])] if until - points[-1][0] > timedelta(0) else list(points)
