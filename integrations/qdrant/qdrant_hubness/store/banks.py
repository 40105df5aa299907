"""Query banks as Qdrant collections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qdrant_client import models

from milvus_hubness.layout import Floats, Metric
from milvus_hubness.state import BankReference, CollectionState
from milvus_hubness.stores.bank_generations import BANK_PROPERTY, BankGenerations
from milvus_hubness.stores.base import Key
from qdrant_hubness.store import schema
from qdrant_hubness.store.ledger import QdrantLedger
from qdrant_hubness.store.points import NUMBERS, SURE
from qdrant_hubness.store.rows import UNNAMED


class QdrantBanks(QdrantLedger, BankGenerations):
    """The bank methods of the store. A bank is only ever read whole, and needs no index."""

    database = "qdrant"

    def save_nearest(
        self, reference: BankReference, collection: str, nearest: Sequence[Sequence[Key]]
    ) -> BankReference:
        """As Store.save_nearest."""
        first, second = (f"nearest_{collection}_{place}" for place in (0, 1))
        renewed = reference.model_copy(update={"nearest": second if reference.nearest == first else first})
        ids = self._bank_ids(reference)
        told = [
            (id, {renewed.nearest: list(nearest[i]) if i < len(nearest) else []}) for i, id in enumerate(ids)
        ]
        for part in self._parts(told, self.form(reference.collection, UNNAMED)):
            self._set_payloads(reference.collection, part)
        return renewed

    def _make_bank(self, collection: str, dim: int) -> None:
        vectors = models.VectorParams(
            size=dim, distance=models.Distance.DOT, hnsw_config=models.HnswConfigDiff(m=0)
        )
        self.make_collection(collection, {BANK_PROPERTY: "{}"}, vectors_config=vectors)
        if not self.is_local:
            self.ask("create_payload_index", collection, field_name="generation", field_schema="integer")

    def _serve_bank(self, collection: str, metric: Metric) -> None:
        """Qdrant serves every collection that is there."""

    def _told_of_bank(self, collection: str) -> tuple[int, str | None]:
        described = self.ask("get_collection", collection)
        params = schema.dense(described).get(UNNAMED)
        return params.size if params else 0, self._told(collection, described).get(BANK_PROPERTY)

    def _tell_of_bank(self, collection: str, told: str) -> None:
        self.properties.alter(self._real_name(collection), {BANK_PROPERTY: told})

    def _put_bank_rows(self, collection: str, rows: list[dict[str, Any]]) -> None:
        form = self.form(collection, UNNAMED)
        points = [
            models.PointStruct(id=row.pop("id"), vector=row.pop("vector").tolist(), payload=row)
            for row in map(dict, rows)
        ]
        for part in self._parts(points, form):
            self.ask("upsert", collection, points=part, **SURE)

    def _bank_ids(self, reference: BankReference) -> list[int]:
        found: list[int] = []
        while page := self._page(
            reference.collection, NUMBERS, found[-1] if found else None, 10_000, rows_of(reference)
        ):
            found += [record.id for record in page]
        return found

    def _bank_whole(self, reference: BankReference) -> tuple[list[int], Floats, list[dict[str, Any]]]:
        ids = self._bank_ids(reference)
        return ids, *self._whole(reference.collection, UNNAMED, ids)

    def _drop_bank_rows(self, reference: BankReference) -> None:
        where = models.FilterSelector(filter=rows_of(reference))
        self.ask("delete", reference.collection, points_selector=where, **SURE)

    def _all_states(self) -> Iterator[CollectionState]:
        for each in self.client.get_collections().collections:
            # Some may be dropped meanwhile.
            if self.exists(each.name):
                yield from self._states(each.name, self.ask("get_collection", each.name)).values()


def rows_of(reference: BankReference) -> models.Filter:
    """The filter that picks a generation."""
    here = models.MatchValue(value=reference.generation)
    return models.Filter(must=[models.FieldCondition(key="generation", match=here)])
