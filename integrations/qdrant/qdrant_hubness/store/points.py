"""Reads and writes of points, by id, in order, acknowledged.

Ids are numbers and UUIDs, which Python cannot order among each other. So a collection counts as two
partitions, one for each kind of id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID

from qdrant_client import QdrantClient, models

from milvus_hubness import CollectionNotFound, LeaseLost, ServerUnavailable, StoreError
from milvus_hubness.extending import (
    PENDING,
    Batch,
    CollectionState,
    Fences,
    Key,
    MultiVectorFormat,
    StorageFormat,
    is_fence,
    read_states,
)
from qdrant_hubness.store import schema
from qdrant_hubness.store.limits import UNLIMITED, Limits, RecentLimits
from qdrant_hubness.store.properties import Properties
from qdrant_hubness.store.requests import (
    WHOLE_SERVER,
    PointsMissing,
    TooLarge,
    is_local,
    patiently,
    plain_client_of,
    translated,
    turn,
)
from qdrant_hubness.store.rows import LOCAL_UNITS, SERVER_UNITS, Form, in_order
from qdrant_hubness.store.sizes import BYTES_PER_NUMBER, in_parts, json_bytes

Of = TypeVar("Of", bound="QdrantPoints")
T = TypeVar("T")
Change = TypeVar("Change")

NUMBERS = "numbers"
UUIDS = "uuids"
PARTITIONS = (NUMBERS, UUIDS)
"""The partitions of every collection, in the order in which Qdrant pages through them."""

FIRST_UUID = "00000000-0000-0000-0000-000000000000"
LAST_UUID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
LAST_NUMBER = 2**64 - 1

KEYS_PER_PAGE = 10_000
"""Ids that one request returns or deletes."""

REQUEST_BYTES = 8_000_000
"""Bytes of JSON in one request or answer; a server takes 32 MB by default."""
ROW_BYTES = 512
"""Bytes of a point in an answer without its vectors, as an estimate for points not yet read."""

FEWEST_ROWS = 16
MOST_ROWS = 1_000
"""Fewest and most points in one request."""


@dataclass(frozen=True)
class Scroll:
    """Which points of a partition are read, in the order of their ids, and what of them."""

    after: Key | None = None
    """The id before the first."""
    upto: Key | None = None
    """The last id."""
    most: int = UNLIMITED
    """The number of points."""
    page: int = KEYS_PER_PAGE
    """The number of points that are read at once, if strict mode allows so many."""
    where: models.Filter | None = None
    with_payload: Any = False
    """Whether, or which part of it."""
    with_vectors: bool = False


ALL_IDS = Scroll()

SPLIT = {
    "upsert": "points",
    "update_vectors": "points",
    "set_payload": "points",
    "overwrite_payload": "points",
    "delete_payload": "points",
    "batch_update_points": "update_operations",
    "retrieve": "ids",
    "query_batch_points": "requests",
}
"""The argument of each method whose items can be sent in several requests."""

WRITES = {
    "upsert",
    "update_vectors",
    "set_payload",
    "overwrite_payload",
    "delete_payload",
    "batch_update_points",
    "delete",
}
"""Methods of the client that a fencing alias addresses."""
SURE = {"wait": True, "ordering": models.WriteOrdering.STRONG}
"""Arguments of a write that is carried out, in order, when the method returns."""


def partition_of(key: Key) -> str:
    """Return the partition of a key."""
    return NUMBERS if isinstance(key, int) else UUIDS


def _next(key: Key) -> Key | None:
    """Return the next possible id in the partition of `key`."""
    if isinstance(key, int):
        return key + 1 if key < LAST_NUMBER else None
    if key >= LAST_UUID:
        return None

    text = f"{int(key.replace('-', ''), 16) + 1:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def create_alias(alias: str, collection: str) -> models.CreateAliasOperation:
    return models.CreateAliasOperation(
        create_alias=models.CreateAlias(collection_name=collection, alias_name=alias)
    )


def drop_alias(alias: str) -> models.DeleteAliasOperation:
    return models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))


class QdrantPoints:
    """The methods of the store for single points.

    client: a QdrantClient, local or of a server, see `connect`.
    """

    def __init__(self, client: QdrantClient) -> None:
        self.client = plain_client_of(client)
        self.is_local = is_local(self.client)
        self.properties = Properties(self.client)
        self.units = LOCAL_UNITS if self.is_local else SERVER_UNITS
        self._reads: dict[str, Any] = {}
        """Arguments of reads that see all acknowledged writes."""

        if not self.is_local:
            self._reads["consistency"] = models.ReadConsistencyType.MAJORITY
        self._fences: Fences | None = None
        self._warned: set[str] = set()
        self._recent = RecentLimits()
        """Limits of collections that were described a moment ago."""
        self._ensured = RecentLimits()
        """Limits of collections that were ledgers a moment ago."""

    def ask(self, method: str, collection: str, /, **options: Any) -> Any:
        """Call a method of the client about a collection, and translate its errors.

        A request that is too large is sent in halves. Raises as `translated` does.
        """

        def send() -> Any:
            with turn(self.client):
                return getattr(self.client, method)(collection_name=name, **options)

        try:
            with self._addressed(method, collection) as name:
                return patiently(send, collection)
        except TooLarge as error:
            argument = SPLIT.get(method, "")
            items = options.get(argument)
            if not isinstance(items, list) or not items:
                raise
            if len(items) == 1:
                raise _unsendable(items[0], error) from error

        # Of a list of answers the caller gets one list; of acknowledgements, the last one.
        middle = len(items) // 2
        answers = [
            self.ask(method, collection, **options | {argument: half})
            for half in (items[:middle], items[middle:])
        ]
        return [*answers[0], *answers[1]] if isinstance(answers[0], list) else answers[1]

    def fenced(self: Of, fences: Fences) -> Of:
        """As Store.fenced. Properties are fenced by the token, see the module `properties`."""
        store = copy(self)
        store._fences = fences
        return store

    def _expect_lease(self) -> None:
        """Raise LeaseLost if this store has a lease that another job has taken."""
        if self._fences is not None:
            self._fences.check()

    def fence(self, collection: str, alias: str) -> None:
        """As Store.fence."""
        self.change_aliases([create_alias(alias, collection)], collection)

    def unfence(self, alias: str) -> None:
        """As Store.unfence."""
        if self._behind(alias):
            self.change_aliases([drop_alias(alias)], alias)

    def fences_of(self, collection: str) -> list[str]:
        """As Store.fences_of."""
        aliases = self._aliases(collection)
        return [each for each in aliases if aliases[each] == collection and is_fence(each)]

    def change_aliases(self, changes: Sequence[models.AliasOperations], needed: str) -> None:
        """Make these changes in one step of the database. needed: the name that they take to exist."""
        with turn(self.client), translated(needed):
            self.client.update_collection_aliases(change_aliases_operations=list(changes))

    @contextmanager
    def _addressed(self, method: str, collection: str) -> Iterator[str]:
        """Yield the name to send a request by: the fencing alias for a write.

        Raises LeaseLost if it is gone.
        """
        alias = ""
        if self._fences is not None and method in WRITES:
            alias = self._fences.alias_of(collection) or ""
        if alias == collection:
            alias = ""

        try:
            with translated(collection, alias):
                yield alias or collection
        except CollectionNotFound as error:
            # Assumes that the write did not happen: a server looks up the
            # name before it carries out anything. If the collection exists
            # and the fencing alias does not, another job has taken over.
            if not alias or not self.exists(collection):
                raise CollectionNotFound(f"no collection or alias {collection!r}") from error

            raise _lease_lost(collection) from error

    def exists(self, collection: str) -> bool:
        """As Store.exists."""
        return bool(self.ask("collection_exists", collection))

    def collection_names(self) -> list[str]:
        """As Store.collection_names."""
        with turn(self.client), translated(WHOLE_SERVER):
            return [collection.name for collection in self.client.get_collections().collections]

    def server_version(self) -> str:
        """As Store.server_version."""
        with translated(WHOLE_SERVER):
            version = str(self.client.info().version)
        return f"qdrant_local {version}" if self.is_local else f"qdrant {version}"

    def count(self, collection: str) -> int:
        """As Store.count."""
        return self._within_limits(collection, lambda limits: self._count(collection, limits))

    def _count(self, collection: str, limits: Limits, where: models.Filter | None = None) -> int:
        """Count points. Where strict mode forbids exact counts, this counts the ids."""
        if limits.allows_exact:
            return int(self.ask("count", collection, count_filter=where, exact=True).count)

        scroll = Scroll(where=where)
        pages = (self._records(collection, partition, limits, scroll) for partition in PARTITIONS)
        return sum(1 for page in pages for _ in page)

    def scan_keys(
        self,
        collection: str,
        *,
        limit: int,
        after: Key | None = None,
        partition: str | None = None,
        pending: str = "",
    ) -> list[Key]:
        """As Store.scan_keys."""
        where = None
        if pending:
            where = self._pending(collection, pending, self._described(collection))

        scroll = Scroll(after=after, most=limit, where=where)

        def read(limits: Limits) -> list[Key]:
            named = self._named(partition, after)
            return [record.id for record in self._records(collection, named, limits, scroll)]

        return self._within_limits(collection, read)

    def above(self, key: Key, step: int) -> Key | None:
        """As Store.above."""
        if isinstance(key, int):
            number = key + 2**step - 1
            return number if number < LAST_NUMBER else None

        number = UUID(key).int + 2**step - 1
        return str(UUID(int=number)) if number < UUID(LAST_UUID).int else None

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
        """As Store.scan."""
        form = self.form(collection, field)
        scroll = Scroll(
            after=after,
            upto=upto,
            most=UNLIMITED if limit is None else limit,
            page=self._rows_per_request(form),
            with_payload=True,
            with_vectors=True,
        )
        pages = self._pages(collection, self._named(partition, after), form.limits, scroll)
        # Page by page, as points take far more memory and work of the garbage collector than rows.
        return Batch.joined([form.batch(page) for page in pages] or [form.batch([])])

    def get(
        self, collection: str, keys: Sequence[Key], field: str, *, partition: str | None = None
    ) -> Batch:
        """As Store.get."""
        return self._retrieve(collection, keys, self.form(collection, field))

    def values(
        self,
        collection: str,
        name: str,
        keys: Sequence[Key],
        *,
        partition: str | None = None,
        are_numbers: bool = True,
    ) -> dict[Key, Any]:
        """As Store.values: any point may have any key in its payload."""
        rows = min(MOST_ROWS, self._limits(collection).rows_per_read)
        records = self._retrieved(collection, keys, rows, with_payload=[name], with_vectors=False)
        return {record.id: (record.payload or {}).get(name) for record in records}

    def upsert(
        self, collection: str, batch: Batch, field: str, *, partition: str | None = None
    ) -> None:
        """As Store.upsert."""
        form = self.form(collection, field)
        # The points of one request at a time, as in `scan`.
        for start in range(0, len(batch), MOST_ROWS):
            rows = batch.take(range(start, min(start + MOST_ROWS, len(batch))))
            for points in self._parts(form.points(rows), form.limits):
                self.ask("upsert", collection, points=points, **SURE)

    def insert(
        self, collection: str, batch: Batch, field: str, *, partition: str | None = None
    ) -> None:
        """As Store.insert: an upsert costs Qdrant no more."""
        self.upsert(collection, batch, field, partition=partition)

    def put_bias_keys(self, collection: str, batch: Batch, keys: Sequence[str]) -> int:
        """As BiasKeys.put_bias_keys."""
        payloads = [
            (key, {name: row[name] for name in keys})
            for key, row in zip(batch.keys, batch.rows, strict=True)
        ]
        gone: set[Key] = set()
        for some_payloads in self._parts(payloads, self._limits(collection)):
            gone |= self._set_payloads(collection, dict(some_payloads))
        return len(batch) - len(gone)

    def delete(self, collection: str, keys: Sequence[Key], *, partition: str | None = None) -> None:
        """As Store.delete."""
        for start in range(0, len(keys), KEYS_PER_PAGE):
            selector = models.PointIdsList(points=list(keys[start : start + KEYS_PER_PAGE]))
            self.ask("delete", collection, points_selector=selector, **SURE)

    def form(self, collection: str, field: str) -> Form:
        """Return the form in which points of the collection are read and written with this vector
        as the field.
        """
        described = self._described(collection)
        normalised = schema.normalised(described, self.units)
        limits = Limits.of(described)
        state = self._states(collection, described).get(field)
        params = schema.dense(described)[field]
        are_multi = params.multivector_config is not None
        if state is not None and not state.codec.leaves_vectors:
            return Form(field, state.codec.form, state, normalised, limits, are_multi)

        format_class = MultiVectorFormat if are_multi else StorageFormat
        plain = format_class(schema.DTYPES[params.datatype], params.size)
        return Form(field, plain, None, normalised, limits, are_multi)

    def index_payload(self, collection: str, key: str, field_schema: Any) -> None:
        """Create a payload index, so that strict mode allows filters and formulas with the key.

        The local mode has no indexes.
        """
        if not self.is_local:
            self.ask("create_payload_index", collection, field_name=key, field_schema=field_schema)

    def make_collection(self, collection: str, properties: dict[str, str], **config: Any) -> None:
        """Create a collection with these properties. config: of create_collection."""
        if self.properties.in_metadata:
            self.ask("create_collection", collection, metadata=properties, **config)
            return

        # The properties come first, so that no client sees the collection without them.
        self.properties.alter(collection, properties)
        self.ask("create_collection", collection, **config)

    # -- helpers ---------------------------------------------------------------------------

    def _described(self, collection: str) -> models.CollectionInfo:
        described: models.CollectionInfo = self.ask("get_collection", collection)
        self._recent.put(collection, Limits.of(described))
        return described

    def _limits(self, collection: str) -> Limits:
        return Limits.of(self._described(collection))

    def _within_limits(self, collection: str, read: Callable[[Limits], T]) -> T:
        """Return what `read` returns, given the limits of the collection.

        Limits that were read a moment ago save a request. They may have changed since: if the
        server refuses what they allow, this reads again within the present ones.
        """
        recent = self._recent.get(collection)
        if recent is not None:
            try:
                return read(recent)
            except ServerUnavailable:
                raise
            except StoreError:
                # Assumes nothing: the read begins again, and fails for good if it fails again.
                self._recent.forget(collection)
        return read(self._limits(collection))

    def _real_name(self, collection: str) -> str:
        return self._behind(collection) or collection

    def _behind(self, alias: str) -> str | None:
        return self._aliases(alias).get(alias)

    def _aliases(self, name: str) -> dict[str, str]:
        """Return all aliases, each with its collection. name: whose it is that messages name."""
        with turn(self.client), translated(name):
            aliases = self.client.get_aliases().aliases
        return {entry.alias_name: entry.collection_name for entry in aliases}

    def _alter(self, collection: str, changed: Mapping[str, str]) -> None:
        """Change these properties of a collection. Raises LeaseLost."""
        name = self._real_name(collection)
        token = 0
        if self._fences is not None:
            token = self._fences.token_of(name)
            alias = self._fences.alias_of(name)
            # Who takes over drops the alias first.
            if alias is not None and self._behind(alias) != name:
                raise _lease_lost(collection)

        self.properties.alter(name, changed, token)

    def _properties(self, collection: str, described: Any) -> dict[str, str]:
        """Return the properties of a collection, given its name or an alias."""
        name = collection if self.properties.in_metadata else self._real_name(collection)
        return self.properties.of(name, described)

    def _states(self, collection: str, described: Any) -> dict[str, CollectionState]:
        return read_states(self._properties(collection, described), collection)

    def _retrieve(self, collection: str, keys: Sequence[Key], form: Form) -> Batch:
        rows = self._rows_per_request(form)
        records = self._retrieved(collection, keys, rows, with_payload=True, with_vectors=True)
        return form.batch(in_order(records, keys))

    def _retrieved(
        self, collection: str, keys: Sequence[Key], rows: int, **options: Any
    ) -> Iterator[Any]:
        """Yield the points of these keys, `rows` of them by each request."""
        for start in range(0, len(keys), rows):
            some_keys = list(keys[start : start + rows])
            yield from self.ask("retrieve", collection, ids=some_keys, **options, **self._reads)

    def _records(
        self, collection: str, partition: str, limits: Limits, scroll: Scroll = ALL_IDS
    ) -> Iterator[Any]:
        """Yield the first points as `_pages` does, one by one."""
        return chain.from_iterable(self._pages(collection, partition, limits, scroll))

    def _pages(
        self, collection: str, partition: str | None, limits: Limits, scroll: Scroll
    ) -> Iterator[list[Any]]:
        """Yield the points of a partition that a scroll reads. partition: None for both."""
        upto = scroll.upto
        after = scroll.after
        left = scroll.most
        while left > 0:
            size = min(left, scroll.page, limits.rows_per_read)
            records = self._page(collection, partition, after, size, scroll)
            if upto is not None and records and records[-1].id > upto:
                yield [record for record in records if record.id <= upto]
                return

            yield records
            if len(records) < size or (upto is not None and records[-1].id == upto):
                return

            left -= len(records)
            after = records[-1].id

    def _page(
        self,
        collection: str,
        partition: str | None,
        after: Key | None,
        limit: int,
        scroll: Scroll,
    ) -> list[Any]:
        """Return the first points of a partition after `after`; of both, if it is None."""
        first: Key | None = FIRST_UUID if partition == UUIDS else 0
        if after is not None:
            first = _next(after)
            # Numbers come before UUIDs.
            if first is None and partition is None and partition_of(after) == NUMBERS:
                first = FIRST_UUID
        if first is None:
            return []

        records, _ = self.ask(
            "scroll",
            collection,
            scroll_filter=scroll.where,
            limit=limit,
            offset=first,
            with_payload=scroll.with_payload,
            with_vectors=scroll.with_vectors,
            **self._reads,
        )
        if partition is None or (records and partition_of(records[-1].id) == partition):
            return list(records)

        # The page has reached the next partition.
        return [record for record in records if partition_of(record.id) == partition]

    @staticmethod
    def _named(partition: str | None, after: Key | None) -> str:
        if partition is not None:
            return partition
        return NUMBERS if after is None else partition_of(after)

    def _pending(self, collection: str, epoch_field: str, described: Any) -> models.Filter:
        """Return the filter that selects points whose bias is not computed yet."""
        for state in self._states(collection, described).values():
            if state.codec.epoch_field == epoch_field and state.codec.leaves_vectors:
                in_use = schema.numbered(epoch_field, state.profile.generation)
                return models.Filter(must_not=[in_use])

        marked = models.FieldCondition(key=epoch_field, match=models.MatchValue(value=PENDING))
        return models.Filter(must=[marked])

    # -- changes of existing points -------------------------------------------------------------
    #
    # Each returns the keys of the points that are gone; all others have the change.

    def _until_acknowledged(
        self, collection: str, changes: Mapping[Key, Change], send: Callable[[list[Change]], Any]
    ) -> set[Key]:
        """Send the changes of points until Qdrant acknowledges them.

        A request that names a missing point is carried out in part, and no answer says which: then
        none of its points counts as changed. Those that still exist are sent again, in halves,
        which lose less to the next deletion. Only a request about one point is carried out whole or
        not at all.
        """
        gone: set[Key] = set()
        waiting = [list(changes)] if changes else []
        while waiting:
            keys = waiting.pop()
            try:
                send([changes[key] for key in keys])
            except PointsMissing:
                existing = self._existing(collection, keys) if len(keys) > 1 else set()
                gone.update(key for key in keys if key not in existing)
                left = [key for key in keys if key in existing]
                middle = len(left) // 2
                waiting += [half for half in (left[:middle], left[middle:]) if half]

        return gone

    def _existing(self, collection: str, keys: Sequence[Key]) -> set[Key]:
        records = self.ask(
            "retrieve", collection, ids=list(keys), with_payload=False, **self._reads
        )
        return {record.id for record in records}

    def _set_payloads(self, collection: str, payloads: Mapping[Key, dict[str, Any]]) -> set[Key]:
        """Set fields of each point to values of its own, in
        one request: it ends at the operation that fails.
        """
        operations = {
            key: models.SetPayloadOperation(
                set_payload=models.SetPayload(payload=payload, points=[key])
            )
            for key, payload in payloads.items()
        }

        def send(some_operations: list[models.SetPayloadOperation]) -> None:
            self.ask("batch_update_points", collection, update_operations=some_operations, **SURE)

        return self._until_acknowledged(collection, operations, send)

    def _rows_per_request(self, form: Form) -> int:
        """Return how many points to read at once."""
        bytes_per_row = ROW_BYTES + BYTES_PER_NUMBER * form.form.width
        rows = min(MOST_ROWS, REQUEST_BYTES // bytes_per_row)
        return min(form.limits.rows_per_read, max(FEWEST_ROWS, rows))

    def _parts(self, items: Sequence[T], limits: Limits) -> Iterator[list[T]]:
        """Yield what is written in parts that a request can hold."""
        return in_parts(items, rows=min(MOST_ROWS, limits.rows_per_write), most_bytes=REQUEST_BYTES)


def _unsendable(item: Any, error: TooLarge) -> StoreError:
    """Return the error about an item that is too large for a request of its own."""
    what = f"point {item.id!r}" if hasattr(item, "id") else "one item"
    problem = f"{error}, for {what} alone, of about {json_bytes(item):,} bytes"
    if "strict mode" in problem:
        return StoreError(problem)

    return StoreError(
        f"{problem}: raise service.max_request_size_mb in the server's configuration, or shorten "
        "the payload"
    )


def _lease_lost(collection: str) -> LeaseLost:
    return LeaseLost(
        f"the lease on {collection!r} was lost: another job has taken over, so this write was not "
        "made"
    )
