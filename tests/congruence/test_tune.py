"""Tuning and diagnosis of collections in Milvus, and the jobs that follow the finding."""

from datetime import datetime, timezone
from functools import partial

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    CollectionNotFound,
    CorrectionNotRecommended,
    DimensionMismatch,
    InvalidInput,
    InvertedSoftmax,
    Judgements,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
    rollback,
    status,
)
from milvus_hubness.jobs.store.records import MOST_VERDICTS, TUNING_PROPERTY, TuningRecord, Verdicts
from milvus_hubness.reports.collections import diagnose, tune
from tests.support.aliases import aliased
from tests.support.galleries import (
    METRICS,
    half_known,
    hubby_gallery,
    plain_collection,
    similarity,
)

pytestmark = pytest.mark.beyond_contract

DIM, ITEMS = 24, 300


class Retrieval:
    """A gallery with hubs whose right answers are known: queries are noisy items with a shared drift."""

    def __init__(self, backend):
        rng = np.random.default_rng(6)
        drift = rng.normal(size=DIM)
        items = rng.normal(size=(ITEMS, DIM)) + np.outer(rng.gamma(1, 0.7, ITEMS), drift)
        self.backend, self.items = backend, items.astype(np.float32)

        def ask(which):
            noise = rng.normal(size=(len(which), DIM))
            return (items[which] + 1.2 * noise + 0.8 * drift).astype(np.float32)

        order = rng.permutation(ITEMS)
        self.answers = (order[:120] * 10).tolist()
        self.queries, self.bank = ask(order[:120]), ask(order[120:])
        self.client, self.name = backend.client(), backend.name()
        rows = plain_collection(self.client, self.name, self.items, "COSINE")
        self.client.delete(self.name, filter="id >= 0")
        self.client.insert(self.name, [{**row, "id": row["id"] * 10} for row in rows])
        self.store = backend.store()

    def kept(self, bank):
        """The verdict on a bank that the collection keeps."""
        return self.store.info(self.name).verdicts.of("vector", bank.fingerprint)

    def tune(self, collection, **changes):
        """Keep a verdict, and no other, with a collection."""
        self.store.write_property(
            collection, TUNING_PROPERTY, Verdicts(records=(self.tuned(**changes),))
        )

    def tuned(self, **changes):
        record = {
            "field": "vector",
            "verdict": "apply",
            "choice": {"name": "InvertedSoftmax", "tau": 0.1},
            "strength": 0.5,
            "reason": "said so",
            "labelled": True,
            "bank_fingerprint": QueryBank(self.bank).fingerprint,
            "tuned_at": "2999-01-01T00:00:00Z",
            **changes,
        }
        return TuningRecord.model_validate(record)


@pytest.fixture(scope="module")
def retrieval(shared_backend):
    return Retrieval(shared_backend)


def test_the_finding_is_kept_with_the_collection_and_followed(retrieval):
    found = tune(
        retrieval.store,
        retrieval.name,
        QueryBank(retrieval.bank),
        judgements=Judgements.of(retrieval.queries, retrieval.answers),
    )
    assert found.labelled
    assert found.verdict == "apply"
    assert found.interval.low > 0
    kept = retrieval.kept(QueryBank(retrieval.bank))
    assert (kept.verdict, kept.strength) == (found.verdict, round(found.strength, 2))
    plan = plan_correction(retrieval.store, retrieval.name, QueryBank(retrieval.bank))
    assert plan.to_dict()["estimator"] == kept.choice
    assert plan.chosen.strength == kept.strength
    other = plan_correction(retrieval.store, retrieval.name, QueryBank(retrieval.bank[:90]))
    assert other.to_dict()["estimator"]["name"] == "WithDemand"
    assert other.chosen.strength == 1.0


def test_a_verdict_on_another_bank_does_not_take_the_place_of_the_first(retrieval):
    bank, other = QueryBank(retrieval.bank), QueryBank(retrieval.bank[:90])
    store, name = retrieval.store, retrieval.name
    retrieval.tune(name, choice={"name": "NNN", "k": 8}, strength=0.5)
    tune(store, name, other)
    assert plan_correction(store, name, bank).to_dict()["estimator"]["name"] == "NNN"
    verdict = plan_correction(store, name, bank).to_dict()["verdict"]
    assert (verdict["verdict"], verdict["choice"]["name"]) == ("apply", "NNN")
    assert verdict["tuned_at"].startswith("2999-01-01")
    [missing] = [
        remark
        for remark in plan_correction(store, name, bank.vectors[:80], Beside()).remarks
        if "verdict" in remark
    ]
    assert missing.startswith(
        "there is no verdict on this bank, but on 2 other banks: the default method applies"
    )
    assert not any(
        "verdict" in each
        for each in plan_correction(
            store, name, Recipe(other.vectors[:80], estimator=NNN(4))
        ).remarks
    )
    told = status(store, name).verdicts
    assert [each["bank_fingerprint"] for each in told] == [other.fingerprint, bank.fingerprint]
    assert told[1]["tuned_at"].startswith("2999-01-01")


def test_the_latest_verdicts_are_kept_one_for_each_bank_and_field(retrieval):
    verdicts = Verdicts()
    for number in range(MOST_VERDICTS + 3):
        verdicts = verdicts.with_record(
            retrieval.tuned(bank_fingerprint=f"bank {number}", strength=0.25)
        )
    verdicts = verdicts.with_record(
        retrieval.tuned(bank_fingerprint=f"bank {number}", strength=0.75)
    )
    verdicts = verdicts.with_record(
        retrieval.tuned(bank_fingerprint=f"bank {number}", field="image", strength=0.5)
    )
    assert len(verdicts.records) == MOST_VERDICTS
    assert verdicts.of("vector", f"bank {number}").strength == 0.75
    assert verdicts.of("image", f"bank {number}").strength == 0.5
    assert verdicts.of("vector", "bank 0") is None
    assert verdicts.of("image", f"bank {number - 1}") is None


def test_without_labels_it_asks_the_bank(retrieval):
    found = tune(retrieval.store, retrieval.name, QueryBank(retrieval.bank))
    assert not found.labelled
    assert found.interval is None


def test_advice_against_holds_until_forced(retrieval):
    retrieval.tune(
        retrieval.name, verdict="leave it alone", choice=None, strength=0.0, reason="it hurts"
    )
    bank = QueryBank(retrieval.bank)
    for estimator in (None, NNN(8)):
        plan = plan_correction(
            retrieval.store, retrieval.name, Recipe(bank, estimator=estimator, verdict="require")
        )
        with pytest.raises(CorrectionNotRecommended, match="it hurts"):
            migrate(retrieval.store, plan)
    assert (
        plan_correction(
            retrieval.store, retrieval.name, Recipe(bank, verdict="warn")
        ).chosen.strength
        == 1.0
    )
    assert (
        plan_correction(
            retrieval.store, retrieval.name, QueryBank(retrieval.bank[:90])
        ).chosen.strength
        == 1.0
    )


def test_a_diagnosis_shows_what_a_migration_would_do(retrieval):
    retrieval.tune(retrieval.name, strength=0.35)
    store, bank = retrieval.store, QueryBank(retrieval.bank)
    judgements = Judgements.of(retrieval.queries, retrieval.answers)

    def strength(estimator=None):
        return diagnose(
            store, retrieval.name, recipe=Recipe(bank, estimator=estimator), judgements=judgements
        ).strength

    assert strength() == plan_correction(store, retrieval.name, bank).chosen.strength == 0.35
    # The verdict is about another method, or against all of them.
    assert strength(NNN(8)) == 1.0
    retrieval.tune(retrieval.name, verdict="leave it alone", choice=None, strength=0.0)
    assert strength() == 1.0


def test_searches_take_the_tuned_strength_and_a_refresh_the_newer_finding(retrieval):
    store, bank = retrieval.store, QueryBank(retrieval.bank)
    retrieval.tune(retrieval.name, choice={"name": "NNN", "k": 8}, strength=0.5)
    target = aliased(store, migrate(store, plan_correction(store, retrieval.name, bank)).target)
    client = retrieval.backend.hubness_client()
    query = [retrieval.queries[0]]
    by_default = client.search(target, data=query, limit=20)
    by_name = client.search(target, data=query, limit=20, strength=0.5)
    assert [dict(hit) for hit in by_default[0]] == [dict(hit) for hit in by_name[0]]

    retrieval.tune(store.info(target).name, strength=0.75)
    done = refresh(store, target)
    assert done.reason == (
        "the parameters changed from NNN(k=8, alpha=0.75) to InvertedSoftmax(tau=0.1), which tune chose by "
        "labelled queries"
    )
    told = status(store, target)
    assert told.estimator == {"name": "InvertedSoftmax", "tau": 0.1}
    assert told.strength == 0.75
    retrieval.tune(store.info(target).name, tuned_at="2000-01-01T00:00:00Z", choice={"name": "NNN"})
    assert refresh(store, target).action == "none"

    judged = Judgements.of(retrieval.queries, retrieval.answers)
    again = tune(store, target, judgements=judged)
    assert again.bank_size == len(bank)


def test_the_page_shows_a_corrected_collection_as_it_is_served(retrieval):
    store = retrieval.store
    target = f"{retrieval.name}_hubness"
    if not store.exists(target):
        migrate(
            store,
            plan_correction(
                store, retrieval.name, Recipe(QueryBank(retrieval.bank), verdict="warn")
            ),
        )
    found = diagnose(
        store, target, judgements=Judgements.of(retrieval.queries, retrieval.answers)
    ).to_dict()
    client = retrieval.backend.hubness_client()
    for name, strength in (("before", 0.0), ("after", None)):
        results = client.search(target, data=list(retrieval.queries), limit=10, strength=strength)
        counts = np.unique([hit["id"] for hits in results for hit in hits], return_counts=True)[1]
        assert found[name]["largest"] == counts.max()


@pytest.mark.parametrize("metric", METRICS)
def test_reciprocity_is_by_the_metric_of_the_field(lite, metric):
    """Long queries are not the first ones of all items, unless they are nearer."""
    items, queries, answers = hubby_gallery(rows=150, queries=300, dim=16)
    # Queries for the same item are near copies.
    _, first = np.unique(answers, return_index=True)
    queries = np.vstack([queries[first], np.delete(queries, first, axis=0)])
    lengths = np.random.default_rng(5).choice([0.5, 1, 3], 80)[:, None]
    searched = (queries[:80] * lengths).astype(np.float32)
    store, name = lite.store(), lite.name("reciprocity")
    plain_collection(lite.client(), name, items, metric)
    bank = QueryBank(queries[100:], groups=np.arange(200))
    target = migrate(
        store,
        plan_correction(store, name, Recipe(bank, estimator=NNN(8, alpha=1.0), verdict="skip")),
    ).target
    # Some repeat, and nobody has grouped them.
    shown = diagnose(store, target, QueryBank(np.vstack([searched, searched[:9]]))).reciprocity

    strength = store.info(target).state.profile.strength
    # Under L2, a longer query is another query.
    lengths = 1 if metric == "L2" else np.linalg.norm(searched, axis=1, keepdims=True)
    scores = similarity(searched / lengths, items, metric)
    # A strength counts against scores of queries as they are sent.
    of_bank = similarity(bank.vectors, items, metric)
    biases = np.sort(of_bank, axis=0)[-8:].mean(0)
    corrected = similarity(searched, items, metric) - strength * biases
    first_queries = scores.argmax(0)
    for share, by_query in ((shown.before, scores), (shown.after, corrected)):
        mutual = first_queries[by_query.argmax(1)] == np.arange(80)
        assert share == pytest.approx(mutual.mean()), (shown, by_query is scores)
    assert shown.distinct == 80


def test_the_page_of_a_plain_collection_shows_what_would_be(retrieval):
    with pytest.raises(InvalidInput, match="pass --bank FILE"):
        diagnose(retrieval.store, retrieval.name, QueryBank(retrieval.queries))
    found = diagnose(
        retrieval.store,
        retrieval.name,
        QueryBank(retrieval.queries),
        Recipe(QueryBank(retrieval.bank), estimator=InvertedSoftmax(0.1)),
    )
    assert found.title == retrieval.name


def test_bad_input(retrieval):
    store, name, bank = retrieval.store, retrieval.name, QueryBank(retrieval.bank)
    queries = QueryBank(retrieval.queries)
    with pytest.raises(InvalidInput, match="no bank"):
        tune(store, name)
    judged = Judgements.of(queries, retrieval.answers)
    with pytest.raises(InvalidInput, match="judgements have queries of their own"):
        tune(store, name, Recipe(bank, queries=queries), judgements=judged)
    strange = Judgements.of(queries, [12345 + number for number in range(120)])
    for job in (tune, partial(diagnose, queries=None)):
        with pytest.raises(InvalidInput, match=r"none of the 120 judged keys .*: 12345, 12346, "):
            job(store, name, recipe=bank, judgements=strange)
    for given in ({}, {"queries": queries, "judgements": judged}):
        with pytest.raises(InvalidInput, match="needs queries or judgements: pass one of them"):
            diagnose(store, name, recipe=bank, **given)
    with pytest.raises(DimensionMismatch):
        tune(store, name, QueryBank(retrieval.bank[:, 1:]))
    with pytest.raises(DimensionMismatch):
        diagnose(store, name, QueryBank(retrieval.queries[:, 1:]), bank)
    with pytest.raises(CollectionNotFound):
        tune(store, "nowhere", bank)


def test_a_log_is_judged_and_diagnosed_by_its_groups(lite):
    """Of an uncorrected collection the groups are looked for; those of a corrected one are stored."""
    items, queries, answers = hubby_gallery()
    store, name = lite.store(), lite.name("log")
    plain_collection(lite.client(), name, items, "IP")
    rng = np.random.default_rng(0)
    asked = np.repeat(np.arange(200), np.r_[[120] * 2, np.ones(198, int)])
    log = queries[asked] + 0.01 * rng.standard_normal((len(asked), queries.shape[1]))
    bank = QueryBank(log.astype(np.float32))
    real = QueryBank(queries[300:400])
    keys = answers[300:400].tolist()
    judged = Judgements.of(real, keys, weights=1 + np.arange(100) % 3)
    told = tune(store, name, bank, judgements=judged)
    [finding] = [one for one in told.findings if one.name == "log"]
    assert finding.text.startswith("438 queries are ")
    assert finding.remedy
    unlabelled = tune(store, name, bank, replaces=True)
    assert unlabelled.reason.count("groups of near copies") == 1
    assert "groups of near copies" in plan_correction(store, name, bank).chosen.verdict.reason
    before = diagnose(store, name, recipe=bank, judgements=judged)
    target = migrate(store, plan_correction(store, name, Recipe(bank, verdict="skip"))).target
    after = diagnose(store, target, judgements=judged)
    for diagnosis in (before, after):
        assert diagnosis.bank.logged == 438
        assert diagnosis.bank.groups <= 200
        assert diagnosis.bank.largest_share > 0.5
        assert diagnosis.demand is not None
        assert sum("emand and correction" in sentence for sentence in diagnosis.summary) == 1
    groups = store.load_bank(store.info(target).state_of(None).profile.bank).queries.groups
    assert after.bank.groups == groups.max() + 1


def test_a_tuned_gate_is_followed_by_every_job(lite):
    vectors, items, queries = half_known()
    bank, store, name, keys = QueryBank(vectors), lite.store(), lite.name("half"), list(range(200))
    plain_collection(lite.client(), name, items, "IP")
    judged = Judgements.of(queries, keys)
    told = tune(store, name, bank, judgements=judged)
    assert told.gate == 1

    assert (
        plan_correction(store, name, bank).chosen.gate,
        plan_correction(store, name, Recipe(bank, gate=0)).chosen.gate,
    ) == (1, None)
    assert plan_correction(store, name, Recipe(bank, estimator=NNN(8))).chosen.gate is None
    assert plan_correction(store, name, bank, Beside()).chosen.gate == 1
    assert plan_correction(store, name, Recipe(bank, gate=0), Beside()).chosen.gate is None
    shown = diagnose(store, name, recipe=bank, judgements=judged).retrieval_after["R@1"]
    target = aliased(store, migrate(store, plan_correction(store, name, bank)).target)

    def found(strength=None):
        results = lite.hubness_client().search(
            target, data=list(queries), limit=1, strength=strength
        )
        return np.mean([hits[0]["id"] == key for key, hits in enumerate(results)])

    raw = found(strength=0)
    assert found() == pytest.approx(raw + told.interval.estimate, abs=0.04)
    assert found() == pytest.approx(shown, abs=0.03)
    assert diagnose(store, target, judgements=judged).retrieval_after["R@1"] == pytest.approx(
        found()
    )
    enable(store, plan_correction(store, name, bank, Beside()))
    assert store.info(name).state.profile.gate == 1

    gated = found()
    later = {"gate": None, "tuned_at": datetime.now(timezone.utc)}
    [kept] = store.info(name).verdicts.records
    again = Verdicts(records=(kept.model_copy(update=later),))
    store.write_property(store.info(target).name, TUNING_PROPERTY, again)
    assert refresh(store, target, force=True).reason.startswith("the gate changed")
    assert found() < gated - 0.02
    assert rollback(store, target).alias == target
    assert found() == gated
