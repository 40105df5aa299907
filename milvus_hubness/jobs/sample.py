"""Rows of a collection to judge biases by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from milvus_hubness.jobs.placement import bias_location_of
from milvus_hubness.jobs.progress import Progress, chunks
from milvus_hubness.jobs.shadow import Labelled
from milvus_hubness.layout import Floats
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import CollectionInfo, Key, Store

MOST_ROWS = 20_000


class Labels(NamedTuple):
    """queries (n, d), and for each the keys of the rows that answer it."""

    queries: Floats
    keys: Sequence[Sequence[Key]]


class Sample(NamedTuple):
    """Rows that hold a usable vector. vectors (n, d) as their user knows them; biases (n, slots) that they
    carry."""

    keys: list[Key]
    vectors: Floats
    biases: Floats


def sampled(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    labels: Labels | None,
    progress: Progress,
    *,
    seed: int = 0,
) -> Sample:
    """20,000 rows, or all where there are fewer, and with them those that labels name."""
    rng = np.random.default_rng(seed)
    bias_location = bias_location_of(store, info, state)
    named = {key for keys in labels.keys for key in keys} if labels else set()
    keys: list[Key] = []
    vectors: list[Floats] = [np.empty((0, state.layout.dim), np.float32)]
    biases: list[Floats] = []
    there = {partition: store.keys(info.name, partition=partition) for partition in info.partitions}
    total = sum(map(len, there.values()))
    for partition, known in there.items():
        share = min(len(known), -(-MOST_ROWS * len(known) // max(1, total)))
        picked = {known[i] for i in rng.choice(len(known), share, replace=False)} if share else set()
        wanted = [key for key in known if key in picked or key in named]
        for part in chunks(wanted, store.chunk_rows(info), "reading a sample", progress):
            biased_rows = bias_location.read(part, partition)
            valid = ~state.layout.invalid(biased_rows.vectors)
            keys += [key for key, usable in zip(biased_rows.batch.keys, valid, strict=True) if usable]
            vectors.append(biased_rows.vectors[valid])
            biases.append(biased_rows.biases[valid])
    slots = np.concatenate(biases) if biases else np.empty((0, state.slots), np.float32)
    return Sample(keys, np.concatenate(vectors), slots)


def labelled_in(sample: Sample, labels: Labels) -> Labelled | None:
    """The labelled queries that have an answer in the sample; None where they are fewer than two."""
    where = {key: i for i, key in enumerate(sample.keys)}
    found = [np.array([where[key] for key in keys if key in where], np.int64) for keys in labels.keys]
    rows = [i for i, numbers in enumerate(found) if len(numbers)]
    if len(rows) < 2:
        return None
    return Labelled(np.asarray(labels.queries, np.float32)[rows], [found[i] for i in rows])
