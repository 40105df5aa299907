"""tune: one pass equals direct fits, picks and mixes, and the verdict with labels and without."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness.basics.texts import points
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import (
    CSLS,
    NNN,
    Blend,
    DualInvertedSoftmax,
    RelativeNNN,
    Sinkhorn,
    WithDemand,
    from_dict,
    to_dict,
)
from milvus_hubness.correction.estimators.base import is_same, score_spread
from milvus_hubness.correction.near_copies import near_copies
from milvus_hubness.correction.prior import Prior
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput, NonFiniteVectors
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.measures import paired_difference
from milvus_hubness.quality.outcomes import assess, excess_answers_of
from milvus_hubness.quality.prior_weights import Preference
from milvus_hubness.quality.retrieval import Measure, ranks
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.trial_table import latex_of
from milvus_hubness.quality.trials import STRENGTHS, Trial, search, search_labelled, sweep
from milvus_hubness.quality.tuning import (
    Swept,
    Whole,
    bank_before,
    compare,
    decide,
    drawn_words,
    folds,
    judge_labelled,
    mix,
    pick,
    tune,
)
from tests.support.galleries import crowding, half_known, hubby_gallery
from tests.support.real_data import Task, load_task, needs_real_data

V2T, RERANKER = "text_video_msrvtt v2t", "reranker_scores t2v"


@pytest.fixture
def space():
    """A bank (60, 8), a gallery (50, 8) and 40 queries, each near the item of its number."""
    rng = np.random.default_rng(0)
    gallery = rng.standard_normal((50, 8)).astype(np.float32)
    queries = gallery[:40] + 0.5 * rng.standard_normal((40, 8)).astype(np.float32)
    bank = rng.standard_normal((60, 8)).astype(np.float32)
    return QueryBank(bank), gallery, queries


@pytest.fixture
def log():
    """A bank of 90 queries that are 30 groups of near copies, of 1 to 20 queries, out of order."""
    rng = np.random.default_rng(1)
    sizes = np.array([20, 12, 8, 6, 5, 4, *[2] * 11, *[1] * 13])
    groups = rng.permutation(np.repeat(np.arange(30), sizes))
    subjects = rng.standard_normal((30, 8))
    rows = subjects[groups] + 0.1 * rng.standard_normal((90, 8))
    return QueryBank(rows.astype(np.float32), groups=groups)


def test_every_trial_of_a_log_equals_its_direct_fit(space, log):
    """Near copies share the weight of one query, and the agreement is that of the log's queries."""
    _, gallery, queries = space
    trials = sweep(log, gallery, QueryBank(queries))
    agreements = set()
    for trial in trials:
        fitted = trial.estimator.unmeasured().fit(log, gallery=gallery, target_bank=queries)
        np.testing.assert_allclose(trial.bias, trial.strength * fitted.bias(gallery), atol=2e-5)
        if trial.estimator.strength == "agreement":
            agreements.add((trial.estimator.agreement, fitted.estimator.agreement))
    assert len(agreements) == 3, "of RelativeNNN(8), RelativeNNN(30) and Blend"
    for measured, direct in agreements:
        assert measured == pytest.approx(direct, abs=1e-6)

    # Of the groups alone it would be another: their halves have no near copies in common.
    of_groups = sweep(QueryBank(log.condensed.vectors), gallery)[-1].estimator.agreement
    assert trials[-1].estimator.agreement > of_groups + 0.05
    gated = next(trial for trial in trials if trial.gate == 1)
    opens = DynamicGate(1).activated(log.condensed.vectors, gallery)
    np.testing.assert_array_equal(gated.activated, opens)


def test_every_trial_of_a_sweep_equals_its_direct_fit(space):
    bank, gallery, queries = space
    trials = [trial for trial in sweep(bank, gallery, QueryBank(queries)) if trial.gate is None]
    assert {type(trial.estimator).__name__ for trial in trials} == {
        "NNN", "CSLS", "InvertedSoftmax", "DualInvertedSoftmax", "DistributionNormalization", "Sinkhorn",
        "DualBankSinkhorn", "RelativeNNN", "Blend",
    }  # fmt: skip
    assert {trial.estimator.k for trial in trials if isinstance(trial.estimator, NNN | CSLS)} == {
        2, 8, 32,
    }  # fmt: skip
    alphas = {trial.estimator.alpha for trial in trials if isinstance(trial.estimator, NNN)}
    assert alphas == {step / 8 for step in range(1, 13)} - {0.5}
    duals = [
        trial.estimator for trial in trials if isinstance(trial.estimator, DualInvertedSoftmax)
    ]
    assert len({(dual.tau_query, dual.tau_target) for dual in duals}) == 16
    for trial in trials:
        fitted = trial.estimator.fit(bank, gallery=gallery, target_bank=queries)
        np.testing.assert_allclose(trial.bias, trial.strength * fitted.bias(gallery), atol=2e-5)
    assert is_same(Blend(), to_dict(trials[-1].estimator))
    assert trials[-1].strength == 1.0


def test_a_sweep_tells_how_far_it_is_and_never_asks_for_more_than_the_bank_has(space):
    bank, gallery, _ = space
    told = []
    trials = sweep(
        QueryBank(bank.vectors[:5]),
        gallery,
        progress=lambda doing, done, total: told.append((done, total)),
    )
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]
    assert max(trial.estimator.k for trial in trials if isinstance(trial.estimator, NNN)) == 2
    assert (
        max(trial.estimator.k for trial in trials if isinstance(trial.estimator, RelativeNNN)) == 5
    )
    assert {trial.strength for trial in trials} == {*STRENGTHS}


def test_trials_share_their_passes_over_the_scores(space):
    """A pass is a call of a kernel or a walk over tiles of scores; without sharing, each estimator takes several."""
    bank, gallery, queries = space
    passes = set()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_name in (
            "topk",
            "topk_mean",
            "logsumexp",
            "score_tiles",
        ):
            passes.add(frame)

    sys.setprofile(count)
    try:
        trials = sweep(bank, gallery, QueryBank(queries))
    finally:
        sys.setprofile(None)
    calls = [frame for frame in passes if "/kernels/on_numpy" not in frame.f_code.co_filename]
    assert len({trial.estimator for trial in trials}) > 60
    # Sixteen of them are over halves of the bank: how far these agree, for each of four biases.
    assert 10 < len(calls) < 40


def test_temperatures_follow_the_scale_of_the_scores(space):
    bank, gallery, _ = space
    direct = (bank.vectors @ gallery.T).std(1)
    assert score_spread(bank, gallery) == pytest.approx(np.sqrt((direct**2).mean()), rel=1e-4)
    taus = [
        [
            trial.estimator.tau
            for trial in sweep(bank, items)
            if isinstance(trial.estimator, Sinkhorn)
        ]
        for items in (gallery, 100 * gallery)
    ]
    np.testing.assert_allclose(taus[1], 100 * np.array(taus[0]), rtol=0.05)


def test_outcomes_equal_ranks_and_can_be_parted_by_query(space):
    bank, gallery, queries = space
    biases = [np.zeros(50, np.float32), *(trial.bias for trial in sweep(bank, gallery)[::20])]
    positives = [np.array([number, 49]) for number in range(40)]
    outcome = assess(queries, gallery, biases, RightItems.of(positives))
    for row, bias in zip(outcome.ranks, biases, strict=True):
        np.testing.assert_array_equal(
            row, ranks(queries, gallery, RightItems.of(positives), bias).best
        )
    some = np.array([3, 1, 30])
    apart = assess(
        queries[some], gallery, biases, RightItems.of([positives[query] for query in some])
    )
    np.testing.assert_array_equal(outcome.of(some).ranks, apart.ranks)
    np.testing.assert_allclose(
        excess_answers_of(outcome.of(some), 50), excess_answers_of(apart, 50)
    )


@pytest.mark.parametrize("n_items", [3, 50, 500])
def test_outcomes_under_many_unlike_biases_are_those_of_a_full_sort(n_items):
    rng = np.random.default_rng(n_items)
    gallery, queries = (rng.standard_normal((n, 16)).astype(np.float32) for n in (n_items, 30))
    gallery[-2:], queries[3] = gallery[0], 0
    spreads = np.array([0, 0, 1e-6, *np.linspace(0.1, 30, 60), 1e4], np.float32)
    biases = [
        spread * rng.standard_normal(n_items).astype(np.float32) + 5 * spread for spread in spreads
    ]
    biases[5][0] = 1e3
    positives = [rng.choice(n_items, 2, replace=False) for _ in queries]
    outcome = assess(queries, gallery, biases, RightItems.of(positives))
    for row, bias in enumerate(biases):
        corrected = queries @ gallery.T - bias
        found = np.take_along_axis(corrected, outcome.retrieved[row], 1)
        np.testing.assert_allclose(found, -np.sort(-corrected, 1)[:, :10], atol=1e-5)
        assert all(len(set(items)) == min(10, n_items) for items in outcome.retrieved[row].tolist())
        np.testing.assert_array_equal(
            outcome.ranks[row], ranks(queries, gallery, RightItems.of(positives), bias).best
        )


def test_a_mix_is_the_mean_of_its_trials(space):
    bank, gallery, _ = space
    fits = [(NNN(4, 0.75), 1.0), (Sinkhorn(0.5), 0.5), (Sinkhorn(0.5), 1.0)]
    trials = [
        Trial(one, w, np.float32(w) * one.fit(bank, gallery=gallery).bias(gallery))
        for one, w in fits
    ]
    mixed = mix(trials)
    assert len(mixed.estimator.estimators) == 2
    assert mixed.strength == pytest.approx(2.5 / 3)
    bias = mixed.strength * mixed.estimator.fit(bank, gallery=gallery).bias(gallery)
    np.testing.assert_allclose(mixed.bias, bias, atol=1e-5)
    np.testing.assert_allclose(mixed.bias, np.mean([trial.bias for trial in trials], 0), atol=1e-5)
    assert mix(trials[1:]).estimator == Sinkhorn(0.5)


def test_picking_prefers_what_ranks_better_and_then_what_is_more_even():
    trials = [Trial(NNN(k), 1.0, np.zeros(5, np.float32)) for k in range(1, 21)]
    alike = np.full((20, 30), 0.25)
    assert pick(trials, np.linspace(0.2, 0.3, 20), alike, np.ones(30)) == trials[:8]
    even = np.full(20, 0.2)
    few = np.full((20, 30), 0.25)
    few[12:] = 1.0
    assert pick(trials, even, few, np.ones(30)) == trials[12:]


def test_a_gate_is_picked_for_all_or_none_and_has_to_be_clearly_better():
    plain = [Trial(NNN(k), 1.0, np.zeros(5, np.float32)) for k in range(1, 11)]
    trials = [*(trial._replace(gate=1) for trial in plain), *plain]
    even, merits = np.full(20, 0.2), np.full((20, 100), 0.5)
    merits[:10, 0] = 1  # 0.005 of mean reciprocal rank
    assert pick(trials, even, merits, np.ones(100)) == plain[:8]
    merits[:10, :3] = 1  # 0.015, with a standard error of 0.0085
    assert pick(trials, even, merits, np.ones(100)) == plain[:8]
    merits[:10, :5] = 1
    assert pick(trials, even, merits, np.ones(100)) == trials[:8]
    merits[10] = 1  # One trial without a gate is the best of all.
    merits[:10, :40] = 1
    assert pick(trials, even, merits, np.ones(100)) == trials[:8]


def test_a_gated_trial_corrects_only_queries_whose_raw_best_item_is_that_of_a_bank_query(space):
    bank, gallery, queries = space
    bank = QueryBank(bank.vectors[:12])
    positives = [np.array([number]) for number in range(40)]
    trials = sweep(bank, gallery)
    without = [trial for trial in trials if trial.gate is None]
    gated = [trial for trial in trials if trial.gate == 1]
    assert [trial[:2] for trial in gated] == [trial[:2] for trial in without]

    plain = search(without, queries, gallery, RightItems.of(positives))
    is_open = DynamicGate(1).activated(bank.vectors, gallery)[plain.retrieved[0, :, 0]]
    assert 5 < is_open.sum() < 35
    found = search(gated, queries, gallery, RightItems.of(positives))
    np.testing.assert_array_equal(found.ranks, np.where(is_open, plain.ranks, plain.ranks[0]))
    np.testing.assert_array_equal(
        found.retrieved, np.where(is_open[:, None], plain.retrieved, plain.retrieved[0])
    )
    assert trials[-1].gate is None


def test_tune_chooses_a_gate_where_the_bank_knows_one_half_of_the_gallery():
    bank, gallery, queries = half_known()
    positives = np.arange(200)
    told = tune(bank, gallery, queries=LabelledQueries.of(queries, positives))
    assert (told.verdict, told.gate) == ("apply", 1)
    assert {row.gate for row in told.rows[1:]} == {None, 1}

    bias = told.strength * told.choice.fit(QueryBank(bank), gallery=gallery).bias(gallery)
    trial = Trial(told.choice, told.strength, np.asarray(bias, np.float32))
    gated = trial._replace(gate=1, activated=DynamicGate(1).activated(bank, gallery))
    raw, plain, with_gate = search(
        [trial, gated], queries, gallery, RightItems.of(positives)
    ).values.mean(1)
    assert with_gate > raw + 0.1
    assert with_gate > plain + 0.02
    assert told.interval.estimate == pytest.approx(with_gate - raw, abs=0.04)
    for without in (tune(bank, gallery), tune(bank, gallery, queries=queries)):
        assert without.gate is None


def recorded_searches(monkeypatch):
    searches = []

    def recorded(trials, searched, *others, **more):
        searches.append((trials, searched))
        return search(trials, searched, *others, **more)

    monkeypatch.setattr("milvus_hubness.quality.trials.search", recorded)
    return searches


def test_a_query_is_judged_by_the_bank_before_it_was_sent(space, log, monkeypatch):
    """What users sent before stays in the bank: the next one is sent to that bank too."""
    _, gallery, _ = space
    numbers = np.random.default_rng(3).permutation(90)[:50]
    queries = log.vectors[numbers]
    positives = (queries @ gallery.T).argmax(1)
    searches = recorded_searches(monkeypatch)
    told = tune(log, gallery, queries=LabelledQueries.of(queries, positives))
    folds = [(trials[0], searched) for trials, searched in searches if len(searched) < 50]
    assert len(folds) == 5
    assert sum(len(searched) for _, searched in folds) == 50

    bank = log.take(np.setdiff1d(np.arange(90), numbers))
    for trial, _ in folds:
        # Fixed at its strength: the agreement was measured with the trials.
        if isinstance(trial.estimator, Blend):
            fits = [
                weight * inner.share * replace(inner, strength=1.0, agreement=None)
                .fit(bank, gallery=gallery).bias(gallery)
                for inner, weight in zip(
                    trial.estimator.estimators, trial.estimator.weights, strict=True
                )
            ]  # fmt: skip
            np.testing.assert_allclose(trial.bias, trial.strength * sum(fits), atol=1e-4)
    assert told.labelled


class TestDemand:
    """A log in which one of 30 items is wanted as often as 20 others."""

    RNG = np.random.default_rng(0)
    ITEMS = 2 * RNG.standard_normal((30, 8)).astype(np.float32)
    WANTED = RNG.permutation(np.r_[np.zeros(60, int), np.repeat(np.arange(1, 30), 3)])

    def sent(self, seed, wanted):
        noise = 2 * np.random.default_rng(seed).standard_normal((len(wanted), 8))
        return (self.ITEMS[wanted] + noise).astype(np.float32)

    def test_where_demand_is_uneven_what_labels_choose_heeds_it(self):
        bank = QueryBank(self.sent(1, self.WANTED), groups=self.WANTED)
        pairs = self.sent(2, self.WANTED)
        told = tune(bank, self.ITEMS, queries=LabelledQueries.of(pairs, self.WANTED))
        assert isinstance(told.candidate, WithDemand)
        assert not isinstance(told.candidate.of_biases, WithDemand)

    def test_labels_that_want_all_equally_often_choose_none(self):
        bank = QueryBank(self.sent(1, self.WANTED), groups=self.WANTED)
        rare = np.repeat(np.arange(1, 30), 4)
        told = tune(bank, self.ITEMS, queries=LabelledQueries.of(self.sent(2, rare), rare))
        assert not isinstance(told.candidate, WithDemand)

    def test_even_demand_is_none(self):
        wanted = np.arange(30)
        bank = QueryBank(self.sent(1, wanted), groups=wanted)
        pairs = self.sent(2, self.WANTED)
        told = tune(bank, self.ITEMS, queries=LabelledQueries.of(pairs, self.WANTED))
        assert not isinstance(told.candidate, WithDemand)


def test_the_demand_that_tune_tries_is_that_of_a_fit(space, log):
    _, gallery, _ = space
    counted = replace(log, counts=np.random.default_rng(1).pareto(1.0, 90) + 0.1)
    for bank in (log, counted):
        for estimator in (Blend(), NNN(4)):
            biases = estimator.clamped(30).fit(bank, gallery=gallery).bias(gallery)
            demanded = WithDemand((estimator.clamped(30),))
            np.testing.assert_allclose(
                demanded.of_gallery(biases, bank, gallery),
                demanded.fit(bank, gallery=gallery).bias(gallery),
                atol=1e-5,
            )
    assert not np.allclose(demanded.of_gallery(biases, bank, gallery), biases)


def test_a_bank_of_nothing_but_near_copies_of_the_pairs_shows_no_gain(space):
    _, gallery, queries = space
    rng = np.random.default_rng(5)
    noise = 0.01 * rng.standard_normal((2, 100, 8))
    one = queries[:1] + noise[0].astype(np.float32)
    bank = QueryBank(queries[:1] + noise[1].astype(np.float32), groups=np.zeros(100, int))
    told = tune(bank, gallery, queries=LabelledQueries.of(one, np.arange(100) % len(gallery)))
    assert told.interval == (0, 0, 0)
    assert told.findings == (), "a bank of one group cannot be examined"
    alone = tune(bank, gallery)
    assert alone.verdict == "leave it alone"
    assert "a bank of 1 distinct queries, near copies counted once" in alone.reason


def test_near_copies_among_the_pairs_are_in_one_fold(space, log, monkeypatch):
    _, gallery, _ = space
    rng = np.random.default_rng(4)
    sizes = [30, 10, 5, 5, *[1] * 20]
    subject = rng.permutation(np.repeat(np.arange(24), sizes))
    queries = (5 * rng.standard_normal((24, 8)))[subject] + 0.01 * rng.standard_normal((70, 8))
    queries = queries.astype(np.float32)
    searches = recorded_searches(monkeypatch)
    tune(log, gallery, queries=LabelledQueries.of(queries, (queries @ gallery.T).argmax(1)))
    # What the others choose by is searched too, with 40 queries or more.
    folds = [rows for _, rows in searches if len(rows) < 40]
    assert sorted(map(len, folds)) == [10, 10, 10, 10, 30]
    subject_of = dict(zip(map(bytes, queries), subject.tolist(), strict=True))
    subjects = [{subject_of[bytes(row)] for row in rows} for rows in folds]
    assert sum(map(len, subjects)) == len(set.union(*subjects)) == 24


class TestWeights:
    def test_a_weight_is_a_number_of_equal_pairs(self, space):
        bank, gallery, queries = space
        weights = np.random.default_rng(0).integers(1, 4, 40)
        weighted = tune(
            bank, gallery, queries=LabelledQueries.of(queries, np.arange(40), weights=weights)
        )
        each = np.repeat(np.arange(40), weights)
        repeated = tune(bank, gallery, queries=LabelledQueries.of(queries[each], each))
        by_method = {(row.estimator, row.strength, row.gate): row for row in repeated.rows}
        for row in weighted.rows[1:]:
            same = by_method[row.estimator, row.strength, row.gate]
            assert row.value == pytest.approx(same.value)
            assert row.gain.estimate == pytest.approx(same.gain.estimate)
            # Few queries of unequal weight say less than as many as the sum of the weights.
            assert row.gain.high - row.gain.low >= same.gain.high - same.gain.low - 0.01
        assert weighted.demand == pytest.approx(weights.max() / weights.sum())
        assert weighted.demand == pytest.approx(repeated.demand)

    def test_the_interval_is_that_of_a_weighted_bootstrap(self):
        rng = np.random.default_rng(1)
        values, weights = rng.standard_normal(300), rng.gamma(0.5, size=300) + 0.01
        share = weights / weights.sum()
        told = paired_difference(np.zeros(300), values, weights)
        assert told.estimate == pytest.approx(share @ values)
        error = np.sqrt(share**2 @ (values - share @ values) ** 2)
        assert told.high - told.low == pytest.approx(2 * 1.96 * error, rel=0.1)
        assert told == paired_difference(np.zeros(300), values, 1000 * weights)
        equal = paired_difference(np.zeros(300), values, np.full(300, 7.0))
        np.testing.assert_allclose(equal, paired_difference(np.zeros(300), values))

    def test_a_pair_of_weight_0_says_nothing(self, space):
        bank, gallery, queries = space
        weights = np.repeat([1.0, 0.0], 20)
        positives = np.arange(40)
        told = tune(bank, gallery, queries=LabelledQueries.of(queries, positives, weights=weights))
        alone = tune(bank, gallery, queries=LabelledQueries.of(queries[:20], positives[:20]))
        assert told.to_dict() == alone.to_dict()
        with pytest.raises(InvalidInput, match="19 queries cannot judge"):
            tune(
                bank,
                gallery,
                queries=LabelledQueries.of(queries, positives, weights=weights * (positives > 0)),
            )

    def test_what_is_asked_for_most_decides(self):
        raw = np.repeat([1.0, 0.0], [20, 380])
        after = 1 - raw
        assert judge_labelled(raw, after, 1.0, 0.4).verdict == "apply"
        weights = np.repeat([100.0, 1.0], [20, 380])
        judged = judge_labelled(raw, after, 1.0, 0.4, weights)
        assert judged.verdict == "leave it alone"
        assert judged.interval.estimate == pytest.approx((380 - 2000) / 2380)

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (np.ones(39), "weights of 40 pairs must be 40 numbers"),
            (np.zeros(40), "weights of all pairs are 0"),
            (np.r_[np.ones(39), -1], "weight of pair 39 must be a number from 0 to 1e"),
            (np.r_[np.ones(39), 1e200], "weight of pair 39 must be a number from 0 to 1e"),
            (np.r_[np.ones(39), np.nan], "weight of pair 39 must be a number from 0 to 1e"),
            (np.array(["1"] * 40), "must be 40 numbers"),
            (np.ones(40, bool), "must be 40 numbers"),
            ([1.0, None] * 20, "must be 40 numbers"),
            ([[1.0], [1.0, 2.0]] * 20, "must be 40 numbers"),
        ],
    )
    def test_bad_weights(self, space, weights, message):
        bank, gallery, queries = space
        with pytest.raises(InvalidInput, match=message):
            tune(bank, gallery, queries=LabelledQueries.of(queries, np.arange(40), weights=weights))


class TestMeasures:
    """Another measure than R@1 decides."""

    @pytest.fixture
    def judged(self, space):
        """Queries with 1 to 6 positives each, and their grades."""
        bank, gallery, queries = space
        rng = np.random.default_rng(7)
        positives = [rng.choice(50, rng.integers(1, 7), replace=False) for _ in queries]
        grades = [rng.integers(1, 4, len(items)).astype(float) for items in positives]
        return bank, gallery, queries, positives, grades

    @pytest.mark.parametrize("name", ["R@1", "R@5", "MRR", "MAP", "nDCG@3", "nDCG@10"])
    def test_a_search_gives_the_measure_of_its_ranks(self, judged, name):
        bank, gallery, queries, positives, grades = judged
        measure = Measure.of(name)
        trials = sweep(bank, gallery)[-40:]
        pairs = LabelledQueries.of(queries, positives, grades, measure=measure)
        outcome = search_labelled(trials, pairs, gallery)
        for row, bias in enumerate([np.zeros(50), *(trial.bias for trial in trials)]):
            of_bias = ranks(queries, gallery, RightItems.of(positives, grades), bias)
            if row == 0 or trials[row - 1].gate is None:
                np.testing.assert_allclose(outcome.values[row], measure.values(of_bias))

    @pytest.mark.parametrize("name", ["R@5", "MRR", "MAP", "nDCG@10"])
    def test_the_table_and_the_gain_are_those_of_the_measure(self, judged, name):
        bank, gallery, queries, positives, grades = judged
        told = tune(
            bank, gallery, queries=LabelledQueries.of(queries, positives, grades, measure=name)
        )
        measure = Measure.of(name)
        raw = measure.values(ranks(queries, gallery, RightItems.of(positives, grades)))
        assert told.measure == name
        assert told.rows[0].value == pytest.approx(raw.mean())
        assert f"{name} changes by" in told.reason
        for row in told.rows[1:6]:
            if row.gate is None:
                bias = row.strength * row.estimator.fit(bank, gallery=gallery).bias(gallery)
                after = measure.values(
                    ranks(queries, gallery, RightItems.of(positives, grades), bias)
                )
                assert row.value == pytest.approx(after.mean(), abs=1e-6)
                assert row.gain.estimate == pytest.approx((after - raw).mean(), abs=1e-6)

    def test_grades_change_what_is_best(self, space):
        """Of two right items the one that a correction brings forward has the higher grade."""
        bank, gallery, queries = space
        order = np.argsort(-(queries @ gallery.T), axis=1)
        positives = np.stack([order[:, 0], order[:, 4]], axis=1)
        first = tune(
            bank,
            gallery,
            queries=LabelledQueries.of(
                queries, positives, np.tile([9, 1], (40, 1)), measure="nDCG@10"
            ),
        )
        fifth = tune(
            bank,
            gallery,
            queries=LabelledQueries.of(
                queries, positives, np.tile([1, 9], (40, 1)), measure="nDCG@10"
            ),
        )
        assert first.rows[0].value > 0.9 > fifth.rows[0].value
        assert fifth.rows[1].gain.estimate > first.rows[1].gain.estimate

    @pytest.mark.parametrize("prior", [False, True])
    def test_a_prior_is_weighed_by_the_measure(self, judged, prior):
        bank, gallery, queries, positives, grades = judged
        wanted = np.bincount(np.concatenate(positives), minlength=50).astype(float)
        preference = (
            Preference(Prior(source="field", field="sales").of_gallery(wanted, "a"), wanted)
            if prior
            else None
        )
        told = tune(
            bank,
            gallery,
            queries=LabelledQueries.of(queries, positives, grades, measure="MAP"),
            preference=preference,
        )
        assert "MAP changes by" in told.reason
        assert (told.prior_weight is None) or prior

    @pytest.mark.parametrize(
        ("measure", "grades", "match"),
        [
            ("R@0", None, "R@k, MRR, MAP or nDCG@k, not 'R@0'"),
            ("precision", None, "R@k, MRR, MAP or nDCG@k"),
            ("nDCG", None, "nDCG@k, not 'nDCG'"),
            ("MRR@5", None, "not 'MRR@5'"),
            (5, None, "not 5"),
            ("MAP", [[1.0]] * 39, "grades of query 39"),
            ("MAP", [[1.0, 2.0]] * 40, "as many as its positives"),
            ("MAP", [[float("nan")]] * 40, "numbers above 0"),
            ("MAP", [[0]] * 40, "numbers above 0"),
            ("MAP", [["good"]] * 40, "numbers above 0"),
        ],
    )
    def test_wrong_measures_and_grades(self, space, measure, grades, match):
        bank, gallery, queries = space
        with pytest.raises(InvalidInput, match=match):
            tune(
                bank,
                gallery,
                queries=LabelledQueries.of(
                    queries, np.arange(40)[:, None], grades, measure=measure
                ),
            )


def test_names_of_ir_measures_are_taken():
    names = ("Success@3", "RR", "AP", "ndcg@20")
    assert [str(Measure.of(name)) for name in names] == ["R@3", "MRR", "MAP", "nDCG@20"]


def test_without_labels_a_group_is_fitted_or_searched(space, log):
    _, gallery, _ = space
    told = tune(log, gallery)
    assert told.queries == 15, "one query of each of half of the groups"
    [finding] = [one for one in told.findings if one.name == "log"]
    assert finding.text.startswith("90 queries are 30 groups of near copies")
    assert told.to_dict()["demand"] is None


def test_verdicts():
    rng = np.random.default_rng(0)
    raw = (rng.random(400) < 0.4).astype(float)
    better, worse = np.maximum(raw, rng.random(400) < 0.1), raw * (rng.random(400) < 0.9)
    good = judge_labelled(raw, better, 1.0, 0.4)
    assert good.verdict == "apply"
    assert 0 < good.interval.low < good.interval.estimate < good.interval.high
    assert judge_labelled(raw, better, 0.5, 0.4).verdict == "apply weakly"
    assert judge_labelled(raw, worse, 1.0, 0.4)[:2] == ("leave it alone", 0.0)
    assert good.sentence.startswith("expect +")
    assert f", cautiously: 400 pairs show {points(good.interval)}" in good.sentence
    assert judge_labelled(raw, raw, 1.0, 0.4)[:2] == ("not proven", 1.0)
    alone = judge_labelled(raw, raw, 1.0, -0.1)
    assert alone.verdict == "leave it alone"
    assert alone.sentence == "expect no gain of R@1, as 400 pairs show"


@pytest.mark.parametrize("share", [0.05, 0.34, -0.34])
def test_the_cautious_gain_is_within_the_measured_interval(share):
    """Also where it is far from the gain of usual collections, which is the prior."""
    rng = np.random.default_rng(0)
    raw = (rng.random(400) < 0.4).astype(float)
    changed = rng.random(400) < abs(share) / (0.6 if share > 0 else 0.4)
    told = judge_labelled(raw, np.where(changed, float(share > 0), raw), 1.0, 0.4)
    if share < 0:
        assert told.sentence.startswith("expect no gain")
        return
    [cautious] = re.findall(r"expect ([+−][\d.]+) points", told.sentence)
    assert 100 * told.interval.low - 0.05 <= float(cautious) <= 100 * told.interval.high + 0.05
    # Little is left of the prior where it cannot have been right.
    if share > 0.3:
        assert float(cautious) == pytest.approx(100 * told.interval.estimate, abs=1)


def test_the_trials_as_a_frame_and_for_a_paper(space):
    bank, gallery, queries = space
    told = tune(bank, gallery, queries=LabelledQueries.of(queries, np.arange(40)))
    frame = told.to_frame()
    assert [*frame.columns] == [
        *("method", "strength", "gate", "R@1", "low", "high", "excess_answers"),
    ]
    assert len(frame) == len(told.rows)
    assert frame["method"][0] == "as it is"
    assert frame["R@1"].tolist() == [row.value for row in told.rows]
    assert frame["low"].isna().tolist() == [row.estimator is None for row in told.rows]
    table = told.to_latex(rows=3).splitlines()
    assert table[0] == r"\begin{tabular}{lrrrr}"
    assert [line.count("&") for line in table] == [0, 0, 4, 0, 4, 4, 4, 0, 0]
    assert table[4].startswith(rf"as it is &  & {100 * told.rows[0].value:.1f} &  & ")
    assert latex_of("50% of a_b & τ") == r"50\% of a\_b \& $\tau$"


def test_methods_of_ones_choice_are_compared_in_a_table(space):
    """Each as its own fit and search have it, without the queries that the bank holds."""
    bank, gallery, queries = space
    log = QueryBank(np.concatenate([bank.vectors, queries[:5]]))
    methods = [CSLS(4), NNN(8, 0.5), Sinkhorn(temperature=0.5)]
    told = compare(methods, gallery, queries, log, np.arange(40))
    biases = [
        np.zeros(50),
        *(method.fit(bank, gallery=gallery).bias(gallery) for method in methods),
    ]
    expected = [
        (ranks(queries, gallery, RightItems.of(np.arange(40)), bias).best == 1).mean()
        for bias in biases
    ]
    assert [row.value for row in told.rows] == pytest.approx(expected)
    assert told.to_frame()["method"].str.split("(").str[0].tolist() == [
        *("as it is", "CSLS", "NNN", "Sinkhorn"),
    ]
    assert "CSLS" in told.to_latex()
    assert "<td>CSLS" in told._repr_html_()
    unlabelled = compare(methods, gallery, queries, log)
    assert [row.value for row in unlabelled.rows] == [None] * 4
    excess = [row.excess_answers for row in told.rows]
    assert [row.excess_answers for row in unlabelled.rows] == excess
    with pytest.raises(InvalidInput, match="positives cover 39 queries"):
        compare(methods, gallery, queries, log, np.arange(39))


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (NNN(8), r"methods must be a list such as \[NNN\(\), CSLS\(\)\], not NNN"),
        ("nnn", "methods must be a list"),
        ([NNN(8), None], "methods must be a list"),
        (["nnn"], r"an estimator is needed, not the text 'nnn': pass NNN\(\)"),
        ([NNN], r"an estimator is needed, not its class: pass NNN\(\)"),
    ],
)
def test_what_are_no_methods_to_compare(space, methods, said):
    bank, gallery, queries = space
    with pytest.raises(InvalidInput, match=said):
        compare(methods, gallery, queries, bank)


def test_right_items_of_tensors_are_numbers(space):
    torch = pytest.importorskip("torch")
    bank, gallery, queries = space
    numbers = np.arange(40)
    told = compare([NNN(8)], gallery, queries, bank, numbers)
    several = [torch.tensor([number, number]) for number in numbers]
    for positives in (torch.tensor(numbers), several):
        assert compare([NNN(8)], gallery, queries, bank, positives).rows == told.rows
    grades = [torch.tensor([2.0, 1.0]) for _ in numbers]
    graded = compare([NNN(8)], gallery, queries, bank, several, grades=grades, measure="nDCG@5")
    plain = compare([NNN(8)], gallery, queries, bank, numbers, measure="nDCG@5")
    assert [row.value for row in graded.rows] == [row.value for row in plain.rows]


def test_a_measure_among_some_items_says_what_it_is_among_all():
    items = np.eye(6, dtype=np.float32)
    items[5] = items[0] * 2
    pairs = LabelledQueries.of(items[:2], [0, 1])
    whole = Whole(items, pairs, None, np.arange(5))
    assert drawn_words(whole, items, pairs, judges_all=True) == ""
    assert drawn_words(whole, items[:5], pairs, judges_all=False) == (
        "R@1 is measured among 5 of 6 items, with all right ones: as it is, R@1 is 100.0% there and "
        "50.0% among all"
    )
    assert drawn_words(whole, items[:5], pairs, judges_all=True).startswith(
        "the gain is measured among all items, each trial among 5 of 6 items"
    )


def test_a_gain_that_few_pairs_show_is_not_proven_and_as_many_as_it_says_would_prove_it():
    """The number of pairs is that at which four of five samples exclude 0, if the gain is the expected one."""
    rng = np.random.default_rng(3)
    raw = (rng.random(200) < 0.4).astype(float)
    after = np.where(rng.random(200) < 0.1, rng.integers(0, 2, 200), raw)
    after[:6] = 1 - raw[:6]
    few = judge_labelled(raw, after, 0.5, 0.4)
    assert (few.verdict, few.strength) == ("not proven", 0.5)
    assert few.interval.low <= 0
    gain, needed = re.fullmatch(
        r"expect \+(\d\.\d) points of R@1; 200 pairs cannot tell it from 0, about ([\d,]+) would",
        few.sentence,
    ).groups()
    assert few.sentence in few.reason
    count = int(needed.replace(",", ""))
    assert count > 200

    # Samples of so many queries that gain or lose as often, around the gain that is expected.
    differences = after - raw
    differences += float(gain) / 100 - differences.mean()
    draws = rng.choice(differences, (1000, count))
    lows = draws.mean(1) - 1.96 * draws.std(1) / count**0.5
    assert 0.7 < (lows > 0).mean() < 0.9


def test_where_hardly_any_number_of_pairs_would_do_the_sentence_says_so():
    raw = np.repeat([0.0, 1.0], 200)
    assert judge_labelled(raw, raw, 1.0, 0.4).sentence.endswith("from 0, nor would 100,000")


class TestBadInput:
    def test_too_few_queries(self, space):
        bank, gallery, queries = space
        with pytest.raises(
            InvalidInput, match="1 queries cannot judge a correction: 20 are needed"
        ):
            tune(bank, gallery, queries=LabelledQueries.of(queries[:1], [0]))
        for more in ({}, {"queries": queries}):
            with pytest.raises(BankTooSmall, match="at least 40 are needed"):
                tune(bank.vectors[:39], gallery, **more)
        assert (
            tune(
                bank.vectors[:39], gallery, queries=LabelledQueries.of(queries, np.arange(40))
            ).findings
            == ()
        )

    def test_labels_that_point_nowhere(self, space):
        bank, gallery, queries = space
        positives = np.arange(40)
        positives[7] = 50
        with pytest.raises(InvalidInput, match="query 7 are not among the 50"):
            tune(bank, gallery, queries=LabelledQueries.of(queries, positives))
        with pytest.raises(InvalidInput, match="cover 39 queries, but 40"):
            tune(bank, gallery, queries=LabelledQueries.of(queries, positives[:39]))

    def test_vectors(self, space):
        bank, gallery, queries = space
        with pytest.raises(DimensionMismatch):
            tune(bank, gallery[:, :7])
        with pytest.raises(DimensionMismatch):
            tune(bank, gallery, queries=queries[:, :7])
        with pytest.raises(NonFiniteVectors):
            tune(bank, np.where(gallery == gallery[3], np.nan, gallery))
        with pytest.raises(InvalidInput, match="seed"):
            tune(bank, gallery, seed=-1)

    def test_nothing_to_rank(self, space):
        bank, gallery, queries = space
        for items in (gallery[:1], np.zeros_like(gallery)):
            with pytest.raises(InvalidInput, match="score alike"):
                tune(bank, items)
        with pytest.raises(InvalidInput, match="nothing but the queries"):
            tune(queries, gallery, queries=queries)

    def test_zero_rows_are_no_fault(self, space):
        bank, gallery, queries = space
        gallery[45:] = 0
        assert tune(bank, gallery, queries=LabelledQueries.of(queries, np.arange(40))).items == 50


def labelled(task, numbers, **more):
    return tune(
        task.bank,
        task.gallery,
        target_bank=task.target_bank,
        queries=LabelledQueries.of(task.query[numbers], task.positives[numbers]),
        **more,
    )


@pytest.fixture(scope="module")
def hubby():
    """Half of the queries of a gallery with hubs are its bank."""
    items, queries, answers = hubby_gallery(rows=300, queries=400)
    others, _, _ = hubby_gallery(rows=200, queries=1)
    return Task(queries[:200], items, queries[200:], others, answers[:200])


def test_equal_seeds_choose_equally(hubby):
    one, same, other = (tune(hubby.bank, hubby.gallery, seed=seed) for seed in (1, 1, 2))
    assert one.to_dict() == same.to_dict()
    assert one.to_dict() != other.to_dict()


def test_a_split_of_shared_outcomes_is_judged_as_alone(hubby):
    """benchmarks/tune.py rests on this."""
    half = np.random.default_rng(3).permutation(200)[:100]
    copies = near_copies(QueryBank(hubby.bank), hubby.gallery)
    pairs = LabelledQueries.of(hubby.query[half], hubby.positives[half])
    swept = bank_before(copies.bank, pairs.queries)
    trials = sweep(swept, hubby.gallery, hubby.target_bank)
    positives = list(hubby.positives[:, None])
    outcome = search(trials, hubby.query, hubby.gallery, RightItems.of(positives)).of(half)
    fold = folds(pairs.queries, copies.cosine)
    chosen, judged, *_ = decide(Swept(trials, outcome, swept, hubby.gallery), pairs, fold)
    told = labelled(hubby, half)
    assert (told.choice, told.strength, told.interval) == (
        chosen.estimator, judged.strength, judged.interval,
    )  # fmt: skip


@needs_real_data
class TestOnRealData:
    def test_the_verdict_with_labels_and_that_it_can_be_kept(self):
        labelled_half = np.random.default_rng(0).permutation(500)[:250]
        told = labelled(load_task(V2T), labelled_half)
        assert told.verdict == "not proven", "250 pairs are few"
        assert not any(one.fails for one in told.findings)
        assert told.interval.low <= 0 < told.interval.estimate
        assert told.rows[0].estimator is None
        r1s = [row.value for row in told.rows[1:]]
        assert r1s == sorted(r1s, reverse=True)
        kept = json.loads(json.dumps(told.to_dict()))
        assert from_dict(kept["choice"]) == told.choice
        assert kept["rows"][5]["gain"]["low"] < kept["rows"][5]["gain"]["high"]

    @pytest.mark.parametrize("seed", range(3))
    def test_reranker_scores_are_left_alone(self, seed):
        labelled_half = np.random.default_rng(seed).permutation(500)[:250]
        for told in (
            labelled(load_task(RERANKER), labelled_half, seed=seed),
            tune(*load_task(RERANKER)[2:0:-1], seed=seed),
        ):
            assert told.verdict == "leave it alone"
            assert told.choice is None
            assert told.strength == 0

    def test_labels_decide_whatever_the_bank_looks_like(self):
        task = load_task(V2T)
        bank = crowding(task.bank, task.gallery, 0.1)
        free = tune(bank, task.gallery)
        assert (free.verdict, free.choice, free.strength) == ("leave it alone", None, 0)
        assert free.reason.startswith("the bank reaches")
        assert free.candidate is not None
        foreign = load_task("clip_products t2i").bank
        with_labels = tune(
            foreign, task.gallery, queries=LabelledQueries.of(task.query, task.positives)
        )
        assert "hubs" in [one.name for one in with_labels.findings if one.fails]
        assert with_labels.reason.startswith("cross-validated on 500 labelled queries")
