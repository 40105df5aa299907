"""Linear maps with a memory, the network of QuARI, and their scores.

For each query q, a map T of the items and a vector q' give the score of an item r: cos(q', T r).

The network. A hypernetwork (`quari.hypernetwork`) predicts u_j and v_j, j = 1 … r, and a decoded
query:

    T     I + scale · Σ_j u_j v_jᵀ / (‖U‖ ‖V‖), Frobenius norms
    q'    weight · q + (1 − weight) · the decoded query

With z = V r, the r numbers v_j·r, and G = U Uᵀ (rank × rank), computed once per query, an item
costs V r and H r:

    q'·T r    = (U q')·z  + q'·r
    ‖T r‖²    = z·H r  + ‖r‖²       H = G V + 2 U

Linear maps. T = S and q' = W q, learned for all queries; ‖S r‖² is a product with the eigenvectors
of SᵀS.

The memory. A map W that is best for all queries leaves errors; the error of a training pair (q_i,
c_i) is

    e_i = S c_i / ‖S c_i‖ − W q_i / ‖W q_i‖

Neighbouring queries have similar errors, so a query recalls the errors of the pairs near it, by
kernel regression (Nadaraya, 1964; Watson, 1964):

    recalled(q) = strength · Σ_i a_i(q) e_i       a(q) = softmax_i( q·q_i / temperature )

This is added to q', so direct searches use it too. It costs 2·n·d multiplications per query for n
pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from milvus_hubness.extras.quari.hypernetwork import Hypernetwork
from milvus_hubness.extras.quari.settings import QuariConfig

STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
TEMPERATURES = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08)


class Memory(nn.Module):
    """n remembered pairs, empty at first.

    queries (n, d) of length 1, errors (n, d), strength and temperature (): buffers, saved with the
    weights.
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

    def tune(self, strength: float, temperature: float) -> None:
        self.strength.fill_(strength)
        self.temperature.fill_(temperature)

    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        """Return (m, d) the recalled errors for queries (m, d) of length 1."""
        near = queries @ self.queries.T / self.temperature
        recalled: torch.Tensor = self.strength * near.softmax(1) @ self.errors
        return recalled


class Static(NamedTuple):
    """The map S of all queries.

    ‖S r‖² = base·‖r‖² + Σ_i weights_i (directions_i·r)², exactly so if there are d directions.
    """

    map: torch.Tensor
    """(d, d): the matrix S."""
    directions: torch.Tensor
    """(k, d): the directions in which S stretches by other than base."""
    weights: torch.Tensor
    """(k,): the weight of each direction."""
    base: float


class Adaptation(NamedTuple):
    """The adaptation of the space to m queries."""

    query: torch.Tensor
    """(m, d): q'."""
    U: torch.Tensor
    """(m, r, d): the rows u_j."""
    V: torch.Tensor
    """(m, r, d): the rows v_j."""
    static: Static | None
    """The matrix that is added to Σ u_j v_jᵀ; None for I."""


class Quari(nn.Module):
    """The linear maps or the network with the sizes of `config`.

    hypernetwork: None for linear maps, which alone have query_map, item_map and memory.
    """

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.config = config
        self.hypernetwork: Hypernetwork | None = None
        if config.form == "linear":
            self.query_map, self.item_map = (nn.Parameter(torch.eye(config.dim)) for _ in range(2))
            self.memory = Memory(config.memory, config.dim)
        else:
            self.hypernetwork = Hypernetwork(config)

        self._truncated: tuple[tuple[int | None, torch.device], Static] | None = None

    def static(self) -> Static:
        """Return the map of the items; in evaluation mode `truncated` to `config.directions`, once."""
        S = self.item_map
        if self.training:
            return Static(S, S, S.new_ones(len(S)), 0.0)
        state = (None if S.is_inference() else S._version, S.device)
        if self._truncated is None or self._truncated[0] != state:
            self._truncated = (state, truncated(S.detach(), self.config.directions))
        return self._truncated[1]

    def remember(self, queries: torch.Tensor, items: torch.Tensor) -> None:
        """Fill the memory with queries (n, d) of length 1 and the errors of their answers, items
        (n, d).
        """
        targets = items @ self.item_map.T
        mapped = queries @ self.query_map.T
        self.memory.queries.copy_(queries)
        self.memory.errors.copy_(
            functional.normalize(targets, dim=1) - functional.normalize(mapped, dim=1)
        )

    def forward(self, queries: torch.Tensor) -> Adaptation:
        """Return the adaptation to the directions of queries (m, d).

        In training, the memory is not used.
        """
        unit = functional.normalize(queries, dim=1)
        weight = self.config.query_weight
        if self.hypernetwork is None:
            query = unit @ self.query_map.T
            none = unit.new_zeros(len(unit), 0, self.config.dim)
            if not self.training:
                query = query + query.norm(dim=1, keepdim=True) * self.memory(unit)
            return Adaptation(query, none, none, self.static())

        decoded, U, V = self.hypernetwork(unit)
        U, V = (
            rows / (torch.linalg.matrix_norm(rows)[:, None, None] + TINY_NORM) for rows in (U, V)
        )
        return Adaptation(
            weight * unit + (1 - weight) * decoded, self.config.map_scale * U, V, None
        )


def truncated(S: torch.Tensor, count: int) -> Static:
    """Return S (d, d) with lengths from the `count` eigenvectors of SᵀS whose values are farthest
    from the median, and the mean of the other values.
    """
    values, vectors = torch.linalg.eigh((S.T @ S).double())
    order = (values - values.median()).abs().argsort(descending=True)
    chosen = order[:count]
    rest = order[count:]
    base = float(values[rest].mean()) if len(rest) else 0.0
    directions = vectors[:, chosen].T.to(S.dtype).contiguous()
    return Static(S, directions, (values[chosen] - base).to(S.dtype), base)


TINY = 1e-12
TINY_NORM = 1e-8


def cosines(adaptation: Adaptation, items: torch.Tensor) -> torch.Tensor:
    """Return (m, c) cos(q', T r) for m queries and shared items (c, d); 0 for an item that T maps
    to zero.
    """
    query, U, V, static = adaptation
    rank = U.shape[1]
    onto = torch.matmul(query[:, None], U.transpose(1, 2)) @ V
    H = torch.baddbmm(_seen(static, U), torch.matmul(U, U.transpose(1, 2)), V, beta=2)
    products = _products(torch.cat([V, H, onto + _seen(static, query[:, None])], 1), items)
    z = products[:, :rank]
    along = products[:, -1]
    squares = (products[:, rank:-1] * z).sum(1) + _squares(static, items)
    lengths = squares.clamp_min(TINY).sqrt() * query.norm(dim=1, keepdim=True).clamp_min(TINY)
    cosine: torch.Tensor = along / lengths

    return cosine


def transformed_queries(adaptation: Adaptation) -> torch.Tensor:
    """Return (m, d) Tᵀq', whose inner product with r is q'·T r."""
    query, U, V, static = adaptation
    return torch.matmul(torch.matmul(U, query[:, :, None]).transpose(1, 2), V)[:, 0] + _seen(
        static, query
    )


def _seen(static: Static | None, rows: torch.Tensor) -> torch.Tensor:
    """Return (…, d) Sᵀ of rows (…, d)."""
    return rows if static is None else rows @ static.map


def _squares(static: Static | None, items: torch.Tensor) -> torch.Tensor:
    """Return (c,) ‖S r‖² of items (c, d)."""
    squares: torch.Tensor = torch.linalg.vector_norm(items, dim=1).square()
    if static is None:
        return squares
    return static.base * squares + (items @ static.directions.T).square() @ static.weights


def _products(rows: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Return (m, k, c), the products of rows (m, k, d) and items (c, d), as one product of two
    matrices.
    """
    count, per_query, dim = rows.shape
    return (rows.reshape(-1, dim) @ items.T).reshape(count, per_query, len(items))
