"""Biases of new rows, from banks in memory or in the database. No I/O: see `steps`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from milvus_hubness.client.bank_search import BankSearching
from milvus_hubness.client.steps import Compute, LoadBank, Operation
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.layout import Floats
from milvus_hubness.state import CollectionState, Profile
from milvus_hubness.stores.base import StoredBank

Bias = Literal["compute", "pending"]
"""Whether a new row gets its bias at once, or the mean one until the next refresh."""


class Biasing(BankSearching):
    """Of vectors, in every profile of their field."""

    def _bank(self, collection: str, state: CollectionState, name: str) -> Operation[StoredBank]:
        """The bank of a profile as it was when that was first seen."""
        return self._bank_of(collection, state, state.profiles[name])

    def _bank_of(self, collection: str, state: CollectionState, profile: Profile) -> Operation[StoredBank]:
        of = (collection, state.field, profile.slot)
        bank = self._banks.bank(of, profile)
        if bank is None:
            bank = yield LoadBank(profile.bank)
            self._banks.keep(of, profile, bank)
        return bank

    def _biases(
        self,
        collection: str,
        state: CollectionState,
        vectors: Floats,
        bias: Bias,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[dict[int, Floats]]:
        """(n,) biases of vectors (n, d) by the slot that they go into: each profile's in its two, and in
        theirs those that a refresh is about to bring, or has just taken away.

        are_new: whether these rows are inserted together. While a job computes all biases anew they get those
        that it would give them: of biases on their way, and of a copy or a second field that is being filled.
        """
        if bias not in ("compute", "pending"):
            raise InvalidParameter(f'bias must be "compute" or "pending", not {bias!r}')
        if bias == "pending":
            return dict.fromkeys(range(state.slots), np.zeros(len(vectors), np.float32))
        biases: dict[int, Floats] = {}
        left = self._banks.budget
        for profile in state.profiles.values():
            room = are_new and state.phase == "ready"
            found = yield from self._biases_of(
                collection, state, profile, vectors, left, timeout, are_new=room
            )
            biases |= {profile.slot: found, profile.standby: found}
        for moving in (state.outgoing, state.incoming):
            if moving is None:
                continue
            # A bank that the other would push out of memory, and it that one, at every write, is searched.
            other = state.profiles.get(moving.name)
            left -= _size(state, other) if other and _size(state, other) <= left else 0
            slot = moving.profile.slot
            biases[slot] = yield from self._biases_of(
                collection, state, moving.profile, vectors, left, timeout, are_new=False
            )
        return biases

    def _locality_hints(
        self, collection: str, state: CollectionState, vectors: Floats, bias: Bias
    ) -> Operation[Floats]:
        """(n, c) what the locality hint columns of vectors (n, d) hold, by the active profile's bank. Zeros,
        which a refresh fills, where that is too large for memory, or the row is left to the next refresh."""
        profile, columns = state.profile, state.layout.locality_hint_count
        if not columns or bias == "pending" or _size(state, profile) > self._banks.budget:
            return np.zeros((len(vectors), columns), np.float32)
        bank = yield from self._bank_of(collection, state, profile)
        of = (collection, state.field, profile.slot)
        found: Floats = yield Compute(
            lambda: self._banks.correction(of, state, profile, bank).locality_hints(vectors)
        )
        return found

    def _biases_of(
        self,
        collection: str,
        state: CollectionState,
        profile: Profile,
        vectors: Floats,
        budget: int,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[Floats]:
        """budget: bytes that the bank may take."""
        if _size(state, profile) > budget:
            return (
                yield from self._biases_by_search(
                    collection, state, profile, vectors, timeout, are_new=are_new
                )
            )
        bank = yield from self._bank_of(collection, state, profile)

        def compute() -> Floats:
            of = (collection, state.field, profile.slot)
            correction = self._banks.correction(of, state, profile, bank)
            return replace(correction, are_new=are_new).centred(vectors)

        found: Floats = yield Compute(compute)
        return found


def _size(state: CollectionState, profile: Profile) -> int:
    """Bytes of a profile's queries."""
    return 4 * state.dim * profile.bank.count
