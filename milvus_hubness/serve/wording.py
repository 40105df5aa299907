"""Spans of time and numbers as people read them."""

from __future__ import annotations

from datetime import datetime

UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def span(seconds: float) -> str:
    """In the largest unit that it has one of: 45 s, 12 min, 3.5 h, 9.1 d."""
    name, size = next((unit for unit in UNITS if seconds >= unit[1]), UNITS[-1])
    count = seconds / size
    return f"{count:.1f} {name}" if count < 10 and name != "min" else f"{count:.0f} {name}"


def ago(moment: datetime, now: datetime) -> str:
    seconds = (now - moment).total_seconds()
    return "just now" if seconds < 1 else f"{span(seconds)} ago"


def ahead(moment: datetime, now: datetime) -> str:
    seconds = (moment - now).total_seconds()
    return f"in {span(seconds)}" if seconds >= 1 else "now"
