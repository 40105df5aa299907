"""The forms in which judgements come: what their files, folders and frames have in each row.

Nothing is merged here, and no key is looked up: `judgements` does both.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

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
from milvus_hubness.basics.files.columns import (
    ARCHIVE,
    ARRAY,
    CSV,
    FORMATS,
    ONLY,
    Columns,
    columns_of_frame,
    format_of,
    open_columns,
    open_text,
    unknown_kind,
)
from milvus_hubness.basics.files.names import (
    KEY_OPTION,
    QUERY_NAMES,
    USUAL_NAMES,
    key_named,
    listed,
    named_so,
    vectors_named,
)
from milvus_hubness.basics.files.opening import open_file
from milvus_hubness.basics.files.sizes import OBJECT_BYTES
from milvus_hubness.basics.files.tables import TABLES
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput, UnreadableFile, name_some
from milvus_hubness.quality.labelled import checked_weights

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

VECTOR_SUFFIXES = (ARCHIVE, *TABLES, CSV, ARRAY)
"""Suffixes of a file `queries` with vectors in a BEIR folder, in the order in which it is looked
for.
"""

VECTORS_OPTION = "--pairs-queries"
"""The option of commands that names the vectors of the queries."""

SWAPPED = "did you swap --bank and --pairs?"
"""The question about a file of judgements that looks like a bank."""

JUDGEMENT_BYTES = 6 * OBJECT_BYTES
"""About how many bytes a line of a qrels file takes, apart from its texts: two lists, two texts and
a number.
"""

LARGEST_DICTIONARY = 1 << 30
"""Largest number of characters of a dictionary in JSON."""

FURTHER_IDS = ("id", "ids", BEIR_ID)
"""Further names of the ids in a file of vectors of queries, where no row has a key."""


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


def read_rows(
    path: Path,
    text_column: str | None = None,
    key_column: str | None = None,
    *,
    needs_queries: bool = True,
) -> JudgedRows:
    """Return the rows of a file of judgements.

    needs_queries: whether the file must say, by vectors or ids, which query a row is about. Raises
    UnreadableFile, InvalidInput.
    """
    if path.is_dir():
        path = qrels_of_folder(path)
    for is_this, read in (
        (path.suffix.lower() == JSON, _read_dictionary),
        (_is_qrels(path), _read_qrels),
    ):
        if is_this and key_column is not None:
            raise InvalidInput(
                f"{path} has its keys in a place of their own: leave out {KEY_OPTION}"
            )
        if is_this:
            return read(path)
    with _open_columns(path, key=key_column) as columns:
        return columns.rows(text_column, needs_queries=needs_queries)


def rows_of_frame(frame: Any, text_column: str | None = None) -> JudgedRows:
    """Return the rows of a frame of pandas, Polars or another library that exports to Arrow.

    Raises InvalidInput.
    """
    columns = columns_of_frame(frame, "the judgements")
    return JudgedColumns("the frame", columns).rows(text_column)


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
    rows = columns.rows()
    return (
        rows if weights is None else replace(rows, weights=checked_weights(weights, len(rows.keys)))
    )


def read_query_vectors(
    path: Path, text_column: str | None = None, ids: Sequence[str] | None = None
) -> QueryVectors:
    """Return the vectors of a file with `query_id` and `query`.

    ids: those of its rows, if it has none. Raises UnreadableFile, InvalidInput.
    """
    if format_of(path) == ARRAY:
        if ids is None:
            raise InvalidInput(f"{path} has no {QUERY_ID_COLUMN!r}: save both in an .npz file")
        return one_of_each(QueryVectors(str(path), ids, QueryBank.load(path)))

    with _open_columns(path, FURTHER_IDS) as columns:
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
            ids = _checked_ids(columns.read(BEIR_ID), columns)
            if text_column is not None:
                columns.require(text_column)
                texts = dict(zip(ids, map(str, columns.read(text_column)), strict=True))

    vectors = read_query_vectors(present[0], text_column, ids)
    if texts is None or vectors.texts is not None:
        return vectors
    return QueryVectors(
        vectors.source, vectors.ids, vectors.queries, [texts.get(name, "") for name in vectors.ids]
    )


# -- columns --------------------------------------------------------------------------------------


class JudgedColumns:
    """The columns of a source, by our names for them.

    ids: further names of a column with ids of queries. key: the column of keys that the caller names.
    """

    def __init__(
        self, source: str, columns: Columns, ids: Sequence[str] = (), key: str | None = None
    ) -> None:
        self.source = source
        self._columns = columns
        names = columns.names
        self._actual = {name: name for name in names}
        for ours, usual in USUAL_NAMES.items():
            further = (*usual, *ids) if ours == QUERY_ID_COLUMN else usual
            for actual in named_so(names, further)[:1]:
                self._actual[ours] = actual

        # The names of BEIR count only together: a column `score` alone may be anything.
        if BEIR_COLUMNS.keys() <= self._actual.keys():
            self._actual |= {ours: theirs for theirs, ours in BEIR_COLUMNS.items()}
        if key is not None or not BEIR_COLUMNS.keys() <= self._actual.keys():
            named = key_named(names, source, key, holds_vectors=columns.holds_vectors)
            if named is not None and (key or named != self._actual.get(QUERY_ID_COLUMN)):
                self._actual[KEY_COLUMN] = named
        queries = vectors_named(names, QUERY_NAMES, columns.holds_vectors)
        if queries is not None and queries != self._actual.get(KEY_COLUMN):
            self._actual[QUERY_COLUMN] = queries

    def place(self, row: int) -> str:
        """Return what messages call a row."""
        return self._columns.place(row)

    def has(self, name: str) -> bool:
        """Whether there is a column of this name."""
        return name in self._actual

    def require(self, name: str) -> None:
        """Raise InvalidInput if there is no column of this name."""
        if self.has(name):
            return
        columns = listed(self._columns.names)
        problem = f"{self.source} has no column {name!r}"
        if name == KEY_COLUMN:
            swapped = f", or {SWAPPED}" if self.has(QUERY_COLUMN) else ""
            raise InvalidInput(
                f"{problem} with the keys of right rows: its columns are {columns}: name one of them "
                f"with {KEY_OPTION}{swapped}"
            )
        raise InvalidInput(f"{problem}, only {columns}: add it, or name another file")

    def read(self, name: str) -> list[Any]:
        """Return the values of a column, one for each row. Raises InvalidInput if it is missing."""
        self.require(name)
        actual = self._actual[name]
        if name == WEIGHT_COLUMN:
            return self._columns.numbers(actual)
        if name not in (KEY_COLUMN, GRADE_COLUMN):
            return self._columns.values(actual)

        if name == GRADE_COLUMN:
            values = self._columns.numbers(actual, may_be_lists=True)
        else:
            values = self._columns.values(actual, may_be_lists=True)
        return self._by_query(name, values) if self.has(QUERY_NUMBER_COLUMN) else values

    def _by_query(self, name: str, values: list[Any]) -> list[list[Any]]:
        """Return the values of each query, of a file with the number of the query of each value."""
        # The numbers, and not where each query starts, because they need no order, look like qrels,
        # and cannot be off by one.
        numbers = self._columns.values(QUERY_NUMBER_COLUMN)
        if len(numbers) != len(values):
            raise InvalidInput(
                f"{name!r} of {self.source} has {len(values)} values for {len(numbers)} of "
                f"{QUERY_NUMBER_COLUMN!r}"
            )
        count = len(self.load_queries()) if self.has(QUERY_COLUMN) else 0
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
        """Return the column with the vectors of queries. Raises InvalidInput."""
        self.require(QUERY_COLUMN)
        return QueryBank(self._columns.vectors(self._actual[QUERY_COLUMN]), self.source)

    def query_ids(self) -> list[str]:
        """Return the ids of the queries as texts. Raises InvalidInput."""
        return _checked_ids(self.read(QUERY_ID_COLUMN), self)

    def rows(self, text_column: str | None, *, needs_queries: bool = True) -> JudgedRows:
        """Return the rows, as `read_rows` does. Raises InvalidInput."""
        # Without ids, a missing column of vectors is the fault to name.
        is_lacking = needs_queries and not self.has(QUERY_ID_COLUMN)
        has_vectors = self.has(QUERY_COLUMN) or is_lacking
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

    def values(self, name: str, *, may_be_lists: bool = False) -> list[Any]:
        return [_plain(value) for value in self._values[name]]

    def holds_vectors(self, name: str) -> bool:
        return name == QUERY_COLUMN

    def vectors(self, name: str) -> npt.NDArray[Any]:
        assert self._queries is not None, "values without vectors have query ids"
        return self._queries.vectors

    def rows(self) -> JudgedRows:
        """Return the rows. Raises InvalidInput."""
        return JudgedColumns(self.source, self).rows(None)


def _plain(value: Any) -> Any:
    """Return a value of NumPy as one of Python, and other sequences as lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


@contextmanager
def _open_columns(
    path: Path, ids: Sequence[str] = (), key: str | None = None
) -> Iterator[JudgedColumns]:
    """Open a file with columns. Raises UnreadableFile, also while it is open, and InvalidInput.

    ids, key: as for JudgedColumns.
    """
    if format_of(path) not in FORMATS:
        # A missing file, or a pipe, is the fault to name.
        with open_file(path):
            pass
        formats = tuple(suffix for suffix in FORMATS if suffix != ARRAY)
        noun = "a file of judgements is a BEIR folder, or"
        raise UnreadableFile(unknown_kind(path, noun, (*formats, JSON, *QRELS_SUFFIXES)))

    with open_columns(path) as columns:
        if columns.names == [ONLY]:
            with open_file(path):
                pass
            raise InvalidInput(
                f"{path}: has vectors alone, and judgements have the keys of right rows too: {SWAPPED}"
            )
        yield JudgedColumns(path.name, columns, ids, key)


# -- qrels ----------------------------------------------------------------------------------------


def _is_qrels(path: Path) -> bool:
    """Whether a file is a qrels file by its name, such as test.tsv or qrels.robust2004."""
    suffix = path.suffix.lower()
    has_columns = format_of(path) in FORMATS
    return suffix in QRELS_SUFFIXES or (path.name.lower().startswith(QRELS) and not has_columns)


def _read_qrels(path: Path) -> JudgedRows:
    """Return the rows of a qrels file of TREC, or of BEIR, which has a header and tabs."""
    query_ids: list[str] = []
    keys: list[list[Key]] = []
    grades: list[list[float]] = []
    separator = None
    names: Sequence[str] = TREC_COLUMNS
    is_first = True
    for number, line in _qrels_lines(path):
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


def _qrels_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a qrels file with their numbers. Raises UnreadableFile."""
    with open_text(path) as text:
        for number, line in text.lines():
            text.growth.add(f"its first {number:,} lines", JUDGEMENT_BYTES + len(line))
            yield number, line


def _read_dictionary(path: Path) -> JudgedRows:
    """Return the rows of a dictionary {query id: {key: grade}} in JSON, as ranx saves qrels."""
    with open_text(path) as opened:
        text = "".join(line for _, line in opened.lines(longest=LARGEST_DICTIONARY))
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
    return _ListColumns(None, values, source).rows()


def _grade_of(text: str, place: str) -> float:
    try:
        grade = float(text)
    except ValueError:
        grade = float("nan")
    if not isfinite(grade):
        raise InvalidInput(f"{place} has the grade {reprlib.repr(text)}, which is no number")
    return grade


# -- values ---------------------------------------------------------------------------------------


def _checked_ids(values: Sequence[Any], columns: JudgedColumns) -> list[str]:
    """Return ids of queries as texts. Raises InvalidInput."""
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise InvalidInput(
                f"the ids of queries of {columns.source} must be texts or whole numbers, not "
                f"{reprlib.repr(value)} ({columns.place(row)})"
            )
    return list(map(str, values))


def _checked_keys(values: Sequence[Any], columns: JudgedColumns) -> list[list[Key]]:
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
    values: Sequence[Any], keys: Sequence[Sequence[Key]], columns: JudgedColumns
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
