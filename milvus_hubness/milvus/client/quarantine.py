"""List, release and drop the rows that the hub guard held back. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.quarantine import HeldRow, chosen_rows, drop_held, held_rows
from milvus_hubness.milvus.client.dual_write import DualWrites
from milvus_hubness.milvus.client.messages import Write
from milvus_hubness.milvus.client.state_cache import StateCache
from milvus_hubness.milvus.client.steps import Ask, InStore, Operation

if TYPE_CHECKING:
    from milvus_hubness.milvus.store.milvus_store import MilvusStore


class Quarantine:
    """Operations on the rows of a collection that were held back."""

    def __init__(self, states: StateCache, dual_writes: DualWrites) -> None:
        self._states = states
        self._dual_writes = dual_writes

    def listed(self, collection: str) -> Operation[list[dict[str, Any]]]:
        """Return the id, the key and the time of each row, and the row itself, oldest first."""
        rows: list[HeldRow] = yield InStore(partial(_held, collection))
        return [{**row.facts, "row": row.row} for row in rows]

    def release(
        self, collection: str, keys: Sequence[Any], *, replaces: bool = False
    ) -> Operation[int]:
        """Write rows of these keys, or ids, to the collection; return their number.

        replaces: a row of the same key may be there, and is replaced. Raises InvalidInput if it is
        there and may not be, and for a key that is not in quarantine, and StateError for a row that
        somebody has changed; then nothing is written.
        """
        held: list[HeldRow] = yield InStore(partial(_chosen, collection, _texts(keys)))
        # All are read before the first is written: a broken one stops the release as a whole.
        rows = [(each, each.row) for each in held]
        present = [each.key for each in held if each.key is not None]
        if present and not replaces:
            cached = yield from self._states.cached_state(collection)
            options = {"output_fields": [cached.key_field], "consistency_level": "Strong"}
            there = yield Ask("get", (collection, present), options)
            if there:
                raise InvalidInput(
                    f"{collection!r} has a row of the key {there[0][cached.key_field]!r}: replace "
                    "it (--replace, replaces=True), or drop the held row (--forget)"
                )

        for each, row in rows:
            method = "upsert" if replaces and each.key is not None else "insert"
            write = Write(
                method,
                collection,
                [row],
                partition_name=each.partition or "",
                guarded=False,
            )
            yield from self._dual_writes.write(write)
            # One by one: a release that fails in the middle leaves the others in quarantine.
            yield InStore(partial(_drop, [each]))
        return len(rows)

    def drop(self, collection: str, keys: Sequence[Any]) -> Operation[int]:
        """Forget rows of these keys, or ids; return their number. Raises InvalidInput."""
        rows: list[HeldRow] = yield InStore(partial(_chosen, collection, _texts(keys)))
        yield InStore(partial(_drop, rows))
        return len(rows)


def _texts(keys: Any) -> list[str]:
    if isinstance(keys, str | int):
        keys = [keys]
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str | int) for key in keys):
        raise InvalidInput(f"keys of rows in quarantine are a list of keys or ids, not {keys!r}")
    return [str(key) for key in keys]


def _held(collection: str, store: MilvusStore) -> list[HeldRow]:
    return held_rows(store, store.info(collection, counted=False), collection)


def _chosen(collection: str, keys: Sequence[str], store: MilvusStore) -> list[HeldRow]:
    return chosen_rows(_held(collection, store), keys, collection)


def _drop(rows: Sequence[HeldRow], store: MilvusStore) -> None:
    drop_held(store, rows)
