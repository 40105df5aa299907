"""Sinkhorn–Knopp iteration over bank × items, on all their scores or on those of the nearest pairs.

All scores are computed once and kept where they fit into memory, else computed again in every step; where
there are too many even for that, an estimator turns to the nearest pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch

from milvus_hubness.estimators.nearest import ROUNDS
from milvus_hubness.kernels import logsumexp, topk
from milvus_hubness.kernels.cached import cached_logsumexp, cached_scores

Step: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Scores: TypeAlias = Literal["float32", "float16", "recomputed", "sparse"]

CPU_CACHE = 1 << 30
CUDA_SHARE = 0.6
MOST_RECOMPUTED = {"cpu": 2e10, "cuda": 2e12}


def scores_for(m: int, n: int, device: torch.device) -> Scores:
    """How to have the scores of m × n pairs: kept in float32 where that fits into 1 GiB, or 0.6 of the free
    memory of a CUDA device, kept in float16 where that does, and else recomputed in every step; but "sparse"
    from 2·10^10 pairs on, 2·10^12 on CUDA, where an iteration would take minutes."""
    on_cuda = device.type == "cuda"
    memory = CUDA_SHARE * torch.cuda.mem_get_info(device)[0] if on_cuda else CPU_CACHE
    if 4 * m * n <= memory:
        return "float32"
    if 2 * m * n <= memory:
        return "float16"
    return "recomputed" if m * n <= MOST_RECOMPUTED[device.type] else "sparse"


class Balance(NamedTuple):
    """Potentials f (m,) of the bank and g (n,) of the items, and how near to balance they are.

    marginal_error: Σ_i |marginal of bank query i − 1/m|, between 0 and 2.
    """

    f: torch.Tensor
    g: torch.Tensor
    iterations: int
    marginal_error: float
    converged: bool


def balance(
    bank_step: Step, item_step: Step, g: torch.Tensor, tau: float, iterations: int, tol: float
) -> Balance:
    """Potentials for which exp((s_ij + f_i + g_j) / tau) has uniform marginals, from those of the items.

    bank_step: f from g, −tau · log Σ_j exp((s_ij + g_j) / tau). item_step: g from f, likewise over i.
    Each iteration sets f and then g, so the items' marginal is met and the bank's is off by the error
    reported. Ends when that is at most `tol`, or after `iterations`.
    """
    f = bank_step(g)
    for done in range(1, iterations + 1):
        g = item_step(f)
        following = bank_step(g)
        marginal = ((f - following).double() / tau).exp_() / len(g)
        error = float((marginal - 1 / len(f)).abs().sum())
        if error <= tol or done == iterations:
            break
        f = following
    return Balance(f, g, done, error, error <= tol)


def with_room(bank_step: Step, item_step: Step, f: torch.Tensor, tau: float, share: float) -> torch.Tensor:
    """Potentials of the bank (m,) under which new items get biases that leave room for each other.

    bank_step, item_step: over the new items. f (m,): of the fit. share: m over the items of the fit. The
    weight e^(−f_i/τ) of a query is what the fitted items take of it, times the share; with what new ones
    take, Σ_j e^((s_ij − b_j)/τ) and b_j = τ log Σ_i e^((s_ij + f'_i)/τ), it is e^(−f'_i/τ). A refit would
    lower the biases of the fitted items too, in the mean by as much as it lowers the potentials: they stay
    here, and the mean of the potentials with them.
    """
    room = f
    for _ in range(ROUNDS):
        taken = math.log(share) - bank_step(item_step(room)) / tau
        room = -tau * torch.logaddexp(-f / tau, taken)
    return room - (room - f).mean()


def cached_steps(
    bank: torch.Tensor, items: torch.Tensor, tau: float, dtype: torch.dtype
) -> tuple[Step, Step]:
    """The two steps over every pair, whose scores are kept, in float32 or, off by up to 2^-12 of each, in
    float16."""
    scores = cached_scores(bank, items, dtype)
    return (
        lambda g: -cached_logsumexp(scores, tau, g),
        lambda f: -cached_logsumexp(scores.T, tau, f),
    )


def dense_steps(
    bank: torch.Tensor, items: torch.Tensor, tau: float, device: str | None = None
) -> tuple[Step, Step]:
    """The two steps over every pair of bank (m, d) and items (n, d), in O((m + n) · d) memory.

    device: where, as the kernels take it; that of the bank unless given.
    """
    device = device or str(bank.device)
    return (
        lambda g: -logsumexp(bank, items, tau, g, device=device),
        lambda f: -logsumexp(items, bank, tau, f, device=device),
    )


def sparse_steps(bank: torch.Tensor, items: torch.Tensor, tau: float, neighbors: int) -> tuple[Step, Step]:
    """The two steps over each item's and each query's nearest only, in O((m + n) · neighbors) memory."""
    device, m, n = str(bank.device), len(bank), len(items)
    near_items = topk(items, bank, min(neighbors, m), device=device)
    near_bank = topk(bank, items, min(neighbors, n), device=device)
    pairs = torch.cat(
        [
            (near_items.indices * n + torch.arange(n, device=bank.device)[:, None]).ravel(),
            (near_bank.indices + torch.arange(m, device=bank.device)[:, None] * n).ravel(),
        ]
    )
    scores = torch.cat([near_items.values.ravel(), near_bank.values.ravel()])
    pairs, order = pairs.sort()
    first = torch.ones_like(pairs, dtype=torch.bool)
    first[1:] = pairs[1:] != pairs[:-1]
    pairs, scores = pairs[first], scores[order][first]
    query, item = pairs // n, pairs % n
    return (
        lambda g: -_grouped_logsumexp(scores + g[item], query, m, tau),
        lambda f: -_grouped_logsumexp(scores + f[query], item, n, tau),
    )


def _grouped_logsumexp(values: torch.Tensor, group: torch.Tensor, groups: int, tau: float) -> torch.Tensor:
    largest = values.new_full((groups,), -torch.inf).scatter_reduce_(0, group, values, "amax")
    terms = ((values - largest[group]) / tau).exp_().double()
    total = terms.new_zeros(groups).index_add_(0, group, terms)
    return largest + (tau * total.log_()).to(values.dtype)
