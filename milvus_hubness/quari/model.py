"""The hypernetwork of QuARI (Xing, Stylianou, Pless and Jacobs, 2025, section 3): from a query its customised
query q' and a low-rank transformation T of the gallery.

    control_l   query_encoder(q) + step embedding l                     (w,)
    X_0         r tokens U and r tokens V, all zero                     (2r, w)
    X_l         X_{l−1} + the tokens of transformer([control_l; X_{l−1} + positions])
    u_j, v_j    decoders of the tokens of X_L                           (d,)
    T           Σ_j u_j v_jᵀ
    q'          decoder of the control token's output at step L

Where the paper leaves open how it is done: positions are fixed sinusoids over the 2r tokens, added at each
step. The transformer normalises before attention and before its MLP, and its output is normalised. Queries
enter at unit length times √d, and what the decoders say is divided by √d, so that all coordinates inside
are of the order of 1 and a step of the optimiser is small beside the query that it moves.

T and the start. With zero tokens and freshly drawn decoders, T = Σ u_j v_jᵀ begins as a random matrix of
rank r: it projects the gallery onto r random directions, and all that the encoder knew must be learned anew.
In the forms "residual" and "anchored" I is added to T, and q to q', or W q with W = I at first; and the last
layers of the decoders of u and q', and all a_i, begin at zero. So T is the identity and q' the query: the
network begins with the encoder's own ranking and learns where to depart from it. The anchored form sees the
gallery through a static map first, what is best for all queries, so that the tokens say only what differs
between them.
benchmarks/quari.py tells what each is worth.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from milvus_hubness.quari.config import QuariConfig


class Adaptation(NamedTuple):
    """What m queries make of the space.

    query (m, d): q'. U, V (m, r, d): the rows u_j and v_j. residual: whether I is added to their sum. A, B
    (k, d): the rows a_i and b_i of the static map that comes before; k is 0 where there is none.
    """

    query: torch.Tensor
    U: torch.Tensor
    V: torch.Tensor
    residual: bool
    A: torch.Tensor
    B: torch.Tensor


class Quari(nn.Module):
    """The network of the sizes that `config` gives."""

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.config = config
        dim, width, inside = config.dim, config.width, config.hidden * config.width
        self.query_encoder = nn.Sequential(nn.Linear(dim, inside), nn.GELU(), nn.Linear(inside, width))
        self.step_embedding = nn.Embedding(config.steps, width)
        nn.init.normal_(self.step_embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            config.heads,
            config.feedforward * width,
            config.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.transformer = nn.TransformerEncoder(
            layer, config.layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decode_query = _decoder(width, inside, dim) if config.adapt_query else None
        self.decode_u = _decoder(width, inside, dim) if config.adapt_gallery else None
        self.decode_v = _decoder(width, inside, dim) if config.adapt_gallery else None
        anchored = config.form == "anchored"
        self.map = nn.Parameter(torch.eye(dim)) if anchored and config.adapt_query else None
        self.anchor_a = self.anchor_b = None
        if anchored and config.adapt_gallery:
            self.anchor_a = nn.Parameter(torch.zeros(config.anchors, dim))
            self.anchor_b = nn.Parameter(torch.randn(config.anchors, dim) / math.sqrt(dim))
        for decoder in (self.decode_query, self.decode_u):
            if config.form != "published" and decoder is not None:
                last = cast(nn.Linear, decoder[-1])
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
        self.register_buffer("positions", sinusoids(2 * config.rank, width), persistent=False)

    def anchors(self) -> list[nn.Parameter]:
        """W, a and b, those that there are: what is learned for all queries."""
        return [each for each in (self.map, self.anchor_a, self.anchor_b) if each is not None]

    def anchored(self, queries: torch.Tensor) -> Adaptation:
        """What the anchors alone make of queries (m, d): the same map for all of them."""
        unit = functional.normalize(queries, dim=1)
        none = unit.new_zeros(len(unit), 0, self.config.dim)
        query = unit if self.map is None else unit @ self.map.T
        if self.anchor_a is None or self.anchor_b is None:
            empty = unit.new_zeros(0, self.config.dim)
            return Adaptation(query, none, none, True, empty, empty)
        return Adaptation(query, none, none, True, self.anchor_a, self.anchor_b)

    def forward(self, queries: torch.Tensor) -> Adaptation:
        """queries (m, d), of any length above 0: only their direction counts."""
        config, scale = self.config, math.sqrt(self.config.dim)
        alone = self.anchored(queries)
        encoded = self.query_encoder(functional.normalize(queries, dim=1) * scale)
        tokens = encoded.new_zeros(len(queries), 2 * config.rank, config.width)
        output = encoded[:, None]
        for step in self.step_embedding.weight:
            control = (encoded + step)[:, None]
            output = self.transformer(torch.cat([control, tokens + self.positions], 1))
            tokens = tokens + output[:, 1:]
        query = alone.query
        if self.decode_query is not None:
            decoded = self.decode_query(output[:, 0]) / scale
            query = decoded if config.form == "published" else query + decoded
        if self.decode_u is None or self.decode_v is None:
            return alone._replace(query=query)
        U = self.decode_u(tokens[:, : config.rank]) / scale
        V = self.decode_v(tokens[:, config.rank :]) / scale
        return Adaptation(query, U, V, config.form != "published", alone.A, alone.B)


def sinusoids(count: int, width: int) -> torch.Tensor:
    """(count, width) fixed positions (Vaswani et al., NeurIPS 2017, section 3.5); width is even."""
    places = torch.arange(count, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    return torch.stack([torch.sin(places * rates), torch.cos(places * rates)], 2).reshape(count, width)


def _decoder(width: int, inside: int, dim: int) -> nn.Sequential:
    """Two layers with GELU and LayerNorm between."""
    return nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.LayerNorm(inside), nn.Linear(inside, dim))
