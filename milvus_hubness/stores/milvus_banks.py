"""Query banks as Milvus collections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pymilvus import DataType, MilvusClient

from milvus_hubness.layout import Floats, Metric
from milvus_hubness.state import BankReference, CollectionState, read_states
from milvus_hubness.stores.bank_generations import (
    BANK_PROPERTY,
    GENERATION_STRIDE,
    LONGEST_SOURCE,
    BankGenerations,
    first_target,
)
from milvus_hubness.stores.base import Batch, Key
from milvus_hubness.stores.milvus_requests import ROWS_PER_REQUEST, MilvusRequests
from milvus_hubness.stores.milvus_rpc import translated

QUERIES_PER_PAGE = 8_000
"""Of a bank that is read whole: fewer where they make too large a message."""


def all_targets(reference: BankReference) -> str:
    """The filter that picks a generation's targets."""
    return f"{_all_rows(reference)} and id >= {first_target(reference)}"


def queries_between(reference: BankReference, start: int, end: int) -> str:
    """The filter that picks a generation's queries from number `start` to before number `end`."""
    return _between(reference, reference.generation * GENERATION_STRIDE, start, end)


def targets_between(reference: BankReference, start: int, end: int) -> str:
    """The filter that picks a generation's targets from number `start` to before number `end`."""
    return _between(reference, first_target(reference), start, end)


def _all_rows(reference: BankReference) -> str:
    return f"generation == {reference.generation}"


def _between(reference: BankReference, first: int, start: int, end: int) -> str:
    return f"{_all_rows(reference)} and id >= {first + start} and id < {first + end}"


class MilvusBanks(MilvusRequests, BankGenerations):
    """The bank methods of the store."""

    database = "milvus"

    def drop(self, collection: str) -> None:
        with translated(collection):
            self.client.drop_collection(collection)

    def save_nearest(
        self, reference: BankReference, collection: str, nearest: Sequence[Sequence[Key]]
    ) -> BankReference:
        first, second = (f"nearest_{collection}_{place}" for place in (0, 1))
        renewed = reference.model_copy(update={"nearest": second if reference.nearest == first else first})
        found = self._keys(reference.collection, _all_rows(reference))
        by_row = dict(zip(found, nearest, strict=False))
        for start in range(0, len(found), ROWS_PER_REQUEST):
            batch = self.fetch(reference.collection, found[start : start + ROWS_PER_REQUEST], "vector")
            rows = [
                {**row, renewed.nearest: list(by_row.get(key, []))}
                for key, row in zip(batch.keys, batch.rows, strict=True)
            ]
            self.write(reference.collection, Batch(batch.keys, batch.vectors, rows), "vector")
        return renewed

    def _make_bank(self, collection: str, dim: int) -> None:
        schema = MilvusClient.create_schema(
            description="query bank of milvus_hubness", enable_dynamic_field=True
        )
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("generation", DataType.INT64)
        schema.add_field("source", DataType.VARCHAR, max_length=LONGEST_SOURCE)
        schema.add_field("added_at", DataType.INT64, description="Unix time, seconds")
        with translated(collection):
            self.client.create_collection(
                collection, schema=schema, properties={BANK_PROPERTY: "{}"}, consistency_level="Strong"
            )

    def _serve_bank(self, collection: str, metric: Metric) -> None:
        with translated(collection):
            self._serve_flat(collection, metric)

    def _told_of_bank(self, collection: str) -> tuple[int, str | None]:
        with translated(collection):
            schema = self.client.describe_collection(collection)
        dims = [field["params"]["dim"] for field in schema["fields"] if field["name"] == "vector"]
        return int(dims[0]) if dims else 0, schema["properties"].get(BANK_PROPERTY)

    def _tell_of_bank(self, collection: str, told: str) -> None:
        with translated(collection):
            self._alter_properties(collection, {BANK_PROPERTY: told})

    def _put_bank_rows(self, collection: str, rows: list[dict[str, Any]]) -> None:
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            self._upsert(collection, rows[start : start + ROWS_PER_REQUEST])

    def _bank_whole(self, reference: BankReference) -> tuple[list[int], Floats, list[dict[str, Any]]]:
        self._ensure_loaded(reference.collection)
        where = _all_rows(reference)
        batch = self._scanned(reference.collection, "vector", where=where, page=QUERIES_PER_PAGE)
        return [int(key) for key in batch.keys], batch.vectors, batch.rows

    def _drop_bank_rows(self, reference: BankReference) -> None:
        with translated(reference.collection):
            self.client.delete(reference.collection, filter=_all_rows(reference))

    def _all_states(self) -> Iterator[CollectionState]:
        # Some may be dropped meanwhile.
        for name in self.client.list_collections():
            if self.client.has_collection(name):
                yield from read_states(self.client.describe_collection(name)["properties"]).values()
