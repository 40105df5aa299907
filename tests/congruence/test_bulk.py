"""Copies by files that the server imports: all rows, each once, wherever it is interrupted."""

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    BulkTarget,
    CannotMigrate,
    InvalidInput,
    MigrationOptions,
    QueryBank,
    StoreError,
    migrate,
    plan_migration,
    resume,
)
from milvus_hubness.migration.catch_up import verify
from milvus_hubness.operations.lease_records import LEDGER
from milvus_hubness.operations.progress import Events
from milvus_hubness.stores.milvus import MilvusStore
from tests.galleries import plain_collection, rich_rows, rich_schema, vectors

ROWS, DIM = 3_000, 32


class Interruption(Exception):
    """As a SIGKILL would: whatever was about to happen does not."""


@pytest.fixture
def served(served):
    """Milvus 2.3.5 imports files into collections of the default database only."""
    default = served.in_database("default")
    yield default
    default.clean()


def by_files(folder, result=None, remote=None, **options):
    listeners = [] if result is None else [result.append]
    return MigrationOptions(no_writers=True, bulk=BulkTarget(folder, remote, **options), events=Events(listeners))


def planned(backend, name, dim=DIM):
    bank = QueryBank(vectors(np.random.default_rng(2), 100, dim))
    return plan_migration(backend.store(), name, bank, estimator=NNN(16, 0.75))


def everything(client, name, key):
    """All rows, those of one key one by one."""
    rows = client.query(name, filter="", limit=16_000, output_fields=["*"], consistency_level="Strong")
    return {row[key]: dict(row) for row in rows}, len(rows)


def counted(client, name):
    [row] = client.query(name, filter="", output_fields=["count(*)"], consistency_level="Strong")
    return row["count(*)"]


@pytest.mark.parametrize("key", [pytest.param("int", marks=pytest.mark.long), "varchar"])
def test_rows_of_every_kind_arrive_once_and_whole(served, tmp_path, key):
    client, name = served.client(), served.name()
    client.create_collection(
        name,
        schema=rich_schema(client, key, DIM),
        index_params=client.prepare_index_params(
            "vec", index_type="HNSW", metric_type="COSINE", params={"M": 8, "efConstruction": 64}
        ),
        num_partitions=4,
        consistency_level="Strong",
    )
    client.insert(name, rich_rows(np.random.default_rng(1), ROWS, key, DIM))
    told = []
    migration = migrate(served.store(), planned(served, name), by_files(tmp_path, told))

    assert verify(served.store(), name).rows == ROWS
    assert counted(client, migration.target) == ROWS
    before, _ = everything(client, name, "pk")
    after, rows = everything(served.hubness_client(), migration.target, "pk")
    assert rows == ROWS
    assert after.keys() == before.keys()
    recovered = [after[each].pop("vec") for each in before]
    np.testing.assert_allclose(recovered, [before[each].pop("vec") for each in before], rtol=2.4e-7)
    assert after == before

    passes = [event.facts for event in told if event.name == "catching-up"]
    assert max(each["differing"] for each in passes) == 0, "the files alone bring the rows"
    assert any(event.facts.get("rows") == ROWS for event in told if event.name == "copying")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_named_partitions_keep_their_rows(served, tmp_path):
    client, name = served.client(), served.name()
    items = vectors(np.random.default_rng(3), 200, 8)
    plain_collection(client, name, items[:100], "IP")
    client.create_partition(name, "other")
    others = [{"id": 1_000 + i, "vector": vector, "group": 9} for i, vector in enumerate(items[100:])]
    client.insert(name, others, partition_name="other")
    migration = migrate(served.store(), planned(served, name, 8), by_files(tmp_path))
    assert counted(client, migration.target) == 200
    found = client.query(migration.target, filter="", limit=500, partition_names=["other"], consistency_level="Strong")
    assert {row["id"] for row in found} == {row["id"] for row in others}


@pytest.mark.parametrize(
    ("moment", "names_files"),
    [
        pytest.param("asking", True, marks=pytest.mark.long),
        pytest.param("waiting", True, marks=pytest.mark.long),
        pytest.param("recording", True, marks=pytest.mark.long),
        pytest.param("recording", False, marks=pytest.mark.long),
    ],
)
def test_an_interrupted_import_is_neither_lost_nor_done_twice(served, tmp_path, monkeypatch, moment, names_files):
    """names_files: whether the server tells, of an import, which file it is of."""

    class Interrupted(MilvusStore):
        imports = 0
        spent = False

        def interrupt(self, at):
            if at == moment and self.imports == 2 and not Interrupted.spent:
                Interrupted.spent = True
                raise Interruption

        def bulk_import(self, collection, file, *, partition=None):
            self.imports += 1
            self.interrupt("asking")
            return super().bulk_import(collection, file, partition=partition)

        def import_job(self, job):
            self.interrupt("waiting")
            return super().import_job(job)

        def put_records(self, ledger, records):
            if any('"importing":"' in each.body and '"seconds":null' not in each.body for each in records):
                self.interrupt("recording")
            super().put_records(ledger, records)

    client, name = served.client(), served.name()
    plain_collection(client, name, vectors(np.random.default_rng(4), 900, 8), "IP")
    monkeypatch.setattr(MilvusStore, "chunk_rows", lambda self, source: 100)
    store = Interrupted(served.client())
    with pytest.raises(Interruption):
        migrate(store, planned(served, name, 8), by_files(tmp_path, file_bytes=32_000))
    assert Interrupted.spent

    class Nameless(MilvusStore):
        def import_jobs(self, collection):
            return [replace(job, file=None) for job in super().import_jobs(collection)]

    store = (MilvusStore if names_files else Nameless)(served.client())
    migration = resume(store, name, by_files(tmp_path, file_bytes=32_000))
    assert migration.phase == "verified"
    assert counted(client, migration.target) == 900
    assert verify(served.store(), name).rows == 900


@pytest.mark.long
def test_a_copy_begun_by_files_is_finished_by_upserts_and_the_other_way(served, tmp_path, monkeypatch):
    class Stopping(MilvusStore):
        def put_records(self, ledger, records):
            if sum('"seconds":null' not in each.body for each in records if each.group != "migrations") == 1:
                raise Interruption
            super().put_records(ledger, records)

    monkeypatch.setattr(MilvusStore, "chunk_rows", lambda self, source: 100)
    for first, second in [
        (by_files(tmp_path, file_bytes=1), MigrationOptions(no_writers=True)),
        (MigrationOptions(no_writers=True), by_files(tmp_path, file_bytes=1)),
    ]:
        client, name = served.client(), served.name()
        plain_collection(client, name, vectors(np.random.default_rng(5), 300, 8), "IP")
        with pytest.raises(Interruption):
            migrate(Stopping(served.client()), planned(served, name, 8), first)
        migration = resume(served.store(), name, second)
        assert counted(client, migration.target) == 300


@pytest.mark.long
def test_the_server_says_why_it_could_not_import(served, tmp_path):
    client, name = served.client(), served.name()
    plain_collection(client, name, vectors(np.random.default_rng(6), 50, 8), "IP")
    with pytest.raises(StoreError, match=r"could not import /nowhere/.*no such file"):
        migrate(served.store(), planned(served, name, 8), by_files(tmp_path, remote="/nowhere"))
    migration = resume(served.store(), name, by_files(tmp_path, remote=str(tmp_path)))
    assert counted(client, migration.target) == 50


def refused(backend, options, error, match):
    """Before anything is written."""
    client, name = backend.client(), backend.name()
    plain_collection(client, name, vectors(np.random.default_rng(7), 50, 8), "IP")
    plan = planned(backend, name, 8)
    before = set(client.list_collections()) - {LEDGER}
    with pytest.raises(error, match=match):
        migrate(backend.store(), plan, options)
    assert set(client.list_collections()) - {LEDGER} == before
    assert not client.has_collection(plan.target)


def test_milvus_lite_imports_no_files(lite, tmp_path):
    refused(lite, by_files(tmp_path), CannotMigrate, "Milvus Lite imports no files")


def test_the_extra_must_be_installed(served, tmp_path, monkeypatch):
    monkeypatch.setattr("milvus_hubness.stores.milvus_bulk.find_spec", lambda name: None if name == "minio" else True)
    refused(served, by_files(tmp_path), CannotMigrate, r'minio: pip install "milvus-hubness\[bulk\]"')


def test_the_folder_must_be_there(served, tmp_path):
    refused(served, by_files(tmp_path / "missing"), InvalidInput, "no folder .*missing")


def test_writers_must_rest(tmp_path):
    with pytest.raises(InvalidInput, match="--no-writers"):
        MigrationOptions(bulk=BulkTarget(tmp_path))


def test_a_folder_may_be_called_otherwise_by_the_server(tmp_path):
    assert BulkTarget.parse("/a/b").seen_by_database("c/1.parquet") == "/a/b/c/1.parquet"
    assert BulkTarget.parse("/a/b=bulk/in/").seen_by_database("c/1.parquet") == "bulk/in/c/1.parquet"
    assert BulkTarget.parse("/a/b=").seen_by_database("c/1.parquet") == "c/1.parquet"
