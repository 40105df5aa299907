"""The symmetric contrastive loss of QuARI with semi-positives (Xing et al., 2025, section 3)."""

from __future__ import annotations

import torch
from torch.nn import functional


def contrastive_loss(
    cosines: torch.Tensor,
    items: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """A batch's loss, a scalar.

    cosines (m, m·(1+s)): of each query with the batch's answers, then with their semi-positives, those of
    answer 0 first. items (m, 1+s): gallery numbers of each query's answer and semi-positives. weights
    (m, s): of the semi-positives. With ω = 1 for an answer and its weight for a semi-positive,

        queries → items   mean over queries i of  −Σ_j ω_j log softmax_j(cos_ij / τ) / Σ_j ω_j,  j of i's own
        items → queries   mean over items j, weighted by ω_j, of  −log softmax_i(cos_ij / τ) at j's own query

    and the loss is the mean of both. Where the paper is silent: semi-positives weigh in both directions, and
    an item that occurs twice in a batch is no wrong answer to a query of which it is a right one.
    """
    count, own = items.shape
    columns = torch.cat([items[:, 0], items[:, 1:].reshape(-1)])
    owner = torch.arange(count, device=items.device)
    owners = torch.cat([owner, owner.repeat_interleave(own - 1)])
    is_own = owners == owner[:, None]
    is_right = (columns[None, :, None] == items[:, None, :]).any(2)
    logits = (cosines / temperature).masked_fill(is_right & ~is_own, -torch.inf)
    share = torch.cat([weights.new_ones(count), weights.reshape(-1)])
    to_items = functional.log_softmax(logits, 1)[owners, torch.arange(len(columns), device=items.device)]
    to_queries = functional.log_softmax(logits, 0)[owners, torch.arange(len(columns), device=items.device)]
    each = share.new_zeros(count).index_add(0, owners, share)
    forward = -(to_items * share / each[owners]).sum() / count
    backward = -(to_queries * share).sum() / share.sum()
    return (forward + backward) / 2
