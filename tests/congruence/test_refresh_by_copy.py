"""New biases by a copy that takes over all names, beside writers, and from wherever it was left."""

import threading
import time

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Cancelled,
    CannotMigrate,
    CorrectionConfig,
    InvalidInput,
    Judgements,
    QueryBank,
    Recipe,
    StoreError,
    WrongPhase,
    clean,
    refresh,
    rollback,
)
from milvus_hubness.jobs.common.progress import Throttle
from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.migration import ledger
from milvus_hubness.jobs.refresh import by_copy
from milvus_hubness.jobs.refresh.sample import MOST_JUDGED_ROWS
from milvus_hubness.jobs.refresh.sampling import start_sampling
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.aliases import aliased
from tests.support.born import born
from tests.support.galleries import hubby_gallery, nnn, plain_collection, similarity, vectors
from tests.support.live import DIM, ITEMS, K, Live
from tests.support.recipes import as_recipe


@pytest.fixture
def live(backend, request):
    return Live(backend, is_migrated=hasattr(request, "param"))


of_a_copy = pytest.mark.parametrize("live", ["migrated"], indirect=True)
"""Of a collection that a job has made, which a later one may drop, and whose ledger is there."""


@pytest.mark.beyond_contract
def test_a_copy_takes_over_beside_writers(live):
    class Writing(MilvusStore):
        """The application writes after every write of the job."""

        def upsert(self, collection, *args, **kwargs):
            super().upsert(collection, *args, **kwargs)
            if len(live.rows) < ITEMS + 3:
                live.write()

        def chunk_rows(self, source):
            return 100

    before = live.read()
    store = Writing(live.backend.client())
    planned = refresh(store, live.alias, QueryBank(live.other), plan=True)
    assert (planned.action, planned.planned) == ("full", True)
    assert (planned.copy.target, planned.copy.names) == (f"{live.name}_r2", (live.alias,))
    assert planned.copy.rows == ITEMS
    assert min(planned.copy.memory_bytes.values()) > 4 * ITEMS * DIM
    assert planned.copy.seconds > 0
    assert store.alias_target(live.alias) == live.name
    done = refresh(store, live.alias, QueryBank(live.other))
    assert (done.action, done.collection, done.epoch) == ("full", f"{live.name}_r2", 2)
    assert store.alias_target(live.alias) == done.collection
    live.assert_found(live.other)
    after = live.read()
    for key in set(before) & set(after) - {5}:
        np.testing.assert_array_equal(after[key], before[key])
    live.write()
    live.assert_found(live.other)
    assert refresh(store, live.alias).action == "none"
    assert rollback(store, live.alias).source == live.name
    live.assert_found(live.bank)
    clean(store, done.collection, drop=done.collection)
    assert not store.exists(done.collection)


@pytest.mark.lite_only
@pytest.mark.parametrize("asked_again", [True, False])
def test_what_was_left_is_carried_on_with(live, asked_again):
    class Breaking(MilvusStore):
        left = 3

        def upsert(self, collection, *args, **kwargs):
            self.left -= collection == f"{live.name}_r2"
            if not self.left:
                raise StoreError("the connection broke")
            super().upsert(collection, *args, **kwargs)

        def chunk_rows(self, source):
            return 50

    with pytest.raises(StoreError):
        refresh(Breaking(live.backend.client()), live.alias, QueryBank(live.other))
    assert live.store.alias_target(live.alias) == live.name
    live.write()
    live.assert_found(live.bank)
    again = {"bank": QueryBank(live.other)} if asked_again else {}
    done = refresh(live.store, live.alias, **as_recipe(**again))
    assert (done.action, done.collection, done.reason) == (
        "full",
        f"{live.name}_r2",
        "one was not finished",
    )
    live.assert_found(live.other)


def break_off(live, monkeypatch):
    """Begin a refresh with the other bank, whose connection breaks before the copy is made."""

    def fail(*args):
        raise StoreError("the connection broke")

    with monkeypatch.context() as patched:
        patched.setattr(by_copy, "opened", fail)
        with pytest.raises(StoreError):
            refresh(live.store, live.alias, QueryBank(live.other))


@pytest.mark.lite_only
def test_what_was_left_before_the_copy_was_made_is_carried_on_with(live, monkeypatch):
    break_off(live, monkeypatch)
    assert not live.store.exists(f"{live.name}_r2")
    done = refresh(live.store, live.alias)
    assert (done.action, done.collection) == ("full", f"{live.name}_r2")
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_a_switch_of_which_only_the_alias_was_moved_is_finished(live):
    class Breaking(MilvusStore):
        def write_property(self, collection, name, record):
            if name == DUAL_WRITE_PROPERTY and record is None:
                raise StoreError("the connection broke")
            super().write_property(collection, name, record)

    with pytest.raises(StoreError):
        refresh(Breaking(live.backend.client()), live.alias, QueryBank(live.other))
    copy = f"{live.name}_r2"
    assert live.store.alias_target(live.alias) == copy
    assert live.store.info(live.name).dual_write is not None
    live.write()
    assert refresh(live.store, live.alias, plan=True).planned
    assert live.store.info(live.name).dual_write is not None, "a plan changes nothing"
    assert refresh(live.store, live.alias).action == "none"
    assert live.store.info(live.name).dual_write is None
    live.assert_found(live.other)
    assert rollback(live.store, live.alias).source == live.name
    live.assert_found(live.bank)


@pytest.mark.lite_only
def test_another_bank_takes_its_place(live, monkeypatch):
    break_off(live, monkeypatch)
    third = vectors(np.random.default_rng(5), 40, DIM)
    done = refresh(live.store, live.alias, QueryBank(third))
    assert done.action == "full"
    live.assert_found(third)
    assert done.collection == f"{live.name}_r3"
    assert [
        each.target for each in ledger.Ledger(live.store).migrations() if each.source == live.name
    ] == [done.collection]


@pytest.mark.lite_only
def test_a_stop_ends_the_wait_for_clients_before_a_name_moves(live):
    throttle = Throttle()

    class Stopping(MilvusStore):
        """The job is stopped once it waits for clients to write to both collections."""

        def write_property(self, collection, name, record):
            super().write_property(collection, name, record)
            if name == DUAL_WRITE_PROPERTY and record is not None and record.required:
                threading.Timer(0.1, throttle.stop, [Cancelled("stopped")]).start()

    began = time.monotonic()
    with pytest.raises(Cancelled, match="stopped"):
        refresh(
            Stopping(live.backend.client()),
            live.alias,
            QueryBank(live.other),
            client_ttl=60.0,
            throttle=throttle,
        )
    assert time.monotonic() - began < 30
    assert live.store.alias_target(live.alias) == live.name
    assert not live.store.info(live.name).dual_write.required
    assert refresh(live.store, live.alias, client_ttl=0.0).action == "full"
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_a_collection_that_has_lost_all_rows_gets_another_bank(live):
    live.client.delete(live.alias, filter="id >= 0")
    live.rows = {}
    done = refresh(live.store, live.alias, QueryBank(live.other))
    assert (done.action, done.collection, done.rows) == ("full", f"{live.name}_r2", 0)
    row = vectors(np.random.default_rng(6), 1, DIM)[0]
    live.client.insert(live.alias, [{"id": 1, "vector": row, "group": 1}])
    live.rows = {1: row}
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_a_collection_without_a_name_that_can_move_is_left_as_it_is(live):
    live.store.drop_alias(live.alias)
    for plan in (True, False):
        with pytest.raises(InvalidInput, match=r"no alias leads there.* or pass --rename .*enable"):
            refresh(live.store, live.name, QueryBank(live.other), plan=plan)
    assert not live.store.exists(f"{live.name}_r2")
    assert refresh(live.store, live.name).action == "none", "nothing is due, and no name moves"


@pytest.mark.beyond_contract
def test_a_collection_that_is_read_by_its_own_name_is_renamed(live):
    live.store.drop_alias(live.alias)
    live.alias = live.name
    planned = refresh(live.store, live.name, QueryBank(live.other), rename=True, plan=True)
    assert planned.copy.renamed == f"{live.name}__before_hubness"
    done = refresh(live.store, live.name, QueryBank(live.other), rename=True)
    assert (done.collection, done.former_copy) == (f"{live.name}_r2", planned.copy.renamed)
    live.assert_found(live.other)
    live.write()
    live.assert_found(live.other)

    # From now on, the name is an alias.
    again = refresh(live.store, live.name, QueryBank(live.bank), rename=True, keep_former=2)
    assert (again.collection, again.former_copy) == (f"{live.name}_r3", done.collection)
    live.assert_found(live.bank)
    assert rollback(live.store, live.name).source == done.collection
    live.assert_found(live.other)
    assert rollback(live.store, live.name).source == live.name
    assert live.store.alias_target(live.name) is None
    live.assert_found(live.bank)


@pytest.mark.lite_only
def test_all_aliases_move_and_writes_go_to_both_until_the_last_has(live):
    second = live.backend.name("second")
    live.store.point_alias(second, live.name)
    moved = []

    class Watching(MilvusStore):
        def point_alias(self, alias, collection):
            moved.append((alias, self.info(live.name, counted=False).dual_write.required))
            super().point_alias(alias, collection)

    done = refresh(Watching(live.backend.client()), live.alias, QueryBank(live.other))
    assert sorted(moved) == sorted([(live.alias, True), (second, True)])
    assert {live.store.alias_target(alias) for alias, _ in moved} == {done.collection}
    assert live.store.info(live.name).dual_write is None
    live.assert_found(live.other)
    rollback(live.store, second)
    assert {live.store.alias_target(alias) for alias, _ in moved} == {live.name}


@pytest.mark.lite_only
def test_a_refresh_that_was_killed_between_two_aliases_is_finished_by_the_next(live):
    second = live.backend.name("second")
    live.store.point_alias(second, live.name)

    class Breaking(MilvusStore):
        def point_alias(self, alias, collection):
            if self.info(collection).aliases:
                raise StoreError("the connection broke")
            super().point_alias(alias, collection)

    with pytest.raises(StoreError):
        refresh(Breaking(live.backend.client()), live.alias, QueryBank(live.other))
    leading = {live.store.alias_target(alias) for alias in (live.alias, second)}
    assert leading == {live.name, f"{live.name}_r2"}
    live.write()
    assert refresh(live.store, second).action == "none"
    assert {live.store.alias_target(alias) for alias in (live.alias, second)} == {f"{live.name}_r2"}
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_a_refresh_that_was_killed_while_the_name_led_nowhere_is_finished_by_the_next(live):
    live.store.drop_alias(live.alias)
    live.alias = live.name

    class Breaking(MilvusStore):
        def point_alias(self, alias, collection):
            raise StoreError("the connection broke")

    with pytest.raises(StoreError):
        refresh(Breaking(live.backend.client()), live.name, QueryBank(live.other), rename=True)
    assert not live.store.exists(live.name)
    assert refresh(live.store, live.name, rename=True).action == "none"
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_a_name_that_somebody_moves_meanwhile_stops_the_switch(live):
    stranger = live.backend.name("stranger")
    plain_collection(live.backend.client(), stranger, np.ones((2, DIM), np.float32), "IP")

    class Moving(MilvusStore):
        def write_property(self, collection, name, record):
            super().write_property(collection, name, record)
            if name == DUAL_WRITE_PROPERTY and record is not None and record.required:
                live.backend.client().alter_alias(stranger, live.alias)

    with pytest.raises(InvalidInput, match="no alias leads there that could move"):
        refresh(Moving(live.backend.client()), live.alias, QueryBank(live.other))
    live.store.point_alias(live.alias, live.name)
    assert refresh(live.store, live.alias).collection == f"{live.name}_r2"
    live.assert_found(live.other)


@of_a_copy
@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.lite_only
def test_former_copies_do_not_pile_up(live, kept):
    [source] = {m.source for m in ledger.Ledger(live.store).migrations() if m.target == live.name}
    banks = [live.other, live.bank] * 2
    names = [live.name]
    dropped = []
    for bank in banks:
        done = refresh(live.store, live.alias, QueryBank(bank), keep_former=kept)
        names.append(done.collection)
        dropped += done.dropped
        live.write()
        live.assert_found(bank)

    left = [name for name in names if live.store.exists(name)]
    assert left == names[-1 - kept :]
    assert dropped == names[: -1 - kept]
    assert live.store.exists(source), "nobody but its owner drops it"
    [generations] = {
        live.store.count(each.collection) for each in live.store.info(live.alias).state.banks
    }
    assert generations == sum(
        len(bank) for bank in {0: (live.bank,)}.get(kept, (live.bank, live.other))
    )

    # Those that an earlier run had to leave go with the next.
    if kept == 2:
        done = refresh(live.store, live.alias, QueryBank(live.other), keep_former=0)
        assert done.dropped == tuple(left)
        left = [done.collection]
        made = [m.target for m in ledger.Ledger(live.store).migrations()]
        assert [name for name in made if name.startswith(live.name)] == left

    for former in [*reversed(left[:-1]), source]:
        assert rollback(live.store, live.alias).source == former
        assert set(live.read()) == set(live.rows)


@of_a_copy
@pytest.mark.lite_only
def test_a_former_copy_that_somebody_reads_or_has_made_stays(live):
    first = refresh(live.store, live.alias, QueryBank(live.other))
    other = live.backend.name("archive")
    live.store.point_alias(other, live.name)
    again = refresh(live.store, live.alias, QueryBank(live.bank))
    assert (again.dropped, live.store.exists(live.name)) == ((), True)

    # A stranger's collection under the name of a copy.
    live.store.drop_alias(other)
    client = live.backend.client()
    client.drop_collection(live.name)
    plain_collection(client, live.name, np.ones((2, DIM), np.float32), "IP")
    last = refresh(live.store, live.alias, QueryBank(live.other))
    assert live.store.exists(live.name)
    assert first.collection in last.dropped or not last.dropped


@of_a_copy
@pytest.mark.lite_only
def test_a_former_copy_can_be_dropped_and_the_way_back_stays(live):
    done = refresh(live.store, live.alias, QueryBank(live.other))
    assert done.to_dict()["former_copy"] == live.name
    [source] = {m.source for m in ledger.Ledger(live.store).migrations() if m.target == live.name}
    clean(live.store, live.alias, drop=live.name)
    assert not live.store.exists(live.name)
    live.write()
    live.assert_found(live.other)
    assert rollback(live.store, live.alias).source == source
    assert set(live.read()) == set(live.rows)


@of_a_copy
@pytest.mark.lite_only
def test_the_migration_before_a_refresh_is_not_rolled_back_past_newer_writes(live):
    """Only the rows of its own copy would be carried back, which clients no longer write to."""
    done = refresh(live.store, live.alias, QueryBank(live.other))
    live.write()
    [source] = {m.source for m in ledger.Ledger(live.store).migrations() if m.target == live.name}
    for name in (live.name, source):
        with pytest.raises(WrongPhase, match=f"'{live.alias}' leads to '{done.collection}', where"):
            rollback(live.store, name)
    assert set(live.read()) == set(live.rows)

    # One after the other, by the alias, loses nothing.
    assert rollback(live.store, live.alias).source == live.name
    assert rollback(live.store, live.alias).source == source
    assert set(live.read()) == set(live.rows)


@pytest.mark.beyond_contract
def test_no_write_of_any_client_is_lost_or_undone(live):
    """A plain client changes and deletes rows as they are stored, and ours writes as always."""
    plain = live.backend.client()
    groups = {}
    state = {"step": 0}

    def write_as_plain():
        state["step"] += 1
        changed, gone = 20 + state["step"], 80 + state["step"]
        [stored] = plain.query(
            live.alias, f"id == {changed}", output_fields=["*"], consistency_level="Strong"
        )
        groups[changed] = 100 + state["step"]
        plain.upsert(live.alias, {**stored, "group": groups[changed]})
        plain.delete(live.alias, ids=[gone])
        del live.rows[gone]

    class Writing(MilvusStore):
        """Both write between the job's reads and its writes, and the plain one until the copy is verified."""

        def upsert(self, collection, *args, **kwargs):
            if collection == f"{live.name}_r2" and state["step"] < 3:
                write_as_plain()
                live.write()
            super().upsert(collection, *args, **kwargs)

        def flush(self, collection):
            write_as_plain()
            live.write()
            super().flush(collection)

        def point_alias(self, alias, collection):
            live.write()
            super().point_alias(alias, collection)

        def chunk_rows(self, source):
            return 60

    done = refresh(Writing(live.backend.client()), live.alias, QueryBank(live.other))
    assert state["step"] >= 3
    assert done.collection == f"{live.name}_r2"
    read = live.read()
    assert read.keys() == live.rows.keys()
    live.assert_found(live.other)
    rows = live.client.query(
        live.alias, filter="group >= 100", output_fields=["group"], consistency_level="Strong"
    )
    assert {row["id"]: row["group"] for row in rows} == groups


@pytest.mark.lite_only
def test_a_further_profile_is_a_copy_with_its_columns(live):
    width = live.store.info(live.name).state.layout.width
    for number in range(1, 6):
        bank = QueryBank(live.other[: 20 + number])
        done = refresh(
            live.store, live.alias, Recipe(bank, estimator=NNN(K)), profile=f"image {number}"
        )
        assert (done.action, done.reason) == ("full", "the profile is new")
    state = live.store.info(live.alias).state
    assert (len(state.profiles), state.active, state.slots) == (6, "default", 6)
    assert state.layout.width > width
    live.write()
    live.assert_found(live.bank)
    items = np.array(list(live.rows.values()))
    for number in (1, 5):
        [hits] = live.client.search(
            live.alias, data=list(live.query), limit=len(items), profile=f"image {number}"
        )
        profile = state.profiles[f"image {number}"]
        biases = nnn(live.other[: 20 + number], items, live.metric, K, 0.75)
        wanted = similarity(live.query, items, live.metric)[0] - biases + profile.mean_bias
        found = {hit["id"]: hit["distance"] for hit in hits}
        np.testing.assert_allclose([found[key] for key in live.rows], wanted, atol=3e-5)


@pytest.mark.lite_only
def test_a_killed_refresh_of_a_new_profile_is_continued_by_name_or_without(live, monkeypatch):
    def fail(*args):
        raise StoreError("the connection broke")

    bank = QueryBank(live.other)
    with monkeypatch.context() as patched:
        patched.setattr(MilvusStore, "flush", fail)
        with pytest.raises(StoreError):
            refresh(live.store, live.alias, Recipe(bank, estimator=NNN(K)), profile="image")
    assert list(live.store.info(live.alias).state.profiles) == ["default"]
    done = refresh(live.store, live.alias)
    assert (done.action, done.reason) == ("full", "one was not finished")
    state = live.store.info(live.alias).state
    assert (list(state.profiles), state.active) == (["default", "image"], "default")
    live.assert_found(live.bank)


@pytest.mark.lite_only
def test_who_has_no_room_for_a_copy_is_told_of_enable(live, monkeypatch):
    def fail(*args):
        raise StoreError("insert failed: quota exceeded[reason=disk quota exceeded]")

    with monkeypatch.context() as patched:
        patched.setattr(MilvusStore, "flush", fail)
        with pytest.raises(StoreError, match=r"quota exceeded.*has no room.*\(enable\)"):
            refresh(live.store, live.alias, QueryBank(live.other))
    live.assert_found(live.bank)
    assert refresh(live.store, live.alias).action == "full"
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_two_fields_are_refreshed_one_by_one_and_taken_back(lite):
    rng = np.random.default_rng(3)
    fields = {"text": 8, "image": 12}
    items = {name: vectors(rng, 80, dim) for name, dim in fields.items()}
    banks = {name: vectors(rng, 40, dim) for name, dim in fields.items()}
    others = {name: vectors(rng, 50, dim) for name, dim in fields.items()}
    client, store = lite.hubness_client(), lite.store()
    name, alias = lite.name("two"), lite.name("live")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    index = client.prepare_index_params()
    for field, dim in fields.items():
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=dim)
        index.add_index(field, index_type="FLAT", metric_type="IP")
    corrections = [
        CorrectionConfig(Recipe(QueryBank(banks[field]), estimator=NNN(K)), anns_field=field)
        for field in fields
    ]
    client.create_collection(
        name,
        schema=schema,
        index_params=index,
        consistency_level="Strong",
        hubness=corrections,
    )
    client.insert(name, [{"id": i, **{f: items[f][i] for f in fields}} for i in range(80)])
    store.point_alias(alias, name)

    def assert_found(**in_use):
        states = store.info(alias).states
        for field, bank in in_use.items():
            query = vectors(np.random.default_rng(9), 1, fields[field])
            biases = nnn(bank, items[field], "IP", K, 0.75)
            biases -= states[field].profile.mean_bias
            wanted = similarity(query, items[field], "IP")[0] - biases
            [hits] = client.search(alias, data=list(query), anns_field=field, limit=80)
            found = {hit["id"]: hit["distance"] for hit in hits}
            np.testing.assert_allclose([found[i] for i in range(80)], wanted, atol=3e-5)

    assert_found(**banks)
    for field in fields:
        done = refresh(store, alias, QueryBank(others[field]), field=field)
        row = int(field == "image")
        items["text"][row] = vectors(rng, 1, fields["text"])[0]
        client.upsert(alias, [{"id": row, **{f: items[f][row] for f in fields}}])
    assert done.dropped == (), "the first collection is its owner's"
    assert_found(**others)
    assert rollback(store, alias).source == f"{name}_r2"
    assert_found(text=others["text"], image=banks["image"])
    assert rollback(store, alias).source == name
    assert_found(**banks)

    # Of two refreshes of different fields, only the last can be taken back once the copy between is gone.
    kept = [refresh(store, alias, QueryBank(others[f]), field=f, keep_former=0) for f in fields]
    assert kept[1].dropped == (kept[0].collection,)
    assert_found(**others)
    with pytest.raises(WrongPhase):
        rollback(store, alias)


@of_a_copy
@pytest.mark.lite_only
def test_what_cannot_be_copied_is_refused_before_anything_is_written(live, monkeypatch):
    monkeypatch.setattr(
        MilvusStore, "obstacles", lambda *_: ["auto_id: no upsert keeps the key: enable corrects"]
    )
    before = set(live.store.collection_names())
    for plan in (True, False):
        with pytest.raises(CannotMigrate, match=r"which cannot be copied: auto_id.*enable"):
            refresh(live.store, live.alias, QueryBank(live.other), plan=plan)
    assert set(live.store.collection_names()) == before
    assert refresh(live.store, live.alias).action == "none"


@pytest.mark.lite_only
def test_sampled_queries_are_those_of_the_copy_too(live):
    start_sampling(live.store, live.alias, rate=1.0)
    client = live.backend.hubness_client()
    for query in live.other[:30]:
        client.search(live.alias, data=[query], limit=3)
    client.close()
    sampled = sampled_bank(live.store, live.alias)
    # Each takes a random place, so that two may share one.
    assert 25 <= len(sampled) <= 30
    refresh(live.store, live.alias, QueryBank(live.other))
    again = sampled_bank(live.store, live.alias)
    assert {row.tobytes() for row in again.vectors} == {row.tobytes() for row in sampled.vectors}


@pytest.mark.long
@pytest.mark.lite_only
def test_pairs_are_measured_among_all_rows_also_beyond_the_sample(lite):
    """A sample has 50,000 rows, among which right ones come first more often."""
    items, queries, right = hubby_gallery(rows=MOST_JUDGED_ROWS + 10_000, queries=1_000)
    bank, pairs = QueryBank(queries[:600]), slice(600, 1_000)
    name = born(lite, items, bank, "IP", estimator=NNN(K))
    live = aliased(lite.store(), name)
    judgements = Judgements.of(queries[pairs], right[pairs])
    judged = refresh(
        lite.store(),
        live,
        Recipe(estimator=NNN(2 * K), queries=queries[pairs]),
        judgements=judgements,
        plan=True,
    ).judged
    scores = queries[pairs].astype(float) @ items.T.astype(float)
    assert judged.measured_rows == len(items) > judged.items
    assert judged.measured["raw"] == pytest.approx(
        (scores.argmax(1) == right[pairs]).mean(), abs=1e-4
    )
    for name_of, k in (("old", K), ("new", 2 * K)):
        biases = NNN(k).fit(bank).bias(items)
        wanted = ((scores - biases).argmax(1) == right[pairs]).mean()
        assert judged.measured[name_of] == pytest.approx(wanted, abs=0.005)
