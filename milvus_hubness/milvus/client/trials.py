"""The arm of one search of an experiment."""

from __future__ import annotations

from dataclasses import dataclass

NUMBER_BITS = 52
"""Bits of the numbers of samples, answers and units: what a float64 holds exactly."""
NUMBERS = 1 << NUMBER_BITS

CORRECTED = "corrected"
CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Trial:
    """One search of an experiment."""

    experiment: str
    share: float
    """Probability of the corrected arm."""
    treated: bool
    """Whether it gets the corrected ranking."""
    unit: int
    """Hash of the query and its window of time, by which arms are drawn."""
    query: int
    """Hash of the query."""
    is_recorded: bool
    began: float
    """When it began, by time.perf_counter."""

    @property
    def arm(self) -> str:
        return CORRECTED if self.treated else CONTROL
