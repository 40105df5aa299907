"""Milvus's filter language: keys as it writes them."""

from __future__ import annotations

from collections.abc import Sequence

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"})


def escaped(text: str) -> str:
    """Return a text as it stands between double quotes."""
    return text.translate(_ESCAPES)


def literal(key: int | str) -> str:
    """Return a key: digits, or a text in quotes."""
    return str(key) if isinstance(key, int) else f'"{escaped(key)}"'


def is_one_of(field: str, keys: Sequence[int | str]) -> str:
    """Return the filter that is true where a field has one of these keys."""
    return f"{field} in [{', '.join(map(literal, keys))}]"
