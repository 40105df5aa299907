"""The transformer of a network that no longer learns: torch's own layers, whose attention is never formed."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional


def encode(transformer: nn.TransformerEncoder, tokens: torch.Tensor) -> torch.Tensor:
    """(m, t, w) what the transformer says of tokens (m, t, w) in evaluation mode, to float32 accuracy.

    Its layers normalise first and have GELU between. On the CPU torch takes another road there, which forms
    all t² weights of attention in memory; this one leaves them to `scaled_dot_product_attention`.
    """
    for layer in transformer.layers:
        tokens = _layer(cast(nn.TransformerEncoderLayer, layer), tokens)
    normalised: torch.Tensor = cast(nn.LayerNorm, transformer.norm)(tokens)
    return normalised


def _layer(layer: nn.TransformerEncoderLayer, tokens: torch.Tensor) -> torch.Tensor:
    attention = layer.self_attn
    count, length, width = tokens.shape
    rows = functional.linear(layer.norm1(tokens), attention.in_proj_weight, attention.in_proj_bias)
    heads = rows.view(count, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    seen = functional.scaled_dot_product_attention(*heads)
    tokens = tokens + attention.out_proj(seen.transpose(1, 2).reshape(count, length, width))
    added: torch.Tensor = layer.linear2(functional.gelu(layer.linear1(layer.norm2(tokens))))
    return tokens + added
