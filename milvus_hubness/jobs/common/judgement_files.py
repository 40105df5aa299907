"""The forms in which judgements come: what their files, folders and frames have in each row.

Nothing is merged here, and no key is looked up: `judgements` does both.
"""

from __future__ import annotations

import io
import json
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.bounds import shown
from milvus_hubness.basics.defaults import (
    GRADE_COLUMN,
    KEY_COLUMN,
    QUERY_COLUMN,
    QUERY_ID_COLUMN,
    QUERY_NUMBER_COLUMN,
    WEIGHT_COLUMN,
)
from milvus_hubness.basics.files.arrays import Archive, open_archive
from milvus_hubness.basics.files.opening import open_file
from milvus_hubness.basics.files.sizes import reading
from milvus_hubness.basics.files.tables import TABLES, Table, open_table
from milvus_hubness.correction.banks.bank import QueryBank, stack_lists
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput, UnreadableFile, name_some
from milvus_hubness.quality.retrieval import checked_weights

if TYPE_CHECKING:
    import pyarrow as pa

ARCHIVE = ".npz"
JSON_LINES = (".jsonl", ".ndjson")
JSON = ".json"
QRELS_SUFFIXES = (".qrels", ".trec", ".tsv", ".txt")

QRELS = "qrels"
"""A file whose name begins so is a qrels file, whatever its suffix; in BEIR, the folder with them."""

TREC_COLUMNS = ("query id", "iteration", "key", "grade")
"""The columns of a TREC qrels file, of which the second one is not used."""

BEIR_COLUMNS = {"query-id": QUERY_ID_COLUMN, "corpus-id": KEY_COLUMN, "score": GRADE_COLUMN}
"""What BEIR and MTEB call the columns of judgements, and what we call them."""

BEIR_QUERIES = "queries.jsonl"
"""The file of a BEIR folder with the ids and the texts of its queries."""

BEIR_ID = "_id"

BEIR_SPLIT = "test"
"""The split of a BEIR folder that is read if there are several."""

VECTOR_SUFFIXES = (ARCHIVE, *TABLES, ".npy")
"""Suffixes of a file `queries` with vectors in a BEIR folder, in the order in which it is looked
for.
"""

VECTORS_OPTION = "--pairs-queries"
"""The option of commands that names the vectors of the queries."""


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """The rows of a source, each about one query."""

    source: str
    """What messages call it: the path of the file, or what it is in memory."""

    keys: Sequence[Sequence[Key]]
    """The keys of each row."""

    grades: Sequence[Sequence[float]]
    """The grades of these keys."""

    queries: QueryBank | None = None
    """The queries; None if rows have ids alone, and the vectors are elsewhere."""

    query_numbers: npt.NDArray[np.int64] | None = None
    """The number of each row's query among these; None if row i is about query i."""

    query_ids: Sequence[str] | None = None
    """The id of the query of each row; None without ids."""

    weights: npt.NDArray[np.float64] | None = None
    """The weight of each row; None without weights."""

    texts: Sequence[str] | None = None
    """The texts of `queries`, if they were read."""

    has_grades: bool = False
    """Whether the source has grades. It is of judges then, and no log in which a repeated row says
    that users sent a query again.
    """

    left_out: Sequence[str] = ()
    """A sentence for each reason for which something of the source is left out."""


@dataclass(frozen=True, eq=False)
class QueryVectors:
    """Vectors of queries by id."""

    source: str
    """What messages call it."""

    ids: Sequence[str]
    """Each of them once."""

    queries: QueryBank
    """The query of each id."""

    texts: Sequence[str] | None = None
    """The text of each query, if it was read."""


def read_rows(path: Path, text_column: str | None = None) -> JudgedRows:
    """Return the rows of a file of judgements. Raises UnreadableFile, InvalidInput."""
    if path.is_dir():
        path = qrels_of_folder(path)
    if path.suffix.lower() == JSON:
        return _read_dictionary(path)
    if _is_qrels(path):
        return _read_qrels(path)
    with _open_columns(path) as columns:
        return columns.rows(text_column)


def rows_of_frame(frame: Any, text_column: str | None = None) -> JudgedRows:
    """Return the rows of a frame of pandas, Polars or another library that exports to Arrow.

    Raises InvalidInput.
    """
    import pyarrow as pa

    try:
        table = pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"the judgements must be a frame of pandas, Polars or Arrow ({reason})"
        ) from error
    return _TableColumns("the frame", table).rows(text_column)


def rows_of_lists(
    queries: QueryBank,
    keys: Sequence[Any] | npt.NDArray[Any],
    grades: Sequence[Any] | npt.NDArray[Any] | None,
    weights: npt.ArrayLike | None,
    ids: Sequence[Any] | None,
) -> JudgedRows:
    """Return the rows of values in memory, as `Judgements.of` takes them. Raises InvalidInput."""
    given = {KEY_COLUMN: keys, GRADE_COLUMN: grades, QUERY_ID_COLUMN: ids}
    columns = _ListColumns(
        queries, {name: values for name, values in given.items() if values is not None}
    )
    rows = columns.rows(None)
    return (
        rows if weights is None else replace(rows, weights=checked_weights(weights, len(rows.keys)))
    )


def read_query_vectors(
    path: Path, text_column: str | None = None, ids: Sequence[str] | None = None
) -> QueryVectors:
    """Return the vectors of a file with `query_id` and `query`.

    ids: those of its rows, if it has none. Raises UnreadableFile, InvalidInput.
    """
    if path.suffix.lower() == ".npy":
        if ids is None:
            raise InvalidInput(f"{path} has no {QUERY_ID_COLUMN!r}: save both in an .npz file")
        return one_of_each(QueryVectors(str(path), ids, QueryBank.load(path)))

    with _open_columns(path) as columns:
        has_ids = columns.has(QUERY_ID_COLUMN)
        if has_ids or ids is None:
            ids = columns.query_ids()
        queries = columns.load_queries()
        texts = None
        if text_column is not None and columns.has(text_column):
            texts = list(map(str, columns.read(text_column)))
    return one_of_each(QueryVectors(columns.source, ids, queries, texts))


NAMED = 3
"""Most ids or keys that a message names."""


def some_of(names: Sequence[object]) -> str:
    """Return the first few ids or keys for a message, whatever a file has in them."""
    return name_some(list(map(shown, names)), NAMED)


def one_of_each(vectors: QueryVectors) -> QueryVectors:
    """Return the vectors if each has an id of its own. Raises InvalidInput."""
    if len(vectors.ids) != len(vectors.queries):
        raise InvalidInput(
            f"{vectors.source} has {len(vectors.queries)} vectors for {len(vectors.ids)} query ids"
        )
    repeated = [name for name, count in Counter(vectors.ids).items() if count > 1]
    if repeated:
        raise InvalidInput(
            f"{vectors.source} has several vectors of the query ids {some_of(repeated)}: "
            "keep one of each"
        )
    return vectors


# -- BEIR folders ---------------------------------------------------------------------------------


def qrels_of_folder(folder: Path) -> Path:
    """Return the qrels of a BEIR folder. Raises UnreadableFile, InvalidInput."""
    splits = sorted((folder / QRELS).glob("*.tsv"))
    if not splits:
        raise UnreadableFile(
            f"{folder}: is a folder: name a file, or a BEIR folder, which has {QRELS}/"
            f"{BEIR_SPLIT}.tsv"
        )
    by_name = {path.stem: path for path in splits}
    if BEIR_SPLIT in by_name:
        return by_name[BEIR_SPLIT]
    if len(splits) > 1:
        raise InvalidInput(
            f"{folder} has no {QRELS}/{BEIR_SPLIT}.tsv: name one of "
            f"{', '.join(str(path) for path in splits)}"
        )
    return splits[0]


def vectors_of_folder(judged: Path, text_column: str | None = None) -> QueryVectors | None:
    """Return the vectors that a BEIR folder has for its qrels; None if there is no such folder.

    judged: the folder, or one of its qrels. Vectors without ids belong to the rows of its queries,
    in their order. Raises UnreadableFile, InvalidInput.
    """
    folder = judged
    if not judged.is_dir():
        if judged.parent.name != QRELS:
            return None
        folder = judged.parent.parent

    paths = [folder / f"queries{suffix}" for suffix in VECTOR_SUFFIXES]
    present = [path for path in paths if path.exists()]
    if not present:
        raise InvalidInput(
            f"{folder} has no vectors of its queries: save {QUERY_ID_COLUMN!r} and "
            f"{QUERY_COLUMN!r} as {paths[0].name} in it, or name a file with {VECTORS_OPTION}"
        )

    described = folder / BEIR_QUERIES
    ids = None
    texts = None
    if described.exists():
        with _open_columns(described) as columns:
            ids = _checked_ids(columns.values(BEIR_ID), columns)
            if text_column is not None:
                columns.require(text_column)
                texts = dict(zip(ids, map(str, columns.values(text_column)), strict=True))

    vectors = read_query_vectors(present[0], text_column, ids)
    if texts is None or vectors.texts is not None:
        return vectors
    return QueryVectors(
        vectors.source, vectors.ids, vectors.queries, [texts.get(name, "") for name in vectors.ids]
    )


# -- columns --------------------------------------------------------------------------------------


class Columns(ABC):
    """The columns of a source, by their names."""

    def __init__(self, source: str, names: Sequence[str]) -> None:
        self.source = source
        self._actual = {name: name for name in names}
        # The names of BEIR count only together: a column `score` alone may be anything.
        if BEIR_COLUMNS.keys() <= self._actual.keys():
            self._actual |= {ours: theirs for theirs, ours in BEIR_COLUMNS.items()}

    @abstractmethod
    def values(self, name: str) -> list[Any]:
        """Return the values of a column that there is, one for each row; some may be lists."""

    @abstractmethod
    def load_queries(self) -> QueryBank:
        """Return the column with the vectors of queries. Raises InvalidInput."""

    def place(self, row: int) -> str:
        """Return what messages call a row."""
        return f"row {row}"

    def has(self, name: str) -> bool:
        """Whether there is a column of this name."""
        return name in self._actual

    def require(self, name: str) -> None:
        """Raise InvalidInput if there is no column of this name."""
        if not self.has(name):
            raise InvalidInput(
                f"{self.source} has no column {name!r}: add it, or name another file"
            )

    def read(self, name: str) -> list[Any]:
        """Return the values of a column. Raises InvalidInput if it is missing."""
        self.require(name)
        return self.values(self._actual[name])

    def query_ids(self) -> list[str]:
        """Return the ids of the queries as texts. Raises InvalidInput."""
        return _checked_ids(self.read(QUERY_ID_COLUMN), self)

    def rows(self, text_column: str | None) -> JudgedRows:
        """Return the rows. Raises InvalidInput."""
        # Without ids, a missing column of vectors is the fault to name.
        has_vectors = self.has(QUERY_COLUMN) or not self.has(QUERY_ID_COLUMN)
        queries = self.load_queries() if has_vectors else None
        keys = _checked_keys(self.read(KEY_COLUMN), self)
        if queries is not None and len(keys) != len(queries):
            raise InvalidInput(f"{self.source} has {len(keys)} keys for {len(queries)} queries")

        grades = [[1.0] * len(of_row) for of_row in keys]
        if self.has(GRADE_COLUMN):
            grades = _checked_grades(self.read(GRADE_COLUMN), keys, self)
        weights = None
        if self.has(WEIGHT_COLUMN):
            weights = checked_weights(self.read(WEIGHT_COLUMN), len(keys))
        query_ids = None
        if self.has(QUERY_ID_COLUMN):
            query_ids = self.query_ids()
            self._require_as_many(QUERY_ID_COLUMN, query_ids, keys)
        texts = None
        # Where the vectors are elsewhere, so are the texts.
        if text_column is not None and queries is not None:
            texts = list(map(str, self.read(text_column)))
            self._require_as_many(text_column, texts, keys)
        return JudgedRows(
            self.source,
            keys,
            grades,
            queries=queries,
            query_ids=query_ids,
            weights=weights,
            texts=texts,
            has_grades=self.has(GRADE_COLUMN),
        )

    def _require_as_many(
        self, name: str, values: Sequence[Any], keys: Sequence[Sequence[Key]]
    ) -> None:
        if len(values) != len(keys):
            raise InvalidInput(
                f"{name!r} of {self.source} has {len(values)} values for {len(keys)} rows of "
                f"{KEY_COLUMN!r}"
            )


class _ArchiveColumns(Columns):
    """The arrays of an .npz file.

    `key` and `grade` are (n,), (n, k) for k keys of each query, or, with `query_number` (p,), the
    (p,) keys of the queries of these numbers in `query`. The numbers, and not where each query
    starts, because they need no order, look like qrels, and cannot be off by one.
    """

    def __init__(self, path: Path, archive: Archive) -> None:
        super().__init__(path.name, archive.names)
        self._path = path
        self._archive = archive

    def values(self, name: str) -> list[Any]:
        of_keys = name in (KEY_COLUMN, GRADE_COLUMN)
        values = self._array(name, 2 if of_keys else 1)
        if of_keys and self.has(QUERY_NUMBER_COLUMN):
            return self._by_query(name, values)
        return values

    def _array(self, name: str, most_dimensions: int) -> list[Any]:
        shape = self._archive.header(name).shape
        if not 1 <= len(shape) <= most_dimensions:
            wanted = "1-D, one value a query" if most_dimensions == 1 else "1-D or 2-D"
            raise InvalidInput(f"{name!r} of {self._path} must be {wanted}, but has shape {shape}")
        return list(self._archive.read(name).tolist())

    def _by_query(self, name: str, values: list[Any]) -> list[list[Any]]:
        """Return the values of each query."""
        numbers = self._array(QUERY_NUMBER_COLUMN, 1)
        if len(numbers) != len(values):
            raise InvalidInput(
                f"{name!r} of {self.source} has {len(values)} values for {len(numbers)} of "
                f"{QUERY_NUMBER_COLUMN!r}"
            )
        count = self._archive.header(QUERY_COLUMN).shape[0] if self.has(QUERY_COLUMN) else 0
        wrong = [
            number for number in numbers if not isinstance(number, int) or not 0 <= number < count
        ]
        if wrong:
            raise InvalidInput(
                f"{QUERY_NUMBER_COLUMN!r} of {self.source} must hold row numbers of "
                f"{QUERY_COLUMN!r}, from 0 to {count - 1}, not {reprlib.repr(wrong[0])}"
            )
        by_query: list[list[Any]] = [[] for _ in range(count)]
        for number, value in zip(numbers, values, strict=True):
            by_query[number].append(value)
        return by_query

    def load_queries(self) -> QueryBank:
        self.require(QUERY_COLUMN)
        return QueryBank.load(self._path, QUERY_COLUMN)


class _TableColumns(Columns):
    """The columns of a Parquet or Arrow file, or of a frame."""

    def __init__(self, source: str, table: Table | pa.Table) -> None:
        super().__init__(source, table.schema.names)
        self._table = table

    def values(self, name: str) -> list[Any]:
        return list(self._table.column(name).to_pylist())

    def load_queries(self) -> QueryBank:
        import pyarrow as pa

        self.require(QUERY_COLUMN)
        cells = self._table.column(QUERY_COLUMN)
        if not (
            pa.types.is_list(cells.type)
            or pa.types.is_large_list(cells.type)
            or pa.types.is_fixed_size_list(cells.type)
        ):
            raise InvalidInput(
                f"{QUERY_COLUMN!r} of {self.source} must hold lists of numbers, not {cells.type}"
            )
        return QueryBank(stack_lists(self.source, QUERY_COLUMN, cells), self.source)


class _ListColumns(Columns):
    """Values in memory."""

    def __init__(
        self,
        queries: QueryBank | None,
        values: Mapping[str, Sequence[Any] | npt.NDArray[Any]],
        source: str = "the list of judgements",
    ) -> None:
        names = list(values)
        super().__init__(source, names if queries is None else [QUERY_COLUMN, *names])
        self._queries = queries
        self._values = values

    def values(self, name: str) -> list[Any]:
        return [_plain(value) for value in self._values[name]]

    def load_queries(self) -> QueryBank:
        assert self._queries is not None, "values without vectors have query ids"
        return self._queries


def _plain(value: Any) -> Any:
    """Return a value of NumPy as one of Python, and other sequences as lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


class _LineColumns(Columns):
    """The members of the objects of a file of JSON lines."""

    def __init__(self, source: str, lines: Sequence[tuple[int, dict[str, Any]]]) -> None:
        names = dict.fromkeys(name for _, members in lines for name in members)
        super().__init__(source, list(names))
        self._lines = lines

    def place(self, row: int) -> str:
        return f"line {self._lines[row][0]}"

    def values(self, name: str) -> list[Any]:
        without = [number for number, members in self._lines if name not in members]
        if without:
            raise InvalidInput(
                f"{self.source} has no {name!r} in line {name_some(without)}, but in others: add it"
            )
        return [members[name] for _, members in self._lines]

    def load_queries(self) -> QueryBank:
        rows = self.read(QUERY_COLUMN)
        for row, value in enumerate(rows):
            if not isinstance(value, list):
                raise InvalidInput(
                    f"{QUERY_COLUMN!r} of {self.source} must hold lists of numbers, not "
                    f"{reprlib.repr(value)} ({self.place(row)})"
                )
        return QueryBank(rows, self.source)  # type: ignore[arg-type]


@contextmanager
def _open_columns(path: Path) -> Iterator[Columns]:
    """Open a file with columns. Raises UnreadableFile, also while it is open."""
    suffix = path.suffix.lower()
    if suffix == ARCHIVE:
        with open_archive(path) as archive:
            yield _ArchiveColumns(path, archive)
    elif suffix in TABLES:
        with open_table(path) as table:
            yield _TableColumns(path.name, table)
    elif suffix in JSON_LINES:
        yield _LineColumns(path.name, _read_json_lines(path))
    else:
        # A missing file, or a pipe, is the fault to name.
        with open_file(path):
            pass
        kinds = ", ".join((ARCHIVE, *TABLES, *JSON_LINES, JSON, *QRELS_SUFFIXES))
        raise UnreadableFile(
            f"{path}: of an unknown kind: judgements are a BEIR folder or a {kinds} file"
        )


def _lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text that are not blank, with their numbers.

    Raises UnreadableFile.
    """
    # Files from Windows may begin with a mark of their encoding.
    with (
        open_file(path) as file,
        reading(path, path.suffix or "a text"),
        io.TextIOWrapper(file, "utf-8-sig") as text,
    ):
        for number, line in enumerate(text, 1):
            if line.strip():
                yield number, line


def _read_json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a file of JSON lines, with their line numbers."""
    lines = []
    for number, line in _lines_of(path):
        try:
            members = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise UnreadableFile(f"{path}: line {number} is no JSON ({reason})") from None
        if not isinstance(members, dict):
            raise UnreadableFile(f"{path}: line {number} is no JSON object with {KEY_COLUMN!r}")
        lines.append((number, members))
    if not lines:
        raise UnreadableFile(f"{path}: has no lines: create it again")
    return lines


# -- qrels ----------------------------------------------------------------------------------------


def _is_qrels(path: Path) -> bool:
    """Whether a file is a qrels file by its name, such as test.tsv or qrels.robust2004."""
    suffix = path.suffix.lower()
    has_columns = suffix in (ARCHIVE, *TABLES, *JSON_LINES)
    return suffix in QRELS_SUFFIXES or (path.name.lower().startswith(QRELS) and not has_columns)


def _read_qrels(path: Path) -> JudgedRows:
    """Return the rows of a qrels file of TREC, or of BEIR, which has a header and tabs."""
    query_ids: list[str] = []
    keys: list[list[Key]] = []
    grades: list[list[float]] = []
    separator = None
    names: Sequence[str] = TREC_COLUMNS
    is_first = True
    for number, line in _lines_of(path):
        columns = line.rstrip("\r\n").split(separator)
        if is_first:
            is_first = False
            if set(line.split()) == BEIR_COLUMNS.keys():
                # Ids of BEIR may hold blanks.
                separator = "\t"
                names = line.split()
                continue

        if len(columns) != len(names):
            raise InvalidInput(
                f"{path}: line {number} has {len(columns)} columns where {len(names)} belong: "
                f"{', '.join(names)}"
            )
        if separator is None:
            query_id, _, key, grade = columns
        else:
            values = dict(zip(names, map(str.strip, columns), strict=True))
            query_id, key, grade = (values[name] for name in BEIR_COLUMNS)
        query_ids.append(query_id)
        keys.append([key])
        grades.append([_grade_of(grade, f"{path}: line {number}")])

    if not keys:
        raise InvalidInput(f"{path}: has no judgements: each line has {', '.join(names)}")
    return JudgedRows(path.name, keys, grades, query_ids=query_ids, has_grades=True)


def _read_dictionary(path: Path) -> JudgedRows:
    """Return the rows of a dictionary {query id: {key: grade}} in JSON, as ranx saves qrels."""
    text = "".join(line for _, line in _lines_of(path))
    try:
        judged = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnreadableFile(f"{path}: is no JSON ({reason}): create it again") from None
    return rows_of_dictionary(judged, str(path))


def rows_of_dictionary(judged: Any, source: str) -> JudgedRows:
    """Return the rows of a dictionary {query id: {key: grade}}. Raises InvalidInput."""
    if not isinstance(judged, Mapping) or not judged:
        raise InvalidInput(f"{source} has no judgements: they are {{query id: {{key: grade}}}}")
    for query_id, of_query in judged.items():
        if not isinstance(of_query, Mapping):
            raise InvalidInput(
                f"{source} must have a dictionary {{key: grade}} of query {shown(query_id)}, not "
                f"{reprlib.repr(of_query)}"
            )
    values = {
        KEY_COLUMN: [list(of_query) for of_query in judged.values()],
        GRADE_COLUMN: [list(of_query.values()) for of_query in judged.values()],
        QUERY_ID_COLUMN: list(judged),
    }
    return _ListColumns(None, values, source).rows(None)


def _grade_of(text: str, place: str) -> float:
    try:
        grade = float(text)
    except ValueError:
        grade = float("nan")
    if not isfinite(grade):
        raise InvalidInput(f"{place} has the grade {reprlib.repr(text)}, which is no number")
    return grade


# -- values ---------------------------------------------------------------------------------------


def _checked_ids(values: Sequence[Any], columns: Columns) -> list[str]:
    """Return ids of queries as texts. Raises InvalidInput."""
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise InvalidInput(
                f"the ids of queries of {columns.source} must be texts or whole numbers, not "
                f"{reprlib.repr(value)} ({columns.place(row)})"
            )
    return list(map(str, values))


def _checked_keys(values: Sequence[Any], columns: Columns) -> list[list[Key]]:
    """Return the keys of each row. Raises InvalidInput."""
    rows = [value if isinstance(value, list) else [value] for value in values]
    for row, keys in enumerate(rows):
        for key in keys:
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise InvalidInput(
                    f"{KEY_COLUMN!r} of {columns.source} must hold whole numbers or texts, not "
                    f"{reprlib.repr(key)} ({columns.place(row)})"
                )
    return rows


def is_grade(value: Any) -> bool:
    """Whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    # A whole number beyond float64.
    except OverflowError:
        return False


def _checked_grades(
    values: Sequence[Any], keys: Sequence[Sequence[Key]], columns: Columns
) -> list[list[float]]:
    """Return the grades of the keys of each row. Raises InvalidInput."""
    if len(values) != len(keys):
        raise InvalidInput(
            f"{columns.source} has {GRADE_COLUMN!r} for {len(values)} rows and {KEY_COLUMN!r} for "
            f"{len(keys)}"
        )
    rows = [value if isinstance(value, list) else [value] for value in values]
    for row, grades in enumerate(rows):
        if len(grades) != len(keys[row]):
            raise InvalidInput(
                f"{columns.source} has {len(grades)} grades for {len(keys[row])} keys in "
                f"{columns.place(row)}"
            )
        for grade in grades:
            if not is_grade(grade):
                raise InvalidInput(
                    f"{GRADE_COLUMN!r} of {columns.source} must hold numbers, not "
                    f"{reprlib.repr(grade)} ({columns.place(row)})"
                )
    return [list(map(float, grades)) for grades in rows]
