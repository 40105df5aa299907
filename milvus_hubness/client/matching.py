"""The keys of rows that a filter matches. No I/O: see `steps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from milvus_hubness.client.knowledge import StateCache
from milvus_hubness.client.steps import Ask, Operation
from milvus_hubness.errors import StoreError
from milvus_hubness.stores.milvus_rpc import literal

T = TypeVar("T")
Key = int | str

KEYS_PER_PAGE = 16_384
KEYS_PER_REQUEST = 8_000
ROWS_PER_REQUEST = 1_000
STRONG = {"consistency_level": "Strong"}
_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True"}


class Matching(StateCache):
    """Page by page."""

    def _matching(
        self,
        collection: str,
        key_field: str,
        where: str,
        timeout: float | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[list[Key]]:
        """The keys of the rows that a filter matches, in order. Raises StoreError where the server pages in
        none."""
        partitions = [partition_name] if partition_name else None
        template = {name: options[name] for name in ("filter_params",) if name in options}

        def ask(filter: str, limit: int, how: Mapping[str, Any]) -> Ask:
            args = (collection, filter, [key_field], timeout, None, partitions)
            return Ask("query", args, {**template, **how, "limit": limit})

        # Pages follow the collection's consistency level whatever they ask for, and show what this has shown.
        yield ask(where, 1, STRONG)
        found: list[Key] = []
        while True:
            cursor = f"{key_field} > {literal(found[-1])} and " if found else ""
            page = yield ask(f"{cursor}({where})", KEYS_PER_PAGE, _IN_KEY_ORDER)
            fresh = sorted({row[key_field] for row in page})
            if not fresh:
                return found
            if found and fresh[0] <= found[-1]:
                raise StoreError(f"the server did not page {collection!r} in key order")
            found += fresh


def parts(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """`items` in lists of at most so many."""
    return (list(items[start : start + size]) for start in range(0, len(items), size))
