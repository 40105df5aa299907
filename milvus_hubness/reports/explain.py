"""Explanations of a row that is found or not, of the order of answers, and of hubs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality import measures, retrieval
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.reports.biased import Biased

DEPTH = 10
"""Rank up to which a row answers a query: the k of N_k and of the report."""


class Rank(NamedTuple):
    """A row among the results of a bank query. Scores are as a search returns them."""

    query: int
    """The number of the query."""
    text: str | None
    """The text of the query."""
    raw_score: float
    corrected_score: float
    raw_rank: int
    """From 1."""
    corrected_rank: int
    """From 1."""

    @property
    def best(self) -> tuple[int, int]:
        """The better of both ranks; of equal ones, a better raw rank comes first."""
        return min(self.raw_rank, self.corrected_rank), self.raw_rank


class RowExplanation(NamedTuple):
    """A row, and the bank queries that find it."""

    key: Key
    k: int
    """Number of results up to which a query finds a row."""
    bias: float
    strength: float
    rows_with_less_bias: float
    """Share of the rows whose bias is smaller."""
    bank_size: int
    before: int
    """Number of bank queries that find the row without correction."""
    after: int
    """Number of bank queries that find the row with correction."""
    queries: list[Rank]
    """The bank queries that find the row without or with correction, best rank first."""


class Answer(NamedTuple):
    """A row among the answers to a query."""

    key: Key
    raw_score: float
    by_kind: float
    """What the means of kinds change in the score; 0 without kinds."""
    bias: float
    corrected_score: float
    """Under IP and COSINE raw_score + by_kind − strength · bias; under L2, where scores are
    distances, raw_score + 2 · strength · bias."""
    raw_rank: int
    corrected_rank: int


class QueryExplanation(NamedTuple):
    """Why the answers to a query have their ranks."""

    text: str | None
    metric: str
    strength: float
    """0 if the gate leaves the query without biases."""
    gated: bool
    """Whether the gate leaves the query without biases."""
    kind: str | None
    """The field of the kinds by whose means searches compare, or "auto"; None for none."""
    answers: list[Answer]
    """The first ones by their corrected rank, then the named row if it is not among them."""


class Occurrence(NamedTuple):
    """How often a row is found."""

    kind: Literal["hub", "anti-hub"]
    key: Key
    before: int
    """N_k, the number of queries with the row among their first k results, without correction."""
    after: int
    """N_k with correction."""
    bias: float
    share_before: float
    """Share of all answers without correction."""
    share_after: float
    """Share of all answers with correction."""


class Hubs(NamedTuple):
    """The hubs and the anti-hubs of a collection."""

    k: int
    n_queries: int
    n_items: int
    antihubs_before: int
    """Number of all rows with N_k = 0 without correction."""
    antihubs_after: int
    """Number of all rows with N_k = 0 with correction."""
    rows: list[Occurrence]
    """Hubs, those with the largest N_k without correction first; then anti-hubs, rows with N_k = 0,
    those with the largest bias first."""


def explain_row(
    biased: Biased, key: str | Key, texts: Sequence[str] | None = None
) -> RowExplanation:
    """Return why the row of this key is found or not found by the queries of the bank.

    texts: of these queries. Raises InvalidInput for an unknown key.
    """
    row = _position(biased, key)
    items = biased.items
    queries = biased.raw(biased.bank.vectors)
    sent = biased.sent(biased.bank.vectors)
    weighted_biases = biased.strength * biased.biases

    # The row is the positive of every query, so its ranks are those of a positive.
    right = RightItems.of(np.full(len(queries), row))
    before = retrieval.ranks(queries, items, right).best
    after = retrieval.ranks(sent, items, right, weighted_biases).best

    # Inner products of reduced vectors rank as the metric does, but users know its own scores.
    names: Sequence[str | None] = texts or [None] * len(queries)
    ranks = map(
        Rank,
        range(len(queries)),
        names,
        _as_metric(biased, queries @ items[row]).tolist(),
        _as_metric(biased, sent @ items[row] - weighted_biases[row]).tolist(),
        before.tolist(),
        after.tolist(),
    )

    depth = min(DEPTH, len(items))
    finding = [rank for rank in ranks if rank.best[0] <= depth]
    return RowExplanation(
        key=biased.gallery.keys[row],
        k=depth,
        bias=float(biased.biases[row]),
        strength=biased.strength,
        rows_with_less_bias=float((biased.biases < biased.biases[row]).mean()),
        bank_size=len(queries),
        before=int((before <= depth).sum()),
        after=int((after <= depth).sum()),
        queries=sorted(finding, key=attrgetter("best")),
    )


def explain_query(
    biased: Biased,
    queries: BankLike | None,
    number: int,
    *,
    top: int = DEPTH,
    key: str | Key | None = None,
    texts: Sequence[str] | None = None,
) -> QueryExplanation:
    """Return why the first `top` answers to a query, and the row of `key`, have their ranks.

    queries: as the application sends them; None for those
    of the bank. Raises InvalidInput, DimensionMismatch.
    """
    layout = biased.gallery.layout
    keys = biased.gallery.keys
    reduced = _reduced(biased, queries)
    if not 0 <= number < len(reduced):
        raise InvalidInput(
            f"no query {number}: choose one from 0 to {len(reduced) - 1} with --query-number"
        )

    query = reduced[number : number + 1]
    raw = biased.items @ biased.raw(query)[0]
    unbiased = biased.items @ biased.sent(query)[0]
    # A gate corrects a query only if its best item without biases is activated.
    gated = biased.activated is not None and not biased.activated[int(unbiased.argmax())]
    strength = 0.0 if gated else biased.strength
    corrected = unbiased - strength * biased.biases

    # One column for each field of Answer after the key.
    columns = (
        _as_metric(biased, raw),
        unbiased - raw,
        biased.biases,
        _as_metric(biased, corrected),
        _ranks(raw),
        _ranks(corrected),
    )
    answers = list(map(Answer, keys, *(column.tolist() for column in columns)))

    shown = sorted(answers, key=attrgetter("corrected_rank"))[:top]
    if key is not None:
        of_key = answers[_position(biased, key)]
        if of_key not in shown:
            shown.append(of_key)

    text = None if texts is None else texts[number]
    kind = biased.kinds.kinds.rule.source if biased.kinds is not None else None
    return QueryExplanation(text, layout.metric, strength, gated, kind, shown)


def list_hubs(biased: Biased, queries: BankLike | None = None, *, top: int = 50) -> Hubs:
    """Return `top` hubs and `top` anti-hubs among the rows.

    queries: those that are counted; by default the bank's. Raises DimensionMismatch.
    """
    reduced = _reduced(biased, queries)
    items = biased.items
    k = min(DEPTH, len(items))

    def occurrence(queries: Vectors, bias: npt.NDArray[np.float32] | None) -> measures.Counts:
        retrieved = measures.nearest(queries, items, k, bias)
        return measures.k_occurrence(retrieved, len(items), k)

    before = occurrence(biased.raw(reduced), None)
    after = occurrence(biased.sent(reduced), biased.strength * biased.biases)

    # One column for each field of Occurrence after the key.
    total = k * len(reduced)
    columns = (before, after, biased.biases, before / total, after / total)
    rows = list(zip(biased.gallery.keys, *(column.tolist() for column in columns), strict=True))

    most_frequent = np.argsort(-before, kind="stable")[:top].tolist()
    hubs = [Occurrence("hub", *rows[number]) for number in most_frequent if before[number]]
    lost = [
        Occurrence("anti-hub", *row) for row, count in zip(rows, before, strict=True) if not count
    ]
    # All have the same N_k, so they are listed by how far the correction pushes them back.
    lost.sort(key=attrgetter("bias"), reverse=True)

    return Hubs(
        k=k,
        n_queries=len(reduced),
        n_items=len(items),
        antihubs_before=len(lost),
        antihubs_after=int((after == 0).sum()),
        rows=hubs + lost[:top],
    )


def _reduced(biased: Biased, queries: BankLike | None) -> Vectors:
    """Return the queries, by default those of the bank, reduced to inner products.

    Raises DimensionMismatch.
    """
    if queries is None:
        return biased.bank.vectors
    bank = QueryBank.of(queries)
    layout = biased.gallery.layout
    bank.expect_dim(layout.dim, "the field")
    return layout.reduce_queries(bank.vectors)


def _position(biased: Biased, key: str | Key) -> int:
    """Return the position of the row of this key, or of the key whose text it is."""
    for position, row_key in enumerate(biased.gallery.keys):
        if str(row_key) == str(key):
            return position
    raise InvalidInput(
        f"{biased.title!r} has no row with the key {key!r} and a valid vector: check the key"
    )


def _ranks(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the rank of each score, from 1 for the highest."""
    # The first sort gives the item at each rank, the second turns that into the rank of each item.
    return 1 + np.argsort(np.argsort(-scores, kind="stable"))


def _as_metric(biased: Biased, similarities: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return similarities as searches of the collection's metric return them.

    Under L2 they are distances.
    """
    return -2 * similarities if biased.gallery.layout.metric == "L2" else similarities
