"""The columns of a file, whatever its format: vectors, and values such as keys and counts.

One reader for each format, which all give the same:

- a .npy file is one column of vectors; the arrays of a .npz file are its columns,
- Parquet and Arrow are tables, of which a column of lists holds vectors,
- in JSON lines the members of the objects are the columns,
- in CSV a cell holds a vector as text, "[0.1, -0.4]"; a file of numbers alone, or of one vector a
  line, is one column.

Which names stand for queries and keys is in `names`; what the columns mean, their readers know.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import math
import os
import re
import reprlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.bounds import shown
from milvus_hubness.basics.files.arrays import (
    Archive,
    Header,
    open_archive,
    read_npy,
)
from milvus_hubness.basics.files.opening import open_file, size_of
from milvus_hubness.basics.files.sizes import (
    OBJECT_BYTES,
    Growth,
    object_bytes,
    reading,
    require_columns,
)
from milvus_hubness.basics.files.tables import TABLES, LoadedTable, Table, are_vectors, open_table
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

SEPARATORS = ",;\t"
"""What parts the cells of a CSV file."""

MARK = b"\xef\xbb\xbf"
"""The mark of UTF-8 with which files from Windows may begin."""

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
"""A number as spreadsheets write it in most languages but English."""

CELL_BYTES = 4
"""What a cell of a CSV file takes apart from its text, in bytes."""

LONGEST_NUMBER = 9
"""Most digits of the number of a column."""

LOOKED_AT = 1_000
"""Rows that are looked at, whether the line above them is a header."""

MOSTLY = 0.5
"""Share of fractions among many columns from which on whole numbers above them are a header."""

LARGEST_ROW = 64 << 20
"""Maximum size of a row of a CSV file, in bytes."""

LONGEST_NAME = 1_000
"""Largest number of characters of the name of a column."""

MEMBER_BYTES = 6 * OBJECT_BYTES
"""About how many bytes a column of a file of JSON lines takes before it has a value."""

LONGEST_LINE = 4 << 20
"""Largest number of characters of a line, which is in memory as objects of Python before it is
looked at. A vector of 65,536 numbers has some 1.4 million.
"""


class Columns(ABC):
    """The columns of a source. names: of them, in the order of the source."""

    noun = "column"
    """What messages call one of them."""

    vector_noun = "vector column"
    """What messages call one that holds vectors."""

    def __init__(self, source: str, names: Sequence[str]) -> None:
        self.source = source
        self.names = list(names)
        longest = max(map(len, self.names), default=0)
        if longest > LONGEST_NAME:
            # Messages name columns.
            raise UnreadableFile(
                f"{source} has a column whose name has {longest:,} characters, and at most "
                f"{LONGEST_NAME:,} are read: rename it"
            )
        counts = Counter(self.names)
        self.repeated = frozenset(name for name, count in counts.items() if count > 1)
        """Names of several columns, of which none can be read."""

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

        self._archive.growth.add(repr(name), OBJECT_BYTES * math.prod(shape))
        return list(self._archive.read(name).tolist())

    def holds_vectors(self, name: str) -> bool:
        return len(self._archive.header(name).shape) == 2

    def vectors(self, name: str) -> npt.NDArray[Any]:
        _expect_vectors(self.source, self._archive.header(name))
        return self._archive.read(name)


class TableColumns(Columns):
    """The columns of a Parquet or Arrow file, or of a frame."""

    def __init__(self, source: str, table: Table) -> None:
        super().__init__(source, table.schema.names)
        self._table = table

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return list(self._table.column(name, as_objects=True).to_pylist())

    def holds_vectors(self, name: str) -> bool:
        return name not in self.repeated and are_vectors(self._table.schema.field(name).type)

    def vectors(self, name: str) -> npt.NDArray[Any]:
        if name not in self.repeated:
            cells = self._table.schema.field(name).type
            if not are_vectors(cells):
                raise InvalidInput(
                    f"{name!r} of {self.source} must hold lists of numbers, not {cells}"
                )
        return _stacked(self.source, name, self._table.column(name))


class _Member:
    """The values of a member of the objects of a file, and the rows that have it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.rows = array("q")


class _LineColumns(Columns):
    """The members of the objects of a file of JSON lines.

    lines: the number of the line of each row.
    """

    def __init__(self, source: str, members: Mapping[str, _Member], lines: Sequence[int]) -> None:
        super().__init__(source, list(members))
        self._members = members
        self._lines = lines

    def place(self, row: int) -> str:
        return f"line {self._lines[row]}"

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return [
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in self._cells(name)
        ]

    def holds_vectors(self, name: str) -> bool:
        value = self._members[name].values[0]
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
        member = self._members.get(name, _Member())
        if len(member.rows) < len(self._lines):
            is_without = np.ones(len(self._lines), np.bool_)
            is_without[np.array(member.rows, np.int64)] = False
            without = np.asarray(self._lines)[is_without].tolist()
            raise InvalidInput(
                f"{self.source} has no {name!r} in line {name_some(without)}, but in others: add it"
            )
        return member.values


class _CsvColumns(Columns):
    """The columns of a CSV file, whose cells are texts.

    growth: of what is built of them.
    """

    def __init__(self, source: str, names: Sequence[str], table: pa.Table, growth: Growth) -> None:
        super().__init__(source, names)
        self._table = table
        self._growth = growth
        self._numbers = {name: number for number, name in enumerate(names)}

    def place(self, row: int) -> str:
        return f"row {row}, not counting the header"

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        cells = self._cells(name)
        if not may_be_lists:
            return cells
        return [self._list_in(cell) for cell in cells]

    def numbers(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return [
            list(map(_number_in, value)) if isinstance(value, list) else _number_in(value)
            for value in self.values(name, may_be_lists=may_be_lists)
        ]

    def holds_vectors(self, name: str) -> bool:
        return name not in self.repeated and _is_vector_text(self._first(name))

    def vectors(self, name: str) -> npt.NDArray[Any]:
        rows = []
        for row, cell in enumerate(self._cells(name)):
            if "..." in cell:
                raise InvalidInput(
                    f"{self._shown(name)} has a vector that NumPy has cut short by '...' "
                    f"({self.place(row)}): save the vectors with np.save"
                )
            try:
                # In float64, which no number of the text exceeds that float32 could hold.
                numbers = np.array(_number_texts(cell), np.float64)
            except ValueError:
                raise InvalidInput(
                    f"{self._shown(name)} must hold lists of numbers such as "
                    f'"[0.1, -0.4]", not {reprlib.repr(cell)} ({self.place(row)})'
                ) from None
            self._growth.add(repr(name), object_bytes(numbers) + OBJECT_BYTES)
            rows.append(numbers)
        return _of_rows(self.source, name, rows)

    def why_no_vectors(self) -> str:
        numeric = sum(_is_number_text(self._first(name)) for name in set(self.names))
        if numeric < WIDE:
            return super().why_no_vectors()
        return (
            f"has no {self.vector_noun}, but {numeric} columns of numbers: write the numbers of a "
            'row into one cell, "[0.1, -0.4]", or save the vectors with np.save'
        )

    def _shown(self, name: str) -> str:
        return f"{name!r} of {self.source}"

    def _first(self, name: str) -> str:
        """Return the first cell of a column that is not empty; empty if all are."""
        texts = (str(cell.as_py() or "") for cell in self._table.column(self._numbers[name]))
        return next(filter(str.strip, texts), "")

    def _cells(self, name: str) -> list[str]:
        if name in self.repeated:
            raise InvalidInput(f"{self.source}: several columns have the name {name!r}")
        if name not in self._numbers:
            raise InvalidInput(f"{self.source} has no column {name!r}: add it")
        cells = self._table.column(self._numbers[name])
        self._growth.add(repr(name), OBJECT_BYTES * len(cells) + cells.nbytes)
        return [cell or "" for cell in cells.to_pylist()]

    def _list_in(self, text: str) -> Any:
        """Return the list in a text such as "[12, 17]" or "['a', 'b']", and others as they are."""
        if len(text) > LONGEST_LINE:
            raise InvalidInput(
                f"{self.source} has a list of more than {LONGEST_LINE:,} characters: write a row "
                "for each of its values"
            )
        value = _list_in(text)
        self._growth.add("its lists", object_bytes(value))
        return value


class _CsvVectors(_CsvColumns):
    """A CSV file of vectors as texts without a header: one vector a line."""

    def __init__(self, source: str, table: pa.Table, growth: Growth) -> None:
        super().__init__(source, [ONLY], table, growth)

    def place(self, row: int) -> str:
        return f"row {row}"

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        raise InvalidInput(f"{self.source} has vectors alone, and no column {name!r}")

    def _shown(self, name: str) -> str:
        return self.source


class _CsvNumbers(Columns):
    """A CSV file of numbers alone, as `np.savetxt` and frames write it: one vector a line."""

    def __init__(self, source: str, table: pa.Table, separator: str, growth: Growth) -> None:
        super().__init__(source, [ONLY])
        self._table = table
        self._separator = separator
        self._growth = growth

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        raise InvalidInput(f"{self.source} has numbers alone, and no column {name!r}")

    def holds_vectors(self, name: str) -> bool:
        return True

    def vectors(self, name: str) -> npt.NDArray[Any]:
        import pyarrow.compute as pc

        shape = (self._table.num_rows, self._table.num_columns)
        self._growth.add("its vectors", np.dtype(np.float64).itemsize * math.prod(shape))
        vectors = np.empty(shape, np.float64)
        for number in range(self._table.num_columns):
            cells = self._table.column(number)
            if self._separator != ",":
                cells = pc.replace_substring(cells, ",", ".")
            try:
                vectors[:, number] = cells.cast("float64").to_numpy()
            except ValueError as error:
                reason = str(error).splitlines()[0]
                raise InvalidInput(f"{self.source} must have numbers alone ({reason})") from None
        return vectors


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
    return TableColumns("the frame", LoadedTable(table))


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
        yield _read_json_lines(path)
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


class _Unpacked(io.RawIOBase):
    """What a file of gzip holds, as far as it was read. Raises UnreadableFile if it grows too much."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._unpacked = gzip.GzipFile(fileobj=file)
        self._growth = Growth(path, size_of(file))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is something, and return its size in bytes."""
        size = self._unpacked.readinto(buffer)
        self._growth.add("its content", size)
        return size


def _content(path: Path, file: BinaryIO) -> BinaryIO:
    """Return the content of an open text, decompressed as it is read if its name ends in .gz.

    Raises UnreadableFile, and OSError, EOFError, which its reading raises too.
    """
    is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    file.seek(0)
    if path.name.lower().endswith(GZIP):
        return io.BufferedReader(_Unpacked(path, file), PACKED_BLOCK)
    if is_packed:
        raise UnreadableFile(f"{path}: is compressed by gzip: name it {path.name}{GZIP}")
    return file


class Text:
    """An open text.

    growth: of what is built of its lines.
    """

    def __init__(self, path: Path, content: TextIO, size: int) -> None:
        self._path = path
        self._content = content
        self.growth = Growth(path, size)

    def lines(self, longest: int = LONGEST_LINE) -> Iterator[tuple[int, str]]:
        """Yield the lines that are not blank, with their numbers.

        longest: how many characters a line may have. Raises UnreadableFile.
        """
        number = 0
        while line := self._content.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise UnreadableFile(
                    f"{self._path}: line {number} has more than {longest:,} characters: this is "
                    "another kind of file"
                )
            if line.strip():
                yield number, line


@contextmanager
def open_text(path: Path) -> Iterator[Text]:
    """Open a text, compressed or not. Raises UnreadableFile, also while it is read."""
    # Files from Windows may begin with a mark of their encoding.
    with (
        open_file(path) as file,
        reading(path, format_of(path) or "a text"),
        io.TextIOWrapper(_content(path, file), "utf-8-sig") as text,
    ):
        yield Text(path, text, os.stat(path).st_size)


def _read_json_lines(path: Path) -> Columns:
    """Return the columns of a file of JSON lines. Raises UnreadableFile."""
    columns: dict[str, _Member] = {}
    lines = array("q")
    with open_text(path) as text:
        for number, line in text.lines():
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

            size = lines.itemsize
            for name, value in members.items():
                if name not in columns:
                    size += MEMBER_BYTES + len(name)
                    columns[name] = _Member()
                    require_columns(path, len(columns))
                compact = _compact(value)
                # And a reference to the value, and the number of its row.
                size += object_bytes(compact) + 2 * lines.itemsize
                columns[name].values.append(compact)
                columns[name].rows.append(len(lines))
            lines.append(number)
            text.growth.add(f"its first {number:,} lines", size)

    if not lines:
        raise UnreadableFile(f"{path}: has no lines: create it again")
    return _LineColumns(str(path), columns, lines)


def _compact(value: Any) -> Any:
    """Return a long list of numbers as an array, and any other value as it is."""
    if not (isinstance(value, list) and len(value) >= LONG_LIST and all(map(_is_number, value))):
        return value
    try:
        # Lists of whole numbers may be keys, which need all their digits.
        return np.array(value, np.float64 if any(map(_is_fraction, value)) else np.int64)
    except OverflowError:
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float)


def _read_csv(path: Path) -> Columns:
    """Return the columns of a CSV file. Raises UnreadableFile, ValueError, OSError."""
    with naming_extras():
        import pyarrow.csv  # noqa: F401

    with open_file(path) as file:
        growth = Growth(path, size_of(file))
        growth.check("its content", size_of(file))
        # From memory: pyarrow reads ahead on a thread, which a closed file of Python would crash.
        content = io.BytesIO()
        stream = _content(path, file)
        while block := stream.read(PACKED_BLOCK):
            growth.add("its content", len(block))
            content.write(block)

    content.seek(0)
    first = _first_line(content)
    unquoted = re.sub(r'"[^"]*"', "", first)
    # Before there is an object for each.
    require_columns(path, 1 + max(map(unquoted.count, SEPARATORS)))
    separator = _separator_of(unquoted)
    cells = _cells_of(first, separator)
    names = _names_in(path, cells, separator)
    start = content.tell() if names else len(MARK) * content.getvalue().startswith(MARK)
    rows = content.getbuffer()[start:]
    growth.add("its cells", CELL_BYTES * _count_of((separator, "\n"), rows))
    table = _table_of(rows, separator, len(cells))

    if names and not _are_numbers(names, separator):
        return _CsvColumns(str(path), names, table, growth)
    if not names and not _are_numbers(cells, separator):
        return _CsvVectors(str(path), table, growth)
    if names and names[0] == "":
        # A frame writes its index as a first column without a name.
        table = table.drop(["0"])
    elif names:
        _expect_fractions(path, first, table)
    return _CsvNumbers(str(path), table, separator, growth)


def _separator_of(unquoted: str) -> str:
    """Return what parts the cells of a line of a CSV file, of which what is quoted was left out."""
    for separator in SEPARATORS.replace(",", ""):
        # Of numbers with decimal commas, a line has more commas than separators.
        cells = list(map(str.strip, unquoted.split(separator)))
        if len(cells) > 1 and _are_numbers(cells, separator):
            return separator
    return max(SEPARATORS, key=unquoted.count)


def _first_line(content: BinaryIO) -> str:
    """Return the first line of a CSV file that is not blank.

    Raises ValueError.
    """
    while block := content.readline(LARGEST_ROW):
        # Files from Windows may begin with a mark of their encoding.
        line = block.decode("utf-8-sig")
        if line.strip():
            return line.rstrip("\r\n")
    raise ValueError("it has no lines")


def _cells_of(line: str, separator: str) -> list[str]:
    """Return the cells of a line of a CSV file. Raises ValueError."""
    try:
        [cells] = csv.reader([line], delimiter=separator)
    except csv.Error as error:
        raise ValueError(f"its first line has no names of columns: {error}") from None
    return [cell.strip() for cell in cells]


def _names_in(path: Path, cells: list[str], separator: str) -> list[str]:
    """Return the names of the columns in the first line of a CSV file; none if it has a vector.

    Raises UnreadableFile for a first line with a vector among other cells.
    """
    if _are_numbers(cells, separator):
        return cells if _are_numbered(cells) else []
    if not any(map(_is_vector_text, cells)):
        return cells
    if len(cells) > 1:
        raise UnreadableFile(
            f"{path}: has a vector and no names of columns in its first line: add a line with "
            "names, such as key,vector"
        )
    return []


def _are_numbers(cells: Sequence[str], separator: str) -> bool:
    """Whether cells are numbers alone, or those of a header that frames write: it may begin with
    the empty name of their index.
    """
    numbers = cells[1:] if cells[0] == "" and len(cells) > 1 else cells
    if len(numbers) < len(cells) and not _are_numbered(cells):
        return False
    return all(_is_number_text(_with_point(cell, separator)) for cell in numbers)


def _are_numbered(cells: Sequence[str]) -> bool:
    """Whether cells number columns: from 0 or 1 on, or, of many columns, some of these numbers."""
    numbers = cells[1:] if cells[0] == "" else cells
    if len(numbers) < 2 or not all(map(str.isdecimal, numbers)):
        return False
    if len(max(numbers, key=len)) > LONGEST_NUMBER:
        return False
    values = list(map(int, numbers))
    steps = {after - before for before, after in pairwise(values)}
    return (values[0] in (0, 1) and steps == {1}) or (len(values) >= WIDE and min(steps) > 0)


def _expect_fractions(path: Path, first: str, rows: pa.Table) -> None:
    """Raise UnreadableFile unless the rows below a line 0, 1, 2 … are of another kind.

    If they have whole numbers too, that may be their first vector, and is a header only if they are
    fractions.
    """
    import pyarrow.compute as pc

    first_rows = rows.slice(0, LOOKED_AT)
    has_fraction = [
        pc.sum(pc.match_substring_regex(column, r"[.,eE]")).as_py() or 0
        for column in first_rows.columns
    ]
    share = sum(has_fraction) / max(1, first_rows.num_rows * first_rows.num_columns)
    # A single vector such as 0, 1 is soon among a few columns.
    if share < (MOSTLY if rows.num_columns >= WIDE else 1):
        raise UnreadableFile(
            f"{path}: its first line, {shown(first)}, may number the columns or be a vector: delete "
            "it in the first case, and write its numbers as 0.0 in the second"
        )


def _count_of(texts: Sequence[str], content: memoryview) -> int:
    """Return how often one of these characters is in a content."""
    blocks = (
        bytes(content[start : start + PACKED_BLOCK])
        for start in range(0, len(content), PACKED_BLOCK)
    )
    return sum(block.count(text.encode()) for block in blocks for text in texts)


def _table_of(rows: memoryview, separator: str, width: int) -> pa.Table:
    """Return the cells of a CSV file as texts, in columns "0", "1" and so on. Raises ValueError."""
    import pyarrow as pa
    import pyarrow.csv

    # A repeated name would make all of them unreadable, also those that nobody reads.
    numbers = list(map(str, range(width)))
    if not len(rows) or np.frombuffer(rows, np.uint8).max() <= ord(" "):
        return pa.table({number: pa.array([], pa.string()) for number in numbers})

    options = {
        "read_options": pa.csv.ReadOptions(
            column_names=numbers,
            use_threads=False,
            # A row has to be within a block.
            block_size=min(LARGEST_ROW, max(PACKED_BLOCK, len(rows))),
        ),
        "parse_options": pa.csv.ParseOptions(
            delimiter=separator, newlines_in_values=True, ignore_empty_lines=True
        ),
        "convert_options": pa.csv.ConvertOptions(
            column_types=dict.fromkeys(numbers, pa.string()), strings_can_be_null=False
        ),
    }
    try:
        return pa.csv.read_csv(pa.BufferReader(pa.py_buffer(rows)), **options)
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _with_point(text: str, separator: str) -> str:
    """Return a number with a decimal point, also one with a comma where this parts no cells."""
    return text.replace(",", ".") if separator != "," and DECIMAL_COMMA.fullmatch(text) else text


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
    """Return the texts of the numbers in "[0.1, -0.4]", "0.1 -0.4", "0.1;-0.4" or "[0,1; -0,4]".

    Raises ValueError for an empty one, and for one number with a decimal comma.
    """
    stripped = text.strip()
    inner = stripped.strip("[]()").strip()
    if ";" in inner:
        # Between numbers with decimal commas are semicolons.
        parts = [_with_point(part.strip(), ";") for part in inner.removesuffix(";").split(";")]
    elif "," in inner:
        if DECIMAL_COMMA.fullmatch(stripped):
            raise ValueError("one number")
        parts = list(map(str.strip, inner.removesuffix(",").split(",")))
    else:
        parts = inner.split()
    if not inner:
        raise ValueError("no number")
    return parts


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


def _stacked(source: str, name: str, cells: Any) -> npt.NDArray[Any]:
    """Return the lists of numbers in a column of Arrow as one array (n, d).

    Raises InvalidInput, EmptyBank, DimensionMismatch.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(cells.type, pa.BaseExtensionType):
        # Tensors of one shape are lists of one length.
        chunks = [chunk.storage for chunk in cells.chunks]
        cells = pa.chunked_array(chunks, cells.type.storage_type)
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
