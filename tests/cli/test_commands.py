"""The commands as a user runs them: what they print, how they end, what they leave behind."""

import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import connect
from milvus_hubness.cli import main
from tests.galleries import plain_collection, vectors

DIM = 8


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A Milvus Lite file with a collection of 60 rows, and banks of every kind, in the working folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(4)
    bank = vectors(rng, 40, DIM)
    client = connect("shop.db")
    plain_collection(client, "products", vectors(rng, 60, DIM), "COSINE")
    np.save("bank.npy", bank)
    np.savez("bank.npz", queries=bank, other=bank[:3])
    table = pa.table({"text": ["q"] * 40, "embedding": list(bank)})
    pq.write_table(table, "bank.parquet")
    with pa.OSFile("bank.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    yield tmp_path
    client.close()
    server_manager_instance.release_server("shop.db")


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process; what it printed and how it ended."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments, uri="shop.db", **environment):
        monkeypatch.setenv("MILVUS_HUBNESS_URI", uri)
        monkeypatch.setenv("COLUMNS", "120")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["milvus-hubness", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, on_terminate)


def collections(folder):
    return set(connect(str(folder / "shop.db")).list_collections())


def assert_fails(done, code, *said):
    """One clear line, no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    [line] = done.stderr.strip().splitlines()
    for words in said:
        assert words in line


def test_from_a_plain_collection_to_a_refreshed_one(run, files):
    plan = run("migrate", "products", "--bank", "bank.npy", "--k", "8")
    assert plan.returncode == 0, plan.stderr
    for fact in ("products_hubness", "COSINE, served as IP", "8 -> 16", "40 queries", "NNN(k=8, alpha=0.75"):
        assert fact in plan.stdout
    assert "Nothing was written" in plan.stdout
    assert collections(files) == {"products"}

    done = run("migrate", "products", "--bank", "bank.npy", "--k", "8", "--alias", "live", "--execute")
    assert done.returncode == 0, done.stderr
    assert "60 rows" in done.stdout
    assert "live -> products_hubness" in done.stdout
    assert collections(files) == {"products", "products_hubness", "products__bank"}

    status = run("status", "live")
    assert status.returncode == 0, status.stderr
    for fact in ("products_hubness", "corrected", "yes", "products__bank, 40 queries", "NNN(k=8", "epoch 1"):
        assert fact in status.stdout

    refreshed = run("refresh", "products_hubness", "--bank", "bank.parquet", "--alpha", "1", "--json")
    assert refreshed.returncode == 0, refreshed.stderr
    told = json.loads(refreshed.stdout)["refresh"]
    assert (told["mode"], told["scanned"], told["reason"]) == ("full", 60, "the parameters changed")

    back = run("migrate", "live", "--rollback")
    assert back.returncode == 0, back.stderr
    assert "live -> products" in back.stdout


def test_json_of_every_command(run, files):
    planned = json.loads(run("migrate", "products", "--bank", "bank.npy", "--k", "8", "--json").stdout)
    assert planned["executed"] is False
    assert planned["plan"]["rows"] == 60
    arguments = ("--bank", "bank.npy", "--k", "8", "--alias", "live", "--execute", "--json")
    done = json.loads(run("migrate", "products", *arguments).stdout)
    assert done["result"]["rows"] == 60
    assert done["result"]["unsound"] == {"rows": 0, "keys": []}
    status = json.loads(run("status", "products_hubness", "--json").stdout)["status"]
    assert (status["corrected"], status["pending"], status["epoch"]) == (True, 0, 1)
    back = json.loads(run("migrate", "live", "--rollback", "--json").stdout)
    assert back["rollback"]["source"] == "products"


@pytest.mark.parametrize(
    ("bank", "column"),
    [
        ("bank.npy", None),
        ("bank.npz", "queries"),
        ("bank.parquet", None),
        ("bank.arrow", "embedding"),
        ("collection:products", None),
    ],
)
def test_banks_of_every_kind(run, files, bank, column):
    chosen = ["--bank-column", column] if column else []
    done = run("migrate", "products", "--bank", bank, *chosen, "--k", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["bank"]["queries"] == (60 if bank.startswith("coll") else 40)


def test_a_gate_with_two_sets(run, files):
    asked = ["migrate", "products", "--bank", "bank.npz", "--bank-column", "queries", "--gate", "1"]
    assert_fails(run(*asked, "--gate-targets", "2"), 1, "give a target bank")
    done = run(*asked, "--gate-targets", "2", "--target-bank", "bank.npy", "--execute", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert (plan["gate"], plan["gate_targets"], plan["bank"]["targets"]) == (1, 2, 40)


def test_tune_then_diagnose(run, files):
    rng = np.random.default_rng(4)
    rng.normal(size=(1, 1))
    queries = vectors(rng, 30, DIM)
    np.savez("pairs.npz", query=queries, key=np.arange(30))
    table = pa.table({"query": list(queries), "key": list(range(30))})
    pq.write_table(table, "pairs.parquet")
    told = json.loads(run("tune", "products", "--bank", "bank.npy", "--pairs", "pairs.npz", "--json").stdout)
    assert told["tune"]["verdict"] in {"apply", "apply weakly", "leave it alone"}
    assert told["tune"]["labelled"]
    human = run("tune", "products", "--bank", "bank.npy", "--pairs", "pairs.parquet")
    assert human.returncode == 0, human.stderr
    assert f"products: {told['tune']['verdict']}" in human.stdout
    assert "as it is" in human.stdout
    done = run("diagnose", "products", "--pairs", "pairs.npz", "--bank", "bank.npy", "--output", "page.html")
    assert done.returncode == 0, done.stderr
    assert "<svg" in (files / "page.html").read_text()
    np.savez("short.npz", query=queries, key=np.arange(29))
    np.savez("keyless.npz", query=queries)
    for pairs, said in (
        ("short.npz", "29 keys for 30"),
        ("keyless.npz", "'key'"),
        ("missing.npz", "missing"),
    ):
        assert_fails(run("tune", "products", "--bank", "bank.npy", "--pairs", pairs), 1, said)
    assert_fails(run("tune", "products"), 1, "no bank")
    np.save("asked.npy", queries)
    blind = run("tune", "products", "--bank", "bank.npy")
    seeing = run("tune", "products", "--bank", "bank.npy", "--queries", "asked.npy")
    assert "Told of the bank alone" in blind.stdout
    assert "Told of the bank alone" not in seeing.stdout
    assert "products: " in seeing.stdout
    both = run("tune", "products", "--bank", "bank.npy", "--queries", "asked.npy", "--pairs", "pairs.npz")
    assert both.returncode == 2


def spoiled(files):
    np.save(files / "narrow.npy", np.ones((40, DIM - 1), np.float32))
    np.save(files / "nan.npy", np.where(np.eye(40, DIM) == 1, np.nan, 1.0))
    np.save(files / "empty.npy", np.empty((0, DIM), np.float32))
    (files / "broken.npy").write_bytes(b"not a numpy file")
    (files / "bank.txt").write_text("1 2 3")


FAILURES = [
    (["migrate", "products", "--bank", "narrow.npy"], 1, ["8", "7"]),
    (["migrate", "products", "--bank", "nan.npy"], 1, ["NaN", "0, 1, 2"]),
    (["migrate", "products", "--bank", "empty.npy"], 1, ["bank"]),
    (["migrate", "products", "--bank", "broken.npy"], 1, ["broken.npy"]),
    (["migrate", "products", "--bank", "missing.npy"], 1, ["missing.npy"]),
    (["migrate", "products", "--bank", "bank.txt"], 1, ["bank.txt"]),
    (["migrate", "products", "--bank", "bank.npz"], 1, ["queries", "other"]),
    (["migrate", "products", "--bank", "bank.npy", "--k", "41"], 1, ["41", "40"]),
    (["migrate", "products", "--bank", "bank.npy", "--k", "0"], 2, ["k"]),
    (["migrate", "products", "--bank", "bank.npy", "--alpha", "nan"], 2, ["alpha"]),
    (["migrate", "products", "--bank", "bank.npy", "--method", "magic"], 2, ["magic"]),
    (["migrate", "products", "--bank", "bank.npy", "--method", "is", "--param", "tau=0"], 2, ["tau"]),
    (["migrate", "products", "--bank", "bank.npy", "--method", "is", "--param", "tau"], 2, ["NAME=VALUE"]),
    (["migrate", "products", "--bank", "bank.npy", "--method", "blend", "--k", "8"], 2, ["no parameter"]),
    (["migrate", "products", "--bank", "bank.npy", "--method", "dualis"], 1, ["target"]),
    (["migrate", "nowhere", "--bank", "bank.npy", "--k", "8"], 1, ["nowhere"]),
    (["migrate", "products", "--bank", "bank.npy", "--k", "8", "--field", "group"], 1, ["group"]),
    (["refresh", "products"], 1, ["products", "no biases"]),
    (["status", "nowhere"], 1, ["nowhere"]),
    (["migrate", "products", "--rollback"], 1, ["alias"]),
    (["status", "products", "--token-file", "missing"], 1, ["missing"]),
]


def test_what_is_wrong_is_told_in_one_line_and_nothing_is_left(run, files):
    spoiled(files)
    for arguments, code, said in FAILURES:
        execute = ["--execute"] if "--bank" in arguments else []
        assert_fails(run(*arguments, *execute), code, *said)
    assert collections(files) == {"products"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["migrate"],
        ["migrate", "products"],
        ["diagnose", "products"],
        ["nonsense"],
        ["status", "--nonsense"],
        ["demo", "--keep"],
    ],
)
def test_wrong_usage_ends_with_two(run, arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_dead_server_is_told(run):
    secret = "s3cret-token"
    done = run("status", "products", uri="http://127.0.0.1:1", MILVUS_HUBNESS_TOKEN=secret)
    assert_fails(done, 1, "no Milvus answers at http://127.0.0.1:1")
    assert secret not in done.stdout + done.stderr


def test_an_error_is_json_too(run, files):
    done = run("status", "nowhere", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "CollectionNotFound"


def test_a_terminated_migration_leaves_nothing(files):
    """In a process of its own: the signal is real."""
    server_manager_instance.release_server("shop.db")
    script = (
        "import os, signal, sys\n"
        "from milvus_hubness.stores import MilvusStore\n"
        "from milvus_hubness.cli import main\n"
        "MilvusStore.finish = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['x', 'migrate', 'products', '--bank', 'bank.npy', '--k', '8', '--execute']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MILVUS_HUBNESS_URI": "shop.db"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 143
    assert collections(files) == {"products"}


def test_the_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "milvus_hubness", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    for name in ("demo", "migrate", "refresh", "status"):
        assert name in done.stdout


def test_enable_plans_then_does_and_disable_takes_it_back(files, run):
    before = collections(files)
    planned = run("enable", "products", "--bank", "bank.npy", "--method", "nnn", "--k", "4")
    assert planned.returncode == 0
    for said in ("products__bias", "60", "NNN(k=4", "candidates", "missed", "--execute"):
        assert said in planned.stdout
    assert collections(files) == before
    asked = ["enable", "products", "--bank", "bank.npy", "--mode", "rerank", "--execute", "--json"]
    done = json.loads(run(*asked).stdout)
    assert done["executed"]
    assert done["result"]["rows"] == 60
    assert done["plan"]["missed"]["50"] == pytest.approx(done["result"]["missed"])
    assert collections(files) == {*before, "products__bias", "products__bank"}
    told = json.loads(run("status", "products", "--json").stdout)["status"]
    assert (told["corrected"], told["where"], told["pending"]) == (True, "side", 0)
    assert "beside the vectors" in run("status", "products").stdout
    assert "pending" in run("refresh", "products").stdout
    assert_fails(run(*asked[:-1]), 1, "products", "refresh it instead")
    assert run("disable", "products").returncode == 0
    assert collections(files) == {*before, "products__bank"}
    assert_fails(run("disable", "products"), 1, "carries no biases")


def test_enable_refuses_what_it_cannot_do(files, run):
    assert_fails(run("enable", "products", "--bank", "bank.npy", "--misses", "2"), 2, "allowed_misses", "2")
    assert_fails(run("enable", "nothing", "--bank", "bank.npy"), 1, "nothing")
    assert_fails(
        run("enable", "products", "--bank", "bank.npy", "--where", "fields"), 1, "side collection", "products"
    )
    assert run("enable", "products", "--bank", "bank.npy", "--mode", "vectors").returncode == 2
    assert run("enable", "products").returncode == 2
