"""Tables in Parquet and Arrow files, of which one column is read, batch by batch."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from milvus_hubness.basics.files.opening import open_file
from milvus_hubness.basics.files.sizes import reading, require_sane_growth

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

ITEM_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
"""Size of a decoded value of a physical type of Parquet, if it is not 8 bytes."""


class Table:
    """An open table. schema: of its columns."""

    schema: pa.Schema

    def __init__(self, path: str | os.PathLike[str], size: int) -> None:
        self._path = path
        self._size = size

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column.

        Raises UnreadableFile for values that no honest file of this size has.
        """
        import pyarrow as pa

        if self.schema.names.count(name) > 1:
            raise ValueError(f"several columns have the name {name!r}")

        chunks = []
        decoded = 0
        for batch in self._batches(name):
            chunk = batch.column(name)
            # Offsets beyond the values would be read from foreign memory.
            chunk.validate(full=True)
            decoded += _decoded_size(chunk)
            require_sane_growth(self._path, repr(name), decoded, self._size)
            chunks.append(chunk)

        return pa.chunked_array(chunks, self.schema.field(name).type)

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        raise NotImplementedError


def _decoded_size(chunk: pa.Array) -> int:
    """Return the size of the values of a chunk, in bytes: of a dictionary, as often as each of its
    texts is used.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(chunk, pa.DictionaryArray):
        return int(chunk.nbytes)

    # A text of a megabyte can be named a million times by a few bytes each.
    values = chunk.dictionary
    is_text = any(
        is_kind(values.type) for is_kind in (pa.types.is_string, pa.types.is_large_string)
    )
    if not is_text:
        return int(values.nbytes) * max(1, len(chunk))

    return int(pc.sum(pc.binary_length(values).take(chunk.indices).cast("int64")).as_py() or 0)


class _Parquet(Table):
    def __init__(self, path: str | os.PathLike[str], size: int, source: Any) -> None:
        import pyarrow.parquet

        super().__init__(path, size)
        self._file = pyarrow.parquet.ParquetFile(source)
        self.schema = self._file.schema_arrow

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        metadata = self._file.metadata
        decoded = 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                path = column.path_in_schema
                if path != name and not path.startswith(f"{name}."):
                    continue

                # A dictionary or runs of equal values make the uncompressed size as small as one
                # likes; the number of values is what takes memory.
                values = column.num_values * ITEM_BYTES.get(column.physical_type, 8)
                decoded += max(values, column.total_uncompressed_size)

        require_sane_growth(self._path, repr(name), decoded, self._size)
        return self._file.iter_batches(batch_size=BATCH_ROWS, columns=[name])  # type: ignore[no-any-return]


class _Arrow(Table):
    """The file format is the stream format between its
    first bytes and a list of offsets, which is not needed.
    """

    def __init__(self, path: str | os.PathLike[str], size: int, source: Any) -> None:
        super().__init__(path, size)
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
        require_sane_growth(self._path, "its table", decompressed, self._size)
        # Only the buffers of this column are decompressed.
        options = pa.ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name)])

        return self._open(options)  # type: ignore[no-any-return]

    def _open(self, options: Any = None) -> Any:
        import pyarrow as pa

        self._source.seek(self._start)
        return pa.ipc.open_stream(self._source, options=options)


# The kinds of messages that have buffers, in Arrow's Message.fbs.
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
            yield (_Parquet if suffix == PARQUET else _Arrow)(path, len(content), source)
        except (pa.ArrowException, struct.error) as error:
            raise ValueError(str(error)) from error
