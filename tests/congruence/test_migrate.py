"""From a plain collection to its corrected copy: everything carried over, the source untouched."""

import itertools
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient

from milvus_hubness import (
    NNN,
    AlreadyCorrected,
    BankTooSmall,
    CannotMigrate,
    CollectionExists,
    CollectionNotFound,
    Copy,
    DimensionMismatch,
    EmptyCollection,
    HubnessClient,
    InvalidInput,
    LeaseHeld,
    MigrationOptions,
    NotCaughtUp,
    QueryBank,
    Recipe,
    StateError,
    StoreError,
    VerificationFailed,
    WrongPhase,
    ZeroVectors,
    clean,
    cutover,
    migrate,
    plan_correction,
    refresh,
    resume,
    rollback,
)
from milvus_hubness.correction.codec.base import BIAS_FIELD, EPOCH_FIELD, NORM_FIELD
from milvus_hubness.jobs.common.inputs import read_bank
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.migrator import MOST_PASSES
from milvus_hubness.jobs.migration.survey import survey
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, IDENTITY_PROPERTY
from milvus_hubness.milvus.client import state_cache
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from milvus_hubness.milvus.store.server import ROWS_PER_PAGE
from tests.support.aliases import aliased
from tests.support.galleries import (
    all_keys,
    nnn,
    plain_collection,
    rich_rows,
    rich_schema,
    similarity,
    single_queries,
    vectors,
)
from tests.support.recipes import as_plan

ON_SERVERS = {"metric": ["COSINE"]}

DIM = 32
HNSW = {"M": 8, "efConstruction": 64}


def everything(client, name, keys):
    """All rows by key, read back in full."""
    found = {}
    for start in range(0, len(keys), 2_000):
        batch = keys[start : start + 2_000]
        for row in (
            client.get(name, batch)
            if isinstance(batch[0], int)
            else by_varchar(client, name, batch)
        ):
            found[row["pk"]] = dict(row)
    return found


def by_varchar(client, name, keys):
    quoted = ", ".join(milvus_literal(key) for key in keys)
    return client.query(name, filter=f"pk in [{quoted}]", consistency_level="Strong")


def milvus_literal(key):
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("int", 2_100),
        pytest.param("int", 20_000, marks=pytest.mark.long),
        pytest.param("varchar", 2_100, marks=pytest.mark.lite_only),
    ],
)
def test_thousands_of_rows_of_every_kind_arrive_whole(backend, monkeypatch, key, count):
    if count < ROWS_PER_PAGE:
        # A page less than all rows, as of larger collections.
        monkeypatch.setattr(MilvusStore, "chunk_rows", lambda store, source: 2_000)
    rng = np.random.default_rng(1)
    client, name = backend.client(), backend.name()
    index = client.prepare_index_params("vec", index_type="HNSW", metric_type="COSINE", params=HNSW)
    if not backend.is_lite:
        index.add_index("big", index_type="STL_SORT")
    client.create_collection(
        name,
        schema=rich_schema(client, key, DIM),
        index_params=index,
        num_partitions=4,
        properties={"team.owner": "search"},
        consistency_level="Session",
    )
    rows = rich_rows(rng, count, key, DIM)
    for start in range(0, count, 2_000):
        client.insert(name, rows[start : start + 2_000])
    bank = vectors(rng, 200, DIM)
    keys = [row["pk"] for row in rows]
    before = everything(client, name, keys)
    description = client.describe_collection(name)

    store = backend.store()
    stages = []
    plan = plan_correction(store, name, Recipe(single_queries(bank), estimator=NNN(16, 0.75)))
    assert plan.to_dict()["rows"] == count
    json.dumps(plan.to_dict())
    result = migrate(store, plan, progress=lambda *stage: stages.append(stage))
    assert result.rows == count
    assert ("copying", count, count) in stages
    assert any(doing.startswith("comparing") and done == count for doing, done, _ in stages)

    after = everything(backend.hubness_client(), result.target, keys)
    assert after.keys() == before.keys() == set(keys)
    recovered = np.array([after[key].pop("vec") for key in keys])
    np.testing.assert_allclose(recovered, [before[key].pop("vec") for key in keys], rtol=2.4e-7)
    assert after == before

    assert everything(client, name, keys[:100]).keys() == set(keys[:100])
    source_now = client.describe_collection(name)
    assert (
        json.loads(source_now["properties"].pop(DUAL_WRITE_PROPERTY))["collection"] == result.target
    )
    source_now["properties"].pop(IDENTITY_PROPERTY, None)
    # Milvus 2.6 describes aliases from a cache: those of jobs stay there for a while.
    unheeded = {"update_timestamp", "aliases"}
    assert {key: value for key, value in source_now.items() if key not in unheeded} == {
        key: value for key, value in description.items() if key not in unheeded
    }
    copied = client.describe_collection(result.target)
    for unchanged in (
        "num_partitions",
        "num_shards",
        "consistency_level_name",
        "enable_dynamic_field",
    ):
        assert copied[unchanged] == description[unchanged]
    assert copied["properties"]["team.owner"] == "search"
    theirs = {field["name"]: field for field in copied["fields"]}
    for field in description["fields"]:
        if field["name"] != "vec":
            ours = {k: v for k, v in theirs[field["name"]].items() if k != "field_id"}
            assert ours == {k: v for k, v in field.items() if k != "field_id"}
    added = set(theirs) - {field["name"] for field in description["fields"]}
    assert added == {BIAS_FIELD, EPOCH_FIELD, NORM_FIELD}
    for index_name in client.list_indexes(name):
        old, new = (
            client.describe_index(name, index_name),
            client.describe_index(result.target, index_name),
        )
        counts = {"total_rows", "indexed_rows", "pending_index_rows"}
        differing = {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)} - counts
        assert differing == ({"metric_type"} if index_name == "vec" else set())

    sample = keys[::400]
    stored = client.query(result.target, filter="count >= 0", output_fields=["hubness_bias"])
    by_key = {row["pk"]: row["hubness_bias"] for row in stored}
    items = np.array([rows[i]["vec"] for i in range(0, count, 400)])
    wanted = nnn(bank, items, "COSINE", 16, 0.75)
    got = np.array([by_key[key] for key in sample])
    np.testing.assert_allclose(got - got.mean(), wanted - wanted.mean(), atol=2e-6)


def small(backend, metric="IP", count=60, dim=8, **options):
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(5)
    plain_collection(client, name, vectors(rng, count, dim), metric, **options)
    return client, name, QueryBank(vectors(rng, 40, dim))


def collections(client):
    return set(client.list_collections())


@pytest.mark.beyond_contract
@pytest.mark.parametrize("metric", ["COSINE", "IP", "L2"])
def test_rows_without_direction_are_carried_over_counted_and_listed(backend, metric):
    client, name = backend.client(), backend.name()
    items = vectors(np.random.default_rng(5), 50, 8)
    items[[7, 20]] = 0
    plain_collection(client, name, items, metric)
    store = backend.store()
    result = migrate(
        store, plan_correction(store, name, Recipe(QueryBank(items[30:]), estimator=NNN(4)))
    )
    assert result.invalid_keys == ((7, 20) if metric == "COSINE" else ())
    assert result.invalid == len(result.invalid_keys)
    rows = backend.hubness_client().get(
        result.target, [7, 20], output_fields=["vector", "hubness_bias", "hubness_epoch"]
    )
    for row in rows:
        assert not any(row["vector"])
        assert row["hubness_epoch"] == 1
        assert (row["hubness_bias"] == 0) == (metric == "COSINE")


@pytest.mark.lite_only
def test_a_chunk_of_several_pages_is_recorded_after_its_last_and_continued(lite):
    client, name = lite.client(), lite.name()
    items = vectors(np.random.default_rng(5), 60, 8)
    items[[1, 9, 30]] = 0
    plain_collection(client, name, items, "COSINE")
    sizes = []

    class Narrow(MilvusStore):
        fails_at = None

        def chunk_rows(self, source):
            return 4

        def upsert(self, collection, batch, *args, **options):
            if collection == f"{name}_hubness":
                sizes.append(len(batch))
            if len(sizes) == self.fails_at:
                raise StoreError("the connection broke")
            super().upsert(collection, batch, *args, **options)

    store = Narrow(client)
    plan = plan_correction(store, name, Recipe(QueryBank(items[31:]), estimator=NNN(4)))
    # As of a collection so large that a chunk is several pages.
    small = replace(survey(store, plan.source, 24), page_rows=4)
    plan = replace(plan, body=replace(plan.body, survey=small))
    store.fails_at = 9
    with pytest.raises(StoreError, match="broke"):
        migrate(store, plan, client_ttl=0.0)
    ledger = Ledger(store)
    assert [chunk.seconds is not None for chunk in ledger.chunks(ledger.find(name))] == [
        True,
        False,
        False,
    ]
    store.fails_at = None
    done = migrate(store, plan, client_ttl=0.0)
    assert (done.phase, done.rows, done.invalid, done.invalid_keys) == (
        "verified",
        60,
        3,
        (1, 9, 30),
    )
    assert sizes == [4] * (9 + 9), (
        "six pages of a chunk, two of the next one, and from its start again"
    )


def test_named_partitions_are_kept(backend):
    client, name = backend.client(), backend.name()
    items = vectors(np.random.default_rng(5), 60, 8)
    plain_collection(client, name, items[:20], "IP")
    for partition, partition_items in (("north", items[20:45]), ("south", items[45:])):
        client.create_partition(name, partition)
        start = 20 if partition == "north" else 45
        rows = [{"id": start + i, "vector": v, "group": 0} for i, v in enumerate(partition_items)]
        client.insert(name, rows, partition_name=partition)
    store = backend.store()
    migrate(store, plan_correction(store, name, Recipe(QueryBank(items), estimator=NNN(4))))
    for partition, wanted in (("north", range(20, 45)), ("south", range(45, 60))):
        rows = client.query(
            f"{name}_hubness", filter="id >= 0", output_fields=["id"], partition_names=[partition]
        )
        assert sorted(row["id"] for row in rows) == list(wanted)


def test_other_vector_fields_are_left_as_they_are(backend):
    if not backend.is_lite:
        pytest.skip("Milvus 2.3.5 has one vector field to a collection")
    client, name = backend.client(), backend.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("image", DataType.FLOAT_VECTOR, dim=8)
    schema.add_field("title", DataType.FLOAT_VECTOR, dim=6)
    index = client.prepare_index_params("image", index_type="FLAT", metric_type="IP")
    index.add_index("title", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index)
    rng = np.random.default_rng(5)
    images, titles = vectors(rng, 30, 8), vectors(rng, 30, 6)
    client.insert(
        name,
        [
            {"id": i, "image": a, "title": b}
            for i, (a, b) in enumerate(zip(images, titles, strict=True))
        ],
    )
    store = backend.store()
    with pytest.raises(InvalidInput, match="image, title"):
        plan_correction(store, name, Recipe(QueryBank(images), estimator=NNN(4)))
    migrate(
        store,
        plan_correction(store, name, Recipe(QueryBank(images), estimator=NNN(4)), field="image"),
    )
    corrected = backend.hubness_client()
    target = f"{name}_hubness"
    expected = client.search(
        name, data=[titles[3]], anns_field="title", limit=5, output_fields=["image"]
    )
    got = corrected.search(
        target, data=[titles[3]], anns_field="title", limit=5, output_fields=["image"]
    )
    assert [dict(hit) for hit in got[0]] == [dict(hit) for hit in expected[0]]
    assert client.describe_index(target, "title")["metric_type"] == "COSINE"


def test_nullable_and_default_values_survive(backend):
    if not backend.is_lite:
        pytest.skip("Milvus 2.3.5 has no nullable fields")
    client, name = backend.client(), backend.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True, auto_id=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    schema.add_field("maybe", DataType.INT64, nullable=True)
    schema.add_field("usual", DataType.VARCHAR, max_length=10, default_value="as ever")
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index)
    items = vectors(np.random.default_rng(5), 30, 8)
    rows = [
        {"vector": v, **({"maybe": i, "usual": "new"} if i % 2 else {})}
        for i, v in enumerate(items)
    ]
    keys = list(client.insert(name, rows)["ids"])
    store = backend.store()
    migrate(store, plan_correction(store, name, Recipe(QueryBank(items), estimator=NNN(4))))
    got = backend.hubness_client().get(f"{name}_hubness", keys)
    assert sorted(map(str, got)) == sorted(map(str, client.get(name, keys)))
    corrected = backend.hubness_client()
    [new] = corrected.insert(f"{name}_hubness", {"vector": items[0]})["ids"]
    assert new not in keys
    [row] = corrected.get(f"{name}_hubness", new, output_fields=["maybe", "usual"])
    assert (row["maybe"], row["usual"]) == (None, "as ever")


@pytest.fixture(scope="module")
def finished(shared_backend):
    """(client, name, bank, store, alias) of a small collection that was migrated and its alias switched."""
    client, name, bank = small(shared_backend)
    alias = shared_backend.name("live")
    client.create_alias(name, alias)
    store = shared_backend.store()
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(alias=alias)))
    return client, name, bank, store, alias


@pytest.mark.beyond_contract
def test_the_bank_is_kept_beside_the_collection(finished):
    client, name, bank, store, _ = finished
    reference = store.info(f"{name}_hubness").state.profile.bank
    assert reference.collection == f"{name}__bank"
    assert store.load_bank(reference).fingerprint == bank.fingerprint
    counted = client.query(f"{name}__bank", output_fields=["count(*)"], consistency_level="Strong")
    assert counted[0]["count(*)"] == 40


def test_a_collection_of_another_database_is_migrated_there(served):
    client, name = served.client(), served.name()
    client.create_database(f"apart_{name}")
    apart = served.in_database(f"apart_{name}")
    client, bank = apart.client(), QueryBank(vectors(np.random.default_rng(5), 40, DIM))
    items = vectors(np.random.default_rng(6), 60, DIM)
    plain_collection(client, name, items, "COSINE")
    client.create_alias(name, f"{name}_live")
    store = apart.store()
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(5))))
    cutover(store, name, alias=f"{name}_live")
    scores = similarity(bank.vectors[:3], items, "COSINE") - nnn(
        bank.vectors, items, "COSINE", 5, 0.75
    )
    hits = apart.hubness_client().search(f"{name}_live", data=bank.vectors[:3], limit=5)
    assert [each.ids for each in hits] == np.argsort(-scores, axis=1)[:, :5].tolist()
    assert refresh(store, f"{name}_live").action == "none"
    rollback(store, f"{name}_live")
    assert store.alias_target(f"{name}_live") == name
    client.drop_alias(f"{name}_live")
    for each in client.list_collections():
        client.drop_collection(each)
    served.client().drop_database(f"apart_{name}")


def test_an_application_that_uses_the_real_name_is_moved_by_renaming(backend):
    client, name, bank = small(backend)
    kept = f"{name}__before_hubness"
    backend.made.append(kept)
    store = backend.store()
    result = migrate(
        store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(rename=True))
    )
    assert result.alias == name
    assert store.info(name).name == result.target
    assert store.info(name).state.source == kept
    assert len(backend.hubness_client().search(name, data=[bank.vectors[0]], limit=3)[0]) == 3
    with pytest.raises(StoreError, match="still leads to"):
        clean_up(store, name, result.target)
    done = rollback(store, name)
    assert (done.source, store.info(name).name, store.info(name).state) == (name, name, None)
    assert kept not in collections(client)


def clean_up(store, name, target):
    store_migration = Ledger(store).find(name)
    Ledger(store).write(store_migration, phase="verified")
    try:
        clean(store, name, drop=target)
    finally:
        Ledger(store).write(store_migration)


@pytest.mark.parametrize("rename", [False, True], ids=["alias", "rename"])
def test_a_copy_that_was_refreshed_since_goes_back_and_comes_again_as_it_is(lite, rename):
    client, name, bank = small(lite)
    lite.made.append(f"{name}__before_hubness")
    store, alias = lite.store(), None if rename else lite.name("live")
    result = migrate(
        store,
        plan_correction(
            store, name, Recipe(bank, estimator=NNN(4)), Copy(alias=alias, rename=rename)
        ),
    )
    done = refresh(store, alias or name, QueryBank(bank.vectors[:20]))
    assert (done.former_copy, done.epoch) == (result.target, 2)
    copied = store.info(result.target).state
    lite.hubness_client().delete(alias or name, ids=[7])
    back = rollback(store, alias or name)
    assert (back.source, back.carried) == (result.target, 1)
    assert rollback(store, alias or name).carried == 1
    assert store.info(result.target).state.profiles == copied.profiles
    assert store.info(name).state is None
    client.upsert(name, {"id": 8, "vector": bank.vectors[0], "group": 1})
    resume(store, result.target)
    cutover(store, result.target, alias=alias, rename=rename)
    assert store.info(result.target).state.profiles == copied.profiles
    assert verify(store, result.target).rows == 59
    rollback(store, result.target)


def test_the_old_collection_is_dropped_only_by_name_and_only_after_the_switch(lite):
    client, name, bank = small(lite)
    store, alias = lite.store(), lite.name("live")
    client.create_alias(name, alias)
    result = migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4))))
    with pytest.raises(WrongPhase):
        clean(store, name, drop=name)
    cutover(store, name, alias=alias)
    with pytest.raises(WrongPhase):
        clean(store, name, drop=result.target)
    with pytest.raises(InvalidInput, match="neither"):
        clean(store, name, drop="something")
    clean(store, name, drop=name)
    assert name not in collections(client)
    assert store.info(alias).name == result.target
    with pytest.raises(WrongPhase):
        rollback(store, alias)


def restless(client, name, application):
    """A store of this client; somebody writes by `application` between any two passes of its jobs."""

    class Restless(MilvusStore):
        def count(self, collection):
            if collection == name:
                application.upsert(name, {"id": 1, "vector": np.random.rand(8), "group": 1})
            return super().count(collection)

    return Restless(client)


@pytest.mark.parametrize("writer", [MilvusClient, HubnessClient])
def test_the_job_counts_the_writes_that_miss_the_copy_and_says_why(lite, monkeypatch, writer):
    """Those of a plain client, and those of one whose user may not read the ledger."""

    def denied(targets, store):
        raise StoreError("PrivilegeQuery: permission deny to writer")

    monkeypatch.setattr(state_cache, "bodies_of", denied)
    client, name, bank = small(lite)
    plan = plan_correction(lite.store(), name, Recipe(bank, estimator=NNN(4)))
    with pytest.raises(NotCaughtUp) as raised:
        migrate(restless(client, name, lite.client(writer)), plan)
    message = str(raised.value)
    assert f"{MOST_PASSES - 1} rows were written to {name!r} and by no dual write" in message
    assert "a client without the rights to write" in message
    assert "or to read 'hubness_ledger'" in message
    assert "an old version" in message


def test_writers_without_our_client_keep_the_switch_from_happening(lite):
    client, name, bank = small(lite)
    store, alias = lite.store(), lite.name("live")
    client.create_alias(name, alias)
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    migrate(store, plan)
    with pytest.raises(NotCaughtUp, match="that is no HubnessClient"):
        cutover(restless(client, name, client), name, alias=alias)
    assert store.alias_target(alias) == name
    assert not store.info(name).dual_write.required
    assert (
        cutover(store, name, alias=alias, options=MigrationOptions(no_writers=True)).phase
        == "switched"
    )
    assert verify(store, name).rows == 60


def test_no_pass_runs_after_rows_of_rising_keys_for_ever(lite):
    """However fast the keys go on: between any two pages there is a new row."""
    client, name, bank = small(lite)
    alias, application, keys = (
        lite.name("live"),
        lite.hubness_client(state_ttl=0.0),
        itertools.count(1_000),
    )
    client.create_alias(name, alias)

    class Beset(MilvusStore):
        def insert(self):
            key = next(keys)
            assert key < 1_400, "the rows are read for ever"
            application.insert(alias, {"id": key, "vector": np.random.rand(8), "group": 1})

        def scan(self, *args, **options):
            self.insert()
            return super().scan(*args, **options)

        def scan_keys(self, *args, **options):
            self.insert()
            return super().scan_keys(*args, **options)

    store = Beset(client)
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    migrate(store, plan)
    verify(store, name)
    cutover(store, name, alias=alias)
    written = set(range(60)) | set(range(1_000, next(keys)))
    assert set(all_keys(lite.store(), alias)) == written


def test_another_process_at_work_is_not_disturbed(lite):
    _, name, bank = small(lite)
    store = lite.store()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    migrate(store, plan)
    for held in (name, f"{name}_hubness"):
        with Lease(lite.store(), held), pytest.raises(LeaseHeld, match=str(os.getpid())):
            cutover(store, name, alias=lite.name("live"))
    assert cutover(store, name, alias=lite.name("live")).phase == "switched"


def test_a_new_alias_is_made(lite):
    _, name, bank = small(lite)
    alias = lite.name("fresh")
    store = lite.store()
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(alias=alias)))
    assert store.alias_target(alias) == f"{name}_hubness"


@pytest.mark.lite_only
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"source": "no_such_collection"}, CollectionNotFound),
        ({"bank": QueryBank(np.ones((9, 5), np.float32))}, DimensionMismatch),
        ({"estimator": NNN(41)}, BankTooSmall),
        ({"field": "group"}, CannotMigrate),
        ({"field": "nothing"}, CannotMigrate),
    ],
)
def test_plans_that_cannot_be(backend, change, error):
    client, name, bank = small(backend)
    before = collections(client)
    arguments = {"source": name, "bank": bank, "estimator": NNN(4), **change}
    with pytest.raises(error):
        plan_correction(
            backend.store(),
            arguments.pop("source"),
            **as_plan(arguments.pop("bank"), **arguments),
        )
    assert collections(client) == before


def test_collections_that_cannot_be_migrated(finished, backend):
    client, name, bank, store, _ = finished
    empty = backend.name("empty")
    plain_collection(client, empty, np.empty((0, 8), np.float32), "IP")
    with pytest.raises(EmptyCollection):
        plan_correction(store, empty, Recipe(bank, estimator=NNN(4)))
    with pytest.raises(AlreadyCorrected):
        plan_correction(store, f"{name}_hubness", Recipe(bank, estimator=NNN(4)))
    with pytest.raises(CannotMigrate, match="query bank"):
        plan_correction(store, f"{name}__bank", Recipe(bank, estimator=NNN(4)))
    with pytest.raises(AlreadyCorrected, match="was switched"):
        plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    with pytest.raises(CollectionExists):
        plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(target=empty))
    with pytest.raises(InvalidInput, match="not an alias"):
        plan_correction(
            store, name, Recipe(bank, estimator=NNN(4)), Copy(target="other", alias=empty)
        )
    with pytest.raises(InvalidInput, match="corrected collection"):
        read_bank(store, f"collection:{name}_hubness")
    clash = backend.name("clash")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    schema.add_field("hubness_bias", DataType.FLOAT)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(clash, schema=schema, index_params=index)
    client.insert(clash, [{"id": 1, "vector": [1.0] * 8, "hubness_bias": 1.0}])
    with pytest.raises(CannotMigrate, match="hubness_bias"):
        plan_correction(store, clash, Recipe(bank, estimator=NNN(4)))


def test_auto_id_is_refused_where_keys_cannot_be_kept(backend):
    if backend.is_lite:
        pytest.skip("Milvus Lite keeps given keys, see test_nullable_and_default_values_survive")
    client, name = backend.client(), backend.name()
    client.create_collection(name, dimension=8, auto_id=True)
    client.insert(name, [{"vector": [0.5] * 8}] * 3)
    with pytest.raises(CannotMigrate, match="auto_id"):
        plan_correction(backend.store(), name, Recipe(QueryBank(np.ones((9, 8))), estimator=NNN(4)))


class Failing(MilvusStore):
    """A store whose connection breaks at one point."""

    def __init__(self, client, at):
        super().__init__(client)
        self.at = at

    def upsert(self, *args, **kwargs):
        if self.at == "upsert":
            raise StoreError("the connection broke")
        super().upsert(*args, **kwargs)

    def flush(self, *args):
        if self.at == "interrupt":
            raise KeyboardInterrupt
        super().flush(*args)

    def write_state(self, *args):
        raise StoreError("the connection broke")


def test_two_copies_may_share_a_bank_until_one_of_them_adopts_another(lite):
    _, name, bank = small(lite)
    store, second = lite.store(), lite.name("second")
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4))))
    migrate(
        store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(target=second))
    )
    refresh(store, aliased(store, f"{name}_hubness"), QueryBank(bank.vectors[:30]))
    lite.hubness_client().insert(second, {"id": 900, "vector": bank.vectors[0], "group": 0})
    assert refresh(store, second).action == "none"


def test_a_copy_taken_back_takes_what_it_added_to_a_bank_that_was_there(lite):
    client, name, bank = small(lite)
    store = lite.store()
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4))))
    other = QueryBank(bank.vectors[:30])
    plan = plan_correction(
        store, name, Recipe(other, estimator=NNN(4)), Copy(target=lite.name("second"))
    )
    with pytest.raises(StoreError):
        migrate(Failing(client, "upsert"), plan)
    clean(store, plan.body.target, drop=plan.body.target)
    counted = client.query(f"{name}__bank", output_fields=["count(*)"], consistency_level="Strong")
    assert counted[0]["count(*)"] == 40


@pytest.mark.lite_only
def test_writes_to_the_source_after_the_plan_arrive_too(backend):
    client, name, bank = small(backend)
    store = backend.store()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    client.upsert(name, [{"id": key, "vector": bank.vectors[0], "group": 1} for key in (555, 8)])
    client.delete(name, ids=[17])
    assert migrate(store, plan).rows == 60
    rows = backend.hubness_client().query(
        plan.body.target, filter="id in [8, 17, 555]", output_fields=["group"]
    )
    assert {row["id"]: row["group"] for row in rows} == {8: 1, 555: 1}


SPOILERS = {
    "field": lambda client, target, row: client.upsert(target, {**row, "group": 99}),
    "vector": lambda client, target, row: client.upsert(
        target, {**row, "vector": [0.0, *row["vector"][1:]]}
    ),
    "bias": lambda client, target, row: client.upsert(
        target, {**row, "hubness_bias": row["hubness_bias"] + 1}
    ),
    "missing": lambda client, target, row: client.delete(target, ids=[17]),
    "extra": lambda client, target, row: client.insert(target, {**row, "id": 1_017}),
}


@pytest.mark.beyond_contract
def test_verification_names_the_row_that_differs(finished):
    client, name, _, store, _ = finished
    target = f"{name}_hubness"
    assert verify(store, name).rows == 60
    [row] = client.get(target, 17, consistency_level="Strong")
    for spoil in SPOILERS.values():
        spoil(client, target, dict(row))
        with pytest.raises(VerificationFailed, match="17"):
            verify(store, name)
        client.delete(target, ids=[1_017])
        client.upsert(target, dict(row))
    assert verify(store, target).rows == 60


def test_a_bias_that_the_bank_does_not_give_fails_the_verification(finished):
    client, name, _, store, _ = finished
    target, state = f"{name}_hubness", store.info(f"{name}_hubness").state
    [row] = client.get(target, 0, consistency_level="Strong")
    stored = np.array([row["vector"]], np.float32)
    [vector] = state.layout.with_biases(
        stored, {slot: [0.25] for slot in range(state.layout.slots.count)}
    )
    client.upsert(target, {**row, "vector": vector, "hubness_bias": 0.25})
    with pytest.raises(VerificationFailed, match="of its bank: rows 0"):
        verify(store, name)
    client.upsert(target, dict(row))


def test_a_ledger_that_lost_rows_is_told(finished):
    _, name, _, store, _ = finished
    ledger, target = Ledger(store), f"{name}_hubness"
    migration = ledger.find(name)
    there = ledger.chunks(migration)
    ledger.forget_chunks(migration)
    with pytest.raises(StateError, match=f"lost the chunks of the migration to '{target}'"):
        verify(store, name)
    ledger.write_chunks(migration, there)
    assert verify(store, name).rows == 60


def test_duplicates_in_the_source_are_told_and_copied_once(backend):
    client, name, bank = small(backend)
    if backend.is_lite:
        pytest.skip("Milvus Lite replaces on insert: there are no duplicates")
    client.insert(name, {"id": 3, "vector": bank.vectors[0], "group": 1})
    store = backend.store()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    assert any("61 rows but 60 distinct keys" in remark for remark in plan.remarks)
    assert migrate(store, plan).rows == 60


@pytest.mark.parametrize("counts", [(57, 60), (64, 60)], ids=["inserts", "deletes"])
def test_rows_that_come_and_go_while_the_keys_are_read_are_no_duplicates(lite, counts):
    class Counting(MilvusStore):
        def info(self, collection, **options):
            return replace(super().info(collection, **options), rows=counts[0])

        def count(self, collection):
            return counts[1] if collection == name else super().count(collection)

    client, name, bank = small(lite)
    plan = plan_correction(Counting(client), name, Recipe(bank, estimator=NNN(4)))
    assert not any("distinct" in remark for remark in plan.remarks)


@pytest.mark.long
def test_large_rows_go_in_fitting_parts_on_a_server(served):
    client, name = served.client(), served.name()
    items = vectors(np.random.default_rng(5), 1_150, 8)
    plain_collection(client, name, items[:1], "IP")
    text = "x" * 60_000
    for start in range(1, 1_150, 200):
        rows = [
            {"id": i, "vector": items[i], "group": 0, "long": text}
            for i in range(start, min(1_150, start + 200))
        ]
        client.insert(name, rows)
    store = served.store()
    result = migrate(
        store, plan_correction(store, name, Recipe(QueryBank(items[:50]), estimator=NNN(4)))
    )
    assert result.rows == 1_150
    [row] = client.get(result.target, 1_149)
    assert row["long"] == text


def test_product_quantisation_gets_a_width_it_can_divide(backend):
    if backend.is_lite:
        pytest.skip("Milvus Lite has no product quantisation")
    client, name = backend.client(), backend.name()
    items = vectors(np.random.default_rng(5), 2_000, 24)
    plain_collection(
        client, name, items, "IP", index_type="IVF_PQ", params={"nlist": 8, "m": 12, "nbits": 8}
    )
    store = backend.store()
    plan = plan_correction(store, name, Recipe(QueryBank(items[:50]), estimator=NNN(4)))
    assert plan.chosen.layout.width % math.lcm(16, 12) == 0


def test_a_graph_finds_under_l2_what_the_raw_one_does(lite):
    rng = np.random.default_rng(6)
    lengths = np.exp(0.3 * rng.normal(size=1_660))[:, None]
    rows = (rng.normal(size=(1_660, 32)) * lengths).astype(np.float32)
    items, queries, bank = rows[:1_500], rows[1_500:1_560], rows[1_560:]
    client, name = lite.client(), lite.name()
    plain_collection(client, name, items, "L2", index_type="HNSW", params=HNSW)
    client.flush(name)
    store = lite.store()
    target = migrate(
        store, plan_correction(store, name, Recipe(single_queries(bank), estimator=NNN(16, 0.75)))
    ).target
    exact = similarity(queries, items, "L2")
    nearest = np.argsort(-exact)[:, :10]
    corrected = np.argsort(-(exact - nnn(bank, items, "L2", 16, 0.75)))[:, :10]
    ef = {"params": {"ef": 64}}

    def recall(searched, collection, wanted, **options):
        found = searched.search(
            collection, data=list(queries), limit=10, search_params=ef, **options
        )
        pairs = zip(found, wanted, strict=True)
        return np.mean([len({hit["id"] for hit in hits} & set(row)) / 10 for hits, row in pairs])

    raw = recall(client, name, nearest)
    ours = lite.hubness_client()
    assert recall(ours, target, nearest, strength=0.0) > raw - 0.03
    assert recall(ours, target, corrected) > 0.75


def test_a_plan_takes_arrays_and_refuses_a_bank_of_zeros(lite):
    rng, name = np.random.default_rng(8), lite.name()
    plain_collection(lite.client(), name, vectors(rng, 40, 8), "IP")
    bank, store = vectors(rng, 20, 8), lite.store()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4), target_bank=bank.tolist()))
    assert (
        plan.body.arguments["bank"]
        == plan.body.arguments["target_bank"]
        == QueryBank(bank).fingerprint
    )
    with pytest.raises(ZeroVectors, match="has only zero vectors"):
        plan_correction(store, name, Recipe(0 * bank, estimator=NNN(4)))
