"""Encode queries as augmented queries <q, −w>, by what a layout says of them. No I/O.

A search of one query spends much of its time here, most of it in code that the work of the server
has pushed out of the processor's caches. So what is the same for all queries of a prepared search is
checked and computed once, and what follows has few steps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import (
    UNIT_TOLERANCE,
    Floats,
    lengths_of,
    matrix,
    only_vector,
    packing,
)

Weights = npt.NDArray[np.float32]
"""One strength, or one for each query (m,)."""


@dataclass(frozen=True, eq=False)
class ByKind:
    """Compares queries with the means of kinds, by the columns of kinds."""

    columns: slice
    """The columns, after the vector."""
    directions: Floats
    """(d, K + 1): (νk − κ·(μk − μ))/h, which the query is multiplied with."""
    added: Floats
    """(K + 1,): κ·⟨μq, μ⟩/h less the products of κ·μq with the directions."""
    taken_off: Floats | None
    """(d,) what is subtracted from the queries afterwards; None for nothing."""

    def set(self, sent: Floats, vectors: Floats) -> None:
        """Set the columns of augmented queries, and their vectors (m, d), in place."""
        np.add(vectors @ self.directions, self.added, out=sent[:, self.columns])
        if self.taken_off is not None:
            vectors -= self.taken_off


@dataclass(frozen=True, eq=False)
class KindWeights:
    """What a search sends for the kinds of items, see `correction.kinds`; κ is in all three."""

    taken_off: Floats
    """(d,): κ·μq, subtracted from the query."""
    directions: npt.NDArray[np.float64]
    """(d, K + 1): κ·(μk − μ), whose products with that difference are subtracted by kind; 0 for rows
    without a kind, which count as average items."""
    added: float
    """κ·⟨μq, μ⟩, added to all scores: an item at the mean of all has its raw score."""
    sent: dict[tuple[str, float], ByKind] = field(default_factory=dict, repr=False)
    """By the offsets and h of a layout: they are computed once, since nearly all searches have the same
    weights."""


class QueryWeights(NamedTuple):
    """What a search sends beside its queries."""

    strength: float = 1.0
    """w; 0 gives the raw ranking."""
    slot: int = 0
    """The slot whose biases count."""
    kinds: KindWeights | None = None
    """The means of kinds to compare with; None for none."""


FULL = QueryWeights()
"""The full correction by the first slot."""


@dataclass(frozen=True)
class Sender:
    """Encodes queries of one vector each."""

    dim: int
    """d, the dimension of the user's queries."""
    after: Floats
    """The columns after the vector, (width − d,), or those of each query, (m, width − d)."""
    is_cosine: bool
    """Whether queries are sent at length 1."""
    require_finite: Callable[[Floats, str], Any]
    """Raises NonFiniteVectors, which names the queries."""
    seen_from: Floats | None
    """(d,) the mean that queries are measured from; None for a layout without one."""
    by_kind: ByKind | None
    """None for a search that compares with no means and a layout without offsets."""

    def __call__(self, queries: npt.ArrayLike) -> Floats:
        """Return augmented queries (m, width). Raises as `Layout.encode_queries` does."""
        rows = matrix(queries, self.dim, "vectors")
        sent = np.empty((len(rows), self.dim + self.after.shape[-1]), np.float32)
        sent[:, self.dim :] = self.after

        vectors = sent[:, : self.dim]
        if self.is_cosine:
            self._set_unit(vectors, rows)
        else:
            self.require_finite(rows, "query")
            vectors[...] = rows if self.seen_from is None else rows - self.seen_from

        if self.by_kind is not None:
            self.by_kind.set(sent, vectors)
        return sent

    def packed(self, queries: npt.ArrayLike) -> Iterable[Any]:
        """Return augmented queries as a request has them: the bytes of one, or else an array.

        Raises as `Layout.encode_queries` does.
        """
        if self.by_kind is not None or (self.seen_from is not None and not self.is_cosine):
            return self(queries)

        vector = only_vector(queries, self.dim)
        if vector is None:
            return self(queries)
        if isinstance(vector, np.ndarray):
            query = vector
        else:
            try:
                packed = packing(self.dim)(*vector)
                length = math.hypot(*vector)
            except (struct.error, OverflowError, TypeError):
                return self(queries)

            # Most encoders return unit vectors: such a list needs no function of NumPy at all.
            if is_unit(length) or (not self.is_cosine and math.isfinite(length)):
                return [packed + self._bytes_after]
            query = np.frombuffer(packed, np.float32)

        # The same numbers as of several queries, by the fewest functions of NumPy: most of the time
        # goes into the first call of each.
        wide = query.astype(np.float64)
        length = math.sqrt(wide.dot(wide))
        if not math.isfinite(length):
            self.require_finite(query[None], "query")
        if self.is_cosine and not is_unit(length):
            query = (wide / length).astype(np.float32)
        return [query.tobytes() + self._bytes_after]

    @cached_property
    def _bytes_after(self) -> bytes:
        """The columns after the vector of one query."""
        return self.after.tobytes()

    def _set_unit(self, vectors: Floats, rows: Floats) -> None:
        """Set vectors (m, d), in place, to the rows at length 1; zero rows stay zero."""
        lengths = [1.0 if is_unit(length) else length for length in lengths_of(rows).tolist()]
        if not math.isfinite(sum(lengths)):
            self.require_finite(rows, "query")

        # Unit vectors, as most encoders return them, are sent as they are.
        if lengths.count(1.0) == len(lengths):
            vectors[...] = rows
        else:
            np.divide(rows, np.array(lengths)[:, None], out=vectors, casting="same_kind")


def is_unit(length: float) -> bool:
    """Whether a vector of this length is sent as it is; one of zeros has no direction."""
    return length == 0 or abs(length - 1) <= UNIT_TOLERANCE
