"""Rows of several vectors each, which a database scores by MaxSim: their layout and their codec. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import (
    Floats,
    StorageFormat,
    encode,
    rounded,
)
from milvus_hubness.correction.codec.base import Columns, VectorCodec
from milvus_hubness.correction.codec.layout import Layout, are_finite, expect_finite
from milvus_hubness.correction.codec.senders import KindWeights, QueryWeights, Weights
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors
from milvus_hubness.correction.kernels.token_rows import TokenRows, is_token_rows
from milvus_hubness.errors import InvalidParameter


@dataclass(frozen=True)
class MultiVectorLayout(Layout):
    """The layout of rows that have several vectors, their tokens; for IP and COSINE only.

    Methods take and return `MultiVectors` in place of (n, d). Each token of a row has the row's numbers
    after it, and each of a query its weights, so that MaxSim, a sum over the query's tokens of the
    largest product, is the corrected one: Σj maxi(⟨qj, di⟩ − w·b).

    Raises InvalidParameter for parts that rows of several vectors do not have.
    """

    multi_vectors = True

    def __post_init__(self) -> None:
        if self.metric == "L2":
            raise InvalidParameter(
                "MaxSim over L2 adds up squared distances, which no number behind a vector makes "
                "corrected ones: use IP or COSINE"
            )
        if self.parts != (self.slots,):
            raise InvalidParameter(
                "rows of several vectors have no columns for kinds or index hints: leave them out"
            )
        super().__post_init__()

    @cached_property
    def of_tokens(self) -> Layout:
        """The layout of single vectors, which each token of a row has."""
        return Layout(self.dim, self.metric, self.slots, self.multiple_of)

    def rows(self, vectors: npt.ArrayLike) -> Floats:
        """Return `vectors` as multi-vectors.

        Raises DimensionMismatch, InvalidInput, and NonFiniteVectors for lists of tokens with NaN.
        """
        return cast(Floats, self._rows(vectors))

    def _rows(self, vectors: Any) -> MultiVectors:
        rows = (
            vectors.taken() if is_token_rows(vectors) else MultiVectors.of(vectors, what="vectors")
        )
        rows.expect_dim(self.dim, "the field")
        return rows

    def require_finite(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        rows = self.rows(vectors)
        expect_finite(~self.invalid(rows), what)
        return rows

    def validate_vectors(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        return self.require_finite(vectors, what)

    def invalid(self, vectors: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether a row has NaN or infinity, bool (n,).

        A token of zeros has a score, so that a row of them has one too.
        """
        rows = self._rows(vectors)
        return ~rows.all_of_row(are_finite(rows.tokens))

    def reduce_items(self, vectors: npt.ArrayLike) -> Floats:
        """Return rows of tokens for MaxSim, as documents."""
        return self._reduced(vectors, TokenRows.documents)

    def reduce_queries(self, queries: npt.ArrayLike) -> Floats:
        """Return rows of tokens for MaxSim, as queries."""
        return self._reduced(queries, TokenRows.queries)

    def _reduced(self, vectors: Any, tokens_of: Callable[[MultiVectors], TokenRows]) -> Floats:
        rows = vectors if is_token_rows(vectors) else tokens_of(self._rows(vectors))
        rows.vectors.expect_dim(self.dim, "the field")
        return cast(Floats, rows.normalised() if self.metric == "COSINE" else rows)

    def augment(
        self,
        vectors: npt.ArrayLike,
        biases: npt.ArrayLike,
        locality_hints: npt.ArrayLike | None = None,
        kinds: npt.ArrayLike | None = None,
    ) -> Floats:
        rows = self._rows(vectors)
        of_tokens = rows.of_tokens(self._by_slot(biases, len(rows)))
        return cast(Floats, rows.with_tokens(self.of_tokens.augment(rows.tokens, of_tokens)))

    def with_biases(
        self,
        stored: Floats,
        biases: Mapping[int, npt.ArrayLike],
        locality_hints: npt.ArrayLike | None = None,
        kinds: npt.ArrayLike | None = None,
    ) -> Floats:
        rows = cast(MultiVectors, stored)
        of_tokens = {
            slot: rows.of_tokens(np.asarray(biases_of_slot, np.float32))
            for slot, biases_of_slot in biases.items()
        }
        return cast(Floats, rows.with_tokens(self.of_tokens.with_biases(rows.tokens, of_tokens)))

    def vectors_in(self, stored: Floats) -> Floats:
        return _with_tokens(stored, self.of_tokens.vectors_in)

    def biases(self, stored: Floats, slot: int | slice = 0) -> Floats:
        # All tokens of a row have its biases.
        return self.of_tokens.biases(cast(MultiVectors, stored).first_tokens, slot)

    def sender(
        self,
        strength: float | npt.ArrayLike = 1.0,
        *,
        slot: int = 0,
        kinds: KindWeights | None = None,
    ) -> Callable[[npt.ArrayLike], Floats]:
        weights = self._weights(strength, slot)
        return partial(self._sent, weights, slot)

    def _sent(self, weights: Weights, slot: int, queries: npt.ArrayLike) -> Floats:
        """Return augmented queries, as multi-vectors: each token has the weight of its query."""
        rows = cast(MultiVectors, self.require_finite(queries, "query"))
        of_tokens = rows.of_tokens(weights) if weights.ndim else weights
        sent = self.of_tokens.encode_queries(rows.tokens, of_tokens, slot=slot)
        return cast(Floats, rows.with_tokens(sent))


class MultiVectorFormat(StorageFormat):
    """The storage format of rows of several vectors: that of each token."""

    def encode_rows(self, rows: Floats) -> list[Any]:
        return [encode(tokens, self.dtype) for tokens in self.split(rows)]

    def encode_queries(self, rows: Floats) -> list[Any]:
        return [super(MultiVectorFormat, self).encode_queries(tokens) for tokens in rows]

    def split(self, rows: Floats) -> Floats:
        return _with_tokens(rows, super().split)

    def joined(self, fields: Floats) -> Floats:
        return _with_tokens(fields, super().joined)


class MultiVectorCodec(VectorCodec):
    """The bias location `vector` for rows of several vectors.

    They have no norms: under COSINE, tokens are stored at length 1.
    """

    norm_field = None

    @cached_property
    def form(self) -> StorageFormat:
        layout = self.layout
        return MultiVectorFormat(self.dtype, layout.dim, layout.numbers, layout.multiple_of)

    def decode_rows(self, columns: Columns) -> Floats:
        vectors = self.layout.vectors_in(columns[self.field])
        return _with_tokens(vectors, partial(rounded, dtype=self.dtype))

    def query_packer(
        self, weights: QueryWeights, *, packed: bool = False
    ) -> Callable[[npt.ArrayLike], Iterable[Any]]:
        send = self.query_encoder(weights)
        return lambda queries: self.form.encode_queries(send(queries))


def _with_tokens(rows: Floats, change: Callable[[Floats], Floats]) -> Floats:
    """Return multi-vectors whose tokens are what `change` returns of these."""
    multi = cast(MultiVectors, rows)
    return cast(Floats, multi.with_tokens(change(multi.tokens)))
