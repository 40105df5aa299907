"""Dual writes, which go to the source and to the copy of a migration. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from pymilvus.exceptions import MilvusException

from milvus_hubness.basics.logs import log
from milvus_hubness.errors import BankTooLarge, DualWriteFailed, HubnessError
from milvus_hubness.jobs.store.records import DualWrite
from milvus_hubness.milvus.client.catalog import Reads
from milvus_hubness.milvus.client.messages import Deletion, Write
from milvus_hubness.milvus.client.state_cache import NOTHING, CachedState, StateCache
from milvus_hubness.milvus.client.steps import Ask, Operation
from milvus_hubness.milvus.client.write_intents import (
    KEYS_PER_REQUEST,
    ROWS_PER_REQUEST,
    STRONG,
    Key,
    Row,
    WriteIntents,
)
from milvus_hubness.milvus.client.writes import Writes
from milvus_hubness.milvus.filters import is_one_of
from milvus_hubness.milvus.store.server import in_parts

_FAILURES = (MilvusException, HubnessError, grpc.RpcError)


class DualWrites:
    """insert, upsert and delete, first on the collection and then on its copy, each in its own format.

    The caller gets the answer of the collection. While the copy is still being made, failures on the copy are
    logged; afterwards they raise DualWriteFailed.
    """

    def __init__(
        self, states: StateCache, reads: Reads, writes: Writes, intents: WriteIntents
    ) -> None:
        self._states = states
        self._reads = reads
        self._writes = writes
        self._intents = intents

    def write(self, write: Write) -> Operation[dict[str, Any]]:
        """Insert or upsert rows; the copy gets an upsert, as the migration may have copied the row already."""
        answer, cached = yield from self._writes.write(write)
        yield from self.carry(cached, list(answer.get("ids") or ()), write)
        return answer

    def carry(self, cached: CachedState, keys: Sequence[Key], write: Write) -> Operation[None]:
        """Write the rows that the collection took to its copy, if it has one. Raises DualWriteFailed."""
        dual_write = cached.dual_write
        if dual_write is None:
            return
        rows, collection = write.rows, write.collection
        keys = keys or [row[cached.key_field] for row in rows]

        def in_full(dual_write: DualWrite) -> Operation[None]:
            # An upsert accepts a key once; for an auto_id collection only the answer has the keys.
            last = {
                key: {**row, cached.key_field: key} for key, row in zip(keys, rows, strict=True)
            }
            yield from self._upsert(dual_write, replace(write, data=list(last.values())))

        def in_part(dual_write: DualWrite) -> Operation[None]:
            in_collection = yield from self._rows(cached.key_field, keys, write)
            if not (yield from self._still_has(dual_write, collection, write.timeout)):
                # The copy has the name by now, so the rows that were read were its own.
                yield from self._upsert(dual_write, write)
                return
            description = yield Ask("describe_collection", (dual_write.collection, write.timeout))
            whole = yield from self._states.insertable(in_collection, description)
            for part in in_parts(whole, ROWS_PER_REQUEST):
                yield from self._upsert(dual_write, replace(write, data=part, options={}))

        work = in_part if write.in_part else in_full
        yield from self._reach(dual_write, work, collection, cached, write.timeout)

    def delete(self, deletion: Deletion) -> Operation[dict[str, int]]:
        """Delete rows. On the copy, a filter deletes the rows that matched it and that the collection lost."""
        collection, timeout = deletion.collection, deletion.timeout
        by_filter = bool(deletion.filter) and not (deletion.ids or deletion.options.get("pks"))

        def call(cached: CachedState) -> Operation[tuple[dict[str, int], list[Key]]]:
            matched: list[Key] = []
            if by_filter and cached.dual_write:
                matched = yield from self._intents.matching(cached.key_field, deletion)
            return (yield from self._writes.delete(deletion, cached)), matched

        (answer, matched), _, cached = yield from self._intents.noted(
            collection, timeout, call, call
        )
        dual_write = cached.dual_write
        if dual_write is None:
            return answer

        def likewise(dual_write: DualWrite) -> Operation[None]:
            yield from self._delete(dual_write, deletion)

        def lost(dual_write: DualWrite) -> Operation[None]:
            # These rows matched later, or in an earlier attempt.
            late: list[Key] = []
            if dual_write.required:
                yield from self._states.ensure_loaded(dual_write.collection, timeout)
                on_copy = replace(deletion, collection=dual_write.collection)
                late = yield from self._intents.matching(cached.key_field, on_copy)
            keys = list(dict.fromkeys([*matched, *late]))
            rows = yield from self._rows(cached.key_field, keys, deletion, [cached.key_field])
            left = {row[cached.key_field] for row in rows}
            if not (yield from self._still_has(dual_write, collection, timeout)):
                # The copy has the name by now, so the keys that were read were its own.
                yield from likewise(dual_write)
                return
            for part in in_parts([key for key in keys if key not in left], KEYS_PER_REQUEST):
                by_key = replace(deletion, ids=part, filter=None, options={})
                yield from self._delete(dual_write, by_key)

        yield from self._reach(
            dual_write, lost if by_filter else likewise, collection, cached, timeout
        )
        return answer

    def _still_has(
        self, dual_write: DualWrite, collection: str, timeout: float | None
    ) -> Operation[bool]:
        now = yield from self._states.read_again(collection, timeout)
        return now.dual_write is not None and now.dual_write.collection == dual_write.collection

    def _reach(
        self,
        dual_write: DualWrite,
        work: Callable[[DualWrite], Operation[None]],
        collection: str,
        cached: CachedState,
        timeout: float | None,
    ) -> Operation[None]:
        """Run work(dual_write), which makes a write on the copy. Raises DualWriteFailed."""
        try:
            yield from self._states.expect_copy(cached, dual_write)
            yield from work(dual_write)
            return
        except _FAILURES as error:
            if not dual_write.required:
                message = "a write reached %r, but not its unfinished copy %r, which a later pass repairs: %s"
                log.warning(message, collection, dual_write.collection, error)
                return
        self._states.forget(dual_write.collection)
        try:
            now = yield from self._states.read_again(collection, timeout)
            if now in (NOTHING, replace(cached, dual_write=None)):
                return  # the dual writes have ended
            if now.dual_write is None:
                copy = yield from self._states.cached_state(dual_write.collection, timeout)
                if copy == NOTHING:
                    # A rollback renamed the collections: the copy has the name now, and the ledger no other one.
                    dual_write = dual_write.model_copy(update={"collection": collection})
            yield from self._states.expect_copy(cached, dual_write)
            yield from work(dual_write)
        except _FAILURES as error:
            raise DualWriteFailed(
                f"the write reached {collection!r}, but not its copy {dual_write.collection!r}: {error}. "
                "Write again, an insert as an upsert"
            ) from error

    def _upsert(self, dual_write: DualWrite, write: Write) -> Operation[None]:
        """Write rows to the copy, invalid ones too; their biases are pending if the bank is too large."""
        upsert = replace(write, method="upsert", collection=dual_write.collection)
        try:
            yield from self._writes.write(upsert, valid=False)
        except BankTooLarge:
            yield from self._writes.write(replace(upsert, bias="pending"), valid=False)

    def _delete(self, dual_write: DualWrite, deletion: Deletion) -> Operation[None]:
        on_copy = replace(deletion, collection=dual_write.collection)
        delete = partial(self._writes.delete, on_copy)
        yield from self._intents.noted(on_copy.collection, on_copy.timeout, delete, delete)

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
        for part in in_parts(list(keys), per_request):
            options = {
                "output_fields": list(output_fields),
                "timeout": request.timeout,
                "partition_names": partitions,
                **STRONG,
            }
            where = is_one_of(key_field, part)
            rows += yield from self._reads.read(Ask("query", (request.collection, where), options))
        return rows
