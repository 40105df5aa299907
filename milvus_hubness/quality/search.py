"""Exact corrected search in memory, by tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import Vectors, as_vectors
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.kernels import topk
from milvus_hubness.kernels.arguments import whole_number


def nearest(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    k: int,
    bias: npt.ArrayLike | None = None,
    *,
    device: str = "auto",
) -> npt.NDArray[np.int64]:
    """(n_queries, k) numbers of the gallery items with the highest s(q, r) − b(r), best first.

    queries (n_queries, d), gallery (n_items, d); bias (n_items,), none unless given; 1 ≤ k ≤ n_items.
    Raises InvalidInput, DimensionMismatch, NonFiniteVectors and, for k, InvalidParameter.
    """
    query_vectors, stored = with_bias(queries, gallery, bias)
    k = whole_number("k", k)
    if k > len(stored):
        raise InvalidParameter(f"k = {k} nearest were asked for and the gallery has {len(stored)} items")
    indices: npt.NDArray[np.int64] = topk(query_vectors, stored, k, device=device).indices
    return indices


def with_bias(
    queries: npt.ArrayLike, gallery: npt.ArrayLike, bias: npt.ArrayLike | None
) -> tuple[Vectors, Vectors]:
    """<q, −1> and <r, b>, whose inner products are the corrected scores; as they are without a bias."""
    query_vectors, stored = as_vectors(queries, "the queries"), as_vectors(gallery, "the gallery")
    if query_vectors.shape[1] != stored.shape[1]:
        raise DimensionMismatch(
            f"the queries have dimension {query_vectors.shape[1]}, the gallery has {stored.shape[1]}"
        )
    if bias is None:
        return query_vectors, stored
    if np.shape(bias) != (len(stored),):
        raise DimensionMismatch(f"biases must have shape ({len(stored)},) and have {np.shape(bias)}")
    column = as_vectors(np.reshape(bias, (-1, 1)), "the biases")
    return np.hstack([query_vectors, np.full((len(query_vectors), 1), -1, np.float32)]), np.hstack(
        [stored, column]
    )


def first_k(retrieved: npt.NDArray[Any], k: int) -> npt.NDArray[Any]:
    """(n_queries, k) of the results (n_queries, ≥ k); raises InvalidInput where there are fewer."""
    if retrieved.ndim != 2 or retrieved.shape[1] < k:
        raise InvalidInput(f"results must have shape (n_queries, {k} or more), not {retrieved.shape}")
    return retrieved[:, :k]
