"""The arm of one search of an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

NUMBER_BITS = 52
"""Bits of the numbers of samples, answers and units: what a float64 holds exactly."""
NUMBERS = 1 << NUMBER_BITS

CORRECTED = "corrected"
CONTROL = "control"


# Not frozen: each search makes one, and a frozen one takes three times as long.
@dataclass(slots=True)
class Trial:
    """One search of an experiment."""

    experiment: str
    share: float
    """Probability of the corrected arm."""
    treated: bool
    """Whether it gets the corrected ranking."""
    unit: int
    """Hash of the query and its window of time, by which arms are drawn."""
    hashed: bytes
    """What of the queries is hashed."""
    is_recorded: bool
    began: float
    """When it began, by time.perf_counter."""

    @property
    def query(self) -> int:
        """Hash of the queries, the same at any time."""
        digest = blake2b(self.hashed, digest_size=8).digest()
        return int.from_bytes(digest, "big") % NUMBERS

    @property
    def arm(self) -> str:
        return CORRECTED if self.treated else CONTROL
