"""A migration that is steered from outside while it runs, and terminated in a process of its own."""

import io
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

from milvus_hubness import MilvusStore, connect
from milvus_hubness.jobs.migration.ledger import MIGRATIONS, Ledger
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.docs import pages

OPTIONS = ("--bank", "bank.npy", "--param", "k=8", "--no-writers", "--alias", "live", "--json")
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
        "migrate", "run", "many", *OPTIONS, "--rows-per-second", "800", "--control", "control.json",
        MILVUS_HUBNESS_TOKEN=TOKEN,
    )  # fmt: skip
    printed = until(process, "copying")
    command = Path(f"/proc/{process.pid}/cmdline").read_text()
    control('{"paused": true}')
    printed += until(process, "paused")
    process.send_signal(signal.SIGTERM)
    rest, complaint = process.communicate(timeout=20)
    assert process.returncode == 143
    assert json.loads(rest.splitlines()[-1])["name"] == "stopped"
    assert complaint.strip() == "milvus-hubness: stopped; repeat the command to continue"
    assert TOKEN not in json.dumps(printed) + rest + command

    standing = json.loads(run("migrate", "status", "many", "--json").stdout)["migration"]
    assert (standing["phase"], standing["lease"]) == ("copying", None)
    assert 0 < standing["rows_copied"] < 3_000
    done = run("migrate", "run", "many", "--alias", "live", "--no-writers", "--json")
    assert done.returncode == 0, done.stderr
    copied = [line["facts"] for line in done.lines() if line["name"] == "copying"]
    assert len(copied) == standing["chunks"] - standing["chunks_done"]
    assert connect("shop.db").describe_collection("live")["collection_name"] == "many_hubness"


class Script(io.StringIO):
    """A standard output whose reader replies to events with other settings in the control file."""

    def __init__(self, settings):
        super().__init__()
        self._settings = settings
        self.printed = []

    def write(self, line):
        self.printed.append(json.loads(line))
        if settings := self._settings.pop(self.printed[-1]["name"], None):
            control(settings)
        return len(line)


def test_it_is_steered_by_a_file_and_keeps_the_token(files, run, monkeypatch):
    """Paused from the start, resumed at another rate, its cutover postponed and then released."""
    connect("shop.db").create_alias("products", "live")
    control('{"paused": true}')
    script = Script(
        {
            "before-copy": '{"paused": "no"}',
            "warning": '{"paused": false, "rows_per_second": 100000}',
            "postponed": '{"cutover": "now"}',
        }
    )
    steered = ("--control", "control.json", "--postpone-cutover")
    command = ("migrate", "run", "products", *OPTIONS, *steered)
    here = threading.main_thread().ident
    impatient = threading.Timer(60, signal.pthread_kill, (here, signal.SIGTERM))
    impatient.start()
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", script)
        done = run(*command, MILVUS_HUBNESS_TOKEN=TOKEN)
    impatient.cancel()
    assert done.returncode == 0, (done.stderr, script.printed)

    names = [line["name"] for line in script.printed]
    assert names[:4] == ["paused", "plan", "before-copy", "warning"]
    facts = {line["name"]: line["facts"] for line in script.printed}
    assert facts["paused"] == {"reason": "the control file"}
    message = "control.json: paused must be true or false, not 'no'; nothing changes until the file is corrected"
    assert facts["warning"] == {"message": message}
    assert names.count("warning") == 1
    assert facts["rate"]["rows_per_second"] == 100_000
    assert names.count("rate") == 1
    assert names.index("rate") < names.index("resumed") < names.index("copying")
    assert names.index("copying") < names.index("postponed")
    assert script.printed[-1]["facts"]["phase"] == "switched"

    store = MilvusStore(connect("shop.db"))
    kept = store.records(LEDGER, MIGRATIONS) + store.records(LEDGER, "products_hubness")
    assert Ledger(store).find("products").phase == "switched"
    heard = (json.dumps(script.printed), done.stderr, str(kept))
    assert not [text for text in heard if TOKEN in text]


def test_events_are_piped_to_a_script_of_the_page(run, files):
    [script] = [
        block.text
        for block in pages.blocks(pages.DOCS / "how-to" / "control.md")
        if block.title == "notify.py"
    ]
    done = run("migrate", "run", "products", *OPTIONS)
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
