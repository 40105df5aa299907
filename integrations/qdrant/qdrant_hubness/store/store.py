"""QdrantStore: the Store protocol for Qdrant, local or a server."""

from __future__ import annotations

from typing import Any, Literal

from qdrant_client import models

from milvus_hubness.banks.generations import BANK_PROPERTY, Key
from milvus_hubness.codec.arrays import Floats, decode
from milvus_hubness.codec.base import BIAS_FIELD, EPOCH_FIELD
from milvus_hubness.errors import CannotMigrate, CollectionExists, InvalidParameter
from milvus_hubness.state import CollectionState, FrozenModel, read_states
from milvus_hubness.stores.helpers import expect_helpers
from milvus_hubness.stores.records import (
    CollectionInfo,
    DualWrite,
    OnlineBanks,
    VectorField,
    Verdicts,
    WriteIntentLog,
    identity_in,
    is_fence,
    taken_keys,
)
from milvus_hubness.waiting import wait_until
from qdrant_hubness.store import schema
from qdrant_hubness.store.points import PARTITIONS, create_alias, drop_alias
from qdrant_hubness.store.requests import has_formulas, translated, turn
from qdrant_hubness.store.write_intents import QdrantWriteIntents

CHUNK_BYTES = 8_000_000
ROW_OVERHEAD_BYTES = 512
QUERIES_PER_REQUEST = 200
BIAS_METRICS = {"COSINE", "IP"}
"""Metrics from whose score a formula can subtract a bias."""


class QdrantStore(QdrantWriteIntents):
    """The Store of a QdrantClient, see `connect`. The protocol documents the methods."""

    # -- descriptions ------------------------------------------------------------------------------

    def info(self, collection: str, *, counted: bool = True, checked: bool = True) -> CollectionInfo:
        name = self._real_name(collection)
        described = self.ask("get_collection", name)
        properties = self.properties.of(name, described)
        with turn(self.client), translated(name):
            aliases = self.client.get_collection_aliases(name).aliases
        info = CollectionInfo(
            name=name,
            key_field="id",
            vector_fields=schema.vector_fields(described),
            rows=self.count(name) if counted else 0,
            partitions=PARTITIONS,
            aliases=tuple(alias.alias_name for alias in aliases if not is_fence(alias.alias_name)),
            states=read_states(properties, name),
            verdicts=Verdicts.read(properties, name) or Verdicts(),
            is_bank=BANK_PROPERTY in properties,
            schema={"described": described},
            dual_write=DualWrite.read(properties, name),
            intent_log=WriteIntentLog.read(properties, name),
            online_banks=(OnlineBanks.read(properties, name) or OnlineBanks()).banks,
            identity=identity_in(properties, name),
        )
        if checked:
            expect_helpers(self, info.biases_and_notes, info.collection_id)
        return info

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        names = [name + suffix for name in (BIAS_FIELD, EPOCH_FIELD)]
        counts = {name: self._count_with(source.name, name) for name in names}
        return schema.obstacles(source, field) + taken_keys({name: count for name, count in counts.items() if count})

    def _count_with(self, collection: str, key: str) -> int:
        """Return the number of points with this key in their payloads."""
        lacking = models.IsEmptyCondition(is_empty=models.PayloadField(key=key))
        count_filter = models.Filter(must_not=[lacking])
        return int(self.ask("count", collection, count_filter=count_filter, exact=True).count)

    def remarks(self, source: CollectionInfo, field: str) -> list[str]:
        return schema.remarks(source, field)

    def width_multiple(self, field: VectorField) -> int:
        return schema.width_multiple(field)

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        if planned != source:
            raise InvalidParameter("this database builds the index of a copy as in the source: omit the index options")

    def bias_spread(self, source: CollectionInfo, field: str) -> int:
        return schema.bias_spread(source, field)

    def takes_graph_hint(self, source: CollectionInfo, field: str) -> bool:
        return schema.takes_graph_hint(source, field)

    def takes_length_pull(self, source: CollectionInfo, field: str) -> bool:
        return schema.takes_locality_hints(source, field)

    def takes_locality_hints(self, source: CollectionInfo, field: str) -> bool:
        return schema.takes_locality_hints(source, field)

    def units_moved(self) -> int:
        return self.units

    def schema_facts(self, source: CollectionInfo) -> dict[str, Any]:
        return schema.facts(source)

    def chunk_rows(self, source: CollectionInfo) -> int:
        numbers = sum(params.size for params in schema.dense(source.schema["described"]).values())
        return max(16, min(2_000, CHUNK_BYTES // (ROW_OVERHEAD_BYTES + 4 * numbers)))

    def nearest(self, collection: str, field: str, query_vectors: Floats, k: int) -> list[list[Key]]:
        form = self.form(collection, field)
        queries = decode(form.form.encode_queries(query_vectors), form.form.dtype).tolist()
        keys: list[list[Key]] = []
        for start in range(0, len(queries), QUERIES_PER_REQUEST):
            requests = [
                models.QueryRequest(query=query, using=field or None, limit=k, with_payload=False)
                for query in queries[start : start + QUERIES_PER_REQUEST]
            ]
            answers = self.ask("query_batch_points", collection, requests=requests, **self._reads)
            keys += [[point.id for point in answer.points] for answer in answers]
        return keys

    # -- the corrected copy ---------------------------------------------------------------------------

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        if self.exists(target):
            before = self._states(target, self.ask("get_collection", target)).get(state.field)
            if before is None or (before.migration, before.phase) != (state.migration, "copying"):
                raise CollectionExists(f"the name {target!r} is taken: choose another with --target")
        else:
            metadata = schema.copied_metadata(source, state) if self.properties.in_metadata else None
            if metadata is None:
                properties = self.properties.of(source.name, source.schema["described"])
                states = {own.property_name: properties[own.property_name] for own in source.states.values()}
                self.properties.alter(target, {**states, state.property_name: state.to_json()})
            self.ask("create_collection", target, **schema.copy_config(source, state, metadata))
        for name, index in (source.schema["described"].payload_schema or {}).items():
            field_schema = index.params if index.params is not None else index.data_type
            self.ask("create_payload_index", target, field_name=name, field_schema=field_schema)

    # -- biases in payloads ----------------------------------------------------------------------

    def bias_fields(self, source: CollectionInfo, suffix: str) -> Literal["present", "can be added", "none"]:
        """As Store.bias_fields: payloads accept any key, but a score of Euclid is a root."""
        version = self.server_version()
        if not has_formulas(version.rpartition(" ")[2]):
            raise CannotMigrate(
                f"{source.name!r} cannot be enabled: {version} has no formulas in queries: upgrade it to 1.14 or "
                "newer, or migrate the collection"
            )
        metrics = {field.metric for field in source.users_fields.values()}
        return "present" if metrics & BIAS_METRICS else "none"

    def bias_remarks(self, source: CollectionInfo, suffix: str) -> list[str]:
        return ["points that clients other than HubnessQdrantClient write have no bias until a refresh"]

    def add_bias_fields(self, collection: str, suffix: str) -> None:
        """Payloads accept any key."""

    # -- whole collections -------------------------------------------------------------

    def collection_names(self) -> list[str]:
        with turn(self.client), translated("the server"):
            return [collection.name for collection in self.client.get_collections().collections]

    def flush(self, collection: str) -> None:
        self.load(collection)

    def load(self, collection: str) -> None:
        def share_indexed() -> str | None:
            described = self.ask("get_collection", collection)
            if described.status != models.CollectionStatus.YELLOW:
                return None
            indexed, points = described.indexed_vectors_count or 0, described.points_count or 0
            return f"{indexed:,} vectors of {points:,} points are indexed"

        wait_until(f"Qdrant to optimise {collection!r}", share_indexed)

    def wait_visible(self, collection: str) -> None:
        """Every write of this store is visible when it returns."""

    def count_notes(self, intent_log: WriteIntentLog) -> int:
        return self.count(intent_log.collection) if self.exists(intent_log.collection) else 0

    def write_property(self, collection: str, name: str, record: FrozenModel | None) -> None:
        text = record.to_json() if record else ""
        self.properties.alter(self._real_name(collection), {name: text})

    def drop(self, collection: str) -> None:
        self.ask("delete_collection", collection)
        self.properties.forget(collection)

    def alias_target(self, alias: str) -> str | None:
        return self._behind(alias)

    def point_alias(self, alias: str, collection: str) -> None:
        created = create_alias(alias, collection)
        self.change_aliases([drop_alias(alias), created] if self._behind(alias) else [created], alias)

    def drop_alias(self, alias: str) -> None:
        self.change_aliases([drop_alias(alias)], alias)
