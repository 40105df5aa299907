"""Dual writes: each write goes to the source and to the copy of a migration. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
from pymilvus.exceptions import MilvusException

from milvus_hubness.client.biases import Bias
from milvus_hubness.client.catalog import Reads
from milvus_hubness.client.state_cache import NOTHING, CachedState
from milvus_hubness.client.steps import Ask, Operation
from milvus_hubness.client.write_intents import KEYS_PER_REQUEST, ROWS_PER_REQUEST, STRONG, parts
from milvus_hubness.client.writes import Writing
from milvus_hubness.errors import BankTooLarge, DualWriteFailed, HubnessError
from milvus_hubness.job_properties import DualWrite
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.milvus_server import is_one_of

Row = dict[str, Any]
Key = int | str

_FAILURES = (MilvusException, HubnessError, grpc.RpcError)

_log = logging.getLogger("milvus_hubness")


class DualWriting(Writing, Reads):
    """insert, upsert and delete, first on the collection and then on its copy, each in its own format.

    The caller gets the answer of the collection. While the copy is still being made, failures on the copy are
    logged; afterwards they raise DualWriteFailed.
    """

    def write(
        self,
        method: str,
        collection: str,
        data: Any,
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, Any]]:
        """Insert or upsert rows.

        The copy gets an upsert, because the migration may have copied the row already.
        """
        written, cached = yield from self._written(
            method, collection, data, timeout, partition_name, bias, options
        )
        if cached.dual_write is not None:
            keys = list(written.get("ids") or ())
            yield from self._dual_written(
                cached, keys, collection, data, timeout, partition_name, bias, options
            )
        return written

    def _dual_written(
        self,
        cached: CachedState,
        keys: Sequence[Key],
        collection: str,
        data: Any,
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
    ) -> Operation[None]:
        """Write to the copy the rows that the collection took. keys: those of the answer, if it has any."""
        dual_write = cached.dual_write
        if dual_write is None:
            return
        rows = [data] if isinstance(data, dict) else data
        keys = keys or [row[cached.key_field] for row in rows]

        def in_full(dual_write: DualWrite) -> Operation[None]:
            # An upsert accepts a key once; for an auto_id collection only the answer has the keys.
            last = {key: {**row, cached.key_field: key} for key, row in zip(keys, rows, strict=True)}
            yield from self._carry(dual_write, list(last.values()), timeout, partition_name, bias, options)

        def in_part(dual_write: DualWrite) -> Operation[None]:
            found = yield from self._rows_of(collection, cached.key_field, keys, timeout, partition_name)
            if not (yield from self._still_has(dual_write, collection, timeout)):
                # The copy has the name by now, so the rows that were read were its own.
                yield from self._carry(dual_write, rows, timeout, partition_name, bias, options)
                return
            description = yield Ask("describe_collection", (dual_write.collection, timeout))
            whole = milvus_schema.as_written(found, description)
            for part in parts(whole, ROWS_PER_REQUEST):
                yield from self._carry(dual_write, part, timeout, partition_name, bias, {})

        is_partial = options.get("partial_update") or options.get("field_ops")
        yield from self._reach(dual_write, in_part if is_partial else in_full, collection, cached, timeout)

    def delete(
        self,
        collection: str,
        ids: Any,
        timeout: float | None,
        filter: str | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, int]]:
        """Delete rows.

        On the copy, a filter deletes the rows that matched it and that the collection lost. Biases in a side
        collection are deleted with rows that are named by key, and otherwise by the next refresh.
        """
        where = None if ids or options.get("pks") else filter

        def matching(name: str, cached: CachedState) -> Operation[list[Key]]:
            return self._matching(name, cached.key_field, str(where), timeout, partition_name, options)

        delete = self._deleted(collection, ids, timeout, filter, partition_name, options)

        def call(cached: CachedState) -> Operation[tuple[dict[str, int], list[Key]]]:
            found = (yield from matching(collection, cached)) if where and cached.dual_write else []
            return (yield from delete(cached)), found

        (done, found), _, cached = yield from self._noted(collection, timeout, call, call)
        dual_write = cached.dual_write
        if dual_write is None:
            return done

        def likewise(dual_write: DualWrite) -> Operation[None]:
            yield from self._drop(dual_write, ids, timeout, filter, partition_name, options)

        def lost(dual_write: DualWrite) -> Operation[None]:
            # These rows matched later, or in an earlier attempt.
            late: list[Key] = []
            if dual_write.required:
                yield from self._ensure_loaded(dual_write.collection, timeout)
                late = yield from matching(dual_write.collection, cached)
            keys = list(dict.fromkeys([*found, *late]))
            held = yield from self._held(collection, cached.key_field, keys, timeout, partition_name)
            if not (yield from self._still_has(dual_write, collection, timeout)):
                # The copy has the name by now, so the keys that were read were its own.
                yield from likewise(dual_write)
                return
            for part in parts([key for key in keys if key not in held], KEYS_PER_REQUEST):
                yield from self._drop(dual_write, part, timeout, None, partition_name, {})

        yield from self._reach(dual_write, lost if where else likewise, collection, cached, timeout)
        return done

    # -- the copy -------------------------------------------------------------------------------------

    def _still_has(self, dual_write: DualWrite, collection: str, timeout: float | None) -> Operation[bool]:
        self.forget(collection)
        now = yield from self.cached_state(collection, timeout)
        return now.dual_write is not None and now.dual_write.collection == dual_write.collection

    def _reach(
        self,
        dual_write: DualWrite,
        work: Callable[[DualWrite], Operation[None]],
        collection: str,
        cached: CachedState,
        timeout: float | None,
    ) -> Operation[None]:
        """Run work(dual_write), which repeats a write on the copy. Raises DualWriteFailed."""
        try:
            yield from work(dual_write)
            return
        except _FAILURES as error:
            if not dual_write.required:
                _log.warning(
                    "written to %r, but not to %r, which is being made of it and is repaired later: %s",
                    collection,
                    dual_write.collection,
                    error,
                )
                return
        self.forget(collection)
        self.forget(dual_write.collection)
        try:
            now = yield from self.cached_state(collection, timeout)
            has_ended = now in (NOTHING, replace(cached, dual_write=None))
            if not has_ended:
                if (
                    now.dual_write is None
                    and (yield from self.cached_state(dual_write.collection, timeout)) == NOTHING
                ):
                    # A rollback renamed the collections: the copy has the name now.
                    dual_write = dual_write.model_copy(update={"collection": collection})
                yield from work(dual_write)
        except _FAILURES as error:
            raise DualWriteFailed(
                f"written to {collection!r}, but not to {dual_write.collection!r}, where its rows are "
                "carried: "
                f"{error}. Repeat the write, an insert as an upsert"
            ) from error

    def _carry(
        self,
        dual_write: DualWrite,
        rows: list[Row],
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
    ) -> Operation[None]:
        """Write to the copy the rows that the collection took.

        This includes rows that can have no bias. If the bank is too large to compute a bias now, rows get a
        pending one.
        """

        def upsert(bias: Bias) -> Operation[Any]:
            return self._written(
                "upsert", dual_write.collection, rows, timeout, partition_name, bias, options, valid=False
            )

        try:
            yield from upsert(bias)
        except BankTooLarge:
            yield from upsert("pending")

    def _drop(
        self,
        dual_write: DualWrite,
        ids: Any,
        timeout: float | None,
        filter: str | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, int]]:
        delete = self._deleted(dual_write.collection, ids, timeout, filter, partition_name, options)
        done, _, _ = yield from self._noted(dual_write.collection, timeout, delete, delete)
        return done

    # -- reads of the collection ------------------------------------------------------------------------

    def _rows_of(
        self,
        collection: str,
        key_field: str,
        keys: Iterable[Key],
        timeout: float | None,
        partition_name: str | None,
        output_fields: Sequence[str] = ("*",),
    ) -> Operation[list[Row]]:
        """Return the existing rows of these keys, in the user's form."""
        partitions = [partition_name] if partition_name else None
        per_request = ROWS_PER_REQUEST if "*" in output_fields else KEYS_PER_REQUEST
        found: list[Row] = []
        for part in parts(list(keys), per_request):
            wanted = is_one_of(key_field, part)
            found += yield from self.query(
                collection, wanted, list(output_fields), timeout, None, partitions, STRONG
            )
        return found

    def _held(
        self,
        collection: str,
        key_field: str,
        keys: Iterable[Key],
        timeout: float | None,
        partition_name: str | None,
    ) -> Operation[set[Key]]:
        rows = yield from self._rows_of(collection, key_field, keys, timeout, partition_name, [key_field])
        return {row[key_field] for row in rows}
