"""New biases by a copy that takes over the alias, beside writers, and from wherever it was left."""

from types import SimpleNamespace

import numpy as np
import pytest

import milvus_hubness
from milvus_hubness import (
    NNN,
    QueryBank,
    StoreError,
    WrongPhase,
    clean,
    migrate,
    plan_migration,
    rollback,
)
from milvus_hubness.jobs.migration import ledger
from milvus_hubness.jobs.refresh import plan as refresh_plan
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.galleries import nnn, plain_collection, similarity, vectors

DIM, ITEMS, K = 12, 150, 8


def refresh(store, name, **options):
    """Refresh by a copy even though there are few rows."""
    return milvus_hubness.refresh(store, name, **{"rebuild_rows": 1, **options})


class Live:
    """A corrected collection behind an alias, rows of which are of any length."""

    def __init__(self, backend, metric="COSINE"):
        rng = np.random.default_rng(8)
        self.backend, self.store, self.metric = backend, backend.store(), metric
        self.rows = dict(enumerate(vectors(rng, ITEMS, DIM)))
        self.bank, self.other = vectors(rng, 60, DIM), vectors(rng, 70, DIM)
        self.query = vectors(rng, 1, DIM)
        source, self.alias = backend.name("rebuilt"), backend.name("live")
        plain_collection(backend.client(), source, np.array(list(self.rows.values())), metric)
        plan = plan_migration(
            self.store,
            source,
            QueryBank(self.bank),
            estimator=NNN(K),
            alias=self.alias,
            restart=False,
        )
        self.name = migrate(self.store, plan).target
        backend.made += [f"{self.name}_r{number}" for number in (2, 3)]
        self.client = backend.hubness_client()

    def read(self):
        found = self.client.query(self.alias, filter="id >= 0", consistency_level="Strong")
        return {row["id"]: np.float32(row["vector"]) for row in found}

    def assert_found(self, bank):
        items = np.array(list(self.rows.values()))
        mean_bias = self.store.info(self.alias).state.profile.mean_bias
        wanted = (
            similarity(self.query, items, self.metric)[0]
            - nnn(bank, items, self.metric, K, 0.75)
            + mean_bias
        )
        [hits] = self.client.search(self.alias, data=list(self.query), limit=len(items) + 50)
        assert {hit["id"] for hit in hits} == set(self.rows)
        found = {hit["id"]: hit["distance"] for hit in hits}
        np.testing.assert_allclose([found[key] for key in self.rows], wanted, atol=3e-5)

    def write(self):
        rng = np.random.default_rng(len(self.rows))
        fresh = vectors(rng, 3, DIM)
        new = max(self.rows) + 1
        lines = [
            {"id": key, "vector": row, "group": 1}
            for key, row in zip((5, new), fresh, strict=False)
        ]
        self.client.upsert(self.alias, lines)
        gone = min(key for key in self.rows if key > 10)
        self.client.delete(self.alias, ids=[gone])
        self.rows |= {5: fresh[0], new: fresh[1]}
        del self.rows[gone]


@pytest.fixture
def live(backend):
    return Live(backend)


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
    planned = refresh(store, live.alias, bank=QueryBank(live.other), plan=True)
    assert (planned.action, planned.planned) == ("rebuilt", True)
    assert f"100% of {ITEMS} rows change: a copy takes over the alias" in planned.reason
    assert store.alias_target(live.alias) == live.name
    done = refresh(store, live.alias, bank=QueryBank(live.other))
    assert (done.action, done.collection, done.epoch) == ("rebuilt", f"{live.name}_r2", 2)
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
        refresh(Breaking(live.backend.client()), live.alias, bank=QueryBank(live.other))
    assert live.store.alias_target(live.alias) == live.name
    live.write()
    live.assert_found(live.bank)
    again = {"bank": QueryBank(live.other)} if asked_again else {}
    done = refresh(live.store, live.alias, **again)
    assert (done.action, done.collection, done.reason) == (
        "rebuilt",
        f"{live.name}_r2",
        "one was not finished",
    )
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_what_was_left_before_the_copy_was_made_is_carried_on_with(live, monkeypatch):
    def fail(*args):
        raise StoreError("the connection broke")

    with monkeypatch.context() as patched:
        patched.setattr(refresh_plan, "opened", fail)
        with pytest.raises(StoreError):
            refresh(live.store, live.alias, bank=QueryBank(live.other))
    assert not live.store.exists(f"{live.name}_r2")
    done = refresh(live.store, live.alias)
    assert (done.action, done.collection) == ("rebuilt", f"{live.name}_r2")
    live.assert_found(live.other)


@pytest.mark.lite_only
def test_a_switch_of_which_only_the_alias_was_moved_is_finished(live):
    class Breaking(MilvusStore):
        def write_property(self, collection, name, record):
            if name == DUAL_WRITE_PROPERTY and record is None:
                raise StoreError("the connection broke")
            super().write_property(collection, name, record)

    with pytest.raises(StoreError):
        refresh(Breaking(live.backend.client()), live.alias, bank=QueryBank(live.other))
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


@pytest.mark.parametrize(
    ("aliases", "is_found"), [(("live",), True), ((), False), (("other",), False)]
)
def test_a_switch_is_finished_only_of_the_copy_that_the_alias_leads_to(aliases, is_found):
    left = SimpleNamespace(
        id="1", field="vector", target="copy_r2", phase="switching", arguments={"alias": "live"}
    )
    copy = SimpleNamespace(
        name="copy_r2", aliases=aliases, states={"vector": SimpleNamespace(migration="1")}
    )
    assert (refresh_plan.half_switched([left], copy) is left) == is_found
    other = SimpleNamespace(
        name="copy_r2", aliases=aliases, states={"vector": SimpleNamespace(migration="2")}
    )
    assert refresh_plan.half_switched([left], other) is None


@pytest.mark.lite_only
def test_another_bank_takes_its_place(live, monkeypatch):
    def fail(*args):
        raise StoreError("the connection broke")

    with monkeypatch.context() as patched:
        patched.setattr(refresh_plan, "opened", fail)
        with pytest.raises(StoreError):
            refresh(live.store, live.alias, bank=QueryBank(live.other))
    third = vectors(np.random.default_rng(5), 40, DIM)
    done = refresh(live.store, live.alias, bank=QueryBank(third), rebuild_share=2.0)
    assert done.action == "full"
    live.assert_found(third)
    assert not live.store.exists(f"{live.name}_r2")
    assert [
        each.target for each in ledger.Ledger(live.store).migrations() if each.source == live.name
    ] == []


@pytest.mark.lite_only
def test_it_is_told_why_rows_are_upserted(live):
    def told(**options):
        return refresh(
            live.store, live.alias, bank=QueryBank(live.other), plan=True, **options
        ).reason

    assert "change: they are upserted" in told(rebuild_share=1.5)
    assert "fewer than 10,000 in all" in told(rebuild_rows=10_000)
    by_name = refresh(live.store, live.name, bank=QueryBank(live.other), plan=True)
    assert "by its alias" in by_name.reason
    live.store.drop_alias(live.alias)
    assert (
        "no alias leads to"
        in refresh(live.store, live.name, bank=QueryBank(live.other), plan=True).reason
    )


@pytest.mark.lite_only
def test_a_former_copy_can_be_dropped_and_the_way_back_stays(live):
    done = refresh(live.store, live.alias, bank=QueryBank(live.other))
    assert done.to_dict()["former_copy"] == live.name
    [source] = {m.source for m in ledger.Ledger(live.store).migrations() if m.target == live.name}
    clean(live.store, live.alias, drop=live.name)
    assert not live.store.exists(live.name)
    live.write()
    live.assert_found(live.other)
    assert rollback(live.store, live.alias).source == source
    assert set(live.read()) == set(live.rows)


@pytest.mark.lite_only
def test_the_migration_before_a_rebuild_is_not_rolled_back_past_newer_writes(live):
    """Only the rows of its own copy would be carried back, which clients no longer write to."""
    done = refresh(live.store, live.alias, bank=QueryBank(live.other))
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
