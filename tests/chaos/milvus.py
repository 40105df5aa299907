"""Milvus, Lite and served, as the trials use it."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType, MilvusClient
from pymilvus.grpc_gen import milvus_pb2_grpc

from milvus_hubness import HubnessClient, MilvusStore
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, IDENTITY_PROPERTY
from milvus_hubness.milvus.filters import is_one_of
from milvus_hubness.milvus.store.server import connect
from tests.chaos.moments import Counted, Watch
from tests.chaos.ports import Database, Place, Program, Sameness
from tests.chaos.sources import DIM, PARTITIONS, ROWS, Key, Rows, Shape
from tests.support.galleries import AWKWARD, plain_collection, rich_rows, rich_schema
from tests.support.servers import MilvusServer, aliases_of, lite_uri


class MilvusDatabase(Database):
    """uri: also of the clients that applications use."""

    def __init__(self, uri: str, client: MilvusClient) -> None:
        self.uri, self.client = uri, client
        self.store = MilvusStore(client)

    def make_source(self, name: str, shape: Shape, seed: int, *, count: int = ROWS) -> None:
        """As Database.make_source; loaded."""
        client = self.client
        schema = rich_schema(client, shape.key, DIM)
        if shape.bias_location != "partition key":
            next(
                field for field in schema.fields if field.name == "tenant"
            ).is_partition_key = False
        if shape.nullable:
            schema.add_field("maybe", DataType.INT64, nullable=True)
        params = {"HNSW": {"M": 8, "efConstruction": 64}, "FLAT": {}}[shape.index]
        index = client.prepare_index_params(
            "vec", index_type=shape.index, metric_type=shape.metric, params=params
        )
        keyed = {"num_partitions": 4} if shape.bias_location == "partition key" else {}
        client.create_collection(name, schema=schema, index_params=index, **keyed)
        rows = rich_rows(np.random.default_rng(seed), count, shape.key, DIM)
        for i, row in enumerate(rows):
            if shape.key == "varchar":
                row["pk"] = f"{AWKWARD[i % len(AWKWARD)]}{i:04d}"
            if shape.nullable and i % 3:
                row["maybe"] = i
        if shape.bias_location != "partitions":
            client.insert(name, rows)
            return
        for partition, tenants in PARTITIONS.items():
            client.create_partition(name, partition)
            client.insert(
                name, [row for row in rows if row["tenant"] in tenants], partition_name=partition
            )
        biased_rows = {tenant for tenants in PARTITIONS.values() for tenant in tenants}
        client.insert(name, [row for row in rows if row["tenant"] not in biased_rows])

    def make_plain(self, name: str, items: np.ndarray) -> None:
        plain_collection(self.client, name, items, "IP")

    def application(self, state_ttl: float = 0.0, *, plain: bool = False) -> HubnessClient:
        return HubnessClient(self.uri, state_ttl=state_ttl)

    def load(self, name: str) -> None:
        """As Database.load: Milvus Lite opens with every collection released."""
        self.client.load_collection(name)

    def put_pending(self, name: str, rows: list[dict[str, Any]], *, partition: str) -> None:
        self.application().insert(name, rows, partition_name=partition, bias="pending")
        keys = [row["pk"] for row in rows]
        found = self.application().query(
            name, filter=is_one_of("pk", keys), output_fields=["pk"], consistency_level="Strong"
        )
        assert len(found) == len(rows), f"{len(found)} of {len(rows)} rows inserted are there"

    def held(self, name: str) -> Rows:
        return _all_rows(self.client, name)

    def shown(self, name: str) -> Rows:
        return _all_rows(self.application(), name)

    def counted(self, name: str) -> int:
        self.load(name)
        [found] = self.client.query(
            name, filter="", output_fields=["count(*)"], consistency_level="Strong"
        )
        return int(found["count(*)"])

    def biases(self, name: str) -> dict[Key, float]:
        found = self.client.query(
            name,
            filter="",
            output_fields=["pk", "hubness_bias"],
            limit=16_384,
            consistency_level="Strong",
        )
        return {row["pk"]: row["hubness_bias"] for row in found}

    def generations(self, bank: str) -> Counter[str]:
        self.load(bank)
        rows = self.client.query(
            bank,
            filter='part == "queries"',
            output_fields=["generation"],
            limit=16_384,
            consistency_level="Strong",
        )
        return Counter(row["generation"] for row in rows)

    def collections(self) -> set[str]:
        return set(self.client.list_collections())

    def described(self, name: str) -> Any:
        """As Database.described. An empty property says as little as none, see MilvusStore.write_property."""
        client, found = self.client, self.client.describe_collection(name)
        properties = {
            key: value
            for key, value in found["properties"].items()
            if key != IDENTITY_PROPERTY and (value or key != DUAL_WRITE_PROPERTY)
        }
        indexes = [client.describe_index(name, each) for each in sorted(client.list_indexes(name))]
        counts = {"total_rows", "indexed_rows", "pending_index_rows"}
        return {
            "fields": found["fields"],
            "properties": properties,
            "partitions": sorted(client.list_partitions(name)),
            "indexes": [{k: v for k, v in each.items() if k not in counts} for each in indexes],
        }

    def aliases(self, name: str) -> set[str]:
        return set(aliases_of(self.client, name))

    def drop(self, name: str) -> None:
        for alias in self.aliases(name):
            self.client.drop_alias(alias)
        self.client.drop_collection(name)

    def sameness(self, metric: str, *, converted: bool) -> Sameness:
        return "within a unit" if converted and metric == "COSINE" else "bit for bit"


def _all_rows(client: MilvusClient, name: str) -> Rows:
    client.load_collection(name)
    read = client.query(
        name, filter="", output_fields=["*"], limit=16_384, consistency_level="Strong"
    )
    return {row["pk"]: dict(row) for row in read}


class MilvusProgram(Program):
    """On Milvus."""

    store = MilvusStore

    @staticmethod
    def count_requests(watch: Watch) -> None:
        class Stub(milvus_pb2_grpc.MilvusServiceStub):
            def __init__(self, channel: Any) -> None:
                super().__init__(channel)
                for name, call in list(vars(self).items()):
                    setattr(self, name, Counted(name, call, watch))

        milvus_pb2_grpc.MilvusServiceStub = Stub


class MilvusPlace(Place):
    """server: None on Milvus Lite, where a file has one process at a time; and where nobody may kill it."""

    program = MilvusProgram

    @classmethod
    def within(cls, folder: Path, server: MilvusServer | None = None, uri: str = "") -> MilvusPlace:
        """As Place.within."""
        made = Path(tempfile.mkdtemp(prefix="trial-", dir=folder))
        return cls(made, server, (server.uri if server else uri) or lite_uri(made))

    @contextlib.contextmanager
    def open(self) -> Iterator[MilvusDatabase]:
        client = connect(self.uri, create=True)
        try:
            yield MilvusDatabase(self.uri, client)
        finally:
            client.close()
            if not self.is_served:
                server_manager_instance.release_server(self.uri)

    @contextlib.contextmanager
    def hosted(self) -> Iterator[MilvusPlace]:
        uri = server_manager_instance.start_and_get_uri(self.uri)
        assert uri, f"Milvus Lite did not open {self.uri}"
        try:
            yield MilvusPlace(self.folder, None, uri)
        finally:
            server_manager_instance.release_server(self.uri)
