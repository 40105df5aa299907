"""Rows of tokens as an operand of the kernels: what stands where others have an array of vectors.

An estimator asks the kernels for means, maxima and sums of the scores of two operands. Those of two
arrays are inner products, and those of two `TokenRows`, queries and documents, are MaxSim. All
else that estimators do with vectors, rows of tokens do too, see `kernels.rows`: they are taken by
number, and get columns, numbers that stand in each token of a row:

    s(q, r) = MaxSim(q, r) + ⟨columns of q, columns of r⟩

A MaxSim takes as long as hundreds of inner products, and a fit reads each score several times. So
documents may carry a table of their scores with a bank, see `TokenRows.scored`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.maxsim import MEMORY_BYTES, maxsim_tiles
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors
from milvus_hubness.correction.kernels.policy import POLICY
from milvus_hubness.errors import DimensionMismatch, InvalidInput

Scores = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]


class Approximation(Protocol):
    """What computes scores of some queries at less cost, such as `Centroids`."""

    @property
    def queries(self) -> MultiVectors: ...

    def tiles(
        self, documents: MultiVectors, numbers: Numbers, *, device: str
    ) -> Iterator[tuple[slice, Scores]]:
        """Yield slices of the documents with their scores of these queries."""
        ...


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """The scores of documents and queries, each computed once."""

    documents: MultiVectors
    queries: MultiVectors
    column_of: Numbers
    """(n_queries,): the column of each query, −1 for a query without scores."""

    scores: Scores
    """(n_documents, columns), without the products of columns of tokens."""

    def has(self, documents: TokenRows, queries: TokenRows) -> bool:
        """Return whether the table has the scores of these rows."""
        is_of_both = self.documents is documents.vectors and self.queries is queries.vectors
        return is_of_both and bool((self.column_of[queries.numbers] >= 0).all())


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Documents or queries of several vectors each, and which of them."""

    vectors: MultiVectors

    numbers: Numbers
    """(n,): the rows of `vectors` that are meant; taking rows copies no token."""

    are_queries: bool
    """Whether the mean is over their tokens, and the maximum over those of the other operand."""

    columns: Scores = field(repr=False)
    """(n, c) float32: numbers that stand in each token of a row."""

    tables: tuple[ScoreTable, ...] = field(default=(), repr=False)
    """Scores that have been computed, of documents."""

    centroids: Approximation | None = field(default=None, repr=False)
    """What computes the scores of documents with the queries of a bank; None for exact ones."""

    @classmethod
    def documents(cls, vectors: MultiVectors) -> TokenRows:
        """Return all rows, as documents."""
        return cls._all(vectors, are_queries=False)

    @classmethod
    def queries(cls, vectors: MultiVectors) -> TokenRows:
        """Return all rows, as queries."""
        return cls._all(vectors, are_queries=True)

    @classmethod
    def _all(cls, vectors: MultiVectors, *, are_queries: bool) -> TokenRows:
        numbers = np.arange(len(vectors))
        return cls(vectors, numbers, are_queries, np.empty((len(vectors), 0), np.float32))

    ndim = 2
    dtype = np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of the numbers in a token with its columns."""
        return len(self.numbers), self.vectors.dim + self.columns.shape[1]

    @property
    def nbytes(self) -> int:
        """The memory of the tokens that rows are taken from."""
        return self.vectors.nbytes

    @property
    def size(self) -> int:
        """How many numbers a kernel reads at least."""
        return len(self) * self.shape[1]

    def __getitem__(self, which: Any) -> TokenRows:
        """Return the rows of a slice, a mask (n,) or numbers."""
        numbers = np.atleast_1d(self.numbers[which])
        columns = self.columns[which].reshape(len(numbers), -1)
        return replace(self, numbers=numbers, columns=columns)

    def taken(self) -> MultiVectors:
        """Return these rows as multi-vectors, without columns."""
        if np.array_equal(self.numbers, np.arange(len(self.vectors))):
            return self.vectors
        start = int(self.numbers[0]) if len(self) else 0
        if np.array_equal(self.numbers, np.arange(start, start + len(self))):
            return self.vectors[start : start + len(self)]
        return self.vectors[self.numbers]

    def normalised(self) -> TokenRows:
        """Return the rows with tokens of length 1."""
        if self.vectors.is_normalised:
            return self
        taken = self.taken().normalised()
        return replace(self, vectors=taken, numbers=np.arange(len(taken)), tables=())

    def as_queries(self) -> TokenRows:
        """Return the rows as queries: their tokens are averaged over."""
        return replace(self, are_queries=True, tables=())

    def as_documents(self) -> TokenRows:
        """Return the rows as documents."""
        return replace(self, are_queries=False)

    def scored(self, queries: TokenRows, *, device: str = "auto") -> TokenRows:
        """Return these documents with a table of their scores with these queries.

        If the table does not fit in the memory that a Sinkhorn fit may store, they are as they were,
        and kernels compute the scores whenever they read them.
        """
        if any(table.has(self, queries) for table in self.tables):
            return self
        documents = self.taken()
        query_numbers = np.unique(queries.numbers)
        stored_bytes, _ = POLICY.get().sinkhorn_limits
        if 4 * len(documents) * len(query_numbers) > stored_bytes:
            return self

        scores = np.empty((len(documents), len(query_numbers)), np.float32)
        for rows, tile in self._tiles(documents, queries.vectors, query_numbers, device):
            scores[rows] = tile
        column_of = np.full(len(queries.vectors), -1)
        column_of[query_numbers] = np.arange(len(query_numbers))
        table = ScoreTable(documents, queries.vectors, column_of, scores)

        # Earlier tables are of the rows as they were numbered then.
        earlier = self.tables if documents is self.vectors else ()
        numbers = np.arange(len(documents))
        return replace(self, vectors=documents, numbers=numbers, tables=(*earlier, table))

    def scores_with(self, queries: TokenRows, device: str = "auto") -> Iterator[tuple[slice, Any]]:
        """Yield slices of these documents with their scores of the queries, (documents, queries)."""
        products = queries.columns.T
        for table in self.tables:
            if table.has(self, queries):
                columns = table.column_of[queries.numbers]
                height = max(1, POLICY.get().tile_size_of("numpy") // max(1, len(queries)))
                for start in range(0, len(self), height):
                    rows = slice(start, min(start + height, len(self)))
                    scores = table.scores[np.ix_(self.numbers[rows], columns)]
                    yield rows, scores + self.columns[rows] @ products
                return

        for rows, scores in self._tiles(self.taken(), queries.vectors, queries.numbers, device):
            yield rows, scores + self.columns[rows] @ products

    def _tiles(
        self, documents: MultiVectors, queries: MultiVectors, numbers: Numbers, device: str
    ) -> Iterator[tuple[slice, Scores]]:
        """Return slices of documents with their scores of some of the queries."""
        if self.centroids is not None and self.centroids.queries is queries:
            return self.centroids.tiles(documents, numbers, device=device)
        is_whole = np.array_equal(numbers, np.arange(len(queries)))
        some = queries if is_whole else queries[numbers]
        return maxsim_tiles(documents, some, device=device)


def is_token_rows(rows: object) -> TypeGuard[TokenRows]:
    """Return whether an operand has rows of tokens."""
    return isinstance(rows, TokenRows)


def concatenated(first: TokenRows, second: TokenRows) -> TokenRows:
    """Return the rows of both, of the first one's kind, without columns."""
    one = first.taken()
    other = second.taken()
    one.expect_dim(other.dim, other.what)
    tokens = np.concatenate([one.tokens, other.tokens])
    offsets = np.concatenate([one.offsets, other.offsets[1:] + one.offsets[-1]])
    rows = MultiVectors(tokens, offsets, what=one.what)
    return TokenRows.queries(rows) if first.are_queries else TokenRows.documents(rows)


def score_rows(X: Any, B: Any, device: str = "auto") -> Iterator[tuple[slice, Scores]]:
    """Yield slices of X's rows with their scores of all rows of B, (rows, |B|).

    X, B: rows of tokens, one of them queries and the other documents. Raises InvalidInput and
    DimensionMismatch.
    """
    validate_token_rows(X, B)
    if not X.are_queries:
        yield from X.scores_with(B, device)
        return

    # Some queries at a time, so that their scores of all documents fit.
    height = max(1, MEMORY_BYTES // (4 * max(1, len(B))))
    for start in range(0, len(X), height):
        rows = slice(start, min(start + height, len(X)))
        scores = np.empty((rows.stop - rows.start, len(B)), np.float32)
        for columns, tile in B.scores_with(X[rows], device):
            scores[:, columns] = tile.T
        yield rows, scores


def validate_token_rows(X: object, B: object) -> None:
    """Raise InvalidInput unless one operand is queries and the other documents of as many numbers."""
    if not (is_token_rows(X) and is_token_rows(B)):
        raise InvalidInput(
            "multi-vectors have no score with vectors: pass bank, queries and gallery as "
            "MultiVectors"
        )
    if X.are_queries == B.are_queries:
        noun = "queries" if X.are_queries else "documents"
        raise InvalidInput(f"MaxSim is between queries and documents, and both operands are {noun}")
    if X.shape[1] != B.shape[1]:
        raise DimensionMismatch(
            f"X has tokens of {X.shape[1]} numbers and B of {B.shape[1]}: embed both with one model"
        )
