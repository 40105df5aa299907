"""Biases of new rows, from banks in memory or in the database. No I/O: see `steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from milvus_hubness.client.bank_search import BankSearching
from milvus_hubness.client.steps import Compute, LoadBank, Operation
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.layout import Floats
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import StoredBank

Bias = Literal["compute", "pending"]
"""Whether a new row gets its bias at once, or the mean one until the next refresh."""


class Biasing(BankSearching):
    """Of vectors, in every profile of their field."""

    def _bank(self, collection: str, state: CollectionState, name: str) -> Operation[StoredBank]:
        """The bank of a profile as it was when that was first seen."""
        profile = state.profiles[name]
        bank = self._banks.bank((collection, state.field, name), profile)
        if bank is None:
            bank = yield LoadBank(profile.bank)
            self._banks.keep((collection, state.field, name), profile, bank)
        return bank

    def _biases(
        self, collection: str, state: CollectionState, vectors: Floats, bias: Bias, timeout: float | None
    ) -> Operation[dict[str, Floats]]:
        """(n,) biases of vectors (n, d) in every profile."""
        if bias not in ("compute", "pending"):
            raise InvalidParameter(f'bias must be "compute" or "pending", not {bias!r}')
        biases: dict[str, Floats] = {}
        for name, profile in state.profiles.items():
            if bias == "pending":
                biases[name] = np.zeros(len(vectors), np.float32)
            elif 4 * state.dim * profile.bank.count > self._banks.budget:
                biases[name] = yield from self._biases_by_search(collection, state, name, vectors, timeout)
            else:
                bank = yield from self._bank(collection, state, name)
                biases[name] = yield Compute(self._computing(collection, state, name, bank, vectors))
        return biases

    def _computing(
        self, collection: str, state: CollectionState, name: str, bank: StoredBank, vectors: Floats
    ) -> Callable[[], Floats]:
        def compute() -> Floats:
            of = (collection, state.field, name)
            return self._banks.correction(of, state, state.profiles[name], bank).centred(vectors)

        return compute
