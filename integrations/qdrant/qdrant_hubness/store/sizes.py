"""The size of requests: how many bytes a value takes as JSON, and parts that a server takes. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

T = TypeVar("T")

BYTES_PER_NUMBER = 22
"""Bytes of a number of a vector: a float32 as a double has up to 17 digits, and a sign, a point and an exponent."""
BYTES_PER_ITEM = 3
"""Bytes around an item of a list or a dictionary: separators and brackets."""


def json_bytes(value: Any) -> int:
    """Return about how many bytes a value takes as JSON, rather more than less."""
    if isinstance(value, bool) or value is None:
        return 5
    if isinstance(value, int | float):
        return BYTES_PER_NUMBER
    if isinstance(value, str):
        return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if isinstance(value, np.ndarray):
        return BYTES_PER_NUMBER * value.size
    if isinstance(value, BaseModel):
        return json_bytes(value.__dict__)
    if isinstance(value, dict):
        return sum(json_bytes(name) + json_bytes(item) + BYTES_PER_ITEM for name, item in value.items())
    if isinstance(value, list | tuple):
        # A vector is a list of floats alone, and long.
        if value and isinstance(value[0], float):
            return BYTES_PER_NUMBER * len(value)
        return sum(json_bytes(item) + BYTES_PER_ITEM for item in value)
    return len(str(value)) + BYTES_PER_ITEM


def in_parts(
    items: Sequence[T], *, rows: int, most_bytes: int, size: Callable[[T], int] = json_bytes
) -> Iterator[list[T]]:
    """Yield the items in order, in lists of at most `rows` items and `most_bytes` bytes; a larger item is alone."""
    part: list[T] = []
    part_bytes = 0
    for item in items:
        item_bytes = size(item)
        if part and (len(part) >= rows or part_bytes + item_bytes > most_bytes):
            yield part
            part, part_bytes = [], 0
        part.append(item)
        part_bytes += item_bytes
    if part:
        yield part
