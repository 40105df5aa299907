"""Rows that a server acknowledged and does not show, as Milvus 2.3.5 after it was killed, until a flush shows them."""

import time

import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.exceptions import ErrorCode, MilvusException

from milvus_hubness import (
    NNN,
    Copy,
    EmptyBank,
    LeaseHeld,
    LeaseLost,
    MigrationOptions,
    NoMigration,
    QueryBank,
    Recipe,
    StoreError,
    cutover,
    migrate,
    plan_correction,
    refresh,
    rollback,
)
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.errors import StateError
from milvus_hubness.jobs.common.lease import Lease, forget_leases, read_entries
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS = 8, 60
ALONE = MigrationOptions(no_writers=True)
PERMISSION_DENIED = 7


class Blind(MilvusClient):
    """A client of a server that hides the rows that a collection has by now, until it is flushed, and shows later ones.

    answers: what the next flushes are answered with; without any, they succeed. by_others: whether the flush of another
    process shows the rows a moment after ours was refused.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.flushed, self.answers, self.by_others = [], [], False
        self.hidden, self._rows, self._shown_at = "", set(), None

    def hide(self, collection):
        self.hidden, self._rows = collection, set()
        names = ["key", "body"] if collection == LEDGER else ["id", "number"]
        rows = super().query(collection, f'{names[0]} != ""', names, **STRONG)
        self._rows = {tuple(row[name] for name in names) for row in rows}

    def query(self, collection_name, filter="", output_fields=None, **options):
        if self._shown_at is not None and time.monotonic() >= self._shown_at:
            self.hidden = ""
        rows = super().query(collection_name, filter, output_fields, **options)
        if collection_name != self.hidden or output_fields == ["count(*)"]:
            return rows
        names = ["key", "body"] if collection_name == LEDGER else ["id", "number"]
        return [row for row in rows if tuple(row[name] for name in names) not in self._rows]

    def flush(self, collection_name, *args, **options):
        self.flushed.append(collection_name)
        if self.answers:
            self._shown_at = time.monotonic() + 0.5 if self.by_others else None
            raise self.answers.pop()
        super().flush(collection_name, *args, **options)
        if collection_name == self.hidden:
            self._shown_at = time.monotonic() + 0.5


STRONG = {"consistency_level": "Strong", "limit": 10_000}


def blind(backend, hidden="", *answers, by_others=False):
    client = backend.client(Blind)
    store = MilvusStore(client)
    client.answers, client.by_others = list(answers), by_others
    if hidden:
        client.hide(hidden)
    return client, store


def bank_vectors():
    return vectors(np.random.default_rng(5), 40, DIM)


def migrated(backend, store, **switch):
    name = backend.name("source")
    plain_collection(backend.client(), name, vectors(np.random.default_rng(1), ITEMS, DIM), "IP")
    plan = plan_correction(
        store, name, Recipe(QueryBank(bank_vectors()), estimator=NNN(4)), Copy(**switch)
    )
    return migrate(store, plan, ALONE)


def too_often():
    return MilvusException(ErrorCode.RATE_LIMIT, "request is rejected by limiter, flush")


def not_allowed():
    return MilvusException(PERMISSION_DENIED, "PrivilegeFlush: permission deny")


def test_ordinary_jobs_flush_nothing_of_ours(served):
    """Only the copy, as ever; nor does a mistyped name."""
    client, store = blind(served, "")
    alias = served.name("alias")
    done = migrated(served, store, alias=alias)
    rollback(store, alias, options=ALONE)
    with pytest.raises(NoMigration):
        rollback(store, f"{alias}x", options=ALONE)
    assert set(client.flushed) <= {done.source, done.target}


@pytest.mark.parametrize("by", ["alias", "target", "source"])
def test_a_migration_is_rolled_back_though_the_ledger_is_hidden(served, by):
    alias = served.name("alias")
    done = migrated(served, served.store(), alias=alias)
    client, store = blind(served, LEDGER)
    name = {"alias": alias, "target": done.target, "source": done.source}[by]
    assert rollback(store, name, options=ALONE).source == done.source
    assert Ledger(store).of_target(done.target).phase == "rolled back"
    assert client.flushed.count(LEDGER) == 1


def test_a_run_sees_the_copy_whose_record_is_hidden(served):
    done = migrated(served, served.store())
    client, store = blind(served, LEDGER)
    plan = plan_correction(
        store,
        done.source,
        Recipe(QueryBank(bank_vectors()), estimator=NNN(4)),
        Copy(target=done.target),
    )
    assert migrate(store, plan, ALONE).id == done.id
    assert client.flushed.count(LEDGER) == 1


def test_a_holder_whose_record_is_hidden_later_goes_on(served):
    name = served.name("items")
    client, store = blind(served)
    with Lease(store, name) as lease:
        client.hide(LEDGER)
        lease.check_now()
        lease.check_now()
    assert client.flushed == [LEDGER]


def test_a_holder_that_lost_its_lease_for_good_is_told_at_once(served):
    """Its aliases are gone with its records, so nothing is hidden."""
    name = served.name("items")
    plain_collection(served.client(), name, vectors(np.random.default_rng(4), 5, DIM), "IP")
    client, store = blind(served)
    with Lease(store, name) as lease:
        for alias in [lease.alias_of(name), lease.alias_of(LEDGER)]:
            served.store().unfence(alias)
        forget_leases(served.store(), name)
        with pytest.raises(LeaseLost, match="it is gone"):
            lease.check_now()
    assert client.flushed == []


def test_nobody_takes_a_lease_whose_record_is_hidden(served):
    """The aliases by which its holder writes are no rows, and are shown."""
    name = served.name("items")
    plain_collection(served.client(), name, vectors(np.random.default_rng(4), 5, DIM), "IP")
    with Lease(served.store(), name) as held:
        client, store = blind(served, LEDGER)
        with pytest.raises(LeaseHeld, match="wait until it ends"), Lease(store, name):
            pass
        held.check_now()
    assert client.flushed == [LEDGER]


def test_an_alias_that_came_after_its_record_was_gone_is_dropped(served):
    name = served.name("items")
    plain_collection(served.client(), name, vectors(np.random.default_rng(4), 5, DIM), "IP")
    store = blind(served, "", not_allowed())[1]
    late = f"{name}__lease_1_0123abcd"
    store.fence(name, late)
    with Lease(store, name) as lease:
        assert late not in store.fences_of(name)
        assert store.fences_of(name) == [lease.alias_of(name)]
    assert store.fences_of(name) == []


def test_a_claim_that_is_not_shown_is_read_back(served, monkeypatch):
    """As if the server hid what comes after it was started, too."""
    name = served.name("items")
    client, store = blind(served)
    put = store.put_records

    def put_and_hide(ledger, records):
        put(ledger, records)
        monkeypatch.undo()
        client.hide(LEDGER)

    monkeypatch.setattr(store, "put_records", put_and_hide)
    with Lease(store, name) as lease:
        assert [entry.owner_id for entry in read_entries(store, name)] == [lease.owner_id]
    assert client.flushed == [LEDGER]


def test_a_claim_that_stays_hidden_is_no_lease(served, monkeypatch):
    name = served.name("items")
    client, store = blind(served, "", not_allowed())
    put = store.put_records

    def put_and_hide(ledger, records):
        put(ledger, records)
        client.hide(LEDGER)

    monkeypatch.setattr(store, "put_records", put_and_hide)
    message = "cannot be taken: the database does not show"
    with pytest.raises(StoreError, match=message), Lease(store, name):
        pass
    assert client.flushed == [LEDGER]
    with Lease(served.store(), name) as lease:
        lease.check_now()


def bank_of(count):
    queries = QueryBank(vectors(np.random.default_rng(2), count, DIM))
    return StoredBank(queries, np.empty((count, 0), np.float32))


def test_a_bank_whose_rows_are_hidden_is_loaded(served):
    """A collection of another kind than the ledger: the same mechanism."""
    name = served.name("bank")
    bank = bank_of(30)
    reference, _ = served.store().save_bank(name, bank, "IP")
    client, store = blind(served, name)
    stored = store.load_bank(reference)
    assert np.array_equal(stored.queries.vectors, bank.queries.vectors)
    assert client.flushed == [name]


def test_a_bank_that_is_hidden_as_it_is_written_is_read_back(served, monkeypatch):
    name = served.name("bank")
    bank = bank_of(30)
    client, store = blind(served)
    upsert = store.upsert

    def upsert_and_hide(*args, **options):
        upsert(*args, **options)
        client.hide(name)

    monkeypatch.setattr(store, "upsert", upsert_and_hide)
    reference, made = store.save_bank(name, bank, "IP")
    assert made == "collection"
    assert client.flushed == [name]
    assert np.array_equal(store.load_bank(reference).queries.vectors, bank.queries.vectors)


def test_a_bank_without_queries_is_still_said_to_be_empty(served):
    name = served.name("bank")
    reference, _ = served.store().save_bank(name, bank_of(9), "IP")
    client, store = blind(served, name, not_allowed())
    with pytest.raises(EmptyBank, match="has no queries of generation"):
        store.load_bank(reference)
    assert client.flushed == [name]


def test_a_refused_flush_leaves_the_first_error_and_is_not_repeated(served):
    """Who may not flush is told what is missing, at once."""
    alias = served.name("alias")
    done = migrated(served, served.store(), alias=alias)
    client, store = blind(served, LEDGER, not_allowed(), not_allowed(), not_allowed())
    began = time.monotonic()
    for name in (alias, done.target):
        with pytest.raises(NoMigration, match="repeat the command in a minute"):
            rollback(store, name, options=ALONE)
    assert time.monotonic() - began < 15
    assert client.flushed == [LEDGER]


def test_the_flush_of_another_process_serves_as_well(served):
    """A server refuses one so soon after another; the rows appear all the same."""
    alias = served.name("alias")
    done = migrated(served, served.store(), alias=alias)
    client, store = blind(served, LEDGER, too_often(), by_others=True)
    assert rollback(store, alias, options=ALONE).source == done.source
    assert client.flushed.count(LEDGER) == 1


def test_milvus_lite_is_never_flushed_for_this(lite):
    client, store = blind(lite, "")
    alias = lite.name("alias")
    done = migrated(lite, store)
    client.hide(LEDGER)
    client.flushed.clear()
    with pytest.raises(NoMigration, match="no migration of"):
        cutover(store, done.source, alias=alias, options=ALONE)
    with pytest.raises(NoMigration, match="repeat the command in a minute"):
        rollback(store, done.target, options=ALONE)
    with pytest.raises(StateError, match="repeat the command in a minute"):
        refresh(store, done.target, client_ttl=0)
    assert client.flushed == []
    client.hidden = ""
    assert cutover(store, done.source, alias=alias, options=ALONE).phase == "switched"
