"""The QuARI network: its configuration, encoder, memory, hypernetwork and scores.

For each query q the network predicts a map T of rank r for the items, and an adapted query q':

    control_l   query_encoder(q) + step embedding l                     (w,)
    X_0         r tokens U and r tokens V, all zero                     (2r, w)
    X_l         X_{l−1} + the tokens of transformer([control_l; X_{l−1} + positions])
    u_j, v_j    decoders of the tokens of X_L                           (d,)
    T           Σ_j u_j v_jᵀ
    q'          decoder of the control token's output at step L

Details that the paper leaves open: positions are fixed sinusoids over the 2r tokens, added at each step; the
transformer normalizes before attention, before its MLP and at its end; queries enter at unit length times √d, and the
decoders' outputs are divided by √d, so that an optimizer's step is small compared with the query that it moves.

The start of T. With zero tokens and random decoders, T begins as a random matrix of rank r. In the forms "residual" and
"anchored" (`settings.QuariConfig`), the last layers of the decoders of u and q' begin at zero: the network begins with
the encoder's own ranking. The anchored form learns S and W first, so that the tokens express only the differences
between queries. benchmarks/quari.py measures the value of each form.

The scores. With z = V r, the r numbers v_j·r, and G = U Uᵀ (rank × rank), computed once per query:

    q'·T r    = (U q')·z  + (Sᵀq')·r                  the last terms where T = S + Σ u_j v_jᵀ
    ‖T r‖²    = zᵀ G z    + ‖S r‖² + 2 (U S r)·z

An item then costs the product V r, and rank² more. With an S it costs V r and H r with H = G V + 2 U S, because
‖T r‖² = z·H r + ‖S r‖². ‖S r‖² is ‖r‖² for S = I, else a product with the eigenvectors of SᵀS.

The memory. A map W that is best for all queries leaves errors; the error of a training pair (q_i, c_i) is

    e_i = S c_i / ‖S c_i‖ − W q_i / ‖W q_i‖

Neighbouring queries have similar errors, so a query recalls the errors of the pairs near it, by kernel regression
(Nadaraya, 1964; Watson, 1964):

    recalled(q) = strength · Σ_i a_i(q) e_i       a(q) = softmax_i( q·q_i / temperature )

This is added to q', so direct searches use it too. It costs 2·n·d multiplications per query for n pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from milvus_hubness.quari.settings import QuariConfig

INSIDE = 2
"""Width inside all MLPs, as a multiple of the width of a token."""


def encode(transformer: nn.TransformerEncoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return (m, t, w) the transformer's output for tokens (m, t, w) in evaluation mode, to float32 accuracy. On the
    CPU, torch's own path forms all t² weights of attention in memory; `scaled_dot_product_attention` does not."""
    count, length, width = tokens.shape
    for layer in cast(list[nn.TransformerEncoderLayer], transformer.layers):
        attention = layer.self_attn
        rows = functional.linear(layer.norm1(tokens), attention.in_proj_weight, attention.in_proj_bias)
        heads = rows.view(count, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads)
        tokens = tokens + attention.out_proj(attended.transpose(1, 2).reshape(count, length, width))
        tokens = tokens + layer.linear2(functional.gelu(layer.linear1(layer.norm2(tokens))))
    return cast(torch.Tensor, cast(nn.LayerNorm, transformer.norm)(tokens))


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
    matrix that is added to Σ u_j v_jᵀ, if any."""

    query: torch.Tensor
    U: torch.Tensor
    V: torch.Tensor
    static: Static | None


class Quari(nn.Module):
    """The network with the sizes of `config`."""

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.config = config
        dim, width, inside = config.dim, config.width, INSIDE * config.width
        self.query_encoder = nn.Sequential(nn.Linear(dim, inside), nn.GELU(), nn.Linear(inside, width))
        self.step_embedding = nn.Embedding(config.steps, width)
        nn.init.normal_(self.step_embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, config.heads, inside, config.dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(
            layer, config.layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decode_query, self.decode_u, self.decode_v = (
            nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.LayerNorm(inside), nn.Linear(inside, dim))
            for _ in range(3)
        )
        anchored = config.form == "anchored"
        self.query_map = nn.Parameter(torch.eye(dim)) if anchored else None
        self.item_map = nn.Parameter(torch.eye(dim)) if anchored else None
        self.memory = Memory(config.memory, dim) if config.memory else None
        self._truncated: tuple[tuple[int | None, torch.device], Static] | None = None
        if config.form != "published":
            for decoder in (self.decode_query, self.decode_u):
                last = cast(nn.Linear, decoder[-1])
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
        self.register_buffer("positions", sinusoids(2 * config.rank, width), persistent=False)

    def static(self) -> Static | None:
        """The matrix that is added to Σ u_j v_jᵀ; in evaluation mode `truncated` to `config.anchors`, once."""
        S = self.item_map
        if self.config.form == "published":
            return None
        if S is None:
            none = self.step_embedding.weight.new_zeros(0, 0)
            return Static(None, none, none.flatten(), 1.0)
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
        config, scale = self.config, math.sqrt(self.config.dim)
        alone = self.remembering(queries, hidden)
        encoded = self.query_encoder(functional.normalize(queries, dim=1) * scale)
        tokens = encoded.new_zeros(len(queries), 2 * config.rank, config.width)
        output = encoded[:, None]
        for step in self.step_embedding.weight:
            control = (encoded + step)[:, None]
            sequence = torch.cat([control, tokens + self.positions], 1)
            output = self.transformer(sequence) if self.training else encode(self.transformer, sequence)
            tokens = tokens + output[:, 1:]
        query = _decoded(self.decode_query, output[:, 0], scale)
        if config.form != "published":
            query = alone.query + query
        U = _decoded(self.decode_u, tokens[:, : config.rank], scale)
        V = _decoded(self.decode_v, tokens[:, config.rank :], scale)
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


def sinusoids(count: int, width: int) -> torch.Tensor:
    """Return (count, width) fixed positions (Vaswani et al., NeurIPS 2017, section 3.5); width is even."""
    places = torch.arange(count, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    return torch.stack([torch.sin(places * rates), torch.cos(places * rates)], 2).reshape(count, width)


def _decoded(decoder: nn.Sequential, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the decoder's output for tokens (…, w), divided by the scale in its last layer."""
    last = cast(nn.Linear, decoder[-1])
    return functional.linear(decoder[:-1](tokens), last.weight / scale, last.bias / scale)


TINY = 1e-12


def cosines(adaptation: Adaptation, items: torch.Tensor) -> torch.Tensor:
    """Return (m, c) cos(q', T r) for m queries and shared items (c, d); 0 for an item that T maps to zero."""
    query, U, V, static = adaptation
    rank, onto = U.shape[1], torch.matmul(query[:, None], U.transpose(1, 2)) @ V
    G = torch.matmul(U, U.transpose(1, 2))
    if static is None:
        products = _products(torch.cat([V, onto], 1), items)
        z, along = products[:, :rank], products[:, rank]
        squares = (torch.matmul(G, z) * z).sum(1)
    else:
        H = torch.baddbmm(_seen(static, U), G, V, beta=2)
        products = _products(torch.cat([V, H, onto + _seen(static, query[:, None])], 1), items)
        z, along = products[:, :rank], products[:, -1]
        squares = (products[:, rank:-1] * z).sum(1) + _squares(static, items)
    lengths = squares.clamp_min(TINY).sqrt() * query.norm(dim=1, keepdim=True).clamp_min(TINY)
    cosine: torch.Tensor = along / lengths
    return cosine


def transformed_queries(adaptation: Adaptation) -> torch.Tensor:
    """Return (m, d) Tᵀq', whose inner product with r is q'·T r."""
    query, U, V, static = adaptation
    revert = torch.matmul(torch.matmul(U, query[:, :, None]).transpose(1, 2), V)[:, 0]
    return revert if static is None else revert + _seen(static, query)


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
