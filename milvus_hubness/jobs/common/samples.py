"""Samples of live queries as banks and as queries to judge on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from milvus_hubness.basics.defaults import FEWEST_QUERIES, WHERE_FROM
from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.near_copies import directions_of, groups_at
from milvus_hubness.errors import EmptyBank, InvalidInput, UnreadableFile
from milvus_hubness.jobs.common.gallery import only_field
from milvus_hubness.jobs.common.inputs import COLLECTION_PREFIX, read_bank
from milvus_hubness.jobs.store.protocols import QuerySampling, Store, capability
from milvus_hubness.jobs.store.records import CollectionInfo, QuerySamples, Sampling

VECTORS = ("bank", "target_bank", "queries")
"""Arguments and fields of recipes that hold vectors, or name some of the database."""

SAMPLES = "samples"
"""The name of a bank that is read from the samples of the collection itself, not from a file."""


NEAR_COPIES = 0.99
"""Cosine from which on sampled queries are near copies of each other."""

MOST_JUDGED = 2_000
"""Samples of which a bank is judged on those that are no near copies."""


def sampling_of(info: CollectionInfo, field: str | None = None) -> Sampling | None:
    """Return how a field of a collection is sampled; None if it is not.

    field: None for the only one. Raises InvalidInput.
    """
    field = field or only_field(info)
    info.require_field(field)
    return info.samplings.of(field)


def samples_of(store: Store, sampling: Sampling) -> QuerySamples:
    """Return the samples of a field."""
    sampler = capability(store, QuerySampling)
    return sampler.read_query_samples(sampling.samples_collection, sampling.size)


def drawn(samples: QuerySamples, most: int, *, seed: int = 0) -> QuerySamples:
    """Return at most this number of samples, drawn at random: they come in the order of places."""
    return samples.take(np.random.default_rng(seed).permutation(len(samples))[:most])


def sampled_bank(store: Store, collection: str, field: str | None = None) -> QueryBank:
    """Return the sampled queries of a field as a bank, (m, d) as users sent them, with repeats: a fit
    lets near copies share a weight.

    Raises InvalidInput if the field is not sampled, and EmptyBank if nothing is sampled yet.
    """
    capability(store, QuerySampling)
    info = store.info(collection, counted=False)
    sampling = sampling_of(info, field)
    if sampling is None:
        raise InvalidInput(
            f"no queries of {info.name!r} are sampled: start with milvus-hubness bank sample "
            f"{info.name}, or pass the reference queries as a file"
        )

    vectors = samples_of(store, sampling).vectors
    if not len(vectors):
        raise EmptyBank(
            f"no query of {info.name!r} is sampled yet: clients sample {sampling.rate:.3%} of "
            f"them, see milvus-hubness status {info.name}"
        )
    return QueryBank(vectors, source=sampling.samples_collection)


def is_in_database(named: object, *, as_bank: bool = True) -> bool:
    """Whether a text names vectors of the database, and no file. as_bank: whether samples count."""
    if not isinstance(named, str):
        return False
    return named.startswith(COLLECTION_PREFIX) or (as_bank and named == SAMPLES)


def read_from_database(
    store: Store, values: Mapping[str, object], collection: str, field: str | None
) -> dict[str, QueryBank]:
    """Return the vectors of the database that some of these values name, by the names of the values.

    values: arguments or fields by name, of which VECTORS are looked at. collection, field: whose samples
    are meant. Raises as `sampled_bank` and `read_bank` do.
    """
    found = {}
    for name in VECTORS:
        value = values.get(name)
        if not isinstance(value, str) or not is_in_database(value, as_bank=name == "bank"):
            continue
        is_sampled = value == SAMPLES
        found[name] = (
            sampled_bank(store, collection, field) if is_sampled else read_bank(store, value)
        )
    return found


def distinct_samples(store: Store, info: CollectionInfo, field: str) -> QueryBank | None:
    """Return sampled queries of which no two are near copies, if there are enough to judge a bank on;
    None otherwise.
    """
    sampling = sampling_of(info, field)
    if sampling is None:
        return None

    vectors = drawn(samples_of(store, sampling), MOST_JUDGED).vectors
    if len(vectors) < FEWEST_QUERIES:
        return None
    _, first = np.unique(groups_at(directions_of(vectors), NEAR_COPIES), return_index=True)
    if len(first) < FEWEST_QUERIES:
        return None
    return QueryBank(vectors[np.sort(first)], source=sampling.samples_collection)


def missing_bank(store: Store, collection: str, field: str | None = None) -> str:
    """Return where a bank could come from, for the message that there is none."""
    if isinstance(store, QuerySampling):
        info = store.info(collection, counted=False)
        sampling = sampling_of(info, field)
        count = len(samples_of(store, sampling)) if sampling else 0
        if count:
            return f"{count:,} queries of {info.name!r} are sampled, pass --bank {SAMPLES}"
    return f"pass --bank FILE ({WHERE_FROM})"


def write_samples(store: Store, collection: str, path: Path, *, field: str | None = None) -> int:
    """Write the sampled queries of a field to a .npy or .npz file; return their number.

    The .npz also has `at`, their Unix times. Only the user may read a new file: these are queries of
    people. Raises as `sampled_bank` does, UnreadableFile for
    another kind of file, and OSError.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz"):
        raise UnreadableFile(f"{path}: sampled queries are written to a .npy or .npz file")

    sampled_bank(store, collection, field)
    sampling = sampling_of(store.info(collection, counted=False), field)
    assert sampling is not None, "sampled_bank has read its samples"
    samples = samples_of(store, sampling)
    with whole_file(path, is_private=True) as file:
        if suffix == ".npy":
            np.save(file.buffer, samples.vectors)
        else:
            np.savez(file.buffer, queries=samples.vectors, at=samples.at)
    return len(samples)
