"""`migrate status --watch`: a line again and again, while a migration runs, pauses and ends."""

import json
import threading

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import (
    Copy,
    MigrationOptions,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    cutover,
    migrate,
    plan_correction,
)
from milvus_hubness.cli.migrate import watch
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.pauses import paused_by
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import plain_collection, vectors
from tests.support.terminals import Terminal

WATCH = ("migrate", "status", "--watch")
ROWS = 900


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Looks follow each other at once: tests do not wait for a person to read them."""
    monkeypatch.setattr(watch.Watch, "seconds_between_looks", 0.1)


@pytest.fixture
def many(files, monkeypatch):
    """A collection of several chunks, `many`."""
    monkeypatch.setattr(MilvusStore, "chunk_rows", lambda store, info: ROWS // 3)
    client = connect("shop.db")
    plain_collection(client, "many", vectors(np.random.default_rng(5), ROWS, DIM), "COSINE")
    client.create_alias("many", "live")
    return MilvusStore(client)


@pytest.fixture
def few(files):
    return MilvusStore(connect("shop.db"))


class Running:
    """A migration in a thread of this process, which pauses after its first chunk."""

    def __init__(self, store, **plan):
        self.throttle = Throttle()
        self.paused = threading.Event()
        options = MigrationOptions(
            no_writers=True, throttle=self.throttle, events=Events([self._pause_once])
        )
        made = plan_correction(
            store, "many", Recipe(QueryBank.load("bank.npy"), verdict="skip"), Copy(**plan)
        )
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(store, made, options))
        self._thread.start()

    def _run(self, store, plan, options):
        try:
            migrate(store, plan, options)
        except BaseException as error:
            self.error = error

    def _pause_once(self, event):
        if event.name == "copying" and not self.paused.is_set():
            self.throttle.pause("the control file")
            self.paused.set()

    def resume(self):
        self.throttle.resume("the control file")

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_it_follows_a_migration_that_pauses_to_its_end(run, many, monkeypatch):
    running = Running(many, alias="live")
    assert running.paused.wait(60)
    pauses_seen = []

    def seen(*arguments):
        """As `paused_by`; the second look at a pause ends it."""
        pauses = paused_by(*arguments)
        pauses_seen.extend(pauses)
        if len(pauses_seen) == 2:
            running.resume()
        return pauses

    monkeypatch.setattr(watch, "paused_by", seen)
    watched = run(*WATCH, "--json")
    running.join()
    assert running.error is None
    assert watched.returncode == 0, watched.stderr
    looks = [line["migration"] for line in watched.lines()]
    copied = [look["rows_copied"] for look in looks]
    assert copied == sorted(copied)
    assert 0 < copied[0] < ROWS
    assert copied[-1] == ROWS
    assert looks[0]["phase"] == "copying"
    assert ["the control file"] in [look["paused_by"] for look in looks]
    assert looks[-1]["paused_by"] == []
    assert looks[-1]["phase"] == "switched"
    paused = [look for look in looks if look["paused_by"]]
    assert {look["rows_per_second"] for look in paused} == {0}, "no row is written in a pause"
    assert all(look["eta_seconds"] is None for look in paused)
    assert many.records(LEDGER, "pauses") == [], "no note is left behind"


def test_a_process_that_is_gone_pauses_nothing(run, many):
    """Its lease is over, but its note is still there."""
    running = Running(many)
    assert running.paused.wait(60)
    for _ in range(100):
        if paused_by(many, "many_hubness"):
            break
        threading.Event().wait(0.1)
    [note] = many.records(LEDGER, "pauses")
    running.throttle.stop(SystemExit(143))
    running.join()
    assert isinstance(running.error, SystemExit)
    many.put_records(LEDGER, [note])
    assert paused_by(many, "many_hubness") == []
    status = json.loads(run("migrate", "status", "many", "--json").stdout)["migration"]
    assert (status["phase"], status["lease"]) == ("copying", None)


def test_rows_of_clients_that_the_copy_lacks_are_the_lag(run, few):
    plan = plan_correction(few, "products", Recipe(QueryBank.load("bank.npy"), verdict="skip"))
    migrate(few, plan, MigrationOptions(no_writers=True))
    [line] = run(*WATCH, "products").stdout.splitlines()
    assert line == (
        "verified: 60/60 rows (100.0%), lag 0 rows, waits for milvus-hubness migrate cutover"
    )
    new = vectors(np.random.default_rng(6), 7, DIM)
    few.client.insert(
        "products", [{"id": 900 + i, "vector": row, "group": 0} for i, row in enumerate(new)]
    )
    assert "lag 7 rows" in run(*WATCH, "products").stdout
    cutover(few, "products", alias="live", options=MigrationOptions(no_writers=True))
    [line] = run(*WATCH, "live").stdout.splitlines()
    assert line.startswith("switched: 6")
    assert line.endswith("live -> products_hubness")


def test_a_terminal_shows_one_line_in_place_and_ctrl_c_ends_it(run, many):
    running = Running(many)
    assert running.paused.wait(60)
    running.throttle.stop(SystemExit(143))
    running.join()
    many.client.close()
    server_manager_instance.release_server("shop.db")

    terminal = Terminal(*WATCH)
    terminal.until("no process at work: repeat milvus-hubness migrate run to continue")
    while terminal.drawn.count("\r\x1b[K") < 3:
        terminal.until("copying")
        terminal.read()
    terminal.type("\x03")
    assert terminal.code() == 130, terminal.shown
    assert terminal.drawn.rstrip().count("\n") == 0, "lines are drawn in place"
    assert "Traceback" not in terminal.shown


def test_what_to_watch_is_named_where_it_is_unclear(run, few):
    assert_fails(run(*WATCH), 1, "nothing to watch")
    options = MigrationOptions(no_writers=True)
    for target in ("first", "second"):
        bank = QueryBank.load("bank.npy")
        plan = plan_correction(few, "products", Recipe(bank, verdict="skip"), Copy(target=target))
        migrate(few, plan, options)
    assert_fails(run(*WATCH), 2, "name one of first, second")
    assert "verified" in run(*WATCH, "first").stdout
    assert Ledger(few).find("first").phase == "verified"
