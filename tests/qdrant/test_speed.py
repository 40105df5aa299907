"""What clients and jobs do not do twice, or for nothing; `benchmarks.qdrant_speed` has the times."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import qdrant_hubness
from milvus_hubness import (
    NNN,
    Copy,
    MigrationOptions,
    NonFiniteVectors,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.errors import CollectionExists
from milvus_hubness.jobs.common.corrections import load_corrections
from milvus_hubness.jobs.common.progress import Events
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.survey import MEAN_ROWS
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from qdrant_hubness.store.limits import NO_LIMITS, RECENT_SECONDS, Limits, RecentLimits
from qdrant_hubness.store.points import Scroll
from qdrant_hubness.store.rows import Uncopied
from qdrant_hubness.store.sizes import in_parts, json_bytes
from tests.qdrant.strict import StrictServer
from tests.support.galleries import vectors

DIM, ROWS = 8, 60


class World:
    def __init__(self, distance="Cosine", datatype=None):
        self.server = StrictServer()
        self.plain = self.server.client()
        self.store = QdrantStore(self.plain)
        rng = np.random.default_rng(0)
        self.items, self.queries = (vectors(rng, n, DIM) for n in (ROWS, 9))
        config = models.VectorParams(size=DIM, distance=distance, datatype=datatype)
        self.plain.create_collection("items", vectors_config=config)
        self.plain.upsert("items", self.points())
        plan = plan_correction(
            self.store, "items", Recipe(QueryBank(vectors(rng, 30, DIM)), estimator=NNN(4))
        )
        self.name = migrate(self.store, plan, MigrationOptions(no_writers=True)).target
        self.client = self.server.client(HubnessQdrantClient)

    def points(self):
        return [
            models.PointStruct(id=i, vector=item.tolist(), payload={"n": i})
            for i, item in enumerate(self.items)
        ]

    def sent(self, work):
        """The requests that the work sends."""
        before = len(self.server.requests)
        work()
        return [f"{method} {path}" for method, path, _ in self.server.requests[before:]]


# -- searches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "datatype"), [("Cosine", None), ("Dot", models.Datatype.FLOAT16), ("Euclid", None)]
)
def test_searches_that_are_encoded_together_have_the_answers_that_each_has_alone(
    distance, datatype
):
    world = World(distance, datatype)
    queries = [query.tolist() for query in world.queries]
    requests = [models.QueryRequest(query=query, limit=5, with_payload=True) for query in queries]
    requests[2] = models.QueryRequest(
        query=models.NearestQuery(nearest=queries[2]), limit=5, with_payload=True
    )
    requests[4] = models.QueryRequest(query=3, limit=5, with_payload=True)
    requests.append(requests[0])
    for options in ({}, {"strength": 0.5}, {"strength": 0.0}):
        together = world.client.query_batch_points(world.name, requests, **options)
        alone = [
            world.client.query_points(world.name, request.query, limit=5, **options)
            for request in requests
        ]
        assert [answer.points for answer in together] == [answer.points for answer in alone]


def test_a_bad_query_of_a_batch_is_refused_as_it_is_alone():
    world = World()
    good = models.QueryRequest(query=world.queries[0].tolist(), limit=3)
    bad = models.QueryRequest(query=[float("nan")] + [0.0] * (DIM - 1), limit=3)
    with pytest.raises(NonFiniteVectors, match="query"):
        world.client.query_batch_points(world.name, [good, bad])
    short = models.QueryRequest(query=[1.0, 2.0], limit=3)
    with pytest.raises(Exception, match="8 dimensions, got 2"):
        world.client.query_batch_points(world.name, [good, short])


def test_an_augmented_query_is_not_copied_number_by_number():
    query = Uncopied([1.0, 2.0])
    request = models.QueryRequest(query=models.NearestQuery.model_construct(nearest=query))
    copied = copy.deepcopy(request)
    assert copied.query is not request.query
    assert copied.query.nearest is query
    assert json.loads(copied.model_dump_json(exclude_none=True)) == {
        "query": {"nearest": [1.0, 2.0]}
    }


# -- writes ---------------------------------------------------------------------------------------


PAYLOADS = [
    None,
    {},
    {"text": 'é"\n' * 300, "deep": [{"numbers": [0.1] * 30, "none": None}]},
    {"ids": list(range(200)), "漢": "字" * 100, "\ud800": True},
    {"other": {1, 2}, 3: complex(1)},
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_points_that_are_counted_together_are_not_undercounted(payload):
    point = models.PointStruct.model_construct(id=1, vector={"v": [0.1] * 40}, payload=payload)
    alone = json_bytes(point)
    whole = list(in_parts([point] * 10, rows=10, most_bytes=12 * alone + 2_000))
    assert [len(part) for part in whole] == [10]
    halves = list(in_parts([point] * 10, rows=10, most_bytes=5 * alone))
    assert [len(part) for part in halves] == [5, 5]


# -- jobs and commands ----------------------------------------------------------------------------


def test_a_record_costs_a_ledger_one_lookup_and_a_moment_later_none():
    world = World()
    store = QdrantStore(world.plain)
    record = Record("key", "group", "{}")
    put = f"PUT /collections/{LEDGER}/points"
    first = world.sent(lambda: store.put_records(LEDGER, [record]))
    assert first == [f"GET /collections/{LEDGER}", put]
    assert world.sent(lambda: store.put_records(LEDGER, [record])) == [put]
    assert len(world.sent(lambda: store.record(LEDGER, "key"))) == 1
    assert len(world.sent(lambda: store.records(LEDGER, "group"))) == 1
    assert store.records(LEDGER, "group") == [record]


def test_a_ledger_that_was_dropped_a_moment_ago_is_made_again():
    world = World()
    record = Record("key", "group", "{}")
    world.store.put_records(LEDGER, [record])
    world.plain.delete_collection(LEDGER)
    assert world.store.records(LEDGER, "group") == []
    world.store.drop_records(LEDGER, "group")
    world.store.put_records(LEDGER, [record])
    assert world.store.records(LEDGER, "group") == [record]


def test_limits_are_recent_for_seconds_only():
    now = [0.0]
    recent = RecentLimits(lambda: now[0])
    assert recent.get("items") is None
    recent.put("items", Limits(hits=7))
    now[0] = RECENT_SECONDS - 0.01
    assert recent.get("items") == Limits(hits=7)
    now[0] = RECENT_SECONDS
    assert recent.get("items") is None


@pytest.mark.parametrize("limit", [{"max_query_limit": 7}, {"search_allow_exact": False}])
def test_reads_keep_to_limits_that_were_set_a_moment_ago(limit):
    world = World()
    world.store.put_records(LEDGER, [Record(f"key {i}", "group", "{}") for i in range(20)])
    names = ("items", LEDGER)
    reads = {
        "count": lambda: world.store.count("items"),
        "keys": lambda: world.store.scan_keys("items", limit=ROWS),
        "rows": lambda: world.store.scan("items", "").keys,
        "records": lambda: world.store.records(LEDGER, "group"),
    }
    for read in reads.values():
        read()
    for name in names:
        strict = models.StrictModeConfig(enabled=True, **limit)
        world.plain.update_collection(name, strict_mode_config=strict)
    assert reads["count"]() == ROWS
    assert reads["keys"]() == reads["rows"]() == list(range(ROWS))
    assert len(reads["records"]()) == 20


def test_a_migration_asks_for_nothing_twice_before_its_rows_are_copied():
    world = World()
    server = world.server
    sent = []

    def note(event):
        if event.name == "after-copy":
            sent.extend(f"{method} {path}" for method, path, _ in server.requests[before:])

    bank = QueryBank(vectors(np.random.default_rng(1), 30, DIM))
    before = len(server.requests)
    store = QdrantStore(world.plain)
    recipe = Recipe(bank, estimator=NNN(4))
    copy = Copy(target="again")
    plan = plan_correction(store, "items", recipe, copy, bank_collection="again__bank")
    migrate(store, plan, MigrationOptions(no_writers=True, events=Events([note])))

    # The rows of the bank are read to see that they are those that were written, and once more when the
    # copy names them: until then, another job may have dropped them.
    assert sent.count("POST /collections/again__bank/points/scroll") == 2
    assert "POST /collections/again__bank/points" not in sent
    assert sent.count(f"GET /collections/{LEDGER}") <= 4
    assert len(sent) <= 85


class Counting(QdrantStore):
    """Counts the rows that are read by their keys, for the copies of it that hold a lease too."""

    def __init__(self, client):
        super().__init__(client)
        self.read = []

    def get(self, collection, keys, field, **options):
        self.read.append(len(keys))
        return super().get(collection, keys, field, **options)


@pytest.mark.parametrize("lacking", [0, 900])
def test_a_mean_bias_costs_a_thousand_rows_that_have_a_vector(lacking):
    rng = np.random.default_rng(0)
    items = vectors(rng, 2_500, 4)
    lacks_vector = set(rng.permutation(len(items))[:lacking].tolist())
    plain = QdrantClient(":memory:")
    config = {"v": models.VectorParams(size=4, distance="Cosine")}
    plain.create_collection("items", vectors_config=config)
    plain.upsert(
        "items",
        [
            models.PointStruct(
                id=i, vector={} if i in lacks_vector else {"v": item.tolist()}, payload={}
            )
            for i, item in enumerate(items)
        ],
    )
    store = Counting(plain)
    plan = plan_correction(store, "items", Recipe(QueryBank(vectors(rng, 60, 4)), estimator=NNN(4)))
    store.read.clear()

    def stop(event):
        if event.name == "before-copy":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        migrate(store, plan, MigrationOptions(no_writers=True, events=Events([stop])))
    assert MEAN_ROWS <= sum(store.read) <= MEAN_ROWS + 2 * lacking

    state = Ledger(store).find("items").corrected()
    correction = load_corrections(store, state)[state.profile.slot]
    valid = [i for i in range(len(items)) if i not in lacks_vector]
    biases = correction.centred(items[valid])
    assert abs(biases.mean()) < 4 * biases.std() / np.sqrt(MEAN_ROWS)


def test_points_of_both_kinds_of_ids_are_read_in_one_go():
    plain = QdrantClient(":memory:")
    plain.create_collection("c", vectors_config={})
    ids = [0, 3, 2**64 - 1, *(f"00000000-0000-0000-0000-00000000000{i}" for i in range(4))]
    plain.upsert("c", [models.PointStruct(id=key, vector={}) for key in ids])
    store = QdrantStore(plain)
    for size in range(1, 9):
        pages = store._pages("c", None, NO_LIMITS, Scroll(page=size))
        assert [record.id for page in pages for record in page] == ids


def test_a_ledger_that_does_not_exist_has_no_records_and_another_collection_is_none():
    world = World()
    assert world.store.record("nothing", "key") is None
    assert world.store.records("nothing", "group") == []
    with pytest.raises(CollectionExists, match="is not a ledger"):
        world.store.put_records("items", [Record("key", "group", "{}")])


def test_the_command_loads_neither_pymilvus_nor_the_clients():
    code = """
import sys
from milvus_hubness.cli.options import Connection
from milvus_hubness.errors import ServerUnavailable
try:
    Connection("qdrant+http://localhost:1").open()
except ServerUnavailable:
    print("pymilvus" in sys.modules, "qdrant_hubness.client" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_each_public_name_is_there_when_it_is_used():
    for name in qdrant_hubness.__all__:
        assert getattr(qdrant_hubness, name).__module__.startswith("qdrant_hubness")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        qdrant_hubness.nothing  # noqa: B018
