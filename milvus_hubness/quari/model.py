"""The QuARI network: its maps, memory and scores.

For each query q a hypernetwork (`quari.hypernetwork`) predicts u_j and v_j, j = 1 … r, and a decoded query. With the
maps S of the items and W of the queries, which are the identity or learned for all queries (`settings.QuariConfig`),

    T     S + Σ_j u_j v_jᵀ        or  S + scale · Σ_j u_j v_jᵀ / (‖U‖ ‖V‖), Frobenius norms
    q'    W q + the decoded query  or  weight · W q + (1 − weight) · the decoded query

and the score of an item r is cos(q', T r). The form "linear" has only the maps: cos(W q, S r). The anchored form learns
S and W first, so that the tokens express only the differences between queries.

The scores. With z = V r, the r numbers v_j·r, and G = U Uᵀ (rank × rank), computed once per query:

    q'·T r    = (U q')·z  + (Sᵀq')·r
    ‖T r‖²    = z·H r  + ‖S r‖²       H = G V + 2 U S

An item then costs the products V r and H r. ‖S r‖² is ‖r‖² for S = I, else a product with the eigenvectors of SᵀS.

The memory. A map W that is best for all queries leaves errors; the error of a training pair (q_i, c_i) is

    e_i = S c_i / ‖S c_i‖ − W q_i / ‖W q_i‖

Neighbouring queries have similar errors, so a query recalls the errors of the pairs near it, by kernel regression
(Nadaraya, 1964; Watson, 1964):

    recalled(q) = strength · Σ_i a_i(q) e_i       a(q) = softmax_i( q·q_i / temperature )

This is added to q', so direct searches use it too. It costs 2·n·d multiplications per query for n pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from milvus_hubness.quari.hypernetwork import Hypernetwork, PublishedHypernetwork
from milvus_hubness.quari.settings import QuariConfig

STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
TEMPERATURES = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08)


class Memory(nn.Module):
    """n remembered pairs, empty at first. queries (n, d) of length 1, errors (n, d), strength and temperature ():
    buffers, saved with the weights."""

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
        self.queries.copy_(queries)
        self.errors.copy_(errors)

    def tune(self, strength: float, temperature: float) -> None:
        self.strength.fill_(strength)
        self.temperature.fill_(temperature)

    def forward(self, queries: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Return (m, d) the recalled errors for queries (m, d) of length 1. hidden (m, n): True for pairs that a query
        must not recall; without any pair it recalls zeros."""
        near = queries @ self.queries.T / self.temperature
        if hidden is not None:
            near = near.masked_fill(hidden, -torch.inf)
        recalled: torch.Tensor = self.strength * near.softmax(1).nan_to_num() @ self.errors
        return recalled


class Static(NamedTuple):
    """The part S of T that is the same for all queries. map: (d, d); None for I. directions (k, d), weights (k,)
    and base: ‖S r‖² = base·‖r‖² + Σ_i weights_i (directions_i·r)², exactly so if there are d directions."""

    map: torch.Tensor | None
    directions: torch.Tensor
    weights: torch.Tensor
    base: float


class Adaptation(NamedTuple):
    """The adaptation of the space to m queries. query: q' (m, d). U, V: (m, r, d) the rows u_j and v_j. static: the
    matrix that is added to Σ u_j v_jᵀ."""

    query: torch.Tensor
    U: torch.Tensor
    V: torch.Tensor
    static: Static


class Quari(nn.Module):
    """The network with the sizes of `config`."""

    none: torch.Tensor

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.config = config
        hypernetworks = {"linear": None, "published": PublishedHypernetwork}
        make = hypernetworks.get(config.form, Hypernetwork)
        self.hypernetwork = make(config) if make else None
        has_maps = config.form in ("linear", "anchored")
        self.query_map = nn.Parameter(torch.eye(config.dim)) if has_maps else None
        self.item_map = nn.Parameter(torch.eye(config.dim)) if has_maps else None
        self.memory = Memory(config.memory, config.dim) if config.memory else None
        self.register_buffer("none", torch.zeros(0, config.dim), persistent=False)
        self._truncated: tuple[tuple[int | None, torch.device], Static] | None = None

    def static(self) -> Static:
        """The matrix that is added to Σ u_j v_jᵀ; in evaluation mode `truncated` to `config.anchors`, once."""
        S = self.item_map
        if S is None:
            return Static(None, self.none, self.none[:, 0], 1.0)
        if self.training:
            return Static(S, S, S.new_ones(len(S)), 0.0)
        state = (None if S.is_inference() else S._version, S.device)
        if self._truncated is None or self._truncated[0] != state:
            self._truncated = (state, truncated(S.detach(), self.config.anchors))
        return self._truncated[1]

    def anchored(self, queries: torch.Tensor) -> Adaptation:
        """Return the adaptation of queries (m, d) by the anchors alone: the same map for all queries."""
        unit = functional.normalize(queries, dim=1)
        none = unit.new_zeros(len(unit), 0, self.config.dim)
        query = unit if self.query_map is None else unit @ self.query_map.T
        return Adaptation(query, none, none, self.static())

    def remembering(self, queries: torch.Tensor, hidden: torch.Tensor | None = None) -> Adaptation:
        """Return the adaptation by the anchors and the memory, if there is one. hidden: as in `Memory`."""
        alone = self.anchored(queries)
        if self.memory is None:
            return alone
        recalled = self.memory(functional.normalize(queries, dim=1), hidden)
        return alone._replace(query=alone.query + alone.query.norm(dim=1, keepdim=True) * recalled)

    def errors(self, queries: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return (m, d) the errors that the anchors leave between queries (m, d) and their answers, items (m, d)."""
        targets = items if self.item_map is None else items @ self.item_map.T
        return functional.normalize(targets, dim=1) - functional.normalize(self.anchored(queries).query, dim=1)

    def forward(self, queries: torch.Tensor, hidden: torch.Tensor | None = None) -> Adaptation:
        """Return the adaptation to the directions of queries (m, d). hidden: as in `Memory`."""
        alone, weight, scale = self.remembering(queries, hidden), self.config.query_weight, self.config.map_scale
        if self.hypernetwork is None:
            return alone
        decoded, U, V = self.hypernetwork(functional.normalize(queries, dim=1))
        query = weight * alone.query + (1 - weight) * decoded if weight else alone.query + decoded
        if scale:
            U, V = (rows / (torch.linalg.matrix_norm(rows)[:, None, None] + TINY_NORM) for rows in (U, V))
            U = scale * U
        return Adaptation(query, U, V, alone.static)


def truncated(S: torch.Tensor, count: int) -> Static:
    """Return S (d, d) with lengths from the `count` eigenvectors of SᵀS whose values are farthest from the median,
    and the mean of the other values."""
    values, vectors = torch.linalg.eigh((S.T @ S).double())
    order = (values - values.median()).abs().argsort(descending=True)
    chosen, rest = order[:count], order[count:]
    base = float(values[rest].mean()) if len(rest) else 0.0
    directions = vectors[:, chosen].T.to(S.dtype).contiguous()
    return Static(S, directions, (values[chosen] - base).to(S.dtype), base)


TINY, TINY_NORM = 1e-12, 1e-8


def cosines(adaptation: Adaptation, items: torch.Tensor) -> torch.Tensor:
    """Return (m, c) cos(q', T r) for m queries and shared items (c, d); 0 for an item that T maps to zero."""
    query, U, V, static = adaptation
    rank, onto = U.shape[1], torch.matmul(query[:, None], U.transpose(1, 2)) @ V
    H = torch.baddbmm(_seen(static, U), torch.matmul(U, U.transpose(1, 2)), V, beta=2)
    products = _products(torch.cat([V, H, onto + _seen(static, query[:, None])], 1), items)
    z, along = products[:, :rank], products[:, -1]
    squares = (products[:, rank:-1] * z).sum(1) + _squares(static, items)
    lengths = squares.clamp_min(TINY).sqrt() * query.norm(dim=1, keepdim=True).clamp_min(TINY)
    cosine: torch.Tensor = along / lengths
    return cosine


def transformed_queries(adaptation: Adaptation) -> torch.Tensor:
    """Return (m, d) Tᵀq', whose inner product with r is q'·T r."""
    query, U, V, static = adaptation
    return torch.matmul(torch.matmul(U, query[:, :, None]).transpose(1, 2), V)[:, 0] + _seen(static, query)


def _seen(static: Static, rows: torch.Tensor) -> torch.Tensor:
    """Return (…, d) Sᵀ of rows (…, d)."""
    return rows if static.map is None else rows @ static.map


def _squares(static: Static, items: torch.Tensor) -> torch.Tensor:
    """Return (c,) ‖S r‖² of items (c, d)."""
    squares: torch.Tensor = static.base * torch.linalg.vector_norm(items, dim=1).square()
    if len(static.directions):
        squares = squares + (items @ static.directions.T).square() @ static.weights
    return squares


def _products(rows: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Return (m, k, c), the products of rows (m, k, d) and items (c, d), as one product of two matrices."""
    count, per_query, dim = rows.shape
    return (rows.reshape(-1, dim) @ items.T).reshape(count, per_query, len(items))
