"""milvus-hubness as a user runs it on Qdrant, one process after the other on a folder of the local mode."""

import json
import os
import sys

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from milvus_hubness import (
    CannotMigrate,
    InvalidInput,
    InvalidParameter,
    MultiVectors,
    UnsupportedOperation,
    cli,
    status,
)
from tests.support.galleries import vectors

DIM = 8


@pytest.fixture
def folder(quick_folder, monkeypatch):
    rng = np.random.default_rng(0)
    with_data = QdrantClient(path=str(quick_folder / "data"))
    config = models.VectorParams(size=DIM, distance="Cosine")
    with_data.create_collection("items", vectors_config=config)
    with_data.upload_collection("items", vectors(rng, 60, DIM), ids=range(60))
    with_data.close()
    for name in ("bank", "other"):
        np.save(quick_folder / f"{name}.npy", vectors(rng, 40, DIM))
    monkeypatch.setenv("MILVUS_HUBNESS_URI", f"qdrant+file://{quick_folder}/data")
    return quick_folder


@pytest.fixture
def run(folder, command):
    def call(*words):
        done = command(*words, "--json", catch_exceptions=False)
        assert done.exit_code == 0, done.output
        # A migration prints events, of which the last has its result.
        last = json.loads(done.stdout.splitlines()[-1])
        return last.get("facts", last)

    return call


def test_the_rights_of_an_application_are_tried_on_milvus_only(command, folder, monkeypatch):
    """Refused before anything is written."""
    monkeypatch.setenv("MILVUS_HUBNESS_APPLICATION_TOKEN", "key-of-the-shop")
    bank = str(folder / "bank.npy")
    done = command("migrate", "run", "--rehearse", "items", "--bank", bank)
    assert done.exit_code != 0
    assert "rights can be tried on Milvus only: unset $MILVUS_HUBNESS_APPLICATION_TOKEN" in str(
        done.exception
    )
    assert json.loads(command("migrate", "status", "--json").stdout) == {"migrations": []}


def test_a_printed_command_quotes_names_with_spaces(run, folder):
    names = ("--target", "items of spring", "--alias", "the live one")
    bank = str(folder / "bank.npy")
    made = run("migrate", "run", "--rehearse", "items", "--bank", bank, "--param", "k=4", *names)
    assert made["clean"] == "milvus-hubness migrate clean items --drop 'items of spring'"
    assert "migrate cutover items --alias 'the live one': the live one leads" in made["cutover"][0]


def test_from_a_plain_collection_to_a_fresh_one_and_back(run, folder):
    bank, other = str(folder / "bank.npy"), str(folder / "other.npy")
    assert run("status", "items")["status"]["corrected"] is False
    planned = run(
        "migrate", "run", "--plan", "items", "--bank", bank, "--param", "k=4", "--alias", "live"
    )["plan"]
    assert (planned["rows"], planned["target"]) == (60, "items_hubness")
    assert run("status", "items")["status"]["aliases"] == []
    made = run("migrate", "run", "--rehearse", "items", "--bank", bank, "--param", "k=4")
    assert made["target"] == "items_hubness"
    shown = run("migrate", "status", "items")["migration"]
    assert (shown["phase"], shown["rows"]) == ("verified", 60)
    moved = run("migrate", "cutover", "items", "--alias", "live")
    assert (moved["phase"], moved["switch"]["name"]) == ("switched", "live")
    assert run("migrate", "run", "items")["phase"] == "switched", "nothing is left to do"
    told = run("status", "live")["status"]
    assert (told["collection"], told["estimator"]["k"], told["pending"]) == ("items_hubness", 4, 0)
    checked = run("refresh", "live", "--refit-share", "0.2")["refresh"]
    assert (checked["action"], checked["unfitted_share"]) == ("none", 0)
    done = run("refresh", "live", "--bank", other, "--force")["refresh"]
    assert (done["action"], done["epoch"]) == ("full", 2)
    for source in ("items_hubness", "items"):
        back = run("migrate", "rollback", "live")
        assert (back["alias"], back["source"]) == ("live", source)
    again = run("migrate", "rollback", "live")
    assert (again["source"], again["carried"]) == ("items", 0), "nothing is left to do"
    cleaning = ("migrate", "clean", "items", "--drop", "items_hubness")
    assert run(*cleaning)["clean"]["would_drop"] == {
        "the copy": "items_hubness, 60 rows",
        "the bank": "items__bank",
    }
    assert run("status", "items_hubness")["status"]["corrected"], (
        "nothing was dropped without --yes"
    )
    assert run(*cleaning, "--yes")["clean"]["dropped"]["the copy"] == "items_hubness, 60 rows"
    assert run("status", "items")["status"]["aliases"] == ["live"]


def test_other_options_than_those_of_a_switched_migration_are_refused(run, folder):
    bank, other = str(folder / "bank.npy"), str(folder / "other.npy")
    options = ("items", "--param", "k=4")
    run("migrate", "run", *options, "--bank", bank, "--alias", "one")
    with pytest.raises(InvalidParameter, match=r"^--alias two: .* is 'switched' with --alias one"):
        run("migrate", "run", *options, "--bank", bank, "--alias", "two")
    with pytest.raises(InvalidParameter, match=r"^--alias two: .* is 'switched' with --alias one"):
        run("migrate", "cutover", "items", "--alias", "two")
    for different in (("--bank", other), ("--bank", bank, "--on-hub", "warn")):
        with pytest.raises(InvalidParameter, match=r"^--(bank|on-hub): .* with other options"):
            run("migrate", "run", *options, *different, "--alias", "one")
    assert run("migrate", "run", *options, "--bank", bank, "--alias", "one")["phase"] == "switched"


def test_a_plan_shows_what_is_there_and_what_is_added(run, command, folder):
    plan = ("migrate", "run", "--plan", "items", "--bank", str(folder / "bank.npy"))
    shown = command(*plan, catch_exceptions=False).stdout
    facts = run(*plan)["plan"]
    assert facts["partitions"] == facts["hidden_fields"] == []
    assert "fields added" not in shown
    assert "partitions" not in shown
    words = " ".join(shown.split())
    assert "one payload index more" in words
    assert "vectors of 16 numbers, so that plain clients fail" in words
    assert "HubnessQdrantClient" in words

    run("migrate", "run", "items", "--bank", str(folder / "bank.npy"), "--alias", "live")
    client = QdrantClient(path=str(folder / "data"))
    assert client.scroll("items_hubness", limit=1)[0][0].payload == {}
    client.close()


def test_a_migration_whose_alias_has_moved_on_says_so(run, command, folder):
    bank, other = str(folder / "bank.npy"), str(folder / "other.npy")
    run("migrate", "run", "items", "--bank", bank, "--param", "k=4", "--alias", "live")
    again = ("migrate", "run", "items")
    assert run(*again)["leads_to"] == "items_hubness"
    assert "now ->" not in command(*again, catch_exceptions=False).stdout

    done = run("refresh", "live", "--bank", other)["refresh"]
    assert (done["action"], done["former_copy"]) == ("full", "items_hubness")
    assert run(*again)["leads_to"] == done["collection"]
    for words in (again, ("migrate", "status", "items")):
        shown = " ".join(command(*words, catch_exceptions=False).stdout.split())
        assert f"now -> {done['collection']}" in shown
    # In the table of all, the name of the copy may need a line of its own.
    assert "live, now ->" in command("migrate", "status", catch_exceptions=False).stdout
    assert "migrate rollback live" in command(*again, catch_exceptions=False).stdout
    assert run("migrate", "rollback", "live")["source"] == "items_hubness"


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
    planned = run("migrate", "run", "--plan", "pages", *bank, "--alias", "live")["plan"]
    assert planned["bank"]["queries"] == 90
    assert 1 < planned["vectors_per_row"] < 5
    moved = run("migrate", "run", "pages", *bank, "--alias", "live")
    assert (moved["phase"], moved["switch"]["name"]) == ("switched", "live")
    with pytest.raises(CannotMigrate, match=r"^the vector of 'pages' has several vectors a row"):
        run("enable", "pages", *bank)
    # The bank of the collection itself is read from there, too.
    own = ("--bank", "collection:pages")
    done = run("refresh", "live", *own, "--force")["refresh"]
    assert (done["action"], done["written"]) == ("full", 60)
    for source in ("pages_hubness", "pages"):
        assert run("migrate", "rollback", "live")["source"] == source


def test_without_a_copy(run, folder):
    bank = ("--bank", str(folder / "bank.npy"), "--param", "k=4")
    assert run("enable", "items", *bank, "--plan")["plan"]["side_collections"] == []
    made = run("enable", "items", *bank)["enable"]
    assert (made["rows"], made["side_collection"]) == (60, None)
    assert run("status", "items")["status"]["where"] == "beside"
    run("disable", "items")
    assert run("status", "items")["status"]["corrected"] is False
    left = run("sweep", "items")["sweep"]["would_remove"]
    assert left["keys"]["hubness_bias"] == 60
    assert run("sweep", "items", "--yes")["sweep"]["removed"]["keys"] == left["keys"]
    assert run("sweep", "items")["sweep"]["removed"]["keys"] == {}


LOOKS = {
    "check": "items --bank bank.npy --queries other.npy --page hubness.html",
    "tune": "items --bank bank.npy",
    "hubs": "items --bank bank.npy --top 3",
    "status": "items",
}


@pytest.mark.parametrize("name", LOOKS)
def test_commands_that_look_at_a_collection(command, folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    done = command(name, *LOOKS[name].split(), "--json", catch_exceptions=False)
    # The bank of random queries is better left alone, which `check` says by 3.
    assert done.exit_code in (0, 3), done.output[:500]
    assert "error" not in json.loads(done.stdout)


BANK = "--bank bank.npy --force"
REFUSED = {
    "a gate": (f"migrate run --plan items {BANK} --gate 4", "gate searches"),
    "a rename": (f"migrate run --plan items {BANK} --rename", "cannot rename collections"),
    "a hub guard": (f"migrate run --plan items {BANK} --on-hub warn", "watch their writes"),
    "a gate without a copy": (f"enable items {BANK} --plan --gate 4", "gate searches"),
    "samples": ("bank sample items --rate 0.5", "keeps no query samples"),
    "an adoption": ("adopt items --renamed-from former", "cannot rename collections"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_store_cannot_do_is_refused(run, folder, monkeypatch, case):
    words, message = REFUSED[case]
    monkeypatch.chdir(folder)
    with pytest.raises((UnsupportedOperation, InvalidInput), match=message):
        run(*words.split())


def test_jobs_of_the_library_take_the_address(folder, run):
    run("enable", "items", "--bank", str(folder / "bank.npy"), "--param", "k=4")
    for _ in range(2):
        assert status(f"qdrant+file://{folder}/data", "items").where == "beside", "it is closed"


def test_errors_are_one_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["milvus-hubness", "status", "nowhere", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert told.err == "milvus-hubness: no collection or alias 'nowhere'\n"
    assert json.loads(told.out)["error"]["type"] == "CollectionNotFound"


ADDRESSES = {
    "of a program": (
        "qdrant+file://{}/program",
        "program: is no folder of the local mode: name a folder, or a server as http://HOST:PORT",
    ),
    "of a pipe": (
        "qdrant+file://{}/pipe",
        "pipe: is no folder of the local mode: name a folder, or a server as http://HOST:PORT",
    ),
    "without a package": (
        "sqlite+file://{}/data",
        "no store for 'sqlite+file': install the package that offers it",
    ),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_an_invalid_address_is_refused(tmp_path, monkeypatch, capsys, case):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "program").write_bytes(b"\x7fELF")
    address, message = ADDRESSES[case]
    words = ["milvus-hubness", "status", "items", "--uri", address.format(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.endswith(message)


def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr("milvus_hubness.api.databases.entry_points", lambda **of: ())
    words = ["milvus-hubness", "status", "items", "--uri", "qdrant+http://localhost:6333"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("milvus-hubness: no store for 'qdrant+http': pip install ")
    assert "qdrant" in line.partition("pip install ")[2]


@pytest.mark.parametrize("words", ["match items --out out.npz", "demo"])
def test_what_needs_a_client_of_milvus_says_so(folder, monkeypatch, capsys, words):
    bank = ["--queries", str(folder / "bank.npy")] if words != "demo" else []
    monkeypatch.chdir(folder)
    uri = os.environ["MILVUS_HUBNESS_URI"]
    monkeypatch.setattr(sys, "argv", ["milvus-hubness", *words.split(), *bank, "--uri", uri])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "is no address of Milvus, which this needs" in capsys.readouterr().err.splitlines()[-1]


def test_a_name_that_steers_a_terminal_is_shown(folder, command):
    name = "it\x1b[2J\u202eems"
    client = QdrantClient(path=str(folder / "data"))
    client.create_collection(name, vectors_config=models.VectorParams(size=DIM, distance="Cosine"))
    client.close()
    for option in ([], ["--json"]):
        done = command("status", name, *option, catch_exceptions=False)
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
    options = ("items", "--bank", bank, "--param", "k=4", "--force")
    prior = ("--prior", "clicks", "--prior-weight", "0.2")
    planned = run("migrate", "run", "--plan", *options, *prior)["plan"]
    assert (planned["prior"]["field"], planned["prior"]["weight"]) == ("clicks", 0.2)
    run("migrate", "run", *options, *prior, "--alias", "live")
    made = run("status", "items_hubness")["status"]["prior"]
    assert (made["source"], made["factor"] > 0) == ("field", True)

    refresh = ("refresh", "live")
    clicks = ("--prior-from", str(folder / "clicks.npz"), "--prior-weight", "0.2")
    assert run(*refresh, *clicks)["refresh"]["action"] == "full"
    assert run("status", "live")["status"]["prior"]["source"] == "pairs"
    assert run(*refresh, "--no-prior")["refresh"]["action"] == "full"
    assert run("status", "live")["status"]["prior"] is None

    assert run("enable", *options, "--plan", *prior)["plan"]["prior"]["weight"] == 0.2
    with pytest.raises(InvalidInput, match="field 'sales' of 'items' is 0 or missing in all rows"):
        run("enable", *options, "--plan", "--prior", "sales")
