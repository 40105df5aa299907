"""Tables in Parquet and Arrow files, of which one column is read, batch by batch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from milvus_hubness.files.opening import open_file, size_of
from milvus_hubness.files.sizes import reading, require_sane_growth

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = ".parquet"
TABLES = (PARQUET, ".arrow", ".feather", ".ipc")
"""The suffixes of files with tables."""
BATCH_ROWS = 1_024
ITEM_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
"""Size of a decoded value of a physical type of Parquet, if it is not 8 bytes."""


class Table:
    """An open table. schema: of its columns."""

    schema: pa.Schema

    def __init__(self, path: str | os.PathLike[str], size: int) -> None:
        self._path, self._size = path, size

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column. Raises UnreadableFile for values that no honest file of this size has."""
        import pyarrow as pa

        if self.schema.names.count(name) > 1:
            raise ValueError(f"several columns have the name {name!r}")
        chunks, decoded = [], 0
        for batch in self._batches(name):
            chunk = batch.column(name)
            # Offsets beyond the values would be read from foreign memory.
            chunk.validate(full=True)
            decoded += chunk.nbytes
            require_sane_growth(self._path, repr(name), decoded, self._size)
            chunks.append(chunk)
        return pa.chunked_array(chunks, self.schema.field(name).type)

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        raise NotImplementedError


class _Parquet(Table):
    def __init__(self, path: str | os.PathLike[str], size: int, source: Any) -> None:
        import pyarrow.parquet

        super().__init__(path, size)
        self._file = pyarrow.parquet.ParquetFile(source)
        self.schema = self._file.schema_arrow

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        metadata, decoded = self._file.metadata, 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for part in map(group.column, range(group.num_columns)):
                if part.path_in_schema == name or part.path_in_schema.startswith(f"{name}."):
                    values = part.num_values * ITEM_BYTES.get(part.physical_type, 8)
                    decoded += max(values, part.total_uncompressed_size)
        require_sane_growth(self._path, repr(name), decoded, self._size)
        return self._file.iter_batches(batch_size=BATCH_ROWS, columns=[name])  # type: ignore[no-any-return]


class _Arrow(Table):
    def __init__(self, path: str | os.PathLike[str], size: int, source: Any) -> None:
        import pyarrow as pa

        super().__init__(path, size)
        self._source = source
        self.schema = self._open(pa.ipc.IpcReadOptions()).schema

    def _batches(self, name: str) -> Iterable[pa.RecordBatch]:
        import pyarrow as pa

        # Only the buffers of this column are decompressed.
        reader = self._open(pa.ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name)]))
        if hasattr(reader, "num_record_batches"):
            return (reader.get_batch(number) for number in range(reader.num_record_batches))
        return reader  # type: ignore[no-any-return]

    def _open(self, options: Any) -> Any:
        """Return a reader of the file format, or of the stream format."""
        import pyarrow as pa

        self._source.seek(0)
        try:
            return pa.ipc.open_file(self._source, options=options)
        except pa.ArrowInvalid:
            self._source.seek(0)
            return pa.ipc.open_stream(self._source, options=options)


@contextmanager
def open_table(path: str | os.PathLike[str]) -> Iterator[Table]:
    """Open a .parquet, .arrow, .feather or .ipc file. Raises UnreadableFile, also while it is open."""
    import pyarrow as pa

    suffix = os.path.splitext(path)[1].lower()
    with open_file(path) as file, reading(path, suffix or "a table"):
        if not size_of(file):
            raise EOFError("the file is empty")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(content))
        try:
            yield (_Parquet if suffix == PARQUET else _Arrow)(path, len(content), source)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from error
