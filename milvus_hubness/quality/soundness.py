"""Is the bank one of the queries that this gallery is asked? What a bad bank looks like, without labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from milvus_hubness.banks import Vectors
from milvus_hubness.kernels import topk

NARROW = 0.43
NARROWER = 0.58
CHOSEN = 0.02
SHIFTED = 0.25
SAMPLE = 10_000


class Reach(NamedTuple):
    """How many items are the nearest of some query.

    reached: so many. share: of the number that as many queries would reach if all items were as likely,
    N·(1 − exp(−n/N)). once: share of the queries whose nearest item no other query has; it estimates how
    likely the next query is to reach a new item (Good, Biometrika 1953).
    """

    queries: int
    items: int
    reached: int
    share: float
    once: float


class Suspicion(NamedTuple):
    """kind: "narrow", "chosen" or "shifted". text: what was seen, for people."""

    kind: str
    text: str


def reach(queries: Vectors, gallery: Vectors, *, device: str = "auto") -> Reach:
    """Of queries (n, d) over the items (N, d)."""
    nearest = topk(queries, gallery, 1, device=device).indices[:, 0]
    counts = np.bincount(nearest, minlength=len(gallery))
    n, items, reached = len(queries), len(gallery), int((counts > 0).sum())
    return Reach(
        n, items, reached, float(reached / (-items * np.expm1(-n / items))), float((counts == 1).sum() / n)
    )


def shift(bank: Vectors, queries: Vectors) -> float:
    """‖mean(bank) − mean(queries)‖² over their mean variance, less what chance gives; 0 for equals."""
    apart = bank.mean(0, dtype=np.float64) - queries.mean(0, dtype=np.float64)
    spreads = [float(part.var(0, dtype=np.float64).sum()) for part in (bank, queries)]
    by_chance = spreads[0] / len(bank) + spreads[1] / len(queries)
    return float(max(0.0, apart @ apart - by_chance) / max(sum(spreads) / 2, 1e-30))


def suspicions(
    bank: Vectors, gallery: Vectors, queries: Vectors | None = None, *, seed: int = 0, device: str = "auto"
) -> list[Suspicion]:
    """What speaks against a bank; nothing for a good one. queries: what is really asked, where known.

    A bank is narrow if its queries' nearest items are fewer than `NARROW` of what evenly spread queries would
    reach, or, where queries are known, fewer than `NARROWER` of what as many of those reach. It is chosen
    rather than drawn if, being narrow, fewer than `CHOSEN` of its queries have a nearest item of their own: a
    bank drawn from a stream of queries has rare ones. It is shifted if `shift` from the queries is above
    `SHIFTED`. On eight real tasks the first is 0.52 or more for their own banks, at most 0.35 for half a bank
    picked to crowd few items and for banks of other data sets; the second at least 0.68 and at most 0.49;
    the shift at most 0.002, and at least 1.7 for other data sets.
    """
    order = np.random.default_rng(seed).permutation(len(bank))[:SAMPLE]
    seen = reach(bank[order], gallery, device=device)
    if queries is None:
        narrow, usual = seen.share < NARROW, "evenly spread queries would reach"
        expected = seen.reached / seen.share
    else:
        n = min(len(queries), len(order))
        query_vectors = reach(queries[:n], gallery, device=device)
        alike = reach(bank[order[:n]], gallery, device=device)
        narrow, usual = alike.reached < NARROWER * query_vectors.reached, "the queries asked reach"
        expected = seen.reached * query_vectors.reached / alike.reached
    found = []
    if narrow:
        found.append(
            Suspicion(
                "narrow",
                f"the nearest items of the bank's {seen.queries} queries are only {seen.reached} of "
                f"{seen.items}, where {usual} about {expected:.0f}: the bank is from another domain, or "
                f"covers a corner of this one",
            )
        )
        if seen.once < CHOSEN:
            found.append(
                Suspicion(
                    "chosen",
                    f"{100 * seen.once:.1f}% of the bank's queries have a nearest item of their own: such a "
                    f"bank is not drawn from a stream of queries but picked to crowd few items",
                )
            )
    apart = 0.0 if queries is None else shift(bank, queries)
    if apart > SHIFTED:
        found.append(
            Suspicion(
                "shifted",
                f"bank and queries lie {apart:.2f} of their variance apart (a bank of the same kind: "
                f"under {SHIFTED}): they are of different kinds",
            )
        )
    return found
