"""The rows of a collection cut into runs of keys, frozen before the first is copied."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from pydantic import BaseModel, ConfigDict, Field

from milvus_hubness.jobs.key_pages import key_pages
from milvus_hubness.jobs.progress import Progress, silent
from milvus_hubness.stores.base import CollectionInfo, Key, Store

SAMPLE_ROWS = 4_096


class Chunk(BaseModel):
    """The rows of a partition with after < key ≤ upto. rows: how many there were when it was frozen.
    seconds: how long writing them took, None until that is done. invalid: how many of them hold no usable
    vector; invalid_keys: the first of those. importing: the file that the database was asked to import it
    from, as that calls it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=0)
    partition: str | None
    after: Key | None
    upto: Key
    rows: int = Field(ge=1)
    seconds: float | None = None
    invalid: int = 0
    invalid_keys: tuple[Key, ...] = ()
    importing: str | None = None


@dataclass(frozen=True)
class Survey:
    """All chunks of a collection, in the order of their keys within each partition, and the keys of rows
    spread evenly over each."""

    chunks: list[Chunk]
    sample: dict[str | None, list[Key]]

    @property
    def rows(self) -> int:
        """Distinct keys."""
        return sum(chunk.rows for chunk in self.chunks)


def survey(store: Store, info: CollectionInfo, rows_per_chunk: int, *, progress: Progress = silent) -> Survey:
    """Page through the keys once. Holds one page of them at a time."""
    store.count(info.name)
    every = max(1, info.rows // SAMPLE_ROWS)
    chunks: list[Chunk] = []
    sample: dict[str | None, list[Key]] = {}
    seen = 0
    for partition in info.partitions:
        sample[partition] = []
        waiting: list[Key] = []
        cut_at: Key | None = None
        for page in chain(key_pages(store, info.name, partition), [[]]):
            waiting += page
            while len(waiting) >= rows_per_chunk or (waiting and not page):
                part, waiting = waiting[:rows_per_chunk], waiting[rows_per_chunk:]
                chunks.append(
                    Chunk(
                        number=len(chunks), partition=partition, after=cut_at, upto=part[-1], rows=len(part)
                    )
                )
                cut_at = part[-1]
            sample[partition] += page[-seen % every :: every]
            seen += len(page)
            progress("reading the keys", seen, info.rows)
    return Survey(chunks, sample)
