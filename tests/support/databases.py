"""Databases of every kind behind one port, for suites that all of them must pass: see tests.chaos.ports."""

from __future__ import annotations

import itertools
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pymilvus import DataType, MilvusClient
from qdrant_client import QdrantClient, models

from milvus_hubness import MilvusStore
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, Samplings
from milvus_hubness.milvus.store import schema as milvus_schema
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from qdrant_hubness.store.points import partition_of
from tests.chaos.milvus import MilvusDatabase
from tests.chaos.ports import Application, Database
from tests.chaos.qdrant import DISTANCES, AsMilvus, QdrantDatabase
from tests.support.galleries import AWKWARD
from tests.support.servers import made_for, own_name

UUIDS = [str(uuid.UUID(int=random.Random(i).getrandbits(128))) for i in range(200)]
EDGES = [str(uuid.UUID(int=0)), str(uuid.UUID(int=2**128 - 1))]

_numbers = itertools.count()


class Held(ABC):
    """A database, and what a test made there, which is dropped after it.

    kind: one of KINDS. base: the class of its stores. keys: kinds of them. A row is its key in `id`, its vector
    in `vector`, `group` and `note`."""

    base: ClassVar[type]
    keys: ClassVar[tuple[str, ...]]

    def __init__(self, kind: str, database: Database) -> None:
        self.kind, self.database = kind, database
        self.made: list[str] = []

    @property
    def is_quick(self) -> bool:
        """It is no server, which takes seconds for what others do in no time."""
        return self.kind in ("lite", "qdrant-local", "qdrant-states")

    def name(self, stem: str = "held") -> str:
        name = own_name(f"{stem}_{next(_numbers)}")
        self.made.append(name)
        return name

    @abstractmethod
    def key(self, number: int) -> Key:
        """Of a row by its number, where keys are of several kinds in turn."""

    @abstractmethod
    def keys_of(self, kind: str) -> list[Key]:
        """Some hundred of this kind, odd ones among them."""

    @abstractmethod
    def is_in(self, key: Key, partition: str | None) -> bool:
        """Whether a plain collection has a key in this of its partitions."""

    @abstractmethod
    def make(self, name: str, dim: int, metric: str, keys: str = "int") -> None:
        """An empty collection. keys: of this kind."""

    @abstractmethod
    def put(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """As a client that knows nothing of us does."""

    @abstractmethod
    def store(self, cls: type | None = None) -> Store:
        """A new one, of this class."""

    @abstractmethod
    def application(self, state_ttl: float = 0.0) -> Application:
        """A new client of ours."""

    @abstractmethod
    def scores(
        self, name: str, query: np.ndarray, limit: int, client: Any = None
    ) -> dict[Key, float]:
        """Of the best, by key, as Milvus reports them: under L2 squared distances. client: that is asked, in
        place of a new one of ours."""

    @abstractmethod
    def begin_copy(
        self, store: Any, source: CollectionInfo, target: str, state: CollectionState
    ) -> None:
        """What an interrupted `create_copy` leaves."""

    @abstractmethod
    def served(self, name: str) -> Any:
        """How rows are found in a collection."""

    @property
    @abstractmethod
    def field(self) -> str:
        """What the vector is called."""

    def fill(self, items: np.ndarray, metric: str, *, keys: Sequence[Key] | None = None) -> str:
        """A collection of these, and its name. keys: 0, 1, 2, … where none are given."""
        name, ids = self.name(), list(range(len(items))) if keys is None else list(keys)
        kind = "int" if all(isinstance(each, int) for each in ids) else "other"
        self.make(name, items.shape[1], metric, kind)
        rows = zip(ids, items, strict=True)
        self.put(
            name,
            [
                {"id": key, "vector": v, "group": i % 5, "note": f"n{i}"}
                for i, (key, v) in enumerate(rows)
            ],
        )
        return name

    def clean(self) -> None:
        for name in made_for(self.made, self.database.collections()):
            self.database.drop(name)
        self.made.clear()


class OnMilvus(Held):
    """client: makes one."""

    base, keys, field = MilvusStore, ("int", "varchar"), "vector"

    def __init__(self, kind: str, uri: str, client: Callable[[], MilvusClient]) -> None:
        super().__init__(kind, MilvusDatabase(uri, client()))
        self.uri, self._client = uri, client

    @classmethod
    def of(cls, backend: Any) -> OnMilvus:
        """What is made there is the backend's."""
        here = cls(backend.kind, backend.uri, backend.client)
        here.made = backend.made
        return here

    def key(self, number: int) -> Key:
        return number

    def keys_of(self, kind: str) -> list[Key]:
        numbers = range(-20, 480)
        return (
            list(numbers)
            if kind == "int"
            else [*filter(None, AWKWARD), *(f"k{i}" for i in numbers)]
        )

    def is_in(self, key: Key, partition: str | None) -> bool:
        return partition is None

    def make(self, name: str, dim: int, metric: str, keys: str = "int") -> None:
        client = self.database.client
        schema = client.create_schema(enable_dynamic_field=True)
        kind, length = (
            (DataType.INT64, {}) if keys == "int" else (DataType.VARCHAR, {"max_length": 64})
        )
        schema.add_field("id", kind, is_primary=True, **length)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("group", DataType.INT64)
        index = client.prepare_index_params("vector", index_type="FLAT", metric_type=metric)
        client.create_collection(
            name, schema=schema, index_params=index, consistency_level="Strong"
        )

    def put(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        for start in range(0, len(rows), 1_000):
            self.database.client.upsert(name, list(rows[start : start + 1_000]))

    def store(self, cls: type | None = None) -> MilvusStore:
        return (cls or MilvusStore)(self._client())

    def application(self, state_ttl: float = 0.0) -> Application:
        return self.database.application(state_ttl, plain=True)

    def scores(
        self, name: str, query: np.ndarray, limit: int, client: Any = None
    ) -> dict[Key, float]:
        [hits] = (client or self.application()).search(name, data=[query], limit=limit)
        return {hit["id"]: hit["distance"] for hit in hits}

    def begin_copy(
        self, store: Any, source: CollectionInfo, target: str, state: CollectionState
    ) -> None:
        schema, properties = (
            milvus_schema.copy_schema(source, state),
            milvus_schema.copy_properties(source, state, Samplings()),
        )
        store.client.create_collection(target, schema=schema, properties=properties)

    def served(self, name: str) -> Any:
        client = self.database.client
        return client.get_load_state(name)["state"].name, client.list_indexes(name)


class OnQdrant(Held):
    """Of the kind "qdrant-states" as if it kept no metadata of collections."""

    base, keys, field = QdrantStore, ("int", "uuid", "mixed"), ""

    def __init__(self, kind: str, client: QdrantClient) -> None:
        super().__init__(kind, QdrantDatabase(client))
        self._client = client

    def key(self, number: int) -> Key:
        return number if number % 2 else str(uuid.UUID(int=(number * 2**97 + 77) % 2**128))

    def keys_of(self, kind: str) -> list[Key]:
        numbers: list[Key] = [0, 3, 7, 2**63 + 5, 2**64 - 1, *range(100, 300)]
        texts = [*UUIDS, *EDGES]
        return {"int": numbers, "uuid": texts, "mixed": [*numbers, *texts]}[kind]

    def is_in(self, key: Key, partition: str | None) -> bool:
        return partition_of(key) == partition

    def make(self, name: str, dim: int, metric: str, keys: str = "int") -> None:
        config = models.VectorParams(size=dim, distance=DISTANCES[metric])
        self._client.create_collection(name, vectors_config=config)

    def put(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        AsMilvus(self._client).upsert(name, list(rows))

    def store(self, cls: type | None = None) -> QdrantStore:
        made = (cls or QdrantStore)(self._client)
        made.properties.in_metadata = self.kind != "qdrant-states"
        return made

    def application(self, state_ttl: float = 0.0) -> Application:
        client = HubnessQdrantClient(client=self._client, state_ttl=state_ttl)
        client._operations._in_metadata = self.kind != "qdrant-states"
        return AsMilvus(client)

    def scores(
        self, name: str, query: np.ndarray, limit: int, client: Any = None
    ) -> dict[Key, float]:
        """As Held.scores. Qdrant reports roots, with the sign of what they are of."""
        [points] = (client or self.application()).search(name, data=[query], limit=limit)
        info = self.store().info(name)
        metric = info.state.metric if info.state else info.vector_fields[self.field].metric
        return {p.id: p.score * abs(p.score) if metric == "L2" else p.score for p in points}

    def begin_copy(
        self, store: Any, source: CollectionInfo, target: str, state: CollectionState
    ) -> None:
        """As Held.begin_copy: without the indexes of payloads."""
        schema = {
            **source.schema,
            "described": source.schema["described"].model_copy(update={"payload_schema": {}}),
        }
        store.create_copy(replace(source, schema=schema), target, state)

    def served(self, name: str) -> Any:
        indexes = self._client.get_collection(name).payload_schema
        # Those of jobs are not the user's.
        return {key: index for key, index in indexes.items() if not key.startswith("hubness_")}


def write_state(store: Store, collection: str, state: CollectionState) -> None:
    """Replace the state of a collection."""
    store.write_property(collection, state.property_name, state)
