"""Reads and writes of rows in Milvus collections, by key, with strong consistency."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import count
from typing import Any, TypeVar

import grpc
import numpy as np
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.basics.bounds import FrozenModel
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.waiting import Standing, WaitPolicy, reported, wait_until
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import unpacked
from milvus_hubness.correction.codec.base import PENDING
from milvus_hubness.errors import CollectionNotFound, LeaseLost, StoreError, WaitedTooLong
from milvus_hubness.jobs.store.generations import Batch, Row
from milvus_hubness.jobs.store.records import Fences, is_fence
from milvus_hubness.milvus.filters import is_one_of, literal
from milvus_hubness.milvus.pymilvus_private import WITHOUT_WAITING, database_of
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.keepalive import keep_alive_as_lite_allows
from milvus_hubness.milvus.store.server import (
    DUPLICATES_PER_KEY,
    FEW_KEYS,
    PAUSES,
    ROWS_PER_PAGE,
    in_fitting_parts,
    in_parts,
    is_lite,
    is_missing,
    is_rate_limited,
    is_too_large,
    may_arrive,
    message_of,
    plain_client_of,
    supported_version,
    supports,
    translated,
)

DEFAULT_GROUP = "__default_resource_group"
"""The resource group of replicas for which nobody has chosen another one."""

MOST_HIDDEN = 60.0
"""Seconds after which a flush that was to show hidden rows, and has not, is taken to be in vain. It
shows them within 20 s on a busy machine.
"""

GREATEST_NUMBER = 2**63 - 1
"""The greatest key of a collection whose keys are numbers."""

GREATEST_CHARACTER = "\U0010ffff"

_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True", "consistency_level": "Strong"}
"""Arguments with which a query returns the first rows in key order, as in an iterator."""

_AS_ARRAYS = {"strict_float32": True}
"""Argument with which float vectors become slices of one array, 1,000 times faster than lists."""

Self = TypeVar("Self", bound="MilvusRequests")
T = TypeVar("T")


class MilvusRequests:
    """Reads and writes of rows.

    client: a MilvusClient; see `connect`. Of a HubnessClient, its plain client is used.
    """

    def __init__(self, client: MilvusClient) -> None:
        client = plain_client_of(client)
        self.client = client
        with translated("the server"):
            self._version = supported_version(client)
        self.is_lite = is_lite(self._version)
        if self.is_lite:
            keep_alive_as_lite_allows(client)
        self._ready_ledgers: set[str] = set()
        self._warned: set[str] = set()
        self._fences: Fences | None = None
        self._showing = threading.RLock()
        self._flushed_in_vain: dict[str, float] = {}
        self._most_that_fit: dict[tuple[str, tuple[str, ...]], int] = {}
        """Rows of a collection, with these fields, that fit a message, where a page does not."""

    def fenced(self: Self, fences: Fences) -> Self:
        store = copy(self)
        store._fences = fences
        return store

    def _expect_lease(self) -> None:
        """Raise LeaseLost if this store has a lease that another job has taken."""
        if self._fences is not None:
            self._fences.check()

    def fence(self, collection: str, alias: str) -> None:
        self.client.create_alias(collection, alias, retry_times=0)

    def unfence(self, alias: str) -> None:
        # Milvus 2.3 clears the name caches of its proxies before it drops the alias. A proxy that
        # reads the alias in between has it in its cache until the second call.
        for _ in range(1 if self.is_lite else 2):
            with suppress(MilvusException):
                self.client.drop_alias(alias)
        if self.exists(alias):
            raise StoreError(
                f"the fencing alias {alias!r} could not be dropped: drop it and try again"
            )

    def fences_of(self, collection: str) -> list[str]:
        if not self.exists(collection):
            return []
        description = self.client.describe_collection(collection)
        return list(filter(is_fence, self._all_aliases(description)))

    def _all_aliases(self, description: Mapping[str, Any]) -> list[str]:
        """Return the aliases of a described collection.

        Its description may have those of a minute ago, and none on Milvus Lite. On Milvus 2.3 it is right, and the
        list is refused: nobody can be given that right there.
        """
        if not supports(self._version, "the right to list aliases"):
            return list(description["aliases"])
        name = description["collection_name"]
        listed = self.client.list_aliases(name, db_name=database_of(self.client))
        return list(listed["aliases"])

    def _drop(self, collection: str) -> None:
        # A late request may have created one.
        self.drop_fences(collection)
        self._expect_lease()
        self.client.drop_collection(collection)

    def drop_fences(self, collection: str) -> None:
        """Drop the fencing aliases that killed jobs left. A collection with aliases stays."""
        for alias in self.fences_of(collection):
            self.unfence(alias)

    def _send(self, collection: str, write: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return `write(name, *args, **options)`: one request of pymilvus, through the fencing
        alias if there is one. pymilvus would send a failed request again while the first may still
        arrive, even after later writes; a fenced one is sent again only when it cannot.

        Raises pymilvus's errors, and LeaseLost if the alias is gone.
        """
        if self._fences is None or self._fences.alias_of(collection) is None:
            return write(collection, *args, **options)

        pauses = iter(PAUSES)
        waited = 0.0
        while True:
            name = self._fences.alias_of(collection)
            try:
                return write(name, *args, **{**options, "retry_times": 0})
            except (MilvusException, grpc.RpcError) as error:
                if is_missing(error) and name != self._fences.alias_of(collection):
                    # Another thread has renewed it.
                    continue

                if is_missing(error) and self.exists(collection):
                    raise LeaseLost(
                        f"the lease on {collection!r} was lost: another job has taken over, and "
                        "the database refused this write"
                    ) from error

                pause = next(pauses, None)
                if pause is None or not (is_rate_limited(error) or may_arrive(error)):
                    raise
                if may_arrive(error):
                    self._fences.renew(collection)
                if waited < WaitPolicy.first_report <= waited + pause:
                    log.warning(
                        "writes to %r fail and are tried again: %s", collection, message_of(error)
                    )

            time.sleep(pause)
            waited += pause

    def exists(self, collection: str) -> bool:
        return bool(self.client.has_collection(collection))

    def server_version(self) -> str:
        return self._version

    def scan_keys(
        self,
        collection: str,
        *,
        limit: int,
        after: Key | None = None,
        partition: str | None = None,
        pending: str = "",
    ) -> list[Key]:
        where = f"{pending} == {PENDING}" if pending else ""
        key_field = self._key_field(collection)
        if after is None:
            self._ensure_loaded(collection)
            # Pages have the collection's consistency level, not that of the request: they show what
            # the request before them has seen.
            few = self._query(
                collection, where, [key_field], partition, limit=FEW_KEYS * DUPLICATES_PER_KEY
            )
            if len(few) < FEW_KEYS:
                return sorted({row[key_field] for row in few})[:limit]

        return next(
            self._pages(collection, key_field, [key_field], limit, after, None, partition, where)
        )[0]

    def scan(
        self,
        collection: str,
        field: str,
        *,
        after: Key | None = None,
        upto: Key | None = None,
        limit: int | None = None,
        partition: str | None = None,
        where: str = "",
    ) -> Batch:
        schema = self.client.describe_collection(collection)
        key_field = milvus_schema.key_field(schema)["name"]
        size = min(limit or ROWS_PER_PAGE, ROWS_PER_PAGE)
        pages = self._pages(collection, key_field, ["*"], size, after, upto, partition, where)
        keys, by_key = next(pages)
        while (limit is None or len(keys) < limit) and (page := next(pages, None)):
            page_keys, page_rows = page
            keys += page_keys
            by_key |= page_rows

        return self._batch(schema, field, keys[:limit], by_key)

    def _pages(
        self,
        collection: str,
        key_field: str,
        output_fields: list[str],
        size: int,
        after: Key | None = None,
        upto: Key | None = None,
        partition: str | None = None,
        where: str = "",
    ) -> Iterator[tuple[list[Key], dict[Key, Row]]]:
        """Yield the keys and the rows of pages with after < key ≤ upto; the last one is empty or
        ends with `upto`.
        """
        last = f"{key_field} <= {literal(upto)}" if upto is not None else ""
        while True:
            first = f"{key_field} > {literal(after)}" if after is not None else ""
            bounds = " and ".join(filter(None, [first, last, where]))
            rows = self._page(collection, bounds, output_fields, size, partition)
            by_key = {row[key_field]: row for row in rows}
            keys = sorted(by_key)
            if keys and after is not None and keys[0] <= after:
                raise StoreError(f"the server did not page {collection!r} in key order")

            yield keys, by_key
            if not keys or keys[-1] == upto:
                return

            after = keys[-1]

    def _page(
        self, collection: str, where: str, fields: list[str], limit: int, partition: str | None
    ) -> list[Row]:
        """Return the first rows in key order, with half the limit until they fit a message."""
        read = (collection, tuple(fields))
        limit = min(limit, self._most_that_fit.get(read, limit))
        while True:
            try:
                return self._query(
                    collection, where, fields, partition, limit=limit, **_IN_KEY_ORDER, **_AS_ARRAYS
                )
            except (MilvusException, grpc.RpcError) as error:
                if limit < 2 or not is_too_large(error):
                    raise

            limit //= 2
            self._most_that_fit[read] = limit

    def _query(
        self,
        collection: str,
        where: str,
        fields: list[str],
        partition: str | None = None,
        **options: Any,
    ) -> list[Row]:
        rows = self.client.query(
            collection,
            filter=where,
            output_fields=fields,
            partition_names=[partition] if partition else None,
            **{"consistency_level": "Strong", **options},
        )
        return list(rows)

    def above(self, key: Key, step: int) -> Key | None:
        if isinstance(key, int):
            number = key + 2**step - 1
            return number if number < GREATEST_NUMBER else None

        if step > len(key):
            return None

        # The character that is raised, and what stands before it.
        position = len(key) - step
        prefix = key[:position]
        raised = key[position : position + 1]
        if not raised or raised == GREATEST_CHARACTER:
            return key

        # No text has the characters between these two: they are the surrogates.
        next_character = "\ue000" if raised == "\ud7ff" else chr(ord(raised) + 1)
        return prefix + next_character

    def count(self, collection: str) -> int:
        self._ensure_loaded(collection)
        return self._count(collection)

    def _count(self, collection: str, where: str = "", **options: Any) -> int:
        rows = self._query(collection, where, ["count(*)"], **options)
        return int(rows[0]["count(*)"]) if rows else 0

    def read_back(self, collection: str, read: Callable[[], T], is_whole: Callable[[T], bool]) -> T:
        result = read()
        # Milvus Lite is one process with its rows, and shows what it acknowledged.
        if self.is_lite or is_whole(result) or not self.exists(collection):
            return result

        # One flush is enough for all threads that miss something.
        with self._showing:
            result = read()
            if is_whole(result) or self._was_in_vain(collection):
                return result

            return self._shown(collection, read, is_whole)

    def _was_in_vain(self, collection: str) -> bool:
        """Whether a flush has just shown nothing, so that another one would not either."""
        last = self._flushed_in_vain.get(collection)
        return last is not None and time.monotonic() - last < MOST_HIDDEN

    def _shown(self, collection: str, read: Callable[[], T], is_whole: Callable[[T], bool]) -> T:
        """Return what `read` returns after a flush, as soon as it is whole, or else at the end.

        After it was killed and started again, Milvus 2.3.5 may hide the rows that no flush has
        sealed, of collections that share a channel with others; a flush shows them.
        """
        log.warning(
            "the server hides rows of %r that it acknowledged: they are flushed", collection
        )
        began = time.monotonic()
        try:
            self.client.flush(collection, timeout=MOST_HIDDEN, retry_on_rate_limit=False)
        except (MilvusException, grpc.RpcError) as error:
            # Soon after another flush, which serves as well, a server refuses this one.
            if not is_rate_limited(error):
                log.warning("the flush of %r failed: %s", collection, message_of(error))
                self._flushed_in_vain[collection] = time.monotonic()
                return read()

        result: T

        def hidden() -> Standing | None:
            nonlocal result
            result = read()
            return None if is_whole(result) else Standing("some are still hidden", 1)

        limit = max(0.0, MOST_HIDDEN - (time.monotonic() - began))
        try:
            wait_until(f"all rows of {collection!r} to be shown", hidden, WaitPolicy(limit=limit))
        except WaitedTooLong:
            self._flushed_in_vain[collection] = time.monotonic()
        return result

    def get(
        self, collection: str, keys: Sequence[Key], field: str, *, partition: str | None = None
    ) -> Batch:
        schema = self.client.describe_collection(collection)
        by_key = self._by_key(collection, milvus_schema.key_field(schema)["name"], keys, partition)
        return self._batch(schema, field, [key for key in keys if key in by_key], by_key)

    def values(
        self,
        collection: str,
        name: str,
        keys: Sequence[Key],
        *,
        partition: str | None = None,
        are_numbers: bool = True,
    ) -> dict[Key, Any]:
        schema = self.client.describe_collection(collection)
        milvus_schema.expect_values(schema, name, collection, are_numbers=are_numbers)
        key_field = milvus_schema.key_field(schema)["name"]
        by_key = self._by_key(collection, key_field, keys, partition, [name])
        return {key: row.get(name) for key, row in by_key.items()}

    def upsert(
        self, collection: str, batch: Batch, field: str, *, partition: str | None = None
    ) -> None:
        rows, _ = self._encoded_rows(collection, batch, field)
        self._upsert(collection, rows, partition)

    def insert(
        self, collection: str, batch: Batch, field: str, *, partition: str | None = None
    ) -> None:
        rows, schema = self._encoded_rows(collection, batch, field)
        if milvus_schema.key_field(schema).get("auto_id"):
            self._upsert(collection, rows, partition)
            return

        def insert(part: Sequence[Row]) -> None:
            attempts = count()

            def write(name: str, **options: Any) -> Any:
                # A second insert could create duplicates.
                method = self.client.upsert if next(attempts) else self.client.insert
                return method(name, list(part), **options)

            self._send(collection, write, partition_name=partition or "", retry_times=0)

        try:
            with translated(collection):
                in_fitting_parts(insert, rows)
        except StoreError:
            self._upsert(collection, rows, partition)

    def _encoded_rows(self, collection: str, batch: Batch, field: str) -> tuple[list[Row], Row]:
        """Return rows with their vectors as the collection stores them, and its description."""
        schema = self.client.describe_collection(collection)
        vectors = milvus_schema.form_of(schema, field).encode_rows(batch.vectors)
        rows = [{**row, field: vector} for row, vector in zip(batch.rows, vectors, strict=True)]
        return rows, schema

    def delete(self, collection: str, keys: Sequence[Key], *, partition: str | None = None) -> None:
        # By ids, pymilvus would not escape text keys.
        self._delete_in(collection, self._key_field(collection), keys, partition)

    def _delete_in(
        self, collection: str, field: str, values: Sequence[Key], partition: str | None = None
    ) -> None:
        for part in in_parts(values):
            self._delete(collection, is_one_of(field, part), partition)

    def _delete(self, collection: str, where: str, partition: str | None = None) -> None:
        self._send(collection, self.client.delete, filter=where, partition_name=partition)

    def _key_field(self, collection: str) -> str:
        return str(milvus_schema.key_field(self.client.describe_collection(collection))["name"])

    def _insertable(self, rows: Iterable[Row], schema: Row) -> list[Row]:
        return milvus_schema.insertable_rows(rows, schema, lite=self.is_lite)

    def _batch(self, schema: Row, field: str, keys: list[Key], by_key: dict[Key, Row]) -> Batch:
        form = milvus_schema.form_of(schema, field)
        rows = [by_key[key] for key in keys]
        stored_vectors = [row.pop(field) for row in rows]
        # Vectors of float32 come as arrays, those of half precision as bytes.
        if form.dtype != "float32":
            stored_vectors = [unpacked(stored, form.dtype) for stored in stored_vectors]

        vectors = np.empty((len(keys), form.width), np.float32)
        for number, stored in enumerate(stored_vectors):
            try:
                vectors[number] = stored
            except ValueError as error:
                # A cutover can rename collections between the description and the query.
                raise StoreError(
                    f"field {field!r} no longer has vectors of {form.width} numbers: another job "
                    "has moved the name to another collection: run this command again"
                ) from error

        return Batch(keys, form.joined(vectors), self._insertable(rows, schema))

    def _by_key(
        self,
        collection: str,
        key_field: str,
        keys: Sequence[Key],
        partition: str | None,
        fields: Sequence[str] = ("*",),
    ) -> dict[Key, Row]:
        by_key: dict[Key, Row] = {}
        missing = list(keys)
        while missing:
            rows = self._rows(collection, key_field, missing, partition, fields)
            by_key |= {row[key_field]: row for row in rows}
            # Milvus 2.3 counts duplicates of a key as rows and omits others for them.
            missing = [key for key in missing if key not in by_key] if rows else []
        return by_key

    def _rows(
        self,
        collection: str,
        key_field: str,
        keys: Sequence[Key],
        partition: str | None,
        fields: Sequence[str] = ("*",),
    ) -> list[Row]:
        parts = in_fitting_parts(
            lambda part: self._query(
                collection, is_one_of(key_field, part), list(fields), partition, **_AS_ARRAYS
            ),
            keys,
        )
        return [row for part in parts for row in part]

    def _upsert(
        self, collection: str, rows: Sequence[Row], partition: str | None = None, **options: Any
    ) -> None:
        def upsert(part: Sequence[Row]) -> Any:
            return self._send(
                collection,
                self.client.upsert,
                list(part),
                partition_name=partition or "",
                **options,
            )

        with translated(collection):
            in_fitting_parts(upsert, rows)

    def properties_of(self, collection: str) -> Row:
        properties: Row = self.client.describe_collection(collection)["properties"]
        return properties

    def write_property(self, collection: str, name: str, record: FrozenModel | None) -> None:
        # Milvus 2.3 cannot drop a property; an empty one means the same.
        self._alter_properties(collection, {name: record.to_json() if record else ""})

    def _alter_properties(self, collection: str, properties: dict[str, str]) -> None:
        # Milvus 2.3 removes no expired rows any more once
        # properties were altered without the time to live.
        seconds = (
            None if self.is_lite else self.properties_of(collection).get(milvus_schema.TTL_PROPERTY)
        )
        if seconds:
            properties = {milvus_schema.TTL_PROPERTY: str(seconds), **properties}
        # After a restart, Milvus 2.3 loses the latest change
        # of a collection's properties, and only that.
        for _ in range(1 if self.is_lite else 2):
            self._send(collection, self.client.alter_collection_properties, properties)

    def _ensure_loaded(self, collection: str) -> None:
        if self.client.get_load_state(collection)["state"].name == "Loaded":
            return
        # Milvus Lite opens with all collections released.
        if not self.is_lite:
            # A server says of a collection that is gone, too, that it is not loaded.
            if not self.exists(collection):
                raise CollectionNotFound(f"no collection or alias {collection!r}")
            raise StoreError(f"collection {collection!r} is not loaded: load it first")

        self._load(collection)

    def _load(self, collection: str, **settings: Any) -> None:
        """Load a collection, and wait for it.

        settings: of `_load_settings`. Raises WaitedTooLong.
        """
        self.client.load_collection(collection, **WITHOUT_WAITING, **settings)
        state = ""

        def share_loaded() -> Standing | None:
            nonlocal state
            loading = self.client.get_load_state(collection)
            state = loading["state"].name
            percent = int(loading.get("progress", 0))
            return Standing(f"{percent}% is loaded", 100 - percent) if state == "Loading" else None

        wait_until(f"the load of {collection!r}", share_loaded)
        if state != "Loaded":
            # The server has given up: this call raises its reason.
            with reported(f"the load of {collection!r}") as limit:
                self.client.load_collection(collection, timeout=limit, **settings)

    def _create_index(self, collection: str, index: IndexParams) -> None:
        with reported(f"the indexes of {collection!r}") as limit:
            self.client.create_index(collection, index, timeout=limit)

    def _create_loaded(self, collection: str, **options: Any) -> None:
        """Create a collection with its indexes, and load it."""
        with reported(f"the indexes and the load of the new collection {collection!r}") as limit:
            self.client.create_collection(collection, timeout=limit, **options)

    def _load_settings(self, collection: str) -> Row:
        """Return the arguments of load_collection with which a collection is loaded, where they are
        not the default.

        Milvus refuses to load a loaded collection with another number of replicas. The fields that
        are loaded are not known: no request returns them.
        """
        if self.is_lite or self.client.get_load_state(collection)["state"].name != "Loaded":
            return {}

        groups = sorted(
            replica.resource_group for replica in self.client.describe_replica(collection)
        )

        settings: Row = {}
        if len(groups) > 1:
            settings["replica_number"] = len(groups)

        distinct = list(dict.fromkeys(groups))
        # Milvus takes one group for all replicas, or one for each.
        if len(distinct) in (1, len(groups)) and distinct != [DEFAULT_GROUP]:
            settings["resource_groups"] = distinct
        return settings

    def _indexes(self, collection: str) -> list[Row]:
        return [
            self.client.describe_index(collection, name)
            for name in self.client.list_indexes(collection)
        ]
