"""Tables in Parquet and Arrow files, of which one column is read, batch by batch."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.opening import open_file
from milvus_hubness.basics.files.parquet_footer import chunks_of
from milvus_hubness.basics.files.sizes import OBJECT_BYTES, Growth, reading

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = ".parquet"
TABLES = (PARQUET, ".arrow", ".feather", ".ipc")
"""The suffixes of files with tables."""

BATCH_ROWS = 1_024
"""Rows of a Parquet file that are decoded at a time, before their size is looked at."""

ARROW_FILE = b"ARROW1\0\0"
"""The first bytes of a file of Arrow."""

ARROW_STREAM = b"\xff\xff\xff\xff"
"""The first bytes of a stream of Arrow."""

WORD = 8
"""Size of an offset of Arrow, in bytes."""

LARGEST_NUMBER = 16
"""Size of the largest number that is read, in bytes."""

ITEM_BYTES = {0: 1, 1: 4, 4: 4}
"""Size of a decoded value of a physical type of Parquet, if it is not 8 bytes: of BOOLEAN, INT32 and
FLOAT.
"""


class Table:
    """An open table. schema: of its columns."""

    schema: pa.Schema

    def __init__(self, path: str | os.PathLike[str], size: int) -> None:
        self._growth = Growth(path, size)

    def column(self, name: str, *, as_objects: bool = False) -> pa.ChunkedArray:
        """Return a column.

        as_objects: whether its values will be objects of Python, which take more memory than those
        of Arrow. Raises UnreadableFile for values that no honest file of this size has, and for
        those that are neither numbers, texts nor lists of them.
        """
        import pyarrow as pa

        if self.schema.names.count(name) > 1:
            raise ValueError(f"several columns have the name {name!r}")

        _expect_plain(name, self.schema.field(name).type)
        chunks = []
        for batch in self._batches(name):
            chunk = batch.column(name)
            # Offsets beyond the values would be read from foreign memory.
            chunk.validate(full=True)
            count, decoded = usage(chunk)
            self._growth.add(repr(name), decoded + (OBJECT_BYTES * count if as_objects else 0))
            chunks.append(chunk)

        return pa.chunked_array(chunks, self.schema.field(name).type)

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        raise NotImplementedError


class LoadedTable(Table):
    """A table that is in memory, as a frame."""

    def __init__(self, table: pa.Table) -> None:
        self.schema = table.schema
        self._table = table

    def column(self, name: str, *, as_objects: bool = False) -> pa.ChunkedArray:
        """Return a column."""
        return self._table.column(name)


def _expect_plain(name: str, of_type: pa.DataType) -> None:
    """Raise ValueError for values that are neither numbers, texts nor lists of them.

    Some of these take no byte in a file, such as a struct without members or a run of equal values.
    """
    import pyarrow.types as types

    plain = _stored(of_type)
    if types.is_dictionary(plain):
        plain = plain.value_type
    are_views = False
    while is_list(plain):
        are_views |= _is_view(plain)
        plain = plain.value_type

    is_number = types.is_primitive(plain) or types.is_null(plain)
    if not is_number and (are_views or not _is_text(plain)):
        raise ValueError(
            f"{name!r} holds values of type {of_type}, and what is read are numbers, texts or lists"
        )


def are_vectors(of_type: pa.DataType) -> bool:
    """Whether values of a type are lists of numbers, or tensors of one axis."""
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(of_type, pa.FixedShapeTensorType) and len(of_type.shape) != 1:
        return False
    stored = _stored(of_type)
    if not is_list(stored):
        return False
    number = stored.value_type
    return bool(types.is_floating(number) or types.is_integer(number))


def is_list(of_type: pa.DataType) -> bool:
    """Whether a type is one of lists, of which Arrow has five."""
    import pyarrow.types as types

    return bool(
        types.is_list(of_type)
        or types.is_large_list(of_type)
        or types.is_fixed_size_list(of_type)
        or _is_view(of_type)
    )


def _is_view(of_type: pa.DataType) -> bool:
    """Whether a type is one of lists of which several may share their members."""
    import pyarrow.types as types

    return bool(types.is_list_view(of_type) or types.is_large_list_view(of_type))


def _is_text(of_type: pa.DataType) -> bool:
    import pyarrow.types as types

    return bool(
        types.is_string(of_type)
        or types.is_large_string(of_type)
        or types.is_binary(of_type)
        or types.is_large_binary(of_type)
        or types.is_fixed_size_binary(of_type)
        or _is_text_view(of_type)
    )


def _is_text_view(of_type: pa.DataType) -> bool:
    import pyarrow.types as types

    return bool(types.is_string_view(of_type) or types.is_binary_view(of_type))


def _stored(of_type: pa.DataType) -> pa.DataType:
    """Return the type in which values are stored, of an extension such as tensors of one shape."""
    import pyarrow as pa

    return of_type.storage_type if isinstance(of_type, pa.BaseExtensionType) else of_type


def usage(chunk: pa.Array) -> tuple[int, int]:
    """Return how many values a chunk has, those in its lists included, and their size in bytes.

    Each counts as often as it is used: a few bytes name a text of a megabyte in a dictionary, and a
    list of a million numbers that rows share.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(chunk, pa.ExtensionArray):
        chunk = chunk.storage
    count = len(chunk)
    if isinstance(chunk, pa.DictionaryArray):
        if not _is_text(chunk.dictionary.type):
            return count, LARGEST_NUMBER * count
        used = pa.array(_text_sizes(chunk.dictionary)).take(chunk.indices)
        return count, pc.sum(used).as_py() or 0

    if _is_view(chunk.type):
        members = pc.sum(pc.list_value_length(chunk)).as_py() or 0
        return count + members, WORD * count + LARGEST_NUMBER * members
    if is_list(chunk.type):
        members, size = usage(chunk.flatten())
        return count + members, WORD * count + size
    if _is_text_view(chunk.type):
        return count, WORD * count + int(_text_sizes(chunk).sum())
    return count, int(chunk.nbytes)


def _text_sizes(texts: pa.Array) -> npt.NDArray[np.int64]:
    """Return the size of each text, in bytes."""
    import pyarrow.compute as pc

    if not _is_text_view(texts.type):
        sizes = pc.fill_null(pc.binary_length(texts), 0)
        return np.asarray(sizes.to_numpy(zero_copy_only=False), np.int64)

    # Each view begins with the size, and has four words in all.
    words = np.frombuffer(texts.buffers()[1], "<i4").reshape(-1, 4)
    return words[texts.offset : texts.offset + len(texts), 0].astype(np.int64)


class _Parquet(Table):
    def __init__(self, path: str | os.PathLike[str], content: memoryview, source: Any) -> None:
        import pyarrow.parquet

        super().__init__(path, len(content))
        self._content = content
        self._file = pyarrow.parquet.ParquetFile(source)
        self.schema = self._file.schema_arrow

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        decoded = 0
        for chunk in chunks_of(self._content):
            if chunk.name != name:
                continue

            # A dictionary or runs of equal values make the uncompressed size as small as one likes;
            # the number of values is what takes memory.
            size = chunk.values * ITEM_BYTES.get(chunk.physical_type, 8)
            decoded += max(size, chunk.uncompressed, 0)

        self._growth.check(repr(name), decoded)
        return self._file.iter_batches(batch_size=BATCH_ROWS, columns=[name])  # type: ignore[no-any-return]


class _Arrow(Table):
    """The file format is the stream format between its
    first bytes and a list of offsets, which is not needed.
    """

    def __init__(self, path: str | os.PathLike[str], content: memoryview, source: Any) -> None:
        super().__init__(path, len(content))
        start = source.read(len(ARROW_FILE))
        if start == ARROW_FILE:
            self._start = len(ARROW_FILE)
        elif start.startswith(ARROW_STREAM):
            self._start = 0
        else:
            raise ValueError("not an Arrow file")

        self._source = source
        self.schema = self._open().schema

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        import pyarrow as pa

        self._source.seek(self._start)
        messages = pa.ipc.MessageReader.open_stream(self._source)
        decompressed = sum(map(decompressed_size, messages))
        self._growth.check("its table", decompressed)
        # Only the buffers of this column are decompressed.
        options = pa.ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name)])

        return self._open(options)  # type: ignore[no-any-return]

    def _open(self, options: Any = None) -> Any:
        import pyarrow as pa

        self._source.seek(self._start)
        return pa.ipc.open_stream(self._source, options=options)


# The types of messages that have buffers, in Arrow's Message.fbs.
RECORDS = 3
DICTIONARY = 2


def decompressed_size(message: pa.ipc.Message) -> int:
    """Return the size of the buffers of a message after
    decompression, in bytes, from its headers alone.

    The metadata is a flatbuffer (Arrow's Message.fbs): Message has the fields
    header_type 1 and header 2, RecordBatch has buffers 2 and compression 3,
    DictionaryBatch has a RecordBatch as its data 1. A compressed buffer begins
    with its size after decompression, or with -1 if it is not compressed.
    """
    metadata = memoryview(message.metadata)
    body = message.body
    if body is None:
        return 0

    [root] = struct.unpack_from("<I", metadata, 0)
    kind_at = _field(metadata, root, 1)
    kind = metadata[kind_at] if kind_at else 0
    if kind not in (RECORDS, DICTIONARY):
        return 0

    records = _table(metadata, root, 2)
    if kind == DICTIONARY:
        records = _table(metadata, records, 1)

    if not _field(metadata, records, 3):
        return int(body.size)

    buffers = _table(metadata, records, 2)
    content = memoryview(body)
    size = 0
    [count] = struct.unpack_from("<I", metadata, buffers)

    for number in range(count):
        offset, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * number)
        if length:
            [claimed] = struct.unpack_from("<q", content, offset)
            size += length if claimed < 0 else claimed

    return size


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a table in a flatbuffer; 0 if the table lacks it."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    [length] = struct.unpack_from("<H", metadata, fields)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, fields + at)[0] if at < length else 0
    return table + offset if offset else 0


def _table(metadata: memoryview, table: int, number: int) -> int:
    """Return the position of the table or the list that a field leads to."""
    at = _field(metadata, table, number)
    if not at:
        raise ValueError("its metadata is damaged")
    return at + int(struct.unpack_from("<I", metadata, at)[0])


@contextmanager
def open_table(path: str | os.PathLike[str]) -> Iterator[Table]:
    """Open a .parquet, .arrow, .feather or .ipc file.

    Raises UnreadableFile, also while it is open.
    """
    import pyarrow as pa

    suffix = os.path.splitext(path)[1].lower()
    with open_file(path) as file, reading(path, suffix or "a table"):
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(content))
        try:
            yield (_Parquet if suffix == PARQUET else _Arrow)(path, memoryview(content), source)
        except (pa.ArrowException, struct.error) as error:
            raise ValueError(str(error)) from error
