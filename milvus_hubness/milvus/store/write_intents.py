"""Write-intent logs as Milvus collections: one with the notes, one with the noted rows.

The collection of rows has the fields of the collection whose writes are noted, and names that clients create as keys,
so no noted row is ever overwritten. The collection of notes decides: the database orders the notes under one key, and
the last one counts.

Both take seconds to create, so they stay from one job to the next, empty in between. Notes have the name of their job,
which separates them from late notes of clients that had not seen the end of an earlier job. No two logs ever have the
same name, and a log is marked before it is dropped, so that no other job takes it: a late request to drop it drops
nothing that is in use.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pymilvus import CollectionSchema, DataType, MilvusClient
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.basics.bounds import read_value
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import CollectionExists, StateError
from milvus_hubness.jobs.store.generations import Batch, Row
from milvus_hubness.jobs.store.ownership import WRITE_INTENTS_OF_PROPERTY, CollectionId, owner_in
from milvus_hubness.jobs.store.records import (
    WRITE_INTENTS_PROPERTY,
    CollectionInfo,
    Note,
    WriteIntentLog,
    intent_log_name,
    intent_logs_among,
)
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.requests import MilvusRequests
from milvus_hubness.milvus.store.server import (
    ROWS_PER_REQUEST,
    in_parts,
    is_one_of,
    literal,
    translated,
)

FITS_PROPERTY = (
    "hubness_write_intents_fits"  # Digest of the schema of the collection whose writes are noted.
)
RETIRED_PROPERTY = (
    "hubness_write_intents_retired"  # Marks a write-intent log that is about to be dropped.
)
NAME_FIELD = "hubness_note"  # Field with the name of a noted row.


def place_of(intent_log: WriteIntentLog, key: Key, partition: str | None) -> str:
    """Return the key of a row's note in the write-intent log."""
    place = f"{intent_log.made}\0{partition_of(intent_log, partition)}\0{key}"
    return hashlib.blake2b(place.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def partition_of(intent_log: WriteIntentLog, partition: str | None) -> str:
    """Return the partition within which keys are unique; empty if they are unique in the whole collection."""
    return (partition or "_default") if intent_log.by_partition else ""


def line(
    intent_log: WriteIntentLog,
    key: Key,
    partition: str | None,
    name: str,
    changed: Collection[str] = (),
) -> Row:
    """Return the note of a row, as stored. name: of the noted row; empty for a deletion. changed: see Note."""
    return {
        "place": place_of(intent_log, key, partition),
        "made": intent_log.made,
        "key": key,
        "partition": partition or "",
        "name": name,
        "id": uuid.uuid4().hex,
        "changed": json.dumps(sorted(changed)) if changed else "",
        "vector": [0.0, 0.0],
    }


class MilvusWriteIntents(MilvusRequests):
    def create_intent_log(self, source: CollectionInfo) -> WriteIntentLog:
        fits = _digest(source)
        made = f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}"  # These digits sort by time.
        facts: dict[str, Any] = {
            "made": made,
            "auto_id": bool(milvus_schema.key_field(source.schema).get("auto_id")),
            "by_partition": source.partitions != (None,),
        }
        for left in self.intent_logs(source.collection_id):
            if self._fits(left, fits):
                return left.model_copy(update=facts)
        intent_log = WriteIntentLog(collection=intent_log_name(source.name), **facts)
        with translated(source.name):
            indexes = self._indexes(source.name)
        ttl = source.time_to_live
        parts = {
            intent_log.collection: (
                _lines_schema(source),
                milvus_schema.flat_index("vector", "IP"),
            ),
            intent_log.rows: (_rows_schema(source), _rows_index(source.schema, indexes)),
        }
        for collection, (schema, index) in parts.items():
            with translated(collection):
                self._create_loaded(
                    collection,
                    schema=schema,
                    index_params=index,
                    properties={
                        WRITE_INTENTS_OF_PROPERTY: source.collection_id.model_dump_json(),
                        FITS_PROPERTY: fits,
                        # Noted rows live no longer than the rows themselves: a job that is resumed
                        # after that does not bring an expired row back.
                        **(
                            {milvus_schema.TTL_PROPERTY: str(ttl)}
                            if ttl and collection == intent_log.rows
                            else {}
                        ),
                    },
                    consistency_level="Strong",
                )
        return intent_log

    def _fits(self, intent_log: WriteIntentLog, fits: str) -> bool:
        """Whether both collections exist in full and can take the rows to be noted."""
        for collection in (intent_log.collection, intent_log.rows):
            if not self.exists(collection):
                return False
            with translated(collection):
                properties = self.client.describe_collection(collection)["properties"]
                if properties.get(FITS_PROPERTY) != fits or properties.get(RETIRED_PROPERTY):
                    return False
                state = self.client.get_load_state(collection)["state"].name
                if state == "NotExist" or not self.client.list_indexes(collection):
                    return False
                if state != "Loaded":
                    self._load(collection)
        return True

    def end_intent_log(self, collection: str, intent_log: WriteIntentLog) -> None:
        self.write_property(collection, WRITE_INTENTS_PROPERTY, None)
        if self.exists(intent_log.collection) and self.exists(intent_log.rows):
            # "~" sorts after every digit.
            self._forget_notes(intent_log, before=intent_log.made + "~")

    def _forget_notes(self, intent_log: WriteIntentLog, *, before: str) -> None:
        """Delete the notes for jobs that started before `before`: not those of a successor of a stopped process."""

        def forget(collection: str, field: str) -> None:
            with translated(collection):
                # The newest notes may not be visible yet: the next job deletes them.
                if self._count(collection, consistency_level="Eventually"):
                    self.client.delete(collection, filter=f"{field} < {literal(before)}")

        with ThreadPoolExecutor(1, "intent-log") as executor:
            lines = executor.submit(forget, intent_log.collection, "made")
            forget(intent_log.rows, NAME_FIELD)
            lines.result()

    def intent_logs(self, owner: CollectionId) -> list[WriteIntentLog]:
        names = intent_logs_among(self.client.list_collections(), owner.name)
        logs = [WriteIntentLog(collection=name, made="") for name in names]
        return [intent_log for intent_log in logs if self._is_log_of(intent_log, owner)]

    def _is_log_of(self, intent_log: WriteIntentLog, owner: CollectionId) -> bool:
        """Whether the parts of a log that exist are those of this collection: long names have a beginning in common,
        and a log keeps its name when its collection is renamed."""
        for collection in (intent_log.collection, intent_log.rows):
            if self.exists(collection):
                with translated(collection):
                    log_of = owner_in(self.properties_of(collection), WRITE_INTENTS_OF_PROPERTY)
                if log_of is None or not log_of.is_same(owner):
                    return False
        return True

    def drop_intent_log(self, intent_log: WriteIntentLog, check: Callable[[], None]) -> None:
        collections = [
            name for name in (intent_log.collection, intent_log.rows) if self.exists(name)
        ]
        for collection in collections:
            with translated(collection):
                properties = self.client.describe_collection(collection)["properties"]
            if WRITE_INTENTS_OF_PROPERTY not in properties:
                raise CollectionExists(
                    f"{collection!r} exists and is not a write-intent log: rename it"
                )
            self._alter_properties(collection, {RETIRED_PROPERTY: "1"})
        check()
        for collection in collections:
            self.drop(collection)

    def notes(
        self, intent_log: WriteIntentLog, keys: Sequence[Key], *, partition: str | None = None
    ) -> list[Note]:
        if not self.count(intent_log.collection):
            return []
        places = [place_of(intent_log, key, partition) for key in keys]
        return [
            Note(
                row["key"],
                row["partition"] or None,
                row["name"] or None,
                changed_in(row),
                row["id"],
            )
            for row in self.get(intent_log.collection, places, "vector").rows
        ]

    def noted(
        self, collection: str, intent_log: WriteIntentLog, keys: Sequence[Key], field: str
    ) -> tuple[list[str], Batch]:
        schema = self.client.describe_collection(collection)
        key_field = milvus_schema.key_field(schema)["name"]
        with translated(intent_log.rows):
            rows = self._rows(intent_log.rows, key_field, keys, None)
        by_name = {row.pop(NAME_FIELD): row for row in rows}
        batch = self._batch(schema, field, list(by_name), by_name)
        return list(by_name), Batch(
            [row[key_field] for row in batch.rows], batch.vectors, batch.rows
        )

    def compact_notes(self, intent_log: WriteIntentLog, unused: frozenset[str]) -> frozenset[str]:
        left: set[str] = set()
        last: Key | None = None
        while names := self.scan_keys(intent_log.rows, limit=ROWS_PER_REQUEST, after=last):
            last = names[-1]
            lines = self._query(intent_log.collection, is_one_of("name", names), ["name"])
            spare = {str(name) for name in names} - {line["name"] for line in lines}
            self._delete_in(intent_log.rows, NAME_FIELD, sorted(spare & unused))
            left |= spare - unused
        return frozenset(left)

    def count_notes(self, intent_log: WriteIntentLog) -> int:
        return sum(
            self.count(name)
            for name in (intent_log.collection, intent_log.rows)
            if self.exists(name)
        )

    def replay(
        self, collection: str, intent_log: WriteIntentLog, notes: Sequence[Note]
    ) -> list[Note]:
        schema = self.client.describe_collection(collection)
        by_partition: dict[str | None, list[Note]] = {}
        for note in notes:
            by_partition.setdefault(note.partition, []).append(note)
        done = []
        for partition, noted in by_partition.items():
            for part in in_parts(noted):
                done += self._replay(collection, schema, intent_log, part, partition)
        return done

    def _replay(
        self,
        collection: str,
        schema: Row,
        intent_log: WriteIntentLog,
        notes: Sequence[Note],
        partition: str | None,
    ) -> list[Note]:
        names = [note.row for note in notes if note.row is not None]
        noted = self._by_value(intent_log.rows, schema, NAME_FIELD, names, None)
        # A row that a note names disappears once its client has replaced the note.
        notes = [note for note in notes if note.row is None or note.row in noted]
        for row in noted.values():
            row.pop(NAME_FIELD)
        within = partition_of(intent_log, partition) or None
        key_field = milvus_schema.key_field(schema)["name"]
        stored = self._by_value(collection, schema, key_field, [note.key for note in notes], within)
        deleted = [note for note in notes if note.row is None and note.key in stored]
        changed = [
            note
            for note in notes
            if note.row is not None and stored.get(note.key) != noted[note.row]
        ]
        if changed:
            self._upsert(collection, [noted[note.row] for note in changed if note.row], partition)
        if deleted:
            self.delete(collection, [note.key for note in deleted], partition=within)
        return changed + deleted

    def _by_value(
        self, collection: str, schema: Row, field: str, values: Sequence[Any], partition: str | None
    ) -> dict[Any, Row]:
        """Return the rows with these values of a unique field, in the form that inserts take, by value."""
        if not values:
            return {}
        with translated(collection):
            self._ensure_loaded(collection)
            by_value = self._by_key(collection, field, values, partition)
        rows = self._insertable(by_value.values(), schema)
        return dict(zip(by_value, rows, strict=True))


def name_for(intent_log: WriteIntentLog) -> str:
    return intent_log.made + uuid.uuid4().hex


def _digest(source: CollectionInfo) -> str:
    facts = milvus_schema.facts(source)
    result = json.dumps(
        [facts["fields"], facts["functions"], facts["dynamic"], source.time_to_live]
    )
    return hashlib.blake2b(result.encode(), digest_size=16).hexdigest()


def changed_in(line: Row) -> tuple[str, ...]:
    """Return the fields that a partial update changes, from a note as stored."""
    if not line["changed"]:
        return ()
    fields = read_value(
        line["changed"], f"the note {line['place']!r} of a write", "run refresh again"
    )
    if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
        raise StateError(
            f"the note {line['place']!r} of a write names no fields: run refresh again"
        )
    return tuple(fields)


def names_in(
    intent_log: WriteIntentLog, lines: Sequence[Row], keys: Sequence[Key], partition: str | None
) -> dict[Key, str]:
    """Return the names of the noted rows, for those of these keys that have a note among `lines`."""
    by_place = {line["place"]: str(line["name"]) for line in lines}
    places = {key: place_of(intent_log, key, partition) for key in keys}
    return {key: by_place[place] for key, place in places.items() if place in by_place}


def picked(intent_log: WriteIntentLog, keys: Sequence[Key], partition: str | None) -> str:
    return is_one_of("place", [place_of(intent_log, key, partition) for key in keys])


def _lines_schema(source: CollectionInfo) -> CollectionSchema:
    key = milvus_schema.key_field(source.schema)
    limits = {name: value for name, value in key.get("params", {}).items() if name == "max_length"}
    schema = MilvusClient.create_schema(
        description=f"write-intent log of {source.name}", enable_dynamic_field=False
    )
    schema.add_field("place", DataType.VARCHAR, is_primary=True, max_length=64)
    schema.add_field("key", DataType(key["type"]), **limits)
    for name, length in {
        "made": 64,
        "partition": 1_024,
        "name": 64,
        "id": 64,
        "changed": 65_535,
    }.items():
        schema.add_field(name, DataType.VARCHAR, max_length=length)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    return schema


def _rows_schema(source: CollectionInfo) -> CollectionSchema:
    """Return a schema with the source's fields, except those that the server computes; none of them is a key."""
    computed = milvus_schema.function_outputs(source.schema)
    no_key = {
        "is_primary": False,
        "auto_id": False,
        "is_partition_key": False,
        "is_clustering_key": False,
    }
    name = {
        "name": NAME_FIELD,
        "type": DataType.VARCHAR,
        "params": {"max_length": 64},
        "is_primary": True,
    }
    fields = [
        {**field, **no_key} for field in source.schema["fields"] if field["name"] not in computed
    ]
    described = {**source.schema, "fields": [name, *fields], "functions": []}
    return CollectionSchema.construct_from_dict(described)


def _rows_index(schema: dict[str, Any], indexes: Sequence[dict[str, Any]]) -> IndexParams:
    """Return an index for each vector field: FLAT if it is dense, or else that of the source."""
    kinds = {field["name"]: field["type"] for field in schema["fields"]}
    computed = milvus_schema.function_outputs(schema)
    params = MilvusClient.prepare_index_params()
    for index in indexes:
        field = index["field_name"]
        if field in computed or not index.get("metric_type"):
            continue
        is_dense = kinds[field] in milvus_schema.DTYPES
        params.add_index(
            field,
            index_type="FLAT" if is_dense else index["index_type"],
            index_name=field,
            metric_type=index["metric_type"],
            params={} if is_dense else milvus_schema.build_params(index),
        )
    return params
