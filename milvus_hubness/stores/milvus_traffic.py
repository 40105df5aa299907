"""Samples of live queries in a Milvus collection that cannot outgrow its places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from milvus_hubness.banks import Origins
from milvus_hubness.errors import CollectionExists, DimensionMismatch
from milvus_hubness.layout import Floats
from milvus_hubness.state import ONLINE_BANKS_PROPERTY, OnlineBank, OnlineBanks
from milvus_hubness.stores.base import QuerySamples
from milvus_hubness.stores.milvus_requests import ROWS_PER_REQUEST, MilvusRequests
from milvus_hubness.stores.milvus_rpc import is_one_of, literal, translated

QUERY_SAMPLES_PROPERTY = "hubness_query_samples"
_METRIC = "IP"


@dataclass(frozen=True, eq=False)
class Sample:
    """A live query: its vector (d,) float32, the profile it was asked under, and when, in Unix seconds.

    number: what tells it from others. place: one of the profile's; a later sample of that place replaces it.
    """

    profile: str
    place: int
    number: int
    at: int
    vector: Floats


def put_samples(
    client: MilvusClient, samples_collection: str, samples: Sequence[Sample], timeout: float
) -> None:
    """Write samples, each into its place. Raises as the client does."""
    rows = {
        f"{each.profile}/{each.place}": {
            "place": f"{each.profile}/{each.place}",
            "vector": each.vector,
            "profile": each.profile,
            "sample": each.number,
            "asked_at": each.at,
        }
        for each in samples
    }
    client.upsert(samples_collection, list(rows.values()), timeout=timeout)


class MilvusQuerySamples(MilvusRequests):
    """The query-sample methods of the store."""

    def write_online_banks(self, collection: str, online_banks: Sequence[OnlineBank]) -> None:
        # As in `drop_state`: what says nothing stands for what is not there.
        with translated(collection):
            said = OnlineBanks(banks=tuple(online_banks)).model_dump_json() if online_banks else ""
            self._alter_properties(collection, {ONLINE_BANKS_PROPERTY: said})

    def create_query_samples(self, samples_collection: str, dim: int) -> None:
        with translated(samples_collection):
            if not self.client.has_collection(samples_collection):
                self.client.create_collection(
                    samples_collection,
                    schema=_schema(dim),
                    properties={QUERY_SAMPLES_PROPERTY: "1"},
                    consistency_level="Strong",
                )
            described = self.client.describe_collection(samples_collection)
            if QUERY_SAMPLES_PROPERTY not in described["properties"]:
                raise CollectionExists(
                    f"{samples_collection!r} is there already and holds no samples of queries: rename it "
                    "first"
                )
            [stored] = [_dim(field) for field in described["fields"] if field["name"] == "vector"]
            if stored != dim:
                raise DimensionMismatch(
                    f"{samples_collection!r} holds {stored}-d samples, these queries have {dim}"
                )
            self._serve_flat(samples_collection, _METRIC)

    def read_query_samples(self, samples_collection: str, profile: str) -> QuerySamples:
        if not self.exists(samples_collection):
            return QuerySamples(np.empty((0, 0), np.float32), Origins.seeds(0, 0))
        keys = self._keys(samples_collection, f"profile == {literal(profile)}")
        vectors, rows = self._whole(samples_collection, "vector", keys)
        numbers, at = (np.array([row[name] for row in rows], np.int64) for name in ("sample", "asked_at"))
        return QuerySamples(vectors, Origins(numbers, at))

    def drop_samples(self, samples_collection: str, numbers: Sequence[int]) -> None:
        if not self.exists(samples_collection):
            return
        with translated(samples_collection):
            for start in range(0, len(numbers), ROWS_PER_REQUEST):
                part = numbers[start : start + ROWS_PER_REQUEST]
                self.client.delete(samples_collection, filter=is_one_of("sample", part))


def _schema(dim: int) -> Any:
    schema = MilvusClient.create_schema(
        description="live queries sampled by milvus_hubness", enable_dynamic_field=False
    )
    schema.add_field("place", DataType.VARCHAR, is_primary=True, max_length=1_024)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("profile", DataType.VARCHAR, max_length=1_000)
    schema.add_field("sample", DataType.INT64)
    schema.add_field("asked_at", DataType.INT64, description="Unix time, seconds")
    return schema


def _dim(field: dict[str, Any]) -> int:
    return int(field["params"]["dim"])
