"""Write-intent logs as Milvus collections.

A **note** is what a client is about to do with the row of one key: write it, or delete it. While
a job rewrites rows, each client writes a note before it writes or deletes a row
(`milvus.client.write_intents`). The job reads the notes after each batch and replays those whose
writes its own write has undone (`jobs.common.row_writer`).

A log has two collections:

- one with the notes. A note has the key of the row, its partition, and the name of the noted row;
  an empty name notes a deletion. The database orders the notes under one key, and the last one
  counts.
- one with the **noted rows**, whole, as the clients are about to write them. It has the fields of
  the collection whose writes are noted. Its keys are the names, which clients create, so no noted
  row is ever overwritten.

Only the job removes anything: while it runs, the noted rows that no note names any more
(`compact_notes`), and at its end all notes and noted rows (`end_intent_log`). A note has the mark
of its job, `made`, and the name of a noted row begins with it: so late notes of a client that had
not seen the end of an earlier job are distinguished from those for the next one.

Both collections take seconds to create, so they stay from one job to the next, empty in between.
No two logs ever have the same name, and a log is marked before it is dropped, so that no other
job takes it: a late request to drop it drops nothing that is in use.
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
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.records import (
    WRITE_INTENTS_PROPERTY,
    CollectionInfo,
    Note,
    WriteIntentLog,
)
from milvus_hubness.milvus.filters import is_one_of, literal
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.requests import MilvusRequests
from milvus_hubness.milvus.store.server import ROWS_PER_REQUEST, in_parts, translated

SCHEMA_DIGEST_PROPERTY = "hubness_write_intents_fits"
"""Property of a log: the digest of the schema of the collection whose writes are noted."""

RETIRED_PROPERTY = "hubness_write_intents_retired"
"""Property that marks a write-intent log that is about to be dropped."""

NOTE_KEY_FIELD = "note_key"
"""Primary key of the notes; see `note_key`."""

NAME_FIELD = "hubness_row_name"
"""Primary key of the noted rows: their names."""


def note_key(intent_log: WriteIntentLog, key: Key, partition: str | None) -> str:
    """Return the primary key of the note about a row."""
    identity = f"{intent_log.made}\0{partition_of(intent_log, partition)}\0{key}"
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def partition_of(intent_log: WriteIntentLog, partition: str | None) -> str:
    """Return the partition within which keys are unique.

    Empty if they are unique in the whole collection.
    """
    return (partition or "_default") if intent_log.by_partition else ""


def new_row_name(intent_log: WriteIntentLog) -> str:
    """Return a new name for a noted row."""
    return intent_log.made + uuid.uuid4().hex


def stored_note(
    intent_log: WriteIntentLog,
    key: Key,
    partition: str | None,
    row_name: str,
    changed: Collection[str] = (),
) -> Row:
    """Return the note about a row, as stored.

    row_name: of the noted row; empty for a deletion. changed: see `Note`.
    """
    return {
        NOTE_KEY_FIELD: note_key(intent_log, key, partition),
        "made": intent_log.made,
        "key": key,
        "partition": partition or "",
        "name": row_name,
        "id": uuid.uuid4().hex,
        "changed": json.dumps(sorted(changed)) if changed else "",
        # Every Milvus collection must have a vector field.
        "vector": [0.0, 0.0],
    }


def changed_in(note: Row) -> tuple[str, ...]:
    """Return the fields that a partial update changes, from a note as stored."""
    if not note["changed"]:
        return ()

    title = f"the note {note[NOTE_KEY_FIELD]!r} of a write"
    fields = read_value(note["changed"], title, "run refresh again")
    if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
        raise StateError(f"{title} names no fields: run refresh again")
    return tuple(fields)


def row_names_in(
    intent_log: WriteIntentLog, notes: Sequence[Row], keys: Sequence[Key], partition: str | None
) -> dict[Key, str]:
    """Return the names of the noted rows by key, for those keys that have a note among `notes`."""
    names = {note[NOTE_KEY_FIELD]: str(note["name"]) for note in notes}
    note_keys = {key: note_key(intent_log, key, partition) for key in keys}
    return {key: names[note] for key, note in note_keys.items() if note in names}


def notes_filter(intent_log: WriteIntentLog, keys: Sequence[Key], partition: str | None) -> str:
    """Return the filter that picks the notes about these rows."""
    return is_one_of(NOTE_KEY_FIELD, [note_key(intent_log, key, partition) for key in keys])


class MilvusWriteIntents(MilvusRequests):
    """The write-intent log methods of the store."""

    drop: Callable[[str], None]

    def create_intent_log(self, source: CollectionInfo) -> WriteIntentLog:
        digest = _schema_digest(source)
        fields_of_log: dict[str, Any] = {
            # These digits sort by time.
            "made": f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}",
            "auto_id": bool(milvus_schema.key_field(source.schema).get("auto_id")),
            "by_partition": source.partitions != (None,),
        }

        for earlier_log in self.intent_logs(source.collection_id):
            if self._fits(earlier_log, digest):
                return earlier_log.model_copy(update=fields_of_log)

        intent_log = WriteIntentLog(
            collection=WriteIntentLog.new_name(source.name), **fields_of_log
        )
        self._create_log_collections(source, intent_log, digest)
        return intent_log

    def _create_log_collections(
        self, source: CollectionInfo, intent_log: WriteIntentLog, digest: str
    ) -> None:
        with translated(source.name):
            indexes = self._indexes(source.name)
        properties = {
            WriteIntentLog.marker: source.collection_id.model_dump_json(),
            SCHEMA_DIGEST_PROPERTY: digest,
        }

        with translated(intent_log.collection):
            self._create_loaded(
                intent_log.collection,
                schema=_notes_schema(source),
                index_params=milvus_schema.flat_index("vector", "IP"),
                properties=properties,
                consistency_level="Strong",
            )

        # Noted rows live no longer than the rows themselves: a job that is resumed after that does
        # not bring an expired row back.
        if source.time_to_live:
            properties = {**properties, milvus_schema.TTL_PROPERTY: str(source.time_to_live)}
        with translated(intent_log.rows):
            self._create_loaded(
                intent_log.rows,
                schema=_rows_schema(source),
                index_params=_rows_index(source.schema, indexes),
                properties=properties,
                consistency_level="Strong",
            )

    def _fits(self, intent_log: WriteIntentLog, digest: str) -> bool:
        """Whether both collections exist in full and can take the rows to be noted."""
        return all(
            self._collection_fits(name, digest) for name in (intent_log.collection, intent_log.rows)
        )

    def _collection_fits(self, collection: str, digest: str) -> bool:
        if not self.exists(collection):
            return False

        with translated(collection):
            properties = self.client.describe_collection(collection)["properties"]
            if properties.get(SCHEMA_DIGEST_PROPERTY) != digest:
                return False
            if properties.get(RETIRED_PROPERTY):
                return False

            load_state = self.client.get_load_state(collection)["state"].name
            if load_state == "NotExist" or not self.client.list_indexes(collection):
                return False
            if load_state != "Loaded":
                self._load(collection)

        return True

    def end_intent_log(self, collection: str, intent_log: WriteIntentLog) -> None:
        # Clients stop noting before the notes go.
        self.write_property(collection, WRITE_INTENTS_PROPERTY, None)
        if self.exists(intent_log.collection) and self.exists(intent_log.rows):
            # "~" sorts after every digit.
            self._forget_notes(intent_log, before=intent_log.made + "~")

    def _forget_notes(self, intent_log: WriteIntentLog, *, before: str) -> None:
        """Delete the notes for jobs that started before `before`.

        Those of the successor of a stopped process stay.
        """

        def forget(collection: str, field: str) -> None:
            with translated(collection):
                if self._count(collection):
                    self.client.delete(collection, filter=f"{field} < {literal(before)}")

        with ThreadPoolExecutor(1, "intent-log") as executor:
            forgetting_notes = executor.submit(forget, intent_log.collection, "made")
            # A name begins with `made`.
            forget(intent_log.rows, NAME_FIELD)
            forgetting_notes.result()

    def intent_logs(self, owner: CollectionId) -> list[WriteIntentLog]:
        names = WriteIntentLog.names_among(self.client.list_collections(), owner.name)
        logs = [WriteIntentLog(collection=name, made="") for name in names]
        return [intent_log for intent_log in logs if self._is_log_of(intent_log, owner)]

    def _is_log_of(self, intent_log: WriteIntentLog, owner: CollectionId) -> bool:
        """Whether the collections of a log that exist belong to this collection.

        The name alone decides nothing: long names have a beginning in common, and a log keeps its
        name when its collection is renamed.
        """
        for collection in (intent_log.collection, intent_log.rows):
            if not self.exists(collection):
                continue

            with translated(collection):
                properties = self.properties_of(collection)
                log_of = WriteIntentLog.owner_in(properties)
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
            if WriteIntentLog.marker not in properties:
                raise CollectionExists(
                    f"{collection!r} exists and is not a write-intent log: rename it"
                )

            # From here on no job takes the log, so that a late request to drop it does no harm.
            self._alter_properties(collection, {RETIRED_PROPERTY: "1"})

        check()
        for collection in collections:
            self.drop(collection)

    def notes(
        self, intent_log: WriteIntentLog, keys: Sequence[Key], *, partition: str | None = None
    ) -> list[Note]:
        if not self.count(intent_log.collection):
            return []

        note_keys = [note_key(intent_log, key, partition) for key in keys]
        notes = self.get(intent_log.collection, note_keys, "vector").rows
        return [
            Note(
                key=note["key"],
                partition=note["partition"] or None,
                row=note["name"] or None,
                changed=changed_in(note),
                id=note["id"],
            )
            for note in notes
        ]

    def noted(
        self, collection: str, intent_log: WriteIntentLog, keys: Sequence[Key], field: str
    ) -> tuple[list[str], Batch]:
        schema = self.client.describe_collection(collection)
        key_field = milvus_schema.key_field(schema)["name"]
        with translated(intent_log.rows):
            rows = self._rows(intent_log.rows, key_field, keys, None)

        # One key may have several noted rows, so they are distinguished by their names.
        rows_by_name = {row.pop(NAME_FIELD): row for row in rows}
        names = list(rows_by_name)
        batch = self._batch(schema, field, names, rows_by_name)
        keys_of_rows = [row[key_field] for row in batch.rows]
        return names, Batch(keys_of_rows, batch.vectors, batch.rows)

    def compact_notes(self, intent_log: WriteIntentLog, unused: frozenset[str]) -> frozenset[str]:
        newly_unused: set[str] = set()
        last_name: Key | None = None
        while names := self.scan_keys(intent_log.rows, limit=ROWS_PER_REQUEST, after=last_name):
            last_name = names[-1]
            notes = self._query(intent_log.collection, is_one_of("name", names), ["name"])
            without_note = {str(name) for name in names} - {note["name"] for note in notes}

            # A row is stored before its note, so one look proves nothing: only rows that lacked a
            # note at the last compaction too are dropped.
            self._delete_in(intent_log.rows, NAME_FIELD, sorted(without_note & unused))
            newly_unused |= without_note - unused

        return frozenset(newly_unused)

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

        replayed = []
        for partition, notes_of_partition in by_partition.items():
            for some_notes in in_parts(notes_of_partition):
                replayed += self._replay(collection, schema, intent_log, some_notes, partition)
        return replayed

    def _replay(
        self,
        collection: str,
        schema: Row,
        intent_log: WriteIntentLog,
        notes: Sequence[Note],
        partition: str | None,
    ) -> list[Note]:
        names = [note.row for note in notes if note.row is not None]
        noted_rows = self._by_value(intent_log.rows, schema, NAME_FIELD, names, None)
        for row in noted_rows.values():
            row.pop(NAME_FIELD)
        # A row that a note names disappears once its client has replaced the note.
        notes = [note for note in notes if note.row is None or note.row in noted_rows]

        within = partition_of(intent_log, partition) or None
        key_field = milvus_schema.key_field(schema)["name"]
        keys = [note.key for note in notes]
        stored_rows = self._by_value(collection, schema, key_field, keys, within)

        # A write that the collection still shows needs no replay, which would be a write itself.
        undone_writes = [
            note
            for note in notes
            if note.row is not None and stored_rows.get(note.key) != noted_rows[note.row]
        ]
        undone_deletions = [note for note in notes if note.row is None and note.key in stored_rows]
        if undone_writes:
            rows = [noted_rows[note.row] for note in undone_writes if note.row]
            self._upsert(collection, rows, partition)
        if undone_deletions:
            self.delete(collection, [note.key for note in undone_deletions], partition=within)
        return undone_writes + undone_deletions

    def _by_value(
        self, collection: str, schema: Row, field: str, values: Sequence[Any], partition: str | None
    ) -> dict[Any, Row]:
        """Return rows in the form that inserts take, by the value of a unique field."""
        if not values:
            return {}

        with translated(collection):
            self._ensure_loaded(collection)
            by_value = self._by_key(collection, field, values, partition)
        rows = self._insertable(by_value.values(), schema)
        return dict(zip(by_value, rows, strict=True))


def _schema_digest(source: CollectionInfo) -> str:
    facts = milvus_schema.facts(source)
    digested = [facts["fields"], facts["functions"], facts["dynamic"], source.time_to_live]
    return hashlib.blake2b(json.dumps(digested).encode(), digest_size=16).hexdigest()


def _notes_schema(source: CollectionInfo) -> CollectionSchema:
    schema = MilvusClient.create_schema(
        description=f"write-intent log of {source.name}", enable_dynamic_field=False
    )
    schema.add_field(NOTE_KEY_FIELD, DataType.VARCHAR, is_primary=True, max_length=64)

    key = milvus_schema.key_field(source.schema)
    limits = {name: value for name, value in key.get("params", {}).items() if name == "max_length"}
    schema.add_field("key", DataType(key["type"]), **limits)

    schema.add_field("made", DataType.VARCHAR, max_length=64)
    schema.add_field("partition", DataType.VARCHAR, max_length=1_024)
    schema.add_field("name", DataType.VARCHAR, max_length=64)
    schema.add_field("id", DataType.VARCHAR, max_length=64)
    schema.add_field("changed", DataType.VARCHAR, max_length=65_535)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    return schema


def _rows_schema(source: CollectionInfo) -> CollectionSchema:
    """Return the schema of the noted rows.

    It has the source's fields, except those that the server computes, and the name as the key.
    """
    name_field = {
        "name": NAME_FIELD,
        "type": DataType.VARCHAR,
        "params": {"max_length": 64},
        "is_primary": True,
    }
    no_key = {
        "is_primary": False,
        "auto_id": False,
        "is_partition_key": False,
        "is_clustering_key": False,
    }
    computed = milvus_schema.computed_by(source.schema)
    fields = [
        {**field, **no_key} for field in source.schema["fields"] if field["name"] not in computed
    ]
    described = {**source.schema, "fields": [name_field, *fields], "functions": []}
    return CollectionSchema.construct_from_dict(described)


def _rows_index(schema: dict[str, Any], indexes: Sequence[dict[str, Any]]) -> IndexParams:
    """Return an index for each vector field: FLAT if it is dense, or else that of the source."""
    types = {field["name"]: field["type"] for field in schema["fields"]}
    computed = milvus_schema.computed_by(schema)

    params = MilvusClient.prepare_index_params()
    for index in indexes:
        field = index["field_name"]
        if field in computed or not index.get("metric_type"):
            continue

        is_dense = types[field] in milvus_schema.DTYPES
        params.add_index(
            field,
            index_type="FLAT" if is_dense else index["index_type"],
            index_name=field,
            metric_type=index["metric_type"],
            params={} if is_dense else milvus_schema.build_params(index),
        )

    return params
