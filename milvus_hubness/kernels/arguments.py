"""Checks of numbers that a caller may get wrong; each returns the plain Python number."""

from __future__ import annotations

import math
import numbers
from typing import Any

from milvus_hubness.errors import InvalidParameter


def whole_number(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """`value` as an int; raises InvalidParameter if it is no whole number (True is none) or out of range."""
    upper = "" if at_most is None else f" and at most {at_most}"
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < at_least or (at_most is not None and value > at_most):
        raise InvalidParameter(f"{name} must be a whole number of at least {at_least}{upper}, not {value!r}")
    return int(value)


def finite_number(name: str, value: Any) -> float:
    """`value` as a float; raises InvalidParameter if it is no number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidParameter(f"{name} must be a finite number, not {value!r}")
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """`value` as a float; raises InvalidParameter if it is no finite number above 0."""
    if finite_number(name, value) <= 0:
        raise InvalidParameter(f"{name} must be above 0, not {value!r}")
    return float(value)


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises InvalidParameter unless `value` is among `cached`."""
    if value not in known:
        raise InvalidParameter(f"{name} are among {', '.join(known)}, not {value!r}")
