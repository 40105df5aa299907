"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many rows are done, and how many there are."""


def silent(doing: str, done: int, total: int) -> None:
    """The progress of work that nobody watches."""


def chunks(items: Sequence[T], size: int, doing: str, progress: Progress) -> Iterator[Sequence[T]]:
    """`items` in runs of `size`, telling `progress` after each is worked off."""
    progress(doing, 0, len(items))
    for start in range(0, len(items), size):
        part = items[start : start + size]
        yield part
        progress(doing, start + len(part), len(items))
