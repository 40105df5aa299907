"""What the footer of a Parquet file says of the sizes of its columns.

pyarrow says it too, but some footers end its process there: `RowGroupMetaData.column` lets a C++
exception through. The footer is a struct of Thrift in its compact protocol (Parquet's
parquet.thrift): FileMetaData has row_groups 4, RowGroup has columns 1, ColumnChunk has meta_data 3,
and ColumnMetaData has type 1, path_in_schema 3, num_values 5 and total_uncompressed_size 6.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"PAR1"
"""The last bytes of a file, after the size of the footer."""

MOST_NESTED = 32
"""Largest number of structs and lists that are within each other."""

# Types of the compact protocol. Whole numbers have those between BYTE and DOUBLE.
TRUE = 1
FALSE = 2
BYTE = 3
DOUBLE = 7
BINARY = 8
LIST = 9
SET = 10
MAP = 11
STRUCT = 12


class Chunk(NamedTuple):
    """A column of a group of rows."""

    name: str
    """The name of the column, also of what is within its lists."""

    physical_type: int
    """A number of Parquet's enumeration `Type`."""

    values: int
    """The number of its values."""

    uncompressed: int
    """Its size after decompression, in bytes, in which equal values may be together."""


def chunks_of(content: memoryview) -> Iterator[Chunk]:
    """Yield the columns of all groups of rows of a Parquet file. Raises ValueError."""
    if len(content) < len(MAGIC) + 4 or bytes(content[-len(MAGIC) :]) != MAGIC:
        raise ValueError("it has no footer")

    end = len(content) - len(MAGIC) - 4
    [size] = struct.unpack("<I", content[end : end + 4])
    if size > end:
        raise ValueError("its footer is cut off")
    footer = _Compact(content[end - size : end])
    try:
        yield from _of_file(footer)
    except IndexError:
        raise ValueError("its footer is cut off") from None


def _of_file(footer: _Compact) -> Iterator[Chunk]:
    for number, kind in footer.fields():
        if (number, kind) != (4, LIST):
            footer.skip(kind)
            continue
        for _ in footer.structs():
            for inner, of_group in footer.fields():
                if (inner, of_group) == (1, LIST):
                    for _ in footer.structs():
                        yield from _of_chunk(footer)
                else:
                    footer.skip(of_group)


def _of_chunk(footer: _Compact) -> Iterator[Chunk]:
    for number, kind in footer.fields():
        if (number, kind) == (3, STRUCT):
            yield _column(footer)
        else:
            footer.skip(kind)


def _column(footer: _Compact) -> Chunk:
    numbers = {1: 0, 5: 0, 6: 0}
    path: list[str] = []
    for number, kind in footer.fields():
        if number in numbers and BYTE < kind < DOUBLE:
            numbers[number] = footer.whole_number()
        elif (number, kind) == (3, LIST):
            path = footer.texts()
        else:
            footer.skip(kind)
    return Chunk(path[0] if path else "", numbers[1], numbers[5], numbers[6])


class _Compact:
    """A reader of Thrift's compact protocol. Methods raise ValueError, and IndexError at the end."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the type of each field of a struct, whose value is read meanwhile."""
        number = 0
        while header := self._byte():
            step = header >> 4
            number = number + step if step else self.whole_number()
            yield number, header & 15

    def structs(self) -> Iterator[None]:
        """Yield once for each struct of a list, which is read meanwhile."""
        count, kind = self._list()
        if kind != STRUCT and count:
            raise ValueError("its footer is damaged")
        for _ in range(count):
            yield

    def texts(self) -> list[str]:
        """Return a list of texts."""
        count, kind = self._list()
        if kind != BINARY and count:
            raise ValueError("its footer is damaged")
        return [bytes(self._bytes(self._varint())).decode() for _ in range(count)]

    def whole_number(self) -> int:
        """Return a whole number."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int, depth: int = 0, *, is_member: bool = False) -> None:
        """Leave out a value. is_member: whether it is one of a list, where a truth has a byte."""
        if depth > MOST_NESTED:
            raise ValueError("its footer is nested too deeply")
        if kind in (TRUE, FALSE):
            self._bytes(1 if is_member else 0)
        elif kind == BYTE:
            self._bytes(1)
        elif BYTE < kind < DOUBLE:
            self._varint()
        elif kind == DOUBLE:
            self._bytes(8)
        elif kind == BINARY:
            self._bytes(self._varint())
        elif kind in (LIST, SET):
            count, of_members = self._list()
            for _ in range(count):
                self.skip(of_members, depth + 1, is_member=True)
        elif kind == MAP:
            count = self._varint()
            of_pairs = self._byte() if count else 0
            for _ in range(count):
                self.skip(of_pairs >> 4, depth + 1, is_member=True)
                self.skip(of_pairs & 15, depth + 1, is_member=True)
        elif kind == STRUCT:
            for _, of_field in self.fields():
                self.skip(of_field, depth + 1)
        else:
            raise ValueError("its footer is damaged")

    def _list(self) -> tuple[int, int]:
        header = self._byte()
        count = header >> 4
        return (self._varint() if count == 15 else count), header & 15

    def _varint(self) -> int:
        value = 0
        # Ten groups of seven bits hold 64 bits.
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("its footer is damaged")

    def _byte(self) -> int:
        byte = self._content[self._at]
        self._at += 1
        return byte

    def _bytes(self, count: int) -> memoryview:
        start = self._at
        self._at += count
        if self._at > len(self._content):
            raise IndexError
        return self._content[start : self._at]
