"""Biases of new rows, from banks in memory. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import PENDING, RowBiases
from milvus_hubness.correction.prior import ItemRows
from milvus_hubness.correction.state import CollectionState, Profile
from milvus_hubness.errors import BankTooLarge
from milvus_hubness.milvus.client.messages import Bias
from milvus_hubness.milvus.client.state_cache import BankCache, CachedBank, Name, StateCache
from milvus_hubness.milvus.client.steps import Compute, Operation

if TYPE_CHECKING:
    from milvus_hubness.correction.guard import RowEvidence


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
        rows: RowEvidence,
        key_at: Callable[[int], Any],
    ) -> None:
        """Learn of rows. key_at: returns the key of the row at a position.

        What it raises keeps them from being stored.
        """


class Biases:
    """Banks, and the biases of vectors in every profile of their field.

    bank_budget: bytes of banks in memory; writes are
    refused where the banks of one field are larger. listener: learns of rows before they are stored.
    """

    def __init__(
        self, states: StateCache, bank_budget: int, listener: WriteListener | None = None
    ) -> None:
        self._states = states
        self._listener = listener
        self.banks = BankCache(bank_budget)

    def bank(
        self, collection: str, state: CollectionState, profile: Profile
    ) -> Operation[StoredBank]:
        """Return the bank of a profile, from the cache or the database."""
        return (yield from self._cached(collection, state, profile)).bank

    def _cached(
        self,
        collection: str,
        state: CollectionState,
        profile: Profile,
        in_use: Collection[Name] = (),
    ) -> Operation[CachedBank]:
        """Return a bank with its fit. in_use: banks that must not be evicted for it."""
        name = (collection, state.field, profile.slot)
        cached = self.banks.get(name, profile)
        if cached is not None:
            return cached

        yield from self._states.expect_banks(collection, state)
        # Another task may have read it meanwhile.
        cached = self.banks.get(name, profile)
        if cached is not None:
            return cached
        bank = yield from self._states.load_bank(profile.bank)
        return self.banks.keep(name, profile, bank, in_use)

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
        """Return the biases of rows with vectors (n, d) by slot, with their epoch and locality hints.

        are_new: whether these rows are inserted together. While a job computes
        all biases, new rows get the biases that the job would give them: in a generation and in a copy
        that are being filled. key_at: returns the key of the row at a position. Raises BankTooLarge if
        the budget has no room for the banks, and what the listener raises.
        """
        listener = self._listener
        is_wanted = listener is not None and listener.wants(collection, state, bias)
        wanted: RowEvidence | None = None
        state.expect_values(rows.rows)
        locality_hints = np.zeros((len(vectors), state.layout.locality_hint_count), np.float32)
        kinds = None if state.kinds is None else state.kinds.numbers_of(vectors, rows)
        if bias == "pending":
            none = np.zeros(len(vectors), np.float32)
            slots = dict.fromkeys(range(state.slots), none)
            return RowBiases(slots, PENDING, locality_hints, kinds)

        self._expect_room(collection, state)
        are_last = are_new and state.phase == "ready"
        profiles = state.written_profiles

        # Every write needs all of these banks. They must not evict each other: each would be read
        # from the database again at the next write.
        in_use = {(collection, state.field, profile.slot) for profile in profiles}

        biases: dict[int, Floats] = {}
        epoch = state.profile.epoch
        for profile in profiles:
            cached = yield from self._cached(collection, state, profile, in_use)
            is_active = profile is state.profile
            # A job that fills a generation gives all rows the biases of its formula.
            are_apart = are_last and profile is not state.filling
            # A fit is restored and evaluated in a thread: both may take long.
            work = partial(
                _of_written, cached, state, vectors, rows, are_apart, is_wanted and is_active
            )
            column, hints, evidence, leaves_room = yield Compute(work)
            biases[profile.slot] = column
            if are_apart and leaves_room:
                epoch = -state.profile.epoch

            # The index is shaped by the queries of the active profile alone.
            if is_active:
                locality_hints = hints
                wanted = evidence

        # The banks of all profiles may be larger than the budget by the one that a refresh
        # replaces. As soon as no state names that, it goes.
        self.banks.evict(in_use)
        if listener is not None and wanted is not None:
            listener.before_stored(collection, state, wanted, key_at)
        return RowBiases(biases, epoch, locality_hints, kinds)

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


def _of_written(
    cached: CachedBank,
    state: CollectionState,
    vectors: Floats,
    rows: ItemRows,
    are_new: bool,
    is_wanted: bool,
) -> tuple[Floats, Floats, RowEvidence | None, bool]:
    """Return what `Correction.of_written` does, and whether the fit leaves room for new rows."""
    correction = cached.correction(state)
    written = correction.of_written(vectors, rows, are_new=are_new, with_evidence=is_wanted)
    return (*written, correction.leaves_room)
