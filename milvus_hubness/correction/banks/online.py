"""The online bank as a weighted reservoir: it merges sampled live queries into its own.

Weighted sampling without replacement (A-Res; Efraimidis and Spirakis, 2006): of n queries, those with the
largest keys u_i^(1/w_i) stay, with u_i uniform on (0, 1). The weights decay with age by half-lives, counted
forward from a fixed time (Cormode et al., 2009, "Forward decay"), so that no key ever changes. u_i is a hash
of the query's number and the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from milvus_hubness.correction.banks.bank import Origins, QueryBank, Vectors
from milvus_hubness.correction.state import FrozenModel

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

BLOCK = 256

LARGEST_SIZE = 10_000_000
SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE = 1e-3, 1e12
"""Between them, the weights of queries of this century are finite."""


class Terms(FrozenModel):
    """Settings of the reservoir.

    size: capacity of the bank. seed_share: the share of it that is reserved for queries that the bank started with.
    half_life_seconds: the age at which a query has half the weight. duplicate_cosine: two queries with a cosine
    above it are duplicates. seed: of the random draws; it is not stored.
    """

    size: int = Field(ge=1, le=LARGEST_SIZE)
    seed_share: float = Field(ge=0, le=1)
    half_life_seconds: float = Field(ge=SHORTEST_HALF_LIFE, le=LONGEST_HALF_LIFE)
    duplicate_cosine: float = Field(gt=0, le=1)
    seed: int = Field(default=0, exclude=True)

    @property
    def seed_places(self) -> int:
        return math.ceil(self.seed_share * self.size)


@dataclass(frozen=True, eq=False)
class Merged:
    """The result of a merge.

    bank: the new bank; None if nothing changed. taken: samples that came in; duplicates: samples
    similar to a query of the bank; dropped: samples that lost the draw or are zero or not finite;
    left: queries that lost their slot.
    """

    bank: QueryBank | None
    taken: int
    duplicates: int
    dropped: int
    left: int


def priorities(origins: Origins, terms: Terms) -> npt.NDArray[np.float64]:
    """Return ln w_i − ln(−ln u_i), (n,), with w_i = 2^(t_i / half-life): it has the same order as
    u_i^(1/w_i).
    """
    uniform = _uniform(origins.numbers, terms.seed)
    weights = math.log(2) / terms.half_life_seconds * origins.at.astype(np.float64)
    ordered: npt.NDArray[np.float64] = weights - np.log(-np.log(uniform))
    return ordered


def safe_seeds(origins: Origins, terms: Terms) -> Flags:
    """Return which queries of a bank have a reserved slot, bool (n,)."""
    ranked = np.argsort(-priorities(origins, terms), kind="stable")
    safe = np.zeros(len(origins), bool)
    safe[ranked[origins.are_seeds[ranked]][: terms.seed_places]] = True
    return safe


def merge(
    bank: QueryBank, origins: Origins, samples: Vectors, sampled: Origins, terms: Terms
) -> Merged:
    """Merge samples into a bank.

    origins: (n,) of the bank's queries. samples: (m, d). sampled: (m,) their origins. A sample is
    not taken if it is a duplicate of a query in the bank, or of a sample with a larger key; the
    bank may have started with duplicates. New queries fill the rows of those that leave. A second
    merge of the same samples changes nothing.
    """
    own = len(bank)
    fresh = np.flatnonzero(~np.isin(sampled.numbers, origins.numbers))
    fresh = fresh[np.unique(sampled.numbers[fresh], return_index=True)[1]]
    valid = (
        fresh[np.isfinite(samples[fresh]).all(1) & samples[fresh].any(1)] if len(fresh) else fresh
    )
    everything = origins + sampled[valid]
    vectors = np.concatenate([bank.vectors, samples[valid]]) if len(valid) else bank.vectors
    units = _units(vectors)
    priority = priorities(everything, terms)
    held = np.arange(own)
    while True:
        rest = np.setdiff1d(np.arange(own, len(vectors)), held)
        rest = rest[np.argsort(-priority[rest], kind="stable")]
        unlike = _unlike(units, held, rest, terms.duplicate_cosine)
        chosen = _chosen(np.r_[held, rest[unlike]], priority, everything.are_seeds, terms)
        if np.array_equal(chosen, np.sort(held)):
            break
        held = chosen
    changed = not np.array_equal(held, np.arange(own))
    placed = _placed(held, own, priority)
    duplicates = int((~unlike).sum())
    return Merged(
        QueryBank(vectors[placed], bank.source, everything[placed]) if changed else None,
        taken=int((held >= own).sum()),
        duplicates=duplicates,
        dropped=len(fresh) - int((held >= own).sum()) - duplicates,
        left=own - int((held < own).sum()),
    )


def distinct_vectors(vectors: Vectors, duplicate_cosine: float) -> Flags:
    """Return which rows are no duplicates of an earlier one that is none, bool (n,)."""
    return _unlike(_units(vectors), np.arange(0), np.arange(len(vectors)), duplicate_cosine)


def _chosen(
    rows: Numbers, priority: npt.NDArray[np.float64], are_seeds: Flags, terms: Terms
) -> Numbers:
    """Return the rows of the new bank, in ascending order: the best seeds in reserved slots, then
    the best others.
    """
    ordered = rows[np.argsort(-priority[rows], kind="stable")]
    safe = ordered[are_seeds[ordered]][: terms.seed_places]
    others = ordered[~np.isin(ordered, safe)]
    held: Numbers = np.sort(np.r_[safe, others[: max(0, terms.size - len(safe))]])
    return held


def _placed(held: Numbers, own: int, priority: npt.NDArray[np.float64]) -> Numbers:
    arrived = held[held >= own]
    arrived = arrived[np.argsort(-priority[arrived], kind="stable")]
    places = np.arange(own)
    free = np.setdiff1d(places, held)
    filled = min(len(free), len(arrived))
    places[free[:filled]] = arrived[:filled]
    placed: Numbers = np.r_[np.delete(places, free[filled:]), arrived[filled:]]
    return placed


def _unlike(units: Vectors, held: Numbers, rows: Numbers, most: float) -> Flags:
    """Return which rows have a cosine of at most `most` with all `held` and earlier rows that do,
    bool (len(rows),).
    """
    unlike = np.ones(len(rows), bool)
    against = units[held]
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        block = units[rows[part]]
        earlier = units[rows[:start][unlike[:start]]]
        for others in (against, earlier):
            if len(others):
                unlike[part] &= (block @ others.T).max(1) <= most
        within = np.tril(block @ block.T > most, -1)
        for i in np.flatnonzero(within.any(1)):
            unlike[start + i] &= not (within[i] & unlike[part]).any()
    return unlike


def _units(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def _uniform(numbers: Numbers, seed: int) -> npt.NDArray[np.float64]:
    """Return numbers in (0, 1), (n,), by SplitMix64's finalizer (Steele et al., 2014) of each
    number and the seed.
    """
    mixed = _mixed(numbers.astype(np.uint64) + _mixed(np.array([seed & (2**64 - 1)], np.uint64)))
    uniform: npt.NDArray[np.float64] = (
        (mixed >> np.uint64(11)).astype(np.float64) + 0.5
    ) * 2.0**-53
    return uniform


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
