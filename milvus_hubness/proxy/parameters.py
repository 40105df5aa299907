"""The parameters of searches in Milvus's protocol: pairs of strings, one of which is JSON. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from milvus_hubness.client.arguments import RANGE_BOUNDS
from milvus_hubness.errors import InvalidParameter

STRENGTH, PROFILE = "hubness_strength", "hubness_profile"
"""Parameters of a search that say how it is corrected."""
_METRIC, _PARAMS, _FIELD = "metric_type", "params", "anns_field"


@dataclass(frozen=True)
class Overrides:
    """How a search is to be corrected, where it says so itself. strength: w; None takes the profile's.
    profile: a set of biases by name; None takes the active one."""

    strength: float | None = None
    profile: str | None = None

    @classmethod
    def parsed(cls, strength: Any, profile: Any) -> Overrides:
        """From words. Raises InvalidParameter."""
        try:
            weight = None if strength in (None, "") else float(strength)
        except (TypeError, ValueError):
            raise InvalidParameter(f"strength must be a number, got {strength!r}") from None
        return cls(weight, str(profile) if profile else None)

    def over(self, other: Overrides) -> Overrides:
        """This one, and where it says nothing the other."""
        strength = other.strength if self.strength is None else self.strength
        return Overrides(strength, self.profile or other.profile)


class SearchParameters:
    """The pairs of a search, without those that are for this package: `overrides` has them."""

    def __init__(self, pairs: Iterable[Any]) -> None:
        """Raises InvalidParameter where they are no parameters."""
        self._pairs = {pair.key: pair.value for pair in pairs}
        self._inner = _parsed(self._pairs.get(_PARAMS))
        told = {
            name: self._pairs.pop(name, None) or self._inner.pop(name, None) for name in (STRENGTH, PROFILE)
        }
        zero = told[STRENGTH] is None and STRENGTH in self._inner
        self.overrides = Overrides.parsed(0.0 if zero else told[STRENGTH], told[PROFILE])

    @property
    def field(self) -> str | None:
        """The vector field that is named."""
        return self._pairs.get(_FIELD) or None

    def name_field(self, name: str) -> None:
        """Have the search name this field."""
        self._pairs[_FIELD] = name

    def value(self, name: str) -> Any:
        """A parameter as it came, None without it."""
        return self._pairs.get(name, self._inner.get(name))

    def number(self, name: str, default: int) -> int:
        """A parameter that is a whole number. Raises InvalidParameter."""
        value = self.value(name)
        try:
            return default if value in (None, "", "None") else int(str(value))
        except ValueError:
            raise InvalidParameter(f"{name} must be a whole number, got {value!r}") from None

    def put(self, name: str, value: object) -> None:
        """Set a parameter, everywhere."""
        self._inner.pop(name, None)
        self._pairs[name] = str(value)

    def has(self, name: str) -> bool:
        """Whether it says anything of that parameter."""
        return name in self._pairs or name in self._inner

    @property
    def metric(self) -> str | None:
        """The metric that is named."""
        named = self._pairs.get(_METRIC) or self._inner.get(_METRIC)
        return str(named) if named else None

    def for_rewrite(self) -> dict[str, Any]:
        """Search parameters as `Rewrite` takes them. Raises InvalidParameter where a bound is no number."""
        told: dict[str, Any] = {_PARAMS: dict(self._inner)}
        told[_PARAMS].pop(_METRIC, None)
        if self.metric:
            told[_METRIC] = self.metric
        told |= {name: self._pairs[name] for name in RANGE_BOUNDS if name in self._pairs}
        for place in (told, told[_PARAMS]):
            for name in RANGE_BOUNDS:
                if place.get(name) is not None:
                    place[name] = _number(name, place[name])
        return told

    def take(self, rewritten: Mapping[str, Any]) -> None:
        """What `Rewrite` made of them, which names no metric."""
        self._inner = dict(rewritten.get(_PARAMS) or {})
        self._pairs.pop(_METRIC, None)
        for name in RANGE_BOUNDS:
            if name in self._pairs:
                self._pairs[name] = repr(rewritten[name]) if name in rewritten else ""

    def write(self, pairs: Any) -> None:
        """Put them into a message in place of the pairs that it has."""
        had_params = _PARAMS in self._pairs
        if had_params or self._inner:
            self._pairs[_PARAMS] = json.dumps(self._inner)
        del pairs[:]
        for name, value in self._pairs.items():
            pairs.add(key=name, value=value)


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        inner = json.loads(text) if text else {}
    except ValueError:
        inner = None
    if not isinstance(inner, dict):
        raise InvalidParameter(f"search parameters must be a JSON object, got {str(text)[:80]!r}")
    return inner


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidParameter(f"{name} must be a number, got {value!r}") from None
