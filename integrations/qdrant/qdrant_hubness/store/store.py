"""Qdrant, local and served, as a Store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from qdrant_client import models
from tenacity import Retrying, retry_if_result, wait_exponential

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import BANK_PROPERTY, Batch, Key
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import decode
from milvus_hubness.errors import (
    CannotMigrate,
    CollectionExists,
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    UnsupportedOperation,
)
from milvus_hubness.job_properties import (
    DUAL_WRITE_PROPERTY,
    TUNING_PROPERTY,
    DualWrite,
    OnlineBank,
    TuningRecord,
    WriteIntentLog,
    read_dual_write,
    read_intent_log,
    read_online_banks,
    read_tuning,
)
from milvus_hubness.state import CollectionState, read_states
from milvus_hubness.stores.records import CollectionInfo, ImportJob, QuerySamples, VectorField, is_fence
from qdrant_hubness.store import schema
from qdrant_hubness.store.journal import QdrantWriteIntents
from qdrant_hubness.store.points import PARTITIONS, create_alias, drop_alias
from qdrant_hubness.store.requests import translated, turn

CHUNK_BYTES = 8_000_000
ROW_OVERHEAD_BYTES = 512
QUERIES_PER_REQUEST = 200
BIAS_METRICS = {"COSINE", "IP"}
"""Those whose score a formula can subtract a bias from."""
_NO_SIDE = "payloads of Qdrant hold biases themselves: a collection beside is of no use"
_NO_SECOND = "a second vector for the augmented form is not supported on Qdrant: migrate, or have a formula"
_NO_IMPORT = "Qdrant imports no files of rows"
_NO_ONLINE_BANK = "HubnessQdrantClient takes no samples of queries, so that no bank lives on Qdrant"


class QdrantStore(QdrantWriteIntents):
    """A Store over a plain QdrantClient, see `connect`. The methods do what Store says."""

    # -- what is there ------------------------------------------------------------------------------

    def info(self, collection: str, *, counted: bool = True) -> CollectionInfo:
        name = self._real_name(collection)
        described = self.ask("get_collection", name)
        result = self.properties.of(name, described)
        with turn(self.client), translated(name):
            aliases = self.client.get_collection_aliases(name).aliases
        return CollectionInfo(
            name=name,
            key_field="id",
            vector_fields=schema.vector_fields(described),
            rows=self.count(name) if counted else 0,
            partitions=PARTITIONS,
            aliases=tuple(each.alias_name for each in aliases if not is_fence(each.alias_name)),
            states=read_states(result),
            tuning=read_tuning(result),
            is_bank=BANK_PROPERTY in result,
            schema={"described": described},
            dual_write=read_dual_write(result),
            intent_log=read_intent_log(result),
            online_banks=read_online_banks(result),
        )

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        return schema.obstacles(source, field)

    def remarks(self, source: CollectionInfo, field: str) -> list[str]:
        return schema.remarks(source)

    def width_multiple(self, field: VectorField) -> int:
        return schema.width_multiple(field)

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        if planned != source:
            raise InvalidParameter("this database makes a copy's index as the source's: name none for it")

    def takes_graph_hint(self, source: CollectionInfo, field: str) -> bool:
        return schema.takes_graph_hint(source, field)

    def takes_locality_hints(self, source: CollectionInfo, field: str) -> bool:
        return schema.takes_locality_hints(source, field)

    def units_moved(self) -> int:
        return self.units

    def renames(self) -> bool:
        return False

    def schema_facts(self, source: CollectionInfo) -> dict[str, Any]:
        return schema.facts(source)

    def chunk_rows(self, source: CollectionInfo) -> int:
        numbers = sum(params.size for params in schema.dense(source.schema["described"]).values())
        return max(16, min(2_000, CHUNK_BYTES // (ROW_OVERHEAD_BYTES + 4 * numbers)))

    def nearest(self, collection: str, field: str, query_vectors: Floats, k: int) -> list[list[Key]]:
        form = self.form(collection, field)
        queries = decode(form.form.encode_queries(query_vectors), form.form.dtype).tolist()
        found: list[list[Key]] = []
        for start in range(0, len(queries), QUERIES_PER_REQUEST):
            requests = [
                models.QueryRequest(query=query, using=field or None, limit=k, with_payload=False)
                for query in queries[start : start + QUERIES_PER_REQUEST]
            ]
            answers = self.ask("query_batch_points", collection, requests=requests, **self._reads)
            found += [[point.id for point in answer.points] for answer in answers]
        return found

    def read_vectors(self, collection: str, field: str | None = None) -> QueryBank:
        info = self.info(collection)
        if field is None:
            if len(info.users_fields) != 1:
                names = ", ".join(map(repr, info.users_fields)) or "none"
                raise InvalidInput(f"name the vector of {collection!r} to read, there are: {names}")
            [field] = info.users_fields
        info.require_field(field)
        state = info.states.get(field)
        if state is not None and not state.leaves_vectors:
            raise InvalidInput(f"{collection!r} is a corrected collection: its stored vectors are no queries")
        vectors, _ = self._whole(info.name, field, self.keys(info.name))
        if not len(vectors):
            raise EmptyBank(f"collection {collection!r} is empty: a bank needs at least one query")
        return QueryBank(vectors, source=f"qdrant:{collection}")

    # -- the corrected copy ---------------------------------------------------------------------------

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        if self.exists(target):
            found = self._states(target, self.ask("get_collection", target)).get(state.field)
            if found is None or (found.migration, found.phase) != (state.migration, "copying"):
                raise CollectionExists(f"the name {target!r} is taken: choose another with --target")
        else:
            metadata = schema.copied_metadata(source, state) if self.properties.in_metadata else None
            if metadata is None:
                result = self.properties.of(source.name, source.schema["described"])
                kept = {each.property_name: result[each.property_name] for each in source.states.values()}
                self.properties.alter(target, {**kept, state.property_name: state.to_json()})
            self.ask("create_collection", target, **schema.copy_config(source, state, metadata))
        for name, index in (source.schema["described"].payload_schema or {}).items():
            how = index.params if index.params is not None else index.data_type
            self.ask("create_payload_index", target, field_name=name, field_schema=how)

    # -- biases beside the vectors ----------------------------------------------------------------------

    def bias_fields(self, source: CollectionInfo, suffix: str) -> Literal["there", "can be added", "none"]:
        """Payloads take any key; the score of Euclid, a root, is none to subtract a bias from."""
        metrics = {each.metric for each in source.users_fields.values()}
        return "there" if metrics & BIAS_METRICS else "none"

    def bias_remarks(self, source: CollectionInfo, suffix: str) -> list[str]:
        return ["points that clients other than HubnessQdrantClient write have no bias until a refresh"]

    def add_bias_fields(self, collection: str, suffix: str) -> None:
        """Payloads take any key."""

    def is_left_side(self, source: CollectionInfo, side: str) -> bool:
        raise UnsupportedOperation(_NO_SIDE)

    def create_side(self, source: CollectionInfo, side: str) -> None:
        raise UnsupportedOperation(_NO_SIDE)

    def second_vector_field(
        self, source: CollectionInfo, field: str, suffix: str, width: int
    ) -> Literal["there", "can be added"]:
        raise CannotMigrate(_NO_SECOND)

    def second_vector_remarks(self, source: CollectionInfo, suffix: str) -> list[str]:
        return []

    def add_second_vector(self, source: CollectionInfo, field: str, suffix: str, width: int) -> None:
        raise UnsupportedOperation(_NO_SECOND)

    def load_second_vector(self, source: CollectionInfo, state: CollectionState) -> None:
        raise UnsupportedOperation(_NO_SECOND)

    def drop_second_vector(self, collection: str, state: CollectionState) -> bool:
        raise UnsupportedOperation(_NO_SECOND)

    # -- rows from files --------------------------------------------------------------------------------

    def import_obstacles(self, source: CollectionInfo) -> list[str]:
        return [_NO_IMPORT]

    def write_import_file(
        self, collection: str, batches: Iterable[Batch], field: str, folder: Path
    ) -> str | None:
        raise UnsupportedOperation(_NO_IMPORT)

    def bulk_import(self, collection: str, file: str, *, partition: str | None = None) -> str:
        raise UnsupportedOperation(_NO_IMPORT)

    def import_job(self, job: str) -> ImportJob:
        raise UnsupportedOperation(_NO_IMPORT)

    def import_jobs(self, collection: str) -> list[ImportJob]:
        return []

    def show_imported(self, collection: str) -> None:
        raise UnsupportedOperation(_NO_IMPORT)

    # -- what is done to a whole collection -------------------------------------------------------------

    def flush(self, collection: str) -> None:
        self.load(collection)

    def load(self, collection: str) -> None:
        is_building = retry_if_result(lambda seen: seen.status == models.CollectionStatus.YELLOW)
        Retrying(retry=is_building, wait=wait_exponential(0.1, max=5))(self.ask, "get_collection", collection)

    def wait_visible(self, collection: str) -> None:
        """Every write was waited for."""

    def write_state(self, collection: str, state: CollectionState) -> None:
        self.properties.alter(self._real_name(collection), {state.property_name: state.to_json()})

    def drop_state(self, collection: str, state: CollectionState) -> None:
        self.properties.alter(self._real_name(collection), {state.property_name: ""})

    def write_dual_write(self, collection: str, dual_write: DualWrite | None) -> None:
        said = dual_write.model_dump_json() if dual_write else ""
        self.properties.alter(self._real_name(collection), {DUAL_WRITE_PROPERTY: said})

    def write_tuning(self, collection: str, tuning: TuningRecord) -> None:
        self.properties.alter(self._real_name(collection), {TUNING_PROPERTY: tuning.model_dump_json()})

    def noted(
        self, collection: str, intent_log: WriteIntentLog, keys: Sequence[Key], field: str
    ) -> tuple[list[str], Batch]:
        raise UnsupportedOperation("Qdrant replaces no whole points: every note is replayed")

    def compact_notes(self, intent_log: WriteIntentLog, unused: frozenset[str]) -> frozenset[str]:
        """As Store.compact_notes: a note takes the place of the one before it."""
        return frozenset()

    def count_notes(self, intent_log: WriteIntentLog) -> int:
        return self.count(intent_log.collection) if self.exists(intent_log.collection) else 0

    def drop(self, collection: str) -> None:
        self.ask("delete_collection", collection)
        self.properties.forget(collection)

    def rename(self, collection: str, name: str) -> None:
        raise UnsupportedOperation("Qdrant cannot rename collections")

    def alias_target(self, alias: str) -> str | None:
        return self._behind(alias)

    def point_alias(self, alias: str, collection: str) -> None:
        made = create_alias(alias, collection)
        self.change_aliases([drop_alias(alias), made] if self._behind(alias) else [made], alias)

    def drop_alias(self, alias: str) -> None:
        self.change_aliases([drop_alias(alias)], alias)

    # -- live queries -----------------------------------------------------------------------------------

    def write_online_banks(self, collection: str, online_banks: Sequence[OnlineBank]) -> None:
        raise UnsupportedOperation(_NO_ONLINE_BANK)

    def create_query_samples(self, samples_collection: str, dim: int) -> None:
        raise UnsupportedOperation(_NO_ONLINE_BANK)

    def read_query_samples(self, samples_collection: str, profile: str) -> QuerySamples:
        raise UnsupportedOperation(_NO_ONLINE_BANK)

    def drop_samples(self, samples_collection: str, numbers: Sequence[int]) -> None:
        raise UnsupportedOperation(_NO_ONLINE_BANK)
