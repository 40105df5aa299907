"""The sampling of live queries: start and stop it on any collection, and say what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from milvus_hubness.basics.defaults import FEWEST_QUERIES
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.correction.near_copies import directions_of, groups_at
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.common.gallery import only_field
from milvus_hubness.jobs.common.lease import DROPPED, Lease, leasing
from milvus_hubness.jobs.common.samples import MOST_JUDGED, NEAR_COPIES, drawn, samples_of
from milvus_hubness.jobs.store.helpers import left_helpers
from milvus_hubness.jobs.store.ownership import QUERY_SAMPLES_PROPERTY, samples_name
from milvus_hubness.jobs.store.protocols import (
    Collections,
    QuerySampling,
    Store,
    capability,
    expect_store,
)
from milvus_hubness.jobs.store.records import (
    SAMPLINGS_PROPERTY,
    CollectionInfo,
    QuerySamples,
    Sampling,
)

DEFAULT_RATE = 0.01
DEFAULT_SIZE = 10_000
"""Samples of a field; a bank of 3,000 is large enough for most galleries."""

ENOUGH = 1_000
"""Queries of a bank to begin with; `benchmarks/banks.py` shows what fewer lose."""
SPREAD_OF_GAINS = 0.34
"""Standard deviation of a query's change of R@1 by the default correction: the mean over the seven
embedding tasks of `benchmarks/samples.py`, from 0.24 (docstring_code) to 0.43 (text_video_msrvtt
v2t)."""
NORMAL = 1.96


@dataclass(frozen=True)
class Variety:
    """How varied sampled queries are."""

    compared: int
    """Number of samples that were compared, drawn at random."""
    distinct: int
    """Number of groups of near copies among them, by a cosine of NEAR_COPIES: a fit, which sees the
    gallery, may group more."""
    effective: float
    """n² / Σ s², for n samples in groups of s: as many queries, each sent equally often, repeat
    themselves as much (the inverse of Simpson's index, 1949)."""
    largest: float
    """Share of the largest group."""
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
    """How a field is sampled, and what was sampled."""

    sampling: Sampling
    samples: int
    """Number of samples."""
    first: int | None = None
    """Unix time of the oldest one; None without samples."""
    last: int | None = None
    """Unix time of the newest one."""
    variety: Variety | None = None
    """None for fewer than two samples."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        variety = None
        if self.variety is not None:
            variety = {**vars(self.variety), "enough": self.variety.enough}
        return {**vars(self), "sampling": self.sampling.model_dump(), "variety": variety}


def start_sampling(
    store: Store, collection: str, *, field: str | None = None, **settings: float
) -> SamplingStatus:
    """Have clients sample live queries of a field, or change the settings of its sampling.

    Nothing else changes for its searches. settings: `rate` and `size` of `Sampling`; omitted ones
    stay, and are at first DEFAULT_RATE and DEFAULT_SIZE. Raises CollectionNotFound, InvalidInput,
    InvalidParameter, CannotMigrate for a field whose vectors the database computes, and
    CollectionExists if the name of the collection of samples is taken.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, _):
        store = lease.store
        info, field = _field_of(store, collection, field)
        before = info.samplings.of(field)
        sampling = _chosen(info, field, before, settings)
        capability(store, QuerySampling).create_query_samples(
            sampling.samples_collection, info.collection_id, sampling.dim
        )
        # The collection exists before the property names it: clients sample once they read that.
        samplings = info.samplings.with_field(sampling)
        store.write_property(info.name, SAMPLINGS_PROPERTY, samplings)
        if before is not None and before.size > sampling.size:
            # A refresh would not read them any more.
            capability(store, QuerySampling).drop_samples(
                sampling.samples_collection, sampling.size
            )
        return _status(store, sampling)


def stop_sampling(store: Store, collection: str, *, field: str | None = None) -> Sampling | None:
    """Stop the sampling of a field, and drop its samples.

    After an interruption, call it again. Return the former settings; None if nothing was sampled.
    Raises CollectionNotFound, InvalidInput.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, _):
        store = lease.store
        info, field = _field_of(store, collection, field)
        sampling = info.samplings.of(field)
        if sampling is None:
            _drop_left(lease, info, field)
            return None

        others = info.samplings.without(field)
        store.write_property(info.name, SAMPLINGS_PROPERTY, others if others.fields else None)
        try:
            lease.drop_helper(sampling.helper, info.collection_id)
        finally:
            store.unlist_helper(info.collection_id, sampling.samples_collection)
        return sampling


def _drop_left(lease: Lease, info: CollectionInfo, field: str) -> None:
    """Drop the samples of a field that an interrupted job has left."""
    store = lease.store
    name = samples_name(info.name, field)
    left = left_helpers(store, info, QUERY_SAMPLES_PROPERTY)
    # The job may have renamed them for the drop.
    if any(each == name or each.startswith(name + DROPPED) for each in left):
        lease.drop(name)
        log.warning("the samples in %r, which an interrupted command had left, are dropped", name)
    store.unlist_helper(info.collection_id, name)


def list_samplings(store: Store, collection: str) -> list[SamplingStatus]:
    """Return what of a collection is sampled. Raises CollectionNotFound."""
    expect_store(store)
    info = store.info(collection)
    return [
        _status(store, sampling)
        for sampling in info.samplings.fields
        if sampling.field in info.vector_fields
    ]


def _field_of(store: Collections, collection: str, field: str | None) -> tuple[CollectionInfo, str]:
    """Return the description of a collection, and the field."""
    info = store.info(collection)
    field = field or only_field(info)
    info.require_field(field)
    return info, field


def _chosen(
    info: CollectionInfo, field: str, before: Sampling | None, settings: dict[str, float]
) -> Sampling:
    """Return the settings of a sampling. Raises InvalidParameter."""
    if before is not None:
        first = before.model_dump()
    else:
        info.require_correctable(field)
        dim, _ = info.users_shape(field)
        first = {
            "field": field,
            "samples_collection": samples_name(info.name, field),
            "rate": DEFAULT_RATE,
            "size": DEFAULT_SIZE,
            "dim": dim,
            "dtype": info.vector_fields[field].dtype,
        }
    try:
        return Sampling(**(first | settings))
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidParameter(
            f"{problem['loc'][0]}{problem['msg'].removeprefix('Input')}, not {problem['input']!r}"
        ) from None


def _status(store: Store, sampling: Sampling) -> SamplingStatus:
    samples = samples_of(store, sampling)
    return SamplingStatus(
        sampling=sampling,
        samples=len(samples),
        first=int(samples.at.min()) if len(samples) else None,
        last=int(samples.at.max()) if len(samples) else None,
        variety=variety_of(samples) if len(samples) > 1 else None,
    )


def variety_of(samples: QuerySamples, *, seed: int = 0) -> Variety:
    """Return how varied samples (n, d), n ≥ 2, are. Larger samples are represented by a part."""
    samples = drawn(samples, MOST_JUDGED, seed=seed)
    n = len(samples)
    sizes = np.bincount(groups_at(directions_of(samples.vectors), NEAR_COPIES))
    effective = float(n**2 / (sizes.astype(np.float64) ** 2).sum())
    interval = 100 * NORMAL * SPREAD_OF_GAINS / np.sqrt(effective)
    return Variety(
        compared=n,
        distinct=len(sizes),
        effective=effective,
        largest=float(sizes.max() / n),
        interval=float(interval),
    )
