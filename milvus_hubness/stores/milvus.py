"""Milvus, embedded and served, as a Store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient
from tenacity import Retrying, retry_if_result, wait_exponential

from milvus_hubness.banks import QueryBank
from milvus_hubness.errors import CollectionExists, DimensionMismatch, EmptyBank, InvalidInput, StoreError
from milvus_hubness.layout import Floats, Metric
from milvus_hubness.state import (
    EPOCH_FIELD,
    PENDING,
    PROPERTY,
    BankReference,
    CollectionState,
    read_state,
)
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.base import Batch, CollectionInfo, Key, VectorField
from milvus_hubness.stores.milvus_rpc import connect, in_fitting_parts, is_one_of, literal, translated

__all__ = ["BANK_PROPERTY", "MilvusStore", "connect"]

BANK_PROPERTY = "hubness_bank"
KEYS_PER_PAGE = 16_384
CHUNK_BYTES = 8_000_000
ROW_OVERHEAD_BYTES = 512
_GENERATION_STRIDE = 2**32
_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True", "consistency_level": "Strong"}


class MilvusStore:
    """client: a plain MilvusClient, see `connect`. Milvus Lite opens with every collection released, so there
    a collection is loaded when it is first read; on a server a released collection is an error."""

    def __init__(self, client: MilvusClient) -> None:
        self.client = client
        self.is_lite = client.get_server_version().startswith("milvus_lite")

    # -- what is there ------------------------------------------------------------------------------

    def info(self, collection: str) -> CollectionInfo:
        with translated(collection):
            schema = self.client.describe_collection(collection)
            name = schema["collection_name"]
            partitions: tuple[str | None, ...] = (None,)
            if not milvus_schema.has_partition_key(schema):
                names = self.client.list_partitions(name)
                partitions = tuple(names) if len(names) > 1 else partitions
            return CollectionInfo(
                name=name,
                key_field=milvus_schema.key_field(schema)["name"],
                vector_fields=milvus_schema.vector_fields(schema, self._indexes(name)),
                rows=self.count(name),
                partitions=partitions,
                aliases=tuple(self.client.list_aliases(name)["aliases"]),
                state=read_state(schema["properties"]),
                is_bank=BANK_PROPERTY in schema["properties"],
                schema=schema,
            )

    def exists(self, collection: str) -> bool:
        with translated(collection):
            return bool(self.client.has_collection(collection))

    def obstacles(self, source: CollectionInfo, field: str) -> list[str]:
        return milvus_schema.obstacles(source, field, lite=self.is_lite)

    def remarks(self, source: CollectionInfo) -> list[str]:
        return milvus_schema.remarks(source)

    def width_multiple(self, field: VectorField) -> int:
        return milvus_schema.width_multiple(field)

    # -- rows ---------------------------------------------------------------------------------------

    def keys(self, collection: str, *, partition: str | None = None, pending: bool = False) -> list[Key]:
        return self._keys(collection, _pending_filter(pending), partition)

    def count(self, collection: str, *, pending: bool = False) -> int:
        self._ensure_loaded(collection)
        with translated(collection):
            rows = self.client.query(
                collection,
                filter=_pending_filter(pending),
                output_fields=["count(*)"],
                consistency_level="Strong",
            )
        return int(rows[0]["count(*)"]) if rows else 0

    def chunk_rows(self, source: CollectionInfo) -> int:
        bytes_per_row = ROW_OVERHEAD_BYTES + sum(4 * field.dim for field in source.vector_fields.values())
        return max(16, min(2_000, CHUNK_BYTES // bytes_per_row))

    def fetch(
        self, collection: str, keys: Sequence[Key], field: str, *, partition: str | None = None
    ) -> Batch:
        with translated(collection):
            schema = self.client.describe_collection(collection)
            key_field = milvus_schema.key_field(schema)["name"]
            [dim] = [each["params"]["dim"] for each in schema["fields"] if each["name"] == field]
            written_by_server = milvus_schema.function_outputs(schema)
            by_key: dict[Key, dict[str, Any]] = {}
            missing = list(keys)
            while missing:
                rows = self._rows(collection, key_field, missing, partition)
                by_key |= {row[key_field]: row for row in rows}
                # Milvus 2.3 counts duplicates of a key as rows and cuts others off for them: ask again.
                missing = [key for key in missing if key not in by_key] if rows else []
        present = [key for key in keys if key in by_key]
        vectors = np.empty((len(present), int(dim)), np.float32)
        others = []
        for i, key in enumerate(present):
            row = by_key[key]
            vectors[i] = row.pop(field)
            others.append({name: value for name, value in row.items() if name not in written_by_server})
        return Batch(present, vectors, others)

    def write(self, collection: str, batch: Batch, field: str, *, partition: str | None = None) -> None:
        rows = [{**row, field: vector} for row, vector in zip(batch.rows, batch.vectors, strict=True)]
        self._upsert(collection, rows, partition)

    # -- the corrected copy ---------------------------------------------------------------------------

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        if self.exists(target):
            raise CollectionExists(f"the name {target!r} is taken")
        placement = (
            {"num_partitions": source.schema["num_partitions"]}
            if milvus_schema.has_partition_key(source.schema)
            else {}
        )
        with translated(target):
            self.client.create_collection(
                target,
                schema=milvus_schema.copy_schema(source, state),
                properties=milvus_schema.copy_properties(source, state),
                num_shards=source.schema["num_shards"],
                consistency_level=source.schema["consistency_level"],
                **placement,
            )
            for partition in source.partitions:
                if partition and not self.client.has_partition(target, partition):
                    self.client.create_partition(target, partition)
            indexes = milvus_schema.copy_indexes(self._indexes(source.name), state.field)
            self.client.create_index(target, indexes)
            self.client.load_collection(target)

    def finish(self, collection: str) -> None:
        with translated(collection):
            self.client.flush(collection)
            for index in self.client.list_indexes(collection):
                unfinished = retry_if_result(
                    lambda seen: seen["state"] != "Finished" or seen["pending_index_rows"]
                )
                Retrying(retry=unfinished, wait=wait_exponential(0.1, max=5))(
                    self.client.describe_index, collection, index
                )
            self.client.load_collection(collection)

    def settle(self, collection: str) -> None:
        self.count(collection)

    def write_state(self, collection: str, state: CollectionState) -> None:
        with translated(collection):
            self.client.alter_collection_properties(collection, {PROPERTY: state.to_json()})

    def drop(self, collection: str) -> None:
        with translated(collection):
            self.client.drop_collection(collection)

    def alias_target(self, alias: str) -> str | None:
        if not self.exists(alias):
            return None
        with translated(alias):
            name = str(self.client.describe_collection(alias)["collection_name"])
        return name if name != alias else None

    def point_alias(self, alias: str, collection: str) -> None:
        with translated(alias):
            if self.alias_target(alias):
                self.client.alter_alias(collection, alias)
            else:
                self.client.create_alias(collection, alias)

    # -- banks ----------------------------------------------------------------------------------------

    def save_bank(self, collection: str, bank: QueryBank, metric: Metric) -> tuple[BankReference, bool]:
        generations: dict[str, Any] = {}
        created = not self.exists(collection)
        if created:
            self._create_bank(collection, bank.dim, metric)
        else:
            generations = self._generations(collection, bank.dim)
        for number, known in generations.items():
            reference = BankReference(
                collection=collection,
                generation=int(number),
                fingerprint=known["fingerprint"],
                count=known["count"],
            )
            if known["fingerprint"] == bank.fingerprint == self.load_bank(reference).fingerprint:
                return reference, False
        reference = BankReference(
            collection=collection,
            generation=1 + max(map(int, generations), default=0),
            fingerprint=bank.fingerprint,
            count=len(bank),
        )
        try:
            self._insert_bank(reference, bank)
            self._write_generations(
                collection,
                {
                    **generations,
                    str(reference.generation): {
                        "fingerprint": bank.fingerprint,
                        "count": len(bank),
                        "source": bank.source,
                    },
                },
            )
        except BaseException:
            if created:
                self.drop(collection)
            raise
        return reference, created

    def load_bank(self, reference: BankReference) -> QueryBank:
        where = f"generation == {reference.generation}"
        vectors = self._vectors(reference.collection, "vector", self._keys(reference.collection, where))
        if not len(vectors):
            raise EmptyBank(f"{reference.collection!r} holds no queries of generation {reference.generation}")
        return QueryBank(vectors, source=f"milvus:{reference.collection}")

    def drop_bank_generation(self, reference: BankReference) -> None:
        generations = self._generations(reference.collection)
        generations.pop(str(reference.generation), None)
        with translated(reference.collection):
            self.client.delete(reference.collection, filter=f"generation == {reference.generation}")
        self._write_generations(reference.collection, generations)

    def read_vectors(self, collection: str, field: str | None = None) -> QueryBank:
        info = self.info(collection)
        if field is None:
            if len(info.vector_fields) != 1:
                names = ", ".join(info.vector_fields) or "none"
                raise InvalidInput(f"name the vector field of {collection!r} to read, there are: {names}")
            [field] = info.vector_fields
        if field not in info.vector_fields:
            raise InvalidInput(f"{collection!r} has no FLOAT_VECTOR field {field!r}")
        vectors = self._vectors(info.name, field, self.keys(info.name))
        if not len(vectors):
            raise EmptyBank(f"collection {collection!r} is empty: a bank needs at least one query")
        if info.state is not None and info.state.field == field:
            raise InvalidInput(f"{collection!r} is a corrected collection: its stored vectors are no queries")
        return QueryBank(vectors, source=f"milvus:{collection}")

    def _create_bank(self, collection: str, dim: int, metric: Metric) -> None:
        schema = MilvusClient.create_schema(description="query bank of milvus_hubness")
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("generation", DataType.INT64)
        schema.add_field("source", DataType.VARCHAR, max_length=512)
        schema.add_field("added_at", DataType.INT64, description="Unix time, seconds")
        index = MilvusClient.prepare_index_params("vector", index_type="FLAT", metric_type=metric)
        with translated(collection):
            self.client.create_collection(
                collection,
                schema=schema,
                index_params=index,
                properties={BANK_PROPERTY: "{}"},
                consistency_level="Strong",
            )

    def _insert_bank(self, reference: BankReference, bank: QueryBank) -> None:
        common = {
            "generation": reference.generation,
            "source": bank.source.encode()[:512].decode(errors="ignore"),
            "added_at": int(time.time()),
        }
        first = reference.generation * _GENERATION_STRIDE
        rows = [{"id": first + i, "vector": vector, **common} for i, vector in enumerate(bank.vectors)]
        step = max(16, CHUNK_BYTES // (4 * bank.dim + ROW_OVERHEAD_BYTES))
        for start in range(0, len(rows), step):
            self._upsert(reference.collection, rows[start : start + step])

    def _generations(self, collection: str, dim: int | None = None) -> dict[str, Any]:
        with translated(collection):
            schema = self.client.describe_collection(collection)
        if BANK_PROPERTY not in schema["properties"]:
            raise CollectionExists(
                f"{collection!r} is there already and is no query bank: name another with --bank-name"
            )
        [stored] = [field["params"]["dim"] for field in schema["fields"] if field["name"] == "vector"]
        if dim is not None and int(stored) != dim:
            raise DimensionMismatch(f"bank {collection!r} holds {stored}-d queries, these have {dim}")
        generations: dict[str, Any] = json.loads(schema["properties"][BANK_PROPERTY])
        return generations

    def _write_generations(self, collection: str, generations: dict[str, Any]) -> None:
        with translated(collection):
            self.client.alter_collection_properties(collection, {BANK_PROPERTY: json.dumps(generations)})

    # -- requests -------------------------------------------------------------------------------------

    def _keys(self, collection: str, where: str, partition: str | None = None) -> list[Key]:
        """Key-ordered pages, each beginning behind the last key seen."""
        self._ensure_loaded(collection)
        found: list[Key] = []
        with translated(collection):
            key_field = milvus_schema.key_field(self.client.describe_collection(collection))["name"]
            while True:
                behind = f"{key_field} > {literal(found[-1])}" if found else ""
                page = self.client.query(
                    collection,
                    filter=" and ".join(filter(None, [behind, where])),
                    output_fields=[key_field],
                    partition_names=[partition] if partition else None,
                    limit=KEYS_PER_PAGE,
                    **_IN_KEY_ORDER,
                )
                fresh = sorted({row[key_field] for row in page})
                if not fresh:
                    return found
                if found and fresh[0] <= found[-1]:
                    raise StoreError(f"the server did not page {collection!r} in key order")
                found += fresh

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
                )
            ),
            keys,
        )
        return [row for part in parts for row in part]

    def _vectors(self, collection: str, field: str, keys: list[Key]) -> Floats:
        parts = []
        for start in range(0, len(keys), 2_000):
            parts.append(self.fetch(collection, keys[start : start + 2_000], field).vectors)
        return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)

    def _upsert(self, collection: str, rows: list[dict[str, Any]], partition: str | None = None) -> None:
        with translated(collection):
            in_fitting_parts(
                lambda part: self.client.upsert(collection, list(part), partition_name=partition or ""), rows
            )

    def _indexes(self, collection: str) -> list[dict[str, Any]]:
        return [self.client.describe_index(collection, name) for name in self.client.list_indexes(collection)]

    def _ensure_loaded(self, collection: str) -> None:
        with translated(collection):
            state = self.client.get_load_state(collection)["state"].name
            if state == "Loaded":
                return
            if not self.is_lite:
                raise StoreError(f"collection {collection!r} is not loaded: load it first")
            self.client.load_collection(collection)


def _pending_filter(pending: bool) -> str:
    return f"{EPOCH_FIELD} == {PENDING}" if pending else ""
