"""Online banks: start and stop them, take in query samples, and measure how live queries drift."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
from pydantic import ValidationError

from milvus_hubness.correction.banks.bank import Origins, QueryBank
from milvus_hubness.correction.banks.online import Merged, distinct_vectors, merge, safe_seeds
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.state import CollectionState, require_state
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.common.lease import leasing
from milvus_hubness.jobs.store.ownership import samples_name
from milvus_hubness.jobs.store.protocols import (
    Collections,
    QuerySampling,
    Store,
    capability,
    expect_store,
)
from milvus_hubness.jobs.store.records import (
    ONLINE_BANKS_PROPERTY,
    CollectionInfo,
    OnlineBank,
    OnlineBanks,
    QuerySamples,
)
from milvus_hubness.quality.bank_checks import AT_LEAST, AT_MOST, Drift, drift_between
from milvus_hubness.quality.tuning import FEWEST_QUERIES

DEFAULT_SETTINGS = {
    "rate": 0.01,
    "seed_share": 0.25,
    "half_life_seconds": 7 * 86_400.0,
    "duplicate_cosine": 0.99,
}
"""The settings of a new online bank, see `OnlineBank` and `Terms`."""


@dataclass(frozen=True)
class OnlineBankStatus:
    """The status of an online bank."""

    online_bank: OnlineBank
    """Its settings."""
    seed: int
    """Number of original queries."""
    live: int
    """Number of sampled queries."""
    waiting: int
    """Number of samples that are not yet taken in."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        return {**asdict(self), "online_bank": self.online_bank.model_dump()}


@dataclass(frozen=True, eq=False)
class Absorbed(Merged):
    """The result of a merge of query samples into a profile's bank."""

    samples_collection: str
    samples: tuple[int, ...]
    """The numbers of all processed samples."""
    seed: int
    """Number of original queries in the resulting bank."""
    live: int
    """Number of sampled queries in the resulting bank."""
    origins: Origins
    """Where and when the queries of the resulting bank were sampled."""
    waiting: Origins
    """Where and when the processed samples were sampled."""

    def since(self, moment: datetime) -> int:
        """Return how many queries sampled after this moment were processed or are in the bank."""
        begin = moment.timestamp()
        is_recent = (self.origins.at > begin) & ~self.origins.are_seeds
        in_bank = self.origins.numbers[is_recent]
        waiting = self.waiting.numbers[self.waiting.at > begin]
        return len(np.union1d(in_bank, waiting))

    @property
    def counts(self) -> dict[str, int]:
        return {
            name: getattr(self, name) for name in ("seed", "live", "taken", "duplicates", "dropped")
        }


def start_online_bank(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    **settings: float,
) -> OnlineBankStatus:
    """Have clients sample the profile's queries for
    its bank, or change the settings of an online bank.

    settings: those of `OnlineBank`; omitted settings stay, and are at first DEFAULT_SETTINGS and
    the bank's own size. Raises NotCorrected, InvalidInput, InvalidParameter, and CollectionExists
    if <collection>__query_samples exists.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, _):
        store = lease.store
        info, state, name = _profile_of(store, collection, field, profile)
        present = info.online_bank_of(state.field, name)
        first = {
            **DEFAULT_SETTINGS,
            "field": state.field,
            "profile": name,
            "samples_collection": samples_name(info.name, state.suffix),
            "size": state.profiles[name].bank.count,
        }
        try:
            former = present.model_dump() if present else first
            online_bank = OnlineBank(**(former | settings))
        except ValidationError as error:
            problem = error.errors()[0]
            raise InvalidParameter(
                f"{problem['loc'][0]}{problem['msg'].removeprefix('Input')}, not "
                f"{problem['input']!r}"
            ) from None

        capability(store, QuerySampling).create_query_samples(
            online_bank.samples_collection, info.collection_id, state.dim
        )

        # The collection exists before the property names it: clients sample once they read that.
        banks = OnlineBanks(banks=(*_others(info, online_bank), online_bank))
        store.write_property(info.name, ONLINE_BANKS_PROPERTY, banks)
        return _status(store, state, online_bank)


def stop_online_bank(
    store: Store, collection: str, *, field: str | None = None, profile: str | None = None
) -> OnlineBank | None:
    """Stop the sampling of the profile's queries.

    Drop the samples that wait, and keep the queries in the bank. Return the former settings of the
    online bank; None if the bank was not online. Raises NotCorrected, InvalidInput.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, _):
        store = lease.store
        info, state, name = _profile_of(store, collection, field, profile)
        online_bank = info.online_bank_of(state.field, name)
        if online_bank is None:
            return None

        others = _others(info, online_bank)
        samples = online_bank.samples_collection
        banks = OnlineBanks(banks=tuple(others)) if others else None
        store.write_property(info.name, ONLINE_BANKS_PROPERTY, banks)

        # The profiles of a field share one collection of samples.
        if any(other.samples_collection == samples for other in others):
            numbers = _samples(store, online_bank).origins.numbers.tolist()
            capability(store, QuerySampling).drop_samples(samples, numbers)
        elif store.exists(samples):
            store.drop(samples)

        return online_bank


def list_online_banks(store: Store, collection: str) -> list[OnlineBankStatus]:
    """Return the collection's online banks. Raises CollectionNotFound."""
    expect_store(store)
    info = store.info(collection)
    return [
        _status(store, info.states[bank.field], bank)
        for bank in info.online_banks
        if bank.field in info.states and bank.profile in info.states[bank.field].profiles
    ]


def absorbed(
    store: Store, collection: str, *, field: str | None = None, profile: str | None = None
) -> Absorbed | None:
    """Merge the samples into the profile's bank, see `banks.online.merge`; return None if the bank
    is not online. This writes nothing and may be repeated: pass `bank` to a refresh, and then the
    result to `drop_processed`. Raises NotCorrected, InvalidInput, DimensionMismatch.
    """
    info, state, name = _profile_of(store, collection, field, profile)
    online_bank = info.online_bank_of(state.field, name)
    if online_bank is None:
        return None

    stored = store.load_bank(state.profiles[name].bank, checked=False)
    samples = _samples(store, online_bank)
    origins = origins_of(stored)
    merged = Merged(None, 0, 0, 0, 0)
    if len(samples.origins):
        dim = samples.vectors.shape[1]
        stored.queries.expect_dim(dim, f"a sample in {online_bank.samples_collection!r}")
        merged = merge(stored.queries, origins, samples.vectors, samples.origins, online_bank)
        origins = (merged.bank.origins if merged.bank else None) or origins

    seed_count = int(origins.are_seeds.sum())
    return Absorbed(
        **vars(merged),
        samples_collection=online_bank.samples_collection,
        samples=tuple(samples.origins.numbers.tolist()),
        seed=seed_count,
        live=len(origins) - seed_count,
        origins=origins,
        waiting=samples.origins,
    )


def origins_of(bank: StoredBank) -> Origins:
    """Return the origins of the bank's queries; if the
    bank stores none, all queries count as original.
    """
    return bank.queries.origins or Origins.seeds(len(bank.queries), 0)


def drop_processed(store: Store, done: Absorbed) -> None:
    """Drop the processed samples, once searches read the biases of the new bank, if any."""
    capability(store, QuerySampling).drop_samples(done.samples_collection, done.samples)


def _samples(store: Store, online_bank: OnlineBank) -> QuerySamples:
    sampling = capability(store, QuerySampling)
    return sampling.read_query_samples(online_bank.samples_collection, online_bank.profile)


def _profile_of(
    store: Collections, collection: str, field: str | None, profile: str | None
) -> tuple[CollectionInfo, CollectionState, str]:
    info = store.info(collection)
    state = require_state(info.state_of(field), info.name)
    state.profile_of(profile)
    return info, state, profile or state.active


def _others(info: CollectionInfo, online_bank: OnlineBank) -> list[OnlineBank]:
    this = (online_bank.field, online_bank.profile)
    return [bank for bank in info.online_banks if (bank.field, bank.profile) != this]


def _status(store: Store, state: CollectionState, online_bank: OnlineBank) -> OnlineBankStatus:
    profile = state.profiles[online_bank.profile]
    origins = origins_of(store.load_bank(profile.bank, checked=False))
    seed_count = int(origins.are_seeds.sum())
    return OnlineBankStatus(
        online_bank=online_bank,
        seed=seed_count,
        live=len(origins) - seed_count,
        waiting=len(_samples(store, online_bank).origins),
    )


MOST_COMPARED = 2 * AT_MOST
"""Number of samples that a measurement of drift reads; near copies among them count once."""


def live_queries(store: Store, info: CollectionInfo, state: CollectionState) -> QueryBank | None:
    """Return the distinct sampled queries that wait for the active profile's online bank, if there
    are enough to judge a bank on; None otherwise.
    """
    online_bank = info.online_bank_of(state.field, state.active)
    if online_bank is None:
        return None
    vectors = _samples(store, online_bank).vectors
    if len(vectors) < FEWEST_QUERIES:
        return None

    # A random part stands for all: samples come in the order of their slots.
    drawn = vectors[np.random.default_rng(0).permutation(len(vectors))[:MOST_COMPARED]]
    distinct = drawn[distinct_vectors(drawn, online_bank.duplicate_cosine)]
    if len(distinct) < FEWEST_QUERIES:
        return None
    return QueryBank(distinct, source=online_bank.samples_collection)


def drift(
    store: Store, collection: str, *, field: str | None = None, profile: str | None = None
) -> Drift:
    """Compare the waiting samples with the profile's bank,
    as the field's metric sees them; see `drift_between`.

    Equal samples count once, as in the bank. Only those queries of the bank count whose places
    samples may take: a bank that has taken in all it can does not show the same drift again. Call
    this before the samples are taken in. If the bank is not online, or few samples wait, `reason`
    says so. Raises NotCorrected, InvalidInput, InvalidParameter.
    """
    info, state, name = _profile_of(store, collection, field, profile)
    reference = state.profiles[name].bank
    online_bank = info.online_bank_of(state.field, name)
    if online_bank is None:
        reason = f"no queries of {info.name!r} are sampled: turn its online bank on"
        return Drift(reason, reference.count, 0)

    vectors = _samples(store, online_bank).vectors
    # A random part stands for all: samples come in the order of their slots.
    vectors = vectors[np.random.default_rng(0).permutation(len(vectors))[:MOST_COMPARED]]
    if not len(vectors):
        return Drift("no recent queries were sampled", reference.count, 0)

    recent = vectors[distinct_vectors(vectors, online_bank.duplicate_cosine)]
    stored = store.load_bank(reference, checked=False)
    bank = stored.queries.vectors
    are_replaceable = ~safe_seeds(origins_of(stored), online_bank)
    if are_replaceable.sum() >= AT_LEAST:
        bank = bank[are_replaceable]
    return drift_between(
        state.layout.reduce_queries(bank)[:, : state.dim],
        state.layout.reduce_queries(recent)[:, : state.dim],
    )
