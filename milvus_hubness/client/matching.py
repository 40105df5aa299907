"""`match`: candidates of a batch of queries from the database, kept in memory or files, and the matches among them."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank
from milvus_hubness.banks.generations import Key
from milvus_hubness.client.messages import Question
from milvus_hubness.client.operations import Operations
from milvus_hubness.client.searches import Searches
from milvus_hubness.client.steps import Ask, Compute, InStore, Operation
from milvus_hubness.codec.arrays import Floats, as_metric, decode, encode
from milvus_hubness.codec.layout import Layout
from milvus_hubness.errors import InvalidInput, UnreadableFile, naming_extras
from milvus_hubness.estimators.matching import Pairs, balanced, moments, one_to_one, spread_of
from milvus_hubness.kernels.primitives import topk, whole_number
from milvus_hubness.stores.milvus_server import is_one_of

if TYPE_CHECKING:
    from milvus_hubness.operations.progress import Progress
    from milvus_hubness.stores.records import VectorField

Array = npt.NDArray[Any]

MOST_CANDIDATES = 16_384
HITS_PER_REQUEST, ROWS_PER_PAGE, KEYS_PER_REQUEST = 100_000, 2_000, 8_000
QUERIES_PER_ITEM = 64
"""Number of nearest queries of each item that are its candidates."""
SAMPLED_QUERIES = 1_000
"""Number of queries whose scores over all items give the spread."""


@dataclass(frozen=True, eq=False)
class Matches:
    """The rows matched to queries: `matches[i]` is the list of the hits of query i, best first.

    A hit has id, score (the raw one) and matched_score in the metric of the field, raw_rank and rank, from 1 among the
    candidates, and entity with the output fields. columns: all this of all hits but the entities, after the number of
    the `query`, as arrays (r,). warnings: why the raw ranking may be better. facts: the measurements behind them.
    """

    queries: int
    columns: Mapping[str, Array] = field(repr=False)
    warnings: list[str]
    facts: Mapping[str, float]
    entities: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def unmatched(self) -> list[int]:
        """The numbers of the queries without a hit."""
        numbers: list[int] = np.setdiff1d(np.arange(self.queries), self.columns["query"]).tolist()
        return numbers

    @property
    def changed(self) -> float:
        """The share of the queries whose first hit is not the first by raw score."""
        _, first = np.unique(self.columns["query"], return_index=True)
        return float((self.columns["raw_rank"][first] > 1).sum() / self.queries)

    def __len__(self) -> int:
        return self.queries

    def __getitem__(self, query: int) -> list[dict[str, Any]]:
        number = range(self.queries)[query]
        own = slice(*np.searchsorted(self.columns["query"], [number, number + 1]))
        names = [name for name in self.columns if name != "query"]
        hits = zip(*(self.columns[name][own].tolist() for name in names), strict=True)
        return [{**dict(zip(names, hit, strict=True)), "entity": dict(self.entities.get(hit[0], {}))} for hit in hits]

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return map(self.__getitem__, range(self.queries))


class Candidates:
    """The pairs that were searched so far. inputs: what they depend on, fit for JSON. folder: for files with them, from
    which an interrupted match continues. Raises InvalidInput for files of other inputs, UnreadableFile."""

    def __init__(self, inputs: Mapping[str, Any], folder: Path | None) -> None:
        self.searched, self.scanned = 0, 0
        self.last: Key | None = None
        self.moments: Array = np.zeros((3, 1))
        self.numbers: dict[Key, int] = {}
        self._parts: list[tuple[Array, Array, Array]] = []
        self._folder, self._files = folder, 0
        if folder is None:
            return
        about = folder / "inputs.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not about.exists():
                about.write_text(json.dumps(inputs))
            elif json.loads(about.read_text()) != inputs:
                raise InvalidInput(f"{folder} has parts of another match: repeat its options, or remove the folder")
            for path in sorted(folder.glob("*.npz")):
                with np.load(path, allow_pickle=False) as part:
                    self._take(part)
                self._files += 1
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise UnreadableFile(f"cannot use the parts in {folder} ({error}): remove the folder") from None

    def add(self, queries: Array, keys: Sequence[Key], scores: Array, **further: Any) -> None:
        """Add pairs: numbers of queries and scores (p,), and a key for each pair or for as many pairs as another key.
        further: `searched`, the number of queries that were searched, or of items: `scanned`, `last` and `moments`."""
        part = {"queries": queries, "keys": np.array(keys), "scores": np.asarray(scores, np.float32), **further}
        if self._folder is not None:
            path = self._folder / f"{self._files:08}.npz"
            with path.with_suffix(".unfinished").open("wb") as file:
                np.savez(file, **part)
            os.replace(path.with_suffix(".unfinished"), path)
            self._files += 1
        self._take(part)

    def _take(self, part: Mapping[str, Any]) -> None:
        keys = part["keys"].tolist()
        numbers = np.array([self.numbers.setdefault(key, len(self.numbers)) for key in keys], np.int64)
        queries = np.asarray(part["queries"], np.int64)
        self._parts.append((queries, np.repeat(numbers, len(queries) // max(1, len(keys))), part["scores"]))
        if "searched" in part:
            self.searched += int(part["searched"])
        else:
            self.scanned += int(part["scanned"])
            self.last = np.asarray(part["last"]).item()
            self.moments = self.moments + part["moments"]

    def matches(self, queries: int, limit: int, metric: str, *, assign: bool) -> Matches:
        """Return the matches of the first `queries` queries; further ones only take part in the balance."""
        pairs, items = Pairs.union(*(np.concatenate(column) for column in zip(*self._parts, strict=True))), self.numbers
        biases, warnings, facts = balanced(pairs, len(items), spread_of(self.moments))
        pairs = pairs.of_first(queries)
        matched = pairs.scores - biases[pairs.items]
        ranks, raw_ranks = pairs.ranks(matched), pairs.ranks(pairs.scores)
        chosen = np.flatnonzero(one_to_one(pairs, matched, len(items)) if assign else ranks <= limit)
        chosen = chosen[np.lexsort((ranks[chosen], pairs.queries[chosen]))]
        keys = np.array(list(items), np.int64 if all(type(key) is int for key in items) else object)
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


class MatchOptions(NamedTuple):
    """Options of `match`; see `HubnessClient.match`."""

    limit: int
    candidates: int
    with_bank: bool
    one_to_one: bool
    folder: Path | None
    progress: Progress | None


def match(
    operations: Operations, collection: str, data: BankLike, filter: str, search: Mapping[str, Any], how: MatchOptions
) -> Operation[Matches]:
    """Match queries with the rows of a collection. search: the other arguments of a search, by name. Raises
    InvalidInput, InvalidParameter, UnreadableFile, DimensionMismatch, MissingExtra."""
    with naming_extras():
        from milvus_hubness.kernels import steps  # noqa: F401  (a missing extra is reported before any search)
        from milvus_hubness.operations.inputs import only_field
        from milvus_hubness.operations.progress import silent
    candidates = whole_number("candidates", how.candidates, at_most=MOST_CANDIDATES)
    limit = whole_number("limit", how.limit, at_most=candidates)
    search, report = dict(search), how.progress or silent
    output_fields, params, field = search.pop("output_fields"), search.pop("search_params"), search.pop("anns_field")
    bank = QueryBank.of(data)
    info = yield InStore(lambda store: store.info(collection))
    field = field or only_field(info)
    state = info.state_of(field)
    vector = info.vector_fields[field]
    layout = state.layout if state else Layout(vector.dim, as_metric(vector.metric))
    bank.expect_dim(layout.dim, "the field")
    if how.with_bank:
        if state is None:
            raise InvalidInput(f"{info.name!r} is not corrected and has no bank: match without it")
        stored = yield from operations.biases.bank(info.name, state, state.profile)
        bank = replace(bank, vectors=np.concatenate([bank.vectors, stored.queries.vectors]), origins=None)
    inputs = {"collection": info.name, "field": field, "filter": filter, "partitions": search["partition_names"]}
    pool = Candidates({**inputs, "candidates": candidates, "queries": bank.fingerprint}, how.folder)
    searches = Searches(operations.states, operations.biases, operations.reads, 0.0, None)
    while pool.searched < len(bank):
        report("searching the queries", pool.searched, len(bank))
        part = bank.vectors[pool.searched :][: max(1, HITS_PER_REQUEST // candidates)]
        vectors, fields = encode(part, vector.dtype), [info.key_field]
        question = Question(vectors, candidates, search_params=params, output_fields=fields, strength=0.0)
        answers = yield from searches.search(info.name, question, filter, {**search, "anns_field": field})
        numbers = pool.searched + np.repeat(np.arange(len(part)), [len(hits) for hits in answers])
        scores = np.concatenate([hits.distances for hits in answers]) * (-0.5 if layout.metric == "L2" else 1.0)
        pool.add(numbers, [key for hits in answers for key in hits.ids], scores, searched=len(part))
    queries, pages = layout.reduce_queries(bank.vectors), operations.pages
    rows = Ask("query", (info.name,), {"filter": filter, **{k: search[k] for k in ("partition_names", "timeout")}})
    rows, key_field = yield from pages.begin(rows)
    while page := (yield from pages.page(rows, key_field, pool.last, ROWS_PER_PAGE, [key_field, field])):
        report("searching the rows", pool.scanned, info.rows)
        keys, vectors = [row[key_field] for row in page], [row[field] for row in page]
        yield Compute(partial(_scan, pool, keys, vectors, vector, layout, queries))
    count = len(QueryBank.of(data)) if how.with_bank else len(bank)
    matches: Matches = yield Compute(lambda: pool.matches(count, limit, layout.metric, assign=how.one_to_one))
    entities: dict[Key, Mapping[str, Any]] = {}
    keys = list(dict.fromkeys(matches.columns["id"].tolist())) if output_fields else []
    for start in range(0, len(keys), KEYS_PER_REQUEST):
        where = is_one_of(key_field, keys[start : start + KEYS_PER_REQUEST])
        options = {"output_fields": [key_field, *output_fields], "timeout": search["timeout"]}
        entities |= {
            row[key_field]: row for row in (yield from operations.reads.read(Ask("query", (info.name, where), options)))
        }
    return replace(matches, entities=entities)


def _scan(
    pool: Candidates, keys: Sequence[Key], vectors: Sequence[Any], field: VectorField, layout: Layout, queries: Floats
) -> None:
    """Add the nearest queries of a page of rows; rows without a valid vector have none."""
    items = decode(vectors, field.dtype)
    valid = np.flatnonzero(~layout.invalid(items)).tolist()
    items = layout.reduce_items(items[valid])
    near = topk(items, queries, min(QUERIES_PER_ITEM, len(queries)))
    sample = queries[np.linspace(0, len(queries) - 1, min(SAMPLED_QUERIES, len(queries)), dtype=np.int64)]
    pool.add(
        near.indices.ravel(),
        [keys[i] for i in valid],
        near.values.ravel(),
        scanned=len(keys),
        last=keys[-1],
        moments=moments(items @ sample.T),
    )
