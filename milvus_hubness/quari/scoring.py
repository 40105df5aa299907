"""cos(q', T r) of many items without forming T, or T r, for any pair.

With z = V r, the r numbers v_j·r, and G = U Uᵀ (rank × rank), once a query:

    q'·T r    = (U q')·z  + (Sᵀq')·r                  the last terms where T = S + Σ u_j v_jᵀ
    ‖T r‖²    = zᵀ G z    + ‖S r‖² + 2 (U S r)·z

so an item costs the product V r, and rank² more. Where there is an S it costs V r and H r with
H = G V + 2 U S, by which ‖T r‖² = z·H r + ‖S r‖²: G, H and Sᵀq' are of the query alone, and ‖S r‖² is ‖r‖²
for S = I, else a product with its axes.
"""

from __future__ import annotations

import torch

from milvus_hubness.quari.model import Adaptation, Static

TINY = 1e-12


def cosines(adaptation: Adaptation, items: torch.Tensor) -> torch.Tensor:
    """(m, c) cos(q', T r) for m queries and items (c, d) that all share.

    An item that T sends to zero has cosine 0.
    """
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
    found: torch.Tensor = along / lengths
    return found


def transformed_queries(adaptation: Adaptation) -> torch.Tensor:
    """(m, d) Tᵀq', whose inner product with r is q'·T r."""
    query, U, V, static = adaptation
    revert = torch.matmul(torch.matmul(U, query[:, :, None]).transpose(1, 2), V)[:, 0]
    return revert if static is None else revert + _seen(static, query)


def _seen(static: Static, rows: torch.Tensor) -> torch.Tensor:
    """(…, d) Sᵀ of rows (…, d)."""
    return rows if static.map is None else rows @ static.map


def _squares(static: Static, items: torch.Tensor) -> torch.Tensor:
    """(c,) ‖S r‖² of items (c, d)."""
    found: torch.Tensor = static.base * torch.linalg.vector_norm(items, dim=1).square()
    if len(static.axes):
        found = found + (items @ static.axes.T).square() @ static.weights
    return found


def _products(rows: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """(m, k, c) of rows (m, k, d) and items (c, d), as one product of two matrices."""
    count, each, dim = rows.shape
    return (rows.reshape(-1, dim) @ items.T).reshape(count, each, len(items))
