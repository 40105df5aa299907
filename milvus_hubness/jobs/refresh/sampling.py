"""The sampling of live queries: start and stop it on any collection, and say what was sampled."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.near_copies import directions_of, groups_at
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.jobs.common.inputs import only_field
from milvus_hubness.jobs.common.lease import leasing
from milvus_hubness.jobs.common.samples import samples_of, sampling_of
from milvus_hubness.jobs.refresh.online_bank import DUPLICATE_COSINE, MOST_COMPARED, origins_of
from milvus_hubness.jobs.store.ownership import field_samples_name, samples_name
from milvus_hubness.jobs.store.protocols import (
    Collections,
    QuerySampling,
    Store,
    capability,
    expect_store,
)
from milvus_hubness.jobs.store.records import (
    EVERY_PROFILE,
    SAMPLINGS_PROPERTY,
    CollectionInfo,
    FieldSampling,
    OnlineBank,
    QuerySamples,
    Sample,
    SamplesOf,
    Sampling,
    Samplings,
)
from milvus_hubness.quality.bank_checks import AT_LEAST, Drift, drift_between
from milvus_hubness.quality.tuning import FEWEST_QUERIES

DEFAULT_RATE = 0.01
DEFAULT_SIZE = 10_000
"""Samples of a field that is not corrected; a bank of 3,000 is large enough for most galleries."""
BANK_SETTINGS = {
    "rate": DEFAULT_RATE,
    "seed_share": 0.25,
    "half_life_seconds": 7 * 86_400.0,
    "duplicate_cosine": DUPLICATE_COSINE,
}
"""The settings of a new online bank, see `OnlineBank` and `Terms`."""
FIELD_SETTINGS = ("rate", "size")
"""The settings of a sampled field without an online bank."""

ENOUGH = 1_000
"""Queries of a bank to begin with; `benchmarks/banks.py` shows what fewer lose."""
SPREAD_OF_GAINS = 0.34
"""Standard deviation of a query's change of R@1 by the default correction: the mean over the seven
embedding tasks of `benchmarks/samples.py`, from 0.24 (docstring_code) to 0.43 (text_video_msrvtt
v2t)."""
NORMAL = 1.96

AnySampling = TypeVar("AnySampling", FieldSampling, OnlineBank)


@dataclass(frozen=True)
class Variety:
    """How varied sampled queries are."""

    compared: int
    """Number of samples that were compared, drawn at random."""
    distinct: int
    """Number of groups of near copies among them, by a cosine of DUPLICATE_COSINE: a fit, which sees
    the gallery, may group more."""
    effective: float
    """n² / Σ s², for n samples in groups of s: as many queries, each sent equally often, repeat
    themselves as much (the inverse of Simpson's index, 1949)."""
    largest: float
    """Share of the largest group."""
    drift: Drift
    """Between the older half and the newer half of the samples."""
    interval: float
    """Half of the 95% interval, in points of R@1, of a verdict on as many varied queries with
    labels."""

    @property
    def enough(self) -> str:
        """Whether the samples are enough for a bank and for a verdict, in words."""
        if self.compared < FEWEST_QUERIES:
            return f"too few to judge on: {self.compared} of {FEWEST_QUERIES}"
        if self.distinct < ENOUGH:
            return f"enough to judge on, few for a bank: {self.distinct:,} different of {ENOUGH:,}"
        return "enough for a bank and a verdict"


@dataclass(frozen=True)
class SamplingStatus(ShownAsTable):
    """How a field or a profile is sampled, and what was sampled."""

    sampling: Sampling
    waiting: int
    """Number of samples that no job has taken into a bank."""
    seed: int | None = None
    """Number of queries that an online bank began with; None for a field without one."""
    live: int | None = None
    """Number of sampled queries in an online bank; None for a field without one."""
    first: int | None = None
    """Unix time of the oldest sample that waits; None without samples."""
    last: int | None = None
    """Unix time of the newest one."""
    variety: Variety | None = None
    """None for fewer than two samples."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        variety = None
        if self.variety is not None:
            variety = {
                **vars(self.variety),
                "drift": vars(self.variety.drift),
                "enough": self.variety.enough,
            }
        return {**vars(self), "sampling": self.sampling.model_dump(), "variety": variety}


def start_sampling(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    **settings: float,
) -> SamplingStatus:
    """Have clients sample live queries of a field, or change the settings of its sampling.

    A field that is corrected gets an online bank of the profile, which takes the samples in. Any
    other field is sampled as it is; nothing else changes for its searches.

    settings: those of `OnlineBank`, or `rate` and `size` of `FieldSampling`; omitted ones stay, and
    are at first BANK_SETTINGS and the bank's own size, or DEFAULT_RATE and DEFAULT_SIZE. Raises
    CollectionNotFound, InvalidInput, InvalidParameter, CannotMigrate for a field whose vectors the
    database computes, and CollectionExists if the name of the collection of samples is taken.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, _):
        store = lease.store
        info, field, state = _field_of(store, collection, field, profile)
        former = info.samplings.field_of(field)
        before = sampling_of(info, field, profile)
        sampling: FieldSampling | OnlineBank
        if state is None:
            sampling = _field_sampling(info, field, former, settings)
            samplings = info.samplings.with_field(sampling)
        else:
            sampling = _online_bank(info, state, profile or state.active, settings)
            samplings = info.samplings.with_bank(sampling)
            if former is not None:
                samplings = samplings.without(former)

        dim, _ = info.users_shape(field)
        capability(store, QuerySampling).create_query_samples(
            sampling.samples_collection, info.collection_id, dim
        )
        if state is not None and former is not None:
            _move_samples(store, info, former, sampling)

        # The collection exists before the property names it: clients sample once they read that.
        store.write_property(info.name, SAMPLINGS_PROPERTY, samplings)
        if former is not None and former.samples_collection not in _collections_of(samplings):
            store.drop(former.samples_collection)
        elif before is not None and before.capacity > sampling.capacity:
            _drop_surplus(store, sampling)
        return _status(store, state, sampling)


def stop_sampling(
    store: Store, collection: str, *, field: str | None = None, profile: str | None = None
) -> Sampling | None:
    """Stop the sampling of a field or a profile.

    Drop the samples that wait; the queries in a bank stay. Return the former settings; None if
    nothing was sampled. Raises CollectionNotFound, InvalidInput.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, _):
        store = lease.store
        info, field, _ = _field_of(store, collection, field, profile)
        sampling = sampling_of(info, field, profile)
        if sampling is None:
            return None

        samples = sampling.samples_collection
        others = info.samplings.without(sampling)
        store.write_property(info.name, SAMPLINGS_PROPERTY, others if others.all else None)

        # The profiles of a field share one collection of samples.
        if samples in _collections_of(others):
            numbers = samples_of(store, sampling).origins.numbers.tolist()
            capability(store, QuerySampling).drop_samples(samples, numbers)
        elif store.exists(samples):
            store.drop(samples)

        return sampling


def list_samplings(store: Store, collection: str) -> list[SamplingStatus]:
    """Return what of a collection is sampled. Raises CollectionNotFound."""
    expect_store(store)
    info = store.info(collection)
    statuses = []
    for sampling in info.samplings.all:
        state = info.states.get(sampling.field)
        is_bank = isinstance(sampling, OnlineBank)
        if is_bank and (state is None or sampling.profile not in state.profiles):
            continue
        if sampling.field in info.vector_fields:
            statuses.append(_status(store, state, sampling))
    return statuses


def import_samples(
    store: Store,
    collection: str,
    queries: QueryBank,
    *,
    field: str | None = None,
    profile: str | None = None,
    seed: int = 0,
) -> int:
    """Add queries (m, d) to the samples of a field, as if clients had sampled them now.

    A query with a count is added as often, and at most as many as there are places, drawn at random.
    Return how many were added. Raises CollectionNotFound, InvalidInput if the field is not sampled,
    and DimensionMismatch.
    """
    expect_store(store)
    info, field, _ = _field_of(store, collection, field, profile)
    sampling = sampling_of(info, field, profile)
    if sampling is None:
        raise InvalidInput(f"{info.name!r} is not sampled: turn its sampling on first")
    dim, _ = info.users_shape(field)
    if queries.dim != dim:
        raise DimensionMismatch(
            f"the queries from {queries.source} have {queries.dim} dimensions, those of field "
            f"{field!r} have {dim}"
        )

    rng = np.random.default_rng(seed)
    rows = _drawn_rows(queries, sampling.capacity, rng)
    numbers = rng.integers(2**52, size=len(rows))
    places = rng.permutation(sampling.capacity)[: len(rows)]
    now = int(time.time())
    samples = [
        Sample(sampling.profile, int(place), int(number), now, queries.vectors[row])
        for place, number, row in zip(places, numbers, rows, strict=True)
    ]
    target = SamplesOf(sampling.helper, info.collection_id)
    capability(store, QuerySampling).put_query_samples(target, samples)
    return len(samples)


def _drawn_rows(
    queries: QueryBank, most: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rows of the queries to add, each as often as its count, `most` at most."""
    if queries.counts is None:
        return rng.permutation(len(queries))[:most]

    counts = np.maximum(np.round(queries.counts), 1)
    if counts.sum() <= most:
        return np.repeat(np.arange(len(queries)), counts.astype(np.int64))
    # A log may count a query a million times: the rows are drawn, never laid out.
    return rng.choice(len(queries), size=most, p=counts / counts.sum())


def _field_of(
    store: Collections, collection: str, field: str | None, profile: str | None
) -> tuple[CollectionInfo, str, CollectionState | None]:
    """Return the description of a collection, the field, and its state if it is corrected."""
    info = store.info(collection)
    field = field or only_field(info)
    info.require_field(field)
    if info.vector_fields[field].multi_vectors:
        raise InvalidInput(
            f"field {field!r} of {info.name!r} has several vectors a row, and samples of queries are "
            "single vectors: collect its queries in a file, and refresh with --bank FILE"
        )

    state = info.states.get(field)
    if state is not None:
        state.profile_of(profile)
    elif profile:
        raise InvalidInput(
            f"field {field!r} of {info.name!r} is not corrected, so it has no profile {profile!r}: "
            "leave the profile out"
        )
    return info, field, state


def _field_sampling(
    info: CollectionInfo, field: str, former: FieldSampling | None, settings: dict[str, float]
) -> FieldSampling:
    if unfit := sorted(settings.keys() - set(FIELD_SETTINGS)):
        raise InvalidParameter(
            f"{unfit[0]} is a setting of an online bank, which only a corrected field has: "
            f"{info.name!r} is not corrected"
        )
    info.require_correctable(field)
    dim, _ = info.users_shape(field)
    first = {
        "field": field,
        "samples_collection": field_samples_name(info.name, field),
        "rate": DEFAULT_RATE,
        "size": DEFAULT_SIZE,
        "dim": dim,
        "dtype": info.vector_fields[field].dtype,
    }
    return _checked(FieldSampling, former, first, settings)


def _online_bank(
    info: CollectionInfo, state: CollectionState, profile: str, settings: dict[str, float]
) -> OnlineBank:
    first = {
        **BANK_SETTINGS,
        "field": state.field,
        "profile": profile,
        "samples_collection": samples_name(info.name, state.suffix),
        "size": state.profiles[profile].bank.count,
    }
    former = info.samplings.bank_of(state.field, profile)
    return _checked(OnlineBank, former, first, settings)


def _checked(
    kind: type[AnySampling],
    former: AnySampling | None,
    first: dict[str, Any],
    settings: dict[str, float],
) -> AnySampling:
    """Return the settings of a sampling. Raises InvalidParameter."""
    before = former.model_dump() if former else first
    try:
        return kind(**(before | settings))
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidParameter(
            f"{problem['loc'][0]}{problem['msg'].removeprefix('Input')}, not {problem['input']!r}"
        ) from None


def _collections_of(samplings: Samplings) -> set[str]:
    return {sampling.samples_collection for sampling in samplings.all}


def _move_samples(store: Store, info: CollectionInfo, former: Sampling, to: Sampling) -> None:
    """Give the samples of a field to the online bank that takes its place.

    The newest have the first places, so that a second attempt writes the same rows.
    """
    samples = samples_of(store, former)
    newest = np.lexsort((samples.origins.numbers, -samples.origins.at))[: to.capacity]
    samples = samples.take(newest)
    moved = [
        Sample(to.profile, place, int(number), int(at), vector)
        for place, (number, at, vector) in enumerate(
            zip(samples.origins.numbers, samples.origins.at, samples.vectors, strict=True)
        )
    ]
    target = SamplesOf(to.helper, info.collection_id)
    capability(store, QuerySampling).put_query_samples(target, moved)


def _drop_surplus(store: Store, sampling: Sampling) -> None:
    """Drop the oldest samples beyond the number of places, which has become smaller.

    A sample in a place that no longer exists is not replaced, but it is among the oldest soon.
    """
    origins = samples_of(store, sampling).origins
    oldest = np.argsort(origins.at, kind="stable")[: max(len(origins) - sampling.capacity, 0)]
    if len(oldest):
        numbers = origins.numbers[oldest].tolist()
        capability(store, QuerySampling).drop_samples(sampling.samples_collection, numbers)


def _status(store: Store, state: CollectionState | None, sampling: Sampling) -> SamplingStatus:
    samples = samples_of(store, sampling)
    times = samples.origins.at
    seed: int | None = None
    live: int | None = None
    if state is not None and sampling.profile != EVERY_PROFILE:
        origins = origins_of(store.load_bank(state.profiles[sampling.profile].bank, checked=False))
        seed = int(origins.are_seeds.sum())
        live = len(origins) - seed

    return SamplingStatus(
        sampling=sampling,
        waiting=len(samples.origins),
        seed=seed,
        live=live,
        first=int(times.min()) if len(times) else None,
        last=int(times.max()) if len(times) else None,
        variety=variety_of(samples) if len(times) > 1 else None,
    )


def variety_of(samples: QuerySamples, *, seed: int = 0) -> Variety:
    """Return how varied samples (n, d), n ≥ 2, are. Larger samples are represented by a part."""
    drawn = np.random.default_rng(seed).permutation(len(samples.origins))[:MOST_COMPARED]
    samples = samples.take(drawn)
    n = len(drawn)
    groups = groups_at(directions_of(samples.vectors), DUPLICATE_COSINE)
    sizes = np.bincount(groups)
    effective = float(n**2 / (sizes.astype(np.float64) ** 2).sum())

    # Near copies count once, so that one query that became popular is no drift of its own.
    _, first = np.unique(groups, return_index=True)
    by_time = first[np.argsort(samples.origins.at[first], kind="stable")]
    older, newer = np.array_split(by_time, 2)
    too_few = f"fewer than {2 * AT_LEAST} different queries"
    drift = Drift(too_few, len(older), len(newer))
    if len(older) >= AT_LEAST:
        drift = drift_between(samples.vectors[older], samples.vectors[newer], seed=seed)

    interval = 100 * NORMAL * SPREAD_OF_GAINS / np.sqrt(effective)
    return Variety(
        compared=n,
        distinct=len(sizes),
        effective=effective,
        largest=float(sizes.max() / n),
        drift=drift,
        interval=float(interval),
    )
