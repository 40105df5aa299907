"""Query banks, query samples and ledgers as Milvus collections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import numpy as np
from pymilvus import CollectionSchema, DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Metric
from milvus_hubness.correction.state import BankReference
from milvus_hubness.errors import CollectionExists, DimensionMismatch
from milvus_hubness.jobs.store.generations import (
    LONGEST_SOURCE,
    BankGenerations,
    Batch,
    Row,
)
from milvus_hubness.jobs.store.helpers import HelperLists, expect_helpers
from milvus_hubness.jobs.store.ownership import (
    QUERY_SAMPLES_PROPERTY,
    CollectionId,
    owner_in,
)
from milvus_hubness.jobs.store.records import QuerySamples, Record, Sample, SamplesOf
from milvus_hubness.milvus.filters import is_one_of, literal
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.requests import MilvusRequests
from milvus_hubness.milvus.store.server import in_parts, is_missing, translated

QUERIES_PER_PAGE = 8_000
"""Rows of a bank that one request reads."""

SAMPLES_PER_REQUEST = 1_000
"""Samples that one request writes."""

LONGEST_ID = 512
"""Bytes of the id of a bank's row, and of its generation."""


def bank_rows(generation: str, parts: Sequence[str] = (), before: int | None = None) -> str:
    """Return the filter that picks a generation's rows of these parts, or of all, that were added
    before this Unix time, or whenever.
    """
    where = [f"generation == {literal(generation)}"]
    if parts:
        where.append(is_one_of("part", parts))
    if before is not None:
        where.append(f"added_at < {before}")
    return " and ".join(where)


class OwnCollections(MilvusRequests):
    """Collections that this package creates for itself."""

    def _ensure(
        self,
        collection: str,
        schema: CollectionSchema,
        property_name: str,
        kind: str,
        value: str = "1",
    ) -> Row:
        """Create, index and load a collection, as far as an
        interrupted call left it undone; return its description.
        """
        if not self.client.has_collection(collection):
            self._create(collection, schema, property_name, value)
        described: Row = self.client.describe_collection(collection)
        if property_name not in described["properties"]:
            raise CollectionExists(
                f"{collection!r} exists already and is no {kind}: rename it first"
            )

        self._serve_flat(collection, "IP")
        return described

    def _create(
        self, collection: str, schema: CollectionSchema, property_name: str, value: str = "1"
    ) -> None:
        self.client.create_collection(
            collection, schema=schema, properties={property_name: value}, consistency_level="Strong"
        )

    def _serve_flat(self, collection: str, metric: str) -> None:
        """Index the field `vector` exactly and load the collection, where that is not done yet."""
        if not self.client.list_indexes(collection):
            self._create_index(collection, milvus_schema.flat_index("vector", metric))
        if self.client.get_load_state(collection)["state"].name != "Loaded":
            self._load(collection)


class MilvusBanks(OwnCollections, BankGenerations):
    database = "milvus"
    bank_field = "vector"

    def _make_bank(self, collection: str, dim: int) -> None:
        schema = MilvusClient.create_schema(
            description="query bank of milvus_hubness", enable_dynamic_field=True
        )
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=LONGEST_ID)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("generation", DataType.VARCHAR, max_length=LONGEST_ID)
        schema.add_field("part", DataType.VARCHAR, max_length=LONGEST_ID)
        schema.add_field("number", DataType.INT64)
        schema.add_field("source", DataType.VARCHAR, max_length=LONGEST_SOURCE)
        schema.add_field("added_at", DataType.INT64, description="Unix time, seconds")
        with translated(collection):
            self._create(collection, schema, self.marker)

    def _serve_bank(self, collection: str, metric: Metric) -> None:
        try:
            self._serve_flat(collection, metric)
        except MilvusException:
            # Another process may have built the index meanwhile.
            if not self.client.list_indexes(collection):
                raise

            self._serve_flat(collection, metric)

    def _describe_bank(self, collection: str) -> tuple[int, bool]:
        schema = self.client.describe_collection(collection)
        vector = milvus_schema.fields_by_name(schema).get("vector")
        return int(vector["params"]["dim"]) if vector else 0, self.marker in schema["properties"]

    def _read_bank_rows(self, reference: BankReference, parts: Sequence[str] = ()) -> Batch:
        self._ensure_loaded(reference.collection)
        where = bank_rows(reference.generation, parts)
        with ThreadPoolExecutor(1, "bank") as pool:
            # The context has the caller's deadline.
            counting = pool.submit(copy_context().run, self._count, reference.collection, where)
            schema = self.client.describe_collection(reference.collection)
            keys: list[Key] = []
            by_key: dict[Key, Row] = {}
            for page_keys, page in self._pages(
                reference.collection, "id", ["*"], QUERIES_PER_PAGE, where=where
            ):
                keys += page_keys
                by_key |= page
                self.expect_bounded(reference, len(keys))
                # The empty page after the last one need not be read.
                if len(keys) == counting.result():
                    break

        return self._batch(schema, "vector", keys, by_key)

    def _delete_bank_rows(
        self,
        collection: str,
        generation: str,
        *,
        part: str | None = None,
        before: int | None = None,
    ) -> None:
        where = bank_rows(generation, [part] if part else [], before)
        self.client.delete(collection, filter=where)

    def _first_rows(self, collection: str) -> Iterator[Row]:
        self._ensure_loaded(collection)
        fields = ["id", "generation", "part", "added_at"]
        for _, page in self._pages(collection, "id", fields, QUERIES_PER_PAGE, where="number == 0"):
            yield from page.values()

    def _all_properties(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for name in self.client.list_collections():
            try:
                properties = self.client.describe_collection(name)["properties"]
            except MilvusException as error:
                # Some may be dropped meanwhile.
                if not is_missing(error):
                    raise
            else:
                yield name, properties


def put_samples(
    client: MilvusClient,
    target: SamplesOf,
    samples: Sequence[Sample],
    timeout: float | None = None,
) -> None:
    """Write samples, each into its place.

    Raises as the client does, and StateError if another collection is named.
    """
    expect_helpers(MilvusLedger(client), [target.helper], target.owner)

    # Of the samples of one place, the last one is written.
    rows = {}
    for sample in samples:
        rows[sample.place] = {
            "place": sample.place,
            "sample": sample.number,
            "queried_at": sample.at,
            "vector": sample.vector,
        }

    client.upsert(target.helper.collection, list(rows.values()), timeout=timeout)


class MilvusQuerySamples(OwnCollections):
    list_helpers: Callable[[CollectionId, Iterable[str]], None]
    listed_helpers: Callable[[CollectionId], frozenset[str]]

    def create_query_samples(self, samples_collection: str, owner: CollectionId, dim: int) -> None:
        description = "live queries sampled by milvus_hubness"
        schema = MilvusClient.create_schema(description=description, enable_dynamic_field=False)
        schema.add_field("place", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("sample", DataType.INT64)
        schema.add_field("queried_at", DataType.INT64, description="Unix time, seconds")

        value = owner.model_dump_json()
        was_there = self.exists(samples_collection)
        if not was_there:
            # Before it exists: what exists and is not listed, a stranger may have made.
            self.list_helpers(owner, [samples_collection])
        described = self._ensure(
            samples_collection, schema, QUERY_SAMPLES_PROPERTY, "collection of samples", value
        )

        samples_of = owner_in(described["properties"], QUERY_SAMPLES_PROPERTY)
        if samples_of is None or not samples_of.is_same(owner):
            raise CollectionExists(
                f"{samples_collection!r} has the query samples of another collection than "
                f"{owner.name!r}: rename it"
            )

        if was_there and samples_collection not in self.listed_helpers(owner):
            raise CollectionExists(
                f"{samples_collection!r} exists, and the ledger does not list it as a collection of "
                f"{owner.name!r}: drop it, or rename it"
            )

        stored_dim = int(milvus_schema.fields_by_name(described)["vector"]["params"]["dim"])
        if stored_dim != dim:
            raise DimensionMismatch(
                f"{samples_collection!r} holds {stored_dim}-d samples, these queries have {dim} "
                "dimensions"
            )

    def read_query_samples(self, samples_collection: str, places: int) -> QuerySamples:
        none = np.empty(0, np.int64)
        none_sampled = QuerySamples(np.empty((0, 0), np.float32), none, none)
        if not self.exists(samples_collection):
            return none_sampled

        # A scan may lag behind; a count, which is strongly consistent, lets the server catch up.
        self.count(samples_collection)

        in_places = f"place >= 0 and place < {places}"
        samples = self.scan(samples_collection, "vector", where=in_places, limit=places)
        if not samples.rows:
            return none_sampled
        numbers = np.array([row["sample"] for row in samples.rows], np.int64)
        times = np.array([row["queried_at"] for row in samples.rows], np.int64)
        return QuerySamples(samples.vectors, numbers, times).counting(time.time())

    def put_query_samples(self, target: SamplesOf, samples: Sequence[Sample]) -> None:
        for part in in_parts(samples, SAMPLES_PER_REQUEST):
            put_samples(self.client, target, part)

    def drop_samples(self, samples_collection: str, places: int) -> None:
        if self.exists(samples_collection):
            self._delete(samples_collection, f"place < 0 or place >= {places}")


LEDGER_PROPERTY = "hubness_ledger"
"""Property that a ledger has and no other collection."""

_RECORDS_PER_REQUEST = 500

_FEW = 64
"""Records that one query returns; further ones are read in pages."""


class MilvusLedger(MilvusBanks, HelperLists):
    """The ledger methods of the store.

    A ledger has a vector field because every Milvus collection must have one.
    """

    def put_records(self, ledger: str, records: Sequence[Record]) -> None:
        self._ensure_ledger(ledger)
        rows = [
            {
                "key": record.key,
                "belongs_to": record.group,
                "body": record.body,
                "vector": [0.0, 0.0],
            }
            for record in records
        ]
        for part in in_parts(rows, _RECORDS_PER_REQUEST):
            self._upsert(ledger, part)

    def record(self, ledger: str, key: str) -> Record | None:
        return next(iter(self._records(ledger, is_one_of("key", [key]))), None)

    def records(self, ledger: str, *groups: str) -> list[Record]:
        return self._records(ledger, is_one_of("belongs_to", groups))

    def _records(self, ledger: str, where: str) -> list[Record]:
        if ledger not in self._ready_ledgers and not self.exists(ledger):
            return []

        self._ensure_ledger(ledger)
        fields = ["key", "belongs_to", "body"]
        rows = self._query(ledger, where, fields, limit=_FEW)
        if len(rows) == _FEW:
            pages = self._pages(ledger, "key", fields, _RECORDS_PER_REQUEST, where=where)
            rows = [row for _, page in pages for row in page.values()]
        records = [Record(row["key"], row["belongs_to"], row["body"]) for row in rows]
        return sorted(records, key=lambda record: record.key)

    def drop_records(self, ledger: str, group: str, keys: Sequence[str] | None = None) -> None:
        if self.exists(ledger):
            self._ensure_ledger(ledger)
            # By keys alone: with any other field, Milvus searches for the rows first.
            self._delete(
                ledger,
                f"belongs_to == {literal(group)}" if keys is None else is_one_of("key", keys),
            )

    def _ensure_ledger(self, ledger: str) -> None:
        if ledger in self._ready_ledgers:
            return

        schema = MilvusClient.create_schema(description="ledger of milvus_hubness")
        schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=1_024)
        schema.add_field("belongs_to", DataType.VARCHAR, max_length=512)
        schema.add_field("body", DataType.VARCHAR, max_length=65_535)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
        self._ensure(ledger, schema, LEDGER_PROPERTY, "ledger")
        self._ready_ledgers.add(ledger)
