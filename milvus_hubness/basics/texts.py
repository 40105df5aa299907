"""Numbers, times, gains and estimators as texts, and characters that cannot be seen as escapes, for
the command line, pages, logs and reports.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from milvus_hubness.basics.estimator_names import MEASURED

TIME_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
CONSTANT = {
    "kernel": "dense",
    "iterations": 10,
    "tol": 0.001,
    "neighbors": None,
    "discount": 0.5,
    "finds": 10,
}
"""Parameters of estimators that are not shown at these values."""

MANY = 3
"""Methods from which on a mix is shown by a short name; its parts are in --json."""

_INVISIBLE = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # Controls of terminals, except the line feed and the tab.
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u206f"  # Directions: what follows is shown elsewhere.
    "\\u2028\\u2029"  # Separators of lines and paragraphs.
    "\\xad\\u180e\\u200b\\u2060-\\u2065\\ufeff\\ufff9-\\ufffb"  # No width: two keys look the same.
    "\\U00013430-\\U0001345f\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0000-\\U000e007f"
    "\\ud800-\\udfff"  # Halves of pairs, which no encoding of a terminal or a page has.
)
"""The characters that change how a text is shown and are
not seen themselves, as the inside of a regular expression.
"""
_JOINERS = r"(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
"""Zero-width joiners that join nothing; scripts and
emoji need those between two letters beyond ASCII.
"""
_HIDDEN = re.compile(rf"[{_INVISIBLE}]|{_JOINERS}")
_HIDDEN_IN_LINE = re.compile(rf"[{_INVISIBLE}\n\t]|{_JOINERS}")


def field_words(field: str) -> str:
    """Return what messages call a vector field; Qdrant's unnamed vector has an empty name."""
    return f"field {field!r}" if field else "the vector"


def visible(text: str) -> str:
    """Return `text` with escapes, such as \\x1b and \\u202e, in place of the characters that would
    steer a terminal or change the order of what is shown. Line feeds and tabs stay.
    """
    return _HIDDEN.sub(_escape, text)


def visible_line(text: str) -> str:
    """Return `text` as `visible` does, with escapes in place of line feeds and tabs too."""
    return _HIDDEN_IN_LINE.sub(_escape, text)


def visible_json(text: str) -> str:
    """Return a JSON text, on one line, with JSON's own
    escapes in place of the same characters: its values stay.
    """
    return _HIDDEN_IN_LINE.sub(lambda hidden: json.dumps(hidden[0])[1:-1], text)


def _escape(hidden: re.Match[str]) -> str:
    return hidden[0].encode("unicode_escape").decode()


def describe(estimator: dict[str, Any]) -> str:
    """Return an estimator's dictionary in readable form, 0.83 (0.5 NNN(k=8, alpha=1) + …), without
    constant parameters: first the factor on the biases, unless it is 1. A mix of many methods has a
    short name, mix of 7 methods, id 9f3c.
    """
    text = _at_full_strength(estimator)
    strength = _strength(estimator)
    if strength == "agreement":
        strength = estimator.get("agreement", strength)

    if strength == 1:
        return text

    factor = f"{strength:.2g}" if isinstance(strength, float) else strength
    is_sum = " + " in text or ", id " in text
    return f"{factor} ({text})" if is_sum else f"{factor} {text}"


def agreement_sentence(estimator: dict[str, Any]) -> str | None:
    """Return what the agreement of an estimator's
    dictionary means; None if its strength is a number.
    """
    # The demand of a bank goes with the biases of one other estimator.
    if estimator["name"] == "WithDemand":
        return agreement_sentence(estimator["estimators"][0])
    if _strength(estimator) != "agreement":
        return None
    if (agreement := estimator.get("agreement")) is None:
        return "the fit measures how far the two halves of the bank agree, and applies that share of each bias"
    return f"the two halves of the bank agree to {agreement:.2f}, so that share of each bias is applied"


def _strength(estimator: dict[str, Any]) -> float | str:
    default = "agreement" if estimator["name"] == "Blend" else 1.0
    strength: float | str = estimator.get("strength", default)
    return strength


def _at_full_strength(estimator: dict[str, Any]) -> str:
    if estimator["name"] == "WithDemand":
        biases = describe(estimator["estimators"][0])
        # Where demand is even, nothing is left to take off.
        if estimator.get("factor") == 0:
            return biases
        return f"{biases}, less {estimator['weight']:g} log demand"
    if "estimators" in estimator:
        if len(estimator["estimators"]) >= MANY:
            return f"mix of {len(estimator['estimators'])} methods, id {mix_id(estimator)}"
        blended = [
            f"({text})" if " + " in text else text
            for text in map(describe, estimator["estimators"])
        ]
        shares = rounded_shares(estimator["weights"])
        return " + ".join(
            f"{share / 100:g} {text}" for share, text in zip(shares, blended, strict=True)
        )

    parameters = ", ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in estimator.items()
        if name not in ("name", "items", "mean_bias", "strength", "agreement")
        and not (name in CONSTANT and CONSTANT[name] == value)
    )
    return f"{estimator['name']}({parameters})"


def mix_id(estimator: dict[str, Any]) -> str:
    """Return the first digits of a digest of a mix, which is the same before and after its fit."""
    text = json.dumps(chosen_parameters(estimator), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:4]


def chosen_parameters(estimator: dict[str, Any], *but: str) -> dict[str, Any]:
    """Return an estimator's dictionary with what somebody has chosen, without what a fit measures.

    but: measured entries that stay.
    """
    chosen: dict[str, Any] = {}
    for name, value in estimator.items():
        temperature = name.replace("tau", "temperature")
        # The fit measures a tau that has a temperature.
        is_measured = name in MEASURED or (temperature != name and temperature in estimator)
        if name == "estimators":
            chosen[name] = [chosen_parameters(part, *but) for part in value]
        elif name in but or not is_measured:
            chosen[name] = value
    return chosen


def rounded_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights of a Blend in hundredths, rounded so that they add up to 100."""
    # Rounded down; what is missing to 100 goes to those that lost most.
    shares = [int(100 * weight) for weight in weights]
    by_remainder = sorted(range(len(shares)), key=lambda i: shares[i] - 100 * weights[i])
    for i in by_remainder[: 100 - sum(shares)]:
        shares[i] += 1
    return shares


def points(interval: tuple[float, float, float]) -> str:
    """Return a gain as text, in percentage points."""
    estimate, low, high = map(in_points, interval)
    return f"{estimate} points (95% interval {low} to {high})"


def in_points(value: float) -> str:
    """Return a difference of shares as text, in percentage points, with its sign."""
    return f"{_rounded(100 * value, 1):+.1f}".replace("-", "−")


def percent(share: float, decimals: int = 0) -> str:
    """Return a share as text, in percent."""
    return f"{_rounded(share, decimals + 2):.{decimals}%}"


def _rounded(value: float, decimals: int) -> float:
    """Return a rounded value; what is rounded to zero has no sign."""
    return round(value, decimals) + 0.0


def number(value: float) -> str:
    """Return a number as text, with separators between its thousands."""
    return f"{value:,.0f}"


def span(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least one: 45 s, 12 min, 3.5 h, 9.1 d."""
    name, size = next((unit for unit in TIME_UNITS if seconds >= unit[1]), TIME_UNITS[-1])
    count = seconds / size
    return f"{count:.1f} {name}" if count < 10 and name != "min" else f"{count:.0f} {name}"
