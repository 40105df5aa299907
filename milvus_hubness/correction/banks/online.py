"""The online bank as a weighted reservoir: it merges sampled live queries into its own.

Weighted sampling without replacement (A-Res; Efraimidis and Spirakis, 2006): of n queries, those
with the largest keys u_i^(1/w_i) stay, with u_i uniform on (0, 1). The weights decay with age by
half-lives, counted forward from a fixed time (Cormode et al., 2009, "Forward decay"), so that no
key ever changes. u_i is a hash of the query's number and the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from milvus_hubness.basics.bounds import FrozenModel
from milvus_hubness.correction.banks.bank import Origins, QueryBank, Vectors

Numbers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BLOCK = 256
"""Number of rows whose cosines are compared at once."""

LARGEST_SIZE = 10_000_000
"""Largest capacity of an online bank."""
SHORTEST_HALF_LIFE = 1e-3
LONGEST_HALF_LIFE = 1e12
"""Between them, the weights of queries of this century are finite."""


class Terms(FrozenModel):
    """Settings of the reservoir."""

    size: int = Field(ge=1, le=LARGEST_SIZE)
    """Capacity of the bank."""
    seed_share: float = Field(ge=0, le=1)
    """Share of the capacity that is reserved for queries that the bank started with."""
    half_life_seconds: float = Field(ge=SHORTEST_HALF_LIFE, le=LONGEST_HALF_LIFE)
    """The age at which a query has half the weight."""
    duplicate_cosine: float = Field(gt=0, le=1)
    """Two queries with a cosine above it are duplicates."""
    seed: int = Field(default=0, exclude=True)
    """Seed of the random draws; it is not stored."""

    @property
    def reserved_slots(self) -> int:
        """Number of slots that are reserved for queries that the bank started with."""
        return math.ceil(self.seed_share * self.size)


@dataclass(frozen=True, eq=False)
class Merged:
    """The result of a merge."""

    bank: QueryBank | None
    """The new bank; None if nothing changed."""
    taken: int
    """Number of samples that came in."""
    duplicates: int
    """Number of samples similar to a query of the bank."""
    dropped: int
    """Number of samples that lost the draw, or are zero or not finite."""
    left: int
    """Number of queries that lost their slot."""


def priorities(origins: Origins, terms: Terms) -> Doubles:
    """Return ln w_i − ln(−ln u_i), (n,), with w_i = 2^(t_i / half-life).

    It has the same order as the key u_i^(1/w_i).
    """
    # The keys themselves would all be 1: 1/w_i is below the precision of float64 after 53
    # half-lives.
    uniform = _uniform(origins.numbers, terms.seed)
    log_weights = math.log(2) / terms.half_life_seconds * origins.at.astype(np.float64)
    ordered: Doubles = log_weights - np.log(-np.log(uniform))
    return ordered


def safe_seeds(origins: Origins, terms: Terms) -> Flags:
    """Return which queries of a bank have a reserved slot, bool (n,)."""
    ranked = np.argsort(-priorities(origins, terms), kind="stable")
    ranked_seeds = ranked[origins.are_seeds[ranked]]

    safe = np.zeros(len(origins), bool)
    safe[ranked_seeds[: terms.reserved_slots]] = True
    return safe


def merge(
    bank: QueryBank, origins: Origins, samples: Vectors, sampled: Origins, terms: Terms
) -> Merged:
    """Merge samples into a bank.

    origins: (n,) of the bank's queries. samples: (m, d). sampled: (m,) their origins.

    A sample is not taken if it is a duplicate of a query in the bank, or of a sample with a larger
    key; the bank may have started with duplicates. New queries fill the rows of those that leave. A
    second merge of the same samples changes nothing.
    """
    bank_size = len(bank)
    fresh = _fresh(origins, sampled)
    valid = _valid(samples, fresh)
    # Rows from `bank_size` on are samples, here and below.
    everything = origins + sampled[valid]
    vectors = np.concatenate([bank.vectors, samples[valid]]) if len(valid) else bank.vectors

    members, duplicates = _drawn(vectors, everything, bank_size, terms)
    taken = int((members >= bank_size).sum())

    merged = None
    if not np.array_equal(members, np.arange(bank_size)):
        rows = _in_places(members, bank_size, priorities(everything, terms))
        merged = QueryBank(vectors[rows], bank.source, everything[rows])
    return Merged(
        merged,
        taken=taken,
        duplicates=duplicates,
        dropped=len(fresh) - taken - duplicates,
        left=bank_size - (len(members) - taken),
    )


def distinct_vectors(vectors: Vectors, duplicate_cosine: float) -> Flags:
    """Return which rows are no duplicates of an earlier one that is none, bool (n,)."""
    return _unlike(_units(vectors), np.arange(0), np.arange(len(vectors)), duplicate_cosine)


def _fresh(origins: Origins, sampled: Origins) -> Numbers:
    """Return the samples that the bank does not have yet, once each."""
    fresh = np.flatnonzero(~np.isin(sampled.numbers, origins.numbers))
    _, first = np.unique(sampled.numbers[fresh], return_index=True)
    return fresh[first]


def _valid(samples: Vectors, fresh: Numbers) -> Numbers:
    """Return those of the fresh samples that are finite and not zero."""
    # An empty array of samples may be 1-D: then there is no second axis to check.
    if not len(fresh):
        return fresh
    vectors = samples[fresh]
    return fresh[np.isfinite(vectors).all(1) & vectors.any(1)]


def _drawn(vectors: Vectors, origins: Origins, bank_size: int, terms: Terms) -> tuple[Numbers, int]:
    """Return the rows that the reservoir draws, ascending, and the number of duplicate samples.

    vectors: those of the bank, then the samples.
    """
    units = _units(vectors)
    priority = priorities(origins, terms)
    members = np.arange(bank_size)

    # A query that leaves no longer makes a sample its duplicate, so the draw is repeated until it
    # changes nothing: then a second merge of the same samples changes nothing either.
    while True:
        candidates = np.setdiff1d(np.arange(bank_size, len(vectors)), members)
        candidates = candidates[np.argsort(-priority[candidates], kind="stable")]
        unlike = _unlike(units, members, candidates, terms.duplicate_cosine)

        rows = np.r_[members, candidates[unlike]]
        drawn = _best(rows, priority, origins.are_seeds, terms)
        if np.array_equal(drawn, np.sort(members)):
            return members, int((~unlike).sum())
        members = drawn


def _best(rows: Numbers, priority: Doubles, are_seeds: Flags, terms: Terms) -> Numbers:
    """Return the rows of the new bank, ascending.

    The best seeds have the reserved slots, and the best others what is free.
    """
    ordered = rows[np.argsort(-priority[rows], kind="stable")]
    safe = ordered[are_seeds[ordered]][: terms.reserved_slots]
    others = ordered[~np.isin(ordered, safe)]

    free = max(0, terms.size - len(safe))
    best: Numbers = np.sort(np.r_[safe, others[:free]])
    return best


def _in_places(members: Numbers, bank_size: int, priority: Doubles) -> Numbers:
    """Return the members in the order of the new bank, which moves as few queries as possible.

    Queries that stay keep their rows. Samples, the best first, fill the rows that are free, and
    then follow at the end.
    """
    arrived = members[members >= bank_size]
    arrived = arrived[np.argsort(-priority[arrived], kind="stable")]

    rows = np.arange(bank_size)
    free = np.setdiff1d(rows, members)
    filled = min(len(free), len(arrived))
    rows[free[:filled]] = arrived[:filled]

    ordered: Numbers = np.r_[np.delete(rows, free[filled:]), arrived[filled:]]
    return ordered


def _unlike(units: Vectors, members: Numbers, rows: Numbers, largest_cosine: float) -> Flags:
    """Return which rows are no duplicates, bool (len(rows),).

    Such a row has a cosine of at most `largest_cosine` with all `members`, and with all earlier
    rows that are no duplicates themselves.
    """
    unlike = np.ones(len(rows), bool)
    member_units = units[members]
    for start in range(0, len(rows), BLOCK):
        block = slice(start, start + BLOCK)
        block_units = units[rows[block]]
        earlier_units = units[rows[:start][unlike[:start]]]
        for others in (member_units, earlier_units):
            if len(others):
                unlike[block] &= (block_units @ others.T).max(1) <= largest_cosine

        # Within the block, whether a row counts depends on the rows before it: one after the other.
        is_like_earlier = np.tril(block_units @ block_units.T > largest_cosine, -1)
        for row in np.flatnonzero(is_like_earlier.any(1)):
            unlike[start + row] &= not (is_like_earlier[row] & unlike[block]).any()
    return unlike


def _units(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def _uniform(numbers: Numbers, seed: int) -> Doubles:
    """Return numbers in (0, 1), (n,), by SplitMix64's finalizer of each number and the seed.

    Steele, Lea and Flood, 2014.
    """
    of_seed = _mixed(np.array([seed & (2**64 - 1)], np.uint64))
    mixed = _mixed(numbers.astype(np.uint64) + of_seed)

    # The upper 53 bits, as many as float64 has; half a step more, since 0 has no logarithm.
    steps = (mixed >> np.uint64(11)).astype(np.float64)
    uniform: Doubles = (steps + 0.5) * 2.0**-53
    return uniform


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
