"""The store of Milvus, embedded or on a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import filterfalse
from typing import Any

from pymilvus.exceptions import MilvusException

from milvus_hubness.basics.waiting import Standing, reported, wait_until
from milvus_hubness.basics.words import expect_words
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import HIDDEN_FIELDS
from milvus_hubness.correction.codec.beside import SIDE_FIELD
from milvus_hubness.correction.state import CollectionState, read_states
from milvus_hubness.errors import (
    CannotMigrate,
    CollectionExists,
    CollectionNotFound,
    StateError,
    StoreError,
    did_you_mean,
    redacted,
)
from milvus_hubness.jobs.migration.rights import Grant, Right
from milvus_hubness.jobs.store.helpers import own_samplings
from milvus_hubness.jobs.store.ownership import (
    SIDE_PROPERTY,
    owner_in,
    samples_name,
)
from milvus_hubness.jobs.store.protocols import ClientFeature
from milvus_hubness.jobs.store.records import (
    CollectionInfo,
    ColumnNeeds,
    Samplings,
    VectorField,
    is_fence,
    taken_keys,
)
from milvus_hubness.milvus.pymilvus_private import reason_of_failed_index
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store import server as milvus_server
from milvus_hubness.milvus.store.banks import MilvusQuerySamples
from milvus_hubness.milvus.store.bulk import MilvusBulk
from milvus_hubness.milvus.store.grants import grant_all, grants_on
from milvus_hubness.milvus.store.rights import denied
from milvus_hubness.milvus.store.server import (
    ROWS_PER_PAGE,
    in_parts,
    is_missing,
    supports,
    translated,
    translating,
)

CHUNK_BYTES = 8_000_000
"""Bytes of the rows that a job copies at a time."""

ROW_OVERHEAD_BYTES = 512
"""What a row is taken to have besides its vectors."""

QUERIES_PER_REQUEST = 500

MOST_HITS = 16_384
"""Rows for which a search of Milvus may ask."""


@translating
class MilvusStore(MilvusBulk, MilvusQuerySamples):
    """A Store over a plain MilvusClient; see `milvus_server.connect`."""

    def client_features(self) -> frozenset[ClientFeature]:
        """As ClientFeatures.client_features: HubnessClient, AsyncHubnessClient and the proxy do both."""
        return frozenset({"gate", "hub guard"})

    def close(self) -> None:
        self.client.close()

    def denied(self, collection: str, rights: Iterable[Right]) -> list[Right]:
        """Return those of the rights on a collection that this store's user lacks."""
        known = expect_words("rights", rights, Right)
        return [] if self.is_lite else denied(self.client, collection, known)

    def grants_on(self, collection: str) -> list[Grant] | None:
        return [] if self.is_lite else grants_on(self.client, collection)

    def grant_all(self, collection: str, grants: Sequence[Grant]) -> list[Grant]:
        return grant_all(self.client, collection, grants)

    # -- descriptions ------------------------------------------------------------------------------

    def info(
        self, collection: str, *, counted: bool = True, checked: bool = True
    ) -> CollectionInfo:
        schema = self._described(collection)
        name = schema["collection_name"]
        properties = schema["properties"]
        info = CollectionInfo.of_properties(
            properties,
            name=name,
            key_field=milvus_schema.key_field(schema)["name"],
            vector_fields=milvus_schema.vector_fields(schema, self._indexes(name)),
            rows=self.count(name) if counted else 0,
            partitions=self._partitions(schema),
            aliases=self._all_aliases(schema),
            schema=schema,
            number=str(schema["collection_id"] or ""),
            time_to_live=milvus_schema.time_to_live(properties),
        )
        milvus_schema.expect_side_collections(info.states.values(), name)
        return self._with_own_helpers(info) if checked else info

    def _described(self, collection: str) -> dict[str, Any]:
        """Return the description of a collection.

        Raises CollectionNotFound, which names those that may be meant.
        """
        try:
            return dict(self.client.describe_collection(collection))
        except MilvusException as error:
            if not is_missing(error):
                raise
            names = self.client.list_collections()
            # Milvus 2.3 refuses this list.
            with suppress(MilvusException):
                names += self.client.list_aliases("")["aliases"]
            meant = did_you_mean(collection, filterfalse(is_fence, names))
            raise CollectionNotFound(f"no collection or alias {collection!r}{meant}") from error

    def _partitions(self, schema: dict[str, Any]) -> tuple[str | None, ...]:
        """Return the partitions that a job has to visit; None is the whole collection."""
        if milvus_schema.has_partition_key(schema):
            return (None,)

        names = self.client.list_partitions(schema["collection_name"])
        return tuple(names) if len(names) > 1 else (None,)

    def _with_own_helpers(self, info: CollectionInfo) -> CollectionInfo:
        """Return the description without the samplings
        whose samples belong to another collection.

        Raises StateError for another helper that does:
        biases and notes are indispensable, samples are not.
        """
        self.expect_own_helpers(info)
        samplings = own_samplings(self, info.samplings, info.collection_id)
        return replace(info, samplings=samplings)

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        reasons = milvus_schema.obstacles(source, field, suffix, lite=self.is_lite)
        if not source.schema.get("enable_dynamic_field"):
            return reasons

        # Rows with dynamic keys of such names cannot get hidden fields.
        fields = milvus_schema.fields_by_name(source.schema)
        names = [name + suffix for name in HIDDEN_FIELDS if name + suffix not in fields]
        self._ensure_loaded(source.name)
        counts = {name: self._count(source.name, f"exists {name}") for name in names}
        return reasons + taken_keys({name: count for name, count in counts.items() if count})

    def remarks(self, source: CollectionInfo, field: str) -> list[str]:
        remarks = milvus_schema.remarks(source, field)
        with translated(source.name):
            settings = self._load_settings(source.name)
        if settings:
            named = ", ".join(f"{name} {value}" for name, value in settings.items())
            remarks.append(f"the copy is loaded as the source is: {named}")
        if supports(self._version, "load fields"):
            remarks.append(
                "all fields of the copy are loaded, as the server does not say which fields of the "
                "source are: load the copy again with load_fields if that is too much"
            )

        return remarks

    def schema_facts(self, source: CollectionInfo) -> dict[str, Any]:
        facts = milvus_schema.facts(source)
        vector_fields = set(source.vector_fields)
        scalar_indexes = [
            [index["index_name"], index["field_name"]]
            for index in self._indexes(source.name)
            if index["field_name"] not in vector_fields
        ]
        return {**facts, "scalar_indexes": sorted(scalar_indexes)}

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        milvus_server.validate_index(planned, source, self._version)

    def column_needs(self, source: CollectionInfo, field: str) -> ColumnNeeds:
        vector = source.vector_fields[field]
        return milvus_schema.column_needs(vector, *source.users_shape(field))

    def named_partitions(self, source: CollectionInfo) -> list[str]:
        return [name for name in source.partitions if name is not None]

    def fields_of_copy(self, hidden_fields: Sequence[str]) -> list[str]:
        return list(hidden_fields)

    def units_moved(self) -> int:
        return 0

    # -- rows --------------------------------------------------------------------------------------

    def chunk_rows(self, source: CollectionInfo) -> int:
        bytes_per_row = ROW_OVERHEAD_BYTES + sum(
            4 * field.dim for field in source.vector_fields.values()
        )
        return max(16, min(ROWS_PER_PAGE, CHUNK_BYTES // bytes_per_row))

    def nearest(
        self, collection: str, field: str, query_vectors: Floats, k: int
    ) -> list[list[Key]]:
        described = self.client.describe_collection(collection)
        data = milvus_schema.form_of(described, field).encode_queries(query_vectors)
        # Milvus Lite returns all fields, the vectors among them, unless one is named.
        key_field = milvus_schema.key_field(described)["name"]
        keys: list[list[Key]] = []
        for part in in_parts(data, QUERIES_PER_REQUEST):
            results = self.client.search(
                collection,
                data=part,
                anns_field=field,
                limit=k,
                output_fields=[key_field],
                consistency_level="Strong",
            )
            keys += [list(hits.ids) for hits in results]

        return keys

    # -- the corrected copy ------------------------------------------------------------------------

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        with translated(target):
            if self.client.has_collection(target):
                self._expect_own_copy(target, state)
            else:
                self._create_empty_copy(source, target, state)
            for partition in source.partitions:
                if partition and not self.client.has_partition(target, partition):
                    self.client.create_partition(target, partition)

            indexes = set(self.client.list_indexes(target))
            missing = [
                index for index in self._indexes(source.name) if index["index_name"] not in indexes
            ]
            if missing:
                corrected = source.vector_fields[state.field]
                self._create_index(target, milvus_schema.copy_indexes(missing, corrected))

            if self.client.get_load_state(target)["state"].name != "Loaded":
                self._load(target, **self._load_settings(source.name))

        copy = self.info(target, counted=False)
        for sampling in _sampled_for(target, source).fields:
            dim, _ = copy.users_shape(sampling.field)
            self.create_query_samples(sampling.samples_collection, copy.collection_id, dim)

    def _expect_own_copy(self, target: str, state: CollectionState) -> None:
        """Raise CollectionExists unless an earlier run of this migration has created the target."""
        properties = self.client.describe_collection(target)["properties"]
        present = read_states(properties, target).get(state.field)
        if present is None or present.migration != state.migration or present.phase != "copying":
            raise CollectionExists(f"the name {target!r} is taken: choose another with --target")

    def _create_empty_copy(
        self, source: CollectionInfo, target: str, state: CollectionState
    ) -> None:
        settings = {name: source.schema[name] for name in ("num_shards", "consistency_level")}
        if milvus_schema.has_partition_key(source.schema):
            settings["num_partitions"] = source.schema["num_partitions"]
        samplings = _sampled_for(target, source)
        self.client.create_collection(
            target,
            schema=milvus_schema.copy_schema(source, state),
            properties=milvus_schema.copy_properties(source, state, samplings),
            **settings,
        )

    # -- side biases -------------------------------------------------------------------------------

    def beside_remarks(self, source: CollectionInfo) -> list[str]:
        if obstacles := milvus_schema.kind_obstacles(source.schema):
            raise CannotMigrate(f"{source.name!r} cannot be corrected: {'; '.join(obstacles)}")
        return []

    def most_candidates(self, source: CollectionInfo) -> int:
        return MOST_HITS

    def can_hold_side(self, source: CollectionInfo, side: str) -> bool:
        if not self.exists(side):
            return True

        with translated(side):
            side_of = owner_in(self.properties_of(side), SIDE_PROPERTY)
        if side_of is None or not side_of.is_same(source.collection_id):
            return False

        return not any(
            self._may_use_side(name, properties, side)
            for name, properties in self._all_properties()
        )

    @staticmethod
    def _may_use_side(collection: str, properties: Mapping[str, str], side: str) -> bool:
        """Whether a collection has its biases in a side collection; one that cannot be read may
        have them in any.
        """
        try:
            states = read_states(properties, collection)
        except StateError:
            return True
        return any(side in state.codec.sides for state in states.values())

    def create_side(self, source: CollectionInfo, side: str) -> None:
        with translated(side):
            self._create_loaded(
                side,
                schema=milvus_schema.side_schema(source),
                properties={SIDE_PROPERTY: source.collection_id.model_dump_json()},
                consistency_level=source.schema["consistency_level"],
            )
            self.client.create_index(side, milvus_schema.flat_index(SIDE_FIELD, "IP"))
            # Each search asks the side collection, which is to be as available as the source.
            self.client.load_collection(side, **self._load_settings(source.name))

    # -- whole collections -------------------------------------------------------------------------

    def validate_name(self, name: str) -> None:
        milvus_server.validate_name(name)

    def collection_names(self) -> list[str]:
        return list(self.client.list_collections())

    def flush(self, collection: str) -> None:
        with reported(f"the flush of {collection!r}") as limit:
            self.client.flush(collection, timeout=limit)
        self.load(collection)

    def load(self, collection: str) -> None:
        for index in self.client.list_indexes(collection):
            self._wait_indexed(collection, index)
        self._load(collection, **self._load_settings(collection))

    def _wait_indexed(self, collection: str, index: str) -> None:
        """Wait until an index is built.

        Raises StoreError if the server cannot build it, and WaitedTooLong.
        """
        described: dict[str, Any] = {}

        def rows_left() -> Standing | None:
            described.update(self.client.describe_index(collection, index))
            # A FLAT index has nothing to build; its rows
            # count as pending while other builds are queued.
            if described.get("index_type") == "FLAT" or described["state"] == "Failed":
                return None
            if described["state"] == "Finished" and not described["pending_index_rows"]:
                return None

            rows = int(described["pending_index_rows"])
            return Standing(f"{rows:,} rows are left to index", rows)

        wait_until(f"index {index!r} of {collection!r}", rows_left)
        if described["state"] == "Failed":
            reason = " ".join(reason_of_failed_index(self.client, collection, index).split())
            raise StoreError(
                f"the server failed to build index {index!r} of collection {collection!r}: "
                f"{redacted(reason) or 'it gives no reason'}; drop the index, create it again "
                "with parameters that the server accepts, and run the command again"
            )

    def wait_visible(self, collection: str) -> None:
        self._ensure_loaded(collection)
        with reported(f"the last writes to {collection!r} to be visible") as limit:
            self._count(collection, timeout=limit)

    def rename(self, collection: str, name: str) -> None:
        loaded = self.is_lite and self.client.get_load_state(collection)["state"].name == "Loaded"
        self._expect_lease()
        self.client.rename_collection(collection, name)
        if loaded:
            # Milvus Lite releases it; if it cannot load it, the next read reports it.
            with suppress(MilvusException):
                self._load(name)

    def drop_alias(self, alias: str) -> None:
        self._expect_lease()
        self.client.drop_alias(alias)

    def alias_target(self, alias: str) -> str | None:
        name = (
            str(self.client.describe_collection(alias)["collection_name"])
            if self.exists(alias)
            else alias
        )
        return name if name != alias else None

    def point_alias(self, alias: str, collection: str) -> None:
        is_new = not self.alias_target(alias)
        self._expect_lease()
        # What may be missing is the collection: nobody else gives or drops the alias meanwhile.
        with translated(collection):
            if is_new:
                self.client.create_alias(collection, alias)
            else:
                self.client.alter_alias(collection, alias)


def _sampled_for(copy: str, source: CollectionInfo) -> Samplings:
    """Return the source's samplings as those of its copy, which takes samples of its own."""
    fields = [
        each.model_copy(update={"samples_collection": samples_name(copy, each.field)})
        for each in source.samplings.fields
    ]
    return Samplings(fields=tuple(fields))
