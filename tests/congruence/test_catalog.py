"""Calls on whole collections: they reach the collections beside these, or are refused."""

import asyncio
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from pymilvus import DataType, MilvusClient

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    Beside,
    CannotMigrate,
    CorrectionConfig,
    DimensionMismatch,
    InvalidInput,
    LeaseHeld,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    DualWrite,
)
from milvus_hubness.milvus.client.catalog import other_database
from tests.support.galleries import plain_collection, vectors
from tests.support.ledgers import let_write
from tests.support.recipes import as_recipe

DIM, ITEMS, K = 8, 40, 4


def bank_of(seed):
    return QueryBank(vectors(np.random.default_rng(seed), 20, DIM))


def made(backend, seed=1, **options):
    """A collection that is corrected from its first row on, with some rows."""
    client, name = backend.hubness_client(), backend.name("whole")
    hubness = CorrectionConfig(**as_recipe(bank_of(seed), estimator=NNN(K), **options))
    client.create_collection(
        name, dimension=DIM, metric_type="IP", consistency_level="Strong", hubness=hubness
    )
    rows = vectors(np.random.default_rng(2), ITEMS, DIM)
    client.insert(name, [{"id": i, "vector": vector} for i, vector in enumerate(rows)])
    return client, name


def enabled(backend):
    """One whose biases are in a side collection."""
    client, name, store = backend.hubness_client(), backend.name("beside"), backend.store()
    backend.made += [f"{name}__bias_a", f"{name}__bias_b"]
    plain_collection(client, name, vectors(np.random.default_rng(3), ITEMS, DIM), "IP")
    enable(store, plan_correction(store, name, Recipe(bank_of(4), estimator=NNN(K)), Beside()))
    return client, name


def everything(client):
    return set(client.list_collections(include_internal=True))


@pytest.mark.lite_only
def test_collections_that_are_ours_are_hidden_and_dropped_with_their_owner(backend):
    before = everything(backend.hubness_client())
    client, name = made(backend)
    _, other = enabled(backend)
    client.create_alias(name, f"{name}_alias")
    helpers = {
        f"{name}__bank",
        f"{other}__bank",
        f"{other}__bias_a",
        f"{other}__bias_b",
        "hubness_ledger",
    }
    shown = set(client.list_collections())
    assert {name, other} <= shown
    assert not helpers & shown
    assert everything(client) - before >= helpers - {"hubness_ledger"} | {name, other}
    assert client.list_aliases(name)["aliases"] == [f"{name}_alias"]
    client.drop_alias(f"{name}_alias")
    client.drop_collection(name)
    store = backend.store()
    refresh(store, other, bank_of(5))

    async def drop_the_other():
        fellow = AsyncHubnessClient(backend.uri, dedicated=True)
        assert other in await fellow.list_collections()
        await fellow.drop_collection(other)
        internal = await fellow.list_collections(include_internal=True)
        await fellow.close()
        return internal

    assert set(asyncio.run(drop_the_other())) - {"hubness_ledger"} == before - {"hubness_ledger"}
    client.drop_collection(name)


@pytest.mark.lite_only
def test_a_bank_that_another_collection_uses_stays(backend):
    client, first = made(backend, bank_collection="shared_bank")
    _, second = made(backend, bank_collection="shared_bank")
    backend.made.append("shared_bank")
    client.drop_collection(first)
    [hits] = client.search(second, data=vectors(np.random.default_rng(9), 1, DIM), limit=3)
    assert len(hits) == 3
    client.insert(second, {"id": 99, "vector": [0.5] * DIM})
    client.drop_collection(second)
    assert "shared_bank" not in everything(client)


CALLS = {
    "drop_collection": lambda c, n: c.drop_collection(n),
    "truncate_collection": lambda c, n: c.truncate_collection(n),
    "drop_partition": lambda c, n: c.drop_partition(n, "_default"),
    "rename_collection": lambda c, n: c.rename_collection(n, f"{n}_renamed"),
}


@pytest.fixture
def called(monkeypatch):
    """What pymilvus was asked to do, in place of doing it."""
    calls = []

    def record(name):
        def call(self, *args, **options):
            calls.append((name, args, options))

        return call

    for name in (*CALLS, "restore_snapshot", "load_collection", "load_partitions"):
        monkeypatch.setattr(MilvusClient, name, record(name))
    return calls


@pytest.fixture(scope="module")
def corrected(shared_lite):
    return made(shared_lite)


@pytest.fixture(scope="module")
def side_biases(shared_lite):
    return enabled(shared_lite)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_done_to_a_collection_on_which_a_job_works(shared_lite, corrected, called, call):
    client, name = corrected
    with Lease(shared_lite.store(), name), pytest.raises(LeaseHeld, match="wait until it ends"):
        CALLS[call](client, name)
    assert not called
    CALLS[call](client, name)
    assert [name for name, _, _ in called] == [call]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_done_that_a_migration_would_undo(shared_lite, corrected, called, call):
    client, name = corrected
    copy = f"{name}__bank"
    let_write(shared_lite.store(), name, copy)
    dual_write = {DUAL_WRITE_PROPERTY: DualWrite(collection=copy).model_dump_json()}
    client.alter_collection_properties(name, dual_write)
    with pytest.raises(UnsupportedOperation, match=f"carried to {copy!r}"):
        CALLS[call](client, name)
    client.alter_collection_properties(name, {DUAL_WRITE_PROPERTY: ""})
    client.alter_collection_properties(
        name, {DUAL_WRITE_PROPERTY: DualWrite(collection="gone").model_dump_json()}
    )
    CALLS["drop_partition"](client, name)
    assert called.pop()[0] == "drop_partition"
    client.alter_collection_properties(name, {DUAL_WRITE_PROPERTY: ""})
    assert not called
    client.hubness_state(name)


def test_a_side_collection_is_emptied_with_its_owner(side_biases, called):
    client, name = side_biases
    client.truncate_collection(name, timeout=7)
    assert called == [
        ("truncate_collection", (name, 7), {}),
        ("truncate_collection", (f"{name}__bias_a", 7), {}),
        ("truncate_collection", (f"{name}__bias_b", 7), {}),
    ]


def test_corrected_collections_stay_in_their_database(corrected, side_biases, called):
    client, name = corrected
    plain = f"{name}__bank"
    for target_db, source in (("elsewhere", plain), ("", name), ("default", name)):
        client.rename_collection(source, "renamed", target_db)
        client.restore_snapshot("s", source, "restored", target_db_name=target_db)
    with pytest.raises(UnsupportedOperation, match="cannot move to database 'elsewhere'"):
        client.rename_collection(name, "renamed", target_db="elsewhere")
    with pytest.raises(UnsupportedOperation, match="which lacks its bank"):
        client.restore_snapshot("s", name, "restored", target_db_name="elsewhere")
    with pytest.raises(UnsupportedOperation, match="would share the biases"):
        client.restore_snapshot("s", side_biases[1], "restored")
    assert [call for call, _, _ in called] == ["rename_collection", "restore_snapshot"] * 3


@pytest.mark.parametrize(
    ("named", "current", "other"),
    [
        ("", "sales", ""),
        (None, "", ""),
        ("default", "", ""),
        ("sales", "sales", ""),
        ("sales", "", "sales"),
        ("default", "sales", "default"),
    ],
)
def test_which_database_is_another_one(named, current, other):
    assert other_database(named, current) == other


def test_fields_are_loaded_with_those_that_go_with_them(corrected, side_biases, called):
    client, name = corrected
    client.load_collection(name, load_fields=["id", "vector"], replica_number=2)
    client.load_partitions(name, ["_default"], load_fields=["id"])
    client.load_collection(side_biases[1], load_fields=["id", "vector"])
    client.load_collection(name)
    hidden = ["hubness_bias", "hubness_epoch"]
    assert called == [
        (
            "load_collection",
            (name, None),
            {"load_fields": ["id", "vector", *hidden], "replica_number": 2},
        ),
        ("load_partitions", (name, ["_default"], None), {"load_fields": ["id"]}),
        ("load_collection", (side_biases[1], None), {"load_fields": ["id", "vector"]}),
        ("load_collection", (name, None), {}),
    ]


def test_a_session_reads_biases_in_its_own_cluster(side_biases, monkeypatch):
    client, name = side_biases
    sent = []
    for method in ("search", "query"):
        own = getattr(MilvusClient, method)

        def spied(self, *args, _own=own, _method=method, **options):
            sent.append((_method, args[0], options.get("cluster_id")))
            return _own(self, *args, **options)

        monkeypatch.setattr(MilvusClient, method, spied)
    session = client.session("east")
    session.search(name, data=vectors(np.random.default_rng(9), 1, DIM))
    session.search(name, ids=[3])
    session.get(name, [3])
    asked = [("search", name, "east"), ("query", f"{name}__bias_a", "east")]
    assert sent == [*asked, ("query", name, "east"), *asked]


KINDS = {
    "external_source": ("s3://bucket/rows", "external"),
    "enable_namespace": (True, "namespaces"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_collections_that_no_job_can_rewrite_are_refused_by_plan(
    shared_lite, monkeypatch, kind
):
    name, (value, reason) = shared_lite.name("kind"), KINDS[kind]
    plain_collection(
        shared_lite.client(), name, vectors(np.random.default_rng(3), ITEMS, DIM), "IP"
    )
    own = MilvusClient.describe_collection
    monkeypatch.setattr(
        MilvusClient,
        "describe_collection",
        lambda *args, **options: {**own(*args, **options), kind: value},
    )
    store = shared_lite.store()
    with pytest.raises(CannotMigrate, match=reason):
        plan_correction(store, name, Recipe(bank_of(1), estimator=NNN(K)))
    with pytest.raises(CannotMigrate, match=reason):
        plan_correction(store, name, Recipe(bank_of(1), estimator=NNN(K)), Beside())


def test_a_new_collection_with_namespaces_is_not_corrected(shared_lite):
    client, name = shared_lite.hubness_client(), shared_lite.name("spaces")
    schema = client.create_schema(enable_namespace=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    with pytest.raises(InvalidInput, match="namespaces"):
        client.create_collection(
            name,
            schema=schema,
            index_params=index,
            hubness=CorrectionConfig(Recipe(bank_of(1), estimator=NNN(K))),
        )
    assert name not in client.list_collections()


@pytest.mark.parametrize("metric", ["COSINE", "L2"])
def test_rows_in_files_are_the_rows_that_an_insert_stores(shared_lite, tmp_path, metric):
    """Milvus Lite imports no files: what they hold is inserted by a plain client, and compared."""
    rng = np.random.default_rng(3)
    client, plain, store = shared_lite.hubness_client(), shared_lite.client(), shared_lite.store()
    name, old = shared_lite.name("files"), vectors(rng, ITEMS, DIM)
    plain_collection(plain, name, old, metric)
    name = migrate(
        store, plan_correction(store, name, Recipe(bank_of(4), estimator=NNN(K))), no_writers=True
    ).target
    new = [
        {"id": 100 + i, "vector": v, "group": i, "note": f"n{i}"}
        for i, v in enumerate(vectors(rng, 7, DIM))
    ]
    files = client.write_import_files(name, iter(new), tmp_path)
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row in rows:
        row |= json.loads(row.pop("$meta"))
    plain.insert(name, rows)
    imported = plain.query(name, filter="id >= 100", output_fields=["*"])
    question = {
        "data": [row["vector"] for row in new],
        "limit": 5,
        "output_fields": ["vector", "note"],
    }
    found = client.search(name, **question)
    client.delete(name, ids=[row["id"] for row in new])
    client.insert(name, new)
    assert plain.query(name, filter="id >= 100", output_fields=["*"]) == imported
    assert [list(hits) for hits in client.search(name, **question)] == [
        list(hits) for hits in found
    ]
    assert client.write_import_files(name, [], tmp_path / "none") == []


def test_rows_that_a_file_cannot_bring_are_refused(corrected, side_biases, shared_lite, tmp_path):
    client, name = corrected
    with pytest.raises(UnsupportedOperation, match="would miss the biases"):
        client.write_import_files(side_biases[1], [], tmp_path)
    with pytest.raises(InvalidInput, match="is not corrected"):
        client.write_import_files(f"{name}__bank", [], tmp_path)
    with pytest.raises(InvalidInput, match="row 1 lacks the vector field 'vector'"):
        client.write_import_files(name, [{"id": 1, "vector": [1.0] * DIM}, {"id": 2}], tmp_path)
    for rows in ([3], {"id": 1, "vector": [1.0] * DIM}):
        with pytest.raises(InvalidInput, match=r"row 0 is a \w+: pass a list of dicts"):
            client.write_import_files(name, rows, tmp_path)
    with pytest.raises(DimensionMismatch, match="row 0"):
        client.write_import_files(name, [{"id": 1, "vector": [1.0]}], tmp_path)
    client.alter_collection_properties(
        name, {DUAL_WRITE_PROPERTY: DualWrite(collection="copy").model_dump_json()}
    )
    with pytest.raises(UnsupportedOperation, match="wait until it ends"):
        client.write_import_files(name, [], tmp_path)
    client.alter_collection_properties(name, {DUAL_WRITE_PROPERTY: ""})

    async def by_an_async_client():
        fellow = AsyncHubnessClient(shared_lite.uri, dedicated=True)
        files = await fellow.write_import_files(name, [{"id": 1, "vector": [1.0] * DIM}], tmp_path)
        await fellow.close()
        return files

    [file] = asyncio.run(by_an_async_client())
    [row] = pq.read_table(file).to_pylist()
    assert len(row["vector"]) > DIM
