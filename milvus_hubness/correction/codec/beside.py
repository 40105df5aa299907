"""The bias location `beside`: searches re-rank candidates.

Vectors are stored as the user gave them. Biases are entries apart from them: rows of two side
collections on Milvus, keys of each payload on Qdrant. There are two slots of entries. A refresh fills
the slot that no search reads, and then the state names that one.

Each entry has the number of the generation for which its bias was computed: one that a client
writes late, for an earlier generation, is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.codec.arrays import Floats, Metric, StorageFormat
from milvus_hubness.correction.codec.base import (
    BIAS_FIELD,
    EPOCH_FIELD,
    PENDING,
    Columns,
    Flags,
    RowBiases,
    RowCodec,
)
from milvus_hubness.correction.codec.senders import QueryWeights

SLOTS = 2
"""Slots of entries: that of the generation that searches read, and that of the other one."""
SLOT_KEYS = (BIAS_FIELD, "hubness_second_bias")
"""Keys of payloads with the biases, by slot, without their suffix, which is one of a field's name: no
key with one is a key of the other slot.
"""
NUMBER_KEYS = (EPOCH_FIELD, "hubness_second_epoch")
"""Keys of payloads with the numbers of the generations, by slot, without their suffix."""
SIDE_FIELD = "biases"
"""Vector field of a side collection, whose first component is the bias."""
SIDE_WIDTH = 2
"""Components of that field: the least that Milvus takes. The second is 0."""
SIDE_ENDINGS = ("_a", "_b")
"""Ends of the names of the side collections, by slot."""


@dataclass(frozen=True)
class BesideCodec(RowCodec):
    """Vectors as the user gave them; the client corrects the scores of candidates.

    In the columns of rows, the biases are in `slot_keys`, and the numbers of their generations in
    `number_keys`, also where a side collection holds them.
    """

    generations: tuple[tuple[int, int], ...] = ()
    """The slot and the number of each generation that rows get: first that which searches read."""

    location = "beside"
    leaves_vectors = True
    needs_candidates = True

    @property
    def served_metric(self) -> Metric:
        return self.layout.metric

    @cached_property
    def slot_keys(self) -> tuple[str, ...]:
        """The keys that hold the biases, by slot."""
        return tuple(name + self.suffix for name in SLOT_KEYS)

    @cached_property
    def number_keys(self) -> tuple[str, ...]:
        """The keys that hold the numbers of the generations, by slot."""
        return tuple(name + self.suffix for name in NUMBER_KEYS)

    @cached_property
    def epoch_field(self) -> str:
        """The key with the number of the generation that searches read."""
        [(slot, _), *_] = self.generations
        return self.number_keys[slot]

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """The side collections by slot; empty if payloads hold the biases."""
        return sides_of(self.side_prefix) if self.side_prefix is not None else ()

    @cached_property
    def hidden_fields(self) -> tuple[str, ...]:
        return () if self.sides else (*self.slot_keys, *self.number_keys)

    @cached_property
    def form(self) -> StorageFormat:
        # No numbers follow the vector: its dtype is all that counts.
        return StorageFormat(self.dtype, self.layout.dim)

    # -- rows -------------------------------------------------------------------------------------

    def encode_rows(self, vectors: Floats, biases: RowBiases) -> Columns:
        return self._entries(biases, len(vectors))

    def set_biases(self, columns: Columns, biases: RowBiases) -> Columns:
        return self._entries(biases, len(columns[self.field]))

    def _entries(self, biases: RowBiases, rows: int) -> Columns:
        """Return the columns of the slots that have biases and that a generation fills."""
        is_new = biases.epoch is not None and biases.epoch < PENDING
        columns: Columns = {}
        for slot, number in self.generations:
            if slot not in biases.by_slot:
                continue

            # A refresh computes the biases that it fills for all rows alike.
            if biases.epoch == PENDING:
                number = PENDING
            elif is_new and slot == self.generations[0][0]:
                number = -number
            columns[self.slot_keys[slot]] = np.asarray(biases.by_slot[slot], np.float32).tolist()
            columns[self.number_keys[slot]] = [number] * rows
        return columns

    def read_biases(self, columns: Columns) -> Floats:
        """Return the biases (n, slots), NaN where a row has none of the generation of the slot."""
        biases = np.full((len(columns[self.field]), SLOTS), np.nan, np.float32)
        for slot, number in self.generations:
            values = zip(
                columns[self.slot_keys[slot]], columns[self.number_keys[slot]], strict=True
            )
            biases[:, slot] = [
                bias if bias is not None and is_of(stored, number) else np.nan
                for bias, stored in values
            ]
        return biases

    def pending(self, columns: Columns) -> Flags:
        [(slot, _), *_] = self.generations
        return np.asarray(np.isnan(self.read_biases(columns)[:, slot]), np.bool_)

    def side_columns(self, columns: Columns, slot: int) -> Columns:
        """Return the columns of the rows of a side collection, from those of `encode_rows`."""
        biases = columns[self.slot_keys[slot]]
        vectors = np.zeros((len(biases), SIDE_WIDTH), np.float32)
        vectors[:, 0] = biases
        return {SIDE_FIELD: vectors, EPOCH_FIELD: columns[self.number_keys[slot]]}

    # -- searches ---------------------------------------------------------------------------------

    def query_encoder(self, weights: QueryWeights) -> Callable[[npt.ArrayLike], Floats]:
        return partial(self.layout.require_finite, what="query")

    def decode_scores(
        self,
        scores: npt.ArrayLike,
        queries: npt.ArrayLike,
        strength: float = 1.0,
        biases: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float64]:
        raw = np.asarray(scores, np.float64)
        if biases is None:
            return raw
        return raw + self.bias_factor * strength * np.asarray(biases, np.float64)


def sides_of(prefix: str) -> tuple[str, ...]:
    """Return the names of the side collections by slot, given what their names begin with."""
    return tuple(prefix + ending for ending in SIDE_ENDINGS)


def is_of(stored: Any, number: int) -> bool:
    """Whether an entry is of this generation; that of a new row has the negative number."""
    return stored is not None and abs(int(stored)) == number
