"""A migration in a process of its own, steered from outside while it runs."""

import json
import os
import signal
import threading
from pathlib import Path
from urllib.request import Request, urlopen

from milvus_hubness import MilvusStore, connect
from milvus_hubness.jobs.migration.ledger import MIGRATIONS, Ledger
from milvus_hubness.jobs.store.ownership import LEDGER

QUERY_SCALE = (
    "migrate",
    "run",
    "many",
    "--bank",
    "bank.npy",
    "--k",
    "8",
    "--no-writers",
    "--alias",
    "live",
)
TOKEN = "s3cret-token"


def until(process, name):
    """The events up to the first of this name; one that does not come ends the process."""
    seen = []
    impatient = threading.Timer(60, process.kill)
    impatient.start()
    try:
        for line in process.stdout:
            seen.append(json.loads(line))
            if seen[-1]["name"] == name:
                return seen
    finally:
        impatient.cancel()
    raise AssertionError(f"{name} never came: {process.stderr.read()}")


def control(text):
    Path("control.json").write_text(text)


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = Request(url + path, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_terminated_in_the_middle_it_carries_on(started, run):
    process = started(
        *QUERY_SCALE, "--rows-per-second", "800", "--control", "control.json", "--json"
    )
    until(process, "copying")
    control('{"paused": true}')
    until(process, "paused")
    process.send_signal(signal.SIGTERM)
    rest, complaint = process.communicate(timeout=20)
    assert process.returncode == 143
    assert json.loads(rest.splitlines()[-1])["name"] == "stopped"
    assert complaint.strip() == "milvus-hubness: stopped; repeat the command to continue"

    standing = json.loads(run("migrate", "status", "many", "--json").stdout)["migration"]
    assert (standing["phase"], standing["lease"]) == ("copying", None)
    assert 0 < standing["rows_copied"] < 3_000
    done = run("migrate", "run", "many", "--alias", "live", "--no-writers", "--json")
    assert done.returncode == 0, done.stderr
    copied = [line["facts"] for line in done.lines() if line["name"] == "copying"]
    assert len(copied) == standing["chunks"] - standing["chunks_done"]
    assert connect("shop.db").describe_collection("live")["collection_name"] == "many_hubness"


def test_it_is_steered_by_file_and_over_http_and_keeps_the_token(started, run, files):
    control('{"paused": true}')
    hook = ("--on", "before-copy=env > hook.txt")
    process = started(
        *QUERY_SCALE, "--control", "control.json", *hook, "--postpone-cutover", "--http", "127.0.0.1:0", "--json",
        MILVUS_HUBNESS_TOKEN=TOKEN,
    )  # fmt: skip
    printed = until(process, "before-copy")
    assert [line["name"] for line in printed] == ["paused", "plan", "before-copy"]
    announced = process.stderr.readline()
    url = announced.split()[-1]
    status = json.loads(ask(url, "/status"))
    assert (status["paused_by"], status["cutover"]) == (["the control file"], "postponed")
    ask(url, "/control", {"rows_per_second": 100_000})
    ask(url, "/control", {"paused": True})
    control('{"paused": false}')
    printed += until(process, "resumed")
    assert json.loads(ask(url, "/status"))["paused_by"] == ["http"]
    assert "milvus_hubness_migration_paused" in ask(url, "/metrics")
    command = Path(f"/proc/{process.pid}/cmdline").read_text()
    ask(url, "/control", {"paused": False})
    printed += until(process, "postponed")
    control('{"cutover": "now"}')
    rest, complaint = process.communicate(timeout=30)
    assert process.returncode == 0, complaint
    printed += [json.loads(line) for line in rest.splitlines()]
    assert printed[-1]["facts"]["phase"] == "switched"

    store = MilvusStore(connect("shop.db"))
    kept = store.records(LEDGER, MIGRATIONS) + store.records(LEDGER, "many_hubness")
    assert Ledger(store).find("many").phase == "switched"
    heard = (
        json.dumps(printed),
        announced,
        complaint,
        command,
        Path("hook.txt").read_text(),
        str(kept),
    )
    assert not [text for text in heard if TOKEN in text]
    assert TOKEN not in os.environ.values()
