"""Writes to a collection whose rows are being carried to another one, its mirror, reach both. No I/O: see
`steps`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
from pymilvus.exceptions import MilvusException

from milvus_hubness.client.biases import Bias
from milvus_hubness.client.knowledge import NOTHING, Known
from milvus_hubness.client.matching import KEYS_PER_REQUEST, ROWS_PER_REQUEST, STRONG, parts
from milvus_hubness.client.reads import Reads
from milvus_hubness.client.steps import Ask, Operation
from milvus_hubness.client.writes import Writing
from milvus_hubness.errors import BankTooLarge, HubnessError, MirrorFailed
from milvus_hubness.state import Mirror
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.milvus_rpc import is_one_of

Row = dict[str, Any]
Key = int | str

_FAILURES = (MilvusException, HubnessError, grpc.RpcError)

_log = logging.getLogger("milvus_hubness")


class Mirroring(Writing, Reads):
    """insert, upsert and delete, of the collection first and then of its mirror, each in its own form. The
    caller gets what the collection answered.

    While the mirror is still being made, what it does not take is logged; afterwards MirrorFailed is raised.
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
        """insert or upsert; the mirror gets an upsert, as whoever carries rows to it may have been faster."""
        written, known = yield from self._written(
            method, collection, data, timeout, partition_name, bias, options
        )
        if known.mirror is not None:
            keys = list(written.get("ids") or ())
            yield from self._mirrored(known, keys, collection, data, timeout, partition_name, bias, options)
        return written

    def _mirrored(
        self,
        known: Known,
        keys: Sequence[Key],
        collection: str,
        data: Any,
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
    ) -> Operation[None]:
        """Have the mirror take what the collection took. keys: as the answer named them, if it did."""
        mirror = known.mirror
        if mirror is None:
            return
        rows = [data] if isinstance(data, dict) else data
        keys = keys or [row[known.key_field] for row in rows]

        def in_full(mirror: Mirror) -> Operation[None]:
            # An upsert takes a key once; of an auto_id collection's rows only the answer names the keys.
            last = {key: {**row, known.key_field: key} for key, row in zip(keys, rows, strict=True)}
            yield from self._carry(mirror, list(last.values()), timeout, partition_name, bias, options)

        def in_part(mirror: Mirror) -> Operation[None]:
            found = yield from self._rows_of(collection, known.key_field, keys, timeout, partition_name)
            if not (yield from self._still_has(mirror, collection, timeout)):
                # The name is the mirror's by now, and so were the rows found.
                yield from self._carry(mirror, rows, timeout, partition_name, bias, options)
                return
            description = yield Ask("describe_collection", (mirror.collection, timeout))
            whole = milvus_schema.as_written(found, description)
            for part in parts(whole, ROWS_PER_REQUEST):
                yield from self._carry(mirror, part, timeout, partition_name, bias, {})

        is_partial = options.get("partial_update") or options.get("field_ops")
        yield from self._reach(mirror, in_part if is_partial else in_full, collection, known, timeout)

    def delete(
        self,
        collection: str,
        ids: Any,
        timeout: float | None,
        filter: str | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, int]]:
        """delete; of the mirror, by a filter, the rows that matched it and that the collection lost.

        Biases in a side collection go with rows that are named by key, and otherwise with the next refresh.
        """
        where = None if ids or options.get("pks") else filter

        def matching(name: str, known: Known) -> Operation[list[Key]]:
            return self._matching(name, known.key_field, str(where), timeout, partition_name, options)

        delete = self._deleted(collection, ids, timeout, filter, partition_name, options)

        def call(known: Known) -> Operation[tuple[dict[str, int], list[Key]]]:
            found = (yield from matching(collection, known)) if where and known.mirror else []
            return (yield from delete(known)), found

        (done, found), _, known = yield from self._noted(collection, timeout, call, call)
        mirror = known.mirror
        if mirror is None:
            return done

        def likewise(mirror: Mirror) -> Operation[None]:
            yield from self._drop(mirror, ids, timeout, filter, partition_name, options)

        def lost(mirror: Mirror) -> Operation[None]:
            # Rows that matched later, or when this was tried before.
            late: list[Key] = []
            if mirror.required:
                yield from self._ensure_loaded(mirror.collection, timeout)
                late = yield from matching(mirror.collection, known)
            keys = list(dict.fromkeys([*found, *late]))
            held = yield from self._held(collection, known.key_field, keys, timeout, partition_name)
            if not (yield from self._still_has(mirror, collection, timeout)):
                # The name is the mirror's by now, and so were the keys held.
                yield from likewise(mirror)
                return
            for part in parts([key for key in keys if key not in held], KEYS_PER_REQUEST):
                yield from self._drop(mirror, part, timeout, None, partition_name, {})

        yield from self._reach(mirror, lost if where else likewise, collection, known, timeout)
        return done

    # -- the mirror -------------------------------------------------------------------------------------

    def _still_has(self, mirror: Mirror, collection: str, timeout: float | None) -> Operation[bool]:
        self.forget(collection)
        now = yield from self.known(collection, timeout)
        return now.mirror is not None and now.mirror.collection == mirror.collection

    def _reach(
        self,
        mirror: Mirror,
        work: Callable[[Mirror], Operation[None]],
        collection: str,
        known: Known,
        timeout: float | None,
    ) -> Operation[None]:
        """work(mirror), which repeats there what was done to the collection. Raises MirrorFailed."""
        try:
            yield from work(mirror)
            return
        except _FAILURES as error:
            if not mirror.required:
                _log.warning(
                    "written to %r, but not to %r, which is being made of it and is mended later: %s",
                    collection,
                    mirror.collection,
                    error,
                )
                return
        self.forget(collection)
        self.forget(mirror.collection)
        try:
            now = yield from self.known(collection, timeout)
            has_ended = now in (NOTHING, replace(known, mirror=None))
            if not has_ended:
                if now.mirror is None and (yield from self.known(mirror.collection, timeout)) == NOTHING:
                    # A migration was taken back by renaming: the mirror is what has the name now.
                    mirror = mirror.model_copy(update={"collection": collection})
                yield from work(mirror)
        except _FAILURES as error:
            raise MirrorFailed(
                f"written to {collection!r}, but not to {mirror.collection!r}, where its rows are carried: "
                f"{error}. Repeat the write, an insert as an upsert"
            ) from error

    def _carry(
        self,
        mirror: Mirror,
        rows: list[Row],
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
    ) -> Operation[None]:
        """What the collection took, the mirror takes: also rows that can have no bias, and those of which the
        bank is too large to tell it now."""

        def upsert(bias: Bias) -> Operation[Any]:
            return self._written(
                "upsert", mirror.collection, rows, timeout, partition_name, bias, options, sound=False
            )

        try:
            yield from upsert(bias)
        except BankTooLarge:
            yield from upsert("pending")

    def _drop(
        self,
        mirror: Mirror,
        ids: Any,
        timeout: float | None,
        filter: str | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, int]]:
        delete = self._deleted(mirror.collection, ids, timeout, filter, partition_name, options)
        done, _, _ = yield from self._noted(mirror.collection, timeout, delete, delete)
        return done

    # -- what the collection holds ----------------------------------------------------------------------

    def _rows_of(
        self,
        collection: str,
        key_field: str,
        keys: Iterable[Key],
        timeout: float | None,
        partition_name: str | None,
        output_fields: Sequence[str] = ("*",),
    ) -> Operation[list[Row]]:
        """The rows of these keys that are there, as the user knows them."""
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
