"""A migration in a process of its own, steered from outside while it runs."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from milvus_hubness import MilvusStore, connect
from milvus_hubness.jobs.migration.ledger import MIGRATIONS, Ledger
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.docs import pages

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


def test_it_is_steered_by_a_file_and_keeps_the_token(started):
    """Paused from the start, resumed at another rate, its cutover postponed and then released."""
    control('{"paused": true}')
    process = started(
        *QUERY_SCALE, "--control", "control.json", "--postpone-cutover", "--json",
        MILVUS_HUBNESS_TOKEN=TOKEN,
    )  # fmt: skip
    printed = until(process, "before-copy")
    assert [line["name"] for line in printed] == ["paused", "plan", "before-copy"]
    assert printed[0]["facts"] == {"reason": "the control file"}
    command = Path(f"/proc/{process.pid}/cmdline").read_text()

    control('{"paused": "no"}')
    printed += until(process, "warning")
    message = "control.json: paused must be true or false, not 'no'; nothing changes until the file is corrected"
    assert printed[-1]["facts"] == {"message": message}

    control('{"paused": false, "rows_per_second": 100000}')
    printed += until(process, "resumed")
    assert "copying" not in [line["name"] for line in printed]
    [rate] = [line["facts"] for line in printed if line["name"] == "rate"]
    assert rate["rows_per_second"] == 100_000

    printed += until(process, "postponed")
    control('{"cutover": "now"}')
    rest, complaint = process.communicate(timeout=30)
    assert process.returncode == 0, complaint
    printed += [json.loads(line) for line in rest.splitlines()]
    assert printed[-1]["facts"]["phase"] == "switched"
    assert [line["name"] for line in printed].count("warning") == 1

    store = MilvusStore(connect("shop.db"))
    kept = store.records(LEDGER, MIGRATIONS) + store.records(LEDGER, "many_hubness")
    assert Ledger(store).find("many").phase == "switched"
    heard = (json.dumps(printed), complaint, command, str(kept))
    assert not [text for text in heard if TOKEN in text]
    assert TOKEN not in os.environ.values()


def test_events_are_piped_to_a_script_of_the_page(run, files):
    [script] = [
        block.text
        for block in pages.blocks(pages.DOCS / "how-to" / "control.md")
        if block.title == "notify.py"
    ]
    command = ("migrate", "run", "products", "--bank", "bank.npy", "--k", "8", "--no-writers")
    done = run(*command, "--alias", "live", "--json")
    assert done.returncode == 0
    told = subprocess.run(
        [sys.executable, "-c", script],
        input=done.stdout + '{"error": {}}',
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = told.stdout.splitlines()
    assert line.startswith("after-cutover: source products, target products_hubness, alias live")
