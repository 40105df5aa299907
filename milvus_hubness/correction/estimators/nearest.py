"""Biases from the nearest bank rows of an item alone, for banks that are searched instead of held in memory.

The largest terms dominate a log-sum-exp: those seen are summed, and the others are bounded by the score of
the last one seen (as in Mussmann and Ermon, Learning and Inference via Maximum Inner Product Search, ICML
2016, with a bound that always holds in place of their estimate from a sample):

    S = Σ_seen exp((s_i + f_i)/τ)     T = exp(s_N/τ) · Σ_unseen exp(f_i/τ)     τ log S ≤ b(r) ≤ τ log(S + T)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import BankTooSmall

Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.floating[Any]]

LEADING = 64
"""Number of terms of a log-sum-exp that are requested first."""
MOST_PRODUCTS = 1 << 24
"""Largest number of inner products of new items and the whole bank that are in memory at once."""
ROUNDS = 5
"""Number of rounds in which the room and the biases of new items are computed from one another."""
ROUNDING = 1e-9
"""Smallest share of Σ exp(f_i/τ) assumed for the unseen rows: the share is a difference of float64 sums."""
ACCURACY = 1 / 300
"""Error of a bias from the nearest rows, as a share of tau: the relative error of the sum in its logarithm."""


class Needs(NamedTuple):
    """The part of a bank that an estimator needs to compute biases.

    queries, targets: how many of the nearest queries, and of the target bank's nearest items, to request
    first; 0 for none. mean: whether it needs the mean over all queries. temperatures: τ of each column of
    potentials. tolerance: largest error of a bias, in units of the score.
    """

    queries: int = 0
    targets: int = 0
    mean: bool = False
    temperatures: tuple[float, ...] = ()
    tolerance: float = math.inf


class Bounded(NamedTuple):
    """Biases (m,), and errors (m,) by which they are at most too small, both float64."""

    biases: Doubles
    errors: Doubles


@dataclass(frozen=True, eq=False)
class Nearest:
    """The N nearest rows of a bank for m items.

    scores: (m, N) inner products, falling along each row. rest: how many rows of the bank are not among them; none of
    these scores above the last. means: (m,) float64 mean inner product with the whole bank, if needed. potentials: (m,
    N, p) of the rows seen, and masses: (p,) float64 τ·log Σ exp(f_i/τ) over the whole bank; p = 0 if there are none.
    are_new: whether the items came after the fit. is_whole: whether the columns are all rows of the bank, in its order;
    then new items leave room for each other, and otherwise each for itself.
    """

    scores: Numbers
    rest: int
    means: Doubles
    potentials: Numbers
    masses: Doubles
    are_new: bool = False
    is_whole: bool = False


def masses(
    potentials: npt.ArrayLike, temperatures: Sequence[float], before: npt.ArrayLike
) -> Doubles:
    """Return τ·log Σ_i exp(f_i/τ) of potentials (n, p), n ≥ 1, and of those summed in `before`, float64 (p,).

    temperatures: (p,) the τ of each column. before: (p,) −inf at the start.
    """
    # exp(before/τ) is one more term.
    rows = np.vstack([np.asarray(potentials, np.float64), np.asarray(before, np.float64)])
    tau, largest = np.array(temperatures, np.float64), rows.max(0)
    with np.errstate(over="ignore"):
        joined: Doubles = largest + tau * np.log(np.exp((rows - largest) / tau).sum(0))
    return joined


def largest(scores: Numbers, k: int) -> Doubles:
    """Return the k largest of each row of scores (m, N), in any order, (m, k). Raises BankTooSmall if N < k."""
    seen = scores.shape[1]
    if seen < k:
        raise BankTooSmall(f"the {k} nearest bank rows are needed, and the search returned {seen}")
    return np.partition(scores, seen - k, axis=1)[:, seen - k :].astype(np.float64)


def bounded_logsumexp(nearest: Nearest, tau: float) -> Bounded:
    """Return τ·log Σ_i exp((s_i + f_i)/τ) over the rows seen, f_i the potentials or 0, and what others can add."""
    scores, has_potentials = nearest.scores, nearest.potentials.shape[-1] > 0
    highest, terms = _terms(scores + nearest.potentials[..., 0] if has_potentials else scores, tau)
    with np.errstate(over="ignore", divide="ignore"):
        biases = highest + tau * np.log(terms.sum(1), dtype=np.float64)
        if not nearest.rest:
            return Bounded(biases, np.zeros(len(biases)))
        mass, unseen = 0.0, np.full(len(scores), float(nearest.rest))
        if has_potentials:
            mass = nearest.masses[0]
            unseen = np.maximum(
                1 - np.exp((nearest.potentials[..., 0] - mass) / tau).sum(1), ROUNDING
            )
        excess = (mass + scores[:, -1] - biases) / tau + np.log(unseen)
        return Bounded(biases, tau * np.logaddexp(0, excess))


def logsumexp_with_room(nearest: Nearest, tau: float, items: int) -> Doubles:
    """Return biases (m,) of items that came after a fit on `items`, under which they leave room for each other.

    Those items take e^(−f_i/τ) · items / |bank| of a query, the new ones Σ_j e^((s_ij − b_j)/τ), next to nothing of the
    unseen rows. A refit would also lower the biases of the fitted items, on average as much as the potentials. Here
    these biases stay, and so does the mean of the potentials.
    """
    highest, terms = _terms(nearest.scores + nearest.potentials[..., 0], tau)
    together, tiny = nearest.is_whole, np.finfo(terms.dtype).tiny
    size = terms.shape[1] + nearest.rest
    left = np.ones(terms.shape[1] if together else terms.shape, terms.dtype)  # e^((room_i − f_i)/τ)
    for number in range(ROUNDS + 1):
        sums = terms @ left if together else (terms * left).sum(1)
        if number < ROUNDS:
            taken = (1 / sums) @ terms if together else terms / sums[:, None]
            left = np.maximum(1 / (1 + size / items * taken), tiny)
    mean = np.log(left).sum(-1, dtype=np.float64) / size
    return np.asarray(highest + tau * (np.log(sums, dtype=np.float64) - mean), np.float64)


def _terms(values: Numbers, tau: float) -> tuple[Numbers, Numbers]:
    """Return the highest of each row of values (m, N), (m,), and e^((v − highest)/τ), (m, N)."""
    highest = values.max(1)
    terms = values - highest[:, None]
    with np.errstate(over="ignore"):
        terms /= max(tau, float(np.finfo(terms.dtype).tiny))
    return highest, np.exp(terms, out=terms)
