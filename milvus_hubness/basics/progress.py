"""The callback by which long work reports how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""A callback that gets the current step, the number of finished rows, and the total number of rows.
"""


def silent(doing: str, done: int, total: int) -> None:
    """Ignore the progress."""
