"""All keys of a collection in order, a page at a time, also where rows of ever greater keys are written."""

from __future__ import annotations

from collections.abc import Iterator

from milvus_hubness.stores.base import Key, Store

KEYS_PER_PAGE = 16_384

NEARLY_EMPTY = 16
"""A page of so many times fewer keys than asked for shows the end: what comes behind it was written since. An
empty one need never come. Not every short page does: of rows that are there twice Milvus gives one."""


def key_pages(store: Store, collection: str, partition: str | None = None) -> Iterator[list[Key]]:
    """The keys that were there when this began, and more that were written meanwhile."""
    after: Key | None = None
    while page := store.scan_keys(collection, after=after, limit=KEYS_PER_PAGE, partition=partition):
        yield page
        if len(page) * NEARLY_EMPTY <= KEYS_PER_PAGE:
            return
        after = page[-1]


def last_key(store: Store, collection: str, *, after: Key, partition: str | None = None) -> Key:
    """The greatest key, or a greater one than any that was there when this began, but `after` at least."""
    page = [after]
    while following := store.scan_keys(collection, after=page[-1], limit=KEYS_PER_PAGE, partition=partition):
        page = following
        if len(page) * NEARLY_EMPTY <= KEYS_PER_PAGE:
            break
    return page[-1]
