"""Ledgers as Qdrant collections without vectors: one point per record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from qdrant_client import models

from milvus_hubness import CollectionExists, CollectionNotFound
from milvus_hubness.extending import HelperLists, Record
from qdrant_hubness.store.limits import Limits
from qdrant_hubness.store.points import SURE, UUIDS, QdrantPoints, Scroll
from qdrant_hubness.store.properties import point_id

LEDGER_PROPERTY = "hubness_ledger"
_RECORDS_PER_REQUEST = 500


class QdrantLedger(QdrantPoints, HelperLists):
    """The ledger methods of the store."""

    def put_records(self, ledger: str, records: Sequence[Record]) -> None:
        """As Store.put_records."""
        points = [
            models.PointStruct(
                id=point_id(record.key),
                vector={},
                payload={"key": record.key, "group": record.group, "body": record.body},
            )
            for record in records
        ]
        limits = self._ensured.get(ledger)
        if limits is not None:
            try:
                self._upsert_records(ledger, points, limits)
                return
            except CollectionNotFound:
                # Assumes that somebody has dropped the ledger, and all records with it.
                self._ensured.forget(ledger)
        self._upsert_records(ledger, points, self._ensured_ledger(ledger))

    def _upsert_records(
        self, ledger: str, points: Sequence[models.PointStruct], limits: Limits
    ) -> None:
        for part in self._parts(points, limits):
            self.ask("upsert", ledger, points=part, **SURE)

    def record(self, ledger: str, key: str) -> Record | None:
        """As Store.record."""
        try:
            points = self.ask("retrieve", ledger, ids=[point_id(key)], **self._reads)
        except CollectionNotFound:
            return None
        return _record(points[0]) if points else None

    def records(self, ledger: str, *groups: str) -> list[Record]:
        """As Store.records."""

        def read(limits: Limits) -> list[Record]:
            # The id of a record is the UUID that its key gives.
            scroll = Scroll(page=_RECORDS_PER_REQUEST, where=_of(*groups), with_payload=True)
            return [_record(point) for point in self._records(ledger, UUIDS, limits, scroll)]

        try:
            records = self._within_limits(ledger, read)
        except CollectionNotFound:
            return []
        return sorted(records, key=lambda record: record.key)

    def drop_records(self, ledger: str, group: str, keys: Sequence[str] | None = None) -> None:
        """As Store.drop_records."""
        where = _of(group)
        if keys is not None:
            among = models.HasIdCondition(has_id=[point_id(key) for key in keys])
            where = models.Filter(must=[where, among])
        # Assumes that a ledger that does not exist has no records.
        with suppress(CollectionNotFound):
            self.ask("delete", ledger, points_selector=models.FilterSelector(filter=where), **SURE)

    def properties_of(self, collection: str) -> Mapping[str, Any]:
        """As Store.properties_of."""
        return self._properties(collection, self.ask("get_collection", collection))

    def _ensured_ledger(self, ledger: str) -> Limits:
        """Create the ledger if it does not exist. Return its limits.

        Raises CollectionExists for a collection that is no ledger.
        """
        try:
            described = self._described(ledger)
        except CollectionNotFound:
            self.make_collection(ledger, {LEDGER_PROPERTY: "1"}, vectors_config={})
            self.index_payload(ledger, "group", "keyword")
            described = self._described(ledger)
        if LEDGER_PROPERTY not in self._properties(ledger, described):
            raise CollectionExists(f"{ledger!r} exists and is not a ledger: rename it first")
        return self._ensured.put(ledger, Limits.of(described))


def _of(*groups: str) -> models.Filter:
    """Return the filter that selects the records of these groups."""
    among_groups = models.MatchAny(any=list(groups))
    return models.Filter(must=[models.FieldCondition(key="group", match=among_groups)])


def _record(point: Any) -> Record:
    return Record(point.payload["key"], point.payload["group"], point.payload["body"])
