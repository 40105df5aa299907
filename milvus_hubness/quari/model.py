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
In the forms "residual" and "anchored" I is added to T, and q to q', or S and W q with S = W = I at first; and
the last layers of the decoders of u and q' begin at zero. So T is the identity and q' the query: the network
begins with the encoder's own ranking and learns where to depart from it. The anchored form learns S and W
first, the two linear maps that are best for all queries, so that the tokens say only what differs between
them.
benchmarks/quari.py tells what each is worth.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from milvus_hubness.quari.config import QuariConfig
from milvus_hubness.quari.encoding import encode
from milvus_hubness.quari.memory import Memory


class Static(NamedTuple):
    """The part S of T that is the same for all queries.

    map: S (d, d); None for I. axes (k, d), weights (k,) and base: ‖S r‖² = base·‖r‖² + Σ_i weights_i
    (axes_i·r)², or near it where fewer axes are kept than S has.
    """

    map: torch.Tensor | None
    axes: torch.Tensor
    weights: torch.Tensor
    base: float


class Adaptation(NamedTuple):
    """What m queries make of the space: query (m, d) q'; U, V (m, r, d) the rows u_j and v_j; static: what is
    added to Σ u_j v_jᵀ, if anything."""

    query: torch.Tensor
    U: torch.Tensor
    V: torch.Tensor
    static: Static | None


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
        self.query_map = nn.Parameter(torch.eye(dim)) if anchored and config.adapt_query else None
        self.item_map = nn.Parameter(torch.eye(dim)) if anchored and config.adapt_gallery else None
        self.memory = Memory(config.memory, dim) if config.memory else None
        self._truncated: tuple[tuple[int | None, torch.device], Static] | None = None
        for decoder in (self.decode_query, self.decode_u):
            if config.form != "published" and decoder is not None:
                last = cast(nn.Linear, decoder[-1])
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
        self.register_buffer("positions", sinusoids(2 * config.rank, width), persistent=False)

    def anchors(self) -> list[nn.Parameter]:
        """W and S, those that there are: what is learned for all queries."""
        return [each for each in (self.query_map, self.item_map) if each is not None]

    def static(self) -> Static | None:
        """What is added to Σ u_j v_jᵀ; in evaluation mode with `config.anchors` axes, found once."""
        if self.item_map is None:
            is_sum = self.config.form == "published" and self.config.adapt_gallery
            return None if is_sum else identity(self.step_embedding.weight)
        if self.training:
            return whole(self.item_map)
        version = None if self.item_map.is_inference() else self.item_map._version
        state = (version, self.item_map.device)
        if self._truncated is None or self._truncated[0] != state:
            self._truncated = (state, truncated(self.item_map.detach(), self.config.anchors))
        return self._truncated[1]

    def anchored(self, queries: torch.Tensor) -> Adaptation:
        """What the anchors alone make of queries (m, d): the same map for all of them."""
        unit = functional.normalize(queries, dim=1)
        none = unit.new_zeros(len(unit), 0, self.config.dim)
        query = unit if self.query_map is None else unit @ self.query_map.T
        return Adaptation(query, none, none, self.static())

    def remembering(self, queries: torch.Tensor, hidden: torch.Tensor | None = None) -> Adaptation:
        """The same with what the memory recalls, where there is one. hidden: as `Memory` has it."""
        alone = self.anchored(queries)
        if self.memory is None:
            return alone
        recalled = self.memory(functional.normalize(queries, dim=1), hidden)
        return alone._replace(query=alone.query + alone.query.norm(dim=1, keepdim=True) * recalled)

    def errors(self, queries: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """(m, d) what the anchors leave between queries (m, d) and the items (m, d) that answer them."""
        targets = items if self.item_map is None else items @ self.item_map.T
        return functional.normalize(targets, dim=1) - functional.normalize(
            self.anchored(queries).query, dim=1
        )

    def forward(self, queries: torch.Tensor, hidden: torch.Tensor | None = None) -> Adaptation:
        """queries (m, d), of any length above 0: only their direction counts. hidden: as `Memory` has it."""
        config, scale = self.config, math.sqrt(self.config.dim)
        alone = self.remembering(queries, hidden)
        encoded = self.query_encoder(functional.normalize(queries, dim=1) * scale)
        tokens = encoded.new_zeros(len(queries), 2 * config.rank, config.width)
        output = encoded[:, None]
        for step in self.step_embedding.weight:
            control = (encoded + step)[:, None]
            seen = torch.cat([control, tokens + self.positions], 1)
            output = self.transformer(seen) if self.training else encode(self.transformer, seen)
            tokens = tokens + output[:, 1:]
        query = alone.query
        if self.decode_query is not None:
            decoded = _decoded(self.decode_query, output[:, 0], scale)
            query = decoded if config.form == "published" else query + decoded
        if self.decode_u is None or self.decode_v is None:
            return alone._replace(query=query)
        U = _decoded(self.decode_u, tokens[:, : config.rank], scale)
        V = _decoded(self.decode_v, tokens[:, config.rank :], scale)
        return Adaptation(query, U, V, alone.static)


def identity(like: torch.Tensor) -> Static:
    """S = I, on the device of some tensor."""
    return Static(None, like.new_zeros(0, 0), like.new_zeros(0), 1.0)


def whole(S: torch.Tensor) -> Static:
    """S (d, d), its lengths by its own rows."""
    return Static(S, S, S.new_ones(len(S)), 0.0)


def truncated(S: torch.Tensor, count: int) -> Static:
    """S (d, d), its lengths by the `count` eigenvectors of SᵀS whose values are farthest from the rest's, and
    for the rest by the mean of them."""
    values, vectors = torch.linalg.eigh((S.T @ S).double())
    order = (values - values.median()).abs().argsort(descending=True)
    kept, rest = order[:count], order[count:]
    base = float(values[rest].mean()) if len(rest) else 0.0
    axes = vectors[:, kept].T.to(S.dtype).contiguous()
    return Static(S, axes, (values[kept] - base).to(S.dtype), base)


def sinusoids(count: int, width: int) -> torch.Tensor:
    """(count, width) fixed positions (Vaswani et al., NeurIPS 2017, section 3.5); width is even."""
    places = torch.arange(count, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    return torch.stack([torch.sin(places * rates), torch.cos(places * rates)], 2).reshape(count, width)


def _decoded(decoder: nn.Sequential, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """What the decoder says of tokens (…, w), divided by the scale in its last layer."""
    last = cast(nn.Linear, decoder[-1])
    return functional.linear(decoder[:-1](tokens), last.weight / scale, last.bias / scale)


def _decoder(width: int, inside: int, dim: int) -> nn.Sequential:
    """Two layers with GELU and LayerNorm between."""
    return nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.LayerNorm(inside), nn.Linear(inside, dim))
