"""The keys of a collection in pages, in key order: a job holds one page of them, however many rows there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from milvus_hubness.banks.generations import Key
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.stores.protocols import Rows
from milvus_hubness.stores.records import CollectionInfo

KEYS_PER_PAGE = 16_384


def key_pages(
    store: Rows,
    collection: str,
    partition: str | None = None,
    *,
    after: Key | None = None,
    pending: str = "",
    rows: int = 0,
) -> Iterator[list[Key]]:
    """Yield pages of keys in ascending order: all keys that exist at the start, and some of those that clients write
    meanwhile. after: the key before the first one. pending: as in Rows.scan_keys. rows: the expected number of keys;
    from there on this looks for the end, as clients may write rising keys faster than a job takes them."""
    if after is not None:
        store.count(collection)  # Only a first page is strongly consistent, and what follows it.
    ceiling: Key | None = None
    seen = 0
    while page := store.scan_keys(collection, limit=KEYS_PER_PAGE, after=after, partition=partition, pending=pending):
        after, seen = page[-1], seen + len(page)
        if ceiling is None and seen >= rows:
            ceiling = ceiling_of(store, collection, after, partition, pending)
        if ceiling is not None:
            page = [key for key in page if key <= ceiling]  # type: ignore[operator]
        if page:
            yield page
        if ceiling is not None and after >= ceiling:  # type: ignore[operator]
            return


def ceiling_of(store: Rows, collection: str, key: Key, partition: str | None = None, pending: str = "") -> Key | None:
    """Return a key that is at least the greatest current key, searched from `key` up; None if there is none. A reader
    that stops here ends even if clients write rising keys faster than it reads. A page with fewer rows than requested
    does not show the end: Milvus 2.3 returns some rows one by one."""
    for step in count():
        above = store.above(key, step)
        if above is None or not store.scan_keys(collection, limit=1, after=above, partition=partition, pending=pending):
            return above
    raise AssertionError("steps end where there is no key above")


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


def in_chunks(pages: Iterable[list[Key]], size: int) -> Iterator[list[Key]]:
    """Yield the keys of all pages in chunks of `size`."""
    held: list[Key] = []
    for page in pages:
        held += page
        start = 0
        while len(held) - start >= size:
            yield held[start : start + size]
            start += size
        del held[:start]
    if held:
        yield held


def key_chunks(
    store: Rows,
    info: CollectionInfo,
    doing: str,
    progress: Progress = silent,
    *,
    pages: Callable[[str | None], Iterator[list[Key]]] | None = None,
    done: int = 0,
    total: int | None = None,
) -> Iterator[tuple[str | None, list[Key]]]:
    """Yield partitions and chunks of their keys, of a suitable size for one read, and report each processed chunk.

    pages: of the keys of a partition, by default all keys. done: the number of keys that an earlier run has processed.
    total: the expected number of keys, by default that of all rows.
    """
    total = info.rows if total is None else total
    progress(doing, done, max(done, total))
    for partition in info.partitions:
        keys = pages(partition) if pages else key_pages(store, info.name, partition, rows=info.rows)
        for part in in_chunks(keys, store.chunk_rows(info)):
            yield partition, part
            done += len(part)
            progress(doing, done, max(done, total))
