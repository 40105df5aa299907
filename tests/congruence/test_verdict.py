"""Every job that takes a bank asks whether it fits, and stops before its first write if it does not."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    CorrectionConfig,
    CorrectionNotRecommended,
    InvalidInput,
    InvalidParameter,
    MigrationOptions,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
    tune,
)
from milvus_hubness.jobs.common import judging
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.refresh.sampling import start_sampling
from milvus_hubness.jobs.store.records import Verdicts
from milvus_hubness.quality.tuning import Judgement
from tests.support.aliases import aliased
from tests.support.databases import OnMilvus
from tests.support.galleries import hubby_gallery
from tests.support.recipes import as_plan

ITEMS, QUERIES, _ = hubby_gallery(rows=300, queries=280)
BANK, REAL = QUERIES[:180], QUERIES[180:]
OTHER_ITEMS = ITEMS[::-1][:150] + np.float32(0.01) * QUERIES[:150]
FOREIGN = np.ascontiguousarray(QUERIES[:180, ::-1])
ALONE = MigrationOptions(no_writers=True)


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """As for users: whoever says nothing demands a verdict."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")


@pytest.fixture
def lite(lite):
    return OnMilvus.of(lite)


def corrected(here, bank=BANK, **options):
    """Return the name of a copy, and the store."""
    store = here.store()
    name = here.fill(ITEMS, "IP")
    plan = plan_correction(store, name, **as_plan(bank, estimator=NNN(8), **options))
    return aliased(store, migrate(store, plan, ALONE).target), store


def named_by(store):
    return set(store.collection_names())


def test_a_bank_that_fits_is_applied_and_its_verdict_is_stored(database):
    store = database.store()
    name = database.fill(ITEMS, "IP")
    plan = plan_correction(store, name, BANK)
    assert plan.chosen.verdict.verdict == "apply"
    assert "half of the bank, for lack of real queries" in plan.chosen.verdict.judged_by
    assert store.info(name).verdicts == Verdicts(), "a plan writes nothing"
    migrate(store, plan, ALONE)
    for collection, in_use in ((name, False), (plan.body.target, True)):
        [told] = status(store, collection).verdicts
        assert told["verdict"] == "apply"
        assert told["bank_fingerprint"] == QueryBank(BANK).fingerprint
        assert told["in_use"] == in_use
        assert "hubs go from" in told["reason"]


@pytest.mark.parametrize("bank", [OTHER_ITEMS, FOREIGN], ids=["items", "foreign"])
def test_a_bank_that_does_not_fit_stops_a_job_before_its_first_write(database, bank):
    store = database.store()
    name = database.fill(ITEMS, "IP")
    before = named_by(store)
    facts = plan_correction(store, name, bank).to_dict()["verdict"]
    assert (facts["verdict"], facts["strength"]) == ("leave it alone", 0)
    jobs = (
        lambda: migrate(store, plan_correction(store, name, bank), ALONE),
        lambda: enable(store, plan_correction(store, name, bank, Beside(0.5))),
    )
    for job in jobs:
        with pytest.raises(CorrectionNotRecommended, match=r"\(verdict='warn' goes on all"):
            job()
    assert named_by(store) == before
    assert store.info(name).verdicts == Verdicts()


def test_who_insists_is_warned(database, caplog):
    store = database.store()
    name = database.fill(ITEMS, "IP")
    plan = plan_correction(store, name, Recipe(FOREIGN, verdict="warn"))
    assert migrate(store, plan, ALONE).phase == "verified"
    assert "the bank is foreign" in caplog.text
    [told] = status(store, name).verdicts
    assert told["verdict"] == "leave it alone"


def test_a_refresh_refuses_a_bank_that_does_not_fit(database):
    name, store = corrected(database)
    before = status(store, name)
    for plan in (True, False):
        done = refresh(store, name, OTHER_ITEMS, plan=plan, client_ttl=0)
        assert done.action == "refused"
        assert "looks like a bank of items" in done.reason
        assert done.to_dict()["verdict"]["verdict"] == "leave it alone"
    assert (status(store, name).epoch, status(store, name).verdicts) == (1, before.verdicts)

    forced = refresh(store, name, OTHER_ITEMS, force=True, client_ttl=0)
    assert forced.action == "full"
    latest = status(store, name).verdicts[0]
    assert (latest["verdict"], latest["in_use"]) == ("leave it alone", True)


def test_a_new_profile_is_judged_too(lite):
    name, store = corrected(lite)
    done = refresh(store, name, FOREIGN, profile="other", client_ttl=0)
    assert done.action == "refused"
    assert status(store, name).profiles == ("default",)


def test_a_small_gallery_is_corrected_at_half_strength_until_real_queries_are_known(lite):
    store = lite.store()
    name = lite.fill(ITEMS[:200], "IP")
    plan = plan_correction(store, name, BANK)
    assert (plan.chosen.verdict.verdict, plan.chosen.strength) == ("not proven", 0.5)
    assert "200 items are too few" in plan.chosen.verdict.reason
    copy = migrate(store, plan, ALONE).target
    assert store.info(copy).state.profile.strength == 0.5
    known = plan_correction(store, lite.fill(ITEMS[:200], "IP"), Recipe(BANK, queries=REAL))
    assert (known.chosen.verdict.verdict, known.chosen.strength) == ("apply", 1.0)


def test_a_weak_bank_lowers_the_strength_until_the_next(lite, monkeypatch):
    weak = Judgement("apply weakly", 0.5, "hubs keep many answers", None)
    monkeypatch.setattr(judging, "judge_bank", lambda *args, **options: weak)
    plan = plan_correction(lite.store(), lite.fill(ITEMS, "IP"), BANK)
    assert plan.chosen.strength == 0.5
    store = lite.store()
    name = aliased(store, migrate(store, plan, ALONE).target)
    monkeypatch.undo()
    monkeypatch.setenv("MILVUS_HUBNESS_VERDICT", "require")
    assert refresh(store, name, BANK[:130], client_ttl=0, force=True).action == "full"
    assert status(store, name).strength == 1.0

    monkeypatch.setattr(judging, "judge_bank", lambda *args, **options: weak)
    assert refresh(store, name, BANK[:90], client_ttl=0, force=True).action == "full"
    assert status(store, name).strength == 0.5


def test_real_queries_decide(lite):
    store, name = lite.store(), lite.fill(ITEMS, "IP")
    plan = plan_correction(store, name, Recipe(BANK, queries=REAL))
    assert plan.chosen.verdict.judged_by == "100 real queries"
    assert plan.chosen.verdict.verdict == "apply"
    plan = plan_correction(store, name, Recipe(FOREIGN, queries=REAL))
    assert "they fall by less than 12%" in plan.chosen.verdict.reason


def test_queries_of_the_bank_are_no_judges_of_it(lite):
    store, name = lite.store(), lite.fill(ITEMS, "IP")
    plan = plan_correction(
        store, name, Recipe(BANK, queries=np.concatenate([BANK[:90], REAL[:10]]))
    )
    assert "half of the bank" in plan.chosen.verdict.judged_by, "ten are left, which are too few"
    plan = plan_correction(
        store, name, Recipe(BANK, queries=np.concatenate([BANK[:90], REAL[:30]]))
    )
    assert plan.chosen.verdict.judged_by == "30 real queries"


def test_queries_that_clients_sampled_stand_in_for_given_ones(lite):
    name, store = corrected(lite)
    start_sampling(store, name, rate=1.0)
    client = lite.application()
    for query in REAL[:60]:
        client.search(name, data=[query], limit=3)
    client.close()
    done = refresh(store, name, BANK[:130], plan=True)
    assert 50 <= done.verdict.real_queries <= 60
    assert done.judged.real_queries
    assert tune(store, name, BANK[:130]).real_queries == done.verdict.real_queries


def test_a_stored_verdict_is_asked_before_a_new_one_is_made(lite):
    store, name = lite.store(), lite.fill(ITEMS, "IP")
    tune(store, name, BANK)
    [tuned] = store.info(name).verdicts.records
    assert plan_correction(store, name, BANK).chosen.verdict == tuned
    judged = plan_correction(store, name, Recipe(BANK, queries=REAL)).chosen.verdict
    assert judged.real_queries == 100, "real queries know better than a verdict without labels"


def test_an_interrupted_run_goes_on_as_it_began(lite):
    store, name = lite.store(), lite.fill(ITEMS, "IP")
    plan = plan_correction(store, name, Recipe(FOREIGN, verdict="warn"))
    with pytest.raises(KeyboardInterrupt):
        migrate(store, plan, MigrationOptions(no_writers=True), progress=_raising_after_the_bank())
    assert Ledger(store).of_target(plan.body.target).phase == "copying"
    again = plan_correction(store, name, FOREIGN)
    assert migrate(store, again, ALONE).phase == "verified"


def _raising_after_the_bank():
    def progress(doing, done, of):
        if doing.startswith("copy"):
            raise KeyboardInterrupt

    return progress


def test_no_verdict_on_a_few_rows(lite):
    store, name = lite.store(), lite.fill(ITEMS[:40], "IP")
    plan = plan_correction(store, name, Recipe(BANK, estimator=NNN(4)))
    assert plan.chosen.verdict is None
    assert any("too few rows to judge the bank" in remark for remark in plan.remarks)
    assert migrate(store, plan, ALONE).phase == "verified"


def test_a_new_collection_asks_with_its_target_bank(lite):
    client = lite.application()
    name = lite.name()
    bad = CorrectionConfig(Recipe(FOREIGN, target_bank=ITEMS))
    before = set(client.list_collections())
    with pytest.raises(CorrectionNotRecommended):
        client.create_collection(name, ITEMS.shape[1], metric_type="IP", hubness=bad)
    assert set(client.list_collections()) == before

    good = CorrectionConfig(Recipe(BANK, target_bank=ITEMS))
    client.create_collection(name, ITEMS.shape[1], metric_type="IP", hubness=good)
    [told] = status(lite.store(), name).verdicts
    assert (told["verdict"], told["in_use"]) == ("apply", True)
    client.close()


def test_a_collection_that_had_no_rows_is_judged_once_it_has(lite, caplog):
    client = lite.application()
    name = lite.name()
    client.create_collection(
        name,
        ITEMS.shape[1],
        metric_type="IP",
        hubness=CorrectionConfig(Recipe(FOREIGN, estimator=NNN(4))),
    )
    store = lite.store()
    rows = [{"id": i, "vector": row} for i, row in enumerate(np.concatenate([ITEMS] * 6))]
    client.insert(name, rows[:400])
    assert refresh(store, name, client_ttl=0).verdict is None
    client.insert(name, rows[400:])
    client.close()
    done = refresh(store, name, client_ttl=0)
    assert done.verdict.verdict == "leave it alone"
    assert "the verdict on this bank is to leave" in caplog.text
    assert status(store, name).verdicts[0]["in_use"]
    assert refresh(store, name, client_ttl=0).verdict is None, "once is enough"


def test_what_cannot_be_asked_is_said(lite, monkeypatch):
    store, name = lite.store(), lite.fill(ITEMS, "IP")
    with pytest.raises(InvalidInput, match="19 queries cannot judge a bank: 20 are needed"):
        plan_correction(store, name, Recipe(BANK, queries=REAL[:19]))
    with pytest.raises(InvalidParameter, match="verdict is one of require, warn, skip"):
        plan_correction(store, name, Recipe(BANK, verdict="ask"))
    monkeypatch.setenv("MILVUS_HUBNESS_VERDICT", "maybe")
    with pytest.raises(InvalidParameter, match=r"\$MILVUS_HUBNESS_VERDICT is one of require"):
        plan_correction(store, name, BANK)
    monkeypatch.setenv("MILVUS_HUBNESS_VERDICT", "skip")
    assert plan_correction(store, name, FOREIGN).chosen.verdict is None
