"""Faults of vectors that look like hubness, or that make any figure about them worthless.

Each is counted on the vectors as the user has them. The thresholds say from where on a count is worth
a line; none of them decides a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.codec.arrays import Metric
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.kernels.rows import pooled
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.quality import measures, retrieval
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.right_items import RightItems

GRAVE_SHARE = 0.1
"""Share of rows without a vector of their own from which on the figures say little."""
FEW_COPIES = 0.01
"""Share of rows that are copies of others up to which they are as in any collection."""
LARGE_GROUP = 10
"""Rows with one vector from which on it looks like a placeholder."""
ITEMS_AMONG_QUERIES = 0.05
"""Share of the queries that are items from which on it is worth a line."""
SAME_DIRECTION = 0.9999
"""Cosine from which on two vectors are one, saved in half precision or at another length."""
MOSTLY_ITEMS = 0.5
"""Share from which on they are no queries."""
UNEVEN_LENGTHS = 0.05
"""Standard deviation of the lengths, as a share of their mean, from which on they can decide."""
LONG_ANSWERS = 0.8
"""Mean rank of the length of the first answers, from 0 to 1, from which on the length decides: 0.5 is
by chance."""
METRIC_GAIN = 0.02
"""Gain in R@1 by another metric from which on it is worth a line, if its interval is above 0."""
SEARCHED = 2_000
"""Queries that are searched, and items per query at most 20,000."""
MOST_ITEMS = 20_000
DEPTH = 10
CHANCE_FACTOR = 3
"""The right item is among the first ten as rarely as by chance if it is up to so many times as often."""
FEWEST_ITEMS = 200
"""Items below which chance finds too much."""


ITSELF = (
    "the ids of queries are keys of rows, so a search finds the query itself first; if that is no "
    "answer, as in ArguAna and Quora, pass --ignore-identical, as evaluators do"
)
"""The remedy where the queries are rows by their ids."""


class Fault(NamedTuple):
    """One fault, with its remedy."""

    name: str
    text: str
    remedy: str
    is_grave: bool = False
    """Whether no figure about these data is worth anything before it is remedied."""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}"


def data_faults(
    items: Vectors,
    bank: QueryBank,
    metric: Metric,
    *,
    unusable: int = 0,
    queries: Vectors | LabelledQueries | None = None,
    share_with_ids: float = 0.0,
    seed: int = 0,
) -> list[Fault]:
    """Return the faults of items (n, d) and of the queries that search them.

    Of rows of several vectors, the means of these are looked at; how their items answer, no mean says.
    unusable: number of further items, whose vectors are zero. queries: (m, d), those with right items
    or real ones apart from the bank. share_with_ids: the share of these that have the id of an item.
    """
    rng = np.random.default_rng(seed)
    are_scored = not is_token_rows(bank.vectors)
    items = pooled(items)
    past = pooled(bank.vectors)
    right = None
    if isinstance(queries, LabelledQueries):
        right = queries.right
        queries = queries.queries
    queries = None if queries is None else pooled(queries)
    zero = ~items.any(1)
    faults = [
        *_on_zeros(unusable + int(zero.sum()), unusable + len(items)),
        *_on_constants(items[~zero]),
        *_on_copies(items[~zero]),
        *_on_queries(past, queries),
    ]
    # Where items are no answers to themselves, the caller knows that they are queries.
    if right is None or right.own is None:
        remedy = ITSELF if share_with_ids >= ITEMS_AMONG_QUERIES else None
        if right is not None and queries is not None:
            faults += _on_items_among(queries, items, "the queries with right rows", rng, remedy)
        faults += _on_items_among(past, items, "the bank", rng, remedy)
    if not are_scored:
        return faults

    searched = queries if queries is not None else past
    chosen = np.sort(rng.permutation(len(searched))[:SEARCHED])
    searched = searched[chosen]
    if right is not None:
        faults += _on_right_items(searched, items, right.take(chosen), metric, seed)
    else:
        some = np.sort(rng.permutation(len(items))[:MOST_ITEMS])
        faults += _on_long_answers(searched, items[some], metric)
    return faults


def _on_zeros(count: int, total: int) -> Iterator[Fault]:
    if count:
        yield Fault(
            "zero vectors",
            f"{_rows(count, total)} a zero vector",
            "their embedding failed, so embed them again or delete them",
            count >= GRAVE_SHARE * total,
        )


def _on_constants(items: Vectors) -> Iterator[Fault]:
    if items.shape[1] < 2:
        return
    count = int((np.ptp(items, axis=1) == 0).sum())
    if count:
        yield Fault(
            "constant vectors",
            f"{_rows(count, len(items))} a vector of equal numbers",
            "these are placeholders, so embed them again or delete them",
            count >= GRAVE_SHARE * len(items),
        )


def _on_copies(items: Vectors) -> Iterator[Fault]:
    # Constant ones have a line of their own.
    rows = items[np.ptp(items, axis=1) > 0] if items.shape[1] > 1 else items
    if not len(rows):
        return
    sizes = np.array(list(_groups(rows).values()))
    copies = int(sizes.sum() - len(sizes))
    largest = int(sizes.max())
    if copies <= FEW_COPIES * len(rows) and largest < LARGE_GROUP:
        return
    yield Fault(
        "duplicates",
        f"{_rows(copies, len(rows))} the vector of another row; one vector is there "
        f"{largest:,} times",
        "if it is a placeholder, embed these rows again; of one item under several keys, keep one",
        largest >= GRAVE_SHARE * len(rows) and largest >= LARGE_GROUP,
    )


def _on_queries(past: Vectors, queries: Vectors | None) -> Iterator[Fault]:
    for vectors, name in ((past, "the bank"), (queries, "the queries")):
        count = 0 if vectors is None else int((~vectors.any(1)).sum())
        if count and vectors is not None:
            yield Fault(
                "zero queries",
                f"{count:,} of the {len(vectors):,} queries of {name} are zero vectors",
                "their embedding failed, so leave them out",
                count >= GRAVE_SHARE * len(vectors),
            )


def _on_items_among(
    vectors: Vectors,
    items: Vectors,
    name: str,
    rng: np.random.Generator,
    known_remedy: str | None = None,
) -> Iterator[Fault]:
    """Yield that items are among queries. known_remedy: if their ids say that they are items."""
    some = np.sort(rng.permutation(len(vectors))[:SEARCHED])
    queries = _unit(vectors[some])
    directions = _unit(items)
    first = measures.nearest(queries, directions, 1)[:, 0]
    count = int((np.einsum("qd,qd->q", queries, directions[first]) >= SAME_DIRECTION).sum())
    if count < ITEMS_AMONG_QUERIES * len(queries):
        return
    are_items = count >= MOSTLY_ITEMS * len(queries)
    remedy = "remove them, unless users search by items"
    if are_items:
        remedy = (
            "they look like items and not like queries of users, so is it the wrong file, or are two "
            "of them swapped?"
        )
    yield Fault(
        "items as queries",
        f"{count:,} of the {len(queries):,} vectors of {name} are those of items",
        known_remedy or remedy,
        are_items,
    )


def _on_right_items(
    queries: Vectors, items: Vectors, right: RightItems, metric: Metric, seed: int
) -> Iterator[Fault]:
    """Yield that right items are found by chance, or better by another metric."""
    values: dict[Metric, npt.NDArray[np.float64]] = {}
    best: npt.NDArray[np.int64] | None = None
    for name in dict.fromkeys((metric, "COSINE", "IP", "L2")):
        layout = Layout(items.shape[1], name)
        is_valid = ~layout.invalid(items)
        # A zero vector has no direction, and is no answer then.
        reduced_items = layout.reduce_items(np.where(is_valid[:, None], items, 1))
        reduced_queries = layout.reduce_queries(queries)
        ranks = retrieval.ranks(reduced_queries, reduced_items, right)
        values[name] = retrieval.R_AT_1.values(ranks)
        if name == metric:
            best = ranks.best

    assert best is not None, "the metric is one of those"
    found = float((best <= DEPTH).mean())
    by_chance = DEPTH * float(right.counts.mean()) / len(items)
    if len(items) >= FEWEST_ITEMS and found <= CHANCE_FACTOR * by_chance:
        yield Fault(
            "right rows by chance",
            f"a right row is among the first {DEPTH} for {found:.1%} of the pairs only, hardly more "
            f"than by chance ({by_chance:.1%})",
            "are the keys those of the right rows, are queries and items of one model, and is no "
            "file in place of another?",
            True,
        )
        return

    others = {name: value for name, value in values.items() if name != metric}
    better = max(others, key=lambda name: float(others[name].mean()))
    gain = measures.paired_difference(
        values[metric], others[better], np.ones(len(queries)), seed=seed
    )
    if gain.low > 0 and gain.estimate >= METRIC_GAIN:
        yield Fault(
            "metric",
            f"R@1 of the pairs is {values[metric].mean():.1%} by {metric} and "
            f"{others[better].mean():.1%} by {better}",
            "is the metric of the index that of the model?",
        )


def _on_long_answers(queries: Vectors, items: Vectors, metric: Metric) -> Iterator[Fault]:
    """Yield that the longest vectors answer, which hardly any model means."""
    lengths = np.linalg.norm(items, axis=1)
    mean = float(lengths.mean())
    if metric != "IP" or mean == 0 or lengths.std() <= UNEVEN_LENGTHS * mean:
        return
    rank_of = np.empty(len(items))
    rank_of[np.argsort(lengths, kind="stable")] = np.linspace(0, 1, len(items))
    first = measures.nearest(queries, items, 1)[:, 0]
    mean_rank = float(rank_of[first].mean())
    if mean_rank >= LONG_ANSWERS:
        yield Fault(
            "metric",
            f"by IP the first answers are the longest vectors: on average longer than "
            f"{mean_rank:.0%} of the items",
            "is the model made for COSINE? Pairs would show it (--pairs)",
        )


def _rows(count: int, total: int) -> str:
    verb = "has" if count == 1 else "have"
    return f"{count:,} of {total:,} rows {verb}"


def _groups(rows: Vectors) -> dict[bytes, int]:
    """Return the number of rows of each vector."""
    sizes: dict[bytes, int] = {}
    for row in rows:
        content = row.tobytes()
        sizes[content] = sizes.get(content, 0) + 1
    return sizes


def _unit(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; zero vectors stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)
