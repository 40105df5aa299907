"""One process at work on a collection, whatever the others do, and whenever their writes arrive."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from milvus_hubness import LeaseHeld, LeaseLost, ServerUnavailable, StateError
from milvus_hubness.basics.defaults import STATE_TTL
from milvus_hubness.jobs.common import lease as lease_module
from milvus_hubness.jobs.common import lease_records
from milvus_hubness.jobs.common.lease import Lease, holder_of, read_entries
from milvus_hubness.jobs.common.lease_records import LEASES, LeasePolicy, Owner, now, process_start
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite, Record

QUICK = LeasePolicy(seconds=30, skew=0.0, fenced_write=0.0)
HERE = Owner.here()
ELSEWHERE = HERE.model_copy(update={"host": "db-2", "boot_id": "another"})


class Shelf:
    """A database that is all memory: records and aliases, and what happens before each write of records."""

    def __init__(self):
        self.kept, self.aliases, self.before_write = {}, {}, lambda: None
        self.collections = {"items", "others", LEDGER}
        self.lock = threading.Lock()

    def records(self, ledger, *groups):
        with self.lock:
            return [record for record in self.kept.values() if record.group in groups]

    def read_back(self, collection, read, is_whole):
        return read()

    def put_records(self, ledger, records):
        self.before_write()
        with self.lock:
            self.kept |= {each.key: each for each in records}

    def drop_records(self, ledger, group, keys=None):
        with self.lock:
            self.kept = {
                key: each
                for key, each in self.kept.items()
                if each.group != group or not (keys is None or key in keys)
            }

    def exists(self, collection):
        return collection in self.collections

    def alias_target(self, alias):
        return None

    def fenced(self, fences):
        return self

    def fence(self, collection, alias):
        self.aliases[alias] = collection

    def unfence(self, alias):
        self.aliases.pop(alias, None)


@pytest.fixture
def shelf():
    return Shelf()


def leasing(shelf, *names, **policy):
    return Lease(shelf, *(names or ["items"]), policy=LeasePolicy(**(vars(QUICK) | policy)))


def entry(shelf):
    return read_entries(shelf, "items")[-1]


def put(shelf, there):
    shelf.put_records(LEDGER, [Record(there.key, f"{LEASES}/items", there.model_dump_json())])


def another(shelf, **changes):
    """What another process has written of the lease since this one took it."""
    mine = entry(shelf)
    theirs = {"owner_id": "f" * 32, "token": mine.token + 1, "owner": ELSEWHERE}
    return mine.model_copy(update=theirs | changes)


def test_a_second_process_is_told_who_holds_the_lease(shelf):
    with leasing(shelf) as mine:
        mine.check()
        with pytest.raises(
            LeaseHeld, match=rf"process {os.getpid()} on .*'items' \(token 1, until"
        ):
            leasing(shelf).__enter__()
        with leasing(shelf, "others"):
            mine.check()
        assert holder_of(shelf, "items").owner == HERE
    assert holder_of(shelf, "items") is None
    with leasing(shelf) as mine:
        assert mine.token == 2


def test_of_many_at_once_one_gets_it(shelf):
    taken, refused, ready = [], [], threading.Barrier(8)

    def take():
        ready.wait()
        try:
            taken.append(leasing(shelf).__enter__())
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
    assert not shelf.aliases


def test_a_claim_that_arrives_late_is_withdrawn(shelf):
    """Whoever claimed meanwhile keeps the lease."""
    refused, writing = [], threading.Event()

    def claim_late():
        try:
            leasing(shelf).__enter__()
        except LeaseHeld as error:
            refused.append(error)

    slow = threading.Thread(target=claim_late)

    def hold_up():
        if threading.current_thread() is slow:
            writing.set()
            time.sleep(0.8)

    shelf.before_write = hold_up
    slow.start()
    writing.wait()
    with leasing(shelf) as first:
        slow.join()
        assert len(refused) == 1
        first.check_now()
        assert len(read_entries(shelf, "items")) == 1, "the late claim is withdrawn"


def test_a_claim_that_another_process_won_is_withdrawn(shelf):
    """It had read that the lease was free before the other one wrote."""
    with leasing(shelf):
        pass
    theirs = another(shelf, token=2, expires_at=now() + timedelta(hours=1))

    def interfere():
        shelf.before_write = lambda: None
        put(shelf, theirs)

    shelf.before_write = interfere
    with pytest.raises(LeaseHeld, match="db-2"):
        leasing(shelf).__enter__()
    assert [each.owner_id for each in read_entries(shelf, "items") if each.token == 2] == [
        theirs.owner_id
    ]
    assert not shelf.aliases


def test_it_is_renewed_and_a_silent_holder_s_expires(shelf):
    with leasing(shelf, seconds=0.6) as mine:
        time.sleep(1.2)
        mine.check()
        assert entry(shelf).is_held
    put(shelf, another(shelf, expires_at=now()))
    with leasing(shelf) as mine:
        assert mine.token == 3


def test_a_revived_holder_finds_that_it_has_lost(shelf):
    with leasing(shelf, seconds=3) as mine:
        theirs = another(shelf)
        put(shelf, theirs)
        time.sleep(0.4)
        with pytest.raises(LeaseLost, match="process"):
            mine.check()
    assert entry(shelf) == theirs, "and leaves the other's alone"


def test_an_answer_that_comes_late_is_no_proof_of_the_lease(shelf):
    """The process was stopped after the database had read, and another one has the lease since."""
    with leasing(shelf, seconds=0.6) as mine:
        read = shelf.records

        def stopped_after_it(ledger, *groups):
            answer = read(ledger, *groups)
            shelf.records = read
            put(shelf, another(shelf))
            time.sleep(0.4)
            return answer

        shelf.records = stopped_after_it
        with pytest.raises(LeaseLost, match="has it: this process changes nothing more"):
            mine.check_now()


def test_a_database_that_always_answers_too_late_ends_a_job(shelf):
    with leasing(shelf, seconds=0.1) as mine:
        read = shelf.records
        shelf.records = lambda *groups: time.sleep(0.06) or read(*groups)
        with pytest.raises(LeaseLost, match="cannot be known: 10 answers"):
            mine.check_now()
        shelf.records = read


def test_a_renewal_that_arrives_late_does_not_take_the_lease_back(shelf):
    with leasing(shelf):
        late = entry(shelf)
        put(shelf, another(shelf, expires_at=now() - timedelta(seconds=1)))
        with leasing(shelf) as successor:
            put(shelf, late.model_copy(update={"expires_at": now() + timedelta(hours=1)}))
            successor.check_now()
            assert holder_of(shelf, "items").token == successor.token == 3


def test_the_lease_of_a_killed_process_of_this_machine_is_taken_at_once(shelf):
    victim = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    victim.start()
    owner = HERE.model_copy(update={"pid": victim.pid, "started": process_start(victim.pid)})
    with leasing(shelf):
        held = another(shelf, owner=owner, expires_at=now() + timedelta(seconds=60))
    put(shelf, held)
    with pytest.raises(LeaseHeld, match=str(victim.pid)):
        leasing(shelf).__enter__()
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with leasing(shelf) as mine:
        assert mine.token == 3


@pytest.mark.parametrize("where", ["boot_id", "pid_namespace"])
def test_a_process_that_cannot_be_seen_from_here_is_not_taken_for_dead(shelf, where):
    """Two containers of one host name: the number of the one's process may be free in the other."""
    owner = HERE.model_copy(update={"pid": 2**22 + 1, where: "another"})
    with leasing(shelf):
        held = another(shelf, owner=owner, expires_at=now() + timedelta(seconds=60))
    put(shelf, held)
    with pytest.raises(LeaseHeld):
        leasing(shelf).__enter__()


@pytest.mark.parametrize("ahead", [-5, 0, 5])
def test_clocks_may_differ_by_five_seconds(shelf, monkeypatch, ahead):
    """No process takes a lease that its holder, whose clock differs by so much, still believes to hold."""
    policy = vars(LeasePolicy.default()) | {"fenced_write": 0.0}
    theirs = now() + timedelta(seconds=ahead)
    with leasing(shelf):
        held = another(
            shelf, skew=policy["skew"], expires_at=theirs + timedelta(seconds=policy["seconds"])
        )
    put(shelf, held)
    for seconds, is_free in ((policy["seconds"] - 1, False), (policy["seconds"] + 11, True)):
        later = now() + timedelta(seconds=seconds)
        monkeypatch.setattr(lease_module, "now", lambda later=later: later)
        monkeypatch.setattr(lease_records, "now", lambda later=later: later)
        if is_free:
            with Lease(shelf, "items", policy=LeasePolicy(**policy)):
                pass
        else:
            with pytest.raises(LeaseHeld):
                Lease(shelf, "items", policy=LeasePolicy(**policy)).__enter__()
        monkeypatch.undo()


def test_a_broken_entry_is_told(shelf):
    shelf.put_records(LEDGER, [Record(f"{LEASES}/items/1/x", f"{LEASES}/items", "{}")])
    with pytest.raises(StateError, match="leases/items"):
        leasing(shelf).__enter__()


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf"])
def test_seconds_in_the_environment_that_are_no_number_are_refused(monkeypatch, text):
    monkeypatch.setenv("MILVUS_HUBNESS_LEASE_SECONDS", text)
    with pytest.raises(
        ValueError,
        match=r"MILVUS_HUBNESS_LEASE_SECONDS must be a number of seconds, at least 0\.001",
    ):
        LeasePolicy.default()


def test_the_environment_says_how_long_writing_clients_use_a_state(monkeypatch):
    monkeypatch.setenv("MILVUS_HUBNESS_CLIENT_TTL", "7.5")
    assert MigrationOptions().client_ttl == RefreshOptions().client_ttl == 7.5
    monkeypatch.delenv("MILVUS_HUBNESS_CLIENT_TTL")
    assert MigrationOptions().client_ttl == RefreshOptions().client_ttl == STATE_TTL == 5
    monkeypatch.setenv("MILVUS_HUBNESS_CLIENT_TTL", "-1")
    with pytest.raises(
        ValueError, match="MILVUS_HUBNESS_CLIENT_TTL must be a number of seconds, at least 0, not"
    ):
        MigrationOptions()


def test_several_collections_are_leased_together(shelf):
    with leasing(shelf, "items", "others") as both:
        with pytest.raises(LeaseHeld, match="'others'"):
            leasing(shelf, "others").__enter__()
        both.include("further")
        with pytest.raises(LeaseHeld, match="'further'"):
            leasing(shelf, "further").__enter__()
    with leasing(shelf, "others"), leasing(shelf, "further"):
        pass


def test_a_former_holder_s_writes_are_refused_however_late_they_arrive(lite):
    """The database refuses them: the alias that they are sent to is gone."""
    name = lite.name()
    client = lite.client()
    client.create_collection(name, dimension=4, auto_id=False)
    client.insert(name, [{"id": i, "vector": [1.0] * 4} for i in range(3)])
    store = lite.store()
    row = store.get(name, [1], "vector")
    with Lease(store, name, policy=LeasePolicy(seconds=0.5, skew=0.0)) as former:
        late = former.store
        late.upsert(name, row, "vector")
        assert store.info(name).aliases == (), "aliases of leases are not the user's"
        former._over.set()  # no renewal: it was paused
        time.sleep(0.7)
        with Lease(lite.store(), name) as mine:
            fresh = Batch([1], row.vectors * 2, row.rows)
            mine.store.upsert(name, fresh, "vector")
            for write in (
                lambda: late.upsert(name, row, "vector"),
                lambda: late.insert(name, row, "vector"),
                lambda: late.delete(name, [1]),
                lambda: late.write_property(name, DUAL_WRITE_PROPERTY, DualWrite(collection="x")),
                lambda: late.put_records(LEDGER, [Record("late", "late", "{}")]),
                lambda: late.drop_records(LEDGER, f"{LEASES}/{name}"),
            ):
                with pytest.raises(LeaseLost, match="another job has taken over"):
                    write()
    assert store.get(name, [1], "vector").vectors.tolist() == [[2.0] * 4]
    assert client.list_aliases(name)["aliases"] == []


def test_a_service_leases_a_name_that_is_no_collection_on_a_server(served):
    """Milvus refuses such names, so nothing is asked of a collection."""
    name = f"service/{served.name()}.x"
    with Lease(served.store(), name, fenced=False), pytest.raises(LeaseHeld, match=name):
        Lease(served.store(), name, fenced=False).__enter__()


def test_whatever_alias_a_former_holder_made_its_successor_drops(shelf):
    """Each is recorded before it is created; one that a failed request created late too."""
    made = []
    former = leasing(shelf).__enter__()
    former.renew("items")
    shelf.fence = lambda collection, alias: made.append(alias) or fails()

    def fails():
        if len(made) == 1:
            raise ServerUnavailable("no answer")
        shelf.aliases[made[-1]] = "items"

    former.renew("items")
    assert former.alias_of("items") == made[-1]
    shelf.aliases[made[0]] = "items"  # It arrives late.
    former._over.set()
    put(shelf, entry(shelf).model_copy(update={"expires_at": now() - timedelta(hours=1)}))
    del shelf.fence
    with leasing(shelf) as mine:
        assert set(shelf.aliases) == {mine.alias_of("items"), mine.alias_of(LEDGER)}
        with pytest.raises(LeaseLost):
            former.renew("items")
    former.__exit__()
    assert not shelf.aliases


def test_writers_wait_while_the_alias_is_renewed(shelf):
    with leasing(shelf, fenced_write=0.3) as mine:
        before = mine.alias_of("items")
        renewing = threading.Thread(target=mine.renew, args=("items",))
        renewing.start()
        time.sleep(0.1)
        assert mine.alias_of("items") not in (None, before)
        renewing.join()
        assert mine.alias_of("items") in shelf.aliases
