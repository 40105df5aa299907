"""qdrant-hubness as a user runs it, one process after the other on a folder of the local mode."""

import json
import os
import sys

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from typer.main import get_command
from typer.testing import CliRunner

from milvus_hubness import InvalidInput, MultiVectors
from qdrant_hubness import cli
from tests.support.galleries import vectors

DIM = 8


@pytest.fixture
def folder(quick_folder):
    rng = np.random.default_rng(0)
    with_data = QdrantClient(path=str(quick_folder / "data"))
    config = models.VectorParams(size=DIM, distance="Cosine")
    with_data.create_collection("items", vectors_config=config)
    with_data.upload_collection("items", vectors(rng, 60, DIM), ids=range(60))
    with_data.close()
    for name in ("bank", "other"):
        np.save(quick_folder / f"{name}.npy", vectors(rng, 40, DIM))
    return quick_folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.setenv("QDRANT_URL", str(folder / "data"))
    opened = []
    connect = cli.connect
    monkeypatch.setattr(cli, "connect", lambda *args: opened.append(connect(*args)) or opened[-1])

    def call(*words, code=0):
        done = CliRunner().invoke(cli.app, [*words, "--json"], catch_exceptions=False)
        for client in opened:
            client.close()
        opened.clear()
        assert done.exit_code == code, done.output
        return done.output if code else json.loads(done.stdout)

    return call


def test_from_a_plain_collection_to_a_fresh_one_and_back(run, folder):
    bank, other = str(folder / "bank.npy"), str(folder / "other.npy")
    assert run("status", "items")["status"]["corrected"] is False
    planned = run("migrate", "items", "--bank", bank, "--k", "4", "--alias", "live", "--plan")[
        "plan"
    ]
    assert (planned["rows"], planned["target"]) == (60, "items_hubness")
    assert run("status", "items")["status"]["aliases"] == []
    made = run("migrate", "items", "--bank", bank, "--k", "4", "--client-ttl", "0")["migration"]
    assert (made["phase"], made["rows"]) == ("verified", 60)
    shown = run("migrate", "items", "--alias", "live", "--plan")["migration"]
    assert (shown["phase"], run("status", "items")["status"]["aliases"]) == ("verified", []), (
        "it only shows"
    )
    moved = run("migrate", "items", "--alias", "live", "--client-ttl", "0")["migration"]
    assert (moved["phase"], moved["alias"]) == ("switched", "live")
    assert run("migrate", "items")["migration"]["phase"] == "switched", "nothing is left to do"
    told = run("status", "live")["status"]
    assert (told["collection"], told["estimator"]["k"], told["pending"]) == ("items_hubness", 4, 0)
    checked = run("refresh", "live", "--refit-share", "0.2", "--client-ttl", "0")["refresh"]
    assert (checked["action"], checked["unfitted_share"]) == ("none", 0)
    done = run("refresh", "live", "--bank", other, "--force", "--client-ttl", "0")["refresh"]
    assert (done["action"], done["epoch"]) == ("full", 2)
    assert (
        run("refresh", "live", "--revert", "--force", "--client-ttl", "0")["refresh"]["epoch"] == 3
    )
    revert = run("rollback", "live", "--client-ttl", "0")["rollback"]
    assert (revert["alias"], revert["source"]) == ("live", "items")
    again = run("rollback", "live", "--client-ttl", "0")["rollback"]
    assert (again["source"], again["carried"]) == ("items", 0), "nothing is left to do"
    cleaning = ("clean", "items", "--drop", "items_hubness")
    assert run(*cleaning)["clean"]["would_drop"] == {
        "the copy": "items_hubness, 60 rows",
        "the bank": "items__bank",
    }
    assert run("status", "items_hubness")["status"]["corrected"], (
        "nothing was dropped without --yes"
    )
    assert run(*cleaning, "--yes")["clean"]["dropped"] == "items_hubness"
    assert run("status", "items")["status"]["aliases"] == ["live"]


def test_points_of_several_vectors(run, folder):
    rng = np.random.default_rng(1)

    def texts(count):
        return [vectors(rng, length, DIM) for length in rng.integers(1, 6, count)]

    client = QdrantClient(path=str(folder / "data"))
    max_sim = models.MultiVectorConfig(comparator="max_sim")
    config = models.VectorParams(size=DIM, distance="Cosine", multivector_config=max_sim)
    client.create_collection("pages", vectors_config=config)
    points = [models.PointStruct(id=i, vector=row.tolist()) for i, row in enumerate(texts(60))]
    client.upsert("pages", points)
    client.close()
    MultiVectors.from_list(texts(90)).save(folder / "bank.npz")

    bank = ("--bank", str(folder / "bank.npz"))
    planned = run("migrate", "pages", *bank, "--alias", "live", "--plan")["plan"]
    assert planned["bank"]["queries"] == 90
    assert 1 < planned["vectors_per_row"] < 5
    moved = run("migrate", "pages", *bank, "--alias", "live", "--client-ttl", "0")["migration"]
    assert (moved["phase"], moved["alias"]) == ("switched", "live")
    # The bank of the collection itself is read from there, too.
    own = ("--bank", "collection:pages")
    done = run("refresh", "live", *own, "--force", "--client-ttl", "0")["refresh"]
    assert (done["action"], done["written"]) == ("full", 60)
    assert run("rollback", "live", "--client-ttl", "0")["rollback"]["source"] == "pages"


def test_without_a_copy(run, folder):
    made = run("enable", "items", "--bank", str(folder / "bank.npy"), "--k", "4")["enable"]
    assert (made["rows"], made["side_collection"]) == (60, None)
    assert run("status", "items")["status"]["where"] == "fields"
    run("disable", "items")
    assert run("status", "items")["status"]["corrected"] is False


def test_errors_are_one_line(folder, monkeypatch, capsys):
    options = ["status", "nowhere", "--uri", str(folder / "data"), "--json"]
    monkeypatch.setattr(sys, "argv", ["qdrant-hubness", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert told.err == "qdrant-hubness: no collection or alias 'nowhere'\n"
    assert json.loads(told.out)["error"]["type"] == "CollectionNotFound"


def test_every_command_and_option_is_explained():
    found = get_command(cli.app).commands
    assert {"migrate", "refresh", "status"} <= set(found)
    for name, command in found.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


@pytest.mark.parametrize(
    "place", [os.mkfifo, lambda path: path.write_bytes(b"\x7fELF")], ids=["pipe", "program"]
)
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, monkeypatch, capsys, place):
    place(tmp_path / "data")
    monkeypatch.setattr(
        sys, "argv", ["qdrant-hubness", "status", "items", "--uri", str(tmp_path / "data")]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.endswith(
        "data: is no folder of the local mode: name a folder, or a server as http://HOST:PORT"
    )


def test_a_name_that_steers_a_terminal_is_shown(folder, monkeypatch):
    name = "it\x1b[2J\u202eems"
    client = QdrantClient(path=str(folder / "data"))
    client.create_collection(name, vectors_config=models.VectorParams(size=DIM, distance="Cosine"))
    client.close()
    monkeypatch.setenv("QDRANT_URL", str(folder / "data"))
    opened = []
    connect = cli.connect
    monkeypatch.setattr(cli, "connect", lambda *args: opened.append(connect(*args)) or opened[-1])
    for option in ([], ["--json"]):
        done = CliRunner().invoke(cli.app, ["status", name, *option], catch_exceptions=False)
        opened.pop().close()
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.output
        assert "\u202e" not in done.output
    assert json.loads(done.stdout)["status"]["collection"] == name


def test_a_prior_is_a_key_of_the_payload_or_a_log_of_clicks(run, folder):
    client = QdrantClient(path=str(folder / "data"))
    for id in range(0, 60, 3):
        client.set_payload("items", {"clicks": id}, points=[id])
    client.close()
    keys = np.arange(40) % 7
    np.savez(folder / "clicks.npz", query=np.load(folder / "bank.npy"), key=keys)

    bank = str(folder / "bank.npy")
    options = ("--bank", bank, "--k", "4", "--force", "--client-ttl", "0")
    prior = ("--prior", "clicks", "--prior-weight", "0.2")
    planned = run("migrate", "items", *options, *prior, "--plan")["plan"]
    assert (planned["prior"]["field"], planned["prior"]["weight"]) == ("clicks", 0.2)
    run("migrate", "items", *options, *prior)
    made = run("status", "items_hubness")["status"]["prior"]
    assert (made["source"], made["factor"] > 0) == ("field", True)

    refresh = ("refresh", "items_hubness", "--client-ttl", "0")
    clicks = ("--prior-from", str(folder / "clicks.npz"), "--prior-weight", "0.2")
    assert run(*refresh, *clicks)["refresh"]["action"] == "full"
    assert run("status", "items_hubness")["status"]["prior"]["source"] == "pairs"
    assert run(*refresh, "--no-prior")["refresh"]["action"] == "full"
    assert run("status", "items_hubness")["status"]["prior"] is None

    words = ("enable", "items", "--bank", bank, "--k", "4", "--force", "--plan")
    assert run(*words, *prior)["plan"]["prior"]["weight"] == 0.2
    with pytest.raises(InvalidInput, match="field 'sales' of 'items' is 0 or missing in all rows"):
        run(*words, "--prior", "sales")
