"""The result of `enable`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from milvus_hubness.basics.notebooks import ShownAsTable


@dataclass(frozen=True)
class Enabled(ShownAsTable):
    """The result of `enable`."""

    collection: str
    bank: str
    """The collection that holds the bank's generations."""
    rows: int
    """Number of rows that now have a bias."""
    seconds: float
    side_collection: str | None = None
    """The side collection that searches read; None if payloads hold the biases."""
    candidates: int | None = None
    """How many rows a search reads, see state.CandidateReranking."""
    missed: float | None = None
    """What these miss, see state.CandidateReranking."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        return asdict(self)
