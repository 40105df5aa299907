"""Qdrant's local mode, as the trials use it: one process to a folder."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.local.qdrant_local import QdrantLocal

from milvus_hubness.correction.codec.base import PENDING
from milvus_hubness.jobs.store.records import IDENTITY_PROPERTY
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from qdrant_hubness.store import connect
from qdrant_hubness.store.properties import PREFIX, of_metadata
from tests.chaos.moments import Counted, Watch
from tests.chaos.ports import Application, Database, Place, Program, Sameness
from tests.chaos.sources import DIM, ROWS, Key, Rows, Shape
from tests.support.galleries import rich_rows
from tests.support.servers import MilvusServer

DISTANCES = {"IP": "Dot", "COSINE": "Cosine", "L2": "Euclid"}
REQUESTS = (
    "get_collection", "get_aliases", "get_collection_aliases", "get_collections", "collection_exists",
    "count", "scroll", "retrieve", "upsert", "update_vectors", "set_payload", "delete_payload", "delete",
    "update_collection", "create_collection", "delete_collection", "create_payload_index",
    "update_collection_aliases", "query_batch_points", "batch_update_points",
)  # fmt: skip


class AsMilvus:
    """What an application asks of a HubnessClient, asked of a QdrantClient or of ours. key, vector: what rows
    call their key and their vector; the rest of them is payload."""

    def __init__(self, client: QdrantClient, *, key: str = "id", vector: str = "vector") -> None:
        self._client, self._key, self._vector = client, key, vector

    def insert(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.upsert(name, rows)

    def upsert(self, name: str, rows: list[dict[str, Any]], *, partition_name: str = "") -> None:
        field = field_of(self._client, name)
        self._client.upsert(name, [self.point(row, row[self._vector], field) for row in rows])

    def point(self, row: dict[str, Any], vector: Any, field: str) -> models.PointStruct:
        payload = {
            name: value for name, value in row.items() if name not in (self._key, self._vector)
        }
        numbers = np.asarray(vector, np.float32).tolist()
        taken = {field: numbers} if field else numbers
        return models.PointStruct(id=row[self._key], vector=taken, payload=payload)

    def delete(self, name: str, ids: Sequence[Key] | None = None, filter: str = "") -> None:
        """filter: that the key is in a list."""
        if ids is not None:
            self._client.delete(name, models.PointIdsList(points=list(ids)))
            return
        among = models.HasIdCondition(has_id=json.loads(filter[filter.index("[") :]))
        self._client.delete(name, models.Filter(must=[among]))

    def search(self, name: str, data: list[Any], limit: int) -> list[Any]:
        asked = [np.asarray(each).tolist() for each in data]
        using = field_of(self._client, name) or None
        return [self._client.query_points(name, each, using, limit=limit).points for each in asked]

    def get(self, name: str, ids: Sequence[Key], output_fields: list[str]) -> list[dict[str, Any]]:
        return [{self._key: record.id} for record in self._client.retrieve(name, ids)]

    def query(self, name: str, **_: Any) -> list[dict[str, Any]]:
        """All rows, whatever was asked for."""
        records, rest = self._client.scroll(name, limit=16_384, with_vectors=True)
        assert rest is None
        field = field_of(self._client, name)
        return [
            {self._key: r.id, self._vector: r.vector[field] if field else r.vector, **r.payload}
            for r in records
        ]


def field_of(client: QdrantClient, name: str) -> str:
    """What a collection calls its vector, "" where that has no name."""
    config = client.get_collection(name).config.params.vectors
    return "" if isinstance(config, models.VectorParams) else next(iter(config))


class QdrantDatabase(Database):
    """client: shared by those of ours."""

    def __init__(self, client: QdrantClient) -> None:
        self.client = client
        self.store = QdrantStore(client)

    def make_source(self, name: str, shape: Shape, seed: int, *, count: int = ROWS) -> None:
        """As Database.make_source: payloads take any field."""
        params = models.VectorParams(size=DIM, distance=DISTANCES[shape.metric])
        self.client.create_collection(
            name, vectors_config={"vec": params} if shape.is_named else params
        )
        rows = rich_rows(np.random.default_rng(seed), count, "int", DIM)
        self._rows().upsert(name, [{**row, "pk": shape.key_of(i)} for i, row in enumerate(rows)])

    def make_plain(self, name: str, items: np.ndarray) -> None:
        params = models.VectorParams(size=items.shape[1], distance="Dot")
        self.client.create_collection(name, vectors_config=params)
        rows = [
            {"id": i, "vector": item, "group": i % 5, "note": f"n{i}"}
            for i, item in enumerate(items)
        ]
        AsMilvus(self.client).upsert(name, rows)

    def application(self, state_ttl: float = 0.0, *, plain: bool = False) -> Application:
        client = HubnessQdrantClient(client=self.client, state_ttl=state_ttl)
        return AsMilvus(client) if plain else AsMilvus(client, key="pk", vector="vec")

    def load(self, name: str) -> None:
        """As Database.load: all are."""

    def put_pending(self, name: str, rows: list[dict[str, Any]], *, partition: str) -> None:
        """As Database.put_pending: a client that is not ours stores them in the right form and marks them, or
        where biases lie in payloads, knows of none."""
        info = self.store.info(name)
        state = info.state
        assert state is not None
        given = np.float32([row["vec"] for row in rows])
        mark: dict[str, Any] = {}
        if state.reranking is None:
            layout = state.layout
            given = state.codec.form.split(
                layout.augment(given, np.zeros((len(rows), layout.slots.count), np.float32))
            )
            mark = {state.codec.epoch_field: PENDING}
        made = [
            self._rows().point({**row, **mark}, own, state.field)
            for row, own in zip(rows, given, strict=True)
        ]
        self.client.upsert(name, made)

    def held(self, name: str) -> Rows:
        return {row["pk"]: row for row in self._rows().query(name)}

    def shown(self, name: str) -> Rows:
        return {
            row["pk"]: row for row in self.application().query(name, filter="", output_fields=["*"])
        }

    def counted(self, name: str) -> int:
        return int(self.client.count(name).count)

    def biases(self, name: str) -> dict[Key, float]:
        """As Database.biases: they lie in the vectors."""
        info = self.store.info(name)
        state = info.state
        assert state is not None
        found = {}
        for record in self.client.scroll(name, limit=16_384, with_vectors=True)[0]:
            vector = record.vector[state.field] if state.field else record.vector
            stored = state.codec.form.joined(np.float32([vector]))
            found[record.id] = float(state.layout.biases(stored, state.profile.slot)[0])
        return found

    def generations(self, bank: str) -> Counter[str]:
        records, _ = self.client.scroll(bank, limit=16_384)
        payloads = (record.payload for record in records)
        return Counter(row["generation"] for row in payloads if row["part"] == "queries")

    def collections(self) -> set[str]:
        return {each.name for each in self.client.get_collections().collections}

    def described(self, name: str) -> Any:
        """As Database.described. Under which keys properties are written says nothing."""
        found = self.client.get_collection(name)
        stored = found.config.metadata or {}
        of_user = {key: value for key, value in stored.items() if not key.startswith(PREFIX)}
        metadata = {**of_user, **of_metadata(found)}
        metadata.pop(IDENTITY_PROPERTY, None)
        return {
            "config": {**found.config.model_dump(), "metadata": metadata},
            "payload": found.payload_schema,
        }

    def aliases(self, name: str) -> set[str]:
        return {each.alias_name for each in self.client.get_collection_aliases(name).aliases}

    def drop(self, name: str) -> None:
        for alias in self.aliases(name):
            self.store.drop_alias(alias)
        self.client.delete_collection(name)

    def sameness(self, metric: str, *, converted: bool) -> Sameness:
        """As Database.sameness: Qdrant keeps no lengths under Cosine."""
        return "in direction" if metric == "COSINE" else "bit for bit"

    def _rows(self) -> AsMilvus:
        return AsMilvus(self.client, key="pk", vector="vec")


class QdrantProgram(Program):
    """On Qdrant."""

    store = QdrantStore

    @staticmethod
    def count_requests(watch: Watch) -> None:
        for name in REQUESTS:
            setattr(QdrantLocal, name, _counted(name, getattr(QdrantLocal, name), watch))


def _counted(name: str, call: Any, watch: Watch) -> Any:
    """A method in whose place another is called."""

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        return Counted(name, functools.partial(call, self), watch)(*args, **options)

    return counted


class QdrantPlace(Place):
    """A folder of the local mode."""

    program = QdrantProgram

    @classmethod
    def within(cls, folder: Path, server: MilvusServer | None = None, uri: str = "") -> QdrantPlace:
        """As Place.within."""
        made = Path(tempfile.mkdtemp(prefix="trial-", dir=folder))
        return cls(made, None, str(made / "data"))

    @property
    def address(self) -> str:
        """As Place.address."""
        return f"qdrant+file://{self.uri}"

    @contextlib.contextmanager
    def open(self) -> Iterator[QdrantDatabase]:
        with contextlib.closing(connect(self.uri, create=True)) as client:
            yield QdrantDatabase(client)

    def hosted(self) -> contextlib.AbstractContextManager[Place]:
        """As Place.hosted: impossible."""
        raise NotImplementedError("nobody serves a folder of the local mode to others")
