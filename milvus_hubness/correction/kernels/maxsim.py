"""MaxSim, the score of late interaction (Khattab and Zaharia, ColBERT, SIGIR 2020), as a mean.

    s(q, r) = mean over the tokens q_j of q of max_i ⟨q_j, r_i⟩ over the tokens r_i of r

Documents of nearly the same length make a group, in which shorter ones repeat their last token: that
changes no maximum, and one product of matrices serves the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import isqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, Tokens
from milvus_hubness.correction.kernels.policy import resolve_device, uses_numpy

Scores: TypeAlias = npt.NDArray[np.float32]
Numbers: TypeAlias = npt.NDArray[np.int64]

MEMORY_BYTES = 1 << 26
"""Default memory of a computation, apart from its arguments and its result."""
LEAST_MEMORY = 1 << 16
"""Least memory that can be set, in bytes."""
MOST_PADDING = 0.125
"""Share of a group's tokens that may be repetitions."""
SHARES = 6
"""The memory is shared by the tokens of a group, their products with a block of queries, the maxima,
their sums in float64, and the scores of a tile."""


def maxsim(
    queries: MultiVectors,
    documents: MultiVectors,
    *,
    device: str = "auto",
    memory_bytes: int = MEMORY_BYTES,
) -> Scores:
    """Return MaxSim of all queries and documents, float32 (n_queries, n_documents).

    It is the mean over a query's tokens, so that long queries score as high as short ones; times
    `queries.lengths[:, None]`, it is the score that a database returns. Tokens are compared by their
    inner products: pass `normalised()` rows for cosine. device: as of all kernels. Raises
    DimensionMismatch, InvalidParameter.
    """
    scores = np.empty((len(queries), len(documents)), np.float32)
    tiles = maxsim_tiles(documents, queries, device=device, memory_bytes=memory_bytes)
    for rows, tile in tiles:
        scores[:, rows] = tile.T
    return scores


def maxsim_tiles(
    documents: MultiVectors,
    queries: MultiVectors,
    *,
    device: str = "auto",
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[tuple[slice, Scores]]:
    """Yield slices of the documents with their scores, float32 (documents, n_queries).

    Beyond its arguments it takes about `memory_bytes`, or what the scores of one document take, and
    four bytes for each token of the longest document. Raises as `maxsim` does.
    """
    queries.expect_dim(documents.dim, documents.what)
    memory = whole_number("memory_bytes", memory_bytes, at_least=LEAST_MEMORY)
    share = memory // (SHARES * np.dtype(np.float32).itemsize)
    products = len(documents.tokens) * len(queries.tokens) * queries.dim

    with ExitStack() as settings:
        library: _OnNumpy | _OnTorch
        if uses_numpy(products, device):
            library = _OnNumpy()
        else:
            # torch takes a second to import, which a search service does without.
            from milvus_hubness.correction.kernels.operands import full_precision

            torch_device = resolve_device(device)
            settings.enter_context(full_precision(torch_device))
            library = _OnTorch(torch_device)

        if not len(queries):
            yield slice(0, len(documents)), np.empty((len(documents), 0), np.float32)
            return

        blocks = _query_blocks(queries, library, share)
        height = max(1, share // len(queries))
        for start in range(0, len(documents), height):
            rows = slice(start, min(start + height, len(documents)))
            yield rows, _tile(documents[rows], len(queries), blocks, library, share)


class _Block(NamedTuple):
    """Queries whose maxima are in memory at once."""

    rows: slice
    tokens: Any
    """(t, d), where the library computes, or as an array if not all queries fit there."""
    starts: Numbers
    """(rows,): the first token of each query."""
    lengths: Numbers
    """(rows,)."""


def _query_blocks(queries: MultiVectors, library: _OnNumpy | _OnTorch, share: int) -> list[_Block]:
    """Return the queries in blocks of tokens that take at most `share`, or of one query."""
    # As many query tokens as documents: the maxima of a group are a square.
    most = max(1, min(share // queries.dim, isqrt(share)))
    fits = queries.tokens.size <= share
    blocks = []
    start = 0
    while start < len(queries):
        limit = queries.offsets[start] + most
        end = int(np.searchsorted(queries.offsets, limit, "right")) - 1
        block = queries[start : max(end, start + 1)]
        tokens = library.load(block.tokens) if fits else block.tokens
        rows = slice(start, start + len(block))
        blocks.append(_Block(rows, tokens, block.offsets[:-1], block.lengths))
        start = rows.stop
    return blocks


def _tile(
    documents: MultiVectors,
    query_count: int,
    blocks: list[_Block],
    library: _OnNumpy | _OnTorch,
    share: int,
) -> Scores:
    """Return the scores of these documents, (documents, queries)."""
    scores = np.empty((len(documents), query_count), np.float32)
    most_rows = max(1, share // max(int(block.lengths.sum()) for block in blocks))
    for group, tokens in _groups(documents, share // documents.dim, most_rows):
        loaded = library.load(tokens)
        for block in blocks:
            maxima = library.maxima(loaded, library.load(block.tokens), share)
            sums = np.add.reduceat(maxima, block.starts, axis=1, dtype=np.float64)
            scores[group, block.rows] = sums / block.lengths
    return scores


def _groups(
    documents: MultiVectors, most_tokens: int, most_rows: int
) -> Iterator[tuple[Numbers, Tokens]]:
    """Yield the numbers of documents of nearly the same length, with their tokens (n, l, d).

    n · l is at most `most_tokens` unless n is 1.
    """
    order = np.argsort(documents.lengths, kind="stable")
    lengths = documents.lengths[order]
    starts = [0]
    token_count = 0
    for position, length in enumerate(lengths.tolist()):
        row_count = position + 1 - starts[-1]
        padded = row_count * length
        token_count += length
        is_full = row_count > most_rows or padded > most_tokens
        if row_count > 1 and (is_full or padded - token_count > MOST_PADDING * padded):
            token_count = length
            starts.append(position)

    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        group = order[start:end]
        yield group, _padded(documents, group, int(lengths[end - 1]))


def _padded(documents: MultiVectors, group: Numbers, length: int) -> Tokens:
    """Return the tokens (n, length, d) of some documents; shorter ones repeat their last token."""
    if len(group) == 1:
        return documents[int(group[0])][None]
    last = documents.lengths[group] - 1
    token_numbers = documents.offsets[group, None] + np.minimum(np.arange(length), last[:, None])
    return np.asarray(documents.tokens[token_numbers], np.float32)


class _OnNumpy:
    """The maxima by NumPy."""

    def load(self, tokens: Tokens) -> Tokens:
        return tokens

    def maxima(self, documents: Tokens, queries: Tokens, share: int) -> Scores:
        """Return max_i ⟨q_j, r_i⟩ of documents (n, l, d) and query tokens (t, d), (n, t).

        share: products in memory at once, or those of one query token.
        """
        count, length, dim = documents.shape
        flat = documents.reshape(count * length, dim)
        maxima = np.empty((count, len(queries)), np.float32)
        for columns in _columns(len(queries), len(flat), share):
            products = flat @ queries[columns].T
            maxima[:, columns] = products.reshape(count, length, -1).max(1)
        return maxima


class _OnTorch:
    """The maxima by torch, on any device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def load(self, tokens: Any) -> Any:
        import torch

        from milvus_hubness.correction.kernels.operands import as_tensor

        return as_tensor(tokens, torch.float32, self.device)

    def maxima(self, documents: Any, queries: Any, share: int) -> Scores:
        """Return what `_OnNumpy.maxima` returns, as an array."""
        from milvus_hubness.correction.kernels.operands import product

        count, length, dim = documents.shape
        flat = documents.reshape(count * length, dim)
        maxima = documents.new_empty((count, len(queries)))
        for columns in _columns(len(queries), len(flat), share):
            products = product(flat, queries[columns].T)
            maxima[:, columns] = products.view(count, length, -1).amax(1)
        return np.asarray(maxima.cpu().numpy(), np.float32)


def _columns(query_tokens: int, document_tokens: int, share: int) -> Iterator[slice]:
    """Yield slices of the query tokens whose products are in memory at once."""
    width = max(1, share // document_tokens)
    for start in range(0, query_tokens, width):
        yield slice(start, start + width)
