"""Judgements: queries with the keys of their right rows, with grades."""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.logs import log
from milvus_hubness.basics.words import expect_instance
from milvus_hubness.correction.banks.bank import BankLike, QueryBank
from milvus_hubness.correction.banks.stored import Key, forms_of
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.judgement_files import (
    VECTORS_OPTION,
    JudgedRows,
    QueryVectors,
    one_of_each,
    read_query_vectors,
    read_rows,
    rows_of_dictionary,
    rows_of_frame,
    rows_of_lists,
    some_of,
    vectors_of_folder,
)
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.measures import Sendings
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.right_items import RightItems

IGNORE_OPTION = "--ignore-identical"
"""The option of commands by which a row is no answer to itself."""


def expect_judgements(judgements: object) -> None:
    """Raise InvalidParameter if these are neither Judgements nor None."""
    if judgements is not None:
        remedy = "make them by Judgements.load(path), Judgements.of or Judgements.from_dict"
        expect_instance("judgements", judgements, Judgements, remedy)


@dataclass(frozen=True, eq=False)
class Judgements:
    """Queries, and for each the keys of its right rows, with grades.

    Made by `load`, `of`, `from_frame` or `from_dict`, which treat their rows as follows.

    **Queries.** All rows about one query become one query with several right rows. Where rows have
    query ids, those of one id are about one query; else those of equal vectors are. As queries of
    their own, two rows would each expect a first place that only one of them can have, so that at
    best one of two answers would count as right.

    **Weights and counts.** A log of clicks repeats a query because users send it often, and a list
    of judgements because several rows are right. With a weight in each row, that of a query is
    their sum, and a sum of 0 leaves it out. Without, the keys decide which it is. A row with a
    further key says that this one is right too, and adds nothing to the count of 1, so that queries
    count equally however many right rows they have, as in trec_eval. A row with only keys that the
    query has already adds 1: no judge says a thing twice, but users send a query again. A source
    with grades is of judges, of whom two may say the same, so it counts each query once.

    **Grades.** A row with a grade of 0 or less was judged as not relevant, and is no right row. Of
    a key that is judged twice for a query, the higher grade counts.
    """

    queries: QueryBank
    """n queries, each of them once."""

    keys: Sequence[tuple[Key, ...]]
    """For each query the keys of its right rows, at least one, none of them twice."""

    grades: Sequence[tuple[float, ...]]
    """For each of these keys how right its row is, above 0; 1 where the source has no grades."""

    clicks: Sequence[tuple[float, ...]]
    """For each of these keys how often users wanted it: the weights of the rows of the source that
    name it. A row that names several keys shares its weight among them, by their grades.
    """

    weights: npt.NDArray[np.float64] | None = None
    """How often users send each query, (n,) above 0, as the source says; None if it does not."""

    counts: npt.NDArray[np.int64] | None = None
    """How often each query was sent, (n,), as the source repeats it; None for once each."""

    ids: Sequence[str] | None = None
    """The ids of the queries; None if the source has none."""

    texts: Sequence[str] | None = None
    """The texts of the queries, if they were read."""

    numbers: Sequence[int] | None = None
    """The numbers that the queries had before some were left out; None if none was."""

    left_out: tuple[str, ...] = ()
    """A sentence for each reason for which something of the source is left out."""

    ignores_identical: bool = False
    """Whether the row whose key is the id of a query is no answer to it, see `ignoring_identical`."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        queries: str | os.PathLike[str] | None = None,
        *,
        text_column: str | None = None,
        key_column: str | None = None,
    ) -> Judgements:
        """Read a file or a folder of judgements.

        An .npz, .parquet, .arrow, .feather, .ipc, .jsonl or .ndjson file has in each row the vector
        of a query as `query`, the key of its right row, or a list of keys, as `key`, and optionally
        as many grades as `grade`, the `weight` of the query and its `query_id`. In an .npz file,
        `key` is (n,) or (n, k), or (p,) with `query_number` (p,), the row of each key in `query`.

        A qrels file of TREC, a dictionary {query id: {key: grade}} in a .json file, the
        `qrels/*.tsv` of a BEIR folder, the folder itself, of which `qrels/test.tsv` is read, and a
        table without `query` have ids of queries. Their vectors are
        in the file `queries` as `query_id` and `query`, or in a file `queries.npz`,
        `queries.parquet` or `queries.npy` of the BEIR folder.

        text_column: the column with the texts of the queries, where the vectors are or in the
        `queries.jsonl` of a BEIR folder. key_column: the column with the keys, where its name is not
        one of the usual ones. Raises UnreadableFile, InvalidInput, and as QueryBank.
        """
        path = Path(path)
        rows = read_rows(path, text_column, key_column)
        if rows.queries is not None:
            if queries is not None:
                raise InvalidInput(f"{path} has vectors of its own: leave out {os.fspath(queries)}")
            return _merged(rows)

        vectors = None
        if queries is not None:
            vectors = read_query_vectors(Path(queries), text_column)
        else:
            vectors = vectors_of_folder(path, text_column)
        if vectors is None:
            raise InvalidInput(
                f"{path} has ids of queries and no vectors: name a file that has both with "
                f"{VECTORS_OPTION}"
            )
        if text_column is not None and vectors.texts is None:
            raise InvalidInput(
                f"{vectors.source} has no column {text_column!r}: add it, or name another one"
            )
        return _merged(_with_vectors(rows, vectors))

    @classmethod
    def of(
        cls,
        queries: BankLike,
        keys: Sequence[Key | Sequence[Key]] | npt.NDArray[Any],
        grades: Sequence[float | Sequence[float]] | npt.NDArray[Any] | None = None,
        *,
        weights: npt.ArrayLike | None = None,
        ids: Sequence[str | int] | None = None,
    ) -> Judgements:
        """Return the judgements of n rows in memory.

        queries: (n, d). keys: for each row a key, or several. grades: of these; by default 1.
        weights: (n,), how often users send each query. ids: (n,), of the queries. Raises
        InvalidInput, and as QueryBank does.
        """
        return _merged(rows_of_lists(QueryBank.of(queries), keys, grades, weights, ids))

    @classmethod
    def from_dict(
        cls, judged: Mapping[Any, Mapping[Key, float]], vectors: Mapping[Any, npt.ArrayLike]
    ) -> Judgements:
        """Return the judgements of a dictionary {query id: {key: grade}}.

        vectors: the vector of each query id. Raises InvalidInput, and as QueryBank does.
        """
        if not isinstance(vectors, Mapping) or not vectors:
            raise InvalidInput("vectors must be a dictionary with that of each query id")
        rows = rows_of_dictionary(judged, "the dictionary of judgements")
        source = "the dictionary of vectors"
        bank = QueryBank(list(vectors.values()), source)  # type: ignore[arg-type]
        of_ids = one_of_each(QueryVectors(source, list(map(str, vectors)), bank))
        return _merged(_with_vectors(rows, of_ids))

    @classmethod
    def from_frame(cls, frame: Any) -> Judgements:
        """Return the judgements of a frame of pandas, Polars or Arrow.

        It has the columns of a file with vectors: `query`, `key`, and optionally `grade`, `weight`
        and `query_id`. Raises InvalidInput, and as QueryBank does.
        """
        rows = rows_of_frame(frame)
        if rows.queries is None:
            raise InvalidInput("the frame has no column 'query' with the vectors: add it")
        return _merged(rows)

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def names(self) -> Sequence[str]:
        """The ids of the queries, or their numbers where the source has no ids."""
        if self.ids is not None:
            return self.ids
        return list(map(str, range(len(self)) if self.numbers is None else self.numbers))

    def take(self, numbers: Sequence[int]) -> Judgements:
        """Return the judgements of the queries of these numbers, n ≥ 1."""
        which = np.asarray(numbers, np.int64)
        return replace(
            self,
            queries=self.queries.take(which),
            keys=[self.keys[query] for query in numbers],
            grades=[self.grades[query] for query in numbers],
            clicks=[self.clicks[query] for query in numbers],
            weights=None if self.weights is None else self.weights[which],
            counts=None if self.counts is None else self.counts[which],
            ids=None if self.ids is None else [self.ids[query] for query in numbers],
            texts=None if self.texts is None else [self.texts[query] for query in numbers],
            numbers=(
                list(numbers)
                if self.numbers is None
                else [self.numbers[query] for query in numbers]
            ),
        )

    def ignoring_identical(self) -> Judgements:
        """Return the judgements for data in which the queries are rows themselves.

        Some data sets ask for the rows that are like a row, such as ArguAna and Quora: the id of a
        query is then the key of a row, which a search finds first. Evaluators leave that row out of
        the answers to this query (`ignore_identical_ids` of BEIR), and so do measures on these
        judgements. Raises InvalidInput without ids.
        """
        if self.ids is None:
            raise InvalidInput(
                f"{IGNORE_OPTION} leaves out the row that has the id of a query, and the judgements "
                "have no ids: add a column 'query_id'"
            )
        return replace(self, ignores_identical=True)

    @property
    def possible_keys(self) -> set[Key]:
        """All keys in all forms that a collection may have them in, for a search of its keys; with those of
        rows that are queries themselves, where these are no answers.
        """
        named = {key for keys in self.keys for key in keys}
        if self.ignores_identical and self.ids is not None:
            named |= {name for name in self.ids if name is not None}
        return {form for key in named for form in forms_of(key)}

    def within(self, rows: Sequence[Key], collection: str) -> Judgements:
        """Return the judgements about these rows of a collection, with its forms of their keys.

        Files have keys as texts where a collection may have whole numbers: "12" is 12 then. Keys of
        no row, and queries without a right row, are left out, counted and named in the log. Raises
        InvalidInput if nothing is left.
        """
        present = frozenset(rows)
        judged: list[_Query] = []
        unknown: list[Key] = []
        own = self._own_keys(present) if self.ignores_identical else [None] * len(self)
        if self.ignores_identical and not any(key is not None for key in own):
            raise InvalidInput(
                f"no query has the key of a row of {collection!r} as its id: leave out "
                f"{IGNORE_OPTION}"
            )
        of_queries = zip(self.keys, self.grades, self.clicks, strict=True)
        for number, (keys, grades, clicks) in enumerate(of_queries):
            query = _Query()
            for key, grade, count in zip(keys, grades, clicks, strict=True):
                actual = next((form for form in forms_of(key) if form in present), None)
                if actual is None:
                    unknown.append(key)
                elif actual != own[number]:
                    query.add(actual, grade, count)
            judged.append(query)

        total = sum(map(len, self.keys))
        answered = [number for number, query in enumerate(judged) if query.grades]
        some = some_of(list(dict.fromkeys(unknown)))
        if not answered:
            raise InvalidInput(
                f"none of the {total:,} judged keys is that of a usable row of {collection!r}: "
                f"{some}{_hint(unknown, rows)}"
            )

        reasons = []
        if unknown:
            reasons.append(
                f"{len(unknown):,} of {total:,} judged keys are those of no usable row of "
                f"{collection!r}: {some}{_hint(unknown, rows)}"
            )
        if len(answered) < len(self):
            without = [
                name for name, query in zip(self.names, judged, strict=True) if not query.grades
            ]
            reasons.append(
                f"{len(without):,} of {len(self):,} queries have no right row in {collection!r}: "
                f"{_some_queries(without, self.ids is not None)}"
            )
        return replace(
            self.take(answered),
            keys=[tuple(judged[query].grades) for query in answered],
            grades=[tuple(judged[query].grades.values()) for query in answered],
            clicks=[tuple(judged[query].clicks.values()) for query in answered],
            left_out=(*self.left_out, *_logged(reasons)),
        )

    def positions(self, rows: Sequence[Key]) -> list[npt.NDArray[np.int64]]:
        """Return the positions of each query's right rows among these, after `within`."""
        position_of = {key: position for position, key in enumerate(rows)}
        return [np.array([position_of[key] for key in keys], np.int64) for keys in self.keys]

    def labelled(self, rows: Sequence[Key], measure: str | Measure = R_AT_1) -> LabelledQueries:
        """Return the queries with the positions of their right rows among these, after `within`.

        measure: what is measured on them, R@k, MRR, MAP or nDCG@k. Raises InvalidInput.
        """
        own = self._own_positions(rows) if self.ignores_identical else None
        return LabelledQueries(
            self.queries.vectors,
            RightItems.of(self.positions(rows), self.grades, own=own),
            Sendings(self.counts, self.weights),
            Measure.of(measure),
        )

    def share_with_ids(self, rows: Sequence[Key]) -> float:
        """Return the share of the queries whose id is the key of one of these rows."""
        return float((self._own_positions(rows) >= 0).mean())

    def _own_positions(self, rows: Sequence[Key]) -> npt.NDArray[np.int64]:
        """Return (n,) the position of the row that has the id of each query; −1 for none."""
        position_of = {key: position for position, key in enumerate(rows)}
        own = self._own_keys(position_of)
        return np.array([-1 if key is None else position_of[key] for key in own], np.int64)

    def _own_keys(self, present: Container[Key]) -> list[Key | None]:
        """Return the key of the row that has the id of each query, None for none."""
        ids: Sequence[str | None] = [None] * len(self) if self.ids is None else self.ids
        return [
            None
            if name is None
            else next((form for form in forms_of(name) if form in present), None)
            for name in ids
        ]


def read_clicks(path: str | os.PathLike[str], key_column: str | None = None) -> dict[Key, float]:
    """Return how often each key is a right one in a file of judgements, by the weights of its rows.

    Each row is a click, or as many as its weight says. Of a row that names several keys, they share
    it by their grades. The vectors of queries are not needed. key_column: as in `Judgements.load`.
    Raises UnreadableFile, InvalidInput.
    """
    rows = read_rows(Path(path), key_column=key_column, needs_queries=False)
    shares = [_shares(rows, row) for row in range(len(rows.keys))]
    clicks = _summed(
        [list(of_row) for of_row in shares], [list(of_row.values()) for of_row in shares]
    )
    if not clicks:
        raise InvalidInput(_why_no_right_row(rows))
    return clicks


# -- merging --------------------------------------------------------------------------------------


@dataclass
class _Query:
    """What the rows about one query say together."""

    grades: dict[Key, float] = field(default_factory=dict)
    clicks: dict[Key, float] = field(default_factory=dict)
    """How often each key was wanted."""

    rows: list[int] = field(default_factory=list)
    """The numbers of the rows, in their order."""

    weight: float = 0.0
    """The sum of the weights of the rows with a right key."""

    repeats: int = 0
    """The number of rows with right keys all of which rows before them name."""

    def add(self, key: Key, grade: float, clicks: float) -> None:
        self.grades[key] = max(grade, self.grades.get(key, grade))
        self.clicks[key] = self.clicks.get(key, 0.0) + clicks


def _merged(rows: JudgedRows) -> Judgements:
    """Return the judgements of rows with vectors, one for each query. Raises InvalidInput."""
    assert rows.queries is not None
    judged: dict[str | bytes, _Query] = {}
    for row, identity in enumerate(_identities(rows)):
        query = judged.setdefault(identity, _Query())
        shares = _shares(rows, row)
        # A row without a right key says nothing of what users want.
        if shares:
            query.weight += _weight(rows, row)
            query.repeats += shares.keys() <= query.grades.keys()
        grades = _right_keys(rows, row)
        for key, share in shares.items():
            query.add(key, grades[key], share)
        query.rows.append(row)

    _require_one_vector_each(rows, judged)
    answered = [query for query in judged.values() if query.grades]
    if not answered:
        raise InvalidInput(_why_no_right_row(rows))

    reasons = []
    if len(answered) < len(judged):
        without = [query.rows[0] for query in judged.values() if not query.grades]
        ids = rows.query_ids
        names = [ids[row] if ids is not None else str(row) for row in without]
        reasons.append(
            f"{len(without):,} of {len(judged):,} queries of {rows.source} have no right row: "
            f"{_some_queries(names, ids is not None)}"
        )
    # A query that nobody sends says nothing.
    sent = answered
    if rows.weights is not None:
        sent = [query for query in answered if query.weight > 0]
    if not sent:
        raise InvalidInput(
            f"the weights of all queries of {rows.source} with a right row are 0: correct them"
        )
    first_rows = [query.rows[0] for query in sent]
    numbers = first_rows if rows.query_numbers is None else rows.query_numbers[first_rows].tolist()
    return Judgements(
        queries=rows.queries.take(np.array(numbers, np.int64)),
        keys=[tuple(query.grades) for query in sent],
        grades=[tuple(query.grades.values()) for query in sent],
        clicks=[tuple(query.clicks.values()) for query in sent],
        weights=None if rows.weights is None else np.array([query.weight for query in sent]),
        counts=_counts(rows, sent),
        ids=None if rows.query_ids is None else [rows.query_ids[row] for row in first_rows],
        texts=None if rows.texts is None else [rows.texts[number] for number in numbers],
        left_out=(*rows.left_out, *_logged(reasons)),
    )


def _why_no_right_row(rows: JudgedRows) -> str:
    """Return why no row of a source names a right one."""
    if not any(rows.keys):
        return (
            f"no right row in {rows.source}: no row has a key: write the keys of right rows into it"
        )
    return f"no right row in {rows.source}: all its grades are 0 or less"


def _identities(rows: JudgedRows) -> Sequence[str | bytes]:
    """Return what the rows about one query have in common: its id, or else its vector."""
    if rows.query_ids is not None:
        return rows.query_ids
    assert rows.queries is not None
    # Adding 0 turns −0 into 0, to which it is equal. Digests, not to have all vectors twice.
    return [
        hashlib.blake2b(vector + np.float32(0), digest_size=16).digest()
        for vector in rows.queries.vectors
    ]


def _require_one_vector_each(rows: JudgedRows, judged: Mapping[str | bytes, _Query]) -> None:
    """Raise InvalidInput if an id has rows with different vectors."""
    assert rows.queries is not None
    # Vectors of another file have one id each.
    if rows.query_ids is None or rows.query_numbers is not None:
        return
    vectors = rows.queries.vectors
    differing = [
        str(query_id)
        for query_id, query in judged.items()
        if len(query.rows) > 1 and np.ptp(vectors[query.rows], axis=0).any()
    ]
    if differing:
        raise InvalidInput(
            f"{rows.source} has several vectors of the query ids {some_of(differing)}: "
            "keep one of each, or leave out the ids"
        )


def _right_keys(rows: JudgedRows, row: int) -> dict[Key, float]:
    """Return the grades of the right keys of a row."""
    grades: dict[Key, float] = {}
    for key, grade in zip(rows.keys[row], rows.grades[row], strict=True):
        if grade > 0:
            grades[key] = max(grade, grades.get(key, grade))
    return grades


def _shares(rows: JudgedRows, row: int) -> dict[Key, float]:
    """Return the share of each right key of a row in its weight."""
    grades = _right_keys(rows, row)
    weight = _weight(rows, row)
    total = sum(grades.values())
    return {key: weight * (grade / total) for key, grade in grades.items()}


def _weight(rows: JudgedRows, row: int) -> float:
    return 1.0 if rows.weights is None else float(rows.weights[row])


def _counts(rows: JudgedRows, judged: Sequence[_Query]) -> npt.NDArray[np.int64] | None:
    """Return how often queries were sent, see Judgements; None for once each."""
    is_log = rows.weights is None and not rows.has_grades
    if not is_log or not any(query.repeats for query in judged):
        return None
    return np.array([1 + query.repeats for query in judged])


def _with_vectors(rows: JudgedRows, vectors: QueryVectors) -> JudgedRows:
    """Return the rows whose query ids have a vector, with it. Raises InvalidInput for none."""
    assert rows.query_ids is not None
    number_of = {query_id: number for number, query_id in enumerate(vectors.ids)}
    present = [row for row, query_id in enumerate(rows.query_ids) if query_id in number_of]
    judged = dict.fromkeys(rows.query_ids)
    missing = [query_id for query_id in judged if query_id not in number_of]
    if not present:
        raise InvalidInput(
            f"none of the {len(judged):,} query ids of {rows.source} has a vector in "
            f"{vectors.source}: {some_of(missing)}"
        )

    reasons = []
    if missing:
        reasons.append(
            f"{len(missing):,} of {len(judged):,} query ids of {rows.source} have no vector in "
            f"{vectors.source}: {some_of(missing)}"
        )
    unjudged = [query_id for query_id in vectors.ids if query_id not in judged]
    if unjudged:
        reasons.append(
            f"{len(unjudged):,} of {len(vectors.ids):,} queries of {vectors.source} have no "
            f"judgement in {rows.source}: {some_of(unjudged)}"
        )
    return replace(
        rows,
        keys=[rows.keys[row] for row in present],
        grades=[rows.grades[row] for row in present],
        queries=vectors.queries,
        query_numbers=np.array([number_of[rows.query_ids[row]] for row in present], np.int64),
        query_ids=[rows.query_ids[row] for row in present],
        weights=None if rows.weights is None else rows.weights[present],
        texts=vectors.texts,
        left_out=tuple(_logged(reasons)),
    )


def _hint(unknown: Sequence[Key], rows: Sequence[Key]) -> str:
    """Return why these keys cannot be those of rows, with examples of both; empty if they may be."""
    whole = [key for key in unknown if len(forms_of(key)) > 1]
    if all(isinstance(key, int) for key in rows):
        texts = [key for key in unknown if len(forms_of(key)) == 1]
        if texts:
            return (
                f" ({reprlib.repr(texts[0])} is no whole number, as the keys of the collection are, "
                f"such as {rows[0]})"
            )
        # A hole in the keys is no reason to doubt all of them.
        lowest, highest = min(map(int, rows)), max(map(int, rows))
        if all(not lowest <= int(key) <= highest for key in whole):
            return f" (the keys of the collection go from {lowest} to {highest})"
        return ""

    example = next((key for key in rows if len(forms_of(key)) == 1), None)
    if not whole or example is None:
        return ""
    hint = f"keys of the collection are texts such as {reprlib.repr(example)}, yours are integers"
    if all(0 <= int(key) < len(rows) for key in whole):
        hint += ": if they number the rows, put the key of each row in their place"
    return f" ({hint})"


def _some_queries(names: Sequence[str], are_ids: bool) -> str:
    return some_of(names if are_ids else [f"number {name}" for name in names])


def _summed(keys: Sequence[Sequence[Key]], counts: Sequence[Sequence[float]]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for of_query, of_keys in zip(keys, counts, strict=True):
        for key, count in zip(of_query, of_keys, strict=True):
            sums[key] = sums.get(key, 0.0) + count
    return sums


def _logged(reasons: Sequence[str]) -> Sequence[str]:
    """Write reasons to the log, and return them."""
    for reason in reasons:
        log.warning("%s", reason)
    return reasons
