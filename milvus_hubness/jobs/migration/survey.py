"""The survey of the source: its chunks of keys, and rows of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.items import Items
from milvus_hubness.jobs.common.progress import key_pages
from milvus_hubness.jobs.migration.ledger import Chunk
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import Rows, Store
from milvus_hubness.jobs.store.records import CollectionInfo

SAMPLE_ROWS = 4_096
"""About how many keys a survey remembers, spread evenly over all."""

MOST_CHUNKS = 4_096
"""About how many chunks a collection has at most: each has a record in the ledger."""
MEAN_ROWS = 1_000
"""Fewest rows of the sample, if it has as many, that the mean bias is computed from.

That mean keeps the bias column near zero, for the sake of an index, and no ranking depends on it.
From 1,000 rows its standard error is 1/√1000 of the standard deviation of biases, about 3%.
"""


def scan_chunk(store: Rows, collection: str, field: str, chunk: Chunk, limit: int) -> Batch:
    """Return the first `limit` rows of a chunk."""
    return store.scan(
        collection,
        field,
        after=chunk.after,
        upto=chunk.upto,
        limit=limit,
        partition=chunk.partition,
    )


def chunk_pages(
    store: Rows, collection: str, field: str, chunk: Chunk, size: int
) -> Iterator[tuple[Batch, bool]]:
    """Yield the rows of a chunk in pages of `size`,
    at least one page, and whether a page is the last.
    """
    is_last = False
    while not is_last:
        page = scan_chunk(store, collection, field, chunk, size)
        is_last = not page.keys or page.keys[-1] == chunk.upto
        yield page, is_last
        chunk = chunk if is_last else chunk.model_copy(update={"after": page.keys[-1]})


@dataclass(frozen=True)
class Survey:
    """All chunks of a collection in key order within each partition, and the keys of rows spread
    over each one.
    """

    chunks: list[Chunk]
    sample: dict[str | None, list[Key]]
    page_rows: int
    """Rows of this collection that make a read of suitable size."""

    @property
    def rows(self) -> int:
        """The number of distinct keys."""
        return sum(chunk.rows for chunk in self.chunks)

    def shuffled_sample(self) -> list[tuple[str | None, Key]]:
        """Return the sampled keys with their partitions in a random order, the same every time: any
        first part of them is a sample too.
        """
        keys = [(partition, key) for partition, keys in self.sample.items() for key in keys]
        order = np.random.default_rng(0).permutation(len(keys)).tolist()
        return [keys[i] for i in order]


def sampled_rows(
    store: Store,
    info: CollectionInfo,
    field: str,
    surveyed: Survey,
    layout: Layout,
    needed: int,
) -> tuple[Floats, Items]:
    """Return rows of the sample: their vectors (n, d), `needed` of them valid if it has so many, and
    their keys and fields.
    """
    pages = list(sampled_pages(store, info, field, surveyed, layout, needed))
    vectors = layout.stacked(page.vectors for page in pages)
    keys = [key for page in pages for key in page.keys]
    return vectors, Items(keys, [row for page in pages for row in page.rows])


def sampled_pages(
    store: Store,
    info: CollectionInfo,
    field: str,
    surveyed: Survey,
    layout: Layout,
    needed: int,
) -> Iterator[Batch]:
    """Yield rows of the sample, `needed` of them with a valid vector if it has so many."""
    sampled_keys = surveyed.shuffled_sample()
    size = needed
    while sampled_keys and needed > 0:
        keys_of: dict[str | None, list[Key]] = {}
        for partition, key in sampled_keys[:size]:
            keys_of.setdefault(partition, []).append(key)
        sampled_keys = sampled_keys[size:]

        valid = 0
        for partition, keys in keys_of.items():
            for start in range(0, len(keys), surveyed.page_rows):
                page_keys = keys[start : start + surveyed.page_rows]
                page = store.get(info.name, page_keys, field, partition=partition)
                valid += int((~layout.invalid(page.vectors)).sum())
                yield page

        # Rows may lack a vector, or be deleted by now: then twice as many as seem to be missing
        # stand in for them, so that another round is rare.
        needed -= valid
        size = 2 * needed * size // max(1, valid)


def survey(
    store: Store, info: CollectionInfo, rows_per_chunk: int, *, progress: Progress = silent
) -> Survey:
    """Page through the keys once, with one page in memory at a time.

    A chunk has `rows_per_chunk` rows or a multiple of that, so that there are about MOST_CHUNKS at
    most. The sample has at most about SAMPLE_ROWS rows, evenly spread over all keys.
    """
    pages_of_chunks = -(-info.rows // (rows_per_chunk * MOST_CHUNKS))
    chunk_rows = rows_per_chunk * max(1, pages_of_chunks)

    chunks: list[Chunk] = []
    sample: dict[str | None, list[Key]] = {}
    seen = 0
    for partition in info.partitions:
        sample[partition] = []
        cutter = _ChunkCutter(chunks, partition, chunk_rows)
        for page in key_pages(store, info.name, partition, rows=info.rows):
            sampled = evenly_spread(seen, len(page), info.rows, SAMPLE_ROWS)
            sample[partition] += [page[i] for i in sampled]
            seen += len(page)
            progress("reading the keys", seen, info.rows)
            cutter.add(page)
        cutter.end_chunk()

    return Survey(chunks, sample, rows_per_chunk)


class _ChunkCutter:
    """Cuts the keys of one partition, page by page, into chunks, which it appends to `chunks`.

    Only the last chunk of a partition may have fewer than `chunk_rows` rows.
    """

    def __init__(self, chunks: list[Chunk], partition: str | None, chunk_rows: int) -> None:
        self._chunks = chunks
        self._partition = partition
        self._chunk_rows = chunk_rows

        # Of the chunk that is being cut.
        self._after: Key | None = None
        self._upto: Key | None = None
        self._rows = 0

    def add(self, page: list[Key]) -> None:
        """Cut a page of keys, which follow those of the former page."""
        stop = 0
        while stop < len(page):
            start = stop
            stop = min(len(page), start + self._chunk_rows - self._rows)
            self._rows += stop - start
            self._upto = page[stop - 1]
            if self._rows == self._chunk_rows:
                self.end_chunk()

    def end_chunk(self) -> None:
        """Append the chunk that is being cut, unless it is empty."""
        if self._upto is None or not self._rows:
            return

        self._chunks.append(
            Chunk(
                number=len(self._chunks),
                partition=self._partition,
                after=self._after,
                upto=self._upto,
                rows=self._rows,
            )
        )
        self._after = self._upto
        self._rows = 0


def evenly_spread(start: int, count: int, total: int, sampled: int) -> list[int]:
    """Return which of the `count` rows from `start` on are in a sample of `sampled` of `total` rows.

    They are counted from `start`. Row ⌊k · total / sampled⌋ is the k-th row of the sample; all rows
    are in it where there are no more than `sampled`.
    """
    if total <= sampled:
        return list(range(count))
    first = -(-start * sampled // total)
    end = -(-(start + count) * sampled // total)
    return [k * total // sampled - start for k in range(first, end)]
