"""Dual writes, which go to the source and to the copy of a migration. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from milvus_hubness.clients.steps import Ask
from milvus_hubness.errors import BankTooLarge, StoreError
from milvus_hubness.jobs.store.records import DualWrite
from milvus_hubness.milvus.client.catalog import Reads
from milvus_hubness.milvus.client.messages import Deletion, Write
from milvus_hubness.milvus.client.state_cache import CachedState, StateCache
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.client.writes import ROWS_PER_REQUEST, Writes
from milvus_hubness.milvus.filters import is_one_of, literal
from milvus_hubness.milvus.store.server import in_parts

Key = int | str
Row = dict[str, Any]

KEYS_PER_PAGE = 16_384
"""Keys that one request of a search for matching rows returns: the most that Milvus allows."""

KEYS_PER_REQUEST = 8_000
"""Keys in the filter of one request."""

STRONG = {"consistency_level": "Strong"}
_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True"}


class DualWrites:
    """insert, upsert and delete, on the collection and then on its copy, each in its own format.

    The caller gets the answer of the collection. While the copy is still being made, failures on
    the copy are logged; afterwards they raise DualWriteFailed.
    """

    def __init__(self, states: StateCache, reads: Reads, writes: Writes) -> None:
        self._states = states
        self._reads = reads
        self._writes = writes

    def write(self, write: Write) -> Operation[dict[str, Any]]:
        """Insert or upsert rows; the copy gets an upsert, as the migration may have copied them.

        Raises PartialWrite if a later part of the rows fails, once the copy has the first ones.
        """
        sent, cached = yield from self._writes.sent(write)
        if cached.dual_write is not None:
            yield from self.carry(cached, list(sent.answer.get("ids") or ()), sent.write)
        if sent.failure is not None:
            raise sent.failure
        return sent.answer

    def carry(self, cached: CachedState, keys: Sequence[Key], write: Write) -> Operation[None]:
        """Write the rows that the collection took to its copy, if it has one.

        keys: that the server created; empty if the rows have their keys. Raises DualWriteFailed.
        """
        keys = keys or [row[cached.key_field] for row in write.rows]
        carry = self._carry_fields if write.in_part else self._carry_rows
        work = partial(carry, keys, write)
        yield from self._states.reach_copy(write.collection, cached, write.timeout, work)

    def _carry_rows(
        self, keys: Sequence[Key], write: Write, cached: CachedState, dual_write: DualWrite
    ) -> Operation[None]:
        """Upsert whole rows to the copy."""
        # For an auto_id collection only the answer has the keys.
        key_field = cached.key_field
        keyed = [{**row, key_field: key} for key, row in zip(keys, write.rows, strict=True)]
        yield from self._upsert(dual_write, replace(write, data=keyed).as_upsert(key_field))

    def _carry_fields(
        self, keys: Sequence[Key], write: Write, cached: CachedState, dual_write: DualWrite
    ) -> Operation[None]:
        """Upsert to the copy the whole rows that a partial update left in the collection."""
        updated = yield from self._rows(cached.key_field, keys, write)
        if not (yield from self._still_has(dual_write, write.collection, write.timeout)):
            # The copy has the name by now, and clients that know it write to it first: what was
            # read may lack their writes.
            yield from self._upsert(dual_write, write)
            return

        description = yield Ask("describe_collection", (dual_write.collection, write.timeout))
        rows = yield from self._states.insertable(updated, description)
        for some_rows in in_parts(rows, ROWS_PER_REQUEST):
            # Without the options of a partial update: these rows are whole.
            yield from self._upsert(dual_write, replace(write, data=some_rows, options={}))

    def delete(self, deletion: Deletion) -> Operation[dict[str, int]]:
        """Delete rows.

        On the copy, a filter deletes the rows that matched it and that the collection lost.
        """
        collection = deletion.collection
        delete_once = partial(self._delete_once, deletion)
        (answer, matched), cached = yield from self._states.written(
            collection, deletion.timeout, delete_once
        )
        if cached.dual_write is None:
            return answer

        if deletion.by_filter:
            work = partial(self._delete_lost, matched, deletion)
        else:
            work = partial(self._delete_on_copy, deletion)
        yield from self._states.reach_copy(collection, cached, deletion.timeout, work)
        return answer

    def _delete_once(
        self, deletion: Deletion, cached: CachedState
    ) -> Operation[tuple[dict[str, int], list[Key]]]:
        """Delete rows of the collection; return the answer and, for a copy, the matched keys."""
        matched: list[Key] = []
        if deletion.by_filter and cached.dual_write:
            within = replace(deletion, collection=cached.real_name)
            matched = yield from self._matching(cached.key_field, within)
        answer = yield from self._writes.delete(deletion, cached)
        return answer, matched

    def _delete_on_copy(
        self, deletion: Deletion, _: CachedState, dual_write: DualWrite
    ) -> Operation[None]:
        on_copy = replace(deletion, collection=dual_write.collection)
        delete = partial(self._writes.delete, on_copy)
        yield from self._states.retrying(on_copy.collection, on_copy.timeout, delete, delete)

    def _delete_lost(
        self, matched: Sequence[Key], deletion: Deletion, cached: CachedState, dual_write: DualWrite
    ) -> Operation[None]:
        """Delete on the copy the rows that matched a filter and that the collection lost."""
        collection = deletion.collection
        key_field = cached.key_field
        timeout = deletion.timeout

        # These rows matched later, or in an earlier attempt.
        matched_on_copy: list[Key] = []
        if dual_write.required:
            yield from self._states.ensure_loaded(dual_write.collection, timeout)
            on_copy = replace(deletion, collection=dual_write.collection)
            matched_on_copy = yield from self._matching(key_field, on_copy)

        keys = list(dict.fromkeys([*matched, *matched_on_copy]))
        rows = yield from self._rows(key_field, keys, deletion, [key_field])
        remaining = {row[key_field] for row in rows}
        if not (yield from self._still_has(dual_write, collection, timeout)):
            # As above: the rows that match are those of the copy.
            yield from self._delete_on_copy(deletion, cached, dual_write)
            return

        lost = [key for key in keys if key not in remaining]
        for some_keys in in_parts(lost, KEYS_PER_REQUEST):
            by_key = replace(deletion, ids=some_keys, filter=None, options={})
            yield from self._delete_on_copy(by_key, cached, dual_write)

    def _matching(self, key_field: str, deletion: Deletion) -> Operation[list[Key]]:
        """Return the keys of the rows that a filter matches, in key order. Raises StoreError."""
        collection = deletion.collection
        where = deletion.filter
        partitions = [deletion.partition_name] if deletion.partition_name else None
        template = {
            name: deletion.options[name] for name in ("filter_params",) if name in deletion.options
        }

        def ask(filter: str, limit: int, options: Mapping[str, Any]) -> Ask:
            args = (collection, filter, [key_field], deletion.timeout, None, partitions)
            return Ask("query", args, {**template, **options, "limit": limit})

        # Pages have the consistency level of the collection, not of the request; they show what
        # this strongly consistent query has shown.
        yield ask(str(where), 1, STRONG)

        keys: list[Key] = []
        while True:
            cursor = f"{key_field} > {literal(keys[-1])} and " if keys else ""
            page = yield ask(f"{cursor}({where})", KEYS_PER_PAGE, _IN_KEY_ORDER)
            page_keys = sorted({row[key_field] for row in page})
            if not page_keys:
                return keys
            if keys and page_keys[0] <= keys[-1]:
                raise StoreError(f"the server did not page {collection!r} in key order")

            keys += page_keys

    def _still_has(
        self, dual_write: DualWrite, collection: str, timeout: float | None
    ) -> Operation[bool]:
        now = yield from self._states.read_again(collection, timeout)
        return now.dual_write is not None and now.dual_write.collection == dual_write.collection

    def _upsert(self, dual_write: DualWrite, write: Write) -> Operation[None]:
        """Write rows to the copy, invalid ones too; biases are pending if the bank is too large."""
        upsert = replace(write, method="upsert", collection=dual_write.collection)
        try:
            yield from self._writes.write(upsert, valid=False)
        except BankTooLarge:
            yield from self._writes.write(replace(upsert, bias="pending"), valid=False)

    def _rows(
        self,
        key_field: str,
        keys: Iterable[Key],
        request: Write | Deletion,
        output_fields: Sequence[str] = ("*",),
    ) -> Operation[list[Row]]:
        """Return the existing rows of these keys in the user's form."""
        partitions = [request.partition_name] if request.partition_name else None
        per_request = ROWS_PER_REQUEST if "*" in output_fields else KEYS_PER_REQUEST
        rows: list[Row] = []
        for some_keys in in_parts(list(keys), per_request):
            options = {
                "output_fields": list(output_fields),
                "timeout": request.timeout,
                "partition_names": partitions,
                **STRONG,
            }
            where = is_one_of(key_field, some_keys)
            rows += yield from self._reads.read(Ask("query", (request.collection, where), options))

        return rows
