"""Tuning, diagnosis and explanations of collections with kinds, and the plans that follow the tuning."""

from datetime import datetime, timezone

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    CannotMigrate,
    InvalidInput,
    Judgements,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.store.records import TUNING_PROPERTY, TuningRecord, Verdicts
from milvus_hubness.reports.biased import read_biased
from milvus_hubness.reports.collections import diagnose, tune
from milvus_hubness.reports.explain import explain_query, explain_row, list_hubs
from tests.support.aliases import aliased
from tests.support.galleries import plain_collection
from tests.support.mixed_kinds import mixed_kinds
from tests.support.recipes import as_plan

pytestmark = pytest.mark.beyond_contract


class Shop:
    """Photos and texts in a collection, with queries whose right rows are known."""

    def __init__(self, backend, metric="COSINE", **options):
        self.mixed = mixed_kinds(**{"items": 300, "queries": 200, "bank": 400, **options})
        self.backend = backend
        self.client, self.name = backend.client(), backend.name("shop")
        rows = plain_collection(self.client, self.name, self.mixed.items, metric)
        for row, value in zip(rows, self.mixed.values, strict=True):
            if value is not None:
                row["modality"] = value
        self.client.upsert(self.name, rows)
        self.bank = QueryBank(self.mixed.bank)
        self.judgements = Judgements.of(self.mixed.queries, self.mixed.answers.tolist())
        self.store = backend.store()

    @property
    def records(self):
        return self.store.info(self.name).verdicts.records

    def keep(self, *changes):
        """Keep these verdicts, the latest first, and no others, with the collection."""
        records = [
            TuningRecord(
                **{
                    "field": "vector",
                    "verdict": "apply",
                    "choice": {"name": "NNN", "k": 8, "alpha": 0.5},
                    "strength": 0.5,
                    "reason": "said so",
                    "labelled": True,
                    "bank_fingerprint": self.bank.fingerprint,
                    "tuned_at": datetime.now(timezone.utc),
                    **change,
                }
            )
            for change in changes
        ]
        self.store.write_property(self.name, TUNING_PROPERTY, Verdicts(records=tuple(records)))

    def plan(self, **options):
        return plan_correction(self.store, self.name, **as_plan(self.bank, **options))


@pytest.fixture
def shop(backend):
    return Shop(backend)


@pytest.fixture(scope="module")
def lasting(shared_backend):
    return Shop(shared_backend)


def test_tune_keeps_its_choice_of_kinds_and_plans_follow_it(lasting):
    shop = lasting
    shop.keep()
    found = tune(
        shop.store, shop.name, Recipe(shop.bank, kind="modality"), judgements=shop.judgements
    )
    assert (found.kind, found.verdict) == ("modality", "apply")
    assert any("rows have no kind" in remark for remark in found.remarks)
    [record] = shop.records
    assert (record.kind, record.kind_tried) == ("modality", "modality")
    assert status(shop.store, shop.name).verdicts[0]["kind"] == "modality"

    plan = shop.plan(kind="modality")
    assert plan.to_dict()["estimator"] == record.choice
    assert plan.chosen.strength == record.strength
    assert not any("tune found" in remark for remark in plan.remarks)

    without = shop.plan(verdict="warn")
    assert without.to_dict()["estimator"] != record.choice
    [remark] = [remark for remark in without.remarks if "tune found" in remark]
    assert "pass --kind modality" in remark


def test_a_method_that_was_chosen_without_kinds_is_not_lent_to_a_plan_with_them(lasting):
    shop = lasting
    shop.keep({"kind": "", "kind_tried": "modality"})
    plan = shop.plan(kind="modality", verdict="warn")
    [blend] = plan.chosen.estimator.estimators
    assert (type(plan.chosen.estimator).__name__, blend.strength, plan.chosen.strength) == (
        "WithDemand",
        1.0,
        1.0,
    )
    assert plan.chosen.verdict.kind == "modality", "the bank is judged anew"
    [remark] = [remark for remark in plan.remarks if "tune found" in remark]
    assert "leave --kind out" in remark
    assert shop.plan().to_dict()["estimator"]["name"] == "NNN"
    # The caller's own method is nobody's to change.
    assert shop.plan(kind="modality", estimator=NNN(4)).chosen.estimator == NNN(4)


def test_a_verdict_against_a_bank_without_kinds_does_not_stop_a_plan_with_them(lasting):
    shop = lasting
    shop.keep({"verdict": "leave it alone", "choice": None, "strength": 0.0})
    assert shop.plan(verdict="warn").chosen.verdict.verdict == "leave it alone"
    assert shop.plan(kind="modality", verdict="warn").chosen.verdict.verdict == "apply"


def test_tune_against_kinds_replaces_its_choice_for_them(backend):
    shop = Shop(backend, gap=0.0)
    shop.keep(
        {"kind": "modality", "kind_tried": "modality"},
        {"kind": "modality", "bank_fingerprint": "another"},
    )
    found = tune(
        shop.store, shop.name, Recipe(shop.bank, kind="modality"), judgements=shop.judgements
    )
    assert found.kind == ""
    kept = [(each.kind, each.kind_tried, each.bank_fingerprint) for each in shop.records]
    assert kept == [("", "modality", shop.bank.fingerprint), ("modality", "", "another")]


def test_clusters_of_the_vectors_are_kinds_for_tune_if_they_are_apart(backend):
    apart = Shop(backend)
    found = tune(
        apart.store, apart.name, Recipe(apart.bank, kind="auto"), judgements=apart.judgements
    )
    assert (found.kind, apart.records[0].kind) == ("auto", "auto")
    assert apart.plan(kind="auto").to_dict()["estimator"] == apart.records[0].choice


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "does not have two kinds"),
        ("id", "has more than 16 values"),
        ("", "kind is the"),
    ],
)
@pytest.mark.parametrize("command", [tune, diagnose])
def test_bad_kinds_are_refused_in_one_line(lasting, command, kind, message):
    shop = lasting
    judged = {"judgements": shop.judgements}
    with pytest.raises(InvalidInput, match=message) as caught:
        command(shop.store, shop.name, recipe=Recipe(shop.bank, kind=kind), **judged)
    assert "\n" not in str(caught.value)


def test_l2_has_no_kinds(backend):
    shop = Shop(backend, "L2")
    with pytest.raises(CannotMigrate, match="compared by L2"):
        tune(shop.store, shop.name, Recipe(shop.bank, kind="modality"))


BOTH_METRICS = ["COSINE", "IP"]


def corrected_shop(backend, metric):
    """Return a shop, and the name of its corrected copy."""
    shop = Shop(backend, metric)
    plan = shop.plan(kind="modality", estimator=NNN(8, 0.75), verdict="skip")
    return shop, migrate(shop.store, plan).target


@pytest.fixture(scope="module", params=BOTH_METRICS)
def corrected(shared_backend, request):
    """A shop and its copy for the tests that only read."""
    return corrected_shop(shared_backend, request.param)


def answers_of(shop, name, **options):
    client = shop.backend.hubness_client()
    return client.search(name, list(shop.mixed.queries[:40]), limit=10, **options)


def test_explanations_add_up_to_the_scores_of_searches(corrected):
    shop, name = corrected
    found = answers_of(shop, name, with_raw_score=True)
    biased = read_biased(shop.store, name)
    for number in (0, 7, 31):
        explained = explain_query(biased, shop.mixed.queries[:40], number)
        assert explained.kind == "modality"
        hits = {hit["id"]: hit for hit in found[number]}
        assert {answer.key for answer in explained.answers} == set(hits)
        for answer in explained.answers:
            hit = hits[answer.key]
            assert answer.corrected_score == pytest.approx(hit["distance"], abs=2e-5)
            assert answer.raw_score == pytest.approx(hit["raw_score"], abs=2e-5)
            total = answer.raw_score + answer.by_kind - explained.strength * answer.bias
            assert total == pytest.approx(answer.corrected_score, abs=2e-6)
    assert any(abs(answer.by_kind) > 0.05 for answer in explained.answers)


def test_ranks_of_a_row_and_hubs_are_those_of_searches(corrected):
    shop, name = corrected
    biased = read_biased(shop.store, name)
    key = found_key = answers_of(shop, name)[3][0]["id"]
    explained = explain_row(biased, found_key)
    client = shop.backend.hubness_client()
    for rank in explained.queries[:3]:
        bank = [shop.mixed.bank[rank.query]]
        [hits] = client.search(name, bank, limit=10)
        if rank.corrected_rank <= 10:
            assert hits[rank.corrected_rank - 1]["id"] == key
            score = hits[rank.corrected_rank - 1]["distance"]
            assert rank.corrected_score == pytest.approx(score, abs=2e-5)

    hubs = list_hubs(biased, shop.mixed.queries[:40])
    counts = np.zeros(len(shop.mixed.items), int)
    for hits in answers_of(shop, name):
        counts[[hit["id"] for hit in hits]] += 1
    for row in hubs.rows:
        assert abs(row.after - counts[row.key]) <= 1


def test_a_diagnosis_of_a_corrected_collection_compares_by_its_kinds(corrected):
    shop, name = corrected
    diagnosis = diagnose(shop.store, name, judgements=shop.judgements)
    assert diagnosis.kind == "modality"
    client = shop.backend.hubness_client()
    for value, options in (
        (diagnosis.value_after, {}),
        (diagnosis.value_before, {"strength": 0.0, "kinds": 0}),
    ):
        first = []
        for start in range(0, len(shop.mixed.queries), 100):
            some = list(shop.mixed.queries[start : start + 100])
            first += [hits[0]["id"] for hits in client.search(name, some, limit=1, **options)]
        assert value == pytest.approx((np.array(first) == shop.mixed.answers).mean(), abs=0.005)

    # Before the migration the same figures, from the same bank.
    planned = diagnose(
        shop.store,
        shop.name,
        recipe=Recipe(shop.bank, estimator=NNN(8, 0.75), kind="modality"),
        judgements=shop.judgements,
    )
    assert planned.value_after == pytest.approx(diagnosis.value_after, abs=0.01)
    with pytest.raises(InvalidInput, match="corrected with the kinds of 'modality'"):
        diagnose(shop.store, name, recipe=Recipe(kind="auto"), judgements=shop.judgements)


@pytest.mark.parametrize("metric", BOTH_METRICS)
def test_tune_and_refresh_of_a_corrected_collection_keep_to_its_kinds(backend, metric):
    shop, name = corrected_shop(backend, metric)
    name = aliased(shop.store, name)
    found = tune(shop.store, name, judgements=shop.judgements)
    assert found.kind == "modality"
    verdict = shop.store.info(name).verdicts.of("vector", shop.bank.fingerprint, "modality")
    assert verdict.choice is not None
    done = refresh(shop.store, name, client_ttl=0, force=True)
    assert done.reason.startswith("the parameters changed")
    assert shop.store.info(name).state.profile.estimator["name"] == verdict.choice["name"]
    assert status(shop.store, name).verdicts[0]["in_use"]

    other = QueryBank(shop.mixed.bank[:200])
    judged = refresh(shop.store, name, Recipe(other, verdict="warn"), client_ttl=0)
    assert judged.verdict.kind == "modality"


def test_enable_says_that_a_choice_with_kinds_takes_a_copy(lasting):
    shop = lasting
    shop.keep({"kind": "modality", "kind_tried": "modality"})
    plan = plan_correction(shop.store, shop.name, Recipe(shop.bank, verdict="warn"), Beside())
    advice = "pass --kind modality to migrate"
    assert any(remark.endswith(advice) for remark in plan.remarks)
    assert plan.to_dict()["estimator"]["name"] != "NNN"
