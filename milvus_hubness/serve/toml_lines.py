"""On which line of a TOML file a key stands, which parsers do not tell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

Path = Sequence[str | int]
"""Keys of tables and places in arrays, from the top."""


class TomlLines:
    """text: a whole file that parses."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def line(self, path: Path) -> int | None:
        """Of the statement that gives the last part of the path that is there, counted from 1; None where not
        even the first is."""
        for end in range(len(path), 0, -1):
            for first, so_far in self._statements:
                if _is_there(so_far, path[:end]):
                    return first
        return None

    @cached_property
    def _statements(self) -> list[tuple[int, dict[str, Any]]]:
        """The first line of each statement, and what the file says up to its end: up to the first line after
        which the beginning of the file is a file of its own."""
        found, first = [], 1
        for end in range(1, len(self._lines) + 1):
            try:
                so_far = tomllib.loads("\n".join(self._lines[:end]))
            except tomllib.TOMLDecodeError:
                continue
            found.append((first, so_far))
            first = end + 1
        return found


def _is_there(value: Any, path: Path) -> bool:
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True
