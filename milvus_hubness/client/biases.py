"""Biases of new rows, from banks in memory or in the database. No I/O: see `steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from milvus_hubness.client.knowledge import Knowledge
from milvus_hubness.client.steps import Ask, Compute, LoadBank, Operation
from milvus_hubness.errors import (
    BankTooLarge,
    InvalidParameter,
)
from milvus_hubness.estimators import from_dict
from milvus_hubness.estimators.base import FromNearest
from milvus_hubness.layout import Floats
from milvus_hubness.state import CollectionState, Profile
from milvus_hubness.stores.base import StoredBank
from milvus_hubness.stores.milvus_banks import only_queries

Bias = Literal["compute", "pending"]
"""Whether a new row gets its bias at once, or the mean one until the next refresh."""

VECTORS_PER_REQUEST = 100


class Biasing(Knowledge):
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
                biases[name] = yield from self._biases_by_search(state, profile, vectors, timeout)
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

    def _biases_by_search(
        self, state: CollectionState, profile: Profile, vectors: Floats, timeout: float | None
    ) -> Operation[Floats]:
        """The same by the server's own search over the bank, which it keeps in an exact index."""
        estimator = from_dict(profile.estimator)
        if not isinstance(estimator, FromNearest):
            raise BankTooLarge(
                f"the bank {profile.bank.collection!r} of {profile.bank.count:,} queries is larger than "
                f"bank_budget, {self._banks.budget:,} bytes, and {profile.estimator['name']} needs all of "
                'it: give a larger budget, or write with bias="pending" and refresh'
            )
        k, share = estimator.nearest
        yield from self._ensure_loaded(profile.bank.collection, timeout)
        means: list[float] = []
        for start in range(0, len(vectors), VECTORS_PER_REQUEST):
            results = yield Ask(
                "search",
                (profile.bank.collection,),
                {
                    "data": list(vectors[start : start + VECTORS_PER_REQUEST]),
                    "filter": only_queries(profile.bank),
                    "limit": k,
                    "anns_field": "vector",
                    "timeout": timeout,
                },
            )
            means += [float(np.mean([hit["distance"] for hit in hits])) for hits in results]
        scores = np.array(means) * (-0.5 if state.metric == "L2" else 1.0)
        return (share * scores - profile.centre).astype(np.float32)
