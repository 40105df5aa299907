"""Codecs encode and decode the rows, queries and scores of a corrected field. No I/O.

There is one class for each bias location, here that of `vector`. Their methods take and return
columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import BiasLocation
from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.codec.arrays import (
    Dtype,
    Floats,
    Metric,
    StorageFormat,
    decode,
    rounded,
    rounded_to_sums,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.senders import FULL, QueryWeights, Sender
from milvus_hubness.errors import StateError

Flags = npt.NDArray[np.bool_]
Columns = dict[str, Any]
"""Values by field name: float32 (n, width) of vectors, in the layout's columns; lists of other
fields."""

BIAS_FIELD = "hubness_bias"
EPOCH_FIELD = "hubness_epoch"
NORM_FIELD = "hubness_norm"
HIDDEN_FIELDS = (BIAS_FIELD, EPOCH_FIELD, NORM_FIELD)
"""The scalar fields that a copy may have, without their suffix."""

PENDING = 0
"""Value of `hubness_epoch` in rows whose bias is not computed yet. A negative epoch is that of a
row whose biases were computed as those of a new row: they depend on the rows that were written
together with it."""


class RowBiases(NamedTuple):
    """Biases of n rows."""

    by_slot: Mapping[int, Floats]
    """(n,) biases of some slots."""
    epoch: int | None = None
    """The epoch of the biases; None leaves that of stored rows."""
    locality_hints: Floats | None = None
    """(n, c) numbers of the locality hint columns; None leaves those of stored rows."""
    kinds: npt.NDArray[np.int64] | None = None
    """(n,) the number of each row's kind, below 0 for none; None leaves those of stored rows."""


def with_columns(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return the rows with these values of fields, by field name."""
    if not columns:
        return [dict(row) for row in rows]
    values_of_rows = zip(*columns.values(), strict=True)
    return [
        {**row, **dict(zip(columns, values, strict=True))}
        for row, values in zip(rows, values_of_rows, strict=True)
    ]


# Each call of a client makes a codec, and nearly all of its calls need the same few formats.
_form = lru_cache(maxsize=256)(StorageFormat)


def form_of(layout: Layout, dtype: Dtype) -> StorageFormat:
    """Return the storage format of a layout's rows in a field of `dtype`.

    Raises InvalidParameter if the field is too narrow.
    """
    return _form(dtype, layout.dim, layout.numbers, layout.multiple_of)


@dataclass(frozen=True)
class RowCodec(ABC):
    """Encodes and decodes the rows of one corrected field, its queries and its scores."""

    field: str
    """The user's vector field."""
    suffix: str
    """End of the names of the hidden fields."""
    layout: Layout
    """The columns of augmented vectors."""
    dtype: Dtype
    """Type of the numbers in the field."""
    shown_slot: int
    """The slot whose bias `bias_field` has: that which searches read by default."""
    side_prefix: str | None = None
    """What the names of the collections begin with that hold the biases under the keys of the rows;
    None if the rows hold them.
    """
    candidates: int = 0
    """The number of candidates of a search for ten results, if it needs any."""

    location: ClassVar[BiasLocation]
    leaves_vectors: ClassVar[bool]
    """Whether `field` holds the vectors as the user gave them."""
    needs_candidates: ClassVar[bool] = False
    """Whether searches fetch candidates, whose scores the client corrects by their biases."""

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """The side collections by slot; empty if there are none."""
        return ()

    def side_columns(self, columns: Columns, slot: int) -> Columns:
        """Return the columns of the rows of a side collection, from those of `encode_rows`."""
        raise NotImplementedError(f"{type(self).__name__} has no side collections")

    @cached_property
    def bias_factor(self) -> float:
        """Factor of a bias in the user's metric.

        Squared distances grow by twice the bias, other scores fall.
        """
        # −½‖q−r‖² − b, the inner product under L2, is −½ times ‖q−r‖² + 2b.
        return 2.0 if self.layout.metric == "L2" else -1.0

    @cached_property
    def bias_field(self) -> str:
        """The scalar field with the active profile's bias."""
        return BIAS_FIELD + self.suffix

    @cached_property
    def epoch_field(self) -> str:
        """The scalar field with the epoch in which the row's bias was computed."""
        return EPOCH_FIELD + self.suffix

    @property
    def served_metric(self) -> Metric:
        """The metric by which the database ranks the field."""
        return "IP"

    @cached_property
    @abstractmethod
    def hidden_fields(self) -> tuple[str, ...]:
        """The fields that this package added; readers do not see them unless they name them."""

    @cached_property
    def form(self) -> StorageFormat:
        """The storage format of the field."""
        return form_of(self.layout, self.dtype)

    def _slots(self, biases: RowBiases, slots: int | Floats) -> Floats:
        """Set the columns of `slots` (n, slots) that have biases, and return it.

        A number n in its place stands for n rows of zeros.
        """
        columns = slots
        if isinstance(columns, int):
            columns = np.zeros((columns, self.layout.slots.count), np.float32)
        for slot, biases_of_slot in biases.by_slot.items():
            columns[:, slot] = biases_of_slot
        return columns

    @cached_property
    def decoding_fields(self) -> tuple[str, ...]:
        """The fields that `decode_rows` needs besides `field`."""
        return ()

    # -- rows -------------------------------------------------------------------------------------

    def columns(self, vectors: Floats, rows: Sequence[Mapping[str, Any]]) -> Columns:
        """Return the columns of stored rows that the other methods read.

        vectors: (n, width) of `field`. rows: the other fields of each row.
        """
        hidden = {name: [row.get(name) for row in rows] for name in self.hidden_fields}
        return {self.field: vectors, **hidden}

    def unpack(self, stored: Floats) -> Floats:
        """Return stored vectors of `field` in the columns of the layout, (n, width).

        Raises StateError if the stored vectors have another width than the codec.
        """
        width = self.layout.dim if self.leaves_vectors else self.form.width
        # A cached state may be older than a copy with another width.
        if len(stored) and stored.shape[1:] != (width,):
            raise StateError(
                f"{field_words(self.field)} has vectors of width {stored.shape[-1]}, "
                f"its collection state says {width}: call again, or open the iterator again"
            )

        # No rows are an array without columns.
        rows = stored.reshape(-1, width)
        if self.leaves_vectors or self.form.is_plain:
            return rows
        return self.form.joined(rows)

    def pack(self, columns: Columns) -> Columns:
        """Return columns with augmented vectors as pymilvus stores them.

        Raises InvalidInput for a number too large.
        """
        # A change of biases may have no vectors.
        if self.leaves_vectors or self.field not in columns:
            return columns

        packed = self.form.encode_rows(columns[self.field])
        return {**columns, self.field: packed}

    def encode_rows(self, vectors: Floats, biases: RowBiases) -> Columns:
        """Return the columns that are stored in place of, or in addition to, those of the user.

        They are for the rows of a side collection if the codec has one. Slots without biases are 0.

        vectors: (n, d).
        """
        slots = self._slots(biases, len(vectors))
        augmented = self.layout.augment(vectors, slots, biases.locality_hints, biases.kinds)
        return {self.field: augmented, **self._hidden(biases, len(vectors))}

    def decode_rows(self, columns: Columns) -> Floats:
        """Return the vectors as the user gave them, (n, d)."""
        vectors: Floats = columns[self.field]
        return vectors

    def vectors_of(self, rows: Sequence[Mapping[str, Any]]) -> Floats:
        """Return the vectors as the user gave them, (n, d), of rows as pymilvus returns them."""
        return self.vectors_in(decode([row[self.field] for row in rows], self.dtype), rows)

    def vectors_in(self, stored: Floats, rows: Sequence[Mapping[str, Any]]) -> Floats:
        """Return the vectors as the user gave them, (n, d), of stored vectors of `field`.

        rows: the other fields of each row. Raises StateError as `unpack` does.
        """
        return self.decode_rows(self.columns(self.unpack(stored), rows))

    def read_biases(self, columns: Columns) -> Floats:
        """Return the biases of stored rows, (n, slots), 0 where a row has none."""
        return self.layout.biases(columns[self.field], slice(None))

    def read_kinds(self, columns: Columns) -> npt.NDArray[np.int64]:
        """Return the kinds of stored rows, (n,), −1 where a row has none."""
        return self.layout.held_kinds(columns[self.field])

    @abstractmethod
    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        """Return the columns that change if stored rows get these biases."""

    def pending(self, columns: Columns) -> Flags:
        """Return (n,) whether the bias of a row is not computed yet."""
        return np.array([epoch in (None, PENDING) for epoch in columns[self.epoch_field]], np.bool_)

    def are_new(self, columns: Columns) -> Flags:
        """Return (n,) whether the biases of a row were computed as those of a new row."""
        epochs = columns[self.epoch_field]
        return np.array([(epoch or PENDING) < PENDING for epoch in epochs], np.bool_)

    def valid(self, columns: Columns, slots: Sequence[int]) -> Flags:
        """Return (n,) whether the biases in these slots are finite and not pending."""
        finite = np.isfinite(self.read_biases(columns)[:, list(slots)]).all(axis=1)
        return np.asarray(finite & ~self.pending(columns), np.bool_)

    def _hidden(self, biases: RowBiases, rows: int) -> Columns:
        """Return the columns with the shown bias and the epoch, as far as they change."""
        columns: Columns = {}
        if self.shown_slot in biases.by_slot:
            shown = np.asarray(biases.by_slot[self.shown_slot], np.float32)
            columns[self.bias_field] = shown.tolist()
        if biases.epoch is not None:
            columns[self.epoch_field] = [biases.epoch] * rows
        return columns

    # -- searches ---------------------------------------------------------------------------------

    def pack_queries(self, queries: npt.ArrayLike, weights: QueryWeights = FULL) -> list[Any]:
        """Return the queries as pymilvus sends them. Raises as `encode_queries` does."""
        return list(self.query_packer(weights)(queries))

    def query_packer(
        self, weights: QueryWeights, *, packed: bool = False
    ) -> Callable[[npt.ArrayLike], Iterable[Any]]:
        """Return what packs queries as `pack_queries` does with these weights, perhaps as an array.

        packed: whether float32 numbers may be bytes too.
        """
        encode = self.query_encoder(weights)
        if self.dtype == "float32":
            return encode.packed if packed and isinstance(encode, Sender) else encode
        form = self.form
        return lambda queries: form.encode_queries(encode(queries))

    def raw_scores(self, vectors: Floats, query: Floats) -> Floats:
        """Return the uncorrected scores (n,) of vectors (n, d) for a query (d,).

        They are in the user's metric.
        """
        [reduced_query] = self.layout.reduce_queries(query[None, :])
        products: Floats = self.layout.reduce_items(vectors) @ reduced_query
        # Rounding can make the distance of equal vectors negative.
        return np.maximum(-2 * products, 0) if self.layout.metric == "L2" else products

    def encode_queries(self, queries: npt.ArrayLike, weights: QueryWeights) -> Floats:
        """Return the queries (m, d) as the field takes them, (m, width).

        Raises as `Layout.encode_queries` does.
        """
        return self.query_encoder(weights)(queries)

    def query_encoder(self, weights: QueryWeights) -> Callable[[npt.ArrayLike], Floats]:
        """Return what encodes queries as `encode_queries` does with these weights."""
        return self.layout.sender(weights.strength, slot=weights.slot, kinds=weights.kinds)

    def decode_scores(
        self,
        scores: npt.ArrayLike,
        queries: npt.ArrayLike,
        strength: float = 1.0,
        biases: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float64]:
        """Return the corrected scores (m, k), in the user's metric.

        scores: (m, k) as the database returns them. queries: (m, d). biases: (m, k) of candidates,
        which need them; other scores contain them.
        """
        return self.layout.scores(scores, queries, strength)


class VectorCodec(RowCodec):
    """The bias location `vector`: columns of the field's vectors hold the biases.

    A scalar field shows the active one.
    """

    location = "vector"
    leaves_vectors = False

    @cached_property
    def norm_field(self) -> str | None:
        """The scalar field with ‖r‖, which COSINE needs to decode vectors.

        None for other metrics.
        """
        return NORM_FIELD + self.suffix if self.layout.metric == "COSINE" else None

    @cached_property
    def decoding_fields(self) -> tuple[str, ...]:
        return (self.norm_field,) if self.norm_field else ()

    @cached_property
    def hidden_fields(self) -> tuple[str, ...]:
        return (self.bias_field, self.epoch_field, *self.decoding_fields)

    def encode_rows(self, vectors: Floats, biases: RowBiases) -> Columns:
        columns = super().encode_rows(vectors, biases)
        if self.norm_field:
            columns[self.norm_field] = self.layout.norms(vectors).tolist()
        return columns

    def decode_rows(self, columns: Columns) -> Floats:
        """Return the vectors, (n, d), within one unit in the last place.

        They are exact for IP, for norms of 1, and for L2 except for the numbers of `lost`. Where rows
        are stored less an offset of their kind, it is the last place of a number or of its offset,
        whichever is larger.
        """
        rows = self.layout.vectors_in(columns[self.field])
        if self.norm_field:
            # The products are rounded to float32 once, from float64.
            norms = np.asarray(columns[self.norm_field], np.float64)[:, None]
            rows = np.multiply(
                rows, norms, out=np.empty(rows.shape, np.float32), casting="same_kind"
            )
        return rounded(rows, self.dtype)

    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        augmented = self.layout.with_biases(
            columns[self.field], biases.by_slot, biases.locality_hints, biases.kinds
        )
        return {self.field: augmented, **self._hidden(biases, len(augmented))}

    def valid(self, columns: Columns, slots: Sequence[int]) -> Flags:
        """Also check that one of these slots has the bias of the bias field."""
        # Compared as stored, since that is where they were rounded: a half-precision field holds a
        # bias as the sum of two numbers.
        shown = self.layout.slots.as_stored(np.array(columns[self.bias_field], np.float32))
        stored = self.layout.slots.as_stored(self.read_biases(columns)[:, list(slots)])
        same = (stored == rounded_to_sums(shown, self.dtype)[:, None]).any(axis=1)
        return np.asarray(super().valid(columns, slots) & same, np.bool_)
