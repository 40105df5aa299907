"""The parts of a serialized message, counted before it is parsed.

Protobuf makes an object of each part, some of two bytes, and Python
runs nothing else meanwhile: 49 MB of empty parameters take 1.4 GB
and five seconds. This count runs in Python, so other threads go on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from pymilvus.grpc_gen import common_pb2

VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = range(6)
"""Wire types."""

MOST_DEPTH = 100
"""Protobuf parses nothing that is nested deeper."""

NUMBERS_PER_PART = 16
"""Numbers of a packed list that take as long to parse as one part."""

_NOT_VARINT = frozenset(
    {
        FieldDescriptor.TYPE_DOUBLE,
        FieldDescriptor.TYPE_FLOAT,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_FIXED32,
        FieldDescriptor.TYPE_SFIXED64,
        FieldDescriptor.TYPE_SFIXED32,
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
    }
)
_INSIDE_BYTES = {
    "milvus.proto.milvus.SearchRequest.placeholder_group": common_pb2.PlaceholderGroup.DESCRIPTOR
}
"""Messages in fields of bytes, which the proxy parses too."""


@cache
def _fields_of(descriptor: Any) -> dict[int, Any]:
    """Return the fields of a message that have a length and parts, by number: the descriptor of a
    message, None for packed numbers.
    """
    fields: dict[int, Any] = {}
    for field in descriptor.fields:
        inner = field.message_type or _INSIDE_BYTES.get(field.full_name)
        if inner is not None or field.type not in _NOT_VARINT:
            fields[field.number] = inner
    return fields


def count_parts(descriptor: Any, data: bytes, most: int) -> int:
    """Return the number of fields in a message and in
    the messages in it; more than `most` if it has more.

    Counts up to where the message is malformed: there parsing ends too.
    """
    # One loop with few calls: of a large message it takes long as it is. `outer` has the
    # messages that are entered and not yet over.
    parts = 0
    fields = _fields_of(descriptor)
    position = 0
    end = len(data)
    outer: list[tuple[dict[int, Any], int, int]] = []
    try:
        while True:
            if position >= end:
                if position > end or not outer:
                    return parts

                fields, position, end = outer.pop()
                continue

            tag = data[position]
            position += 1
            if tag > 127:
                tag, position = _varint(data, position - 1)
            parts += 1
            if parts > most:
                return parts

            wire_type = tag & 7
            if wire_type == LENGTH:
                length = data[position]
                position += 1
                if length > 127:
                    length, position = _varint(data, position - 1)
                stop = position + length
                if stop > end:
                    return parts

                number = tag >> 3
                if length and number in fields:
                    inner = fields[number]
                    if inner is None:
                        parts += _numbers(data, position, length) // NUMBERS_PER_PART
                    elif len(outer) == MOST_DEPTH:
                        return parts
                    else:
                        outer.append((fields, stop, end))
                        fields = _fields_of(inner)
                        end = stop
                        continue

                position = stop
            elif wire_type == VARINT:
                while data[position] > 127:
                    position += 1
                position += 1
            elif wire_type == FIXED64:
                position += 8
            elif wire_type == FIXED32:
                position += 4
            elif wire_type not in (GROUP, END_GROUP):
                return parts
    except IndexError:
        return parts


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it. Raises IndexError."""
    value = 0
    # Ten bytes are the longest that protobuf reads.
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position

    raise IndexError("a number of more than ten bytes")


def _numbers(data: bytes, position: int, length: int) -> int:
    packed = np.frombuffer(data, np.uint8, length, position)
    return int(np.count_nonzero(packed < 128))
