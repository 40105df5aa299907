"""Writes beside the vectors that overlap: of clients with jobs, of jobs with each other, and of strangers.

Each of these left a wrong bias for good, locked clients out, or dropped what others had made.
"""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from pymilvus import DataType
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    MigrationOptions,
    QueryBank,
    Recipe,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.errors import HubnessError, LeaseLost, ServerUnavailable
from milvus_hubness.jobs.beside.entries import Entries
from milvus_hubness.jobs.common.fits import Fit
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.refresh import beside as refreshing
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.client.writes import Writes
from qdrant_hubness.client.writes import Writing
from tests.support.beside import ALPHA, DIM, ITEMS, CorrectedBeside, K, take_back
from tests.support.databases import OnMilvus
from tests.support.galleries import vectors

METHOD = NNN(K, ALPHA)


@pytest.fixture
def beside(database):
    return CorrectedBeside(database)


@pytest.fixture
def on_milvus(lite):
    return CorrectedBeside(OnMilvus.of(lite))


@pytest.fixture
def on_qdrant(database):
    if not database.kind.startswith("qdrant"):
        pytest.skip("about Qdrant's own calls")
    return CorrectedBeside(database)


def row_of(beside, number, vector):
    return {"id": beside.keys[number], "vector": vector.tolist(), "group": 1}


def seen(beside):
    """A vector whose bias is seen: the first answer to a query."""
    return 3 * beside.queries[0]


def enabled(beside, bank, **options):
    plan = plan_correction(
        beside.store, beside.name, Recipe(QueryBank(bank), estimator=METHOD), Beside()
    )
    enable(beside.store, plan, **{"client_ttl": 0.0, **options})


def once(patch, owner, name, action):
    """Have `action` run before the first call of a method, which may be an operation."""
    method = getattr(owner, name)
    done = []

    def first(self, *args, **options):
        if not done:
            done.append(name)
            action()
        return method(self, *args, **options)

    patch.setattr(owner, name, first)
    return done


# -- clients and jobs ------------------------------------------------------------------------------


@pytest.mark.lite_only
def test_an_upsert_without_a_bias_takes_that_of_the_former_vector_away(on_milvus):
    client = on_milvus.database.application()
    client.upsert(on_milvus.name, [row_of(on_milvus, 3, seen(on_milvus))], bias="pending")
    on_milvus.items[3] = seen(on_milvus)
    on_milvus.assert_found(on_milvus.old, without=[3])
    assert status(on_milvus.store, on_milvus.name).pending == 1


@pytest.mark.lite_only
def test_so_does_an_insert_after_a_deletion_by_a_filter(on_milvus):
    client = on_milvus.database.application()
    client.delete(on_milvus.name, filter="id == 3")
    client.insert(on_milvus.name, [row_of(on_milvus, 3, seen(on_milvus))], bias="pending")
    on_milvus.items[3] = seen(on_milvus)
    refresh(on_milvus.store, on_milvus.name, client_ttl=0.0)
    on_milvus.assert_found(on_milvus.old)


@pytest.mark.lite_only
def test_so_does_an_upsert_of_a_row_that_a_job_has_filled(on_milvus, monkeypatch):
    client = on_milvus.database.application()
    row = row_of(on_milvus, 3, seen(on_milvus))
    flush = refreshing.flush_generation

    def flushed(*args):
        client.upsert(on_milvus.name, [row], bias="pending")
        flush(*args)

    monkeypatch.setattr(refreshing, "flush_generation", flushed)
    on_milvus.refreshed()
    on_milvus.items[3] = seen(on_milvus)
    refresh(on_milvus.store, on_milvus.name, client_ttl=0.0)
    on_milvus.assert_found(on_milvus.new)


@pytest.mark.parametrize("number", [3, ITEMS], ids=["an update", "a new row"])
def test_a_slow_writer_gives_its_row_the_bias_of_a_correction_that_was_enabled_meanwhile(
    beside, monkeypatch, number
):
    disable(beside.store, beside.name)
    client = beside.database.application(0.2)
    client.search(beside.name, data=[beside.queries[0]], limit=1)
    for owner, name in ((Writes, "_encoded"), (Writing, "_encode_call"), (Writing, "_send")):
        method = getattr(owner, name)

        def late(self, *args, method=method, **options):
            encoded = yield from method(self, *args, **options)
            if beside.state is None:
                enabled(beside, beside.new, client_ttl=0.3)
            return encoded

        if name == "_send":
            once(monkeypatch, owner, name, lambda: enabled(beside, beside.new, client_ttl=0.3))
        else:
            monkeypatch.setattr(owner, name, late)
    beside.write(number, seen(beside), client)
    refresh(beside.store, beside.name, client_ttl=0.0)
    beside.assert_found(beside.new)


def test_a_row_that_comes_back_as_its_entry_is_removed_has_one_at_the_switch(
    on_milvus, monkeypatch
):
    flush = refreshing.flush_generation

    def flushed(*args):
        on_milvus.database.database.client.delete(on_milvus.name, ids=[3])
        flush(*args)

    monkeypatch.setattr(refreshing, "flush_generation", flushed)
    cls = type(on_milvus.store)
    delete = cls.delete
    filled = on_milvus.state.codec.sides[1 - on_milvus.state.profile.slot]
    written = []

    def late(self, collection, keys, **options):
        if collection == filled and 3 in keys and not written:
            written.append(3)
            on_milvus.write(3, seen(on_milvus))
        return delete(self, collection, keys, **options)

    monkeypatch.setattr(cls, "delete", late)
    on_milvus.refreshed()
    assert written
    assert status(on_milvus.store, on_milvus.name).pending == 0
    on_milvus.assert_found(on_milvus.new)


def test_an_update_of_vectors_on_a_condition_gives_other_points_no_bias(on_qdrant):
    client = on_qdrant.database.application()._client
    best = int(np.argmax(on_qdrant.items @ on_qdrant.queries[0]))
    point = models.PointVectors(id=on_qdrant.keys[best], vector=(-seen(on_qdrant)).tolist())
    of_nobody = models.FieldCondition(key="group", match=models.MatchValue(value=77))
    client.update_vectors(on_qdrant.name, [point], update_filter=models.Filter(must=[of_nobody]))
    on_qdrant.assert_found(on_qdrant.old)


def test_an_insertion_over_the_beginning_of_a_refresh_leaves_points_that_exist_their_bias(
    on_qdrant, monkeypatch
):
    client = on_qdrant.database.application(0.2)._client
    client.query_points(on_qdrant.name, on_qdrant.queries[0].tolist())
    best = int(np.argmax(on_qdrant.items @ on_qdrant.queries[0]))
    begun = once(monkeypatch, Writing, "_send", lambda: on_qdrant.refreshed(client_ttl=0.3))
    point = models.PointStruct(id=on_qdrant.keys[best], vector=(-seen(on_qdrant)).tolist())
    client.upsert(on_qdrant.name, [point], update_mode=models.UpdateMode.INSERT_ONLY)
    assert begun
    on_qdrant.assert_found(on_qdrant.new)


def test_an_update_whose_answer_was_lost_has_its_bias(on_qdrant, monkeypatch):
    client = on_qdrant.database.application()._client
    update = QdrantClient.update_vectors

    def lost(self, *args, **options):
        update(self, *args, **options)
        raise ResponseHandlingException(TimeoutError("timed out"))

    point = models.PointVectors(id=on_qdrant.keys[3], vector=seen(on_qdrant).tolist())
    with monkeypatch.context() as patch:
        patch.setattr(QdrantClient, "update_vectors", lost)
        with pytest.raises((HubnessError, ResponseHandlingException)):
            client.update_vectors(on_qdrant.name, [point])
    on_qdrant.items[3] = seen(on_qdrant)
    on_qdrant.assert_found(on_qdrant.old)


# -- lists of nearest rows, which gates read -------------------------------------------------------


@pytest.mark.lite_only
def test_gates_of_two_fields_with_one_bank_are_two_lists(lite):
    rng = np.random.default_rng(5)
    client = lite.client()
    database = OnMilvus.of(lite)
    name = database.name()
    database.made += [f"{name}__bank"]
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    index = client.prepare_index_params()
    for field in ("title", "body"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
        index.add_index(field, index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    items = {field: vectors(rng, ITEMS, DIM) for field in ("title", "body")}
    rows = [{"id": i, **{f: items[f][i].tolist() for f in items}} for i in range(ITEMS)]
    client.insert(name, rows)
    store = database.store()
    bank = vectors(rng, 30, DIM)
    queries = vectors(rng, 40, DIM).tolist()

    def found():
        ours = lite.hubness_client()
        results = ours.search(name, data=queries, limit=5, anns_field="title")
        return [[hit["id"] for hit in hits] for hits in results]

    answers = []
    for field in items:
        recipe = Recipe(QueryBank(bank), estimator=METHOD, gate=1)
        plan = plan_correction(store, name, recipe, Beside(), field=field)
        database.made += plan.body.sides
        enable(store, plan, client_ttl=0.0)
        answers.append(found())
    assert answers[0] == answers[1]
    for field, state in store.info(name).states.items():
        nearest = np.argmax(bank @ items[field].T, axis=1)
        assert store.load_bank(state.profile.bank).nearest == [[key] for key in nearest]


@pytest.mark.lite_only
def test_gates_of_two_profiles_with_one_bank_are_two_lists(lite):
    rng = np.random.default_rng(5)
    database = OnMilvus.of(lite)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 40, DIM)
    name = database.fill(items, "IP")
    database.made += [f"{name}__bank", f"{name}_hubness", f"{name}_hubness_r2"]
    store = database.store()
    recipe = Recipe(QueryBank(bank), estimator=METHOD, gate=1)
    plan = plan_correction(store, name, recipe, Copy(alias=f"{name}_live"))
    migrate(store, plan, options=MigrationOptions(client_ttl=0.0))
    further = Recipe(QueryBank(bank), estimator=NNN(8, 1.0), gate=3)
    refresh(store, f"{name}_live", further, profile="second", client_ttl=0.0, force=True)

    profiles = store.info(f"{name}_live").state.profiles
    ranking = np.argsort(-(bank @ items.T), axis=1)
    for profile, gate in (("default", 1), ("second", 3)):
        nearest = store.load_bank(profiles[profile].bank).nearest
        assert [set(keys) for keys in nearest] == [set(keys) for keys in ranking[:, :gate].tolist()]


class Paused:
    """A job in a thread whose process stands still at one call, until `wake`: nothing renews its lease."""

    def __init__(self, patch, owner, name, job, wakes_with=None):
        patch.setenv("MILVUS_HUBNESS_LEASE_SECONDS", "0.5")
        self._stands, self._wakes = threading.Event(), threading.Event()
        self.errors = []
        self._thread = threading.Thread(target=self._run, args=(job,))
        renew, call = Lease._renew, getattr(owner, name)
        leases = set()
        enter = Lease.__enter__

        def entered(lease):
            if threading.current_thread() is self._thread:
                leases.add(id(lease))
            return enter(lease)

        def paused(store, *args, **options):
            if threading.current_thread() is self._thread:
                self._stands.set()
                self._wakes.wait(20)
                if wakes_with is not None:
                    raise wakes_with
            return call(store, *args, **options)

        patch.setattr(Lease, "__enter__", entered)
        patch.setattr(Lease, "_renew", lambda lease: None if id(lease) in leases else renew(lease))
        patch.setattr(owner, name, paused)
        self._thread.start()
        assert self._stands.wait(20)
        time.sleep(1.0)

    def _run(self, job):
        try:
            job()
        except BaseException as error:
            self.errors.append(error)

    def wake(self):
        self._wakes.set()
        self._thread.join(20)


@pytest.mark.lite_only
def test_a_job_that_was_paused_writes_no_list_that_searches_read(on_milvus, monkeypatch):
    on_milvus.refreshed(gate=1)
    store = on_milvus.database.store()
    # Nothing is due but a new list.
    job = Paused(
        monkeypatch,
        type(store),
        "save_nearest",
        lambda: refresh(store, on_milvus.name, client_ttl=0.0),
    )
    for number in range(3):
        on_milvus.write(number, 50 * on_milvus.new[number])
    refresh(on_milvus.store, on_milvus.name, client_ttl=0.0)
    job.wake()
    assert [type(error) for error in job.errors] == [LeaseLost]
    nearest = np.argmax(on_milvus.new @ on_milvus.items.T, axis=1)
    bank = on_milvus.store.load_bank(on_milvus.state.profile.bank)
    assert bank.nearest == [[on_milvus.keys[i]] for i in nearest]


@pytest.mark.lite_only
def test_lists_that_were_replaced_go_an_hour_later(on_milvus, monkeypatch):
    on_milvus.refreshed(gate=1)
    reference = on_milvus.state.profile.bank
    of_rows = (reference.collection, f'generation == "{reference.generation}"')
    began = time.time()
    counts = []
    for hours in range(4):
        monkeypatch.setattr(time, "time", lambda hours=hours: began + 4_000 * hours)
        on_milvus.write(hours, 50 * on_milvus.new[hours])
        refresh(on_milvus.store, on_milvus.name, client_ttl=0.0)
        counts.append(on_milvus.store._count(*of_rows) - len(on_milvus.new))
    # The one that searches read, and the one before.
    assert counts == [len(on_milvus.new) * 2] * 4


# -- banks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["edited", "gone"])
def test_a_rollback_to_a_bank_that_cannot_be_read_leaves_writers_alone(beside, how):
    beside.refreshed()
    reference = beside.state.other.profile.bank
    if how == "gone":
        beside.store._delete_bank_rows(reference.collection, reference.generation)
    else:
        keys = beside.store._read_bank_rows(reference).keys
        beside.store.delete(reference.collection, keys[:1])
    with pytest.raises(HubnessError):
        take_back(beside)
    beside.write(3, seen(beside))
    beside.assert_found(beside.new)


class Sharing:
    """Two collections with one bank collection; the bank of one is about to be dropped by the other's job."""

    def __init__(self, database):
        self.one = CorrectedBeside(database)
        self.database, self.store = database, database.store()
        self.items = vectors(self.one.rng, ITEMS, DIM)
        self.keys = [database.key(i) for i in range(ITEMS)]
        self.name = database.fill(self.items, "IP", keys=self.keys)
        database.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
        # `old` is the former bank of the first now, which its next refresh drops.
        self.one.refreshed()

    def enabled(self, bank):
        shared = self.one.state.profile.bank.collection
        recipe = Recipe(QueryBank(bank), estimator=METHOD)
        plan = plan_correction(self.store, self.name, recipe, Beside(), bank_collection=shared)
        enable(self.store, plan, client_ttl=0.0)

    def drop(self):
        self.one.refreshed(vectors(self.one.rng, 35, DIM))

    def assert_whole(self):
        row = {"id": self.keys[3], "vector": self.items[3].tolist(), "group": 1}
        self.database.application().upsert(self.name, [row])
        self.store.load_bank(self.store.info(self.name).state.profile.bank)


def test_a_bank_that_another_job_dropped_before_it_was_named_is_there_afterwards(
    database, monkeypatch
):
    two = Sharing(database)
    assert not two.store.info(two.name).states
    dropped = once(monkeypatch, Entries, "put", two.drop)
    two.enabled(two.one.old)
    assert dropped
    two.assert_whole()


def test_so_is_the_bank_of_a_refresh(database, monkeypatch):
    two = Sharing(database)
    two.enabled(vectors(two.one.rng, 20, DIM))
    waited = refreshing.wait_unread
    dropped = []

    def meanwhile(*args):
        if not dropped:
            dropped.append(1)
            two.drop()
        waited(*args)

    monkeypatch.setattr(refreshing, "wait_unread", meanwhile)
    refresh(two.store, two.name, Recipe(QueryBank(two.one.old)), client_ttl=0.0, force=True)
    assert dropped
    two.assert_whole()


def test_what_another_job_has_made_is_not_undone(beside, monkeypatch):
    """One is paused, and another takes over with the same recipe; then the connection of the first fails."""
    disable(beside.store, beside.name)
    store = beside.database.store()
    recipe = Recipe(QueryBank(beside.new), estimator=METHOD)
    with monkeypatch.context() as patch:
        job = Paused(
            patch,
            Entries,
            "put",
            lambda: enable(
                store, plan_correction(store, beside.name, recipe, Beside()), client_ttl=0.0
            ),
            wakes_with=ServerUnavailable("the connection was closed"),
        )
        woken = once(patch, Entries, "put", job.wake)
        enabled(beside, beside.new)
    assert woken
    assert [type(error) for error in job.errors] == [LeaseLost]
    beside.store.load_bank(beside.state.profile.bank)
    beside.assert_found(beside.new)


# -- what is of a stranger, or left ----------------------------------------------------------------


@pytest.mark.lite_only
@pytest.mark.parametrize("taken", ["_a", "_b"])
def test_a_collection_of_a_stranger_under_the_name_of_a_side_stays(on_milvus, monkeypatch, taken):
    """It was created since the plan was made, and since the names were looked up."""
    disable(on_milvus.store, on_milvus.name)
    client = on_milvus.database.database.client
    stranger = f"{on_milvus.name}__bias{taken}"

    def created():
        client.create_collection(stranger, dimension=4)
        client.insert(stranger, [{"id": 1, "vector": [1, 2, 3, 4]}])

    once(monkeypatch, type(on_milvus.store), "create_side", created)
    with pytest.raises(HubnessError):
        enabled(on_milvus, on_milvus.new)
    assert client.query(stranger, ids=[1], output_fields=["vector"])
    assert on_milvus.state is None
    client.drop_collection(stranger)
    enabled(on_milvus, on_milvus.new)
    on_milvus.assert_found(on_milvus.new)


def test_a_vector_whose_name_is_a_number_has_keys_of_its_own(on_qdrant):
    database, rng = on_qdrant.database, on_qdrant.rng
    name = database.name()
    params = models.VectorParams(size=DIM, distance="Dot")
    database._client.create_collection(name, vectors_config={"text": params, "1": params})
    items = {field: vectors(rng, ITEMS, DIM) for field in ("text", "1")}
    points = [
        models.PointStruct(id=i, vector={f: items[f][i].tolist() for f in items}, payload={})
        for i in range(ITEMS)
    ]
    database._client.upsert(name, points)
    store = database.store()
    database.made += [f"{name}__bank"]
    for field in items:
        recipe = Recipe(QueryBank(on_qdrant.old), estimator=METHOD)
        enable(store, plan_correction(store, name, recipe, Beside(), field=field), client_ttl=0.0)
    ours = database.application()._client
    query = on_qdrant.queries[0].tolist()

    def found():
        answers = ours.query_points(name, query, using="1").points
        return [(point.id, round(point.score, 4)) for point in answers]

    before = found()
    new_bank = Recipe(QueryBank(on_qdrant.new))
    refresh(store, name, new_bank, field="text", client_ttl=0.0, force=True)
    assert found() == before
    assert status(store, name, field="1").pending == 0


def test_disable_takes_the_notes_of_an_unfinished_refresh_along(beside):
    put = Entries.put

    def killed(entries, *args):
        put(entries, *args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Entries, "put", killed)
        beside.refreshed(vectors(beside.rng, 35, DIM))
    filling = beside.state.with_profile(beside.state.filling)
    fit = Fit(beside.store, beside.store.info(beside.name), filling)
    assert fit.note
    disable(beside.store, beside.name)
    assert not beside.store.records(LEDGER, fit.group)
    enabled(beside, beside.new)
    beside.assert_found(beside.new)
