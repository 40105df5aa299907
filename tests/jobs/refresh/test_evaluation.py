"""New biases judged before any search reads them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import KindColumns
from milvus_hubness.correction.estimators import NNN, Blend
from milvus_hubness.correction.kinds import KindRule, Kinds
from milvus_hubness.errors import DimensionMismatch, InvalidInput
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.refresh.evaluation import ReducedSample, judge
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.sample import Sample
from milvus_hubness.quality import measures, retrieval
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.right_items import RightItems
from tests.support.galleries import METRICS, half_known, similarity

DIM = 16


def standing(bank, estimator=None, strength=1.0):
    kept = StoredBank(QueryBank(bank), np.empty((len(bank), 0), np.float32))
    return RefreshPlan(estimator or NNN(8), strength, bank=kept, reason="")


def unit(rows):
    return np.float32(rows / np.linalg.norm(rows, axis=1)[:, None])


@pytest.fixture
def hubs():
    """A gallery that leans to one side, more or less, queries that lean to it too, and others that lean away."""
    rng = np.random.default_rng(4)
    lean = unit(rng.normal(size=(1, DIM)))
    items, queries, others = (unit(rng.normal(size=(n, DIM))) for n in (400, 1_000, 1_000))
    share = rng.uniform(0, 1.5, (400, 1))
    return unit(items + share * lean), unit(queries + lean), unit(others - lean)


@pytest.mark.parametrize("metric", METRICS)
def test_a_bank_of_other_queries_is_objected_to(hubs, metric):
    items, queries, others = hubs
    layout = Layout(DIM, metric)
    assert not judge(ReducedSample.of(layout, items), standing(others), standing(queries)).objection
    told = judge(ReducedSample.of(layout, items), standing(queries), standing(queries, NNN(8, 0.0)))
    assert told.objection.startswith("excess answers taken by hubs rise from")
    assert "biases in use" in told.objection
    assert told.excess_answers["new"] == pytest.approx(told.excess_answers["raw"], abs=0.01)
    assert told.skewness["new"] == pytest.approx(told.skewness["raw"], abs=0.02)
    assert json.loads(json.dumps(measures.as_plain(told)))["overlap"] == told.overlap < 1


def test_biases_that_are_a_little_worse_are_objected_to(hubs):
    """Both are measured on the same queries, which shows small differences of like biases."""
    items, queries, _ = hubs
    old = standing(queries, NNN(8, 0.75))
    new = standing(queries, NNN(8, 0.7))
    told = judge(ReducedSample.of(Layout(DIM, "IP"), items), old, new)
    excess = told.excess_answers
    assert excess["old"] < excess["new"] < excess["old"] + 0.02
    assert told.objection.startswith("excess answers taken by hubs rise from")
    assert not judge(ReducedSample.of(Layout(DIM, "IP"), items), new, old).objection


@pytest.mark.parametrize(("old", "new"), [((8, 0.75), (64, 0.5)), ((8, 1.25), (1, 0.75))])
def test_hubs_that_take_more_answers_are_objected_to_though_the_skewness_falls(hubs, old, new):
    items, queries, _ = hubs
    told = judge(
        ReducedSample.of(Layout(DIM, "IP"), items),
        standing(queries, NNN(*old)),
        standing(queries, NNN(*new)),
    )
    assert told.skewness["new"] < min(told.skewness["old"], told.skewness["raw"])
    assert told.excess_answers["new"] > told.excess_answers["old"] + 0.02
    assert told.objection.startswith("excess answers taken by hubs rise from")


def test_halves_of_a_bank_are_as_good_as_each_other(hubs):
    """The skewness of N_10 rises in every other pair, and refused it."""
    items, queries, _ = hubs
    are_refused = []
    were_refused = []
    for seed in range(6):
        one, other = np.array_split(np.random.default_rng(seed).permutation(queries), 2)
        for old, new in ((one, other), (other, one)):
            told = judge(ReducedSample.of(Layout(DIM, "IP"), items), standing(old), standing(new))
            are_refused.append(bool(told.objection))
            were_refused.append(told.skewness["new"] > told.skewness["old"])
    assert sum(were_refused) >= 5
    assert sum(are_refused) <= 2
    assert sum(were and not are for were, are in zip(were_refused, are_refused, strict=True)) >= 4


@pytest.fixture
def topics():
    """Items and queries of two topics, and more queries of the first alone."""
    rng = np.random.default_rng(4)
    first, second = unit(rng.normal(size=(2, DIM)))

    def around(topic, count):
        return unit(unit(rng.normal(size=(count, DIM))) + topic)

    items = np.concatenate([around(first, 200), around(second, 200)])
    queries = rng.permutation(np.concatenate([around(first, 600), around(second, 600)]))
    return items, queries, around(first, 1_000)


def test_real_queries_tell_a_bank_of_one_topic_which_its_own_queries_do_not(topics):
    items, queries, narrow = topics
    layout = Layout(DIM, "IP")
    bank, real = queries[:1_000], queries[1_000:]

    alone = judge(ReducedSample.of(layout, items), standing(bank), standing(narrow))
    assert not alone.real_queries
    assert alone.queries == 200
    assert not alone.objection

    told = judge(ReducedSample.of(layout, items), standing(bank), standing(narrow), queries=real)
    assert told.real_queries
    assert told.queries == 200
    assert told.excess_answers["new"] > told.excess_answers["old"] + 0.1
    assert "biases in use" in told.objection
    assert not judge(
        ReducedSample.of(layout, items), standing(narrow), standing(bank), queries=real
    ).objection


def test_labels_decide_where_there_are_real_queries_too(topics):
    items, queries, narrow = topics
    labelled = LabelledQueries.of(items * 3, [np.array([i]) for i in range(len(items))])
    told = judge(
        ReducedSample.of(Layout(DIM, "IP"), items),
        standing(queries),
        standing(narrow, NNN(8, 20.0)),
        labelled,
        queries[:100] + np.float32(0.01),
    )
    assert told.real_queries
    assert told.objection.startswith("R@1 falls from")


def test_real_queries_that_are_in_a_bank_do_not_count(topics):
    items, queries, narrow = topics
    layout = Layout(DIM, "IP")
    old, new = standing(queries[:1_000]), standing(narrow)

    mixed = np.concatenate([queries[900:1_050], narrow[:100]]).astype(np.float64)
    assert judge(ReducedSample.of(layout, items), old, new, queries=mixed).queries == 50

    # Of these, too few are in no bank: a part of the new one is held out, as without them.
    leaked = np.concatenate([queries[:1_019], narrow])
    told = judge(ReducedSample.of(layout, items), old, new, queries=leaked)
    assert not told.real_queries
    assert told == judge(ReducedSample.of(layout, items), old, new)
    assert told == judge(
        ReducedSample.of(layout, items), old, new, queries=np.empty((0, DIM), np.float32)
    )


def test_real_queries_of_another_dimension_are_refused(topics):
    items, queries, _ = topics
    with pytest.raises(DimensionMismatch):
        judge(
            ReducedSample.of(Layout(DIM, "IP"), items),
            standing(queries),
            standing(queries),
            queries=np.ones((50, DIM + 1), np.float32),
        )


def test_real_queries_need_no_part_of_the_bank(topics):
    """So a bank that is too small for one is evaluated too."""
    items, queries, narrow = topics
    old, new = standing(queries[:200]), standing(narrow[:100])
    assert judge(ReducedSample.of(Layout(DIM, "IP"), items), old, new) is None
    told = judge(ReducedSample.of(Layout(DIM, "IP"), items), old, new, queries=queries[1_000:])
    assert told.queries == 200
    assert told.objection


def test_labels_that_are_a_little_worse_are_objected_to(hubs):
    items, queries, _ = hubs
    labelled = LabelledQueries.of(items + 0.05, [np.array([i]) for i in range(len(items))])
    told = judge(
        ReducedSample.of(Layout(DIM, "IP"), items),
        standing(queries, NNN(8, 0.0)),
        standing(queries, NNN(8, 1.2)),
        labelled,
    )
    lost = told.measured["old"] - told.measured["new"]
    assert 0 < lost < 0.05
    assert told.objection.startswith("R@1 falls from")


def test_nothing_is_objected_to_what_stays_the_same(hubs):
    items, queries, _ = hubs
    for estimator in (NNN(8), Blend()):
        told = judge(
            ReducedSample.of(Layout(DIM, "IP"), items),
            standing(queries, estimator),
            standing(queries, estimator),
        )
        assert (told.objection, told.overlap) == ("", 1.0)
        assert told.skewness["old"] == told.skewness["new"] < told.skewness["raw"]
        assert told.excess_answers["old"] == told.excess_answers["new"]
        assert told.noise["old"] == 0 < told.noise["raw"]


def test_the_figures_are_those_of_queries_held_out(hubs):
    items, queries, others = hubs
    told = judge(ReducedSample.of(Layout(DIM, "IP"), items), standing(others), standing(queries))
    kept = np.random.default_rng(0).permutation(1_000)[:200]
    assert told.queries == 200
    rest = np.delete(queries, kept, axis=0)
    best = np.sort(similarity(rest, items, "IP"), axis=0)[::-1][:8]
    found = measures.nearest(queries[kept], items, 10, np.float32(0.75 * best.mean(axis=0)))
    counts = measures.k_occurrence(found, len(items))
    assert told.skewness["new"] == pytest.approx(measures.skewness(counts), abs=0.01)
    assert told.excess_answers["new"] == pytest.approx(measures.excess_answers(counts), abs=0.001)


def test_labels_decide_where_there_are_some(hubs):
    items, queries, _ = hubs
    labelled = LabelledQueries.of(items * 3, [np.array([i]) for i in range(len(items))])
    harmful = standing(queries, NNN(8, 20.0))
    told = judge(ReducedSample.of(Layout(DIM, "IP"), items), standing(queries), harmful, labelled)
    assert told.measured["new"] < told.measured["old"]
    assert told.gains["old"].high < 0
    assert told.objection.startswith("R@1 falls from")
    well = judge(ReducedSample.of(Layout(DIM, "IP"), items), harmful, standing(queries), labelled)
    assert well.measured["new"] == told.measured["old"]
    assert not well.objection


@pytest.mark.parametrize("name", ["MRR", "MAP", "nDCG@10"])
def test_another_measure_decides_in_place_of_r1(hubs, name):
    """With a second right item of a higher grade that only the other measures see."""
    items, queries, _ = hubs
    measure = retrieval.Measure.of(name)
    asked = items * 3
    second = (np.arange(len(items)) + 1) % len(items)
    positives = [np.array([i, other]) for i, other in enumerate(second)]
    grades = [np.array([1.0, 3.0])] * len(items)
    labelled = LabelledQueries.of(asked, positives, grades=grades, measure=measure)
    old, new = standing(queries, NNN(8, 0.0)), standing(queries, NNN(8, 20.0))
    told = judge(ReducedSample.of(Layout(DIM, "IP"), items), old, new, labelled)
    raw = measure.values(retrieval.ranks(asked, items, RightItems.of(positives, grades)))
    assert told.measure == name
    assert told.measured["raw"] == told.measured["old"] == pytest.approx(raw.mean(), abs=1e-4)
    assert told.objection.startswith(f"{name} falls from")


def test_labels_count_as_often_as_they_are_asked(hubs):
    """Queries whose answers the new biases lose decide if they are asked most, and else do not."""
    items, queries, _ = hubs
    layout = Layout(DIM, "IP")
    positives = [np.array([i]) for i in range(len(items))]
    asked = unit(items + 0.6 * np.random.default_rng(0).normal(size=items.shape) / DIM**0.5)
    old, new = standing(queries, NNN(8, 0.0)), standing(queries, NNN(8, 0.75))
    alone = [
        judge(
            ReducedSample.of(layout, items),
            old,
            new,
            LabelledQueries.of(asked[[i, i]], [positives[i]] * 2),
        ).measured
        for i in range(40)
    ]
    lost = [i for i, r1 in enumerate(alone) if r1["new"] < r1["old"]]
    won = [i for i, r1 in enumerate(alone) if r1["new"] >= r1["old"]]
    assert lost
    assert won

    weights = np.ones(40)
    weights[lost] = 1_000
    told = judge(
        ReducedSample.of(layout, items),
        old,
        new,
        LabelledQueries.of(asked[:40], positives[:40], weights=weights),
    )
    assert told.objection.startswith("R@1 falls from")
    share = weights / weights.sum()
    for name in ("old", "new"):
        expected = share @ [r1[name] for r1 in alone]
        assert told.measured[name] == pytest.approx(expected, abs=1e-4)
    assert told.gains["old"].estimate == pytest.approx(
        told.measured["new"] - told.measured["old"], abs=1e-3
    )
    weights[lost] = 1e-6
    assert not judge(
        ReducedSample.of(layout, items),
        old,
        new,
        LabelledQueries.of(asked[:40], positives[:40], weights=weights),
    ).objection


def test_a_gate_counts_as_searches_use_it():
    bank, items, queries = half_known()
    labelled, layout = (
        LabelledQueries.of(queries, [np.array([i]) for i in range(len(items))]),
        Layout(16, "IP"),
    )
    corrected = standing(bank, NNN(8, 0.625))
    gated = replace(corrected, gate=1)
    told = judge(ReducedSample.of(layout, items), corrected, gated, labelled)
    assert told.measured["new"] > told.measured["old"] + 0.02
    assert told.measured["old"] > told.measured["raw"]


def test_too_little_is_not_judged_by(hubs):
    items, queries, _ = hubs
    layout = Layout(DIM, "IP")
    assert (
        judge(ReducedSample.of(layout, items[:199]), standing(queries), standing(queries)) is None
    )
    assert (
        judge(ReducedSample.of(layout, items), standing(queries), standing(queries[:200])) is None
    )
    assert judge(ReducedSample.of(layout, items), standing(queries[:40]), standing(queries)) is None


def test_right_rows_are_looked_up_in_the_sample():
    sample = Sample([10, 11, "a"], np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32))
    queries = np.array([[1, 0], [0, 1], [1, 1]])
    judged = Judgements.of(queries, [[11, 99], [98], ["a", 10]])
    known = sample.labelled(judged, "products")
    assert (known.right.items.tolist(), known.right.starts.tolist()) == ([1, 0, 2], [0, 1, 3])
    assert known.queries.tolist() == [[1, 0], [1, 1]]
    assert sample.labelled(Judgements.of(queries[:2], [10, 99]), "products") is None
    with pytest.raises(InvalidInput, match=r"none of the 2 judged keys .* of 'products': 98, 99"):
        sample.labelled(Judgements.of(queries[:2], [98, 99]), "products")

    queries, keys = np.arange(8).reshape(4, 2), [10, 99, 11, "a"]
    weighted = sample.labelled(Judgements.of(queries, keys, weights=[2, 1, 0, 3]), "products")
    assert weighted.weights.tolist() == [2, 3]
    assert weighted.right.items.tolist() == [0, 2]
    unsent = Judgements.of(queries, keys, weights=[0, 1, 0, 0])
    with pytest.raises(InvalidInput, match="none of the 1 judged keys"):
        sample.labelled(unsent, "products")
    unsent = Judgements.of(queries, keys, weights=[2, 1, 0, 0])
    assert sample.labelled(unsent, "products") is None, "one query is too few"


@pytest.mark.parametrize("by_kind", [False, True], ids=["without kinds", "by kind"])
def test_pairs_are_measured_among_the_rows_that_are_not_in_the_sample_too(hubs, by_kind):
    """Also of queries with several right rows; NNN reads no gallery, so both fits are those of all rows."""
    items, queries, _ = hubs
    layout, count = Layout(DIM, "IP"), 250
    numbers = np.arange(len(items)) % 2
    kinds = None
    if by_kind:
        rule = KindRule(field="kind", values=("photo", "text"))
        kinds = Kinds.measured(rule, items, numbers, queries)
        layout = Layout(DIM, "IP", kinds=KindColumns(2))
    right = [np.unique([n % count, (3 * n) % count]) for n in range(400)]
    labelled = LabelledQueries.of(items[[rows[0] for rows in right]] + np.float32(0.3), right)
    old, new = standing(queries, NNN(8)), standing(queries, NNN(32))

    def measured(rows, others=()):
        of_rows = numbers[rows] if by_kind else None
        sample = ReducedSample.of(layout, items[rows], kinds, of_rows)
        return judge(sample, old, new, labelled, others=others)

    whole = measured(np.arange(len(items)))
    parts = np.array_split(np.arange(count, len(items)), 3)
    others = [(items[part], numbers[part] if by_kind else None) for part in parts]
    told = measured(np.arange(count), others)
    assert (told.items, told.measured_rows) == (count, len(items))
    assert told.measured == whole.measured
    assert told.gains == whole.gains
    assert measured(np.arange(count)).measured["raw"] > whole.measured["raw"]
