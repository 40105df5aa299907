"""The size of requests: how many bytes a value takes
as JSON, and parts that a server takes. No I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel
from qdrant_client import models

T = TypeVar("T")

BYTES_PER_NUMBER = 22
"""Bytes of a number of a vector: a float32 as a double
has up to 17 digits, and a sign, a point and an exponent.
"""
BYTES_PER_ITEM = 3
"""Bytes around an item of a list or a dictionary: separators and brackets."""
POINT_BYTES = 100
"""Bytes of a point without its vectors and its payload: the id, and the names of these three."""
_encode = json.JSONEncoder(ensure_ascii=False).encode


def json_bytes(value: Any) -> int:
    """Return about how many bytes a value takes as JSON, rather more than less."""
    if isinstance(value, list | tuple):
        # A vector is a list of floats alone, and long.
        if value and isinstance(value[0], float):
            return BYTES_PER_NUMBER * len(value)

        return sum(json_bytes(item) + BYTES_PER_ITEM for item in value)

    if isinstance(value, bool) or value is None:
        return 5
    if isinstance(value, int | float):
        return BYTES_PER_NUMBER
    if isinstance(value, str):
        return _encoded_bytes(value)
    if isinstance(value, dict):
        return sum(
            json_bytes(name) + json_bytes(item) + BYTES_PER_ITEM for name, item in value.items()
        )

    if isinstance(value, np.ndarray):
        return BYTES_PER_NUMBER * value.size
    if isinstance(value, BaseModel):
        total = 0
        for name, item in value.__dict__.items():
            total += len(name) + BYTES_PER_ITEM
            total += _payload_bytes(item) if name == "payload" else json_bytes(item)
        return total

    return len(str(value)) + BYTES_PER_ITEM


def _payload_bytes(payload: Any) -> int:
    """Return the bytes of a payload.

    It has few floats, so the encoder of the standard library, which is C, is faster than a walk.
    """
    try:
        return _encoded_bytes(payload)
    except (TypeError, ValueError):
        # Values that JSON does not know.
        return json_bytes(payload)


def _encoded_bytes(value: Any) -> int:
    return len(_encode(value).encode("utf-8", "surrogatepass"))


def _points_bytes(items: Sequence[Any]) -> float:
    """Return the bytes of points, counted together for
    a fraction of the time; infinity for other items.
    """
    if not all(type(item) is models.PointStruct for item in items):
        return math.inf

    payloads = _payload_bytes([item.payload for item in items])
    return payloads + sum(POINT_BYTES + json_bytes(item.vector) for item in items)


def in_parts(items: Sequence[T], *, rows: int, most_bytes: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists of at most `rows` items and `most_bytes` bytes; a larger
    item is alone.
    """
    for start in range(0, len(items), rows):
        request = list(items[start : start + rows])
        if _points_bytes(request) <= most_bytes:
            yield request
        else:
            yield from _parts_by_bytes(request, most_bytes)


def _parts_by_bytes(items: Sequence[T], most_bytes: int) -> Iterator[list[T]]:
    request: list[T] = []
    request_bytes = 0
    for item in items:
        item_bytes = json_bytes(item)
        if request and request_bytes + item_bytes > most_bytes:
            yield request
            request = []
            request_bytes = 0
        request.append(item)
        request_bytes += item_bytes

    if request:
        yield request
