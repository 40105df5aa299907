"""Numbers, times, gains and estimators as texts, for the command line, pages and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TIME_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
CONSTANT = {"kernel": "dense", "iterations": 10, "tol": 0.001, "neighbors": None}
"""Parameters of estimators that are not shown at these values."""


def describe(estimator: dict[str, Any]) -> str:
    """Return an estimator's dictionary in readable form, ½ NNN(k=16, alpha=0.75) + …, without constant parameters."""
    if "estimators" in estimator:
        parts = [f"({describe(part)})" if "estimators" in part else describe(part) for part in estimator["estimators"]]
        shares = rounded_shares(estimator["weights"])
        return " + ".join(f"{share / 100:g} {part}" for share, part in zip(shares, parts, strict=True))
    parameters = ", ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in estimator.items()
        if name not in ("name", "items") and not (name in CONSTANT and CONSTANT[name] == value)
    )
    return f"{estimator['name']}({parameters})"


def rounded_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights of a Blend in hundredths, rounded so that they add up to 100."""
    shares = [int(100 * weight) for weight in weights]
    by_remainder = sorted(range(len(shares)), key=lambda i: shares[i] - 100 * weights[i])
    for i in by_remainder[: 100 - sum(shares)]:
        shares[i] += 1
    return shares


def points(interval: tuple[float, float, float]) -> str:
    """Return a gain as text, in percentage points."""
    estimate, low, high = (f"{100 * value:+.1f}" for value in interval)
    return f"{estimate} points (95% interval {low} to {high})".replace("-", "−")


def number(value: float) -> str:
    """Return a number as text, with separators between its thousands."""
    return f"{value:,.0f}"


def span(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least one: 45 s, 12 min, 3.5 h, 9.1 d."""
    name, size = next((unit for unit in TIME_UNITS if seconds >= unit[1]), TIME_UNITS[-1])
    count = seconds / size
    return f"{count:.1f} {name}" if count < 10 and name != "min" else f"{count:.0f} {name}"
