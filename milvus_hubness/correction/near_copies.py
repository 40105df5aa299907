"""Near copies in a query bank: which queries of a log ask for the same.

Users send a popular query again and again, in the same words or in others. Counted one by one, these
raise the bias of the item that answers them, and push down exactly what is wanted most. So near
copies form a group, and a group has the weight of one query (`QueryBank.condensed`).

No fixed similarity separates copies from other queries: paraphrases in one encoder are as near as
different topics in another. Here the gallery decides. The smallest cosine within a group is the one
at which "in one group" and "the same first item under corrected scores" agree best. A method of this
package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import QueryBank, Vectors, not_among
from milvus_hubness.correction.codec.arrays import lengths_of
from milvus_hubness.correction.estimators.base import require_gallery
from milvus_hubness.correction.estimators.blend import default_blend_in_full
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.policy import prefer_torch
from milvus_hubness.correction.kernels.rows import pooled, scored, with_column

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

REPEATS = 1.0
"""The cosine that stands for equal queries."""
COSINES = (
    *(REPEATS, 0.999, 0.995, 0.99, 0.97, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825),
    *(0.8, 0.775, 0.75, 0.725, 0.7, 0.675, 0.65, 0.6, 0.55, 0.5),
)
"""Candidates for the smallest cosine within a group, falling."""
SAMPLED = 3_000
"""Queries on which the cosine is chosen, drawn at random: a log repeats in any part of it."""
FITTED_ITEMS = 20_000
"""Items on which biases are fitted for that choice, spread evenly."""
ROUNDS = 3
"""How often the cosine is chosen; from the second time on by scores less the biases that the groups
of the time before give."""
FEWEST = 80
"""Queries below which the agreement says too little: only repeats are grouped."""
FEWEST_GROUPS = 20
"""Groups without which the cosine stays as raw scores choose it."""
FEWEST_ITEMS = 20
"""Items below which the first one says little of what a query asks for: only repeats are grouped."""
MERGES = 3
"""How often groups are merged at most; mostly the second time changes nothing."""
BLOCK = 1_024
"""Rows that are compared with all leaders at once."""


@dataclass(frozen=True, eq=False)
class NearCopies:
    """A bank with groups, and the cosine from which on two queries ask for the same."""

    bank: QueryBank
    """(m, d), with g groups."""

    cosine: float
    """The smallest within a group; 1 if only repeats are grouped."""

    def near(self, queries: Vectors) -> Flags:
        """Return which groups, (g,), some of the queries (n, d) are near copies of.

        They are at least as near to its mean, or equal to one of its members.
        """
        groups = self.bank.groups
        assert groups is not None, "near copies are those of a bank with groups"
        near = np.zeros(groups.max() + 1, np.bool_)
        near[groups[~not_among(self.bank.vectors, queries)]] = True
        # The mean of several directions is shorter than they are: no cosine of 1 is reached.
        if self.cosine < 1:
            means = _means(directions_of(self.bank.vectors), groups)
            directions = directions_of(queries)
            for start in range(0, len(directions), BLOCK):
                near |= (means @ directions[start : start + BLOCK].T >= self.cosine).any(1)
        return near


def near_copies(
    bank: QueryBank, items: npt.ArrayLike, *, vectors: Vectors | None = None, seed: int = 0
) -> NearCopies:
    """Return the near copies in the bank (m, d); a bank that has groups keeps them.

    items: (n, d), n ≥ 1, the gallery whose first items decide which queries ask for the same. Bank
    and items are reduced to inner products. vectors: (m, e), the queries whose cosines are compared;
    by default those of the bank. Equal seeds give equal groups. Raises DimensionMismatch,
    InvalidInput.
    """
    prefer_torch()
    gallery = require_gallery(bank, items, "the grouping of near copies")
    directions = directions_of(bank.vectors if vectors is None else vectors)
    cosine = smallest_cosine(bank.vectors, directions, gallery, seed=seed)
    if bank.groups is None:
        bank = replace(bank, groups=groups_at(directions, cosine))
    return NearCopies(bank, cosine)


def with_groups(
    bank: QueryBank, items: npt.ArrayLike, *, vectors: Vectors | None = None, seed: int = 0
) -> QueryBank:
    """Return the bank with the groups that `near_copies` finds; as it is if it has groups."""
    if bank.groups is not None:
        return bank
    return near_copies(bank, items, vectors=vectors, seed=seed).bank


def smallest_cosine(
    queries: Vectors, directions: Vectors, items: Vectors, *, seed: int = 0
) -> float:
    """Return the cosine from which on two of the queries (m, d) ask for the same.

    directions: (m, e), the queries at length 1. It is the largest candidate whose agreement is that
    of the best one, up to its error.
    """
    if len(queries) > SAMPLED:
        chosen = np.random.default_rng(seed).permutation(len(queries))[:SAMPLED]
        queries = queries[chosen]
        directions = directions[chosen]
    if len(queries) < FEWEST or len(items) < FEWEST_ITEMS:
        return REPEATS

    # The largest standard error of a mean of so many numbers between 0 and 1. In doubt, queries stay
    # apart: a group that is too large hides what its queries do not share.
    margin = 1 / (2 * math.sqrt(len(queries)))
    cosine = REPEATS
    for done in range(ROUNDS):
        # The first time by raw scores: biases of a log without groups hide what is popular.
        biases = np.zeros(len(items), np.float32)
        if done:
            bank = QueryBank(queries, groups=groups_at(directions, cosine)).condensed
            # Biases of a few groups say more of these than of the items.
            if len(bank) < FEWEST_GROUPS:
                break
            biases = _default_biases(bank, items)
        agreements = _agreements(directions, _first_items(queries, items, biases))
        enough = max(agreements) - margin
        former = cosine
        cosine = next(
            candidate
            for candidate, agreement in zip(COSINES, agreements, strict=True)
            if agreement >= enough
        )
        # The same groups would give the same biases, and choose the same again.
        if done and cosine == former:
            break
    return cosine


def _default_biases(bank: QueryBank, items: Vectors) -> Vectors:
    """Return the biases (n,) of items under the default Blend, fitted on a part of them."""
    items = scored(items, bank.vectors)
    if len(items) <= FITTED_ITEMS:
        return default_blend_in_full(bank, items).gallery_biases(bank, items)
    sample = items[np.linspace(0, len(items) - 1, FITTED_ITEMS, dtype=np.int64)]
    return default_blend_in_full(bank, sample).fit(bank, gallery=sample).bias(items)


def _first_items(queries: Vectors, items: Vectors, biases: Vectors) -> Numbers:
    """Return the first item of each query, (m,), by its scores less the biases (n,)."""
    # One more column subtracts the biases, so that the kernel needs no other pass.
    first: Numbers = topk(with_column(queries, -1), with_column(items, biases), 1).indices[:, 0]
    return first


def _agreements(directions: Vectors, first: Numbers) -> list[float]:
    """Return the agreement of each of `COSINES` for queries (m, d) with these first items (m,).

    It is between the queries near a query and those with the same first item: the mean of their
    B-cubed F1 (Bagga and Baldwin, 1998), in which each query counts alike, and of the F1 of their
    pairs, in which large groups count most, as they do most harm.
    """
    of_same_item = np.bincount(first)[first]
    repeats = _repeats(directions)
    shape = len(COSINES), len(first)
    near_counts = np.zeros(shape)
    both_counts = np.zeros(shape)
    for start in range(0, len(first), BLOCK):
        block = slice(start, start + BLOCK)
        cosines = directions[block] @ directions.T
        # Rounding makes repeats differ a little, and a zero query is near itself too.
        cosines[repeats[block, None] == repeats[None]] = REPEATS
        np.minimum(cosines, REPEATS, out=cosines)
        # Of the pairs that any candidate takes, the first candidate that takes them.
        row, column = np.nonzero(cosines >= COSINES[-1])
        level = np.searchsorted(-np.array(COSINES), -cosines[row, column])
        place = level * len(first) + start + row
        is_same = first[start + row] == first[column]
        near_counts += np.bincount(place, minlength=near_counts.size).reshape(shape)
        both_counts += np.bincount(place[is_same], minlength=near_counts.size).reshape(shape)

    near_counts = near_counts.cumsum(0)
    both_counts = both_counts.cumsum(0)
    precision = (both_counts / near_counts).mean(1)
    recall = (both_counts / of_same_item).mean(1)
    of_queries = 2 * precision * recall / (precision + recall)

    # A query is no pair with itself. Without a pair on either side, there is none to agree on.
    pairs = (near_counts - 1).sum(1) + (of_same_item - 1).sum()
    of_pairs = 2 * (both_counts - 1).sum(1) / np.maximum(pairs, 1)
    agreements: list[float] = ((of_queries + of_pairs) / 2).tolist()
    return agreements


def groups_at(directions: Vectors, cosine: float) -> Numbers:
    """Return the number of each query's group (m,), from 0 up in the order of the first members.

    directions: (m, e), the queries at length 1.

    A query joins a group if its cosine with the group's leader is at least `cosine`. Then groups are
    merged whose members have at least that cosine in the mean: a large group of noisy copies is cut
    into several by the noise of single pairs, which the mean does not have.
    """
    groups = _repeats(directions)
    if cosine < REPEATS:
        # What is repeated most leads, and takes its near copies before others can.
        _, first = np.unique(groups, return_index=True)
        groups = _led(directions[first], np.bincount(groups), cosine)[groups]
        for _ in range(MERGES):
            sizes = np.bincount(groups)
            merged = _led(_means(directions, groups), sizes, cosine)[groups]
            is_settled = merged.max() == groups.max()
            groups = merged
            if is_settled:
                break
    return _numbered(groups)


def _led(rows: Vectors, sizes: Numbers, threshold: float) -> Numbers:
    """Return the number of each row's leader (n,): the nearest with a product from `threshold` on.

    Rows (n, d) without such a leader become leaders, the largest first.
    """
    order = np.argsort(-sizes, kind="stable")
    led = np.empty(len(rows), np.int64)
    leaders: list[int] = []
    for start in range(0, len(rows), BLOCK):
        numbers = order[start : start + BLOCK]
        block = rows[numbers]
        is_led = np.zeros(len(block), np.bool_)
        if leaders:
            products = block @ rows[leaders].T
            nearest = products.argmax(1)
            is_led = products[np.arange(len(block)), nearest] >= threshold
            led[numbers[is_led]] = nearest[is_led]

        # Within the block, one leader after the other takes what is left.
        is_near = block @ block.T >= threshold
        for position in np.flatnonzero(~is_led):
            if is_led[position]:
                continue
            followers = is_near[position] & ~is_led
            followers[position] = True
            led[numbers[followers]] = len(leaders)
            is_led |= followers
            leaders.append(int(numbers[position]))
    return led


def _means(directions: Vectors, groups: Numbers) -> Vectors:
    """Return the mean direction of each group, whose products are the mean cosines of members."""
    return QueryBank(directions, groups=groups).condensed.vectors


def _repeats(directions: Vectors) -> Numbers:
    """Return a number for each query (m,), the same one for equal queries."""
    # Texts of bytes are sorted many times faster than rows of numbers.
    rows = np.ascontiguousarray(directions).view(np.dtype((np.void, directions.strides[0])))
    _, numbers = np.unique(rows.reshape(-1), return_inverse=True)
    return numbers.reshape(-1)


def _numbered(groups: Numbers) -> Numbers:
    """Return the groups with numbers from 0 up, in the order of their first members."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def directions_of(queries: Vectors) -> Vectors:
    """Return the queries at length 1; zero vectors stay zero.

    Queries of several vectors each have the direction of the mean.
    """
    queries = pooled(queries)
    lengths = lengths_of(queries).astype(np.float32)[:, None]
    return np.asarray(queries / np.where(lengths > 0, lengths, 1), np.float32)
