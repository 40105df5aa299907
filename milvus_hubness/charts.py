"""Inline SVG charts, numbers as text, and the loader of the HTML page templates that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, time, timedelta, timezone
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from jinja2.filters import do_truncate
from markupsafe import Markup

from milvus_hubness.texts import number, points, span

WIDTH = 440
TIMELINE_SIZE, CURVES_SIZE = (440, 200), (640, 420)
LABEL_HEIGHT = 15
MOST_DOTS = 80
MOST_TICKS = 4
CHARACTER = 8
"""Width of a character of a label, at the size that narrow screens show."""
STEPS = (
    *(timedelta(seconds=count) for count in (5, 15, 30)),
    *(timedelta(minutes=count) for count in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=count) for count in (1, 2, 3, 6, 12)),
    *(timedelta(days=count) for count in (1, 2, 7, 14, 28, 91, 364)),
)
_EPOCH = datetime(2024, 1, 1, tzinfo=timezone.utc)
_CURVES_STYLE = Markup("""<style>
svg{font:13px system-ui,sans-serif;background:#fff} text{fill:#222} .soft{fill:#666}
.grid{stroke:#e3e3e3} .loss{stroke:#b4531a} .mrr{stroke:#1a6fb4} .r1{stroke:#6a9f2d}
polyline{fill:none;stroke-width:2} text.loss{fill:#b4531a;stroke:none} text.mrr{fill:#1a6fb4;stroke:none}
text.r1{fill:#4c7a17;stroke:none} .best{stroke:#222;stroke-dasharray:4 3}
</style>""")

Box = tuple[float, float, float, float]
Label = Callable[[float], str]
Interval = tuple[float, float, float]
"""An estimate and the bounds of its confidence interval, as shares."""
Bin = tuple[int, int, int, int]
"""low, high, and the numbers of items with low ≤ N_k ≤ high before and after correction."""
Epoch = tuple[int, float | None, float, float]
"""Number of an epoch, its training loss (None before the first), and R@1 and MRR of the validation pairs, as shares."""


class Line(NamedTuple):
    """A line of a timeline, labelled at its end. kind: its CSS class. dots: whether its points have tooltips."""

    name: str
    kind: str
    points: Sequence[tuple[datetime, float]]
    dots: bool = True


class Mark(NamedTuple):
    """A separate point. label: its tooltip; the label of the last mark is also shown next to it."""

    at: datetime
    value: float
    kind: str
    label: str


class _Drawing:
    """The elements of a chart, in SVG units. kind: the CSS class of an element."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self._title, self._size = title, (width, height)
        self._elements: list[Markup] = []

    def add(self, element: str, *values: object) -> None:
        self._elements.append(Markup(element).format(*values))

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "soft") -> None:
        element = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>'
        self.add(element, x, y, anchor, kind, text)

    def line(self, kind: str, x1: float, x2: float, y1: float, y2: float) -> None:
        self.add('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>', kind, x1, x2, y1, y2)

    def bar(self, kind: str, x: float, y: float, width: float, height: float, corner: int, tooltip: str = "") -> None:
        element = '<rect class="{}" x="{:.1f}" y="{:g}" width="{:.1f}" height="{:g}" rx="{}">{}</rect>'
        self.add(element, kind, x, y, width, height, corner, _tooltip(tooltip))

    def dot(self, kind: str, x: float, y: float, radius: float, tooltip: str = "") -> None:
        element = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}">{}</circle>'
        self.add(element, kind, x, y, radius, _tooltip(tooltip))

    def svg(self, attributes: str = "") -> Markup:
        start = '<svg {}viewBox="0 0 {} {:g}" role="img" aria-label="{}"><title>{}</title>'
        head = Markup(start).format(Markup(attributes), *self._size, self._title, self._title)
        return head + Markup("").join(self._elements) + Markup("</svg>")


def _tooltip(text: str) -> Markup:
    return Markup("<title>{}</title>").format(text) if text else Markup("")


class _Plot:
    """A plot with labelled horizontal lines at round values. box: left, right, top, bottom. ends: the range of x."""

    def __init__(
        self, drawing: _Drawing, box: Box, ends: tuple[float, float], values: Sequence[float], label: Label
    ) -> None:
        self._drawing, (self._first, self._last) = drawing, ends
        self.left, self.right, self.top, self.bottom = box
        ticks = round_ticks(min(values), max(values))
        self._low, self._high = min(*values, ticks[0]), max(*values, ticks[-1])
        for tick in ticks:
            drawing.line("grid", self.left, self.right, self.y(tick), self.y(tick))
            drawing.text(self.left - 6, self.y(tick) + 4, label(tick), "end")

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self._first) / (self._last - self._first)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self._low) / (self._high - self._low)

    def draw(self, shape: str, kind: str, points: Iterable[tuple[float, float]]) -> None:
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._drawing.add(f'<{shape} class="{{}}" points="{{}}"/>', kind, corners)

    def draw_band(self, band: Sequence[tuple[float, float, float]]) -> None:
        """Draw the area between two lines. band: x, low, high."""
        self.draw("polygon", "band", [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))])

    def mark_now(self, x: float, label: str, anchor: str, room: float) -> None:
        """Draw a vertical line with its label, which ends at the line if less than `room` is left."""
        self._drawing.line("now", self.x(x), self.x(x), self.top - 6, self.bottom)
        anchor = "end" if self.x(x) > WIDTH - room else anchor
        self._drawing.text(self.x(x), self.top - 10, label, anchor)


def histogram(bins: Sequence[Bin], k: int) -> Markup:
    """Draw two bars per bin, before and after, on a logarithmic scale of items."""
    labels = [str(low) if low == high else f"{number(low)}–{number(high)}" for low, high, _, _ in bins]
    most, row = max(max(before, after) for _, _, before, after in bins), max(32, min(56, 430 // len(bins)))
    left, thick = max(64, 16 + CHARACTER * max(map(len, labels))), (row - 6) // 2
    room = WIDTH - left - max(48, 12 + CHARACTER * len(number(most)))
    height = 24 + row * len(bins)
    drawing = _Drawing(f"How many items have which N_{k}, before and after", WIDTH, height)

    def length(count: int) -> float:
        return room * math.log1p(count) / math.log1p(most)

    for decade in range(int(math.log10(most)) + 1):
        x = left + length(10**decade)
        drawing.line("grid", x, x, 20, height)
        drawing.text(x, 12, number(10**decade), "middle")
    drawing.text(left - 8, 12, f"N_{k}", "end")
    for nth, (label, (_, _, before, after)) in enumerate(zip(labels, bins, strict=True)):
        top = 26 + row * nth
        drawing.text(left - 8, top + thick + 4, label, "end", "")
        for y, name, count in ((top, "before", before), (top + thick + 1, "after", after)):
            tooltip = f"{number(count)} items with N_{k} {label} {name}"
            drawing.bar(name, left, y, length(count), thick, 2, tooltip)
            drawing.text(left + length(count) + 5, y + thick / 2 + 4, number(count), "start", name)
    return drawing.svg()


def curve(
    title: str,
    strengths: Sequence[float],
    values: Sequence[float],
    now: float,
    height: int,
    *,
    percent: bool = False,
    band: Sequence[Interval] = (),
) -> Markup:
    """Draw a measure against the strength. now: the strength in use, which is marked. band: intervals of the values."""
    drawing = _Drawing(f"{title} against the strength of the correction", WIDTH, height)
    box, bounds = (44, WIDTH - 14, 30, height - 22), [bound for _, *bounds in band for bound in bounds]
    ends, label = (0, max(strengths) or 1.0), lambda tick: f"{100 * tick:.4g}%" if percent else f"{tick:.4g}"
    plot = _Plot(drawing, box, ends, [*values, *bounds], label)
    last_label = -math.inf
    for strength in strengths:
        if plot.x(strength) - last_label >= 30:
            last_label = plot.x(strength)
            drawing.text(last_label, height - 6, f"{strength:g}", "middle")
    if band:
        plot.draw_band([(strength, low, high) for strength, (_, low, high) in zip(strengths, band, strict=True)])
    plot.draw("polyline", "line", zip(strengths, values, strict=True))
    plot.mark_now(now, f"in use: {now:g}", "middle", 70)
    for strength, value in zip(strengths, values, strict=True):
        shown = f"{100 * value:.1f}%" if percent else f"{value:.2f}"
        kind, radius = "before" if strength == 0 else "after", 5 if strength in (0, now) else 3
        drawing.dot(kind, plot.x(strength), plot.y(value), radius, f"strength {strength:g}: {shown}")
    drawing.text(0, 14, title, "start", "name")
    return drawing.svg()


def expected_gain(curve: Sequence[tuple[float, float, float, float]], agreement: float, least: float) -> Markup:
    """Draw the points of R@1 that a correction gained against the two-view agreement of its bank. curve: (agreement,
    mean, low, high) by agreement. agreement: of this bank, which is marked. least: below it a bank is foreign."""
    height = 200
    drawing = _Drawing("Gain of a correction against the two-view agreement of its bank", WIDTH, height)
    bounds = [bound for _, *values in curve for bound in values]
    last = max(agreement, curve[-1][0])
    plot = _Plot(drawing, (44, WIDTH - 14, 50, height - 22), (0, last), bounds, lambda tick: f"{tick:+.4g}")
    for tick in (tick for tick in round_ticks(0, last) if tick <= last):
        drawing.text(plot.x(tick), height - 6, f"{tick:.0%}", "middle")
    plot.draw_band([(at, low, high) for at, _, low, high in curve])
    plot.draw("polyline", "line", [(at, mean) for at, mean, _, _ in curve])
    drawing.line("grid", plot.x(least), plot.x(least), plot.top, plot.bottom)
    gain = float(np.interp(agreement, [at for at, *_ in curve], [mean for _, mean, _, _ in curve]))
    label = f"this bank: {agreement:.0%}"
    plot.mark_now(agreement, label, "start", 110)
    drawing.dot("after", plot.x(agreement), plot.y(gain), 5, f"{label}; banks like it gain {gain:+.1f} points")
    drawing.text(0, 14, "Points of R@1 gained", "start", "name")
    return drawing.svg()


def bars(title: str, before: int, after: int, whole: int) -> Markup:
    """Draw two horizontal bars on the same scale."""
    drawing = _Drawing(f"{title}: {number(before)} before, {number(after)} after", 310, 36)
    for top, name, count in ((0, "before", before), (20, "after", after)):
        drawing.bar("track", 52, top, 200, 14, 3)
        drawing.bar(name, 52, top, 200 * count / max(whole, 1), 14, 3)
        drawing.text(46, top + 12, name, "end")
        drawing.text(258, top + 12, number(count), "start", name)
    return drawing.svg()


def share(title: str, reached: float, by_chance: float) -> Markup:
    """Draw one bar as a share of a whole, with a mark at the value of chance."""
    x, drawing = WIDTH * by_chance, _Drawing(title, WIDTH, 48)
    drawing.bar("track", 0, 0, WIDTH, 22, 4)
    drawing.bar("after", 0, 0, WIDTH * reached, 22, 4)
    drawing.line("now", x, x, 0, 28)
    anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
    drawing.text(x, 42, f"by chance: {100 * by_chance:.1f}%", anchor)
    return drawing.svg()


def whisker(interval: Interval, measure: str) -> Markup:
    """Draw an interval against zero, with shares shown as points."""
    drawing = _Drawing(f"Change of {measure}: {points(interval)}", WIDTH, 50)
    most = 1.15 * max(0.001, *map(abs, interval))
    middle, low, high = (WIDTH / 2 * (1 + value / most) for value in interval)
    drawing.line("axis", 0, WIDTH, 18, 18)
    drawing.line("axis", WIDTH / 2, WIDTH / 2, 6, 30)
    drawing.bar("tone", low, 15, high - low, 6, 3)
    drawing.dot("tone", middle, 18, 7)
    drawing.text(WIDTH / 2, 44, "no change", "middle")
    drawing.text(0, 44, "worse")
    drawing.text(WIDTH, 44, "better", "end")
    return drawing.svg()


def timeline(
    title: str, lines: Sequence[Line], since: datetime, until: datetime, shown: Label, marks: Sequence[Mark] = ()
) -> Markup:
    """Draw lines over time from 0 on, with their names at their ends and in the title. shown: formats a value."""
    width, height = TIMELINE_SIZE
    drawing = _Drawing(f"{title}: {', '.join(line.name for line in lines)}", width, height)
    start = min(since, until - timedelta(minutes=1))
    values = [0, *(value for line in lines for _, value in line.points), *(mark.value for mark in marks)]
    box = (60, width - 104, 14, height - 26)
    plot = _Plot(drawing, box, (start.timestamp(), until.timestamp()), values, shown)

    def x(moment: datetime) -> float:
        return plot.x(moment.timestamp())

    def dot(mark: Mark, radius: float) -> None:
        tooltip = f"{mark.at:%Y-%m-%d %H:%M:%S} UTC, {mark.label}"
        drawing.dot(mark.kind, x(mark.at), plot.y(mark.value), radius, tooltip)

    for at, name in time_ticks(start, until):
        drawing.text(x(at), height - 6, name, "middle")
    for line in lines:
        plot.draw("polyline", f"line {line.kind}", [(at.timestamp(), value) for at, value in line.points])
        if line.dots and len(line.points) <= MOST_DOTS:
            for at, value in line.points:
                dot(Mark(at, value, line.kind, f"{line.name}: {shown(value)}"), 3)
    for mark in marks:
        dot(mark, 4.5)
    if marks:
        mark = marks[-1]
        side, anchor = (9, "start") if x(mark.at) < width / 2 else (-9, "end")
        drawing.text(x(mark.at) + side, plot.y(mark.value) + 4, mark.label, anchor, mark.kind)
    ends = apart([plot.y(line.points[-1][1]) + 4 for line in lines], plot.bottom)
    for line, end in zip(lines, ends, strict=True):
        drawing.text(plot.right + 8, end, line.name, "start", line.kind)
    return drawing.svg()


def apart(heights: Sequence[float], lowest: float) -> list[float]:
    """Return the heights of labels, in the same order, moved so that no label covers another or is below `lowest`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, highest = [0.0] * len(heights), -math.inf
    for index in order:
        highest = moved[index] = max(heights[index], highest + LABEL_HEIGHT)
    for index in reversed(order):
        moved[index] = min(moved[index], lowest)
        lowest = moved[index] - LABEL_HEIGHT
    return moved


def time_ticks(start: datetime, until: datetime) -> list[tuple[datetime, str]]:
    """Return at most five round moments and their labels: midnight as the date."""
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


def learning_curves(history: Sequence[Epoch], best: int) -> str:
    """Return an SVG document: the training loss above, MRR and R@1 of the validation pairs below. best: an epoch."""
    width, height = CURVES_SIZE
    left, right, bottom = 60, width - 20, height - 34
    upper_bottom, lower_top = height // 2 - 22, height // 2 + 22
    last = max(history[-1][0], 1)
    losses = [(epoch, loss) for epoch, loss, _, _ in history if loss is not None]
    recall = {
        "mrr": [(epoch, 100 * mrr) for epoch, _, _, mrr in history],
        "r1": [(epoch, 100 * r1) for epoch, _, r1, _ in history],
    }
    drawing = _Drawing("Learning curves", width, height)
    drawing.add("{}", _CURVES_STYLE)

    def panel(lines: Mapping[str, Sequence[tuple[int, float]]], top: int, bottom: int) -> _Plot:
        values = [value for line in lines.values() for _, value in line]
        plot = _Plot(drawing, (left, right, top, bottom), (0, last), values, lambda tick: f"{tick:.4g}")
        for epoch in sorted({round(last * nth / 5) for nth in range(6)}):
            drawing.text(plot.x(epoch), bottom + 15, str(epoch), "middle")
        for kind, line in lines.items():
            plot.draw("polyline", kind, line)
        return plot

    if losses:
        panel({"loss": losses}, 24, upper_bottom)
    best_x = panel(recall, lower_top, bottom).x(best)
    drawing.text(left, 16, "training loss", kind="loss")
    drawing.text(left, lower_top - 8, "validation, %: MRR", kind="mrr")
    drawing.text(left + 160, lower_top - 8, "R@1", kind="r1")
    drawing.line("best", best_x, best_x, 24, bottom)
    drawing.text(best_x, 14, f"best: epoch {best}", "end" if best_x > width / 2 else "start")
    drawing.text((left + right) / 2, height - 4, "epoch", "middle")
    return drawing.svg('xmlns="http://www.w3.org/2000/svg" ') + "\n"


def page_template(package: str, name: str, longest: int, **filters: Callable[..., Any]) -> Template:
    """Return the template `name` in the folder of a package. filters: further ones than number, points, span and
    `short`, which leaves at most `longest` characters of a text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    short = partial(do_truncate, environment, length=longest, killwords=True, end="…", leeway=0)
    environment.filters |= {"number": number, "points": points, "span": span, "short": lambda value: short(str(value))}
    environment.filters |= filters
    return environment.from_string(files(package).joinpath(name).read_text("utf-8"))
