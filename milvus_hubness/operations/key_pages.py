"""The keys of a collection in pages, in key order: a job holds one page of them, however many rows there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import Any

from milvus_hubness.banks.generations import Key
from milvus_hubness.operations.progress import Progress
from milvus_hubness.stores.protocols import Rows
from milvus_hubness.stores.records import CollectionInfo

KEYS_PER_PAGE = 16_384
Pages = Callable[[str | None], Iterable[list[Key]]]


def key_pages(
    store: Rows, name: str, partition: str | None = None, *, rows: int = 0, after: Key | None = None, pending: str = ""
) -> Iterator[list[Key]]:
    """Yield pages of keys in ascending order: all keys that exist at the start, and some of those that clients write
    meanwhile. after: the key before the first one. pending: as in Rows.scan_keys. rows: the expected number of keys;
    from there on this looks for the end, as clients may write rising keys faster than a job takes them."""
    if after is not None:
        store.count(name)  # Only a first page is strongly consistent, and what follows it.
    ceiling: Key | None = None
    seen = 0
    while page := store.scan_keys(name, limit=KEYS_PER_PAGE, after=after, partition=partition, pending=pending):
        after, seen = page[-1], seen + len(page)
        if ceiling is None and seen >= rows:
            ceiling = ceiling_of(store, name, after, partition, pending)
        if ceiling is not None:
            page = [key for key in page if key <= ceiling]  # type: ignore[operator]
        if not page:
            return
        yield page


def ceiling_of(store: Rows, collection: str, key: Key, partition: str | None = None, pending: str = "") -> Key | None:
    """Return a key that is at least the greatest current key, searched from `key` up; None if there is none. A reader
    that stops here ends even if clients write rising keys faster than it reads. A page with fewer rows than requested
    does not show the end: Milvus 2.3 returns some rows one by one."""
    options: Any = {"limit": 1, "partition": partition, "pending": pending}
    keys = (store.above(key, step) for step in count())
    return next(above for above in keys if above is None or not store.scan_keys(collection, after=above, **options))


def absent(pages: Iterable[list[Key]], store: Rows, other: str) -> Iterator[list[Key]]:
    """Yield, from ascending pages of keys, the keys that the collection `other` does not have."""
    after: Key | None = None
    for page in pages:
        lacking = set(page)
        while keys := store.scan_keys(other, after=after, limit=KEYS_PER_PAGE):
            lacking.difference_update(keys)
            after = keys[-1]
            if after >= page[-1]:  # type: ignore[operator]
                break
        after = page[-1]
        if lacking:
            yield [key for key in page if key in lacking]


def key_chunks(
    store: Rows, info: CollectionInfo, doing: str, progress: Progress, pages: Pages | None = None, total: int = -1
) -> Iterator[tuple[str | None, list[Key]]]:
    """Yield partitions and chunks of their keys, of a suitable size for one read, and report each processed chunk.
    pages: of the keys of a partition, by default all. total: their expected number, by default that of all rows."""
    size, total, done = store.chunk_rows(info), info.rows if total < 0 else total, 0
    progress(doing, done, total)
    for partition in info.partitions:
        held: list[Key] = []
        keys = pages(partition) if pages else key_pages(store, info.name, partition, rows=info.rows)
        for page in chain(keys, [None]):
            held += page or []
            while len(held) >= size or (held and page is None):
                part, held = held[:size], held[size:]
                yield partition, part
                done += len(part)
                progress(doing, done, max(done, total))
