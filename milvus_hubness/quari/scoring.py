"""cos(q', T r) of many items without forming T, or T r, for any pair.

With z = V r, the r numbers v_j·r, and G = U Uᵀ (rank × rank), once a query:

    q'·T r    = (U q')·z            + q'·r           the last terms where T = I + Σ u_j v_jᵀ
    ‖T r‖²    = zᵀ G z              + ‖r‖² + 2 (U r)·z

so an item costs the product V r, U r too in the residual form, and rank² more. Where a static map comes
before, r stands for what that makes of the item: r + Σ a_i (b_i·r).
"""

from __future__ import annotations

import torch

from milvus_hubness.quari.model import Adaptation

TINY = 1e-12


def cosines(adaptation: Adaptation, items: torch.Tensor) -> torch.Tensor:
    """(m, c) cos(q', T r) for m queries and items (c, d) that all share, or (m, c, d), of each its own.

    An item that T sends to zero has cosine 0.
    """
    query, U, V, residual, A, B = adaptation
    if len(A):
        items = items + (items @ B.T) @ A
    transposed = items.T if items.ndim == 2 else items.transpose(1, 2)
    z = _products(V, transposed)
    along = torch.matmul(torch.matmul(U, query[:, :, None]).transpose(1, 2), z)[:, 0]
    squares = (torch.matmul(torch.matmul(U, U.transpose(1, 2)), z) * z).sum(1)
    if residual:
        shared = items.ndim == 2
        along = along + (query @ transposed if shared else torch.matmul(query[:, None], transposed)[:, 0])
        squares = squares + items.square().sum(-1) + 2 * (_products(U, transposed) * z).sum(1)
    lengths = squares.clamp_min(TINY).sqrt() * query.norm(dim=1, keepdim=True).clamp_min(TINY)
    found: torch.Tensor = along / lengths
    return found


def transformed_queries(adaptation: Adaptation) -> torch.Tensor:
    """(m, d) Tᵀq', whose inner product with r is q'·T r."""
    query, U, V, residual, A, B = adaptation
    back = torch.matmul(torch.matmul(U, query[:, :, None]).transpose(1, 2), V)[:, 0]
    back = back + query if residual else back
    return back + (back @ A.T) @ B


def _products(rows: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
    """(m, r, c) of rows (m, r, d) and items (d, c) or (m, d, c): one product where the items are shared."""
    if transposed.ndim == 3:
        return torch.matmul(rows, transposed)
    count, rank, dim = rows.shape
    return (rows.reshape(-1, dim) @ transposed).reshape(count, rank, transposed.shape[1])
