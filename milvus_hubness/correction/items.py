"""Items as rows with keys and fields, of which some say how often an item is wanted, or of what kind
it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class ItemRows(Protocol):
    """Items as rows of a database: a `Batch`, or an `Items`."""

    @property
    def keys(self) -> Sequence[Any]:
        """The keys of the rows; None for a key that the database is still to make."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Their fields."""


class Items(NamedTuple):
    """Rows with their keys."""

    keys: Sequence[Any]
    rows: Sequence[Mapping[str, Any]]
