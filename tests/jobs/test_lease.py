"""One process at work on a collection, whatever the others do."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from milvus_hubness import LeaseHeld, LeaseLost, StateError
from milvus_hubness.jobs import lease
from milvus_hubness.jobs.lease import LEASES, Lease
from milvus_hubness.jobs.runner import LEDGER, Runner, started
from milvus_hubness.stores.base import Record


class Shelf:
    """A database that is all memory: its records, and what happens before each write."""

    def __init__(self):
        self.kept, self.before_write = {}, lambda: None
        self.lock = threading.Lock()

    def record(self, ledger, key):
        with self.lock:
            return self.kept.get((ledger, key))

    def put_records(self, ledger, records):
        self.before_write()
        with self.lock:
            self.kept |= {(ledger, each.key): each for each in records}


@pytest.fixture(autouse=True)
def settles(monkeypatch):
    monkeypatch.setattr(lease, "WAITS", True)
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.3)


@pytest.fixture
def shelf():
    return Shelf()


def entry(shelf):
    return lease.Entry.model_validate_json(shelf.kept[LEDGER, f"{LEASES}/items"].body)


def put(shelf, there):
    shelf.put_records(LEDGER, [Record(f"{LEASES}/items", LEASES, there.model_dump_json())])


def test_a_second_one_is_told_who_has_it(shelf):
    with Lease(shelf, "items") as mine:
        mine.check()
        with pytest.raises(LeaseHeld, match=rf"process {os.getpid()} on .*'items' \(lease 1, until"):
            Lease(shelf, "items").__enter__()
        with Lease(shelf, "others"):
            mine.check()
    assert entry(shelf).expires_at is None
    with Lease(shelf, "items") as mine:
        assert mine.number == 2


def test_of_many_at_once_one_gets_it(shelf):
    taken, refused, ready = [], [], threading.Barrier(8)

    def take():
        ready.wait()
        try:
            taken.append(Lease(shelf, "items").__enter__())
        except LeaseHeld as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)
    taken[0].check()
    taken[0].__exit__()


def test_who_writes_late_begins_again(shelf):
    """Its late write has fenced the first one out: two never pass the check."""
    with Lease(shelf, "items", seconds=3) as first:
        theirs = shelf.kept.pop((LEDGER, f"{LEASES}/items"))
        late = iter([0.6])

        def is_late():
            if seconds := next(late, 0):
                time.sleep(seconds)
                shelf.kept[LEDGER, theirs.key] = theirs

        shelf.before_write = is_late
        with Lease(shelf, "items") as second:
            second.check()
            with pytest.raises(LeaseLost, match="changes nothing more"):
                first.check()


def test_a_claim_is_waited_for_by_the_first_check(shelf):
    with Lease(shelf, "items").claimed() as mine:
        assert mine.is_held
        began = time.monotonic()
        mine.check()
        assert time.monotonic() - began > 0.2
        began = time.monotonic()
        mine.check()
        assert time.monotonic() - began < 0.1
    assert entry(shelf).expires_at is None


def test_a_claim_that_another_process_wrote_over_is_refused_before_the_first_write(shelf):
    with Lease(shelf, "items").claimed() as mine:
        put(shelf, entry(shelf).model_copy(update={"name": "another"}))
        with pytest.raises(LeaseHeld, match="is at work on 'items'"):
            mine.check()
    assert entry(shelf).name == "another", "and is left alone"
    assert entry(shelf).expires_at is not None


def test_it_is_renewed_and_a_silent_holder_s_expires(shelf):
    with Lease(shelf, "items", seconds=0.6) as mine:
        elsewhere = entry(shelf).runner.model_copy(update={"host": "another-machine"})
        time.sleep(1.2)
        mine.check()
        assert entry(shelf).is_held
    put(shelf, entry(shelf).model_copy(update={"runner": elsewhere, "expires_at": lease.now()}))
    with Lease(shelf, "items") as mine:
        assert mine.number == 2


def test_a_revived_holder_finds_that_it_has_lost(shelf):
    with Lease(shelf, "items", seconds=3) as mine:
        put(shelf, entry(shelf).model_copy(update={"name": "another", "number": 2}))
        time.sleep(0.2)
        with pytest.raises(LeaseLost, match="process"):
            mine.check()
    assert entry(shelf).name == "another", "and leaves the other's alone"
    assert entry(shelf).expires_at is not None


def test_of_a_killed_process_of_this_machine_it_is_taken_at_once(shelf):
    victim = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    victim.start()
    runner = Runner.here().model_copy(update={"pid": victim.pid, "started": started(victim.pid)})
    with Lease(shelf, "items"):
        held = entry(shelf).model_copy(update={"runner": runner, "name": "theirs"})
    put(shelf, held.model_copy(update={"expires_at": lease.now() + lease.timedelta(seconds=60)}))
    with pytest.raises(LeaseHeld, match=str(victim.pid)):
        Lease(shelf, "items").__enter__()
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with Lease(shelf, "items") as mine:
        assert mine.number == 2


def test_a_broken_entry_is_told(shelf):
    shelf.put_records(LEDGER, [Record(f"{LEASES}/items", LEASES, "{}")])
    with pytest.raises(StateError, match="leases/items"):
        Lease(shelf, "items").__enter__()


def test_it_lies_in_the_database(lite):
    store, name = lite.store(), lite.name()
    with Lease(store, name), pytest.raises(LeaseHeld):
        Lease(lite.store(), name).__enter__()
    with Lease(lite.store(), name) as mine:
        assert mine.number == 2
