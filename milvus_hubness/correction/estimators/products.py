"""Biases from the inner products of items with the whole bank.

A client that writes rows needs these products for the locality hints too, and a `Blend` needs them
for each of its estimators. One product that serves all of them takes a half to a third of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.floating[Any]]

MOST_PRODUCTS = 1 << 24
"""Largest number of inner products of new items and the whole bank in memory at once."""

ROUNDS = 5
"""Number of rounds in which the room and the biases of new items are computed from one another."""


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


def logsumexp_with_room(
    products: Numbers, potentials: Numbers, tau: float, fitted_items: int
) -> Doubles:
    """Return biases (n,) of items that came together, after a fit of potentials f (m,).

    products: (n, m), of the new items and the bank. fitted_items: number of items of the fit.

    Without room for each other, the new items would get the biases of items that came alone. The
    fitted items take e^(−f_i/τ) · fitted_items / m of query i, and the new ones Σ_j e^((s_ij −
    b_j)/τ). A refit would also lower the biases of the fitted items, on average as much as the
    potentials. Here these biases stay, and so does the mean of the potentials.
    """
    highest, terms = _terms(products + potentials, tau)
    bank_size = terms.shape[1]
    # A query that very many new items want has almost no room, but a logarithm below.
    smallest = np.finfo(terms.dtype).tiny

    # e^((f'_i − f_i)/τ), f' the potentials with room for the new items.
    room = np.ones(bank_size, terms.dtype)
    sums = terms @ room
    for _ in range(ROUNDS):
        # Σ_j e^((s_ij + f_i − b_j)/τ): what the new items take of query i at their present biases.
        taken = (1 / sums) @ terms
        room = np.maximum(1 / (1 + bank_size / fitted_items * taken), smallest)
        sums = terms @ room

    # The mean of the potentials stays, since the biases of the fitted items do.
    mean = np.log(room).sum(dtype=np.float64) / bank_size
    return np.asarray(highest + tau * (np.log(sums, dtype=np.float64) - mean), np.float64)


def _terms(scores: Numbers, tau: float) -> tuple[Numbers, Numbers]:
    """Return the highest of each row of scores (n, m), (n,), and e^((s − highest)/τ), (n, m)."""
    # No term is above 1, so none overflows however small τ is.
    highest = scores.max(1)
    terms = scores - highest[:, None]
    # Dividing by a tiny τ may give −infinity, whose exponential is 0, as it should be.
    with np.errstate(over="ignore"):
        terms /= max(tau, float(np.finfo(terms.dtype).tiny))
    return highest, np.exp(terms, out=terms)
