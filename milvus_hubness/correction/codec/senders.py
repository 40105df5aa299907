"""Encode queries as augmented queries <q, −w>. No I/O.

A search of one query spends much of its time here, most of it in code that the work of the server
has pushed out of the processor's caches. So what is the same for all queries of a kind of search is
checked and computed once, and what follows has few steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import (
    QUERY_SCALE,
    UNIT_TOLERANCE,
    Floats,
    KindColumns,
    KindWeights,
    lengths_of,
    matrix,
)
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors
from milvus_hubness.errors import InvalidParameter

if TYPE_CHECKING:
    from milvus_hubness.correction.codec.layout import Layout


class Sender:
    """Encodes queries of one vector each, as `Layout.sender` says."""

    def __init__(
        self, layout: Layout, strength: npt.ArrayLike, slot: int, kinds: KindWeights | None
    ) -> None:
        weights = _expect_weights(layout, strength, slot)
        self._layout = layout
        self._kinds = kinds
        self._compares_by_kind = kinds is not None or bool(layout.kind_offsets)

        # The other slots, u and the index hints stay 0: they count in no score.
        after = np.zeros((*weights.shape, layout.width - layout.dim), np.float32)
        if layout.metric == "L2":
            weight_of_v = -QUERY_SCALE * layout.scale / layout.spread
            after[..., 1 : layout.first_slot - layout.dim] = weight_of_v
        columns = layout.columns_of(slot)
        in_slot = after[..., columns.start - layout.dim : columns.stop - layout.dim]
        in_slot[...] = (-weights / layout.bias_factor / layout.spread)[..., None]
        self._after = after

    def __call__(self, queries: npt.ArrayLike) -> Floats:
        """Return augmented queries (m, width). Raises as `Layout.encode_queries` does."""
        layout = self._layout
        rows = matrix(queries, layout.dim, "vectors")
        sent = np.empty((len(rows), layout.width), np.float32)
        sent[:, layout.dim :] = self._after

        vectors = sent[:, : layout.dim]
        if layout.metric == "COSINE":
            self._set_unit(vectors, rows)
        else:
            layout.require_finite(rows, "query")
            vectors[...] = layout.seen(rows)

        if self._compares_by_kind:
            self._set_by_kind(sent)
        return sent

    def _set_unit(self, vectors: Floats, rows: Floats) -> None:
        """Set vectors (m, d), in place, to the rows at length 1; zero rows stay zero."""
        lengths = [
            1.0 if length == 0 or abs(length - 1) <= UNIT_TOLERANCE else length
            for length in lengths_of(rows).tolist()
        ]
        if not math.isfinite(sum(lengths)):
            self._layout.require_finite(rows, "query")

        # Unit vectors, as most encoders return them, are sent as they are.
        if lengths.count(1.0) == len(lengths):
            vectors[...] = rows
        else:
            np.divide(rows, np.array(lengths)[:, None], out=vectors, casting="same_kind")

    def _set_by_kind(self, sent: Floats) -> None:
        """Compare the vectors of augmented queries with the means of kinds, in place.

        Without weights the means are left out, so that only the offsets of stored vectors count.
        """
        layout = self._layout
        vectors = sent[:, : layout.dim]
        in_kinds = sent[:, layout.kind_columns]
        if self._kinds is None:
            np.matmul(vectors, layout.sent_for_offsets, out=in_kinds)
            return

        form = (layout.kind_offsets, layout.kind_scale)
        by_kind = self._kinds.sent.get(form)
        if by_kind is None:
            by_kind = self._kinds.sent[form] = _columns_of(layout, self._kinds)
        np.add(vectors @ by_kind.directions, by_kind.added, out=in_kinds)
        vectors -= self._kinds.taken_off


class TokenSender:
    """Encodes queries of several vectors each: each token has the weights of its query."""

    def __init__(self, layout: Layout, strength: npt.ArrayLike, slot: int) -> None:
        self._layout = layout
        self._weights = _expect_weights(layout, strength, slot)
        self._slot = slot

    def __call__(self, queries: npt.ArrayLike) -> Floats:
        """Return augmented queries, as multi-vectors. Raises as `Layout.encode_queries` does."""
        rows = cast(MultiVectors, self._layout.require_finite(queries, "query"))
        weights = self._weights
        of_tokens = rows.of_tokens(weights) if weights.ndim else weights
        send = Sender(self._layout.of_tokens, of_tokens, self._slot, None)
        return cast(Floats, rows.with_tokens(send(rows.tokens)))


def _expect_weights(layout: Layout, strength: npt.ArrayLike, slot: int) -> npt.NDArray[np.float32]:
    """Return one strength, or one for each query (m,). Raises InvalidParameter."""
    with np.errstate(over="ignore"):
        weights = np.asarray(strength, np.float32)
    if not np.isfinite(weights).all():
        raise InvalidParameter(f"strength must be finite, got {strength!r}")
    if not 0 <= slot < layout.slots:
        raise InvalidParameter(f"slot {slot} is not one of the {layout.slots} slots")
    return weights


def _columns_of(layout: Layout, kinds: KindWeights) -> KindColumns:
    """Return what a search with these weights sends in the columns of kinds."""
    directions = layout.offsets.T - kinds.directions
    directions /= layout.kind_scale
    # Of the query less its mean, whose part is the same in all searches.
    added = kinds.added / layout.kind_scale - kinds.taken_off.astype(np.float64) @ directions
    return KindColumns(np.asarray(directions, np.float32), np.asarray(added, np.float32))
