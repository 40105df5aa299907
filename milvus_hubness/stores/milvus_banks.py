"""Query banks as Milvus collections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness.layout import Metric
from milvus_hubness.state import BankReference, CollectionState, read_states
from milvus_hubness.stores.bank_generations import (
    BANK_PROPERTY,
    LONGEST_SOURCE,
    QUERIES,
    TARGETS,
    BankGenerations,
)
from milvus_hubness.stores.base import Batch, Key
from milvus_hubness.stores.milvus_requests import MilvusRequests
from milvus_hubness.stores.milvus_rpc import is_one_of, translated

QUERIES_PER_PAGE = 8_000
"""Bank rows per answer; fewer where they make too large a message."""
LONGEST_ID = 512


def all_queries(reference: BankReference) -> str:
    """Return the filter that picks a generation's queries."""
    return _rows_of(reference, [QUERIES])


def all_targets(reference: BankReference) -> str:
    """Return the filter that picks a generation's targets."""
    return _rows_of(reference, [TARGETS])


def queries_between(reference: BankReference, start: int, end: int) -> str:
    """Return the filter that picks a generation's queries from number `start` to before number `end`."""
    return f"{all_queries(reference)} and number >= {start} and number < {end}"


def targets_between(reference: BankReference, start: int, end: int) -> str:
    """Return the filter that picks a generation's targets from number `start` to before number `end`."""
    return f"{all_targets(reference)} and number >= {start} and number < {end}"


def _rows_of(reference: BankReference, parts: Sequence[str] = ()) -> str:
    """Return the filter that picks these parts of a generation, all of them without `parts`."""
    rows = f'generation == "{reference.generation}"'
    return f"{rows} and {is_one_of('part', parts)}" if parts else rows


class MilvusBanks(MilvusRequests, BankGenerations):
    """The bank methods of the store."""

    database = "milvus"
    bank_field = "vector"

    def _make_bank(self, collection: str, dim: int) -> None:
        schema = MilvusClient.create_schema(
            description="query bank of milvus_hubness", enable_dynamic_field=True
        )
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=LONGEST_ID)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("generation", DataType.VARCHAR, max_length=LONGEST_ID)
        schema.add_field("part", DataType.VARCHAR, max_length=LONGEST_ID)
        schema.add_field("number", DataType.INT64)
        schema.add_field("source", DataType.VARCHAR, max_length=LONGEST_SOURCE)
        schema.add_field("added_at", DataType.INT64, description="Unix time, seconds")
        with translated(collection):
            self.client.create_collection(
                collection, schema=schema, properties={BANK_PROPERTY: "1"}, consistency_level="Strong"
            )

    def _serve_bank(self, collection: str, metric: Metric) -> None:
        with translated(collection):
            try:
                self._serve_flat(collection, metric)
            except MilvusException:
                # Another process may have built the index meanwhile.
                if not self.client.list_indexes(collection):
                    raise
                self._serve_flat(collection, metric)

    def _describe_bank(self, collection: str) -> tuple[int, bool]:
        with translated(collection):
            schema = self.client.describe_collection(collection)
        dims = [field["params"]["dim"] for field in schema["fields"] if field["name"] == "vector"]
        return int(dims[0]) if dims else 0, BANK_PROPERTY in schema["properties"]

    def _bank_key(self, row_id: str) -> Key:
        return row_id

    def _read_bank_rows(self, reference: BankReference, parts: Sequence[str] = ()) -> Batch:
        self._ensure_loaded(reference.collection)
        where = _rows_of(reference, parts)
        with ThreadPoolExecutor(1, "bank") as pool:
            counting = pool.submit(self._count, reference.collection, where)
            return self._scanned(
                reference.collection, "vector", where=where, page=QUERIES_PER_PAGE, total=counting.result
            )

    def _delete_bank_rows(self, reference: BankReference, part: str | None = None) -> None:
        with translated(reference.collection):
            where = _rows_of(reference, [part] if part else [])
            self.client.delete(reference.collection, filter=where)

    def _all_states(self) -> Iterator[CollectionState]:
        # Some may be dropped meanwhile.
        for name in self.client.list_collections():
            if self.client.has_collection(name):
                yield from read_states(self.client.describe_collection(name)["properties"]).values()
