"""From a plain collection to its corrected copy and revert: what holds on every database."""

import json
import threading

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    AlreadyCorrected,
    InvalidParameter,
    NoMigration,
    QueryBank,
    Recipe,
    ResumeRefused,
    StoreError,
    VerificationFailed,
    WrongPhase,
    clean,
    cutover,
    migrate,
    plan_correction,
    resume,
    rollback,
)
from milvus_hubness.correction.state import PROPERTY
from milvus_hubness.jobs.common.progress import Events
from milvus_hubness.jobs.migration import switching
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.support.galleries import as_distance, nnn, similarity, vectors
from tests.support.recipes import as_plan

DIM, ITEMS, K = 8, 60, 4
OURS = {LEDGER, "hubness_state"}
"""Collections that stay where they once were needed."""
OTHER_METRICS = {"lite": "IP", "qdrant-states": "L2"}


class Small:
    """A plain collection and a bank to correct it by."""

    def __init__(self, database, metric="IP", items=ITEMS):
        rng = np.random.default_rng(5)
        self.database, self.metric = database, metric
        self.items, self.bank, self.query = (vectors(rng, n, DIM) for n in (items, 40, 1))
        self.numbers = {database.key(i): i for i in range(1_000)}
        self.name = database.fill(self.items, metric, keys=[database.key(i) for i in range(items)])
        self.target, self.store = f"{self.name}_hubness", database.store()

    def plan(self, **options):
        estimator = options.pop("estimator", NNN(K))
        return plan_correction(
            self.store, self.name, **as_plan(QueryBank(self.bank), estimator=estimator, **options)
        )

    def row(self, number, vector, group=0):
        return {"id": self.database.key(number), "vector": vector, "group": group, "note": "new"}

    def rows(self, name):
        """(group, note) of each number, and the vectors, as one client or the other shows them."""
        read = self.database.application().query(
            name, filter="group >= 0", output_fields=["*"], limit=1_000
        )
        numbered = {self.numbers[row["id"]]: row for row in read}
        result = {number: (row["group"], row["note"]) for number, row in numbered.items()}
        return result, {number: np.float32(row["vector"]) for number, row in numbered.items()}

    def assert_corrected(self, name):
        """Scores are those of the definition, in float64."""
        _, items = self.rows(name)
        found = self.database.scores(name, self.query[0], len(items))
        numbers, there = list(items), np.array(list(items.values()))
        state = self.store.info(name).state
        biases = nnn(self.bank, there, self.metric, K, 0.75) - state.profile.mean_bias
        wanted = as_distance(similarity(self.query, there, self.metric) - biases, self.metric)[0]
        got = [found[self.database.key(number)] for number in numbers]
        np.testing.assert_allclose(got, wanted, atol=3e-5)

    def assert_same(self, found, wanted):
        assert found[0] == wanted[0]
        for number, vector in wanted[1].items():
            mine, theirs = found[1][number], vector
            if self.metric == "COSINE":
                mine, theirs = (each / np.linalg.norm(each) for each in (mine, theirs))
                np.testing.assert_allclose(mine, theirs, rtol=1e-5)
            else:
                assert np.array_equal(mine, theirs), "bit for bit"


@pytest.mark.lite_only
def test_a_plan_writes_nothing(database):
    small = Small(database)
    before = database.database.collections()
    told = small.plan().to_dict()
    assert database.database.collections() == before
    assert (told["target"], told["width"], told["rows"]) == (small.target, 16, ITEMS)
    assert told["bank"]["queries"] == 40
    json.dumps(told)


@pytest.mark.beyond_contract
def test_the_name_moves_over_and_back_with_what_was_written(database):
    small = Small(database, OTHER_METRICS.get(database.kind, "COSINE"))
    store, alias = small.store, f"{small.name}_live"
    store.point_alias(alias, small.name)
    before = small.rows(alias)
    assert migrate(store, small.plan(alias=alias)).alias == alias
    assert store.alias_target(alias) == small.target
    small.assert_same(small.rows(alias), before)
    small.assert_corrected(alias)
    new, client = vectors(np.random.default_rng(9), 2, DIM), database.application()
    client.insert(alias, [small.row(999, new[0])])
    client.upsert(alias, [small.row(3, new[1], group=7)])
    client.delete(alias, ids=[database.key(4)])
    small.assert_corrected(alias)
    wanted = small.rows(alias)
    assert wanted[0].keys() == {*range(ITEMS), 999} - {4}
    assert wanted[0][3] == (7, "new")
    with pytest.raises(AlreadyCorrected, match="switched"):
        small.plan()
    done = rollback(store, alias)
    assert (done.alias, done.source, store.alias_target(alias)) == (alias, small.name, small.name)
    assert (done.carried, store.info(small.target).dual_write) == (3, None)
    small.assert_same(small.rows(alias), wanted)
    with pytest.raises(WrongPhase, match="rolled back"):
        rollback(store, alias)
    with pytest.raises(NoMigration):
        rollback(store, "no_such_alias")
    client.delete(alias, ids=[database.key(999)])
    resume(store, small.name)
    cutover(store, small.name, alias=alias)
    assert verify(store, alias).rows == ITEMS - 1
    small.assert_corrected(alias)
    store.drop_alias(alias)


class Watched:
    """A migration whose name moves at once, and what its listeners see of it."""

    def __init__(self, small):
        self.small, self.alias = small, f"{small.name}_live"
        self.seen, self.compared = [], []
        self.replies = {}
        small.store.point_alias(self.alias, small.name)

    def listen(self, event):
        if event.name == "catching-up":
            self.compared.append((event.facts["pass"], event.facts["rows"], self.is_required))
        else:
            self.seen.append(event.name)
        self.replies.pop(event.name, lambda: None)()

    @property
    def is_required(self):
        """Whether writes to the source fail unless they reach the copy."""
        dual_write = self.small.store.info(self.small.name).dual_write
        return dual_write is not None and dual_write.required

    def migrate(self, store=None, **options):
        plan = self.small.plan(alias=self.alias)
        events = Events([self.listen])
        return migrate(store or self.small.store, plan, client_ttl=0, events=events, **options)

    def comparisons(self):
        """The number of each, its rows, and whether writes had to reach the copy all the time."""
        last = {number: rows for number, rows, _ in self.compared}
        return [
            (number, rows, all(required for n, _, required in self.compared if n == number))
            for number, rows in last.items()
        ]

    def leads_to(self):
        return self.small.store.alias_target(self.alias)


@pytest.mark.lite_only
def test_a_name_that_moves_at_once_takes_one_comparison_of_all_rows(database):
    """Meanwhile a write that misses the copy fails, so that none is missing after it."""
    small = Small(database)
    watched = Watched(small)
    done = watched.migrate()
    assert watched.comparisons() == [(1, ITEMS, True)]
    assert (done.phase, done.passes, watched.leads_to()) == ("switched", 1, small.target)
    small.store.drop_alias(watched.alias)


@pytest.mark.lite_only
def test_a_copy_that_fails_its_verification_keeps_no_write_back(database):
    class Blind(database.base):
        def nearest(self, collection, field, vectors, k):
            found = super().nearest(collection, field, vectors, k)
            return [[] for _ in found] if collection.endswith("_hubness") else found

    small = Small(database)
    watched = Watched(small)
    with pytest.raises(VerificationFailed, match="miss rows"):
        watched.migrate(database.store(Blind))
    assert (watched.leads_to(), watched.is_required) == (small.name, False)
    assert watched.comparisons() == [(1, ITEMS, True)]
    assert small.store.info(small.name).dual_write.collection == small.target

    assert watched.migrate().phase == "switched"
    assert watched.leads_to() == small.target
    small.store.drop_alias(watched.alias)


@pytest.mark.lite_only
@pytest.mark.parametrize("at", ["catching-up", "verified", "before-cutover"])
def test_a_run_that_is_stopped_before_the_switch_keeps_no_write_back(database, at):
    """Though it was about to move the name, and writes had to reach the copy."""
    small = Small(database)
    watched = Watched(small)

    def stop():
        assert watched.is_required
        raise KeyboardInterrupt

    watched.replies = {at: stop}
    with pytest.raises(KeyboardInterrupt):
        watched.migrate()
    assert (watched.leads_to(), watched.is_required) == (small.name, False)

    assert watched.migrate().phase == "switched"
    assert watched.leads_to() == small.target
    small.store.drop_alias(watched.alias)


@pytest.mark.lite_only
def test_a_run_that_is_stopped_while_clients_are_waited_for_keeps_no_write_back(
    database, monkeypatch
):
    small = Small(database)
    watched = Watched(small)

    def wait(*facts):
        if watched.is_required:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(switching, "wait_seconds", wait)
        with pytest.raises(KeyboardInterrupt):
            watched.migrate()
    assert (watched.leads_to(), watched.is_required) == (small.name, False)
    clean(small.store, small.name, drop=small.target)
    small.store.drop_alias(watched.alias)


@pytest.mark.lite_only
def test_a_cutover_that_is_postponed_during_the_comparison_waits(database):
    """As by the control file: writes need not reach the copy until it goes on."""
    small = Small(database)
    watched = Watched(small)
    release = threading.Event()
    release.set()
    required = []

    def go_on():
        required.append(watched.is_required)
        assert watched.leads_to() == small.name
        release.set()

    watched.replies = {"verified": release.clear, "postponed": go_on}
    assert watched.migrate(release=release).phase == "switched"
    assert watched.seen[-4:] == ["verified", "postponed", "before-cutover", "after-cutover"]
    assert required == [False]
    assert watched.comparisons() == [(1, ITEMS, True), (2, ITEMS, True)]
    small.store.drop_alias(watched.alias)


@pytest.mark.lite_only
def test_another_name_than_the_one_that_moved_is_refused(database):
    """Nothing would move, and the caller would take it for done."""
    small = Small(database)
    store, alias = small.store, f"{small.name}_live"
    other = small.plan(alias=f"{small.name}_other")
    migrate(store, small.plan(alias=alias))

    for call in (
        lambda: cutover(store, small.name, alias=f"{small.name}_other"),
        lambda: cutover(store, small.target, rename=True),
        lambda: resume(store, small.name, alias=f"{small.name}_other"),
        lambda: migrate(store, other),
    ):
        with pytest.raises(InvalidParameter, match=rf"is 'switched' with --alias {alias}: repeat"):
            call()
    assert store.alias_target(f"{small.name}_other") is None

    assert cutover(store, small.name, alias=alias).alias == alias
    assert resume(store, small.name).alias == alias
    store.drop_alias(alias)


@pytest.mark.lite_only
@pytest.mark.parametrize(
    ("at", "error"),
    [("upsert", StoreError), ("flush", KeyboardInterrupt), ("write_property", StoreError)],
)
def test_what_failed_carries_on_or_is_taken_back_whole(database, at, error):
    class Failing(database.base):
        def flush(self, *args):
            fail("flush")
            super().flush(*args)

        def upsert(self, *args, **options):
            fail("upsert")
            super().upsert(*args, **options)

        def write_property(self, collection, name, record):
            if name == PROPERTY:
                fail("write_property")
            super().write_property(collection, name, record)

    def fail(where):
        if where == at:
            raise error("the connection broke")

    small = Small(database)
    before, described = database.database.collections(), database.database.described(small.name)
    plan, store = small.plan(), small.store
    with pytest.raises(error):
        migrate(database.store(Failing), plan)
    clean(store, small.name, drop=plan.body.target)
    assert database.database.collections() - OURS == before - OURS
    assert database.database.described(small.name) == described
    assert small.name not in {each.source for each in Ledger(store).migrations()}
    with pytest.raises(error):
        migrate(database.store(Failing), plan)
    assert migrate(store, plan).rows == ITEMS
    small.assert_corrected(plan.body.target)


@pytest.mark.lite_only
def test_one_that_broke_is_carried_on_with_and_nothing_is_copied_twice(database):
    count, written = 200, []

    class Counting(database.base):
        def chunk_rows(self, source):
            return 16

        def upsert(self, collection, batch, field, **options):
            super().upsert(collection, batch, field, **options)
            if collection.endswith("_hubness"):
                written.append(len(batch))

    class Breaking(Counting):
        def upsert(self, collection, batch, field, **options):
            if len(written) == 3:
                raise StoreError("the connection broke")
            super().upsert(collection, batch, field, **options)

    small = Small(database, items=count)
    small.store = database.store(Counting)
    with pytest.raises(StoreError):
        migrate(database.store(Breaking), small.plan())
    assert Ledger(small.store).find(small.name).phase == "copying"
    other = small.plan(estimator=NNN(5))
    assert "(estimator: " in " ".join(other.remarks)
    with pytest.raises(ResumeRefused, match="estimator"):
        migrate(small.store, other)
    done = resume(database.store(Counting), small.name)
    assert (done.phase, done.verified["rows"]) == ("verified", count)
    assert sum(written) == count
    assert len(written) > 10, "chunks were small enough for this to say anything"
    small.assert_corrected(done.target)


@pytest.mark.lite_only
def test_a_copy_begun_otherwise_can_be_begun_anew(database):
    class Breaking(database.base):
        def flush(self, *args):
            raise StoreError("the connection broke")

    small = Small(database)
    with pytest.raises(StoreError):
        migrate(database.store(Breaking), small.plan())
    other = plan_correction(
        small.store, small.name, Recipe(QueryBank(small.bank[:30]), estimator=NNN(K))
    )
    [remark] = [remark for remark in other.remarks if "other options" in remark]
    assert "(another bank)" in remark
    assert "--restart" in remark
    with pytest.raises(ResumeRefused, match="bank"):
        migrate(small.store, other)
    result = migrate(small.store, small.plan(estimator=NNN(5), restart=True))
    assert result.rows == ITEMS
    assert small.store.info(result.target).state.profile.estimator["k"] == 5
