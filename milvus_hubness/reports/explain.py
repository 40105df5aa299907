"""Why a row is found or not, why the answers to a query stand where they stand, and the list of hubs and anti-hubs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality import measures
from milvus_hubness.reports.collections import BiasedGallery

DEPTH = 10
"""Rank up to which a row answers a query."""


class Rank(NamedTuple):
    """A row among the results of a bank query: its scores as a search returns them, and its ranks, from 1."""

    query: int
    text: str | None
    raw_score: float
    corrected_score: float
    raw_rank: int
    corrected_rank: int

    @property
    def best(self) -> tuple[int, int]:
        return min(self.raw_rank, self.corrected_rank), self.raw_rank


class RowExplanation(NamedTuple):
    """A row, and the bank queries that have it among their first k results before or after correction, best rank first.
    before, after: the numbers of these. rows_with_less_bias: share of the rows whose bias is smaller."""

    key: Key
    k: int
    bias: float
    strength: float
    rows_with_less_bias: float
    bank_size: int
    before: int
    after: int
    queries: list[Rank]


class Answer(NamedTuple):
    """A row among the answers to a query. Under IP and COSINE, corrected_score is raw_score − strength · bias; under
    L2, where scores are distances, raw_score + 2 · strength · bias."""

    key: Key
    raw_score: float
    bias: float
    corrected_score: float
    raw_rank: int
    corrected_rank: int


class QueryExplanation(NamedTuple):
    """The first answers to a query by their corrected rank, then the named row if it is not among them.
    strength: 0 if the gate leaves the query uncorrected, as `gated` says."""

    text: str | None
    metric: str
    strength: float
    gated: bool
    answers: list[Answer]


class Occurrence(NamedTuple):
    """How many of the queries have a row among their first k results, N_k, before and after correction, and its share
    of all answers."""

    kind: Literal["hub", "anti-hub"]
    key: Key
    before: int
    after: int
    bias: float
    share_before: float
    share_after: float


class Hubs(NamedTuple):
    """The rows with the largest N_k before correction, largest first, and rows with N_k = 0 before it, those with the
    largest bias first. antihubs_before, antihubs_after: numbers of all rows with N_k = 0."""

    k: int
    n_queries: int
    n_items: int
    antihubs_before: int
    antihubs_after: int
    rows: list[Occurrence]


def explain_row(
    biased: BiasedGallery, key: str | Key, texts: Sequence[str] | None = None
) -> RowExplanation:
    """Return why the row of this key is found or not found by the queries of the bank. texts: of these queries. Raises
    InvalidInput for an unknown key."""
    place, strength = _place(biased, key), biased.strength
    items, queries = biased.gallery.layout.reduce_items(biased.gallery.vectors), biased.bank.vectors
    own, weighted = np.full(len(queries), place), strength * biased.biases
    before = measures.ranks(queries, items, own).best
    after = measures.ranks(queries, items, own, weighted).best
    raw = queries @ items[place]
    scores = _scores(biased, raw).tolist(), _scores(biased, raw - weighted[place]).tolist()
    depth = min(DEPTH, len(items))
    names: Sequence[str | None] = texts or [None] * len(queries)
    ranks = map(Rank, range(len(queries)), names, *scores, before.tolist(), after.tolist())
    return RowExplanation(
        key=biased.gallery.keys[place],
        k=depth,
        bias=float(biased.biases[place]),
        strength=strength,
        rows_with_less_bias=float((biased.biases < biased.biases[place]).mean()),
        bank_size=len(queries),
        before=int((before <= depth).sum()),
        after=int((after <= depth).sum()),
        queries=sorted((rank for rank in ranks if rank.best[0] <= depth), key=attrgetter("best")),
    )


def explain_query(
    biased: BiasedGallery,
    queries: BankLike | None,
    number: int,
    *,
    top: int = DEPTH,
    key: str | Key | None = None,
    texts: Sequence[str] | None = None,
) -> QueryExplanation:
    """Return why the first `top` answers to a query stand where they stand, and where the row of `key` stands. queries:
    as the application sends them; None for those of the bank. Raises InvalidInput, DimensionMismatch."""
    layout, keys, reduced = biased.gallery.layout, biased.gallery.keys, _reduced(biased, queries)
    if not 0 <= number < len(reduced):
        raise InvalidInput(
            f"no query {number}: choose one from 0 to {len(reduced) - 1} with --query-number"
        )
    raw = layout.reduce_items(biased.gallery.vectors) @ reduced[number]
    gated = biased.activated is not None and keys[int(raw.argmax())] not in biased.activated
    strength = 0.0 if gated else biased.strength
    corrected = raw - strength * biased.biases
    columns = (
        _scores(biased, raw),
        biased.biases,
        _scores(biased, corrected),
        _ranks(raw),
        _ranks(corrected),
    )
    answers = list(map(Answer, keys, *(column.tolist() for column in columns)))
    shown = sorted(answers, key=attrgetter("corrected_rank"))[:top]
    if key is not None and (own := answers[_place(biased, key)]) not in shown:
        shown.append(own)
    return QueryExplanation(
        None if texts is None else texts[number], layout.metric, strength, gated, shown
    )


def list_hubs(biased: BiasedGallery, queries: BankLike | None = None, *, top: int = 50) -> Hubs:
    """Return `top` hubs and `top` anti-hubs among the rows. queries: those that are counted; by default the bank's.
    Raises DimensionMismatch."""
    reduced, items = (
        _reduced(biased, queries),
        biased.gallery.layout.reduce_items(biased.gallery.vectors),
    )
    k = min(DEPTH, len(items))
    retrieved = (
        measures.nearest(reduced, items, k, bias)
        for bias in (None, biased.strength * biased.biases)
    )
    before, after = (measures.k_occurrence(numbers, len(items), k) for numbers in retrieved)
    total = k * len(reduced)
    columns = before, after, biased.biases, before / total, after / total
    rows = list(zip(biased.gallery.keys, *(column.tolist() for column in columns), strict=True))
    hubs = [
        rows[place] for place in np.argsort(-before, kind="stable")[:top].tolist() if before[place]
    ]
    lost = sorted((row for row in rows if not row[1]), key=lambda row: -row[3])
    listed = [Occurrence("hub", *row) for row in hubs] + [
        Occurrence("anti-hub", *row) for row in lost[:top]
    ]
    return Hubs(k, len(reduced), len(items), len(lost), int((after == 0).sum()), listed)


def _reduced(biased: BiasedGallery, queries: BankLike | None) -> Vectors:
    """Return the queries, by default those of the bank, reduced to inner products. Raises DimensionMismatch."""
    if queries is None:
        return biased.bank.vectors
    bank, layout = QueryBank.of(queries), biased.gallery.layout
    bank.expect_dim(layout.dim, "the field")
    return layout.reduce_queries(bank.vectors)


def _place(biased: BiasedGallery, key: str | Key) -> int:
    """Return the position of the row of this key, or of the key that is written so."""
    place = next((i for i, own in enumerate(biased.gallery.keys) if str(own) == str(key)), None)
    if place is None:
        raise InvalidInput(
            f"{biased.info.name!r} has no row with the key {key!r} and a valid vector: check the key"
        )
    return place


def _ranks(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the rank of each score, from 1 for the highest."""
    return 1 + np.argsort(np.argsort(-scores, kind="stable"))


def _scores(
    biased: BiasedGallery, similarities: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return similarities as searches of the collection's metric return them: under L2 as distances."""
    return -2 * similarities if biased.gallery.layout.metric == "L2" else similarities
