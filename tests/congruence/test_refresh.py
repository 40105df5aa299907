"""Biases kept right: only what is missing or moved is written, and searches switch all at once."""

import threading

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    BankTooSmall,
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NotCorrected,
    QueryBank,
    Stopped,
    StoreError,
    UnfinishedMigration,
    migrate,
    plan_migration,
    refresh,
    status,
)
from milvus_hubness.stores import MilvusStore, milvus
from tests.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

DIM, ITEMS = 12, 200


class Corrected:
    def __init__(self, backend, metric="COSINE"):
        rng = np.random.default_rng(2)
        self.backend, self.metric = backend, metric
        self.items, self.bank, self.other = (vectors(rng, n, DIM) for n in (ITEMS, 50, 70))
        self.query = vectors(rng, 1, DIM)
        self.source = backend.name()
        plain_collection(backend.client(), self.source, self.items, metric)
        self.store = backend.store()
        plan = plan_migration(self.store, self.source, QueryBank(self.bank), estimator=NNN(8))
        self.name = migrate(self.store, plan).target
        self.profile = self.store.info(self.name).state.profile

    def scores(self, client=None):
        client = client or self.backend.hubness_client()
        [hits] = client.search(self.name, data=list(self.query), limit=ITEMS)
        return {hit["id"]: hit["distance"] for hit in hits}

    def wanted(self, bank, k, alpha=0.75):
        centre = self.store.info(self.name).state.profile.centre
        biases = nnn(bank, self.items, self.metric, k, alpha) - centre
        return as_distance(similarity(self.query, self.items, self.metric) - biases, self.metric)[0]

    def assert_scores(self, bank, k, alpha=0.75):
        found, wanted = self.scores(), self.wanted(bank, k, alpha)
        np.testing.assert_allclose([found[i] for i in range(ITEMS)], wanted, atol=3e-5)

    def banked(self):
        """Queries in the bank collection, of whatever generation."""
        bank = self.store.info(self.name).state.profile.bank.collection
        client = self.backend.client()
        return client.query(bank, output_fields=["count(*)"], consistency_level="Strong")[0]["count(*)"]

    def make_pending(self, keys):
        batch = self.store.fetch(self.name, keys, "vector")
        layout = self.store.info(self.name).state.layout
        batch.vectors[:, layout.first_slot : layout.first_slot + layout.slots] = 0
        for row in batch.rows:
            row.update(hubness_bias=0.0, hubness_epoch=0)
        self.store.write(self.name, batch, "vector")


@pytest.fixture(scope="module", params=METRICS)
def shared(shared_backend, request):
    if request.param != "COSINE" and not shared_backend.is_lite:
        pytest.skip("shown on Milvus Lite")
    return Corrected(shared_backend, request.param)


@pytest.fixture
def corrected(shared, request):
    """The shared collection, put back to its first rows, bank and parameters."""
    if not shared.backend.is_lite and request.node.get_closest_marker("shown_on_lite"):
        pytest.skip("shown on Milvus Lite")
    yield shared
    client = shared.backend.hubness_client()
    if added := client.query(shared.name, filter=f"id >= {ITEMS}", output_fields=["id"]):
        client.delete(shared.name, ids=[row["id"] for row in added])
    state = shared.store.info(shared.name).state
    shared.store.write_state(shared.name, state.model_copy(update={"phase": "ready"}))
    gone = sorted(set(range(ITEMS)) - set(shared.store.keys(shared.name)))
    if gone:
        client.insert(shared.name, [{"id": i, "vector": shared.items[i], "group": i % 5} for i in gone])
    if shared.store.info(shared.name).state.profile != shared.profile:
        refresh(shared.store, shared.name, bank=QueryBank(shared.bank), estimator=NNN(8))


under_cosine = pytest.mark.parametrize("shared", ["COSINE"], indirect=True)


def test_a_new_bank_is_adopted(corrected):
    done = refresh(corrected.store, corrected.name, bank=QueryBank(corrected.other))
    assert (done.mode, done.scanned) == ("full", ITEMS)
    assert done.reason.startswith("the bank changed; ")
    corrected.assert_scores(corrected.other, 8)
    state = corrected.store.info(corrected.name).state
    assert (
        corrected.store.load_bank(state.profile.bank).queries.fingerprint
        == QueryBank(corrected.other).fingerprint
    )
    assert corrected.banked() == len(corrected.other) + len(corrected.bank), "the former one is kept"
    third = vectors(np.random.default_rng(5), 40, DIM)
    refresh(corrected.store, corrected.name, bank=QueryBank(third))
    assert corrected.banked() == len(third) + len(corrected.other), "and only that"
    assert corrected.store.info(corrected.name).journal is None
    journals = [each for each in corrected.backend.client().list_collections() if "journal" in each]
    assert all(corrected.store.count(each) == 0 for each in journals)


@pytest.mark.shown_on_lite
def test_one_command_goes_back(corrected):
    before, state = corrected.scores(), corrected.store.info(corrected.name).state
    refresh(corrected.store, corrected.name, bank=QueryBank(corrected.other), estimator=NNN(3, 1.0))
    done = refresh(corrected.store, corrected.name, back=True)
    assert (done.mode, done.written) == ("full", 0), "the other slot holds them still"
    after = corrected.store.info(corrected.name).state.profile
    for name in ("estimator", "centre", "strength", "slot", "bank"):
        assert getattr(after, name) == getattr(state.profile, name), name
    assert corrected.scores() == pytest.approx(before, abs=1e-6)
    refresh(corrected.store, corrected.name, back=True)
    corrected.assert_scores(corrected.other, 3, 1.0)


@under_cosine
def test_stopped_between_two_batches_it_is_carried_on(corrected, monkeypatch):
    monkeypatch.setattr(milvus, "CHUNK_BYTES", 40 * (milvus.ROW_OVERHEAD_BYTES + 4 * 16))
    stop, before = threading.Event(), corrected.scores()

    class Stopping(MilvusStore):
        def write(self, collection, *args, **kwargs):
            super().write(collection, *args, **kwargs)
            if collection == corrected.name:
                stop.set()

    store = Stopping(corrected.backend.client())
    with pytest.raises(Stopped):
        refresh(store, corrected.name, bank=QueryBank(corrected.other), stop=stop)
    assert corrected.store.info(corrected.name).state.incoming is not None
    assert corrected.scores() == pytest.approx(before, abs=1e-6)
    client = corrected.backend.hubness_client()
    client.insert(corrected.name, {"id": 900, "vector": corrected.items[4], "group": 0})
    done = refresh(corrected.store, corrected.name)
    assert (done.mode, done.reason) == ("full", "one was not finished")
    assert done.written == ITEMS - 40, "what was written is not written again, nor what a client wrote"
    state = corrected.store.info(corrected.name).state
    assert (state.incoming, state.profile.bank.count) == (None, len(corrected.other))
    [hits] = client.search(corrected.name, data=list(corrected.query), limit=ITEMS + 1)
    found = {hit["id"]: hit["distance"] for hit in hits}
    wanted = corrected.wanted(corrected.other, 8)
    np.testing.assert_allclose([found[i] for i in range(ITEMS)], wanted, atol=3e-5)
    assert found[900] == pytest.approx(found[4], abs=1e-5)


@pytest.mark.shown_on_lite
@under_cosine
def test_another_bank_takes_the_place_of_one_that_was_not_finished(corrected):
    class Breaking(MilvusStore):
        def settle(self, *args):
            raise StoreError("the connection broke")

    third = vectors(np.random.default_rng(5), 40, DIM)
    with pytest.raises(StoreError):
        refresh(Breaking(corrected.backend.client()), corrected.name, bank=QueryBank(corrected.other))
    refresh(corrected.store, corrected.name, bank=QueryBank(third))
    corrected.assert_scores(third, 8)
    assert corrected.banked() == len(third) + len(corrected.bank)


@pytest.mark.shown_on_lite
def test_new_parameters_are_adopted_and_go_back_to_what_was(corrected):
    before = corrected.scores()
    refresh(corrected.store, corrected.name, estimator=NNN(3, 1.0))
    corrected.assert_scores(corrected.bank, 3, 1.0)
    refresh(corrected.store, corrected.name, estimator=NNN(8))
    after = corrected.scores()
    np.testing.assert_allclose([after[i] for i in range(ITEMS)], [before[i] for i in range(ITEMS)], atol=3e-5)


@pytest.mark.shown_on_lite
def test_vectors_come_through_a_refresh_unchanged(corrected):
    client = corrected.backend.hubness_client()
    before = {row["id"]: row["vector"] for row in client.query(corrected.name, filter="id >= 0")}
    for k in (3, 5, 7):
        refresh(corrected.store, corrected.name, estimator=NNN(k))
    after = {row["id"]: row["vector"] for row in client.query(corrected.name, filter="id >= 0")}
    assert after == before


@pytest.mark.shown_on_lite
@under_cosine
def test_nothing_changed_means_nothing_written(corrected):
    done = refresh(corrected.store, corrected.name)
    assert (done.mode, done.written) == ("pending", 0)


def test_rows_without_a_bias_get_theirs(corrected):
    corrected.make_pending([5, 6, 150])
    assert status(corrected.store, corrected.name).pending == 3
    done = refresh(corrected.store, corrected.name)
    assert (done.mode, done.scanned, done.written) == ("pending", 3, 3)
    assert status(corrected.store, corrected.name).pending == 0
    corrected.assert_scores(corrected.bank, 8)


@pytest.mark.shown_on_lite
@under_cosine
def test_only_rows_that_moved_are_written(corrected):
    store = corrected.store
    refresh(store, corrected.name, estimator=NNN(8, 0.75 + 1e-9), tolerance=0)
    unmoved = refresh(store, corrected.name, estimator=NNN(8), tolerance=1e-3)
    assert (unmoved.mode, unmoved.written, unmoved.scanned) == ("full", 0, ITEMS)
    nudged = np.vstack([corrected.bank, corrected.items[:1] * 10])
    biases = {
        name: nnn(bank, corrected.items, "COSINE", 8, 0.75)
        for name, bank in (("old", corrected.bank), ("new", nudged))
    }
    moved = int((np.abs(biases["new"] - biases["old"]) > 1e-3).sum())
    assert 0 < moved < ITEMS
    done = refresh(store, corrected.name, bank=QueryBank(nudged), tolerance=1e-3)
    assert done.written == moved


@pytest.mark.shown_on_lite
@under_cosine
def test_a_bank_changed_in_place_is_noticed(corrected):
    client = corrected.backend.client()
    bank = corrected.store.info(corrected.name).state.profile.bank
    row = {"id": (bank.generation << 32) + 50, "generation": bank.generation, "source": "live", "added_at": 0}
    client.insert(bank.collection, [{**row, "vector": corrected.other[0]}])
    done = refresh(corrected.store, corrected.name)
    assert done.reason.startswith("the bank changed; ")
    corrected.assert_scores(np.vstack([corrected.bank, corrected.other[:1]]), 8)
    assert refresh(corrected.store, corrected.name).mode == "pending"


@pytest.mark.shown_on_lite
@under_cosine
def test_a_search_sees_the_old_biases_until_all_new_ones_are_there(corrected):
    seen = []

    class Watching(MilvusStore):
        def write(self, *args, **kwargs):
            super().write(*args, **kwargs)
            seen.append(corrected.scores())

    before = corrected.scores()
    refresh(Watching(corrected.backend.client()), corrected.name, bank=QueryBank(corrected.other))
    assert seen
    assert all(scores == pytest.approx(before, abs=1e-6) for scores in seen)
    assert corrected.scores() != pytest.approx(before, abs=1e-3)


@under_cosine
def test_an_interrupted_refresh_changes_no_answer_and_can_be_run_again(corrected):
    class Breaking(MilvusStore):
        def settle(self, *args):
            raise StoreError("the connection broke")

    before = corrected.scores()
    with pytest.raises(StoreError):
        refresh(Breaking(corrected.backend.client()), corrected.name, bank=QueryBank(corrected.other))
    assert corrected.scores() == pytest.approx(before, abs=1e-6)
    done = refresh(corrected.store, corrected.name, bank=QueryBank(corrected.other))
    assert done.written == 0
    corrected.assert_scores(corrected.other, 8)


@pytest.mark.shown_on_lite
@under_cosine
def test_rows_deleted_meanwhile_stay_deleted(corrected):
    class Deleting(MilvusStore):
        def keys(self, *args, **kwargs):
            found = super().keys(*args, **kwargs)
            corrected.backend.client().delete(corrected.name, ids=[0, 1, 2])
            return found

    refresh(Deleting(corrected.backend.client()), corrected.name, bank=QueryBank(corrected.other))
    assert set(corrected.scores()) == set(range(3, ITEMS))


@pytest.mark.shown_on_lite
@under_cosine
def test_a_client_that_remembers_the_old_bank_still_inserts(corrected):
    stale = corrected.backend.hubness_client(state_ttl=3_600)
    stale.search(corrected.name, data=list(corrected.query))
    refresh(corrected.store, corrected.name, bank=QueryBank(vectors(np.random.default_rng(5), 40, DIM)))
    refresh(corrected.store, corrected.name, bank=QueryBank(corrected.other))
    stale.insert(corrected.name, {"id": 900, "vector": corrected.items[4], "group": 0})
    scores = corrected.backend.hubness_client().search(
        corrected.name, data=list(corrected.query), limit=ITEMS + 1
    )
    by_id = {hit["id"]: hit["distance"] for hit in scores[0]}
    assert by_id[900] == pytest.approx(by_id[4], abs=1e-5)


@pytest.mark.shown_on_lite
def test_status_tells_what_there_is(corrected):
    plain = status(corrected.store, corrected.source)
    assert (plain.corrected, plain.rows, plain.estimator) == (False, ITEMS, None)
    told = status(corrected.store, corrected.name)
    assert told.corrected
    assert told.rows == ITEMS
    assert told.source == corrected.source
    assert (told.metric, told.dim, told.width) == (corrected.metric, DIM, 16)
    assert told.estimator == {"name": "NNN", "k": 8, "alpha": 0.75, "kernel": "dense"}
    assert (told.bank["collection"], told.bank["count"]) == (f"{corrected.source}__bank", 50)
    assert told.pending == 0
    assert 0 <= told.age_seconds < 600


@pytest.mark.shown_on_lite
@under_cosine
def test_refreshes_that_cannot_be(corrected):
    state = corrected.store.info(corrected.name).state
    never = state.with_profile(state.profile.model_copy(update={"former": None}))
    corrected.store.write_state(corrected.name, never)
    with pytest.raises(InvalidInput, match="nothing to go back to"):
        refresh(corrected.store, corrected.name, back=True)
    for change, error in (
        ({"back": True, "refit": True}, InvalidParameter),
        ({"bank": QueryBank(np.ones((60, DIM + 1)))}, DimensionMismatch),
        ({"estimator": NNN(51)}, BankTooSmall),
        ({"tolerance": -1.0}, InvalidParameter),
        ({"tolerance": float("nan")}, InvalidParameter),
    ):
        with pytest.raises(error):
            refresh(corrected.store, corrected.name, **change)
    with pytest.raises(NotCorrected):
        refresh(corrected.store, corrected.source)
    state = corrected.store.info(corrected.name).state
    corrected.store.write_state(corrected.name, state.model_copy(update={"phase": "copying"}))
    with pytest.raises(UnfinishedMigration):
        refresh(corrected.store, corrected.name)
