"""What training pairs near to a query say of it. Ours: it is no part of QuARI as published.

A map W that is best for all queries leaves an error for row: of a training pair (q_i, c_i) it is

    e_i = S c_i / ‖S c_i‖ − W q_i / ‖W q_i‖

with S the map of the items. Queries that are near to each other are mistaken alike, so a query takes up what
the pairs near to it lacked, a kernel regression (Nadaraya, 1964; Watson, 1964) over the errors:

    recalled(q) = strength · Σ_i a_i(q) e_i       a(q) = softmax_i( q·q_i / temperature )

It is added to q' and so is of use to a direct search too. It costs 2·n·d multiplications a query for n pairs.
"""

from __future__ import annotations

import torch
from torch import nn

STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
TEMPERATURES = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08)


class Memory(nn.Module):
    """n remembered pairs, empty at first.

    queries (n, d) of length 1, errors (n, d), strength and temperature (): buffers, kept with the weights.
    """

    queries: torch.Tensor
    errors: torch.Tensor
    strength: torch.Tensor
    temperature: torch.Tensor

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("queries", torch.zeros(count, dim))
        self.register_buffer("errors", torch.zeros(count, dim))
        self.register_buffer("strength", torch.zeros(()))
        self.register_buffer("temperature", torch.ones(()))

    def fill(self, queries: torch.Tensor, errors: torch.Tensor) -> None:
        """Remember these, each (n, d)."""
        self.queries.copy_(queries)
        self.errors.copy_(errors)

    def tune(self, strength: float, temperature: float) -> None:
        """How much of it counts, and how near is near; 0 leaves a query as it is."""
        self.strength.fill_(strength)
        self.temperature.fill_(temperature)

    def forward(self, queries: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """(m, d) recalled of queries (m, d) of length 1. hidden (m, n): True for pairs that a query must not
        recall, as in training its own; a query that may recall none recalls zeros."""
        near = queries @ self.queries.T / self.temperature
        if hidden is not None:
            near = near.masked_fill(hidden, -torch.inf)
        recalled: torch.Tensor = self.strength * near.softmax(1).nan_to_num() @ self.errors
        return recalled
