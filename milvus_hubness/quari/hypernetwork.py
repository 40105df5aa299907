"""The hypernetworks of QuARI, ours and the authors': from a query to an adapted query and the tokens' rows U and V.

Both refine one control token and 2r tokens, r for U and r for V, which begin at zero:

    control_l   query_encoder(q) + step embedding l                     (w,)
    X_0         r tokens U and r tokens V, all zero                     (2r, w)
    X_l         X_{l−1} + the tokens of transformer([control_l; X_{l−1} + positions])
    u_j, v_j    decoders of the tokens of X_L                           (d,)

`Hypernetwork` is ours. Its positions differ for all 2r tokens; its transformer normalizes at its end too; queries enter
at length √d, and the decoders' outputs are divided by √d, so that an optimizer's step is small compared with the query
that it moves. The query is decoded from the control token's output at step L.

`PublishedHypernetwork` is the authors' (github.com/mvrl/QuARI, transformer_hypernetwork.py), with the names of their
weights. The control token keeps the sum of its outputs of all steps; the tokens of U and of V have the same r
positions; step embeddings are sinusoids behind an MLP; in training a twentieth of the tokens is set to zero after each
step. The authors multiply rows of items by U Vᵀ, so that their U is what Σ u_j v_jᵀ calls V.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from milvus_hubness.quari.settings import QuariConfig

INSIDE, PUBLISHED_INSIDE = 2, 4
"""Width inside the transformer's MLPs, as a multiple of the width of a token; ours, also of the other MLPs."""
DROPPED_TOKENS = 0.05

Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Hypernetwork(nn.Module):
    """Our hypernetwork. The decoder of the query begins at zero unless the query is averaged, the decoder of U unless
    the map is scaled: the network then begins with the encoder's own ranking."""

    positions: torch.Tensor

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.rank, self.scale = config.rank, math.sqrt(config.dim)
        dim, width, inside = config.dim, config.width, INSIDE * config.width
        self.query_encoder = nn.Sequential(nn.Linear(dim, inside), nn.GELU(), nn.Linear(inside, width))
        self.step_embedding = nn.Embedding(config.steps, width)
        nn.init.normal_(self.step_embedding.weight, std=0.02)
        self.transformer = _transformer(config, inside, nn.LayerNorm(width))
        self.decode_query, self.decode_u, self.decode_v = (
            nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.LayerNorm(inside), nn.Linear(inside, dim))
            for _ in range(3)
        )
        for decoder, begins_at_zero in (
            (self.decode_query, not config.query_weight),
            (self.decode_u, not config.map_scale),
        ):
            if begins_at_zero:
                last = cast(nn.Linear, decoder[-1])
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
        self.register_buffer("positions", sinusoids(2 * config.rank, width), persistent=False)

    def forward(self, queries: torch.Tensor) -> Decoded:
        """Return the decoded queries (m, d), and U and V (m, r, d), for queries (m, d) of length 1."""
        encoded = self.query_encoder(queries * self.scale)
        tokens = encoded.new_zeros(len(queries), *self.positions.shape)
        output = encoded[:, None]
        for step in self.step_embedding.weight:
            output = encode(self.transformer, torch.cat([(encoded + step)[:, None], tokens + self.positions], 1))
            tokens = tokens + output[:, 1:]
        parts = output[:, 0], tokens[:, : self.rank], tokens[:, self.rank :]
        query, U, V = map(self._decoded, (self.decode_query, self.decode_u, self.decode_v), parts)
        return query, U, V

    def _decoded(self, decoder: nn.Sequential, tokens: torch.Tensor) -> torch.Tensor:
        last = cast(nn.Linear, decoder[-1])
        return functional.linear(decoder[:-1](tokens), last.weight / self.scale, last.bias / self.scale)


class PublishedHypernetwork(nn.Module):
    """The authors' hypernetwork."""

    pos_emb: torch.Tensor
    pos_scale: torch.Tensor
    steps: torch.Tensor

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.rank = config.rank
        dim, width, drop = config.dim, config.width, config.dropout
        first = (nn.Linear(dim, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(drop))
        self.query_encoder = nn.Sequential(*first, nn.Linear(width, width), nn.LayerNorm(width))
        self.step_proj = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("pos_emb", sinusoids(2 * config.rank + 1, width))
        self.register_buffer("pos_scale", torch.ones(1))
        self.transformer = _transformer(config, PUBLISHED_INSIDE * width, None)
        self.query_decoder, self.dec_u_img, self.dec_v_img = (
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(drop), nn.Linear(width, dim)) for _ in range(3)
        )
        by_step = sinusoids(config.steps, width)
        self.register_buffer("steps", torch.cat([by_step[:, 1::2], by_step[:, ::2]], 1), persistent=False)

    def forward(self, queries: torch.Tensor) -> Decoded:
        """Return the decoded queries (m, d), and U and V (m, r, d), for queries (m, d)."""
        control = self.query_encoder(queries)
        positions = (self.pos_scale * self.pos_emb[: self.rank]).repeat(2, 1)
        tokens = control.new_zeros(len(queries), *positions.shape)
        for step in self.step_proj(self.steps):
            output = encode(self.transformer, torch.cat([(control + step)[:, None], tokens + positions], 1))
            control, tokens = control + output[:, 0], tokens + output[:, 1:]
            if self.training:
                tokens = tokens * (torch.rand_like(tokens[..., :1]) > DROPPED_TOKENS)
        return (
            self.query_decoder(control),
            self.dec_v_img(tokens[:, self.rank :]),
            self.dec_u_img(tokens[:, : self.rank]),
        )


def _transformer(config: QuariConfig, inside: int, norm: nn.LayerNorm | None) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        config.width, config.heads, inside, config.dropout, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, config.layers, norm=norm, enable_nested_tensor=False)


def encode(transformer: nn.TransformerEncoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return (m, t, w) the transformer's output for tokens (m, t, w), in evaluation mode to float32 accuracy. On the
    CPU, torch's own path forms all t² weights of attention in memory; `scaled_dot_product_attention` does not."""
    if transformer.training:
        return cast(torch.Tensor, transformer(tokens))
    count, length, width = tokens.shape
    for layer in cast(list[nn.TransformerEncoderLayer], transformer.layers):
        attention = layer.self_attn
        rows = functional.linear(layer.norm1(tokens), attention.in_proj_weight, attention.in_proj_bias)
        heads = rows.view(count, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads)
        tokens = tokens + attention.out_proj(attended.transpose(1, 2).reshape(count, length, width))
        tokens = tokens + layer.linear2(functional.gelu(layer.linear1(layer.norm2(tokens))))
    return tokens if transformer.norm is None else cast(torch.Tensor, transformer.norm(tokens))


def sinusoids(count: int, width: int) -> torch.Tensor:
    """Return (count, width) fixed positions (Vaswani et al., NeurIPS 2017, section 3.5); width is even."""
    places = torch.arange(count, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    return torch.stack([torch.sin(places * rates), torch.cos(places * rates)], 2).reshape(count, width)
