"""Inline SVG charts, numbers as text, and the loader of the HTML page templates that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from jinja2.filters import do_truncate
from markupsafe import Markup

from milvus_hubness.basics.texts import number, percent, points, span, visible

WIDTH = 440
"""Width of a chart, in SVG units as all lengths here. Pages scale charts to their columns."""
TIMELINE_SIZE = (440, 200)
CURVE_TOP = 50
"""Room for two lines above a curve: its title, and the name of the mark, which may be anywhere."""
LABEL_HEIGHT = 15
"""Least distance of two labels above each other."""
LABEL_GAP = 6
"""Distance of a label from the left end of its line."""
LETTER = 9.5
"""Width of a letter of a label, on narrow screens, where labels are drawn larger."""
MOST_DOTS = 80
"""Points of a line up to which each gets a dot with a tooltip."""

Box = tuple[float, float, float, float]
"""Left, right, top and bottom."""
Label = Callable[[float], str]
"""Formats a value."""
Interval = tuple[float, float, float]
"""An estimate and the bounds of its confidence interval."""


class Line(NamedTuple):
    """A line of a timeline, labelled at its end."""

    name: str
    css_class: str
    points: Sequence[tuple[datetime, float]]
    dots: bool = True
    """Whether its points have tooltips."""


class Mark(NamedTuple):
    """A separate point."""

    at: datetime
    value: float
    css_class: str
    label: str
    """Its tooltip; the label of the last mark is also shown next to it."""


class _Drawing:
    """The elements of a chart."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self._title = title
        self._size = (width, height)
        self._elements: list[Markup] = []

    def add(self, element: str, *values: object) -> None:
        # Only `element` is markup: what it is filled with, names of items among it, is escaped.
        self._elements.append(Markup(element).format(*values))

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", css_class: str = "soft"
    ) -> None:
        element = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>'
        self.add(element, x, y, anchor, css_class, text)

    def line(self, css_class: str, x1: float, x2: float, y1: float, y2: float) -> None:
        element = '<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
        self.add(element, css_class, x1, x2, y1, y2)

    def dot(self, css_class: str, x: float, y: float, radius: float, tooltip: str = "") -> None:
        element = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}">{}</circle>'
        title = Markup("<title>{}</title>").format(tooltip) if tooltip else ""
        self.add(element, css_class, x, y, radius, title)

    def svg(self) -> Markup:
        # Screen readers read the label, and a pointer shows the title.
        start = '<svg viewBox="0 0 {} {:g}" role="img" aria-label="{}"><title>{}</title>'
        head = Markup(start).format(*self._size, self._title, self._title)
        return head + Markup("").join(self._elements) + Markup("</svg>")


class _Plot:
    """A plot with labelled horizontal lines at round values.

    ends: the range of x. values: those that the range of y has to hold.
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
        share = (value - self._first) / (self._last - self._first)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        # In SVG, y grows downwards.
        share = (value - self._low) / (self._high - self._low)
        return self.bottom - (self.bottom - self.top) * share

    def draw(self, shape: str, css_class: str, points: Iterable[tuple[float, float]]) -> None:
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._drawing.add(f'<{shape} class="{{}}" points="{{}}"/>', css_class, corners)

    def draw_band(self, band: Sequence[tuple[float, float, float]]) -> None:
        """Draw the area between two lines. band: x, low, high."""
        # Around it: the upper line to the right, and the lower line back.
        upper = [(x, high) for x, _, high in band]
        lower = [(x, low) for x, low, _ in reversed(band)]
        self.draw("polygon", "band", [*upper, *lower])

    def mark_now(self, x: float, label: str, anchor: str, room: float) -> None:
        """Draw a vertical line with its label.

        The label ends at the line if less than `room` is left to the right of it.
        """
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
    """Draw a measure against the strength.

    now: the strength in use, which is marked. band: intervals of the values. of: the name of the
    strength, in short and in full, and that of the mark.
    """
    name, against, marked = of
    drawing = _Drawing(f"{title} against {against}", WIDTH, height)
    box = (44, WIDTH - 14, CURVE_TOP, height - 22)
    bounds = [bound for _, *bounds in band for bound in bounds]
    ends = (0, max(strengths) or 1.0)

    def label(tick: float) -> str:
        return f"{100 * tick:.4g}%" if percent else f"{tick:.4g}"

    plot = _Plot(drawing, box, ends, [*values, *bounds], label)

    # Strengths may be near each other: a label that would touch the last one is left out.
    last_label = -math.inf
    for strength in strengths:
        if plot.x(strength) - last_label >= 30:
            last_label = plot.x(strength)
            drawing.text(last_label, height - 6, f"{strength:g}", "middle")

    # What is drawn later is on top: the dots, which have tooltips, come last.
    if band:
        intervals = zip(strengths, band, strict=True)
        plot.draw_band([(strength, low, high) for strength, (_, low, high) in intervals])
    plot.draw("polyline", "line", zip(strengths, values, strict=True))
    plot.mark_now(now, f"{marked}: {now:g}", "middle", 70)
    for strength, value in zip(strengths, values, strict=True):
        shown = f"{100 * value:.1f}%" if percent else f"{value:.2f}"
        css_class = "before" if strength == 0 else "after"
        radius = 5 if strength in (0, now) else 3
        tooltip = f"{name} {strength:g}: {shown}"
        drawing.dot(css_class, plot.x(strength), plot.y(value), radius, tooltip)

    drawing.text(0, 14, title, "start", "name")
    return drawing.svg()


def expected_gain(
    curve: Sequence[tuple[float, float, float, float]], excess: float, gain: float, little: float
) -> Markup:
    """Draw the points of R@1 that a correction gained against the excess answers that hubs took.

    curve: (excess, mean, low, high) by excess. excess: of this bank's queries, which is marked at
    its expected gain. little: below it little is gained.
    """
    height = 200
    title = "Gain of a correction against the answers that hubs take in excess"
    drawing = _Drawing(title, WIDTH, height)
    box = (44, WIDTH - 14, CURVE_TOP, height - 22)
    bounds = [0.0, *(bound for _, *values in curve for bound in values)]
    excess = max(0.0, excess)
    last = max(excess, curve[-1][0])
    plot = _Plot(drawing, box, (0, last), bounds, lambda tick: f"{tick:+.4g}")
    for tick in (tick for tick in round_ticks(0, last) if tick <= last):
        drawing.text(plot.x(tick), height - 6, f"{tick:.0%}", "middle")

    plot.draw_band([(at, low, high) for at, _, low, high in curve])
    plot.draw("polyline", "line", [(at, mean) for at, mean, _, _ in curve])
    drawing.line("grid", plot.x(little), plot.x(little), plot.top, plot.bottom)

    label = f"here: {percent(excess)}"
    tooltip = f"{label}; banks of their own gained {gain:+.1f} points at this"
    plot.mark_now(excess, label, "start", 110)
    drawing.dot("after", plot.x(excess), plot.y(gain), 5, tooltip)

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
    # A service that has just started has one moment only, and no width.
    start = min(since, until - timedelta(minutes=1))
    values = [
        0,
        *(value for line in lines for _, value in line.points),
        *(mark.value for mark in marks),
    ]
    box = (60, width - 120, 14, height - 26)
    plot = _Plot(drawing, box, (start.timestamp(), until.timestamp()), values, shown)

    def x(moment: datetime) -> float:
        return plot.x(moment.timestamp())

    def dot(mark: Mark, radius: float) -> None:
        tooltip = f"{mark.at:%Y-%m-%d %H:%M:%S} UTC, {mark.label}"
        drawing.dot(mark.css_class, x(mark.at), plot.y(mark.value), radius, tooltip)

    for at in (start, start + (until - start) / 2, until):
        drawing.text(x(at), height - 6, f"{at:{_time_format(until - start)}}", "middle")

    for line in lines:
        points = [(at.timestamp(), value) for at, value in line.points]
        plot.draw("polyline", f"line {line.css_class}", points)
        if line.dots and len(line.points) <= MOST_DOTS:
            for at, value in line.points:
                dot(Mark(at, value, line.css_class, f"{line.name}: {shown(value)}"), 3)

    for mark in marks:
        dot(mark, 4.5)
    if marks:
        # On the side of the mark that has more room.
        last = marks[-1]
        side, anchor = (9, "start") if x(last.at) < width / 2 else (-9, "end")
        drawing.text(x(last.at) + side, plot.y(last.value) + 4, last.label, anchor, last.css_class)

    # From the lowest line upwards: a name that would cover the last one moves above it.
    room = plot.bottom
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        end = min(plot.y(line.points[-1][1]) + 4, room)
        drawing.text(plot.right + 8, end, line.name, "start", line.css_class)
        room = end - LABEL_HEIGHT

    return drawing.svg()


def _time_format(duration: timedelta) -> str:
    """Return a format in which three moments of such a duration differ."""
    if duration < timedelta(minutes=10):
        return "%H:%M:%S"
    return "%H:%M" if duration < timedelta(days=1) else "%d %b %H:%M"


def round_ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers around the range."""
    # Equal ends have no range: their own size serves.
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 4)
    first = math.floor(low / step)
    last = math.ceil(high / step)
    # Multiples of the step, not sums, which would carry rounding errors into the labels.
    return [step * nth for nth in range(first, max(last, first + 1) + 1)]


def page_template(package: str, name: str, longest: int, **filters: Callable[..., Any]) -> Template:
    """Return the template `name` in the folder of a package.

    filters: further ones than number, points, span and `short`, which leaves at most `longest`
    characters of a text.
    """
    # A page shows what others wrote: everything is escaped, and a missing value is an error.
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
    """Return a value as a template prints it.

    Texts get escapes in place of what would reorder or hide a section of the page.
    """
    # The escapes have no character of HTML, so they may stand in markup too.
    if isinstance(value, Markup):
        return Markup(visible(value))
    return visible(value) if isinstance(value, str) else value
