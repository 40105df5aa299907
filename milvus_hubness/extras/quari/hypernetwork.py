"""The hypernetwork of QuARI: from a query to the decoded query and to the rows of U and V.

It refines one control token and 2r tokens, r for U and r for V, which begin at zero:

    control_0     query_encoder(q)                                        (w,)
    X_0           r tokens U and r tokens V, all zero                     (2r, w)
    control, X    + the tokens of transformer([control + step l; X + positions]), l = 1 … L
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
"""Share of the tokens that is set to zero after each step of a training."""


class Hypernetwork(nn.Module):
    """The hypernetwork with the sizes of a `QuariConfig`.

    The names of modules and buffers are those in the authors' files of weights.
    """

    pos_emb: torch.Tensor
    """(2r + 1, w): positions, of which the first r are used."""
    pos_scale: torch.Tensor
    """(1,): their factor."""
    steps: torch.Tensor
    """(L, w): embeddings of the steps before the MLP; not in the weights."""

    def __init__(self, config: QuariConfig) -> None:
        super().__init__()
        self.rank = config.rank
        dim = config.dim
        width = config.width
        drop = config.dropout

        # The order of the modules is that of their random numbers: a seed makes one network.
        self.query_encoder = nn.Sequential(
            nn.Linear(dim, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Dropout(drop),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )
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

        self.query_decoder = _decoder(width, dim, drop)
        self.dec_u_img = _decoder(width, dim, drop)
        self.dec_v_img = _decoder(width, dim, drop)

        # The authors put all cosines before all sines here, unlike in the positions.
        by_step = sinusoids(config.steps, width)
        cosines_and_sines = torch.cat([by_step[:, 1::2], by_step[:, ::2]], 1)
        self.register_buffer("steps", cosines_and_sines, persistent=False)

    def forward(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the decoded queries (m, d), and U and V (m, r, d), for queries (m, d)."""
        control = self.query_encoder(queries)
        # The tokens of U and those of V have the same positions.
        positions = (self.pos_scale * self.pos_emb[: self.rank]).repeat(2, 1)
        tokens = control.new_zeros(len(queries), *positions.shape)
        for step in self.step_proj(self.steps):
            first = (control + step)[:, None]
            output = self.transformer(torch.cat([first, tokens + positions], 1))
            control = control + output[:, 0]
            tokens = tokens + output[:, 1:]
            if self.training:
                tokens = tokens * (torch.rand_like(tokens[..., :1]) > DROPPED_TOKENS)

        # The authors' U is V here, and the other way round.
        return (
            self.query_decoder(control),
            self.dec_v_img(tokens[:, self.rank :]),
            self.dec_u_img(tokens[:, : self.rank]),
        )


def _decoder(width: int, dim: int, dropout: float) -> nn.Sequential:
    """Return the network from a token (w,) to a vector (d,)."""
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, dim)
    )


def sinusoids(count: int, width: int) -> torch.Tensor:
    """Return fixed positions (count, width); width is even.

    Vaswani et al., NeurIPS 2017, section 3.5.
    """
    positions = torch.arange(count, dtype=torch.float32)[:, None]
    even = torch.arange(0, width, 2, dtype=torch.float32)
    rates = torch.exp(even * (-math.log(10_000.0) / width))

    # A sine and a cosine of each rate, side by side.
    pairs = torch.stack([torch.sin(positions * rates), torch.cos(positions * rates)], 2)
    return pairs.reshape(count, width)
