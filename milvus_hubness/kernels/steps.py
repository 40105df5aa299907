"""The steps of the Sinkhorn iteration on torch: from potentials of the items to those of the bank, and back.

A step maps a float32 vector of NumPy to another; the scores stay on the device. See `estimators.sinkhorn.iterate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.kernels.dense import cached_logsumexp, cached_scores
from milvus_hubness.kernels.operands import as_tensor
from milvus_hubness.kernels.primitives import logsumexp, resolve_device, topk

Vectors: TypeAlias = npt.NDArray[np.floating[Any]]
Step: TypeAlias = Callable[[Vectors], Vectors]
STORED = {"float32": torch.float32, "float16": torch.float16}


def free_memory(device: str) -> float | None:
    """Return the bytes that are free on a CUDA device; None for the CPU."""
    place = resolve_device(device)
    return torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else None


def full_steps(bank: Vectors, items: Vectors, tau: float, device: str, scores: str) -> tuple[Step, Step]:
    """Return the two steps over every pair of bank (m, d) and items (n, d). scores: "float32" and "float16" store them,
    with errors up to 2^-12 in float16; else the steps recompute them, in O((m + n) · d) memory."""
    place = resolve_device(device)
    queries, columns = (as_tensor(part, torch.float32, place) for part in (bank, items))
    if scores in STORED:
        stored = cached_scores(queries, columns, STORED[scores])
        return (
            _on_device(lambda g: cached_logsumexp(stored, tau, g), place),
            _on_device(lambda f: cached_logsumexp(stored.T, tau, f), place),
        )
    return (
        _on_device(lambda g: logsumexp(queries, columns, tau, g, device=device), place),
        _on_device(lambda f: logsumexp(columns, queries, tau, f, device=device), place),
    )


def sparse_steps(bank: Vectors, items: Vectors, tau: float, neighbors: int, device: str) -> tuple[Step, Step]:
    """Return the two steps over each item's and each query's nearest only, in O((m + n) · neighbors) memory."""
    place, m, n = resolve_device(device), len(bank), len(items)
    queries, columns = (as_tensor(part, torch.float32, place) for part in (bank, items))
    near_items = topk(columns, queries, min(neighbors, m), device=str(place))
    near_bank = topk(queries, columns, min(neighbors, n), device=str(place))
    pairs = torch.cat(
        [
            (near_items.indices * n + torch.arange(n, device=place)[:, None]).ravel(),
            (near_bank.indices + torch.arange(m, device=place)[:, None] * n).ravel(),
        ]
    )
    scores = torch.cat([near_items.values.ravel(), near_bank.values.ravel()])
    pairs, order = pairs.sort()
    first = torch.ones_like(pairs, dtype=torch.bool)
    first[1:] = pairs[1:] != pairs[:-1]
    pairs, scores = pairs[first], scores[order][first]
    query, item = pairs // n, pairs % n
    return (
        _on_device(lambda g: _grouped_logsumexp(scores + g[item], query, m, tau), place),
        _on_device(lambda f: _grouped_logsumexp(scores + f[query], item, n, tau), place),
    )


def _on_device(logsumexps: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Step:
    return lambda potentials: -logsumexps(as_tensor(potentials, torch.float32, device)).cpu().numpy()


def _grouped_logsumexp(values: torch.Tensor, group: torch.Tensor, groups: int, tau: float) -> torch.Tensor:
    largest = values.new_full((groups,), -torch.inf).scatter_reduce_(0, group, values, "amax")
    terms = ((values - largest[group]) / tau).exp_().double()
    total = terms.new_zeros(groups).index_add_(0, group, terms)
    return largest + (tau * total.log_()).to(values.dtype)
