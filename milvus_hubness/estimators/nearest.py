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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import BankTooSmall

Doubles = npt.NDArray[np.float64]

LEADING = 64
"""Number of terms of a log-sum-exp that are requested first."""
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

    scores: (m, N) float64 inner products, falling along each row. rest: how many rows of the bank are not
    among them; none of these scores above the last. means: (m,) float64 mean inner product with the whole
    bank, if needed. potentials: (m, N, p) float64 of the rows seen, and masses: (p,) float64 τ·log Σ
    exp(f_i/τ) over the whole bank; p = 0 if there are none. are_new: whether the items came after the fit.
    """

    scores: Doubles
    rest: int
    means: Doubles
    potentials: Doubles
    masses: Doubles
    are_new: bool = False


def masses(potentials: npt.ArrayLike, temperatures: Sequence[float], before: npt.ArrayLike) -> Doubles:
    """Return τ·log Σ_i exp(f_i/τ) of potentials (n, p), n ≥ 1, and of those summed in `before`, float64 (p,).

    temperatures: (p,) the τ of each column. before: (p,) −inf at the start.
    """
    # exp(before/τ) is one more term.
    rows = np.vstack([np.asarray(potentials, np.float64), np.asarray(before, np.float64)])
    tau, largest = np.array(temperatures, np.float64), rows.max(0)
    with np.errstate(over="ignore"):
        joined: Doubles = largest + tau * np.log(np.exp((rows - largest) / tau).sum(0))
    return joined


def mean_of_largest(nearest: Nearest, k: int) -> Doubles:
    """Return the mean of the k largest scores, float64 (m,). Raises BankTooSmall if fewer were seen."""
    seen = nearest.scores.shape[1]
    if seen < k:
        raise BankTooSmall(f"the {k} nearest bank rows are needed, and the search returned {seen}")
    means: Doubles = nearest.scores[:, :k].mean(1)
    return means


def bounded_logsumexp(nearest: Nearest, tau: float) -> Bounded:
    """Return τ·log Σ_i exp((s_i + f_i)/τ) over the rows seen, f_i the potentials or 0, and what others can add."""
    scores, values = nearest.scores, nearest.scores
    with np.errstate(over="ignore", divide="ignore"):
        if nearest.potentials.shape[-1]:
            potentials, mass = nearest.potentials[..., 0], nearest.masses[0]
            values = scores + potentials
            seen = np.exp((potentials - mass) / tau).sum(1)
            unseen = np.maximum(1 - seen, ROUNDING)
        else:
            mass, unseen = 0.0, np.full(len(scores), float(nearest.rest))
        biases = _logsumexp(values, tau)
        if not nearest.rest:
            return Bounded(biases, np.zeros(len(biases)))
        excess = (mass + scores[:, -1] - biases) / tau + np.log(unseen)
        return Bounded(biases, tau * np.logaddexp(0, excess))


def own_room(nearest: Nearest, tau: float, share: float) -> Doubles:
    """Return by how much the bias of a single item that came after the fit is smaller, (m,); see `sinkhorn.with_room`.

    Its share of the unseen rows is negligible. share: rows of the bank over items of the fit.
    """
    values = nearest.scores + nearest.potentials[..., 0]
    size = values.shape[1] + nearest.rest
    plain = bias = _logsumexp(values, tau)
    for _ in range(ROUNDS):
        lowered = tau * np.logaddexp(0, np.log(share) + (values - bias[:, None]) / tau)
        bias = _logsumexp(values - lowered, tau)
    return np.asarray(plain - bias - lowered.sum(1) / size, np.float64)


def _logsumexp(values: Doubles, tau: float) -> Doubles:
    largest = values.max(1)
    return np.asarray(largest + tau * np.log(np.exp((values - largest[:, None]) / tau).sum(1)), np.float64)
