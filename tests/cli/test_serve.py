"""milvus-hubness serve, as people start it."""

import json
import signal
import time
import urllib.request

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import (
    NNN,
    HubnessClient,
    MilvusStore,
    QueryBank,
    connect,
    migrate,
    plan_migration,
    status,
)
from tests.cli.conftest import DIM
from tests.galleries import vectors

COLLECTION = '[[collection]]\nname = "products_hubness"\n'
TOKEN = "sesame-0815"


@pytest.fixture
def corrected(files):
    """As `files`, with products_hubness, a configuration of which `configured` writes."""
    store = MilvusStore(connect("shop.db"))
    migrate(store, plan_migration(store, "products", QueryBank.load("bank.npy"), estimator=NNN(4)))
    return files


def configured(text=COLLECTION, server=""):
    with open("hubness.toml", "w", encoding="utf-8") as file:
        file.write(f'[server]\nuri = "shop.db"\n{server}[http]\nlisten = "127.0.0.1:0"\n{text}')
    return "hubness.toml"


def insert_pending(count, first=1_000):
    client = HubnessClient("shop.db")
    rows = vectors(np.random.default_rng(first), count, DIM)
    client.insert(
        "products_hubness",
        [{"id": first + n, "vector": row, "group": 1} for n, row in enumerate(rows)],
        bias="pending",
    )
    client.close()


def pending():
    return status(MilvusStore(connect("shop.db")), "products_hubness").pending


def test_what_is_wrong_is_told_with_its_lines_and_ends_with_2(corrected, run):
    done = run("serve", "--config", configured(COLLECTION + 'bank = "bank.npy"\n'), "--check")
    assert (done.returncode, done.stdout) == (0, "hubness.toml: right, for products_hubness\n")
    np.save("wide.npy", np.ones((5, DIM + 1), np.float32))
    config = configured(
        COLLECTION + 'bank = "wide.npy"\n'
        '[[collection]]\nname = "nothing"\nbank = "none.npy"\n'
        '[[collection]]\nname = "products"\n'
        '[[collection]]\nname = "products_hubness"\nprofile = "image"\nbank = "collection:none"\n'
    )
    done = run("serve", "--config", config, "--json")
    faults = done.stderr.splitlines()
    assert done.returncode == 2
    assert [fault.split(":")[1] for fault in faults] == ["7", "9", "10", "12", "16"]
    for fault, words in zip(
        faults,
        [
            f"wide.npy has {DIM + 1} dimensions and field 'vector' of 'products_hubness' has {DIM}",
            "name: no collection or alias 'nothing'",
            "none.npy: no such file",
            "'products' carries no biases: migrate or enable it first",
            "no collection or alias 'none'",
        ],
        strict=True,
    ):
        assert words in fault
    assert json.loads(done.stdout)["error"]["faults"] == faults
    done = run("serve", "--config", configured(COLLECTION + 'profile = "image"\n'), "--check")
    assert (done.returncode, done.stderr.split(":")[1]) == (2, "7")
    assert "there is no profile 'image', but default" in done.stderr


def test_without_a_database_the_configuration_is_neither_right_nor_wrong(files, run):
    with open("hubness.toml", "w", encoding="utf-8") as file:
        file.write(COLLECTION)
    done = run("serve", "--config", "hubness.toml", "--check", uri="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no Milvus answers" in done.stderr


def test_secrets_are_never_printed(files, run):
    with open("token", "w", encoding="utf-8") as file:
        file.write(TOKEN)
    config = configured(f'[[collection]]\nname = "{TOKEN}"\n', 'token_file = "token"\n')
    done = run("serve", "--config", config, "--check", "--json")
    assert done.returncode == 2
    assert "***" in done.stderr
    assert TOKEN not in done.stderr + done.stdout
    with open(config, "w", encoding="utf-8") as file:
        file.write(COLLECTION)
    done = run("serve", "--config", config, "--check", uri=f"http://root:{TOKEN}@127.0.0.1:9")
    assert done.returncode == 2
    assert TOKEN not in done.stderr + done.stdout


def test_once_does_what_is_due_and_ends_with_1_where_that_failed(corrected, run, monkeypatch):
    insert_pending(7)
    np.save("more.npy", vectors(np.random.default_rng(9), 50, DIM))
    config = configured(COLLECTION + 'bank = "more.npy"\nmethod = "nnn"\nparams = { k = 5 }\n')
    done = run("serve", "--config", config, "--once", "--json")
    assert done.returncode == 0, done.stderr
    [looked] = [line["facts"] for line in done.lines() if line["name"] == "looked"]
    assert (looked["action"], looked["scanned"], looked["result"]) == ("full", 67, "ok")
    found = status(MilvusStore(connect("shop.db")), "products_hubness")
    assert (found.pending, found.bank["count"], found.estimator["k"], found.epoch) == (0, 50, 5, 2)
    assert "all biases were renewed" not in run("serve", "--config", config, "--once").stdout
    monkeypatch.setattr("milvus_hubness.serve.looker.read_bank", lambda *given: 1 / 0)
    done = run("serve", "--config", configured(COLLECTION + 'bank = "bank.npy"\n'), "--once")
    assert done.returncode == 1
    assert "products_hubness: FAILED: ZeroDivisionError" in done.stdout


@pytest.mark.long
def test_told_to_stop_it_ends_in_the_middle_of_a_refresh_and_the_next_one_carries_on(corrected, run, started):
    insert_pending(6_000)
    server_manager_instance.release_server("shop.db")
    process = started(
        "serve", "--config", configured(COLLECTION + "rows_per_second = 1000\nclient_ttl = 0\n"), "--json"
    )
    line = json.loads(process.stdout.readline())
    url = line["facts"]["url"]
    assert url.startswith("http://127.0.0.1:")
    while "missing biases, 2000 of" not in at_work(url):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    told, complained = process.communicate(timeout=30)
    assert (process.returncode, complained) == (0, "")
    events = [json.loads(line) for line in told.splitlines()]
    assert [event["name"] for event in events if event["name"] != "missed"] == [
        "stopping",
        "looked",
        "stopped",
    ]
    assert [event["facts"]["result"] for event in events if event["name"] == "looked"] == ["stopped"]
    left = pending()
    assert 0 < left < 6_000
    done = run("serve", "--config", configured(), "--once", "--json")
    [looked] = [line["facts"] for line in done.lines() if line["name"] == "looked"]
    assert (done.returncode, looked["action"], looked["changed"]) == (0, "pending", left)
    assert pending() == 0


def at_work(url):
    """What the status says that a look is doing."""
    with urllib.request.urlopen(f"{url}/status.json", timeout=5) as answer:
        running = json.load(answer)["collections"][0]["running"]
    return "{doing}, {done} of {total}".format(**running) if running else ""
