"""The store of Milvus, embedded or on a server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import numpy as np
from pymilvus.exceptions import MilvusException
from tenacity import Retrying, retry_if_result, wait_exponential

from milvus_hubness.banks.generations import BANK_PROPERTY, Key
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.fields import SIDE_FIELD
from milvus_hubness.errors import BankTooSmall, CannotMigrate, CollectionExists, StoreError, redacted
from milvus_hubness.state import BankReference, CollectionState, read_states
from milvus_hubness.stores import milvus_schema, milvus_server
from milvus_hubness.stores.milvus_banks import MilvusQuerySamples, queries_between
from milvus_hubness.stores.milvus_bulk import MilvusBulk
from milvus_hubness.stores.milvus_second_vector import MilvusSecondField
from milvus_hubness.stores.milvus_server import connect, in_parts, supports, translated
from milvus_hubness.stores.milvus_write_intents import MilvusWriteIntents
from milvus_hubness.stores.records import (
    CollectionInfo,
    DualWrite,
    OnlineBanks,
    TuningRecord,
    VectorField,
    WriteIntentLog,
    is_fence,
)

__all__ = ["MilvusStore", "connect"]

CHUNK_BYTES = 8_000_000
ROW_OVERHEAD_BYTES = 512
QUERIES_PER_REQUEST = 500

SIDE_PROPERTY = "hubness_side"
"""Property of a side collection: the collection whose biases it has."""


class MilvusStore(MilvusBulk, MilvusWriteIntents, MilvusSecondField, MilvusQuerySamples):
    """A Store over a plain MilvusClient; see `connect`."""

    # -- descriptions -------------------------------------------------------------------------------

    def info(self, collection: str, *, counted: bool = True) -> CollectionInfo:
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
                rows=self.count(name) if counted else 0,
                partitions=partitions,
                aliases=tuple(each for each in self._all_aliases(schema) if not is_fence(each)),
                states=read_states(schema["properties"]),
                tuning=TuningRecord.read(schema["properties"]),
                is_bank=BANK_PROPERTY in schema["properties"],
                schema=schema,
                dual_write=DualWrite.read(schema["properties"]),
                intent_log=WriteIntentLog.read(schema["properties"]),
                online_banks=OnlineBanks.read_or_default(schema["properties"]).banks,
                identity=str(schema["collection_id"] or ""),
            )

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        return milvus_schema.obstacles(source, field, suffix, lite=self.is_lite)

    remarks = staticmethod(milvus_schema.remarks)
    width_multiple = staticmethod(milvus_schema.width_multiple)
    schema_facts = staticmethod(milvus_schema.facts)
    bias_remarks = staticmethod(milvus_schema.bias_remarks)

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        milvus_server.validate_index(planned, source, self._version)

    def takes_graph_hint(self, source: CollectionInfo, field: str) -> bool:
        """Return true: Milvus's quantisers have a range for each column, or for each few."""
        return True

    def takes_locality_hints(self, source: CollectionInfo, field: str) -> bool:
        vector = source.vector_fields[field]
        return milvus_schema.takes_locality_hints(vector.index_type, vector.dtype)

    def units_moved(self) -> int:
        return 0

    # -- rows ---------------------------------------------------------------------------------------

    def chunk_rows(self, source: CollectionInfo) -> int:
        bytes_per_row = ROW_OVERHEAD_BYTES + sum(4 * field.dim for field in source.vector_fields.values())
        return max(16, min(2_000, CHUNK_BYTES // bytes_per_row))

    def nearest(self, collection: str, field: str, query_vectors: Floats, k: int) -> list[list[Key]]:
        keys: list[list[Key]] = []
        with translated(collection):
            schema = self.client.describe_collection(collection)
            key_field = milvus_schema.key_field(schema)["name"]
            data = milvus_schema.form_of(schema, field).encode_queries(query_vectors)
            for part in in_parts(data, QUERIES_PER_REQUEST):
                results = self.client.search(
                    collection,
                    data=part,
                    anns_field=field,
                    limit=k,
                    output_fields=[key_field],
                    consistency_level="Strong",
                )
                keys += [[hit["entity"][key_field] for hit in hits] for hits in results]
        return keys

    def bank_scores(self, reference: BankReference, query_vectors: Floats, k: int) -> Floats:
        scores = np.empty((len(query_vectors), k), np.float32)
        with translated(reference.collection):
            self.client.load_collection(reference.collection)
            [index] = self.client.list_indexes(reference.collection, field_name="vector")
            metric = self.client.describe_index(reference.collection, index)["metric_type"]
            for start in range(0, len(query_vectors), QUERIES_PER_REQUEST):
                results = self.client.search(
                    reference.collection,
                    data=list(query_vectors[start : start + QUERIES_PER_REQUEST]),
                    anns_field="vector",
                    filter=queries_between(reference, 0, reference.count),
                    limit=k,
                    consistency_level="Strong",
                )
                for row, hits in enumerate(results, start):
                    if len(hits) < k:
                        raise BankTooSmall(f"the {k} nearest are needed, and {len(hits)} were found")
                    scores[row] = [hit["distance"] for hit in hits]
        return scores * np.float32(-0.5 if metric == "L2" else 1)

    # -- the corrected copy ---------------------------------------------------------------------------

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        with translated(target):
            if not self.client.has_collection(target):
                self._create_copy(source, target, state)
            else:
                before = read_states(self.client.describe_collection(target)["properties"]).get(state.field)
                if before is None or (before.migration, before.phase) != (state.migration, "copying"):
                    raise CollectionExists(f"the name {target!r} is taken: choose another with --target")
            for partition in source.partitions:
                if partition and not self.client.has_partition(target, partition):
                    self.client.create_partition(target, partition)
            indexes = set(self.client.list_indexes(target))
            missing = [index for index in self._indexes(source.name) if index["index_name"] not in indexes]
            if missing:
                corrected = source.vector_fields[state.field]
                self.client.create_index(target, milvus_schema.copy_indexes(missing, corrected))
            self.client.load_collection(target)

    def _create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        settings = ["num_shards", "consistency_level"]
        settings += ["num_partitions"] * milvus_schema.has_partition_key(source.schema)
        self.client.create_collection(
            target,
            schema=milvus_schema.copy_schema(source, state),
            properties=milvus_schema.copy_properties(source, state),
            **{name: source.schema[name] for name in settings},
        )

    # -- side biases ------------------------------------------------------------------------------------

    def bias_fields(self, source: CollectionInfo, suffix: str) -> Literal["there", "can be added", "none"]:
        if obstacles := milvus_schema.kind_obstacles(source.schema):
            raise CannotMigrate(f"{source.name!r} cannot be corrected: {'; '.join(obstacles)}")
        if milvus_schema.has_bias_fields(source.schema, suffix):
            return "there"
        auto_id = milvus_schema.key_field(source.schema).get("auto_id")
        return "can be added" if supports(self._version, "new fields") and not auto_id else "none"

    def add_bias_fields(self, collection: str, suffix: str) -> None:
        with translated(collection):
            for name, kind in milvus_schema.BIAS_FIELDS.items():
                self.client.add_collection_field(
                    collection, name + suffix, kind, nullable=True, default_value=milvus_schema.NO_BIAS[kind]
                )

    def is_left_side(self, source: CollectionInfo, side: str) -> bool:
        if not self.exists(side):
            return False
        with translated(side):
            properties = self.client.describe_collection(side)["properties"]
        used = any(state.codec.side_collection == side for state in source.states.values())
        if properties.get(SIDE_PROPERTY) != source.name or used:
            raise CollectionExists(f"collection {side!r} exists and holds no biases: rename or drop it")
        return True

    def create_side(self, source: CollectionInfo, side: str) -> None:
        with translated(side):
            self.client.create_collection(
                side,
                schema=milvus_schema.side_schema(source),
                index_params=milvus_schema.flat_index(SIDE_FIELD, "IP"),
                properties={SIDE_PROPERTY: source.name},
                consistency_level=source.schema["consistency_level"],
            )

    # -- whole collections ------------------------------------------------------------------------------

    def flush(self, collection: str) -> None:
        with translated(collection):
            self.client.flush(collection)
        self.load(collection)

    def load(self, collection: str) -> None:
        with translated(collection):
            for index in self.client.list_indexes(collection):
                is_building = retry_if_result(_is_building)
                described = Retrying(retry=is_building, wait=wait_exponential(0.1, max=5))(
                    self.client.describe_index, collection, index
                )
                if described["state"] == "Failed":
                    raise StoreError(
                        f"the server failed to build index {index!r} of collection {collection!r}: "
                        f"{self._why_failed(collection, index)}; drop the index, create it again with "
                        "parameters that the server accepts, and repeat the command"
                    )
            self.client.load_collection(collection)

    def _why_failed(self, collection: str, index: str) -> str:
        # `MilvusClient.describe_index` does not return the reason.
        context = self.client._generate_call_context()
        _, reason = self._connection.get_index_state(collection, index, context=context)
        return redacted(" ".join(reason.split())) or "it gives no reason"

    def show_imported(self, collection: str) -> None:
        self.flush(collection)
        with translated(collection):
            self.client.refresh_load(collection)

    def wait_visible(self, collection: str) -> None:
        self.count(collection)

    def rename(self, collection: str, name: str) -> None:
        with translated(collection):
            loaded = self.is_lite and self.client.get_load_state(collection)["state"].name == "Loaded"
            self.client.rename_collection(collection, name)
            if loaded:  # Milvus Lite releases it; if it cannot load it, the next read reports it.
                with suppress(MilvusException):
                    self.client.load_collection(name)

    def drop_alias(self, alias: str) -> None:
        with translated(alias):
            self.client.drop_alias(alias)

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

    def _indexes(self, collection: str) -> list[dict[str, Any]]:
        return [self.client.describe_index(collection, name) for name in self.client.list_indexes(collection)]


def _is_building(index: dict[str, Any]) -> bool:
    """Whether the server still works on an index, given the result of `describe_index`."""
    if index["state"] == "Failed":
        return False
    return index["state"] != "Finished" or bool(index["pending_index_rows"])
