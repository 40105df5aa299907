"""The columns of a file, whatever its format: vectors, and values such as keys and counts.

One reader for each format, which all give the same:

- a .npy file is one column of vectors; the arrays of a .npz file are its columns,
- Parquet and Arrow are tables, of which a column of lists holds vectors,
- in JSON lines the members of the objects are the columns,
- in CSV a cell holds a vector as text, "[0.1, -0.4]"; a file of numbers alone is one column.

Which names stand for queries and keys is in `names`; what the columns mean, their readers know.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.arrays import (
    Archive,
    Header,
    open_archive,
    read_npy,
)
from milvus_hubness.basics.files.opening import open_file, size_of
from milvus_hubness.basics.files.sizes import reading, require_memory, require_sane_growth
from milvus_hubness.basics.files.tables import TABLES, Table, open_table
from milvus_hubness.basics.requirements import naming_extras
from milvus_hubness.errors import (
    DimensionMismatch,
    EmptyBank,
    InvalidInput,
    NonFiniteVectors,
    UnreadableFile,
    name_some,
)

if TYPE_CHECKING:
    import pyarrow as pa

ARRAY = ".npy"
ARCHIVE = ".npz"
JSON_LINES = (".jsonl", ".ndjson")
CSV = ".csv"
GZIP = ".gz"
PACKED = tuple(f"{suffix}{GZIP}" for suffix in (CSV, *JSON_LINES))
"""Texts may be compressed by gzip; the other formats compress themselves, or hardly shrink."""

FORMATS = (ARRAY, ARCHIVE, *TABLES, CSV, *JSON_LINES, *PACKED)
"""The suffixes of files with columns."""

ONLY = ""
"""The name of the only column of a file without names."""

GZIP_MAGIC = b"\x1f\x8b"
PACKED_BLOCK = 1 << 20
"""Bytes that are decompressed at a time, before their size is looked at."""

LONG_LIST = 8
"""Numbers from which on a list of a JSON line becomes an array, which takes a quarter of its memory."""

WIDE = 8
"""Columns of numbers from which on a CSV file looks like vectors with a column for each dimension."""

LARGEST_ROW = 64 << 20
"""Maximum size of a row of a CSV file, in bytes."""


class Columns(ABC):
    """The columns of a source. names: of them, in the order of the source."""

    noun = "column"
    """What messages call one of them."""

    vector_noun = "vector column"
    """What messages call one that holds vectors."""

    def __init__(self, source: str, names: Sequence[str]) -> None:
        self.source = source
        self.names = list(names)

    @abstractmethod
    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        """Return the values of a column, one for each row.

        may_be_lists: whether a row may have several. Raises InvalidInput, UnreadableFile.
        """

    @abstractmethod
    def holds_vectors(self, name: str) -> bool:
        """Whether the rows of a column are lists of numbers."""

    @abstractmethod
    def vectors(self, name: str) -> npt.NDArray[Any]:
        """Return a column of lists of numbers as one array (n, d).

        Raises InvalidInput, EmptyBank, DimensionMismatch, UnreadableFile, which name the place.
        """

    def numbers(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        """Return the values of a column as `values` does, those of a text as numbers."""
        return self.values(name, may_be_lists=may_be_lists)

    def place(self, row: int) -> str:
        """Return what messages call a row."""
        return f"row {row}"

    @property
    def vector_names(self) -> list[str]:
        """The names of the columns that hold vectors."""
        return [name for name in self.names if self.holds_vectors(name)]

    def why_no_vectors(self) -> str:
        """Return what a message says of a file without a column of vectors, with the remedy."""
        return f"has no {self.vector_noun}: add one"


class _ArrayColumn(Columns):
    """The one array of a .npy file."""

    noun = vector_noun = "array"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), [ONLY])
        self._path = path

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        raise InvalidInput(f"{self.source}: a .npy file has one array and no column {name!r}")

    def holds_vectors(self, name: str) -> bool:
        return True

    def vectors(self, name: str) -> npt.NDArray[Any]:
        return read_npy(self._path, lambda header: _expect_vectors(self.source, header))


class ArchiveColumns(Columns):
    """The arrays of a .npz file, whose rows are those along their first axis."""

    noun = vector_noun = "array"

    def __init__(self, path: Path, archive: Archive) -> None:
        super().__init__(str(path), archive.names)
        self._archive = archive

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        shape = self._archive.header(name).shape
        if not 1 <= len(shape) <= (2 if may_be_lists else 1):
            wanted = "1-D or 2-D" if may_be_lists else "1-D, one value a query"
            raise InvalidInput(f"{name!r} of {self.source} must be {wanted}, but has shape {shape}")
        return list(self._archive.read(name).tolist())

    def holds_vectors(self, name: str) -> bool:
        return len(self._archive.header(name).shape) == 2

    def vectors(self, name: str) -> npt.NDArray[Any]:
        _expect_vectors(self.source, self._archive.header(name))
        return self._archive.read(name)


class TableColumns(Columns):
    """The columns of a Parquet or Arrow file, or of a frame."""

    def __init__(self, source: str, table: Table | pa.Table) -> None:
        super().__init__(source, table.schema.names)
        self._table = table

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return list(self._table.column(name).to_pylist())

    def holds_vectors(self, name: str) -> bool:
        import pyarrow.types as types

        if self.names.count(name) > 1:
            return False
        cells = self._table.schema.field(name).type
        if not _is_list(cells):
            return False
        number = cells.value_type
        return bool(types.is_floating(number) or types.is_integer(number))

    def vectors(self, name: str) -> npt.NDArray[Any]:
        cells = self._table.column(name)
        if not _is_list(cells.type):
            raise InvalidInput(
                f"{name!r} of {self.source} must hold lists of numbers, not {cells.type}"
            )
        return _stacked(self.source, name, cells)


class _LineColumns(Columns):
    """The members of the objects of a file of JSON lines."""

    def __init__(self, source: str, lines: Sequence[tuple[int, dict[str, Any]]]) -> None:
        names = dict.fromkeys(name for _, members in lines for name in members)
        super().__init__(source, list(names))
        self._lines = lines

    def place(self, row: int) -> str:
        return f"line {self._lines[row][0]}"

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return [
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in self._cells(name)
        ]

    def holds_vectors(self, name: str) -> bool:
        value = next((members[name] for _, members in self._lines if name in members), None)
        if isinstance(value, np.ndarray):
            return True
        # A list of one number may be a key.
        return isinstance(value, list) and len(value) > 1 and all(map(_is_number, value))

    def vectors(self, name: str) -> npt.NDArray[Any]:
        rows = self._cells(name)
        for row, value in enumerate(rows):
            is_list = isinstance(value, np.ndarray) or (
                isinstance(value, list) and all(map(_is_number, value))
            )
            if not is_list:
                raise InvalidInput(
                    f"{name!r} of {self.source} must hold lists of numbers, not "
                    f"{reprlib.repr(value)} ({self.place(row)})"
                )
        return _of_rows(self.source, name, rows)

    def _cells(self, name: str) -> list[Any]:
        without = [number for number, members in self._lines if name not in members]
        if without:
            raise InvalidInput(
                f"{self.source} has no {name!r} in line {name_some(without)}, but in others: add it"
            )
        return [members[name] for _, members in self._lines]


class _CsvColumns(Columns):
    """The columns of a CSV file with a header, whose cells are texts."""

    def __init__(self, source: str, table: pa.Table) -> None:
        super().__init__(source, table.schema.names)
        self._table = table

    def place(self, row: int) -> str:
        return f"row {row}, not counting the header"

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        cells = self._cells(name)
        if not may_be_lists:
            return cells
        return [_list_in(cell) for cell in cells]

    def numbers(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return [
            list(map(_number_in, value)) if isinstance(value, list) else _number_in(value)
            for value in self.values(name, may_be_lists=may_be_lists)
        ]

    def holds_vectors(self, name: str) -> bool:
        return self.names.count(name) == 1 and _is_vector_text(self._first(name))

    def vectors(self, name: str) -> npt.NDArray[Any]:
        rows = []
        for row, cell in enumerate(self._cells(name)):
            if "..." in cell:
                raise InvalidInput(
                    f"{name!r} of {self.source} has a vector that NumPy has cut short by '...' "
                    f"({self.place(row)}): save the vectors with np.save"
                )
            try:
                # In float64, which no number of the text exceeds that float32 could hold.
                rows.append(np.array(_number_texts(cell), np.float64))
            except ValueError:
                raise InvalidInput(
                    f"{name!r} of {self.source} must hold lists of numbers such as "
                    f'"[0.1, -0.4]", not {reprlib.repr(cell)} ({self.place(row)})'
                ) from None
        return _of_rows(self.source, name, rows)

    def why_no_vectors(self) -> str:
        numeric = sum(_is_number_text(self._first(name)) for name in set(self.names))
        if numeric < WIDE:
            return super().why_no_vectors()
        return (
            f"has no {self.vector_noun}, but {numeric} columns of numbers: write the numbers of a "
            'row into one cell, "[0.1, -0.4]", or save the vectors with np.save'
        )

    def _first(self, name: str) -> str:
        """Return the first cell of a column that is not empty; empty if all are."""
        column = self._table.columns[self.names.index(name)]
        texts = (str(cell.as_py() or "") for cell in column)
        return next(filter(str.strip, texts), "")

    def _cells(self, name: str) -> list[str]:
        if self.names.count(name) > 1:
            raise InvalidInput(f"{self.source}: several columns have the name {name!r}")
        return [cell or "" for cell in self._table.column(name).to_pylist()]


class _CsvNumbers(Columns):
    """A CSV file of numbers alone, as `np.savetxt` and frames write it: one vector a line."""

    def __init__(self, source: str, table: pa.Table) -> None:
        super().__init__(source, [ONLY])
        self._table = table

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        raise InvalidInput(f"{self.source} has numbers alone, and no column {name!r}")

    def holds_vectors(self, name: str) -> bool:
        return True

    def vectors(self, name: str) -> npt.NDArray[Any]:
        columns = []
        for column in self._table.columns:
            try:
                columns.append(column.cast("float64").to_numpy())
            except ValueError as error:
                reason = str(error).splitlines()[0]
                raise InvalidInput(f"{self.source} must have numbers alone ({reason})") from None
        return np.column_stack(columns)


def columns_of_frame(frame: Any, noun: str) -> Columns:
    """Return the columns of a frame of pandas, Polars or another library that exports to Arrow.

    noun: what messages call it. Raises InvalidInput, and MissingExtra without pyarrow.
    """
    with naming_extras():
        import pyarrow as pa

    try:
        table = pa.table(frame)
    # The last one is of a whole number beyond 64 bits.
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"{noun} must be a frame of pandas, Polars or Arrow ({reason})"
        ) from error
    return TableColumns("the frame", table)


@contextmanager
def open_columns(
    path: str | os.PathLike[str], noun: str = "a file of vectors"
) -> Iterator[Columns]:
    """Open a file of one of the FORMATS.

    noun: what messages call it, with its verb's singular. Raises UnreadableFile, also for what its
    columns raise while it is open, and MissingExtra where a table needs pyarrow.
    """
    path = Path(path)
    suffix = format_of(path)
    if suffix == ARRAY:
        yield _ArrayColumn(path)
    elif suffix == ARCHIVE:
        with open_archive(path) as archive:
            yield ArchiveColumns(path, archive)
    elif suffix in TABLES:
        with open_table(path) as table:
            yield TableColumns(str(path), table)
    elif suffix in (*JSON_LINES, *PACKED) and CSV not in suffix:
        yield _LineColumns(str(path), read_json_lines(path))
    elif suffix in (CSV, f"{CSV}{GZIP}"):
        with reading(path, suffix):
            yield _read_csv(path)
    else:
        # A missing file, or a pipe, is the fault to name.
        with open_file(path):
            pass
        raise UnreadableFile(unknown_kind(path, noun, FORMATS))


def format_of(path: Path) -> str:
    """Return the suffix that says how a file is read, in small letters, with .gz."""
    name = path.name.lower()
    suffix = os.path.splitext(name)[1]
    if suffix == GZIP:
        return f"{os.path.splitext(name.removesuffix(GZIP))[1]}{GZIP}"
    return suffix


def unknown_kind(path: Path, noun: str, formats: Sequence[str]) -> str:
    """Return the message about a file that is of none of these formats."""
    suffix = format_of(path)
    if suffix.endswith(GZIP) and suffix.removesuffix(GZIP) in formats:
        return f"{path}: only CSV and JSON lines are read from gzip: gunzip it first"
    return (
        f"{path}: of an unknown kind; {noun} is a {', '.join(formats)} file: save it as one of them"
    )


# -- texts ----------------------------------------------------------------------------------------


def _content(path: Path, file: BinaryIO) -> BinaryIO:
    """Return the content of an open text, decompressed if its name ends in .gz.

    Raises UnreadableFile, OSError, EOFError.
    """
    is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    file.seek(0)
    if not path.name.lower().endswith(GZIP):
        if is_packed:
            raise UnreadableFile(f"{path}: is compressed by gzip: name it {path.name}{GZIP}")
        return file

    packed = size_of(file)
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=file) as unpacked:
        while block := unpacked.read(PACKED_BLOCK):
            content.write(block)
            require_sane_growth(path, "its content", content.tell(), packed)
    content.seek(0)
    return content


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text that are not blank, with their numbers.

    Raises UnreadableFile.
    """
    # Files from Windows may begin with a mark of their encoding.
    with (
        open_file(path) as file,
        reading(path, format_of(path) or "a text"),
        io.TextIOWrapper(_content(path, file), "utf-8-sig") as text,
    ):
        for number, line in enumerate(text, 1):
            if line.strip():
                yield number, line


def read_json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a file of JSON lines, with their line numbers. Raises UnreadableFile."""
    lines = []
    for number, line in lines_of(path):
        try:
            members = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise UnreadableFile(f"{path}: line {number} is no JSON ({reason})") from None
        if not isinstance(members, dict):
            raise UnreadableFile(
                f"{path}: line {number} is no JSON object with names, such as "
                '{"query": [0.1, -0.4], "key": 17}'
            )
        lines.append((number, {name: _compact(value) for name, value in members.items()}))
    if not lines:
        raise UnreadableFile(f"{path}: has no lines: create it again")
    return lines


def _compact(value: Any) -> Any:
    """Return a long list of fractions as an array, and any other value as it is."""
    # Lists of whole numbers may be keys, which need all their digits.
    is_vector = isinstance(value, list) and len(value) >= LONG_LIST
    if not (is_vector and all(map(_is_number, value)) and any(map(_is_fraction, value))):
        return value
    try:
        return np.array(value, np.float64)
    except OverflowError:
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float)


def _read_csv(path: Path) -> Columns:
    """Return the columns of a CSV file. Raises UnreadableFile, ValueError, OSError."""
    with naming_extras():
        import pyarrow as pa
        import pyarrow.csv

    with open_file(path) as file:
        content = _content(path, file)
        size = content.seek(0, os.SEEK_END)
        require_memory(path, "its content", size)
        content.seek(0)
        separator, header = _header_of(content)
        is_numbers = all(map(_is_number_text, header)) or _is_numbered(header)
        if is_numbers and not _is_numbered(header):
            content.seek(0)
        # From memory: pyarrow reads ahead on a thread, which a closed file of Python would crash.
        rows = content.read()
        if not rows.strip():
            return _CsvColumns(
                str(path), pa.table({name: pa.array([], pa.string()) for name in header})
            )
        source = pa.BufferReader(pa.py_buffer(rows))
        options = {
            "read_options": pa.csv.ReadOptions(
                # A repeated name would make all of them unreadable, also those that nobody reads.
                column_names=[str(number) for number in range(len(header))],
                use_threads=False,
                # A row has to be within a block.
                block_size=min(LARGEST_ROW, max(PACKED_BLOCK, size)),
            ),
            "parse_options": pa.csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, ignore_empty_lines=True
            ),
            "convert_options": pa.csv.ConvertOptions(
                column_types={str(number): pa.string() for number in range(len(header))},
                strings_can_be_null=False,
            ),
        }
        try:
            table = pa.csv.read_csv(source, **options)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from error

    if is_numbers:
        # A frame writes its index as a first column without a name.
        return _CsvNumbers(str(path), table.drop(["0"]) if header[0] == "" else table)
    return _CsvColumns(str(path), table.rename_columns(header))


def _header_of(content: BinaryIO) -> tuple[str, list[str]]:
    """Return the separator of a CSV file and the cells of its first line. Raises ValueError."""
    line = ""
    while not line.strip():
        # Files from Windows may begin with a mark of their encoding.
        block = content.readline(LARGEST_ROW)
        if not block:
            raise ValueError("it has no lines")
        line = block.decode("utf-8-sig")
    plain = re.sub(r'"[^"]*"', "", line)
    separator = max(",;\t", key=plain.count)
    try:
        [cells] = csv.reader([line.rstrip("\r\n")], delimiter=separator)
    except csv.Error as error:
        raise ValueError(f"its first line has no names of columns: {error}") from None
    return separator, [cell.strip() for cell in cells]


def _is_numbered(header: Sequence[str]) -> bool:
    """Whether a header is 0, 1, 2 …, as frames write that of an array, also after an empty name."""
    numbers = header[1:] if header[0] == "" else header
    return len(numbers) > 1 and list(numbers) == list(map(str, range(len(numbers))))


def _is_number_text(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number_in(text: Any) -> Any:
    """Return a text as a number; if it is none, as it is, for whoever checks it."""
    if not isinstance(text, str):
        return text
    try:
        return int(text)
    except ValueError:
        pass
    return float(text) if _is_number_text(text) else text


def _list_in(text: str) -> Any:
    """Return the list in a text such as "[12, 17]" or "['a', 'b']", and any other text as it is."""
    stripped = text.strip()
    if not stripped.startswith("["):
        return stripped
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(stripped)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list):
            return value
    return stripped


def _number_texts(text: str) -> list[str]:
    """Return the texts of the numbers in "[0.1, -0.4]", "0.1 -0.4" or "0.1;-0.4".

    Raises ValueError for an empty one.
    """
    numbers = re.sub(r"[,;]", " ", text.strip().strip("[]()")).split()
    if not numbers:
        raise ValueError("no number")
    return numbers


def _is_vector_text(text: str) -> bool:
    """Whether a text holds at least two numbers, as a vector does."""
    try:
        numbers = _number_texts(text)
    except ValueError:
        return False
    return len(numbers) > 1 and all(
        _is_number_text(number) or number == "..." for number in numbers
    )


# -- vectors --------------------------------------------------------------------------------------


def _expect_vectors(source: str, header: Header) -> None:
    """Raise InvalidInput for an array that has no vectors, before it is read."""
    if header.dtype.kind not in "fiu" and 0 not in header.shape:
        raise InvalidInput(f"the bank from {source} must hold real numbers, not {header.dtype}")
    if len(header.shape) != 2:
        raise InvalidInput(
            f"the bank from {source} must be 2-D, one vector a row, but has shape {header.shape}"
        )


def expect_one_width(widths: npt.ArrayLike, what: str) -> None:
    """Raise DimensionMismatch, which names the first row that is not as wide as row 0."""
    sizes = np.asarray(widths)
    unequal = np.flatnonzero(sizes != sizes[:1])
    if len(unequal):
        row = unequal[0]
        raise DimensionMismatch(
            f"{what} has {sizes[row]} numbers in row {row} and {sizes[0]} in row 0"
        )


def _of_rows(source: str, name: str, rows: Sequence[Any]) -> npt.NDArray[Any]:
    """Return rows of numbers as one array. Raises EmptyBank, DimensionMismatch."""
    if not rows:
        raise EmptyBank(f"{source}: {name!r} has no rows")
    expect_one_width(list(map(len, rows)), f"{source}: {name!r}")
    try:
        return np.array(rows, np.float64)
    # Of a whole number alone: a fraction beyond float64 has become infinity when it was read.
    except OverflowError:
        raise NonFiniteVectors(
            f"{source}: {name!r} has a whole number beyond float64: remove its row"
        ) from None


def _is_list(cells: Any) -> bool:
    import pyarrow.types as types

    return bool(
        types.is_list(cells) or types.is_large_list(cells) or types.is_fixed_size_list(cells)
    )


def _stacked(source: str, name: str, cells: Any) -> npt.NDArray[Any]:
    """Return the lists of numbers in a column of Arrow as one array (n, d).

    Raises InvalidInput, EmptyBank, DimensionMismatch.
    """
    import pyarrow.compute as pc

    if cells.null_count:
        empty = np.flatnonzero(cells.is_null().to_numpy()).tolist()
        raise InvalidInput(f"{source}: {name!r} is null in row {name_some(empty)}")
    if len(cells) == 0:
        raise EmptyBank(f"{source}: {name!r} has no rows")

    # `list_flatten` forgets where a row ends, so all must have one width.
    widths = pc.list_value_length(cells).to_numpy()
    expect_one_width(widths, f"{source}: {name!r}")
    numbers = pc.list_flatten(cells).to_numpy()
    return numbers.reshape(len(cells), widths[0])  # type: ignore[no-any-return]
