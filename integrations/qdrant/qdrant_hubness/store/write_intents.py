"""Write-intent logs as Qdrant collections: one point for the last note of each vector.

A refresh replaces the vectors of existing points, or the biases in their payloads,
so it can undo no more of a write: a note has the vector and the biases that a
client is about to write. A refresh creates no deleted point again, so deletions
need no note. Qdrant orders the writes of one point and keeps its vector and
payload together, so the last note of a key is whole, and one collection is enough.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from qdrant_client import models

from milvus_hubness import CollectionExists, StateError
from milvus_hubness.extending import (
    CollectionId,
    CollectionInfo,
    CollectionState,
    Key,
    Note,
    PropertyModel,
    WriteIntentLog,
)
from qdrant_hubness.store import schema
from qdrant_hubness.store.banks import QdrantBanks
from qdrant_hubness.store.limits import Limits
from qdrant_hubness.store.points import partition_of
from qdrant_hubness.store.properties import point_id
from qdrant_hubness.store.requests import translated, turn
from qdrant_hubness.store.rows import OtherVector, named


class NotedFields(PropertyModel):
    """The vectors whose notes a log takes."""

    property_name: ClassVar[str] = "hubness_write_intents_fields"
    fields: tuple[str, ...]


_KEYS_PER_REQUEST = 500
"""Points, and notes, that one request reads: each comes with its vectors."""


def vector_name(field: str) -> str:
    """Return the name of a field's vector in the write-intent log."""
    return f"of_{field}"


def line_id(field: str, key: Key) -> str:
    """Return the id of the note about a field of a point."""
    return point_id(f"{field}\0{key!r}")


def line(
    field: str, key: Key, vector: Sequence[float], columns: dict[str, Any]
) -> models.PointStruct:
    """Return a note: the new vector of a point in a field, and the biases for its payload."""
    # The numbers are those that are sent as the point's, so nothing is left to validate.
    return models.PointStruct.model_construct(
        id=line_id(field, key),
        vector={vector_name(field): vector},
        payload={"key": key, "field": field, "name": uuid.uuid4().hex, "columns": columns},
    )


class QdrantWriteIntents(QdrantBanks):
    """The write-intent log methods of the store."""

    def create_intent_log(self, source: CollectionInfo) -> WriteIntentLog:
        """As Store.create_intent_log."""
        name = WriteIntentLog.new_name(source.name)
        params = schema.dense(source.schema["described"])
        vectors = {
            vector_name(field): models.VectorParams(
                size=params[field].size,
                distance=models.Distance.DOT,
                datatype=params[field].datatype,
                hnsw_config=models.HnswConfigDiff(m=0),
                multivector_config=params[field].multivector_config,
            )
            for field in source.states
        }
        properties = {
            WriteIntentLog.marker: source.collection_id.model_dump_json(),
            NotedFields.property_name: NotedFields(fields=tuple(source.states)).to_json(),
        }
        self.make_collection(name, properties, vectors_config=vectors)
        return WriteIntentLog(collection=name, made=uuid.uuid4().hex)

    def end_intent_log(self, collection: str, intent_log: WriteIntentLog) -> None:
        """As Store.end_intent_log, but the log is dropped: Qdrant creates another one quickly.

        Clients with an outdated state find no log, and read the state again.
        """
        # Clients that read the state from here on note nothing more.
        self.properties.alter(self._real_name(collection), {WriteIntentLog.property_name: ""})
        self.drop_intent_log(intent_log, lambda: None)

    def intent_logs(self, owner: CollectionId) -> list[WriteIntentLog]:
        """As Store.intent_logs."""
        with turn(self.client), translated(owner.name):
            names = [existing.name for existing in self.client.get_collections().collections]
        logs = []
        for name in WriteIntentLog.names_among(names, owner.name):
            log_of = WriteIntentLog.owner_in(self.properties_of(name))
            # Long names have a beginning in common.
            if log_of is not None and log_of.is_same(owner):
                logs.append(WriteIntentLog(collection=name, made=""))

        return logs

    def drop_intent_log(self, intent_log: WriteIntentLog, check: Callable[[], None]) -> None:
        """As Store.drop_intent_log.

        No job takes the write-intent log of another, and no two have the same name.
        """
        name = intent_log.collection
        if not self.exists(name):
            return
        if WriteIntentLog.marker not in self.properties_of(name):
            raise CollectionExists(f"{name!r} exists and is not a write-intent log: rename it")

        self.drop(name)

    def notes(
        self, intent_log: WriteIntentLog, keys: Sequence[Key], *, partition: str | None = None
    ) -> list[Note]:
        """As Store.notes."""
        if not self.count(intent_log.collection):
            return []
        return [_note(noted) for noted in self._lines(intent_log, keys)]

    def replay(
        self, collection: str, intent_log: WriteIntentLog, notes: Sequence[Note]
    ) -> list[Note]:
        """As Store.replay."""
        described = self.ask("get_collection", collection)
        states = self._states(collection, described)
        replayed: list[Note] = []
        size = min(_KEYS_PER_REQUEST, Limits.of(described).rows_per_read)
        for start in range(0, len(notes), size):
            # A key with several notes is read once.
            keys = list(dict.fromkeys(note.key for note in notes[start : start + size]))
            records = self.ask(
                "retrieve", collection, ids=keys, with_vectors=list(states), **self._reads
            )
            present = {record.id: record for record in records}

            for noted in self._lines(intent_log, keys):
                state = states.get(noted.payload["field"])
                record = present.get(noted.payload["key"])
                # Deleted, or no longer corrected: there is nothing that a job could have undone.
                if state is None or record is None:
                    continue
                if self._holds(record, noted, state, described):
                    continue
                if self._replay_line(collection, noted):
                    replayed.append(_note(noted))

        return replayed

    def _lines(self, intent_log: WriteIntentLog, keys: Sequence[Key]) -> list[Any]:
        fields = _noted_fields(self.properties_of(intent_log.collection), intent_log.collection)
        ids = [line_id(field, key) for key in keys for field in fields]
        lines: list[Any] = []
        size = min(_KEYS_PER_REQUEST, self._limits(intent_log.collection).rows_per_read)
        for start in range(0, len(ids), size):
            some_ids = ids[start : start + size]
            lines += self.ask(
                "retrieve", intent_log.collection, ids=some_ids, with_vectors=True, **self._reads
            )

        return lines

    def _holds(self, record: Any, noted: Any, state: CollectionState, described: Any) -> bool:
        """Whether a point has the noted vector and biases."""
        payload = record.payload or {}
        for name, value in noted.payload["columns"].items():
            if payload.get(name) != value:
                return False

        vector = named(record.vector).get(state.field)
        if vector is None:
            return False

        noted_vector = named(noted.vector)[vector_name(state.field)]
        normalisation = schema.normalised(described, self.units).get(state.field)
        return OtherVector(vector, normalisation) == OtherVector(noted_vector)

    def _replay_line(self, collection: str, noted: Any) -> bool:
        """Return whether the point still existed: what was deleted is not made again."""
        key = noted.payload["key"]
        field = noted.payload["field"]
        vector = named(noted.vector)[vector_name(field)]
        point = models.PointVectors(id=key, vector={field: vector} if field else vector)
        gone = self._update_vectors(collection, [point])

        columns = noted.payload["columns"]
        if columns:
            gone |= self._set_payload(collection, columns, [key])
        return not gone


def _note(noted: Any) -> Note:
    key = noted.payload["key"]
    return Note(key, partition_of(key), noted.payload["name"])


def _noted_fields(properties: Mapping[str, str], collection: str) -> tuple[str, ...]:
    """Return the fields whose writes are noted in a write-intent log. Raises StateError."""
    noted = NotedFields.read(properties, collection)
    if noted is None:
        raise StateError(f"the write-intent log {collection!r} names no fields: drop it")
    return noted.fields
