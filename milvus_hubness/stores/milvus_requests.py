"""Reads and writes of rows in Milvus collections, by key, with strong consistency."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from itertools import chain, repeat
from typing import Any, TypeVar

import grpc
import numpy as np
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.codec.arrays import Floats, unpacked
from milvus_hubness.codec.base import PENDING
from milvus_hubness.errors import LeaseLost, StoreError
from milvus_hubness.state import FrozenModel
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.milvus_server import (
    DUPLICATES_PER_KEY,
    FEW_KEYS,
    KEYS_PER_PAGE,
    PAUSES,
    ROWS_PER_REQUEST,
    in_fitting_parts,
    in_parts,
    is_missing,
    is_one_of,
    is_rate_limited,
    is_too_large,
    literal,
    may_arrive,
    translated,
)
from milvus_hubness.stores.records import Fences, is_fence

GREATEST_NUMBER, GREATEST_CHARACTER = 2**63 - 1, "\U0010ffff"
_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True", "consistency_level": "Strong"}
_AS_ARRAYS = {"strict_float32": True}
"""Makes pymilvus return float vectors as slices of one array, in a thousandth of the time that lists take."""


Of = TypeVar("Of", bound="MilvusRequests")
T = TypeVar("T")


class MilvusRequests:
    """Reads and writes of rows. client: a plain MilvusClient; see `connect`.

    Milvus Lite opens with every collection released, so there a collection is loaded at its first read. On a
    server, a released collection is an error.
    """

    def __init__(self, client: MilvusClient) -> None:
        self.client = client
        self._version = str(client.get_server_version())
        self.is_lite = self._version.startswith("milvus_lite")
        self._ready_ledgers: set[str] = set()
        self._fences: Fences | None = None

    def fenced(self: Of, fences: Fences) -> Of:
        store = copy(self)
        store._fences = fences
        return store

    def fence(self, collection: str, alias: str) -> None:
        with translated(collection):
            self.client.create_alias(collection, alias, retry_times=0)

    def unfence(self, alias: str) -> None:
        # Milvus 2.3 clears the name caches of its proxies before it drops the alias. A proxy that asked in
        # between still has the alias, until the cache is cleared again.
        for _ in range(1 if self.is_lite else 2):
            with suppress(MilvusException):
                self.client.drop_alias(alias)
        if self.exists(alias):
            raise StoreError(f"the fencing alias {alias!r} could not be dropped: drop it and try again")

    def _all_aliases(self, schema: dict[str, Any]) -> list[str]:
        # Milvus 2.3 looks for aliases in the default database; Milvus Lite does not describe them.
        if self.is_lite:
            return list(self.client.list_aliases(schema["collection_name"])["aliases"])
        return list(schema["aliases"])

    def drop(self, collection: str) -> None:
        with translated(collection):
            if self.client.has_collection(collection):
                # A late request may have created one.
                for alias in filter(is_fence, self._all_aliases(self.client.describe_collection(collection))):
                    self.unfence(alias)
            self.client.drop_collection(collection)

    def _send(self, collection: str, write: Callable[..., T]) -> T:
        """Return `write(name, **options)`: one request of pymilvus, through the fencing alias if there is one.

        pymilvus repeats a failed request, and the first one may arrive after the second and after later
        writes. So a fenced write is sent again only when the first cannot arrive any more. Raises pymilvus's
        errors, and LeaseLost if the alias is gone.
        """
        if self._fences is None or self._fences.alias_of(collection) is None:
            return write(collection)
        pauses = iter(PAUSES)
        while True:
            name = self._fences.alias_of(collection)
            try:
                return write(name, retry_times=0)
            except (MilvusException, grpc.RpcError) as error:
                if is_missing(error) and name != self._fences.alias_of(collection):
                    continue  # Another thread has renewed it.
                if is_missing(error) and self.exists(collection):
                    raise LeaseLost(
                        f"the lease on {collection!r} was lost: another job has taken over, and the database "
                        "refused this write"
                    ) from error
                pause = next(pauses, None)
                if pause is None or not (is_rate_limited(error) or may_arrive(error)):
                    raise
                if may_arrive(error):
                    self._fences.renew(collection)
            time.sleep(pause)

    def exists(self, collection: str) -> bool:
        with translated(collection):
            return bool(self.client.has_collection(collection))

    def server_version(self) -> str:
        return self._version

    def keys(self, collection: str, *, partition: str | None = None, pending: str | None = None) -> list[Key]:
        return self._keys(collection, f"{pending} == {PENDING}" if pending else "", partition)

    def scan_keys(
        self, collection: str, *, after: Key | None = None, limit: int, partition: str | None = None
    ) -> list[Key]:
        with translated(collection):
            key_field = self._key_field(collection)
            return next(self._pages(collection, key_field, [key_field], limit, after, None, partition))[0]

    def scan(
        self,
        collection: str,
        field: str,
        *,
        after: Key | None = None,
        upto: Key | None = None,
        limit: int | None = None,
        partition: str | None = None,
    ) -> Batch:
        with translated(collection):
            schema = self.client.describe_collection(collection)
            key_field = milvus_schema.key_field(schema)["name"]
            size = min(limit or ROWS_PER_REQUEST, ROWS_PER_REQUEST)
            pages = self._pages(collection, key_field, ["*"], size, after, upto, partition)
            keys, by_key = next(pages)
            for more_keys, more in () if limit is not None else pages:
                keys += more_keys
                by_key |= more
        return self._batch(schema, field, keys, by_key)

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
    ) -> Iterator[tuple[list[Key], dict[Key, dict[str, Any]]]]:
        """Yield the ordered keys and the rows of pages of at most `size` rows with after < key ≤ upto; the
        last one is empty or ends with `upto`.
        """
        while True:
            rows = self._fitting_page(collection, key_field, output_fields, size, after, upto, partition, where)
            by_key = {row[key_field]: row for row in rows}
            keys = sorted(by_key)
            if keys and after is not None and keys[0] <= after:
                raise StoreError(f"the server did not page {collection!r} in key order")
            yield keys, by_key
            if not keys or keys[-1] == upto:
                return
            after = keys[-1]

    def above(self, key: Key, step: int) -> Key | None:
        if isinstance(key, int):
            number = key + 2**step - 1
            return number if number < GREATEST_NUMBER else None
        if step > len(key):
            return None
        prefix, raised = key[: len(key) - step], key[len(key) - step : len(key) - step + 1]
        if not raised or raised == GREATEST_CHARACTER:
            return key
        return prefix + ("\ue000" if raised == "\ud7ff" else chr(ord(raised) + 1))

    def count(self, collection: str) -> int:
        self._ensure_loaded(collection)
        return self._count(collection)

    def _count(self, collection: str, where: str = "", consistency_level: str = "Strong") -> int:
        """Return the number of rows that `where` picks."""
        with translated(collection):
            rows = self.client.query(
                collection, filter=where, output_fields=["count(*)"], consistency_level=consistency_level
            )
        return int(rows[0]["count(*)"]) if rows else 0

    def get(self, collection: str, keys: Sequence[Key], field: str, *, partition: str | None = None) -> Batch:
        with translated(collection):
            schema = self.client.describe_collection(collection)
            key_field = milvus_schema.key_field(schema)["name"]
            by_key = self._by_key(collection, key_field, keys, partition)
        return self._batch(schema, field, [key for key in keys if key in by_key], by_key)

    def upsert(self, collection: str, batch: Batch, field: str, *, partition: str | None = None) -> None:
        rows, _ = self._to_be_stored(collection, batch, field)
        self._upsert(collection, rows, partition)

    def rewrite(
        self, collection: str, batch: Batch, field: str, changed: Sequence[str], *, partition: str | None
    ) -> None:
        # Few versions can replace some fields of a row, and in none does it cost less than the whole row.
        self.upsert(collection, batch, field, partition=partition)

    def insert(self, collection: str, batch: Batch, field: str, *, partition: str | None = None) -> None:
        rows, schema = self._to_be_stored(collection, batch, field)
        if milvus_schema.key_field(schema).get("auto_id"):
            self._upsert(collection, rows, partition)
            return

        def append(part: Sequence[dict[str, Any]]) -> Any:
            # pymilvus inserts once: a repeated insert could create duplicates.
            methods = chain([self.client.insert], repeat(self.client.upsert))
            return self._send(
                collection,
                lambda name, **_: next(methods)(name, list(part), partition_name=partition or "", retry_times=0),
            )

        try:
            with translated(collection):
                in_fitting_parts(append, rows)
        except StoreError:
            self._upsert(collection, rows, partition)

    def _to_be_stored(self, collection: str, batch: Batch, field: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the rows as pymilvus takes them, and the collection's schema."""
        with translated(collection):
            schema = self.client.describe_collection(collection)
        stored = milvus_schema.form_of(schema, field).encode_rows(batch.vectors)
        rows = [{**row, field: vector} for row, vector in zip(batch.rows, stored, strict=True)]
        return rows, schema

    def delete(self, collection: str, keys: Sequence[Key], *, partition: str | None = None) -> None:
        with translated(collection):
            # By ids, pymilvus would not escape text keys.
            self._delete_in(collection, self._key_field(collection), keys, partition)

    def _delete_in(self, collection: str, field: str, values: Sequence[Key], partition: str | None = None) -> None:
        """Delete the rows with these values of a field."""
        with translated(collection):
            for part in in_parts(values):
                self._delete(collection, is_one_of(field, part), partition)

    def _delete(self, collection: str, chosen: str, partition: str | None = None) -> None:
        self._send(
            collection,
            lambda name, **options: self.client.delete(name, filter=chosen, partition_name=partition, **options),
        )

    def _key_field(self, collection: str) -> str:
        return str(milvus_schema.key_field(self.client.describe_collection(collection))["name"])

    def _keys(self, collection: str, where: str, partition: str | None = None) -> list[Key]:
        """Return keys in one request if they are few, or else in key-ordered pages."""
        self._ensure_loaded(collection)
        with translated(collection):
            key_field = self._key_field(collection)
            few = self.client.query(
                collection,
                filter=where,
                output_fields=[key_field],
                partition_names=[partition] if partition else None,
                limit=FEW_KEYS * DUPLICATES_PER_KEY,
                consistency_level="Strong",
            )
            if len(few) < FEW_KEYS:
                return sorted({row[key_field] for row in few})
            # Pages have the collection's consistency level, not that of the request: they show what the
            # request before them has seen.
            pages = self._pages(collection, key_field, [key_field], KEYS_PER_PAGE, partition=partition, where=where)
            return [key for keys, _ in pages for key in keys]

    def _fitting_page(
        self,
        collection: str,
        key_field: str,
        output_fields: list[str],
        limit: int,
        after: Key | None,
        upto: Key | None,
        partition: str | None,
        where: str,
    ) -> list[dict[str, Any]]:
        """Return the first rows with after < key ≤ upto; the limit is halved until the page fits the message limit."""
        bounds = [
            f"{key_field} > {literal(after)}" if after is not None else "",
            f"{key_field} <= {literal(upto)}" if upto is not None else "",
        ]
        while True:
            try:
                return list(
                    self.client.query(
                        collection,
                        filter=" and ".join(filter(None, [*bounds, where])),
                        output_fields=output_fields,
                        partition_names=[partition] if partition else None,
                        limit=limit,
                        **_IN_KEY_ORDER,
                        **_AS_ARRAYS,
                    )
                )
            except (MilvusException, grpc.RpcError) as error:
                if limit < 2 or not is_too_large(error):
                    raise
            limit //= 2

    @staticmethod
    def _batch(schema: dict[str, Any], field: str, keys: list[Key], by_key: dict[Key, dict[str, Any]]) -> Batch:
        form = milvus_schema.form_of(schema, field)
        rows = [by_key[key] for key in keys]
        vectors = np.empty((len(keys), form.width), np.float32)
        for i, row in enumerate(rows):
            vector = unpacked(row.pop(field), form.dtype)
            try:
                vectors[i] = vector
            except ValueError as error:
                # A cutover can rename collections between the description and the query.
                raise StoreError(
                    f"field {field!r} no longer has vectors of {form.width} numbers: another job has "
                    "moved the name to another collection: run this command again"
                ) from error
        return Batch(keys, form.joined(vectors), milvus_schema.as_written(rows, schema))

    def _by_key(
        self, collection: str, key_field: str, keys: Sequence[Key], partition: str | None
    ) -> dict[Key, dict[str, Any]]:
        by_key: dict[Key, dict[str, Any]] = {}
        missing = list(keys)
        while missing:
            rows = self._rows(collection, key_field, missing, partition)
            by_key |= {row[key_field]: row for row in rows}
            # Milvus 2.3 counts duplicates of a key as rows and cuts others off for them: ask again.
            missing = [key for key in missing if key not in by_key] if rows else []
        return by_key

    def _rows(
        self, collection: str, key_field: str, keys: Sequence[Key], partition: str | None
    ) -> list[dict[str, Any]]:
        parts = in_fitting_parts(
            lambda part: list(
                self.client.query(
                    collection,
                    filter=is_one_of(key_field, part),
                    output_fields=["*"],
                    partition_names=[partition] if partition else None,
                    consistency_level="Strong",
                    **_AS_ARRAYS,
                )
            ),
            keys,
        )
        return [row for part in parts for row in part]

    def _whole(self, collection: str, field: str, keys: Sequence[Key]) -> tuple[Floats, list[dict[str, Any]]]:
        """Return the vectors and the other fields of many rows."""
        parts = [self.get(collection, part, field) for part in in_parts(keys)]
        vectors = np.concatenate([part.vectors for part in parts]) if parts else np.empty((0, 0), np.float32)
        return vectors, [row for part in parts for row in part.rows]

    def _upsert(
        self, collection: str, rows: Sequence[dict[str, Any]], partition: str | None = None, **how: Any
    ) -> None:
        def upsert(part: Sequence[dict[str, Any]]) -> Any:
            return self._send(
                collection,
                lambda name, **options: self.client.upsert(
                    name, list(part), partition_name=partition or "", **how, **options
                ),
            )

        with translated(collection):
            in_fitting_parts(upsert, rows)

    def write_property(self, collection: str, name: str, record: FrozenModel | None) -> None:
        # Milvus 2.3 cannot drop a property; an empty one means the same.
        with translated(collection):
            self._alter_properties(collection, {name: record.model_dump_json() if record else ""})

    def _alter_properties(self, collection: str, properties: dict[str, str]) -> None:
        """Change these properties; all others stay."""
        # After a restart, Milvus 2.3 loses the latest change of a collection's properties, and only that.
        for _ in range(1 if self.is_lite else 2):
            self._send(
                collection, lambda name, **options: self.client.alter_collection_properties(name, properties, **options)
            )

    def _ensure_loaded(self, collection: str) -> None:
        with translated(collection):
            state = self.client.get_load_state(collection)["state"].name
            if state == "Loaded":
                return
            if not self.is_lite:
                raise StoreError(f"collection {collection!r} is not loaded: load it first")
            self.client.load_collection(collection)
