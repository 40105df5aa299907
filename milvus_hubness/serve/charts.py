"""Lines over time as inline SVG: plain strings that need no script and scale with the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta, timezone
from html import escape

from milvus_hubness.quality.report_charts import round_ticks, svg, svg_text

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 60, 92, 14, 26
LABEL_HEIGHT = 15
DOTTED_UP_TO = 80
STEPS = (
    *(timedelta(seconds=count) for count in (5, 15, 30)),
    *(timedelta(minutes=count) for count in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=count) for count in (1, 2, 3, 6, 12)),
    *(timedelta(days=count) for count in (1, 2, 7, 14, 28, 91, 364)),
)
MOST_TICKS = 6
_EPOCH = datetime(2024, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Line:
    """name: written at its end. kind: its class. points: in the order of their time. dots: whether each point
    is marked, and told of."""

    name: str
    kind: str
    points: Sequence[tuple[datetime, float]]
    dots: bool = True


@dataclass(frozen=True)
class Mark:
    """A point by itself. told: of it, written beside the last one."""

    at: datetime
    value: float
    kind: str
    told: str


def timeline(
    title: str,
    lines: Sequence[Line],
    since: datetime,
    until: datetime,
    shown: Callable[[float], str],
    marks: Sequence[Mark] = (),
    least: float | None = None,
) -> str:
    """The lines from one moment to another, each with its name where it ends. least: what the scale reaches
    down to at any rate."""
    values = [value for line in lines for _, value in line.points] + [mark.value for mark in marks]
    start = min(since, until - timedelta(minutes=1))
    ticks = round_ticks(min(values) if least is None else min(least, *values), max(values))
    low, high = min(*values, ticks[0]), max(*values, ticks[-1])

    def x(at: datetime) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((at - start) / (until - start))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = []
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(svg_text(LEFT - 6, y(tick) + 4, shown(tick), "end", "soft"))
    for at, name in time_ticks(start, until):
        parts.append(svg_text(x(at), HEIGHT - 6, name, "middle", "soft"))
    for line in lines:
        corners = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        parts.append(f'<polyline class="line {line.kind}" points="{corners}"/>')
        if line.dots and len(line.points) <= DOTTED_UP_TO:
            told = [Mark(at, value, line.kind, f"{line.name}: {shown(value)}") for at, value in line.points]
            parts += [_dot(x(mark.at), y(mark.value), mark, 3) for mark in told]
    parts += [_dot(x(mark.at), y(mark.value), mark, 4.5) for mark in marks]
    for mark in marks[-1:]:
        side, anchor = (9, "start") if x(mark.at) < WIDTH / 2 else (-9, "end")
        parts.append(svg_text(x(mark.at) + side, y(mark.value) + 4, mark.told, anchor, mark.kind))
    ends = apart([y(line.points[-1][1]) + 4 for line in lines])
    for line, end in zip(lines, ends, strict=True):
        parts.append(svg_text(WIDTH - RIGHT + 8, end, line.name, "start", line.kind))
    return svg(title, HEIGHT, parts, WIDTH)


def _dot(x: float, y: float, mark: Mark, radius: float) -> str:
    told = escape(f"{mark.at:%Y-%m-%d %H:%M:%S} UTC, {mark.told}")
    return (
        f'<circle class="{mark.kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{told}</title></circle>'
    )


def apart(heights: Sequence[float]) -> list[float]:
    """The heights of labels, in the given order, moved so far that none covers another."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, highest, lowest = [0.0] * len(heights), float("-inf"), float(HEIGHT - BOTTOM)
    for index in order:
        highest = moved[index] = max(heights[index], highest + LABEL_HEIGHT)
    for index in reversed(order):
        moved[index] = min(moved[index], lowest)
        lowest = moved[index] - LABEL_HEIGHT
    return moved


def time_ticks(start: datetime, until: datetime) -> list[tuple[datetime, str]]:
    """At most seven round moments, and how they are written: midnight as the date."""
    step = next((step for step in STEPS if (until - start) / step <= MOST_TICKS), STEPS[-1])
    within_a_day = "%H:%M" if step >= timedelta(minutes=1) else "%H:%M:%S"
    first = _EPOCH + -(-(start - _EPOCH) // step) * step
    found = []
    while first <= until:
        is_midnight = first.time() == time.min
        found.append((first, f"{first:%d %b}" if is_midnight else f"{first:{within_a_day}}"))
        first += step
    return found
