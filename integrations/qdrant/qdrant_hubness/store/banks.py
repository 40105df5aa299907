"""Query banks as Qdrant collections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdrant_client import models

from milvus_hubness.extending import BankGenerations, BankReference, Batch, Key
from qdrant_hubness.store import schema
from qdrant_hubness.store.ledger import QdrantLedger
from qdrant_hubness.store.points import SURE, Scroll
from qdrant_hubness.store.properties import point_id
from qdrant_hubness.store.rows import UNNAMED


class QdrantBanks(QdrantLedger, BankGenerations):
    """The bank methods of the store. Banks are read whole and need no vector index."""

    database = "qdrant"
    bank_field = UNNAMED

    def _make_bank(self, collection: str, dim: int) -> None:
        vectors = models.VectorParams(
            size=dim, distance=models.Distance.DOT, hnsw_config=models.HnswConfigDiff(m=0)
        )
        self.make_collection(collection, {self.marker: "1"}, vectors_config=vectors)
        # Strict mode allows filters by these keys only with an index.
        for name in ("generation", "part"):
            self.index_payload(collection, name, "keyword")
        for name in ("number", "added_at"):
            self.index_payload(collection, name, "integer")

    def _describe_bank(self, collection: str) -> tuple[int, bool]:
        described = self.ask("get_collection", collection)
        params = schema.dense(described).get(UNNAMED)
        dim = params.size if params else 0
        is_bank = self.marker in self._properties(collection, described)
        return dim, is_bank

    def _bank_key(self, row_id: str) -> Key:
        return point_id(row_id)

    def _read_bank_rows(self, reference: BankReference, parts: Sequence[str] = ()) -> Batch:
        form = self.form(reference.collection, UNNAMED)
        batches: list[Batch] = []
        count = 0
        scroll = Scroll(
            page=self._rows_per_request(form),
            where=rows_of(reference.generation, parts),
            with_payload=True,
            with_vectors=True,
        )
        for page in self._pages(reference.collection, None, form.limits, scroll):
            count += len(page)
            self.expect_bounded(reference, count)
            batches.append(form.batch(page))
        return Batch.joined(batches or [form.batch([])])

    def _delete_bank_rows(
        self,
        collection: str,
        generation: str,
        *,
        part: str | None = None,
        before: int | None = None,
    ) -> None:
        chosen = rows_of(generation, [part] if part else [], before)
        where = models.FilterSelector(filter=chosen)
        self.ask("delete", collection, points_selector=where, **SURE)

    def _first_rows(self, collection: str) -> Iterator[Mapping[str, Any]]:
        form = self.form(collection, UNNAMED)
        first = models.FieldCondition(key="number", match=models.MatchValue(value=0))
        scroll = Scroll(
            page=self._rows_per_request(form),
            where=models.Filter(must=[first]),
            with_payload=["generation", "part", "added_at"],
        )
        for page in self._pages(collection, None, form.limits, scroll):
            yield from (point.payload for point in page)

    def _all_properties(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for name in self.collection_names():
            # Another process may have dropped it meanwhile.
            if self.exists(name):
                yield name, self._properties(name, self.ask("get_collection", name))


def rows_of(generation: str, parts: Sequence[str] = (), before: int | None = None) -> models.Filter:
    """Return the filter that picks a generation's rows of these parts, or of all, that were added
    before this Unix time, or whenever.
    """
    named = models.MatchValue(value=generation)
    must: list[models.Condition] = [models.FieldCondition(key="generation", match=named)]
    if parts:
        among_parts = models.MatchAny(any=list(parts))
        must.append(models.FieldCondition(key="part", match=among_parts))
    if before is not None:
        must.append(models.FieldCondition(key="added_at", range=models.Range(lt=before)))
    return models.Filter(must=must)
