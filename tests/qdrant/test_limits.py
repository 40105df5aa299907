"""Requests by their true size, and the limits of strict mode, in jobs and in both clients, on the strict server."""

import asyncio
import json

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, models

from milvus_hubness import (
    NNN,
    Beside,
    CannotMigrate,
    MigrationOptions,
    PartialWrite,
    QueryBank,
    Recipe,
    StoreError,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.refresh.sweep import sweep
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite
from qdrant_hubness import AsyncHubnessQdrantClient, HubnessQdrantClient, QdrantStore
from qdrant_hubness.store.sizes import in_parts, json_bytes
from tests.qdrant.strict import StrictServer
from tests.qdrant.worlds import Backend
from tests.support.aliases import aliased
from tests.support.galleries import vectors
from tests.support.recipes import as_plan

ALONE = MigrationOptions(no_writers=True)
DIM = 8


class World(Backend):
    """A strict server and a bank."""

    def __init__(self, **options):
        self.server = StrictServer(**options)
        super().__init__("strict", self.server.client())
        self.bank = QueryBank(vectors(np.random.default_rng(3), 40, DIM))

    def collection(self, count=120, *, config=None, strict=None, extra=None, payload=None, dim=DIM):
        name = self.name()
        own = {"size": dim, "distance": "Cosine", **(config or {})}
        strict_mode = models.StrictModeConfig(enabled=True, **strict) if strict else None
        vector = models.VectorParams(**own)
        others = {other: params for other, (params, _) in (extra or {}).items()}
        self.client.create_collection(
            name, {"v": vector, **others} if others else vector, strict_mode_config=strict_mode
        )
        rows = vectors(np.random.default_rng(4), count, dim)
        points = []
        for i, row in enumerate(rows):
            more = {other: value(i) for other, (_, value) in (extra or {}).items()}
            vector = {"v": row.tolist(), **more} if more else row.tolist()
            points.append(
                models.PointStruct(
                    id=i, vector=vector, payload=(payload or (lambda i: {"n": i}))(i)
                )
            )
        for start in range(0, count, 10):
            self.client.upsert(name, points[start : start + 10])
        return name

    def migrated(self, name, **options):
        plan = plan_correction(
            self.store(), name, **as_plan(self.bank, estimator=NNN(4), **options)
        )
        return migrate(self.store(), plan, ALONE).target

    @property
    def largest(self):
        return max(size for *_, size in self.server.requests)

    def hubness_client(self, cls=HubnessQdrantClient, **options):
        """A client as a user makes one, for one call of each kind of client alike."""
        return self.server.client(cls, state_ttl=0.0, **options)


def called(client, method, *args, **options):
    """Call a method of a sync or an async client."""
    result = getattr(client, method)(*args, **options)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


CLIENTS = pytest.mark.parametrize(
    "cls", [HubnessQdrantClient, AsyncHubnessQdrantClient], ids=["sync", "async"]
)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1.5, 'é\n"', None, True], "c": {"deep": ["x" * 100]}},
        np.random.default_rng(0).normal(size=300).astype(np.float32).tolist(),
        models.PointStruct(
            id=1, vector={"v": [0.1] * 50, "s": models.SparseVector(indices=[1], values=[0.5])}
        ),
        "漢字" * 50,
    ],
)
def test_the_size_of_a_value_is_hardly_below_that_of_its_json(value):
    true = len(
        json.dumps(
            value.model_dump() if hasattr(value, "model_dump") else value, ensure_ascii=False
        ).encode()
    )
    assert 0.9 * true <= json_bytes(value) <= 8 * true


def test_parts_keep_to_both_limits():
    items = ["x" * 10] * 7 + ["y" * 1_000] + ["z"]
    parts = list(in_parts(items, rows=4, most_bytes=100))
    assert [len(part) for part in parts] == [4, 3, 1, 1]
    assert [item for part in parts for item in part] == items


def test_payloads_are_copied_in_parts_of_their_true_size():
    """1,000 points of 36 kB: 36 MB, where a server takes 32."""
    world = World()
    name = world.collection(1_000, payload=lambda i: {"n": i, "text": "x" * 36_000})
    target = world.migrated(name)
    assert world.client.count(target).count == 1_000


MULTI = models.VectorParams(
    size=16, distance="Dot", multivector_config=models.MultiVectorConfig(comparator="max_sim")
)
BESIDE = {
    "a multivector": {"m": (MULTI, lambda i: np.full((60, 16), i / 7).tolist())},
    "a second vector": {
        "w": (models.VectorParams(size=600, distance="Dot"), lambda i: [i / 7] * 600)
    },
}


@pytest.mark.parametrize("beside", BESIDE)
def test_vectors_beside_the_corrected_one_count(beside):
    """In a server that takes less, so that this test moves fewer bytes."""
    world = World(request_bytes=300_000)
    name = world.collection(120, extra=BESIDE[beside])
    target = world.migrated(name, field="v")
    assert world.client.count(target).count == 120
    refresh(
        world.store(),
        aliased(world.store(), target),
        QueryBank(world.bank.vectors[:30]),
        field="v",
        force=True,
        client_ttl=0.0,
    )


def test_a_point_that_no_request_can_hold_is_named():
    world = World()
    name = world.collection(20, payload=lambda i: {"text": "x" * (5_000 if i == 7 else 1)})
    world.server.request_bytes = 4_000
    plan = plan_correction(
        world.store(), name, Recipe(QueryBank(world.bank.vectors[:9]), estimator=NNN(4))
    )
    with pytest.raises(
        StoreError,
        match=r"larger than allowed .* for point 7 alone.*: raise service.max_request_size_mb",
    ) as raised:
        migrate(world.store(), plan, ALONE)
    assert "\n" not in str(raised.value)


@CLIENTS
def test_an_upsert_that_qdrant_client_may_send_is_sent_in_parts(cls):
    world = World()
    name = world.migrated(world.collection())
    client = world.hubness_client(cls)
    new = np.round(vectors(np.random.default_rng(5), 200, DIM), 2)
    points = [models.PointStruct(id=i, vector=row.tolist()) for i, row in enumerate(new)]
    world.server.request_bytes = len(json.dumps([p.model_dump() for p in points])) + 500
    called(client, "upsert", name, points)
    stored = called(client, "retrieve", name, list(range(200)), with_vectors=True)
    unit = new / np.linalg.norm(new, axis=1, keepdims=True)
    np.testing.assert_allclose([record.vector for record in stored], unit, atol=1e-6)
    called(
        client,
        "update_vectors",
        name,
        [models.PointVectors(id=p.id, vector=p.vector) for p in points],
    )


def test_a_write_of_which_a_later_part_fails_says_what_was_written():
    world = World()
    name = world.migrated(world.collection())
    client = world.hubness_client()
    points = [models.PointStruct(id=i, vector=[0.5] * DIM) for i in range(8)]
    points[6].payload = {"text": "x" * 9_000}
    world.server.request_bytes = 8_000
    with pytest.raises(PartialWrite, match="larger than allowed") as raised:
        client.upsert(name, points)
    assert raised.value.row_count == 6


@CLIENTS
def test_a_small_write_to_many_points_reaches_the_copy_in_parts(cls):
    """A payload of some bytes for 120 points sends 120 whole points to the copy."""
    world = World()
    wide = 400
    world.bank = QueryBank(vectors(np.random.default_rng(3), 40, wide))
    name = world.collection(dim=wide)
    target = world.migrated(name)
    required = DualWrite(collection=target, required=True)
    world.store().write_property(name, DUAL_WRITE_PROPERTY, required)
    world.server.request_bytes = 400_000
    where = models.Filter(must=[models.FieldCondition(key="n", range=models.Range(gte=0))])
    called(world.hubness_client(cls), "set_payload", name, {"seen": 1}, where)
    records, _ = world.client.scroll(target, limit=200)
    assert {record.payload["seen"] for record in records} == {1}
    called(world.hubness_client(cls), "delete", name, models.FilterSelector(filter=where))
    assert world.client.count(target).count == 0


def test_a_batch_of_queries_is_sent_in_parts():
    world = World()
    name = world.migrated(world.collection())
    requests = [models.QueryRequest(query=[1.0] * DIM, limit=3, with_payload=False)] * 50
    world.server.request_bytes = (
        len(json.dumps([r.model_dump(exclude_none=True) for r in requests])) + 300
    )
    answers = world.hubness_client().query_batch_points(name, requests)
    assert len(answers) == 50
    assert len({tuple(point.id for point in answer.points) for answer in answers}) == 1


# -- strict mode ------------------------------------------------------------------------------------

STRICT = {
    "max_query_limit": 50,
    "upsert_max_batchsize": 30,
    "search_max_batchsize": 4,
    "search_allow_exact": False,
    "unindexed_filtering_retrieve": False,
    "unindexed_filtering_update": False,
    "filter_max_conditions": 2,
}


def test_a_migration_and_all_that_follows_keep_to_strict_mode():
    """Every limit at once, on the collection and, by the server's default, on the collections of jobs."""
    world = World(strict_mode=models.StrictModeConfig(enabled=True, **STRICT))
    name = world.collection(strict=STRICT)
    store, client = world.store(), world.hubness_client()
    target = aliased(store, world.migrated(name))
    assert (status(store, target).pending, status(store, target).rows) == (0, 120)
    other = QueryBank(vectors(np.random.default_rng(6), 60, DIM))
    assert refresh(store, target, other, client_ttl=0.0, force=True).action == "full"
    client.upsert(target, [models.PointStruct(id=900, vector=[1.0] * DIM)])
    assert client.query_points(target, [1.0] * DIM, limit=3).points[0].id == 900
    assert refresh(store, target, client_ttl=0.0).action == "none"


@CLIENTS
def test_searches_of_an_enabled_collection_keep_to_strict_mode(cls):
    world = World(strict_mode=models.StrictModeConfig(enabled=True, **STRICT))
    name = world.collection(strict=STRICT)
    store = world.store()
    plan = plan_correction(store, name, Recipe(world.bank, estimator=NNN(4)), Beside())
    enable(store, plan, client_ttl=0.0)
    client = world.hubness_client(cls)
    assert len(called(client, "query_points", name, [1.0] * DIM, limit=5).points) == 5
    called(client, "upsert", name, [models.PointStruct(id=900, vector=[1.0] * DIM)])
    other = QueryBank(vectors(np.random.default_rng(6), 60, DIM))
    refresh(store, name, other, client_ttl=0.0, force=True)
    assert called(client, "query_points", name, [1.0] * DIM, limit=5).points[0].id == 900
    assert not called(client, "get_collection", name).payload_schema
    disable(store, name)
    assert sweep(store, name).keys
    assert not world.client.get_collection(name).payload_schema


def test_a_collection_with_keys_of_ours_is_refused_though_nobody_may_filter():
    world = World()
    name = world.collection(strict=STRICT)
    world.client.set_payload(name, {"hubness_bias": 0.5}, [3])
    with pytest.raises(CannotMigrate, match=r"hubness_bias \(1 row\)"):
        plan_correction(world.store(), name, Recipe(world.bank, estimator=NNN(4)))


REFUSED = {
    "filter_max_conditions": (0, "filter_max_conditions"),
    "max_payload_index_count": (0, "max_payload_index_count"),
    "max_collection_vector_size_bytes": (120 * DIM * 4 + 10, "max_collection_vector_size_bytes"),
}


@pytest.mark.parametrize("limit", REFUSED)
def test_what_cannot_be_obeyed_is_refused_by_the_plan(limit):
    value, named = REFUSED[limit]
    world = World()
    name = world.collection(strict={limit: value})
    before = len(world.server.collections)
    with pytest.raises(
        CannotMigrate, match=rf"'{name}' cannot be migrated: .*{named}.*: raise"
    ) as raised:
        plan_correction(world.store(), name, Recipe(world.bank, estimator=NNN(4)))
    assert "\n" not in str(raised.value)
    assert len(world.server.collections) == before


def test_enable_refuses_more_candidates_than_a_query_may_ask_for():
    world = World()
    name = world.collection(400, strict={"max_query_limit": 20})
    with pytest.raises(CannotMigrate, match=r"may ask for 20 rows \(max_query_limit\).*: raise"):
        plan_correction(world.store(), name, Recipe(world.bank, estimator=NNN(4, 5.0)), Beside())


def test_no_graph_and_no_exact_search_is_refused():
    world = World()
    flat = {"hnsw_config": models.HnswConfigDiff(m=0)}
    name = world.collection(strict={"search_allow_exact": False}, config=flat)
    with pytest.raises(CannotMigrate, match="search_allow_exact"):
        plan_correction(world.store(), name, Recipe(world.bank, estimator=NNN(4)))


# -- rates --------------------------------------------------------------------------------------------


class Clock:
    """A clock that only waits move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.waited = []
        for module in ("requests",):
            monkeypatch.setattr(f"qdrant_hubness.store.{module}.wait_seconds", self.wait)

    def __call__(self):
        return self.now

    def wait(self, awaited, seconds, stop=None):
        self.waited.append((awaited, seconds))
        self.now += seconds
        return False


def test_jobs_wait_for_the_rates_of_strict_mode(monkeypatch):
    clock = Clock(monkeypatch)
    world = World(clock=clock)
    name = world.collection()
    rates = models.StrictModeConfig(enabled=True, read_rate_limit=40, write_rate_limit=50)
    world.client.update_collection(name, strict_mode_config=rates)
    target = world.migrated(name)
    alias = aliased(world.store(), target)
    refresh(world.store(), alias, QueryBank(world.bank.vectors[:30]), client_ttl=0.0, force=True)
    assert {awaited for awaited, _ in clock.waited} >= {
        f"the rate that strict mode allows on {collection!r}"
        for collection in (name, target, f"{target}_r2")
    }


def test_the_plan_says_that_rates_take_time():
    world = World()
    name = world.collection()
    rates = models.StrictModeConfig(enabled=True, write_rate_limit=30)
    world.client.update_collection(name, strict_mode_config=rates)
    plan = plan_correction(world.store(), name, Recipe(world.bank, estimator=NNN(4)))
    assert [r for r in plan.remarks if "30 points a minute" in r and "4 minutes" in r]


@CLIENTS
def test_what_the_client_adds_to_a_write_waits_for_the_rate(cls, monkeypatch):
    """The user's own request raises what QdrantClient raises."""
    clock = Clock(monkeypatch)
    world = World(clock=clock)
    name = world.collection()
    target = world.migrated(name)
    world.store().write_property(
        name, DUAL_WRITE_PROPERTY, DualWrite(collection=target, required=True)
    )
    rates = models.StrictModeConfig(enabled=True, write_rate_limit=10)
    world.client.update_collection(target, strict_mode_config=rates)
    client = world.hubness_client(cls)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        clock.now += seconds

    async def pause_async(seconds):
        pause(seconds)

    monkeypatch.setattr("qdrant_hubness.client.sync.time.sleep", pause)
    monkeypatch.setattr("qdrant_hubness.client.aio.asyncio.sleep", pause_async)
    for _ in range(3):
        called(client, "set_payload", name, {"seen": 2}, list(range(6)))
    assert pauses
    assert {record.payload["seen"] for record in world.client.retrieve(target, list(range(6)))} == {
        2
    }


def test_a_rate_that_is_never_kept_is_one_line(monkeypatch):
    clock = Clock(monkeypatch)
    world = World(clock=clock)
    name = world.collection()
    rates = models.StrictModeConfig(enabled=True, read_rate_limit=1)
    world.client.update_collection(name, strict_mode_config=rates)
    monkeypatch.setenv("MILVUS_HUBNESS_WAIT_SECONDS", "5")
    store = QdrantStore(world.client)
    store.count(name)
    with pytest.raises(StoreError, match=f"{name}.*rate limit exceeded") as raised:
        store.count(name)
    assert "\n" not in str(raised.value)


def test_the_async_client_is_the_one_of_the_library():
    assert issubclass(AsyncHubnessQdrantClient, AsyncQdrantClient)
