"""Inline SVG charts, and the loader of the HTML page templates that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta, timezone
from functools import partial
from importlib.resources import files
from typing import Any, Protocol

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

WIDTH = 440
TIMELINE_SIZE, CURVES_SIZE = (560, 210), (640, 420)
LABEL_HEIGHT = 15
MOST_DOTS = 80
STEPS = (
    *(timedelta(seconds=count) for count in (5, 15, 30)),
    *(timedelta(minutes=count) for count in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=count) for count in (1, 2, 3, 6, 12)),
    *(timedelta(days=count) for count in (1, 2, 7, 14, 28, 91, 364)),
)
MOST_TICKS = 6
_EPOCH = datetime(2024, 1, 1, tzinfo=timezone.utc)
_CURVES_STYLE = """
svg{font:13px system-ui,sans-serif;background:#fff} text{fill:#222} .soft{fill:#666}
.grid{stroke:#e3e3e3} .loss{stroke:#b4531a} .mrr{stroke:#1a6fb4} .r1{stroke:#6a9f2d}
polyline{fill:none;stroke-width:2} text.loss{fill:#b4531a;stroke:none} text.mrr{fill:#1a6fb4;stroke:none}
text.r1{fill:#4c7a17;stroke:none} .best{stroke:#222;stroke-dasharray:4 3}
"""


class Interval(Protocol):
    """An estimate with its confidence interval, as shares."""

    @property
    def estimate(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Bin(Protocol):
    """The number of items with low ≤ N_k ≤ high, before and after correction."""

    @property
    def low(self) -> int: ...
    @property
    def high(self) -> int: ...
    @property
    def before(self) -> int: ...
    @property
    def after(self) -> int: ...


class Epoch(Protocol):
    """One epoch of a training. loss: None before the first. mrr, r1: of the validation pairs, as shares."""

    @property
    def epoch(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def mrr(self) -> float: ...
    @property
    def r1(self) -> float: ...


@dataclass(frozen=True)
class Line:
    """One line of a timeline.

    name: written at its end. kind: its CSS class. points: in the order of their time. dots: whether each
    point is marked and has a tooltip.
    """

    name: str
    kind: str
    points: Sequence[tuple[datetime, float]]
    dots: bool = True


@dataclass(frozen=True)
class Mark:
    """A separate point. label: its tooltip; the label of the last mark is also written next to it."""

    at: datetime
    value: float
    kind: str
    label: str


@dataclass(frozen=True)
class _Area:
    """The rectangle of a chart, in SVG units, and the ranges of its two axes."""

    left: float
    right: float
    top: float
    bottom: float
    first: float
    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.low) / (self.high - self.low)

    def grid(self, ticks: Sequence[float], label: Callable[[float], str]) -> list[Markup]:
        """Return one horizontal line per tick, each with its label."""
        parts = []
        for tick in ticks:
            parts.append(_line("grid", self.left, self.right, self.y(tick), self.y(tick)))
            parts.append(_text(self.left - 6, self.y(tick) + 4, label(tick), "end", "soft"))
        return parts

    def polyline(self, kind: str, points: Sequence[tuple[float, float]]) -> Markup:
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return Markup('<polyline class="{}" points="{}"/>').format(kind, corners)


# -- charts of a diagnosis ----------------------------------------------------------------------------------


def histogram(bins: Sequence[Bin], k: int) -> Markup:
    """Draw two bars per bin, before and after, on a logarithmic scale of items."""
    left, room, row = 64, WIDTH - 64 - 48, max(32, min(56, 430 // len(bins)))
    thick = (row - 6) // 2
    most = max(max(each.before, each.after) for each in bins)
    height = 24 + row * len(bins)

    def length(count: int) -> float:
        return room * math.log1p(count) / math.log1p(most)

    parts = []
    for decade in range(int(math.log10(most)) + 1):
        x = left + length(10**decade)
        parts.append(_line("grid", x, x, 20, height))
        parts.append(_text(x, 12, number(10**decade), "middle", "soft"))
    parts.append(_text(left - 8, 12, f"N_{k}", "end", "soft"))
    for nth, each in enumerate(bins):
        top = 26 + row * nth
        label = str(each.low) if each.low == each.high else f"{number(each.low)}–{number(each.high)}"
        parts.append(_text(left - 8, top + thick + 4, label, "end"))
        for offset, name, count in ((0, "before", each.before), (thick + 1, "after", each.after)):
            tooltip = f"{number(count)} items with N_{k} {label} {name}"
            parts.append(_bar(name, left, top + offset, length(count), thick, 2, tooltip))
            middle = top + offset + thick / 2 + 4
            parts.append(_text(left + length(count) + 5, middle, number(count), "start", name))
    return _svg(f"How many items have which N_{k}, before and after", WIDTH, height, parts)


def curve(
    title: str,
    strengths: Sequence[float],
    values: Sequence[float],
    now: float,
    height: int,
    *,
    percent: bool = False,
    band: Sequence[Interval] | None = None,
) -> Markup:
    """Draw a measure against the strength, and mark the strength in use.

    now: the strength in use. band: the intervals around the values.
    """
    low = min([*values, *(each.low for each in band or ())])
    high = max([*values, *(each.high for each in band or ())])
    ticks = round_ticks(low, high)
    area = _Area(
        44, WIDTH - 14, 30, height - 22, 0, max(strengths) or 1.0, min(low, ticks[0]), max(high, ticks[-1])
    )
    parts = area.grid(ticks, lambda tick: f"{100 * tick:.4g}%" if percent else f"{tick:.4g}")
    last_label = -math.inf
    for strength in strengths:
        if area.x(strength) - last_label >= 30:
            last_label = area.x(strength)
            parts.append(_text(last_label, height - 6, f"{strength:g}", "middle", "soft"))
    points = list(zip(strengths, values, strict=True))
    if band:
        edge = [(w, each.high) for w, each in zip(strengths, band, strict=True)]
        edge += [(w, each.low) for w, each in reversed(list(zip(strengths, band, strict=True)))]
        corners = " ".join(f"{area.x(w):.1f},{area.y(value):.1f}" for w, value in edge)
        parts.append(Markup('<polygon class="band" points="{}"/>').format(corners))
    parts.append(area.polyline("line", points))
    parts.append(_line("now", area.x(now), area.x(now), area.top - 6, area.bottom))
    for strength, value in points:
        shown = f"{100 * value:.1f}%" if percent else f"{value:.2f}"
        kind, radius = "before" if strength == 0 else "after", 5 if strength in (0, now) else 3
        tooltip = f"strength {strength:g}: {shown}"
        parts.append(_dot(kind, area.x(strength), area.y(value), radius, tooltip))
    anchor = "end" if area.x(now) > WIDTH - 70 else "middle"
    parts.append(_text(0, 14, title, "start", "name"))
    parts.append(_text(area.x(now), area.top - 10, f"in use: {now:g}", anchor, "soft"))
    return _svg(f"{title} against the strength of the correction", WIDTH, height, parts)


def bars(title: str, before: int, after: int, whole: int) -> Markup:
    """Draw two horizontal bars on the same scale."""
    parts = []
    for top, name, count in ((0, "before", before), (20, "after", after)):
        parts.append(_bar("track", 52, top, 200, 14, 3))
        parts.append(_bar(name, 52, top, 200 * count / max(whole, 1), 14, 3))
        parts.append(_text(46, top + 12, name, "end", "soft"))
        parts.append(_text(258, top + 12, number(count), "start", name))
    return _svg(f"{title}: {number(before)} before, {number(after)} after", 310, 36, parts)


def share(title: str, reached: float, by_chance: float) -> Markup:
    """Draw one bar as a share of a whole, with a mark at the value of chance."""
    x = WIDTH * by_chance
    anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
    parts = [
        _bar("track", 0, 0, WIDTH, 22, 4),
        _bar("after", 0, 0, WIDTH * reached, 22, 4),
        _line("now", x, x, 0, 28),
        _text(x, 42, f"by chance: {100 * by_chance:.1f}%", anchor, "soft"),
    ]
    return _svg(title, WIDTH, 48, parts)


def whisker(interval: Interval, measure: str) -> Markup:
    """Draw an interval against zero, with shares shown as points."""
    ends = 1.15 * max(abs(interval.low), abs(interval.high), abs(interval.estimate), 0.001)
    low, middle, high = (
        WIDTH / 2 * (1 + value / ends) for value in (interval.low, interval.estimate, interval.high)
    )
    parts = [
        _line("axis", 0, WIDTH, 18, 18),
        _line("axis", WIDTH / 2, WIDTH / 2, 6, 30),
        _bar("tone", low, 15, high - low, 6, 3),
        _dot("tone", middle, 18, 7),
        _text(WIDTH / 2, 44, "no change", "middle", "soft"),
        _text(0, 44, "worse", "start", "soft"),
        _text(WIDTH, 44, "better", "end", "soft"),
    ]
    return _svg(f"Change of {measure}: {points(interval)}", WIDTH, 50, parts)


def points(interval: Interval) -> str:
    """Return a gain as text, in percentage points."""
    low, high = f"{100 * interval.low:+.1f}", f"{100 * interval.high:+.1f}"
    return f"{100 * interval.estimate:+.1f} points (95% interval {low} to {high})".replace("-", "−")


def number(value: float) -> str:
    """Return a number as text, with separators between its thousands."""
    return f"{value:,.0f}"


# -- lines over time ------------------------------------------------------------------------------------


def timeline(
    title: str,
    lines: Sequence[Line],
    since: datetime,
    until: datetime,
    shown: Callable[[float], str],
    marks: Sequence[Mark] = (),
    least: float | None = None,
) -> Markup:
    """Draw lines over time, each with its name at its end.

    shown: formats a value. least: a value that the scale must include.
    """
    width, height = TIMELINE_SIZE
    values = [value for line in lines for _, value in line.points] + [mark.value for mark in marks]
    start = min(since, until - timedelta(minutes=1))
    ticks = round_ticks(min(values) if least is None else min(least, *values), max(values))
    area = _Area(
        60, width - 92, 14, height - 26, start.timestamp(), until.timestamp(),
        min(*values, ticks[0]), max(*values, ticks[-1]),
    )  # fmt: skip

    def dot(mark: Mark, radius: float) -> Markup:
        tooltip = f"{mark.at:%Y-%m-%d %H:%M:%S} UTC, {mark.label}"
        return _dot(mark.kind, area.x(mark.at.timestamp()), area.y(mark.value), radius, tooltip)

    parts = area.grid(ticks, shown)
    parts += [
        _text(area.x(at.timestamp()), height - 6, name, "middle", "soft")
        for at, name in time_ticks(start, until)
    ]
    for line in lines:
        placed = [(at.timestamp(), value) for at, value in line.points]
        parts.append(area.polyline(f"line {line.kind}", placed))
        if line.dots and len(line.points) <= MOST_DOTS:
            dots = [Mark(at, value, line.kind, f"{line.name}: {shown(value)}") for at, value in line.points]
            parts += [dot(each, 3) for each in dots]
    parts += [dot(mark, 4.5) for mark in marks]
    for mark in marks[-1:]:
        x = area.x(mark.at.timestamp())
        side, anchor = (9, "start") if x < width / 2 else (-9, "end")
        parts.append(_text(x + side, area.y(mark.value) + 4, mark.label, anchor, mark.kind))
    ends = apart([area.y(line.points[-1][1]) + 4 for line in lines], area.bottom)
    for line, end in zip(lines, ends, strict=True):
        parts.append(_text(area.right + 8, end, line.name, "start", line.kind))
    return _svg(title, width, height, parts)


def apart(heights: Sequence[float], lowest: float) -> list[float]:
    """Return the heights of labels, in the given order, moved so that no label covers another.

    lowest: no label is below this.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, highest = [0.0] * len(heights), -math.inf
    for index in order:
        highest = moved[index] = max(heights[index], highest + LABEL_HEIGHT)
    for index in reversed(order):
        moved[index] = min(moved[index], lowest)
        lowest = moved[index] - LABEL_HEIGHT
    return moved


def time_ticks(start: datetime, until: datetime) -> list[tuple[datetime, str]]:
    """Return at most seven round moments and their labels: midnight as the date."""
    step = next((step for step in STEPS if (until - start) / step <= MOST_TICKS), STEPS[-1])
    within_a_day = "%H:%M" if step >= timedelta(minutes=1) else "%H:%M:%S"
    at = _EPOCH + -(-(start - _EPOCH) // step) * step
    ticks = []
    while at <= until:
        ticks.append((at, f"{at:%d %b}" if at.time() == time.min else f"{at:{within_a_day}}"))
        at += step
    return ticks


def round_ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers around the range."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * nth for nth in range(first, max(last, first + 1) + 1)]


# -- the course of a training -----------------------------------------------------------------------------


def learning_curves(history: Sequence[Epoch], best: int) -> str:
    """Return an SVG document with the training loss above, and MRR and R@1 of the validation pairs below.

    best: the epoch that was chosen, which is marked.
    """
    width, height = CURVES_SIZE
    left, right, middle, gap = 60, width - 20, height // 2, 44
    last = max(history[-1].epoch, 1)
    losses = [(each.epoch, each.loss) for each in history if each.loss is not None]
    mrr = [(each.epoch, 100 * each.mrr) for each in history]
    r1 = [(each.epoch, 100 * each.r1) for each in history]

    def panel(title: str, lines: dict[str, Sequence[tuple[int, float]]], top: int, bottom: int) -> None:
        values = [value for line in lines.values() for _, value in line]
        parts.append(_text(left, top - 8, title, "start", next(iter(lines))))
        if not values:
            return
        ticks = round_ticks(min(values), max(values))
        area = _Area(left, right, top, bottom, 0, last, min(*values, ticks[0]), max(*values, ticks[-1]))
        parts.extend(area.grid(ticks, lambda tick: f"{tick:.4g}"))
        for epoch in sorted({round(last * nth / 5) for nth in range(6)}):
            parts.append(_text(area.x(epoch), bottom + 15, str(epoch), "middle", "soft"))
        parts.extend(area.polyline(kind, line) for kind, line in lines.items())

    parts: list[Markup] = []
    panel("training loss", {"loss": losses}, 24, middle - gap // 2)
    panel("validation, %: MRR", {"mrr": mrr, "r1": r1}, middle + gap // 2, height - 34)
    kept = left + (right - left) * best / last
    parts += [
        _text(left + 160, middle + gap // 2 - 8, "R@1", "start", "r1"),
        _line("best", kept, kept, 24, height - 34),
        _text(kept, 14, f"kept: epoch {best}", "end" if kept > width / 2 else "start", "soft"),
        _text((left + right) / 2, height - 4, "epoch", "middle", "soft"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="How the training went"><style>{_CURVES_STYLE}</style>{"".join(parts)}</svg>\n'
    )


# -- elements -----------------------------------------------------------------------------------------------


def _svg(title: str, width: int, height: float, parts: Sequence[Markup]) -> Markup:
    start = Markup('<svg viewBox="0 0 {} {:g}" role="img" aria-label="{}"><title>{}</title>')
    return start.format(width, height, title, title) + Markup("").join(parts) + Markup("</svg>")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> Markup:
    element = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>')
    return element.format(x, y, anchor, kind, text)


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> Markup:
    element = Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    return element.format(kind, x1, x2, y1, y2)


def _bar(
    kind: str, x: float, y: float, width: float, height: float, corner: int, tooltip: str = ""
) -> Markup:
    element = Markup('<rect class="{}" x="{:.1f}" y="{:g}" width="{:.1f}" height="{:g}" rx="{}">{}</rect>')
    return element.format(kind, x, y, width, height, corner, _tooltip(tooltip))


def _dot(kind: str, x: float, y: float, radius: float, tooltip: str = "") -> Markup:
    element = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}">{}</circle>')
    return element.format(kind, x, y, radius, _tooltip(tooltip))


def _tooltip(text: str) -> Markup:
    return Markup("<title>{}</title>").format(text) if text else Markup("")


def page_template(
    package: str, name: str, longest: int, filters: Mapping[str, Callable[..., Any]]
) -> Template:
    """Return the template `name` in the folder of a package.

    longest: characters that the filter `short` leaves of a text. filters: further filters, in addition to
    `short` and `number`.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "short": partial(_short, longest=longest), **filters}
    return environment.from_string(files(package).joinpath(name).read_text("utf-8"))


def _short(value: object, longest: int) -> str:
    text = str(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"
