"""Bank collections that several writers share: overlapping saves and drops mix no generations."""

import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from qdrant_client import QdrantClient

from milvus_hubness import (
    NNN,
    Beside,
    EmptyBank,
    MilvusStore,
    QueryBank,
    StateError,
    StoreError,
    enable,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.generations import (
    SPARE_SECONDS,
    Batch,
    generation_of,
    reference_to,
)
from milvus_hubness.jobs.store.protocols import undo_save_bank
from tests.support.databases import OnMilvus, OnQdrant, write_state
from tests.support.galleries import vectors
from tests.support.recipes import as_plan

DIM = 8


@pytest.fixture(params=["lite", "qdrant-local"])
def database(request):
    if request.param == "lite":
        backend = request.getfixturevalue("lite")
        yield OnMilvus.of(backend)
        return
    here = OnQdrant(request.param, QdrantClient(":memory:"))
    yield here
    here.clean()


def bank_of(seed, *, queries=6, targets=0, columns=0):
    rng = np.random.default_rng(seed)
    potentials = rng.standard_normal((queries, columns)).astype(np.float32)
    target_bank = QueryBank(vectors(rng, targets, DIM)) if targets else None
    return StoredBank(QueryBank(vectors(rng, queries, DIM)), potentials, target_bank)


class Requests:
    """A client whose n-th request is sent once `rival` has run; counts the requests."""

    def __init__(self, client, n, rival):
        self._client, self._n, self._rival = client, n, rival
        self.seen = 0

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return partial(self.send, method) if callable(method) else method

    def send(self, method, *args, **options):
        self.seen += 1
        if self.seen == self._n:
            self._rival()
        return method(*args, **options)


def hooked(store, n, rival):
    """Have `rival` run before the n-th request of the store. Returns what counts the requests."""
    if isinstance(store, MilvusStore):
        store.client = Requests(store.client, n, rival)
        return store.client
    requests = Requests(store.client, n, rival)
    store.ask = partial(requests.send, store.ask)
    return requests


def assert_whole(database, reference, bank):
    stored = database.store().load_bank(reference)
    np.testing.assert_array_equal(stored.queries.vectors, bank.queries.vectors)
    np.testing.assert_array_equal(stored.potentials, bank.potentials)
    assert (stored.targets is None) == (bank.targets is None)
    if bank.targets is not None:
        np.testing.assert_array_equal(stored.targets.vectors, bank.targets.vectors)


def save(database, name, bank, saved):
    saved.append(database.store().save_bank(name, bank, "IP")[0])


def requests_of_a_save(database, is_there):
    store, name = database.store(), database.name("bank")
    if is_there:
        database.store().save_bank(name, bank_of(0), "IP")
    counting = hooked(store, 0, lambda: None)
    store.save_bank(name, bank_of(1, targets=3, columns=2), "IP")
    return counting.seen


@pytest.mark.parametrize("is_there", [False, True], ids=["new collection", "existing collection"])
@pytest.mark.parametrize("same", [False, True], ids=["two banks", "one bank"])
def test_two_saves_that_overlap_at_any_request_end_with_whole_generations(database, is_there, same):
    ours = bank_of(1, targets=3, columns=2)
    theirs = ours if same else bank_of(2, queries=9, columns=1)
    for n in range(1, requests_of_a_save(database, is_there) + 1):
        name = database.name("bank")
        if is_there:
            database.store().save_bank(name, bank_of(0), "IP")
        store, saved = database.store(), []
        hooked(store, n, partial(save, database, name, theirs, saved))
        reference, _ = store.save_bank(name, ours, "IP")
        assert_whole(database, reference, ours)
        [rival] = saved
        assert_whole(database, rival, theirs)
        assert (reference.generation == rival.generation) == same
        database.database.drop(name)


def test_a_late_write_of_one_generation_changes_no_other(database):
    store, name = database.store(), database.name("bank")
    first, second = bank_of(1, targets=3, columns=2), bank_of(2, queries=9)
    write, sent = store.upsert, []
    store.upsert = lambda *given: (sent.append(given), write(*given))[1]
    reference, _ = store.save_bank(name, first, "IP")
    late = list(sent)
    other, _ = store.save_bank(name, second, "IP")
    gated = store.save_nearest(reference, "gallery", [[i] for i in range(9)])
    rows = store.count(name)
    for given in late:
        write(*given)
    assert store.count(name) == rows
    assert_whole(database, reference, first)
    assert_whole(database, other, second)
    assert database.store().load_bank(gated).nearest == [[i] for i in range(9)]


def test_the_same_bank_is_one_generation_and_other_potentials_are_another(database):
    store, name = database.store(), database.name("bank")
    bank = bank_of(1, targets=3, columns=2)
    reference, made = store.save_bank(name, bank, "IP")
    assert made == "collection"
    assert store.save_bank(name, bank, "IP") == (reference, "nothing")
    assert reference == reference_to(name, bank)
    refitted = StoredBank(bank.queries, bank.potentials * 2, bank.targets)
    other, made = store.save_bank(name, refitted, "IP")
    assert (made, other.fingerprint) == ("generation", reference.fingerprint)
    assert other.generation != reference.generation
    assert_whole(database, reference, bank)
    assert_whole(database, other, refitted)


def test_the_sign_of_zero_is_no_difference():
    bank = bank_of(1, columns=1)
    flipped = StoredBank(QueryBank(bank.queries.vectors), -0.0 * bank.potentials)
    zero = StoredBank(QueryBank(bank.queries.vectors), np.abs(0 * bank.potentials))
    assert generation_of(flipped) == generation_of(zero) != generation_of(bank)


@pytest.mark.parametrize("change", ["vector", "potentials", "more", "fewer", "targets"])
def test_rows_that_were_tampered_with_are_refused_and_written_again(database, change):
    store, name = database.store(), database.name("bank")
    bank = bank_of(1, targets=3, columns=2)
    reference, _ = store.save_bank(name, bank, "IP")
    rows = store._read_bank_rows(reference, ["targets" if change == "targets" else "queries"])
    if change in ("vector", "targets"):
        rows.vectors[2] += 1
    elif change == "potentials":
        rows.rows[2]["potentials"] = [0.5, 0.25]
    elif change == "more":
        rows.keys[2] = store._bank_key("another")
        rows.rows[2].update({"id": "another", "number": 6})
    if change == "fewer":
        store.delete(name, rows.keys[2:3])
    else:
        store.upsert(name, rows, store.bank_field)
    with pytest.raises(
        StateError, match=rf"bank '{name}' holds other rows than .* run refresh with --bank"
    ):
        database.store().load_bank(reference)
    found = database.store().load_bank(reference, checked=False)
    assert len(found.queries) == {"more": 7, "fewer": 5}.get(change, 6)
    assert store.save_bank(name, bank, "IP") == (reference, "generation")
    assert_whole(database, reference, bank)
    assert store.count(name) == 9


def test_a_reader_takes_no_endless_rows_of_a_stranger(database):
    """Whoever may write to a bank collection could fill the memory of all who read the bank."""
    store, name = database.store(), database.name("bank")
    bank = bank_of(1, targets=3, columns=2)
    reference, _ = store.save_bank(name, bank, "IP")
    assert reference.size == 9
    rows = store._read_bank_rows(reference)
    strange = [
        {**rows.rows[0], "id": f"strange/{number}", "number": number} for number in range(6, 10_500)
    ]
    keys = [store._bank_key(row["id"]) for row in strange]
    vectors = np.repeat(rows.vectors[:1], len(strange), axis=0)

    few = Batch(keys[:150], vectors[:150], strange[:150])
    store.upsert(name, few, store.bank_field)
    assert len(database.store().load_bank(reference, checked=False).queries) == 156
    for start in range(150, len(keys), 1_000):
        page = slice(start, start + 1_000)
        store.upsert(name, Batch(keys[page], vectors[page], strange[page]), store.bank_field)
    with pytest.raises(StateError, match=rf"bank '{name}' holds more than .* adds rows to it"):
        database.store().load_bank(reference, checked=False)


def corrected(database, name, **options):
    """Correct a collection without a copy."""
    bank = QueryBank(bank_of(9).queries.vectors)
    store = database.store()
    enable(
        store,
        plan_correction(
            store, name, **as_plan(bank, Beside, estimator=NNN(2), verdict="warn", **options)
        ),
    )


class Shared:
    """A collection that names a generation of a bank collection as soon as it is told to."""

    def __init__(self, database, bank):
        self.database, self.bank = database, bank
        self.store = database.store()
        self.name = database.fill(vectors(np.random.default_rng(5), 30, DIM), "IP")
        database.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
        corrected(database, self.name)
        self.collection = self.state.profile.bank.collection

    @property
    def state(self):
        return self.store.info(self.name).state

    def adopt(self):
        """Save the bank, name it, and load it."""
        reference, _ = self.database.store().save_bank(self.collection, self.bank, "IP")
        profile = self.state.profile.model_copy(update={"bank": reference})
        write_state(self.store, self.name, self.state.with_profile(profile))
        return self.database.store().load_bank(reference)


def test_a_generation_that_is_named_while_it_is_dropped_is_kept_or_missed(database):
    """Its rows are whole after the drop, or the job that named it was told that they are gone."""
    bank = bank_of(1, targets=3)
    shared = Shared(database, bank)
    before = shared.state
    reference = reference_to(shared.collection, bank)
    outcomes = []
    for n in range(1, 100):
        database.store().save_bank(shared.collection, bank, "IP")
        write_state(shared.store, shared.name, before)
        store, told = database.store(), []

        def rival(told=told):
            try:
                shared.adopt()
                told.append("whole")
            except EmptyBank:
                told.append("gone")

        requests = hooked(store, n, rival)
        store.drop_bank_generations([reference])
        if requests.seen < n:
            break
        if told == ["whole"]:
            assert_whole(database, reference, bank)
        outcomes += told
    assert outcomes.count("whole") > len(outcomes) // 2 > 1


def test_a_save_that_fails_leaves_the_rows_of_others(database, monkeypatch):
    store, name = database.store(), database.name("bank")
    ours, theirs = bank_of(1), bank_of(2)

    def broken(*given):
        database.store().save_bank(name, theirs, "IP")
        raise StoreError("the connection broke")

    monkeypatch.setattr(store, "upsert", broken)
    with pytest.raises(StoreError, match="broke"):
        store.save_bank(name, ours, "IP")
    assert_whole(database, reference_to(name, theirs), theirs)
    assert store.count(name) == len(theirs.queries)


def test_what_a_save_made_is_undone_except_for_the_rows_of_others(database):
    store, name = database.store(), database.name("bank")
    ours, theirs = bank_of(1), bank_of(2)
    saved = store.save_bank(name, ours, "IP")
    other = database.store().save_bank(name, theirs, "IP")
    undo_save_bank(store, *saved)
    assert_whole(database, other[0], theirs)
    undo_save_bank(store, other[0], "collection")
    assert not store.exists(name)


def test_two_refreshes_at_once_on_one_bank_collection_keep_their_own_banks(database):
    """Each of two collections takes a new bank into the collection that both use."""
    rng = np.random.default_rng(3)
    first = Shared(database, bank_of(1))
    second = database.fill(vectors(rng, 30, DIM), "IP")
    database.made += [f"{second}__bias_a", f"{second}__bias_b"]
    store = database.store()
    corrected(database, second, bank_collection=first.collection)
    banks = {first.name: bank_of(1).queries, second: bank_of(2, queries=9).queries}

    class Overlapped(database.base):
        def upsert(self, collection, batch, field, *, partition=None):
            if collection == first.collection and not seen:
                seen.append(refresh(database.store(), second, banks[second], force=True))
            super().upsert(collection, batch, field, partition=partition)

    seen = []
    refresh(database.store(Overlapped), first.name, banks[first.name], force=True)
    assert seen
    for name, bank in banks.items():
        reference = store.info(name).state.profile.bank
        np.testing.assert_array_equal(store.load_bank(reference).queries.vectors, bank.vectors)
        assert refresh(store, name).action == "none", "nothing changed since"


@contextmanager
def a_day_ago():
    """The clock by which rows are dated; time_machine would also turn the one by which threads wait."""
    now = time.time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: now() - SPARE_SECONDS - 60)
        yield


def drop_spare(database, bank_collection, older_than):
    store = database.store()
    store.drop_spare_generations(bank_collection, Ledger(store).used_banks, older_than=older_than)


def test_what_a_killed_job_left_is_dropped_a_day_later_and_nothing_else(database, monkeypatch):
    shared = Shared(database, bank_of(1))
    store, name = database.store(), shared.collection
    named = shared.state.profile.bank
    with a_day_ago():
        left = store.save_bank(name, bank_of(2, targets=3, columns=2), "IP")[0]
        store.save_nearest(left, shared.name, [[i] for i in range(9)])
        of_a_copy = store.save_bank(name, bank_of(3), "IP")[0]
    young = store.save_bank(name, bank_of(4), "IP")[0]

    # Nothing is dropped while a record of the ledger cannot be read.
    monkeypatch.setattr(Ledger, "used_banks", lambda ledger: None)
    assert refresh(database.store(), shared.name).action == "none"
    assert left.generation in database.database.generations(name)

    # The state of a copy that is not made yet stands in the ledger alone.
    monkeypatch.setattr(Ledger, "used_banks", lambda ledger: {of_a_copy.rows})
    assert refresh(database.store(), shared.name).action == "none"
    kept = {each.generation: each.count for each in (named, of_a_copy, young)}
    assert database.database.generations(name) == kept


def test_a_bank_that_is_saved_again_stays_though_it_was_written_long_ago(database):
    """Whenever another job looks for what nobody uses: its rows are written again."""
    name, bank = database.name("bank"), bank_of(1, targets=3, columns=2)

    def old_bank():
        with a_day_ago():
            return database.store().save_bank(name, bank, "IP")[0]

    n, requests = 0, None
    while requests is None or requests.seen >= n:
        n += 1
        reference, store = old_bank(), database.store()
        requests = hooked(store, n, partial(drop_spare, database, name, SPARE_SECONDS))
        assert store.save_bank(name, bank, "IP") == (reference, "generation")
        drop_spare(database, name, SPARE_SECONDS)
        assert_whole(database, reference, bank)
        database.database.drop(name)
    assert n > 5

    # What a state names is not written again at each refresh.
    reference = old_bank()
    assert database.store().save_bank(name, bank, "IP", in_use=True) == (reference, "nothing")


def test_rows_of_a_stranger_end_no_refresh_and_take_no_generation_along(database):
    shared = Shared(database, bank_of(1))
    store, name, named = database.store(), shared.collection, shared.state.profile.bank
    rows = store._read_bank_rows(named, ["queries"])
    strange = {**rows.rows[0], "id": "strange", "number": 0, "added_at": -1}
    strange["generation"] = '" or true or "'
    key = store._bank_key("strange")
    store.upsert(name, Batch([key], rows.vectors[:1], [strange]), store.bank_field)
    assert refresh(database.store(), shared.name).action == "none"
    assert database.database.generations(name) == {named.generation: named.count}


def test_rows_without_a_date_are_old_and_a_save_writes_them_again():
    """Payloads of Qdrant may lack any key; a field of a bank on Milvus has a value always."""
    database = OnQdrant("qdrant-local", QdrantClient(":memory:"))
    store, name, bank = database.store(), database.name("bank"), bank_of(1, targets=3)
    reference, _ = store.save_bank(name, bank, "IP")
    store.client.delete_payload(name, ["added_at"], points=store._read_bank_rows(reference).keys)

    assert store.save_bank(name, bank, "IP", in_use=True) == (reference, "nothing")
    assert store.save_bank(name, bank, "IP") == (reference, "generation")
    drop_spare(database, name, SPARE_SECONDS)
    assert_whole(database, reference, bank)


def test_a_refresh_looks_for_uses_of_a_bank_twice_if_one_is_spare_and_else_not_at_all(database):
    """It looks into every collection: before it drops the rows, and after."""
    shared, scans = Shared(database, bank_of(1)), []

    class Watched(database.base):
        def _all_properties(self):
            scans.append(len(scans))
            return super()._all_properties()

    for seed, expected in ((7, 0), (8, 2), (9, 4)):
        assert (
            refresh(database.store(Watched), shared.name, bank_of(seed).queries, force=True).action
            == "full"
        )
        assert len(scans) == expected


def test_a_tampered_bank_is_replaced_by_a_file_or_taken_as_it_is(database):
    shared = Shared(database, bank_of(1))
    original = QueryBank(bank_of(9).queries.vectors)
    reference = shared.state.profile.bank
    rows = shared.store._read_bank_rows(reference, ["queries"])
    first = [key for key, row in zip(rows.keys, rows.rows, strict=True) if row["number"] == 0]
    shared.store.delete(shared.collection, first)
    done = refresh(shared.store, shared.name, original, force=True)
    assert "the bank changed" in done.reason
    assert shared.state.profile.bank == reference
    assert shared.store.load_bank(reference).queries.fingerprint == original.fingerprint
    shared.store.delete(shared.collection, first)
    assert "the bank changed" in refresh(shared.store, shared.name, force=True).reason
    stored = shared.store.load_bank(shared.state.profile.bank)
    np.testing.assert_array_equal(stored.queries.vectors, original.vectors[1:])
