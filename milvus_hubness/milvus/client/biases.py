"""Biases of new rows, from banks in memory. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from milvus_hubness.clients.biases import BankBiases
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import PENDING, RowBiases
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import BankTooLarge
from milvus_hubness.milvus.client.messages import Bias
from milvus_hubness.milvus.client.state_cache import StateCache
from milvus_hubness.milvus.client.steps import Operation

if TYPE_CHECKING:
    from milvus_hubness.correction.fitted import RowMeasures


class WriteListener(Protocol):
    """Learns of rows before they are stored."""

    def wants(self, collection: str, state: CollectionState, bias: Bias) -> bool:
        """Whether it needs to learn of rows by this state.

        Raises InvalidParameter where rows without biases may not be stored.
        """

    def before_stored(
        self,
        collection: str,
        state: CollectionState,
        rows: RowMeasures,
        key_at: Callable[[int], Any],
    ) -> None:
        """Learn of rows. key_at: returns the key of the row at a position.

        What it raises keeps them from being stored.
        """


class Biases(BankBiases):
    """The biases of the rows of Milvus's collections.

    bank_budget: bytes of banks in memory; writes are
    refused where the banks of one field are larger. listener: learns of rows before they are stored.
    """

    def __init__(
        self, states: StateCache, bank_budget: int, listener: WriteListener | None = None
    ) -> None:
        super().__init__(states, bank_budget)
        self._listener = listener

    def of_rows(
        self,
        collection: str,
        state: CollectionState,
        vectors: Floats,
        rows: ItemRows,
        bias: Bias,
        *,
        are_new: bool,
        key_at: Callable[[int], Any],
    ) -> Operation[RowBiases]:
        """Return the biases of rows with vectors (n, d), as `of_vectors` does, or pending ones.

        key_at: returns the key of the row at a position. Raises BankTooLarge if the budget has no
        room for the banks, and what the listener raises.
        """
        listener = self._listener
        is_wanted = listener is not None and listener.wants(collection, state, bias)
        if bias == "pending":
            state.expect_values(rows.rows)
            none = np.zeros(len(vectors), np.float32)
            slots = dict.fromkeys(range(state.slots), none)
            locality_hints = np.zeros((len(vectors), state.layout.locality_hint_count), np.float32)
            kinds = None if state.kinds is None else state.kinds.numbers_of(vectors, rows)
            return RowBiases(slots, PENDING, locality_hints, kinds)

        self._expect_room(collection, state)
        biases, measures = yield from self.of_vectors(
            collection, state, vectors, rows, are_new=are_new, with_measures=is_wanted
        )
        if listener is not None and measures is not None:
            listener.before_stored(collection, state, measures, key_at)
        return biases

    def _expect_room(self, collection: str, state: CollectionState) -> None:
        """Raise BankTooLarge unless the budget has room for
        the banks of all profiles, and of those to come.

        The bank that a refresh replaces stays in memory with the new one, whatever the budget: no
        write fails because of a refresh to a bank that has room.
        """
        coming = [state.filling] if state.filling is not None else []
        for profiles in (state.profiles.values(), coming):
            count = sum(profile.bank.count for profile in profiles)
            # Vectors of float32.
            size = 4 * state.layout.dim * count
            if size > self.banks.budget:
                raise BankTooLarge(
                    f"the bank of {collection!r} has {count:,} queries, {size:,} bytes, and "
                    f"bank_budget is {self.banks.budget:,}: refresh with a sample of the bank, "
                    'give a larger budget, or write with bias="pending" and refresh'
                )
