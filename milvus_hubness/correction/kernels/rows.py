"""What estimators do with rows, whether each is one vector or several tokens.

Who works by these functions need not know which of both it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, is_multi
from milvus_hubness.correction.kernels.token_rows import (
    TokenRows,
    concatenated,
    is_token_rows,
    score_rows,
)


def with_column(rows: Any, column: npt.ArrayLike) -> Any:
    """Return vectors (n, d), or rows of tokens, with one more column (n,), or one number for all."""
    values = np.broadcast_to(np.asarray(column, np.float32), (len(rows),))[:, None]
    if is_token_rows(rows):
        return replace(rows, columns=np.hstack([rows.columns, values]))
    return np.hstack([rows, values])


def all_scores(rows: Any, others: Any) -> npt.NDArray[Any]:
    """Return the scores of two operands, (n, m): their inner products, or MaxSim."""
    if not (is_token_rows(rows) or is_token_rows(others)):
        return cast(npt.NDArray[Any], rows @ others.T)
    tiles = [scores for _, scores in score_rows(rows, others)]
    return np.concatenate(tiles) if tiles else np.empty((0, len(others)), np.float32)


def scored(documents: Any, queries: Any, device: str = "auto") -> Any:
    """Return vectors as they are, and documents of tokens with a table of their scores."""
    # Rows of one vector and of several have no scores, which the kernels say.
    if is_token_rows(documents) and is_token_rows(queries):
        return documents.scored(queries, device=device)
    return documents


def as_queries(rows: Any) -> Any:
    """Return vectors as they are, and rows of tokens as queries."""
    return rows.as_queries() if is_token_rows(rows) else rows


def has_numbers(rows: Any) -> bool:
    """Return whether not all numbers of vectors, or of tokens, are 0."""
    return bool((rows.vectors.tokens if is_token_rows(rows) else rows).any())


def as_floats(rows: Any) -> Any:
    """Return vectors as float32, rows of tokens as they are, and multi-vectors as documents."""
    if isinstance(rows, MultiVectors):
        return TokenRows.documents(rows)
    return rows if is_token_rows(rows) else np.asarray(rows, np.float32)


def longest(rows: Any) -> npt.NDArray[np.float64]:
    """Return the length of each vector, or of the longest token of each row, float64 (n,)."""
    if not is_token_rows(rows):
        return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1))
    taken = rows.taken()
    tokens = np.sqrt(np.einsum("td,td->t", taken.tokens, taken.tokens, dtype=np.float64))
    return np.asarray(np.maximum.reduceat(tokens, taken.offsets[:-1]))


def pooled(rows: Any) -> npt.NDArray[np.float32]:
    """Return vectors as they are, and rows of tokens as the means of their tokens, (n, d)."""
    taken = rows.taken() if is_token_rows(rows) else rows
    return taken.means() if is_multi(taken) else np.asarray(taken)


def mapped(rows: Any, function: Callable[[Any], Any]) -> Any:
    """Return what a function of vectors (n, d) gives, of each token where a row has several."""
    if not is_token_rows(rows):
        return function(rows)
    taken = rows.taken()
    vectors = MultiVectors(function(taken.tokens), taken.offsets, what=taken.what)
    return TokenRows.queries(vectors) if rows.are_queries else TokenRows.documents(vectors)


def row_keys(rows: Any) -> list[bytes]:
    """Return bytes that are equal for equal rows."""
    return [tokens.tobytes() for tokens in (rows.taken() if is_token_rows(rows) else rows)]


def numbers_of(rows: Any) -> Iterator[bytes]:
    """Yield all numbers of vectors, or of tokens with the offsets, as little-endian bytes."""
    if is_token_rows(rows):
        taken = rows.taken()
        yield taken.offsets.astype("<i8", copy=False).tobytes()
        rows = taken.tokens
    yield np.asarray(rows).astype("<f4", copy=False).tobytes()


def joined(parts: Sequence[Any]) -> Any:
    """Return the rows of two operands, one after the other."""
    if is_token_rows(parts[0]):
        return concatenated(*parts)
    return np.concatenate(parts)
