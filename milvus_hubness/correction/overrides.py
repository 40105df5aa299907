"""How one search is corrected, where it says so itself."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from milvus_hubness.errors import InvalidParameter


class Overrides(NamedTuple):
    """Settings of a search, or of all searches of a client, in place of those of the collection."""

    strength: float | None = None
    """w; None for that of the profile."""
    kinds: float | None = None
    """κ, the factor of the correction by kind; None for 1."""
    profile: str | None = None
    """The name of a bias profile; None for the active one."""

    def checked(self) -> Overrides:
        """Return these settings. Raises InvalidParameter for a strength that is no finite number,
        and for a factor of kinds that is no finite number from 0 up.
        """
        if self.strength is not None and not is_finite_number(self.strength):
            raise InvalidParameter(f"strength must be a finite number, not {self.strength!r}")

        factor = self.kinds
        if factor is not None and not (is_finite_number(factor) and factor >= 0):
            raise InvalidParameter(
                f"kinds is a number from 0 up: 1 corrects by kind, 0 does not, got {factor!r}"
            )
        return self

    def over(self, default: Overrides) -> Overrides:
        """Return these settings, with those of `default` where these have none."""
        if default == NONE:
            return self
        return Overrides(
            default.strength if self.strength is None else self.strength,
            default.kinds if self.kinds is None else self.kinds,
            default.profile if self.profile is None else self.profile,
        )


NONE = Overrides()
"""The settings of a search that says nothing: the collection's."""

RAW = Overrides(strength=0.0, kinds=0.0)
"""The settings of a search that corrects nothing."""


def is_finite_number(value: Any) -> bool:
    """Whether this is a number, of NumPy too, and no truth value."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number beyond the range of floats.
        return False
