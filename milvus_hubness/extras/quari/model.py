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
"""Strengths of the memory that a training tries on its validation pairs."""
TEMPERATURES = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
"""Temperatures of the memory that it tries with each of them."""

TINY = 1e-12
"""Least length of a vector, and its square, in a division."""
TINY_NORM = 1e-8
"""What the norms of U and V are increased by, as in the authors' code."""


class Memory(nn.Module):
    """n remembered pairs, empty at first."""

    queries: torch.Tensor
    """(n, d), of length 1."""
    errors: torch.Tensor
    """(n, d): e_i of each query."""
    strength: torch.Tensor
    """(): the factor of what is recalled."""
    temperature: torch.Tensor
    """(): the larger, the more pairs take part in it."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        # Buffers are saved with the weights, and no optimizer moves them.
        self.register_buffer("queries", torch.zeros(count, dim))
        self.register_buffer("errors", torch.zeros(count, dim))
        self.register_buffer("strength", torch.zeros(()))
        self.register_buffer("temperature", torch.ones(()))

    def tune(self, strength: float, temperature: float) -> None:
        """Set the strength and the temperature, in place."""
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
    """The square of the factor by which S stretches in all other directions."""


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
    """The linear maps or the network with the sizes of `config`."""

    hypernetwork: Hypernetwork | None
    """None for linear maps, which alone have query_map, item_map and memory."""

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.config = config
        self.hypernetwork = None
        if config.form == "linear":
            # From the identity: an untrained network ranks as the search does.
            self.query_map = nn.Parameter(torch.eye(config.dim))
            self.item_map = nn.Parameter(torch.eye(config.dim))
            self.memory = Memory(config.memory, config.dim)
        else:
            self.hypernetwork = Hypernetwork(config)

        self._truncated: tuple[tuple[int | None, torch.device], Static] | None = None

    def static(self) -> Static:
        """Return the map of the items.

        In evaluation mode it is `truncated` to `config.directions`, once.
        """
        S = self.item_map
        if self.training:
            # ‖S r‖² from the rows of S: gradients through its eigenvectors would be unstable.
            return Static(S, S, S.new_ones(len(S)), 0.0)

        # torch counts the changes of a tensor in place; one of inference mode counts none, and
        # does not change.
        state = (None if S.is_inference() else S._version, S.device)
        if self._truncated is None or self._truncated[0] != state:
            self._truncated = (state, truncated(S.detach(), self.config.directions))
        return self._truncated[1]

    def remember(self, queries: torch.Tensor, items: torch.Tensor) -> None:
        """Fill the memory with queries and the errors of their answers.

        queries: (n, d), of length 1. items: (n, d).
        """
        targets = functional.normalize(items @ self.item_map.T, dim=1)
        mapped = functional.normalize(queries @ self.query_map.T, dim=1)
        self.memory.queries.copy_(queries)
        self.memory.errors.copy_(targets - mapped)

    def forward(self, queries: torch.Tensor) -> Adaptation:
        """Return the adaptation to the directions of queries (m, d).

        In training, the memory is not used.
        """
        unit = functional.normalize(queries, dim=1)
        if self.hypernetwork is None:
            query = unit @ self.query_map.T
            if not self.training:
                # The errors are those of vectors of length 1, and W q has another.
                query = query + query.norm(dim=1, keepdim=True) * self.memory(unit)
            no_rows = unit.new_zeros(len(unit), 0, self.config.dim)
            return Adaptation(query, no_rows, no_rows, self.static())

        decoded, U, V = self.hypernetwork(unit)
        weight = self.config.query_weight
        return Adaptation(
            query=weight * unit + (1 - weight) * decoded,
            U=self.config.map_scale * _at_norm_1(U),
            V=_at_norm_1(V),
            static=None,
        )


def _at_norm_1(rows: torch.Tensor) -> torch.Tensor:
    """Return matrices (m, r, d) divided by their Frobenius norms."""
    norms: torch.Tensor = torch.linalg.matrix_norm(rows)
    return rows / (norms[:, None, None] + TINY_NORM)


def truncated(S: torch.Tensor, count: int) -> Static:
    """Return S (d, d) with lengths from `count` eigenvectors of SᵀS.

    They are those whose values are farthest from the median; the mean of the other values stands
    for the rest.
    """
    values, vectors = torch.linalg.eigh((S.T @ S).double())
    order = (values - values.median()).abs().argsort(descending=True)
    chosen = order[:count]
    rest = order[count:]

    base = float(values[rest].mean()) if len(rest) else 0.0
    directions = vectors[:, chosen].T.to(S.dtype).contiguous()
    return Static(S, directions, (values[chosen] - base).to(S.dtype), base)


def cosines(adaptation: Adaptation, items: torch.Tensor) -> torch.Tensor:
    """Return (m, c) cos(q', T r) for m queries and shared items (c, d).

    It is 0 for an item that T maps to zero.
    """
    query, U, V, static = adaptation
    rank = U.shape[1]

    # What a query needs of an item is V r, H r and Tᵀq'·r: one product with rows of all three.
    transformed = torch.matmul(query[:, None], U.transpose(1, 2)) @ V + _seen(
        static, query[:, None]
    )
    gram = torch.matmul(U, U.transpose(1, 2))
    H = torch.baddbmm(_seen(static, U), gram, V, beta=2)
    products = _products(torch.cat([V, H, transformed], 1), items)

    z = products[:, :rank]
    along = products[:, -1]
    squares = (products[:, rank:-1] * z).sum(1) + _squares(static, items)
    # Rounding may make the square of a short vector negative.
    lengths = squares.clamp_min(TINY).sqrt() * query.norm(dim=1, keepdim=True).clamp_min(TINY)
    cosine: torch.Tensor = along / lengths
    return cosine


def transformed_queries(adaptation: Adaptation) -> torch.Tensor:
    """Return (m, d) Tᵀq', whose inner product with r is q'·T r."""
    query, U, V, static = adaptation
    by_rank = torch.matmul(U, query[:, :, None]).transpose(1, 2)
    return torch.matmul(by_rank, V)[:, 0] + _seen(static, query)


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
    """Return the products of rows (m, k, d) and items (c, d), (m, k, c)."""
    # As one product of two matrices, since m small ones would take longer.
    count, per_query, dim = rows.shape
    return (rows.reshape(-1, dim) @ items.T).reshape(count, per_query, len(items))
