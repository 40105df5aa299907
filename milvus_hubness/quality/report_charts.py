"""Charts as inline SVG: plain strings that need no script and scale with the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from milvus_hubness.quality.bootstrap import Interval
from milvus_hubness.quality.diagnosis import Bin

WIDTH = 440


def histogram(bins: Sequence[Bin], k: int) -> str:
    """Two bars a bin, before and after, on a logarithmic scale of items."""
    left, room, row = 64, WIDTH - 64 - 48, max(32, min(56, 430 // len(bins)))
    thick = (row - 6) // 2
    most = max(max(one.before, one.after) for one in bins)
    height = 24 + row * len(bins)

    def length(count: int) -> float:
        return room * math.log1p(count) / math.log1p(most)

    parts = []
    for decade in range(int(math.log10(most)) + 1):
        x = left + length(10**decade)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{height}"/>')
        parts.append(svg_text(x, 12, number(10**decade), "middle", "soft"))
    parts.append(svg_text(left - 8, 12, f"N_{k}", "end", "soft"))
    for nth, one in enumerate(bins):
        top = 26 + row * nth
        label = str(one.low) if one.low == one.high else f"{number(one.low)}–{number(one.high)}"
        parts.append(svg_text(left - 8, top + thick + 4, label, "end"))
        for offset, name, count in ((0, "before", one.before), (thick + 1, "after", one.after)):
            parts.append(
                f'<rect class="{name}" x="{left}" y="{top + offset}" width="{length(count):.1f}" '
                f'height="{thick}" rx="2">'
                f"<title>{number(count)} items with N_{k} {label} {name}</title></rect>"
            )
            parts.append(
                svg_text(left + length(count) + 5, top + offset + thick / 2 + 4, number(count), "start", name)
            )
    return svg(f"How many items have which N_{k}, before and after", height, parts)


def curve(
    title: str,
    strengths: Sequence[float],
    values: Sequence[float],
    now: float,
    height: int,
    *,
    percent: bool = False,
    band: Sequence[Interval] | None = None,
) -> str:
    """A measure against the strength, the strength in use marked; band: the intervals around the values."""
    left, right, top = 44, 14, 30
    bottom = height - 22
    low = min([*values, *(one.low for one in band or ())])
    high = max([*values, *(one.high for one in band or ())])
    ticks = round_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    widest = max(strengths) or 1.0

    def at(strength: float, value: float) -> str:
        return f"{x(strength):.1f},{y(value):.1f}"

    def x(strength: float) -> float:
        return left + (WIDTH - left - right) * strength / widest

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    parts = []
    for tick in ticks:
        label = f"{100 * tick:.4g}%" if percent else f"{tick:.4g}"
        parts.append(
            f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(svg_text(left - 6, y(tick) + 4, label, "end", "soft"))
    apart = -1e9
    for strength in strengths:
        if x(strength) - apart >= 30:
            parts.append(svg_text(x(strength), height - 6, f"{strength:g}", "middle", "soft"))
            apart = x(strength)
    if band:
        edge = [at(w, one.high) for w, one in zip(strengths, band, strict=True)]
        edge += [at(w, one.low) for w, one in reversed(list(zip(strengths, band, strict=True)))]
        parts.append(f'<polygon class="band" points="{" ".join(edge)}"/>')
    points = list(zip(strengths, values, strict=True))
    parts.append(f'<polyline class="line" points="{" ".join(at(*point) for point in points)}"/>')
    parts.append(f'<line class="now" x1="{x(now):.1f}" x2="{x(now):.1f}" y1="{top - 6}" y2="{bottom}"/>')
    for strength, value in points:
        shown = f"{100 * value:.1f}%" if percent else f"{value:.2f}"
        name = "before" if strength == 0 else "after"
        radius = 5 if strength in (0, now) else 3
        parts.append(
            f'<circle class="{name}" cx="{x(strength):.1f}" cy="{y(value):.1f}" r="{radius}">'
            f"<title>strength {strength:g}: {shown}</title></circle>"
        )
    anchor = "end" if x(now) > WIDTH - 70 else "middle"
    parts.append(svg_text(0, 14, title, "start", "name"))
    parts.append(svg_text(x(now), top - 10, f"in use: {now:g}", anchor, "soft"))
    return svg(f"{title} against the strength of the correction", height, parts)


def bars(title: str, before: int, after: int, whole: int) -> str:
    """Two horizontal bars of the same scale."""
    parts = []
    for top, name, count in ((0, "before", before), (20, "after", after)):
        length = 200 * count / max(whole, 1)
        parts.append(f'<rect class="track" x="52" y="{top}" width="200" height="14" rx="3"/>')
        parts.append(f'<rect class="{name}" x="52" y="{top}" width="{length:.1f}" height="14" rx="3"/>')
        parts.append(svg_text(46, top + 12, name, "end", "soft"))
        parts.append(svg_text(258, top + 12, number(count), "start", name))
    return svg(f"{title}: {number(before)} before, {number(after)} after", 36, parts, 310)


def share(title: str, reached: float, by_chance: float) -> str:
    """One bar of a whole, with a mark where chance would end."""
    at = WIDTH * by_chance
    anchor = "start" if at < 60 else "end" if at > WIDTH - 60 else "middle"
    parts = [
        f'<rect class="track" x="0" y="0" width="{WIDTH}" height="22" rx="4"/>',
        f'<rect class="after" x="0" y="0" width="{WIDTH * reached:.1f}" height="22" rx="4"/>',
        f'<line class="now" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="28"/>',
        svg_text(at, 42, f"by chance: {100 * by_chance:.1f}%", anchor, "soft"),
    ]
    return svg(title, 48, parts)


def whisker(interval: Interval, measure: str) -> str:
    """An interval against zero, the shares as points."""
    ends = 1.15 * max(abs(interval.low), abs(interval.high), abs(interval.estimate), 0.001)

    def x(value: float) -> float:
        return WIDTH / 2 * (1 + value / ends)

    low, middle, high = (x(value) for value in (interval.low, interval.estimate, interval.high))
    parts = [
        f'<line class="axis" x1="0" x2="{WIDTH}" y1="18" y2="18"/>',
        f'<line class="axis" x1="{WIDTH / 2}" x2="{WIDTH / 2}" y1="6" y2="30"/>',
        f'<rect class="tone" x="{low:.1f}" y="15" width="{high - low:.1f}" height="6" rx="3"/>',
        f'<circle class="tone" cx="{middle:.1f}" cy="18" r="7"/>',
        svg_text(WIDTH / 2, 44, "no change", "middle", "soft"),
        svg_text(0, 44, "worse", "start", "soft"),
        svg_text(WIDTH, 44, "better", "end", "soft"),
    ]
    return svg(f"Change of {measure}: {points(interval)}", 50, parts)


def points(interval: Interval) -> str:
    low, high = f"{100 * interval.low:+.1f}", f"{100 * interval.high:+.1f}"
    return f"{100 * interval.estimate:+.1f} points (95% interval {low} to {high})".replace("-", "−")


def number(value: float) -> str:
    return f"{value:,.0f}"


def svg(title: str, height: float, parts: Sequence[str], width: int = WIDTH) -> str:
    name = escape(title)
    return (
        f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{name}"><title>{name}</title>'
        f"{''.join(parts)}</svg>"
    )


def svg_text(x: float, y: float, text: str, anchor: str, name: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{name}">{escape(text)}</text>'


def round_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers around the range."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * nth for nth in range(first, max(last, first + 1) + 1)]
