"""Jobs that overlap with each other, with clients, and with collections that others have made."""

import itertools
import threading
from copy import copy

import numpy as np
import pytest

from milvus_hubness import (
    CSLS,
    NNN,
    AlreadyCorrected,
    Beside,
    CollectionExists,
    CollectionNotFound,
    Copy,
    LeaseHeld,
    NoMigration,
    QueryBank,
    Recipe,
    WrongPhase,
    clean,
    cutover,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    resume,
    rollback,
)
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.refresh.guard import guard_hubs
from milvus_hubness.jobs.refresh.sampling import start_sampling, stop_sampling
from milvus_hubness.jobs.refresh.status import status
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.galleries import nnn, plain_collection, vectors

DIM, ITEMS = 8, 60
CORRECTED = {
    "refresh": lambda case: refresh(case.store, case.copy),
    "cutover": lambda case: cutover(case.store, case.name, alias=case.alias),
    "resume": lambda case: resume(case.store, case.name),
    "run": lambda case: migrate(case.store, case.plan),
    "clean": lambda case: clean(case.store, case.name, drop=case.copy),
    "start sampling": lambda case: start_sampling(case.store, case.copy, rate=0.5),
    "stop sampling": lambda case: stop_sampling(case.store, case.copy),
}
"""Jobs on a verified copy. Each ends well if it is alone."""


class Case:
    """A collection, and its verified copy."""

    def __init__(self, backend, store=None):
        self.backend, rng = backend, np.random.default_rng(5)
        self.client, self.store = backend.client(), store or backend.store()
        self.name, self.alias = backend.name(), backend.name("live")
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 40, DIM)
        plain_collection(self.client, self.name, self.items, "IP")
        self.copy = f"{self.name}_hubness"

    def migrated(self):
        self.plan = plan_correction(
            self.store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(4))
        )
        migrate(self.store, self.plan)
        return self


class Stopping(MilvusStore):
    """Waits before it gives up a lease until it is told to go on."""

    def __init__(self, client):
        super().__init__(client)
        self.stops, self.arrived, self.go_on = False, threading.Event(), threading.Event()

    def unfence(self, alias):
        if self.stops:
            self.arrived.set()
            assert self.go_on.wait(60)
        super().unfence(alias)


@pytest.mark.parametrize("first", CORRECTED)
def test_while_one_job_is_at_work_no_other_begins(lite, first):
    """Every pair of jobs on the same collection, and what the first one does ends well."""
    store = Stopping(lite.client())
    case = Case(lite, store).migrated()
    store.stops = True
    failures = []

    def run():
        try:
            CORRECTED[first](case)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert store.arrived.wait(30), failures
    other = copy(case)
    other.store = lite.store()
    before = other.store.info(case.copy).states if first != "clean" else None
    for second, job in CORRECTED.items():
        # A clean that has begun has put its migration back to the start.
        with pytest.raises((LeaseHeld, NoMigration, CollectionNotFound, WrongPhase)) as refused:
            job(other)
        assert first == "clean" or "holds the lease on" in str(refused.value), second
    assert first == "clean" or other.store.info(case.copy).states == before
    store.go_on.set()
    thread.join(60)
    assert not failures


def test_of_two_plans_for_a_side_collection_the_second_drops_nothing(lite):
    """Point 4: the second one dropped the side collection in use, after which every search failed."""
    case = Case(lite)
    lite.made += [f"{case.name}__bias_a", f"{case.name}__bias_b"]
    plans = [
        plan_correction(
            case.store,
            case.name,
            Recipe(QueryBank(case.bank), estimator=NNN(4), verdict="warn"),
            Beside(),
        )
        for _ in range(2)
    ]
    enable(case.store, plans[0])
    with pytest.raises(AlreadyCorrected, match="since this plan was made: plan again"):
        enable(case.store, plans[1])
    client = lite.hubness_client()
    client.upsert(case.name, {"id": 3, "vector": case.items[4], "group": 1})
    [hits] = client.search(case.name, data=[case.items[3]], limit=5)
    assert len(hits) == 5


@pytest.mark.parametrize("kind", ["rename", "alias"])
def test_a_state_that_a_job_writes_before_a_cutover_is_kept(lite, kind):
    """Point 4: the cutover wrote a state that it had read before."""
    case = Case(lite)
    seen = []

    class Guarding(MilvusStore):
        """A job changes the state of the copy after the cutover has found its migration."""

        def fenced(self, fences):
            if not seen:
                seen.append("guarded")
                guard_hubs(lite.store(), case.copy, "warn")
            return super().fenced(fences)

    case.migrated()
    how = {"rename": True} if kind == "rename" else {"alias": case.alias}
    cutover(Guarding(lite.client()), case.name, **how)
    assert lite.store().info(case.copy).state.on_hub == "warn"
    rollback(case.store, case.copy)
    assert lite.store().info(case.copy).state.on_hub == "warn"


def test_a_refresh_is_of_the_collection_that_the_alias_leads_to_once_the_lease_is_held(lite):
    """A refresh that ended meanwhile had moved the alias, and the former collection was refreshed."""
    former, other = Case(lite).migrated(), Case(lite).migrated()
    former.client.create_alias(former.copy, former.alias)

    class Moving(MilvusStore):
        def fenced(self, fences):
            self.client.alter_alias(other.copy, former.alias)
            return super().fenced(fences)

    done = refresh(Moving(lite.client()), former.alias, Recipe(estimator=CSLS(4)), force=True)
    assert (done.collection, done.former_copy) == (f"{other.copy}_r2", other.copy)
    assert not lite.store().exists(f"{former.copy}_r2")


def test_enabling_undoes_nothing_that_clients_write_meanwhile(lite):
    """Point 3: an update was reverted, a deleted row came back, and it reported success."""
    case = Case(lite)
    lite.made += [f"{case.name}__bias_a", f"{case.name}__bias_b"]
    application, fresh = lite.hubness_client(), vectors(np.random.default_rng(6), 4, DIM)
    counts = itertools.count()

    class Beset(MilvusStore):
        """Clients write before rows are rewritten, before biases are written beside them, and afterwards."""

        def upsert(self, collection, *args, **options):
            self.interfere()
            super().upsert(collection, *args, **options)
            self.interfere()

        def interfere(self):
            number = next(counts)
            if number < 4:
                row = {"id": 10 + number, "vector": fresh[number], "group": 77}
                application.upsert(case.name, row)
                application.delete(case.name, ids=[20 + number])
                application.insert(case.name, {**row, "id": 900 + number})

    store = Beset(lite.client())
    plan = plan_correction(
        store, case.name, Recipe(QueryBank(case.bank), estimator=NNN(4), verdict="warn"), Beside()
    )
    enable(store, plan)
    assert next(counts) > 4
    rows = {row["id"]: row for row in application.query(case.name, filter="id >= 0", limit=1_000)}
    assert {20, 21, 22, 23}.isdisjoint(rows), "a deleted row came back"
    assert rows.keys() == {*range(20), *range(24, 60), *range(900, 904)}
    items = {i: case.items[i] for i in range(60)} | {
        i + j: fresh[j] for i in (10, 900) for j in range(4)
    }
    for key, row in rows.items():
        np.testing.assert_array_equal(np.float32(row["vector"]), items[key], err_msg=str(key))
    assert [rows[10 + i]["group"] for i in range(4)] == [77] * 4
    assert status(store, case.name).pending == 0
    state = application.hubness_state(case.name)
    biases = nnn(case.bank, np.array(list(items.values())), "IP", 4, 0.75) - state.profile.mean_bias
    wanted = dict(zip(items, biases, strict=True))
    [hits] = application.search(case.name, data=[case.bank[0]], limit=100)
    for hit in hits:
        score = float(case.bank[0] @ items[hit["id"]]) - wanted[hit["id"]]
        assert hit["distance"] == pytest.approx(score, abs=3e-5)
    disable(store, case.name)


def strangers(case, name):
    """A collection that somebody else made under this name."""
    plain_collection(case.client, name, case.items[:50], "IP")


@pytest.mark.parametrize("how", ["clean", "restart"])
def test_only_a_copy_of_this_migration_is_dropped(lite, how):
    """Point 8: another collection of the target's name was dropped, with its 50 rows."""
    case = Case(lite).migrated()
    case.client.drop_collection(case.copy)
    strangers(case, case.copy)
    recipe = Recipe(case.bank, estimator=NNN(4))
    jobs = {
        "clean": lambda: clean(case.store, case.name, drop=case.copy),
        "restart": lambda: migrate(
            case.store, plan_correction(case.store, case.name, recipe, Copy(restart=True))
        ),
    }
    with pytest.raises(CollectionExists, match="another client created it"):
        jobs[how]()
    assert case.store.count(case.copy) == 50
    assert case.copy not in {each.target for each in Ledger(case.store).migrations()}


def test_a_source_that_was_made_again_is_not_dropped_on_a_server(served):
    case = Case(served).migrated()
    cutover(case.store, case.name, alias=case.alias)
    case.client.drop_collection(case.name)
    strangers(case, case.name)
    with pytest.raises(CollectionExists, match="another client created it since"):
        clean(case.store, case.name, drop=case.name)
    assert case.store.count(case.name) == 50
