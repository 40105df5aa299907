"""The hypernetwork of QuARI: from a query to the decoded query and to the rows of U and V.

It refines one control token and 2r tokens, r for U and r for V, which begin at zero:

    control_0     query_encoder(q)                                        (w,)
    X_0           r tokens U and r tokens V, all zero                     (2r, w)
    control, X    + the tokens of transformer([control + step embedding l; X + positions]), l = 1 … L
    q, u_j, v_j   decoders of the control token and of the tokens of X    (d,)

The network and the names of its weights are the authors' (github.com/mvrl/QuARI,
transformer_hypernetwork.py). The tokens of U and of V have the same r positions; step embeddings
are sinusoids behind an MLP; in training a twentieth of the tokens is set to zero after each step.
The authors multiply rows of items by U Vᵀ, so that their U is what Σ u_j v_jᵀ calls V.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from milvus_hubness.extras.quari.settings import QuariConfig

INSIDE = 4
"""Width inside the transformer's MLPs, as a multiple of the width of a token."""
DROPPED_TOKENS = 0.05


class Hypernetwork(nn.Module):
    """The hypernetwork with the sizes of a `QuariConfig`."""

    pos_emb: torch.Tensor
    pos_scale: torch.Tensor
    steps: torch.Tensor

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.rank = config.rank
        dim = config.dim
        width = config.width
        drop = config.dropout
        first = (nn.Linear(dim, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(drop))
        self.query_encoder = nn.Sequential(*first, nn.Linear(width, width), nn.LayerNorm(width))
        self.step_proj = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("pos_emb", sinusoids(2 * config.rank + 1, width))
        self.register_buffer("pos_scale", torch.ones(1))
        layer = nn.TransformerEncoderLayer(
            width,
            config.heads,
            INSIDE * width,
            drop,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.transformer = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.query_decoder, self.dec_u_img, self.dec_v_img = (
            nn.Sequential(
                nn.Linear(width, width), nn.GELU(), nn.Dropout(drop), nn.Linear(width, dim)
            )
            for _ in range(3)
        )
        by_step = sinusoids(config.steps, width)
        self.register_buffer(
            "steps", torch.cat([by_step[:, 1::2], by_step[:, ::2]], 1), persistent=False
        )

    def forward(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the decoded queries (m, d), and U and V (m, r, d), for queries (m, d)."""
        control = self.query_encoder(queries)
        positions = (self.pos_scale * self.pos_emb[: self.rank]).repeat(2, 1)
        tokens = control.new_zeros(len(queries), *positions.shape)
        for step in self.step_proj(self.steps):
            output = self.transformer(torch.cat([(control + step)[:, None], tokens + positions], 1))
            control = control + output[:, 0]
            tokens = tokens + output[:, 1:]
            if self.training:
                tokens = tokens * (torch.rand_like(tokens[..., :1]) > DROPPED_TOKENS)

        return (
            self.query_decoder(control),
            self.dec_v_img(tokens[:, self.rank :]),
            self.dec_u_img(tokens[:, : self.rank]),
        )


def sinusoids(count: int, width: int) -> torch.Tensor:
    """Return (count, width) fixed positions (Vaswani et al., NeurIPS 2017, section 3.5); width is
    even.
    """
    places = torch.arange(count, dtype=torch.float32)[:, None]
    rates = torch.exp(
        torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width)
    )
    return torch.stack([torch.sin(places * rates), torch.cos(places * rates)], 2).reshape(
        count, width
    )
