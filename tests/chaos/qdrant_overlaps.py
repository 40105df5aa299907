"""Overlapping jobs on Qdrant: the scene, and the kinds of trials. One process serves it to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException

from milvus_hubness.errors import HubnessError
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from tests.chaos.http_relay import HttpRelay
from tests.chaos.kinds import (
    Kind,
    _do,
    _is_switched,
    _until_done,
    copy,
    disable,
    drop_copy,
    enable,
    refresh,
    refresh_pending,
    restart,
    rollback,
    run,
    serve,
)
from tests.chaos.qdrant import DISTANCES, AsMilvus
from tests.chaos.scene import ALPHA, PENDING, ROWS, K, Row, Scene
from tests.chaos.scene import TTL as STATE_TTL
from tests.chaos.settings import DIM
from tests.qdrant.strict import StrictServer, listening
from tests.support.galleries import nnn
from tests.support.servers import QdrantServer

QDRANT_BACKENDS = ("qdrant-local", "qdrant-strict", "qdrant-server")
MANY = 16_000


@contextlib.contextmanager
def qdrant(backend: str) -> Iterator[str]:
    """The address of a running server: the local mode behind HTTP, the strict server, or a real one."""
    if backend == "qdrant-server":
        if reason := QdrantServer.unavailable():
            raise RuntimeError(reason)
        with QdrantServer() as server:
            yield server.uri
        return
    with listening(StrictServer(part=None if backend == "qdrant-local" else 32)) as uri:
        yield uri


class QdrantScene(Scene):
    """As Scene, with a HubnessQdrantClient; its alias is the application's name."""

    prefix = "qdrant+"
    refused = (ApiException, HubnessError)

    def _connect(self) -> None:
        self.plain = QdrantClient(url=self.uri, check_compatibility=False)
        self.client = self._hubness(STATE_TTL)
        self.store = QdrantStore(self.plain)

    def _hubness(self, state_ttl: float) -> HubnessQdrantClient:
        return HubnessQdrantClient(url=self.uri, check_compatibility=False, state_ttl=state_ttl)

    def make(self, *, alias: bool = True) -> None:
        params = models.VectorParams(size=DIM, distance=DISTANCES[self.metric])
        self.plain.create_collection(self.source, vectors_config=params)
        rows = self._rows(range(ROWS))
        self._rows_of(self.plain).upsert(self.source, rows)
        self._next = ROWS
        self.model = {row["pk"]: row for row in rows}
        self.store.point_alias(self.name, self.source)

    def relay(self, process: str) -> HttpRelay:
        return self._stack.enter_context(HttpRelay(self.uri, process))

    def delete(self, keys: list[int]) -> None:
        self._apply(lambda: self.client.delete(self.name, keys), dict.fromkeys(keys))

    def insert(self, count: int, *, pending: bool = False) -> None:
        if not pending:
            super().insert(count)
            return
        rows = self._rows(range(self._next, self._next + count))
        self._next += count
        # Those of a plain client, which writes no biases.
        assert self.state().codec.leaves_vectors
        self._rows_of(self.plain).upsert(self.name, rows)
        self.model |= {row["pk"]: row for row in rows}

    def _upsert(self, rows: list[Row], **options: Any) -> None:
        self._rows_of(self.client).upsert(self.name, rows)

    def _rows_of(self, client: QdrantClient) -> AsMilvus:
        return AsMilvus(client, key="pk", vector="vec")

    def read(self) -> dict[int, Row]:
        client = self._hubness(0.0)
        try:
            rows = self._rows_of(client).query(self.name)
        finally:
            client.close()
        return {row["pk"]: self._in_length(row) for row in rows}

    def _in_length(self, row: Row) -> Row:
        """Qdrant keeps no lengths of Cosine vectors."""
        written = self.model.get(row["pk"])
        if self.metric != "COSINE" or written is None:
            return row
        return {**row, "vec": (np.float64(row["vec"]) * np.linalg.norm(written["vec"])).tolist()}

    def read_collection(self) -> str:
        return self.store.alias_target(self.name) or self.name

    def state(self) -> Any:
        return self.store.info(self.name).state

    def assert_biases(self, bank: Path) -> None:
        client = self._hubness(0.0)
        try:
            query = np.float32(next(iter(self.model.values()))["vec"]).tolist()
            scores = [
                {
                    p.id: p.score
                    for p in client.query_points(
                        self.name, query, limit=MANY, strength=strength
                    ).points
                }
                for strength in (0.0, 1.0)
            ]
            rows = self._rows_of(client).query(self.name)
        finally:
            client.close()
        if self.metric == "L2":
            scores = [
                {key: -score * abs(score) / 2 for key, score in found.items()} for found in scores
            ]
        assert scores[0].keys() == scores[1].keys() == {row["pk"] for row in rows}
        keys = [row["pk"] for row in rows]
        biases = np.array([scores[0][key] - scores[1][key] for key in keys])
        off = biases - nnn(
            np.load(bank), np.float32([row["vec"] for row in rows]), self.metric, K, ALPHA
        )
        off -= np.median(off)
        wrong = [key for key, by in zip(keys, off, strict=True) if abs(by) > 1e-3]
        assert not wrong, f"{len(wrong)} of {len(keys)} rows have the wrong bias: {wrong[:5]}"

    def _drop(self) -> None:
        for found in self.plain.get_collections().collections:
            if found.name.startswith(f"{self.stem}_"):
                self.plain.delete_collection(found.name)


# -- kinds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QdrantKind(Kind):
    """As Kind, on Qdrant."""

    def finish(self, scene: Scene) -> None:
        if self.place == "copy":
            for _ in range(2):
                if not _is_switched(scene):
                    _until_done(scene, run, restart)
            assert _is_switched(scene), (
                "the last run exited with 0, and the application reads the source"
            )
        elif scene.state() is None:
            _until_done(scene, enable)
        _until_done(scene, refresh(1))


def nothing(scene: Scene) -> None:
    pass


def copied(scene: Scene) -> None:
    _do(scene, lambda scene: (*copy(scene), "--no-writers"))


def migrated(scene: Scene) -> None:
    _do(scene, lambda scene: (*run(scene), "--no-writers"))


def enabled(scene: Scene) -> None:
    _do(scene, enable)


def pending(scene: Scene) -> None:
    enabled(scene)
    scene.insert(PENDING, pending=True)


QDRANT_KINDS: dict[str, Kind] = {
    "refresh": QdrantKind(
        "refresh", "copy", migrated, refresh(1), (refresh(1), refresh(2), rollback)
    ),
    "refresh-beside": QdrantKind(
        "refresh beside", "beside", enabled, refresh(1), (refresh(1), refresh(2), disable)
    ),
    "pending": QdrantKind(
        "refresh beside", "beside", pending, refresh_pending, (refresh_pending, refresh(1))
    ),
    "serve": QdrantKind(
        "serve", "copy", migrated, serve(1), (serve(1), serve(2), refresh(1), rollback)
    ),
    "serve-beside": QdrantKind(
        "serve", "beside", enabled, serve(1), (serve(1), serve(2), refresh(1))
    ),
    "enable-beside": QdrantKind("enable", "beside", nothing, enable, (enable, disable)),
    "disable-beside": QdrantKind(
        "disable", "beside", enabled, disable, (disable, enable, refresh(1))
    ),
    "migrate": QdrantKind("migrate", "copy", nothing, run, (run, restart, drop_copy)),
    "cutover": QdrantKind("cutover", "copy", copied, run, (run, drop_copy)),
    "rollback": QdrantKind("rollback", "copy", migrated, rollback, (rollback, refresh(1))),
    "clean": QdrantKind("clean", "copy", copied, drop_copy, (run, drop_copy)),
}
