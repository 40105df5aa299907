"""`match`: candidates of a batch of queries, in memory or files, and the matches among them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.arrays import open_archive
from milvus_hubness.basics.files.opening import read_text
from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.basics.requirements import naming_extras
from milvus_hubness.clients.steps import Ask, Compute
from milvus_hubness.correction.banks.bank import BankLike, QueryBank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats, decode, encode
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators.matching import (
    Pairs,
    balanced,
    moments,
    one_to_one,
    spread_of,
)
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.primitives import topk
from milvus_hubness.correction.overrides import RAW
from milvus_hubness.errors import InvalidInput, InvalidParameter, UnreadableFile
from milvus_hubness.milvus.client.messages import Question, expect_question
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.rewrite import copied, raised
from milvus_hubness.milvus.client.searches import Searches
from milvus_hubness.milvus.client.steps import InStore, Operation

if TYPE_CHECKING:
    from milvus_hubness.basics.progress import Progress
    from milvus_hubness.jobs.store.records import CollectionInfo, VectorField

Array = npt.NDArray[Any]

MOST_CANDIDATES = 16_384
"""Largest number of hits in one answer of Milvus."""
HITS_PER_REQUEST = 100_000
"""Largest number of hits in the answers to all queries of a request."""
ROWS_PER_PAGE = 2_000
INPUTS = "inputs.json"
"""The file that says what the other files of a folder depend on."""
QUERIES_PER_ITEM = 64
"""Number of nearest queries of each item that are its candidates."""
SAMPLED_QUERIES = 1_000
"""Number of queries whose scores over all items give the spread."""


@dataclass(frozen=True, eq=False)
class Matches:
    """The rows matched to queries: `matches[i]` is the list of the hits of query i, best first.

    A hit has id, score (the raw one) and matched_score in the metric of the field, raw_rank and
    rank, from 1 among the candidates.
    """

    queries: int
    """The number of queries."""
    columns: Mapping[str, Array] = field(repr=False)
    """The hits as arrays (r,), after the number of the `query`."""
    warnings: list[str]
    """Why the raw ranking may be better."""
    facts: Mapping[str, float]
    """The measurements behind the warnings."""

    @property
    def unmatched(self) -> list[int]:
        """The numbers of the queries without a hit."""
        numbers: list[int] = np.setdiff1d(np.arange(self.queries), self.columns["query"]).tolist()
        return numbers

    def __len__(self) -> int:
        return self.queries

    def __getitem__(self, query: int) -> list[dict[str, Any]]:
        number = range(self.queries)[query]
        # The hits are sorted by their query.
        first, end = np.searchsorted(self.columns["query"], [number, number + 1])
        names = [name for name in self.columns if name != "query"]
        hits = zip(*(self.columns[name][first:end].tolist() for name in names), strict=True)
        return [dict(zip(names, hit, strict=True)) for hit in hits]

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return map(self.__getitem__, range(self.queries))


class Candidates:
    """The pairs of queries and rows that were searched so far.

    inputs: what they depend on, fit for JSON. folder: for files with them, from which an
    interrupted match continues. Raises InvalidInput for files of other inputs, UnreadableFile.
    """

    def __init__(self, inputs: Mapping[str, Any], folder: Path | None) -> None:
        self.searched = 0
        """The number of queries that were searched."""
        self.scanned = 0
        """The number of rows that were read."""
        self.last: Key | None = None
        """The key of the row that was read last."""
        self._moments: Array = np.zeros((3, 1))
        self._numbers: dict[Key, int] = {}
        """The numbers of rows, by key."""
        self._parts: list[Pairs] = []
        self._folder = folder
        self._inputs = dict(inputs)
        if folder is None or not (folder / INPUTS).exists():
            return

        try:
            of_parts = json.loads(read_text(folder / INPUTS))
            for path in sorted(folder.glob("[0-9]*.npz")) if of_parts == inputs else ():
                with open_archive(path) as archive:
                    self._take(archive.read_all())
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise UnreadableFile(
                f"cannot use the parts in {folder} ({error}): remove the folder"
            ) from None

        if of_parts != inputs:
            raise InvalidInput(
                f"{folder} has parts of another match: repeat its options, or remove the folder"
            )

    def add(self, queries: Array, keys: Sequence[Key], scores: Array, **further: Any) -> None:
        """Add pairs: numbers of queries and scores (p,), and keys, each for as many pairs.

        further: `searched`, the number of queries that were
        searched, or for rows `scanned`, `last` and `moments`.
        """
        arrays = {"queries": queries, "keys": np.array(keys), "scores": scores, **further}
        if self._folder is not None:
            self._save(self._folder, arrays)
        self._take(arrays)

    def _save(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        """Write the next file. Raises UnreadableFile."""
        try:
            if not self._parts:
                folder.mkdir(parents=True, exist_ok=True)
                with whole_file(folder / INPUTS) as file:
                    json.dump(self._inputs, file)

            # A killed match leaves no half file to read.
            with whole_file(folder / f"{len(self._parts):08}.npz") as file:
                np.savez(file.buffer, **arrays)
        except OSError as error:
            raise UnreadableFile(f"cannot write parts to {folder}: {error.strerror}") from None

    def _take(self, arrays: Mapping[str, Any]) -> None:
        keys = arrays["keys"].tolist()
        queries = arrays["queries"].astype(np.int32)
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        items = np.repeat(np.array(numbers, np.int32), len(queries) // max(1, len(keys)))
        self._parts.append(Pairs(queries, items, arrays["scores"].astype(np.float32)))
        if "searched" in arrays:
            self.searched += int(arrays["searched"])
        else:
            self.scanned += int(arrays["scanned"])
            self.last = np.asarray(arrays["last"]).item()
            self._moments = self._moments + arrays["moments"]

    def matches(self, queries: int, limit: int, metric: str, *, assign: bool) -> Matches:
        """Return the matches of the first `queries` queries; others only count in the balance."""
        items = len(self._numbers)
        pairs = Pairs.union(self._parts, items)
        biases, warnings, facts = balanced(pairs, items, spread_of(self._moments))

        pairs = pairs.of_first(queries)
        matched = pairs.scores - biases[pairs.items]
        ranks = pairs.ranks(matched)
        raw_ranks = pairs.ranks(pairs.scores)
        chosen = np.flatnonzero(one_to_one(pairs, matched, items) if assign else ranks <= limit)
        # By query, then by rank.
        chosen = chosen[np.lexsort((ranks[chosen], pairs.queries[chosen]))]

        are_whole_numbers = all(type(key) is int for key in self._numbers)
        keys = np.array(list(self._numbers), np.int64 if are_whole_numbers else object)
        sign = np.float32(-2 if metric == "L2" else 1)
        columns = {
            "query": pairs.queries[chosen],
            "id": keys[pairs.items[chosen]],
            "score": sign * pairs.scores[chosen],
            "matched_score": sign * matched[chosen],
            "raw_rank": raw_ranks[chosen],
            "rank": ranks[chosen],
        }
        return Matches(queries, columns, warnings, facts)


def match(
    operations: Operations,
    collection: str,
    queries: BankLike,
    limit: int,
    filter: str,
    search: Mapping[str, Any],
    *,
    candidates: int,
    with_bank: bool,
    one_to_one: bool,
    folder: Path | None,
    progress: Progress | None,
) -> Operation[Matches]:
    """Match queries with the rows of a collection; see `HubnessClient.match`.

    search: further arguments of a search, by name. Raises InvalidInput, InvalidParameter,
    UnreadableFile, DimensionMismatch, MissingExtra.
    """
    with naming_extras():
        from milvus_hubness.basics.progress import silent
        from milvus_hubness.jobs.common.gallery import only_field

    candidates = whole_number("candidates", candidates, at_most=MOST_CANDIDATES)
    limit = whole_number("limit", limit)
    # One to one, a query gets a row at most, whatever the limit is.
    if limit > candidates and not one_to_one:
        raise InvalidParameter(
            f"each query has {candidates} candidates, fewer than limit={limit}: raise candidates"
        )

    search = dict(search)
    params = search.pop("search_params")
    bank = QueryBank.of(queries)
    count = len(bank)

    info = yield InStore(lambda store: store.info(collection))
    field = search["anns_field"] or only_field(info)
    search["anns_field"] = field
    state = info.state_of(field)
    vector = info.vector_fields[field]
    layout = state.layout if state else Layout(vector.dim, vector.known_metric)
    bank.expect_dim(layout.dim, "the field")
    if with_bank:
        if state is None:
            raise InvalidInput(
                f"{info.name!r} is not corrected and has no bank: leave out --with-bank"
            )

        stored = yield from operations.biases.bank(info.name, state, state.profile)
        joined = np.concatenate([bank.vectors, stored.queries.vectors])
        bank = replace(bank, vectors=joined)

    # Files of an interrupted call count only if all of this is the same.
    inputs = {
        "collection": info.name,
        "field": field,
        "filter": filter,
        "filter_params": repr(search.get("filter_params")),
        "partitions": search["partition_names"],
        "search": str(params),
        "candidates": candidates,
        "queries": bank.fingerprint,
    }
    pool = Candidates(inputs, folder)
    report = progress or silent
    matching = _Matching(operations, info, vector, layout, bank, filter, search, pool, report)
    yield from matching.search_queries(candidates, params)
    yield from matching.scan_rows()

    report("balancing", 0, 1)
    matches: Matches = yield Compute(
        lambda: pool.matches(count, limit, layout.metric, assign=one_to_one)
    )
    return matches


@dataclass(frozen=True)
class _Matching:
    """Looks for the candidates of one match, and puts them into `pool`.

    An interrupted match continues: the pool says how far it has come.
    """

    operations: Operations
    info: CollectionInfo
    vector: VectorField
    """The searched field."""
    layout: Layout
    bank: QueryBank
    """The queries to match, and those of the stored bank if they join them."""
    filter: str
    search: Mapping[str, Any]
    """Further arguments of a search, by name."""
    pool: Candidates
    report: Progress

    def search_queries(self, candidates: int, params: Any) -> Operation[None]:
        """Add the rows that the index finds for each query."""
        # Without a listener: a batch does not stand for the queries of users.
        operations = self.operations
        searches = Searches(operations.states, operations.biases, operations.reads, RAW, None)
        pool = self.pool
        at_once = max(1, HITS_PER_REQUEST // candidates)
        while pool.searched < len(self.bank):
            self.report("searching the queries", pool.searched, len(self.bank))
            queries = self.bank.vectors[pool.searched :][:at_once]
            encoded = encode(queries, self.vector.dtype)
            # Each query needs all of its candidates, however few hits the parameters were chosen for.
            expect_question(encoded, None, None, params, {})
            question = Question(
                encoded,
                candidates,
                search_params=raised(copied(params or {}), candidates),
                output_fields=[self.info.key_field],
            )
            answers = yield from searches.search(self.info.name, question, self.filter, self.search)

            hit_counts = [len(hits) for hits in answers]
            numbers = pool.searched + np.repeat(np.arange(len(queries)), hit_counts)
            keys = [key for hits in answers for key in hits.ids]
            # Balancing needs inner products: under L2 the greatest has the smallest distance.
            sign = -0.5 if self.layout.metric == "L2" else 1.0
            scores = np.concatenate([hits.distances for hits in answers]) * sign
            pool.add(numbers, keys, scores, searched=len(queries))

    def scan_rows(self) -> Operation[None]:
        """Add the nearest queries of each row, which the index may have missed."""
        pool = self.pool
        reduced_queries = self.layout.reduce_queries(self.bank.vectors)
        pages = self.operations.pages
        options = {
            "filter": self.filter,
            "partition_names": self.search["partition_names"],
            "timeout": self.search["timeout"],
        }
        if "filter_params" in self.search:
            options["filter_params"] = self.search["filter_params"]
        rows, key_field = yield from pages.begin(Ask("query", (self.info.name,), options))
        fields = [key_field, self.vector.name]
        while page := (yield from pages.page(rows, key_field, pool.last, ROWS_PER_PAGE, fields)):
            self.report("searching the rows", pool.scanned, self.info.rows)
            keys = [row[key_field] for row in page]
            vectors = [row[self.vector.name] for row in page]
            yield Compute(
                partial(_scan, pool, keys, vectors, self.vector, self.layout, reduced_queries)
            )


def _scan(
    pool: Candidates,
    keys: Sequence[Key],
    vectors: Sequence[Any],
    field: VectorField,
    layout: Layout,
    queries: Floats,
) -> None:
    """Add the nearest queries of a page of rows; rows without a valid vector have none."""
    items = decode(vectors, field.dtype)
    valid = np.flatnonzero(~layout.invalid(items)).tolist()
    items = layout.reduce_items(items[valid])
    nearest = topk(items, queries, min(QUERIES_PER_ITEM, len(queries)))
    sampled = np.linspace(0, len(queries) - 1, min(SAMPLED_QUERIES, len(queries)), dtype=np.int64)
    pool.add(
        nearest.indices.ravel(),
        [keys[i] for i in valid],
        nearest.values.ravel(),
        scanned=len(keys),
        last=keys[-1],
        moments=moments(items @ queries[sampled].T),
    )
