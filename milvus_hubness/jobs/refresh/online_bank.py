"""Online banks: take in query samples, and measure how live queries drift."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np

from milvus_hubness.correction.banks.bank import Origins, QueryBank
from milvus_hubness.correction.banks.online import Merged, distinct_vectors, merge, safe_seeds
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.state import CollectionState, require_state
from milvus_hubness.jobs.common.samples import drawn_samples, samples_of, sampling_of
from milvus_hubness.jobs.store.protocols import (
    Collections,
    QuerySampling,
    Store,
    capability,
)
from milvus_hubness.jobs.store.records import CollectionInfo
from milvus_hubness.quality.bank_checks import AT_LEAST, AT_MOST, Drift, drift_between
from milvus_hubness.quality.tuning import FEWEST_QUERIES

DUPLICATE_COSINE = 0.99
"""Cosine above which two sampled queries are duplicates, unless an online bank has another one."""
MOST_COMPARED = 2 * AT_MOST
"""Number of samples that a measurement of drift reads; near copies among them count once."""


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


def absorbed(
    store: Store, collection: str, *, field: str | None = None, profile: str | None = None
) -> Absorbed | None:
    """Merge the samples into the profile's bank, see `banks.online.merge`; return None if the bank
    is not online. This writes nothing and may be repeated: pass `bank` to a refresh, and then the
    result to `drop_processed`. Raises NotCorrected, InvalidInput, DimensionMismatch.
    """
    info, state, name = _profile_of(store, collection, field, profile)
    online_bank = info.samplings.bank_of(state.field, name)
    if online_bank is None:
        return None

    stored = store.load_bank(state.profiles[name].bank, checked=False)
    samples = samples_of(store, online_bank)
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


def _profile_of(
    store: Collections, collection: str, field: str | None, profile: str | None
) -> tuple[CollectionInfo, CollectionState, str]:
    info = store.info(collection)
    state = require_state(info.state_of(field), info.name)
    state.profile_of(profile)
    return info, state, profile or state.active


def live_queries(store: Store, info: CollectionInfo, state: CollectionState) -> QueryBank | None:
    """Return the distinct sampled queries of the active profile that wait, if there are enough to
    judge a bank on; None otherwise.
    """
    sampling = sampling_of(info, state.field)
    if sampling is None:
        return None

    # A random part stands for all.
    drawn = drawn_samples(store, sampling, MOST_COMPARED).vectors
    if len(drawn) < FEWEST_QUERIES:
        return None

    online_bank = info.samplings.bank_of(state.field, state.active)
    cosine = online_bank.duplicate_cosine if online_bank else DUPLICATE_COSINE
    distinct = drawn[distinct_vectors(drawn, cosine)]
    if len(distinct) < FEWEST_QUERIES:
        return None
    return QueryBank(distinct, source=sampling.samples_collection)


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
    online_bank = info.samplings.bank_of(state.field, name)
    if online_bank is None:
        reason = f"no queries of {info.name!r} are sampled: turn its online bank on"
        return Drift(reason, reference.count, 0)

    vectors = drawn_samples(store, online_bank, MOST_COMPARED).vectors
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
