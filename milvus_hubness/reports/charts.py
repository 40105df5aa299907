"""Inline SVG charts, numbers as text, and the loader of the HTML page templates that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from jinja2.filters import do_truncate
from markupsafe import Markup

from milvus_hubness.basics.texts import number, points, span, visible

WIDTH = 440
TIMELINE_SIZE = (440, 200)
CURVE_TOP = 50
"""Room for two lines above a curve: its title, and the name of the mark, which may be anywhere."""
LABEL_HEIGHT = 15
LABEL_GAP = 6
LETTER = 9.5
"""Width of a letter of a label, on narrow screens, where labels are drawn larger."""
MOST_DOTS = 80

Box = tuple[float, float, float, float]
Label = Callable[[float], str]
Interval = tuple[float, float, float]
"""An estimate and the bounds of its confidence interval."""


class Line(NamedTuple):
    """A line of a timeline, labelled at its end.

    kind: its CSS class. dots: whether its points have tooltips.
    """

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
        self._title = title
        self._size = (width, height)
        self._elements: list[Markup] = []

    def add(self, element: str, *values: object) -> None:
        self._elements.append(Markup(element).format(*values))

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", kind: str = "soft"
    ) -> None:
        element = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>'
        self.add(element, x, y, anchor, kind, text)

    def line(self, kind: str, x1: float, x2: float, y1: float, y2: float) -> None:
        self.add(
            '<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>',
            kind,
            x1,
            x2,
            y1,
            y2,
        )

    def dot(self, kind: str, x: float, y: float, radius: float, tooltip: str = "") -> None:
        element = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}">{}</circle>'
        self.add(
            element,
            kind,
            x,
            y,
            radius,
            Markup("<title>{}</title>").format(tooltip) if tooltip else "",
        )

    def svg(self) -> Markup:
        start = '<svg viewBox="0 0 {} {:g}" role="img" aria-label="{}"><title>{}</title>'
        head = Markup(start).format(*self._size, self._title, self._title)
        return head + Markup("").join(self._elements) + Markup("</svg>")


class _Plot:
    """A plot with labelled horizontal lines at round values.

    box: left, right, top, bottom. ends: the range of x.
    """

    def __init__(
        self,
        drawing: _Drawing,
        box: Box,
        ends: tuple[float, float],
        values: Sequence[float],
        label: Label,
    ) -> None:
        self._drawing = drawing
        self._first, self._last = ends
        left, self.right, self.top, self.bottom = box
        ticks = round_ticks(min(values), max(values))
        # Labels end before the plot: long ones, such as 0.05%, need more room than `box` leaves.
        longest = max(len(label(tick)) for tick in ticks)
        self.left = max(left, LETTER * longest + LABEL_GAP)
        self._low = min(*values, ticks[0])
        self._high = max(*values, ticks[-1])
        for tick in ticks:
            drawing.line("grid", self.left, self.right, self.y(tick), self.y(tick))
            drawing.text(self.left - LABEL_GAP, self.y(tick) + 4, label(tick), "end")

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self._first) / (
            self._last - self._first
        )

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self._low) / (
            self._high - self._low
        )

    def draw(self, shape: str, kind: str, points: Iterable[tuple[float, float]]) -> None:
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._drawing.add(f'<{shape} class="{{}}" points="{{}}"/>', kind, corners)

    def draw_band(self, band: Sequence[tuple[float, float, float]]) -> None:
        """Draw the area between two lines. band: x, low, high."""
        self.draw(
            "polygon",
            "band",
            [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))],
        )

    def mark_now(self, x: float, label: str, anchor: str, room: float) -> None:
        """Draw a vertical line with its label, which ends at the line if less than `room` is left."""
        self._drawing.line("now", self.x(x), self.x(x), self.top - 6, self.bottom)
        anchor = "end" if self.x(x) > WIDTH - room else anchor
        self._drawing.text(self.x(x), self.top - 10, label, anchor)


def curve(
    title: str,
    strengths: Sequence[float],
    values: Sequence[float],
    now: float,
    height: int,
    *,
    percent: bool = False,
    band: Sequence[Interval] = (),
    of: tuple[str, str, str] = ("strength", "the strength of the correction", "in use"),
) -> Markup:
    """Draw a measure against the strength. now: the strength in use, which is marked. band: intervals of the values.
    of: the name of the strength, in short and in full, and that of the mark.
    """
    name, against, marked = of
    drawing = _Drawing(f"{title} against {against}", WIDTH, height)
    box = (44, WIDTH - 14, CURVE_TOP, height - 22)
    bounds = [bound for _, *bounds in band for bound in bounds]
    ends = (0, max(strengths) or 1.0)

    def label(tick: float) -> str:
        return f"{100 * tick:.4g}%" if percent else f"{tick:.4g}"

    plot = _Plot(drawing, box, ends, [*values, *bounds], label)
    last_label = -math.inf
    for strength in strengths:
        if plot.x(strength) - last_label >= 30:
            last_label = plot.x(strength)
            drawing.text(last_label, height - 6, f"{strength:g}", "middle")
    if band:
        plot.draw_band(
            [
                (strength, low, high)
                for strength, (_, low, high) in zip(strengths, band, strict=True)
            ]
        )
    plot.draw("polyline", "line", zip(strengths, values, strict=True))
    plot.mark_now(now, f"{marked}: {now:g}", "middle", 70)
    for strength, value in zip(strengths, values, strict=True):
        shown = f"{100 * value:.1f}%" if percent else f"{value:.2f}"
        kind = "before" if strength == 0 else "after"
        radius = 5 if strength in (0, now) else 3
        drawing.dot(kind, plot.x(strength), plot.y(value), radius, f"{name} {strength:g}: {shown}")
    drawing.text(0, 14, title, "start", "name")
    return drawing.svg()


def expected_gain(
    curve: Sequence[tuple[float, float, float, float]], agreement: float, least: float
) -> Markup:
    """Draw the points of R@1 that a correction gained against the two-view agreement of its bank.

    curve: (agreement, mean, low, high) by agreement. agreement: of this bank, which is marked.
    least: below it a bank is foreign.
    """
    height = 200
    drawing = _Drawing(
        "Gain of a correction against the two-view agreement of its bank", WIDTH, height
    )
    bounds = [bound for _, *values in curve for bound in values]
    last = max(agreement, curve[-1][0])
    plot = _Plot(
        drawing,
        (44, WIDTH - 14, CURVE_TOP, height - 22),
        (0, last),
        bounds,
        lambda tick: f"{tick:+.4g}",
    )
    for tick in (tick for tick in round_ticks(0, last) if tick <= last):
        drawing.text(plot.x(tick), height - 6, f"{tick:.0%}", "middle")
    plot.draw_band([(at, low, high) for at, _, low, high in curve])
    plot.draw("polyline", "line", [(at, mean) for at, mean, _, _ in curve])
    drawing.line("grid", plot.x(least), plot.x(least), plot.top, plot.bottom)
    gain = float(np.interp(agreement, [at for at, *_ in curve], [mean for _, mean, _, _ in curve]))
    label = f"this bank: {agreement:.0%}"
    plot.mark_now(agreement, label, "start", 110)
    drawing.dot(
        "after",
        plot.x(agreement),
        plot.y(gain),
        5,
        f"{label}; banks like it gain {gain:+.1f} points",
    )
    drawing.text(0, 14, "Points of R@1 gained", "start", "name")
    return drawing.svg()


def timeline(
    title: str,
    lines: Sequence[Line],
    since: datetime,
    until: datetime,
    shown: Label,
    marks: Sequence[Mark] = (),
) -> Markup:
    """Draw lines over time from 0 on, with their names at their ends and in the title.

    shown: formats a value.
    """
    width, height = TIMELINE_SIZE
    drawing = _Drawing(f"{title}: {', '.join(line.name for line in lines)}", width, height)
    start = min(since, until - timedelta(minutes=1))
    values = [
        0,
        *(value for line in lines for _, value in line.points),
        *(mark.value for mark in marks),
    ]
    box = (60, width - 104, 14, height - 26)
    plot = _Plot(drawing, box, (start.timestamp(), until.timestamp()), values, shown)

    def x(moment: datetime) -> float:
        return plot.x(moment.timestamp())

    def dot(mark: Mark, radius: float) -> None:
        tooltip = f"{mark.at:%Y-%m-%d %H:%M:%S} UTC, {mark.label}"
        drawing.dot(mark.kind, x(mark.at), plot.y(mark.value), radius, tooltip)

    within_a_day = "%H:%M" if until - start >= timedelta(minutes=10) else "%H:%M:%S"
    for at in (start, start + (until - start) / 2, until):
        name = f"{at:{within_a_day if until - start < timedelta(days=1) else '%d %b %H:%M'}}"
        drawing.text(x(at), height - 6, name, "middle")
    for line in lines:
        plot.draw(
            "polyline", f"line {line.kind}", [(at.timestamp(), value) for at, value in line.points]
        )
        if line.dots and len(line.points) <= MOST_DOTS:
            for at, value in line.points:
                dot(Mark(at, value, line.kind, f"{line.name}: {shown(value)}"), 3)
    for mark in marks:
        dot(mark, 4.5)
    if marks:
        mark = marks[-1]
        side, anchor = (9, "start") if x(mark.at) < width / 2 else (-9, "end")
        drawing.text(x(mark.at) + side, plot.y(mark.value) + 4, mark.label, anchor, mark.kind)
    room = plot.bottom
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        end = min(plot.y(line.points[-1][1]) + 4, room)
        drawing.text(plot.right + 8, end, line.name, "start", line.kind)
        room = end - LABEL_HEIGHT
    return drawing.svg()


def round_ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers around the range."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 4)
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return [step * nth for nth in range(first, max(last, first + 1) + 1)]


def page_template(package: str, name: str, longest: int, **filters: Callable[..., Any]) -> Template:
    """Return the template `name` in the folder of a package.

    filters: further ones than number, points, span and `short`, which leaves at most `longest`
    characters of a text.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    short = partial(do_truncate, environment, length=longest, killwords=True, end="…", leeway=0)
    environment.filters |= {
        "log1p": math.log1p,
        "number": number,
        "points": points,
        "span": span,
        "short": lambda value: short(str(value)),
    }
    environment.filters |= filters
    return environment.from_string(files(package).joinpath(name).read_text("utf-8"))


def _shown(value: Any) -> Any:
    """Return a value as a template prints it: texts with escapes in place of what would reorder or
    hide a part of the page. These escapes have no character of HTML, so they may stand in markup.
    """
    if isinstance(value, Markup):
        return Markup(visible(value))
    return visible(value) if isinstance(value, str) else value
