"""Biases from the inner products of items with the whole bank.

A client that writes rows needs these products for the locality hints too, and a `Blend` needs them
for each of its estimators. One product that serves all of them takes a half to a third of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.floating[Any]]

MOST_PRODUCTS = 1 << 24
"""Largest number of inner products of new items and the whole bank in memory at once."""

ROUNDS = 5
"""Number of rounds in which the room and the biases of new items are computed from one another."""

FULL_SHARE = 0.1
"""New items of one batch that count in full, as a share of the fitted items.

The others count by how much the bank asks for them. Chosen with that rule on three tasks of
`python -m benchmarks.new_rows --part many`: 0 to 20% do nearly equally well, there and on the four
others. With 10%, batches of everyday size leave the room that they would without a limit. Without
one, a topic that the bank lacks and that is as large as the gallery costs Sinkhorn up to 2.8 points
of R@1.
"""


def topk_mean_of(scores: Numbers, k: int) -> Doubles:
    """Return the mean of the k largest of each row of scores (n, m), (n,), 1 ≤ k ≤ m."""
    # `partition` puts the largest last, in any order; a sort would take several times as long.
    first = scores.shape[1] - k
    largest = np.partition(scores, first, axis=1)[:, first:]
    means: Doubles = largest.mean(1, dtype=np.float64)
    return means


def logsumexp_of(scores: Numbers, tau: float) -> Doubles:
    """Return τ · log Σ_i exp(s_i/τ) of each row of scores (n, m), (n,)."""
    highest, terms = _terms(scores, tau)
    sums = terms.sum(1, dtype=np.float64)
    return np.asarray(highest + tau * np.log(sums), np.float64)


class FittedItems(NamedTuple):
    """What is known of the items of a fit when others come later."""

    number: int
    """Their number."""

    mean_bias: float
    """The mean of their biases."""


def logsumexp_with_room(
    products: Numbers,
    potentials: Numbers,
    tau: float,
    fitted: FittedItems,
    full_share: float = FULL_SHARE,
) -> Doubles:
    """Return biases (n,) of items that came together, after a fit of potentials f (m,).

    products: (n, m), of the new items and the bank. full_share: so many of them, as a share of the
    fitted items, count in full.

    Without room for each other, the new items would get the biases of items that came alone. The
    fitted items take e^(−f_i/τ) · fitted items / m of query i. The new ones take Σ_j e^((s_ij −
    b_j)/τ), of which the share of `_counted_share` counts. A refit would also lower the biases of
    the fitted items, on average as much as the potentials. Here these biases stay, and so does the
    mean of the potentials.
    """
    highest, terms = _terms(products + potentials, tau)
    bank_size = terms.shape[1]
    # A query that very many new items want has almost no room, but a logarithm below.
    smallest = np.finfo(terms.dtype).tiny

    # e^((f'_i − f_i)/τ), f' the potentials with room for the new items.
    room = np.ones(bank_size, terms.dtype)
    sums = terms @ room

    alone = highest + tau * np.log(sums, dtype=np.float64)
    counted = _counted_share(alone, tau, fitted, full_share)
    weight = counted * (bank_size / fitted.number)
    for _ in range(ROUNDS):
        # Σ_j e^((s_ij + f_i − b_j)/τ): what the new items take of query i at their present biases.
        taken = (1 / sums) @ terms
        room = np.maximum(1 / (1 + weight * taken), smallest)
        sums = terms @ room

    # The mean of the potentials stays, since the biases of the fitted items do.
    mean = np.log(room).sum(dtype=np.float64) / bank_size
    return np.asarray(highest + tau * (np.log(sums, dtype=np.float64) - mean), np.float64)


def _counted_share(alone: Doubles, tau: float, fitted: FittedItems, full_share: float) -> float:
    """Return how much of what new items take of the bank counts, between 0 and 1.

    alone: (n,), their biases if each of them came alone.

    In the balance, every item takes as much of the bank as any other: also one that no query asks
    for, such as those of a topic that came after the bank. Many of these crowd each other out of
    queries that ask for fitted items, lower each other's biases, and win the answers. At the fitted
    items' mean bias c, an item takes e^((b − c)/τ) of what it would in the balance. A batch counts
    by its mean b, and not in part where that is above c; so its order does not matter.
    """
    in_full = full_share * fitted.number / len(alone)
    if in_full >= 1:
        return 1.0

    # Dividing by a tiny τ may give an infinity, whose exponential is 0 or 1, as it should be.
    with np.errstate(over="ignore"):
        above = (alone.mean() - fitted.mean_bias) / max(tau, np.finfo(np.float64).tiny)
    return max(in_full, float(np.exp(min(above, 0.0))))


def _terms(scores: Numbers, tau: float) -> tuple[Numbers, Numbers]:
    """Return the highest of each row of scores (n, m), (n,), and e^((s − highest)/τ), (n, m)."""
    # No term is above 1, so none overflows however small τ is.
    highest = scores.max(1)
    terms = scores - highest[:, None]
    # Dividing by a tiny τ may give −infinity, whose exponential is 0, as it should be.
    with np.errstate(over="ignore"):
        terms /= max(tau, float(np.finfo(terms.dtype).tiny))
    return highest, np.exp(terms, out=terms)
