"""All keys of a collection in order, a page at a time, also where rows of ever greater keys are written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from milvus_hubness.stores.base import Key, Store

KEYS_PER_PAGE = 16_384


def key_pages(store: Store, collection: str, partition: str | None = None) -> Iterator[list[Key]]:
    """The keys that were there when this began, and some of those that were written meanwhile."""
    after: Key | None = None
    ceiling: Key | None = None
    while page := store.scan_keys(collection, after=after, limit=KEYS_PER_PAGE, partition=partition):
        if ceiling is None and len(page) < KEYS_PER_PAGE:
            ceiling = ceiling_of(store, collection, page[-1], partition)
        if ceiling is not None:
            page = [key for key in page if key <= ceiling]  # type: ignore[operator]
        if not page:
            return
        yield page
        after = page[-1]


def ceiling_of(store: Store, collection: str, key: Key, partition: str | None = None) -> Key | None:
    """A key that the greatest one of this moment is not above, looked for from `key` up; None where there is
    no such key.

    Whoever reads up to it comes to an end, while rows of rising keys may be written faster than pages are
    read. A short page shows no end: of one partition of several Milvus 2.3 gives the last rows one by one.
    """
    for step in count():
        above = store.above(key, step)
        if above is None or not store.scan_keys(collection, after=above, limit=1, partition=partition):
            return above
    raise AssertionError("steps end where there is no key above")
