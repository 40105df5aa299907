"""A mistyped path of a local database: one line says so, and no empty database appears there."""

import sqlite3
from contextlib import closing
from functools import partial

import pytest
from qdrant_client import QdrantClient

from milvus_hubness import (
    HubnessClient,
    InvalidInput,
    InvalidParameter,
    ServerUnavailable,
    UnsupportedVersion,
    connect,
)
from qdrant_hubness import HubnessQdrantClient
from qdrant_hubness.store import connect as connect_qdrant

READS_AND_JOBS = {
    "status": ("status", "products"),
    "refresh": ("refresh", "products"),
    "migrate plan": ("migrate", "run", "--plan", "products", "--bank", "bank.npy"),
    "migrate status": ("migrate", "status"),
    "migrate run": ("migrate", "run", "products", "--bank", "bank.npy"),
    "enable": ("enable", "products", "--bank", "bank.npy"),
    "check": ("check", "products", "--bank", "bank.npy"),
    "match": ("match", "products", "--queries", "bank.npy", "--out", "out.parquet"),
    "hubs": ("hubs", "products", "--bank", "bank.npy"),
}


@pytest.mark.parametrize("words", READS_AND_JOBS.values(), ids=READS_AND_JOBS)
def test_a_command_creates_no_database_at_a_mistyped_path(files, run, words):
    done = run(*words, uri="shp.db")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "no Milvus Lite database at shp.db: correct the path" in done.stderr
    assert not (files / "shp.db").exists()


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("localhost:19530", "http://localhost:19530"),
        ("milvus", "http://milvus:19530"),
        ("[::1]:19530", "http://[::1]:19530"),
        ("root:secret@10.0.0.7:19530", "http://***@10.0.0.7:19530"),
        ("qdrant+localhost:6333", "qdrant+http://localhost:6333"),
    ],
)
def test_an_address_without_its_scheme_is_written_out(address, meant):
    for call in (connect, HubnessClient):
        with pytest.raises(InvalidInput, match="has no http:// or https://") as refused:
            call(address)
        assert f"write {meant}, " in str(refused.value)
        assert "secret" not in str(refused.value)


def test_an_address_names_one_database():
    with pytest.raises(InvalidParameter, match="more than a database: write http://HOST:PORT/DATA"):
        connect("http://root:secret@localhost:1/shop/spring")


def test_a_mistyped_collection_or_alias_is_answered_with_near_ones(files, run):
    connect("shop.db").create_alias("products", "photo_search")
    for mistyped, meant in (("prodcts", "products"), ("Photo_Serch", "photo_search")):
        done = run("status", mistyped)
        assert done.returncode == 1
        assert f"no collection or alias {mistyped!r}; did you mean {meant!r}?" in done.stderr
    assert "did you mean" not in run("status", "elsewhere").stderr


def test_an_empty_folder_is_no_database(files, run):
    (files / "empty.db").mkdir()
    assert "no Milvus Lite database at empty.db" in run("status", "products", uri="empty.db").stderr
    assert list((files / "empty.db").iterdir()) == []


@pytest.mark.parametrize("content", ["text", "SQLite", "nothing"])
def test_a_file_in_place_of_a_database_is_named_for_what_it_is(tmp_path, run, content):
    path = tmp_path / "shop.db"
    path.write_bytes({"text": b"hello\n", "SQLite": b"", "nothing": b""}[content])
    kind, reason = ServerUnavailable, "shop.db is a file, and a database of Milvus Lite is a folder"
    if content == "SQLite":
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE items (id)")
        kind, reason = UnsupportedVersion, "shop.db is a file of Milvus Lite 2, and Milvus Lite 3"
    before = path.read_bytes()
    for call in (connect, partial(connect, create=True), HubnessClient):
        with pytest.raises(kind, match=reason) as refused:
            call(str(path))
        assert "another process" not in str(refused.value)
    done = run("status", "products", uri=str(path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert reason in done.stderr
    assert path.read_bytes() == before


def test_connect_creates_a_database_only_on_request(tmp_path):
    path = tmp_path / "new.db"
    with pytest.raises(ServerUnavailable, match=r"no Milvus Lite database at .*new\.db"):
        connect(str(path))
    assert not path.exists()
    connect(str(path), create=True).close()
    assert path.exists()
    connect(str(path)).close()


def test_a_client_creates_a_database_as_pymilvus_does(tmp_path):
    client = HubnessClient(str(tmp_path / "new.db"))
    client.create_collection("items", 4)
    assert client.list_collections() == ["items"]


def test_qdrants_local_mode_likewise(tmp_path, run):
    folder, other = tmp_path / "dta", tmp_path / "notes"
    other.mkdir()
    (other / "todo.txt").write_text("mine")
    for path in (folder, other):
        with pytest.raises(ServerUnavailable, match="no database of Qdrant's local mode at"):
            connect_qdrant(str(path))
        done = run("status", "items", uri=f"qdrant+file://{path}")
        assert "no database of Qdrant's local mode at" in done.stderr
    assert not folder.exists()
    assert [path.name for path in other.iterdir()] == ["todo.txt"], "another folder stays as it is"

    connect_qdrant(str(folder), create=True).close()
    connect_qdrant(str(folder)).close()
    HubnessQdrantClient(path=str(tmp_path / "third")).close()
    QdrantClient(path=str(tmp_path / "third")).close()
